"""The module PyTorch looks up as ``torch.emu``: what ``torch.cuda`` is to CUDA devices."""

from __future__ import annotations

import os
import socket
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opacus.testing.emulated_devices.state import state

__all__ = ["make_backend_module"]

_Device = torch.device | str | int | None


@contextmanager
def device(device: _Device) -> Iterator[None]:
    """Make `device` the current one inside the block."""
    saved, state.current = state.current, state.index(device)
    try:
        yield
    finally:
        state.current = saved


def set_device(device: _Device) -> None:
    """Make `device` the current one."""
    state.current = state.index(device)


def current_device() -> int:
    """Index of the current device."""
    return state.current


def device_count() -> int:
    """Number of emulated devices."""
    return state.count


def is_available() -> bool:
    """True: they are installed."""
    return True


def is_initialized() -> bool:
    """True: nothing is started lazily."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def get_device_properties(device: _Device = None) -> types.SimpleNamespace:
    """Name (of the model, as for GPUs) and `uuid` of `device`: that of an emulated device is the process's own, as its memory is."""
    index = state.index(device)
    return types.SimpleNamespace(name="emulated", uuid=f"EMU-{socket.gethostname()}-{os.getpid()}-{index}")


def synchronize(device: _Device = None) -> None:
    """Return at once: every op has finished when it returns."""


def empty_cache() -> None:
    """Return at once: memory is the host's."""


def manual_seed(seed: int) -> None:
    """Seed the default stream of the current device."""
    state.generators[state.current].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the default stream of every device; `torch.manual_seed` calls this."""
    for generator in state.generators:
        generator.manual_seed(seed)


def get_rng_state(device: _Device = None) -> Tensor:
    """State of the default stream of `device`."""
    return state.generators[state.index(device)].get_state()


def set_rng_state(new_state: Tensor, device: _Device = None) -> None:
    """Set the state of the default stream of `device`."""
    state.generators[state.index(device)].set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes autocast may be asked for. It is accepted, and casts nothing."""
    return [torch.bfloat16, torch.float16]


_FUNCTIONS: tuple[Any, ...] = (
    device,
    set_device,
    current_device,
    device_count,
    is_available,
    is_initialized,
    _is_in_bad_fork,
    get_device_properties,
    synchronize,
    empty_cache,
    manual_seed,
    manual_seed_all,
    get_rng_state,
    set_rng_state,
    get_amp_supported_dtype,
)


def make_backend_module(name: str) -> types.ModuleType:
    """A module ``torch.<name>`` with the functions above."""
    module = types.ModuleType(f"torch.{name}", f"Emulated devices of type '{name}'.")
    for function in _FUNCTIONS:
        setattr(module, function.__name__, function)
    return module
