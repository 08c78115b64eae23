"""Renyi differential privacy of the Poisson subsampled Gaussian mechanism.

Letters: q sample rate, s noise multiplier, a order. With P = (1-q) N(0, s^2) + q N(1, s^2), Q = N(0, s^2) and
l(x) = log P(x)/Q(x), the divergence at order a is log(A) / (a - 1) with A = E_Q[exp(a l)] (Mironov, Talwar and
Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism"; they prove that the opposite
direction is never larger).

For small q, A is 1 plus something far below machine precision. Since E_Q[exp(l)] = 1, that something is
A - 1 = E_Q[exp(a l) - a exp(l) + a - 1], whose integrand is nowhere negative: computed directly, as a sum for whole
orders and by quadrature for the others, it loses no digits.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from opacus.accountants.analysis.checks import number_problems
from opacus.errors import raise_if_any

__all__ = ["compute_rdp", "get_privacy_spent"]

# Terms below exp(-45) of the largest one cannot change a double.
_NEGLIGIBLE = 45.0


def compute_rdp(
    *, q: float, noise_multiplier: float, steps: int, orders: float | Sequence[float]
) -> float | np.ndarray:
    """Renyi divergence of `steps` subsampled Gaussian mechanisms, at each order.

    Args:
        q: probability with which each sample enters a batch, 0 to 1.
        noise_multiplier: standard deviation of the noise over the clipping norm, at least 0.
        steps: number of optimizer steps, at least 0.
        orders: one order or several, each above 1 (``inf`` allowed).

    Returns:
        Divergence in nats: a float for a single order, else a float64 array of the orders' length. ``inf``
        without noise.

    Raises:
        ConfigurationError: naming every argument out of range.

    Formal guarantee:
        The mechanism "sum of Poisson sampled, clipped gradients plus Gaussian noise", run `steps` times
        adaptively, is (order, returned value)-RDP under adding or removing one sample (Mironov, Talwar and
        Zhang 2019), up to a relative rounding error of about 1e-9.

    Example:
        >>> compute_rdp(q=1.0, noise_multiplier=2.0, steps=8, orders=3)
        3.0
    """
    problems = number_problems(sample_rate=q, noise_multiplier=noise_multiplier, steps=steps)
    order_A = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    problems += _order_problems(order_A)
    raise_if_any("compute_rdp cannot answer", problems)

    if q == 0 or steps == 0 or noise_multiplier == math.inf:
        rdp_A = np.zeros_like(order_A)
    elif noise_multiplier == 0:
        rdp_A = np.full_like(order_A, np.inf)
    elif q == 1:
        rdp_A = order_A / 2 / noise_multiplier / noise_multiplier * steps
    else:
        rdp_A = steps * np.array(
            [_subsampled(float(q), float(noise_multiplier), order) for order in order_A.tolist()]
        )
    return float(rdp_A[0]) if np.ndim(orders) == 0 else rdp_A


def _order_problems(order_A: np.ndarray) -> list[str]:
    if order_A.ndim != 1 or order_A.size == 0:
        return ["orders is empty or nested; pass one order or a flat list of them."]
    wrong = [order for order in order_A.tolist() if not order > 1]
    return [f"orders holds {wrong}; every order must be above 1."] if wrong else []


# Kept, because epsilon is asked for again and again while a run's history grows at its end.
@lru_cache(maxsize=1 << 16)
def _subsampled(q: float, sigma: float, order: float) -> float:
    if math.isinf(order):
        return math.inf
    excess = _whole_order(q, sigma, int(order)) if order == int(order) else _any_order(q, sigma, order)
    return float(np.logaddexp(0.0, excess)) / (order - 1)


def _log_sum_exp(terms: np.ndarray) -> float:
    top = terms.max()
    if not np.isfinite(top):
        return float(top)
    return float(top + np.log(np.exp(terms - top).sum()))


def _whole_order(q: float, sigma: float, order: int) -> float:
    """log(A - 1) by the binomial theorem: terms k = 0 and 1 are what cancels against 1."""
    k = np.arange(2, order + 1, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, order + 1, dtype=np.float64)))))
    log_choose = log_factorial[order] - log_factorial[2:] - log_factorial[order - 2 :: -1]
    with np.errstate(over="ignore"):  # a noise multiplier near zero: the divergence is infinite in doubles
        growth = k * (k - 1) / 2 / sigma / sigma
    log_expm1 = np.where(growth > 1, growth, 0.0) + np.log(
        np.where(growth > 1, -np.expm1(-growth), np.expm1(np.minimum(growth, 1)))
    )
    return _log_sum_exp(log_choose + k * math.log(q) + (order - k) * math.log1p(-q) + log_expm1)


def _any_order(q: float, sigma: float, order: float) -> float:
    """log(A - 1) by the trapezoidal rule, which converges exponentially for this smooth integrand.

    The integrand is analytic up to pi s^2 off the real axis, where P has its zeros; beside a Gaussian of width s.
    The step below resolves both to 1e-15. A first, coarse pass finds where the integrand lives: near 0,
    near the order, or both.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        lowest, highest = -10 * sigma, max(order, 2.0) + 10 * sigma
        coarse = np.linspace(lowest, highest, max(64, math.ceil((highest - lowest) / (sigma / 2))))
        value = _log_integrand(coarse, q, sigma, order)
        top = value.max()
        if not np.isfinite(top):
            return math.inf
        lives = value > top - _NEGLIGIBLE
        lives = lives | np.roll(lives, 1) | np.roll(lives, -1)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], lives.astype(np.int8), [0]))))
        step = min(sigma / 3, sigma * sigma / 2)
        pieces = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            left, right = coarse[first], coarse[last - 1]
            count = max(2, math.ceil((right - left) / step) + 1)
            x = np.linspace(left, right, count)
            pieces.append(
                _log_sum_exp(_log_integrand(x, q, sigma, order)) + math.log((right - left) / (count - 1))
            )
    return _log_sum_exp(np.array(pieces))


