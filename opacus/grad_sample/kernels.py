"""Fused GPU kernels (Triton), each beside the plain torch code that gives the same numbers and that every other device runs.

They pay where plain code reads and writes the same tensor several times: per-sample gradients of normalisation layers,
and backprops scaled by clip factors. Accumulation is in float32.

Shapes: R rows, T positions, D normalised elements, B samples, N numbers of a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

__all__ = ["fused", "norm_rows", "scale_rows"]


def fused(*tensors: Tensor) -> bool:
    """Whether the kernels take `tensors`: floating-point and contiguous, on a CUDA device, with Triton there."""
    return triton is not None and all(
        t.is_cuda
        and t.is_contiguous()
        and t.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and t.numel() > 0
        for t in tensors
    )


def norm_rows(x_RTD: Tensor, g_RTD: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """`(sum_t x_hat_t * g_t, sum_t g_t)`, both `[R, D]` float32, with x_hat the normalised input.

    Args:
        x_RTD: inputs. g_RTD: backprops; both as `fused` asks.
        eps: added to the variance (or mean square).
        centred: subtract the mean (LayerNorm) or not (RMSNorm).
    """
    rows, positions, width = x_RTD.shape
    mean_RT = torch.empty(rows, positions, device=x_RTD.device, dtype=torch.float32)
    rstd_RT = torch.empty_like(mean_RT)
    weight_RD = torch.empty(rows, width, device=x_RTD.device, dtype=torch.float32)
    bias_RD = torch.empty_like(weight_RD)
    with torch.cuda.device_of(x_RTD):
        _moments[(rows * positions,)](
            x_RTD, mean_RT, rstd_RT, width, eps, CENTRED=centred, BLOCK=triton.next_power_of_2(width)
        )
        block = 64
        _affine[(rows, triton.cdiv(width, block))](
            x_RTD, g_RTD, mean_RT, rstd_RT, weight_RD, bias_RD, positions, width, BLOCK_T=32, BLOCK_D=block
        )
    return weight_RD, bias_RD


def scale_rows(x: Tensor, factor_B: Tensor) -> Tensor:
    """`factor_i * x_i` in `x`'s dtype, zero where the factor is (zero times infinity is no zero).

    Args:
        x: `[B, ...]`, as `fused` asks. factor_B: `[B]`, float32.
    """
    out = torch.empty_like(x)
    n = x[0].numel()
    with torch.cuda.device_of(x):
        _scale[(x.shape[0], triton.cdiv(n, 4096))](x, factor_B.contiguous(), out, n, BLOCK=4096)
    return out


if triton is not None:

    @triton.jit
    def _moments(x, mean, rstd, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < width
        value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
        centre = 0.0
        if CENTRED:
            centre = tl.sum(value) / width
            value = tl.where(inside, value - centre, 0.0)
        variance = tl.sum(value * value) / width
        tl.store(mean + row, centre)
        tl.store(rstd + row, 1.0 / tl.sqrt(variance + eps))

    @triton.jit
    def _affine(
        x,
        g,
        mean,
        rstd,
        weight,
        bias,
        positions,
        width,
        BLOCK_T: tl.constexpr,
        BLOCK_D: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = column < width
        of_weight = tl.zeros((BLOCK_D,), dtype=tl.float32)
        of_bias = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for start in range(0, positions, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            there = t < positions
            line = row * positions + t
            at = line[:, None] * width + column[None, :]
            mask = there[:, None] & inside[None, :]
            centre = tl.load(mean + line, mask=there, other=0.0)
            scale = tl.load(rstd + line, mask=there, other=0.0)
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            back = tl.load(g + at, mask=mask, other=0.0).to(tl.float32)
            of_weight += tl.sum((value - centre[:, None]) * scale[:, None] * back, axis=0)
            of_bias += tl.sum(back, axis=0)
        tl.store(weight + row * width + column, of_weight, mask=inside)
        tl.store(bias + row * width + column, of_bias, mask=inside)

    @triton.jit
    def _scale(x, factor, out, n, BLOCK: tl.constexpr):
        sample = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        by = tl.load(factor + sample)
        value = tl.load(x + sample * n + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(by == 0.0, 0.0, value * by)
        tl.store(out + sample * n + at, value.to(out.dtype.element_ty), mask=inside)
