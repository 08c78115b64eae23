"""What is kept of a parameter between its layer's backward and the moment the clip factors are known.

Three forms: the per-sample gradient itself where it is small, the two factors of a matrix product, or the table entries
that were looked up. Each knows its squared norm and its clipped sum. Uses of one parameter by several calls (a module
called twice, tied weights) are joined before the norm is taken: gradients add, norms do not.

Shapes: B samples, K groups, T positions, D in, P out, V table entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opacus.grad_sample.kernels import fused, gram_norms, position_sums, row_sq_norms
from opacus.grad_sample.products import (
    gram_sq_norm,
    outer_rows,
    product_rounding,
    reduces_float32,
    scaled_product,
)
from opacus.norms import as_rows, row_norms, wide_dtype

__all__ = [
    "Kept",
    "KeptElsewhere",
    "KeptLookup",
    "KeptPositions",
    "KeptProduct",
    "KeptRows",
    "KeptWithNorm",
    "LookedUp",
    "can_merge",
    "joint_sq_norm",
    "launched_with",
    "merged",
    "rows_of",
    "sq_norms",
]


class Kept(Protocol):
    """One call's share of one parameter's per-sample gradients.

    Attributes:
        waits: whether its norm is best taken when the backward has ended, with others like it.
    """

    @property
    def waits(self) -> bool: ...

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

    waits = True

    @property
    def width(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.grad_B.shape[1:])

    @property
    def held_bytes(self) -> int:
        """Of what is kept."""
        return self.grad_B.numel() * self.grad_B.element_size()

    @property
    def written_bytes(self) -> int:
        """Of what a launch writes for this use."""
        return self.width * self.grad_B.element_size()

    def matrix(self) -> Tensor:
        """`[B, elements]`, at least float32."""
        flat = as_rows(self.grad_B)
        return (
            flat if flat.dtype == torch.float32 else flat.to(torch.promote_types(flat.dtype, torch.float32))
        )

    def sq_norm(self) -> Tensor:
        return row_norms(self.matrix()).square()

    def instantiated(self) -> Tensor:
        return self.grad_B

    def clipped(self, factor_B: Tensor) -> Tensor:
        rows = self.matrix()
        factor_B = factor_B.to(rows.device)
        # zero times infinity is no zero: a sample left out must be left out of the product too
        rows = torch.where((factor_B == 0).unsqueeze(1), 0, rows)
        return torch.mv(rows.t(), factor_B.to(rows.dtype)).view(self.grad_B.shape[1:])


@dataclass
class KeptPositions:
    """Backprops of a bias, kept anyway for the weight beside it: `sum_t g_t` is formed when the backward has ended."""

    g_BTP: Tensor

    waits = True

    @property
    def width(self) -> int:
        """Elements of the parameter."""
        return self.g_BTP.shape[-1]

    def rows(self) -> KeptRows:
        """The sums, `[B, P]`."""
        return KeptRows(self.g_BTP.sum(1, dtype=torch.promote_types(self.g_BTP.dtype, torch.float32)))

    def sq_norm(self) -> Tensor:
        return self.rows().sq_norm()

    def instantiated(self) -> Tensor:
        return self.rows().instantiated()

    def clipped(self, factor_B: Tensor) -> Tensor:
        return self.rows().clipped(factor_B)


def rows_of(uses: Sequence[KeptRows | KeptPositions]) -> list[KeptRows]:
    """`uses` as per-sample gradients, those of positions summed in one launch for each shape."""
    found: list[KeptRows | None] = [use if isinstance(use, KeptRows) else None for use in uses]
    alike: dict[object, list[tuple[int, Tensor]]] = {}
    for i, use in enumerate(uses):
        if isinstance(use, KeptPositions):
            g_BTP = use.g_BTP
            alike.setdefault((g_BTP.shape, g_BTP.dtype), []).append((i, g_BTP))
    for group in alike.values():
        for (i, _), sum_BP in zip(group, position_sums([g_BTP for _, g_BTP in group]).unbind(), strict=True):
            found[i] = KeptRows(sum_BP)
    return [rows for rows in found if rows is not None]


@dataclass
class KeptProduct:
    """Activations and backprops of `sum_t g_t a_t^T`.

    Args:
        pairs: returns `(a_BKTD, g_BKTP)`; called again rather than kept where forming them takes memory (convolutions).
        shape: of the parameter; `[K, P, D]` reshapes to it.
        like: what pairs have in common that one launch of the fused kernels can serve; None: they do not take this one.
        held_bytes: what both take, where `like` is there.
    """

    pairs: Callable[[], tuple[Tensor, Tensor]]
    shape: torch.Size
    like: tuple[object, ...] | None = None
    held_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        """Of what a launch writes for this use: both, one of them scaled."""
        return self.held_bytes

    @property
    def waits(self) -> bool:
        return self.like is not None

    def sq_norm(self) -> Tensor:
        return _product_sq_norm(*self.pairs())

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

    waits = False

    def sq_norm(self) -> Tensor:
        return self.norm_B.square()

    def instantiated(self) -> Tensor:
        return self.use.instantiated()

    def clipped(self, factor_B: Tensor) -> Tensor:
        return self.use.clipped(factor_B)


@dataclass
class KeptElsewhere:
    """A use by a layer that computes on another device than its parameter's: what is asked for comes home."""

    use: Kept
    device: torch.device
    home: torch.device

    waits = False

    def sq_norm(self) -> Tensor:
        return self.use.sq_norm().to(self.home)

    def instantiated(self) -> Tensor:
        return self.use.instantiated().to(self.home)

    def clipped(self, factor_B: Tensor) -> Tensor:
        return self.use.clipped(factor_B.to(self.device)).to(self.home)


