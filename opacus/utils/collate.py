"""Collate functions that accept an empty list of records, as Poisson sampling produces now and then."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data.dataloader import default_collate

from opacus.utils.empty_batch import batch_without_records, random_batch

__all__ = ["CollateFnWithEmpty", "dtype_safe", "shape_safe", "wrap_collate_with_empty"]


class CollateFnWithEmpty:
    """A collate function that also accepts no records.

    Args:
        collator_fn: merges a non-empty list of records into a batch; it never sees an empty one.
        batch_first: whether dimension 0 (else 1) counts records, where that cannot be told by collating two records.
        rand_on_empty: answer an empty list with one made-up record of random 0s and 1s instead of zero rows.
        sample_empty_shapes: shapes of an empty batch's tensors, batch dimension included; used as long as no record is
            known.
        dtypes: their dtypes, or python types as `dtype_safe` gives them.
        dataset: where record 0 is taken from when an empty batch is first needed. Without it, the first record that
            passes through shows the structure.
    """

    def __init__(
        self,
        collator_fn: Callable[[list[Any]], Any],
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_empty_shapes: Sequence[Sequence[int]] | None = None,
        dtypes: Sequence[Any] | None = None,
        dataset: Any = None,
    ) -> None:
        self.collator_fn = collator_fn
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.sample_empty_shapes = sample_empty_shapes
        self.dtypes = dtypes
        self.dataset = dataset
        self._seen: list[
            Any
        ] = []  # one record that passed through, kept only where there is no data set to ask
        self._example: tuple[Any, Any] | None = None  # the batches of one and of two copies of a record

    def __call__(self, batch: Any) -> Any:
        """Collate `batch`, a list of records that may be empty."""
        if len(batch) == 0:
            return self._empty_batch()
        if self.dataset is None and not self._seen and isinstance(batch, Sequence):
            self._seen = [copy.deepcopy(batch[0])]
        return self.collator_fn(batch)

    def _empty_batch(self) -> Any:
        if self._example is None and (self.dataset is not None or self._seen):
            self._example = self._collated(1), self._two_collated()
        if self._example is not None:
            make = random_batch if self.rand_on_empty else batch_without_records
            return make(*self._example, batch_dim=0 if self.batch_first else 1)
        if self.sample_empty_shapes is not None:
            types = self.dtypes or [torch.float32] * len(self.sample_empty_shapes)
            return [_zeros(s, t) for s, t in zip(self.sample_empty_shapes, types, strict=True)]
        warnings.warn(
            "the first batch is empty and no record is known to show its structure: it is an empty list. Give "
            "CollateFnWithEmpty a dataset, or sample_empty_shapes and dtypes.",
            stacklevel=2,
        )
        return []

    def _collated(self, copies: int) -> Any:
        if self.dataset is None:
            records: Any = self._seen * copies
        elif getattr(self.dataset, "__getitems__", None):
            records = self.dataset.__getitems__([0] * copies)
        else:
            records = [self.dataset[0] for _ in range(copies)]
        if isinstance(records, list):
            records = [
                copy.deepcopy(record) for record in records
            ]  # some collate functions empty their records
        return self.collator_fn(records)

    def _two_collated(self) -> Any:
        try:
            return self._collated(2)
        except (
            Exception
        ):  # a collate function may insist on distinct records; `batch_first` then says what to cut
            return None


def wrap_collate_with_empty(
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[Any] | None = None,
) -> CollateFnWithEmpty:
    """Let a collate function accept an empty list of records.

    Args:
        collate_fn: merges a non-empty list of records; torch's default when `None`.
        batch_first: as in `CollateFnWithEmpty`.
        rand_on_empty: as in `CollateFnWithEmpty`.
        sample_empty_shapes: as in `CollateFnWithEmpty`.
        dtypes: as in `CollateFnWithEmpty`.

    Example:
        >>> collate = wrap_collate_with_empty(collate_fn=None)
        >>> collate([torch.ones(3), torch.ones(3)]).shape, collate([]).shape
        (torch.Size([2, 3]), torch.Size([0, 3]))
    """
    return CollateFnWithEmpty(
        collate_fn or default_collate, batch_first, rand_on_empty, sample_empty_shapes, dtypes
    )


def shape_safe(x: Any) -> Sequence[int]:
    """Shape of a tensor or array; `()` for anything else."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> Any:
    """Dtype of a tensor or array; the class of anything else."""
    return getattr(x, "dtype", type(x))


def _zeros(shape: Sequence[int], dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}.get(dtype)
    return [] if dtype is None else torch.zeros(tuple(shape), dtype=dtype)
