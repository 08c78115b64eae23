"""Attention against `nn.MultiheadAttention`, and the rule that every inner call's rows are the batch in its order."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from opacus.layers import DPMultiheadAttention, SequenceBias
from opacus.tests.row_rule import grads_by_loop, grads_by_row

E, N, B, T, S = 6, 3, 4, 5, 7
FLAGS = {
    "plain": {},
    "no bias": {"bias": False},
    "sizes": {"kdim": 4, "vdim": 2},
    "one size": {"kdim": 6, "vdim": 2, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 3, "vdim": 5},
}
MASKS = {
    "none": (None, None),
    "padding": (None, "bool"),
    "padding floats": (None, "float"),
    "2-D": ("bool", None),
    "2-D floats": ("float", "float"),
    "3-D": ("bool3", "bool"),
    "3-D floats": ("float3", None),
    "mixed": ("float3", "float"),
}


def pair(batch_first=False, **flags):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, N, batch_first=batch_first, **flags).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)  # torch's biases are zero at first
    ours = DPMultiheadAttention(E, N, batch_first=batch_first, **flags).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(layer, rows=B):
    """Query, key, value `[rows, T or S, ...]`."""
    torch.manual_seed(1)
    sizes = ((T, E), (S, layer.kdim), (S, layer.vdim))
    return [torch.randn(rows, steps, size, dtype=torch.float64) for steps, size in sizes]


def mask(kind, *shape):
    torch.manual_seed(3)
    if kind is None:
        return None
    if kind.startswith("float"):
        return torch.randn(*shape, dtype=torch.float64)
    chosen = torch.rand(*shape) < 0.3
    chosen[..., 0] = False  # every query keeps a key
    return chosen


def masks(name, rows=B):
    of_scores, of_keys = MASKS[name]
    shape = (rows * N, T, S) if of_scores and of_scores.endswith("3") else (T, S)
    return {"attn_mask": mask(of_scores, *shape), "key_padding_mask": mask(of_keys, rows, S)}


def laid_out(layer, tensors):
    return tensors if layer.batch_first else [x.transpose(0, 1) for x in tensors]


def run(layer, tensors, **arguments):
    """Outputs, gradients of the inputs, and gradients of the parameters under torch's names."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    outputs = [x for x in layer(*leaves, **arguments) if x is not None]
    torch.manual_seed(2)
    sum((torch.randn(x.shape, dtype=x.dtype) * x).sum() for x in outputs).backward()
    with_gradients = copy.deepcopy(layer)
    for new, old in zip(with_gradients.parameters(), layer.parameters(), strict=True):
        new.data = old.grad
    layer.zero_grad()
    return [*outputs, *(x.grad for x in leaves), *with_gradients.state_dict().values()]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("flags", FLAGS)
def test_outputs_and_all_gradients_are_torchs(flags, batch_first, need_weights):
    theirs, ours = pair(batch_first, **FLAGS[flags])
    tensors = laid_out(ours, inputs(ours))
    for name in MASKS:
        arguments = {**masks(name), "need_weights": need_weights}
        assert_same(run(ours, tensors, **arguments), run(theirs, tensors, **arguments))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_causal_mask_with_its_hint_gives_torchs_results(batch_first, need_weights):
    theirs, ours = pair(batch_first)
    tensors = laid_out(ours, [torch.randn(B, T, E, dtype=torch.float64)] * 3)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for padding in (None, torch.tensor([[False] * 4 + [True]] * B)):
        arguments = {
            "attn_mask": causal, "is_causal": True, "need_weights": need_weights, "key_padding_mask": padding
        }  # fmt: skip
        assert_same(run(ours, tensors, **arguments), run(theirs, tensors, **arguments))


@pytest.mark.parametrize("flags", ["plain", "all"])
def test_weights_of_each_head_are_torchs(flags):
    theirs, ours = pair(**FLAGS[flags])
    tensors = laid_out(ours, inputs(ours))
    results = [run(x, tensors, **masks("3-D"), average_attn_weights=False) for x in (ours, theirs)]
    assert_same(*results)
    assert results[0][1].shape[:2] == (B, N)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_unbatched_sequence_gives_torchs_results(batch_first, name):
    theirs, ours = pair(batch_first, **FLAGS["bias_kv"])
    tensors = [x[0] for x in inputs(ours, rows=1)]
    arguments = masks(name, rows=1)
    if arguments["key_padding_mask"] is not None:
        arguments["key_padding_mask"] = arguments["key_padding_mask"][0]
    assert_same(run(ours, tensors, **arguments), run(theirs, tensors, **arguments))
    a, b = (layer(*tensors, **arguments, average_attn_weights=False)[1] for layer in (ours, theirs))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("batch_first", "need_weights"), list(itertools.product([True, False], repeat=2)))
