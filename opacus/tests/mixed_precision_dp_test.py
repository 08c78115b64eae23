"""Mixed precision: bf16 parameters, autocast, loss scaling. Per-sample gradients against a float64 loop; C holds exactly.

Tolerances are stated in units of the dtype's rounding, 2^-8 for bfloat16 and 2^-11 for float16, relative to the norm of
the sample's whole gradient. Emulated devices do not cast under autocast, so autocast is tested on the CPU.
"""

from __future__ import annotations

import copy
import math
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
from opacus.optimizers import AdaClipDPOptimizer, AutomaticDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from opacus.testing import spread

B, D, VOCABULARY = 5, 4, 7
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ADAPTATION = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 5.0,
}
STYLES: dict[str, tuple[type[DPOptimizer], dict[str, Any]]] = {
    "flat": (DPOptimizer, {}),
    "per_layer": (DPPerLayerOptimizer, {}),
    "adaptive": (AdaClipDPOptimizer, ADAPTATION),
    "automatic": (AutomaticDPOptimizer, {}),
}


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(D, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3)
    )


def convolutions() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
        nn.Linear(4 * D, 3),
    )  # fmt: skip


def tokens() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Tanh(), nn.Flatten(), nn.Linear(6 * D, 3)
    )


MODELS = {"linear": network, "convolution": convolutions, "embedding": tokens}


def batch(kind: str = "linear", n: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=generator)
    if kind == "embedding":
        return torch.randint(VOCABULARY, (n, D), generator=generator), y
    # values that bfloat16 holds exactly, so that the loop sees the same data
    return torch.randn(n, D, generator=generator).bfloat16().float(), y


