"""InstanceNorm1d/2d/3d: statistics per sample and channel (or the running ones in eval), an affine map per channel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.group_norm import channel_affine_rows
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.rules import compute_dtype, instantiated, register

__all__ = ["compute_instance_norm_grad_sample", "instance_norm_rows"]

_DIMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}


def instance_norm_rows(captured: Captured) -> dict[str, Tensor]:
    layer = captured.layer
    dims = next(dims for kind, dims in _DIMS.items() if isinstance(layer, kind))
    x = captured.batched(dims, exactly=True)
    x = x.to(compute_dtype(x))
    if layer.training or not layer.track_running_stats:
        x_hat = F.instance_norm(x, eps=layer.eps)
    else:
        running = (layer.running_mean.to(x), layer.running_var.to(x))
        x_hat = F.instance_norm(x, *running, use_input_stats=False, eps=layer.eps)
    return channel_affine_rows(captured, x_hat)


INSTANCE_NORM = instantiated(instance_norm_rows)
register(*_DIMS, rule=INSTANCE_NORM)


def compute_instance_norm_grad_sample(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    activations: list[Tensor],
    backprops: Tensor,
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of an InstanceNorm, `[B, C]` each.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(INSTANCE_NORM, layer, activations, backprops)
