"""The optimizer under a private one cannot be stepped by mistake."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import PerSampleGradientError
from opacus.optimizers import DPOptimizer

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
MODES = ["hooks", "functorch", "ew", "bk"]


def private(mode="hooks", make=torch.optim.SGD, inner=None, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    inner = make(model.parameters(), lr=0.1) if inner is None else inner
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, _ = engine.make_private(
        module=model,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(X), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        **kwargs,
    )
    return module, optimizer, inner, engine


def loss_of(module):
    return module(X[:6]).square().sum(1).mean()


def refused(inner):
    with pytest.raises(
        PerSampleGradientError, match=r"under a private optimizer[\s\S]*make_private returned"
    ):
        inner.step()


@pytest.mark.parametrize(
    ("mode", "wrap"), [(mode, wrap) for mode in MODES for wrap in (True, False) if wrap or mode != "ew"]
)
def test_a_step_of_the_inner_optimizer_is_refused_and_moves_nothing(mode, wrap):
    module, optimizer, inner, engine = private(mode, wrap_model=wrap)
    model = module._module
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(module if wrap else model).backward()
    refused(inner)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step()
    refused(inner)  # the gradients of a step are used once
    assert len(engine.accountant) == 1


def test_closures_step_and_leave_no_way_open():
    for make in (torch.optim.SGD, torch.optim.Adam):
        module, optimizer, inner, engine = private(make=make)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(module)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(engine.accountant) == 1
        with pytest.raises(PerSampleGradientError, match="under a private optimizer"):
            inner.step(lambda: 0.0)


def test_a_subclass_may_step_the_inner_optimizer_itself():
    class Own(DPOptimizer):
        def step(self, closure=None):
            return self.original_optimizer.step() if self.pre_step() else None

    module, optimizer, _, _ = private()
    optimizer.__class__ = Own
    before = [p.detach().clone() for p in optimizer.params]
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(module).backward()
        optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(optimizer.params, before, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_an_inner_optimizer_given_a_closure_is_refused_before_it_evaluates_the_batch_again(mode):
    class Passing(DPOptimizer):
        def step(self, closure=None):
            return self.original_optimizer.step(closure) if self.pre_step(closure) else None

    module, optimizer, _, engine = private(mode)
    optimizer.__class__ = Passing
    evaluations = []

    def closure():
        evaluations.append(None)
        optimizer.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in optimizer.params]
    with pytest.raises(PerSampleGradientError, match="SGD, under a private optimizer, was given a closure"):
        optimizer.step(closure)
    assert len(evaluations) == len(engine.accountant) == 1
    assert all(torch.equal(p, q) for p, q in zip(optimizer.params, before, strict=True))


def test_without_hooks_the_optimizer_is_the_users_again():
    module, _kept, inner, _ = private()
    module.disable_hooks()
    inner.step()
    module.enable_hooks()
    refused(inner)
    module.to_standard_module()
    inner.step()


def test_made_private_again_the_last_private_optimizer_counts():
    module, optimizer, inner, _ = private()
    again = PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=inner,
        data_loader=DataLoader(TensorDataset(X), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )[1]
    loss_of(module).backward()
    refused(inner)
    again.step()
    del optimizer, again
    gc.collect()
    inner.step()


def test_schedulers_copies_and_pickles_work_as_before():
    module, optimizer, inner, _ = private(make=torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
    loss_of(module).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert pickle.loads(pickle.dumps(inner)).state_dict().keys() == inner.state_dict().keys()
    copy.deepcopy(inner).step()  # a copy has parameters of its own
    copied_module, copied = copy.deepcopy((module, optimizer))
    copied.zero_grad()
    loss_of(copied_module).backward()
    copied.step()
