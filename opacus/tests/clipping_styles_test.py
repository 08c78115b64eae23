"""Clipping styles against closed forms: Abadi et al. 2016, Andrew et al. 2021 (algorithm 1), Bu et al. 2023 (AUTO-S).

Expected updates come from a float64 loop over samples and plain python numbers; every style runs on every layout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import (
    AdaClipDPOptimizer,
    AutomaticDPOptimizer,
    DPOptimizer,
    DPPerLayerOptimizer,
    get_optimizer_class,
)
from opacus.optimizers.adaclipoptimizer import gradient_noise_multiplier
from opacus.optimizers.clipping import automatic_clip_factor
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, LambdaGradClip, StepGradClip
from opacus.testing import count_copies, devices_for, spread

D, CLASSES, EXPECTED, LR = 3, 2, 7, 0.5
CLIP = 1.15
ADAPTATION = {
    "target_unclipped_quantile": 0.4,
    "clipbound_learning_rate": 0.3,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}
CLASSES_OF = {
    "flat": DPOptimizer,
    "per_layer": DPPerLayerOptimizer,
    "adaptive": AdaClipDPOptimizer,
    "automatic": AutomaticDPOptimizer,
}
STYLES = tuple(CLASSES_OF)
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="copies are counted on emulated devices")


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, CLASSES)
    ).to(dtype)


def batch(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # sizes differ, so that some samples are clipped and others are not
    x = torch.randn(n, D, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 6, n).unsqueeze(1)
    return x.to(dtype), torch.randint(CLASSES, (n,), generator=generator)


def optimizer_of(style: str, module: nn.Module, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "expected_batch_size": EXPECTED,
    }
    if style == "adaptive":
        arguments |= ADAPTATION
    inner = torch.optim.SGD(module.parameters(), lr=LR)
    return CLASSES_OF[style](inner, **(arguments | changes))


def backward(module: nn.Module, x: Tensor, y: Tensor, reduction: str) -> None:
    output = module(x)
    if len(x):
        nn.functional.cross_entropy(output.double(), y.to(output.device), reduction=reduction).backward()
    else:
        output.sum().backward()


# ------------------------------------------------------------------ by hand


def loop(reference: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    """For each sample, the gradient of its own loss with respect to every parameter."""
    parameters = list(reference.parameters())
    return [
        list(
            torch.autograd.grad(
                nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1]), parameters
            )
        )
        for i in range(len(x))
    ]


def norm_of(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(t.double().square().sum().item() for t in tensors))


def factors_by_hand(style: str, grads: list[Tensor], clip: float | list[float]) -> list[float]:
    """For one sample, how much of its gradient enters each parameter's sum."""
    if style == "per_layer":
        bounds = clip if isinstance(clip, list) else [clip / math.sqrt(len(grads))] * len(grads)
        return [min(1.0, bound / norm_of([g])) for bound, g in zip(bounds, grads, strict=True)]
    norm = norm_of(grads)
    factor = clip / (norm + 0.01) if style == "automatic" else min(1.0, clip / norm)
    return [factor] * len(grads)


def sum_by_hand(style: str, reference: nn.Module, x: Tensor, y: Tensor, clip: Any) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in reference.parameters()]
    for grads in loop(reference, x, y):
        for t, g, factor in zip(total, grads, factors_by_hand(style, grads, clip), strict=True):
            t += factor * g
    return total


def next_clip(clip: float, norms: list[float], expected: int, options: dict[str, float]) -> float:
    """Algorithm 1 of Andrew et al. without noise, the count centred: sum of (b_i - 1/2), over the expected size."""
    count = sum((1 if norm <= clip else 0) - 0.5 for norm in norms)
    fraction = count / expected + 0.5
    rate, quantile = options["clipbound_learning_rate"], options["target_unclipped_quantile"]
    moved = clip * math.exp(-rate * (fraction - quantile))
    return min(max(moved, options["min_clipbound"]), options["max_clipbound"])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("style", STYLES)
