"""GDP: closed forms, and the defining integral of the central limit."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from opacus.accountants import GaussianAccountant
from opacus.accountants.analysis.gdp import (
    compute_eps_poisson,
    compute_eps_uniform,
    compute_mu_poisson,
    compute_mu_uniform,
    delta_eps_mu,
    eps_from_mu,
)
from opacus.errors import ConfigurationError


@pytest.mark.parametrize("mu", [1e-3, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0, 20.0])
def test_delta_is_the_hockey_stick_divergence_of_two_normals(mu, eps):
    # E over N(mu, 1) of max(0, 1 - exp(eps - loss)), with loss = mu x - mu^2 / 2.
    start = eps / mu + mu / 2
    end = max(start, mu) + 40
    expected, _ = quad(
        lambda x: norm.pdf(x, mu) * -np.expm1(eps - mu * x + mu * mu / 2),
        start,
        end,
        points=[p for p in (mu - 5, mu, mu + 5) if start < p < end] or None,
        epsabs=0,
        epsrel=1e-11,
        limit=400,
    )
    assert delta_eps_mu(eps=eps, mu=mu) == pytest.approx(expected, rel=1e-8, abs=1e-14)


@pytest.mark.parametrize("mu", [1e-2, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
def test_epsilon_inverts_delta(mu, delta):
    epsilon = eps_from_mu(mu=mu, delta=delta)
    if epsilon > 0:
        assert delta_eps_mu(eps=epsilon, mu=mu) == pytest.approx(delta, rel=1e-6)
    else:
        assert delta_eps_mu(eps=0.0, mu=mu) <= delta


def test_full_batches_are_exact():
    for uniform in (compute_mu_poisson, compute_mu_uniform):
        assert uniform(steps=9, noise_multiplier=4.0, sample_rate=1.0) == pytest.approx(0.75, rel=1e-14)


def test_mu_of_poisson_samples_is_the_chi_square_divergence():
    # The limit's mu^2 is steps * rate^2 * (E over N(0, s^2) of (dN(1)/dN(0))^2 - 1).
    s = 1.3
    square, _ = quad(lambda x: norm.pdf(x, 1, s) ** 2 / norm.pdf(x, 0, s), -30, 30)
    mu = compute_mu_poisson(steps=400, noise_multiplier=s, sample_rate=0.02)
    assert mu == pytest.approx(0.02 * 20 * math.sqrt(square - 1), rel=1e-8)


@pytest.mark.parametrize("sigma", [0.25, 1.0, 50.0])
def test_mu_of_fixed_size_batches_is_the_stated_formula(sigma):
    mp = pytest.importorskip("mpmath")
    with mp.workdps(40):
        s = mp.mpf(sigma)
        variance = mp.exp(s**-2) * mp.ncdf(1.5 / s) + 3 * mp.ncdf(-0.5 / s) - 2
        expected = float(mp.mpf("0.02") * 20 * mp.sqrt(2 * variance))
    mu = compute_mu_uniform(steps=400, noise_multiplier=sigma, sample_rate=0.02)
    assert mu == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("poisson", [True, False])
def test_parts_of_a_run_add_in_squares(poisson):
    accountant = GaussianAccountant()
    accountant.history = [(1.0, 0.01, 300), (2.0, 0.02, 100)]
    mu_of = compute_mu_poisson if poisson else compute_mu_uniform
    parts = [mu_of(steps=n, noise_multiplier=s, sample_rate=q) for s, q, n in accountant.history]
    expected = eps_from_mu(mu=math.sqrt(parts[0] ** 2 + parts[1] ** 2), delta=1e-5)
    assert accountant.get_epsilon(1e-5, poisson=poisson) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("epsilon_of", [compute_eps_poisson, compute_eps_uniform])
def test_extreme_noise_gives_numbers_and_less_noise_never_less_epsilon(epsilon_of):
    sigmas = [0.0, 1e-3, 0.05, 0.3, 1.0, 50.0, 1e6]
    found = [epsilon_of(steps=10**6, noise_multiplier=s, sample_rate=1e-3, delta=1e-6) for s in sigmas]
    assert not any(math.isnan(value) for value in found)
    assert found == sorted(found, reverse=True)
    assert found[0] == math.inf


def test_bad_arguments_are_named():
    with pytest.raises(ConfigurationError, match="mu is"):
        eps_from_mu(mu=-1.0, delta=1e-5)
    with pytest.raises(ConfigurationError, match="eps is"):
        delta_eps_mu(eps=-1.0, mu=1.0)
    with pytest.raises(ConfigurationError, match="steps is"):
        compute_mu_poisson(steps=-1, noise_multiplier=1.0, sample_rate=0.1)
