"""Which records a rank of a sharded model draws: its data-parallel share, the same for all ranks of a tensor-parallel axis."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from opacus.distributed.groups import default_group
from opacus.distributed.sharding import axes_of, is_fsdp, is_sharded
from opacus.grad_sample.tensor_axis import TensorAxis

__all__ = ["common_stream", "data_group", "group_of", "share_of_records"]


def share_of_records(model: nn.Module, generator: torch.Generator | None) -> dict[str, Any]:
    """Keyword arguments for `DPDataLoader.from_data_loader`; collective where `model` has a tensor-parallel axis.

    Args:
        model: sharded, or not.
        generator: the loader's own stream; None stands for torch's default one.
    """
    axis = TensorAxis(model)
    share: dict[str, Any] = {"distributed": is_fsdp(model)}
    if is_fsdp(model):
        share["process_group"] = data_group(model, axis.names)
    if axis.mesh is not None:
        share["generator"] = common_stream(generator, axis.mesh)
    return share


def common_stream(generator: torch.Generator | None, mesh: Any) -> torch.Generator:
    """A stream that all ranks of the axis `mesh` have: seeded from the next number of the first one's `generator`.

    Ranks that were seeded alike, or not, sample the same batches from then on.
    """
    device = torch.device("cpu") if generator is None else generator.device
    seed = int(torch.randint(2**32, (), generator=generator, device=device))
    seeds: list[Any] = [None] * mesh.size()
    dist.all_gather_object(seeds, seed, group=mesh.get_group())
    return torch.Generator().manual_seed(seeds[0])


def data_group(model: nn.Module, model_axes: Collection[Any]) -> Any:
    """The process group of the ranks that have this rank's place in the tensor-parallel axis: they share out the records.

    Collective over all ranks.

    Args:
        model: under `fully_shard`, over all ranks.
        model_axes: names of the mesh axes that are tensor parallel.
    """
    if not model_axes:
        return default_group()
    meshes = [p.device_mesh for p in model.parameters() if is_sharded(p)]  # type: ignore[attr-defined]
    mesh = max(meshes, key=lambda one: one.ndim)
    data = [d for d, axis in enumerate(axes_of(mesh)) if axis not in model_axes]
    if len(data) == 1:
        return mesh.get_group(data[0])
    # one column of ranks for each place in the tensor-parallel axis
    columns = mesh.mesh.permute(*data, *(d for d in range(mesh.ndim) if d not in data)).flatten(
        0, len(data) - 1
    )
    group, _ = dist.new_subgroups_by_enumeration(columns.flatten(1).T.tolist())
    return group


_groups: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def group_of(optimizer: Any) -> Any:
    """The ranks whose samples meet in a step of `optimizer`; None where it is this process alone. The first call is collective."""
    own = getattr(optimizer, "process_group", None)
    booked = getattr(optimizer, "_booked", None)
    if own is not None or booked is None or booked.book.homes is None:
        return own
    root = booked.book.root
    if root not in _groups:
        _groups[root] = data_group(root, booked.book.axis.names)
    return _groups[root]