def test_noiseless_steps_equal_a_float64_loop_over_samples(style, mode, layout, reduction, accumulate):
    reference = network()
    module = GradSampleModule(
        spread(network(), layout), loss_reduction=reduction, force_functorch=mode == "functorch"
    )
    optimizer = optimizer_of(style, module, loss_reduction=reduction)
    clip = CLIP
    for step in range(3 - accumulate):
        x, y = batch(7 - step, seed=step)
        expected = sum_by_hand(style, reference, x, y, clip)
        if style == "adaptive":
            clip = next_clip(clip, [norm_of(g) for g in loop(reference, x, y)], EXPECTED, ADAPTATION)
        with torch.no_grad():
            for p, t in zip(reference.parameters(), expected, strict=True):
                p -= LR * t / (EXPECTED if reduction == "mean" else 1)
        pieces = list(zip(x.tensor_split(accumulate), y.tensor_split(accumulate), strict=True))
        for i, (x_piece, y_piece) in enumerate(pieces):
            optimizer.signal_skip_step(i < accumulate - 1)
            optimizer.zero_grad()
            backward(module, x_piece.to(layout[0]), y_piece, reduction)
            optimizer.step()
    # adaptive clipping holds C in float32
    tolerance = 1e-6 if style == "adaptive" else 1e-12
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert (p.detach().cpu() - q).abs().max().item() < tolerance
    assert optimizer.max_grad_norm == pytest.approx(clip, rel=1e-6)


def test_some_samples_of_these_batches_are_clipped_and_some_are_not():
    """Otherwise the test above would not tell styles apart."""
    norms = [norm_of(g) for g in loop(network(), *batch(6))]
    assert min(norms) < CLIP < max(norms)


def test_per_layer_bounds_are_one_for_each_parameter(layout):
    bounds = [0.05 * (k + 1) for k in range(8)]
    reference = network()
    module = GradSampleModule(spread(network(), layout), loss_reduction="sum")
    optimizer = optimizer_of("per_layer", module, max_grad_norm=bounds, loss_reduction="sum")
    x, y = batch(6)
    backward(module, x.to(layout[0]), y, "sum")
    optimizer.step()
    for p, t in zip(module.parameters(), sum_by_hand("per_layer", reference, x, y, bounds), strict=True):
        assert (p.grad.cpu() - t).abs().max().item() < 1e-12
    assert optimizer.max_grad_norms == bounds
    assert optimizer.max_grad_norm == pytest.approx(norm_of([torch.tensor(bounds)]), rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ADAPTATION,
        ADAPTATION | {"target_unclipped_quantile": 0.0, "clipbound_learning_rate": 1.5, "min_clipbound": 0.2},
        ADAPTATION | {"target_unclipped_quantile": 1.0, "clipbound_learning_rate": 2.0, "max_clipbound": 1.6},
    ],
    ids=["inside", "reaches the minimum", "reaches the maximum"],
)
def test_the_adaptive_clipping_norm_follows_the_recursion_for_many_steps(layout, options):
    module = GradSampleModule(spread(network(), layout))
    optimizer = optimizer_of("adaptive", module, **options)
    reference = network()
    clip, seen = CLIP, []
    for step in range(8):
        x, y = batch([6, 0, 9, 1][step % 4], seed=step)
        with torch.no_grad():
            for q, p in zip(reference.parameters(), module.parameters(), strict=True):
                q.copy_(p.cpu())
        norms = [norm_of(g) for g in loop(reference, x, y)]
        assert all(abs(norm / clip - 1) > 1e-5 for norm in norms)  # no tie that rounding could decide
        optimizer.zero_grad()
        backward(module, x.to(layout[0]), y, "mean")
        optimizer.step()
        clip = next_clip(clip, norms, EXPECTED, options)
        assert optimizer.max_grad_norm == pytest.approx(clip, rel=1e-5)
        seen.append(clip)
    assert min(seen) < max(seen)
    assert options["min_clipbound"] == 0.01 or seen[-1] == 0.2
    assert options["max_clipbound"] == 10.0 or seen[-1] == 1.6


