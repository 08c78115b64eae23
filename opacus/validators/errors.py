"""Errors that say why a module cannot be trained with differential privacy as it is."""

from __future__ import annotations

__all__ = [
    "IllegalModuleConfigurationError",
    "NotYetSupportedModuleError",
    "ShouldReplaceModuleError",
    "UnsupportableModuleError",
    "UnsupportedError",
    "UnsupportedModuleError",
]


class UnsupportedError(ValueError):
    """Something in the model, or around it, cannot be part of private training."""


class UnsupportedModuleError(UnsupportedError):
    """A module cannot be trained privately; `args[0]` is one message, or a list of errors from `validate`."""

    def __str__(self) -> str:
        errors = self.args[0] if self.args else ""
        if not isinstance(errors, list):
            return super().__str__()
        count = "1 module" if len(errors) == 1 else f"{len(errors)} modules"
        return f"{count} cannot be trained privately:" + "".join(f"\n  - {error}" for error in errors)


class ShouldReplaceModuleError(UnsupportedModuleError):
    """Another module does the same and is safe; the message names it."""


class IllegalModuleConfigurationError(UnsupportedModuleError):
    """The module is safe with other arguments; the message names them."""


class UnsupportableModuleError(UnsupportedModuleError):
    """The module does something that cannot be made private."""


class NotYetSupportedModuleError(UnsupportedModuleError):
    """The module could be made private; nobody has written it yet."""
