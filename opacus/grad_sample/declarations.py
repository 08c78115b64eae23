"""What layers of other libraries are, where it cannot be read off them; said by `opacus.integrations`.

Classes are known by name, so that no library is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["declare", "draws_in_vain", "has_constant_buffers", "is_part_of_parent"]

_part_of_parent: set[tuple[str, str]] = set()
_constant_buffers: set[tuple[str, str]] = set()
_draws_in_vain: dict[tuple[str, str], Callable[[Any], bool]] = {}


def declare(
    module: str,
    *names: str,
    part_of_parent: bool = False,
    constant_buffers: bool = False,
    draws_in_vain: Callable[[Any], bool] | None = None,
) -> None:
    """Say what the classes `names` of the Python module `module` are.

    Args:
        module: where the classes are defined.
        names: of the classes; subclasses have to be declared themselves.
        part_of_parent: its forward has outputs that are no rows of samples, which the module above multiplies with rows:
            its parameters belong to that module's call.
        constant_buffers: no forward writes to its buffers.
        draws_in_vain: whether the random numbers that a layer's forward draws do not change its output (a dropout of rate 0).
    """
    classes = {(module, name) for name in names}
    if part_of_parent:
        _part_of_parent.update(classes)
    if constant_buffers:
        _constant_buffers.update(classes)
    if draws_in_vain is not None:
        _draws_in_vain.update(dict.fromkeys(classes, draws_in_vain))


def is_part_of_parent(module: nn.Module) -> bool:
    """Whether `module`'s parameters are used by the call of the module above it."""
    return _name(module) in _part_of_parent


def has_constant_buffers(module: nn.Module) -> bool:
    """Whether what a forward reads from `module`'s buffers was never written by an earlier one."""
    return _name(module) in _constant_buffers


def draws_in_vain(module: nn.Module) -> bool:
    """Whether `module`'s forward can be repeated although it draws random numbers."""
    in_vain = _draws_in_vain.get(_name(module))
    return in_vain is not None and in_vain(module)


def _name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__
