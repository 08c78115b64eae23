"""Kernels that add up in the same order each time, for a run that is to be compared with another one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

__all__ = ["deterministic_kernels", "has_no_deterministic_kernel"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ACCEPTED = (":4096:8", ":16:8")  # torch refuses matrix products under any other value


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Within it torch takes deterministic kernels, or raises; afterwards the process is set as it was.

    Attention's backward on GPUs adds up in an order of its own each time: in bfloat16, over many blocks, two runs on the same
    batch then differ by several percent.

    Raises:
        RuntimeError: within it, by an operation without such a kernel (`has_no_deterministic_kernel`).
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(_WORKSPACE)
    try:
        if workspace not in _ACCEPTED:
            # torch wants it said; it is the size that recent GPUs are given anyway
            os.environ[_WORKSPACE] = _ACCEPTED[0]
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=only_warns)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace


def has_no_deterministic_kernel(error: RuntimeError) -> bool:
    """Whether `error` is what an operation raised within `deterministic_kernels`."""
    return "does not have a deterministic implementation" in str(error)
