"""Tensor parallel (`parallelize_module`), alone and under FSDP2: the numbers of one process, in modes bk and ghost_tp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opacus.accountants import RDPAccountant
from opacus.layers import DPLSTM
from opacus.testing import Ranks
from opacus.tests.tensor_parallel_cases import (
    WIDTH,
    Setting,
    batch,
    collectives_of_a_step,
    data_parallel_wrapper_error,
    expected_run,
    expected_sums,
    net,
    noise_only,
    norms_after_a_backward,
    one_step,
    ranks_with_other_samples,
    refusal_of,
    sample_gradients,
    shuffled_loader_error,
    train,
    uninterrupted_and_resumed,
    unnamed_norm,
)

PLANS = ("columns", "positions")
MODES = ("bk", "ghost_tp")


def assert_sums(found: list[dict[str, Tensor]], expected: dict[str, Tensor], atol: float = 1e-12) -> None:
    """Every rank holds the same whole gradients, and they are the expected ones."""
    for grads in found:
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_clipped_sums_are_those_of_one_process(
    two_ranks: Ranks, plan: str, mode: str, reduction: str
) -> None:
    ids = batch(5)
    found = two_ranks.run(one_step, Setting(plan, mode, reduction), [ids])
    assert_sums(found, expected_sums(net(), ids))


@pytest.mark.parametrize(
    ("plan", "mode", "reduction"),
    [
        ("columns", "bk", "mean"),
        ("columns", "ghost_tp", "sum"),
        ("positions", "bk", "sum"),
        ("positions", "ghost_tp", "mean"),
    ],
)
def test_under_fsdp2_clipped_sums_are_those_of_one_process(
    four_ranks: Ranks, plan: str, mode: str, reduction: str
) -> None:
    ids = batch(5)
    found = four_ranks.run(one_step, Setting(plan, mode, reduction, shard=2), [ids])
    assert_sums(found, expected_sums(net(), ids))


@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_clipping_style_sees_whole_norms(two_ranks: Ranks, plan: str, clipping: str) -> None:
    ids = batch(5)
    found = two_ranks.run(one_step, Setting(plan, clipping=clipping), [ids])
    assert_sums(found, expected_sums(net(), ids, clipping), atol=1e-7)  # per layer: bounds are float32


@pytest.mark.parametrize("setting", [Setting(), Setting(mode="ghost_tp"), Setting("positions", wrap=False)])
def test_widths_and_vocabularies_that_ranks_cannot_share_evenly(two_ranks: Ranks, setting: Setting) -> None:
    ids = batch(5)
    setting = replace(setting, hidden=7)
    assert_sums(two_ranks.run(one_step, setting, [ids]), expected_sums(net(7), ids))


@pytest.mark.parametrize("mode", MODES)
def test_frozen_layers_take_no_part_and_attached_hooks_need_no_wrapper(two_ranks: Ranks, mode: str) -> None:
    ids = batch(5)
    found = two_ranks.run(one_step, Setting(mode=mode, freeze="down", wrap=False), [ids])
    assert_sums(found, expected_sums(net(), ids, without="down"))


@pytest.mark.parametrize("plan", PLANS)
def test_functorch_is_exact_on_pieces(two_ranks: Ranks, plan: str) -> None:
    ids = batch(5)
    assert_sums(
        two_ranks.run(one_step, Setting(plan, force_functorch=True), [ids]), expected_sums(net(), ids)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shard", [1, 2])
def test_physical_batches_add_up_and_empty_ones_add_nothing(
    request: pytest.FixtureRequest, mode: str, shard: int
) -> None:
    ranks: Ranks = request.getfixturevalue("two_ranks" if shard == 1 else "four_ranks")
    first, last = batch(5), batch(3, seed=2)
    setting = Setting("positions", mode, "sum", shard=shard)
    found = ranks.run(one_step, setting, [first, batch(0), last])
    expected = expected_sums(net(), torch.cat([first, last]))
    assert_sums(found, expected)
    assert_sums(ranks.run(one_step, setting, [batch(0)]), {name: 0 * g for name, g in expected.items()})


def test_sample_weights_are_applied_before_clipping(two_ranks: Ranks) -> None:
    ids, weights = batch(5), torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    found = two_ranks.run(one_step, Setting("positions"), [ids], weights)
    assert_sums(found, expected_sums(net(), ids, weights=weights))


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_ghost_tp_gives_norms_of_whole_parameters(two_ranks: Ranks, plan: str, wrap: bool) -> None:
    ids = batch(5)
    rows = {name: g for name, g in sample_gradients(net(), ids).items() if "unused" not in name}
    own = {name: g.flatten(1).norm(dim=1) for name, g in rows.items()}
    for norms, by_parameter, pattern in two_ranks.run(
        norms_after_a_backward, Setting(plan, "ghost_tp", wrap=wrap), ids
    ):
        torch.testing.assert_close(norms, torch.stack(list(own.values())).norm(dim=0))
        torch.testing.assert_close(by_parameter, own)
        assert pattern["up.weight"] is True
        assert pattern["down.bias"] is False
        assert ("norm.weight" in pattern) == (plan == "positions")
        assert "unused.weight" not in pattern


@pytest.mark.parametrize("mode", MODES)
def test_one_collective_adds_up_the_norms_of_all_parameters(two_ranks: Ranks, mode: str) -> None:
    ids, passes = batch(5), 2 if mode == "ghost_tp" else 1
    for forward, backward, step in two_ranks.run(collectives_of_a_step, Setting("columns", mode), ids):
        assert len(step) == len(forward) + passes * len(backward) + 1


@pytest.mark.parametrize("mode", MODES)
def test_a_normalisation_of_split_positions_costs_one_collective_of_the_size_of_its_gradients(
    two_ranks: Ranks, mode: str
) -> None:
    ids, passes = batch(5), 2 if mode == "ghost_tp" else 1
    for *_, step in two_ranks.run(collectives_of_a_step, Setting("positions", mode), ids):
        ours = [size for name, size in step if name.startswith("c10d::allreduce")]
        layer_norm, rms_norm = 5 * 2 * WIDTH, 5 * WIDTH  # B times weight and bias; B times weight
        assert ours.count(layer_norm) >= passes
        assert ours.count(rms_norm) == passes
        assert len(ours) == 2 * passes + 1


@pytest.mark.parametrize("setting", [Setting(), Setting("positions", "ghost_tp"), Setting(shard=2)])
def test_noise_has_its_std_once_on_every_coordinate(request: pytest.FixtureRequest, setting: Setting) -> None:
    """Parameters that ranks hold whole get the same noise on all of them, pieces get noise of their own."""
    ranks: Ranks = request.getfixturevalue("two_ranks" if setting.shard == 1 else "four_ranks")
    std = 2.0 * 0.25
    setting = replace(setting, reduction="sum", noise_multiplier=2.0, norm=0.25, hidden=800)
    found = ranks.run(noise_only, setting, 6)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    values = {name: noise.flatten() / std for name, noise in found[0].items()}
    values["all"] = torch.cat(list(values.values()))
    for name, noise in values.items():
        n = noise.numel()
        assert abs(float(noise.square().mean()) - 1) < 6 * (2 / n) ** 0.5 + 10 / n, name  # the tails of chi^2
        assert abs(float(noise.mean())) < 6 / n**0.5, name
    assert values["all"].unique().numel() == values["all"].numel()  # no value is drawn twice, in any shard


@pytest.mark.parametrize("plan", PLANS)
def test_one_more_sample_moves_the_sum_by_at_most_c(two_ranks: Ranks, plan: str) -> None:
    """Searched for: samples with long gradients in few and in many parameters, next to short ones."""
    ids = batch(6)
    worst = 0.0
    with_all = two_ranks.run(one_step, Setting(plan, reduction="sum", norm=0.01), [ids])[0]
    for left_out in range(6):
        kept = torch.cat([ids[:left_out], ids[left_out + 1 :]])
        without = two_ranks.run(one_step, Setting(plan, reduction="sum", norm=0.01), [kept])[0]
        moved = torch.stack([(with_all[name] - without[name]).norm() for name in with_all]).norm()
        worst = max(worst, float(moved))
    assert 0.0099 < worst <= 0.01 * (1 + 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_other_samples_are_told_before_training(two_ranks: Ranks, mode: str) -> None:
    setting = Setting(mode=mode)
    for error in two_ranks.run(ranks_with_other_samples, setting, [5, 4], [1, 1]):
        assert "same batches" in error
        assert "rank 1 of the axis was given inputs of shape (4, 4), rank 0 inputs of shape (5, 4)" in error
    for error in two_ranks.run(ranks_with_other_samples, setting, [5, 5], [1, 2]):
        assert "same shapes but other values (ranks 1 differ" in error
    assert two_ranks.run(ranks_with_other_samples, setting, [5, 5], [1, 1]) == ["", ""]


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_sees_a_part_of_the_positions_unnoticed_is_refused(two_ranks: Ranks, mode: str) -> None:
    for error in two_ranks.run(unnamed_norm, mode):
        assert "norm.weight is held whole by every rank, but" in error
        assert "SequenceParallel" in error
        assert "up.weight" not in error
        assert "down" not in error


@pytest.mark.parametrize(
    ("layer", "names", "mode", "dim", "axes", "says"),
    [
        (nn.Linear(4, 4), ["weight"], "hooks", 0, 1, "but the model is sharded"),
        (nn.Linear(4, 4), ["weight"], "functorch", 0, 1, "but the model is sharded"),
        (nn.Linear(4, 4), ["weight", "bias"], "ew", 0, 1, "but the model is sharded"),
        (nn.Conv1d(4, 4, 1), ["weight"], "bk", 0, 1, "layer.weight is split over tensor-parallel ranks"),
        (nn.LayerNorm(4), ["weight", "bias"], "bk", 0, 1, "layer.bias is split over tensor-parallel ranks"),
        (DPLSTM(4, 4), ["l0.ih.weight"], "ghost_tp", 0, 1, "recurrent cell"),
        (nn.Linear(4, 1), ["weight"], "bk", 0, 1, "one holds nothing"),
        (nn.Linear(4, 4), ["weight"], "ghost_tp", 0, 2, "over 2 mesh dimensions"),
    ],
)
def test_what_cannot_be_clipped_exactly_is_refused_by_name(
    two_ranks: Ranks, layer: nn.Module, names: list[str], mode: str, dim: int, axes: int, says: str
) -> None:
    for error in two_ranks.run(refusal_of, layer, names, mode, dim, axes):
        assert says in error


@pytest.mark.parametrize(
    ("mode", "shard", "reduction", "physical"),
    [("bk", 1, "mean", None), ("ghost_tp", 1, "sum", 2), ("bk", 2, "sum", 2), ("ghost_tp", 2, "mean", None)],
)
def test_make_private_trains_as_one_process_does(
    request: pytest.FixtureRequest, mode: str, shard: int, reduction: str, physical: int | None
) -> None:
    """Ranks of a tensor axis draw the same batches though they are seeded differently; data-parallel ranks share the records."""
    ranks: Ranks = request.getfixturevalue("two_ranks" if shard == 1 else "four_ranks")
    setting = Setting("positions", mode, reduction, shard=shard)
    runs = ranks.run(train, setting, 20, 4, 2, physical)
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first.batches, second.batches, strict=True))
    logical = [torch.cat(parts) for parts in zip(*(run.batches for run in runs[::2]), strict=True)]
    assert len(logical) == 10
    assert len({len(ids) for ids in logical}) > 1
    expected = expected_run(logical, setting, 4)
    for run in runs:
        assert run.steps == 10
        for name, p in run.parameters.items():
            torch.testing.assert_close(p, expected[name], atol=1e-12, rtol=0)


def test_the_budget_is_that_of_one_process(two_ranks: Ranks) -> None:
    accountant = RDPAccountant()
    for _ in range(5):
        accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    for run in two_ranks.run(train, Setting(noise_multiplier=1.0), 20, 4):
        assert run.steps == 5
        assert run.epsilon == pytest.approx(accountant.get_epsilon(1e-5))


def test_loaders_that_shuffle_differently_are_found(two_ranks: Ranks) -> None:
    for error in two_ranks.run(shuffled_loader_error):
        assert "tensor-parallel ranks must be given the same batches" in error


def test_a_data_parallel_wrapper_around_pieces_is_refused(two_ranks: Ranks) -> None:
    for error in two_ranks.run(data_parallel_wrapper_error):
        assert "are DTensors" in error
        assert "fully_shard over a second mesh axis" in error


@pytest.mark.parametrize("shard", [1, 2])
def test_optimizers_follow_and_runs_resume(
    request: pytest.FixtureRequest, tmp_path: Path, shard: int
) -> None:
    ranks: Ranks = request.getfixturevalue("two_ranks" if shard == 1 else "four_ranks")
    setting = Setting("positions", shard=shard)
    for (whole, steps), (resumed, counted) in ranks.run(
        uninterrupted_and_resumed, setting, str(tmp_path / "run")
    ):
        assert steps == counted == 10
        for name, p in whole.items():
            torch.testing.assert_close(resumed[name], p, atol=1e-14, rtol=0)
        before = dict(net().named_parameters())
        assert all(not torch.equal(p, before[name]) for name, p in whole.items())


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl", timeout=300) as ranks:
        yield ranks


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plan", PLANS)
def test_clipped_sums_on_gpus_are_those_of_one_process(
    two_gpus: Ranks, plan: str, mode: str, dtype: torch.dtype
) -> None:
    ids = batch(5)
    found = two_gpus.run(one_step, Setting(plan, mode, device="cuda", dtype=dtype), [ids])
    found = [{name: grad.double() for name, grad in grads.items()} for grads in found]
    assert_sums(found, expected_sums(net(), ids), atol=1e-12 if dtype == torch.float64 else 1e-5)
