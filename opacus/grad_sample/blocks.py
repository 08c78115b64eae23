"""Blocks: the parameters that are normed and clipped together when a backward has ended.

What calls kept is normed here, layers of one shape in one launch, and summed with the clip factors, again several layers at
a time as long as the copies that takes stay small.

Shapes: B samples of a physical batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opacus.grad_sample.kept import (
    Kept,
    KeptPositions,
    KeptProduct,
    KeptRows,
    launched_with,
    rows_of,
    sq_norms,
)
from opacus.grad_sample.kernels import weighted_rows
from opacus.grad_sample.products import scaled_products
from opacus.grad_sample.tensor_axis import TensorAxis

__all__ = ["SMALL", "Block", "clipped_sums", "is_small", "joined", "launch_budget", "take_norms"]

SMALL = 2**17  # elements: copying so few costs less than a launch
# what one launch writes (scaled copies, sums) is this share of what is kept, at most
_SHARE = 32


@dataclass
class Block:
    """Parameters that are normed and clipped together: one, or many small ones of one device.

    Attributes:
        parameters: at least one; all on one device.
        shapes: of their gradients (tensor parallel: of this rank's pieces).
        kept: whose sum is the gradient. For several parameters: one entry, their gradients side by side.
        norm_B: `[B]`, L2 norm of each sample's gradient with respect to the block; its square until `take_norms` is done.
        split: tensor parallel: whether they are pieces, of which every rank of the axis holds another.
    """

    parameters: list[nn.Parameter]
    shapes: list[torch.Size]
    kept: list[Kept]
    norm_B: Tensor | None = None
    split: bool = False

    def clipped(self, factor_B: Tensor) -> list[Tensor]:
        """One clipped sum for each parameter; what was kept is given back."""
        total = self.kept.pop().clipped(factor_B)
        while self.kept:  # what is summed is given back at once
            total.add_(self.kept.pop().clipped(factor_B))
        return self.parts_of(total)

    def parts_of(self, total: Tensor) -> list[Tensor]:
        """The sum of the block as one for each parameter, in its shape."""
        if len(self.parameters) == 1:
            return [total.view(self.shapes[0])]
        parts = total.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def is_small(use: Kept) -> bool:
    """Whether it is copied next to others, to be normed and summed with them: biases, norms, LoRA matrices."""
    return isinstance(use, (KeptRows, KeptPositions)) and use.width <= SMALL


def joined(
    parameters: list[nn.Parameter], shapes: list[torch.Size], uses: list[Kept], split: bool = False
) -> Block:
    """Small gradients of one device side by side: one norm and one product for all of them."""
    rows = [use.matrix() for use in rows_of(uses)]  # type: ignore[arg-type]  # is_small told so
    together = KeptRows(torch.cat(rows, dim=1) if len(rows) > 1 else rows[0])
    return Block(parameters, shapes, [together], together.sq_norm(), split)


def take_norms(blocks: Sequence[Block], scale: float, axis: TensorAxis) -> None:
    """Fill in norms that no one took before, and turn squared norms into `scale` times norms, in few launches.

    Args:
        axis: whose ranks hold pieces of some blocks; norms become those of the whole.
    """
    late = [block for block in blocks if block.norm_B is None]
    for block, sq_norm_B in zip(late, sq_norms([block.kept for block in late]), strict=True):
        block.norm_B = sq_norm_B
    squared = [block.norm_B for block in blocks if block.norm_B is not None]
    split, first = [block.split for block in blocks], [block.parameters[0] for block in blocks]
    for block, sq_norm_B in zip(blocks, axis.whole(squared, split, first), strict=True):
        block.norm_B = sq_norm_B
    by_device: dict[tuple[torch.device, torch.dtype], list[Block]] = {}
    for block in blocks:
        assert block.norm_B is not None
        by_device.setdefault((block.norm_B.device, block.norm_B.dtype), []).append(block)
    for group in by_device.values():
        norms = torch.stack([block.norm_B for block in group]).clamp_(min=0).sqrt_().mul_(scale)  # type: ignore[misc]
        for block, norm_B in zip(group, norms.unbind(), strict=True):
            block.norm_B = norm_B


def launch_budget(blocks: Sequence[Block]) -> int:
    """Bytes that one launch for several layers may write."""
    return sum(use.held_bytes for block in blocks if (use := _launched(block)) is not None) // _SHARE


def clipped_sums(
    blocks: Sequence[Block], factors: Sequence[Tensor], budget: int
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The clipped sum of each parameter of `blocks`; what they kept is given back on the way.

    Args:
        factors: `[B]` for each block, on its device.
        budget: as `launch_budget`.
    """
    alike: dict[object, tuple[Tensor, list[tuple[Block, KeptProduct | KeptRows]]]] = {}
    for block, factor_B in zip(blocks, factors, strict=True):
        use = _launched(block)
        if use is None:
            yield from zip(block.parameters, block.clipped(factor_B), strict=True)
            continue
        key = (launched_with(use), id(factor_B))
        _, waiting = alike.setdefault(key, (factor_B, []))
        waiting.append((block, use))
        if (len(waiting) + 1) * use.written_bytes > budget:
            del waiting, use  # what is summed is given back at once
            yield from _together(*alike.pop(key))
    while alike:
        yield from _together(*alike.popitem()[1])


def _launched(block: Block) -> KeptProduct | KeptRows | None:
    """What the block kept, if it can be summed in one launch with others like it."""
    use = block.kept[0] if len(block.kept) == 1 else None
    if isinstance(use, (KeptProduct, KeptRows)) and launched_with(use) is not None:
        return use
    return None


def _together(
    factor_B: Tensor, waiting: list[tuple[Block, KeptProduct | KeptRows]]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    products = [use for _, use in waiting if isinstance(use, KeptProduct)]
    if products:
        totals = scaled_products([product.pairs() for product in products], factor_B)
    else:
        rows = [use.matrix() for _, use in waiting if isinstance(use, KeptRows)]
        totals = weighted_rows(rows, factor_B.to(torch.float32))
        del rows
    blocks = [block for block, _ in waiting]
    for block in blocks:
        block.kept.clear()
    del products
    waiting.clear()
    for block, total in zip(blocks, totals.unbind(), strict=True):
        yield from zip(block.parameters, block.parts_of(total), strict=True)
