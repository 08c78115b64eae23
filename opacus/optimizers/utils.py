"""Small questions asked of an optimizer's parameters, and of tensors kept for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["alike", "all_params", "describe", "params"]


def all_params(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups, frozen ones too, in the optimizer's order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def params(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of all groups that require grad, in the optimizer's order."""
    return [p for p in all_params(optimizer) if p.requires_grad]


def describe(optimizer: Optimizer, parameter: nn.Parameter) -> str:
    """How to name a parameter to a person: its name where known, else its place in the optimizer and its shape."""
    names = getattr(optimizer, "param_names", None) or {}
    if id(parameter) in names:
        return names[id(parameter)]
    for i, group in enumerate(optimizer.param_groups):
        for j, candidate in enumerate(group["params"]):
            if candidate is parameter:
                return f"parameter {j} of group {i}, shape {tuple(parameter.shape)}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def alike(*lists: Sequence[Any]) -> list[tuple[list[Tensor], ...]]:
    """Split lists of tensors, in parallel, by device and dtype of the first list's: what one `foreach` call takes."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for entry in zip(*lists, strict=True):
        groups.setdefault((entry[0].device, entry[0].dtype), []).append(entry)
    return [tuple(map(list, zip(*group, strict=True))) for group in groups.values()]
