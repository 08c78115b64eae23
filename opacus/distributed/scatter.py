"""Clipped sums of sharded models: each rank forms those of its own samples, and receives its part of everyone's.

Buckets of parameters with one layout and shape, small ones of all shapes together, up to a cap: their gradients are formed in
few launches, and no rank ever holds the gradients of the whole model: at most some four buckets, or gradients that are larger. One reduce-scatter for each bucket, one all-reduce for each
axis over which parameters are repeated (HSDP). Always sums, in at least float32: nothing depends on how many ranks there are.

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
import torch.nn.functional as F
from torch import Tensor

from opacus.devices import computing_device
from opacus.distributed.groups import lost_rank
from opacus.distributed.sharding import Layout, Layouts, axes_of, is_sharded

__all__ = ["BUCKET_ELEMENTS", "reduce_to_shards", "sum_over_data_ranks"]

# the name that newer versions of torch prefer
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

BUCKET_ELEMENTS = 1 << 26  # 256 MiB of float32: a few matrices of one shape, small next to a model
_SMALL = 1 << 14  # elements: parameters up to that travel with others of any shape


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
    form: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    receive: Callable[[Tensor, Tensor], None],
    layouts: Layouts,
    *,
    model_axes: Collection[Any] = (),
    cap: int | None = None,
) -> None:
    """Add up gradients over all data-parallel ranks; each rank receives its own part. Collective.

    Args:
        parameters: sharded parameters, the same on every rank and in the same order.
        form: this rank's gradients of the parameters of a bucket, each in the shape of its layout's piece; None for zero. Asked
            once for each.
        receive: called with each parameter and this rank's part of the sum, a plain tensor of the local part's shape, on its
            device, at least float32.
        layouts: those that are known.
        model_axes: names of the mesh axes that are tensor parallel: nothing is added up over them.
        cap: elements of a bucket; `BUCKET_ELEMENTS` by default.

    Raises:
        RankLostError: if a rank does not come.

    Formal guarantee:
        Each rank's gradient enters the sum exactly once, with factor 1.
    """
    on_its_way: _Travelling | None = None
    for members in _buckets(parameters, layouts, model_axes, BUCKET_ELEMENTS if cap is None else cap):
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


def _buckets(
    parameters: Sequence[Tensor], layouts: Layouts, model_axes: Collection[Any], cap: int
) -> Iterator[list[_Member]]:
    alike: dict[Any, list[_Member]] = {}
    for parameter in parameters:
        layout = layouts.of(parameter, model_axes)
        axis = layout.shard[0] if layout.shard else None
        shape = layout.piece if layout.padded * layout.ranks > _SMALL else ()
        key = (layout.mesh, axis, layout.copies, _dtype(parameter), layout.device, shape)
        alike.setdefault(key, []).append(_Member(parameter, layout))
    for members in alike.values():
        bucket, room = [members[0]], cap - _size(members[0])
        for member in members[1:]:
            if room < _size(member):
                yield bucket
                bucket, room = [], cap
            bucket.append(member)
            room -= _size(member)
        yield bucket


def _size(member: _Member) -> int:
    return member.layout.padded * member.layout.ranks


def _dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _send(members: list[_Member], form: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]) -> _Travelling:
    first = members[0]
    flat = _packed(members, form([member.parameter for member in members]))
    if first.layout.ranks == 1:
        return _Travelling(members, flat, flat[0], None)
    received = flat.new_empty(flat.shape[1])
    group = first.layout.mesh.get_group(first.layout.shard[0])  # type: ignore[index]
    with _named(group):
        work = _reduce_scatter(received, flat.view(-1), group=group, async_op=True)
    return _Travelling(members, flat, received, work)


def _packed(members: list[_Member], gradients: Sequence[Tensor | None]) -> Tensor:
    """`[ranks, elements]`: row r is what rank r holds of each member."""
    rows = [
        _zeros(member) if grad is None else _by_rank(grad, member)
        for member, grad in zip(members, gradients, strict=True)
    ]
    return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0].contiguous()


def _by_rank(grad: Tensor, member: _Member) -> Tensor:
    """`[ranks, elements]`, each rank's part padded to the largest, as `torch.chunk` cuts."""
    layout = member.layout
    grad = grad.to(_dtype(member.parameter))
    if layout.dim:
        grad = grad.movedim(layout.dim, 0)
    missing = layout.padded * layout.ranks - grad.numel()
    if missing:
        grad = F.pad(grad.reshape(-1), (0, missing))
    return grad.reshape(layout.ranks, layout.padded)


def _zeros(member: _Member) -> Tensor:
    layout, parameter = member.layout, member.parameter
    return torch.zeros(
        layout.ranks, layout.padded, dtype=_dtype(parameter), device=computing_device(parameter)
    )


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
        if part.numel() > math.prod(local):
            part = part[: math.prod(local)]
        if dim:
            part = part.view(local[dim], *local[:dim], *local[dim + 1 :]).movedim(0, dim).contiguous()
        # views share the bucket: all of it is waited for by the same step
        receive(member.parameter, part.view(local).to(member.layout.device))
