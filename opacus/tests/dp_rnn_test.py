"""Recurrent layers against torch's own, and the rule that every inner call's rows are the batch in its order."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from opacus.layers import DPGRU, DPLSTM, DPRNN, RenameParamsMixin
from opacus.layers.dp_rnn import (
    RNN_CELL_TYPES,
    DPGRUCell,
    DPLSTMCell,
    DPRNNBase,
    DPRNNCell,
    RNNLinear,
    apply_permutation,
)
from opacus.tests.row_rule import grads_by_loop, grads_by_row

D, H, B, T = 3, 4, 5, 6
KINDS = {
    "rnn": (nn.RNN, DPRNN, {}),
    "relu": (nn.RNN, DPRNN, {"nonlinearity": "relu"}),
    "gru": (nn.GRU, DPGRU, {}),
    "lstm": (nn.LSTM, DPLSTM, {}),
    "projected": (nn.LSTM, DPLSTM, {"proj_size": 2}),
}
SHAPES = [
    {},
    {"bias": False, "batch_first": True},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "batch_first": True, "dropout": 1.0},
]
LENGTHS = {"equal": [T] * B, "sorted": [6, 4, 4, 2, 1], "unsorted": [2, 6, 1, 4, 4]}


def pair(kind, **flags):
    torch.manual_seed(0)
    torch_class, private_class, extra = KINDS[kind]
    theirs = torch_class(D, H, **flags, **extra).double()
    ours = private_class(D, H, **flags, **extra).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def states(layer, rows=B):
    torch.manual_seed(1)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h = torch.randn(count, rows, layer.proj_size or H, dtype=torch.float64, requires_grad=True)
    c = torch.randn(count, rows, H, dtype=torch.float64, requires_grad=True)
    return (h, c) if isinstance(layer, (nn.LSTM, DPLSTM)) else (h,)


def run(layer, x, state):
    """Outputs and gradients of everything, for a loss that weighs each output differently."""
    leaf = x.data if isinstance(x, PackedSequence) else x
    leaf.requires_grad_()
    output, final = layer(x, state if state is None or len(state) == 2 else state[0])
    if isinstance(output, PackedSequence):
        assert torch.equal(output.batch_sizes, x.batch_sizes)
        output = output.data
    finals = final if isinstance(final, tuple) else (final,)
    torch.manual_seed(2)
    loss = sum((torch.randn(part.shape, dtype=part.dtype) * part).sum() for part in (output, *finals))
    leaves = [leaf, *(state or ()), *layer.parameters()]
    return [output, *finals, *torch.autograd.grad(loss, leaves)]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("given_state", [False, True])
@pytest.mark.parametrize("flags", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_all_gradients_are_torchs(kind, flags, given_state):
    theirs, ours = pair(kind, **flags)
    x = (
        torch.randn(B, T, D, dtype=torch.float64)
        if theirs.batch_first
        else torch.randn(T, B, D, dtype=torch.float64)
    )
    results = [run(layer, x.clone(), states(layer) if given_state else None) for layer in (ours, theirs)]
    assert_same(*results)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("flags", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_give_torchs_outputs_and_gradients(kind, flags, lengths):
    theirs, ours = pair(kind, **flags)
    x = torch.randn(T, B, D, dtype=torch.float64)
    results = []
    for layer in (ours, theirs):
        packed = pack_padded_sequence(x, LENGTHS[lengths], enforce_sorted=lengths != "unsorted")
        results.append(run(layer, packed, states(layer)))
    assert_same(*results)


def test_packed_output_unpacks_to_the_batchs_order():
    theirs, ours = pair("gru")
    packed = pack_padded_sequence(
        torch.randn(T, B, D, dtype=torch.float64), LENGTHS["unsorted"], enforce_sorted=False
    )
    mine, wanted = pad_packed_sequence(ours(packed)[0]), pad_packed_sequence(theirs(packed)[0])
    assert mine[1].tolist() == wanted[1].tolist() == LENGTHS["unsorted"]
    torch.testing.assert_close(mine[0], wanted[0])


@pytest.mark.parametrize("kind", KINDS)
def test_one_unbatched_sequence_gives_torchs_outputs_and_gradients(kind):
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    x = torch.randn(T, D, dtype=torch.float64)
    assert_same(run(ours, x.clone(), None), run(theirs, x.clone(), None))
    given = [tuple(part.detach()[:, 0] for part in states(layer)) for layer in (ours, theirs)]
    given = [state if len(state) == 2 else state[0] for state in given]
    torch.testing.assert_close(ours(x, given[0]), theirs(x, given[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_gives_empty_results_of_torchs_shapes(kind):
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    x = torch.randn(T, 0, D, dtype=torch.float64)
    for mine, wanted in zip(run(ours, x, None), run(theirs, x.clone(), None), strict=True):
        assert mine.shape == wanted.shape
        assert not mine.any()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [None, *LENGTHS])
@pytest.mark.parametrize("kind", KINDS)
def test_row_i_of_every_inner_call_is_sample_i(kind, lengths, batch_first):
    _, ours = pair(kind, num_layers=2, bidirectional=True, batch_first=batch_first)
    x = torch.randn(B, T, D, dtype=torch.float64)
    weights = torch.randn(B, T, 2 * (ours.proj_size or H), dtype=torch.float64)
    counts = [T] * B if lengths is None else LENGTHS[lengths]

    def whole():
        if lengths is None:
            output, _ = ours(x if batch_first else x.transpose(0, 1))
            output = output if batch_first else output.transpose(0, 1)
        else:
            packed = pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=lengths != "unsorted")
            output, _ = pad_packed_sequence(ours(packed)[0], batch_first=True)
        return (weights * output).sum()

    def alone(i):
        return (weights[i, : counts[i]] * ours(x[i, : counts[i]])[0]).sum()

    found = grads_by_row(ours, whole)
    assert {layer.max_batch_len for layer in ours.modules() if isinstance(layer, RNNLinear)} == {B}
    wanted = grads_by_loop(ours, [lambda i=i: alone(i) for i in range(B)])
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-10, msg=name)


def test_a_sample_that_overflows_leaves_the_others_alone():
    _, ours = pair("lstm")
    x = torch.randn(B, T, D, dtype=torch.float64)
    clean = ours(pack_padded_sequence(x, LENGTHS["unsorted"], batch_first=True, enforce_sorted=False))[1][0]
    x[2] = float("nan")
    h = ours(pack_padded_sequence(x, LENGTHS["unsorted"], batch_first=True, enforce_sorted=False))[1][0]
    assert h[0, 2].isnan().all()
    torch.testing.assert_close(h[0, [0, 1, 3, 4]], clean[0, [0, 1, 3, 4]])


def test_dropout_acts_between_layers_while_training_only():
    torch.manual_seed(0)
    layer = DPRNN(1, 4000, num_layers=2, bias=False, dropout=0.25, nonlinearity="relu")
    for name, parameter in layer.named_parameters():
        nn.init.ones_(parameter) if name == "weight_ih_l0" else nn.init.zeros_(parameter)
    with torch.no_grad():
        layer.weight_ih_l1.copy_(torch.eye(4000))
    x = torch.ones(1, 1, 1)
    kept = layer(x)[0].flatten()
    assert set(kept.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((kept == 0).double().mean().item() - 0.25) < 5.5 * (0.25 * 0.75 / 4000) ** 0.5  # fails < 1e-7
    assert torch.equal(layer.eval()(x)[0].flatten(), torch.ones(4000))


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_and_parameter_order_are_torchs(kind):
    theirs, ours = pair(kind, num_layers=2, bidirectional=True)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    nested = nn.ModuleDict({"rnn": copy.deepcopy(ours)}), nn.ModuleDict({"rnn": copy.deepcopy(theirs)})
    for parameter in nested[0].parameters():
        nn.init.zeros_(parameter)
    nested[1].load_state_dict(nested[0].state_dict())
    assert not any(parameter.any() for parameter in nested[1].parameters())
    nested[0].load_state_dict(theirs.state_dict(prefix="rnn."))
    assert all(torch.equal(a, b) for a, b in zip(nested[0].parameters(), theirs.parameters(), strict=True))


def test_the_names_of_the_owning_layers_load_too_and_nothing_is_loaded_in_silence():
    _, ours = pair("lstm")
    other = DPLSTM(D, H).double()
    other.load_state_dict(
        {
            f"l0.{product}.{kind}": getattr(getattr(ours.l0, product), kind)
            for product in ("ih", "hh")
            for kind in ("weight", "bias")
        }
    )
    assert torch.equal(other.weight_hh_l0, ours.weight_hh_l0)
    state = ours.state_dict()
    del state["bias_hh_l0"]
    state["surprise"] = torch.zeros(1)
    before = list(state)
    answer = other.load_state_dict(state, strict=False)
    assert (answer.missing_keys, answer.unexpected_keys) == (["bias_hh_l0"], ["surprise"])
    assert list(state) == before
    with pytest.raises(RuntimeError, match="bias_hh_l0"):
        other.load_state_dict(state)


def same_parameter(layer):
    return all(getattr(layer, new) is layer.get_parameter(old) for old, new in layer.old_to_new.items())


@pytest.mark.parametrize("change", [
    copy.deepcopy,
    lambda layer: pickle.loads(pickle.dumps(layer)),
    lambda layer: layer.float(),
    lambda layer: layer.to("meta").to_empty(device="cpu"),
    lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True) and layer,
])  # fmt: skip
def test_both_names_stay_one_parameter(change):
    changed = change(pair("lstm", num_layers=2)[1])
    assert same_parameter(changed)
    assert len(list(changed.parameters())) == 8


def test_assigning_a_public_name_reaches_the_layer_that_computes():
    theirs, ours = pair("gru")
    for layer in (theirs, ours):
        layer.weight_hh_l0 = nn.Parameter(torch.ones_like(layer.weight_hh_l0))
    assert same_parameter(ours)
    x = torch.randn(T, B, D, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_renamed_parameter_needs_to_exist():
    class Model(RenameParamsMixin, nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.set_rename_map({"layer.wieght": "w"})

    with pytest.raises(AttributeError, match="wieght"):
        Model()


@pytest.mark.parametrize(("theirs", "ours"), [
    (nn.RNNCell(D, H), DPRNNCell(D, H, True)),
    (nn.RNNCell(D, H, nonlinearity="relu"), DPRNNCell(D, H, True, nonlinearity="relu")),
    (nn.GRUCell(D, H), DPGRUCell(D, H, True)),
    (nn.LSTMCell(D, H), DPLSTMCell(D, H, True)),
])  # fmt: skip
def test_cells_are_torchs_cells(theirs, ours):
    for product in ("ih", "hh"):
        for kind in ("weight", "bias"):
            getattr(getattr(ours, product), kind).data = getattr(theirs, f"{kind}_{product}").data
    x, h = torch.randn(B, D), torch.randn(B, H)
    hx = (h, torch.randn(B, H)) if ours.has_cell_state else h
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours(x, hx), theirs(x, hx))
    first = tuple(part[:2] for part in hx) if ours.has_cell_state else h[:2]
    torch.testing.assert_close(ours(x[:2], hx, batch_size_t=2), theirs(x[:2], first))
    assert ours.ih.max_batch_len == ours.hh.max_batch_len == B


def test_initial_values_have_torchs_distribution():
    torch.manual_seed(0)
    bound = 1 / 8
    values = torch.cat([p.flatten() for p in DPLSTM(32, 64, proj_size=16).parameters()])
    assert values.abs().max() <= bound
    assert values.abs().max() > 0.999 * bound
    assert abs(values.mean()) < 6 * bound / 3**0.5 / values.numel() ** 0.5


def test_a_cell_class_of_ones_own_is_stacked():
    class Leaky(DPRNNCell):
        def step(self, gates, state):
            return (0.5 * state[0] + 0.5 * super().step(gates, state)[0],)

    layer = DPRNNBase(Leaky, D, H, num_layers=2, cell_params={"nonlinearity": "relu"})
    assert layer(torch.randn(T, B, D))[0].shape == (T, B, H)
    assert layer.l1.nonlinearity == "relu"
    assert set(RNN_CELL_TYPES) == {"RNN_TANH", "RNN_RELU", "GRU", "LSTM"}


def test_rows_sorted_by_length_may_be_given_by_count():
    _, ours = pair("lstm")
    x = torch.randn(3, 4, D, dtype=torch.float64)
    h, c = torch.zeros(2, 3, H, dtype=torch.float64)
    counts = torch.tensor([3, 2, 2, 1])
    output, h_n, _ = ours.forward_layer(x, h, c, counts, ours.l0, 3, 4, True, False)
    for i, length in enumerate([4, 3, 1]):
        alone = ours(x[i, :length])[0]
        torch.testing.assert_close(output[i, :length], alone)
        torch.testing.assert_close(h_n[i], alone[-1])


def test_iterate_layers_walks_layers_then_directions():
    layer = DPGRU(D, H, num_layers=2, bidirectional=True)
    walked = [(n, list(entries)) for n, entries in layer.iterate_layers("abcd", [1, 2, 3, 4])]
    assert walked == [(0, [(0, ("a", 1)), (1, ("b", 2))]), (1, [(0, ("c", 3)), (1, ("d", 4))])]


def test_bfloat16_and_autocast_run_forward_and_backward():
    packed = pack_padded_sequence(torch.randn(T, B, D), LENGTHS["unsorted"], enforce_sorted=False)
    for layer in (DPLSTM(D, H, 2, bidirectional=True), DPGRU(D, H), DPRNN(D, H)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(packed)[0].data
        output.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        half = copy.deepcopy(layer).bfloat16()
        assert half(torch.randn(T, B, D, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="only an LSTM"):
        DPGRU(D, H, proj_size=1)
    with pytest.raises(ValueError, match=r"dropout=1.5.*proj_size=4"):
        DPLSTM(D, H, dropout=1.5, proj_size=4)
    with pytest.raises(ValueError, match="'sine'"):
        DPRNN(D, H, nonlinearity="sine")
    with pytest.raises(ValueError, match="'TREE'"):
        DPRNNBase("TREE", D, H)
    with pytest.raises(ValueError, match="hidden_size=0"):
        DPGRU(D, 0)
    with pytest.warns(UserWarning, match="no effect"):
        DPGRU(D, H, dropout=0.5)


def test_bad_inputs_are_named():
    layer = DPLSTM(D, H)
    with pytest.raises(ValueError, match="2 features, input_size=3"):
        layer(torch.zeros(T, B, 2))
    with pytest.raises(ValueError, match="at least one step"):
        layer(torch.zeros(0, B, D))
    with pytest.raises(ValueError, match="4 dimensions"):
        layer(torch.zeros(1, 1, 1, D))
    with pytest.raises(ValueError, match=r"cell state has shape \(1, 2, 4\)"):
        layer(torch.zeros(T, B, D), (torch.zeros(1, B, H), torch.zeros(1, 2, H)))


def test_apply_permutation_reorders_one_dimension():
    x = torch.arange(6).view(2, 3)
    assert apply_permutation(x, 1, torch.tensor([2, 0, 1])).tolist() == [[2, 0, 1], [5, 3, 4]]
    assert apply_permutation(x, 0, None) is x


def test_a_larger_batch_between_forward_and_backward_does_not_change_the_rows():
    from opacus import GradSampleModule

    module = GradSampleModule(DPLSTM(3, 4, batch_first=True))
    loss = module(torch.randn(2, 5, 3))[0].sum()
    with torch.no_grad():
        module(torch.randn(7, 5, 3))
    loss.backward()
    assert all(p.grad_sample.shape[0] == 2 for p in module.parameters())
