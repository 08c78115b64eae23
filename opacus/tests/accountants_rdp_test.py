"""RDP: against Google's dp-accounting, 25-digit quadrature, and closed forms."""

import itertools
import math
import warnings

import numpy as np
import pytest

from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from opacus.errors import ConfigurationError


def epsilon(q, sigma, steps, delta, **options):
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_epsilon(delta, **options)


# Whole orders only: dp-accounting's series for the others stops after 1000 terms, 20% off at order 1.1.
ORDERS = [float(order) for order in range(2, 64)] + [128.0, 256.0, 512.0, 1024.0]


@pytest.mark.parametrize("q", [1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 4.0, 20.0])
def test_epsilon_agrees_with_dp_accounting(q, sigma):
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    for steps in (1, 1000, 100_000):
        theirs = RdpAccountant(ORDERS).compose(event, steps)
        for delta in (1e-8, 1e-5, 1e-3):
            ours = epsilon(q, sigma, steps, delta, alphas=ORDERS)
            assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.01, 1.0, 1000), (0.001, 0.7, 10_000), (0.02, 1.5, 5000)]
)
def test_default_orders_give_dp_accountings_default_epsilon(q, sigma, steps):
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import RdpAccountant

    theirs = RdpAccountant()
    theirs.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    assert epsilon(q, sigma, steps, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.parametrize(("q", "sigma"), [(1e-6, 1.0), (0.01, 20.0), (0.3, 0.3)])
@pytest.mark.parametrize("order", [1.01, 10.3])
def test_divergence_agrees_with_quadrature_in_25_digits(q, sigma, order):
    mp = pytest.importorskip("mpmath")
    with mp.workdps(25):
        s, a = mp.mpf(sigma), mp.mpf(order)
        edge = s * s * mp.log((1 - mp.mpf(q)) / q) + 0.5
        points = sorted(
            p for p in {-30 * s, -5 * s, mp.mpf(0), 5 * s, edge - s, edge, edge + s, a - 5 * s, a, a + 5 * s, a + 30 * s}
            if -30 * s <= p <= a + 30 * s
        )  # fmt: skip
        moment = mp.quad(
            lambda x: mp.npdf(x, 0, s) * (1 - mp.mpf(q) + q * mp.exp((2 * x - 1) / (2 * s * s))) ** a, points
        )
        expected = float(mp.log(moment) / (a - 1))
    assert compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order) == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize(("q", "sigma", "order"), [(1e-6, 50.0, 1.5), (1e-4, 1e6, 3.3), (0.01, 300.0, 2.5)])
def test_tiny_divergences_keep_their_digits(q, sigma, order):
    mp = pytest.importorskip("mpmath")
    with mp.workdps(50):
        s, a, rate = mp.mpf(sigma), mp.mpf(order), mp.mpf(q)
        excess = mp.quad(
            lambda x: mp.npdf(x, 0, s) * ((1 - rate + rate * mp.exp((2 * x - 1) / (2 * s * s))) ** a - 1),
            [-20 * s, -5 * s, 0, 5 * s, 20 * s],
        )
        expected = float(mp.log1p(excess) / (a - 1))
    found = compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=order)
    assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("sigma", [1e-3, 1e-170])
def test_next_to_no_noise_has_a_divergence_that_is_valid_and_rises_with_the_order(sigma):
    # P is at least q N(1, s^2), so the moment is at least q^order times that of the Gaussian mechanism.
    orders = [1.1, 1.9, 2.0, 2.5, 3.0]
    rdp = compute_rdp(q=0.1, noise_multiplier=sigma, steps=1, orders=orders)
    assert all(before <= after * (1 + 1e-12) for before, after in itertools.pairwise(rdp))
    full = [order / 2 / sigma / sigma + order / (order - 1) * math.log(0.1) for order in orders]
    assert all(value >= least for value, least in zip(rdp, full, strict=True))


def test_full_batches_have_the_gaussian_divergence():
    orders = np.array([1.5, 2.0, 33.0])
    rdp = compute_rdp(q=1.0, noise_multiplier=3.0, steps=7, orders=orders)
    np.testing.assert_allclose(rdp, 7 * orders / 18, rtol=1e-14)


def test_divergence_is_continuous_where_the_method_changes():
    for order in (2, 5, 20):
        at, near = (compute_rdp(q=0.02, noise_multiplier=0.8, steps=1, orders=order + d) for d in (0.0, 1e-7))
        assert near == pytest.approx(at, rel=1e-4)


def test_conversion_is_the_stated_formula_at_its_best_order():
    orders, rdp, delta = [2.0, 4.0, 8.0], [0.1, 0.2, 0.9], 1e-5
    each = [r + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, r in zip(orders, rdp, strict=True)]
    with pytest.warns(UserWarning, match="larger orders"):
        assert get_privacy_spent(orders=orders, rdp=rdp, delta=delta) == (pytest.approx(min(each)), 8.0)


def test_total_variation_below_delta_is_epsilon_zero():
    # TV <= sqrt(1 - exp(-KL)) < delta
    assert get_privacy_spent(orders=[2.0, 3.0], rdp=[1e-11, 1e-11], delta=1e-5)[0] == 0.0


def test_changing_noise_and_rate_adds_divergences():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.01, 100), (2.0, 0.05, 50)]
    orders = RDPAccountant.DEFAULT_ALPHAS
    rdp = compute_rdp(q=0.01, noise_multiplier=1.0, steps=100, orders=orders) + compute_rdp(
        q=0.05, noise_multiplier=2.0, steps=50, orders=orders
    )
    expected, _ = get_privacy_spent(orders=orders, rdp=rdp, delta=1e-6)
    assert accountant.get_epsilon(1e-6) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["rdp", "gdp", "prv", "pld"])
def test_no_steps_no_epsilon_and_no_noise_no_privacy(name):
    if name == "pld":
        pytest.importorskip("dp_accounting")
    accountant = create_accountant(name)
    assert accountant.get_epsilon(1e-5) == 0.0
    accountant.step(noise_multiplier=0.0, sample_rate=0.1)
    assert accountant.get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("name", ["rdp", "gdp", "prv", "pld"])
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, None])
def test_delta_out_of_range_is_named(name, delta):
    with pytest.raises(ConfigurationError, match="delta"):
        create_accountant(name).get_epsilon(delta)


def test_all_bad_arguments_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        compute_rdp(q=1.5, noise_multiplier=math.nan, steps=-1, orders=[0.5, 2.0])
    for name in ("sample_rate", "noise_multiplier", "steps", "orders"):
        assert name in str(caught.value)
