"""Packed sequences (`torch.nn.utils.rnn.PackedSequence`): what their batch sizes say, and random ones for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

__all__ = ["compute_seq_lengths"]


def compute_seq_lengths(batch_sizes: Tensor | Sequence[int]) -> list[int]:
    """Lengths of the sequences of a packed batch, longest first.

    Sequence j is present at step t when more than j sequences are: its length is the number of such t.

    Args:
        batch_sizes: number of sequences still running at each time step, `[T]`, not increasing
            (`PackedSequence.batch_sizes`).

    Returns:
        One length for each sequence, not increasing.

    Example:
        >>> compute_seq_lengths(torch.tensor([4, 3, 3, 2, 1]))
        [5, 4, 3, 1]
    """
    running_T = torch.as_tensor(batch_sizes, device="cpu")
    if running_T.numel() == 0:
        return []
    sequences = torch.arange(int(running_T[0]))
    return (running_T[:, None] > sequences).sum(0).tolist()


def _gen_packed_data(
    minibatch_size: int, max_seq_length: int, input_dim: int, batch_first: bool, sorted_: bool | None = False
) -> PackedSequence:
    """Pack `minibatch_size` standard normal sequences of 1 to `max_seq_length` steps, for tests of recurrent layers.

    Args:
        minibatch_size: number of sequences.
        max_seq_length: largest number of steps.
        input_dim: features of a step.
        batch_first: changes nothing, as a packed sequence has no layout; callers pass what their layer is told.
        sorted_: make the longest sequence first, so that the result has no `sorted_indices`.
    """
    lengths = torch.randint(1, max_seq_length + 1, (minibatch_size,)).tolist()
    if sorted_:
        lengths.sort(reverse=True)
    return pack_sequence([torch.randn(length, input_dim) for length in lengths], enforce_sorted=bool(sorted_))
