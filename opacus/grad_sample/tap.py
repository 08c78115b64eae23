"""The tap: an identity on a layer's outputs, in whose backward the call's inputs meet the backprops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opacus.grad_sample.pieces import Piece, pieces_of

if TYPE_CHECKING:
    from opacus.grad_sample.capture import Capture
    from opacus.grad_sample.one_backward import OneBackward
    from opacus.grad_sample.owners import OwnerRule
    from opacus.grad_sample.ownership import Slot

__all__ = ["TENSOR", "Call", "Tap"]

TENSOR = object()  # stands for a saved tensor among a call's inputs


class Call:
    """What `Tap` must remember of a layer call besides tensors; holds none, so nothing is kept alive.

    Attributes:
        leaves: the call's inputs in the order of `structure`, `TENSOR` for saved ones; None: all are tensors, by position.
        padded_to: rows that shorter inputs are padded to (recurrent cells).
        spent_by: the backward that the call was captured in.
    """

    __slots__ = (
        "capture",
        "differentiable",
        "layer",
        "leaves",
        "names",
        "padded_to",
        "path",
        "pieces",
        "rows_allowed",
        "rule",
        "slots",
        "spent_by",
        "structure",
    )

    def __init__(
        self,
        capture: Capture,
        path: str,
        layer: nn.Module,
        slots: list[Slot],
        names: tuple[str, ...],
        leaves: list[Any] | None,
        structure: Any,
        differentiable: tuple[int, ...],
        rows_allowed: frozenset[int] | None,
        rule: OwnerRule | None,
    ) -> None:
        self.capture = capture
        self.path = path
        self.layer = layer
        self.slots = slots
        self.names = names
        self.structure = structure
        self.differentiable = differentiable
        self.rows_allowed = rows_allowed
        self.rule = rule
        # of this forward: another one, with another batch, may run before the backward
        self.padded_to: int | None = vars(layer).get("max_batch_len")
        self.leaves = leaves
        self.pieces: dict[str, Piece] | None = pieces_of(path, slots, names)
        self.spent_by: OneBackward | None = None

    @property
    def where(self) -> str:
        return f"{self.path or '(root)'} ({type(self.layer).__name__})"


class Tap(torch.autograd.Function):
    """Identity on the outputs; saves the inputs; its backward is where inputs meet backprops."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, *tensors: Tensor) -> Any:
        count = len(call.differentiable)
        ctx.call = call
        ctx.save_for_backward(*tensors[count:])
        # detach() shares the version counter, so autograd still sees later in-place changes; .data would hide them
        if count == 1:
            return tensors[0].detach()
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        call: Call = ctx.call
        call.capture.deliver(call, saved, grads)
        return (None, None, *grads, *([None] * len(saved)))