@pytest.mark.parametrize("style", STYLES)
def test_same_seed_same_noise_on_one_device_and_on_many(style, layout):
    """Where all devices are of one type; of the CPU's own stream, only that a run can be repeated."""

    def train(devices: list[torch.device]) -> tuple[list[Tensor], float]:
        module = GradSampleModule(spread(network(), devices))
        generator = torch.Generator(layout[0]).manual_seed(5)
        optimizer = optimizer_of(style, module, noise_multiplier=1.0, generator=generator)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(5, seed=step)
            backward(module, x.to(devices[0]), y, "mean")
            optimizer.step()
        return [p.detach().cpu() for p in module.parameters()], optimizer.max_grad_norm

    one_type = len({device.type for device in layout}) == 1
    many, clip = train(layout)
    other, other_clip = train(layout[:1] if one_type else layout)
    assert clip == pytest.approx(other_clip, rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(many, other, strict=True))


# ------------------------------------------------------------- sensitivity


def clipped_sum(style: str, module: nn.Module, x: Tensor, y: Tensor, scale: float, clip: Any) -> Any:
    """Summed gradients, one float64 tensor a parameter, and the optimizer that formed them."""
    optimizer = optimizer_of(style, module, max_grad_norm=clip, loss_reduction="sum")
    output = module(x)
    loss = nn.functional.cross_entropy(output.double(), y.to(output.device), reduction="sum")
    (scale * loss).backward()
    optimizer.clip_and_accumulate()
    sums = [p.summed_grad.cpu().double() for p in optimizer.params]
    count = None if style != "adaptive" else float(optimizer._centred_count)
    optimizer.zero_grad()
    return sums, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", [*STYLES, "per_layer list"])
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 5),
    log_scale=st.floats(-3, 6),
    clip=st.floats(1e-3, 1e3),
    layout_name=st.sampled_from(["one", "two", "device+cpu"]),
    mode=st.sampled_from(["hooks", "functorch"]),
)
def test_one_more_sample_moves_the_sum_by_at_most_c(
    style, dtype, seed, n, log_scale, clip, layout_name, mode
):
    """I1; for per-layer clipping also each parameter by at most its bound, for adaptive the count by one half."""
    bounds = [clip * (k + 1) / 8 for k in range(8)]
    wanted: Any = bounds if style == "per_layer list" else clip
    total = norm_of([torch.tensor(bounds, dtype=torch.float64)]) if style == "per_layer list" else clip
    style = style.removesuffix(" list")
    devices = devices_for(layout_name)
    module = GradSampleModule(
        spread(network(dtype), devices), loss_reduction="sum", force_functorch=mode == "functorch"
    )
    x, y = batch(n, seed, dtype)
    x = x.to(devices[0])
    whole, count = clipped_sum(style, module, x, y, 10**log_scale, wanted)
    without, count_without = clipped_sum(style, module, x[:-1], y[:-1], 10**log_scale, wanted)
    moved = [a - b for a, b in zip(whole, without, strict=True)]
    rounding = 1e-5 * (total + norm_of(whole))  # of the two sums, not of the clipping
    assert norm_of(moved) <= total + rounding
    if style == "per_layer":
        limits = bounds if isinstance(wanted, list) else [clip / math.sqrt(8)] * 8
        assert all(norm_of([m]) <= limit + rounding for m, limit in zip(moved, limits, strict=True))
    if style == "adaptive":
        assert abs(count - count_without) == 0.5


@settings(deadline=None, max_examples=60)
@given(norm=st.floats(0, 2.0**127, width=32), clip=st.floats(1e-6, 1e6), weight=st.floats(0, 128, width=32))
def test_the_automatic_factor_never_lets_a_norm_reach_c(norm, clip, weight):
    """I7; the reference is exact: float32 values in float64 products."""
    norm_B, weight_B = torch.tensor([norm]), torch.tensor([weight])
    exact = norm_B[0].double().item()
    assert 0 <= automatic_clip_factor(norm_B, clip)[0].double().item() * exact < clip
    factor = automatic_clip_factor(norm_B, clip, weight_B)[0].double().item()
    assert 0 <= factor * exact < clip
    ideal = weight * clip / (weight * norm + 0.01)
    assert factor == pytest.approx(ideal, rel=1e-5) or ideal < 2e-38 or weight * norm > 3e38


