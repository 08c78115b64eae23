"""Decorators that tell a validator what to do with a module class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from opacus.validators.module_validator import ModuleValidator

__all__ = ["register_module_fixer", "register_module_validator"]

Function = TypeVar("Function", bound=Callable[..., Any])
Target = type[nn.Module] | Sequence[type[nn.Module]]


def register_module_validator(
    target_class_or_classes: Target, validator_class: type[ModuleValidator] = ModuleValidator
) -> Callable[[Function], Function]:
    """Register a function `(module) -> list of errors` for modules of the given class or classes.

    Subclasses are covered too, unless they have an entry of their own.

    Args:
        target_class_or_classes: one `nn.Module` class, or several.
        validator_class: whose table `VALIDATORS` takes the function.

    Example:
        >>> class Spy(nn.Module): ...
        >>> @register_module_validator(Spy)
        ... def refuse(module):
        ...     return [UnsupportedModuleError("it looks at other samples")]
        >>> from opacus.validators.errors import UnsupportedModuleError
        >>> print(*ModuleValidator.validate(nn.Sequential(Spy())))
        '0' (Spy): it looks at other samples
        >>> _ = ModuleValidator.VALIDATORS.pop(Spy)
    """
    return _register(validator_class.VALIDATORS, target_class_or_classes)


def register_module_fixer(
    target_class_or_classes: Target, validator_class: type[ModuleValidator] = ModuleValidator
) -> Callable[[Function], Function]:
    """Register a function `(module, **options) -> module` that gives the private replacement.

    It is applied to modules of exactly the given class or classes: a subclass may do more than the replacement.

    Args:
        target_class_or_classes: one `nn.Module` class, or several.
        validator_class: whose table `FIXERS` takes the function.
    """
    return _register(validator_class.FIXERS, target_class_or_classes)


def _register(
    table: dict[type[nn.Module], Callable[..., Any]], target: Target
) -> Callable[[Function], Function]:
    classes = [target] if isinstance(target, type) else list(target)

    def register(function: Function) -> Function:
        table.update(dict.fromkeys(classes, function))
        return function

    return register
