"""History, hooks, saved states, registry."""

import copy
import pickle
import types

import pytest

from opacus.accountants import IAccountant, RDPAccountant, create_accountant, register_accountant
from opacus.accountants.registry import _ACCOUNTANTS
from opacus.errors import ConfigurationError

NAMES = ["rdp", "gdp", "prv", "pld"]


@pytest.mark.parametrize("name", NAMES)
def test_length_is_the_number_of_steps(name):
    accountant = create_accountant(name)
    assert len(accountant) == 0
    assert accountant  # an accountant without steps is still there
    for sigma in (1.0, 1.0, 2.0, 1.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert len(accountant) == 4
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]


@pytest.mark.parametrize(("accumulated", "rate"), [(1, 0.1), (3, 0.1 * 3), (0, 0.1), (10, 1.0)])
def test_hook_records_noise_and_the_rate_of_the_logical_batch(accumulated, rate):
    accountant = RDPAccountant()
    record = accountant.get_optimizer_hook_fn(0.1)
    record(types.SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=accumulated))
    assert accountant.history == [(1.5, rate, 1)]


def test_hook_refuses_a_rate_above_one():
    record = RDPAccountant().get_optimizer_hook_fn(0.5)
    with pytest.raises(ConfigurationError, match="sample_rate is 1.5"):
        record(types.SimpleNamespace(noise_multiplier=1.0, accumulated_iterations=3))


def test_hook_of_a_copied_optimizer_counts_against_the_same_budget():
    accountant = RDPAccountant()
    optimizer = types.SimpleNamespace(
        noise_multiplier=2.0, accumulated_iterations=1, hook=accountant.get_optimizer_hook_fn(0.1)
    )
    copied = copy.deepcopy(optimizer)
    copied.noise_multiplier = 3.0
    for each in (optimizer, copied):
        each.hook(each)
    assert accountant.history == [(2.0, 0.1, 1), (3.0, 0.1, 1)]


def test_hook_survives_pickling_with_its_history():
    accountant = RDPAccountant()
    hook = accountant.get_optimizer_hook_fn(0.1)
    step = types.SimpleNamespace(noise_multiplier=2.0, accumulated_iterations=2)
    hook(step)
    restored, owner = pickle.loads(pickle.dumps((hook, accountant)))
    restored(step)
    assert owner.history == [(2.0, 0.2, 2)]  # the restored hook still belongs to the restored accountant
    assert accountant.history == [(2.0, 0.2, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trip_keeps_history_and_epsilon(name):
    if name == "pld":
        pytest.importorskip("dp_accounting")
    accountant, other = create_accountant(name), create_accountant(name)
    accountant.step(noise_multiplier=2.0, sample_rate=0.05)
    accountant.step(noise_multiplier=3.0, sample_rate=0.05)
    state = accountant.state_dict()
    assert set(state) == {"history", "mechanism"}
    other.load_state_dict(state)
    accountant.step(noise_multiplier=3.0, sample_rate=0.05)  # the saved state must not follow
    assert len(other) == 2
    other.step(noise_multiplier=3.0, sample_rate=0.05)
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)


def test_state_fills_the_destination():
    destination = {"kept": 1}
    assert RDPAccountant().state_dict(destination) is destination
    assert destination == {"kept": 1, "history": [], "mechanism": "rdp"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state_dict is None"),
        ({}, "state_dict is"),
        ({"history": []}, "no key 'mechanism'"),
        ({"mechanism": "rdp"}, "no key 'history'"),
        ({"history": [], "mechanism": "prv"}, "saved by mechanism 'prv'"),
        ({"history": [(1.0, 0.1)], "mechanism": "rdp"}, r"history\[0\]"),
        ({"history": [(1.0, 0.1, 1), (-1.0, 2.0, 0.5)], "mechanism": "rdp"}, r"history\[1\]"),
        ({"history": 3, "mechanism": "rdp"}, "must be a list"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(state, message):
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(ConfigurationError, match=message):
        accountant.load_state_dict(state)
    assert accountant.history == [(1.0, 0.1, 1)]


@pytest.mark.parametrize(
    ("sigma", "rate"), [(-1.0, 0.1), (float("nan"), 0.1), (1.0, 1.1), (1.0, -0.1), ("1", 0.1)]
)
def test_a_step_out_of_range_is_refused(sigma, rate):
    accountant = RDPAccountant()
    with pytest.raises(ConfigurationError):
        accountant.step(noise_multiplier=sigma, sample_rate=rate)
    assert len(accountant) == 0


def test_accountants_can_be_registered_and_replaced_by_force_only():
    class Mine(IAccountant):
        def get_epsilon(self, delta, **kwargs):
            return 1.0

        @classmethod
        def mechanism(cls):
            return "mine"

    try:
        register_accountant("mine", Mine)
        assert isinstance(create_accountant("mine"), Mine)
        with pytest.raises(ConfigurationError, match="force=True"):
            register_accountant("mine", RDPAccountant)
        register_accountant("mine", RDPAccountant, force=True)
        assert isinstance(create_accountant("mine"), RDPAccountant)
    finally:
        _ACCOUNTANTS.pop("mine", None)


def test_an_unknown_mechanism_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'none' is not registered; choose one of 'rdp'"):
        create_accountant("none")
