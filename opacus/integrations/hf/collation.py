"""A trainer's collate function, for looking: what it makes of records alone and of the same records together.

Where the function draws random numbers (masked tokens, augmented images), records collated alone would be other data than together.
Then the joint batch is drawn once, and each record's rows are cut out of it, without the padding that others' lengths made.

Shapes: n records, k rows of each, R = n k rows (all first rows, then all second rows), T positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.integrations.hf.contract import IGNORED, first_rows
from opacus.integrations.hf.looked_mode import drawn_states, same_states
from opacus.integrations.hf.own_generators import own_generators, seed_default_generators, seed_own_generators
from opacus.testing.undisturbed import same_randomness

__all__ = ["Collation", "collated", "equal_batches", "repeated"]

Batch = dict[str, Any]

_SEEDS_OF_LABELS = 64  # tried until every record has a label
_SEEDS_OF_MIXING = 8


class Collation:
    """The collate function of a trainer's loader.

    Args:
        collate: the function; its own generators go on afterwards as if it had not been called.
        records: some to try it with.

    Attributes:
        draws: whether what it makes of records is random.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], records: Sequence[Any]) -> None:
        self.collate = collate
        self.draws = self._draws(list(records))

    def batch(self, records: Sequence[Any], seed: int = 0) -> Batch:
        """Collated on the CPU; the same for the same records and seed."""
        with same_randomness(set()), own_generators(self.collate):
            self._seed(seed)
            return collated(self.collate, records)

    def pair(self, records: Sequence[Any]) -> tuple[list[Batch], Batch]:
        """Each record in a batch of its own, and all of them together."""
        if not self.draws:
            return [self.batch([record]) for record in records], self.batch(records)
        for seed in range(_SEEDS_OF_LABELS):
            together = self.batch(records, seed)
            if _labelled(together):
                break
        return [_row_of(together, i, len(records)) for i in range(len(records))], together

    def refuse_mixing(self, records: Sequence[Any]) -> None:
        """Raise if a random collate function makes something else of a record where another record is in the batch.

        Raises:
            PerSampleGradientError: if so.
            ConfigurationError: if it cannot be found out.
        """
        if not self.draws:
            return
        if not equal_batches(self.batch(records), self.batch(records)):
            raise ConfigurationError(
                "the trainer's loss cannot be made private",
                [
                    "data_collator draws random numbers that cannot be repeated, so that it is not known whether it mixes records: let it "
                    "draw from the default generators of torch, NumPy or random, or from a generator that is an attribute of it."
                ],
            )
        ordered = sorted(records, key=lambda record: -_width(self.batch([record])))
        n = len(ordered)
        for seed in range(_SEEDS_OF_MIXING):
            # the longest record stays, so that shapes do, and with them what is drawn
            one, other = self.batch(ordered, seed), self.batch([*ordered[:-1], ordered[0]], seed)
            for i in range(n - 1):
                if not equal_batches(_row_of(one, i, n, trim=False), _row_of(other, i, n, trim=False)):
                    raise PerSampleGradientError(
                        "samples are not isolated",
                        [
                            "data_collator: what it makes of one record changes with another record of the batch (mixup, cutmix, a "
                            "statistic). Make each record's rows from that record alone."
                        ],
                    )

    def _draws(self, records: list[Any]) -> bool:
        with same_randomness(set()), own_generators(self.collate) as generators:
            collated(self.collate, records)  # collators make their generators when they are first called
            before = drawn_states(set()), generators()
            once = collated(self.collate, records)
            drawn = not same_states(before[0], drawn_states(set())) or generators() != before[1]
            return drawn or not equal_batches(once, collated(self.collate, records))

    def _seed(self, seed: int) -> None:
        seed_default_generators(seed)
        seed_own_generators(self.collate, seed)


def collated(collate: Callable[[list[Any]], Any], records: Sequence[Any]) -> Batch:
    """What `collate` makes of copies of the records."""
    batch = dict(collate([copy.deepcopy(record) for record in records]))
    return {name: _as_tensor(value, len(records)) for name, value in batch.items()}


def repeated(batch: Mapping[str, Any], i: int, n: int) -> Batch:
    """A batch of the same shape, with the rows of record `i` of `n` in the place of all others'."""
    return _picked(batch, n, lambda size: [i + n * (place // n) for place in range(size)])


def _picked(batch: Mapping[str, Any], n: int, places: Callable[[int], Sequence[int]]) -> Batch:
    """Rows at `places`, a function of how many there are, of everything that has one for each record or row."""
    rows = first_rows(batch)

    def cut(value: Any) -> Any:
        if not isinstance(value, (Tensor, list, tuple)) or (isinstance(value, Tensor) and not value.dim()):
            return value
        if len(value) not in (n, rows):
            return value
        chosen = list(places(len(value)))
        return value[chosen] if isinstance(value, Tensor) else type(value)(value[place] for place in chosen)

    return {name: cut(value) for name, value in batch.items()}


def _row_of(batch: Mapping[str, Any], i: int, n: int, *, trim: bool = True) -> Batch:
    """The rows of record `i` of `n`, without padding that no row of it needs."""
    own = _picked(batch, n, lambda size: range(i, size, n))
    mask = own.get("attention_mask")
    if not trim or not isinstance(mask, Tensor) or mask.dim() != 2 or not bool(mask.any()):
        return own
    seen = mask.bool().any(0).nonzero()
    start, end = int(seen[0]), int(seen[-1]) + 1
    return {
        name: value[:, start:end]
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == mask.shape
        else value
        for name, value in own.items()
    }


def _labelled(batch: Mapping[str, Any]) -> bool:
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return True
    return bool(labels.ne(IGNORED).any(1).all())


def _width(batch: Mapping[str, Any]) -> int:
    return max(
        (value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.dim() > 1),
        default=0,
    )


def equal_batches(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Of tensors; what is none is not compared."""
    return all(
        not isinstance(value, Tensor)
        or (isinstance(b.get(name), Tensor) and value.shape == b[name].shape and torch.equal(value, b[name]))
        for name, value in a.items()
    )


def _as_tensor(value: Any, n: int) -> Any:
    """Lists of one number a sample as tensors, so that samples can be exchanged."""
    plain = (
        isinstance(value, list) and len(value) == n and all(isinstance(v, (bool, int, float)) for v in value)
    )
    return torch.tensor(value) if plain else value
