"""get_noise_multiplier and the opacus-privacy command."""

import json
import re
import subprocess
import sys
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opacus.accountants import PRVAccountant, create_accountant, get_noise_multiplier
from opacus.accountants.analysis.search import Bracket, bisect, narrow, pin
from opacus.accountants.utils import MAX_SIGMA, steps_of
from opacus.errors import ConfigurationError
from opacus.scripts.compute_dp_sgd_privacy import main


@pytest.mark.parametrize("name", ["rdp", "gdp", "prv"])
@pytest.mark.parametrize("target", [0.05, 8.0, 200.0])
@pytest.mark.parametrize(("q", "steps"), [(0.01, 1000), (1.0, 20)])
def test_noise_spends_the_target_and_less_noise_would_exceed_it(name, target, q, steps):
    tolerance = min(0.01, 0.01 * target)
    sigma = get_noise_multiplier(
        target_epsilon=target,
        target_delta=1e-5,
        sample_rate=q,
        steps=steps,
        accountant=name,
        epsilon_tolerance=tolerance,
    )

    def spent(noise_multiplier):
        accountant = create_accountant(name)
        accountant.history = [(noise_multiplier, q, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return accountant.get_epsilon(1e-5)

    assert target - tolerance <= spent(sigma) <= target
    assert spent(0.95 * sigma) > target


def plain_bisection(epsilon_of, target, tolerance):
    low, high = 0.0, 20.0
    while epsilon_of(high) > target:
        high *= 2
    while target - epsilon_of(high) > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_of(middle) <= target else (middle, high)
    return high


@pytest.mark.parametrize("name", ["rdp", "gdp", "prv"])
@pytest.mark.parametrize(
    ("target", "q", "steps", "tolerance"),
    [
        (8.0, 0.04, 500, 0.01),
        (1.0, 0.001, 5000, 1e-3),
        (0.05, 0.05, 2000, 0.01),
        (0.008, 0.3, 10_000, 0.01),  # all epsilons below the target will do: the first doubling ends it
        (300.0, 0.01, 100, 0.5),
    ],
)
def test_noise_is_that_of_plain_bisection_to_the_last_digit(name, target, q, steps, tolerance):
    accountant = create_accountant(name)

    def spent(noise_multiplier):
        accountant.history = [(noise_multiplier, q, steps)]
        return accountant.get_epsilon(1e-5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_noise_multiplier(
            target_epsilon=target,
            target_delta=1e-5,
            sample_rate=q,
            steps=steps,
            accountant=name,
            epsilon_tolerance=tolerance,
        )
        assert found == plain_bisection(spent, target, tolerance)


def search(function, target, tolerance, start=1.0):
    asked = []

    def counted(x):
        asked.append(x)
        return function(x)

    bracket = Bracket(counted, target - tolerance, target)
    assert narrow(bracket, start, 1e6)
    pin(bracket)
    return bisect(bracket, 20.0), asked


@given(
    power=st.floats(0.5, 6),
    scale=st.floats(1e-2, 1e2),
    target=st.floats(0.01, 1000),
    share=st.floats(1e-4, 0.9),
)
@settings(max_examples=60, deadline=None)
def test_any_power_is_searched_as_by_bisection_in_fewer_evaluations(power, scale, target, share):
    def function(x):
        return (scale / x) ** power

    assume(2e-3 < scale / target ** (1 / power) < 1e5)
    found, asked = search(function, target, share * target)
    assert found == plain_bisection(function, target, share * target)
    assert len(asked) == len(set(asked)) <= 40


def test_where_epsilon_jumps_across_the_target_the_search_ends_beside_the_jump():
    found, asked = search(lambda x: 1000.0 if x < 0.7 else 1.0, 300.0, 0.01)
    assert found == pytest.approx(0.7, rel=1e-5)
    assert found >= 0.7
    assert len(asked) < 60


def test_prv_searches_take_few_evaluations_where_losses_are_rare_and_large(monkeypatch):
    asked = []
    plain = PRVAccountant.get_epsilon
    monkeypatch.setattr(
        PRVAccountant, "get_epsilon", lambda self, *a, **k: asked.append(plain(self, *a, **k)) or asked[-1]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no answer of the Renyi accountant is used
        get_noise_multiplier(
            target_epsilon=300, target_delta=1e-6, sample_rate=1e-6, steps=10_000, accountant="prv"
        )
    assert 299.99 <= asked[-1] <= 300
    assert len(asked) <= 16


def test_full_batches_have_the_closed_form():
    # mu = sqrt(steps) / sigma = 1 spends epsilon 4.377 at delta 1e-5.
    sigma = get_noise_multiplier(
        target_epsilon=4.3772,
        target_delta=1e-5,
        sample_rate=1.0,
        steps=100,
        accountant="gdp",
        epsilon_tolerance=1e-4,
    )
    assert sigma == pytest.approx(10.0, rel=1e-3)


def test_epochs_are_steps_times_rate():
    assert steps_of(sample_rate=1 / 49, epochs=10) == 490
    assert steps_of(sample_rate=0.03, epochs=10) == 333
    common = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.02}
    assert get_noise_multiplier(**common, epochs=4) == get_noise_multiplier(**common, steps=200)


def test_options_reach_the_accountant():
    common = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 0.02, "steps": 200}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert get_noise_multiplier(**common, alphas=[2.0, 3.0]) > get_noise_multiplier(**common)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon is 0.0"),
        ({"target_epsilon": float("nan")}, "target_epsilon is nan"),
        ({"target_delta": 1.0}, "target_delta is 1.0"),
        ({"sample_rate": 0.0}, "sample_rate is 0"),
        ({"epochs": 1}, "exactly one"),
        ({"steps": None}, "exactly one"),
        ({"steps": 0}, "steps is 0"),
        ({"epsilon_tolerance": -1}, "epsilon_tolerance is -1"),
        ({"accountant": "none"}, "'none'"),
        ({"steps": None, "epochs": 1e-3}, "no step"),
        ({"target_epsilon": 1e-9, "steps": 10**9, "sample_rate": 1.0}, re.escape(f"{MAX_SIGMA:g}")),
    ],
)
def test_impossible_searches_are_named(change, named):
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 10, **change}
    with pytest.raises(ConfigurationError, match=named):
        get_noise_multiplier(**arguments)


