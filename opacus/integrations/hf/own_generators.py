"""Generators of random numbers that a collate function or a data set holds for itself: found, told apart, set and put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["own_generators", "seed_default_generators", "seed_own_generators"]

_DEPTH = 4  # of attributes of attributes
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class own_generators:
    """Within it, generators that `holder` has are as they were at the start; afterwards again.

    Entering returns what tells their states.
    """

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __enter__(self) -> Callable[[], list[str]]:
        self._kept = {id(owner): dict(vars(owner)) for owner in _owners(self.holder)}
        self._states = [(vars(o)[name], _state(vars(o)[name])) for o, name in _found(self.holder)]
        return lambda: [_told(vars(o)[name]) for o, name in _found(self.holder)]

    def __exit__(self, *exc: object) -> None:
        for owner, name in _found(self.holder):  # those made meanwhile go
            if name in self._kept.get(id(owner), {}):
                setattr(owner, name, self._kept[id(owner)][name])
        for own, state in self._states:
            _set(own, state)


def seed_default_generators(seed: int) -> None:
    """Of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def seed_own_generators(holder: Any, seed: int) -> None:
    """All that `holder` has."""
    for owner, name in _found(holder):
        own = vars(owner)[name]
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
        elif isinstance(own, np.random.Generator):
            own.bit_generator.state = type(own.bit_generator)(seed).state
        else:
            own.seed(seed)


def _owners(holder: Any) -> list[Any]:
    """Objects that may hold generators: `holder`, and those that it wraps or has as attributes."""
    found: dict[int, Any] = {}
    level = [holder]
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for owner in level:
            parts = [owner, getattr(owner, "__self__", None), getattr(owner, "func", None)]
            for part in parts:
                plain = part is not None and not isinstance(part, (type, ModuleType, nn.Module, Tensor))
                if plain and id(part) not in found and hasattr(part, "__dict__"):
                    found[id(part)] = part
                    inner += vars(part).values()
        level = inner
    return list(found.values())


def _found(holder: Any) -> list[tuple[Any, str]]:
    return [
        (owner, name)
        for owner in _owners(holder)
        for name, value in vars(owner).items()
        if isinstance(value, _KINDS)
    ]


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _told(generator: Any) -> str:
    """The whole state as text; that of a tensor or a long array leaves out its middle."""
    state = _state(generator)
    if isinstance(state, Tensor):
        return state.numpy().tobytes().hex()
    with np.printoptions(threshold=10_000):
        return repr(state)
