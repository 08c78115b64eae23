"""Linear and its relatives: inputs of any rank and strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
from opacus.tests.per_sample import VIEWS, assert_close, check


class DoubledLinear(nn.Linear):
    """A subclass that computes something else: the rule of Linear must not be used."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, 2 * self.weight, self.bias) ** 2


class NamedLinear(nn.Linear):
    """A subclass that computes the same."""


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (4, 2, 3, 5), (4, 2, 1, 3, 5)], ids=str)
def test_linear_is_exact_for_inputs_of_any_rank(shape, bias, view):
    check(lambda: nn.Linear(5, 3, bias=bias), torch.randn(shape), view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "kind", [DoubledLinear, NamedLinear, nn.modules.linear.NonDynamicallyQuantizableLinear]
)
def test_subclasses_follow_their_own_forward(kind, view):
    check(lambda: kind(5, 3), torch.randn(4, 2, 5), view=view)


def test_a_forward_replaced_on_the_instance_is_followed():
    def make() -> nn.Module:
        layer = nn.Linear(5, 3)
        layer.forward = lambda x: F.linear(x, layer.weight).sin() + layer.bias
        return layer

    layer = make().double()
    x = torch.randn(4, 5, dtype=torch.float64)
    want = [torch.autograd.grad(layer(x[i]).sum(), [layer.weight, layer.bias]) for i in range(4)]
    GradSampleModule(layer, loss_reduction="sum")(x).sum().backward()
    found = {"weight": layer.weight.grad_sample, "bias": layer.bias.grad_sample}
    assert_close(found, {name: torch.stack([w[k] for w in want]) for k, name in enumerate(found)}, 1e-10)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("strided", ["expanded", "transposed", "every second"])
def test_linear_takes_inputs_of_any_strides(strided, view):
    x = {
        "expanded": torch.randn(4, 1, 5).expand(4, 3, 5),
        "transposed": torch.randn(4, 5, 3).transpose(1, 2),
        "every second": torch.randn(8, 6, 10)[::2, ::2, ::2],
    }[strided]
    check(lambda: nn.Linear(5, 3), x, view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("x", [torch.randn(3, 4, 5), torch.randn(4, 5)], ids=["[T,B,D]", "[B,D]"])
def test_linear_with_the_batch_second(x, view):
    check(lambda: nn.Linear(5, 3), x, view=view, batch_dim=1, n=4)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_half_of_a_layer_gets_nothing(frozen, view):
    def make() -> nn.Module:
        layer = nn.Linear(5, 3)
        getattr(layer, frozen).requires_grad_(False)
        return layer

    check(make, torch.randn(4, 2, 5), view=view)


@pytest.mark.parametrize("view", VIEWS)
def test_bilinear_has_two_inputs(view):
    check(lambda: nn.Bilinear(3, 4, 2), torch.randn(5, 3), torch.randn(5, 4), view=view)


def test_the_recorded_functions_agree_with_the_loop():
    layer = nn.Linear(5, 3).double()
    a, g = torch.randn(4, 2, 5, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    names = {"weight": layer.weight, "bias": layer.bias}
    loops = [torch.autograd.grad((layer(a[i]) * g[i]).sum(), list(names.values())) for i in range(4)]
    want = {name: torch.stack([grads[k] for grads in loops]) for k, name in enumerate(names)}
    found, norms = compute_linear_grad_sample(layer, [a], g), compute_linear_norm_sample(layer, [a], g)
    assert_close({name: found[p] for name, p in names.items()}, want, 1e-10)
    lengths = {name: grad.flatten(1).norm(dim=1) for name, grad in want.items()}
    assert_close({name: norms[p] for name, p in names.items()}, lengths, 1e-10)


def test_one_sample_without_a_batch_dimension_is_refused():
    model = GradSampleModule(nn.Linear(4, 4))
    with pytest.raises(PerSampleGradientError, match=r"no batch dimension"):
        model(torch.randn(4)).sum().backward()
