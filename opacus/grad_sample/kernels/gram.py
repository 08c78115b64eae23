"""Squared norms of `sum_t g_t a_t^T` from Gram matrices that never reach memory: `<a a^T, g g^T>`.

Both matrices are symmetric: tiles on and below the diagonal are computed, those below counted twice.

Shapes: L layers, B samples, T positions, D in, P out, N tiles of the lower triangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels.support import (
    addresses,
    aligned,
    language_type,
    parts,
    power_of_two,
    tl,
    triton,
)

__all__ = ["gram_norms"]


def gram_norms(a_BTD: Sequence[Tensor], g_BTP: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Squared norms of L layers' per-sample gradients, and the sizes of the terms that were added.

    Args:
        a_BTD, g_BTP: L activations, all of one shape, and L backprops likewise; all of one dtype, on one device, as `fused`
            asks. float32 is multiplied in TF32.

    Returns:
        `(sq_norm_LB, size_LB)`, float32: the squared norms up to rounding, and `sum_t |a_t| |g_t|`.
    """
    batch, positions, d_in = a_BTD[0].shape
    p_out, dtype, device = g_BTP[0].shape[-1], a_BTD[0].dtype, a_BTD[0].device
    block = max(16, min(128, power_of_two(positions)))
    tiles = parts(positions, block)
    tiles = tiles * (tiles + 1) // 2
    sq_norm_LBN = torch.empty(2, len(a_BTD), batch, tiles, device=device)
    half = dtype != torch.float32
    with torch.cuda.device_of(a_BTD[0]):
        _gram[(tiles, batch, len(a_BTD))](
            addresses(a_BTD, g_BTP),
            sq_norm_LBN,
            positions,
            d_in,
            p_out,
            TYPE=language_type(dtype),
            ALIGNED=d_in % 16 == 0 and p_out % 16 == 0 and aligned(a_BTD, g_BTP),
            BLOCK=block,
            BLOCK_K=64 if half else 32,
            num_warps=8 if block == 128 else 4,
            num_stages=3,
        )
    sq_norm_LB, size_LB = sq_norm_LBN.sum(3).unbind()
    return sq_norm_LB, size_LB


if triton is not None:

    @triton.jit
    def _tile(
        x, left, right, positions, width, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
    ):
        k = tl.arange(0, BLOCK_K)
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        of_left = x + left[:, None].to(tl.int64) * width + k[None, :]
        of_right = x + right[None, :].to(tl.int64) * width + k[:, None]
        if ALIGNED:
            tl.multiple_of(of_left, [16, 16])
            tl.multiple_of(of_right, [16, 16])
        for start in range(0, width, BLOCK_K):
            inside = start + k < width
            one = tl.load(of_left, mask=(left < positions)[:, None] & inside[None, :], other=0.0)
            other = tl.load(of_right, mask=(right < positions)[None, :] & inside[:, None], other=0.0)
            total = tl.dot(one, other, total, input_precision="tf32")
            of_left += BLOCK_K
            of_right += BLOCK_K
        return total

    @triton.jit
    def _gram(
        table,
        out,
        positions,
        d_in,
        p_out,
        TYPE: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        tile, sample, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        tiles, batch, layers = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
        # row and column of the tile: tile = row (row + 1) / 2 + column, column <= row
        row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
        row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
        column = tile - row * (row + 1) // 2
        left = row * BLOCK + tl.arange(0, BLOCK)
        right = column * BLOCK + tl.arange(0, BLOCK)
        first = sample.to(tl.int64) * positions
        a = tl.load(table + layer).to(tl.pointer_type(TYPE)) + first * d_in
        g = tl.load(table + layers + layer).to(tl.pointer_type(TYPE)) + first * p_out
        aa = _tile(a, left, right, positions, d_in, ALIGNED, BLOCK, BLOCK_K)
        gg = _tile(g, left, right, positions, p_out, ALIGNED, BLOCK, BLOCK_K)
        both = aa * gg
        at = (layer * batch + sample) * tiles + tile
        tl.store(out + at, tl.sum(both) * tl.where(row == column, 1.0, 2.0))
        diagonal = (left[:, None] == right[None, :]) & (row == column)
        terms = tl.where(diagonal, tl.sqrt(tl.maximum(both, 0.0)), 0.0)
        tl.store(out + layers * batch * tiles + at, tl.sum(terms))
