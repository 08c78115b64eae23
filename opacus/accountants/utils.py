"""The noise multiplier that spends a given epsilon.

Which one of the many within the tolerance is returned is part of the interface: the one that plain bisection finds,
so that a run repeated elsewhere gets the same noise to the last digit. Bisection asks for epsilon some 15 times;
here a faster search brackets the answer first, and since epsilon falls as noise grows, it then decides most
of bisection's questions.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from opacus.accountants.analysis.checks import number_problems
from opacus.accountants.analysis.search import Bracket, bisect, narrow, pin
from opacus.accountants.rdp import RDPAccountant
from opacus.accountants.registry import create_accountant
from opacus.errors import ConfigurationError, raise_if_any

__all__ = ["get_noise_multiplier", "steps_of"]

MAX_SIGMA = 1e6
_FIRST_SIGMA = 20.0
_CHEAP = ("rdp", "gdp")
_LONG = 100_000  # steps


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
    """A noise multiplier whose run stays within the target epsilon, and below it by no more than the tolerance.

    The number is the one that bisection finds: an upper end of 20, doubled until epsilon is at most the target, and
    a lower end of 0; halved until the upper end's epsilon is within the tolerance.

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
        `target_epsilon`. It is at least ``target_epsilon - epsilon_tolerance`` wherever epsilon as a function
        of the noise multiplier takes such a value; where it jumps across, the noise is the least one up to 1e-6
        of it. With less noise than 0.001 nobody is protected, and the search ends.

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

    start = 1.0
    if accountant not in _CHEAP:
        # Renyi's epsilon costs little, and its answer is near.
        renyi = RDPAccountant()

        def renyi_epsilon_of(sigma: float) -> float:
            renyi.history = [(sigma, float(sample_rate), count)]
            return renyi.get_privacy_spent(delta=target_delta)[0]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on orders, which do not matter here
            rough = Bracket(renyi_epsilon_of, 0.97 * target_epsilon, target_epsilon)
            narrow(rough, 1.0, MAX_SIGMA)
        start = min((x for x, value in rough.values.items() if value <= target_epsilon), default=MAX_SIGMA)
    bracket = Bracket(epsilon_of, target_epsilon - epsilon_tolerance, target_epsilon)
    if not narrow(bracket, start, MAX_SIGMA):
        raise ConfigurationError(
            heading,
            [
                f"target_epsilon {target_epsilon!r} at target_delta {target_delta!r} is too low: with "
                f"noise_multiplier {MAX_SIGMA:g} accountant {accountant!r} still spends {epsilon_of(MAX_SIGMA):.3g} "
                f"over {count} steps. Raise a target, or train for fewer steps."
            ],
        )
    if accountant not in _CHEAP and count > _LONG:
        # each evaluation takes a good part of a second here: the answer found is as good as bisection's
        inside = [x for x, value in bracket.values.items() if bracket.floor <= value <= target_epsilon]
        if inside:
            return min(inside)
    pin(bracket)
    return bisect(bracket, _FIRST_SIGMA)


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
