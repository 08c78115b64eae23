"""How products wait and are normed and summed together, with the GPU's kernels played by plain code: exact in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.grad_sample import blocks, kept, products, rules
from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

B, T, D = 3, 5, 8


@pytest.fixture
def played(monkeypatch):
    """Counts launches."""
    launches: list[tuple[str, int]] = []

    def fits(*tensors: Tensor) -> bool:
        return all(x.is_contiguous() and x.numel() > 0 for x in tensors)

    def grams_fit(a: Tensor, g: Tensor) -> bool:
        return a.shape[1] == 1 and a.shape[2] > 1 and a.dtype == g.dtype and fits(a, g)

    def gram_norms(a_BTD: list[Tensor], g_BTP: list[Tensor]) -> tuple[Tensor, Tensor]:
        launches.append(("norms", len(a_BTD)))
        a, g = torch.stack(list(a_BTD)), torch.stack(list(g_BTP))
        gradient = g.transpose(2, 3) @ a
        return gradient.flatten(2).square().sum(2), (a.norm(dim=3) * g.norm(dim=3)).sum(2)

    def position_sums(g_BTP: list[Tensor]) -> Tensor:
        launches.append(("positions", len(g_BTP)))
        return torch.stack([g.sum(1) for g in g_BTP])

    def scale_pairs(scaled: list[Tensor], whole: list[Tensor], factor_B: Tensor) -> tuple[Tensor, Tensor]:
        launches.append(("sums", len(scaled)))
        shape = (1, -1, *[1] * (scaled[0].dim() - 1))
        by = factor_B.view(shape)
        return (torch.stack(scaled) * by).masked_fill(by == 0, 0), torch.stack(whole).masked_fill(by == 0, 0)

    def row_sq_norms(rows_BN: list[Tensor]) -> Tensor:
        launches.append(("row norms", len(rows_BN)))
        return torch.stack([rows.square().sum(1) for rows in rows_BN])

    def weighted_rows(rows_BN: list[Tensor], factor_B: Tensor) -> Tensor:
        launches.append(("row sums", len(rows_BN)))
        return torch.stack([(rows * factor_B[:, None])[factor_B != 0].sum(0) for rows in rows_BN])

    for module in (rules, products):
        monkeypatch.setattr(module, "grams_fused", grams_fit)
    for module in (kept, products):
        monkeypatch.setattr(module, "fused", fits)
    monkeypatch.setattr(kept, "row_sq_norms", row_sq_norms)
    monkeypatch.setattr(blocks, "weighted_rows", weighted_rows)
    for module in (kept, products):
        monkeypatch.setattr(module, "gram_norms", gram_norms)
    monkeypatch.setattr(kept, "position_sums", position_sums)
    monkeypatch.setattr(products, "scale_pairs", scale_pairs)
    return launches


class Net(nn.Module):
    """Layers of one shape, of another, one called twice, one without bias, and norms between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # wide enough that two Gram matrices cost less than the gradient itself
        self.alike = nn.ModuleList(nn.Linear(D, 4 * D) for _ in range(4))
        self.back = nn.ModuleList(nn.Linear(4 * D, D, bias=i % 2 == 0) for i in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.twice = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for up, down, norm in zip(self.alike, self.back, self.norms, strict=True):
            x = x + down(torch.tanh(up(norm(x))))
        return self.twice(torch.tanh(self.twice(x)))


def per_sample(net: Net, x: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for i in range(B):
        net.zero_grad()
        net(x[i : i + 1]).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    return found


def booked(net: Net, bound: float | list[float], **options: Any) -> DPOptimizer:
    """An optimizer that clips `net`'s gradients in mode "bk": all together, or each parameter's to its own bound."""
    hooks = wrap_model(net, "bk", False, loss_reduction="sum", **options)
    optimizer = (DPPerLayerOptimizer if isinstance(bound, list) else DPOptimizer)(
        torch.optim.SGD(net.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    optimizer.attach_book(hooks.policy)
    return optimizer


@pytest.mark.parametrize("style", ["flat", "per_layer"])
@pytest.mark.parametrize("share", [1, 6, 10**6])
def test_sums_of_products_that_waited_are_exact(played, monkeypatch, style, share):
    monkeypatch.setattr(blocks, "_SHARE", share)
    net = Net().double()
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grads = per_sample(net, x)
    names = list(grads[0])
    norms = {name: torch.stack([grad[name].norm() for grad in grads]) for name in names}
    if style == "flat":
        whole = torch.stack(list(norms.values())).norm(dim=0)
        clip = {name: whole.median().item() for name in names}
        norms = dict.fromkeys(names, whole)
    else:
        clip = {name: norms[name].median().item() for name in names}
    factors = {name: (clip[name] / norms[name]).clamp(max=1.0) for name in names}

    net.zero_grad(set_to_none=True)
    optimizer = booked(net, clip[names[0]] if style == "flat" else list(clip.values()))
    for _ in range(2):
        optimizer.zero_grad()
        played.clear()
        net(x).square().sum().backward()
        optimizer.clip_and_accumulate()
        for name, p in net.named_parameters():
            expected = sum(factor * grad[name] for factor, grad in zip(factors[name], grads, strict=True))
            assert torch.allclose(p.summed_grad, expected, rtol=1e-10, atol=1e-10), name
    together = {what: max(n for kind, n in played if kind == what) for what in ("norms", "sums")}
    assert together["norms"] == 4
    assert together["sums"] == (1 if share == 10**6 or style == "per_layer" else together["sums"])
    assert share != 1 or style == "per_layer" or together["sums"] == 4


@pytest.mark.parametrize("share", [1, 10**6])
def test_rows_of_one_shape_are_normed_and_summed_together(played, monkeypatch, share):
    monkeypatch.setattr(blocks, "_SHARE", share)
    net = Net()
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))
    grads = per_sample(net, x)
    norms = {name: torch.stack([grad[name].norm() for grad in grads]) for name in grads[0]}
    clip = {name: norm.median().item() for name, norm in norms.items()}

    net.zero_grad(set_to_none=True)
    optimizer = booked(net, list(clip.values()), stash_budget=10**9)  # each parameter on its own
    for _ in range(2):
        optimizer.zero_grad()
        played.clear()
        net(x).square().sum().backward()
        optimizer.clip_and_accumulate()
        for name, p in net.named_parameters():
            factor = (clip[name] / norms[name]).clamp(max=1.0)
            expected = sum(f * grad[name] for f, grad in zip(factor, grads, strict=True))
            assert torch.allclose(p.summed_grad, expected, rtol=1e-5, atol=1e-5), name
    assert max(n for kind, n in played if kind == "row norms") >= 4
    # factors differ from parameter to parameter: none are summed together
    assert {n for kind, n in played if kind == "row sums"} == {1}


@pytest.mark.parametrize("budget", [0, 10**9])
def test_rows_with_the_same_factors_are_summed_in_launches_of_bounded_size(played, budget):
    torch.manual_seed(0)
    rows = [torch.randn(B, 6, 4) for _ in range(5)]
    parameters = [nn.Parameter(torch.zeros(6, 4)) for _ in rows]
    factor_B = torch.tensor([0.5, 0.0, 2.0])
    made = [
        blocks.Block([p], [p.shape], [kept.KeptRows(grad_B)])
        for p, grad_B in zip(parameters, rows, strict=True)
    ]
    found = dict(blocks.clipped_sums(made, [factor_B] * 5, budget))
    for p, grad_B in zip(parameters, rows, strict=True):
        assert torch.allclose(found[p], torch.einsum("b,bpd->pd", factor_B, grad_B))
    assert [n for kind, n in played if kind == "row sums"] == ([1] * 5 if budget == 0 else [5])
    assert not any(block.kept for block in made)


def test_a_sample_that_is_not_finite_leaves_the_others_sum(played):
    net = Net().double()
    x = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x[1, 2, 3] = torch.inf
    optimizer = booked(net, 1e3, strict=False)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.clip_and_accumulate()
    grads = per_sample(Net().double(), x.nan_to_num(posinf=0.0))
    for name, p in net.named_parameters():
        expected = grads[0][name] + grads[2][name]
        norms = [torch.stack([g.norm() for g in grads[i].values()]).norm() for i in (0, 2)]
        expected = sum(min(1.0, 1e3 / n.item()) * grads[i][name] for i, n in zip((0, 2), norms, strict=True))
        assert torch.allclose(p.summed_grad, expected, rtol=1e-10, atol=1e-10), name
