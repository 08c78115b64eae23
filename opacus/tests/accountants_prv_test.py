"""PRV: against dp-accounting's bounds from both sides, closed forms, and numerical integration."""

import math
import warnings

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom

from opacus.accountants import PRVAccountant, RDPAccountant, create_accountant
from opacus.accountants.analysis.gdp import delta_eps_mu, eps_from_mu
from opacus.accountants.analysis.prv import (
    DiscretePRV,
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    compute_safe_domain_size,
    discretize,
)
from opacus.accountants.analysis.prv.split import Loss, compose_on_two_meshes
from opacus.errors import ConfigurationError


def epsilon(history, delta, **options):
    accountant = PRVAccountant()
    accountant.history = history
    return accountant.get_epsilon(delta, **options)


# Several sizes, runs with rare large losses (small rate and noise) among them; spacing of dp-accounting's mesh last.
RUNS = [
    (0.01, 1.0, 1000, 1e-4),
    (0.001, 0.7, 10_000, 1e-4),
    (0.1, 2.0, 500, 1e-4),
    (0.5, 4.0, 30, 1e-4),
    (0.9, 0.7, 1, 1e-3),
    (1e-5, 0.4, 1000, 5e-4),
    (1e-3, 0.5, 2000, 1e-3),
    (1e-3, 2.0, 1000, 1e-4),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "spacing"), RUNS)
def test_epsilon_lies_between_dp_accountings_bounds_and_within_a_percent(q, sigma, steps, spacing):
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as pld

    below, above = (
        pld.from_gaussian_mechanism(
            sigma, sampling_prob=q, value_discretization_interval=spacing, pessimistic_estimate=pessimistic
        ).self_compose(steps)
        for pessimistic in (False, True)
    )
    for delta in (1e-7, 1e-5):
        found = epsilon([(sigma, q, steps)], delta)
        assert found >= below.get_epsilon_for_delta(delta) * (1 - 1e-9)
        assert found <= above.get_epsilon_for_delta(delta) * 1.01 + 1e-5


@pytest.mark.parametrize(("sigma", "steps"), [(5.0, 10), (0.5, 3), (300.0, 10**6)])
def test_full_batches_are_exact_and_nearly_full_ones_nearly(sigma, steps):
    exact = eps_from_mu(mu=math.sqrt(steps) / sigma, delta=1e-6)
    assert epsilon([(sigma, 1.0, steps)], 1e-6) == pytest.approx(exact, rel=1e-12)
    assert exact * (1 - 1e-6) <= epsilon([(sigma, 1 - 1e-12, steps)], 1e-6) <= exact * 1.01


def test_one_step_is_the_hockey_stick_divergence():
    q, sigma, delta = 0.2, 0.8, 1e-4
    found = epsilon([(sigma, q, 1)], delta)

    def spent(eps):
        def excess(x):
            ratio = 1 - q + q * math.exp((2 * x - 1) / (2 * sigma**2))
            return max(0.0, ratio - math.exp(eps)) * math.exp(-0.5 * (x / sigma) ** 2)

        start = sigma**2 * math.log((math.exp(eps) - 1 + q) / q) + 0.5
        return quad(excess, start, 12, epsabs=0, limit=300)[0] / (sigma * math.sqrt(2 * math.pi))

    assert spent(found) <= delta <= spent(found * 0.99)


def test_changing_noise_and_rate_agrees_with_dp_accounting():
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    history = [(1.0, 0.01, 500), (1.5, 0.02, 300), (1.0, 0.01, 100)]
    theirs = PLDAccountant(value_discretization_interval=1e-4)
    for sigma, q, steps in history:
        theirs.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    assert epsilon(history, 1e-6) == pytest.approx(theirs.get_epsilon(1e-6), rel=0.01)
    pld = create_accountant("pld")
    pld.history = history
    assert pld.get_epsilon(1e-6) == pytest.approx(theirs.get_epsilon(1e-6), rel=1e-12)


