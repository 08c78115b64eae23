"""DPOptimizer and its relatives really are `torch.optim.Optimizer`s: hooks, closures, schedulers, copies, state dicts."""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import AdaClipDPOptimizer, AutomaticDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from opacus.testing import spread

B, D = 6, 3
STYLES: dict[str, Callable[..., Any]] = {
    "flat": DPOptimizer,
    "per_layer": DPPerLayerOptimizer,
    "automatic": AutomaticDPOptimizer,
    "adaptive": lambda *args, **kwargs: AdaClipDPOptimizer(
        *args,
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.3,
        max_clipbound=10.0,
        min_clipbound=0.01,
        unclipped_num_std=3.0,
        **kwargs,
    ),
}


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2)
    )


def batch(seed: int = 0, n: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n, D, generator=generator), torch.randint(2, (n,), generator=generator)


def build(
    style: str = "flat",
    inner: Callable[..., torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.2, momentum=0.9),
    devices: list[torch.device] | None = None,
    net: nn.Module | None = None,
    **changes: Any,
) -> tuple[GradSampleModule, Any]:
    net = network() if net is None else net
    module = GradSampleModule(spread(net, devices) if devices else net)
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 0.9, "expected_batch_size": B} | changes
    return module, STYLES[style](inner(module.parameters()), **arguments)


def loss_of(module: nn.Module, seed: int = 0) -> Tensor:
    x, y = batch(seed)
    output = module(x.to(next(module.parameters()).device))
    return nn.functional.cross_entropy(output, y.to(output.device))


def train(module: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    return values(module)


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in module.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------- hooks


@pytest.mark.parametrize("style", STYLES)
def test_it_is_an_optimizer_that_shows_the_inner_ones_groups_state_and_defaults(style):
    module, optimizer = build(style)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, DPOptimizer)
    inner = optimizer.original_optimizer
    assert optimizer.param_groups is inner.param_groups
    train(module, optimizer, range(1))
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert all("momentum_buffer" in optimizer.state[p] for p in module.parameters())
    optimizer.param_groups[0]["lr"] = 0.0
    assert equal(values(module), train(module, optimizer, range(1)))
    assert repr(inner) in repr(optimizer)


@pytest.mark.parametrize("style", STYLES)
def test_step_hooks_fire_once_a_step_in_order_with_the_optimizer(style):
    module, optimizer = build(style)
    seen: list[tuple[str, Any]] = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o)))
    after = optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o)))
    inner = optimizer.original_optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(("inner", o))
    )
    train(module, optimizer, range(2))
    assert seen == [("pre", optimizer), ("inner", optimizer.original_optimizer), ("post", optimizer)] * 2
    for handle in (before, after, inner):
        handle.remove()
    train(module, optimizer, range(1))
    assert len(seen) == 6


def test_a_pre_hook_of_the_inner_optimizer_sees_the_noised_gradient_and_of_ours_none():
    module, optimizer = build(noise_multiplier=0.0, max_grad_norm=1e-3)
    p = next(module.parameters())
    seen: list[float] = []
    optimizer.original_optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(p.grad.norm().item())
    )
    train(module, optimizer, range(1))
    assert 0 < seen[0] <= 1e-3


def test_global_hooks_see_both_optimizers_each_once():
    module, optimizer = build()
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append(o)),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(o)),
    ]
    try:
        train(module, optimizer, range(1))
    finally:
        for handle in handles:
            handle.remove()
    inner = optimizer.original_optimizer
    assert seen == [optimizer, inner, inner, optimizer]


def test_attach_step_hook_is_called_for_released_steps_only_and_replaces_the_one_before():
    module, optimizer = build()
    seen: list[Any] = []
    optimizer.attach_step_hook(lambda o: seen.append("replaced"))
    optimizer.attach_step_hook(seen.append)
    for skip in (True, True, False):
        optimizer.signal_skip_step(skip)
        train(module, optimizer, range(1))
    assert seen == [optimizer]


