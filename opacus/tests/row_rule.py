"""Per-sample gradients from hooks of our own, for tests of layers: no part of the library under test is used.

Every parametrised submodule's calls are recorded; row i of each call's input and output gradient must belong to
sample i. The result is compared with a loop over samples, so a layer that reorders or mixes rows is found.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opacus.layers import SequenceBias


def grads_by_row(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Per-sample gradients `[B, *shape]` that follow from "dimension 0 of every inner call is the batch"."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []

    def hook_on(path: str) -> Callable[..., None]:
        def record(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            activations = args[0].detach()
            output.register_hook(lambda g: calls.append((path, layer, activations, g)))

        return record

    handles = [
        layer.register_forward_hook(hook_on(path))
        for path, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, SequenceBias))
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    found: dict[str, Tensor] = {}
    for path, layer, a, g in calls:
        pieces = {}
        if isinstance(layer, nn.Linear):
            pieces["weight"] = torch.einsum("b...p,b...d->bpd", g, a)
            if layer.bias is not None:
                pieces["bias"] = g.flatten(1, -2).sum(1) if g.dim() > 2 else g
        else:
            pieces["bias"] = g[:, -1]
        for name, piece in pieces.items():
            key = f"{path}.{name}"
            found[key] = found[key] + piece if key in found else piece
    return found


def grads_by_loop(model: nn.Module, losses: list[Callable[[], Tensor]]) -> dict[str, Tensor]:
    """Per-sample gradients, one backward for each sample; names as `named_parameters` of every owner gives them."""
    rows = []
    for loss in losses:
        model.zero_grad()
        loss().backward()
        rows.append(
            {
                f"{path}.{name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for path, layer in model.named_modules()
                if isinstance(layer, (nn.Linear, SequenceBias))
                for name, p in layer.named_parameters()
            }
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
