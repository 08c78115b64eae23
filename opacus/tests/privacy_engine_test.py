"""PrivacyEngine: named errors before anything changes, every step accounted once, and the numbers of a loop by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus import GradSampleModule, PrivacyEngine
from opacus.errors import ConfigurationError
from opacus.grad_sample import GradSampleHooks
from opacus.testing import spread
from opacus.validators import UnsupportedModuleError

N, D = 40, 3


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N, D, generator=generator), torch.randint(2, (N,), generator=generator))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2))


def private(net: nn.Module | None = None, **changes: object):
    net = model() if net is None else net
    arguments = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.5),
        "data_loader": DataLoader(data(), batch_size=8),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    } | changes
    engine = PrivacyEngine(accountant="rdp")
    return engine, *engine.make_private(**arguments)


class Endless(IterableDataset):
    def __iter__(self):
        yield from ()


def meta_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


BAD = {
    "parameters the module does not have": (
        {"optimizer": torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=1.0)},
        r"optimizer holds a parameter of shape \(3, 3\) .*number 0 of group 0.* that module does not have",
    ),
    "max_grad_norm zero": (
        {"max_grad_norm": 0.0},
        "max_grad_norm must be a positive, finite number, not 0.0",
    ),
    "max_grad_norm negative": ({"max_grad_norm": -1.0}, "max_grad_norm .* not -1.0"),
    "max_grad_norm NaN": ({"max_grad_norm": math.nan}, "max_grad_norm .* not nan"),
    "max_grad_norm a list": ({"max_grad_norm": [1.0, 1.0]}, r"max_grad_norm .* not \[1.0, 1.0\]"),
    "noise_multiplier negative": ({"noise_multiplier": -0.1}, "noise_multiplier must be .* not -0.1"),
    "noise_multiplier NaN": ({"noise_multiplier": math.nan}, "noise_multiplier must be .* not nan"),
    "unknown mode": ({"grad_sample_mode": "telepathy"}, "grad_sample_mode 'telepathy' is not available"),
    "unknown clipping": ({"clipping": "scissors"}, "clipping 'scissors' is not available"),
    "unknown reduction": (
        {"loss_reduction": "median"},
        "loss_reduction must be 'mean' or 'sum', not 'median'",
    ),
    "unknown option": ({"max_gradnorm": 1.0}, "max_gradnorm is not an option"),
    "no length": ({"data_loader": DataLoader(Endless(), batch_size=2)}, "IterableDataset"),
    "no batch size": ({"data_loader": DataLoader(data(), batch_size=None)}, "batch_size=None"),
    "not a loader": ({"data_loader": [1, 2]}, "data_loader is a list"),
    "not a module": ({"module": "model"}, "module must be a torch.nn.Module, not str"),
    "not an optimizer": ({"optimizer": None}, "optimizer must be a torch.optim.Optimizer, not NoneType"),
    "generator": ({"noise_generator": 3}, "generator must be a torch.Generator, not int"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_named_error_and_nothing_changes(case):
    changes, message = BAD[case]
    net = model()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(ConfigurationError, match=message):
        private(net, **changes)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == hooks
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert not any(hasattr(p, "grad_sample") or hasattr(p, "summed_grad") for p in net.parameters())
    private(net)  # and the same model can be made private afterwards


def test_a_batch_size_of_zero_is_refused():
    loader = DataLoader(data(), batch_size=4)
    loader.batch_sampler.batch_size = 0
    object.__setattr__(loader, "_DataLoader__initialized", False)
    loader.batch_size = 0
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        private(data_loader=loader)


def test_all_problems_stand_in_one_message():
    with pytest.raises(ConfigurationError) as caught:
        private(nn.Sequential(nn.BatchNorm1d(3)), max_grad_norm=-1, noise_multiplier=-2, clipping="scissors")
    assert caught.value.heading == "make_private cannot start"
    text = str(caught.value)
    assert all(
        part in text for part in ("noise_multiplier", "max_grad_norm", "scissors", "'0' (BatchNorm1d)")
    )


def test_trainable_meta_parameters_are_named_and_frozen_ones_pass():
    net = meta_model()
    with pytest.raises(ConfigurationError, match=r"parameter 1.weight is on the meta device"):
        private(net)
    net[1].requires_grad_(False)
    private(net, optimizer=torch.optim.SGD(net[0].parameters(), lr=0.1))


def test_layers_without_a_shape_and_weights_that_are_computed_are_named_before_training():
    with pytest.raises(ConfigurationError, match=r"parameter 0.weight has no shape yet"):
        private(nn.Sequential(nn.LazyLinear(3)))
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    with pytest.raises(ConfigurationError, match=r"0 computes its weights by a parametrization"):
        private(net)
    net[0].requires_grad_(False)
    private(net, optimizer=torch.optim.SGD(net[1].parameters(), lr=0.1))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigurationError, match="no parameter that requires grad"):
        private(model().requires_grad_(False))


@pytest.mark.parametrize("wrap", [nn.DataParallel])
def test_data_parallel_is_refused_by_name(wrap):
    with pytest.raises(ValueError, match="DataParallel"):
        private(wrap(model()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.Embedding(4, 3, scale_grad_by_freq=True),
        nn.Embedding(4, 3, max_norm=1.0),
        nn.LSTM(3, 3),
        nn.MultiheadAttention(4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_mix_samples_or_hide_them_are_refused_by_path(layer):
    with pytest.raises(UnsupportedModuleError, match=r"'1'"):
        private(nn.Sequential(nn.Linear(3, 3), layer))
    engine = PrivacyEngine(accountant="rdp")
    assert not engine.is_compatible(module=layer, optimizer=None, data_loader=None)
    assert engine.is_compatible(
        module=nn.Linear(1, 1), optimizer=None, data_loader=DataLoader(data(), batch_size=2)
    )


def test_get_compatible_module_can_be_made_private():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    fixed = PrivacyEngine.get_compatible_module(net)
    private(fixed)
    assert isinstance(net[1], nn.BatchNorm2d)


def test_every_step_is_accounted_once_empty_batches_included():
    engine, module, optimizer, loader = private(data_loader=DataLoader(data(), batch_size=1))
    sizes = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    assert 0 in sizes
    assert len(engine.accountant) == len(sizes) == 3 * N
    assert engine.accountant.history == [(1.0, 1 / N, 3 * N)]
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_noiseless_step_equals_a_float64_loop_over_samples(layout, wrap, mode, reduction):
    net = nn.Sequential(*model(), nn.Tanh(), nn.Linear(2, 3), nn.Linear(3, 2)).double()
    reference = copy.deepcopy(net)
    spread(net, layout)
    x, y = (t[:8] for t in data().tensors)
    x = x.double()
    _, module, optimizer, _ = private(
        net,
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        loss_reduction=reduction,
        wrap_model=wrap,
        grad_sample_mode=mode,
    )
    assert isinstance(module, GradSampleModule) == wrap
    call = module if wrap else net
    output = call(x.to(layout[0]))
    nn.functional.cross_entropy(output, y.to(output.device), reduction=reduction).backward()
    optimizer.step()

    total = [torch.zeros_like(p) for p in reference.parameters()]
    for i in range(8):
        loss = nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(reference.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, 0.3 / norm)
    scale = 8 if reduction == "mean" else 1
    for p, before, t in zip(net.parameters(), reference.parameters(), total, strict=True):
        assert torch.allclose(p.detach().cpu(), before.detach() - 0.5 * t / scale, atol=1e-10)


def test_a_step_without_backward_is_refused():
    _, module, optimizer, _ = private()
    with pytest.raises(ValueError, match=r"call loss\.backward\(\)|Call loss.backward"):
        optimizer.step()
    module(torch.ones(2, D))
    with pytest.raises(ValueError, match="no backward pass was captured"):
        optimizer.step()


def test_a_second_backward_before_the_step_is_refused_under_poisson_sampling():
    _, module, optimizer, _ = private()
    module(torch.ones(2, D)).sum().backward()
    with pytest.raises(ValueError, match="not compatible with Poisson sampling"):
        module(torch.ones(2, D)).sum().backward()
    optimizer.zero_grad()
    module(torch.ones(2, D)).sum().backward()
    optimizer.step()


def test_accumulation_without_poisson_sampling_clips_each_sample_once():
    _, module, optimizer, loader = private(poisson_sampling=False, noise_multiplier=0.0, max_grad_norm=0.3)
    assert type(loader) is DataLoader
    x, y = (t[:8] for t in data().tensors)
    for part in (slice(0, 3), slice(3, 8)):
        nn.functional.cross_entropy(module(x[part]), y[part]).backward()
    assert optimizer.accumulated_iterations == 2
    optimizer.step()
    halves = [p.grad.clone() for p in module.parameters()]

    _, module, optimizer, _ = private(poisson_sampling=False, noise_multiplier=0.0, max_grad_norm=0.3)
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    for half, p in zip(halves, module.parameters(), strict=True):
        assert torch.allclose(half, p.grad / 2, atol=1e-7)


def test_step_without_zero_grad_is_refused():
    _, module, optimizer, _ = private(poisson_sampling=False)
    module(torch.ones(2, D)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"call optimizer\.zero_grad"):
        optimizer.step()


def test_adapters_replaced_after_the_optimizer_was_built_are_noticed():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net[2] = nn.Linear(4, 2)
    with pytest.raises(ConfigurationError, match="that module does not have"):
        private(net, optimizer=optimizer)


def test_adapters_replaced_after_make_private_are_noticed_at_the_first_step():
    net = model()
    _, module, optimizer, _ = private(net)
    net[2] = nn.Linear(4, 2)
    with pytest.raises(ValueError, match=r"used outside|2\.weight|no per-sample gradient"):
        nn.functional.cross_entropy(module(torch.ones(2, D)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()


def test_a_target_epsilon_is_met_and_not_wasted():
    net = model()
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=8),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0


def test_secure_mode_draws_noise_no_seed_repeats():
    net = model()
    engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    module, optimizer, _ = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        data_loader=DataLoader(data(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        optimizer.zero_grad()
        module(torch.ones(2, D)).sum().mul(0).backward()
        optimizer.step()
        drawn.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert not torch.equal(*drawn)


def test_training_in_eval_mode_works():
    net = nn.Sequential(nn.Linear(D, 4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    _, module, optimizer, _ = private(net)
    assert not module.training
    module(torch.ones(2, D)).sum().backward()
    optimizer.step()


def test_make_private_again_takes_over_the_wrapped_model_and_the_inner_optimizer():
    net = model()
    _, module, optimizer, _ = private(net)
    _, again, second, _ = private(module, optimizer=optimizer)
    assert again is module
    assert second.original_optimizer is optimizer.original_optimizer
    with pytest.raises(ConfigurationError, match="wrapped with loss_reduction='mean'"):
        private(module, optimizer=optimizer, loss_reduction="sum")


def test_a_model_that_is_hooked_already_is_refused_before_anything_changes():
    net = model()
    hooks = GradSampleHooks(net)
    before = [set(vars(p)) for p in net.parameters()]
    with pytest.raises(ConfigurationError, match=r"0.* is captured already"):
        private(net)
    assert [set(vars(p)) for p in net.parameters()] == before
    hooks.cleanup()
    private(net)


@pytest.mark.parametrize("together", [True, False])
def test_a_deep_copy_of_an_engine_tells_the_epsilon_of_original_and_copy(together):
    engine, module, optimizer, loader = private(poisson_sampling=False)
    if together:
        copied_engine, copied_module, copied_optimizer = copy.deepcopy((engine, module, optimizer))
    else:
        copied_engine, (copied_module, copied_optimizer) = (
            copy.deepcopy(engine),
            copy.deepcopy((module, optimizer)),
        )
    x, y = next(iter(loader))
    for steps, (net, stepped) in enumerate(((copied_module, copied_optimizer), (module, optimizer)), start=1):
        nn.functional.cross_entropy(net(x), y).backward()
        stepped.step()
        assert len(engine.accountant) == len(copied_engine.accountant) == steps
        assert copied_engine.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
