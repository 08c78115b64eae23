"""Where the batch dimension lies, and how many rows the batch has.

The model's own inputs say it; layers inside must agree. A layer that sees another number of rows has
lost the samples (broadcast later, or folded with positions): that is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

__all__ = [
    "RowCount",
    "bags_of",
    "batch_dim",
    "expand_position_ids",
    "first_dim_is_batch",
    "pad_rows",
    "takes_ids",
]

# torch itself fixes dimension 0 of their inputs as the batch
_BATCH_IS_FIRST = (
    nn.modules.conv._ConvNd,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.EmbeddingBag,
)


class RowCount:
    """Row counts that the inputs of the model's current call admit."""

    def __init__(self, batch_first: bool) -> None:
        self._batch_first = batch_first
        self._depth = 0
        self._last: frozenset[int] | None = None

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._depth += 1
        if self._depth == 1:
            sizes: list[int] = []
            _sizes((*args, *kwargs.values()), self._batch_first, sizes)
            self._last = frozenset(sizes) or None

    def leave(self) -> None:
        self._depth = max(0, self._depth - 1)

    def of_output(self, output: Any) -> int | None:
        """The number of rows, told by the model's output where its inputs leave a choice (a mask `[T, T]`)."""
        if self.expected is not None:
            return self.expected
        sizes: list[int] = []
        _sizes([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], self._batch_first, sizes)
        candidates = set(sizes) & (self.allowed or frozenset())
        return candidates.pop() if len(candidates) == 1 else None

    @property
    def outermost(self) -> bool:
        return self._depth == 1

    @property
    def in_model(self) -> bool:
        """Whether the model is being called, rather than a part of it by itself."""
        return self._depth > 0

    @property
    def _recomputing(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    @property
    def allowed(self) -> frozenset[int] | None:
        """Sizes that may be the number of rows; None where the model's inputs do not say."""
        return self._last if self._depth or self._recomputing else None

    @property
    def expected(self) -> int | None:
        """The number of rows, where the inputs leave one choice besides 1 (position ids `[1, T]`)."""
        candidates = (self.allowed or frozenset()) - {1}
        return next(iter(candidates)) if len(candidates) == 1 else None


def _sizes(values: Sequence[Any], batch_first: bool, out: list[int]) -> None:
    for value in values:
        if isinstance(value, PackedSequence):
            out.append(int(value.batch_sizes[0]))
        elif isinstance(value, Tensor):
            if value.dim():
                out.append(value.shape[batch_dim(value, batch_first, frozenset())])
        elif isinstance(value, Mapping):
            _sizes(list(value.values()), batch_first, out)
        elif isinstance(value, (list, tuple)):
            out.append(len(value))
            _sizes(value, batch_first, out)


def batch_dim(tensor: Tensor, batch_first: bool, rows: frozenset[int]) -> int:
    """The batch dimension of `tensor`.

    With `batch_first=False` it is dimension 1 of `[T, B, ...]`; a matrix of features `[B, D]` has its rows
    first all the same, while a matrix of ids is `[T, B]`. Where `rows` names one dimension only, it decides.
    """
    if batch_first or tensor.dim() < 2:
        return 0
    if tensor.dim() > 2:
        return 1
    zero, one = tensor.shape[0] in rows, tensor.shape[1] in rows
    if zero != one:
        return 0 if zero else 1
    return 0 if tensor.is_floating_point() else 1


def first_dim_is_batch(layer: nn.Module) -> bool:
    """Whether `layer` takes its batch first in any model."""
    return isinstance(layer, _BATCH_IS_FIRST)


def bags_of(
    layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], rows: frozenset[int] | None
) -> frozenset[int] | None:
    """Row counts with that of an EmbeddingBag added whose offsets, one more than bags, are the model's input."""
    if not rows or not isinstance(layer, nn.EmbeddingBag) or not layer.include_last_offset:
        return rows
    offsets = args[1] if len(args) > 1 else kwargs.get("offsets")
    if isinstance(offsets, Tensor) and offsets.shape[0] in rows:
        return rows | {offsets.shape[0] - 1}
    return rows


def takes_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is given integers: an embedding, or an adapter around one."""
    for value in args:  # asked of every call: a generator costs more than the question
        if isinstance(value, Tensor) and not value.is_floating_point():
            return True
    return bool(kwargs) and takes_ids(tuple(kwargs.values()), {})


def expand_position_ids(
    args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None, batch_first: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give ids of shape `[1, T]` (`[T, 1]` time first) one row per sample, so that their embedding's gradient keeps the samples apart.

    GPT-2, BERT and OPT look position ids up once and broadcast the result over the batch: the sum over
    samples would be taken before any hook sees it. Expanding costs no copy of the ids. It is done where ids are the only
    tensor that the layer is given: an embedding, or an adapter around one.
    """
    if rows is None:
        return None
    tensors = [(i, value) for i, value in enumerate(args) if isinstance(value, Tensor)]
    named = [(name, value) for name, value in kwargs.items() if isinstance(value, Tensor)]
    if len(tensors) + len(named) != 1:
        return None
    _, ids = (*tensors, *named)[0]
    dim = 0 if batch_first else 1
    if ids.dim() != 2 or ids.shape[dim] != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        return None
    ids = ids.expand(rows, -1) if batch_first else ids.expand(-1, rows)
    if named:
        return args, {**kwargs, named[0][0]: ids}
    return tuple(ids if i == tensors[0][0] else value for i, value in enumerate(args)), kwargs


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Append zero rows up to `rows`: samples whose sequence has ended take no part in this call."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
