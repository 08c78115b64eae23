"""Small tables for the GPU without waiting: pinned memory that is written round and round.

A copy from ordinary memory waits for what the GPU was told before, and fresh pinned memory has to be allocated as long as
earlier copies are on their way. A ring is written ahead of them, and looks back once each half.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Ring", "ring_on"]

_ENTRIES = 2**15


class Ring:
    """Pinned memory for tables that one stream reads.

    Args:
        device: where tables go.
        entries: int64 numbers in both halves together.
        event: makes a marker with `record` (behind the copies so far, on the current stream) and `synchronize`.
    """

    def __init__(
        self, device: torch.device, entries: int = _ENTRIES, event: Callable[[], Any] | None = None
    ) -> None:
        self.device = device
        self.half = entries // 2
        self.host = torch.empty(2 * self.half, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._written = self.host.numpy()
        self._event: Callable[[], Any] = torch.cuda.Event if event is None else event
        self._half, self._at = 0, 0
        self._copied: list[Any] = [None, None]  # for each half: behind the last copy out of it
        self._lock = threading.Lock()

    def send(self, numbers: Sequence[int]) -> Tensor:
        """`numbers` on the device, `[n]`, int64."""
        n = len(numbers)
        if n > self.half:
            return torch.tensor(numbers, dtype=torch.int64).to(self.device)
        with self._lock:
            now = self._half
            if self._at + n > (now + 1) * self.half:
                self._copied[now] = self._event()
                self._copied[now].record()
                now = self._half = 1 - now
                self._at = now * self.half
                if self._copied[now] is not None:
                    self._copied[now].synchronize()
            begin, self._at = self._at, self._at + n
            self._written[begin : self._at] = numbers
            return self.host[begin : self._at].to(self.device, non_blocking=True)


_rings: dict[tuple[torch.device, int], Ring] = {}


def ring_on(device: torch.device) -> Ring:
    """The ring of `device`'s current stream."""
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    ring = _rings.get(key)
    if ring is None:
        ring = _rings.setdefault(key, Ring(device))
    return ring
