"""Putting the pieces in place, once per process."""

from __future__ import annotations

import threading
from typing import Any

import torch

from opacus.errors import raise_if_any
from opacus.testing.emulated_devices.state import state
from opacus.testing.emulated_devices.support import raise_if_unsupported

__all__ = ["install", "is_installed"]

MAX_DEVICES = 64
_lock = threading.Lock()
# A Library takes its kernels away when it is collected.
_libraries: list[torch.library.Library] = []


def is_installed() -> bool:
    """Whether emulated devices exist in this process."""
    return state.name is not None


def install(n: int = 2, name: str = "emu") -> list[torch.device]:
    """Make `n` emulated devices ``emu:0`` to ``emu:{n-1}`` on a machine that has only a CPU.

    They behave as GPUs do where it matters for code that spans several: tensors live on one device, ops across
    devices are refused, copies are explicit and counted (`count_copies`), each device has its own generators.
    Numbers are those of the CPU. See the package's documentation for what is not emulated.

    For the whole process and for good; calling again is cheap, returns the same devices, and can raise `n`.
    PyTorch's work on the CPU stays as it was.

    Args:
        n: number of devices, 1 to 64.
        name: their device type: a lower-case identifier that is not yet a name in `torch`.

    Returns:
        The devices, `n` of them.

    Raises:
        ConfigurationError: `n` or `name` is unusable, or devices of another name are installed.
        EmulationUnsupported: they cannot work in this process; the message lists every reason. Nothing was
            changed.

    Example:
        >>> import torch
        >>> from opacus.testing.emulated_devices import install
        >>> first, second = install(2)
        >>> a, b = torch.ones(3, device=first), torch.ones(3, device=second)
        >>> a.to(second) + b
        tensor([2., 2., 2.], device='emu:1')
        >>> a + b  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        RuntimeError: Expected all tensors to be on the same device, but found at least two devices, emu:0 and ...
    """
    with _lock:
        raise_if_any("emulated devices cannot be installed", _argument_problems(n, name))
        if state.name is None:
            raise_if_unsupported()
            _install_device_type(name)
        _grow(n)
    return state.devices(n)


def _argument_problems(n: Any, name: Any) -> list[str]:
    problems = []
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_DEVICES:
        problems.append(f"n is {n!r}; pass a number of devices from 1 to {MAX_DEVICES}.")
    if state.name is not None:
        if name != state.name:
            problems.append(
                f"name is {name!r}, but devices named '{state.name}' are installed, and a process has one kind. "
                f"Pass name='{state.name}'."
            )
    elif not isinstance(name, str) or not name.isidentifier() or name != name.lower():
        problems.append(f"name is {name!r}; pass a lower-case identifier such as 'emu'.")
    elif hasattr(torch, name) or hasattr(torch.Tensor, name) or hasattr(torch.nn.Module, name):
        problems.append(f"name is {name!r}, which already means something in torch. Choose another.")
    return problems


def _install_device_type(name: str) -> None:
    # These modules use private parts of torch as they are loaded, so they wait until the checks have passed.
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from opacus.testing.emulated_devices import patches
    from opacus.testing.emulated_devices.backend import make_backend_module

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    libraries = _kernel_libraries()
    _setup_privateuseone_for_python_backend(name, make_backend_module(name), None, Guard())
    state.name = name
    patches.apply()
    _libraries.extend(libraries)


def _kernel_libraries() -> list[torch.library.Library]:
    from opacus.testing.emulated_devices.fallback import fallback
    from opacus.testing.emulated_devices.kernels import (
        EXPLICIT,
        METADATA_ONLY,
        THROUGH_AUTOGRAD,
        metadata_kernel,
    )

    every_op = torch.library.Library("_", "IMPL")
    every_op.fallback(fallback, "PrivateUse1")
    every_op.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # accepted, casts nothing

    aten = torch.library.Library("aten", "IMPL")
    for op, kernel in EXPLICIT.items():
        aten.impl(op, kernel, "PrivateUse1")
    for op, kernel in THROUGH_AUTOGRAD.items():
        aten.impl(op, kernel, "PrivateUse1")
        aten.impl(op, kernel, "AutogradPrivateUse1")
    for op in METADATA_ONLY:
        aten.impl(op, metadata_kernel(op), "PrivateUse1")
    # The fallbacks of these keys resolve the bit by a copy, which would come back here without end.
    for key in ("Conjugate", "Negative"):
        aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
    return [every_op, aten]


def _grow(n: int) -> None:
    from opacus.testing.emulated_devices.generators import Generator

    state.count = max(n, state.count)
    while len(state.generators) < state.count:
        state.generators.append(Generator(torch.device(str(state.name), len(state.generators))))
