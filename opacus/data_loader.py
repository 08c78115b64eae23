"""Poisson-sampled data loading: `DPDataLoader`, and batches without records for collate functions that need some."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import default_collate

from opacus.errors import ConfigurationError, raise_if_any
from opacus.utils.collate import CollateFnWithEmpty, dtype_safe, shape_safe, wrap_collate_with_empty
from opacus.utils.resumable import ResumableDataLoader
from opacus.utils.sample_rate import dataset_problems, loader_problems, replaced_sampler, sample_rate_of
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    sampler_problems,
)

__all__ = [
    "CollateFnWithEmpty",
    "DPDataLoader",
    "dtype_safe",
    "loader_problems",
    "loading_settings",
    "sample_rate_of",
    "sampling_generator",
    "shape_safe",
    "switch_generator",
    "wrap_collate_with_empty",
]

_CARRIED_OVER = (
    "num_workers",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class DPDataLoader(ResumableDataLoader):
    """A data loader whose batches are Poisson samples, as the privacy accountants assume.

    Every record is in each batch independently with probability `sample_rate`, so batches vary in size and may be empty.
    An empty batch has the structure, dtypes and trailing shapes of any other, and zero rows: it is made from record 0
    of the data set the first time one is needed, so even the very first batch may be empty, and `collate_fn` never
    sees an empty list. An epoch is `1 / sample_rate` batches.

    Args:
        dataset: map-style data set.
        sample_rate: probability of each record, in (0, 1].
        collate_fn: merges a list of records into a batch; torch's default when `None`.
        drop_last: ignored, with a warning: a Poisson batch has no missing records.
        generator: stream of the draws, on any device; torch's default CPU stream when `None`.
        distributed: draw this rank's share only; the ranks' batches together are one Poisson batch.
        batch_first: whether dimension 0 (else 1) counts records, where that cannot be told by collating two records.
        rand_on_empty: in place of an empty batch, yield one made-up record of random 0s and 1s, for models that cannot
            process zero rows. See the formal guarantee.
        process_group: with `distributed`, the ranks that share the records; all ranks when `None`.
        **kwargs: passed on to `torch.utils.data.DataLoader`.

    Raises:
        ConfigurationError: listing everything that is wrong with the arguments.

    Formal guarantee:
        Given all other draws, each record takes part in a batch with probability at most `sample_rate`, and less than
        2**-53 below it. No tensor of an empty batch depends on a record's values, beyond the trailing shape of
        record 0. With `rand_on_empty=True` the made-up record's clipped gradient (norm up to C) joins the sum exactly when no
        record was drawn: then adding or removing a record can move the sum by 2C, which accountants do not cover.

    Example:
        >>> data = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.zeros(4))
        >>> [tuple(x.shape) for x in next(iter(DPDataLoader(data, sample_rate=1e-12)))]
        [(0, 3), (0,)]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        sample_rate: float,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        distributed: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        process_group: Any = None,
        **kwargs: Any,
    ) -> None:
        raise_if_any(
            "a Poisson-sampled data loader cannot start", _argument_problems(dataset, sample_rate, kwargs)
        )
        size = len(dataset)  # type: ignore[arg-type]
        self.sample_rate = sample_rate
        self.distributed = distributed
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.process_group = process_group
        sampler: Sampler[list[int]]
        if distributed:
            sampler = DistributedUniformWithReplacementSampler(
                total_size=size, sample_rate=sample_rate, generator=generator, process_group=process_group
            )
        else:
            sampler = UniformWithReplacementSampler(
                num_samples=size, sample_rate=sample_rate, generator=generator
            )
        if drop_last:
            warnings.warn(
                "drop_last is ignored: Poisson batches have no fixed size to fall short of.", stacklevel=2
            )
        if rand_on_empty:
            warnings.warn(
                "rand_on_empty=True puts a made-up record in place of an empty batch; its gradient doubles the "
                "sensitivity of that step, which the accountant does not know. Prefer a model that accepts zero rows.",
                stacklevel=2,
            )
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=CollateFnWithEmpty(
                _unwrapped(collate_fn) or default_collate, batch_first, rand_on_empty, dataset=dataset
            ),
            generator=_host_generator(generator),
            **kwargs,
        )

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader,
        *,
        distributed: bool = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        process_group: Any = None,
    ) -> DPDataLoader:
        """Make the Poisson-sampled loader that takes the place of `data_loader`.

        Data set, collate function, workers, pinning and prefetching are carried over; batches are drawn anew, at the
        rate `sample_rate_of(data_loader)`. A sampler that would have chosen records in a way of its own (weights, a
        subset) is replaced with a warning that names it.

        Args:
            data_loader: loader over a map-style data set, with a batch size. It is left as it is.
            distributed: draw this rank's share only.
            generator: stream of the draws; the loader's own when `None`.
            batch_first, rand_on_empty, process_group: as in `DPDataLoader`.

        Raises:
            ConfigurationError: listing everything that is wrong with the loader.

        Example:
            >>> loader = DataLoader(torch.utils.data.TensorDataset(torch.ones(100, 3)), batch_size=10)
            >>> DPDataLoader.from_data_loader(loader).sample_rate
            0.1
        """
        sample_rate = sample_rate_of(data_loader)
        replaced = replaced_sampler(data_loader)
        if replaced is not None:
            warnings.warn(
                f"Poisson sampling replaces {replaced}: each of the data set's {len(data_loader.dataset)} "  # type: ignore[arg-type]
                f"records is drawn with the same probability {sample_rate:g}. To train on a part of the data set, pass "
                "torch.utils.data.Subset.",
                stacklevel=2,
            )
        return cls(
            data_loader.dataset,
            sample_rate=sample_rate,
            collate_fn=data_loader.collate_fn,
            generator=sampling_generator(data_loader) if generator is None else generator,
            distributed=distributed,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            process_group=process_group,
            **loading_settings(data_loader),
        )


