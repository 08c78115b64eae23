"""Going on in the middle of an epoch: how far a pass over the batches has come, and loaders that start a pass there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from opacus.utils.random_states import generator_state, restore_generator, state_problems

__all__ = ["BatchCounter", "ResumableDataLoader", "Sampling"]


class BatchCounter:
    """Counts the batches a sampler has drawn in the pass going on.

    A pass that is broken off (its iterator dropped) or complete counts no more: the next one is an epoch of its own.
    """

    def __init__(self) -> None:
        self._drawn: int | None = None  # None between passes
        self._start = 0
        self._latest = 0

    @property
    def position(self) -> int:
        """Batches of the present epoch that are behind; 0 between epochs."""
        return self._start if self._drawn is None else self._drawn

    @position.setter
    def position(self, batches: int) -> None:
        """The next pass starts behind this many batches."""
        self._start, self._drawn = batches, None
        self._latest += 1

    @property
    def resumes(self) -> bool:
        """Whether the next pass goes on with an epoch instead of starting one."""
        return self._drawn is None and self._start > 0

    def batches(self, steps: int) -> Iterator[int]:
        """Number the batches of one pass, from `position` to `steps`; to be advanced before each batch is drawn."""
        start, self._start = self._start, 0
        self._latest += 1
        own = self._latest
        try:
            for batch in range(start, steps):
                if self._latest == own:
                    self._drawn = batch + 1
                yield batch
        finally:
            if self._latest == own:
                self._drawn = None


class ResumableDataLoader(DataLoader):
    """A `DataLoader` that draws nothing from its stream when it resumes an epoch.

    torch's loader starts each pass by drawing a seed for its workers. Where an epoch is resumed, that draw belongs to the
    part of it that is over.

    Attributes:
        place: applied to each batch in the main process, e.g. to move it to a device; None leaves batches as they are.
    """

    place: Callable[[Any], Any] | None = None

    def __iter__(self) -> Any:
        batches = self._batches()
        return batches if self.place is None else map(self.place, batches)

    def _batches(self) -> Any:
        counter = _counter(self.batch_sampler)
        if counter is None or not counter.resumes or self.num_workers > 0:
            return super().__iter__()
        state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        iterator = super().__iter__()  # without workers, batches are drawn later, one by one
        if self.generator is None:
            torch.set_rng_state(state)
        else:
            self.generator.set_state(state)
        return iterator


@dataclass
class Sampling:
    """What decides which batches a data loader draws next.

    Args:
        batch_sampler: the loader's.
        generator: the loader's own, of workers' seeds.
        num_workers: with workers, batches are drawn ahead of training, so that a position in the epoch is not known.
    """

    batch_sampler: Any
    generator: torch.Generator | None
    num_workers: int

    @classmethod
    def of(cls, data_loader: DataLoader) -> Sampling:
        """Of a data loader; the data set is not held."""
        return cls(data_loader.batch_sampler, data_loader.generator, data_loader.num_workers)

    def _generators(self) -> dict[str, torch.Generator]:
        inner = getattr(self.batch_sampler, "sampler", None)
        found = {
            "loader": self.generator,
            "sampler": getattr(self.batch_sampler, "generator", None) or getattr(inner, "generator", None),
        }
        return {name: generator for name, generator in found.items() if generator is not None}

    def state_dict(self) -> dict[str, Any]:
        """States of the loader's generators, and the position in the epoch."""
        counter = _counter(self.batch_sampler)
        known = counter is not None and self.num_workers == 0
        return {
            "position": counter.position if known and counter is not None else 0,
            "batches": len(self.batch_sampler),
            "generators": {name: generator_state(g) for name, g in self._generators().items()},
        }

    def problems(self, state: Any) -> list[str]:
        """What is wrong with a saved state, a sentence each."""
        wanted = {"position", "batches", "generators"}
        if (
            not isinstance(state, Mapping)
            or not wanted <= set(state)
            or not isinstance(state["generators"], Mapping)
        ):
            return [f"the data loader's state is {type(state).__name__} without {', '.join(sorted(wanted))}."]
        problems = [
            f"the data loader's {name} is {state[name]!r}, not a number of batches."
            for name in ("position", "batches")
            if not isinstance(state[name], int) or state[name] < 0
        ]
        for name, generator in self._generators().items():
            saved = state["generators"].get(name, {})
            problems += state_problems(f"the data loader's {name} generator", saved, [generator.device])
        return problems

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on where `state` was taken. An epoch of another length than the present one is not resumed but begun anew."""
        for name, generator in self._generators().items():
            restore_generator(generator, state["generators"].get(name, {}))
        counter = _counter(self.batch_sampler)
        if counter is not None:
            counter.position = state["position"] if state["batches"] == len(self.batch_sampler) else 0


def _counter(batch_sampler: Any) -> BatchCounter | None:
    """The counter of a sampler, or of the one it splits."""
    inner = getattr(batch_sampler, "sampler", None)
    return getattr(batch_sampler, "counter", None) or getattr(inner, "counter", None)
