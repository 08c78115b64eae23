"""RMSNorm: like LayerNorm's weight, with the input divided by its root mean square."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.layer_norm import affine_rows
from opacus.grad_sample.rules import Instantiated, compute_dtype, register

__all__ = ["compute_rms_norm_grad_sample"]


def rms_norm_rows(captured: Captured) -> dict[str, Tensor]:
    layer, x = captured.layer, captured.inputs[0]
    # eps=None means the machine epsilon of the layer's own dtype, not of the one computed in here
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    x_hat = F.rms_norm(x.to(compute_dtype(x)), layer.normalized_shape, eps=eps)
    return affine_rows(captured, x_hat, len(layer.normalized_shape))


RMS_NORM = Instantiated(rms_norm_rows)
register(nn.RMSNorm, rule=RMS_NORM, names=("weight",))


def compute_rms_norm_grad_sample(
    layer: nn.RMSNorm, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of an RMSNorm weight.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(RMS_NORM, layer, activations, backprops)
