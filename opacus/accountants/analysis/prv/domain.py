"""The mesh on which distributions of the privacy loss are represented."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from opacus.errors import raise_if_any

__all__ = ["Domain", "compute_safe_domain_size"]


class Domain:
    """`size` equally spaced points from `t_min` to `t_max`, both included.

    Args:
        t_min: first point, in nats.
        t_max: last point, above `t_min`.
        size: number of points, at least 2.
        shifts: how far the points lie right of the multiples of their distance they were made from.

    Raises:
        ConfigurationError: if there are fewer than two points or `t_max` is not above `t_min`.

    Example:
        >>> Domain(-1.0, 1.0, 5).ts.tolist()
        [-1.0, -0.5, 0.0, 0.5, 1.0]
    """

    def __init__(self, t_min: float, t_max: float, size: int, shifts: float = 0.0) -> None:
        problems = []
        if not (size == int(size) and size >= 2):
            problems.append(f"size is {size!r}; pass a whole number that is at least 2.")
        if not (math.isfinite(t_min) and math.isfinite(t_max) and t_min < t_max):
            problems.append(
                f"t_min is {t_min!r} and t_max {t_max!r}; pass finite numbers, t_min below t_max."
            )
        raise_if_any("no mesh can be made", problems)
        self.t_min = t_min
        self.t_max = t_max
        self.size = int(size)
        self.shifts = shifts

    @classmethod
    def create_aligned(cls, t_min: float, t_max: float, dt: float) -> Domain:
        """The smallest mesh of an even number of multiples of `dt` that covers `t_min` to `t_max`.

        Example:
            >>> domain = Domain.create_aligned(-1.0, 2.0, 0.25)
            >>> domain.t_min, domain.t_max, domain.size
            (-1.0, 2.25, 14)
        """
        if not (dt > 0 and math.isfinite(dt)):
            raise_if_any("no mesh can be made", [f"dt is {dt!r}; pass a finite number above 0."])
        first, last = math.floor(t_min / dt), math.ceil(t_max / dt)
        last += (last - first + 1) % 2
        return cls(first * dt, last * dt, last - first + 1)

    @property
    def dt(self) -> float:
        """Distance of two neighbouring points."""
        return (self.t_max - self.t_min) / (self.size - 1)

    @property
    def ts(self) -> np.ndarray:
        """The points, float64 of length `size`."""
        return np.linspace(self.t_min, self.t_max, self.size)

    def shift_right(self, dt: float) -> Domain:
        """The mesh moved right by `dt`."""
        return Domain(self.t_min + dt, self.t_max + dt, self.size, self.shifts + dt)

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Domain(t_min={self.t_min}, t_max={self.t_max}, size={self.size}, shifts={self.shifts})"


def compute_safe_domain_size(
    prvs: Sequence[Any], max_self_compositions: Sequence[int], eps_error: float, delta_error: float
) -> float:
    """L such that the composed privacy loss leaves [-L, L] with probability at most `delta_error`.

    A Chernoff bound on the Renyi divergences: the loss S obeys E[exp(l S)] = exp(l D) with D the divergence at
    order 1 + l, and E[exp(-S)] <= 1. Each single loss obeys it as well.

    Args:
        prvs: privacy random variables with a method `rdp(alpha)`.
        max_self_compositions: number of compositions of each.
        eps_error: added to L, so that an epsilon read off with this error is inside.
        delta_error: probability, strictly between 0 and 1.

    Returns:
        L, in nats.

    Raises:
        ConfigurationError: if the lists differ in length or a number is out of range.
    """
    problems = []
    if len(prvs) != len(max_self_compositions) or not len(prvs):
        problems.append(f"{len(prvs)} prvs and {len(max_self_compositions)} compositions; pass one for each.")
    if not 0 < delta_error < 1:
        problems.append(f"delta_error is {delta_error!r}; pass a number strictly between 0 and 1.")
    if not eps_error >= 0:
        problems.append(f"eps_error is {eps_error!r}; pass a number that is at least 0.")
    raise_if_any("no safe domain size can be computed", problems)

    # Half of the probability for each side; a share of it for each single loss, all of which must fit as well.
    single = delta_error / 2 / (sum(max_self_compositions) + 1)
    orders = 1 + np.geomspace(1e-2, 1e3, 200)
    total = np.zeros_like(orders)
    needed = -math.log(single)
    for prv, count in zip(prvs, max_self_compositions, strict=True):
        divergence = np.array([prv.rdp(order) for order in orders])
        total += count * divergence
        needed = max(needed, float((divergence - math.log(single) / (orders - 1)).min()))
    return max(needed, float((total - math.log(single) / (orders - 1)).min())) + eps_error