class LookedUp:
    """Which table entries the rows of a call used, flattened: entry `ids[n]` got `g[n]` from `rows[n]`.

    Args:
        ids_N: `[N]`, int64. rows_N: `[N]`, int64. g_ND: `[N, D]`.
        rectangular: whether the entries are those of a `[B, T]` matrix of ids, row i being sample i.
    """

    def __init__(self, ids_N: Tensor, rows_N: Tensor, g_ND: Tensor, rectangular: bool = False) -> None:
        self.ids_N, self.rows_N, self.rectangular = ids_N, rows_N, rectangular
        self.g_ND = g_ND.to(torch.promote_types(g_ND.dtype, torch.float32))
        self._added_up = False

    def add_up(self, n_entries: int) -> None:
        """Let what a row gave to one entry of the table stand in one place, the first; zeros in the others. No host sync.

        Norm and clipped sum are then of the same numbers: where the parts nearly cancel, rounding each by itself would let
        the clipped sum be longer than the norm says.
        """
        if self._added_up or not self.ids_N.shape[0]:
            return
        key_N, order_N = (self.rows_N * n_entries + self.ids_N).sort(stable=True)
        starts_N = torch.ones_like(key_N, dtype=torch.bool)
        starts_N[1:] = key_N[1:] != key_N[:-1]
        places_N = torch.arange(key_N.shape[0], device=key_N.device)
        first_N = torch.where(starts_N, places_N, 0).cummax(0).values
        target_N = torch.empty_like(order_N).scatter_(0, order_N, order_N[first_N])
        self.g_ND = torch.zeros_like(self.g_ND).index_add_(0, target_N, self.g_ND)
        self._added_up = True

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

    waits = False

    def sq_norm(self) -> Tensor:
        looked = self.looked
        looked.add_up(self.shape[0])
        norm_N = row_norms(looked.g_ND)
        # thousands of terms a sample
        total_B = norm_N.new_zeros(self.n_samples, dtype=wide_dtype(norm_N))
        return total_B.index_add_(0, looked.rows_N, norm_N.to(total_B.dtype).square()).to(norm_N.dtype)

    def instantiated(self) -> Tensor:
        return self.looked.grad_rows(self.n_samples, self.shape[0])

    def clipped(self, factor_B: Tensor) -> Tensor:
        looked = self.looked
        looked.add_up(self.shape[0])
        factor_N = factor_B.to(looked.g_ND.dtype)[looked.rows_N].unsqueeze(1)
        scaled = (looked.g_ND * factor_N).masked_fill(factor_N == 0, 0)
        return scaled.new_zeros(self.shape).index_add_(0, looked.ids_N, scaled)


def launched_with(use: Kept) -> tuple[object, ...] | None:
    """What uses have in common that one launch of the fused kernels can serve; None: they do not take this one."""
    if isinstance(use, KeptProduct):
        return use.like
    if isinstance(use, KeptRows) and use.grad_B.dtype == torch.float32 and fused(use.grad_B):
        return use.grad_B.shape[0], use.width, use.grad_B.device
    return None


