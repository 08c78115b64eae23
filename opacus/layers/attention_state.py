"""State dicts of attention: this library's names and those of `nn.MultiheadAttention`.

torch stacks the three input projections where keys and values have the queries' size (`in_proj_weight`), keeps
three weights where not (`q_proj_weight`, ...), and stacks their biases always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["from_torch_names", "to_torch_names"]

_INPUTS = ("q", "k", "v")


def to_torch_names(state: dict[str, Any], prefix: str, packed: bool) -> None:
    """Rename one attention layer's entries in `state`, in place and in torch's order.

    Args:
        state: state dict that holds the layer's entries under `prefix`, by its own names.
        prefix: of the layer, with its dot.
        packed: whether torch would keep the three weights in one tensor.
    """
    weights = [state.pop(f"{prefix}{name}linear.weight") for name in _INPUTS]
    biases = [state.pop(f"{prefix}{name}linear.bias", None) for name in _INPUTS]
    appended = [state.pop(f"{prefix}seq_bias_{name}.bias", None) for name in ("k", "v")]
    last = {
        key: state.pop(key) for key in (f"{prefix}out_proj.weight", f"{prefix}out_proj.bias") if key in state
    }
    if packed:
        state[f"{prefix}in_proj_weight"] = torch.cat(weights)
    else:
        state.update({f"{prefix}{name}_proj_weight": w for name, w in zip(_INPUTS, weights, strict=True)})
    if biases[0] is not None:
        state[f"{prefix}in_proj_bias"] = torch.cat(biases)
    for name, vector in zip(("k", "v"), appended, strict=True):
        if vector is not None:
            state[f"{prefix}bias_{name}"] = vector.reshape(1, 1, -1)
    state.update(last)


def from_torch_names(state: dict[str, Tensor], prefix: str) -> None:
    """Replace torch's entries under `prefix` in `state` by this library's, in place; others are left alone."""
    for kind in ("weight", "bias"):
        stacked = state.pop(f"{prefix}in_proj_{kind}", None)
        if stacked is not None:
            parts = stacked.chunk(3)
            state.update({f"{prefix}{n}linear.{kind}": p for n, p in zip(_INPUTS, parts, strict=True)})
    for name in _INPUTS:
        _move(state, f"{prefix}{name}_proj_weight", f"{prefix}{name}linear.weight")
    for name in ("k", "v"):
        _move(state, f"{prefix}bias_{name}", f"{prefix}seq_bias_{name}.bias")
        vector = state.get(f"{prefix}seq_bias_{name}.bias")
        if vector is not None:
            state[f"{prefix}seq_bias_{name}.bias"] = vector.reshape(-1)


def _move(state: dict[str, Tensor], old: str, new: str) -> None:
    if old in state:
        state[new] = state.pop(old)
