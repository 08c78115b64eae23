"""Large logical batches in little memory: several physical batches before each step.

A logical batch (what is sampled and accounted) is cut into physical batches (what goes through the model at once). For
every physical batch the optimizer is told whether to skip its step: all but the last of a logical batch only accumulate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from scipy.special import bdtrc
from torch.utils.data import BatchSampler, DataLoader, Sampler

from opacus.data_loader import loading_settings
from opacus.distributed.groups import largest, size_of
from opacus.distributed.records import group_of
from opacus.errors import raise_if_any
from opacus.utils.collate import CollateFnWithEmpty
from opacus.utils.resumable import ResumableDataLoader
from opacus.utils.sample_rate import dataset_problems

if TYPE_CHECKING:
    from opacus.optimizers import DPOptimizer

__all__ = ["BatchMemoryManager", "BatchSplittingSampler", "wrap_data_loader"]


@dataclass
class _Pass:
    """One pass over a sampler: signals sent, and whether its end was reached."""

    signals: list[bool] = field(default_factory=list)
    exhausted: bool = False


# of each optimizer: a loader made anew has to know what the one before it left behind
_passes: WeakKeyDictionary[Any, _Pass] = WeakKeyDictionary()


class BatchSplittingSampler(Sampler[list[int]]):
    """Cuts each logical batch of `sampler` into physical batches, and tells the optimizer which of them step.

    The physical batches of one logical batch differ in size by at most one. An empty logical batch is one empty
    physical batch, and steps: noise is due, and accounted, for it as for any other. With an optimizer of several ranks, all of them
    cut their shares of a logical batch into the same number of physical batches, some of which may be empty.

    Args:
        sampler: yields logical batches, lists of record indices.
        max_batch_size: largest physical batch, at least 1.
        optimizer: told through `signal_skip_step(do_skip)`, once for each physical batch and in their order; each
            `step()` takes one signal. Workers may run ahead: signals then wait in the optimizer's queue.

    Raises:
        ConfigurationError: for a `max_batch_size` that is no positive number, or another kind of optimizer.

    Formal guarantee:
        The optimizer steps exactly once for each logical batch, with the sum over all its records, if the training
        loop calls `optimizer.step()` for every physical batch. Starting over drops what a logical batch left half done,
        so no step sums over records of two logical batches.
    """

    def __init__(self, *, sampler: Any, max_batch_size: int, optimizer: DPOptimizer) -> None:
        problems = _size_problems("max_batch_size", max_batch_size) + _optimizer_problems(optimizer)
        raise_if_any("logical batches cannot be split", problems)
        self.sampler = sampler
        self.max_batch_size = max_batch_size
        self.optimizer = optimizer

    def __iter__(self) -> Iterator[list[int]]:
        self.settle()
        this = _passes[self.optimizer] = _Pass()
        for batch in self.sampler:
            pieces = self._pieces(len(batch))
            shortest, longer = divmod(len(batch), pieces)
            start = 0
            for piece in range(pieces):
                end = start + shortest + (piece < longer)
                do_skip = piece < pieces - 1
                self.optimizer.signal_skip_step(do_skip=do_skip)
                this.signals.append(do_skip)
                yield batch[start:end]
                start = end
        this.exhausted = True

    def _pieces(self, records: int) -> int:
        """Number of physical batches for a logical batch of so many records; the most that any rank needs."""
        needed = max(1, math.ceil(records / self.max_batch_size))
        group = group_of(self.optimizer)
        if group is None or size_of(group) == 1:
            return needed
        return largest(needed, group, self.optimizer.params[0].device)

    def __len__(self) -> int:
        """Number of physical batches: exact for batches of fixed size, the expected number for Poisson sampling."""
        limit = self.max_batch_size
        sampler = self.sampler
        if isinstance(sampler, BatchSampler):
            full, rest = divmod(len(sampler.sampler), sampler.batch_size)  # type: ignore[arg-type]
            return full * math.ceil(sampler.batch_size / limit) + (not sampler.drop_last) * math.ceil(
                rest / limit
            )
        if isinstance(sampler, Sequence):
            return sum(max(1, math.ceil(len(batch) / limit)) for batch in sampler)
        if hasattr(sampler, "sample_rate"):
            return round(len(sampler) * _expected_pieces(sampler.num_samples, sampler.sample_rate, limit))
        return len(sampler) * math.ceil(getattr(sampler, "batch_size", limit) / limit)

    def settle(self, *, prefetches: bool = True) -> None:
        """Forget the optimizer's pass: drop signals no step has taken, and gradients of a half-done logical batch.

        The pass may have been another sampler's, left behind by a loop over a loader that is no longer there.

        Args:
            prefetches: whether batches may have been drawn that training never asked for. If not, signals left over
                from a complete pass mean that steps were missed, and a warning says how many.
        """
        queue = self.optimizer._step_skip_queue
        over = _passes.pop(self.optimizer, None) or _Pass()
        sent, exhausted = over.signals, over.exhausted
        left = min(len(queue), len(sent))
        if left and exhausted and not prefetches:
            warnings.warn(
                f"optimizer.step() was not called for {left} of {len(sent)} physical batches, so later steps took "
                "their signals and logical batches were mixed. Call step() for every batch, empty ones included.",
                stacklevel=3,
            )
        for _ in range(left):
            queue.pop()
        taken = len(sent) - left
        if taken and sent[taken - 1]:
            _drop_gradients(self.optimizer)
            warnings.warn(
                "training left a logical batch half done: its accumulated gradients were dropped, no step was taken for "
                "it. To end early, stop after a step that was not skipped.",
                stacklevel=3,
            )


class BatchMemoryManager:
    """Context in which a training loop sees physical batches of at most `max_physical_batch_size` records.

    Steps, noise, accounting and the sampled (logical) batches are those of `data_loader`; only memory changes.

    Args:
        data_loader: the loader `make_private` returned.
        max_physical_batch_size: largest number of records in one forward pass, at least 1.
        optimizer: the optimizer `make_private` returned.

    Raises:
        ConfigurationError: listing everything that is wrong with the arguments.

    Formal guarantee:
        As for `BatchSplittingSampler`. When the context is left, by `break` or an error too, no signal stays behind,
        and a logical batch that was half done is dropped with a warning.

    Example:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=64, optimizer=optimizer) as physical:
            for x, y in physical:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
    """

    def __init__(
        self, *, data_loader: DataLoader, max_physical_batch_size: int, optimizer: DPOptimizer
    ) -> None:
        problems = _size_problems("max_physical_batch_size", max_physical_batch_size)
        problems += _optimizer_problems(optimizer) + _loader_problems(data_loader)
        raise_if_any("BatchMemoryManager cannot start", problems)
        self.data_loader = data_loader
        self.max_physical_batch_size = max_physical_batch_size
        self.optimizer = optimizer
        self._splitters: list[BatchSplittingSampler] = []

    def __enter__(self) -> DataLoader:
        loader = wrap_data_loader(
            data_loader=self.data_loader,
            max_batch_size=self.max_physical_batch_size,
            optimizer=self.optimizer,
        )
        self._splitters.append(loader.batch_sampler)  # type: ignore[arg-type]
        return loader

    def __exit__(self, *exception: object) -> None:
        self._splitters.pop().settle(prefetches=self.data_loader.num_workers > 0)


def wrap_data_loader(*, data_loader: DataLoader, max_batch_size: int, optimizer: DPOptimizer) -> DataLoader:
    """Make a loader that yields the logical batches of `data_loader` in physical batches.

    Args:
        data_loader: a loader over a map-style data set, in batches. It is left as it is.
        max_batch_size: largest physical batch, at least 1.
        optimizer: told which physical batches step; see `BatchSplittingSampler`.

    Raises:
        ConfigurationError: listing everything that is wrong with the arguments.
    """
    problems = _size_problems("max_batch_size", max_batch_size)
    problems += _optimizer_problems(optimizer) + _loader_problems(data_loader)
    raise_if_any("logical batches cannot be split", problems)
    loader = ResumableDataLoader(
        data_loader.dataset,
        batch_sampler=BatchSplittingSampler(
            sampler=data_loader.batch_sampler, max_batch_size=max_batch_size, optimizer=optimizer
        ),
        collate_fn=_collate_fn(data_loader, optimizer),
        generator=data_loader.generator,
        **loading_settings(data_loader),
    )
    loader.place = getattr(data_loader, "place", None)
    return loader


def _collate_fn(data_loader: DataLoader, optimizer: Any) -> Any:
    """One that accepts no records, where other ranks may need more physical batches than this one."""
    collate_fn = data_loader.collate_fn
    if group_of(optimizer) is None or isinstance(collate_fn, CollateFnWithEmpty):
        return collate_fn
    return CollateFnWithEmpty(collate_fn, True, False, dataset=data_loader.dataset)


def _expected_pieces(num_samples: int, sample_rate: float, limit: int) -> float:
    """Expected number of pieces of a Poisson batch: `sum_k P(size > k * limit)`, and one piece where it is empty."""
    mean = num_samples * sample_rate
    largest = min(
        num_samples, math.ceil(mean + 12 * math.sqrt(mean) + 40)
    )  # larger ones are too rare to count
    above = bdtrc(np.arange(0, largest, limit), num_samples, sample_rate)
    return float(above.sum() + 1 - above[0])


def _size_problems(name: str, size: Any) -> list[str]:
    if isinstance(size, int) and size >= 1:
        return []
    return [f"{name} is {size!r}. It must be a positive number of records."]


def _optimizer_problems(optimizer: Any) -> list[str]:
    if hasattr(optimizer, "signal_skip_step"):
        return []
    kind = type(optimizer).__qualname__
    return [f"optimizer, a {kind}, cannot skip steps. Pass the optimizer that make_private returned."]


def _loader_problems(data_loader: Any) -> list[str]:
    if not isinstance(data_loader, DataLoader):
        return [f"data_loader is a {type(data_loader).__qualname__}. Pass a torch.utils.data.DataLoader."]
    problems = dataset_problems(data_loader.dataset)
    if data_loader.batch_sampler is None:
        problems.append(
            "data_loader has batch_size=None, so there are no batches to split. Give it a batch size."
        )
    if isinstance(data_loader.batch_sampler, BatchSplittingSampler):
        problems.append(
            "data_loader is split into physical batches already. Pass the loader it was made from."
        )
    return problems


def _drop_gradients(optimizer: Any) -> None:
    optimizer._is_last_step_skipped = False  # zero_grad keeps what skipped steps accumulated
    optimizer.zero_grad()
