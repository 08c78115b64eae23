"""Invariants of modes "bk" and "ghost": I1 by search, copies between devices, host waits, and the noise of mode "hooks"."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opacus.testing import count_copies, devices_for, spread
from opacus.tests.clipped_sums import Private

BOTH = ["bk", "ghost"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# what rounding the two sums (not the clipping) may add, relative to the sum's size
ROUNDING = 1e-5


class Cancel(nn.Module):
    """Gradients of positions nearly cancel: what a sample moves is a small difference of large terms."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        same = x.mean(1, keepdim=True).expand_as(x)
        h = self.layer(same + 1e-4 * x)
        return h - h.detach().mean(1, keepdim=True)


class Reused(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Pieces(nn.Module):
    """Any of the pieces in any order, then a head tied to the table."""

    def __init__(self, names: list[str], d: int, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, d, padding_idx=0)
        self.pieces = nn.Sequential(*[PIECES[name](d) for name in names])
        self.head = nn.Linear(d, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.pieces(self.table(ids)))


class Mixed(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.by)


class Along(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d, d, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class CancelBack(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.cancel, self.back = Cancel(d), nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.cancel(x))


PIECES = {
    "linear": lambda d: nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Linear(3 * d, d)),
    "norm": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "reused": Reused,
    "conv": Along,
    "functorch": Mixed,
    "cancel": CancelBack,
}


def moved_by_one_sample(way, model, ids, targets, scale, clip):
    private = Private(model, way, clip=clip, loss_reduction="sum")
    sums = []
    for rows in (slice(None), slice(None, -1)):

        def losses(output, dim, rows=rows):
            target = targets[rows].to(output.device)
            return (
                nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="none")
                .view(target.shape)
                .sum(1)
            )

        found = private.batch(ids[rows], loss=losses, scale=scale)
        sums.append(torch.cat([total.flatten().cpu().double() for total in found.values()]))
    return (sums[0] - sums[1]).norm().item(), sums[0].norm().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", BOTH)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(PIECES)), min_size=0, max_size=3),
    d=st.sampled_from([4, 8]),
    tied=st.booleans(),
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 4),
    positions=st.integers(1, 6),
    log_scale=st.floats(-3, 6),
    log_clip=st.floats(-3, 3),
    layout_name=st.sampled_from(["cpu", "one", "two"]),
)
def test_one_more_sample_moves_the_sum_by_at_most_c(
    way, dtype, names, d, tied, seed, batch, positions, log_scale, log_clip, layout_name
):
    """I1 over models, batches, scales, dtypes and devices."""
    torch.manual_seed(seed)
    model = Pieces(names, d, tied).to(DTYPES[dtype])
    ids, targets = torch.randint(7, (batch, positions)), torch.randint(7, (batch, positions))
    if layout_name != "cpu":
        devices = devices_for(layout_name)
        layers = ["table", *[f"pieces.{i}" for i in range(len(names))], "head"]
        model = spread(model, devices[:1] if tied else devices, layers)
    clip = 10**log_clip
    moved, size = moved_by_one_sample(way, model, ids, targets, 10**log_scale, clip)
    assert moved <= clip * (1 + ROUNDING) + ROUNDING * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", BOTH)
def test_a_sample_clipped_to_one_has_norm_one(way, dtype):
    """1.6.0: norm 1.005 in bf16. The norm is taken larger by what rounding may hide, hence the lower bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 30)).to(DTYPES[dtype])
    private = Private(model, way, clip=1.0, loss_reduction="sum")
    for _ in range(2):
        found = private.batch(
            torch.randn(1, 6, 50).to(DTYPES[dtype]),
            scale=1e4,
            loss=lambda y, dim: y.float().square().sum((1, 2)),
        )
        norm = torch.cat([total.flatten().double() for total in found.values()]).norm().item()
        assert (0.995 if dtype == "bf16" else 0.9999) < norm <= 1.0


def spread_model(layout):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)) for _ in range(8)])
    if isinstance(layout, str):
        layout = devices_for(layout) if layout != "cpu" else ["cpu"]
    return spread(model, layout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="copies are counted on emulated devices")
@pytest.mark.parametrize("style", ["flat", "automatic", "adaptive", "per_layer"])
@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize(("layout", "devices"), [("one", 1), ("two", 2), ("four", 4)])
def test_only_two_vectors_for_each_further_device_cross_and_the_host_waits_for_nothing(
    layout, devices, way, style
):
    """Against the copies that forward and backward make by themselves: 2 (D - 1) of length B; none for per-layer clipping."""
    batch = 5
    model = spread_model(layout)
    first = next(model.parameters()).device
    x = torch.randn(batch, 3, 6).to(first)
    private = Private(model, way, style=style, sigma=0.0)
    for _ in range(2):  # the first batch is verified, which waits
        private.backward(x)
        private.optimizer.step()
        private.optimizer.zero_grad(set_to_none=True)
    with count_copies() as seen:
        private.backward(x)
        private.optimizer.step()
    own = [shape for shape in seen.shapes("cross") if shape == (batch,)]
    rest = [shape for shape in seen.shapes("cross") if shape not in ((batch,), (batch, 3, 6))]
    assert len(own) == (0 if style == "per_layer" else 2 * (devices - 1))
    assert rest == []
    assert (seen.sync, seen.d2h) == (0, 0)


@pytest.mark.parametrize("layout", ["one", "two", "four"], indirect=True)
def test_the_sums_do_not_depend_on_the_layout(layout):
    x = torch.randn(5, 3, 6)
    want = Private(spread_model("cpu"), "bk", clip=0.1).batch(x)
    model = spread_model(layout)
    found = Private(model, "bk", clip=0.1).batch(x.to(next(model.parameters()).device))
    for name, total in want.items():
        assert torch.allclose(found[name].cpu(), total, atol=1e-6), name
