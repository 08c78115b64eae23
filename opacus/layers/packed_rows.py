"""Packed sequences as rows in the batch's own order.

A `PackedSequence` stores samples sorted by length. Every other layer of the model sees them in the order of
the batch, and per-sample norms add up layers row by row: a recurrent layer that worked in sorted order would
mix samples. So packed input is padded in the batch's order, and steps that a sample does not have are masked.

Shapes: B samples, T steps, D features, N packed elements (the sum of all lengths).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["apply_permutation", "pack_rows", "steps_taken", "unpack_rows"]


def apply_permutation(tensor: Tensor, dim: int, permutation: Tensor | None) -> Tensor:
    """Reorder `tensor` along `dim`; `None` leaves it as it is.

    Example:
        >>> apply_permutation(torch.tensor([[1, 2, 3]]), 1, torch.tensor([2, 0, 1]))
        tensor([[3, 1, 2]])
    """
    return tensor if permutation is None else tensor.index_select(dim, permutation)


def steps_taken(batch_sizes: Tensor) -> Tensor:
    """Which rows, sorted by length, have a step t.

    Args:
        batch_sizes: rows that have a step t, `[T]`, not increasing, on the CPU (as in a `PackedSequence`).

    Returns:
        `[T, B]` bool, on the CPU.

    Example:
        >>> steps_taken(torch.tensor([2, 1])).tolist()
        [[True, True], [True, False]]
    """
    return torch.arange(int(batch_sizes[0])) < batch_sizes.unsqueeze(1)


def unpack_rows(packed: PackedSequence) -> tuple[Tensor, Tensor | None]:
    """Pad packed sequences with zeros, samples in the order they had before packing.

    Returns:
        The sequences `[B, T, D]`, and which steps each takes `[T, B]`: None where all lengths are equal.
    """
    taken_TB = steps_taken(packed.batch_sizes)
    padded = packed.data.new_zeros(taken_TB.numel(), *packed.data.shape[1:])
    padded = padded.index_copy(0, _positions(taken_TB, packed.data.device), packed.data)
    x_BTD = apply_permutation(padded.unflatten(0, taken_TB.shape), 1, packed.unsorted_indices).transpose(0, 1)
    if bool(taken_TB.all()):  # a CPU tensor: nothing waits for the device
        return x_BTD, None
    return x_BTD, apply_permutation(taken_TB.to(x_BTD.device), 1, packed.unsorted_indices)


def pack_rows(x_BTD: Tensor, like: PackedSequence) -> PackedSequence:
    """Pack `[B, T, D]`, samples in the order they had before packing, exactly as `like` is packed."""
    x_TBD = apply_permutation(x_BTD.transpose(0, 1), 1, like.sorted_indices)
    data_ND = x_TBD.flatten(0, 1).index_select(0, _positions(steps_taken(like.batch_sizes), x_BTD.device))
    return PackedSequence(data_ND, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _positions(taken_TB: Tensor, device: torch.device) -> Tensor:
    return taken_TB.flatten().nonzero().squeeze(1).to(device)
