"""Convolutions and their transposes: every way to stride, dilate, group and pad."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.conv import compute_conv_grad_sample, convolution2d_backward_as_a_convolution
from opacus.tests.per_sample import VIEWS, assert_close, check

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

SHAPES = [
    {},
    {"stride": 2},
    {"dilation": 2},
    {"groups": 2},
    {"padding": 1, "stride": 2, "dilation": 2, "groups": 2},
    {"stride": 3, "padding": 2, "bias": False},
    {"padding": "same"},
    {"padding": "same", "kernel_size": 2},
    {"padding": "same", "kernel_size": 2, "dilation": 3, "groups": 4},
    {"padding": "valid", "kernel_size": 2, "stride": 2},
    {"kernel_size": 1},
]
PADDED = [
    {"padding_mode": mode, "padding": padding, "kernel_size": kernel}
    for mode, (padding, kernel) in itertools.product(
        ["reflect", "replicate", "circular"], [(1, 3), (2, 3), ("same", 3), ("same", 2)]
    )
]
# strides that leave positions at the end which no output saw; output_padding below stride or dilation
TRANSPOSES = [
    {},
    {"stride": 2},
    {"stride": 3, "output_padding": 2},
    {"dilation": 3, "output_padding": 2, "padding": 1},
    {"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2, "groups": 2, "bias": False},
    {"stride": 2, "kernel_size": 1, "output_padding": 1},
]


def image(dims: int, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 4, *(7, 6, 5)[:dims])


def name_of(options: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items()) or "plain"


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("options", SHAPES + PADDED, ids=name_of)
def test_convolution_is_exact_in_two_dimensions(options, view):
    check(lambda: nn.Conv2d(4, 8, **{"kernel_size": 3, **options}), image(2), view=view)


@pytest.mark.parametrize("view", ["float64", "policy"])
@pytest.mark.parametrize("options", SHAPES + PADDED, ids=name_of)
@pytest.mark.parametrize("dims", [1, 3])
def test_convolution_is_exact_in_one_and_three_dimensions(dims, options, view):
    check(lambda: CONV[dims](4, 8, **{"kernel_size": 3, **options}), image(dims), view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("options", TRANSPOSES, ids=name_of)
@pytest.mark.parametrize("dims", TRANSPOSED)
def test_transposed_convolution_is_exact(dims, options, view):
    check(lambda: TRANSPOSED[dims](4, 6, **{"kernel_size": 3, **options}), image(dims), view=view)


@pytest.mark.parametrize("view", VIEWS)
def test_every_dimension_has_numbers_of_its_own(view):
    options = {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (1, 3)}
    check(lambda: nn.Conv2d(4, 4, **options), image(2), view=view)
    check(lambda: nn.ConvTranspose2d(4, 4, **options, output_padding=(0, 1)), image(2), view=view)


class AskedForASize(nn.ConvTranspose2d):
    """`output_size` is an argument of the call."""

    def forward(self, x):
        return super().forward(x, output_size=[x.shape[2] * 2, x.shape[3] * 2])


@pytest.mark.parametrize("view", VIEWS)
def test_a_transposed_convolution_can_be_asked_for_an_output_size(view):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1)

        def forward(self, x):
            return self.up(x, output_size=[x.shape[2] * 2, x.shape[3] * 2])

    check(Model, image(2), view=view)
    check(lambda: AskedForASize(4, 2, 3, stride=2, padding=1), image(2), view=view)


@pytest.mark.parametrize("view", VIEWS)
def test_channels_last_images(view):
    check(lambda: nn.Conv2d(4, 8, 3, padding=1), image(2).to(memory_format=torch.channels_last), view=view)


@pytest.mark.parametrize("channels", [3, 4], ids=["B = channels", "B < channels"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_convolution_is_batch_first_in_a_model_that_is_not(view, channels):
    """Its batch is dimension 0 by torch's own rule, also where B happens to equal the number of channels."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(channels, channels, 3, padding=1)
            self.head = nn.Linear(channels, 2)

        def forward(self, x_TBC):
            h_BCT = self.conv(x_TBC.permute(1, 2, 0))
            return self.head(h_BCT.permute(2, 0, 1))

    check(Model, torch.randn(5, 3, channels), view=view, batch_dim=1, n=3)


def test_the_recorded_functions_agree_with_the_loop():
    layer = nn.Conv2d(4, 6, 3, padding=1).double()
    x, g = image(2).double(), torch.randn(3, 6, 7, 6, dtype=torch.float64)
    names = {"weight": layer.weight, "bias": layer.bias}
    loops = [torch.autograd.grad((layer(x[i : i + 1]) * g[i]).sum(), list(names.values())) for i in range(3)]
    want = {name: torch.stack([grads[k] for grads in loops]) for k, name in enumerate(names)}
    for function in (compute_conv_grad_sample, convolution2d_backward_as_a_convolution):
        found = function(layer, [x], g)
        assert_close({name: found[p] for name, p in names.items()}, want, 1e-10)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_one_image_without_a_batch_dimension_is_refused(kind):
    model = GradSampleModule(kind(4, 4, 3))
    with pytest.raises(PerSampleGradientError, match=kind.__name__):
        model(torch.randn(4, 7, 7)).sum().backward()
