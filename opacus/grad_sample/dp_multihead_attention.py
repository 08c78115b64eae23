"""SequenceBias: one vector appended to every sequence, so its gradient is what arrives at the last position."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.rules import compute_dtype, instantiated, register
from opacus.layers.dp_multihead_attention import SequenceBias

__all__ = ["compute_sequence_bias_grad_sample"]


def appended_rows(captured: Captured) -> dict[str, Tensor]:
    """`[R, E]`: backprops `[R, S + 1, E]` at the appended position."""
    g = captured.backprops
    return {"bias": g[:, -1].to(compute_dtype(g))} if captured.trains("bias") else {}


SEQUENCE_BIAS = instantiated(appended_rows)
register(SequenceBias, rule=SEQUENCE_BIAS, names=("bias",))


def compute_sequence_bias_grad_sample(
    layer: SequenceBias, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a `SequenceBias`.

    Args:
        layer: the layer. activations: its input, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, E]}` if the bias requires grad.
    """
    return by_parameter(SEQUENCE_BIAS, layer, activations, backprops)
