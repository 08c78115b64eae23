"""How often a data loader shows each record, and what keeps a loader from being Poisson sampled at all.

The rate comes from the batch size and the size of the data set. A sampler's own length says nothing about it: a
`WeightedRandomSampler` may draw any number of records per epoch.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from opacus.errors import raise_if_any

__all__ = ["dataset_problems", "loader_problems", "replaced_sampler", "sample_rate_of"]


def sample_rate_of(data_loader: DataLoader) -> float:
    """Probability with which Poisson sampling in place of this loader includes each record in a batch.

    Args:
        data_loader: a loader over a data set of known size, with a batch size; or one that is Poisson sampled already.

    Returns:
        One over the number of batches in which the loader would show every record once: `1 / ceil(N / batch_size)`, with
        `drop_last` `1 / floor(N / batch_size)`. Under a `DistributedSampler` N is a rank's share, so the rate is that
        of the batches of all ranks together. A Poisson sampler's own rate where there is one.

    Raises:
        ConfigurationError: listing what `loader_problems` finds.

    Example:
        >>> sample_rate_of(DataLoader(range(1000), batch_size=8))
        0.008
    """
    raise_if_any("the sample rate of the data loader is unknown", loader_problems(data_loader))
    rate = _own_rate(data_loader)
    return 1 / _batches_per_epoch(data_loader) if rate is None else rate


def loader_problems(data_loader: Any) -> list[str]:
    """Say what keeps `data_loader` from being replaced by a Poisson-sampled one.

    Args:
        data_loader: what the user passed.

    Returns:
        One sentence for each problem, with what to do; empty when there is none.
    """
    if not isinstance(data_loader, DataLoader):
        return [f"data_loader is a {_class_name(data_loader)}. Pass a torch.utils.data.DataLoader."]
    problems = dataset_problems(data_loader.dataset)
    if _own_rate(data_loader) is not None:
        return problems
    batch_size = _batch_size(data_loader)
    if batch_size is None:
        batching = data_loader.batch_sampler
        if batching is None:
            problems.append(
                "the data loader has batch_size=None. Give it a batch size, or a batch sampler with one."
            )
        else:
            problems.append(
                f"the data loader's batch sampler, a {_class_name(batching)}, has no batch_size. Build the loader with "
                "DataLoader(dataset, batch_size=...), or give the batch sampler a batch_size."
            )
    elif not isinstance(batch_size, int) or batch_size < 1:
        problems.append(
            f"the data loader's batch_size is {batch_size!r}. It must be a positive number of records."
        )
    elif not problems and _batches_per_epoch(data_loader) < 1:
        problems.append(
            f"the data loader has drop_last=True and a batch_size of {batch_size}, more than its {_records(data_loader)} "
            "records, so it has no batch. Lower the batch size or drop drop_last."
        )
    return problems


def dataset_problems(dataset: Any) -> list[str]:
    """Say what keeps a data set's records from being drawn by index."""
    kind = _class_name(dataset)
    if isinstance(dataset, IterableDataset):
        return [
            f"the data set, a {kind}, is an IterableDataset: its records cannot be drawn by index. Use a map-style data "
            "set (with __len__ and __getitem__), or poisson_sampling=False where the accountant's assumptions allow it."
        ]
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        return [f"the data set, a {kind}, has no length. Give it a __len__."]
    return [f"the data set, a {kind}, is empty. Pass a data set with records."] if length == 0 else []


def replaced_sampler(data_loader: DataLoader) -> str | None:
    """Name the class of a sampler whose choice of records would be lost to Poisson sampling.

    Returns:
        `None` for plain shuffled or sequential loaders, and for loaders that are Poisson sampled already.
    """
    if _own_rate(data_loader) is not None:
        return None
    if type(data_loader.batch_sampler) is not BatchSampler:
        return _class_name(data_loader.batch_sampler)
    sampler = data_loader.batch_sampler.sampler
    shows_each_record_once = isinstance(sampler, (SequentialSampler, DistributedSampler)) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(data_loader.dataset)  # type: ignore[arg-type]
    )
    return None if shows_each_record_once else _class_name(sampler)


def _own_rate(data_loader: DataLoader) -> float | None:
    """The rate of a loader that is Poisson sampled already."""
    return getattr(data_loader.batch_sampler, "sample_rate", None)


def _batch_size(data_loader: DataLoader) -> Any:
    if data_loader.batch_size is not None:
        return data_loader.batch_size
    return getattr(data_loader.batch_sampler, "batch_size", None)


def _records(data_loader: DataLoader) -> int:
    """Records a rank sees per epoch."""
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    sampler = getattr(data_loader.batch_sampler, "sampler", data_loader.sampler)
    if not isinstance(sampler, DistributedSampler):
        return size
    return size // sampler.num_replicas if sampler.drop_last else math.ceil(size / sampler.num_replicas)


def _batches_per_epoch(data_loader: DataLoader) -> int:
    batches = _records(data_loader) / _batch_size(data_loader)
    drop_last = getattr(data_loader.batch_sampler, "drop_last", data_loader.drop_last)
    return math.floor(batches) if drop_last else math.ceil(batches)


def _class_name(thing: Any) -> str:
    return type(thing).__qualname__