def test_state_dict_hooks_fire():
    _, optimizer = build()
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: seen.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "saved", "before loading", "loaded"]


# ---------------------------------------------------------------- closures


@pytest.mark.parametrize("style", STYLES)
def test_sgd_with_a_closure_takes_the_same_step_and_returns_the_loss(style):
    results = []
    for closed in (False, True):
        module, optimizer = build(style, generator=torch.Generator().manual_seed(1))
        expected = loss_of(module).item()
        optimizer.zero_grad()

        def closure(module=module, optimizer=optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module)
            loss.backward()
            return loss

        if closed:
            with torch.no_grad():  # as torch's own step does
                loss = optimizer.step(closure)
            assert loss.item() == pytest.approx(expected)
        else:
            closure()
            assert optimizer.step() is None
        results.append(values(module))
    assert equal(*results)


class Demanding(torch.optim.SGD):
    """Has a step that cannot be called without a closure."""

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        return super().step(closure)


class Disguised(torch.optim.LBFGS):
    """LBFGS behind a signature that does not say what it needs."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Demanding, Disguised])
@pytest.mark.parametrize("style", STYLES)
def test_an_optimizer_that_evaluates_a_closure_is_refused_by_name_with_all_other_problems(style, kind):
    with pytest.raises(
        ConfigurationError, match=f"optimizer, a {kind.__name__}, evaluates the loss"
    ) as caught:
        build(style, lambda ps: kind(ps, lr=0.1), noise_multiplier=-1.0)
    assert any("noise_multiplier" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "bk", "ghost"])
def test_make_private_refuses_lbfgs_in_every_mode_and_changes_nothing(mode):
    net = network()
    arguments: dict[str, Any] = {
        "module": net,
        "data_loader": DataLoader(TensorDataset(*batch()), batch_size=2),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "grad_sample_mode": mode,
    }
    with pytest.raises(ConfigurationError, match="make_private cannot start[\\s\\S]*LBFGS"):
        PrivacyEngine().make_private(optimizer=torch.optim.LBFGS(net.parameters()), **arguments)
    PrivacyEngine().make_private(optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **arguments)


@pytest.mark.parametrize("style", STYLES)
def test_a_closure_is_evaluated_once_a_step_even_by_an_inner_optimizer_that_would_call_it_twice(style):
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for _ in range(2 if closure is not None else 0):
                with torch.enable_grad():
                    closure()
            return super().step()

    module, optimizer = build(style, lambda ps: Twice(ps, lr=0.1))
    accounted: list[Any] = []
    evaluations: list[Any] = []
    optimizer.attach_step_hook(accounted.append)

    def closure() -> Tensor:
        evaluations.append(None)
        optimizer.zero_grad()
        loss = loss_of(module)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(evaluations) == len(accounted) == 1


# -------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("style", STYLES)
def test_learning_rates_follow_the_schedule_they_follow_on_the_inner_optimizer(style, kind):
    rates = []
    for private in (False, True):
        module, optimizer = build(style)
        scheduled = optimizer if private else optimizer.original_optimizer
        scheduler = SCHEDULERS[kind](scheduled)
        found = []
        for step in range(5):
            train(module, optimizer, range(step, step + 1))
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("momentum")))
        rates.append(found)
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1


# ------------------------------------------------------------------ groups


@pytest.mark.parametrize("style", STYLES)
def test_an_added_group_is_clipped_noised_and_stepped_with_its_own_options(style, layout):
    net = spread(network(), layout)
    module = GradSampleModule(net)
    optimizer = STYLES[style](
        torch.optim.SGD([*net[0].parameters(), *net[2].parameters()], lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1e-3,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    optimizer.add_param_group({"params": [*net[4].parameters(), *net[5].parameters()], "lr": 0.0})
    before = values(module)
    train(module, optimizer, range(1))
    moved = [not torch.equal(a, b) for a, b in zip(before, values(module), strict=True)]
    assert moved == [True] * 4 + [False] * 4
    assert len(optimizer.params) == 8
    total = math.sqrt(sum(p.grad.square().sum().item() for p in module.parameters()))
    assert 0 < total <= B * 1e-3


def test_a_group_of_foreign_parameters_makes_step_raise_naming_it():
    module, optimizer = build()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    loss_of(module).backward()
    with pytest.raises(PerSampleGradientError, match=r"parameter 0 of group 1, shape \(5,\)"):
        optimizer.step()


# ------------------------------------------------------------------ copies


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_a_copy_of_module_and_optimizer_continues_bit_identically_and_apart(style, seeded, layout):
    generator = torch.Generator(layout[0]).manual_seed(4) if seeded else None
    module, optimizer = build(style, devices=layout, generator=generator, noise_multiplier=0.0)
    train(module, optimizer, range(3))
    module_copy, optimizer_copy = copy.deepcopy((module, optimizer))
    assert optimizer_copy.generator is generator
    assert all(p is q for p, q in zip(optimizer_copy.params, module_copy.parameters(), strict=True))
    original = train(module, optimizer, range(3, 6))
    assert not equal(values(module_copy), original)
    assert equal(train(module_copy, optimizer_copy, range(3, 6)), original)
    assert optimizer_copy.max_grad_norm == optimizer.max_grad_norm


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_copy_never_repeats_the_noise(seeded, stepped, layout):
    """Two releases with one noise differ by what the samples are."""
    generator = torch.Generator(layout[0]).manual_seed(4) if seeded else None
    module, optimizer = build("flat", devices=layout, generator=generator, noise_multiplier=1e4)
    if stepped:
        train(module, optimizer, range(1))
    pairs = [(module, optimizer), copy.deepcopy((module, optimizer))]
    drawn = []
    for one, its in pairs:
        its.zero_grad()
        loss_of(one, 9).backward()
        its.step()
        drawn.append(torch.cat([p.grad.detach().cpu().flatten() for p in its.params]))
    cosine = torch.cosine_similarity(drawn[0], drawn[1], dim=0).item()
    assert abs(cosine) < 5 / len(drawn[0]) ** 0.5


@pytest.mark.parametrize("style", STYLES)
def test_copying_breaks_no_other_optimizer(style):
    """1.6.0: deepcopy raises, and afterwards every DPOptimizer in the process is broken."""
    module, optimizer = build(style)
    lr_scheduler.StepLR(optimizer, step_size=1)  # puts a bound `step` on the instance
    copied = copy.deepcopy(optimizer)
    assert "step" not in vars(copied)
    other_module, other = build(style)
    for m, o in ((module, optimizer), (other_module, other)):
        before = values(m)
        assert not equal(before, train(m, o, range(1)))
    fresh = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    fresh.step()
    assert copied.original_optimizer is not optimizer.original_optimizer


@pytest.mark.parametrize("style", STYLES)
def test_a_pickled_optimizer_comes_back_with_its_parameters_options_and_state(style):
    module, optimizer = build(style, inner=torch.optim.Adam, generator=torch.Generator().manual_seed(3))
    train(module, optimizer, range(2))
    optimizer.zero_grad()
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is type(optimizer)
    assert equal([p.detach() for p in again.params], [p.detach() for p in optimizer.params])
    assert (again.noise_multiplier, again.max_grad_norm) == (
        optimizer.noise_multiplier,
        optimizer.max_grad_norm,
    )
    loss_of(module, 9).backward()
    for p, q in zip(again.params, optimizer.params, strict=True):
        p.grad_sample = q.grad_sample.clone()
    optimizer.step()
    again.step()
    assert equal([p.detach() for p in again.params], [p.detach() for p in optimizer.params])


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("style", STYLES)
def test_a_state_dict_saved_inside_a_run_continues_it_bit_identically(style, inner, layout):
    def start() -> tuple[Any, Any]:
        return build(style, inner, layout, generator=torch.Generator(layout[0]).manual_seed(8))

    module, optimizer = start()
    train(module, optimizer, range(4))
    file = io.BytesIO()
    streams = optimizer.noise_stream().state_dict()
    torch.save((module.state_dict(), optimizer.state_dict(), streams), file)
    uninterrupted = train(module, optimizer, range(4, 8))

    module, optimizer = start()
    file.seek(0)
    weights, state, streams = torch.load(file, weights_only=True)
    module.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.noise_stream().load_state_dict(streams)
    assert equal(train(module, optimizer, range(4, 8)), uninterrupted)


def test_a_state_dict_is_the_inner_optimizers_own_and_loads_both_ways():
    module, optimizer = build(inner=torch.optim.Adam)
    train(module, optimizer, range(2))
    plain = torch.optim.Adam(network().parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    optimizer.load_state_dict(plain.state_dict())
    _, adaptive = build("adaptive", inner=torch.optim.Adam)
    adaptive.load_state_dict(plain.state_dict())  # of another style: C stays
    assert adaptive.max_grad_norm == pytest.approx(0.9)


# ------------------------------------------------- gradients, skips, clearing


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_zero_grad_clears_everything_a_step_left(style, set_to_none):
    module, optimizer = build(style)
    train(module, optimizer, range(1))
    optimizer.zero_grad(set_to_none=set_to_none)
    for p in module.parameters():
        assert p.grad_sample is None
        assert p.summed_grad is None
        assert p.grad is None if set_to_none else not p.grad.any()


@pytest.mark.parametrize("clear", ["optimizer", "module", "inner"])
@pytest.mark.parametrize("style", STYLES)
def test_no_way_of_clearing_gradients_releases_a_sum_twice(style, clear):
    """A training loop may call `model.zero_grad()`; the sum of the step before must not be in the next one."""
    module, optimizer = build(style, noise_multiplier=0.0, inner=lambda ps: torch.optim.SGD(ps, lr=0.0))
    found = []
    for _ in range(3):
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "module":
            module.zero_grad()
        else:
            optimizer.original_optimizer.zero_grad()
            module.set_grad_sample_to_none()
        if style == "adaptive":
            optimizer.max_grad_norm = 0.9
        loss_of(module).backward()
        optimizer.step()
        found.append([p.grad.clone() for p in module.parameters()])
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_skip_signals_are_taken_first_in_first_out_and_an_empty_queue_means_a_step():
    module, optimizer = build()
    accounted: list[Any] = []
    optimizer.attach_step_hook(accounted.append)
    for skip in (True, False, True, True):
        optimizer.signal_skip_step(skip)
    assert optimizer._check_skip_next_step(pop_next=False) is True
    steps = []
    for _ in range(6):
        before, count = values(module), len(accounted)
        train(module, optimizer, range(1))
        assert equal(before, values(module)) == (len(accounted) == count)
        steps.append(len(accounted) > count)
    assert steps == [False, True, False, False, True, True]


def test_grad_samples_accumulated_iterations_and_params():
    module, optimizer = build(noise_multiplier=0.0)
    assert optimizer.accumulated_iterations == 1
    for n in (2, 3):
        x, y = batch(n=n)
        nn.functional.cross_entropy(module(x), y).backward()
    assert optimizer.accumulated_iterations == 2
    assert [tuple(g.shape) for g in optimizer.grad_samples] == [(5, *p.shape) for p in module.parameters()]
    assert all(p is q for p, q in zip(optimizer.params, module.parameters(), strict=True))
    module._module[0].weight.requires_grad_(False)
    assert len(optimizer.params) == 7


def test_grad_samples_that_disagree_are_refused():
    module, optimizer = build()
    loss_of(module).backward()
    first = next(iter(module.parameters()))
    first.grad_sample = [first.grad_sample, first.grad_sample.clone()]
    with pytest.raises(ValueError, match="different numbers of backward passes"):
        _ = optimizer.accumulated_iterations
    first.grad_sample = first.grad_sample[0][:2]
    with pytest.raises(PerSampleGradientError, match=r"parameter 0 of group 0.* has 2 rows"):
        optimizer.step()


@pytest.mark.parametrize("style", STYLES)
def test_nothing_to_train_steps_and_releases_nothing(style):
    module, optimizer = build(style)
    train(module, optimizer, range(1))
    module.requires_grad_(False)
    accounted: list[Any] = []
    optimizer.attach_step_hook(accounted.append)
    before = values(module)
    optimizer.zero_grad()
    optimizer.step()
    optimizer.signal_skip_step()
    optimizer.step()
    assert optimizer.params == []
    assert accounted == []
    assert equal(before, values(module))
    assert not optimizer._step_skip_queue


@pytest.mark.parametrize("style", STYLES)
def test_a_parameter_frozen_between_backward_and_step_does_not_move(style):
    """Its plain gradient is there, and was not clipped."""
    module, optimizer = build(style, noise_multiplier=0.0)
    weight = module._module[2].weight
    before = weight.detach().clone()
    loss_of(module).backward()
    assert weight.grad is not None
    weight.requires_grad_(False)
    optimizer.step()
    assert torch.equal(weight, before)
    optimizer.zero_grad()
    weight.requires_grad_(True)  # and trains again, with nothing left over
    loss_of(module).backward()
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("style", STYLES)
def test_constant_gradients_expanded_from_one_number_count(style):
    """The bias gradient of a summed output is one for every sample and coordinate."""
    module = GradSampleModule(nn.Linear(2, 3), loss_reduction="sum")
    inner = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer = STYLES[style](
        inner, noise_multiplier=0.0, max_grad_norm=1e3, expected_batch_size=1, loss_reduction="sum"
    )
    module(torch.ones(4, 2)).sum().backward()
    weight, bias = module.parameters()
    bias.grad_sample = torch.ones(()).expand(4, 3)  # as a registered grad sampler may return it
    optimizer.step()
    if style != "automatic":
        assert torch.allclose(bias.grad, torch.full((3,), 4.0))
        assert torch.allclose(weight.grad, torch.full((3, 2), 4.0))
    else:
        assert torch.allclose(bias.grad, torch.full((3,), 4e3 / (3 + 0.01)), rtol=1e-5)  # norm sqrt(6 + 3)


@pytest.mark.parametrize("style", STYLES)
def test_secure_mode_draws_noise_of_the_right_size_that_no_seed_repeats(style):
    n = 100
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        module = GradSampleModule(nn.Linear(n, n, bias=False), loss_reduction="sum")
        optimizer = STYLES[style](
            torch.optim.SGD(module.parameters(), lr=0.0),
            noise_multiplier=2.0,
            max_grad_norm=1.5,
            expected_batch_size=1,
            loss_reduction="sum",
            secure_mode=True,
        )
        module(torch.zeros(1, n)).sum().backward()
        optimizer.step()
        drawn.append(next(module.parameters()).grad.flatten().double())
    sigma = 2.0 if style != "adaptive" else (2.0**-2 - 6.0**-2) ** -0.5
    for noise in drawn:
        assert abs(noise.std().item() / (1.5 * sigma) - 1) < 5.7 / math.sqrt(2 * n * n)
    assert abs((drawn[0] @ drawn[1] / (drawn[0].norm() * drawn[1].norm())).item()) < 5.7 / n
    with pytest.raises(ConfigurationError, match="secure_mode .* cannot follow a generator"):
        build(style, secure_mode=True, generator=torch.Generator())


# ----------------------------------------------------------------- weights


@pytest.mark.parametrize("style", STYLES)
def test_sample_weights_clip_the_weighted_gradient_of_each_sample(style, layout):
    clip = 0.9
    weights = [0.0, 0.2, 1.0, 3.0, 10.0, 0.5]
    reference = network().double()
    module, optimizer = build(
        style,
        devices=layout,
        net=network().double(),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        loss_reduction="mean",
    )
    x, y = batch()
    x = x.double()
    output = module(x.to(layout[0]))
    nn.functional.cross_entropy(output, y.to(output.device)).backward()
    optimizer.set_sample_weights(torch.tensor(weights))
    optimizer.step()
    total = [torch.zeros_like(p) for p in reference.parameters()]
    for i, w in enumerate(weights):
        loss = w * nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(reference.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        for t, g in zip(total, grads, strict=True):
            own, bound = (g.norm().item(), clip / math.sqrt(8)) if style == "per_layer" else (norm, clip)
            t += g * (bound / (own + 0.01) if style == "automatic" else min(1.0, bound / own) if own else 0.0)
    for p, t in zip(module.parameters(), total, strict=True):
        assert torch.allclose(p.grad.cpu(), t / B, atol=1e-7)
    # weights hold for one physical batch
    optimizer.zero_grad()
    loss_of(GradSampleModule(network()))
    assert optimizer._sample_weight_B is None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bad", [-1.0, math.nan, -math.inf])
def test_a_weight_that_makes_no_sense_leaves_its_sample_out(style, bad):
    module, optimizer = build(style, noise_multiplier=0.0)
    x, y = batch(n=2)
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.set_sample_weights(torch.tensor([bad, 0.0]))
    optimizer.step()
    assert all(not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("shape", [(1,), (B + 1,), (B, 1), ()])
def test_weights_of_another_shape_are_refused_by_name(mode, shape):
    net = network()
    module, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*batch(n=12)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    optimizer.set_sample_weights(torch.ones(shape))  # "bk" clips in the backward
    with pytest.raises(ValueError, match=rf"set_sample_weights.*{B} samples"):
        loss_of(module).backward()
        optimizer.step()


# ------------------------------------------------------------------- names


def test_after_make_private_errors_name_the_parameters():
    net = network()
    module, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*batch(n=12)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    loss_of(module).backward()
    net[2].weight.grad_sample = None
    net[5].bias.grad_sample = None
    with pytest.raises(PerSampleGradientError) as caught:
        optimizer.step()
    assert [problem.split()[0] for problem in caught.value.problems] == ["2.weight", "5.bias"]
    optimizer.zero_grad()
    loss_of(module).backward()
    optimizer.step()
    with pytest.raises(PerSampleGradientError, match=r"0\.weight still has .*call optimizer\.zero_grad\(\)"):
        optimizer.step()


# ------------------------------------------------------------------- costs


def calls_of(function: Callable[[], Any]) -> int:
    """Python and C function calls that `function` makes, those of generators and comprehensions included."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "part", ["step", "scale_grad", "zero_grad", "accumulated_iterations", "grad_samples"]
)
def test_cost_is_linear_in_the_number_of_parameters(style, part):
    """1.6.0: `scale_grad` asks every parameter for the number of iterations, once for each parameter."""

    def cost(parameters: int) -> int:
        net = nn.Sequential(*[nn.Linear(1, 1) for _ in range(parameters // 2)])
        module = GradSampleModule(net)
        optimizer = STYLES[style](
            torch.optim.SGD(module.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=2,
        )
        for p in module.parameters():
            p.grad_sample = [torch.ones(2, *p.shape) for _ in range(2)]
        if part == "scale_grad":
            optimizer.clip_and_accumulate()
            optimizer.add_noise()
        return calls_of(
            {
                "step": optimizer.step,
                "scale_grad": optimizer.scale_grad,
                "zero_grad": optimizer.zero_grad,
                "accumulated_iterations": lambda: optimizer.accumulated_iterations,
                "grad_samples": lambda: optimizer.grad_samples,
            }[part]
        )

    cost(10)  # what is done once in a process
    ten, hundred, two_hundred = cost(10), cost(100), cost(200)
    per_parameter = (hundred - ten) / 90
    assert (two_hundred - hundred) / 100 <= 1.02 * per_parameter
    assert per_parameter < 150
