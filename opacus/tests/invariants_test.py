"""The privacy invariants of design.md as property tests: I1 sensitivity, I2 noise, I4, I5, I7, on every layout and mode."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.optimizers.clipping import flat_clip_factor
from opacus.testing import devices_for, spread

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# what rounding the two sums (not the clipping) may add, relative to the sum's size
ROUNDING = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5}


class Mixed(nn.Module):
    """Embedding, a layer called twice, tied weights, a norm layer and directly owned parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = Scale(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(self.scale(self.norm(x))).float()


class Scale(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def plain(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, 2),
    )


def clipped_sum(
    module: GradSampleModule, x: torch.Tensor, y: torch.Tensor, scale: float, clip: float
) -> torch.Tensor:
    """The summed clipped gradient of a batch under the loss `scale * cross entropy`, flat, float64."""
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    output = module(x)
    loss = nn.functional.cross_entropy(
        output.flatten(0, -2).float(), y.flatten().to(output.device), reduction="sum"
    )
    (scale * loss).backward()
    optimizer.clip_and_accumulate()
    total = torch.cat([p.summed_grad.flatten().cpu().double() for p in optimizer.params])
    assert all(p.summed_grad.dtype in (torch.float32, torch.float64) for p in optimizer.params)
    optimizer.zero_grad()
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 6),
    log_scale=st.floats(-3, 6),
    clip=st.floats(1e-3, 1e3),
    layout_name=st.sampled_from(["one", "two", "device+cpu"]),
)
def test_one_more_sample_moves_the_sum_by_at_most_c(dtype, mode, seed, batch, log_scale, clip, layout_name):
    devices = devices_for(layout_name)
    torch.manual_seed(seed)
    model = spread(plain(4).to(DTYPES[dtype]), devices)
    module = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    x = torch.randn(batch, 3).to(DTYPES[dtype]).to(devices[0])
    y = torch.randint(2, (batch,))
    scale = 10**log_scale
    whole = clipped_sum(module, x, y, scale, clip)
    without = clipped_sum(module, x[:-1], y[:-1], scale, clip)
    moved = (whole - without).norm().item()
    assert moved <= clip * (1 + ROUNDING[dtype]) + ROUNDING[dtype] * whole.norm().item()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), batch=st.integers(1, 5), log_scale=st.floats(-2, 5), clip=st.floats(1e-2, 1e2)
)
def test_sensitivity_with_reuse_tying_and_owned_parameters(dtype, seed, batch, log_scale, clip):
    torch.manual_seed(seed)
    module = GradSampleModule(Mixed().to(DTYPES[dtype]), loss_reduction="sum")
    ids, y = torch.randint(7, (batch, 3)), torch.randint(7, (batch, 3))
    whole = clipped_sum(module, ids, y, 10**log_scale, clip)
    without = clipped_sum(module, ids[:-1], y[:-1], 10**log_scale, clip)
    moved = (whole - without).norm().item()
    assert moved <= clip * (1 + ROUNDING[dtype]) + ROUNDING[dtype] * whole.norm().item()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sample_clipped_to_one_has_norm_one(dtype):
    """1.6.0: norm 1.005 in bf16."""
    torch.manual_seed(0)
    module = GradSampleModule(nn.Linear(50, 40).to(DTYPES[dtype]), loss_reduction="sum")
    x = torch.randn(1, 50).to(DTYPES[dtype])
    total = clipped_sum(module, x, torch.zeros(1, dtype=torch.long), 1e3, 1.0)
    assert 1 - 1e-5 < total.norm().item() <= 1.0


@settings(deadline=None, max_examples=300)
@given(norm=st.floats(0, 2.0**127, width=32), clip=st.floats(1e-6, 1e6), weight=st.floats(0, 128, width=32))
def test_factor_times_norm_never_exceeds_c_by_rounding(norm, clip, weight):
    """I7, in exact arithmetic: float32 values are rationals that float64 products hold to 1e-15."""
    norm_B = torch.tensor([norm])
    factor = flat_clip_factor(norm_B, clip)[0].double().item()
    assert 0 <= factor <= 1
    assert factor * norm_B[0].double().item() <= clip
    weighted = flat_clip_factor(norm_B, clip, torch.tensor([weight]))[0].double().item()
    assert weighted * norm_B[0].double().item() <= clip


@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_a_non_finite_norm_gets_factor_zero(norm):
    assert flat_clip_factor(torch.tensor([norm, 0.5]), 1.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e30])
