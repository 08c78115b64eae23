"""The privacy loss of one step as a random variable, exact and on a mesh.

Letters: q sample rate, s noise multiplier, P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2), loss l(x) = log P(x)/Q(x).
Removing a sample is judged by T = l(x) with x from P, adding one by T = -l(x) with x from Q. In both cases a
mechanism with loss T spends delta(eps) = E[max(0, 1 - exp(eps - T))], and losses of steps add up.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opacus.accountants.analysis.checks import number_problems
from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.rdp import compute_rdp
from opacus.errors import raise_if_any

__all__ = ["DiscretePRV", "PoissonSubsampledGaussianPRV", "TruncatedPrivacyRandomVariable", "discretize"]

SQRT2 = np.sqrt(2)


class PoissonSubsampledGaussianPRV:
    """Privacy loss of one Gaussian mechanism on a Poisson sample.

    Args:
        sample_rate: q, above 0 and at most 1.
        noise_multiplier: s, positive and finite.
        added: judge the adding of a sample instead of the removing, which is the larger of the two in most cases.

    Raises:
        ConfigurationError: naming every argument out of range.
    """

    def __init__(self, sample_rate: float, noise_multiplier: float, added: bool = False) -> None:
        problems = number_problems(sample_rate=sample_rate, noise_multiplier=noise_multiplier)
        if not problems and (sample_rate == 0 or noise_multiplier in (0, math.inf)):
            problems.append(
                "sample_rate and noise_multiplier must be above 0 and finite: the loss has no density."
            )
        raise_if_any("no privacy random variable can be made", problems)
        self.sample_rate = float(sample_rate)
        self.noise_multiplier = float(noise_multiplier)
        self.added = added

    def _loss(self, x: Any) -> Any:
        tilt = (x - 0.5) / self.noise_multiplier**2
        if self.sample_rate == 1:
            return tilt
        near = np.log1p(self.sample_rate * np.expm1(np.minimum(tilt, 1)))
        far = np.logaddexp(math.log1p(-self.sample_rate), math.log(self.sample_rate) + tilt)
        return np.where(tilt < 1, near, far)

    def _noise_at(self, loss: np.ndarray) -> np.ndarray:
        """The x with each given loss, ascending; -inf where every x has more."""
        q, variance = self.sample_rate, self.noise_multiplier**2
        near, far = np.split(loss, [int(np.searchsorted(loss, 1.0))])
        with np.errstate(divide="ignore"):
            near = np.log1p(np.maximum(np.expm1(near) / q, -1))
        far = far - math.log(q) + np.log1p((q - 1) * np.exp(-far))
        return variance * np.concatenate((near, far)) + 0.5

    def _noise_in_any_order(self, loss: np.ndarray) -> np.ndarray:
        order = np.argsort(loss, axis=None)
        x = np.empty(loss.size)
        x[order] = self._noise_at(loss.ravel()[order])
        return x.reshape(loss.shape)

    def masses(self, ts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E[1] and E[exp(-T)] over each interval between consecutive `ts` (ascending), without cancellation."""
        x = self._noise_at(-ts[::-1] if self.added else ts)
        without, with_sample = self._normal(x, 0.0), self._normal(x, 1.0)
        mixed = (1 - self.sample_rate) * without + self.sample_rate * with_sample
        return (without[::-1], mixed[::-1]) if self.added else (mixed, without)

    def _normal(self, x: np.ndarray, mean: float) -> np.ndarray:
        from scipy.special import ndtr

        z = (x - mean) / self.noise_multiplier
        beyond = ndtr(-np.abs(z))  # the smaller tail at each end: its digits are all good
        left, right = beyond[:-1], beyond[1:]
        across = (z[:-1] <= 0) & (z[1:] > 0)
        return np.where(across, 1 - left - right, np.abs(left - right))

    def bounds(self, mass: float) -> tuple[float, float]:
        """Losses outside of which lies a probability of at most `mass` on either side."""
        from scipy.special import ndtri

        reach = -float(ndtri(mass / 2)) * self.noise_multiplier
        share = min(1.0, mass / 2 / self.sample_rate)
        # Each part of the mixture may spend half of the mass; x around 1 is rarer by the sample rate.
        beyond = -float(ndtri(share)) * self.noise_multiplier if share < 1 else -math.inf
        lowest, highest = -reach, reach if self.added else max(reach, 1 + beyond)
        low, high = float(self._loss(lowest)), float(self._loss(highest))
        # With little noise all of the mass may lie in one floating-point number; keep the bounds apart.
        margin = 1e-12 * max(abs(low), abs(high))
        low, high = low - margin, high + margin
        return (-high, -low) if self.added else (low, high)

    def typical(self) -> float:
        """The loss without noise and without the sample: near it lies the mass of a run with a small sample rate."""
        loss = float(self._loss(0.0))
        return -loss if self.added else loss

    def variance(self, t_min: float, t_max: float) -> float:
        """Second moment of the loss between two bounds, to a few percent."""
        x = self._noise_at(np.array([-t_max, -t_min] if self.added else [t_min, t_max]))
        lowest, highest = np.clip(x, -40 * self.noise_multiplier, None)
        grid = np.linspace(lowest, highest, 4001)
        without, with_sample = self._normal(grid, 0.0), self._normal(grid, 1.0)
        weight = without if self.added else (1 - self.sample_rate) * without + self.sample_rate * with_sample
        return float((weight * self._loss((grid[1:] + grid[:-1]) / 2) ** 2).sum())

    def cdf(self, t: Any) -> Any:
        """Probability that the loss is at most `t`."""
        from scipy.special import ndtr

        t_N = np.asarray(t, dtype=np.float64)
        s = self.noise_multiplier
        if self.added:
            return ndtr(-self._noise_in_any_order(-t_N) / s)
        x = self._noise_in_any_order(t_N)
        return (1 - self.sample_rate) * ndtr(x / s) + self.sample_rate * ndtr((x - 1) / s)

    def pdf(self, t: Any) -> Any:
        """Density of the loss at `t`."""
        t_N = np.asarray(t, dtype=np.float64)
        s, q = self.noise_multiplier, self.sample_rate
        loss = -t_N if self.added else t_N
        x = self._noise_in_any_order(loss)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            log_q = -0.5 * (x / s) ** 2 - math.log(s * math.sqrt(2 * math.pi))
            # dx/dl = s^2 / (1 - (1 - q) exp(-l)); the density of P is exp(l) times that of Q.
            stretch = s * s / -np.expm1(math.log1p(-q) - loss) if q < 1 else s * s
            density = np.exp(log_q + (0 if self.added else 1) * loss) * stretch
        return np.where(np.isfinite(x), density, 0.0)

    def rdp(self, alpha: float) -> float:
        """Renyi divergence at order `alpha`; adding a sample never has the larger one."""
        return float(
            compute_rdp(
                q=self.sample_rate, noise_multiplier=self.noise_multiplier, steps=1, orders=float(alpha)
            )
        )


