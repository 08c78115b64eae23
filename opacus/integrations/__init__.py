"""Other libraries' models and trainers: what of them has to be known for private training.

The core asks here about a model; what is found out about a library is in the file that bears its name, which is imported only
where the library itself is in use. Nothing in the core names a library.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Protocol

from torch import nn

__all__ = ["Handle", "adapt", "findings", "met"]

_LIBRARIES = {
    "peft": "opacus.integrations.peft",
    "bitsandbytes": "opacus.integrations.quantized",
    "torchao": "opacus.integrations.quantized",
}


class Handle(Protocol):
    """Something that was put in place and can be taken away."""

    def remove(self) -> None:
        """Take it away."""


def met() -> list[ModuleType]:
    """Our modules for the libraries that this process has imported."""
    wanted = dict.fromkeys(ours for theirs, ours in _LIBRARIES.items() if theirs in sys.modules)
    return [importlib.import_module(ours) for ours in wanted]


def findings(model: nn.Module) -> list[str]:
    """Problems that only who knows the library can name, a sentence each."""
    return [problem for ours in met() for problem in ours.findings(model)]


def adapt(model: nn.Module) -> list[Any]:
    """Make `model` run with one row per sample where its library would broadcast later.

    Returns:
        Handles that undo it.
    """
    return [handle for ours in met() for handle in ours.adapt(model)]