@pytest.mark.parametrize("style", STYLES)
def test_a_sample_with_a_non_finite_gradient_contributes_zero_and_is_counted(style, layout):
    module = GradSampleModule(spread(network(), layout), loss_reduction="sum")
    x, y = batch(4)
    expected = sum_by_hand(style, network(), x[:3], y[:3], CLIP)
    optimizer = optimizer_of(style, module, loss_reduction="sum")
    output = module(x.to(layout[0]))
    loss_B = nn.functional.cross_entropy(output, y.to(output.device), reduction="none")
    (loss_B * torch.tensor([1.0, 1.0, 1.0, math.nan], device=output.device)).sum().backward()
    optimizer.step()
    for p, t in zip(module.parameters(), expected, strict=True):
        assert (p.grad.cpu() - t).abs().max().item() < 1e-6
    # per-layer clipping leaves parts out, one for each parameter
    assert optimizer.nonfinite_samples == (8 if style == "per_layer" else 1)


# ------------------------------------------------------------------- noise

BOUNDS = [0.3, 0.4, 1.2, 0.1]


@pytest.mark.parametrize("style", [*STYLES, "per_layer list"])
def test_noise_has_std_sigma_c_in_every_parameter(style, layout):
    """I2. Adaptive: sigma is the gradients' share of the noise multiplier that is accounted."""
    n, sigma, clip = 200, 0.5, 0.5
    changes: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": clip, "loss_reduction": "sum"}
    expected = sigma * clip
    if style == "per_layer list":
        style, changes["max_grad_norm"] = "per_layer", BOUNDS
        expected = sigma * math.sqrt(sum(bound**2 for bound in BOUNDS))
    if style == "adaptive":
        changes["unclipped_num_std"] = 0.4  # a large share for the count: 0.5^-2 - 0.8^-2 = 0.64^-2
        expected = clip * (sigma**-2 - (2 * 0.4) ** -2) ** -0.5
        assert expected > 1.2 * sigma * clip
    torch.manual_seed(1)
    layers = nn.Sequential(*[nn.Linear(n, n, bias=False) for _ in range(4)])
    module = GradSampleModule(spread(layers, layout), loss_reduction="sum")
    optimizer = optimizer_of(style, module, **changes)
    module(torch.zeros(1, n, device=layout[0])).sum().backward()
    optimizer.step()
    for p in module.parameters():
        drawn = p.grad.cpu().double().flatten()
        assert abs(drawn.mean().item()) < 5.7 * expected / n
        assert abs(drawn.std().item() / expected - 1) < 5.7 / math.sqrt(2 * n * n)


@settings(deadline=None, max_examples=100)
@given(sigma=st.floats(0.05, 20), ratio=st.floats(0.501, 50))
def test_gradients_and_count_together_cost_what_is_accounted(sigma, ratio):
    """Renyi divergences of Gaussians add: a / (2 z^2) for the gradients, a (1/2)^2 / (2 b^2) for the count."""
    b = sigma * ratio
    z = gradient_noise_multiplier(sigma, b)
    assert 1 / (2 * z**2) + 0.25 / (2 * b**2) == pytest.approx(1 / (2 * sigma**2), rel=1e-9)
    assert z >= sigma


