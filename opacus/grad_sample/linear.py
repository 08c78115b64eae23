"""Linear: weight gradient `sum_t g_t a_t^T`, bias gradient `sum_t g_t`, input of any rank.

Shapes: R rows, K = 1 group, T positions (all middle dims folded), D in, P out.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter, norms_by_parameter
from opacus.grad_sample.products import outer
from opacus.grad_sample.rules import matrix_product, register

__all__ = ["compute_linear_grad_sample", "compute_linear_norm_sample", "pairs", "sizes"]


def pairs(captured: Captured) -> tuple[Tensor, Tensor]:
    """`(a_R1TD, g_R1TP)`: every dimension between batch and features is a position."""
    a, g = captured.batched(2), captured.backprops
    positions = math.prod(g.shape[1:-1])
    return (
        a.reshape(a.shape[0], 1, positions, a.shape[-1]),
        g.reshape(g.shape[0], 1, positions, g.shape[-1]),
    )


def sizes(captured: Captured) -> tuple[int, int, int, int]:
    """`(T, D, P, K)`."""
    a, g = captured.inputs[0], captured.backprops
    return math.prod(g.shape[1:-1]), a.shape[-1], g.shape[-1], 1


def weight_rows(captured: Captured) -> Tensor:
    """`[R, P, D]`."""
    a, g = captured.batched(2), captured.backprops
    if a.dim() == 3:
        return outer(a, g)
    positions = math.prod(g.shape[1:-1])
    return outer(a.reshape(a.shape[0], positions, a.shape[-1]), g.reshape(g.shape[0], positions, g.shape[-1]))


LINEAR = matrix_product(pairs, sizes, weight_rows, pairs_are_views=True)
register(nn.Linear, rule=LINEAR)


def compute_linear_grad_sample(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a linear layer: `sum_t g_t a_t^T` and `sum_t g_t`.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(LINEAR, layer, activations, backprops)


def compute_linear_norm_sample(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Norms of a linear layer's per-sample gradients, without forming them.

    Args:
        layer: the layer. activations: its input, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B]}` for each parameter that requires grad, at least float32.
    """
    return norms_by_parameter(LINEAR, layer, activations, backprops)
