"""Embedding: the gradient of row v is the sum of backprops at the positions that looked v up.

Shapes: R rows, B samples, N = R * T looked-up positions, V vocabulary, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter, norms_by_parameter
from opacus.grad_sample.kept import LookedUp
from opacus.grad_sample.rules import lookup, register

__all__ = [
    "EMBEDDING",
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_embeddingbag_gradsampler",
    "looked_up",
    "mixing_options",
    "refuse_mixing",
]


def mixing_options(layer: nn.Module) -> list[str]:
    """Options of an embedding under which one sample's ids change what the others' gradients are."""
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return []
    return [name for name in ("max_norm", "scale_grad_by_freq") if getattr(layer, name)]


def refuse_mixing(layer: nn.Module) -> None:
    """Raise for an embedding that rescales entries or gradients by what the whole batch looked up.

    Raises:
        PerSampleGradientError: naming the options.
    """
    options = mixing_options(layer)
    if options:
        raise PerSampleGradientError(
            "per-sample gradients do not exist",
            [
                f"{type(layer).__name__}({', '.join(f'{name}={getattr(layer, name)}' for name in options)}) lets the whole "
                "batch's ids decide: build it without."
            ],
        )


def looked_up(captured: Captured) -> LookedUp:
    """An `nn.Embedding` call: ids of any shape and strides; `padding_idx` takes nothing."""
    refuse_mixing(captured.layer)
    ids, g = captured.batched(1), captured.backprops
    rows = torch.arange(ids.shape[0], device=ids.device)
    rows = rows.view(-1, *[1] * (ids.dim() - 1)).expand_as(ids)
    g_ND = g.reshape(-1, g.shape[-1])
    ids_N = ids.reshape(-1).long()
    if captured.layer.padding_idx is not None:
        g_ND = g_ND.masked_fill((ids_N == captured.layer.padding_idx)[:, None], 0)
    return LookedUp(ids_N, rows.reshape(-1), g_ND, rectangular=True)


EMBEDDING = lookup(looked_up)
register(nn.Embedding, rule=EMBEDDING, names=("weight",))


def compute_embedding_grad_sample(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of an embedding table, `[B, V, D]`.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(EMBEDDING, layer, activations, backprops)


def compute_embeddingbag_gradsampler(
    layer: nn.EmbeddingBag, inputs: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-bag gradients of an EmbeddingBag; `inputs` are its ids and, for one line of ids, the offsets."""
    from opacus.grad_sample.embedding_bag import EMBEDDING_BAG  # it builds on this file

    return by_parameter(EMBEDDING_BAG, layer, inputs, backprops)


def compute_embedding_norm_sample(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Norms of an embedding's per-sample gradients by sorted segments, without forming `[B, V, D]`."""
    return norms_by_parameter(EMBEDDING, layer, activations, backprops)