def test_an_empty_batch_gives_empty_results_and_zero_gradients(batch_first, need_weights):
    _, ours = pair(batch_first, **FLAGS["all"])
    tensors = [x.requires_grad_() for x in laid_out(ours, inputs(ours, rows=0))]
    output, weights = ours(*tensors, need_weights=need_weights, key_padding_mask=mask("bool", 0, S))
    assert output.shape == ((0, T, E) if batch_first else (T, 0, E))
    assert weights is None or weights.shape == (0, T, S + 2)
    output.sum().backward()
    assert all(not p.grad.any() for p in ours.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("flags", ["plain", "no bias", "all"])
def test_row_i_of_every_inner_call_is_sample_i(flags, batch_first, need_weights):
    _, ours = pair(batch_first, **FLAGS[flags])
    tensors = inputs(ours)
    padding = mask("bool", B, S)
    weights = torch.randn(B, T, E, dtype=torch.float64)

    def loss(chosen):
        output, _ = ours(
            *laid_out(ours, [x[chosen] for x in tensors]),
            key_padding_mask=padding[chosen],
            need_weights=need_weights,
        )
        return (weights[chosen] * laid_out(ours, [output])[0]).sum()

    found = grads_by_row(ours, lambda: loss(slice(None)))
    assert {m.max_batch_len for m in ours.modules() if isinstance(m, (nn.Linear, SequenceBias))} == {B}
    wanted = grads_by_loop(ours, [lambda i=i: loss([i]) for i in range(B)])
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_while_training_is_torchs_for_the_same_seed(need_weights):
    theirs, ours = pair(dropout=0.5)
    tensors = laid_out(ours, inputs(ours))
    results = []
    for layer in (ours, theirs):
        torch.manual_seed(5)
        results.append(layer(*tensors, need_weights=need_weights)[0])
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], ours.eval()(*tensors, need_weights=need_weights)[0])
    torch.testing.assert_close(ours(*tensors)[0], theirs.eval()(*tensors)[0])


def test_dropout_drops_the_stated_share_of_weights_and_scales_the_rest():
    torch.manual_seed(0)
    ours = DPMultiheadAttention(2, 1, dropout=0.25, batch_first=True)
    x = torch.zeros(1, 200, 2)  # all weights are 1 / 200
    weights = ours(x, x, x)[1].flatten()
    torch.testing.assert_close(weights[weights != 0].unique(), torch.tensor([1 / 150]))
    assert (
        abs((weights == 0).double().mean().item() - 0.25) < 5.5 * (0.25 * 0.75 / 40000) ** 0.5
    )  # fails < 1e-7


@pytest.mark.parametrize("flags", FLAGS)
def test_state_dicts_have_torchs_keys_and_load_both_ways(flags):
    theirs, ours = pair(**FLAGS[flags])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    nested = (
        nn.ModuleDict({"attention": copy.deepcopy(ours)}),
        nn.ModuleDict({"attention": copy.deepcopy(theirs)}),
    )
    for parameter in nested[0].parameters():
        nn.init.zeros_(parameter)
    nested[1].load_state_dict(nested[0].state_dict())
    assert not any(parameter.any() for parameter in nested[1].parameters())
    given = theirs.state_dict(prefix="attention.")
    before = list(given)
    nested[0].load_state_dict(given)
    assert list(given) == before
    assert all(torch.equal(a, b) for a, b in zip(nested[0].parameters(), ours.parameters(), strict=True))


def test_state_dict_hooks_see_torchs_names():
    layer = DPMultiheadAttention(E, N)

    def drop(module, state, prefix, metadata):
        del state[prefix + "in_proj_bias"]

    layer._register_state_dict_hook(drop)
    assert list(layer.state_dict()) == ["in_proj_weight", "out_proj.weight", "out_proj.bias"]


def test_its_own_parameter_names_load_too_and_nothing_is_loaded_in_silence():
    _, ours = pair(add_bias_kv=True)
    other = DPMultiheadAttention(E, N, add_bias_kv=True).double()
    other.load_state_dict(dict(ours.named_parameters()))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), ours.parameters(), strict=True))
    state = ours.state_dict()
    del state["in_proj_bias"]
    state["surprise"] = torch.zeros(1)
    answer = other.load_state_dict(state, strict=False)
    assert answer.missing_keys == ["qlinear.bias", "klinear.bias", "vlinear.bias"]
    assert answer.unexpected_keys == ["surprise"]
    with pytest.raises(RuntimeError, match="surprise"):
        other.load_state_dict(state)


