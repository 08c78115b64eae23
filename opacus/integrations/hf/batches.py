"""Poisson-sampled logical batches as items of a trainer's own data loader, each a list of physical batches.

One item is one optimizer step: epochs, `max_steps`, schedules and what is skipped on resuming all count logical batches, and
nothing private of the trainer has to be replaced. The trainer's own loader is not used: it deals whole batches to ranks and
repeats rows to fill them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Sampler

from opacus.data_loader import loading_settings

__all__ = ["PhysicalBatch", "PoissonBatches", "PoissonLoader", "SplitCollate"]

_RESOLUTION = 2**53
_DRAWN_AT_ONCE = 2**22


class PhysicalBatch(NamedTuple):
    """Rows that go through the model together.

    Args:
        n_samples: number of samples.
        tensors: what the collate function made of them.
    """

    n_samples: int
    tensors: dict[str, Any]


class PoissonBatches(Sampler[list[int]]):
    """Logical batches of indices. Batch k of epoch e follows from `(seed, run, e, k)` alone, so resuming needs no state.

    Ranks that train together draw the same batch, and each takes its share of it: every n-th of its records.

    Args:
        records: number of records N.
        expected_batch_size: records in a batch on average.
        steps: batches in an epoch.
        key: `(seed, run)`, asked for at each batch; `run` tells one training run with this seed from another.
        share: this rank and the number of ranks.

    Formal guarantee:
        Each record is in each batch with probability `floor(2**53 expected_batch_size / N) / 2**53`, independently of all
        other draws (Philox, keyed by the full seed and the batch's number). Of ranks with one key, exactly one takes it.
    """

    def __init__(
        self,
        records: int,
        expected_batch_size: int,
        steps: int,
        key: Callable[[], tuple[int, int]],
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.records = records
        self.steps = steps
        self.epoch = 0
        self._threshold = math.floor(_RESOLUTION * expected_batch_size / records)
        self._key = key
        self._rank, self._ranks = share

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass draws."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.steps):
            yield self._draw(batch)[self._rank :: self._ranks]

    def _draw(self, batch: int) -> list[int]:
        seed, run = self._key()
        sequence = np.random.SeedSequence(seed, spawn_key=(run, self.epoch, batch))
        stream = np.random.Generator(np.random.Philox(sequence))
        chosen: list[int] = []
        for start in range(0, self.records, _DRAWN_AT_ONCE):
            size = min(_DRAWN_AT_ONCE, self.records - start)
            taken = stream.integers(0, _RESOLUTION, size=size) < self._threshold
            chosen += (np.flatnonzero(taken) + start).tolist()
        return chosen


class SplitCollate:
    """Collates a logical batch as physical batches of equal sizes up to `size`; none for a batch without records.

    Of equal sizes: a last batch of few records takes almost the time of a full one.

    Args:
        collate: the trainer's own; it never sees an empty list.
        size: records in a physical batch.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], size: int) -> None:
        self.collate = collate
        self.size = size

    def __call__(self, records: list[Any]) -> list[PhysicalBatch]:
        count = math.ceil(len(records) / self.size)
        ends = [len(records) * part // count for part in range(count + 1)] if count else []
        parts = (records[start:end] for start, end in itertools.pairwise(ends))
        return [PhysicalBatch(len(part), dict(self.collate(part))) for part in parts]


class PoissonLoader(DataLoader):
    """The trainer's loader, over the same data with the same settings, drawing Poisson batches.

    Args:
        base: the loader that the trainer made.
        batches: what to draw.
        physical_size: records in a physical batch.
    """

    def __init__(self, base: DataLoader, batches: PoissonBatches, physical_size: int) -> None:
        settings = loading_settings(base)
        collate = SplitCollate(base.collate_fn, physical_size)
        super().__init__(base.dataset, batch_sampler=batches, collate_fn=collate, **settings)

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