def test_the_count_is_released_with_its_noise_and_the_total_is_accounted():
    """From C before and after a step the released count can be read back: its noise is N(0, b^2)."""
    b, steps, rate = 1.5, 400, 0.01
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, _ = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(40, 2)), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping="adaptive",
        **ADAPTATION
        | {
            "unclipped_num_std": b,
            "clipbound_learning_rate": rate,
            "max_clipbound": 1e9,
            "min_clipbound": 0.0,
        },
    )
    counts, draws, before = [], [], 1.0
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.zeros(3, 2)).sum().backward()
        optimizer.step()
        after = optimizer.max_grad_norm
        fraction = 0.4 - math.log(after / before) / rate
        counts.append((fraction - 0.5) * optimizer.expected_batch_size)
        draws.append(net.weight.grad.flatten()[0].item() * optimizer.expected_batch_size / before)
        before = after
    drawn, gradient = torch.tensor(counts, dtype=torch.float64), torch.tensor(draws, dtype=torch.float64)
    assert optimizer.expected_batch_size == 10
    # three samples of norm zero are not clipped: 3/2; float32 C resolves the count to 1e-4 here
    assert abs(drawn.mean().item() - 1.5) < 5.5 * b / math.sqrt(steps)
    assert abs(drawn.std().item() / b - 1) < 5.5 / math.sqrt(2 * steps)
    z = (1 - (2 * b) ** -2) ** -0.5
    assert abs(gradient.std().item() / z - 1) < 5.5 / math.sqrt(2 * steps)
    assert abs(torch.corrcoef(torch.stack([drawn, gradient]))[0, 1].item()) < 5.5 / math.sqrt(steps)
    assert engine.accountant.history == [(1.0, 0.25, steps)]


def test_a_noise_schedule_that_leaves_the_count_no_room_is_refused_by_name():
    module = GradSampleModule(network())
    optimizer = optimizer_of("adaptive", module, noise_multiplier=3.0)
    ExponentialNoise(optimizer, gamma=2.0).step()
    assert optimizer.noise_multiplier == 6.0
    backward(module, *batch(3), "mean")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"noise_multiplier \(6.0\).*twice unclipped_num_std \(2.0\)"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


# ------------------------------------------------------- devices and dtypes


@emulated
def test_per_layer_clipping_copies_nothing_between_devices(layout):
    module = GradSampleModule(spread(network(), layout))
    optimizer = optimizer_of("per_layer", module)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(5, seed=step)
        backward(module, x.to(layout[0]), y, "mean")
        with count_copies() as seen:
            optimizer.step()
        assert seen.copies == []


@emulated
@pytest.mark.parametrize("style", ["adaptive", "automatic"])
@pytest.mark.parametrize("layout", ["one", "two", "four"], indirect=True)
@pytest.mark.parametrize("n", [5, 0])
def test_a_step_copies_two_vectors_per_further_device_and_never_waits(style, layout, n):
    """Adaptive clipping also sends C, one number, where noise is drawn."""
    module = GradSampleModule(spread(network(), layout))
    generator = torch.Generator(layout[0]).manual_seed(0)
    optimizer = optimizer_of(style, module, noise_multiplier=1.0, generator=generator)
    further = len(layout) - 1
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(n, seed=step)
        backward(module, x.to(layout[0]), y, "mean")
        with count_copies() as seen:
            optimizer.step()
        assert (seen.h2d, seen.d2h, seen.sync) == (0, 0, 0)
        shapes = seen.shapes("cross")
        assert shapes.count((n,)) == 2 * further
        assert shapes.count(()) == (further if style == "adaptive" else 0)
        assert len(shapes) == shapes.count((n,)) + shapes.count(())


@emulated
def test_adaptive_clipping_over_a_device_and_the_cpu_only_copies():
    devices = devices_for("device+cpu")
    module = GradSampleModule(spread(network(), devices))
    optimizer = optimizer_of("adaptive", module, noise_multiplier=1.0)
    for step in range(2):
        optimizer.zero_grad()
        x, y = batch(4, seed=step)
        backward(module, x.to(devices[0]), y, "mean")
        with count_copies() as seen:
            optimizer.step()
        assert seen.sync == 0
        assert (seen.h2d, seen.d2h) <= (2, 2)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("style", STYLES)
