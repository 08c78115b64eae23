"""The noise multiplier that spends a given epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from opacus.accountants.analysis.checks import number_problems
from opacus.accountants.registry import create_accountant
from opacus.errors import ConfigurationError, raise_if_any

__all__ = ["get_noise_multiplier", "steps_of"]

MAX_SIGMA = 1e6
_MIN_SIGMA = 1e-3


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
    epsilon_tolerance: float = 0.01,
    **kwargs: Any,
) -> float:
    """Smallest noise multiplier, up to the tolerance, whose run stays within the target epsilon.

    Args:
        target_epsilon: epsilon the whole run may spend, positive.
        target_delta: probability strictly between 0 and 1.
        sample_rate: probability with which each sample enters a batch, above 0 and at most 1.
        epochs: passes over the data; ``epochs / sample_rate`` steps, rounded down.
        steps: optimizer steps; give either this or `epochs`.
        accountant: registered name of the accountant.
        epsilon_tolerance: how far below the target the run's epsilon may be.
        **kwargs: passed to the accountant's `get_epsilon`.

    Returns:
        Noise multiplier: the standard deviation of the noise over the clipping norm.

    Raises:
        ConfigurationError: naming every argument out of range, or a target that no noise multiplier up to
            `MAX_SIGMA` meets.

    Formal guarantee:
        The accountant's epsilon for the returned noise multiplier, evaluated and not extrapolated, is at most
        `target_epsilon`. It is at least ``target_epsilon - epsilon_tolerance`` (and within 1% of the target)
        wherever epsilon as a function of the noise multiplier takes such a value.

    Example:
        >>> sigma = get_noise_multiplier(target_epsilon=8, target_delta=1e-5, sample_rate=0.01, steps=1000)
        >>> round(sigma, 2)
        0.62
    """
    problems = [
        problem.replace("delta is", "target_delta is")
        for problem in number_problems(delta=target_delta, sample_rate=sample_rate)
    ]
    if sample_rate == 0:
        problems.append("sample_rate is 0; pass a number above 0 and at most 1.")
    for name, value in (("target_epsilon", target_epsilon), ("epsilon_tolerance", epsilon_tolerance)):
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            problems.append(f"{name} is {value!r}; pass a finite number above 0.")
    problems += _length_problems(epochs, steps)
    heading = "no noise multiplier can be found"
    raise_if_any(heading, problems)
    count = steps_of(sample_rate=sample_rate, epochs=epochs, steps=steps)
    spent = create_accountant(accountant)

    def epsilon_of(sigma: float) -> float:
        spent.history = [(sigma, float(sample_rate), count)]
        return spent.get_epsilon(target_delta, **kwargs)

    floor = max(target_epsilon - epsilon_tolerance, 0.99 * target_epsilon)
    found = _search(epsilon_of, floor, target_epsilon)
    if found is None:
        raise ConfigurationError(
            heading,
            [
                f"target_epsilon {target_epsilon!r} at target_delta {target_delta!r} is too low: with "
                f"noise_multiplier {MAX_SIGMA:g} accountant {accountant!r} still spends {epsilon_of(MAX_SIGMA):.3g} "
                f"over {count} steps. Raise a target, or train for fewer steps."
            ],
        )
    return found


def steps_of(*, sample_rate: float, epochs: float | None = None, steps: int | None = None) -> int:
    """Number of optimizer steps of a run whose length is given in epochs or in steps.

    Args:
        sample_rate: probability with which each sample enters a batch, above 0 and at most 1.
        epochs: passes over the data; ``epochs / sample_rate`` steps, rounded down.
        steps: optimizer steps; give either this or `epochs`.

    Raises:
        ConfigurationError: naming every argument out of range, or if the run has no step.

    Example:
        >>> steps_of(sample_rate=1 / 49, epochs=3)
        147
    """
    problems = number_problems(sample_rate=sample_rate)
    if sample_rate == 0:
        problems.append("sample_rate is 0; pass a number above 0 and at most 1.")
    problems += _length_problems(epochs, steps)
    heading = "the number of steps cannot be computed"
    raise_if_any(heading, problems)
    # A hair more, so that a quotient that should be whole is not rounded down to one step less.
    count = int(steps if steps is not None else (epochs or 0) / sample_rate * (1 + 1e-12))
    if count < 1:
        raise_if_any(
            heading, [f"epochs={epochs!r}, steps={steps!r} amount to no step; train for at least one."]
        )
    return count


def _length_problems(epochs: float | None, steps: int | None) -> list[str]:
    problems = []
    if (epochs is None) == (steps is None):
        problems.append(f"epochs is {epochs!r} and steps is {steps!r}; pass exactly one of them.")
    for name, length in (("epochs", epochs), ("steps", steps)):
        if length is not None and not (isinstance(length, (int, float)) and 0 < length < math.inf):
            problems.append(f"{name} is {length!r}; pass a finite number above 0.")
    return problems


def _search(epsilon_of: Callable[[float], float], floor: float, target: float) -> float | None:
    """Noise multiplier whose epsilon lies in [floor, target], or the closest one below the target.

    Keeps a bracket: too much epsilon at `low`, not too much at `high`. Inside it, epsilon is close to a power of
    the noise multiplier, so the next guess is linear interpolation of logarithms (Illinois variant of regula
    falsi); bisection where epsilon is zero or infinite, and where that makes no headway.
    """
    low = high = 1.0
    low_epsilon = high_epsilon = epsilon_of(1.0)
    while high_epsilon > target:
        if high >= MAX_SIGMA:
            return None
        low, low_epsilon = high, high_epsilon
        high = min(2 * high, MAX_SIGMA)
        high_epsilon = epsilon_of(high)
    while low_epsilon <= target:
        if low_epsilon >= floor or low <= _MIN_SIGMA:
            return low
        high, high_epsilon = low, low_epsilon
        low = max(low / 2, _MIN_SIGMA)
        low_epsilon = epsilon_of(low)

    aim = (floor + target) / 2
    low_gap, high_gap = _log_ratio(low_epsilon, aim), _log_ratio(high_epsilon, aim)
    side, stuck = 0, 0
    while high_epsilon < floor and high / low > 1 + 1e-7:
        width = high / low
        usable = math.isfinite(low_gap - high_gap) and low_gap > 0 > high_gap and stuck < 3
        share = low_gap / (low_gap - high_gap) if usable else 0.5
        middle = low * width**share
        if not low < middle < high:
            middle = math.sqrt(low * high)
        epsilon = epsilon_of(middle)
        if epsilon <= target:
            high, high_epsilon, high_gap = middle, epsilon, _log_ratio(epsilon, aim)
            low_gap = low_gap / 2 if side == 1 else low_gap
            side = 1
        else:
            low, low_gap = middle, _log_ratio(epsilon, aim)
            high_gap = high_gap / 2 if side == -1 else high_gap
            side = -1
        stuck = stuck + 1 if usable and math.log(high / low) > 0.7 * math.log(width) else 0
    return high


def _log_ratio(epsilon: float, aim: float) -> float:
    return math.log(epsilon / aim) if epsilon > 0 else -math.inf
