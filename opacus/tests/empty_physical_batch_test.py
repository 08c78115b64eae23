"""`DPOptimizer.add_empty_batch`: a batch without samples, for models that cannot be run on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.accountants import RDPAccountant
from opacus.grad_sample import wrap_model
from opacus.optimizers import DPOptimizer


def private(mode: str, noise_multiplier: float = 0.0) -> tuple[nn.Module, DPOptimizer, RDPAccountant]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    hooks = wrap_model(model, mode, False, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    if mode == "bk":
        optimizer.attach_book(hooks.policy)
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.1))
    return model, optimizer, accountant


def test_an_empty_logical_batch_moves_weights_by_noise_alone_and_is_accounted():
    for noise_multiplier in (0.0, 1.0):
        model, optimizer, accountant = private("bk", noise_multiplier)
        before = model.weight.detach().clone()
        optimizer.add_empty_batch()
        optimizer.step()
        assert torch.equal(model.weight, before) == (noise_multiplier == 0)
        assert accountant.history == [(noise_multiplier, 0.1, 1)]


def test_an_empty_physical_batch_adds_nothing_to_the_others():
    x = torch.randn(2, 4)
    steps = []
    for empty in (False, True):
        model, optimizer, _ = private("bk")
        model(x).square().sum().backward()
        if empty:
            optimizer.signal_skip_step(True)
            optimizer.step()
            optimizer.add_empty_batch()
        optimizer.step()
        steps.append(model.weight.detach().clone())
    assert torch.equal(*steps)


def test_other_modes_are_told_what_to_do():
    _, optimizer, _ = private("hooks")
    with pytest.raises(ValueError, match="batch of zero rows"):
        optimizer.add_empty_batch()