def sq_norms(uses: Sequence[Sequence[Kept]]) -> list[Tensor]:
    """`joint_sq_norm` of each of several parameters' uses; those of one form and shape, used once, in one launch."""
    found: list[Tensor | None] = [None] * len(uses)
    alike: dict[object, list[tuple[int, Kept]]] = {}
    for i, one in enumerate(uses):
        like = launched_with(one[0]) if len(one) == 1 else None
        if like is None:
            found[i] = joint_sq_norm(one)
        else:
            alike.setdefault(like, []).append((i, one[0]))
    for group in alike.values():
        products = [use for _, use in group if isinstance(use, KeptProduct)]
        if products:
            pairs = [product.pairs() for product in products]
            a_BTD, g_BTP = [a[:, 0] for a, _ in pairs], [g[:, 0] for _, g in pairs]
            norms_LB = _with_room(*gram_norms(a_BTD, g_BTP), product_rounding(a_BTD[0], g_BTP[0]))
        else:
            norms_LB = row_sq_norms([use.matrix() for _, use in group if isinstance(use, KeptRows)])
        for (i, _), sq_norm_B in zip(group, norms_LB.unbind(), strict=True):
            found[i] = sq_norm_B
    return [sq_norm_B for sq_norm_B in found if sq_norm_B is not None]


def merged(uses: Sequence[Kept]) -> list[Kept]:
    """Several calls' uses of one parameter with those added up that can be: norm and clipped sum are then of the same numbers.

    Per-sample gradients become one, in at least float32, and lookups one where nothing else is among the uses.
    """
    rows = [use for use in uses if _has_rows(use)]
    lookups = [use for use in uses if isinstance(use, KeptLookup)]
    if len(uses) > 1 and len(lookups) == len(uses):
        return [_joined(lookups)]
    if len(rows) < 2:
        return list(uses)
    total = rows[0].instantiated()
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    for use in rows[1:]:
        total = total + use.instantiated()
    return [*(use for use in uses if not _has_rows(use)), KeptRows(total)]


def can_merge(use: Kept) -> bool:
    """Whether `merged` may add `use` to others."""
    return _has_rows(use) or isinstance(use, KeptLookup)


def _has_rows(use: Kept) -> bool:
    if isinstance(use, (KeptElsewhere, KeptWithNorm)):
        return _has_rows(use.use)
    return isinstance(use, (KeptRows, KeptPositions))


def joint_sq_norm(uses: Sequence[Kept]) -> Tensor:
    """Squared norm of the sum of several calls' gradients of one parameter, `[B]`.

    Products with equal groups join along their positions, lookups along their entries, lookups and products (tied embedding
    and head) by their cross terms; anything else is instantiated and added.
    """
    uses = merged(uses)
    if len(uses) == 1:
        return uses[0].sq_norm()
    products = [use for use in uses if isinstance(use, KeptProduct)]
    lookups = [use for use in uses if isinstance(use, KeptLookup)]
    if products and len(products) + len(lookups) == len(uses):
        pairs = [product.pairs() for product in products]
        groups = {a_BKTD.shape[1] for a_BKTD, _ in pairs}
        can_cross = groups == {1} and all(lookup.looked.rectangular for lookup in lookups)
        if can_cross or (len(groups) == 1 and not lookups):
            a_BKTD, g_BKTP = (torch.cat(sides, 2) for sides in zip(*pairs, strict=True))
            return _tied_sq_norm(lookups, a_BKTD, g_BKTP) if lookups else _product_sq_norm(a_BKTD, g_BKTP)
    return _instantiated_sq_norm(uses)


def _instantiated_sq_norm(uses: Sequence[Kept]) -> Tensor:
    """Of uses that are clipped one by one all the same: with room for what each of them may round."""
    total: Tensor | None = None
    room_B: Tensor | float = 0.0
    for use in uses:
        rows = KeptRows(use.instantiated()).matrix()
        rounding = 8 * torch.finfo(rows.dtype).eps
        size_B = row_norms(rows)
        if isinstance(use, KeptProduct):
            a_BKTD, g_BKTP = use.pairs()
            rounding = max(rounding, product_rounding(a_BKTD, g_BKTP))
            size_BKT = row_norms(a_BKTD.flatten(0, -2)) * row_norms(g_BKTP.flatten(0, -2))
            size_B = torch.linalg.vector_norm(size_BKT.view(a_BKTD.shape[:3]).sum(2), dim=1).to(size_B)
        room_B = rounding * size_B + room_B
        total = rows if total is None else total + rows
    assert total is not None
    return (row_norms(total) + room_B).square()


