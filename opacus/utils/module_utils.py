"""Questions about modules: which have parameters, which of those train, are two states equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "are_state_dict_equal",
    "clone_module",
    "get_submodule",
    "has_trainable_params",
    "parametrized_modules",
    "requires_grad",
    "trainable_modules",
    "trainable_parameters",
]


def has_trainable_params(module: nn.Module) -> bool:
    """Whether the module itself (not its children) owns a parameter that requires grad.

    Example:
        >>> has_trainable_params(nn.Linear(2, 2)), has_trainable_params(nn.Sequential(nn.Linear(2, 2)))
        (True, False)
    """
    return requires_grad(module, recurse=False)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Whether any parameter requires grad.

    Args:
        module: the module asked about.
        recurse: whether its children's parameters count too.
    """
    return any(parameter.requires_grad for parameter in module.parameters(recurse=recurse))


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every submodule, `module` included, that itself owns a parameter, trained or not."""
    for name, submodule in module.named_modules():
        if next(submodule.parameters(recurse=False), None) is not None:
            yield name, submodule


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every submodule, `module` included, that itself owns a parameter that requires grad."""
    for name, submodule in module.named_modules():
        if has_trainable_params(submodule):
            yield name, submodule


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of everything in the module that requires grad; tied parameters once."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def clone_module(module: nn.Module) -> nn.Module:
    """Copy a module with its parameters, buffers, devices, training flag and `requires_grad`; nothing is shared."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Find a submodule by its dotted name; the empty name is the module itself.

    Raises:
        AttributeError: naming the part of `target` that does not exist or is no module.
    """
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Any], sd2: Mapping[str, Any]) -> bool:
    """Whether two state dicts have the same keys and, key by key, the same shapes and values.

    Tensors are compared as `torch.allclose` does, wherever they are; NaN equals NaN. Other values must be equal.

    Args:
        sd1: one state dict.
        sd2: the other.

    Example:
        >>> are_state_dict_equal({"a": torch.ones(2)}, {"a": torch.ones(3)})
        False
    """
    return sd1.keys() == sd2.keys() and all(_equal(value, sd2[key]) for key, value in sd1.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return False
    if not isinstance(one, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other.to(one.device), equal_nan=True)
