"""Matrix products of per-sample gradients, with fp32 results whatever the inputs' dtype.

Shapes: B samples, K groups, T positions, D in, P out (both per group).

bf16 and fp16 inputs multiply on tensor cores and accumulate in fp32 where the device can (`out_dtype`); elsewhere they are
cast first, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels import fused, gram_norms, scale_pairs

__all__ = [
    "gram_sq_norm",
    "grams_fused",
    "outer",
    "outer_rows",
    "product_rounding",
    "reduces_float32",
    "scaled_product",
    "scaled_products",
]


def _batched(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` over leading dims, at least float32."""
    if left.dtype != right.dtype:
        dtype = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(dtype), right.to(dtype)
    if left.dtype not in (torch.bfloat16, torch.float16):
        return torch.matmul(left, right)
    if left.device.type != "cuda":
        return torch.matmul(left.float(), right.float())
    if left.dim() == 3:  # of every LoRA matrix: views would take as long as the rest
        return torch.bmm(left, right, out_dtype=torch.float32)
    lead = left.shape[:-2]
    product = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
    return product.unflatten(0, lead)


def outer(a_BTD: Tensor, g_BTP: Tensor) -> Tensor:
    """`sum_t g_t a_t^T` for each sample: `[B, P, D]`, at least float32."""
    if a_BTD.dtype == g_BTP.dtype == torch.float32:
        return torch.bmm(g_BTP.transpose(1, 2), a_BTD)
    return _batched(g_BTP.transpose(1, 2), a_BTD)


def outer_rows(a_BKTD: Tensor, g_BKTP: Tensor) -> Tensor:
    """`sum_t g_t a_t^T` for each sample and group: `[B, K, P, D]`, at least float32."""
    return _batched(g_BKTP.transpose(-1, -2), a_BKTD)


