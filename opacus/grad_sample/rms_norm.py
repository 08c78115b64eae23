"""RMSNorm: like LayerNorm's weight, with the input divided by its root mean square."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.kernels import fused
from opacus.grad_sample.layer_norm import affine_rows, fused_affine_rows
from opacus.grad_sample.rules import compute_dtype, instantiated, register

__all__ = ["compute_rms_norm_grad_sample"]


def rms_norm_rows(captured: Captured) -> dict[str, Tensor]:
    layer = captured.layer
    x = captured.batched(1 + len(layer.normalized_shape))
    if layer.eps is not None and fused(x, captured.backprops):
        return fused_affine_rows(captured, x, layer.eps, centred=False)
    # without eps torch takes the machine epsilon, of which dtype is its own affair: normalise in the layer's dtype
    wide = x if layer.eps is None else x.to(compute_dtype(x))
    x_hat = F.rms_norm(wide, layer.normalized_shape, eps=layer.eps).to(compute_dtype(x))
    return affine_rows(captured, x_hat, len(layer.normalized_shape))


RMS_NORM = instantiated(rms_norm_rows)
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
