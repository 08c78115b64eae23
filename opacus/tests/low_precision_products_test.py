"""I1 for products in reduced precision: what is clipped by a Gram norm has norm at most C, also where terms cancel."""

from __future__ import annotations

import pytest
import torch

from opacus.grad_sample.kept import KeptLookup, KeptProduct, LookedUp, joint_sq_norm
from opacus.grad_sample.products import product_rounding
from opacus.optimizers.clipping import flat_clip_factor

T, D, P, CLIP = 64, 256, 320, 1.0


def pair(dtype: torch.dtype, cancelling: float, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample whose positions come in pairs of nearly opposite gradients."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(1, 1, T // 2, D, generator=generator).repeat(1, 1, 2, 1)
    g = torch.randn(1, 1, T // 2, P, generator=generator)
    g = torch.cat([g, -g], 2)
    a = a + cancelling * torch.randn(a.shape, generator=generator)
    g = g + cancelling * torch.randn(g.shape, generator=generator)
    return a.to(device, dtype), g.to(device, dtype)


def clipped_norm(a: torch.Tensor, g: torch.Tensor) -> float:
    kept = KeptProduct(lambda: (a, g), torch.Size([P, D]))
    factor = flat_clip_factor(kept.sq_norm().sqrt(), CLIP)
    return kept.clipped(factor).double().norm().item()


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cancelling", [1.0, 1e-1, 1e-2, 1e-3, 0.0])
def test_a_clipped_product_never_exceeds_c(precision, device, dtype, cancelling):
    for seed in range(4):
        assert clipped_norm(*pair(dtype, cancelling, device, seed)) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cancelling", [1.0, 1e-2, 0.0])
def test_a_tied_table_never_exceeds_c(precision, device, dtype, cancelling):
    """The head's gradient is made to cancel the embedding's: row v of the table is looked up and multiplied with."""
    a, g = pair(dtype, 1.0, device, 0)
    product = KeptProduct(lambda: (a, g), torch.Size([P, D]))
    wanted = product.instantiated()[0].double()
    ids = torch.arange(P, device=device)
    noise = cancelling * torch.randn(P, D, generator=torch.Generator().manual_seed(1)).to(device)
    looked = LookedUp(ids, torch.zeros_like(ids), (-wanted.float() + noise), rectangular=True)
    lookup = KeptLookup(looked, 1, torch.Size([P, D]))
    factor = flat_clip_factor(joint_sq_norm([lookup, product]).sqrt(), CLIP)
    total = lookup.clipped(factor).double() + product.clipped(factor).double()
    assert total.norm().item() <= CLIP * (1 + 1e-5)


def test_room_is_asked_for_only_where_products_are_reduced():
    a, g = torch.ones(2, 2), torch.ones(2, 2)
    assert product_rounding(a, g) == 0.0
    assert product_rounding(a.bfloat16(), g.bfloat16()) == 0.0  # cast to float32 on the CPU
    assert product_rounding(a.double(), g.double()) == 0.0
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert product_rounding(a, g) > 0.0
    finally:
        torch.set_float32_matmul_precision(before)
