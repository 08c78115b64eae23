"""RNNLinear, the linear layer inside DPRNN, DPGRU and DPLSTM cells: a Linear whose dimension 0 is always the batch."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.linear import LINEAR
from opacus.grad_sample.rules import register
from opacus.layers.dp_rnn import RNNLinear

__all__ = ["compute_rnn_linear_grad_sample"]

register(RNNLinear, rule=LINEAR)


def compute_rnn_linear_grad_sample(
    layer: RNNLinear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of one call of an `RNNLinear`.

    Args:
        layer: the layer. activations: its input, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(LINEAR, layer, activations, backprops)
