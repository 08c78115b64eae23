"""Schedules for the noise multiplier sigma."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.errors import raise_if_any
from opacus.schedulers.schedule import Schedule, function_problems, gamma_problems, step_size_problems

__all__ = ["ExponentialNoise", "LambdaNoise", "StepNoise"]


class _NoiseScheduler(Schedule):
    """Sets `optimizer.noise_multiplier` epoch by epoch; a subclass says to what, in `get_noise_multiplier`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        last_epoch: epoch reached already; -1 for a new run.
    """

    attribute = "noise_multiplier"

    def get_noise_multiplier(self) -> float:
        """Value of `noise_multiplier` in epoch `last_epoch`, given the present one."""
        raise NotImplementedError(f"{type(self).__name__} has no get_noise_multiplier")

    def value(self) -> float:
        return self.get_noise_multiplier()


class ExponentialNoise(_NoiseScheduler):
    """Multiplies `noise_multiplier` by `gamma` every epoch: `initial * gamma**epoch`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        gamma: factor per epoch, positive and finite.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a `gamma` or an optimizer that cannot be used.

    Formal guarantee:
        Each step is accounted with the noise multiplier it used, so epsilon follows the schedule. The schedule may depend
        on the epoch but not on the data.
    """

    def __init__(self, optimizer: Any, *, gamma: float, last_epoch: int = -1) -> None:
        raise_if_any("ExponentialNoise cannot start", gamma_problems(gamma))
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        present = self.optimizer.noise_multiplier
        return present if self.last_epoch == 0 else present * self.gamma


class LambdaNoise(_NoiseScheduler):
    """Multiplies the initial `noise_multiplier` by a function of the epoch: `initial * noise_lambda(epoch)`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        noise_lambda: factor for an epoch, counted from 0; not saved in state dicts.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a function or an optimizer that cannot be used, and for a factor that makes
            `noise_multiplier` zero, negative or not finite.

    Formal guarantee:
        Each step is accounted with the noise multiplier it used, so epsilon follows the schedule. The schedule may depend
        on the epoch but not on the data.
    """

    not_saved = ("optimizer", "noise_lambda")

    def __init__(self, optimizer: Any, *, noise_lambda: Callable[[int], float], last_epoch: int = -1) -> None:
        raise_if_any("LambdaNoise cannot start", function_problems("noise_lambda", noise_lambda))
        self.noise_lambda = noise_lambda
        self.base_noise_multiplier: Any = getattr(optimizer, "noise_multiplier", None)
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        return self.base_noise_multiplier * self.noise_lambda(self.last_epoch)


class StepNoise(_NoiseScheduler):
    """Multiplies `noise_multiplier` by `gamma` every `step_size` epochs: `initial * gamma**(epoch // step_size)`.

    Args:
        optimizer: the `DPOptimizer` that `make_private` returned.
        step_size: epochs from one change to the next, at least 1.
        gamma: factor per change, positive and finite.
        last_epoch: epoch reached already; -1 for a new run.

    Raises:
        ConfigurationError: for a `gamma`, a `step_size` or an optimizer that cannot be used.

    Formal guarantee:
        Each step is accounted with the noise multiplier it used, so epsilon follows the schedule. The schedule may depend
        on the epoch but not on the data.
    """

    def __init__(self, optimizer: Any, *, step_size: int, gamma: float, last_epoch: int = -1) -> None:
        raise_if_any("StepNoise cannot start", step_size_problems(step_size) + gamma_problems(gamma))
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self) -> float:
        present = self.optimizer.noise_multiplier
        changes = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return present * self.gamma if changes else present
