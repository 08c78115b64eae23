"""Whether ranks hold the same data set, in the same order: each compares digests of some records, field by field."""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opacus.testing.undisturbed import same_randomness

__all__ = ["digests_of", "record_problems"]

_LOOKED_AT = 32


def digests_of(data: Any, salt: bytes, looked_at: int = _LOOKED_AT) -> dict[str, str | None]:
    """Digest of each field over records taken evenly from `data`; None for a field that is not the same when read twice.

    Args:
        data: the records, by number.
        salt: a secret of the ranks: without it, whoever sees a digest could find out by trying what a field of few values holds.
        looked_at: number of records, at most.

    Every record is read with torch's, NumPy's and Python's default generators started alike, so that augmentation drawn from them
    is the same on every rank. Fields that change all the same are drawn from generators of their own.

    Example:
        >>> salt = b"of these ranks"
        >>> digests_of([1, 2, 3], salt) == digests_of([1, 2, 3], salt), digests_of([1, 2, 3], salt) == digests_of([1, 3, 2], salt)
        (True, False)
    """
    first: dict[str, Any] = {}
    varies: set[str] = set()
    count = min(looked_at, len(data))
    with same_randomness(set()):
        for i in range(count):
            index = i * len(data) // count
            once, again = (dict(_fields(_read(data, index, i))) for _ in range(2))
            varies |= {name for name in once.keys() | again.keys() if once.get(name) != again.get(name)}
            for name, digest in once.items():
                first.setdefault(name, hmac.new(salt, digestmod=hashlib.sha256)).update(digest)
    return {name: None if name in varies else total.hexdigest() for name, total in sorted(first.items())}


def record_problems(every: Sequence[Mapping[str, str | None]]) -> Iterator[tuple[int, str]]:
    """`(rank, problem)` for each rank whose digests are not the first rank's, or tell nothing."""
    first = every[0]
    for rank, own in enumerate(every):
        if own.keys() != first.keys() or any(
            own[name] and digest and own[name] != digest for name, digest in first.items()
        ):
            yield rank, "differs"
        elif first and not any(own[name] and digest for name, digest in first.items()):
            yield rank, "tells nothing"


def _read(data: Any, index: int, seed: int) -> Any:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return data[index]


def _fields(record: Any) -> Iterator[tuple[str, bytes]]:
    """Those of a mapping or a tuple, each with its digest; anything else is one field."""
    named: Mapping[Any, Any] = {"": record}
    if isinstance(record, Mapping):
        named = record
    elif isinstance(record, (list, tuple)):
        named = dict(enumerate(record))
    for name, value in named.items():
        total = hashlib.sha256()
        _add(total, value)
        yield str(name), total.digest()


def _add(total: Any, value: Any) -> None:
    """Values that are the same in every process; of other objects only the kind, whose text may hold an address."""
    total.update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            total.update(str(name).encode())
            _add(total, value[name])
    elif isinstance(value, (list, tuple)):
        total.update(str(len(value)).encode())
        for part in value:
            _add(total, part)
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        _add(total, value.tolist())
    elif isinstance(value, Tensor) and (parts := _parts(value)) is not None:
        _add(total, parts)
    elif isinstance(value, (Tensor, np.ndarray, np.generic)):
        total.update(f"{value.dtype} {tuple(value.shape)} {value.tolist()}".encode())
    elif isinstance(value, (str, bytes, bool, int, float, type(None))):
        total.update(repr(value).encode())
    elif hasattr(value, "__array_interface__"):  # images
        _add(total, np.asarray(value))


def _parts(value: Tensor) -> list[Any] | None:
    """What says the same as `value`, where that is no plain array of numbers; None where it is one."""
    if value.is_nested:
        return list(value.unbind())
    if value.layout != torch.strided:
        entries = value.to_sparse_coo().coalesce()
        return [list(value.shape), entries.indices(), entries.values()]
    if value.is_quantized:
        return [value.dequantize()]
    return [str(value.dtype), list(value.shape)] if value.is_meta else None
