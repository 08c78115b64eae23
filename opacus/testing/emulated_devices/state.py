"""What is installed in this process: the device type's name, how many devices, which one is current.

One process has one emulated device type, as PyTorch has one slot for such types.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["State", "state"]


@dataclass
class State:
    """The emulated device type of this process.

    Attributes:
        name: the device type, ``"emu"`` unless chosen otherwise; None before `install`.
        count: number of devices.
        current: index that a device without an index stands for.
        generators: the default random stream of each device.
    """

    name: str | None = None
    count: int = 0
    current: int = 0
    generators: list[torch.Generator] = field(default_factory=list)

    def index(self, device: torch.device | str | int | None) -> int:
        """Index of `device`; the current one where it names none.

        Raises:
            RuntimeError: there is no device of that index.
        """
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            device = device.index
        index = self.current if device is None else device
        if not 0 <= index < self.count:
            raise RuntimeError(
                f"{self.name} error: invalid device ordinal {index}; there are {self.count} emulated devices. "
                "Call install with a larger n to have more."
            )
        return index

    def devices(self, n: int) -> list[torch.device]:
        """The first `n` devices."""
        return [torch.device(str(self.name), index) for index in range(n)]


state = State()
