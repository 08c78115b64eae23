"""How far rounding alone can move a model's gradients: measured, since in 16 bits and over many layers it is no small number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["other_rounding"]

_REDUCED = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def other_rounding(model: nn.Module) -> Iterator[None]:
    """Within it what innermost modules put out in bf16 or fp16 is off by up to a unit in its last place, and gradients likewise.

    Batches of another size take other kernels, which round otherwise; this moves each number about as far. The same in every run
    and in every recomputation, the same for each row, different for the entries of a row.
    """
    handles = [
        module.register_forward_hook(_moved) for module in model.modules() if not any(module.children())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(module: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(_by_a_unit, output)


def _by_a_unit(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dtype not in _REDUCED or not leaf.dim():
        return leaf
    shape = leaf.shape[1:]
    pattern = torch.arange(shape.numel(), device=leaf.device, dtype=torch.float32).mul_(0.7).cos_()
    return leaf * (1 + torch.finfo(leaf.dtype).eps * pattern.view(shape)).to(leaf.dtype)