def test_bf16_and_fp32_parameters_train_together_and_empty_batches_step(style, layout):
    def mixed() -> nn.Sequential:
        layers = network(torch.float32)
        return nn.Sequential(
            Cast(torch.bfloat16),
            layers[0].bfloat16(),
            layers[2].bfloat16(),
            Cast(torch.float32),
            layers[4],
            layers[5],
        )

    names = ["0", "1", "2", "3", "4", "5"]
    module = GradSampleModule(spread(mixed(), layout, names), loss_reduction="sum")
    optimizer = optimizer_of(style, module, loss_reduction="sum", noise_multiplier=0.0)
    x, y = batch(6)
    backward(module, x.to(layout[0]), y, "sum")
    grads = [[p.grad_sample[i].cpu().double() for p in module.parameters()] for i in range(6)]
    optimizer.step()
    for k, p in enumerate(module.parameters()):
        expected = sum(factors_by_hand(style, g, CLIP)[k] * g[k] for g in grads)
        # one rounding, to the parameter's dtype
        assert torch.allclose(p.grad.cpu().double(), expected, rtol=2**-8, atol=1e-5)
        assert p.grad.dtype == p.dtype
    after = [p.detach().cpu().clone() for p in module.parameters()]
    optimizer.zero_grad()
    module(x[:0].to(layout[0])).sum().backward()
    optimizer.step()
    assert all(torch.equal(p.detach().cpu(), q) for p, q in zip(module.parameters(), after, strict=True))


