"""Epsilon of a whole run from the privacy losses of its steps, with a mesh refined until it is accurate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus.accountants.analysis.prv.compose import MeshTooLargeError
from opacus.accountants.analysis.prv.prvs import PoissonSubsampledGaussianPRV
from opacus.accountants.analysis.prv.split import Loss, compose_on_two_meshes

__all__ = ["CannotAnswerError", "composed_epsilon"]

# A transform of this many points takes about 15 ms; most runs need a twentieth of it.
_MAX_POINTS = 1 << 19
# What a run of many different steps may cost in points over all of its steps.
_MAX_TOTAL = 1 << 22
_RELATIVE_ERROR = 0.001
_ABSOLUTE_ERROR = 1e-5
_ROUNDING_PER_STEP = 2e-16


class CannotAnswerError(ArithmeticError):
    """Numerical composition has no accurate answer within the limits; the message says why.

    Attributes:
        bound: an upper bound of epsilon found all the same, possibly infinite.
    """

    def __init__(self, reason: str, bound: float = math.inf) -> None:
        super().__init__(reason)
        self.bound = bound


def composed_epsilon(
    history: Sequence[tuple[float, float, int]], delta: float, eps_error: float, delta_error: float
) -> float:
    """Upper bound of epsilon at `delta` for subsampled Gaussian steps.

    Args:
        history: ``(noise_multiplier, sample_rate, steps)``, all positive, distinct in the first two.
        delta: probability strictly between 0 and 1.
        eps_error: the mesh is refined until epsilon is estimated to be at most this, and 0.1%, too large.
        delta_error: part of `delta` spent on truncation.

    Returns:
        Epsilon.

    Raises:
        CannotAnswerError: where the mesh would be too large, or `delta` is within rounding errors.
    """
    steps = sum(count for _, _, count in history)
    available = delta - delta_error - _ROUNDING_PER_STEP * steps
    if available < 0.9 * delta:
        raise CannotAnswerError(f"delta {delta:.1g} is too close to the rounding errors of {steps} steps")

    sides = []
    for added in (False, True):
        prvs = [PoissonSubsampledGaussianPRV(rate, sigma, added) for sigma, rate, _ in history]
        # Either tail of every step may be cut: in total half of delta_error. The rest is for wrapping.
        bounds = [prv.bounds(delta_error / 4 / steps) for prv in prvs]
        counts = [count for _, _, count in history]
        sides.append(
            [Loss(prv, *limits, count) for prv, limits, count in zip(prvs, bounds, counts, strict=True)]
        )
    # Rounding to a mesh adds a variance of about spacing^2 / 6 a step; this is 1% of what there is.
    fineness = math.sqrt(0.06)
    limit = min(_MAX_POINTS, _MAX_TOTAL // len(history))
    # An added sample never loses more than -log(1 - rate) in a step; for small rates that settles its side.
    best = [math.inf, sum(-math.log1p(-rate) * count if rate < 1 else math.inf for _, rate, count in history)]
    previous = coarser = math.inf
    while True:
        points = 0.0
        try:
            for side, losses in enumerate(sides):
                # Both sides are upper bounds: one that is below the other will stay there, or does not matter.
                if side == 0 or best[1] > best[0]:
                    composed, size = compose_on_two_meshes(losses, fineness, delta_error / 2, limit)
                    best[side], points = min(best[side], composed.epsilon(available)), max(points, size)
        except MeshTooLargeError as reason:
            if math.isinf(previous) and fineness < 2:
                fineness *= 2
                continue
            raise CannotAnswerError(str(reason), max(best)) from None
        epsilon = max(best)
        wanted = min(eps_error, max(_RELATIVE_ERROR * epsilon, _ABSOLUTE_ERROR))
        error = math.inf
        if math.isfinite(previous):
            # The error shrinks with the square of the spacing, so two meshes show what is left of it.
            error = (previous - epsilon) / ((coarser / fineness) ** 2 - 1)
        if error <= wanted:
            return epsilon
        finest = fineness * points / limit
        if finest > 0.7 * fineness:
            if error <= 0.01 * epsilon:
                return epsilon
            raise CannotAnswerError(f"an accurate mesh would have more than {limit} points", epsilon)
        previous, coarser = epsilon, fineness
        step = 0.5 if not math.isfinite(error) else min(0.5, 0.9 * math.sqrt(wanted / error))
        fineness = max(fineness * step, 1.05 * finest)
