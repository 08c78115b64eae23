"""Gaussian differential privacy: the trade-off curve of a run, summed up by one number mu.

The run is approximated by its central limit (Bu, Dong, Long and Su 2019, "Deep Learning with Gaussian Differential
Privacy"; Dong, Roth and Su 2019), which for small sample rates can lie below the true epsilon. For full
batches mu = sqrt(steps) / noise_multiplier is exact, and is what is used.
"""

from __future__ import annotations

import math

import numpy as np

from opacus.accountants.analysis.checks import check_numbers, number_problems
from opacus.errors import raise_if_any

__all__ = [
    "compute_eps_poisson",
    "compute_eps_uniform",
    "compute_mu_poisson",
    "compute_mu_uniform",
    "delta_eps_mu",
    "eps_from_mu",
]


def compute_mu_poisson(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """mu of `steps` Gaussian mechanisms on Poisson samples, in the central limit (Bu et al. 2019, section 2.4).

    Args:
        steps: number of optimizer steps, at least 0.
        noise_multiplier: standard deviation of the noise over the clipping norm, at least 0.
        sample_rate: probability with which each sample enters a batch, 0 to 1.

    Returns:
        ``sample_rate * sqrt(steps * (exp(1 / noise_multiplier**2) - 1))``, or the exact
        ``sqrt(steps) / noise_multiplier`` for sample rate 1. ``inf`` without noise.

    Raises:
        ConfigurationError: naming every argument out of range.

    Example:
        >>> compute_mu_poisson(steps=4, noise_multiplier=2.0, sample_rate=1.0)
        1.0
    """
    check_numbers(
        "mu cannot be computed", steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate
    )
    return _mu(steps, noise_multiplier, sample_rate, _log_expm1)


def compute_mu_uniform(*, steps: int, noise_multiplier: float, sample_rate: float) -> float:
    """mu of `steps` Gaussian mechanisms on batches of one fixed size, in the central limit.

    Neighbouring data sets here differ by one replaced sample (Dong, Roth and Su 2019, corollary 5.4; Bu et al. 2019).

    Args:
        steps: number of optimizer steps, at least 0.
        noise_multiplier: standard deviation of the noise over the clipping norm, at least 0.
        sample_rate: batch size over data set size, 0 to 1.

    Returns:
        mu; ``inf`` without noise.

    Raises:
        ConfigurationError: naming every argument out of range.
    """
    check_numbers(
        "mu cannot be computed", steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate
    )
    return _mu(steps, noise_multiplier, sample_rate, _log_uniform_variance)


def _mu(steps: float, sigma: float, rate: float, log_variance) -> float:
    """Products of very large and very small numbers: in logarithms, so that only the result may overflow."""
    if steps == 0 or rate == 0 or sigma == math.inf:
        return 0.0
    if sigma == 0:
        return math.inf
    if rate == 1:
        return math.sqrt(steps) / sigma
    log_mu = math.log(rate) + (math.log(steps) + log_variance(sigma)) / 2
    return math.exp(log_mu) if log_mu < 709 else math.inf


def _log_expm1(sigma: float) -> float:
    inverse = 1 / sigma / sigma
    return math.log(math.expm1(inverse)) if inverse < 1 else inverse + math.log(-math.expm1(-inverse))


def _log_uniform_variance(sigma: float) -> float:
    """log of 2 (exp(1/s^2) Phi(3/(2s)) + 3 Phi(-1/(2s)) - 2)."""
    from scipy.special import ndtr

    inverse = 1 / sigma / sigma
    if inverse > 30:  # the other terms are below the last digit
        return math.log(2) + inverse + math.log(ndtr(1.5 / sigma))
    growth = math.expm1(inverse) * ndtr(1.5 / sigma)
    # Phi(3/(2s)) - 1/2 and 1/2 - Phi(1/(2s)), without subtracting the halves from each other.
    from scipy.special import erf

    near = erf(1.5 / sigma / math.sqrt(2)) / 2 - 3 * erf(0.5 / sigma / math.sqrt(2)) / 2
    return math.log(2 * (growth + near))


def delta_eps_mu(*, eps: float | np.ndarray, mu: float) -> float | np.ndarray:
    """delta of mu-GDP at epsilon (Dong, Roth and Su 2019, corollary 2.13; Balle and Wang 2018, theorem 8).

    Args:
        eps: epsilon, at least 0; a number or an array.
        mu: at least 0.

    Returns:
        ``Phi(-eps/mu + mu/2) - exp(eps) Phi(-eps/mu - mu/2)``, of the shape of `eps`.

    Raises:
        ConfigurationError: naming an argument that is NaN or negative.

    Formal guarantee:
        Exact for the Gaussian mechanism of sensitivity 1 and noise 1/mu, to about 1e-15 absolute.
    """
    eps_E = np.asarray(eps, dtype=np.float64)
    problems = _mu_problems(mu)
    if not (eps_E >= 0).all():
        problems.append(f"eps is {eps!r}; pass numbers that are at least 0.")
    raise_if_any("delta cannot be computed", problems)
    if mu == 0:
        delta_E = np.zeros_like(eps_E)
    elif mu == math.inf:
        delta_E = np.where(eps_E < math.inf, 1.0, 0.0)
    else:
        delta_E = _delta_at(eps_E / mu - mu / 2, mu)
    return float(delta_E) if np.ndim(eps) == 0 else delta_E


def _delta_at(a, mu: float):
    """delta at eps = mu (a + mu/2). With Phi(-x) = erfcx(x / sqrt 2) exp(-x^2 / 2) / 2 nothing can overflow."""
    from scipy.special import erfcx, ndtr

    with np.errstate(over="ignore", invalid="ignore"):
        density = np.exp(-0.5 * np.square(a)) / 2
        scaled = density * (erfcx(np.maximum(a, 0) / math.sqrt(2)) - erfcx((a + mu) / math.sqrt(2)))
        plain = ndtr(-np.asarray(a)) - density * erfcx((a + mu) / math.sqrt(2))
    return np.where(
        density == 0, np.where(np.asarray(a) > 0, 0.0, 1.0), np.where(np.asarray(a) > 0, scaled, plain)
    )


def eps_from_mu(*, mu: float, delta: float) -> float:
    """Epsilon of mu-GDP at `delta`: the inverse of `delta_eps_mu`.

    Args:
        mu: at least 0.
        delta: probability strictly between 0 and 1.

    Returns:
        The smallest epsilon, at least 0.

    Raises:
        ConfigurationError: naming every argument out of range.

    Example:
        >>> round(eps_from_mu(mu=1.0, delta=1e-5), 3)
        4.377
    """
    raise_if_any("epsilon cannot be computed", _mu_problems(mu) + number_problems(delta=delta))
    if mu == 0:
        return 0.0
    if mu == math.inf:
        return math.inf
    from scipy.optimize import brentq
    from scipy.special import ndtri

    # Solved for a = eps/mu - mu/2, which stays of order one however large mu is; Phi(-a) >= delta bounds it.
    lowest, highest = -mu / 2, 1e-6 - float(ndtri(delta))
    if float(_delta_at(lowest, mu)) <= delta:
        return 0.0
    a = brentq(
        lambda a: float(_delta_at(a, mu)) / delta - 1, lowest, highest, xtol=1e-14, rtol=1e-14, maxiter=500
    )
    return max(mu * (a + mu / 2), 0.0)


def _mu_problems(mu: float) -> list[str]:
    return [] if mu >= 0 else [f"mu is {mu!r}; pass a number that is at least 0."]


def compute_eps_poisson(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Epsilon in the central limit, for Poisson samples; arguments as in `compute_mu_poisson`."""
    mu = compute_mu_poisson(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)


def compute_eps_uniform(*, steps: int, noise_multiplier: float, sample_rate: float, delta: float) -> float:
    """Epsilon in the central limit, for batches of one fixed size; arguments as in `compute_mu_uniform`."""
    mu = compute_mu_uniform(steps=steps, noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return eps_from_mu(mu=mu, delta=delta)