def test_command_prints_what_the_accountant_says(capsys):
    assert main(["-r", "0.01", "-n", "1.0", "-e", "10", "-d", "1e-5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    accountant = create_accountant("rdp")
    accountant.history = [(1.0, 0.01, 1000)]
    assert result["epsilon"] == accountant.get_epsilon(1e-5)
    assert (result["steps"], result["delta"], result["accountant"]) == (1000, 1e-5, "rdp")


def test_command_finds_the_noise_for_a_target(capsys):
    assert main(["-r", "0.01", "--target-epsilon", "3", "--steps", "1000", "-a", "gdp"]) == 0
    text = capsys.readouterr().out
    assert "noise multiplier" in text
    assert "epsilon = 2.99" in text or "epsilon = 3" in text


def test_command_says_unbounded_as_null(capsys):
    assert main(["-r", "0.1", "-n", "0", "--steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["-r", "2", "-n", "1", "-e", "1"],
        ["-r", "0.1", "-n", "-1", "-e", "1"],
        ["-r", "0.1", "-n", "1"],
        ["-r", "0.1", "-n", "1", "-e", "1", "--steps", "3"],
        ["-r", "0.1", "-n", "1", "-e", "1", "-a", "none"],
        ["-r", "0.1", "-n", "1", "-e", "1", "-a", "prv", "--alphas", "2"],
        ["-r", "0.1", "-n", "1", "-e", "1", "--alphas", "0.5"],
        ["-r", "x", "-n", "1", "-e", "1"],
    ],
)
def test_command_answers_bad_input_with_a_message_and_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "opacus-privacy: " in captured.err


def test_command_has_help(capsys):
    assert main(["--help"]) == 0
    assert "--target-epsilon" in capsys.readouterr().out


def test_importing_accountants_loads_no_scipy():
    code = (
        "import sys, types, importlib.util as u; spec = u.find_spec('opacus'); package = types.ModuleType('opacus');"
        "package.__path__ = spec.submodule_search_locations; sys.modules['opacus'] = package;"
        "import opacus.accountants; print([m for m in sys.modules if m.split('.')[0] in ('scipy', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
