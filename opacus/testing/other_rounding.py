"""How far rounding alone can move a model's gradients: measured, since in 16 bits and over many layers it is no small number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from opacus.testing.witness import Key, Seen, Witness, difference

__all__ = ["PATTERNS", "Room", "other_rounding"]

_REDUCED = (torch.bfloat16, torch.float16)

# steps of the cosine that numbers are moved along: what cancels in one run does not in another
PATTERNS = (0.7, 0.83, 1.01)


@contextlib.contextmanager
def other_rounding(model: nn.Module, pattern: float = PATTERNS[0]) -> Iterator[None]:
    """Within it what innermost modules put out in bf16 or fp16 is off by up to a unit in its last place, and gradients likewise.

    Batches of another size take other kernels, which round otherwise; this moves each number about as far. The same in every run
    and in every recomputation, the same for each row, different for the entries of a row.
    """

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(by_a_unit, output)

    def by_a_unit(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype not in _REDUCED or not leaf.dim():
            return leaf
        shape = leaf.shape[1:]
        wave = torch.arange(shape.numel(), device=leaf.device, dtype=torch.float32).mul_(pattern).cos_()
        return leaf * (1 + torch.finfo(leaf.dtype).eps * wave.view(shape)).to(leaf.dtype)

    handles = [module.register_forward_hook(move) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Room:
    """How far each call's rows may move by rounding: twice as far as they moved in runs that rounded otherwise.

    Apart for each call, for some are differences of nearly equal numbers (queries and keys of an attention that looks everywhere
    alike) and move as far as they are large, while others, of the same model, move by a hundredth. Where rounding may change all
    of a call's rows nothing can be told from them. Kernels moved at most 0.7 times as far (bf16 and int8 weights, 22 blocks, H200).

    Args:
        before: the run as it is.
        moved: the same batch under `other_rounding`; none where numbers have enough bits.
    """

    def __init__(self, before: Witness, moved: Sequence[Witness]) -> None:
        self.before, self.moved = before, moved

    def forward(self, key: Key) -> tuple[float, float]:
        """Of the inputs and of the outputs of a module's call, relative to a row's size."""
        return self._of(key, lambda run: run.forward)

    def backward(self, key: Key) -> tuple[float, float]:
        """Of the inputs and of the output's gradient of a captured call."""
        return self._of(key, lambda run: run.backward)

    def _of(self, key: Key, part: Callable[[Witness], dict[Key, Seen]]) -> tuple[float, float]:
        a = part(self.before)[key]
        others = [b for b in (part(run).get(key) for run in self.moved) if b is not None]
        inputs = max((difference(a.inputs, b.inputs) for b in others), default=0.0)
        outputs = max((difference(a.outputs, b.outputs) for b in others), default=0.0)
        return _twice(inputs), _twice(outputs)


def _twice(moved: float) -> float:
    return 2 * moved if 2 * moved < 1 else math.inf
