"""`make_private` on sharded models trains as one process does; optimizers built before sharding follow; the rest is refused by name."""

from __future__ import annotations

import pytest
import torch

from opacus.accountants import RDPAccountant
from opacus.tests import fsdp_front_cases as cases


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"mode": "ghost_fsdp"},
        {"wrap_model": False},
        {"mode": "ghost_fsdp", "wrap_model": False, "reduction": "sum"},
        {"clipping": "per_layer", "lora": True},
        {"clipping": "automatic", "reduction": "sum"},
        {"reseeded": False},
    ],
    ids=str,
)
def test_twenty_steps_are_those_of_one_process(two_ranks, case):
    """The noise is 0, AdamW and its schedule were built before sharding, batches are Poisson sampled over the ranks."""
    results = two_ranks.run(cases.train, **case)
    for result in results:
        assert result["difference"] < 1e-6
        assert result["moved"] > 1e-2
        assert result["steps"] == 20
        assert result["expected"] == 6
        assert result["rate"] == 0.25
    # 20 batches of 24 records drawn with probability 1/4: 120 in the mean, within 6 standard deviations
    assert abs(len(results[0]["seen"]) - 120) < 6 * (480 * 0.25 * 0.75) ** 0.5
    assert len(set(results[0]["seen"])) > 12


def test_on_replicas_too(four_ranks):
    for mode in ("bk", "ghost_fsdp"):
        for result in four_ranks.run(cases.train, "hsdp", mode, epochs=2):
            assert result["difference"] < 1e-6
            assert result["steps"] == 8


def test_every_rank_accounts_for_the_global_rate(two_ranks):
    """Noise 0 costs everything; with noise, each rank's epsilon is that of the whole batch."""
    by_rank = two_ranks.run(cases.epsilon_after, 8)
    accountant = RDPAccountant()
    for _ in range(8):
        accountant.step(noise_multiplier=1.0, sample_rate=0.25)
    assert by_rank == [pytest.approx(accountant.get_epsilon(1e-5))] * 2


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"), [("fsdp", torch.float32, 1e-6), ("fsdp", torch.float64, 1e-12)]
)
def test_adamw_moved_to_shards_goes_on_as_if_unsharded(two_ranks, kind, dtype, limit):
    assert max(two_ranks.run(cases.rebound, kind, dtype)) < limit


def test_adamw_moved_to_replicated_shards(four_ranks):
    assert max(four_ranks.run(cases.rebound, "hsdp", torch.float64)) < 1e-12


def test_record_and_rebind_around_ones_own_sharding(two_ranks):
    assert max(two_ranks.run(cases.by_hand)) < 1e-12


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("stranger", ["shape (2,)", "does not have"]),
        ("none", ["none of the optimizer's parameters"]),
        ("twice", ["emb.weight twice"]),
        ("factored", ["'rows'", "Adafactor", "head.weight"]),
        ("lbfgs", ["LBFGS", "_params"]),
        ("meta", ["blocks.1.up.weight is on the meta device", "blocks.1.up.bias is on the meta device"]),
        ("option", ["reshard is not an option", "reshard_after_forward"]),
        ("tied apart", ["head.weight and emb.weight are one parameter"]),
        ("sharded already", ["sharded already"]),
    ],
)
def test_what_cannot_follow_is_refused_before_anything_changes(two_ranks, what, says):
    for message, untouched in two_ranks.run(cases.refused, what):
        assert untouched
        assert all(part in message for part in says), message


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("gone", ["blocks.1.up.bias was recorded", "head.weight had shape (11, 5), now (12, 5)"]),
        ("frozen", ["head.weight had requires_grad True, now False"]),
    ],
)
def test_a_rebind_that_fails_lists_every_change_and_leaves_the_optimizer(two_ranks, what, says):
    for message, untouched in two_ranks.run(cases.changed_between, what):
        assert untouched
        assert all(part in message for part in says), message


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hooks", ["'hooks'", "grad_sample_mode='bk'"]),
        ("functorch", ["'functorch'", "grad_sample_mode='bk'"]),
        ("ew", ["'ew'", "grad_sample_mode='bk'"]),
        ("no_op", ["'no_op'", "grad_sample_mode='bk'"]),
        ("wrapped by hand", ["sharded", "grad_sample_mode='bk'"]),
        ("stale", ["built before the model was sharded", "fsdp2_wrap(model, optimizer)", "rebind"]),
        ("ignored", ["head.bias is trainable, but fully_shard", "emb.weight is trainable"]),
        ("part", ["head.bias is trainable, but fully_shard", "blocks.1.up.weight is trainable"]),
        ("isolation", ["check_isolation cannot run on a sharded model"]),
        ("outside", ["head.bias received a gradient of its own"]),
        ("unused reduced", ["set_reduce_scatter_unused_params"]),
        ("rank 1 trains another", ["parameter norm.weight is", "trainable", "frozen", "rank 1"]),
        ("rank 1 orders otherwise", ["parameter emb.weight is", "number 0 of the optimizer", "on rank 1"]),
        ("rank 1 adds less noise", ["noise_multiplier is 1.0 on rank 0, 0.5 on rank 1"]),
        ("rank 1 sees the same records", ["DistributedSampler"]),
        ("rank 1 wants hooks", ["rank 1: grad_sample_mode 'hooks'", "grad_sample_mode is 'bk' on rank 0"]),
        ("sharded afterwards", ["is not part of the model", "fsdp2_wrap"]),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_recipe(two_ranks, what, says):
    for message in two_ranks.run(cases.make_private_refuses, what):
        assert all(part in message for part in says), message


def test_that_a_sharded_model_is_not_searched_is_said_once_and_what_to_do(two_ranks):
    for said in two_ranks.run(cases.said_of_isolation, False):
        assert len(said) == 1
        assert "not searched" in said[0]
        assert "check_sample_isolation on the model before it is sharded" in said[0]
    assert two_ranks.run(cases.said_of_isolation, True) == [[], []]


def test_forwards_without_backward_do_not_matter(two_ranks):
    assert max(two_ranks.run(cases.evaluation_in_between)) < 1e-12


def test_a_rank_that_dies_ends_the_others_with_a_named_error(two_ranks):
    first, last = two_ranks.outcomes(cases.last_rank_dies_before_it_reduces)
    assert "exit code 3" in last.error
    assert "RankLostError: rank 0 of 2 could not add up clipped gradients over ranks" in first.error


def test_what_trains_may_change_between_steps(two_ranks):
    assert max(two_ranks.run(cases.thawed_later)) < 1e-12


def test_offloaded_parts(two_ranks):
    assert max(two_ranks.run(cases.offloaded, "fsdp")) < 1e-12


def test_gradients_are_sharded_like_their_parameters(two_ranks):
    assert two_ranks.run(cases.gradient_kind) == [(True, (11, 5))] * 2


def test_units_are_blocks_unless_chosen_otherwise(two_ranks):
    usual, chosen, dtype = two_ranks.run(cases.wrapped_units)[0]
    assert usual == ["", "blocks.0", "blocks.1"]
    assert chosen == ["", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "unused", "head"]
    assert dtype == "torch.float32"