def loop(model: nn.Module, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Per sample, gradients of the weights as they are (rounded already), all arithmetic in float64."""
    reference = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    return [
        list(
            torch.autograd.grad(
                nn.functional.cross_entropy(reference(x[i : i + 1]), y[i : i + 1]),
                list(reference.parameters()),
            )
        )
        for i in range(len(x))
    ]


def norm_of(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def optimizer_of(style: str, module: nn.Module, **changes: Any) -> Any:
    kind, options = STYLES[style]
    arguments = {
        "noise_multiplier": 0.0,
        "max_grad_norm": 0.5,
        "expected_batch_size": B,
        "loss_reduction": "sum",
    }
    return kind(torch.optim.SGD(module.parameters(), lr=0.1), **(arguments | options | changes))


# ------------------------------------------------ parameters and autocast


@pytest.mark.parametrize("force_functorch", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("precision", ["bf16 parameters", "bf16 autocast", "fp16 autocast"])
def test_per_sample_gradients_are_the_loops_up_to_rounding(precision, kind, force_functorch):
    """Within 12 units: about two roundings a layer, forward and backward. A wrong sample or layer would differ by its norm."""
    dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    model = MODELS[kind]()
    if precision == "bf16 parameters":
        model = model.bfloat16()
    x, y = batch(kind)
    expected = loop(model, x, y)
    module = GradSampleModule(model, loss_reduction="sum", force_functorch=force_functorch)
    cast = x.bfloat16() if precision == "bf16 parameters" and x.is_floating_point() else x
    with torch.autocast("cpu", dtype=dtype, enabled="autocast" in precision):
        output = module(cast)
        loss = nn.functional.cross_entropy(output.float(), y, reduction="sum")
    assert output.dtype == dtype
    loss.backward()
    for i, grads in enumerate(expected):
        scale = norm_of(grads)
        difference = norm_of(
            [p.grad_sample[i].double() - g for p, g in zip(module.parameters(), grads, strict=True)]
        )
        assert difference < 12 * UNIT[dtype] * scale
        assert scale > 0.1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("precision", ["bf16 parameters", "bf16 autocast", "fp16 autocast"])
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), n=st.integers(1, 4), log_scale=st.floats(-2, 4), clip=st.floats(1e-2, 1e2))
def test_one_more_sample_moves_the_sum_by_at_most_c(style, precision, seed, n, log_scale, clip):
    """I1: the bound is on what enters the sum, so it needs no allowance for the low precision."""
    dtype = torch.float16 if precision.startswith("fp16") else torch.bfloat16
    model = network().bfloat16() if precision == "bf16 parameters" else network()
    module = GradSampleModule(model, loss_reduction="sum")
    x, y = batch(n=n, seed=seed)
    x = x.to(next(model.parameters()).dtype)

    def clipped_sum(rows: slice) -> list[Tensor]:
        optimizer = optimizer_of(style, module, max_grad_norm=clip)
        with torch.autocast("cpu", dtype=dtype, enabled="autocast" in precision):
            loss = nn.functional.cross_entropy(module(x[rows]).float(), y[rows], reduction="sum")
        (10**log_scale * loss).backward()
        optimizer.clip_and_accumulate()
        found = [p.summed_grad.double() for p in optimizer.params]
        optimizer.zero_grad()
        return found

    # one sample by itself: no rounding of two sums is in the way
    assert norm_of(clipped_sum(slice(0, 1))) <= clip * (1 + 1e-6)
    whole, without = clipped_sum(slice(0, n)), clipped_sum(slice(0, n - 1))
    moved = norm_of([a - b for a, b in zip(whole, without, strict=True)])
    # matrix products of n and of n - 1 rows may round differently; each row by a unit of its own size
    other_rows = UNIT[dtype] * 12 * clip * (n - 1)
    assert moved <= clip * (1 + 1e-5) + other_rows


@pytest.mark.parametrize("style", STYLES)
def test_training_in_bf16_autocast_steps_fp32_parameters(style):
    net = network()
    x, y = batch(n=20)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.01),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=style,
        **STYLES[style][1],
    )
    for x_batch, y_batch in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(module(x_batch), y_batch)
        loss.backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in net.parameters())
    assert all(p.isfinite().all() for p in net.parameters())


# ------------------------------------------------------------ loss scaling


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and step"])
def test_grad_scaler_is_refused_by_name_at_the_first_step_and_nothing_changes(style, unscale):
    """Unscaling would be exact, but the scale would not be private: it follows whether any one sample overflowed."""
    net = network()
    x, y = batch(n=20)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, _ = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        clipping=style,
        **STYLES[style][1],
    )
    before = copy.deepcopy(net.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(nn.functional.cross_entropy(module(x[:5]), y[:5])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"GradScaler cannot drive .*bfloat16.*optimizer\.loss_scale"):
        scaler.step(optimizer)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert len(engine.accountant) == 0
    assert all(p.summed_grad is None for p in net.parameters())
    # and ordinary training goes on afterwards
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(x[:5]), y[:5]).backward()
    optimizer.step()
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("style", STYLES)
def test_a_disabled_grad_scaler_changes_nothing(style):
    results = []
    for scaled in (False, True):
        module = GradSampleModule(network(), loss_reduction="sum")
        optimizer = optimizer_of(style, module)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        x, y = batch()
        loss = nn.functional.cross_entropy(module(x), y, reduction="sum")
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("scale", [65536.0, 2.0**-6])
def test_a_loss_scale_leaves_every_update_bit_for_bit_as_it_was(style, scale, layout):
    """Powers of two are exact; two physical batches may have two scales."""

    def update(scales: list[float]) -> list[Tensor]:
        module = GradSampleModule(spread(network(), layout), loss_reduction="sum")
        generator = torch.Generator(layout[0]).manual_seed(1)
        optimizer = optimizer_of(style, module, noise_multiplier=0.5, generator=generator)
        for step, factor in enumerate(scales):
            optimizer.signal_skip_step(step == 0)
            optimizer.zero_grad()
            x, y = batch(seed=step)
            output = module(x.to(layout[0]))
            loss = nn.functional.cross_entropy(output, y.to(output.device), reduction="sum")
            optimizer.loss_scale = factor
            (factor * loss).backward()
            optimizer.step()
        return [p.detach().cpu() for p in module.parameters()]

    plain, scaled = update([1.0, 1.0]), update([scale, 2 * scale])
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_a_loss_scale_saves_float16_gradients_that_would_vanish():
    """Gradients near 1e-7 are below float16's normal range; scaled by 2^15 they have its whole precision."""
    x, y = batch()
    weight = 2.0**-14  # of the loss: a long sequence's mean, say
    expected = loop(network(), x, y)
    errors = []
    for scale in (1.0, 2.0**14):
        module = GradSampleModule(network(), loss_reduction="sum")
        optimizer = optimizer_of("flat", module, max_grad_norm=1e3, loss_scale=scale)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(module(x).float(), y, reduction="sum")
        (scale * weight * loss).backward()
        optimizer.step()
        differences = [
            p.grad.double() / weight - sum(grads[k] for grads in expected)
            for k, p in enumerate(module.parameters())
        ]
        errors.append(norm_of(differences) / sum(norm_of(grads) for grads in expected))
    assert errors[1] < 12 * UNIT[torch.float16]
    assert errors[0] > 2 * errors[1]


def test_a_sample_that_overflows_float16_contributes_zero_and_the_others_count():
    x, y = batch()
    expected = loop(network(), x, y)
    module = GradSampleModule(network(), loss_reduction="sum")
    optimizer = optimizer_of("flat", module, max_grad_norm=1e3, loss_scale=16.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss_B = nn.functional.cross_entropy(module(x).float(), y, reduction="none")
    (16.0 * loss_B * torch.tensor([1.0, 1.0, 1e6, 1.0, 1.0])).sum().backward()
    optimizer.step()
    assert optimizer.nonfinite_samples == 1
    for k, p in enumerate(module.parameters()):
        wanted = sum(grads[k] for i, grads in enumerate(expected) if i != 2)
        assert (p.grad.double() - wanted).norm() < 12 * UNIT[torch.float16] * sum(
            norm_of(g) for g in expected
        )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None])
def test_a_loss_scale_that_makes_no_sense_is_refused_by_name(style, bad):
    net = network()
    with pytest.raises(ConfigurationError, match="loss_scale must be a positive, finite number"):
        optimizer_of(style, net, loss_scale=bad)
    with pytest.raises(ConfigurationError, match="loss_scale must be a positive, finite number"):
        PrivacyEngine(accountant="rdp").make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*batch()), batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=style,
            loss_scale=bad,
            **STYLES[style][1],
        )
