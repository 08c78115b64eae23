"""EmbeddingBag: a bag is a sample; its gradient spreads over the entries it summed, averaged or took the maximum of.

Shapes: B bags (samples), N looked-up entries over all bags, V vocabulary, D width. Bags come as a matrix of ids, or as
one line of ids with the offset at which each bag starts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.embedding import refuse_mixing
from opacus.grad_sample.kept import LookedUp
from opacus.grad_sample.rules import lookup, register

__all__ = ["EMBEDDING_BAG", "bags"]


def bags(captured: Captured) -> LookedUp:
    """Flatten one call to the entries that received a gradient."""
    layer, g_BD = captured.layer, captured.backprops
    refuse_mixing(layer)
    ids_N, bag_N = _entries(captured, g_BD.shape[0])
    counted_N = torch.ones_like(ids_N, dtype=g_BD.dtype)
    if layer.padding_idx is not None:
        counted_N = (ids_N != layer.padding_idx).to(g_BD.dtype)
    if layer.mode == "max":
        return _largest(layer, ids_N, bag_N, counted_N, g_BD)
    weight_N = counted_N
    if layer.mode == "mean":
        size_B = counted_N.new_zeros(g_BD.shape[0]).index_add_(0, bag_N, counted_N)
        weight_N = counted_N / size_B.clamp(min=1)[bag_N]
    per_sample = captured.arguments.get("per_sample_weights")
    if per_sample is not None:
        weight_N = counted_N * per_sample.reshape(-1)
    return LookedUp(ids_N, bag_N, g_BD[bag_N] * weight_N[:, None])


def _entries(captured: Captured, n_bags: int) -> tuple[Tensor, Tensor]:
    """`(ids_N, bag_N)`: each looked-up id and the bag it belongs to."""
    ids = captured.arguments["input"]
    if ids.dim() == 2:
        bag = torch.arange(ids.shape[0], device=ids.device)[:, None].expand_as(ids)
        return ids.reshape(-1).long(), bag.reshape(-1)
    starts_B = captured.arguments["offsets"].long()[
        :n_bags
    ]  # the last entry may be the end (include_last_offset)
    position_N = torch.arange(ids.shape[0], device=ids.device)
    # the last bag that starts at or before the position: empty bags share their start with the next one
    return ids.long(), torch.searchsorted(starts_B.contiguous(), position_N, right=True) - 1


def _largest(
    layer: nn.EmbeddingBag, ids_N: Tensor, bag_N: Tensor, counted_N: Tensor, g_BD: Tensor
) -> LookedUp:
    """mode="max": coordinate d of a bag goes to the first of its entries whose d-th value is the largest."""
    lowest = torch.finfo(layer.weight.dtype).min
    value_ND = layer.weight.detach()[ids_N].masked_fill(counted_N[:, None] == 0, lowest)
    bag_ND = bag_N[:, None].expand_as(value_ND)
    best_BD = torch.full_like(g_BD, lowest, dtype=value_ND.dtype).scatter_reduce(0, bag_ND, value_ND, "amax")
    n = ids_N.shape[0]
    position_N1 = torch.arange(n, device=ids_N.device)[:, None]
    candidate_ND = torch.where((value_ND == best_BD[bag_N]) & (counted_N[:, None] != 0), position_N1, n)
    first_BD = torch.full(g_BD.shape, n, device=g_BD.device).scatter_reduce(0, bag_ND, candidate_ND, "amin")
    return LookedUp(ids_N, bag_N, torch.where(position_N1 == first_BD[bag_N], g_BD[bag_N], 0))


EMBEDDING_BAG = lookup(bags)
register(nn.EmbeddingBag, rule=EMBEDDING_BAG, names=("weight",))
