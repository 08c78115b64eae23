"""Small questions asked of an optimizer's parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

__all__ = ["all_params", "describe", "params"]


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
