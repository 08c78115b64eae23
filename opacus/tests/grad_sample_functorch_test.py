"""Layers without a rule: functorch over all their inputs, or row by row where it cannot follow."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from opacus.grad_sample.selection import GRAD_SAMPLERS
from opacus.tests.per_sample import VIEWS, assert_close, check, expected, grad_samples, per_sample_loss


class Own(nn.Module):
    """Owns a matrix and a vector; subclasses say what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(3))


class Plain(Own):
    def forward(self, x):
        return (x @ self.w).sin() + self.b


class Keyword(Own):
    def forward(self, x, *, gate=None):
        return (x @ self.w) * gate + self.b


class Tuple(Own):
    def forward(self, x):
        return x @ self.w, (x.cos() @ self.w) * self.b


class Dict(Own):
    def forward(self, x):
        return {
            "sum": x @ self.w + self.b,
            "names": ["no", "tensor"],
            "ids": x.argmax(-1),
            "product": x @ self.w * self.b,
        }


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Named(Own):
    def forward(self, x):
        return Pair(x @ self.w, self.b + x[..., :3])


class RowOfTheBatch(nn.Module):
    """A parameter with one row for each position in the batch, returned or multiplied."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5))
        self.alone = alone

    def forward(self, x):
        return self.w.clone() if self.alone else x * self.w


@pytest.mark.parametrize("alone", [True, False])
def test_a_parameter_with_rows_of_the_batch_is_refused_by_name(alone):
    model = GradSampleModule(nn.Sequential(nn.Linear(5, 5), RowOfTheBatch(alone)))
    with pytest.raises(PerSampleGradientError, match=r"RowOfTheBatch.*\(4, 5\)"):
        model(torch.randn(4, 5)).sum().backward()


class Branching(Own):
    """Data-dependent control flow: vmap cannot follow, so rows are run one by one."""

    def forward(self, x):
        rows = [
            row @ self.w + self.b if float(row.detach().sum()) > 0 else row.sin() @ self.w * self.b
            for row in x
        ]
        return torch.stack(rows) if rows else x @ self.w


class BranchingOnTheBatch(Own):
    """What is done with one sample depends on all: there are no gradients of single samples."""

    def forward(self, x):
        y = x @ self.w
        return y + self.b if float(x.detach().sum()) > 0 else y * self.b


class Nested(Own):
    def forward(self, batch):
        return batch["x"] @ self.w + self.b * batch["more"][0]


class WithChild(Own):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x):
        return self.child(x @ self.w) + self.b


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 5)], ids=str)
@pytest.mark.parametrize("kind", [Plain, Tuple, Dict, Named, WithChild])
def test_any_layer_is_exact(kind, shape, view):
    check(kind, torch.randn(shape), view=view)


@pytest.mark.parametrize("view", ["float64", "float32", "policy"])
def test_data_dependent_control_flow_is_followed_row_by_row(view):
    check(Branching, torch.tensor([[1.0], [-1.0]]).repeat(3, 1) * torch.rand(6, 5), view=view)


def test_a_branch_that_the_whole_batch_decides_is_refused_by_name():
    model = GradSampleModule(nn.Sequential(BranchingOnTheBatch()))
    x = torch.ones(4, 5)
    x[0] = -2
    with pytest.raises(PerSampleGradientError, match=r"0\.w|0\.b"):
        model(x).sum().backward()


@pytest.mark.parametrize("view", VIEWS)
def test_keyword_tensors_and_nested_inputs_take_part(view):
    check(Keyword, torch.randn(4, 5), view=view, gate=torch.randn(4, 3))
    check(Nested, {"x": torch.randn(4, 5), "more": [torch.randn(4, 3)]}, view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", [nn.PReLU, lambda: nn.PReLU(5)], ids=["one slope", "a slope a channel"])
def test_prelu(kind, view):
    check(kind, torch.randn(4, 5, 2), view=view)


class Basis(Own):
    """Its second input belongs to all samples."""

    def forward(self, x_BTD, basis_TD):
        return (x_BTD * basis_TD) @ self.w + self.b


class OnABasis(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Basis()

    def forward(self, x_BTD):
        steps = torch.arange(1, x_BTD.shape[1] + 1, dtype=x_BTD.dtype, device=x_BTD.device)
        return self.layer(x_BTD, steps.sqrt()[:, None].expand(-1, 5))


@pytest.mark.parametrize("view", VIEWS)
def test_inputs_that_belong_to_all_samples(view):
    check(OnABasis, torch.randn(4, 3, 5), view=view)


def test_a_shared_input_stays_shared_when_its_size_happens_to_be_the_batch_size():
    model = OnABasis().double()
    wrapped = GradSampleModule(model)
    for rows in (4, 3):  # the second batch has as many samples as the basis has steps
        x = torch.randn(rows, 3, 5, dtype=torch.float64)
        want = expected(model, (x,), {}, rows)
        wrapped.zero_grad(set_to_none=True)
        per_sample_loss(wrapped(x)).mean().backward()
        assert_close(grad_samples(model), want, 1e-10)


def test_a_shared_input_mistaken_in_the_very_first_batch_is_refused():
    wrapped = GradSampleModule(OnABasis().double())
    with pytest.raises((PerSampleGradientError, RuntimeError), match=r"layer\.w|size|shape"):
        per_sample_loss(wrapped(torch.randn(3, 3, 5, dtype=torch.float64))).mean().backward()


@pytest.mark.parametrize("view", ["float64", "policy"])
def test_a_custom_layer_with_the_batch_second(view):
    check(Plain, torch.randn(3, 4, 5), view=view, batch_dim=1, n=4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_raw_recurrent_layer_is_exact_or_refused(kind):
    torch.manual_seed(0)
    layer = kind(3, 4).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    loops = [
        torch.autograd.grad(layer(x[:, i : i + 1])[0].tanh().sum(), list(layer.parameters()))
        for i in range(2)
    ]
    want = {name: torch.stack([g[k] for g in loops]) for k, (name, _) in enumerate(layer.named_parameters())}
    GradSampleModule(layer, batch_first=False, loss_reduction="sum")(x)[0].tanh().sum().backward()
    assert_close(grad_samples(layer), want, 1e-10)
    with pytest.raises(PerSampleGradientError, match=kind.__name__):
        GradSampleModule(kind(3, 4, batch_first=True))(torch.randn(2, 5, 3))[0].sum().backward()


def test_hooks_around_a_custom_layer_are_not_run_again():
    layer = Plain()
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output * 3)
    check(lambda: layer, torch.randn(4, 5))


class Dropping(Own):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x) @ self.w + self.b


class DroppingAndBranching(Dropping):
    def forward(self, x):
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize("kind", [Dropping, DroppingAndBranching])
def test_random_numbers_inside_a_layer_with_parameters_are_refused_by_name(kind):
    model = GradSampleModule(nn.Sequential(nn.Linear(5, 5), kind()))
    with pytest.raises(
        PerSampleGradientError, match=f"{kind.__name__} owns parameters and draws random numbers"
    ):
        model(torch.randn(4, 5)).sum().backward()
    model.eval()
    model(torch.randn(4, 5)).sum().backward()
    assert model.get_parameter("_module.1.w").grad_sample.shape == (4, 5, 3)


class InPlace(Own):
    def forward(self, x):
        x += 1
        return x.sin() @ self.w + self.b


def test_a_layer_that_changes_its_own_input_is_refused_by_name():
    model = GradSampleModule(nn.Sequential(nn.Identity(), InPlace()))
    with pytest.raises(PerSampleGradientError, match=r"1 \(InPlace\) changes its own input in place"):
        model(torch.randn(4, 5))


def test_a_registered_sampler_is_used_and_can_be_given_back():
    calls = []

    @register_grad_sampler(Plain)
    def sampler(layer, activations, backprops):
        calls.append(len(activations))
        z = activations[0] @ layer.w
        return {layer.w: torch.einsum("bi,bj->bij", activations[0], backprops * z.cos()), layer.b: backprops}

    try:
        check(Plain, torch.randn(4, 5))
        assert calls == [1]
    finally:
        del GRAD_SAMPLERS[Plain]
    check(Plain, torch.randn(4, 5))
    assert calls == [1]


@pytest.mark.parametrize("wrong", ["value", "shape", "missing"])
def test_a_wrong_sampler_is_found_before_a_step_is_taken(wrong):
    @register_grad_sampler([Plain])
    def sampler(layer, activations, backprops):
        right = activations[0][:, :, None] * (backprops * (activations[0] @ layer.w).cos())[:, None]
        if wrong == "missing":
            return {layer.b: backprops}
        return {layer.w: right * 1.5 if wrong == "value" else right.transpose(1, 2), layer.b: backprops}

    try:
        model = GradSampleModule(nn.Sequential(Plain()))
        with pytest.raises(PerSampleGradientError, match=r"0\.w"):
            model(torch.randn(4, 5)).sum().backward()
    finally:
        del GRAD_SAMPLERS[Plain]
