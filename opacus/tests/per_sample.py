"""Expected per-sample gradients, from mathematics alone: a loop over samples, in float64, through plain autograd.

`check` compares one model and batch with that loop in one of several `VIEWS` of the code under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.captured import Captured, Owners
from opacus.grad_sample.ownership import Slot
from opacus.grad_sample.selection import rule_for

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
VIEWS = ("float64", "float32", "functorch", "policy", "empty")


def per_sample_loss(output: Any, batch_dim: int = 0) -> Tensor:
    """`[B]`: a smooth function of every output element, different for each position."""
    total = None
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            rows = leaf.transpose(0, batch_dim) if leaf.dim() > 2 or batch_dim == 0 else leaf
            rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
            weights = torch.arange(1.0, rows.shape[1] + 1, dtype=torch.float64).cos().to(rows)
            term = (torch.tanh(rows) * weights).sum(1)
            total = term if total is None else total + term.to(total.device)
    assert total is not None
    return total


def take(value: Any, rows: slice, n: int, batch_dim: int = 0) -> Any:
    """The given rows of every tensor that has `n` of them."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = batch_dim if leaf.dim() > batch_dim and (leaf.dim() > 2 or not leaf.is_floating_point()) else 0
        return leaf.transpose(0, dim)[rows].transpose(0, dim) if leaf.dim() and leaf.shape[dim] == n else leaf

    return tree_map(of, value)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of `value` in `dtype`."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value
    )


def expected(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    n: int,
    *,
    batch_dim: int = 0,
    loss: Callable[..., Tensor] = per_sample_loss,
    split: Callable[..., Any] = take,
) -> dict[str, Tensor]:
    """`{name: [n, *shape]}` for each trainable parameter, one sample after the other, float64 on the CPU."""
    reference = copy.deepcopy(model).cpu().double()
    trained = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trained}
    for i in range(n):
        one, named = split(in_dtype((tuple(args), kwargs), torch.float64), slice(i, i + 1), n, batch_dim)
        value = loss(reference(*one, **named), batch_dim).sum()
        grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        for (name, p), grad in zip(trained.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad.to_dense())
    return {name: torch.stack(found) for name, found in rows.items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Equal keys and shapes, values within `tolerance` of each tensor's largest entry (or of 1)."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name].detach().cpu().double()
        assert got.shape == want.shape, name
        scale = max(1.0, want.abs().max().item() if want.numel() else 1.0)
        difference = (got - want).abs().max().item() if want.numel() else 0.0
        assert difference <= tolerance * scale, f"{name}: off by {difference:.3g} at a scale of {scale:.3g}"


def grad_samples(model: nn.Module) -> dict[str, Tensor]:
    """`grad_sample` of each trainable parameter."""
    return {name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad}


class RuleViews:
    """Test policy: checks that a rule's norm and clipped sum follow from its grad sample; keeps the latter, added up."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Tensor] = {}
        self.calls: list[str] = []
        self.ended = 0

    def begin(self) -> None:
        self.found.clear()

    def receive(self, path: str, slots: Sequence[Slot], captured: Captured) -> None:
        self.calls.append(path)
        rule = rule_for(captured.layer, captured.names)
        grads = rule.grad_sample(captured)
        n = captured.owners.n_samples
        factor_B = torch.linspace(0.1, 1.0, n, dtype=torch.float64, device=captured.outputs[0].device)
        norms, sums = rule.norm_sample(captured), rule.clipped_grad(captured, factor_B)
        assert set(grads) == set(norms) == set(sums) == set(captured.names)
        for slot in slots:
            if slot.name not in grads:
                continue
            grad = grads[slot.name]
            flat = grad.reshape(n, slot.parameter.numel()).double()
            wanted = {
                "norm": flat.square().sum(1),
                "sum": (factor_B.to(flat.device) @ flat).view(slot.parameter.shape),
            }
            assert_close(
                {"norm": norms[slot.name], "sum": sums[slot.name]},
                _cpu(wanted),
                1e-9 if grad.dtype == torch.float64 else 1e-4,
            )
            key = (id(slot.holder), slot.key)
            self.found[key] = grad + self.found.get(key, 0)

    def end(self) -> None:
        self.ended += 1

    def discard(self) -> None:
        self.found.clear()

    def by_name(self, model: nn.Module) -> dict[str, Tensor]:
        """What was found, under the model's parameter names; tied parameters add."""
        totals: dict[int, Tensor] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if (id(module), key) in self.found:
                    totals[id(p)] = self.found[(id(module), key)] + totals.get(id(p), 0)
        return {name: totals[id(p)] for name, p in model.named_parameters() if id(p) in totals}


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def policy_grads(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    batch_dim: int = 0,
    owners: Owners | None = None,
    loss: Callable[..., Tensor] = per_sample_loss,
) -> dict[str, Tensor]:
    """Per-sample gradients as a policy with detached weights receives them; no plain gradient may be formed."""
    policy = RuleViews()
    capture = Capture(model, policy, batch_first=batch_dim == 0, loss_reduction="sum", detach_weights=True)
    capture.owners = owners
    capture.attach()
    trainable = [p for p in model.parameters() if p.requires_grad]
    loss(model(*args, **kwargs), batch_dim).sum().backward()
    capture.detach()
    assert policy.ended == 1
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in trainable)
    return policy.by_name(model)


def check(
    make: Callable[[], nn.Module],
    *args: Any,
    view: str = "float64",
    batch_dim: int = 0,
    n: int | None = None,
    loss: Callable[..., Tensor] = per_sample_loss,
    split: Callable[..., Any] = take,
    place: Callable[[nn.Module], Any] = lambda model: None,
    **kwargs: Any,
) -> None:
    """Compare one batch's per-sample gradients with the loop.

    Args:
        make: builds the model (seeded here).
        view: one of `VIEWS`: wrapped model in either dtype, with functorch forced (and a summed loss), a policy with
            detached weights that cross-checks all three functions of each rule, or an empty batch.
        batch_dim: 0, or 1 for a model with `batch_first=False`.
        n: number of samples, by default that of the first tensor given.
        split: takes rows out of `(args, kwargs)`.
        place: moves the model to its devices.
    """
    torch.manual_seed(0)
    dtype = torch.float32 if view == "float32" else torch.float64
    model = make().to(dtype)
    args, kwargs = in_dtype((args, kwargs), dtype)
    if n is None:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        n = first.shape[batch_dim]
    want = expected(model, args, kwargs, n, batch_dim=batch_dim, loss=loss, split=split)
    assert any(grad.abs().max() > 1e-3 for grad in want.values()), "a test on zero gradients shows nothing"
    place(model)
    if view == "policy":
        found = policy_grads(model, args, kwargs, batch_dim=batch_dim, loss=loss)
        for name, grad in want.items():
            found.setdefault(name, torch.zeros_like(grad))
        assert_close(found, want, TOLERANCE[dtype])
        return
    wrapped = GradSampleModule(
        model,
        batch_first=batch_dim == 0,
        loss_reduction="mean" if view in ("float64", "float32") else "sum",
        force_functorch=view == "functorch",
    )
    if view == "empty":
        args, kwargs = split((args, kwargs), slice(0, 0), n, batch_dim)
        want = {name: grad[:0] for name, grad in want.items()}
    losses = loss(wrapped(*args, **kwargs), batch_dim)
    (losses.mean() if wrapped.loss_reduction == "mean" else losses.sum()).backward()
    assert_close(grad_samples(model), want, TOLERANCE[dtype])
