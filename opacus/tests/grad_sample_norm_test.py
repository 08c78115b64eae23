"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm with every affine and bias flag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import (
    GradSampleModule,
    compute_group_norm_grad_sample,
    compute_instance_norm_grad_sample,
    compute_layer_norm_grad_sample,
    compute_rms_norm_grad_sample,
)
from opacus.tests.per_sample import VIEWS, assert_close, check


def before(layer: nn.Module) -> nn.Module:
    """A trainable layer in front, so that the norm's own backward is used and a layer without affine map trains something."""
    first = nn.Conv2d(4, 4, 1) if not isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) else nn.Linear(6, 6)
    return nn.Sequential(first, uneven(layer))


def uneven(layer: nn.Module) -> nn.Module:
    for p in layer.parameters():
        nn.init.normal_(p, 1.0)
    return layer


CASES = {
    "layer": lambda: nn.LayerNorm(6),
    "layer, two dims": lambda: nn.LayerNorm((5, 6)),
    "layer, all dims": lambda: nn.LayerNorm((4, 5, 6), eps=0.1),
    "layer, no bias": lambda: nn.LayerNorm(6, bias=False),
    "layer, not affine": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(6),
    "rms, two dims": lambda: nn.RMSNorm((5, 6), eps=0.1),
    "rms, not affine": lambda: nn.RMSNorm(6, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 4),
    "group, one": lambda: nn.GroupNorm(1, 4, eps=0.1),
    "group, not affine": lambda: nn.GroupNorm(2, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance, not affine": lambda: nn.InstanceNorm2d(4),
}
FROZEN_HALVES = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
}


def skip_empty_instance_norm(case: str, view: str) -> None:
    if case.startswith("instance") and view == "empty":
        pytest.skip("torch's own InstanceNorm with an affine map takes no empty batch")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
def test_norm_layer_is_exact(case, view):
    skip_empty_instance_norm(case, view)
    check(lambda: before(CASES[case]()), torch.randn(3, 4, 5, 6), view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("case", FROZEN_HALVES)
def test_either_half_of_the_affine_map_may_be_frozen(case, frozen, view):
    skip_empty_instance_norm(case, view)

    def make() -> nn.Module:
        layer = uneven(FROZEN_HALVES[case]())
        getattr(layer, frozen).requires_grad_(False)
        return layer

    check(make, torch.randn(3, 4, 5, 6), view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    ("case", "make", "shape"),
    [
        ("layer", lambda: nn.LayerNorm(6), (3, 6)),
        ("rms", lambda: nn.RMSNorm(6), (3, 6)),
        ("group", lambda: nn.GroupNorm(2, 6), (3, 6)),
        ("group", lambda: nn.GroupNorm(2, 6), (3, 6, 5)),
        ("group", lambda: nn.GroupNorm(2, 6), (3, 6, 2, 2, 3)),
        ("instance", lambda: nn.InstanceNorm1d(6, affine=True), (3, 6, 5)),
        ("instance", lambda: nn.InstanceNorm3d(6, affine=True), (3, 6, 2, 2, 3)),
    ],
)
def test_norm_layers_take_inputs_of_any_rank(case, make, shape, view):
    skip_empty_instance_norm(case, view)
    check(lambda: uneven(make()), torch.randn(shape), view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm1d])
def test_group_and_instance_norm_are_batch_first_in_a_model_that_is_not(kind, view):
    skip_empty_instance_norm("instance" if kind is nn.InstanceNorm1d else "group", view)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = uneven(kind(2, 4) if kind is nn.GroupNorm else kind(4, affine=True))

        def forward(self, x_TBC: Tensor) -> Tensor:
            return self.norm(x_TBC.permute(1, 2, 0)).permute(2, 0, 1)

    check(Model, torch.randn(5, 4, 4), view=view, batch_dim=1, n=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_without_eps_uses_the_one_that_torch_takes(dtype):
    """Which one that is depends on dtype and version, and matters for inputs near its square root."""
    layer = nn.RMSNorm(4).to(dtype)
    for size in (1e-4, 3e-4, 0.1):
        x = (torch.tensor([[1.0, -2.0, 0.5, 1.5], [0.1, 0.2, -0.3, 0.4]]) * size).to(dtype)
        want = torch.stack([torch.autograd.grad(layer(x[i]).sum(), layer.weight)[0] for i in range(2)])
        model = GradSampleModule(layer, loss_reduction="sum")
        model(x).sum().backward()
        found = {"weight": layer.weight.grad_sample}
        assert_close(found, {"weight": want.double()}, 1e-6 if dtype == torch.float32 else 1e-2)
        model.to_standard_module().zero_grad()


def test_instance_norm_in_eval_uses_its_running_statistics():
    layer = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).double().eval()
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    with pytest.raises(NotImplementedError, match="running_mean"):
        GradSampleModule(layer)
    check_running(layer)


def check_running(layer: nn.Module) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    loops = [
        torch.autograd.grad(layer(x[i : i + 1]).tanh().sum(), [layer.weight, layer.bias]) for i in range(3)
    ]
    GradSampleModule(layer, strict=False, loss_reduction="sum")(x).tanh().sum().backward()
    found = {"weight": layer.weight.grad_sample, "bias": layer.bias.grad_sample}
    assert_close(found, {name: torch.stack([g[k] for g in loops]) for k, name in enumerate(found)}, 1e-10)


@pytest.mark.parametrize(
    ("function", "layer", "shape"),
    [
        (compute_layer_norm_grad_sample, nn.LayerNorm(4), (3, 5, 4)),
        (compute_rms_norm_grad_sample, nn.RMSNorm(4), (3, 5, 4)),
        (compute_group_norm_grad_sample, nn.GroupNorm(2, 4), (3, 4, 5)),
        (compute_instance_norm_grad_sample, nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    ],
)
def test_the_recorded_functions_agree_with_the_loop(function, layer, shape):
    layer.double()
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    names = dict(layer.named_parameters())
    loops = [torch.autograd.grad((layer(x[i : i + 1]) * g[i]).sum(), list(names.values())) for i in range(3)]
    found = function(layer, [x], g)
    want = {name: torch.stack([grads[k] for grads in loops]) for k, name in enumerate(names)}
    assert_close({name: found[p] for name, p in names.items()}, want, 1e-10)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm((3, 4)), (3, 4)),
        (nn.RMSNorm(4), (4,)),
        (nn.InstanceNorm1d(4, affine=True), (4, 5)),
    ],
)
def test_one_sample_without_a_batch_dimension_is_refused(layer, shape):
    with pytest.raises(PerSampleGradientError, match=type(layer).__name__):
        GradSampleModule(layer)(torch.randn(shape)).sum().backward()
