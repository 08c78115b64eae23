"""Search for the point at which a falling function reaches a range, in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Bracket", "bisect", "narrow", "pin"]

_LEAST = 1e-3
_CLOSE = 1 + 1e-6


class Bracket:
    """What is known of a falling function: where it exceeds a range, lies below it, or inside.

    Args:
        function: falling in its positive argument.
        floor: lower end of the range.
        target: upper end of the range, above `floor` and positive.
    """

    def __init__(self, function: Callable[[float], float], floor: float, target: float) -> None:
        self.floor = floor
        self.target = target
        self.exceeds = 0.0  # the largest argument known to give more than the target
        self.falls_short = math.inf  # the smallest known to give less than the floor
        self.values: dict[float, float] = {}
        self._function = function

    def __call__(self, x: float) -> float:
        """The function at `x`, which then is known."""
        if x not in self.values:
            value = self.values[x] = self._function(x)
            if value > self.target:
                self.exceeds = max(self.exceeds, x)
            elif value < self.floor:
                self.falls_short = min(self.falls_short, x)
        return self.values[x]


def narrow(bracket: Bracket, start: float, most: float) -> bool:
    """Evaluate until a point in the range is known, or that the function jumps across it.

    Near the range the function is close to a power of its argument, so the next guess is linear interpolation
    of logarithms (Illinois variant of regula falsi); bisection where a value is zero or infinite, and
    where that makes no headway.

    Args:
        bracket: function and range.
        start: first guess.
        most: largest argument to try.

    Returns:
        Whether an argument of at most `most` gives at most the target.
    """
    floor, target = max(bracket.floor, 0.0), bracket.target
    low = high = min(start, most)
    low_value = high_value = bracket(high)
    factor = 1.1
    while high_value > target:
        if high >= most:
            return False
        low, low_value = high, high_value
        high, factor = min(high * factor, most), min(factor * factor, 4.0)
        high_value = bracket(high)
    while low_value <= target:
        if low_value >= floor or low <= _LEAST:
            return True
        high, high_value = low, low_value
        low, factor = max(low / factor, _LEAST), min(factor * factor, 4.0)
        low_value = bracket(low)

    aim = (floor + target) / 2
    low_gap, high_gap = _log_ratio(low_value, aim), _log_ratio(high_value, aim)
    side, stuck = 0, 0
    while high_value < floor and high / low > _CLOSE:
        width = high / low
        usable = math.isfinite(low_gap - high_gap) and low_gap > 0 > high_gap and stuck < 2
        share = low_gap / (low_gap - high_gap) if usable else 0.5
        middle = low * width**share
        if not low < middle < high:
            middle = math.sqrt(low * high)
        value = bracket(middle)
        if value <= target:
            high, high_value, high_gap = middle, value, _log_ratio(value, aim)
            low_gap = low_gap / 2 if side == 1 else low_gap
            side = 1
        else:
            low, low_gap = middle, _log_ratio(value, aim)
            high_gap = high_gap / 2 if side == -1 else high_gap
            side = -1
        stuck = stuck + 1 if usable and math.log(high / low) > 0.7 * math.log(width) else 0
    return True


def bisect(bracket: Bracket, first: float) -> float:
    """The point at which bisection ends, evaluating only where what is known does not decide.

    Args:
        bracket: function and range, some of which `narrow` has found out.
        first: upper end to begin with, doubled while its value exceeds the target.

    Returns:
        The upper end once its value is in the range; or, where the function jumps across the range, close to
        the jump. Its value was computed, and is at most the target.
    """
    low, high = 0.0, first
    while high <= bracket.exceeds or (high < bracket.falls_short and bracket(high) > bracket.target):
        high *= 2
    while True:
        if high < bracket.falls_short and bracket.floor <= bracket(high) <= bracket.target:
            return high
        if high <= _LEAST or high <= _CLOSE * low:
            bracket(high)
            # `high` itself, unless the function does not fall as it should.
            within = [x for x, value in bracket.values.items() if value <= bracket.target]
            return min(within, key=lambda x: abs(x - high))
        middle = (low + high) / 2
        if middle <= bracket.exceeds or (middle < bracket.falls_short and bracket(middle) > bracket.target):
            low = middle
        else:
            high = middle


def pin(bracket: Bracket) -> None:
    """Evaluate just outside both ends of the range, so that bisection's questions are decided almost everywhere."""
    inside = [x for x, value in bracket.values.items() if max(bracket.floor, 0.0) < value <= bracket.target]
    if not inside:
        return
    x = inside[-1]
    value = bracket.values[x]
    width = bracket.target - max(bracket.floor, 0.0)
    for aim in (bracket.target + width, bracket.floor - width):
        # The slope of logarithms between the two points closest to each other; much noise halves epsilon when doubled.
        others = [y for y, known in bracket.values.items() if y != x and 0 < known < math.inf]
        other = min(others, key=lambda y: abs(math.log(y / x)), default=None)
        slope = _log_ratio(bracket.values[other], value) / math.log(other / x) if other else -1.0
        if aim > 0 and slope < 0:
            guess = x * math.exp(math.log(aim / value) / slope)
            if bracket.exceeds < guess < bracket.falls_short:
                bracket(guess)


def _log_ratio(value: float, aim: float) -> float:
    return math.log(value / aim) if value > 0 else -math.inf
