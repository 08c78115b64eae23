"""Batches as users have them (tensors in tuples and mappings), changed one sample at a time.

A tensor belongs to the samples if its batch dimension has one entry for each sample, or one for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.grad_sample.owners import Owners
from opacus.grad_sample.rows import batch_dim

__all__ = ["Samples", "rows_in_order"]


class Samples:
    """The samples of one batch.

    Args:
        batch: tensors in any nesting of tuples, lists and mappings.
        owners: rows to samples.
        batch_first: whether dimension 0 is the batch (else dimension 1 of tensors that have one).
    """

    def __init__(self, batch: Any, owners: Owners, batch_first: bool) -> None:
        self.batch, self.owners, self.batch_first = batch, owners, batch_first
        self.tensors: list[Tensor] = []
        map_tensors(lambda leaf: self.tensors.append(leaf) if self._index(leaf) is not None else None, batch)

    def replaced(self, sample: int, donor: int) -> Any | None:
        """The batch with the data of `donor` in place of `sample`'s; None where they are the same data."""
        if all(torch.equal(self._of(t, sample), self._of(t, donor)) for t in self.tensors):
            return None

        def change(leaf: Tensor) -> Tensor:
            index = self._index(leaf)
            if index is None:
                return leaf
            order = torch.arange(len(index))
            order[index == sample] = order[index == donor]
            return leaf.index_select(self._dim(leaf), order.to(leaf.device))

        return map_tensors(change, self.batch)

    def only(self, samples: Sequence[int]) -> Any:
        """The batch with these samples alone, in this order; the rows of each where the batch's order has them."""

        def change(leaf: Tensor) -> Tensor:
            index = self._index(leaf)
            if index is None:
                return leaf
            return leaf.index_select(self._dim(leaf), rows_in_order(index, samples).to(leaf.device))

        return map_tensors(change, self.batch)

    def spread_out(self, count: int) -> list[int]:
        """Up to `count` samples of different lengths, from the shortest to the longest.

        Length is how many entries of integer and boolean tensors are neither 0 nor -100 (padding, ignored labels).
        """
        n = self.owners.n_samples
        lengths = torch.zeros(n, dtype=torch.long)
        for t in self.tensors:
            if not t.is_floating_point() and not t.is_complex():
                counted = (
                    ((t != 0) & (t != -100)).transpose(0, self._dim(t)).flatten(1) if t.dim() > 1 else t != 0
                )
                per_entry = counted.sum(1) if counted.dim() > 1 else counted.long()
                lengths.index_add_(0, self._index(t), per_entry.cpu())  # type: ignore[arg-type]
        order = lengths.argsort(stable=True).tolist()
        count = min(count, n)
        return [order[round(j * (n - 1) / max(1, count - 1))] for j in range(count)]

    def _of(self, leaf: Tensor, sample: int) -> Tensor:
        index = self._index(leaf)
        assert index is not None
        return leaf.index_select(self._dim(leaf), (index == sample).nonzero().squeeze(1).to(leaf.device))

    def _index(self, leaf: Tensor) -> Tensor | None:
        """The sample of each entry along the batch dimension, on the CPU; None for a tensor that all samples share."""
        size = leaf.shape[self._dim(leaf)] if leaf.dim() else -1
        if size == self.owners.n_rows:
            return self.owners.index_on(torch.device("cpu"))
        return torch.arange(size) if size == self.owners.n_samples else None

    def _dim(self, leaf: Tensor) -> int:
        sizes = frozenset({self.owners.n_rows, self.owners.n_samples})
        return batch_dim(leaf, self.batch_first, sizes)


def rows_in_order(index: Tensor, samples: Sequence[int]) -> Tensor:
    """Rows of `samples`, as if these had taken each other's places.

    Args:
        index: `[R]`, the sample of each row; equally many rows for each.

    Example:
        >>> rows_in_order(torch.tensor([0, 1, 2, 0, 1, 2]), [2, 0]).tolist()
        [2, 0, 5, 3]
    """
    places = torch.isin(index, torch.tensor(list(samples))).nonzero().squeeze(1)
    rows = torch.empty_like(places)
    for place, sample in zip(sorted(samples), samples, strict=True):
        rows[index[places] == place] = (index == sample).nonzero().squeeze(1)
    return rows


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor changed; mappings keep their class where it can be built from a dict."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(change, item) for key, item in value.items()}
        try:
            return type(value)(items)  # type: ignore[call-arg]
        except TypeError:
            return items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    return value
