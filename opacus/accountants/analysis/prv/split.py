"""Losses of very different sizes: many tiny ones and a few large ones, each on a mesh of its own.

With a small sample rate nearly every step loses next to nothing, and rare ones lose much. One mesh for both needs the
spacing of the former and the reach of the latter. So a step's loss T in [low, high] is replaced by B + J, independent:
B is T given T <= cut; J is 0, or with probability P(T > cut) it is T - low given T > cut. Since B >= low, B + J is
never the smaller one, and delta never falls. The sum of all B is composed on a fine mesh, then moved to the coarse
mesh on which the J are composed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opacus.accountants.analysis.prv.compose import MeshTooLargeError, compose_heterogeneous
from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.prv.prvs import (
    DiscretePRV,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    discretize,
)

__all__ = ["Loss", "compose_on_two_meshes"]

# How many standard deviations of the small losses the cut between small and large lies away, at least.
_CUT = 40.0


class Loss:
    """One kind of step: its privacy loss between two bounds, and how often it happens.

    Args:
        prv: the loss.
        low: lower bound.
        high: upper bound.
        count: number of steps.
    """

    def __init__(self, prv: PoissonSubsampledGaussianPRV, low: float, high: float, count: int) -> None:
        self.prv = prv
        self.high = high
        self.count = count
        self.low = low
        # How much all steps together may be overstated: far below the spread of their sum.
        self.margin = 3e-4 * math.sqrt(count * prv.variance(low, high))
        # Negative losses far out are raised to a common floor.
        while (
            self.low < -_CUT * math.sqrt(prv.variance(self.low, high))
            and -low * self._chance(low, self.low / 2) * count <= self.margin
        ):
            self.low /= 2
        self.raised = self._chance(low, self.low)
        self.cut = self._cut()
        total = prv.variance(self.low, high)
        self.small_variance = prv.variance(self.low, self.cut) if self.is_split else total
        self.large_chance = self._chance(self.cut, high)
        self.large_size = (
            math.sqrt(max(total - self.small_variance, 0.0) / self.large_chance) if self.is_split else 0.0
        )

    @property
    def is_split(self) -> bool:
        return self.cut < self.high

    def _chance(self, left: float, right: float) -> float:
        return float(self.prv.masses(np.array([left, right]))[0][0]) if left < right else 0.0

    def _cut(self) -> float:
        """The lowest bound that is far from the losses below it; `high` if a single mesh is good enough.

        Not so low that the losses above it differ too much among themselves, nor that they are so many that
        adding `-low` to each would be felt.
        """
        total = self.prv.variance(self.low, self.high)
        cut = self.high
        for halvings in range(1, 60):
            lower = self.low + (self.high - self.low) * 2.0**-halvings
            below, chance = self.prv.variance(self.low, lower), self._chance(lower, self.high)
            overstated = self.count * chance * max(-self.low, 0.0)
            if chance > 0.1 or overstated > self.margin:
                break
            # A bound amid the large losses fails here, and yet a lower one may be good.
            if (
                lower - self.low >= _CUT * math.sqrt(below)
                and total - below >= chance * ((self.high - self.low) / 512) ** 2
            ):
                cut = lower
        return cut if cut - self.low < (self.high - self.low) / 8 else self.high

    def small(self, spacing: float) -> DiscretePRV:
        """B on a mesh."""
        domain = _mesh(self.low, self.cut, spacing, self.prv.typical())
        pmf = discretize(TruncatedPrivacyRandomVariable(self.prv, self.low, self.cut), domain).pmf
        pmf *= 1 - self.raised
        pmf[int(np.searchsorted(domain.ts, self.low))] += self.raised
        return DiscretePRV(pmf, domain)

    def large(self, spacing: float) -> DiscretePRV:
        """J on a mesh, one point of which is 0."""
        domain = _mesh(self.low, self.high, spacing, self.low)
        jump = discretize(TruncatedPrivacyRandomVariable(self.prv, self.cut, self.high), domain)
        pmf = jump.pmf * self.large_chance
        pmf[int(np.argmin(np.abs(domain.ts - self.low)))] += 1 - self.large_chance
        return DiscretePRV(pmf, domain.shift_right(-self.low))


def compose_on_two_meshes(
    losses: Sequence[Loss], fineness: float, tail_mass: float, limit: int
) -> tuple[DiscretePRV, float]:
    """The loss of all steps.

    Args:
        losses: the kinds of steps.
        fineness: spacing of each mesh over the standard deviation of what is put on it.
        tail_mass: probability that may be wrapped around, in total.
        limit: most points of a mesh.

    Returns:
        The composed loss, and the most points any mesh had.

    Raises:
        MeshTooLargeError: if a mesh would exceed `limit`.

    Formal guarantee:
        delta(eps) of the steps is at most that of the result plus `tail_mass`, up to rounding: every replacement
        moves mass up, or spreads exp(-T) at a constant mean (see `discretize`).
    """
    steps = sum(loss.count for loss in losses)
    small_variance = sum(loss.count * loss.small_variance for loss in losses)
    spacing = fineness * math.sqrt(small_variance / steps)
    points = _within(limit, max((loss.cut - loss.low) / spacing for loss in losses))
    counts = [loss.count for loss in losses]
    small = compose_heterogeneous([loss.small(spacing) for loss in losses], counts, tail_mass / 2, limit)
    split = [loss for loss in losses if loss.is_split]
    points = max(points, float(len(small)))
    if not split:
        return small, points

    # A sum of small losses far below the reach of the large ones may be coarse in its own measure.
    reach = max(loss.high - loss.low for loss in split)
    coarse = fineness * min(
        max(math.sqrt(small_variance), reach / 4096), *(loss.large_size for loss in split)
    )
    points = max(points, _within(limit, reach / coarse))
    composed = compose_heterogeneous(
        [_move(small, coarse), *(loss.large(coarse) for loss in split)],
        [1, *(loss.count for loss in split)],
        tail_mass / 2,
        limit,
    )
    return composed, max(points, float(len(composed)))


def _within(limit: int, points: float) -> float:
    if not points <= limit:
        raise MeshTooLargeError(f"the mesh of one step would have {points:.1e} points, more than {limit}")
    return points


def _mesh(low: float, high: float, spacing: float, through: float) -> Domain:
    """A mesh over [low, high] with one point where most of the mass may be, which then need not be divided."""
    below, above = (
        max(0, math.ceil((through - low) / spacing)) + 1,
        max(0, math.ceil((high - through) / spacing)) + 1,
    )
    return Domain(through - below * spacing, through + above * spacing, below + above + 1, through)


def _move(dprv: DiscretePRV, spacing: float) -> DiscretePRV:
    """The same loss on a coarser mesh: mass divided among neighbours, E[exp(-T)] preserved."""
    ts = dprv.domain.ts
    mean = float(np.dot(ts, dprv.pmf)) / float(dprv.pmf.sum())
    domain = _mesh(dprv.domain.t_min, dprv.domain.t_max, spacing, mean)
    place = (ts - domain.t_min) / domain.dt
    left = np.clip(np.floor(place).astype(np.int64), 0, domain.size - 2)
    share = np.expm1(-(place - left) * domain.dt) / math.expm1(-domain.dt)
    pmf = np.bincount(left, dprv.pmf * (1 - share), domain.size)
    return DiscretePRV(pmf + np.bincount(left + 1, dprv.pmf * share, domain.size), domain)
