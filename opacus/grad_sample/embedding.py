"""Embedding: the gradient of row v is the sum of backprops at the positions that looked v up.

Shapes: R rows, B samples, N = R * T looked-up positions, V vocabulary, D width. Norms never form `[B, V, D]`:
positions are sorted by (sample, id), backprops added per segment, squared segment sums added per sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter, norms_by_parameter
from opacus.grad_sample.rules import compute_dtype, register

__all__ = [
    "EMBEDDING",
    "LookedUp",
    "LookupRule",
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_embeddingbag_gradsampler",
    "looked_up",
    "mixing_options",
    "refuse_mixing",
    "segment_sq_norm",
]


class LookedUp:
    """Which table entries the rows of a call used, flattened: entry `ids[n]` got `g[n]` from `rows[n]`.

    Args:
        ids_N: `[N]`, int64. rows_N: `[N]`, int64. g_ND: `[N, D]`.
    """

    def __init__(self, ids_N: Tensor, rows_N: Tensor, g_ND: Tensor) -> None:
        self.ids_N, self.rows_N, self.g_ND = ids_N, rows_N, g_ND.to(compute_dtype(g_ND))

    def grad_rows(self, n_rows: int, n_entries: int) -> Tensor:
        """`[n_rows, V, D]`."""
        flat = self.g_ND.new_zeros(n_rows * n_entries, self.g_ND.shape[-1])
        flat.index_add_(0, self.rows_N * n_entries + self.ids_N, self.g_ND)
        return flat.view(n_rows, n_entries, self.g_ND.shape[-1])


def segment_sq_norm(looked: LookedUp, n_samples: int, n_entries: int) -> Tensor:
    """Squared norm of each sample's embedding gradient, `[n_samples]`, without a host sync."""
    key_N, order = (looked.rows_N * n_entries + looked.ids_N).sort()
    starts = torch.ones_like(key_N, dtype=torch.bool)
    starts[1:] = key_N[1:] != key_N[:-1]
    segment_N = starts.cumsum(0) - 1
    sums = torch.zeros_like(looked.g_ND).index_add_(0, segment_N, looked.g_ND[order])
    sample_of_segment = torch.zeros_like(key_N).scatter_(0, segment_N, key_N // n_entries)
    norms = looked.g_ND.new_zeros(n_samples)
    return norms.index_add_(0, sample_of_segment, sums.square().sum(1))


class LookupRule:
    """Rule of a layer whose weight is a table; `find` flattens a call into `LookedUp`."""

    def __init__(self, find: Callable[[Captured], LookedUp]) -> None:
        self.find = find

    def grad_sample(self, captured: Captured) -> dict[str, Tensor]:
        if not captured.trains("weight"):
            return {}
        looked = self._by_sample(captured)
        return {"weight": looked.grad_rows(captured.owners.n_samples, captured.layer.num_embeddings)}

    def norm_sample(self, captured: Captured) -> dict[str, Tensor]:
        if not captured.trains("weight"):
            return {}
        looked = self._by_sample(captured)
        return {"weight": segment_sq_norm(looked, captured.owners.n_samples, captured.layer.num_embeddings)}

    def clipped_grad(self, captured: Captured, factor_B: Tensor) -> dict[str, Tensor]:
        if not captured.trains("weight"):
            return {}
        looked = self._by_sample(captured)
        scaled = looked.g_ND * factor_B.to(looked.g_ND.dtype)[looked.rows_N][:, None]
        total = scaled.new_zeros(captured.layer.num_embeddings, scaled.shape[-1])
        return {"weight": total.index_add_(0, looked.ids_N, scaled)}

    def _by_sample(self, captured: Captured) -> LookedUp:
        looked = self.find(captured)
        if captured.owners.index_R is not None:
            looked.rows_N = captured.owners.index_R.to(looked.rows_N.device)[looked.rows_N]
        return looked


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
    return LookedUp(ids_N, rows.reshape(-1), g_ND)


EMBEDDING = LookupRule(looked_up)
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
