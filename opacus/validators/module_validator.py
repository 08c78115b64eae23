"""Find the modules of a model that cannot be trained privately, and replace those that have a private twin.

What is wrong with a class, and what replaces it, stands in one file for each kind next to this one.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError

__all__ = ["ModuleValidator"]

logger = logging.getLogger(__name__)


class ModuleValidator:
    """Validation and repair of models, by the class of each submodule.

    Attributes:
        VALIDATORS: module class -> function that lists what is wrong with a module of it, or of a subclass.
        FIXERS: module class -> function that returns the replacement of a module of exactly that class.
    """

    VALIDATORS: ClassVar[dict[type[nn.Module], Callable[[Any], list[UnsupportedModuleError]]]] = {}
    FIXERS: ClassVar[dict[type[nn.Module], Callable[..., nn.Module]]] = {}

    @classmethod
    def layer_errors(cls, module: nn.Module) -> list[UnsupportedModuleError]:
        """List every layer in `module` that cannot be trained privately, as it is now.

        The answer depends on what is frozen and which modules are in `eval()`. Ask again after changing either.

        Args:
            module: the model.

        Returns:
            One error for each problem, whose message begins with the submodule's path; empty for a valid model.
        """
        errors = []
        for path, submodule in module.named_modules():
            validator = _for_class(cls.VALIDATORS, type(submodule))
            for error in validator(submodule) if validator else []:
                where = f"{path!r}" if path else "the model itself"
                error.args = (f"{where} ({type(submodule).__name__}): {error}",)
                errors.append(error)
        return errors

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """List everything in `module` that cannot be trained privately, or that tells a model not meant to be trained.

        A model in `eval()` is reported, as Opacus does, since it trains without dropout; `PrivacyEngine` does train it.

        Args:
            module: the model.
            strict: raise instead of returning errors.

        Returns:
            What `layer_errors` finds, and an error for a model in `eval()`.

        Raises:
            UnsupportedModuleError: with `strict`, if there is any error; its `args[0]` is the list.

        Example:
            >>> print(*ModuleValidator.validate(nn.Sequential(nn.Linear(2, 2), nn.RNN(2, 3))))
            '1' (RNN): its fused kernels hide the gradient of each sample. Use opacus.layers.DPRNN, ...
        """
        errors = cls.layer_errors(module)
        if not module.training:
            errors.append(
                IllegalModuleConfigurationError(
                    "the model is in eval() mode: call train() to train it with dropout"
                )
            )
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether `validate` finds nothing.

        Example:
            >>> ModuleValidator.is_valid(nn.Linear(2, 2)), ModuleValidator.is_valid(nn.BatchNorm1d(2))
            (True, False)
        """
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """Return a copy of `module` in which refused modules are replaced by their private twins.

        Values, devices, dtypes, `requires_grad` and the training flag are kept; a module used at several places,
        and a parameter of several modules, stay one. What has no twin is left, for `validate` to name.
        Build the optimizer after this: the copy has parameters of its own.

        Args:
            module: the model; it is not changed.
            **kwargs: options, each passed to the fixers that take it. `replace_bn_with_in=True` replaces
                BatchNorm by InstanceNorm instead of GroupNorm; `num_groups=4` chooses GroupNorm's groups.

        Returns:
            The copy; another class than `module` where `module` itself is replaced.

        Example:
            >>> ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()))[0].num_groups
            2
        """
        return _fixed(cls, copy.deepcopy(module), kwargs, {})

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **kwargs: Any) -> nn.Module:
        """`fix`, then `validate(strict=True)`.

        Raises:
            UnsupportedModuleError: something in `module` has no private twin.
        """
        fixed = cls.fix(module, **kwargs)
        errors = cls.layer_errors(fixed)
        if errors:
            raise UnsupportedModuleError(errors)
        return fixed


def _for_class(table: dict[type[nn.Module], Callable[..., Any]], kind: type) -> Callable[..., Any] | None:
    return next((table[base] for base in kind.__mro__ if base in table), None)


def _fixed(
    validator_class: type[ModuleValidator],
    module: nn.Module,
    options: dict[str, Any],
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module in done:
        return done[module]
    fixer = validator_class.FIXERS.get(type(module))
    validator = _for_class(validator_class.VALIDATORS, type(module))
    replacement = module
    if fixer is not None and (validator is None or validator(module)):
        replacement = fixer(module, **_accepted(fixer, options))
        logger.info("Replaced sub_module %s with %s", type(module).__name__, type(replacement).__name__)
        replacement.train(module.training)
    done[module] = done[replacement] = replacement
    for name, child in list(replacement._modules.items()):
        if child is not None:
            replacement.add_module(name, _fixed(validator_class, child, options, done))
    return replacement


def _accepted(fixer: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(fixer).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in options.items() if name in names}