def test_a_sample_with_a_non_finite_gradient_contributes_zero_and_is_counted(layout, bad):
    torch.manual_seed(0)
    module = GradSampleModule(spread(plain(4), layout), loss_reduction="sum")
    good = torch.randn(3, 3)
    poisoned = torch.cat([good, torch.full((1, 3), bad)])
    expected = clipped_sum(module, good.to(layout[0]), torch.zeros(3, dtype=torch.long), 1.0, 1.0)

    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    output = module(poisoned.to(layout[0]))
    loss = nn.functional.cross_entropy(
        output, torch.zeros(4, dtype=torch.long, device=output.device), reduction="none"
    )
    (loss * torch.tensor([1.0, 1.0, 1.0, math.inf], device=output.device)).sum().backward()
    optimizer.clip_and_accumulate()
    total = torch.cat([p.summed_grad.flatten().cpu().double() for p in optimizer.params])
    assert optimizer.nonfinite_samples == 1
    assert torch.allclose(total, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_noise_has_std_sigma_c_once_per_coordinate_whatever_the_placement(layout, dtype, accumulate):
    """I2: mean 0, std sigma * C, independent of placement, sum and dtype; several physical batches, one noise."""
    sigma, clip, n = 0.5, 0.5, 300
    torch.manual_seed(1)
    layers = [nn.Linear(n, n, bias=False) for _ in layout]
    module = GradSampleModule(spread(nn.Sequential(*layers).to(DTYPES[dtype]), layout), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    for last in [False] * (accumulate - 1) + [True]:
        optimizer.signal_skip_step(not last)
        module(torch.zeros(1, n, dtype=DTYPES[dtype], device=layout[0])).sum().backward()
        optimizer.step()
        if not last:
            optimizer.zero_grad()
    for p in optimizer.params:
        drawn = p.grad.cpu().double().flatten()
        count = drawn.numel()
        assert abs(drawn.mean().item()) < 5.5 * sigma * clip / math.sqrt(count)
        # bf16 rounding adds variance of (2^-9 relative)^2: far below the bound
        assert abs(drawn.std().item() / (sigma * clip) - 1) < 5.5 / math.sqrt(2 * count)


def test_noise_is_not_rounded_away_by_a_large_bf16_sum():
    """1.6.0: a sum near 300 swallows noise of std 0.25. The noisy sum is rounded once, so its error stays Gaussian plus one ulp."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(200_000, dtype=torch.bfloat16))
    optimizer = DPOptimizer(
        torch.optim.SGD([p], lr=1.0), noise_multiplier=0.25, max_grad_norm=1.0, expected_batch_size=300
    )
    p.summed_grad = torch.full((200_000,), 300.5)
    p.grad_sample = torch.zeros(1, 200_000)
    optimizer.add_noise()
    optimizer.scale_grad()
    # after scaling the sum is near 1: a bf16 step is 2^-8 there, that is 300 / 256 = 1.17 units of the sum
    exact = 300.5 / 300
    assert p.grad.double().mean().item() == pytest.approx(exact, abs=2e-3)
    assert p.grad.unique().numel() >= 2


def test_noise_of_parameters_and_steps_is_independent(layout):
    n = 200
    torch.manual_seed(2)
    module = GradSampleModule(spread(nn.Sequential(*[nn.Linear(n, n, bias=False) for _ in range(4)]), layout))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    drawn = []
    for _ in range(3):
        optimizer.zero_grad()
        module(torch.zeros(0, n, device=layout[0])).sum().backward()
        optimizer.step()
        drawn += [p.grad.cpu().double().flatten() for p in optimizer.params]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            assert abs((a @ b / (a.norm() * b.norm())).item()) < 5.8 / n  # 66 pairs, below 1e-6 in all


def test_a_parameter_without_a_clipped_gradient_makes_step_raise():
    """I4."""
    module = GradSampleModule(nn.Linear(2, 2))
    stranger = nn.Parameter(torch.zeros(3))
    optimizer = DPOptimizer(
        torch.optim.SGD([*module.parameters(), stranger], lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    before = copy.deepcopy(module.state_dict())
    module(torch.ones(2, 2)).sum().backward()
    with pytest.raises(PerSampleGradientError, match="parameter 2 of group 0"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_the_same_per_sample_gradients_cannot_be_used_twice():
    """I5."""
    module = GradSampleModule(nn.Linear(2, 2))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=2,
    )
    module(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(PerSampleGradientError, match="zero_grad"):
        optimizer.step()
