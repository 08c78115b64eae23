"""The accountant by numerical composition: tight, and still an upper bound."""

from __future__ import annotations

import math
import warnings
from typing import Any

from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis.checks import number_problems
from opacus.accountants.analysis.gdp import eps_from_mu
from opacus.accountants.analysis.prv.epsilon import CannotAnswerError, composed_epsilon
from opacus.accountants.rdp import RDPAccountant
from opacus.errors import raise_if_any

__all__ = ["PRVAccountant"]


class PRVAccountant(IAccountant):
    """Accounts by composing the distribution of the privacy loss (Gopi, Lee and Wutschitz 2021).

    Noise multiplier and sample rate may change during the run.

    Formal guarantee:
        If each step released a sum of gradients, clipped per sample to norm C over a Poisson sample of the
        recorded rate, with Gaussian noise of standard deviation noise_multiplier * C, then the whole run is
        (epsilon, delta)-differentially private under adding or removing one sample, for the epsilon returned at
        delta: losses are rounded so that delta never falls, truncated and wrapped mass is added to delta, and both
        directions (a sample added, a sample removed) are bounded, up to rounding of double precision, for which
        2e-16 per step is set aside. Exact for full batches.

    Example:
        >>> accountant = PRVAccountant()
        >>> for _ in range(1000):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> round(accountant.get_epsilon(delta=1e-5), 2)
        1.83
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_said_why = False

    @classmethod
    def mechanism(cls) -> str:
        return "prv"

    def get_epsilon(
        self, delta: float, *, eps_error: float = 0.01, delta_error: float | None = None, **kwargs: Any
    ) -> float:
        """Epsilon of the recorded steps, at `delta`.

        Args:
            delta: probability strictly between 0 and 1.
            eps_error: how much too large epsilon may be, as far as can be estimated; 0.1% of epsilon is aimed at
                in any case. Where limits of time and memory stand against it, up to 1% is accepted.
            delta_error: part of delta spent on truncating the losses; a thousandth of delta if None.
            **kwargs: ignored, so that accountants are interchangeable.

        Returns:
            Epsilon, never too small; 0 before the first step, ``inf`` without noise.

        Raises:
            ConfigurationError: naming every argument out of range.

        Warns:
            UserWarning: once per accountant, if the answer is valid but loose (`RDPAccountant`'s at worst), and why.
        """
        problems = number_problems(delta=delta)
        if not (eps_error > 0):
            problems.append(f"eps_error is {eps_error!r}; pass a number above 0.")
        if delta_error is not None and not 0 < delta_error < 0.1 * delta:
            problems.append(f"delta_error is {delta_error!r}; pass a positive number below a tenth of delta.")
        raise_if_any("epsilon cannot be computed", problems)

        counts: dict[tuple[float, float], int] = {}
        for sigma, rate, steps in self.history:
            if rate > 0 and steps > 0 and sigma < math.inf:
                counts[sigma, rate] = counts.get((sigma, rate), 0) + steps
        if any(sigma == 0 for sigma, _ in counts):
            return math.inf
        if all(rate == 1 for _, rate in counts):
            mu = math.hypot(*(math.sqrt(steps) / sigma for (sigma, _), steps in counts.items()))
            return eps_from_mu(mu=mu, delta=delta)
        try:
            return composed_epsilon(
                [(sigma, rate, steps) for (sigma, rate), steps in counts.items()],
                delta,
                eps_error,
                delta / 1000 if delta_error is None else delta_error,
            )
        except CannotAnswerError as reason:
            bound = reason.bound
            if not self._has_said_why:
                self._has_said_why = True
                warnings.warn(
                    f"PRVAccountant's epsilon is valid but larger than need be ({reason}): it is the smaller one "
                    "of a coarse estimate's upper bound and RDPAccountant's epsilon.",
                    stacklevel=2,
                )
        renyi = RDPAccountant()
        renyi.history = [(sigma, rate, steps) for (sigma, rate), steps in counts.items()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on orders, which cannot be chosen here
            return min(bound, renyi.get_epsilon(delta))
