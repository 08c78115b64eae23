"""How a trainer's loss reduces over the samples of a batch, and what undoes it without touching the loss.

Trainers divide by numbers that depend on the whole batch (its rows, its label tokens), so that one sample's gradient would
depend on the others. The loss is called as it is, with a token count of 1, and multiplied by one number that makes it
the sum over samples. Where samples' shares are sums over tokens, each is divided by its own number of tokens inside the clipper.

Shapes: n samples, k rows of each, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["IGNORED", "Kind", "LossContract", "first_rows", "label_tokens"]

IGNORED = -100  # the label of positions that take no part in a loss, in Transformers and TRL

Kind = Literal["sum over rows", "mean over rows", "sum over tokens", "mean over tokens"]


@dataclass(frozen=True)
class LossContract:
    """What one call of the trainer's `compute_loss`, told that the batch has 1 token, returns.

    Args:
        kind: the reduction. "sum over tokens" is that of losses which divide by the count they are told.
        rows_per_sample: k; the rows of a batch are all samples' first rows, then all second rows (chosen, then rejected).
        shifts_labels: whether the label at position 0 takes no part.
    """

    kind: Kind
    rows_per_sample: int = 1
    shifts_labels: bool = False

    @property
    def counts_tokens(self) -> bool:
        return self.kind.endswith("tokens")

    def to_sum(self, n_samples: int, batch: Mapping[str, Any]) -> int:
        """What the loss is multiplied by to be the sum over samples (of each one's sum over its tokens)."""
        if self.kind == "mean over rows":
            return n_samples
        return int(self._tokens(n_samples, batch).sum()) if self.kind == "mean over tokens" else 1

    def weights(self, n_samples: int, batch: Mapping[str, Any]) -> Tensor | None:
        """`[n]`: what makes each sample's share its own mean over tokens; None where there is nothing to do.

        A sample without label tokens has no gradient, whatever its weight.
        """
        if not self.counts_tokens:
            return None
        return 1 / self._tokens(n_samples, batch).clamp(min=1).double()

    def to_mean(self, n_samples: int, batch: Mapping[str, Any]) -> float:
        """What turns the sum back into a mean that is readable in a log."""
        return 1 / max(1, int(self._tokens(n_samples, batch).sum()) if self.counts_tokens else n_samples)

    def _tokens(self, n_samples: int, batch: Mapping[str, Any]) -> Tensor:
        tokens_R = label_tokens(batch, self.shifts_labels)
        return tokens_R.view(self.rows_per_sample, n_samples).sum(0)


def label_tokens(batch: Mapping[str, Any], shifts: bool) -> Tensor:
    """Labels of each row that take part in the loss, `[rows]`, int64."""
    labels_RT = batch["labels"]
    return (labels_RT[:, 1:] if shifts else labels_RT).ne(IGNORED).sum(-1)


def first_rows(batch: Mapping[str, Any]) -> int:
    """Number of rows of a collated batch: of its first tensor of two or more dims, else of its first tensor."""
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    for value in tensors:
        if value.dim() > 1:
            return value.shape[0]
    return tensors[0].shape[0] if tensors else 0
