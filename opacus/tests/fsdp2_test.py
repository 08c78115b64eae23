"""Private training of models sharded by FSDP2 and HSDP gives one process's numbers on the union of the ranks' batches."""

from __future__ import annotations

import math

import pytest
import torch

from opacus.tests import fsdp_cases as cases

EXACT = 1e-12  # float64, relative to the largest entry of the summed gradient
WRAPS = ["root", "block", "leaf", "group"]


def error(ranks, **case) -> float:
    return max(ranks.run(cases.update_error, **case))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_unequal_rows_per_rank_count_alike(two_ranks, wrap, mode, reduction):
    assert error(two_ranks, wrap=wrap, mode=mode, reduction=reduction, rows=((5, 1),)) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_every_clipping_style(two_ranks, clipping, mode):
    assert error(two_ranks, clipping=clipping, mode=mode) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
def test_hooks_without_a_wrapper(two_ranks, mode):
    assert error(two_ranks, wrap_model=False, mode=mode) < EXACT


@pytest.mark.parametrize("wrap", ["root", "block", "leaf"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(two_ranks, reentrant, wrap):
    assert error(two_ranks, checkpointed=reentrant, wrap=wrap) < EXACT


@pytest.mark.parametrize("wrap", ["root", "leaf"])
@pytest.mark.parametrize("checkpointed", [None, False])
def test_frozen_and_trainable_parameters_in_one_group(two_ranks, checkpointed, wrap):
    assert error(two_ranks, lora=True, checkpointed=checkpointed, wrap=wrap) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("wrap", ["root", "group"])
def test_tied_embedding_and_head(two_ranks, wrap, mode):
    assert error(two_ranks, tied=True, wrap=wrap, mode=mode) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("rows", [((4, 0),), ((3, 2), (0, 0)), ((3, 2), (2, 0), (1, 0)), ((0, 0),)], ids=str)
def test_empty_batches_and_several_physical_batches(two_ranks, rows, mode):
    assert error(two_ranks, rows=rows, mode=mode) < EXACT


@pytest.mark.parametrize("small", [None, 0, 8])
@pytest.mark.parametrize("cap", [1, 100, None])
def test_the_size_of_buckets_and_how_they_are_packed_change_nothing(two_ranks, cap, small):
    assert error(two_ranks, cap=cap, small=small) < EXACT


@pytest.mark.parametrize("options", ["keep gathered", "columns", "explicit"])
def test_options_of_fully_shard(two_ranks, options):
    assert error(two_ranks, width=6, hidden=8, options=cases.OPTIONS[options]) < EXACT


@pytest.mark.parametrize("wrap", ["block", "group"])
def test_prefetching_and_parameters_kept_after_the_backward(two_ranks, wrap):
    assert error(two_ranks, wrap=wrap, prefetch=True, rows=((3, 2), (1, 2))) < EXACT


def test_resharding_to_groups_of_ranks(four_ranks):
    case = {"width": 8, "hidden": 8, "options": {"reshard_after_forward": 2}, "rows": ((2, 1),)}
    assert error(four_ranks, **case) < EXACT


def test_float32_parameters(two_ranks):
    assert error(two_ranks, dtype=torch.float32) < 1e-5


def test_bf16_compute_errs_by_its_own_rounding_only(two_ranks):
    case = {"dtype": torch.float32, "options": cases.OPTIONS["bf16"], "rows": ((5, 3),)}
    assert error(two_ranks, **case) < 5e-2


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("wrap", ["root", "leaf"])
def test_more_ranks_than_some_parameters_have_rows(four_ranks, wrap, mode):
    assert error(four_ranks, wrap=wrap, mode=mode, rows=((2, 1),)) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [((2, 1),), ((2, 0), (1, 1), (0, 0))], ids=str)
def test_hsdp(four_ranks, rows, reduction, mode):
    assert error(four_ranks, kind="hsdp", rows=rows, reduction=reduction, mode=mode) < EXACT


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
def test_replicas_of_one_rank_each(two_ranks, mode):
    assert error(two_ranks, kind="hsdp", mode=mode, rows=((3, 2), (0, 1))) < EXACT


def test_adaptive_clipping_counts_the_samples_of_all_ranks(two_ranks):
    for sharded, single in two_ranks.run(cases.adaptive_bound, (4, 1)):
        assert sharded == pytest.approx(single, rel=1e-6)
        assert single != 1.2


# ------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_each_coordinate_of_the_whole_parameter_is_noised_once(four_ranks, kind, secure):
    """std within 6 sigma of its own error; no value drawn twice; replicas alike."""
    sigma, clip = 1.3, 0.7
    by_rank = four_ranks.run(cases.noise_of, kind, sigma=sigma, clip=clip, secure=secure, seed=None)
    for other in by_rank[1:]:
        for step, step_there in zip(by_rank[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, step_there, strict=True))
    flat = [torch.cat([g.flatten() for g in step]).double() for step in by_rank[0]]
    n = flat[0].numel()
    for noise in flat:
        assert abs(float(noise.std()) / (sigma * clip) - 1) < 6 / math.sqrt(2 * n)
        assert abs(float(noise.mean())) < 6 * sigma * clip / math.sqrt(n)
    both = torch.cat(flat)
    # float32 values of n draws meet now and then; shards or steps that share a stream would repeat whole stretches
    assert both.unique().numel() > 0.98 * both.numel()
    assert abs(float(torch.corrcoef(torch.stack(flat))[0, 1])) < 6 / math.sqrt(n)


def test_the_generator_decides_the_noise(two_ranks):
    first, again, other = (two_ranks.run(cases.noise_of, "fsdp", seed=seed)[0] for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True) if a.numel() > 1)


def test_streams_are_one_for_each_shard_pattern_and_their_seeds_differ(four_ranks):
    for kind, patterns in (("fsdp", 4), ("hsdp", 2)):
        states = [state for _, state in four_ranks.run(cases.generator_state_after_noise, kind)]
        assert all(state["streams"].keys() == states[0]["streams"].keys() for state in states)
        assert len(states[0]["streams"]) == patterns
        assert len({bytes(stream.numpy()) for stream in states[0]["streams"].values()}) == patterns
        assert len({(state["base"], state["offset"]) for state in states}) == 1


def test_known_layouts_are_those_of_a_fresh_look(two_ranks):
    two_ranks.run(cases.known_layouts)


# ------------------------------------------------------------------------------------------------- collectives


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
def test_norms_need_no_collective_and_sums_one_for_each_bucket(two_ranks, mode):
    """FSDP gathers as ever (twice in the backward of "ghost"), and reduces nothing; DP reduces one bucket."""
    counts = two_ranks.run(cases.collectives, mode)[0]
    plain, private = counts["plain"], counts["private"]
    gathers, reduces = "allgather_base", "reduce_scatter_base"
    assert plain[reduces] == 3  # two blocks and the rest
    assert private.pop(reduces) == 1
    in_a_backward = plain[gathers] - 3
    assert private.pop(gathers) == plain[gathers] + (0 if mode == "bk" else in_a_backward)
    assert private == {}


def test_a_small_cap_makes_as_many_buckets_as_parameters(two_ranks):
    counts = two_ranks.run(cases.collectives, "bk", cap=1)[0]
    assert counts["private"]["reduce_scatter_base"] == counts["parameters"]["n"]