# --------------------------------------------------------- setting the norm


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schedule", "value"),
    [
        (lambda o: ExponentialGradClip(o, gamma=0.5), CLIP / 4),
        (lambda o: StepGradClip(o, step_size=2, gamma=0.1), CLIP / 10),
        (lambda o: LambdaGradClip(o, scheduler_function=lambda epoch: 1 / (1 + epoch)), CLIP / 3),
    ],
    ids=["exponential", "step", "lambda"],
)
def test_a_schedule_sets_the_clipping_norm(style, schedule, value):
    module = GradSampleModule(network(), loss_reduction="sum")
    optimizer = optimizer_of(style, module, loss_reduction="sum", noise_multiplier=0.0)
    scheduler = schedule(optimizer)
    for _ in range(2):
        scheduler.step()
    assert optimizer.max_grad_norm == pytest.approx(value)
    x, y = batch(5)
    expected = sum_by_hand(style, network(), x, y, value)
    backward(module, x, y, "sum")
    optimizer.step()
    for p, t in zip(module.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, t, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_changing_the_norm_within_a_logical_batch_is_refused(style):
    module = GradSampleModule(network())
    optimizer = optimizer_of(style, module)
    scheduler = ExponentialGradClip(optimizer, gamma=0.5)

    def physical(skip: bool, seed: int) -> None:
        optimizer.signal_skip_step(skip)
        optimizer.zero_grad()
        backward(module, *batch(3, seed=seed), "mean")
        optimizer.step()

    physical(True, 0)
    for change in (lambda: setattr(optimizer, "max_grad_norm", 0.4), scheduler.step):
        with pytest.raises(ValueError, match=r"max_grad_norm cannot change within a logical batch"):
            change()
    assert optimizer.max_grad_norm == pytest.approx(CLIP)
    assert scheduler.last_epoch == 0
    physical(False, 1)
    optimizer.max_grad_norm = 0.4
    physical(False, 2)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mode", ["hooks", "bk"])
def test_noise_is_never_for_another_norm_than_gradients_were_clipped_to(style, mode):
    """Mode "bk" clips in the backward, "hooks" in the step: only there C may still change in between."""
    net = network(torch.float32)
    x, y = batch(8, dtype=torch.float32)
    module, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        clipping=style,
        grad_sample_mode=mode,
        **(ADAPTATION if style == "adaptive" else {}),
    )
    backward(module, x[:1], y[:1], "mean")
    if mode == "bk":
        with pytest.raises(ValueError, match="within a logical batch"):
            optimizer.max_grad_norm = 0.01
    else:
        optimizer.max_grad_norm = 0.01
    bound = optimizer.max_grad_norm
    optimizer.step()
    assert norm_of([4 * p.grad for p in net.parameters()]) <= bound * (1 + 1e-6)
    optimizer.zero_grad()
    optimizer.max_grad_norm = 0.5


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, "1", None, True])
def test_a_norm_that_makes_no_sense_is_refused_when_built_and_when_set(style, bad):
    module = GradSampleModule(network())
    with pytest.raises(ConfigurationError, match=r"max_grad_norm must be a positive, finite number"):
        optimizer_of(style, module, max_grad_norm=bad)
    optimizer = optimizer_of(style, module)
    with pytest.raises(ConfigurationError, match=r"max_grad_norm must be a positive, finite number"):
        optimizer.max_grad_norm = bad
    assert optimizer.max_grad_norm == pytest.approx(CLIP)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1.0] * 7, "7 bounds for 8 parameters that require grad"),
        ([1.0] * 7 + [-1.0], r"max_grad_norm\[7\] must be a positive, finite number, not -1.0"),
        ([1.0, math.nan] + [1.0] * 6, r"max_grad_norm\[1\] .* not nan"),
        ([0.0] + [1.0] * 7, r"max_grad_norm\[0\] .* not 0.0"),
    ],
)
def test_a_list_of_bounds_that_makes_no_sense_is_refused_by_entry(bounds, message):
    module = GradSampleModule(network())
    with pytest.raises(ConfigurationError, match=message):
        optimizer_of("per_layer", module, max_grad_norm=bounds)
    optimizer = optimizer_of("per_layer", module)
    with pytest.raises(ConfigurationError, match=message):
        optimizer.max_grad_norm = bounds
    assert optimizer.max_grad_norms == [CLIP / math.sqrt(8)] * 8
    optimizer.max_grad_norm = [0.5] * 8
    optimizer.max_grad_norm = 1.0  # keeps the proportions
    assert optimizer.max_grad_norms == pytest.approx([1 / math.sqrt(8)] * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_unclipped_quantile": 1.5}, r"target_unclipped_quantile must lie in \[0, 1\], not 1.5"),
        ({"target_unclipped_quantile": math.nan}, "target_unclipped_quantile .* not nan"),
        ({"clipbound_learning_rate": -0.1}, "clipbound_learning_rate .* not -0.1"),
        ({"unclipped_num_std": 0.0}, "unclipped_num_std must be a positive, finite number, not 0.0"),
        ({"min_clipbound": 3.0, "max_clipbound": 2.0}, r"min_clipbound \(3.0\) must be below max_clipbound"),
        ({"max_clipbound": math.nan}, "max_clipbound .* not nan"),
        ({"noise_multiplier": 4.0}, r"noise_multiplier must be smaller than 2 \* unclipped_num_std"),
        ({"expected_batch_size": None, "loss_reduction": "sum"}, "expected_batch_size is needed"),
        ({"bogus": 1}, "bogus is not an option of AdaClipDPOptimizer"),
    ],
)
def test_adaptive_options_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        optimizer_of("adaptive", GradSampleModule(network()), **changes)


@pytest.mark.parametrize("style", STYLES)
def test_freezing_and_unfreezing_between_steps_follows_requires_grad(style, layout):
    module = GradSampleModule(spread(network(), layout), loss_reduction="sum")
    optimizer = optimizer_of(style, module, loss_reduction="sum")
    frozen = module._module[2]
    clip = CLIP
    for step, freeze in enumerate([False, True, False]):
        frozen.requires_grad_(not freeze)
        reference = network()
        reference.load_state_dict({k: v.cpu() for k, v in module._module.state_dict().items()})
        x, y = batch(5, seed=step)
        optimizer.zero_grad()
        backward(module, x.to(layout[0]), y, "sum")
        trained = [k for k in range(8) if not (freeze and k in (2, 3))]
        rows = [[grads[k] for k in trained] for grads in loop(reference, x, y)]
        before = [p.detach().cpu().clone() for p in module.parameters()]
        optimizer.step()
        for place, k in enumerate(trained):
            p = list(module.parameters())[k]
            expected = sum(factors_by_hand(style, grads, clip)[place] * grads[place] for grads in rows)
            assert torch.allclose(p.detach().cpu(), before[k] - LR * expected, atol=1e-6)
        if freeze:
            assert torch.equal(frozen.weight.detach().cpu(), before[2])
        if style == "adaptive":
            clip = next_clip(clip, [norm_of(grads) for grads in rows], EXPECTED, ADAPTATION)


