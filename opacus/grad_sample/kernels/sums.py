"""Sums over positions: per-sample gradients of biases, of many layers in one launch.

Shapes: L layers, B samples, T positions, P out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels.support import addresses, aligned, language_type, parts, tl, triton

__all__ = ["position_sums"]


def position_sums(g_BTP: Sequence[Tensor]) -> Tensor:
    """`sum_t g_t` of L tensors: `[L, B, P]`, float32.

    Args:
        g_BTP: all of one shape and dtype, on one device, as `fused` asks.
    """
    batch, positions, width = g_BTP[0].shape
    out_LBP = torch.empty(len(g_BTP), batch, width, device=g_BTP[0].device)
    with torch.cuda.device_of(g_BTP[0]):
        _sum[(parts(width, 64), batch, len(g_BTP))](
            addresses(g_BTP),
            out_LBP,
            positions,
            width,
            TYPE=language_type(g_BTP[0].dtype),
            ALIGNED=width % 16 == 0 and aligned(g_BTP),
            BLOCK_T=64,
            BLOCK_P=64,
        )
    return out_LBP


if triton is not None:

    @triton.jit
    def _sum(
        table,
        out,
        positions,
        width,
        TYPE: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_P: tl.constexpr,
    ):
        sample, layer = tl.program_id(1), tl.program_id(2)
        column = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        t = tl.arange(0, BLOCK_T)
        g = tl.load(table + layer).to(tl.pointer_type(TYPE)) + sample.to(tl.int64) * positions * width
        at = g + t[:, None].to(tl.int64) * width + column[None, :]
        if ALIGNED:
            tl.multiple_of(at, [16, 16])
        total = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
        for start in range(0, positions, BLOCK_T):
            inside = (start + t < positions)[:, None] & (column < width)[None, :]
            total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            at += BLOCK_T * width
        row = (layer * tl.num_programs(1) + sample).to(tl.int64)
        tl.store(out + row * width + column, tl.sum(total, axis=0), mask=column < width)
