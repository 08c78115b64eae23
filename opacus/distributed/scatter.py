"""Clipped sums of sharded models: each rank forms those of its own samples, and receives its part of everyone's.

Buckets of consecutive parameters with one layout, up to a cap; one whole gradient at a time lies next to a bucket, so that
no rank ever holds the gradients of the whole model. One reduce-scatter for each bucket, one all-reduce for each axis over which
parameters are repeated (HSDP). Always sums, in at least float32: nothing depends on how many ranks there are.

Every rank walks the same parameters in the same order, whatever its own samples used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.devices import computing_device
from opacus.distributed.groups import lost_rank
from opacus.distributed.sharding import Layout, axes_of, is_sharded, layout_of, local_of

__all__ = ["BUCKET_ELEMENTS", "reduce_to_shards", "sum_over_data_ranks"]

# the name that newer versions of torch prefer
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BUCKET_ELEMENTS = 1 << 24  # 64 MiB of float32: large enough for full bandwidth, small next to a gradient
_SMALL = 1 << 14  # elements; of norm layers and biases


@dataclass
class _Member:
    parameter: Tensor
    layout: Layout


@dataclass
class _Travelling:
    """A bucket on its way; `sent` is held until it has arrived."""

    members: list[_Member]
    sent: Tensor
    received: Tensor
    work: Any


def reduce_to_shards(
    parameters: Sequence[Tensor],
    form: Callable[[Tensor], Tensor | None],
    receive: Callable[[Tensor, Tensor], None],
    *,
    model_axes: Collection[Any] = (),
    cap: int | None = None,
) -> None:
    """Add up gradients over all data-parallel ranks; each rank receives its own part. Collective.

    Args:
        parameters: sharded parameters, the same on every rank and in the same order.
        form: this rank's gradient of a parameter, in the shape of its layout's piece; None for zero. Asked once for each.
        receive: called with each parameter and this rank's part of the sum, a plain tensor of the local part's shape, on its
            device, at least float32.
        model_axes: names of the mesh axes that are tensor parallel: nothing is added up over them.
        cap: elements of a bucket; `BUCKET_ELEMENTS` by default.

    Raises:
        RankLostError: if a rank does not come.

    Formal guarantee:
        Each rank's gradient enters the sum exactly once, with factor 1.
    """
    on_its_way: _Travelling | None = None
    for members in _buckets(parameters, model_axes, BUCKET_ELEMENTS if cap is None else cap):
        travelling = _send(members, form)  # while the bucket before is on its way
        if on_its_way is not None:
            _arrive(on_its_way, receive)
        on_its_way = travelling
    if on_its_way is not None:
        _arrive(on_its_way, receive)


def sum_over_data_ranks(
    value: Tensor, parameters: Sequence[Tensor], model_axes: Collection[Any] = ()
) -> Tensor:
    """The sum of `value` over the ranks that have samples of their own, according to the meshes of `parameters`. Collective."""
    axes = {
        axis: (p.device_mesh, d)  # type: ignore[attr-defined]
        for p in parameters
        if is_sharded(p)
        for d, axis in enumerate(axes_of(p.device_mesh))  # type: ignore[attr-defined]
        if axis not in model_axes
    }
    total = value.clone()
    for mesh, d in axes.values():
        dist.all_reduce(total, group=mesh.get_group(d))
    return total


def _buckets(parameters: Sequence[Tensor], model_axes: Collection[Any], cap: int) -> Iterator[list[_Member]]:
    bucket: list[_Member] = []
    last, room = None, 0
    for parameter in parameters:
        layout = layout_of(parameter, model_axes)
        axis = layout.shard[0] if layout.shard else None
        key = (layout.mesh, axis, layout.copies, _dtype(parameter), parameter.device)
        size = layout.padded * layout.ranks
        if bucket and (key != last or room < size):
            yield bucket
            bucket = []
        if not bucket:
            last, room = key, cap
        bucket.append(_Member(parameter, layout))
        room -= size
    if bucket:
        yield bucket


def _dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _send(members: list[_Member], form: Callable[[Tensor], Tensor | None]) -> _Travelling:
    first = members[0]
    ranks, dtype = first.layout.ranks, _dtype(first.parameter)
    flat = _packed(members, form, ranks, dtype)
    if ranks == 1:
        return _Travelling(members, flat, flat[0], None)
    received = flat.new_empty(flat.shape[1])
    group = first.layout.mesh.get_group(first.layout.shard[0])  # type: ignore[index]
    with _named(group):
        work = _reduce_scatter(received, flat.view(-1), group=group, async_op=True)
    return _Travelling(members, flat, received, work)


def _packed(
    members: list[_Member], form: Callable[[Tensor], Tensor | None], ranks: int, dtype: torch.dtype
) -> Tensor:
    """`[ranks, elements]`: row r is what rank r holds of each member, padded as `torch.chunk` cuts."""
    alone = members[0]
    if len(members) == 1 and alone.layout.piece and alone.layout.piece[alone.layout.dim] % ranks == 0:
        grad = form(alone.parameter)
        if grad is not None:  # a large one travels as it is
            return grad.to(dtype).movedim(alone.layout.dim, 0).reshape(ranks, -1)
        return _zeros(alone, ranks, alone.layout.padded, dtype)
    flat = _zeros(alone, ranks, sum(member.layout.padded for member in members), dtype)
    start = 0
    there: list[Tensor] = []
    small: list[Tensor] = []  # copied in one launch
    for member in members:
        grad = form(member.parameter)
        if grad is not None:
            rows = grad.movedim(member.layout.dim, 0) if grad.dim() else grad.view(1)
            for r, part in enumerate(rows.split(max(1, -(-rows.shape[0] // ranks)))):
                place = flat[r, start : start + part.numel()].view(part.shape)
                if part.numel() <= _SMALL:
                    there.append(place)
                    small.append(part)
                else:
                    place.copy_(part)
        start += member.layout.padded
        del grad
    if small:
        torch._foreach_copy_(there, small)
    return flat


def _zeros(member: _Member, ranks: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(ranks, width, dtype=dtype, device=computing_device(member.parameter))


@contextlib.contextmanager
def _named(group: Any) -> Iterator[None]:
    """Say what failed, and which ranks are silent, where a collective of `group` does."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(group, "add up clipped gradients over ranks", error) from error


def _arrive(bucket: _Travelling, receive: Callable[[Tensor, Tensor], None]) -> None:
    received, layout = bucket.received, bucket.members[0].layout
    if bucket.work is not None:
        with _named(layout.mesh.get_group(layout.shard[0])):  # type: ignore[index]
            bucket.work.wait()
    for axis in layout.copies:
        group = layout.mesh.get_group(axis)
        with _named(group):
            dist.all_reduce(received, group=group)
    parts = received.split([member.layout.padded for member in bucket.members])
    for member, part in zip(bucket.members, parts, strict=True):
        local, dim = member.layout.local, member.layout.dim
        moved = (local[dim], *local[:dim], *local[dim + 1 :]) if local else ()
        part = part[: math.prod(local)].view(moved)
        part = part.movedim(0, dim) if local else part
        # views share the bucket: all of it is waited for by the same step
        receive(member.parameter, part.to(local_of(member.parameter).device).contiguous())
