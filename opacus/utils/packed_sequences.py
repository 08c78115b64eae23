"""Packed sequences (`torch.nn.utils.rnn.PackedSequence`): what their batch sizes say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