def _joined(lookups: Sequence[KeptLookup]) -> KeptLookup:
    if len(lookups) == 1:
        return lookups[0]
    looked = [lookup.looked for lookup in lookups]
    together = LookedUp(
        torch.cat([one.ids_N for one in looked]),
        torch.cat([one.rows_N for one in looked]),
        torch.cat([one.g_ND for one in looked]),
    )
    return KeptLookup(together, lookups[0].n_samples, lookups[0].shape)


def _tied_sq_norm(lookups: Sequence[KeptLookup], a_B1SD: Tensor, g_B1SV: Tensor) -> Tensor:
    """Of a table that is looked up and multiplied with: `|lookups|^2 + |products|^2 + 2 <lookups, products>`."""
    together = _joined(lookups)
    rounding = product_rounding(a_B1SD, g_B1SV)
    if reduces_float32(
        a_B1SD.device
    ):  # the three terms may cancel: none of them may round its operands on its own
        a_B1SD, g_B1SV = a_B1SD.double(), g_B1SV.double()
    sq_norm_B, size_B = gram_sq_norm(a_B1SD, g_B1SV)
    total_B = sq_norm_B + together.sq_norm()
    for lookup in lookups:
        total_B = total_B.add(_cross_term(lookup, a_B1SD[:, 0], g_B1SV[:, 0]), alpha=2)
    looked = together.looked
    size_N = torch.linalg.vector_norm(looked.g_ND, dim=1)
    lookup_size_B = size_N.new_zeros(together.n_samples).index_add_(0, looked.rows_N, size_N)
    dtype = looked.g_ND.dtype
    return _with_room(total_B.to(dtype), (size_B + lookup_size_B).to(dtype), rounding)


def _product_sq_norm(a_BKTD: Tensor, g_BKTP: Tensor) -> Tensor:
    return _with_room(*gram_sq_norm(a_BKTD, g_BKTP), product_rounding(a_BKTD, g_BKTP))


def _with_room(sq_norm_B: Tensor, size_B: Tensor, rounding: float) -> Tensor:
    """Squared norms from inner products of terms of size S, made larger by what rounding may have taken from them.

    Inner products err in proportion to S^2 in their own precision. Where terms nearly cancel that may exceed the squared norm
    itself: without room for it a sample could be clipped too little, by any factor. `rounding * S` is added to the norm for
    products in reduced precision: there the clipped sum may be longer than the norm says. (Instantiated gradients need no
    room: their norm and their sum are taken of the same numbers.)
    """
    # abs, not clamp: an overflow to minus infinity must not pass for a norm of 0
    own_B = torch.addcmul(sq_norm_B.abs(), size_B, size_B, value=4 * torch.finfo(sq_norm_B.dtype).eps)
    return torch.add(own_B.sqrt(), size_B, alpha=rounding).square() if rounding else own_B


def _cross_term(lookup: KeptLookup, a_BSD: Tensor, g_BSV: Tensor) -> Tensor:
    """`<embedding gradient, head gradient>` per sample: `sum_{t, s} g_head[b, s, id_t] <g_emb[b, t], a_head[b, s]>`."""
    looked, b = lookup.looked, lookup.n_samples
    dtype = torch.promote_types(looked.g_ND.dtype, a_BSD.dtype)
    positions = looked.ids_N.shape[0] // max(1, b)
    ids_BT, g_BTD = looked.ids_N.view(b, positions), looked.g_ND.view(b, positions, looked.g_ND.shape[-1])
    inner_BTS = torch.matmul(g_BTD.to(dtype), a_BSD.to(dtype).transpose(1, 2))
    head_BST = g_BSV.gather(2, ids_BT.unsqueeze(1).expand(-1, g_BSV.shape[1], -1))
    return (inner_BTS * head_BST.transpose(1, 2).to(dtype)).flatten(1).sum(1)
