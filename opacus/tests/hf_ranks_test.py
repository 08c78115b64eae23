"""A private trainer in several processes gives what one process gives on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

from opacus.integrations.hf.same_records import digests_of, record_problems
from opacus.integrations.transformers import make_trainer_private
from opacus.testing import Ranks
from opacus.testing.emulated_devices import is_supported
from opacus.tests import hf_ranks_cases as cases
from opacus.tests.hf_trainers import make_trainer, norm
from opacus.utils.checkpoint_file import CheckpointError

pytestmark = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes that have imported the trainers, with emulated devices beside the CPU."""
    with Ranks(2, emulated_devices=2, timeout=240, patience=20) as two:
        yield two


def assert_alike(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """After every step: bit-equal replicas, and the one process's weights to 1e-6 of the largest."""
    first, last = alone["weights"][0], alone["weights"][-1]
    size = max(float(w.abs().max()) for w in last.values())
    assert max(float((last[name] - w).abs().max()) for name, w in first.items()) > 1e-2 * size  # they moved
    for own in together:
        assert own["steps"] == alone["steps"] == len(alone["weights"]) - 1
        assert not own["wrapped"]
        for mine, theirs, wanted in zip(
            own["weights"], together[0]["weights"], alone["weights"], strict=True
        ):
            for name, w in wanted.items():
                assert torch.equal(mine[name], theirs[name]), f"replicas drifted: {name}"
                assert float((mine[name] - w).abs().max()) <= 1e-6 * size, name


def assert_shared_out(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Each record of each logical batch is on one rank, once."""
    for first, second, whole in zip(*(own["shares"] for own in (*together, alone)), strict=True):
        assert sorted(first + second) == whole
        assert abs(len(first) - len(second)) <= 1


@pytest.mark.parametrize(
    ("name", "devices", "changes"),
    [
        (cases.GPT2, 1, {}),
        (cases.GPT2, 2, {}),
        (cases.DPO, 2, {"max_steps": 2}),
        # one row a forward, one step: whatever else touches the last bit of an input, bf16 makes a difference of
        (
            cases.SFT,
            1,
            {"bf16": True, "per_device_train_batch_size": 1, "max_steps": 1, "learning_rate": 2.0},
        ),
    ],
    ids=lambda value: str(value) if value else "-",
)
def test_parameters_are_those_of_one_process_on_the_same_batches(ranks, name, devices, changes):
    together = ranks.run(cases.trained, name, devices=devices, **changes)
    alone = cases.trained(name, **changes)
    assert_alike(together, alone)
    assert_shared_out(together, alone)
    assert [own["devices"] > 1 for own in together] == [devices > 1] * 2


ADAPTIVE = {
    "clipping": "adaptive",
    "noise_multiplier": 1e-9,  # this style asks for noise; far below what is compared
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1e-9,
}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"clipping": "per_layer", "max_grad_norm": "each"}, {}),
        ({"clipping": "automatic"}, {}),
        (ADAPTIVE, {}),
        (ADAPTIVE, {"bf16": True, "per_device_train_batch_size": 1, "max_steps": 1, "learning_rate": 2.0}),
    ],
    ids=["per_layer", "automatic", "adaptive", "adaptive in bf16"],
)
def test_every_clipping_style_is_that_of_one_process(ranks, settings, changes):
    settings = dict(settings)
    if settings.get("max_grad_norm") == "each":
        count = sum(p.requires_grad for p in make_trainer(cases.SFT).model.parameters())
        settings["max_grad_norm"] = [0.05 * (1 + i % 3) for i in range(count)]
    together = ranks.run(cases.trained, cases.SFT, settings=settings, **changes)
    assert_alike(together, cases.trained(cases.SFT, settings=settings, **changes))


def test_shares_and_batches_without_records_are_steps_like_others(ranks):
    options = {"settings": {"expected_batch_size": 1}, "max_steps": 12}
    together, alone = ranks.run(cases.trained, cases.SFT, **options), cases.trained(cases.SFT, **options)
    assert_alike(together, alone)
    assert_shared_out(together, alone)
    sizes = [
        (len(first), len(second)) for first, second in zip(*(own["shares"] for own in together), strict=True)
    ]
    assert (0, 0) in sizes
    assert (1, 0) in sizes


def test_physical_batches_may_differ_in_number_between_ranks(ranks):
    options = {"settings": {"expected_batch_size": 5}, "per_device_train_batch_size": 1}
    together, alone = ranks.run(cases.trained, cases.KTO, **options), cases.trained(cases.KTO, **options)
    assert any(len(a) != len(b) for a, b in zip(*(own["shares"] for own in together), strict=True))
    assert_alike(together, alone)


def test_noise_has_the_stated_size_once_on_a_shared_out_batch(ranks):
    stated = {"max_grad_norm": 0.5, "expected_batch_size": 6}
    noisy, other = ranks.run(cases.first_step, cases.GPT2, noise_multiplier=2.0, **stated)
    plain, _ = ranks.run(cases.first_step, cases.GPT2, noise_multiplier=0.0, **stated)
    assert all(torch.equal(noisy[1][name], w) for name, w in other[1].items())
    z = torch.cat([(noisy[1][name] - plain[1][name]).double().flatten() for name in plain[1]]) * (
        6 / (2 * 0.5)
    )
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    assert abs(float(z.var()) - 1) < 5 * math.sqrt(2 / z.numel())


def test_a_record_more_moves_the_sum_over_ranks_by_at_most_c(ranks):
    records, bound = [0, 1, 2, 3, 9], 0.05
    without = [[i for i in records if i != left_out] for left_out in (1, 9)]  # the shortest, the longest
    whole, *less = ranks.run(cases.clipped_sums_of, [records, *without], bound)[0]
    for sums in less:
        moved = norm({name: whole[name] - sums[name] for name in whole})
        assert bound * 0.9 < moved < bound * (1 + 1e-4)  # all are longer than so small a bound


def test_a_killed_run_resumes_bit_for_bit_within_its_first_and_second_epoch(ranks, tmp_path):
    for own in ranks.run(cases.resumed, str(tmp_path), (1, 4)):
        assert own["killed at"] == 5
        wanted, *figures = own["straight"]
        for found, *others in own["resumed"]:
            assert all(torch.equal(w, found[name]) for name, w in wanted.items())
            assert others == figures
    written = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"} <= written


def test_the_budget_stops_all_ranks_at_the_same_step(ranks):
    first, second = ranks.run(cases.stopped_by_the_budget)
    assert first == second
    assert 0 < first[0] < 50
    assert first[1] <= 6.0
    assert "the budget is spent" in first[2]


def test_without_a_seed_all_ranks_take_the_first_ones_secret(ranks):
    (seed, first), (other, second) = ranks.run(cases.seeds_taken)
    assert seed == other > 2**64
    assert all(not set(a) & set(b) for a, b in zip(first, second, strict=True))


def test_detaching_leaves_model_and_accelerator_as_they_were(ranks):
    for own in ranks.run(cases.left_behind):
        assert not own["new on the model"]
        assert not own["new on the accelerator"]


def test_a_model_over_devices_is_evaluated_before_and_after_training(ranks):
    first, second = ranks.run(cases.evaluations)
    assert first == second
    assert first[0] != first[1]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (
            cases.other_settings,
            [
                "ReplicaError",
                "noise_multiplier is 1.0 on rank 0, 2.0 on rank 1",
                "args.learning_rate is 0.1 on rank 0, 1.1 on rank 1",
                "args.lr_scheduler_kwargs is {'power': 1.0} on rank 0, {'power': 2.0} on rank 1",
                "args.logging_first_step is True on rank 0, False on rank 1",
                "seed is 'one with digest",
                "rank 1: delta must lie between 0 and 1",
            ],
        ),
        (cases.other_weights, ["'transformer.wpe.weight' has requires_grad False on rank 1, True on rank 0"]),
        (
            cases.other_records,
            ["train_dataset of rank 1 has other records than rank 0's, or in another order"],
        ),
        (
            cases.other_arguments_at_train,
            ["args.logging_steps is 1 on rank 0, 3", "rank 1: Trainer: args.ignore_data_skip"],
        ),
        (cases.other_learning_rates, ["lr of the optimizer's group 0 is 1.0 on rank 0, 2.0 on rank 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_between_ranks_is_refused_by_name_on_every_rank(ranks, case, named):
    first, second = ranks.run(case)
    assert first == second
    for words in named:
        assert words in first


def test_a_failure_of_one_rank_is_told_by_all(ranks):
    first, second = ranks.run(cases.a_loss_that_fails_on_one_rank)
    assert first.startswith("ReplicaError")
    assert second.startswith("PerSampleGradientError")
    assert "rank 1: " in first
    assert all("neither the sum nor the mean" in message for message in (first, second))


def test_an_accelerator_of_two_ranks_is_refused_unless_allowed(ranks):
    for message in ranks.run(cases.one_accelerator_for_two_ranks, False):
        assert "ranks 0 and 1 both use GPU 0 (emu:0 on rank 0, emu:0 on rank 1)" in message
    assert ranks.run(cases.one_accelerator_for_two_ranks, True) == ["no error"] * 2


def test_a_rank_that_does_not_come_is_named(ranks):
    message, _ = ranks.run(cases.a_rank_that_stays_away)
    assert "RankLostError" in message
    assert "no word from rank 1" in message


def test_a_rank_that_fails_in_a_step_ends_the_others_with_an_error(ranks):
    (message, steps), (own, counted) = ranks.run(cases.a_loss_that_fails_in_the_second_step)
    assert message.startswith("RankLostError: rank 0 of 2 could not add up clipped gradients")
    assert own.startswith("KilledError")
    assert steps == counted == 1


def test_what_a_rank_reduces_that_left_early_never_takes_the_place_of_noise(ranks):
    _, (message, accounted, moved) = ranks.run(cases.a_callback_that_stops_one_rank)
    assert message.startswith("RankLostError: rank 1 of 2 could not add up clipped gradients")
    assert accounted == moved == 1


def test_orders_are_compared_of_records_that_change_at_each_reading(ranks):
    assert ranks.run(cases.augmented_records, False) == ["no error"] * 2
    for message in ranks.run(cases.augmented_records, True):
        assert "train_dataset of rank 1 has other records than rank 0's, or in another order" in message


def test_digests_of_records_are_salted_with_a_secret_of_the_ranks(ranks):
    """Whoever reaches the store could find out by trying what a field of few values holds."""
    told = ranks.run(cases.what_ranks_tell_of_records)
    assert told[0] == told[1]
    first, second = told[0]
    assert first.keys() == second.keys()
    assert all(digest and digest != second[name] for name, digest in first.items())


KEPT: list[object] = []  # so that none takes the address of another


def objects(x: float) -> np.ndarray:
    KEPT.append(object())
    return np.array([KEPT[-1], str(x)], dtype=object)


UNUSUAL: dict[str, Callable[[float], Any]] = {
    "sparse": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse(),
    "compressed": lambda x: torch.tensor([[0.0, x], [0.0, 0.0]]).to_sparse_csr(),
    "nested": lambda x: torch.nested.nested_tensor([torch.tensor([x]), torch.zeros(2)]),
    "quantized": lambda x: torch.quantize_per_tensor(torch.tensor([x]), 0.1, 0, torch.qint8),
    "objects": objects,
}


@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize("field", UNUSUAL.values(), ids=UNUSUAL)
def test_fields_that_are_no_plain_arrays_are_compared_by_what_they_hold(field):
    data = [[{"x": field(x)} for x in (first, 3.0)] for first in (1.0, 1.0, 2.0)]
    once, again, other = (digests_of(records, b"salt") for records in data)
    assert once == again
    assert once["x"] is not None
    assert once["x"] != other["x"]


def test_records_that_tell_nothing_are_found_out():
    class Turned:
        def __init__(self, turn: int, record: Callable[[int], Any]) -> None:
            self.turn = turn
            self.record = record

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return self.record((index + self.turn) % 40)

    own = np.random.default_rng()

    def problems(record: Callable[[int], Any]) -> list[list[tuple[int, str]]]:
        return [
            list(record_problems([digests_of(Turned(at, record), b"salt") for at in (0, turn)]))
            for turn in (0, 1)
        ]

    assert problems(lambda i: {"x": own.random(), "label": np.int64(i)}) == [[], [(1, "differs")]]
    assert problems(lambda i: own.random() + i) == [[(0, "tells nothing"), (1, "tells nothing")]] * 2


def test_a_state_of_a_rank_that_draws_no_noise_is_refused_where_noise_is_drawn(tmp_path: Path):
    trainer = make_trainer_private(
        make_trainer(cases.SFT, output_dir=str(tmp_path)), **{**cases.SETTINGS, "noise_multiplier": 1.0}
    )
    trainer.create_optimizer()
    state = trainer.optimizer.state_dict()
    state["privacy"]["rank"] = 2
    with pytest.raises(CheckpointError, match="saved by rank 2, whose noise stream stands still"):
        trainer.optimizer.load_state_dict(state)
