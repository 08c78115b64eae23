"""The Renyi accountant: fast, always valid, a little loose. The default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis.checks import check_numbers
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

__all__ = ["RDPAccountant"]


class RDPAccountant(IAccountant):
    """Accounts in Renyi divergences (Mironov 2017; Mironov, Talwar and Zhang 2019).

    Divergences of steps with any noise multipliers and sample rates add up, so both may change during the run.

    Formal guarantee:
        If each step released a sum of gradients, clipped per sample to norm C over a Poisson sample of the
        recorded rate, with Gaussian noise of standard deviation noise_multiplier * C, then the whole run is
        (epsilon, delta)-differentially private under adding or removing one sample, for every delta and the
        epsilon returned for it.

    Example:
        >>> accountant = RDPAccountant()
        >>> for _ in range(100):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> len(accountant), round(accountant.get_epsilon(delta=1e-5), 2)
        (100, 1.21)
    """

    # Dense where typical runs have their optimum; the powers of two serve epsilons below about 0.1. The same
    # orders as Google's dp-accounting, so that both libraries state the same number for the same run.
    DEFAULT_ALPHAS = [1 + x / 10 for x in range(1, 101)] + [
        float(x) for x in (*range(12, 64), 128, 256, 512, 1024)
    ]

    @classmethod
    def mechanism(cls) -> str:
        return "rdp"

    def get_privacy_spent(
        self, *, delta: float, alphas: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Epsilon and the Renyi order it came from.

        Args:
            delta: probability strictly between 0 and 1.
            alphas: orders to try, each above 1; `DEFAULT_ALPHAS` if None.

        Returns:
            ``(epsilon, order)``; ``(0.0, 0.0)`` before the first step.

        Raises:
            ConfigurationError: naming every argument out of range.
        """
        check_numbers("epsilon cannot be computed", delta=delta)
        if not self.history:
            return 0.0, 0.0
        orders = self.DEFAULT_ALPHAS if alphas is None else list(alphas)
        rdp = np.zeros(len(orders))
        for noise_multiplier, sample_rate, steps in self.history:
            rdp += compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=steps, orders=orders)
        return get_privacy_spent(orders=orders, rdp=rdp, delta=delta)

    def get_epsilon(self, delta: float, alphas: Sequence[float] | None = None, **kwargs: Any) -> float:
        """Epsilon of the recorded steps, at `delta`.

        Args:
            delta: probability strictly between 0 and 1.
            alphas: Renyi orders to try, each above 1; `DEFAULT_ALPHAS` if None.
            **kwargs: ignored, so that accountants are interchangeable.

        Returns:
            Epsilon; 0 before the first step, ``inf`` without noise.

        Raises:
            ConfigurationError: naming every argument out of range.
        """
        return self.get_privacy_spent(delta=delta, alphas=alphas)[0]
