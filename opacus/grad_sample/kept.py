"""What is kept of a parameter between its layer's backward and the moment the clip factors are known.

Three forms: the per-sample gradient itself where it is small, the two factors of a matrix product, or the table entries
that were looked up. Each knows its squared norm and its clipped sum. Uses of one parameter by several calls (a module
called twice, tied weights) are joined before the norm is taken: gradients add, norms do not.

Shapes: B samples, K groups, T positions, D in, P out, V table entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opacus.grad_sample.products import gram_sq_norm, outer_rows, scaled_product

__all__ = [
    "Kept",
    "KeptLookup",
    "KeptProduct",
    "KeptRows",
    "KeptWithNorm",
    "LookedUp",
    "joint_sq_norm",
    "segment_sq_norm",
]


class Kept(Protocol):
    """One call's share of one parameter's per-sample gradients."""

    def sq_norm(self) -> Tensor:
        """Squared norm of each sample's gradient, `[B]`, at least float32."""

    def instantiated(self) -> Tensor:
        """The per-sample gradients, `[B, *shape]`."""

    def clipped(self, factor_B: Tensor) -> Tensor:
        """Sum over samples of factor times gradient, in the parameter's shape, at least float32."""


@dataclass
class KeptRows:
    """Per-sample gradients small enough to keep: `[B, *shape]`."""

    grad_B: Tensor

    def matrix(self) -> Tensor:
        """`[B, elements]`, at least float32."""
        flat = self.grad_B.flatten(1) if self.grad_B.dim() > 1 else self.grad_B.unsqueeze(1)
        return flat.to(torch.promote_types(flat.dtype, torch.float32))

    def sq_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.matrix(), dim=1).square()

    def instantiated(self) -> Tensor:
        return self.grad_B

    def clipped(self, factor_B: Tensor) -> Tensor:
        rows = self.matrix()
        factor_B = factor_B.to(rows.device)
        # zero times infinity is no zero: a sample left out must be left out of the product too
        rows = rows.masked_fill((factor_B == 0).unsqueeze(1), 0)
        return torch.mv(rows.t(), factor_B.to(rows.dtype)).view(self.grad_B.shape[1:])


@dataclass
class KeptProduct:
    """Activations and backprops of `sum_t g_t a_t^T`.

    Args:
        pairs: returns `(a_BKTD, g_BKTP)`; called again rather than kept where forming them takes memory (convolutions).
        shape: of the parameter; `[K, P, D]` reshapes to it.
    """

    pairs: Callable[[], tuple[Tensor, Tensor]]
    shape: torch.Size

    def sq_norm(self) -> Tensor:
        return gram_sq_norm(*self.pairs()).clamp_(min=0)

    def instantiated(self) -> Tensor:
        rows = outer_rows(*self.pairs())
        return rows.reshape(rows.shape[0], *self.shape)

    def clipped(self, factor_B: Tensor) -> Tensor:
        return scaled_product(*self.pairs(), factor_B).reshape(self.shape)


@dataclass
class KeptWithNorm:
    """A use whose norm the user's own norm sampler found."""

    use: Kept
    norm_B: Tensor

    def sq_norm(self) -> Tensor:
        return self.norm_B.square()

    def instantiated(self) -> Tensor:
        return self.use.instantiated()

    def clipped(self, factor_B: Tensor) -> Tensor:
        return self.use.clipped(factor_B)


class LookedUp:
    """Which table entries the rows of a call used, flattened: entry `ids[n]` got `g[n]` from `rows[n]`.

    Args:
        ids_N: `[N]`, int64. rows_N: `[N]`, int64. g_ND: `[N, D]`.
        rectangular: whether the entries are those of a `[B, T]` matrix of ids, row i being sample i.
    """

    def __init__(self, ids_N: Tensor, rows_N: Tensor, g_ND: Tensor, rectangular: bool = False) -> None:
        self.ids_N, self.rows_N, self.rectangular = ids_N, rows_N, rectangular
        self.g_ND = g_ND.to(torch.promote_types(g_ND.dtype, torch.float32))

    def grad_rows(self, n_rows: int, n_entries: int) -> Tensor:
        """`[n_rows, V, D]`."""
        flat = self.g_ND.new_zeros(n_rows * n_entries, self.g_ND.shape[-1])
        flat.index_add_(0, self.rows_N * n_entries + self.ids_N, self.g_ND)
        return flat.view(n_rows, n_entries, self.g_ND.shape[-1])


