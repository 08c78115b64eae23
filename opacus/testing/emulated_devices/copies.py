"""Counting what crosses a device boundary: copies, and moments when the host waits for a device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opacus.testing.emulated_devices.state import state

__all__ = ["KINDS", "Copy", "count_copies", "record"]

KINDS = ("cross", "h2d", "d2h", "sync", "implicit")


class Copy(NamedTuple):
    """One transfer.

    Attributes:
        src: device it left, e.g. ``"emu:0"``.
        dst: device it reached.
        shape: shape of the tensor.
        dtype: dtype of the tensor at the source.
        nbytes: size in bytes at the source.
        kind: one of ``"cross"``, ``"h2d"``, ``"d2h"``, ``"sync"``, ``"implicit"``.
    """

    src: str
    dst: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    kind: str


_open_counters: list[list[Copy]] = []


class count_copies:
    """Count the copies between devices, and the host's waits, inside a ``with`` block.

    Every thread is counted. Counters nest: each sees all that happens while it is open. After the block the
    numbers stay readable.

    Attributes:
        copies: the `Copy` records, in order.
        cross: number of copies from one emulated device to another.
        h2d: copies from the CPU to an emulated device.
        d2h: copies from an emulated device to the CPU.
        sync: other waits of the host for a device: ``.item()``, ``bool(tensor)``, ``torch.equal``, and results
            whose shape depends on values: ``nonzero``, ``masked_select``, ``unique``, reading by a boolean
            index, writing several values by one. Copies to the CPU wait too, and count as `d2h`.
        implicit: CPU scalars handed to an op on an emulated device, and CPU indices handed to one to write by.
            Reading by a CPU index copies it first, and counts as `h2d`.

    Raises:
        RuntimeError: on entry, if no emulated device is installed: all counts would be zero, and a test that
            asserts a bound could not fail.

    Example:
        >>> import torch
        >>> from opacus.testing.emulated_devices import count_copies, install
        >>> first, second = install(2)
        >>> norms = torch.ones(64, device=first)
        >>> with count_copies() as seen:
        ...     total = norms.to(second).sum()
        >>> seen.cross, seen.sync
        (1, 0)
        >>> seen.shapes("cross")
        [(64,)]
    """

    def __init__(self) -> None:
        self.copies: list[Copy] = []

    def __enter__(self) -> count_copies:
        if state.name is None:
            raise RuntimeError(
                "count_copies sees copies between emulated devices only, and none is installed. Call "
                "opacus.testing.emulated_devices.install() first; on real GPUs use a profiler."
            )
        self.copies = []
        _open_counters.append(self.copies)
        return self

    def __exit__(self, *exc: Any) -> None:
        # By identity: two counters that saw the same copies are equal lists.
        _open_counters[:] = [copies for copies in _open_counters if copies is not self.copies]

    def of(self, kind: str) -> list[Copy]:
        """The records of one kind.

        Raises:
            ValueError: `kind` is none of `KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"kind '{kind}' is unknown; choose one of {', '.join(KINDS)}")
        return [copy for copy in self.copies if copy.kind == kind]

    def shapes(self, kind: str) -> list[tuple[int, ...]]:
        """The shapes of what was transferred, for one kind, in order."""
        return [copy.shape for copy in self.of(kind)]

    @property
    def cross(self) -> int:
        """Number of copies from one emulated device to another."""
        return len(self.of("cross"))

    @property
    def h2d(self) -> int:
        """Number of copies from the CPU to an emulated device."""
        return len(self.of("h2d"))

    @property
    def d2h(self) -> int:
        """Number of copies from an emulated device to the CPU."""
        return len(self.of("d2h"))

    @property
    def sync(self) -> int:
        """Number of waits of the host for a value or a shape."""
        return len(self.of("sync"))

    @property
    def implicit(self) -> int:
        """Number of CPU scalars and CPU indices handed to an op on an emulated device."""
        return len(self.of("implicit"))


def record(src: object, dst: object, tensor: Tensor, kind: str) -> None:
    """Tell every open counter about a transfer of `tensor`."""
    if not _open_counters:
        return
    nbytes = tensor.numel() * tensor.element_size()
    copy = Copy(str(src), str(dst), tuple(tensor.shape), tensor.dtype, nbytes, kind)
    for copies in _open_counters:
        copies.append(copy)
