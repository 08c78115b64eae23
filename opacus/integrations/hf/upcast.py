"""A model in float32 for the time of a look at it: gradients of batches of different sizes then agree to more than two digits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["in_float32"]

logger = logging.getLogger(__name__)

_REDUCED = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within it, bf16 and fp16 parameters and buffers are float32; afterwards they are the tensors they were.

    Quantized weights stay as they are. Where the memory does not suffice nothing is changed.
    """
    # a quantized weight may call itself bf16: only plain tensors are widened
    plain = [
        t
        for t in (*model.parameters(), *model.buffers())
        if t.dtype in _REDUCED and type(t.data) is Tensor and t.device.type != "meta"
    ]
    before: list[tuple[Tensor, Tensor]] = []
    try:
        try:
            for tensor in plain if len(plain) == len(_floating(model)) else ():
                narrow = tensor.data
                tensor.data = narrow.float()
                before.append((tensor, narrow))
        except torch.OutOfMemoryError:
            logger.info(
                "the loss is looked at in reduced precision: there is no memory for the model in float32"
            )
            _put_back(before)
        yield
    finally:
        _put_back(before)


def _floating(model: nn.Module) -> list[Tensor]:
    """What may be in reduced precision, quantized weights included."""
    return [t for t in (*model.parameters(), *model.buffers()) if t.dtype in _REDUCED]


def _put_back(before: list[tuple[Tensor, Tensor]]) -> None:
    while before:
        tensor, narrow = before.pop()
        tensor.data = narrow
        tensor.grad = None