@dataclass
class KeptLookup:
    """Table entries that samples looked up."""

    looked: LookedUp
    n_samples: int
    shape: torch.Size

    def sq_norm(self) -> Tensor:
        return segment_sq_norm(self.looked, self.n_samples, self.shape[0])

    def instantiated(self) -> Tensor:
        return self.looked.grad_rows(self.n_samples, self.shape[0])

    def clipped(self, factor_B: Tensor) -> Tensor:
        looked = self.looked
        factor_N = factor_B.to(looked.g_ND.dtype)[looked.rows_N].unsqueeze(1)
        scaled = (looked.g_ND * factor_N).masked_fill(factor_N == 0, 0)
        return scaled.new_zeros(self.shape).index_add_(0, looked.ids_N, scaled)


def segment_sq_norm(looked: LookedUp, n_samples: int, n_entries: int) -> Tensor:
    """Squared norm of each sample's embedding gradient, `[n_samples]`, without `[B, V, D]` and without a host sync.

    Positions are sorted by (sample, id), backprops added per segment, squared segment sums added per sample.
    """
    key_N, order = (looked.rows_N * n_entries + looked.ids_N).sort()
    starts = torch.ones_like(key_N, dtype=torch.bool)
    starts[1:] = key_N[1:] != key_N[:-1]
    segment_N = starts.cumsum(0) - 1
    sums = torch.zeros_like(looked.g_ND).index_add_(0, segment_N, looked.g_ND[order])
    sample_of_segment = torch.zeros_like(key_N).scatter_(0, segment_N, key_N // n_entries)
    norms = looked.g_ND.new_zeros(n_samples)
    return norms.index_add_(0, sample_of_segment, sums.square().sum(1))


def joint_sq_norm(uses: Sequence[Kept]) -> Tensor:
    """Squared norm of the sum of several calls' gradients of one parameter, `[B]`.

    Products of one shape join along their positions, lookups along their entries, a lookup and a product (tied embedding
    and head) by their cross term; anything else is instantiated and added.
    """
    if len(uses) == 1:
        return uses[0].sq_norm()
    products = [use for use in uses if isinstance(use, KeptProduct)]
    lookups = [use for use in uses if isinstance(use, KeptLookup)]
    if len(products) == len(uses):
        return gram_sq_norm(*_joined(products)).clamp_(min=0)
    if len(lookups) == len(uses):
        return _joined_lookup(lookups).sq_norm()
    if products and lookups and len(products) + len(lookups) == len(uses):
        a_BKTD, g_BKTP = _joined(products)
        lookup = _joined_lookup(lookups)
        total = gram_sq_norm(a_BKTD, g_BKTP) + lookup.sq_norm()
        return total.add_(_cross_term(lookup, a_BKTD[:, 0], g_BKTP[:, 0]), alpha=2).clamp_(min=0)
    total = uses[0].instantiated()
    for use in uses[1:]:
        total = total + use.instantiated()
    return KeptRows(total).sq_norm()


def _joined(products: Sequence[KeptProduct]) -> tuple[Tensor, Tensor]:
    pairs = [product.pairs() for product in products]
    if len(pairs) == 1:
        return pairs[0]
    return torch.cat([a for a, _ in pairs], 2), torch.cat([g for _, g in pairs], 2)


def _joined_lookup(lookups: Sequence[KeptLookup]) -> KeptLookup:
    if len(lookups) == 1:
        return lookups[0]
    looked = [lookup.looked for lookup in lookups]
    joined = LookedUp(
        torch.cat([one.ids_N for one in looked]),
        torch.cat([one.rows_N for one in looked]),
        torch.cat([one.g_ND for one in looked]),
    )
    return KeptLookup(joined, lookups[0].n_samples, lookups[0].shape)


def _cross_term(lookup: KeptLookup, a_BSD: Tensor, g_BSV: Tensor) -> Tensor:
    """`<embedding gradient, head gradient>` per sample: `sum_{n, s} g_head[b, s, id_n] <g_emb[n], a_head[b, s]>`.

    Entries are taken one sample row after the other; `[N, S]` is the largest thing formed.
    """
    looked = lookup.looked
    dtype = looked.g_ND.dtype
    rows = looked.rows_N
    n, b = rows.shape[0], lookup.n_samples
    if looked.rectangular and b:
        ids_BT, g_BTD = looked.ids_N.view(b, -1), looked.g_ND.view(b, n // b, -1)
        inner_BTS = torch.matmul(g_BTD, a_BSD.to(dtype).transpose(1, 2))
        head_BST = g_BSV.gather(2, ids_BT.unsqueeze(1).expand(-1, g_BSV.shape[1], -1))
        return (inner_BTS * head_BST.transpose(1, 2).to(dtype)).flatten(1).sum(1)
    inner_NS = torch.einsum("nd,nsd->ns", looked.g_ND, a_BSD[rows].to(dtype))
    head_NS = g_BSV[rows, :, looked.ids_N].to(dtype)
    return looked.g_ND.new_zeros(b).index_add_(0, rows, (inner_NS * head_NS).sum(1))