def switch_generator(*, data_loader: DataLoader, generator: torch.Generator) -> DataLoader:
    """Make a loader that draws its batches from another stream. `data_loader` is left as it is.

    Args:
        data_loader: a loader whose (batch) sampler draws at random: `DPDataLoader`, or a shuffled one.
        generator: stream of the draws.

    Returns:
        A `DPDataLoader` for a `DPDataLoader`, else a `DataLoader`.

    Raises:
        ConfigurationError: when the sampler has no generator to switch, e.g. without shuffling.
    """
    batching: Any = data_loader.batch_sampler
    holder: Any = (
        batching if hasattr(batching, "generator") else getattr(batching, "sampler", data_loader.sampler)
    )
    if not hasattr(holder, "generator"):
        problem = f"the data loader's {type(holder).__qualname__} has no generator. Shuffle, or sample with DPDataLoader."
        raise ConfigurationError("the data loader's generator cannot be switched", [problem])
    if isinstance(data_loader, DPDataLoader):
        return DPDataLoader.from_data_loader(
            data_loader,
            distributed=data_loader.distributed,
            generator=generator,
            batch_first=data_loader.batch_first,
            rand_on_empty=data_loader.rand_on_empty,
            process_group=data_loader.process_group,
        )
    switched = copy.copy(holder)
    switched.generator = generator
    chosen: dict[str, Any]
    if holder is batching:
        chosen = {"batch_sampler": switched}
    elif isinstance(batching, BatchSampler):
        outer = copy.copy(batching)
        outer.sampler = switched
        chosen = {"batch_sampler": outer}
    else:
        chosen = {"batch_size": None, "sampler": switched}
    return DataLoader(
        data_loader.dataset,
        collate_fn=data_loader.collate_fn,
        generator=_host_generator(generator),
        **chosen,
        **loading_settings(data_loader),
    )


def _argument_problems(dataset: Any, sample_rate: float, kwargs: dict[str, Any]) -> list[str]:
    problems = dataset_problems(dataset)
    problems += sampler_problems("len(dataset)", 1 if problems else len(dataset), sample_rate, None)
    for name, default in (("batch_size", 1), ("shuffle", None), ("sampler", None), ("batch_sampler", None)):
        if kwargs.get(name, default) not in (default, False):
            problems.append(
                f"{name} has no meaning under Poisson sampling. Leave it out, and set sample_rate."
            )
    return problems


def loading_settings(data_loader: DataLoader) -> dict[str, Any]:
    """Settings that say how a loader loads, not what: keyword arguments of this torch version's `DataLoader`."""
    return {name: getattr(data_loader, name) for name in _CARRIED_OVER if hasattr(data_loader, name)}


def sampling_generator(data_loader: DataLoader) -> torch.Generator | None:
    """The stream batches are drawn from, which for a Poisson sampler may be on an accelerator."""
    return getattr(data_loader.batch_sampler, "generator", None) or data_loader.generator


def _host_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The stream torch's loader draws its workers' seeds from, which must be on the CPU."""
    if generator is None or generator.device.type == "cpu":
        return generator
    return torch.Generator().manual_seed(generator.initial_seed())


def _unwrapped(collate_fn: Any) -> Any:
    return collate_fn.collator_fn if isinstance(collate_fn, CollateFnWithEmpty) else collate_fn
