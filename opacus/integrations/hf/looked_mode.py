"""A model as training has it, but for its randomness: what happens in training only must be looked at, and repeat."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus.utils.random_states import default_states
from opacus.validators.batch_norm import is_fixed_map

__all__ = ["TrainingWithoutRandomness", "drawn_states", "same_states"]

logger = logging.getLogger(__name__)

_ROUNDS = 4
T = TypeVar("T")


class TrainingWithoutRandomness:
    """Within `with`, a model is in training mode with every dropout off; afterwards it is as it was.

    Off are dropout modules, and every probability whose name has "drop" in it, which models give to functional dropout, to
    attention, or to what skips whole layers. `settled` finds modules that draw random numbers all the same; these alone
    are looked at in `eval()`. A frozen BatchNorm that normalises by stored statistics stays in `eval()`, too.

    Args:
        model: the trainer's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._drawing: set[nn.Module] = set()

    def __enter__(self) -> TrainingWithoutRandomness:
        self._modes = [(module, module.training) for module in self.model.modules()]
        self._fixed = [
            module
            for module in self.model.modules()
            if isinstance(module, (_BatchNorm, _InstanceNorm)) and is_fixed_map(module)
        ]
        self._chances = [
            (module, name, value)
            for module in self.model.modules()
            for name, value in vars(module).items()
            if type(value) is float
            and value > 0
            and ("drop" in name.lower() or (name == "p" and "drop" in type(module).__name__.lower()))
        ]
        for module, name, _ in self._chances:
            setattr(module, name, 0.0)
        self.model.train()
        self.apply()
        return self

    def __exit__(self, *exc: object) -> None:
        for module, name, value in self._chances:
            setattr(module, name, value)
        for module, training in self._modes:
            module.training = training

    def apply(self) -> None:
        """Switch to `eval()` what must be; again after something else has set the modules' modes."""
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False
        for module in (*self._fixed, *self._drawing):
            module.training = False

    def settled(self, run: Callable[[], T]) -> T:
        """What `run` returns once no module draws random numbers; most often it is run once.

        The model itself stays in training mode, whatever it draws: trainers ask it for its mode.
        """
        for _ in range(_ROUNDS):
            found, drawing = self._watched(run)
            drawing -= self._drawing | {self.model}
            if not drawing:
                break
            names = sorted(type(module).__name__ for module in drawing)
            logger.info("looked at in eval(), as they draw random numbers in training: %s", ", ".join(names))
            self._drawing |= drawing
            self.apply()
        return found

    def _watched(self, run: Callable[[], T]) -> tuple[T, set[nn.Module]]:
        """Also the innermost modules that drew random numbers."""
        devices = {t.device for t in (*self.model.parameters(), *self.model.buffers())}
        drawing: set[nn.Module] = set()
        calls: list[
            tuple[dict[str, Any], list[bool]]
        ] = []  # of modules that are running: state, children drew

        def before(module: nn.Module, args: Any) -> None:
            calls.append((drawn_states(devices), []))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            state, inner = calls.pop()
            drew = not same_states(state, drawn_states(devices))
            if drew and not any(inner):
                drawing.add(module)
            if calls:
                calls[-1][1].append(drew)

        handles: list[Any] = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(before))
            handles.append(module.register_forward_hook(after))
        try:
            return run(), drawing
        finally:
            for handle in handles:
                handle.remove()


def drawn_states(devices: set[torch.device]) -> dict[str, Any]:
    """Of the default generators of torch, NumPy and Python."""
    kept: Any = np.random.get_state()
    return {
        **default_states(devices),
        "numpy": (kept[1].tobytes(), kept[2:]),
        "python": random.getstate(),
    }


def same_states(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether nothing was drawn between them."""
    return all(
        torch.equal(value, b[name]) if isinstance(value, Tensor) else value == b[name]
        for name, value in a.items()
    )
