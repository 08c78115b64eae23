"""Schedules against their closed forms."""

from __future__ import annotations

import io
import math

import pytest
import torch

from opacus.errors import ConfigurationError
from opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from opacus.schedulers.grad_clip_scheduler import _GradClipScheduler
from opacus.schedulers.noise_scheduler import _NoiseScheduler


class Optimizer:
    def __init__(self, noise_multiplier=4.0, max_grad_norm=8.0):
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm


def reciprocal(epoch):
    return 1 / (1 + epoch)


CASES = [
    (ExponentialNoise, {"gamma": 0.7}, lambda epoch: 4 * 0.7**epoch),
    (StepNoise, {"gamma": 0.7, "step_size": 3}, lambda epoch: 4 * 0.7 ** (epoch // 3)),
    (LambdaNoise, {"noise_lambda": reciprocal}, lambda epoch: 4 / (1 + epoch)),
    (ExponentialGradClip, {"gamma": 1.2}, lambda epoch: 8 * 1.2**epoch),
    (StepGradClip, {"gamma": 0.5, "step_size": 2}, lambda epoch: 8 * 0.5 ** (epoch // 2)),
    (LambdaGradClip, {"scheduler_function": reciprocal}, lambda epoch: 8 / (1 + epoch)),
]
cases = pytest.mark.parametrize(("kind", "kwargs", "closed_form"), CASES)


@cases
def test_every_epoch_has_the_value_of_the_closed_form(kind, kwargs, closed_form):
    optimizer = Optimizer()
    schedule = kind(optimizer, **kwargs)
    for epoch in range(20):
        assert schedule.last_epoch == epoch
        assert getattr(optimizer, kind.attribute) == pytest.approx(closed_form(epoch), rel=1e-12)
        schedule.step()


@cases
def test_only_its_own_attribute_changes(kind, kwargs, closed_form):
    optimizer = Optimizer()
    kind(optimizer, **kwargs).step()
    other = {"noise_multiplier": ("max_grad_norm", 8.0), "max_grad_norm": ("noise_multiplier", 4.0)}[
        kind.attribute
    ]
    assert getattr(optimizer, other[0]) == other[1]


@cases
def test_a_resumed_run_goes_on_with_the_uninterrupted_values(kind, kwargs, closed_form):
    schedule = kind(Optimizer(), **kwargs)
    for _ in range(5):
        schedule.step()
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)
    optimizer = Optimizer()
    resumed = kind(optimizer, **kwargs)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for epoch in range(5, 12):
        assert getattr(optimizer, kind.attribute) == pytest.approx(closed_form(epoch), rel=1e-12)
        resumed.step()


def test_a_state_without_the_optimizers_value_leaves_the_optimizer_alone():
    schedule = ExponentialNoise(Optimizer(), gamma=0.5)
    schedule.load_state_dict({"gamma": 0.1, "last_epoch": 4})
    assert (schedule.gamma, schedule.last_epoch, schedule.optimizer.noise_multiplier) == (0.1, 4, 4.0)


@pytest.mark.parametrize("gamma", [0, -1, math.inf, math.nan, "0.5", None])
@pytest.mark.parametrize("kind", [ExponentialNoise, ExponentialGradClip])
def test_a_factor_that_is_not_positive_and_finite_is_refused(kind, gamma):
    optimizer = Optimizer()
    with pytest.raises(ConfigurationError, match="gamma"):
        kind(optimizer, gamma=gamma)
    assert vars(optimizer) == vars(Optimizer())


@pytest.mark.parametrize("step_size", [0, -2, 1.5, None])
@pytest.mark.parametrize("kind", [StepNoise, StepGradClip])
def test_bad_step_size_and_factor_are_named_together(kind, step_size):
    with pytest.raises(ConfigurationError) as caught:
        kind(Optimizer(), step_size=step_size, gamma=-1)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("factor", [0.0, -0.5, math.inf, math.nan, None])
def test_a_function_that_leads_to_no_usable_value_is_refused_when_it_does(factor):
    optimizer = Optimizer()
    schedule = LambdaNoise(optimizer, noise_lambda=lambda epoch: 1.0 if epoch < 2 else factor)
    schedule.step()
    with pytest.raises((ConfigurationError, TypeError)):
        schedule.step()
    assert (schedule.last_epoch, optimizer.noise_multiplier) == (1, 4.0)


def test_what_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match="noise_lambda"):
        LambdaNoise(Optimizer(), noise_lambda=0.5)
    with pytest.raises(ConfigurationError, match="scheduler_function"):
        LambdaGradClip(Optimizer(), scheduler_function=None)


def test_noise_that_would_vanish_by_underflow_is_refused():
    optimizer = Optimizer(noise_multiplier=1e-300)
    schedule = ExponentialNoise(optimizer, gamma=1e-30)
    with pytest.raises(ConfigurationError, match=r"noise_multiplier would become 0\.0"):
        schedule.step()
    assert optimizer.noise_multiplier == 1e-300


def test_no_noise_stays_no_noise():
    optimizer = Optimizer(noise_multiplier=0.0)
    ExponentialNoise(optimizer, gamma=0.5).step()
    assert optimizer.noise_multiplier == 0


@cases
def test_an_optimizer_without_the_attribute_is_refused_by_name(kind, kwargs, closed_form):
    with pytest.raises(ConfigurationError, match=f"SGD, has no {kind.attribute}"):
        kind(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), **kwargs)


@pytest.mark.parametrize(
    ("base", "getter"), [(_NoiseScheduler, "get_noise_multiplier"), (_GradClipScheduler, "get_max_grad_norm")]
)
def test_users_write_schedules_of_their_own(base, getter):
    halving = type("Halving", (base,), {getter: lambda self: 2.0 ** (1 - self.last_epoch)})
    optimizer = Optimizer()
    schedule = halving(optimizer)
    schedule.step()
    assert getattr(optimizer, base.attribute) == 1.0
    with pytest.raises(NotImplementedError):
        base(Optimizer())
