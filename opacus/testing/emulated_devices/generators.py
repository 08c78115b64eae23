"""Random streams of emulated devices.

PyTorch offers no way to make a generator for a device type set up from Python. So `torch.Generator` is
replaced by the class below. Asked for a CPU generator it makes PyTorch's own object, no different from before.
Asked for ``emu:1`` it makes a CPU generator that reports ``emu:1``; the fallback kernel knows it again by the
address of its C++ part, because C++ hands kernels a new Python object each time.

The numbers drawn are those of a CPU generator with the same seed.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from opacus.testing.emulated_devices.state import state

__all__ = ["Generator", "emulated_generator", "keep_cpu_pickles", "using_default_stream"]

_RawGenerator: Any = torch._C.Generator  # Any: the type stubs know neither `_cdata` nor `__new__`
_by_address: weakref.WeakValueDictionary[int, Generator] = weakref.WeakValueDictionary()


class _AcceptsAnyGenerator(type(_RawGenerator)):  # type: ignore[misc]
    """``isinstance(g, torch.Generator)`` stays true for the generators PyTorch makes itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is Generator:
            return isinstance(instance, _RawGenerator)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is Generator:
            return issubclass(subclass, _RawGenerator)
        return super().__subclasscheck__(subclass)


class Generator(_RawGenerator, metaclass=_AcceptsAnyGenerator):
    """Stands in for `torch.Generator`.

    Args:
        device: as for `torch.Generator`. An emulated device without an index means the current one.

    Raises:
        RuntimeError: there is no emulated device of that index.
    """

    _device: torch.device

    def __new__(cls, device: torch.device | str | int | None = None) -> Any:
        if device is None:
            return _RawGenerator() if cls is Generator else super().__new__(cls)
        device = torch.device(device)
        if device.type != state.name:
            return _RawGenerator(device) if cls is Generator else super().__new__(cls, device)
        self = super().__new__(cls)
        self._device = torch.device(device.type, state.index(device))
        _by_address[self._cdata] = self
        return self

    @property
    def device(self) -> torch.device:
        """The device whose random numbers this stream draws."""
        return getattr(self, "_device", None) or super().device

    def clone_state(self) -> Generator:
        """A new stream on the same device that will draw the same numbers."""
        other = type(self)(self.device)
        other.set_state(self.get_state())
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        make, _, stream = super().__reduce__()
        return make, (self.device,), stream


def keep_cpu_pickles() -> None:
    """Copy and pickle CPU generators as PyTorch's own class, so that other processes can read them.

    PyTorch's C++ looks up `torch.Generator` by name for this, and would find the class above.
    """

    def reduce(generator: Any) -> tuple[Any, ...]:
        _, arguments, stream = generator.__reduce__()
        return _RawGenerator, arguments, stream

    copyreg.pickle(_RawGenerator, reduce)


def emulated_generator(generator: Any) -> Generator:
    """The emulated generator behind the object C++ handed to a kernel.

    Raises:
        RuntimeError: it is a generator of another device type.
    """
    found = _by_address.get(generator._cdata)
    if found is None:
        raise RuntimeError(
            f"Expected a '{state.name}' device type for generator but found '{generator.device.type}'"
        )
    return found


@contextmanager
def using_default_stream(index: int) -> Iterator[None]:
    """Let ops that take no generator (dropout) draw from the default stream of device `index`."""
    cpu_stream = torch.default_generator
    saved = cpu_stream.get_state()
    cpu_stream.set_state(state.generators[index].get_state())
    try:
        yield
    finally:
        state.generators[index].set_state(cpu_stream.get_state())
        cpu_stream.set_state(saved)
