"""Collectives between processes on tensors of emulated devices: gloo, over the same memory seen from the host.

PyTorch sends every collective through its dispatcher, by the device of the tensors. For emulated devices the kernels here
take over: they relabel the tensors to the host, in place, and send the collective on; the group's CPU backend does the work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opacus.errors import ConfigurationError
from opacus.testing.emulated_devices.relabel import to_host
from opacus.testing.emulated_devices.state import state

__all__ = ["register_gloo"]

_libraries: list[torch.library.Library] = []  # a Library takes its kernels away when it is collected


def register_gloo() -> None:
    """Let gloo serve emulated devices: `init_process_group("gloo")` then makes groups that reduce their tensors too.

    For the whole process and for good; calling again does nothing. Every rank calls it before it makes a group.

    Raises:
        ConfigurationError: no devices are emulated in this process, or torch was built without gloo.

    Example:
        >>> from opacus.testing.emulated_devices import install, register_gloo
        >>> _ = install(2)
        >>> register_gloo()
        >>> "emu" in torch.distributed.Backend.backend_capability["gloo"]
        True
    """
    if state.name is None:
        raise ConfigurationError(
            "collectives cannot be emulated", ["there are no emulated devices: install some."]
        )
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ConfigurationError("collectives cannot be emulated", ["this torch was built without gloo."])
    if _libraries:
        return
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*[Oo]verrid"
        )  # torch has kernels there: no backend stands behind
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "PrivateUse1"
            ):
                base, _, overload = name.removeprefix("c10d::").partition(".")
                op = getattr(getattr(torch.ops.c10d, base), overload or "default")
                library.impl(op, _on_host(op), "PrivateUse1", allow_override=True)
    _libraries.append(library)
    backend = torch.distributed.Backend
    backend.backend_capability["gloo"].append(state.name)
    backend.default_device_backend_map[state.name] = "gloo"


def _on_host(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        originals: dict[int, tuple[Tensor, Tensor]] = {}  # of what the host sees, kept alive

        def relabelled(tensor: Tensor) -> Tensor:
            if tensor.device.type != state.name:
                return tensor
            seen = to_host(tensor)
            originals[id(seen)] = (seen, tensor)
            return seen

        def restored(tensor: Tensor) -> Tensor:
            return originals[id(tensor)][1] if id(tensor) in originals else tensor

        return _mapped(restored, op(*_mapped(relabelled, args), **_mapped(relabelled, kwargs)))

    return kernel


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return value
