"""Checks of the numbers every accountant takes, collected so that one error names them all."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from opacus.errors import raise_if_any

__all__ = ["check_numbers", "number_problems"]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def number_problems(
    *, noise_multiplier: Any = 1.0, sample_rate: Any = 0.5, steps: Any = 1, delta: Any = 0.5
) -> list[str]:
    """One sentence for each argument outside its range; arguments left out are taken as fine."""
    problems = []
    if not (_is_number(noise_multiplier) and noise_multiplier >= 0):
        problems.append(f"noise_multiplier is {noise_multiplier!r}; pass a number that is at least 0.")
    if not (_is_number(sample_rate) and 0 <= sample_rate <= 1):
        problems.append(f"sample_rate is {sample_rate!r}; pass a number from 0 to 1.")
    if not (_is_number(steps) and steps >= 0 and math.isfinite(steps)):
        problems.append(f"steps is {steps!r}; pass a finite number that is at least 0.")
    if not (_is_number(delta) and 0 < delta < 1):
        problems.append(f"delta is {delta!r}; pass a number strictly between 0 and 1.")
    return problems


def check_numbers(heading: str, **numbers: Any) -> None:
    """Raise one named error for all of `numbers` that are out of range.

    Args:
        heading: what cannot be done.
        **numbers: any of `noise_multiplier`, `sample_rate`, `steps` and `delta`.

    Raises:
        ConfigurationError: naming each number that is NaN, negative or too large.
    """
    raise_if_any(heading, number_problems(**numbers))