@pytest.mark.parametrize(
    "run", [(0.05, 1e-6, 10**6), (0.1, 0.01, 1000), (50.0, 0.3, 10**6), (0.05, 0.5, 10**6)]
)
def test_extreme_runs_have_an_answer_no_larger_than_renyis(run):
    renyi = RDPAccountant()
    renyi.history = [run]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, bound = epsilon([run], 1e-6), renyi.get_epsilon(1e-6)
    assert 0 < found <= bound < math.inf


def test_where_renyi_answers_the_reason_is_said_once():
    accountant, renyi = PRVAccountant(), RDPAccountant()
    accountant.history = renyi.history = [(1.0, 0.01, 10**6)]
    delta = 1e-15  # within the rounding errors of so many steps
    with pytest.warns(UserWarning, match="rounding errors of 1000000 steps"):
        found = accountant.get_epsilon(delta)
    assert found == renyi.get_epsilon(delta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant.get_epsilon(delta)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.5), (1.0, 2.0), (1e-3, 0.5)])
def test_distribution_density_and_masses_agree(q, sigma, added):
    prv = PoissonSubsampledGaussianPRV(q, sigma, added)
    low, high = prv.bounds(1e-6)
    ts = np.linspace(low, high, 9)
    mass, reference = prv.masses(ts)
    np.testing.assert_allclose(mass, np.diff(prv.cdf(ts)), rtol=1e-6, atol=1e-14)
    for left, right, m, r in zip(ts[2:-1], ts[3:], mass[2:], reference[2:], strict=True):
        assert quad(prv.pdf, left, right, limit=200)[0] == pytest.approx(m, rel=1e-5, abs=1e-12)
        weighted = quad(lambda t: prv.pdf(t) * math.exp(-t), left, right, limit=200)[0]
        assert weighted == pytest.approx(r, rel=1e-5, abs=1e-12)
    assert prv.cdf(low) <= 1e-6
    assert 1 - prv.cdf(high) <= 1.1e-6


def test_discretizing_keeps_both_masses_and_never_lowers_delta():
    prv = TruncatedPrivacyRandomVariable(PoissonSubsampledGaussianPRV(0.3, 1.5), -0.2, 2.0)
    fine, coarse = (discretize(prv, Domain.create_aligned(-0.2, 2.0, dt)) for dt in (0.001, 0.1))
    for discrete in (fine, coarse):
        assert discrete.pmf.min() >= 0
        assert discrete.pmf.sum() == pytest.approx(1.0, abs=1e-12)
        exact = quad(lambda t: prv.pdf(t) * math.exp(-t), -0.2, 2.0)[0]
        assert float(np.dot(discrete.pmf, np.exp(-discrete.domain.ts))) == pytest.approx(exact, rel=1e-8)
    for eps in (0.0, 0.13, 0.5, 1.1):
        exact = quad(lambda t, eps=eps: prv.pdf(t) * -math.expm1(eps - t), eps, 2.0)[0]
        assert exact - 1e-12 <= fine.compute_delta_estimate(eps) <= coarse.compute_delta_estimate(eps) + 1e-12
        assert fine.compute_delta_estimate(eps) == pytest.approx(exact, rel=1e-3)
    assert prv.mean() == pytest.approx(quad(lambda t: t * prv.pdf(t), -0.2, 2.0)[0], rel=1e-6)


def test_composition_is_the_convolution():
    rng = np.random.default_rng(0)
    one, two = (
        DiscretePRV(rng.dirichlet(np.ones(n)), Domain(t, t + 0.5 * (n - 1), n))
        for n, t in ((6, -1), (4, 0.5))
    )
    composed = compose_heterogeneous([one, two], [3, 2])
    direct = np.array([1.0])
    for part in (one, one, one, two, two):
        direct = np.convolve(direct, part.pmf)
    values = 3 * -1 + 2 * 0.5 + 0.5 * np.arange(len(direct))
    for eps in (0.0, 1.3, 4.0):
        expected = float(-(direct * np.minimum(np.expm1(np.minimum(eps - values, 0)), 0)).sum())
        assert composed.compute_delta_estimate(eps) == pytest.approx(expected, abs=1e-12)


