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
# With less noise quadrature would take ever more points, for epsilons that protect nobody.
_LEAST_NOISE = 2e-3


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
        rdp_A = steps * _subsampled(float(q), float(noise_multiplier), tuple(order_A.tolist()))
    return float(rdp_A[0]) if np.ndim(orders) == 0 else rdp_A


def _order_problems(order_A: np.ndarray) -> list[str]:
    if order_A.ndim != 1 or order_A.size == 0:
        return ["orders is empty or nested; pass one order or a flat list of them."]
    wrong = [order for order in order_A.tolist() if not order > 1]
    return [f"orders holds {wrong}; every order must be above 1."] if wrong else []


# Kept, because epsilon is asked for again and again while a run's history grows at its end.
@lru_cache(maxsize=1 << 10)
def _subsampled(q: float, sigma: float, orders: tuple[float, ...]) -> np.ndarray:
    """Divergence of one step at each order; all orders at once, since each alone is too little work for numpy."""
    order_A = np.array(orders)
    whole_A = (order_A == np.floor(order_A)) & np.isfinite(order_A)
    other_A = ~whole_A & np.isfinite(order_A)
    log_moment_A = np.full_like(order_A, np.inf)
    if whole_A.any():
        log_moment_A[whole_A] = _whole_orders(q, sigma, tuple(int(order) for order in order_A[whole_A]))
    if other_A.any():
        others = _other_orders if sigma >= _LEAST_NOISE else _between_whole_orders
        log_moment_A[other_A] = others(q, sigma, order_A[other_A])
    return log_moment_A / np.where(np.isfinite(order_A), order_A - 1, 1.0)


def _log_sums(term_N: np.ndarray, first_P: np.ndarray) -> np.ndarray:
    """log of the sum of exponentials of each run of terms; `first_P` says where each starts."""
    top_P = np.maximum.reduceat(term_N, first_P)
    length_P = np.diff(np.append(first_P, len(term_N)))
    with np.errstate(divide="ignore", invalid="ignore"):
        share_N = np.exp(term_N - np.repeat(np.where(np.isfinite(top_P), top_P, 0.0), length_P))
        return np.where(np.isfinite(top_P), top_P + np.log(np.add.reduceat(share_N, first_P)), top_P)


