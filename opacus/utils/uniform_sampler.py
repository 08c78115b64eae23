"""Poisson sampling: the way of drawing batches that the privacy accountants reason about.

Both samplers yield batches (lists of record indices), so they go into a loader's `batch_sampler`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from opacus.errors import raise_if_any
from opacus.utils.resumable import BatchCounter

__all__ = [
    "DistributedUniformWithReplacementSampler",
    "UniformWithReplacementSampler",
    "poisson_mask",
    "sampler_problems",
    "steps_per_epoch",
]

_RESOLUTION = 2**53  # draws are integers below this: as fine as float64, and exact on devices without float64
_DRAWN_AT_ONCE = 2**22  # records; bounds the memory of one draw to 32 MiB however large the data set


class UniformWithReplacementSampler(Sampler[list[int]]):
    """Batches in which every record takes part independently with probability `sample_rate`.

    Poisson sampling, as in Abadi et al. (2016) and Mironov et al. (2019). A batch may be empty, and its size varies
    around `num_samples * sample_rate`. Every iteration draws anew.

    Args:
        num_samples: number of records in the data set, at least 1.
        sample_rate: probability q that a record is in a batch, in (0, 1].
        generator: stream of the draws, on any device; torch's default CPU stream when `None`.
        steps: batches per iteration; `1 / sample_rate`, rounded down, when `None`.

    Raises:
        ConfigurationError: for a number of records, a rate or a number of steps that makes no sense.

    Formal guarantee:
        Given the other records' draws and all earlier batches, record i is in a batch with probability
        `floor(q * 2**53) / 2**53`: never above q, and below it by less than 2**-53.

    Example:
        >>> sampler = UniformWithReplacementSampler(num_samples=4, sample_rate=1.0, steps=2)
        >>> list(sampler)
        [[0, 1, 2, 3], [0, 1, 2, 3]]
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ) -> None:
        problems = sampler_problems("num_samples", num_samples, sample_rate, steps)
        raise_if_any("Poisson sampling cannot start", problems)
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.generator = generator
        self.steps = steps_per_epoch(sample_rate) if steps is None else steps
        self.counter = BatchCounter()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        for _ in self.counter.batches(self.steps):
            mask = poisson_mask(self.num_samples, self.sample_rate, self.generator)
            yield mask.nonzero().flatten().tolist()


class DistributedUniformWithReplacementSampler(Sampler[list[int]]):
    """One rank's share of Poisson-sampled batches; the ranks' shares together are one Poisson batch.

    The records are dealt out to the ranks, every record to exactly one. Each rank draws the inclusion of **all** records
    and keeps its own: ranks seeded alike therefore still include their records independently of one another, and
    their batches add up to the batch one process with the same seed would have drawn.

    Args:
        total_size: number of records in the data set, over all ranks.
        sample_rate: probability that a record is in a (global) batch, in (0, 1].
        shuffle: deal the records out in random order rather than in turn.
        shuffle_seed: seed of that order; must be the same on all ranks.
        steps: batches per iteration; `1 / sample_rate`, rounded down, when `None`. The same on all ranks.
        generator: stream of this rank's draws, on any device.
        process_group: the ranks that share the records; all ranks when `None`.

    Raises:
        ConfigurationError: when `torch.distributed` has no process group, or for arguments that make no sense.

    Formal guarantee:
        As for `UniformWithReplacementSampler`, for the union of the ranks' batches, whether the ranks' generators are
        seeded alike or differently.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ) -> None:
        problems = sampler_problems("total_size", total_size, sample_rate, steps)
        try:
            where = () if process_group is None else (process_group,)
            self.rank, self.num_replicas = dist.get_rank(*where), dist.get_world_size(*where)
        except (
            AttributeError,
            ValueError,
            RuntimeError,
        ):  # no process group, or a torch without torch.distributed
            problems.append(
                "there is no process group. Call torch.distributed.init_process_group(...) first, or sample in one "
                "process (distributed=False)."
            )
        raise_if_any("Poisson sampling over several ranks cannot start", problems)
        self.total_size = total_size
        self.sample_rate = sample_rate
        self.generator = generator
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.epoch = 0
        self.num_samples = len(range(self.rank, total_size, self.num_replicas))
        self.num_batches = steps_per_epoch(sample_rate) if steps is None else steps
        self.counter = BatchCounter()

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        own = self._own_records()
        for _ in self.counter.batches(self.num_batches):
            mask = poisson_mask(self.total_size, self.sample_rate, self.generator)
            yield list(own[mask[own]].numpy())  # numpy's integers: callers may call .item() on an index

    def set_epoch(self, epoch: int) -> None:
        """Deal the records out anew for this epoch. Call it with the same number on every rank."""
        self.epoch = epoch

    def _own_records(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.rank, self.total_size, self.num_replicas)
        order = torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
        return torch.randperm(self.total_size, generator=order)[self.rank :: self.num_replicas]


def poisson_mask(num_samples: int, sample_rate: float, generator: torch.Generator | None) -> Tensor:
    """Draw which records take part in one batch.

    Args:
        num_samples: number of records N.
        sample_rate: probability q of each, in (0, 1].
        generator: stream of the draws; they are made on its device. torch's default CPU stream when `None`.

    Returns:
        `[N]`, bool, on the CPU.

    Formal guarantee:
        Entries are independent and true with probability `floor(q * 2**53) / 2**53`.
    """
    threshold = math.floor(sample_rate * _RESOLUTION)
    device = "cpu" if generator is None else generator.device
    chunks = []
    for start in range(0, num_samples, _DRAWN_AT_ONCE):
        size = min(_DRAWN_AT_ONCE, num_samples - start)
        draws = torch.empty(size, dtype=torch.int64, device=device).random_(
            0, _RESOLUTION, generator=generator
        )
        chunks.append((draws < threshold).cpu())
    return torch.cat(chunks)


def steps_per_epoch(sample_rate: float) -> int:
    """Number of batches in which each record takes part once on average, `1 / sample_rate` rounded down.

    Float rounding does not lose a batch, and there is always one.

    Example:
        >>> steps_per_epoch(1 / 49), steps_per_epoch(0.3), steps_per_epoch(0.7)
        (49, 3, 1)
    """
    return max(1, math.floor(1 / sample_rate * (1 + 1e-9)))


def sampler_problems(size_name: str, size: int, sample_rate: float, steps: int | None) -> list[str]:
    """Say what is wrong with a sampler's arguments, one sentence each.

    Args:
        size_name: what the caller calls the number of records.
        size: number of records.
        sample_rate: probability of each record.
        steps: batches per iteration, or `None` for the default.
    """
    problems = []
    if not isinstance(size, numbers.Integral) or size < 1:
        problems.append(f"{size_name} should be a positive integer value, but it is {size!r}.")
    if not isinstance(sample_rate, numbers.Real) or not 0 < sample_rate <= 1:
        problems.append(f"sample_rate is a probability above 0 and at most 1, but it is {sample_rate!r}.")
    if steps is not None and (not isinstance(steps, numbers.Integral) or steps < 0):
        problems.append(f"steps is a number of batches, but it is {steps!r}.")
    return problems
