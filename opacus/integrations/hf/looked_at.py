"""Which records a loss is looked at with: such as differ in what losses weigh or average by, their labels and their lengths."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

__all__ = ["most_different", "some_records"]

_READ = 256  # records
_READ_FOR_LENGTHS = 2048  # where all of those have one length
_LABELS = ("labels", "label", "label_ids")
_CLASSES = 64  # labels of more values are tokens of a vocabulary
_KINDS = 16  # values of another number that tells records apart by kind
_QUANTILES = (0.25, 0.75, 0.5, 0.1, 0.9, 0.4)
_COMPARED = 3  # of what is returned, the first ones: their gradients are compared with their batch's
_FEW = 4  # tokens; records of fewer may have no loss of their own


def some_records(data: Any) -> list[Any]:
    """Records all over the data set; more where none of them has another length.

    Args:
        data: by number.
    """
    count = len(data)
    stream = random.Random(0)  # not at equal distances, which may be those at which labels repeat
    numbers = sorted(stream.sample(range(count), min(_READ, count)))
    records = [data[i] for i in numbers]
    lengths = {_described(record).length for record in records}
    if lengths != {0} and len(lengths) == 1 and count > len(numbers):
        for i in sorted(stream.sample(range(count), min(_READ_FOR_LENGTHS, count))):
            record = data[i]
            if _described(record).length not in lengths:
                records.append(record)
                break
    return records


def most_different(records: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` of the records, the most telling first: each adds labels that those before lack, rare ones first.

    Among such, lengths are taken from the middle of their range where they differ there, else from its ends; of the first three,
    one has another length if any record has.

    Example:
        >>> records = [{"labels": int(i == 7), "input_ids": [5] * (6 + i % 3)} for i in range(9)]
        >>> [(r["labels"], len(r["input_ids"])) for r in most_different(records, 3)]
        [(1, 7), (0, 8), (0, 7)]
    """
    described = [_described(record) for record in records]
    frequency = Counter(label for each in described for label in each.labels)
    if len(frequency) > _CLASSES and any(len(each.labels) > 1 for each in described):
        frequency.clear()
    commonest = max(frequency, key=lambda label: frequency[label], default=None)
    described = _with_kinds(records, described, frequency)
    telling = [i for i, each in enumerate(described) if not each.degenerate]
    left = telling if len(telling) >= min(count, _COMPARED) else list(range(len(records)))
    lengths = sorted(described[i].length for i in left)
    covered: set[Any] = set()
    taken: list[int] = []
    while left and len(taken) < count:
        target = _target(lengths, len(taken))
        used = {described[i].length for i in taken}
        alike = (
            used if len(taken) == _COMPARED - 1 and len(used) == 1 else set()
        )  # the last chance for another

        def worth(
            i: int,
            target: int = target,
            alike: Collection[int] = alike,
            covered: frozenset[Any] = frozenset(covered),
        ) -> tuple[bool, int, int, int]:
            labels, length, _ = described[i]
            new = [frequency[label] for label in labels - covered if label in frequency]
            rarest = min(new, default=len(records) + 1)
            return bool(alike) and length not in alike, -rarest, len(new), -abs(length - target)

        best = max(left, key=worth)
        left.remove(best)
        taken.append(best)
        covered |= described[best].labels
    if commonest is not None and commonest not in covered and len(taken) > _COMPARED:
        # of many labels the rare ones come first, and a weight may be that of the commonest
        taken[-1] = next(i for i, each in enumerate(described) if commonest in each.labels)
    return [records[i] for i in taken]


def _with_kinds(
    records: Sequence[Any], described: Sequence[_Described], frequency: Counter[Any]
) -> list[_Described]:
    """Numbers of a few values beside the labels (a domain, a weight, a group) count as labels do; adds them to `frequency`."""
    columns = [record if isinstance(record, Mapping) else {} for record in records]
    names = {name for column in columns for name, value in column.items() if _scalar(value, float)} - {
        *_LABELS
    }
    kinds: list[frozenset[Any]] = [each.labels for each in described]
    for name in sorted(names, key=str):
        values = [(name, float(column[name])) if name in column else None for column in columns]
        counts = Counter(value for value in values if value is not None)
        if 1 < len(counts) <= _KINDS:
            frequency.update(counts)
            kinds = [kind | {value} for kind, value in zip(kinds, values, strict=True) if value is not None]
    return [each._replace(labels=kind) for each, kind in zip(described, kinds, strict=True)]


class _Described(NamedTuple):
    labels: frozenset[Any]
    length: int  # whole numbers in the record's sequences
    degenerate: bool  # so few tokens that its own loss may not be defined


def _target(lengths: list[int], number: int) -> int:
    last = len(lengths) - 1
    if lengths[round(last * _QUANTILES[0])] == lengths[round(last * _QUANTILES[1])]:
        ends = (lengths[0], lengths[-1], lengths[last // 2])
        return ends[number % len(ends)]
    return lengths[round(last * _QUANTILES[number % len(_QUANTILES)])]


def _described(record: Any) -> _Described:
    columns: Mapping[Any, Any] = record if isinstance(record, Mapping) else {}
    labels: frozenset[Any] = frozenset()
    length = 0
    few = False
    for name, column in columns.items():
        numbers = _whole_numbers(column)
        if numbers is None:
            continue
        if name in _LABELS:
            labels |= frozenset(number for number in numbers if number != -100)
            few |= not labels
        if not _scalar(column):
            length += len(numbers)
            few |= name == "input_ids" and len(numbers) < _FEW
    return _Described(labels, length, few)


def _scalar(column: Any, *more: type) -> bool:
    return isinstance(column, (bool, int, np.integer, *more)) or (
        isinstance(column, (Tensor, np.ndarray)) and not column.ndim
    )


def _whole_numbers(column: Any) -> list[int] | None:
    """Those of a number, or of a sequence; None for anything else."""
    if isinstance(column, Tensor):
        if column.is_floating_point() or column.is_complex() or column.dim() > 1:
            return None
        return column.reshape(-1).tolist()
    if isinstance(column, np.ndarray):
        if column.dtype.kind not in "iub" or column.ndim > 1:
            return None
        return column.reshape(-1).tolist()
    if isinstance(column, (bool, int, np.integer)):
        return [int(column)]
    if isinstance(column, (list, tuple)) and all(isinstance(number, (bool, int)) for number in column):
        return [int(number) for number in column]
    return None
