"""What every accountant is: a history of steps, and a way to turn it into epsilon."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from opacus.accountants.analysis.checks import check_numbers, number_problems
from opacus.errors import raise_if_any

__all__ = ["IAccountant"]

HistoryEntry = tuple[float, float, int]


class IAccountant(ABC):
    """Records the steps of a run of DP-SGD and states the privacy they spent.

    A subclass names its `mechanism` and computes `get_epsilon` from `history`: a list of
    ``(noise_multiplier, sample_rate, number of steps)``, consecutive equal steps merged.
    """

    def __init__(self) -> None:
        self.history: list[HistoryEntry] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one optimizer step.

        Args:
            noise_multiplier: standard deviation of this step's noise over the clipping norm, at least 0.
            sample_rate: probability with which each sample was in this step's logical batch, 0 to 1.

        Raises:
            ConfigurationError: if either is NaN or out of range; nothing is recorded then.
        """
        check_numbers(
            "the step cannot be accounted", noise_multiplier=noise_multiplier, sample_rate=sample_rate
        )
        mechanism = (float(noise_multiplier), float(sample_rate))
        if self.history and tuple(self.history[-1][:2]) == mechanism:
            self.history[-1] = (*mechanism, self.history[-1][2] + 1)
        else:
            self.history.append((*mechanism, 1))

    @abstractmethod
    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """Epsilon such that the recorded steps are (epsilon, delta)-differentially private.

        Args:
            delta: probability strictly between 0 and 1.
            *args: options of the accountant.
            **kwargs: options of the accountant.
        """

    @classmethod
    @abstractmethod
    def mechanism(cls) -> str:
        """Name under which the accountant is registered, such as ``"rdp"``."""

    def __len__(self) -> int:
        """Number of steps recorded."""
        return sum(steps for _, _, steps in self.history)

    def __bool__(self) -> bool:
        """True, also before the first step: an accountant is not a container."""
        return True

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """A function for `DPOptimizer.attach_step_hook` that records each of the optimizer's steps.

        Args:
            sample_rate: probability with which each sample is in one physical batch, 0 to 1. It is multiplied
                with the number of batches the optimizer accumulated.

        Returns:
            A function of the optimizer.

        Raises:
            ConfigurationError: if `sample_rate` is out of range.
        """
        check_numbers("steps cannot be accounted", sample_rate=sample_rate)

        return _Recorder(self, sample_rate)

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        """The history and the mechanism's name, as plain numbers and strings.

        Args:
            destination: dictionary to fill; a new one if None.

        Returns:
            `destination`, with the keys ``"history"`` and ``"mechanism"``.
        """
        if destination is None:
            destination = OrderedDict()
        destination["history"] = list(self.history)
        destination["mechanism"] = self.mechanism()
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one.

        Args:
            state_dict: what `state_dict` returned, from an accountant of the same mechanism.

        Raises:
            ConfigurationError: naming all that is missing or wrong; the accountant is unchanged then.
        """
        problems = []
        if not isinstance(state_dict, Mapping) or not state_dict:
            problems.append(f"state_dict is {state_dict!r}; pass what state_dict() returned.")
        else:
            problems += [
                f"state_dict has no key {key!r}." for key in ("history", "mechanism") if key not in state_dict
            ]
            saved = state_dict.get("mechanism", self.mechanism())
            if saved != self.mechanism():
                problems.append(
                    f"state_dict was saved by mechanism {saved!r}, this accountant is {self.mechanism()!r}; "
                    f"create the accountant with create_accountant({saved!r})."
                )
            problems += _history_problems(state_dict.get("history", []))
        raise_if_any("the accountant's state cannot be loaded", problems)
        self.history = [
            (float(sigma), float(rate), int(steps)) for sigma, rate, steps in state_dict["history"]
        ]


class _Recorder:
    """An accountant's step hook; an object rather than a closure, so that optimizers that hold it can be pickled."""

    def __init__(self, accountant: IAccountant, sample_rate: float) -> None:
        self.accountant = accountant
        self.sample_rate = sample_rate

    def __call__(self, optimizer: Any) -> None:
        # An empty logical batch accumulates nothing, yet its noise is released: a step like the others.
        rate = self.sample_rate * max(1, optimizer.accumulated_iterations)
        if rate > 1 and math.isclose(rate, 1.0, rel_tol=1e-9):
            rate = 1.0
        self.accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=rate)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        """Itself: what a copied optimizer releases counts against the same budget."""
        return self


def _history_problems(history: Any) -> list[str]:
    if not isinstance(history, (list, tuple)):
        return [f"history is a {type(history).__name__}; it must be a list."]
    problems = []
    for index, entry in enumerate(history):
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            problems.append(f"history[{index}] is {entry!r}, not (noise_multiplier, sample_rate, steps).")
            continue
        sigma, rate, steps = entry
        found = number_problems(noise_multiplier=sigma, sample_rate=rate, steps=steps)
        if not found and steps != int(steps):
            found.append(f"steps is {steps!r}; pass a whole number.")
        problems += [f"history[{index}]: {problem}" for problem in found]
    return problems