def test_initial_values_are_uniform_for_projections_and_normal_for_appended_vectors():
    torch.manual_seed(0)
    layer = DPMultiheadAttention(400, 2, kdim=100, add_bias_kv=True)
    for linear, features in (
        (layer.qlinear, 400),
        (layer.klinear, 100),
        (layer.vlinear, 400),
        (layer.out_proj, 400),
    ):
        for values in (linear.weight, linear.bias):
            scaled = (
                values * features**0.5
            )  # U(-1, 1); the maximum of 400 is below 0.96 with probability 1e-7
            assert 0.96 < scaled.abs().max() <= 1 + 1e-6
    vector = SequenceBias(100_000).bias
    assert abs(vector.mean()) < 6 / 100_000**0.5
    assert abs(vector.var() - 1) < 6 * (2 / 100_000) ** 0.5


@pytest.mark.parametrize("batch_first", [True, False])
def test_it_works_inside_torchs_transformer_layers_in_training_and_evaluation(batch_first):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(E, N, 8, dropout=0.0, batch_first=batch_first).double()
    ours = copy.deepcopy(theirs)
    ours.self_attn = DPMultiheadAttention(E, N, batch_first=batch_first).double()
    ours.load_state_dict(theirs.state_dict())
    x = laid_out(ours.self_attn, [torch.randn(B, T, E, dtype=torch.float64)])[0]
    torch.testing.assert_close(ours(x), theirs(x))
    ours.eval(), theirs.eval()
    with torch.no_grad():  # torch's fused path, which must not be taken for ours
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast_run_forward_and_backward(dtype):
    layer = DPMultiheadAttention(E, N, add_bias_kv=True, batch_first=True)
    x = torch.randn(B, T, E)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x, x, x, attn_mask=causal, need_weights=need_weights)[0]
        output.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        low = copy.deepcopy(layer).to(dtype)
        y = x.to(dtype)
        assert low(y, y, y, attn_mask=causal, need_weights=need_weights)[0].dtype == dtype


def test_bad_arguments_and_inputs_are_named():
    with pytest.raises(ValueError, match=r"embed_dim=5.*num_heads=2"):
        DPMultiheadAttention(5, 2)
    with pytest.raises(ValueError, match="dropout"):
        DPMultiheadAttention(4, 2, dropout=2)
    layer = DPMultiheadAttention(E, N, batch_first=True)
    q, k = torch.zeros(B, T, E), torch.zeros(B, S, E)
    with pytest.raises(ValueError, match=r"value has 5 features, expected 6"):
        layer(q, k, torch.zeros(B, S, 5))
    with pytest.raises(ValueError, match=r"differ in length.*query has 4 samples, key has 1"):
        layer(q, k[:1], k)
    with pytest.raises(ValueError, match="all have 2 or all have 3"):
        layer(q, k[0], k[0])
    with pytest.raises(ValueError, match="pass the mask"):
        layer(q, k, k, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask has shape \(5, 5\), expected \(5, 7\)"):
        layer(q, k, k, attn_mask=torch.zeros(T, T))
    with pytest.raises(ValueError, match=r"key_padding_mask has shape \(7, 4\), expected \(4, 7\)"):
        layer(q, k, k, key_padding_mask=torch.zeros(S, B))
    with pytest.raises(ValueError, match=r"key_padding_mask has dtype torch\.int64"):
        layer(q, k, k, key_padding_mask=torch.zeros(B, S, dtype=torch.int64))


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequence_bias_appends_its_vector_to_every_sequence(batch_first):
    layer = SequenceBias(E, batch_first=batch_first)
    for steps in (0, 3):
        x = torch.randn(B, steps, E)
        longer = layer(x) if batch_first else layer(x.transpose(0, 1)).transpose(0, 1)
        assert torch.equal(longer[:, :steps], x)
        assert torch.equal(longer[:, steps:], layer.bias.expand(B, 1, E))


def test_unsqueeze_0_2_gives_a_mask_dimensions_for_samples_and_heads():
    assert DPMultiheadAttention(E, N).unsqueeze_0_2(torch.zeros(T, S)).shape == (1, 1, T, S)
