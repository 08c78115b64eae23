"""Questions about modules and packed sequences."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from opacus.utils.module_utils import (
    are_state_dict_equal,
    clone_module,
    get_submodule,
    has_trainable_params,
    parametrized_modules,
    requires_grad,
    trainable_modules,
    trainable_parameters,
)
from opacus.utils.packed_sequences import _gen_packed_data, compute_seq_lengths


@pytest.fixture
def model():
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.Sequential(nn.ReLU(), nn.Linear(2, 3)),
        nn.BatchNorm1d(3, affine=False),
        nn.Linear(3, 1),
    )
    model[0].weight.requires_grad = False
    model[3].requires_grad_(False)
    return model


def test_modules_that_own_parameters_are_found_by_name(model):
    assert dict(parametrized_modules(model)) == {"0": model[0], "1.1": model[1][1], "3": model[3]}
    assert dict(trainable_modules(model)) == {"0": model[0], "1.1": model[1][1]}
    assert [name for name, _ in parametrized_modules(model[0])] == [""]


def test_trainable_parameters_come_with_their_names(model):
    found = dict(trainable_parameters(model))
    assert list(found) == ["0.bias", "1.1.weight", "1.1.bias"]
    assert found["0.bias"] is model[0].bias


def test_requires_grad_asks_the_module_itself_unless_told_to_recurse(model):
    assert (requires_grad(model), requires_grad(model, recurse=True)) == (False, True)
    assert (requires_grad(model[0]), requires_grad(model[3])) == (True, False)
    assert (has_trainable_params(model[1]), has_trainable_params(model[1][1])) == (False, True)


def test_a_clone_equals_its_original_and_shares_nothing(model):
    model.eval()
    clone = clone_module(model)
    assert are_state_dict_equal(clone.state_dict(), model.state_dict())
    assert [p.requires_grad for p in clone.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not clone.training
    with torch.no_grad():
        clone[0].weight.add_(1)
    assert not are_state_dict_equal(clone.state_dict(), model.state_dict())


def test_submodules_are_found_by_dotted_name(model):
    assert get_submodule(model, "1.1") is model[1][1]
    assert get_submodule(model, "") is model
    for target in ("7", "0.weight"):
        with pytest.raises(AttributeError, match=target.split(".")[-1]):
            get_submodule(model, target)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"a": torch.ones(3)},
        {"a": torch.ones(2), "b": 0},
        {"b": torch.ones(2)},
        {"a": torch.ones(2).double()},
        {"a": 1.0},
        {"a": torch.tensor([1.0, float("nan")])},
    ],
)
def test_state_dicts_that_differ_in_any_way_are_not_equal(other):
    state = {"a": torch.ones(2)}
    assert are_state_dict_equal(state, {"a": torch.ones(2)})
    assert not are_state_dict_equal(state, other)
    assert not are_state_dict_equal(other, state)
    assert are_state_dict_equal(other, collections.OrderedDict(other))


@pytest.mark.parametrize("lengths", [[5, 4, 3, 1], [2, 2], [1], [7, 7, 7, 1, 1]])
def test_sequence_lengths_are_read_back_from_a_packed_sequence(lengths):
    packed = pack_sequence([torch.ones(length, 2) for length in lengths])
    assert compute_seq_lengths(packed.batch_sizes) == lengths
    assert compute_seq_lengths(packed.batch_sizes.tolist()) == lengths


def test_a_packed_batch_of_no_sequence_has_no_lengths():
    assert compute_seq_lengths(torch.zeros(0, dtype=torch.int64)) == []
    assert compute_seq_lengths(torch.zeros(4, dtype=torch.int64)) == []


@pytest.mark.parametrize("in_order", [True, False])
def test_random_packed_sequences_have_the_sizes_asked_for(in_order):
    packed = _gen_packed_data(6, 9, 3, batch_first=True, sorted_=in_order)
    lengths = compute_seq_lengths(packed.batch_sizes)
    assert len(lengths) == 6
    assert max(lengths) <= 9
    assert packed.data.shape == (sum(lengths), 3)
    assert (packed.sorted_indices is None) == in_order
