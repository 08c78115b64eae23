"""The user's own check of a model: right models pass in every mode, wrong ones do not, values are the mathematics'."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from opacus.grad_sample import GRAD_SAMPLERS, register_grad_sampler
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, make_functional, prepare_layer
from opacus.layers import DPGRU, DPLSTM
from opacus.utils import per_sample_gradients_utils as utils

MODES = utils.get_grad_sample_modes(use_ew=True)


def linear_by_hand(layer: nn.Linear, x: Tensor, reduction: str) -> dict[str, Tensor]:
    """Per-sample gradients of `sum or mean over outputs of y^2 / 2 + sin y`, from dL/dy = y + cos y."""
    y = layer(x).detach()
    g = (y + y.cos()) / (y.shape[1] if reduction == "mean" else 1)
    return {"weight": torch.einsum("bp,bd->bpd", g, x), "bias": g}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
def test_both_ways_give_the_linear_layers_closed_form(mode, reduction):
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    expected = linear_by_hand(layer, x, reduction)
    for found in utils.compute_grad_samples_microbatch_and_opacus(
        x, layer, loss_reduction=reduction, grad_sample_mode=mode
    ):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_batchs_loss_is_the_mean_or_the_sum_of_the_samples_losses(reduction):
    torch.manual_seed(0)
    sequences = [torch.randn(length, 2) for length in (2, 4, 1)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    model = utils.ModelWithLoss(nn.Identity(), reduction)
    losses = torch.stack([model(sequence.unsqueeze(0)) for sequence in sequences])
    torch.testing.assert_close(model(packed), getattr(losses, reduction)())
    batch = torch.randn(5, 3, 2)
    losses = torch.stack([model(sample.unsqueeze(0)) for sample in batch])
    torch.testing.assert_close(model(batch), getattr(losses, reduction)())


def test_several_outputs_add_and_whole_numbers_do_not_count():
    class Several(nn.Module):
        def forward(self, x: Tensor) -> object:
            return {"a": x, "b": (2 * x, torch.tensor([7]))}

    found = utils.ModelWithLoss(Several(), "sum")(torch.tensor([[1.0]]))
    assert found.item() == pytest.approx(1 / 2 + math.sin(1) + 4 / 2 + math.sin(2))
    with pytest.raises(ValueError, match="no tensor of floating-point numbers"):
        utils.ModelWithLoss(nn.Identity())(torch.tensor([[1]]))


class LastOutput(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | PackedSequence) -> Tensor:
        hidden = self.layer(x)[1]
        return hidden[0] if isinstance(hidden, tuple) else hidden


MODELS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(4, 3)),
    "linear over positions": (lambda: nn.Linear(3, 2), lambda: torch.randn(4, 5, 3)),
    "convolution": (lambda: nn.Conv1d(3, 2, 2), lambda: torch.randn(4, 3, 6)),
    "embedding": (lambda: nn.Embedding(7, 3), lambda: torch.randint(7, (4, 5))),
    "embedding of one id": (lambda: nn.Embedding(7, 3), lambda: torch.randint(7, (4,))),
    "normalisation": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), lambda: torch.randn(4, 3)),
    "LSTM": (lambda: DPLSTM(3, 4, batch_first=True), lambda: torch.randn(4, 5, 3)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_right_models_pass_and_are_left_as_they_were(name, mode):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    model = build()
    before = copy.deepcopy(model.state_dict())
    assert utils.check_per_sample_gradients_are_correct(batch(), model, grad_sample_mode=mode)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output", ["packed", "last"])
@pytest.mark.parametrize("lengths", [(4, 2, 1), (2, 4, 1)], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU])
def test_packed_sequences_pass(kind, lengths, output, mode):
    torch.manual_seed(0)
    x = pack_sequence([torch.randn(length, 3) for length in lengths], enforce_sorted=False)
    layer = kind(3, 4, batch_first=True)
    model = layer if output == "packed" else LastOutput(layer)
    assert utils.check_per_sample_gradients_are_correct(x, model, grad_sample_mode=mode)
    found = utils.compute_microbatch_grad_sample_tensor_or_seq(x, model)
    assert {grad.shape[0] for grad in found.values()} == {3}


@pytest.mark.parametrize("mode", utils.get_grad_sample_modes())
def test_the_batch_may_be_dimension_one(mode):
    torch.manual_seed(0)
    x, model = torch.randn(6, 4, 3), DPLSTM(3, 2, batch_first=False)
    assert utils.check_per_sample_gradients_are_correct(x, model, batch_first=False, grad_sample_mode=mode)
    by_samples = utils.compute_microbatch_grad_sample(x, model, batch_first=False)
    assert {grad.shape[0] for grad in by_samples.values()} == {4}


def test_a_wrong_grad_sampler_is_found_out():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.by

    @register_grad_sampler(Scale)
    def rows_swapped(
        layer: Scale, activations: list[Tensor], backprops: Tensor
    ) -> dict[nn.Parameter, Tensor]:
        return {layer.by: (activations[0] * backprops).flip(0)}  # right in the sum, wrong for each sample

    try:
        assert not utils.check_per_sample_gradients_are_correct(torch.randn(4, 3), Scale())
    finally:
        del GRAD_SAMPLERS[Scale]
    assert utils.check_per_sample_gradients_are_correct(torch.randn(4, 3), Scale())


def test_tolerances_are_followed():
    torch.manual_seed(0)
    x, layer = torch.randn(4, 3), nn.Linear(3, 2)
    by_samples, by_library = utils.compute_grad_samples_microbatch_and_opacus(x, layer)
    same = all(torch.equal(by_samples[name], by_library[name]) for name in by_samples)
    assert utils.check_per_sample_gradients_are_correct(x, layer, atol=0.0, rtol=0.0) <= same
    assert utils.check_per_sample_gradients_are_correct(x, layer, atol=1e3)


def test_frozen_parameters_take_no_part_and_unused_ones_have_zero_gradients():
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    assert [
        set(found) for found in utils.compute_grad_samples_microbatch_and_opacus(torch.randn(4, 3), layer)
    ] == [
        {"bias"},
        {"bias"},
    ]

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    assert utils.check_per_sample_gradients_are_correct(torch.randn(4, 3), Unused())
    assert not utils.compute_microbatch_grad_sample(torch.randn(4, 3), Unused())["spare.weight"].any()


def test_samples_are_taken_apart_as_the_user_says():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    plain = utils.compute_microbatch_grad_sample(x, layer)
    backwards = utils.compute_microbatch_grad_sample(x, layer, chunk_method=lambda rows: reversed(list(rows)))
    listed = utils.compute_microbatch_grad_sample(list(x), layer)
    for name, grad in plain.items():
        torch.testing.assert_close(backwards[name], grad.flip(0))
        torch.testing.assert_close(listed[name], grad)


def test_what_cannot_be_compared_is_said_by_name():
    layer = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="x is empty"):
        utils.check_per_sample_gradients_are_correct(torch.zeros(0, 3), layer)
    with pytest.raises(ValueError, match="'no_op' leaves none on weight, bias"):
        utils.compute_opacus_grad_sample(torch.ones(2, 3), layer, grad_sample_mode="no_op")
    with pytest.raises(ValueError, match="'telepathy' is not available"):
        utils.compute_opacus_grad_sample(torch.ones(2, 3), layer, grad_sample_mode="telepathy")
    with pytest.raises(ValueError, match="'mean' or 'sum', not 'none'"):
        utils.ModelWithLoss(layer, "none")


def test_small_questions():
    assert utils.get_grad_sample_modes() == ["hooks", "functorch"]
    assert utils.get_grad_sample_modes(use_ew=True) == ["hooks", "functorch", "ew"]
    assert utils.check_torch_version_for_ew_sample() is True
    x, none = torch.ones(2, 3), torch.ones(0, 3)
    empty = [none, [none, x], (none,), {"a": none}, [], torch.ones(6, 0, 3)]
    assert all(utils.is_batch_empty(batch) for batch in empty)
    assert not any(utils.is_batch_empty(batch) for batch in (x, [x, none], {"a": x}, pack_sequence([x])))
    sequences = [torch.randn(length, 2) for length in (1, 3, 2)]
    found = utils.unpack_packedsequences(pack_sequence(sequences, enforce_sorted=False))
    assert all(torch.equal(one, other) for one, other in zip(found, sequences, strict=True))
    layer = nn.Linear(3, 2)
    clone = utils.clone_module(layer)
    assert torch.equal(clone.weight, layer.weight)
    assert clone.weight is not layer.weight


@pytest.mark.parametrize("prepared", [False, True])
def test_functorch_gives_the_closed_form_for_one_layer(prepared):
    torch.manual_seed(0)
    layer, x, g = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    if prepared:
        prepare_layer(layer)
    found = ft_compute_per_sample_gradient(layer, [x], g)
    assert set(found) == {layer.weight, layer.bias}
    torch.testing.assert_close(found[layer.weight], torch.einsum("bp,bd->bpd", g, x))
    torch.testing.assert_close(found[layer.bias], g)


def test_functorch_feeds_a_layer_that_takes_the_batch_second():
    class RunningSum(nn.Module):
        """Over time, which is dimension 0: mistaking it for the batch changes the gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0) * self.by

    torch.manual_seed(0)
    layer, x, g = RunningSum(), torch.randn(4, 5, 3), torch.randn(4, 5, 3)  # 4 samples, 5 steps: batch first
    prepare_layer(layer, batch_first=False)
    found = ft_compute_per_sample_gradient(layer, [x], g)
    torch.testing.assert_close(found[layer.by], (x.cumsum(1) * g).sum(1))


def test_a_module_as_a_function_of_its_parameters():
    module, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)), torch.randn(4, 3)
    function, parameters = make_functional(module)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    torch.testing.assert_close(function(parameters, x), module(x))
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(2)
    function, values = make_functional(module, disable_autograd_tracking=True)
    assert not any(value.requires_grad for value in values)
    torch.testing.assert_close(function([2 * value for value in values], x), doubled(x))
