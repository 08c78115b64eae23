"""Schedules for the clipping norm C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.errors import raise_if_any
from opacus.schedulers.schedule import Schedule, function_problems, gamma_problems, step_size_problems

__all__ = ["ExponentialGradClip", "LambdaGradClip", "StepGradClip"]


class _GradClipScheduler(Schedule):
    """Sets `optimizer.max_grad_norm` epoch by epoch; a subclass says to what, in `get_max_grad_norm`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        last_epoch: epoch reached already; -1 for a new run.
    """

    attribute = "max_grad_norm"

    def get_max_grad_norm(self) -> float:
        """Value of `max_grad_norm` in epoch `last_epoch`, given the present one."""
        raise NotImplementedError(f"{type(self).__name__} has no get_max_grad_norm")

    def value(self) -> float:
        return self.get_max_grad_norm()


class ExponentialGradClip(_GradClipScheduler):
    """Multiplies `max_grad_norm` by `gamma` every epoch: `initial * gamma**epoch`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        gamma: factor per epoch, positive and finite.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a `gamma` or an optimizer that cannot be used.

    Formal guarantee:
        Noise is `noise_multiplier * max_grad_norm` at each step, so changing the clipping norm leaves epsilon as it is, as
        long as the schedule depends on the epoch and not on the data.
    """

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        raise_if_any("ExponentialGradClip cannot start", gamma_problems(gamma))
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        present = self.optimizer.max_grad_norm
        return present if self.last_epoch == 0 else present * self.gamma


class LambdaGradClip(_GradClipScheduler):
    """Multiplies the initial `max_grad_norm` by a function of the epoch: `initial * scheduler_function(epoch)`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        scheduler_function: factor for an epoch, counted from 0; not saved in state dicts.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a function or an optimizer that cannot be used, and for a factor that makes
            `max_grad_norm` zero, negative or not finite.

    Formal guarantee:
        Noise is `noise_multiplier * max_grad_norm` at each step, so changing the clipping norm leaves epsilon as it is, as
        long as the schedule depends on the epoch and not on the data.
    """

    not_saved = ("optimizer", "scheduler_function")

    def __init__(
        self, optimizer: Any, *, scheduler_function: Callable[[int], float], last_epoch: int = -1
    ) -> None:
        raise_if_any(
            "LambdaGradClip cannot start", function_problems("scheduler_function", scheduler_function)
        )
        self.scheduler_function = scheduler_function
        self.base_max_grad_norm: Any = getattr(optimizer, "max_grad_norm", None)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        return self.base_max_grad_norm * self.scheduler_function(self.last_epoch)


class StepGradClip(_GradClipScheduler):
    """Multiplies `max_grad_norm` by `gamma` every `step_size` epochs: `initial * gamma**(epoch // step_size)`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        step_size: epochs from one change to the next, at least 1.
        gamma: factor per change, positive and finite.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a `gamma`, a `step_size` or an optimizer that cannot be used.

    Formal guarantee:
        Noise is `noise_multiplier * max_grad_norm` at each step, so changing the clipping norm leaves epsilon as it is, as
        long as the schedule depends on the epoch and not on the data.
    """

    def __init__(self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        raise_if_any("StepGradClip cannot start", step_size_problems(step_size) + gamma_problems(gamma))
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_max_grad_norm(self) -> float:
        present = self.optimizer.max_grad_norm
        changes = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return present * self.gamma if changes else present
