"""Data parallel training: several processes, each replica on devices of its own, give what one process gives on all their samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opacus.testing import RankError, Ranks
from opacus.testing.emulated_devices import is_supported
from opacus.tests.replicas import WRAPPINGS, on_this_rank, train

MODES = ("hooks", "functorch", "ew", "bk", "ghost")
STYLES = ("flat", "per_layer", "adaptive", "automatic")
pytestmark = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")


def assert_one_process_does_the_same(
    ranks: Ranks, n_devices: int, *, within: float = 1e-9, **arguments: Any
) -> None:
    """Train on the ranks and here, and compare parameters, batch sizes, steps and clipping norms."""
    alone = train(
        **{name: value for name, value in arguments.items() if name not in ("wrapping", "seed_of_rank")}
    )
    together = ranks.run(on_this_rank, n_devices, **arguments)
    start = train(**{**arguments, "steps": 0, "wrapping": "none", "seed_of_rank": False})["parameters"]
    assert any(not torch.equal(start[name], p) for name, p in alone["parameters"].items())
    for own in together:
        assert own["steps"] == alone["steps"]
        assert own["max_grad_norm"] == pytest.approx(alone["max_grad_norm"], rel=1e-6)
        for name, expected in alone["parameters"].items():
            torch.testing.assert_close(own["parameters"][name], expected, rtol=0, atol=within)
            assert torch.equal(own["parameters"][name], together[0]["parameters"][name]), (
                f"replicas drifted: {name}"
            )
    if arguments.get("physical") is None:
        assert [sum(of_step) for of_step in zip(*(own["sizes"] for own in together), strict=True)] == alone[
            "sizes"
        ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_of_two_devices_train_as_one_process(
    two_ranks_with_devices: Ranks, mode: str, style: str
) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, mode=mode, clipping=style, wrapping="ours", seed_of_rank=True
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_four_ranks_of_two_devices_train_as_one_process(
    four_ranks_with_devices: Ranks, mode: str, style: str
) -> None:
    assert_one_process_does_the_same(
        four_ranks_with_devices, 2, mode=mode, clipping=style, wrapping="ours", seed_of_rank=True
    )


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_a_model_may_be_wrapped_before_after_or_not_at_all(
    two_ranks_with_devices: Ranks, mode: str, wrapping: str
) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, steps=4, mode=mode, wrapping=wrapping, seed_of_rank=True
    )


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_a_loss_that_adds_up_samples_is_exact_over_ranks(two_ranks_with_devices: Ranks, mode: str) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, steps=5, mode=mode, wrapping="ours", reduction="sum", batch_size=3
    )


def test_float32_parameters_agree_too(two_ranks_with_devices: Ranks) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, mode="bk", wrapping="ours", dtype=torch.float32, within=1e-6
    )


def test_inner_optimizers_with_state_agree_too(two_ranks_with_devices: Ranks) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, steps=8, mode="bk", wrapping="ours", inner=torch.optim.AdamW
    )


@pytest.mark.parametrize("wrapping", ["ours", "torch's", "none"])
def test_hooks_without_a_wrapper_around_the_model_train_the_same(two_ranks: Ranks, wrapping: str) -> None:
    assert_one_process_does_the_same(two_ranks, 0, steps=4, mode="bk", wrapping=wrapping, wrap_model=False)


@pytest.mark.parametrize("splits", [2, 1])
def test_without_poisson_sampling_a_loader_must_share_out_records(two_ranks: Ranks, splits: int) -> None:
    if splits == 1:
        with pytest.raises(RankError, match="does not share out records over ranks"):
            two_ranks.run(on_this_rank, poisson_sampling=False)
        return
    alone = train(poisson_sampling=False, shuffle=False, steps=4)
    for own in two_ranks.run(
        on_this_rank, poisson_sampling=False, shuffle=False, splits=2, batch_size=3, steps=4
    ):
        for name, expected in alone["parameters"].items():
            torch.testing.assert_close(own["parameters"][name], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_batches_without_records_on_some_or_all_ranks_step_and_count(
    two_ranks_with_devices: Ranks, mode: str
) -> None:
    assert_one_process_does_the_same(
        two_ranks_with_devices, 2, steps=24, mode=mode, wrapping="ours", batch_size=1, clipping="adaptive"
    )
    sizes = [
        own["sizes"] for own in two_ranks_with_devices.run(on_this_rank, 2, steps=24, mode=mode, batch_size=1)
    ]
    assert any(sum(of_step) == 0 for of_step in zip(*sizes, strict=True))
    assert any(min(of_step) == 0 < max(of_step) for of_step in zip(*sizes, strict=True))


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_ranks_cut_a_logical_batch_into_equally_many_physical_ones(
    two_ranks_with_devices: Ranks, mode: str
) -> None:
    arguments: dict[str, Any] = {"steps": 8, "mode": mode, "wrapping": "ours", "physical": 1, "batch_size": 6}
    assert_one_process_does_the_same(two_ranks_with_devices, 2, **arguments)
    sizes = [own["sizes"] for own in two_ranks_with_devices.run(on_this_rank, 2, **arguments)]
    assert len(sizes[0]) == len(sizes[1]) > 8
    assert all(max(of_batch) <= 1 for of_batch in sizes)
    assert sizes[0] != sizes[1]  # some were padded
