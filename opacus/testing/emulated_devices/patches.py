"""The few places where PyTorch itself has to be taught that a Python-made device type has several devices.

Each patch leaves CPU work as it was, and says which gap it closes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.testing.emulated_devices.generators import Generator, keep_cpu_pickles
from opacus.testing.emulated_devices.state import state

__all__ = ["apply"]


def apply() -> None:
    """Patch PyTorch, for the life of the process."""
    torch.Generator = Generator  # type: ignore[misc]
    keep_cpu_pickles()
    _run_backward_on_the_calling_thread()
    _make_storages_on_emulated_devices()
    _let_parameters_change_device_type()
    _take_host_memory_as_pinned()


def _run_backward_on_the_calling_thread() -> None:
    """Autograd starts one thread per device that C++ counts, and C++ counts one; a second would be an assert."""
    run = torch.autograd.graph._engine_run_backward

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = _engine_run_backward
    torch.autograd._engine_run_backward = _engine_run_backward


def _make_storages_on_emulated_devices() -> None:
    """``UntypedStorage(n, device="emu:1")`` would dereference a null allocator. deepcopy and torch.load use it."""
    make = torch.UntypedStorage.__new__

    def new_storage(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != state.name:
            return make(cls, *args, **kwargs)
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new_storage  # type: ignore[method-assign]


def _let_parameters_change_device_type() -> None:
    """``layer.to("emu:1")`` keeps each Parameter object, as it does for a GPU: optimizers hold on to it."""
    compatible = torch._has_compatible_shallow_copy_type
    data: Any = torch._C.TensorBase.data  # a descriptor, whatever the type stubs say

    # Parameter names are part of the contract: torch._dynamo compares the signature.
    def _has_compatible_shallow_copy_type(input: Tensor, from_: Tensor) -> bool:
        return compatible(input, from_) or _changes_device_type(input, from_)

    def set_data(self: Tensor, value: Tensor) -> None:
        if not _changes_device_type(self, value):
            data.__set__(self, value)
            return
        attributes = dict(self.__dict__)
        self.grad = None
        moved = torch.nn.Parameter(value.detach(), self.requires_grad)
        torch.utils.swap_tensors(self, moved)
        self.__dict__.update(attributes)

    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type
    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]


def _changes_device_type(parameter: Tensor, value: Tensor) -> bool:
    return (
        isinstance(parameter, torch.nn.Parameter)
        and isinstance(value, Tensor)
        and {parameter.device.type, value.device.type} == {"cpu", state.name}
    )


def _take_host_memory_as_pinned() -> None:
    """``DataLoader(pin_memory=True)`` pins as soon as there is an accelerator, and ours has no pinned memory."""

    def pin_memory(self: Tensor, device: torch.device | None = None) -> Tensor:
        return self

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