def test_a_list_of_bounds_does_not_fit_after_unfreezing_and_says_so():
    net = network()
    net[2].requires_grad_(False)
    module = GradSampleModule(net)
    optimizer = optimizer_of("per_layer", module, max_grad_norm=[0.5] * 6)
    net[2].requires_grad_(True)
    backward(module, *batch(3), "mean")
    with pytest.raises(ValueError, match="6 bounds, but 8 parameters require grad now"):
        optimizer.step()


# -------------------------------------------------------------- front doors


@pytest.mark.parametrize("style", STYLES)
def test_the_class_of_a_style(style):
    assert get_optimizer_class(style, False) is CLASSES_OF[style]
    assert (
        get_optimizer_class(clipping=style, distributed=False, grad_sample_mode="hooks") is CLASSES_OF[style]
    )


def test_a_style_there_is_not_is_refused_naming_those_there_are():
    with pytest.raises(ValueError, match="clipping 'scissors' is not available.*adaptive.*flat.*per_layer"):
        get_optimizer_class("scissors", False)


@pytest.mark.parametrize("style", [*STYLES, "per_layer list"])
@pytest.mark.parametrize("wrap", [True, False])
def test_make_private_trains_with_every_style_and_accounts_every_step(style, wrap, layout):
    clip: Any = 1.0
    if style == "per_layer list":
        style, clip = "per_layer", [0.5] * 8
    net = spread(network(torch.float32), layout)
    x, y = batch(40, dtype=torch.float32)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=0.7,
        max_grad_norm=clip,
        clipping=style,
        wrap_model=wrap,
        **(ADAPTATION if style == "adaptive" else {}),
    )
    assert type(optimizer) is CLASSES_OF[style]
    before = [p.detach().cpu().clone() for p in net.parameters()]
    for x_batch, y_batch in loader:
        optimizer.zero_grad()
        backward(module if wrap else net, x_batch.to(layout[0]), y_batch, "mean")
        optimizer.step()
    assert engine.accountant.history == [(0.7, 0.2, 5)]
    assert all(p.isfinite().all() for p in net.parameters())
    assert all(not torch.equal(p.detach().cpu(), q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clipping": "per_layer", "max_grad_norm": [1.0, 2.0]}, "2 bounds for 8 parameters"),
        ({"clipping": "adaptive"}, "target_unclipped_quantile, .*unclipped_num_std must be given"),
        ({"clipping": "flat", **ADAPTATION}, "min_clipbound is not an option of DPOptimizer"),
        (
            {"clipping": "automatic", "max_grad_norm": [1.0]},
            "max_grad_norm must be a positive, finite number",
        ),
    ],
)
def test_make_private_refuses_options_of_another_style_by_name(arguments, message):
    net = network(torch.float32)
    x, y = batch(8, dtype=torch.float32)
    wanted: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | arguments
    with pytest.raises(ConfigurationError, match=message):
        PrivacyEngine(accountant="rdp").make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=4),
            **wanted,
        )
    assert not any(hasattr(p, "grad_sample") for p in net.parameters())


def test_per_layer_with_epsilon_meets_the_target():
    net = network(torch.float32)
    x, y = batch(40, dtype=torch.float32)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        target_epsilon=4.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        clipping="per_layer",
    )
    for x_batch, y_batch in loader:
        optimizer.zero_grad()
        backward(module, x_batch, y_batch, "mean")
        optimizer.step()
    assert 3.9 < engine.get_epsilon(1e-3) <= 4.0