def test_discrete_epsilon_inverts_discrete_delta():
    rng = np.random.default_rng(1)
    prv = DiscretePRV(rng.dirichlet(np.ones(200)), Domain(-3.0, 900.0, 200))
    for delta in (0.9, 0.5, 0.1, 1e-3, 1e-9):
        eps = prv.epsilon(delta)
        assert prv.compute_delta_estimate(eps) == pytest.approx(delta, rel=1e-6)
    assert prv.epsilon(0.0) == math.inf
    lower, estimate, upper = prv.compute_epsilon(0.1, 0.01, 0.5)
    assert lower == prv.epsilon(0.11) - 0.5
    assert estimate == prv.epsilon(0.1)
    assert upper == pytest.approx(prv.epsilon(0.09) + 0.5)


def test_two_meshes_never_lower_delta_and_agree_with_one_fine_mesh():
    prv, count = PoissonSubsampledGaussianPRV(1e-4, 0.4), 200
    low, high = prv.bounds(1e-12)
    loss = Loss(prv, low, high, count)
    assert loss.is_split
    two, points = compose_on_two_meshes([loss], 0.05, 1e-12, 1 << 20)
    assert points < 1 << 18
    one = compose_heterogeneous(
        [discretize(TruncatedPrivacyRandomVariable(prv, low, high), Domain.create_aligned(low, high, 2e-5))],
        [count],
    )
    for delta in (1e-4, 1e-6, 1e-8):
        assert two.epsilon(delta) == pytest.approx(one.epsilon(delta), rel=2e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(1e-6, 0.07, 10**4), (1e-4, 0.06, 10**4), (1e-6, 0.05, 10**6)]
)
def test_rare_large_losses_have_the_epsilon_of_a_poisson_number_of_gaussians(q, sigma, steps):
    # Told which steps held the sample, one sees k ~ Binomial(steps, q) Gaussian mechanisms: an upper bound. Each
    # held the sample unnoticed by a factor of q, so epsilon is lower by no more than log(1/q) for each of them.
    delta = 1e-6
    counts = np.arange(0, 60)
    chances = binom.pmf(counts, steps, q)

    def spent(eps):
        return chances[1:] @ np.array([delta_eps_mu(eps=eps, mu=math.sqrt(k) / sigma) for k in counts[1:]])

    bound = brentq(lambda eps: math.log(max(spent(eps), 1e-300) / delta), 0.0, 2e4)
    most = int(binom.isf(delta, steps, q))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = epsilon([(sigma, q, steps)], delta)
    assert bound - (most + 1) * math.log(1 / q) <= found <= bound


def test_safe_domain_holds_the_composed_loss():
    prv, count = PoissonSubsampledGaussianPRV(1.0, 10.0), 100
    size = compute_safe_domain_size([prv], [count], 0.01, 1e-8)
    # The composed loss of full batches is normal: mean 1/2 and variance 1.
    assert math.erfc((size - 0.5) / math.sqrt(2)) / 2 + math.erfc((size + 0.5) / math.sqrt(2)) / 2 <= 1e-8
    assert size < 40


def test_mesh_is_aligned_and_even():
    domain = Domain.create_aligned(-1.05, 2.03, 0.1)
    assert (domain.t_min, domain.t_max, domain.size) == (pytest.approx(-1.1), pytest.approx(2.2), 34)
    moved = domain.shift_right(0.03)
    assert moved.shifts == 0.03
    np.testing.assert_allclose(moved.ts, domain.ts + 0.03)
    assert moved.dt == pytest.approx(0.1)


@pytest.mark.parametrize("options", [{"eps_error": 0.0}, {"delta_error": 1e-3}, {"delta_error": -1.0}])
def test_bad_options_are_named(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        epsilon([(1.0, 0.1, 1)], 1e-5, **options)