class TruncatedPrivacyRandomVariable:
    """A privacy random variable, given that it lies between two bounds.

    Args:
        prv: variable with `cdf`, `pdf` and `masses`.
        t_min: lower bound.
        t_max: upper bound.
    """

    def __init__(self, prv: Any, t_min: float, t_max: float) -> None:
        self.prv = prv
        self.t_min = t_min
        self.t_max = t_max
        (kept,), _ = prv.masses(np.array([t_min, t_max]))
        if not kept > 0:
            raise_if_any("the variable cannot be truncated", [f"it never lies between {t_min} and {t_max}."])
        self._kept = float(kept)

    def cdf(self, t: Any) -> Any:
        """Probability that the truncated loss is at most `t`."""
        below = self.prv.cdf(np.clip(t, self.t_min, self.t_max)) - self.prv.cdf(self.t_min)
        return np.clip(below / self._kept, 0.0, 1.0)

    def pdf(self, t: Any) -> Any:
        """Density of the truncated loss at `t`."""
        t_N = np.asarray(t, dtype=np.float64)
        return np.where((t_N >= self.t_min) & (t_N <= self.t_max), self.prv.pdf(t_N) / self._kept, 0.0)

    def masses(self, ts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """E[1] and E[exp(-T)] over each interval between consecutive `ts`."""
        mass, reference = self.prv.masses(np.clip(ts, self.t_min, self.t_max))
        return mass / self._kept, reference / self._kept

    def mean(self) -> float:
        """Expected loss, by integrating the distribution function by parts."""
        from scipy.integrate import quad

        area, _ = quad(self.cdf, self.t_min, self.t_max, limit=500)
        return self.t_max - area


class DiscretePRV:
    """A privacy loss on a mesh.

    Args:
        pmf: probability of each point, float64 of the mesh's size.
        domain: the mesh.
    """

    def __init__(self, pmf: np.ndarray, domain: Domain) -> None:
        if len(pmf) != domain.size:
            raise_if_any(
                "no discrete loss can be made", [f"pmf has {len(pmf)} points, domain {domain.size}."]
            )
        self.pmf = pmf
        self.domain = domain

    def __len__(self) -> int:
        return len(self.pmf)

    def compute_delta_estimate(self, eps: float) -> float:
        """E[max(0, 1 - exp(eps - T))]: the delta that this loss spends at `eps`."""
        ts = self.domain.ts
        first = int(np.searchsorted(ts, eps, side="right"))
        return float(-(self.pmf[first:] * np.expm1(eps - ts[first:])).sum())

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon, at least 0, at which this loss spends no more than `delta`; inf if there is none."""
        if delta <= 0:
            return math.inf
        if self.domain.t_max <= 0 or self.compute_delta_estimate(0.0) <= delta:
            return 0.0
        # From here on delta(0) > delta >= delta(t_max) = 0. Narrow down to a range in which exp cannot overflow.
        ts, low, high = self.domain.ts, 0.0, self.domain.t_max
        while high - low > 500:
            middle = (low + high) / 2
            low, high = (low, middle) if self.compute_delta_estimate(middle) <= delta else (middle, high)
        # With sums over the points above eps, delta(eps) = tail - exp(eps - low) * rest.
        first, last = np.searchsorted(ts, [low, high], side="right")
        inside, pmf, above = ts[first:last], self.pmf[first:last], self.pmf[last:]
        tail = np.cumsum(np.append(above.sum(), pmf[::-1]))[::-1]
        beyond = float((above * np.exp(low - ts[last:])).sum())
        rest = np.cumsum(np.append(beyond, (pmf * np.exp(low - inside))[::-1]))[::-1]
        knots = np.append(low, inside)
        too_much = np.flatnonzero(tail - np.exp(knots - low) * rest > delta)
        knot = int(too_much[-1]) if too_much.size else 0
        if not (tail[knot] > delta and rest[knot] > 0):
            return float(knots[knot])
        solved = low + math.log((tail[knot] - delta) / rest[knot])
        return float(
            min(
                max(solved, knots[knot]),
                knots[min(knot + 1, len(knots) - 1)] if knot + 1 < len(knots) else high,
            )
        )

    def compute_epsilon(
        self, delta: float, delta_error: float, eps_error: float
    ) -> tuple[float, float, float]:
        """Lower bound, estimate and upper bound of epsilon, for errors of the representation.

        Args:
            delta: probability strictly between 0 and 1.
            delta_error: bound on the error in delta, below `delta`.
            eps_error: bound on the error in epsilon.

        Returns:
            Epsilon at ``delta + delta_error`` less `eps_error` (at least 0), at `delta`, and at
            ``delta - delta_error`` plus `eps_error`.

        Raises:
            ConfigurationError: naming every argument out of range.
        """
        problems = number_problems(delta=delta)
        if not (0 <= delta_error < delta):
            problems.append(f"delta_error is {delta_error!r}; pass a number from 0 to below delta.")
        if not eps_error >= 0:
            problems.append(f"eps_error is {eps_error!r}; pass a number that is at least 0.")
        raise_if_any("epsilon cannot be computed", problems)
        return (
            max(self.epsilon(delta + delta_error) - eps_error, 0.0),
            self.epsilon(delta),
            self.epsilon(delta - delta_error) + eps_error,
        )


def discretize(prv: Any, domain: Domain) -> DiscretePRV:
    """Put a privacy loss on a mesh without ever understating it.

    The mass between two neighbouring points is divided among them so that E[exp(-T)] stays the same (the idea of
    Doroshenko et al. 2022, "Connect the Dots").

    Args:
        prv: variable with `masses`, lying inside the mesh.
        domain: the mesh.

    Returns:
        The discrete loss.

    Formal guarantee:
        delta(eps) = E[max(0, 1 - exp(eps) U)] is an expectation of a convex function of U = exp(-T), and dividing
        mass among two neighbours with E[U] preserved spreads U at a constant mean. So delta does not fall, for
        any eps, nor does it after any number of compositions (independent losses add, so U is a product
        and the function is convex in each factor). Exact up to rounding of double precision.
    """
    ts = domain.ts
    mass, reference = prv.masses(ts)
    left = ts[:-1]
    # Beyond exp(600) the weights are out of a double's range: all mass moves up, which overstates the loss.
    scaled = np.exp(np.minimum(left, 600.0)) * reference
    upper = np.where(left < 600.0, (mass - scaled) / -math.expm1(-domain.dt), mass)
    upper = np.clip(upper, 0.0, mass)
    pmf = np.zeros(domain.size)
    pmf[:-1] += mass - upper
    pmf[1:] += upper
    return DiscretePRV(pmf, domain)
