"""What the kernels take, and how one launch is told the tensors of several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opacus.grad_sample.kernels.ring import ring_on

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = tl = None

__all__ = ["addresses", "aligned", "fused", "language_type", "parts", "power_of_two", "tl", "triton"]

_MOST_SAMPLES = 2**16 - 1
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LANGUAGE = {} if tl is None else dict(zip(_TYPES, (tl.float32, tl.bfloat16, tl.float16), strict=True))


def fused(*tensors: Tensor) -> bool:
    """Whether the kernels take `tensors`: floating-point and contiguous, on a CUDA device, with Triton there.

    Batch first: samples are numbered along a side of the grid that CUDA limits.
    """
    if triton is None:
        return False
    return all(
        t.is_cuda
        and t.dtype in _TYPES
        and t.is_contiguous()
        and t.numel() > 0
        and t.shape[:1].numel() <= _MOST_SAMPLES
        for t in tensors
    )


def addresses(*lists: Sequence[Tensor]) -> Tensor:
    """Where the tensors lie, `[number of lists, length]`, int64, on their device.

    They must outlive the launch that reads it.
    """
    device = lists[0][0].device
    where = ring_on(device).send([t.data_ptr() for one in lists for t in one])
    return where.view(len(lists), -1)


def aligned(*lists: Sequence[Tensor]) -> bool:
    """Whether all tensors begin at a multiple of 16 bytes, as loads of several numbers at once want it."""
    return all(t.data_ptr() % 16 == 0 for one in lists for t in one)


def parts(n: int, size: int) -> int:
    """How many parts of `size` hold `n` (Triton's own is compiled, and slow to call from Python)."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def language_type(dtype: torch.dtype) -> object:
    """Triton's name of `dtype`."""
    return _LANGUAGE[dtype]
