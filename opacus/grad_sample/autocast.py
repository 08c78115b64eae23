"""Autocast: keep a layer's input as the layer multiplies it, not wider.

Under autocast a linear layer casts a float32 input before it multiplies. What it saw is the copy, and the copy is what autograd
keeps and takes weight gradients of. Casting where the call is captured, rather than within the layer, keeps that one
tensor: of half the size, and of the backprops' own dtype. Products of such pairs have float32 results. Convolutions, whose
rows' gradients would come in the inputs' reduced precision, keep their input as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opacus.grad_sample.hf_conv1d import HF_CONV1D, meet
from opacus.grad_sample.linear import LINEAR
from opacus.grad_sample.rules import builtin_rule
from opacus.grad_sample.selection import sampled_by_user

__all__ = ["as_multiplied"]


def as_multiplied(
    layer: nn.Module, args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
    """Arguments with the input cast as autocast is about to; None where it is not.

    Args:
        layer: about to be called. args: its inputs by position; there are no others.
    """
    x = args[0] if len(args) == 1 else None
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or not torch.is_autocast_enabled(x.device.type):
        return None
    weight = layer._parameters.get("weight")
    if weight is None or weight.device != x.device:  # moved meanwhile: autocast there may not be on
        return None
    if sampled_by_user(type(layer)):  # who is used to the inputs as they come
        return None
    meet(layer)
    if builtin_rule(layer, tuple(layer._parameters)) not in (LINEAR, HF_CONV1D):
        return None
    return (x.to(torch.get_autocast_dtype(x.device.type)),), {}
