"""The Gaussian-DP accountant: one number mu for a whole run, by the central limit theorem."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis.checks import check_numbers
from opacus.accountants.analysis.gdp import compute_mu_poisson, compute_mu_uniform, eps_from_mu

__all__ = ["GaussianAccountant"]


class GaussianAccountant(IAccountant):
    """Accounts in mu of Gaussian differential privacy (Bu, Dong, Long and Su 2019).

    Noise multiplier and sample rate may change during the run: the root of the sum of squares of each part's mu is
    the run's mu (Dong, Roth and Su 2019, corollary 3.3).

    Formal guarantee:
        For full batches (sample rate 1) the epsilon returned is exactly that of the run. Otherwise it is an
        **approximation**, which tends to the truth as the number of steps grows and may lie below it; nothing is
        guaranteed for a finite run. Use ``"rdp"`` or ``"prv"`` for a statement that holds.

    Example:
        >>> accountant = GaussianAccountant()
        >>> for _ in range(100):
        ...     accountant.step(noise_multiplier=10.0, sample_rate=1.0)
        >>> round(accountant.get_epsilon(delta=1e-5), 3)
        4.377
    """

    @classmethod
    def mechanism(cls) -> str:
        return "gdp"

    def get_epsilon(self, delta: float, poisson: bool = True, **kwargs: Any) -> float:
        """Epsilon of the recorded steps, at `delta`.

        Args:
            delta: probability strictly between 0 and 1.
            poisson: whether batches were Poisson samples; False for batches of one fixed size.
            **kwargs: ignored, so that accountants are interchangeable.

        Returns:
            Epsilon; 0 before the first step, ``inf`` without noise.

        Raises:
            ConfigurationError: if `delta` is out of range.
        """
        check_numbers("epsilon cannot be computed", delta=delta)
        mu_of = compute_mu_poisson if poisson else compute_mu_uniform
        parts = [mu_of(steps=n, noise_multiplier=sigma, sample_rate=rate) for sigma, rate, n in self.history]
        return eps_from_mu(mu=math.hypot(*parts), delta=delta)
