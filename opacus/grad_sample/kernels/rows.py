"""Norms and weighted sums of per-sample gradients that were formed: many layers in one launch, each number read once.

Shapes: L layers, B samples, N numbers of a sample, S stretches of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels.support import addresses, aligned, parts, tl, triton

__all__ = ["row_sq_norms", "weighted_rows"]

_PROGRAMS = 512  # enough to fill a GPU
_BLOCK = 4096


def row_sq_norms(rows_BN: Sequence[Tensor]) -> Tensor:
    """Squared norm of each row of L matrices: `[L, B]`.

    Args:
        rows_BN: float32, all of one shape, on one device, as `fused` asks.
    """
    batch, width = rows_BN[0].shape
    layers = len(rows_BN)
    stretches = max(1, min(parts(width, _BLOCK), _PROGRAMS // (layers * batch)))
    length = parts(parts(width, stretches), _BLOCK) * _BLOCK
    stretches = parts(width, length)
    out_SLB = torch.empty(stretches, layers, batch, device=rows_BN[0].device)
    with torch.cuda.device_of(rows_BN[0]):
        _sq_norms[(stretches, batch, layers)](
            addresses(rows_BN),
            out_SLB,
            width,
            length,
            ALIGNED=width % 4 == 0 and aligned(rows_BN),
            BLOCK=_BLOCK,
        )
    return out_SLB.sum(0) if stretches > 1 else out_SLB[0]


def weighted_rows(rows_BN: Sequence[Tensor], factor_B: Tensor) -> Tensor:
    """`sum_i factor_i * row_i` of L matrices: `[L, N]`. A row with factor zero is left out, whatever it holds.

    Args:
        rows_BN: as in `row_sq_norms`. factor_B: `[B]`, float32.
    """
    batch, width = rows_BN[0].shape
    out_LN = torch.empty(len(rows_BN), width, device=rows_BN[0].device)
    block = _BLOCK // 4
    with torch.cuda.device_of(rows_BN[0]):
        _weighted[(parts(width, block), len(rows_BN))](
            addresses(rows_BN),
            factor_B.contiguous(),
            out_LN,
            batch,
            width,
            ALIGNED=width % 4 == 0 and aligned(rows_BN),
            BLOCK=block,
        )
    return out_LN


if triton is not None:

    @triton.jit
    def _sq_norms(table, out, width, length, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
        stretch, sample, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        x = tl.load(table + layer).to(tl.pointer_type(tl.float32)) + sample.to(tl.int64) * width
        if ALIGNED:
            tl.multiple_of(x, 16)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        begin = stretch * length
        for start in range(begin, tl.minimum(begin + length, width), BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < width, other=0.0)
            total += value * value
        row = (stretch * tl.num_programs(2) + layer) * tl.num_programs(1) + sample
        tl.store(out + row, tl.sum(total))

    @triton.jit
    def _weighted(table, factor, out, batch, width, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
        layer = tl.program_id(1)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(table + layer).to(tl.pointer_type(tl.float32)) + at
        if ALIGNED:
            tl.multiple_of(x, 16)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for sample in range(0, batch):
            by = tl.load(factor + sample)
            value = tl.load(x + tl.cast(sample, tl.int64) * width, mask=at < width, other=0.0)
            total += tl.where(by == 0.0, 0.0, value * by)
        tl.store(out + layer.to(tl.int64) * width + at, total, mask=at < width)
