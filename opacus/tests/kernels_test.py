"""Fused kernels against float64, on real GPUs; the plain code beside them is tested everywhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from opacus.grad_sample.kernels import (
    fused,
    gram_norms,
    norm_rows,
    position_sums,
    row_sq_norms,
    scale_pairs,
    weighted_rows,
)

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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shapes", [((3, 7, 100), (3, 7, 20)), ((2, 65, 64), (2, 65, 7)), ((4, 512, 256), (4, 512, 96))]
)
def test_scaled_pairs_round_once_and_leave_out_what_has_factor_zero(dtype, shapes):
    pairs = [[torch.randn(shape, device="cuda").to(dtype) for _ in range(3)] for shape in shapes]
    for side in pairs:
        side[1][1] = math.inf
        side[1][1].view(-1)[0] = math.nan
    factor = torch.rand(shapes[0][0], device="cuda")
    factor[1] = 0
    scaled, whole = scale_pairs(*pairs, factor)
    taken = (factor != 0).view(-1, 1, 1)
    for i in range(3):
        expected = (pairs[0][i].float() * factor.view(-1, 1, 1)).to(dtype)
        assert torch.equal(scaled[i], torch.where(taken, expected, 0))
        assert torch.equal(whole[i], torch.where(taken, pairs[1][i], 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7, 100), (2, 65, 64), (1, 1, 5), (4, 512, 96)])
def test_position_sums_equal_float64(dtype, shape):
    many = [torch.randn(shape, device="cuda").to(dtype) for _ in range(4)]
    for found, g in zip(position_sums(many), many, strict=True):
        assert (found - g.double().sum(1)).abs().max().item() < 1e-5 * math.sqrt(shape[1])


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 4096), (2, 40001), (1, 3_000_000), (5, 131072)])
def test_norms_and_weighted_sums_of_rows_equal_float64(layers, shape):
    many = [torch.randn(shape, device="cuda") for _ in range(layers)]
    factor = torch.rand(shape[0], device="cuda")
    for found, rows in zip(row_sq_norms(many), many, strict=True):
        expected = rows.double().square().sum(1)
        assert ((found - expected).abs() / expected).max().item() < 1e-5
    for found, rows in zip(weighted_rows(many, factor), many, strict=True):
        expected = factor.double() @ rows.double()
        assert (found - expected).abs().max().item() < 1e-5


def test_rows_with_factor_zero_are_left_out_whatever_they_hold():
    rows = [torch.randn(3, 5000, device="cuda") for _ in range(2)]
    rows[1][1] = math.inf
    rows[1][1, 0] = math.nan
    factor = torch.tensor([0.5, 0.0, 2.0], device="cuda")
    for found, one in zip(weighted_rows(rows, factor), rows, strict=True):
        assert torch.allclose(found, 0.5 * one[0] + 2 * one[2])
    assert row_sq_norms(rows).isfinite().tolist() == [[True] * 3, [True, False, True]]


def test_more_samples_than_a_grid_has_room_for_are_left_to_plain_code():
    rows = torch.ones(2**16, 2, device="cuda")
    assert fused(rows[1:])
    assert not fused(rows)
    assert torch.equal(row_sq_norms([rows[1:]]), torch.full((1, 2**16 - 1), 2.0, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_may_begin_anywhere(dtype):
    """Parts of a flat buffer are contiguous, and begin at no multiple of 16 bytes."""

    def part(*shape: int) -> torch.Tensor:
        return torch.randn(math.prod(shape) + 1, device="cuda").to(dtype)[1:].view(shape)

    a, g, factor = part(2, 64, 32), part(2, 64, 48), torch.rand(2, device="cuda")
    assert fused(a, g)
    assert a.data_ptr() % 16
    apart = [x.clone() for x in (a, g)]
    for found, expected in zip(gram_norms([a], [g]), gram_norms(apart[:1], apart[1:]), strict=True):
        assert torch.allclose(found, expected, rtol=1e-3)
    for found, expected in zip(
        scale_pairs([a], [g], factor), scale_pairs(apart[:1], apart[1:], factor), strict=True
    ):
        assert torch.equal(found, expected)
    assert torch.allclose(position_sums([g]), position_sums(apart[1:]), atol=1e-4)
    if dtype == torch.float32:
        rows, same = a.flatten(1), apart[0].flatten(1)
        assert torch.allclose(row_sq_norms([rows]), row_sq_norms([same]))
        assert torch.allclose(weighted_rows([rows], factor), weighted_rows([same], factor), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("positions", "d_in", "p_out"),
    [(2, 3, 5), (7, 100, 20), (128, 64, 64), (129, 48, 80), (300, 257, 64), (512, 256, 96)],
)
def test_gram_norms_equal_float64_within_the_room_that_is_added(dtype, positions, d_in, p_out):
    a = [torch.randn(3, positions, d_in, device="cuda").to(dtype) for _ in range(4)]
    g = [torch.randn(3, positions, p_out, device="cuda").to(dtype) for _ in range(4)]
    sq_norm_LB, size_LB = gram_norms(a, g)
    rounding = 2.0**-8 if dtype == torch.float32 else 1e-6
    for found, size, x, y in zip(sq_norm_LB, size_LB, a, g, strict=True):
        expected = torch.einsum("btp,btd->bpd", y.double(), x.double()).flatten(1).square().sum(1)
        terms = (x.double().norm(dim=2) * y.double().norm(dim=2)).sum(1)
        assert ((size - terms).abs() / terms).max().item() < max(rounding, 1e-5)
        assert ((found - expected).abs() / terms.square()).max().item() < rounding


def test_gram_norms_of_a_sample_that_is_not_finite_are_not_finite():
    a, g = torch.randn(3, 70, 64, device="cuda"), torch.randn(3, 70, 32, device="cuda")
    a[1, 65, 3] = math.inf
    g[2, 0, 0] = math.nan
    sq_norm, _ = gram_norms([a], [g])
    assert sq_norm[0].isfinite().tolist() == [True, False, False]


def test_what_the_kernels_do_not_take_falls_back():
    assert not fused(torch.ones(2, 2))
    assert not fused(torch.ones(4, 4, device="cuda").t()[:2])
    assert not fused(torch.ones(2, 2, device="cuda", dtype=torch.float64))
    assert not fused(torch.ones(0, 2, device="cuda"))
