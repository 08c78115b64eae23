"""Named device layouts, so that one test runs on all of them.

``"one"``, ``"two"`` and ``"four"`` are that many devices of one kind: real GPUs where the machine has enough of
them, emulated devices where it has none. ``"device+cpu"`` is one such device together with the CPU.
"""

from __future__ import annotations

import torch

from opacus.errors import ConfigurationError
from opacus.testing.emulated_devices import EmulationUnsupported, install

__all__ = ["LAYOUTS", "accelerators", "devices_for"]

LAYOUTS: tuple[str, ...] = ("one", "two", "four", "device+cpu")

_ACCELERATORS = {"one": 1, "two": 2, "four": 4, "device+cpu": 1}


def accelerators(n: int) -> list[torch.device]:
    """`n` devices of one kind: CUDA devices where there are any, else emulated ones (installed on first use).

    Args:
        n: how many, at least 1.

    Returns:
        ``[cuda:0, ...]`` or ``[emu:0, ...]``, `n` of them.

    Raises:
        EmulationUnsupported: the process sees CUDA devices, but fewer than `n`, or devices cannot be emulated.

    Example:
        >>> first, second = accelerators(2)
        >>> first == second
        False
    """
    present = torch.cuda.device_count()
    if not present:
        return install(n)
    if present < n:
        raise EmulationUnsupported(
            f"{n} devices are wanted",
            [
                f"this process sees {present} CUDA device(s); CUDA and emulated devices do not share a process. "
                "Run on a machine with more, or hide them with CUDA_VISIBLE_DEVICES=''."
            ],
        )
    return [torch.device("cuda", index) for index in range(n)]


def devices_for(name: str) -> list[torch.device]:
    """The devices of a layout, in the order in which a model's layers are to be placed.

    Args:
        name: one of `LAYOUTS`.

    Returns:
        One, two or four devices of one kind; for ``"device+cpu"`` a device and the CPU.

    Raises:
        ConfigurationError: `name` is none of `LAYOUTS`.
        EmulationUnsupported: as for `accelerators`.

    Example:
        >>> len(devices_for("four"))
        4
        >>> devices_for("device+cpu")[1]
        device(type='cpu')
    """
    if name not in _ACCELERATORS:
        raise ConfigurationError(
            "no devices for this layout", [f"name is {name!r}; choose one of {', '.join(LAYOUTS)}."]
        )
    devices = accelerators(_ACCELERATORS[name])
    return [*devices, torch.device("cpu")] if name == "device+cpu" else devices
