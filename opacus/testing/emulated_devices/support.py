"""Can devices be emulated here?  Asked, and answered in full, before anything is patched.

The emulation leans on parts of PyTorch that are not public. This is the one place that names them,
so that a PyTorch which lacks one is refused with that name instead of failing halfway.
"""

from __future__ import annotations

import sys

import torch

from opacus.errors import ConfigurationError, raise_if_any
from opacus.testing.emulated_devices.state import state

__all__ = ["EmulationUnsupported", "is_supported", "raise_if_unsupported", "unsupported_reasons"]

OLDEST_TORCH = "2.10"  # 2.9.0 was tried: it cannot yet set up a device type from Python alone

NEEDED_FROM_TORCH = (
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "torch._C._acc.DeviceGuard",
    "torch._C._to_dlpack",
    "torch._C._from_dlpack",
    "torch._C.DispatchKeySet",
    "torch._C._get_privateuse1_backend_name",
    "torch._C.Generator._cdata",
    "torch._C.TensorBase.data",
    "torch._has_compatible_shallow_copy_type",
    "torch._ops.OpOverload.redispatch",
    "torch.library.Library.fallback",
    "torch.autograd.graph._engine_run_backward",
    "torch.autograd._engine_run_backward",
    "torch.utils.swap_tensors",
)


class EmulationUnsupported(ConfigurationError):  # noqa: N818
    """Emulated devices cannot be had in this process. The message lists every reason."""


def _exists(path: str) -> bool:
    owner: object = torch
    for name in path.split(".")[1:]:
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def unsupported_reasons() -> list[str]:
    """Every reason why `install` would refuse in this process; empty if it would not.

    Example:
        >>> for reason in unsupported_reasons():
        ...     print(reason)
    """
    # Modules that torch does not import by itself; a missing one shows up as a missing name below.
    for module in ("torch.utils.backend_registration", "torch.library", "torch.autograd.graph"):
        try:
            __import__(module)
        except ImportError:
            continue

    reasons = [
        f"torch {torch.__version__} has no '{path}'; torch {OLDEST_TORCH} or newer is needed, and this name is "
        "private to it: if your torch is newer, it may have been removed. Use a torch this was tested with."
        for path in NEEDED_FROM_TORCH
        if not _exists(path)
    ]
    if sys.implementation.name != "cpython":
        reasons.append(
            f"Python is {sys.implementation.name}; devices are relabelled through CPython's C interface. "
            "Use CPython."
        )
    if torch.cuda.device_count():
        reasons.append(
            f"this process sees {torch.cuda.device_count()} CUDA device(s), and a process has one kind of "
            "accelerator. Test on the real ones, or hide them with CUDA_VISIBLE_DEVICES=''."
        )
    if not reasons:
        reasons = _taken_slot() + _capsule_layout()
    return reasons


def is_supported() -> bool:
    """Whether `install` would succeed in this process.

    Example:
        >>> import pytest
        >>> needs_emulation = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")
    """
    return not unsupported_reasons()


def raise_if_unsupported() -> None:
    """Raise `EmulationUnsupported` with every reason, if there is any."""
    raise_if_any("emulated devices cannot be installed", unsupported_reasons(), EmulationUnsupported)


def _taken_slot() -> list[str]:
    name = torch._C._get_privateuse1_backend_name()
    if name in ("privateuseone", state.name):
        return []
    return [
        f"the device type '{name}' already occupies PyTorch's slot for out-of-tree devices (PrivateUse1). "
        "Run in a process that does not load it."
    ]


def _capsule_layout() -> list[str]:
    """A DLPack capsule of a CPU tensor must read as its address, device type 1 (CPU), device 0."""
    from opacus.testing.emulated_devices.relabel import capsule_fields

    probe = torch.zeros(3)
    if capsule_fields(probe) == (probe.data_ptr(), 1, 0):
        return []
    return [
        f"torch {torch.__version__} lays out DLPack capsules in an unknown way, so tensors cannot be relabelled. "
        "Use a torch this was tested with."
    ]
