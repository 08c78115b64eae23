"""Sums of independent privacy losses, by the fast Fourier transform."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opacus.accountants.analysis.prv.domain import Domain
from opacus.accountants.analysis.prv.prvs import DiscretePRV
from opacus.errors import raise_if_any

__all__ = ["MeshTooLargeError", "compose_heterogeneous"]


class MeshTooLargeError(ArithmeticError):
    """The composed loss needs more mesh points than allowed."""


def compose_heterogeneous(
    dprvs: Sequence[DiscretePRV],
    num_self_compositions: Sequence[int],
    tail_mass: float = 1e-15,
    max_size: int = 1 << 24,
) -> DiscretePRV:
    """The loss of all steps together.

    The result lives on a window that holds all but a given probability (a Chernoff bound on the discrete losses
    themselves); the Fourier transform wraps what lies outside around.

    Args:
        dprvs: discrete losses on meshes of one spacing.
        num_self_compositions: how often each is composed with itself.
        tail_mass: probability that may be wrapped around on each side.
        max_size: most mesh points.

    Returns:
        The discrete loss of the composition.

    Raises:
        ConfigurationError: if the lists differ in length, or meshes in spacing.
        MeshTooLargeError: if the window needs more than `max_size` points.

    Formal guarantee:
        delta(eps) of the composition is at most that of the result plus `tail_mass`, in exact arithmetic; the
        Fourier transform adds rounding of about 1e-16 per step.
    """
    problems = []
    if len(dprvs) != len(num_self_compositions) or not len(dprvs):
        problems.append(
            f"{len(dprvs)} dprvs and {len(num_self_compositions)} compositions; pass one for each."
        )
    elif any(not math.isclose(dprv.domain.dt, dprvs[0].domain.dt, rel_tol=1e-9) for dprv in dprvs):
        problems.append("the meshes differ in spacing; discretize all losses with the same dt.")
    raise_if_any("losses cannot be composed", problems)

    parts = list(zip(dprvs, num_self_compositions, strict=True))
    dt = dprvs[0].domain.dt
    highest = _chernoff(parts, tail_mass, 1)
    lowest = -_chernoff(parts, tail_mass, -1)
    needed = (highest - lowest) / dt + 4
    if not needed <= max_size:
        raise MeshTooLargeError(f"the mesh would have {needed:.1e} points, more than {max_size}")
    size = _smooth(max(64, math.ceil(needed)))

    start, offset = 0.0, 0
    transform = np.ones(size // 2 + 1, dtype=np.complex128)
    for dprv, count in parts:
        # Centred, the transform is close to 1 where it matters, and its powers keep their digits.
        centre = round(float(np.dot(np.arange(len(dprv)), dprv.pmf)) / float(dprv.pmf.sum()))
        folded = np.bincount((np.arange(len(dprv)) - centre) % size, weights=dprv.pmf, minlength=size)
        transform *= np.fft.rfft(folded) ** count
        start += count * dprv.domain.t_min
        offset += count * centre
    first = math.floor((lowest - start) / dt)
    pmf = np.roll(np.fft.irfft(transform, size), (offset - first) % size)
    t_min = start + first * dt
    return DiscretePRV(pmf, Domain(t_min, t_min + (size - 1) * dt, size, math.fmod(t_min, dt)))


def _chernoff(parts: Sequence[tuple[DiscretePRV, int]], mass: float, sign: int) -> float:
    """Value that `sign` times the composed loss exceeds with probability at most `mass`."""
    from scipy.optimize import minimize_scalar

    losses, reach = [], 0.0
    variance = mean = 0.0
    for dprv, count in parts:
        ts, pmf = _coarser(dprv)
        ts = sign * ts
        centre = float(np.dot(ts, pmf))
        variance += count * float(np.dot((ts - centre) ** 2, pmf))
        mean += count * centre
        reach += count * float(ts.max())
        some = pmf > 0
        losses.append((ts[some] - centre, np.log(pmf[some]), count))

    def bound(log_rate: float) -> float:
        rate = math.exp(log_rate)
        total = -math.log(mass)
        for ts, log_pmf, count in losses:
            terms = rate * ts + log_pmf
            top = float(terms.max())
            total += count * (top + math.log(float(np.exp(terms - top).sum())))
        return total / rate

    # At a lower rate than the first, the bound exceeds the reach; a normal loss has its best rate at the second.
    lowest = math.log(-math.log(mass) / max(reach - mean, math.ulp(1.0)))
    normal = math.log(math.sqrt(-2 * math.log(mass) / variance)) if variance > 0 else lowest
    limits = (lowest, max(lowest, normal) + 3)
    best = minimize_scalar(bound, bounds=limits, method="bounded", options={"xatol": 0.05})
    return min(mean + float(best.fun), reach)


def _coarser(dprv: DiscretePRV, factor: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Mass divided among points `factor` apart, means preserved: exponential moments only grow, so bounds hold."""
    ts, pmf = dprv.domain.ts, dprv.pmf
    if len(pmf) < 1 << 13:
        return ts, pmf
    pmf = np.pad(pmf, (0, -len(pmf) % factor)).reshape(-1, factor)
    upper = pmf @ (np.arange(factor) / factor)
    coarse = np.append(pmf.sum(1) - upper, 0.0)
    coarse[1:] += upper
    return dprv.domain.t_min + np.arange(len(coarse)) * factor * dprv.domain.dt, coarse


def _smooth(size: int) -> int:
    """The next even size whose transform is fast: 2^i, 3 * 2^i or 5 * 2^i."""
    return min(odd << max(1, math.ceil(math.log2(size / odd))) for odd in (1, 3, 5))
