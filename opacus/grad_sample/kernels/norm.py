"""Per-sample gradients of normalisation layers: inputs and backprops are read once, nothing of their size is written.

Shapes: R rows, T positions, D normalised elements, S stretches of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opacus.grad_sample.kernels.support import parts, power_of_two, tl, triton

__all__ = ["norm_rows"]

_PROGRAMS = 512  # enough to fill a GPU


def norm_rows(x_RTD: Tensor, g_RTD: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """`(sum_t x_hat_t * g_t, sum_t g_t)`, both `[R, D]` float32, with x_hat the normalised input.

    Args:
        x_RTD: inputs. g_RTD: backprops; both as `fused` asks.
        eps: added to the variance (or mean square).
        centred: subtract the mean (LayerNorm) or not (RMSNorm).
    """
    rows, positions, width = x_RTD.shape
    stretches = max(1, min(positions, _PROGRAMS // rows))
    length = parts(positions, stretches)
    stretches = parts(positions, length)
    out = torch.empty(2, rows, stretches, width, device=x_RTD.device)
    with torch.cuda.device_of(x_RTD):
        block = power_of_two(width)
        _affine[(rows, stretches)](
            x_RTD,
            g_RTD,
            out,
            positions,
            width,
            eps,
            length,
            CENTRED=centred,
            BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )
    weight_RD, bias_RD = (out.sum(2) if stretches > 1 else out[:, :, 0]).unbind()
    return weight_RD, bias_RD


if triton is not None:

    @triton.jit
    def _affine(x, g, out, positions, width, eps, length, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
        row, stretch = tl.program_id(0), tl.program_id(1)
        rows, stretches = tl.num_programs(0), tl.num_programs(1)
        column = tl.arange(0, BLOCK)
        inside = column < width
        of_weight = tl.zeros((BLOCK,), dtype=tl.float32)
        of_bias = tl.zeros((BLOCK,), dtype=tl.float32)
        begin = stretch * length
        end = tl.minimum(begin + length, positions)
        for t in range(begin, end):
            at = (row.to(tl.int64) * positions + t) * width + column
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            back = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
            if CENTRED:
                value = tl.where(inside, value - tl.sum(value) / width, 0.0)
            scale = 1.0 / tl.sqrt(tl.sum(value * value) / width + eps)
            of_weight += value * scale * back
            of_bias += back
        to = (row.to(tl.int64) * stretches + stretch) * width + column
        tl.store(out + to, of_weight, mask=inside)
        tl.store(out + rows.to(tl.int64) * stretches * width + to, of_bias, mask=inside)
