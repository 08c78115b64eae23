"""Fused kernels against float64, on real GPUs; the plain code beside them is tested everywhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from opacus.grad_sample.kernels import fused, norm_rows, scale_rows

pytestmark = pytest.mark.gpu(1)

SHAPES = [(3, 7, 100), (2, 65, 64), (4, 1, 1024), (5, 512, 768)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [True, False])
def test_norm_rows_equal_float64(dtype, shape, centred):
    x = (torch.randn(shape, device="cuda") * 2 + 1).to(dtype)
    g = torch.randn(shape, device="cuda").to(dtype)
    assert fused(x, g)
    weight, bias = norm_rows(x, g, 1e-5, centred=centred)
    normalise = F.layer_norm if centred else F.rms_norm
    x_hat = normalise(x.double(), shape[-1:], eps=1e-5)
    size = math.sqrt(shape[1])
    assert (weight - (x_hat * g.double()).sum(1)).abs().max().item() < 1e-5 * size
    assert (bias - g.double().sum(1)).abs().max().item() < 1e-5 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1, 7, 100), (2, 2, 65, 64), (16, 5000)])
def test_scaled_rows_round_once_and_leave_out_what_has_factor_zero(dtype, shape):
    x = torch.randn(shape, device="cuda").to(dtype)
    x[1] = math.inf
    x[1].view(-1)[0] = math.nan
    factor = torch.rand(shape[0], device="cuda")
    factor[1] = 0
    scaled = scale_rows(x, factor)
    assert scaled.dtype == dtype
    assert torch.equal(scaled[1], torch.zeros_like(scaled[1]))
    expected = (x[0].float() * factor[0]).to(dtype)
    assert torch.equal(scaled[0], expected)


def test_what_the_kernels_do_not_take_falls_back():
    assert not fused(torch.ones(2, 2))
    assert not fused(torch.ones(4, 4, device="cuda").t()[:2])
    assert not fused(torch.ones(2, 2, device="cuda", dtype=torch.float64))
    assert not fused(torch.ones(0, 2, device="cuda"))
