"""Norms of wide rows, within the rounding that clip factors leave room for.

`torch.linalg.vector_norm` adds a row's squares one after the other on CPUs: of 5 million float32 numbers its result was off by
3 * 10^-4, a thousand times what `flat_clip_factor` allows for. Short blocks, whose norms are joined in float64, err by less than
one unit in the last place. GPUs add in trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_rows", "row_norms", "wide_dtype"]

_BLOCK = 256


def as_rows(tensor: Tensor) -> Tensor:
    """`[B, ...]` as a matrix `[B, elements]` (a scalar parameter has one element)."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def row_norms(rows_BN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """L2 norm of each row.

    Args:
        rows_BN: `[B, N]`.
        dtype: of the result, which squares are added in; that of the rows by default.

    Returns:
        `[B]`.

    Example:
        >>> row_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
        tensor([5., 2.])
    """
    dtype = rows_BN.dtype if dtype is None else dtype
    if rows_BN.device.type != "cpu" or rows_BN.shape[1] <= _BLOCK or dtype == torch.float64:
        return torch.linalg.vector_norm(rows_BN, dim=1, dtype=dtype)
    whole = rows_BN.shape[1] // _BLOCK * _BLOCK
    blocks_BK = torch.linalg.vector_norm(
        rows_BN[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2, dtype=dtype
    ).double()
    if whole < rows_BN.shape[1]:
        rest_B1 = torch.linalg.vector_norm(rows_BN[:, whole:], dim=1, keepdim=True, dtype=dtype)
        blocks_BK = torch.cat([blocks_BK, rest_B1.double()], 1)
    return torch.linalg.vector_norm(blocks_BK, dim=1).to(dtype)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What many of `tensor`'s numbers are added in: float64 where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64
