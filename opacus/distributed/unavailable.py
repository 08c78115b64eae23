"""Names of the interface whose work over several processes is not in this version: they import, and refuse by name."""

from __future__ import annotations

from typing import NoReturn

from opacus.errors import ConfigurationError

__all__ = ["refuse"]


def refuse(name: str) -> NoReturn:
    """Raise for `name`.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"{name} is not available in this version",
        [
            "private training over several processes (data parallel, FSDP2, tensor parallel) is not implemented yet, and without it "
            "ranks would clip and noise wrongly. Train in one process; the model may span several devices there."
        ],
    )
