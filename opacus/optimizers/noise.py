"""Gaussian noise for a clipped sum: seeded streams for ordinary runs, the operating system's entropy for secure ones."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["SecureNoise"]


class SecureNoise:
    """Noise from the operating system's cryptographic generator, on any device.

    Each value is the sum of four independent Gaussians over two (standard deviation unchanged), so that the gaps
    of floating-point sampling cannot be used to tell which outputs are impossible (Holohan and Braghin, 2021).
    Values are made on the CPU in float64 and copied to the parameter's device.

    Formal guarantee:
        Values are independent N(0, std^2) up to float64 rounding; there is no seed, so no run can be repeated.
    """

    def normal(self, shape: Sequence[int], std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent draws from N(0, std^2), a tensor of `shape` on `device`."""
        n = math.prod(shape)
        total = np.zeros(n)
        for _ in range(4):
            total += _box_muller(n)
        return torch.from_numpy(total * (std / 2)).to(dtype).view(tuple(shape)).to(device)

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing: there is no state to repeat."""
        return {}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Accepts and ignores what `state_dict` of another stream saved."""


def _box_muller(n: int) -> np.ndarray:
    half = (n + 1) // 2
    bits = np.frombuffer(os.urandom(16 * half), dtype=np.uint64).reshape(2, half)
    u, v = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-u))  # 1 - u lies in (0, 1]
    return np.concatenate([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)])[:n]