def _log_integrand(x: np.ndarray, q: float, sigma: float, order: float) -> np.ndarray:
    log_density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
    tilt = (x - 0.5) / sigma / sigma
    loss = np.where(
        tilt < 1,
        np.log1p(q * np.expm1(np.minimum(tilt, 1))),
        np.logaddexp(math.log1p(-q), math.log(q) + tilt),
    )
    small = np.log(np.maximum(np.expm1(order * loss) - order * np.expm1(loss), 0.0))
    large = order * loss + np.log1p(
        np.maximum(-1.0, -order * np.exp(-(order - 1) * loss) + (order - 1) * np.exp(-order * loss))
    )
    return log_density + np.where(order * loss < 30, small, large)


def get_privacy_spent(
    *, orders: float | Sequence[float], rdp: float | Sequence[float] | np.ndarray, delta: float
) -> tuple[float, float]:
    """Best (epsilon, delta) statement that a curve of Renyi divergences implies.

    Args:
        orders: one order or several, each above 1.
        rdp: divergence in nats at each of them, at least 0.
        delta: probability strictly between 0 and 1.

    Returns:
        epsilon, and the order that gave it. ``(inf, order)`` where every divergence is infinite.

    Raises:
        ConfigurationError: naming every argument out of range.

    Warns:
        UserWarning: if the first or last of several orders was the best: others may do better.

    Formal guarantee:
        A mechanism that is (order, rdp)-RDP at each pair passed in is (epsilon, delta)-differentially private:
        proposition 12 of Canonne, Kamath and Steinke 2020 ("The Discrete Gaussian for Differential Privacy";
        also Balle et al. 2020, theorem 21), and epsilon 0 where the inequality of Bretagnolle and Huber,
        TV <= sqrt(1 - exp(-KL)), already bounds the total variation by delta.

    Example:
        >>> get_privacy_spent(orders=[2, 4, 8], rdp=[0.1, 0.2, 0.4], delta=1e-5)[1]
        8.0
    """
    order_A = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    rdp_A = np.atleast_1d(np.asarray(rdp, dtype=np.float64))
    problems = number_problems(delta=delta) + _order_problems(order_A)
    if rdp_A.shape != order_A.shape:
        problems.append(
            f"orders and rdp have shapes {order_A.shape} and {rdp_A.shape}; pass one rdp per order."
        )
    if np.isnan(rdp_A).any() or (rdp_A < 0).any():
        problems.append("rdp holds NaN or negative values; divergences are at least 0.")
    raise_if_any("get_privacy_spent cannot answer", problems)

    with np.errstate(invalid="ignore"):
        slack_A = np.log1p(-1 / order_A) - (math.log(delta) + np.log(order_A)) / (order_A - 1)
    slack_A = np.where(np.isinf(order_A), 0.0, slack_A)
    epsilon_A = np.maximum(rdp_A + slack_A, 0.0)
    epsilon_A[-np.expm1(-rdp_A) <= delta * delta] = 0.0
    best = int(np.argmin(epsilon_A))
    epsilon, order = float(epsilon_A[best]), float(order_A[best])
    if order_A.size > 1 and 0 < epsilon < math.inf and order in (order_A.min(), order_A.max()):
        side = "smaller" if order == order_A.min() else "larger"
        warnings.warn(
            f"The best order, {order:g}, is the {side[:-1]}st of the orders tried: epsilon is valid but may be "
            f"loose. Pass {side} orders through alphas=.",
            stacklevel=2,
        )
    return epsilon, order