@lru_cache(maxsize=16)
def _binomials(orders: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each order in turn, all k from 2 to it: k, order - k, log of "order choose k"; and where each starts."""
    log_factorial = np.concatenate(
        ([0.0], np.cumsum(np.log(np.arange(1, max(orders) + 1, dtype=np.float64))))
    )
    k_N = np.concatenate([np.arange(2, order + 1) for order in orders])
    rest_N = np.repeat(orders, [order - 1 for order in orders]) - k_N
    log_choose_N = log_factorial[k_N + rest_N] - log_factorial[k_N] - log_factorial[rest_N]
    return k_N, rest_N, log_choose_N, np.cumsum([0, *(order - 1 for order in orders[:-1])])


def _whole_orders(q: float, sigma: float, orders: tuple[int, ...]) -> np.ndarray:
    """log A: of A - 1 by the binomial theorem, where terms k = 0 and 1 are what cancels against 1."""
    k_N, rest_N, log_choose_N, first_A = _binomials(orders)
    k = np.arange(2, max(orders) + 1, dtype=np.float64)
    with np.errstate(over="ignore"):  # a noise multiplier near zero: the divergence is infinite in doubles
        growth = k * (k - 1) / 2 / sigma / sigma
    log_expm1 = np.where(growth > 1, growth, 0.0) + np.log(
        np.where(growth > 1, -np.expm1(-growth), np.expm1(np.minimum(growth, 1)))
    )
    term_N = log_choose_N + k_N * math.log(q) + rest_N * math.log1p(-q) + log_expm1[k_N - 2]
    return np.logaddexp(0.0, _log_sums(term_N, first_A))


def _between_whole_orders(q: float, sigma: float, order_A: np.ndarray) -> np.ndarray:
    """Upper bound of log A: it is convex in the order, so it lies below the chords between whole orders."""
    below_A = np.floor(order_A)
    low_A = np.where(
        below_A > 1, _whole_orders(q, sigma, tuple(int(max(2, order)) for order in below_A)), 0.0
    )
    high_A = _whole_orders(q, sigma, tuple(int(order) + 1 for order in below_A))
    share_A = order_A - below_A
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(high_A), (1 - share_A) * low_A + share_A * high_A, np.inf)


def _other_orders(q: float, sigma: float, order_A: np.ndarray) -> np.ndarray:
    """log A: of A - 1 by the trapezoidal rule, which converges exponentially for this smooth integrand.

    The integrand is analytic up to pi s^2 off the real axis, where P has its zeros; beside a Gaussian of width s.
    The step below resolves both to 1e-15. A first, coarse pass finds where the integrand lives: near 0,
    near the order, or both. Orders are taken in groups of about 30 thousand points.
    """
    step = min(sigma / 3, sigma * sigma / 2)
    groups = min(len(order_A), math.ceil(len(order_A) * (80 + 80 / sigma) / 30_000))
    excess = [_trapezoids(q, sigma, group, step) for group in np.array_split(order_A, groups)]
    return np.logaddexp(0.0, np.concatenate(excess))


def _trapezoids(q: float, sigma: float, order_A: np.ndarray, step: float) -> np.ndarray:
    excess_A = np.full_like(order_A, np.inf)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        lowest, highest = -10 * sigma, max(float(order_A.max()), 2.0) + 10 * sigma
        coarse = np.linspace(lowest, highest, max(64, math.ceil((highest - lowest) / (sigma / 2))))
        value = _log_integrand(coarse, q, sigma, order_A[:, None])
        finite_A = np.isfinite(value.max(1))
        if not finite_A.any():
            return excess_A
        value, order_A = value[finite_A], order_A[finite_A]
        lives = value > value.max(1, keepdims=True) - _NEGLIGIBLE
        wider = lives.copy()
        wider[:, 1:] |= lives[:, :-1]
        wider[:, :-1] |= lives[:, 1:]
        # P pieces, each of an order and between two points; N points of all pieces.
        edges = np.diff(np.pad(wider.astype(np.int8), ((0, 0), (1, 1))))
        order_P, left = np.nonzero(edges == 1)
        left_P, right_P = coarse[left], coarse[np.nonzero(edges == -1)[1] - 1]
        count_P = np.maximum(2, np.ceil((right_P - left_P) / step).astype(np.int64) + 1)
        width_P = (right_P - left_P) / (count_P - 1)
        first_P = np.cumsum(count_P) - count_P
        place_N = np.arange(count_P.sum()) - np.repeat(first_P, count_P)
        x_N = np.repeat(left_P, count_P) + place_N * np.repeat(width_P, count_P)
        term_N = _log_integrand(x_N, q, sigma, np.repeat(order_A[order_P], count_P))
        piece_P = _log_sums(term_N, first_P) + np.log(width_P)
        excess_A[finite_A] = _log_sums(piece_P, np.flatnonzero(np.diff(order_P, prepend=-1)))
    return excess_A


def _log_integrand(x: np.ndarray, q: float, sigma: float, order: np.ndarray) -> np.ndarray:
    log_density = -0.5 * (x / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
    tilt = (x - 0.5) / sigma / sigma
    loss = np.where(
        tilt < 1,
        np.log1p(q * np.expm1(np.minimum(tilt, 1))),
        np.logaddexp(math.log1p(-q), math.log(q) + tilt),
    )
    tilted = order * loss
    # Near zero the difference cancels, but not its series: the sum of (order^k - order) loss^k / k! from k = 2.
    series = 1 + (tilted + loss) / 3 + (tilted * tilted + tilted * loss + loss * loss) / 12
    near = 0.5 * order * (order - 1) * loss * loss * series
    far = np.expm1(tilted) - order * np.expm1(loss)
    small = np.log(np.where(np.abs(tilted) < 1e-3, near, np.maximum(far, 0.0)))
    large = tilted + np.log1p(
        np.maximum(-1.0, -order * np.exp(-(order - 1) * loss) + (order - 1) * np.exp(-order * loss))
    )
    return log_density + np.where(tilted < 30, small, large)


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