def gram_sq_norm(a_BKTD: Tensor, g_BKTP: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm of `sum_t g_t a_t^T` per sample without forming it: `<a a^T, g g^T>` (Goodfellow, 2015).

    Returns:
        `(sq_norm_B, size_B)`, `[B]`, at least float32: the squared norm, up to rounding (which may leave it slightly below
        0), and the size of the terms that were added, `sum_t |a_t| |g_t|` (its root of squares over groups).
    """
    dtype = torch.promote_types(torch.promote_types(a_BKTD.dtype, g_BKTP.dtype), torch.float32)
    if a_BKTD.shape[2] == 1:
        a, g = a_BKTD.to(dtype), g_BKTP.to(dtype)
        sq_norm_B = (a.square().sum(-1) * g.square().sum(-1)).flatten(1).sum(1)
        return sq_norm_B, sq_norm_B.sqrt()
    if grams_fused(a_BKTD, g_BKTP):
        sq_norm_LB, size_LB = gram_norms([a_BKTD[:, 0]], [g_BKTP[:, 0]])
        return sq_norm_LB[0], size_LB[0]
    aa = _batched(a_BKTD, a_BKTD.transpose(-1, -2)).to(dtype)
    gg = _batched(g_BKTP, g_BKTP.transpose(-1, -2)).to(dtype)
    size_BK = (aa.diagonal(dim1=-2, dim2=-1) * gg.diagonal(dim1=-2, dim2=-1)).sqrt().sum(-1)
    return torch.linalg.vecdot(aa.flatten(1), gg.flatten(1)), torch.linalg.vector_norm(size_BK, dim=1)


def grams_fused(a_BKTD: Tensor, g_BKTP: Tensor) -> bool:
    """Whether the fused kernel takes this pair: one group, several positions, a dtype that tensor cores multiply here."""
    return (
        a_BKTD.shape[1] == 1
        and a_BKTD.shape[2] > 1
        and a_BKTD.dtype == g_BKTP.dtype
        and fused(a_BKTD, g_BKTP)
        and (a_BKTD.dtype != torch.float32 or reduces_float32(a_BKTD.device))
    )


def product_rounding(a: Tensor, g: Tensor) -> float:
    """How far norm and clipped sum of a product may lie apart, relative to the size of the terms `sum_t |a_t| |g_t|`.

    Products of numbers with few bits are exact in float32, so a Gram matrix of bf16 activations has the exact norm, and
    one in TF32 has the exact norm of operands rounded to 11 bits (truncated: 2^-10 each, 2^-9 for a pair). The clipped sum
    rounds its operands again: the scaled one of bf16 to 8 bits (2^-8), of fp16 to 11 (2^-11), both of TF32 (2^-9 more).
    """
    dtype = torch.promote_types(a.dtype, g.dtype)
    if dtype == torch.float32:
        return _float32_rounding(a.device)
    if a.device.type != "cuda":  # cast to float32 first
        return _float32_rounding(a.device) if dtype in (torch.bfloat16, torch.float16) else 0.0
    return {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0.0)


def reduces_float32(device: torch.device) -> bool:
    """Whether float32 matrix products on `device` may round their operands (TF32 on GPUs, bf16 on some CPUs)."""
    if torch.get_float32_matmul_precision() != "highest":
        return True
    if device.type != "cuda":
        return False
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set through torch's newer switches, of which this one cannot tell
        return True


def _float32_rounding(device: torch.device) -> float:
    if not reduces_float32(device):
        return 0.0
    # on CPUs "medium" allows bf16 operands: 2^-8 each, twice for a pair, in Gram matrix and clipped sum
    return 1.01 * 2.0**-8 if device.type == "cuda" else 1.01 * 2.0**-6


def scaled_product(a_BKTD: Tensor, g_BKTP: Tensor, factor_B: Tensor) -> Tensor:
    """`sum_i factor_i sum_t g_it a_it^T`: `[K, P, D]`, at least float32.

    The factors scale whichever of the two is smaller. A sample left out (factor 0) is made zero on both sides: infinity
    times zero is no zero.
    """
    k = a_BKTD.shape[1]
    dtype = torch.promote_types(a_BKTD.dtype, g_BKTP.dtype)
    if dtype in (torch.bfloat16, torch.float16) and a_BKTD.device.type != "cuda":
        dtype = torch.float32
    a, g = a_BKTD.to(dtype), g_BKTP.to(dtype)
    smaller_is_a = a.shape[-1] < g.shape[-1]
    if a.dtype == g.dtype and fused(a, g):
        a, g = (x[0] for x in _fused_scaling([a], [g], factor_B))
    else:
        taken_B = (factor_B != 0).to(factor_B.dtype)
        a = _scaled(a, factor_B if smaller_is_a else taken_B)
        g = _scaled(g, taken_B if smaller_is_a else factor_B)
    # [B, K, T, *] -> [K, B T, *]: positions of all samples add up in one product per group
    if k == 1:
        a, g = a.reshape(1, -1, a.shape[-1]), g.reshape(1, -1, g.shape[-1])
    else:
        a, g = a.transpose(0, 1).flatten(1, 2), g.transpose(0, 1).flatten(1, 2)
    return _batched(g.transpose(-1, -2), a)


def scaled_products(pairs: Sequence[tuple[Tensor, Tensor]], factor_B: Tensor) -> Tensor:
    """`scaled_product` of L pairs `(a_B1TD, g_B1TP)` of one shape, which the fused kernels take: `[L, P, D]`."""
    a_LB1TD, g_LB1TP = _fused_scaling([a for a, _ in pairs], [g for _, g in pairs], factor_B)
    return _batched(g_LB1TP.flatten(1, 3).transpose(-1, -2), a_LB1TD.flatten(1, 3))


def _fused_scaling(a: list[Tensor], g: list[Tensor], factor_B: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of L products, stacked: the smaller one scaled."""
    if a[0].shape[-1] < g[0].shape[-1]:
        return scale_pairs(a, g, factor_B)
    g_L, a_L = scale_pairs(g, a, factor_B)
    return a_L, g_L


def _scaled(x_BKTN: Tensor, factor_B: Tensor) -> Tensor:
    """`factor * x`, zero where the factor is (zero times infinity is no zero); one rounding to `x`'s dtype."""
    scale = factor_B.view(-1, 1, 1, 1)
    out = torch.empty_like(x_BKTN)
    torch.mul(x_BKTN, scale.to(torch.promote_types(x_BKTN.dtype, torch.float32)), out=out)
    return out.masked_fill_(scale == 0, 0)
