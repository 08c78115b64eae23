"""Activations and backprops made ready for their product: one of them times the clip factors, samples left out made zero.

Shapes: L layers, B samples, N, M numbers of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels.support import addresses, aligned, language_type, parts, tl, triton

__all__ = ["scale_pairs"]


def scale_pairs(scaled: Sequence[Tensor], whole: Sequence[Tensor], factor_B: Tensor) -> tuple[Tensor, Tensor]:
    """`factor_i * x_i` for L tensors, and L others as they are; both zero where the factor is (infinity times zero is no zero).

    Args:
        scaled: L tensors `[B, ...]` of one shape. whole: likewise; all of one dtype, on one device, as `fused` asks.
        factor_B: `[B]`, float32.

    Returns:
        `(scaled, whole)`, each stacked, `[L, B, ...]`, in the tensors' dtype, rounded once.
    """
    first, other = scaled[0], whole[0]
    outs = tuple(torch.empty(len(scaled), *x.shape, dtype=x.dtype, device=x.device) for x in (first, other))
    n, m = first[0].numel(), other[0].numel()
    block = 4096
    with torch.cuda.device_of(first):
        _scale[(parts(n, block) + parts(m, block), first.shape[0], len(scaled))](
            addresses(scaled, whole),
            factor_B.contiguous(),
            *outs,
            n,
            m,
            TYPE=language_type(first.dtype),
            ALIGNED=n % 16 == 0 and m % 16 == 0 and aligned(scaled, whole),
            BLOCK=block,
        )
    return outs[0], outs[1]


if triton is not None:

    @triton.jit
    def _copy(x, out, by, at, n, ALIGNED: tl.constexpr):
        where = x + at
        if ALIGNED:
            tl.multiple_of(where, 16)
        value = tl.load(where, mask=at < n, other=0.0).to(tl.float32)
        value = tl.where(by == 0.0, 0.0, value * by)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)

    @triton.jit
    def _scale(
        table,
        factor,
        out_scaled,
        out_whole,
        n,
        m,
        TYPE: tl.constexpr,
        ALIGNED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        block, sample, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        layers = tl.num_programs(2)
        row = (layer * tl.num_programs(1) + sample).to(tl.int64)
        by = tl.load(factor + sample)
        blocks = tl.cdiv(n, BLOCK)
        if block < blocks:
            x = tl.load(table + layer).to(tl.pointer_type(TYPE)) + sample.to(tl.int64) * n
            _copy(x, out_scaled + row * n, by, block * BLOCK + tl.arange(0, BLOCK), n, ALIGNED)
        else:
            x = tl.load(table + layers + layer).to(tl.pointer_type(TYPE)) + sample.to(tl.int64) * m
            at = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
            _copy(x, out_whole + row * m, tl.where(by == 0.0, 0.0, 1.0), at, m, ALIGNED)
