"""The two masks of attention, as one tensor of floats to add to the scores.

Shapes: B samples, N heads, T queries, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["merged_mask"]


def merged_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    num_heads: int,
    query: Tensor,
    keys: int,
    keys_and_appended: int,
) -> Tensor | None:
    """Add up both masks.

    Args:
        attn_mask: `[T, S]` or `[B * N, T, S]`; bool (True: leave out) or floats to add.
        key_padding_mask: `[B, S]`, of the same two kinds.
        num_heads: N.
        query: `[B, N, T, H]`; gives shape, dtype and device.
        keys: S.
        keys_and_appended: S plus keys appended to every sequence, which nothing masks.

    Returns:
        What to add to the scores, broadcastable to `[B, N, T, keys_and_appended]`; None without masks.

    Raises:
        ValueError: a mask of the wrong shape or dtype.
    """
    samples, steps = query.shape[0], query.shape[2]
    parts = []
    if attn_mask is not None:
        mask = _additive("attn_mask", attn_mask, query)
        if mask.shape == (steps, keys):
            parts.append(mask)
        elif mask.shape == (samples * num_heads, steps, keys):
            parts.append(mask.unflatten(0, (samples, num_heads)))
        else:
            raise ValueError(
                f"attn_mask has shape {tuple(mask.shape)}, expected {(steps, keys)} "
                f"or {(samples * num_heads, steps, keys)}"
            )
    if key_padding_mask is not None:
        mask = _additive("key_padding_mask", key_padding_mask, query)
        if mask.shape != (samples, keys):
            raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}, expected {(samples, keys)}")
        parts.append(mask[:, None, None, :])
    if not parts:
        return None
    return functional.pad(sum(parts[1:], parts[0]), (0, keys_and_appended - keys))


def _additive(name: str, mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}: masks are bool or floating point")
    return mask.to(query.dtype)
