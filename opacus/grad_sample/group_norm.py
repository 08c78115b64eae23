"""GroupNorm: statistics per sample and group, an affine map per channel.

Shapes: R rows, C channels, then any spatial dims. With x_hat the normalised input, dweight_i = sum over space of
x_hat_i * g_i and dbias_i = sum over space of g_i: both `[R, C]`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.rules import compute_dtype, instantiated, register

__all__ = ["channel_affine_rows", "compute_group_norm_grad_sample"]


def channel_affine_rows(captured: Captured, x_hat: Tensor) -> dict[str, Tensor]:
    """Gradients of a per-channel weight and bias, `[R, C]`, from `x_hat` of shape `[R, C, ...]`."""
    g = captured.backprops.to(x_hat.dtype)
    space = list(range(2, g.dim()))

    def over_space(per_element: Tensor) -> Tensor:
        return per_element.sum(space) if space else per_element

    grads = {}
    if captured.trains("weight"):
        grads["weight"] = over_space(x_hat * g)
    if captured.trains("bias"):
        grads["bias"] = over_space(g)
    return grads


def group_norm_rows(captured: Captured) -> dict[str, Tensor]:
    layer, x = captured.layer, captured.inputs[0]
    x_hat = F.group_norm(x.to(compute_dtype(x)), layer.num_groups, eps=layer.eps)
    return channel_affine_rows(captured, x_hat)


GROUP_NORM = instantiated(group_norm_rows)
register(nn.GroupNorm, rule=GROUP_NORM)


def compute_group_norm_grad_sample(
    layer: nn.GroupNorm, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a GroupNorm, `[B, C]` each.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(GROUP_NORM, layer, activations, backprops)
