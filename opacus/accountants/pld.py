"""The accountant over Google's `dp-accounting` library: a second opinion, from an independent implementation."""

from __future__ import annotations

import math
from typing import Any

from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis.checks import check_numbers
from opacus.errors import raise_if_any

__all__ = ["PLDAccountant"]


class PLDAccountant(IAccountant):
    """Accounts in privacy loss distributions, as `dp_accounting.pld` computes them.

    The library is imported when epsilon is asked for; it comes with ``pip install opacus[accounting]``.

    Formal guarantee:
        That of `dp_accounting.pld.PLDAccountant` with pessimistic estimates, for Poisson sampled Gaussian steps and
        adding or removing one sample (Doroshenko et al. 2022): epsilon is never too small.
    """

    @classmethod
    def mechanism(cls) -> str:
        return "pld"

    def get_epsilon(
        self, delta: float, *, value_discretization_interval: float = 1e-4, **kwargs: Any
    ) -> float:
        """Epsilon of the recorded steps, at `delta`.

        Args:
            delta: probability strictly between 0 and 1.
            value_discretization_interval: spacing of the library's mesh, in nats; smaller is tighter and slower.
            **kwargs: ignored, so that accountants are interchangeable.

        Returns:
            Epsilon; 0 before the first step, ``inf`` without noise.

        Raises:
            ConfigurationError: if `delta` is out of range, or the library is not installed.
        """
        check_numbers("epsilon cannot be computed", delta=delta)
        history = [entry for entry in self.history if entry[1] > 0 and entry[2] > 0 and entry[0] < math.inf]
        if any(noise_multiplier == 0 for noise_multiplier, _, _ in history):
            return math.inf
        if not history:
            return 0.0
        try:
            import dp_accounting
            from dp_accounting import pld
        except ImportError:
            raise_if_any(
                "accountant 'pld' cannot compute epsilon",
                [
                    "dp-accounting is not installed; pip install 'opacus[accounting]', or use accountant 'prv'."
                ],
            )
        accountant = pld.PLDAccountant(
            dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval
        )
        for noise_multiplier, sample_rate, steps in history:
            step = dp_accounting.PoissonSampledDpEvent(
                sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
            )
            accountant.compose(step, steps)
        return float(accountant.get_epsilon(delta))
