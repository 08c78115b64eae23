"""A batch without records: same structure, dtypes and trailing shapes as any other, zero rows.

The structure is learned by comparing a batch of one record with a batch of two copies of that record: what grows from
one to the other, a tensor's dimension or a list's length, belongs to the records and is continued to none
(`2 * size_of_one - size_of_two`); what does not grow belongs to the batch. So padding, time-first tensors, offsets with
one entry more than records, per-record lists and default or custom collate functions need no rule of their own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus.errors import raise_if_any

__all__ = ["batch_without_records", "random_batch"]


def batch_without_records(one: Any, two: Any = None, *, batch_dim: int = 0) -> Any:
    """Build the batch of no records from the batches of one and of two.

    Args:
        one: collated batch of one record: any nesting of tensors, arrays, mappings, lists, tuples, named tuples,
            dataclasses, strings, numbers, `None` and constants.
        two: collated batch of two copies of the same record. Where there is none (`None`), every tensor loses the rows
            of `batch_dim`, lists of strings become empty, and other sequences are taken as fields of the batch.
        batch_dim: the dimension used where `two` is `None`.

    Returns:
        A new batch of the same structure. It holds no record's tensor values: rows are gone, and tensors without rows
        are zero. Numbers, strings and other objects that are equal in both batches are kept; numbers and strings that are
        not become zero and empty.

    Raises:
        ConfigurationError: naming each place of the batch that holds an object with no known empty form.

    Example:
        >>> batch_without_records({"x": torch.ones(1, 3), "id": ["a"]}, {"x": torch.ones(2, 3), "id": ["a", "a"]})
        {'x': tensor([], size=(0, 3)), 'id': []}
    """
    return _checked(_Resized(rows=0, batch_dim=batch_dim), one, two)


def random_batch(one: Any, two: Any = None, *, batch_dim: int = 0) -> Any:
    """Build a batch of one made-up record: as `batch_without_records`, but each tensor has one row of random 0s and 1s.

    Args:
        one: collated batch of one record.
        two: collated batch of two copies of it, or `None`.
        batch_dim: as for `batch_without_records`.

    Raises:
        ConfigurationError: as `batch_without_records` does.
    """
    return _checked(_Resized(rows=1, batch_dim=batch_dim), one, two)


def _checked(resized: _Resized, one: Any, two: Any) -> Any:
    batch = resized(one, two, "batch")
    raise_if_any("an empty batch cannot be made", resized.problems)
    return batch


class _Resized:
    """One walk over a batch's structure, collecting the places it cannot resize."""

    def __init__(self, rows: int, batch_dim: int) -> None:
        self.rows = rows
        self.batch_dim = batch_dim
        self.problems: list[str] = []

    def __call__(self, one: Any, two: Any, where: str) -> Any:
        if isinstance(one, Tensor):
            return one.new_zeros(self._shape(one, two)) if self.rows == 0 else _random_bits(one.shape).to(one)
        if isinstance(one, np.ndarray):
            values = np.zeros(self._shape(one, two)) if self.rows == 0 else _random_bits(one.shape).numpy()
            return values.astype(one.dtype)
        if isinstance(one, Mapping):
            return self._mapping(one, two, where)
        if isinstance(one, (list, tuple)):
            return self._sequence(one, two, where)
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            return self._dataclass(one, two, where)
        if isinstance(one, (int, float, complex)) and not isinstance(one, bool):
            return one if one == two else type(one)(0)
        if isinstance(one, (str, bytes)):
            return one if one == two else type(one)()
        if one is None or isinstance(one, bool) or _same(one, two):
            return one
        self.problems.append(
            f"{where} is a {type(one).__module__}.{type(one).__qualname__}, whose empty form is unknown. Let "
            "collate_fn return tensors in dicts, lists, tuples or dataclasses, or make a collate_fn that accepts an "
            "empty list with opacus.data_loader.CollateFnWithEmpty as its model."
        )
        return one

    def _shape(self, one: Any, two: Any) -> tuple[int, ...]:
        if self.rows == 1:
            return tuple(one.shape)
        if two is not None and getattr(two, "ndim", None) == one.ndim:
            return tuple(max(0, 2 * a - b) for a, b in zip(one.shape, two.shape, strict=True))
        dim = min(self.batch_dim, one.ndim - 1)
        return tuple(0 if d == dim else size for d, size in enumerate(one.shape))

    def _mapping(self, one: Mapping, two: Any, where: str) -> Mapping:
        fields = {key: self(value, _item(two, key), f"{where}[{key!r}]") for key, value in one.items()}
        if type(one) is dict:
            return fields
        if isinstance(one, MutableMapping):
            clone = copy.copy(one)  # keeps the class and its settings, e.g. a default factory
            clone.update(fields)
            return clone
        return type(one)(fields)  # type: ignore[call-arg]

    def _sequence(self, one: list | tuple, two: Any, where: str) -> list | tuple:
        if two is None:
            per_record = len(one) > 0 and all(isinstance(item, (str, bytes)) for item in one)
        else:
            per_record = len(two) != len(one)
        if not per_record:
            items = [self(item, _item(two, i), f"{where}[{i}]") for i, item in enumerate(one)]
        elif self.rows == 0:
            items = []
        else:
            items = [self(item, None, f"{where}[{i}]") for i, item in enumerate(one)]
        if hasattr(one, "_fields"):
            return type(one)(*items)
        return type(one)(items)

    def _dataclass(self, one: Any, two: Any, where: str) -> Any:
        clone = copy.copy(one)
        for field in dataclasses.fields(one):
            value = self(getattr(one, field.name), getattr(two, field.name, None), f"{where}.{field.name}")
            object.__setattr__(clone, field.name, value)  # a frozen dataclass has no other way
        return clone


def _item(container: Any, key: Any) -> Any:
    try:
        return container[key]
    except (TypeError, KeyError, IndexError):
        return None


def _same(one: Any, two: Any) -> bool:
    if one is two:
        return True
    try:
        return type(one) is type(two) and bool(one == two)
    except Exception:  # an object may refuse to be compared; then it is not known to be constant
        return False


def _random_bits(shape: Sequence[int]) -> Tensor:
    return torch.randint(0, 2, tuple(shape))
