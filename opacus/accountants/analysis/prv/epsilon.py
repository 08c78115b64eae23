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

    pairs = [
        [(PoissonSubsampledGaussianPRV(rate, sigma, added), count) for sigma, rate, count in history]
        for added in (False, True)
    ]
    bounds = [[prv.bounds(delta_error / 4 / steps) for prv, _ in pair] for pair in pairs]
    variance = sum(
        count * prv.variance(*limits) for (prv, count), limits in zip(pairs[0], bounds[0], strict=True)
    )
    # Rounding to the mesh adds a variance of about spacing^2 / 6 a step; this is 1% of what there is.
    spacing = math.sqrt(0.06 * variance / steps)
    limit = min(_MAX_POINTS, _MAX_TOTAL // len(history))
    best = [math.inf, math.inf]
    previous = coarser = math.inf
    while True:
        points = 0.0
        try:
            for side, pair in enumerate(pairs):
                # Both sides are upper bounds: one that is below the other will stay there, or does not matter.
                if side == 0 or best[1] > best[0]:
                    found, size = _epsilon_on_mesh(
                        pair, bounds[side], spacing, available, delta_error / 4, limit
                    )
                    best[side], points = min(best[side], found), max(points, size)
        except MeshTooLargeError as reason:
            raise CannotAnswerError(str(reason), max(best)) from None
        epsilon = max(best)
        wanted = min(eps_error, max(_RELATIVE_ERROR * epsilon, _ABSOLUTE_ERROR))
        error = math.inf
        if math.isfinite(previous):
            # The error shrinks with the square of the spacing, so two meshes show what is left of it.
            error = (previous - epsilon) / ((coarser / spacing) ** 2 - 1)
        if error <= wanted:
            return epsilon
        finest = spacing * points / limit
        if finest > 0.7 * spacing:
            if error <= 0.01 * epsilon:
                return epsilon
            raise CannotAnswerError(f"an accurate mesh would have more than {limit} points", epsilon)
        previous, coarser = epsilon, spacing
        step = 0.5 if not math.isfinite(error) else min(0.5, 0.9 * math.sqrt(wanted / error))
        spacing = max(spacing * step, 1.05 * finest)


def _epsilon_on_mesh(
    pair: Sequence[tuple[PoissonSubsampledGaussianPRV, int]],
    bounds: Sequence[tuple[float, float]],
    spacing: float,
    delta: float,
    tail_mass: float,
    limit: int,
) -> tuple[float, float]:
    """Epsilon of one direction on one mesh, and the most points that any of its losses had."""
    points = max((high - low) / spacing for low, high in bounds)
    if not points <= limit:
        raise MeshTooLargeError(f"the mesh of one step would have {points:.1e} points, more than {limit}")
    losses = [
        discretize(TruncatedPrivacyRandomVariable(prv, low, high), Domain.create_aligned(low, high, spacing))
        for (prv, _), (low, high) in zip(pair, bounds, strict=True)
    ]
    composed = compose_heterogeneous(losses, [count for _, count in pair], tail_mass, limit)
    return composed.epsilon(delta), max(points, float(len(composed)))
