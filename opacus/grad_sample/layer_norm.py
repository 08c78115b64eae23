"""LayerNorm: per-sample gradients of an elementwise affine map.

Shapes: R rows, T positions (all middle dims folded), D normalised elements. With x_hat the normalised
input, y = x_hat * weight + bias, so row i's gradient is dweight_i = sum_t x_hat_it * g_it and
dbias_i = sum_t g_it: both `[R, D]`, small enough to keep.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.kernels import fused, norm_rows
from opacus.grad_sample.rules import compute_dtype, instantiated, register

__all__ = ["affine_rows", "compute_layer_norm_grad_sample", "fused_affine_rows"]


def affine_rows(captured: Captured, x_hat: Tensor, n_affine: int) -> dict[str, Tensor]:
    """Gradients of the weight and bias that act on the last `n_affine` dims of `x_hat`, `[R, *affine]`."""
    g = captured.backprops.to(x_hat.dtype)
    middle = list(range(1, g.dim() - n_affine))

    def over_positions(per_position: Tensor) -> Tensor:
        return per_position.sum(middle) if middle else per_position

    grads = {}
    if captured.trains("weight"):
        grads["weight"] = over_positions(x_hat * g)
    if captured.trains("bias"):
        grads["bias"] = over_positions(g)
    return grads


def fused_affine_rows(captured: Captured, x: Tensor, eps: float, *, centred: bool) -> dict[str, Tensor]:
    """What `affine_rows` gives for a whole-width normalisation, by the fused kernel."""
    shape = torch.Size(captured.layer.normalized_shape)
    width = shape.numel()
    as_RTD = (x.shape[0], x.numel() // (x.shape[0] * width), width)
    weight_RD, bias_RD = norm_rows(x.view(as_RTD), captured.backprops.view(as_RTD), eps, centred=centred)
    both = {"weight": weight_RD, "bias": bias_RD}
    return {name: both[name].view(-1, *shape) for name in both if captured.trains(name)}


def layer_norm_rows(captured: Captured) -> dict[str, Tensor]:
    layer = captured.layer
    x = captured.batched(1 + len(layer.normalized_shape))
    if fused(x, captured.backprops):
        return fused_affine_rows(captured, x, layer.eps, centred=True)
    x_hat = F.layer_norm(x.to(compute_dtype(x)), layer.normalized_shape, eps=layer.eps)
    return affine_rows(captured, x_hat, len(layer.normalized_shape))


LAYER_NORM = instantiated(layer_norm_rows)
register(nn.LayerNorm, rule=LAYER_NORM)


def compute_layer_norm_grad_sample(
    layer: nn.LayerNorm, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a LayerNorm with any combination of weight and bias.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(LAYER_NORM, layer, activations, backprops)
