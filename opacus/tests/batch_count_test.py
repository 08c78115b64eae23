"""Two optimizers cannot both step on one batch: its samples would be released twice from one draw of the sampler."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.optimizers.batch_count import BatchCount

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def parts(mode):
    """One model, made private with an optimizer for each of its two layers."""
    torch.manual_seed(0)
    model, engine = (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        PrivacyEngine(accountant="rdp"),
    )
    module, optimizers = model, []
    data = TensorDataset(X)
    for layer in (model[0], model[2]):
        with pytest.warns(UserWarning, match="not in the optimizer"):
            module, optimizer, _ = engine.make_private(
                module=module,
                optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
                data_loader=DataLoader(data, batch_size=8),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                grad_sample_mode=mode,
            )
        optimizers.append(optimizer)
    return module, optimizers, engine


def backward(module, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    module(X[:5]).square().sum(1).mean().backward()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_the_second_step_on_a_batch_is_refused_and_not_accounted(mode):
    module, (one, other), engine = parts(mode)
    backward(module, (one, other))
    one.step()
    before = [p.detach().clone() for p in other.params]
    assert all(p.summed_grad is None for p in other.params)
    with pytest.raises(PerSampleGradientError, match="another optimizer has stepped on this batch"):
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(other.params, before, strict=True))
    assert all(p.summed_grad is None for p in other.params)
    assert len(engine.accountant) == 1


def test_a_model_may_have_a_policy_and_a_capture_of_its_own():
    """Mode "no_op", whose wrapper has neither."""

    class Agent(nn.Linear):
        policy = capture = BatchCount()  # of the user's, neither is ours

    model = Agent(4, 2)
    _, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(X), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="no_op",
    )
    for p in model.parameters():
        p.grad_sample = torch.ones(3, *p.shape)
    optimizer.step()
    assert optimizer.batches is None
    optimizer.original_optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_batch_for_each_optimizer_is_accounted_for_each(mode):
    module, optimizers, engine = parts(mode)
    for optimizer in (*optimizers, *optimizers):
        backward(module, optimizers)
        optimizer.step()
    assert len(engine.accountant) == 4


def test_in_mode_bk_the_last_optimizer_is_the_only_one():
    module, (one, other), engine = parts("bk")
    backward(module, (one, other))
    with pytest.raises(PerSampleGradientError, match="made private again, with another optimizer"):
        one.step()
    other.step()
    assert len(engine.accountant) == 1


def test_a_count_can_be_copied_without_its_optimizers():
    count, owner = BatchCount(), nn.Linear(1, 1)
    count.count()
    count.release(owner)
    count.release(owner)  # physical batches, closures
    again = pickle.loads(pickle.dumps(count))
    again.refuse_another(nn.Linear(1, 1))
    count.refuse_another(owner)
    with pytest.raises(PerSampleGradientError):
        count.refuse_another(nn.Linear(1, 1))


def test_one_engine_warns_of_a_second_data_set():
    engine = PrivacyEngine(accountant="rdp")

    def make_private(data):
        model = nn.Linear(4, 2)
        return engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=torch.tensor(1.0),
            max_grad_norm=1.0,
        )

    data = TensorDataset(X)
    assert make_private(data)[1].noise_multiplier == 1.0
    make_private(data)
    with pytest.warns(UserWarning, match="another data set"):
        make_private(TensorDataset(X))


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(4, 2, dtype=torch.complex64)
    with pytest.raises(
        ConfigurationError, match=r"parameter weight is complex.*\n.*parameter bias is complex"
    ):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(X), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
