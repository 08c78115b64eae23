"""Epsilon of a whole run from the privacy losses of its steps, with a mesh refined until it is accurate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus.accountants.analysis.prv.compose import MeshTooLargeError, compose_heterogeneous
from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.prv.prvs import (
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    discretize,
)

__all__ = ["CannotAnswerError", "composed_epsilon"]

# Transforms of this many points take about 10 ms; a noise multiplier search makes some tens of them.
_MAX_POINTS = 1 << 18
# What a run of many different steps may cost in points over all of its steps.
_MAX_TOTAL = 1 << 22
_RELATIVE_ERROR = 0.001
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

    pairs = [
        [(PoissonSubsampledGaussianPRV(rate, sigma, added), count) for sigma, rate, count in history]
        for added in (False, True)
    ]
    bounds = [[prv.bounds(delta_error / 4 / steps) for prv, _ in pair] for pair in pairs]
    variance = sum(
        count * prv.variance(*limits) for (prv, count), limits in zip(pairs[0], bounds[0], strict=True)
    )
    spacing = math.sqrt(0.06 * variance / steps)

    best = [math.inf, math.inf]
    wanted = math.inf
    try:
        while True:
            previous = max(best)
            for side, pair in enumerate(pairs):
                # Both are upper bounds: a side that is below the other's will stay there or does not matter.
                if side == 1 and best[1] <= best[0]:
                    continue
                found = _epsilon_on_mesh(pair, bounds[side], spacing, available, delta_error / 4)
                best[side] = min(best[side], found)
            epsilon = max(best)
            # Errors shrink with the square of the spacing: what is left is a third of the last change.
            wanted = min(eps_error, _RELATIVE_ERROR * epsilon)
            if math.isfinite(previous) and (previous - epsilon) / 3 <= wanted:
                return epsilon
            spacing /= 2
    except MeshTooLargeError as limit:
        epsilon = max(best)
        if math.isfinite(epsilon) and math.isfinite(previous) and previous - epsilon <= 0.01 * epsilon:
            return epsilon
        raise CannotAnswerError(str(limit), epsilon) from None


def _epsilon_on_mesh(pair, bounds, spacing: float, delta: float, tail_mass: float) -> float:
    points = sum((high - low) / spacing for low, high in bounds)
    if not points <= _MAX_TOTAL:
        raise MeshTooLargeError(
            f"the mesh of one step would have {points:.1e} points, more than {_MAX_TOTAL}"
        )
    losses = [
        discretize(TruncatedPrivacyRandomVariable(prv, low, high), Domain.create_aligned(low, high, spacing))
        for (prv, _), (low, high) in zip(pair, bounds, strict=True)
    ]
    counts = [count for _, count in pair]
    limit = min(_MAX_POINTS, _MAX_TOTAL // len(pair))
    return compose_heterogeneous(losses, counts, tail_mass, limit).epsilon(delta)
