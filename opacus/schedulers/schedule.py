"""What the noise and the clipping schedules have in common: an epoch counter, one optimizer attribute, and checks."""

from __future__ import annotations

import math
import numbers
from typing import Any, ClassVar

from opacus.errors import ConfigurationError, raise_if_any

__all__ = ["Schedule", "function_problems", "gamma_problems", "step_size_problems"]


class Schedule:
    """Sets one attribute of an optimizer, epoch by epoch.

    Subclasses name the `attribute` and give its value for the epoch `last_epoch`. Construction reaches epoch
    `last_epoch + 1`, and each `step()` one more.

    Args:
        optimizer: the optimizer whose attribute is set.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: when the optimizer has no such attribute, or the first value makes no sense.
    """

    attribute: ClassVar[str]
    not_saved: ClassVar[tuple[str, ...]] = ("optimizer",)

    def __init__(self, optimizer: Any, *, last_epoch: int = -1) -> None:
        if not hasattr(optimizer, self.attribute):
            kind = type(optimizer).__qualname__
            problem = f"optimizer, a {kind}, has no {self.attribute}. Pass the optimizer that make_private returned."
            raise ConfigurationError(f"{type(self).__name__} cannot start", [problem])
        self.optimizer = optimizer
        self.last_epoch = last_epoch
        self.step()

    def value(self) -> float:
        """Value of the attribute in epoch `last_epoch`, given its present value."""
        raise NotImplementedError(f"{type(self).__name__} does not say its value")

    def step(self) -> None:
        """Go to the next epoch and set the optimizer's attribute.

        Raises:
            ConfigurationError: for a value that is not positive and finite; the schedule and the optimizer stay as they were.
                A zero is let through only where the attribute is zero already.
            ValueError: as the optimizer, within a logical batch.
        """
        present = getattr(self.optimizer, self.attribute)
        self.last_epoch += 1
        try:
            value = self.value()
            raise_if_any(f"{type(self).__name__} cannot go on", self._problems(value, present))
            setattr(self.optimizer, self.attribute, value)
        except BaseException:
            self.last_epoch -= 1
            raise

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on: the epoch, the settings and the attribute's present value. No functions."""
        state = {key: value for key, value in vars(self).items() if key not in self.not_saved}
        return {**state, self.attribute: getattr(self.optimizer, self.attribute)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: epoch, settings, and the optimizer's attribute where the state has it."""
        state = dict(state_dict)
        if self.attribute in state:
            setattr(self.optimizer, self.attribute, state.pop(self.attribute))
        vars(self).update(state)

    def _problems(self, value: Any, present: Any) -> list[str]:
        if isinstance(value, numbers.Real) and (0 < float(value) < math.inf or value == present == 0):
            return []
        return [
            f"{self.attribute} would become {value!r} in epoch {self.last_epoch}. It must stay positive and finite."
        ]


def gamma_problems(gamma: Any) -> list[str]:
    """Say what is wrong with a factor per epoch."""
    if isinstance(gamma, numbers.Real) and 0 < float(gamma) < math.inf:
        return []
    return [f"gamma is {gamma!r}. It must be a positive, finite factor."]


def step_size_problems(step_size: Any) -> list[str]:
    """Say what is wrong with a number of epochs between changes."""
    if isinstance(step_size, numbers.Integral) and int(step_size) >= 1:
        return []
    return [f"step_size is {step_size!r}. It must be a positive number of epochs."]


def function_problems(name: str, function: Any) -> list[str]:
    """Say what is wrong with a function of the epoch."""
    return [] if callable(function) else [f"{name} is {function!r}. It must be a function of the epoch."]
