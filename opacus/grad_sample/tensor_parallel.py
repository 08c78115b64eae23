"""Tensor parallel models (`parallelize_module`, alone or under `fully_shard`): which axis they are split over, what is refused.

A layer of such a model shows DTensor parameters in its forward. At rest, under FSDP2, they lie on a mesh of more dimensions:
those of FSDP first, the tensor-parallel one last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.distributed.sharding import reshard
from opacus.errors import ConfigurationError
from opacus.grad_sample.ownership import layers_with_parameters
from opacus.grad_sample.pieces import can_be_split, is_split_tensor, refusal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agreement_check", "split_of", "tensor_mesh", "tensor_parallel_problems"]


def _tensor_axes(parameter: Any, managed: bool) -> list[int]:
    """Dimensions of the parameter's mesh that are tensor parallel; `managed`: `fully_shard` owns the first one or two."""
    placements = parameter.placements
    first = 0
    if managed:
        first = 2 if len(placements) > 1 and placements[0].is_replicate() else 1  # HSDP repeats, then splits
    return list(range(first, len(placements)))


def _parallel_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any, list[int]]]:
    """`(full name, layer, name in it, parameter, tensor-parallel mesh dimensions)` of tensor-parallel parameters."""
    reshard(root)
    managed = _managed_by_fsdp(root)
    for path, layer, own in layers_with_parameters(root):
        for slot in own:
            parameter: Any = slot.parameter
            if not is_split_tensor(parameter):
                continue
            axes = _tensor_axes(parameter, id(parameter) in managed)
            if axes:
                yield f"{path}.{slot.name}" if path else slot.name, layer, slot.name, parameter, axes


def _managed_by_fsdp(root: nn.Module) -> set[int]:
    if not any(is_split_tensor(p) for p in root.parameters()):
        return set()
    from torch.distributed.fsdp import FSDPModule

    return {id(p) for module in root.modules() if isinstance(module, FSDPModule) for p in module.parameters()}


def tensor_mesh(root: nn.Module) -> DeviceMesh | None:
    """The mesh of one dimension that layers of `root` are split over, trainable or not; None where there is none."""
    for _, _, _, parameter, axes in _parallel_parameters(root):
        mesh = parameter.device_mesh
        return mesh[mesh.mesh_dim_names[axes[-1]]] if mesh.ndim > 1 else mesh
    return None


def split_of(root: nn.Module) -> dict[str, bool]:
    """For each tensor-parallel parameter, by name: whether ranks hold pieces of it (True) or all hold it whole."""
    return {
        name: not parameter.placements[axes[-1]].is_replicate()
        for name, _, _, parameter, axes in _parallel_parameters(root)
    }


def tensor_parallel_problems(root: nn.Module) -> list[str]:
    """What keeps tensor-parallel layers from being clipped exactly, a sentence each; nothing is changed."""
    problems: list[str] = []
    meshes: dict[Any, str] = {}
    for name, layer, short, parameter, axes in _parallel_parameters(root):
        if not parameter.requires_grad:
            continue
        mesh, placement = parameter.device_mesh, parameter.placements[axes[-1]]
        if len(axes) > 1:
            problems.append(
                f"{name} is tensor parallel over {len(axes)} mesh dimensions ({parameter.placements}): one is supported. Call "
                "parallelize_module with a mesh of one dimension."
            )
            continue
        axis = mesh.mesh_dim_names[axes[-1]] if mesh.mesh_dim_names else None
        meshes.setdefault((axis, mesh.size(axes[-1])), name)
        if len(meshes) > 1:
            problems.append(
                f"{name} is tensor parallel over mesh axis {axis!r} of {mesh.size(axes[-1])} ranks, {next(iter(meshes.values()))} "
                "over another: norms are added up over one axis. Parallelize all layers over the same mesh."
            )
        if placement.is_partial():
            problems.append(
                f"{name} is a partial sum over mesh axis {axis!r}: it must be split or replicated."
            )
        elif not placement.is_replicate():
            problems += _split_problems(name, layer, short, parameter, placement.dim, mesh.size(axes[-1]))
    return problems


def _split_problems(
    name: str, layer: nn.Module, short: str, parameter: Tensor, dim: int, ranks: int
) -> list[str]:
    if hasattr(layer, "max_batch_len"):
        return [
            f"{name} is split over tensor-parallel ranks, but it belongs to a recurrent cell ({type(layer).__name__}), whose output "
            "is cut into gates: leave recurrent layers out of the plan."
        ]
    if not can_be_split(layer, short):
        return [refusal(name, layer)]
    rows = parameter.shape[dim]
    if -(-rows // ranks) * (ranks - 1) >= rows:
        return [
            f"{name} is split along a dimension of {rows} over {ranks} tensor-parallel ranks, so that one holds nothing: "
            "leave it out of the plan."
        ]
    return []


def agreement_check(mesh: DeviceMesh, strict: bool) -> Callable[[nn.Module, Any, Any], None]:
    """A forward pre-hook of the model: before its first training forward, ranks of the axis compare their batches.

    Args:
        mesh: the tensor-parallel axis.
        strict: compare values too, not only the number of rows.
    """
    done = False

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal done
        if done or not torch.is_grad_enabled():
            return
        done = True
        shapes, digest = _seen((args, kwargs))
        found: list[Any] = [None] * mesh.size()
        dist.all_gather_object(found, (shapes, digest if strict else ""), group=mesh.get_group())
        problems = [
            f"rank {rank} of the axis was given {_said(theirs)}, rank 0 {_said(found[0][0])}."
            for rank, (theirs, _) in enumerate(found)
            if theirs != found[0][0]
        ]
        if not problems and any(theirs != found[0][1] for _, theirs in found):
            problems = [
                "the first batches have the same shapes but other values (ranks "
                f"{', '.join(str(rank) for rank, one in enumerate(found) if one[1] != found[0][1])} differ from rank 0)."
            ]
        if problems:
            done = False
            raise ConfigurationError(
                "tensor-parallel ranks must be given the same batches",
                [
                    f"{problem} All ranks of a tensor-parallel axis compute one model on the same samples: seed their samplers "
                    "alike, and give each the data of its data-parallel rank."
                    for problem in problems
                ],
            )

    return check


def _seen(inputs: Any) -> tuple[list[tuple[int, ...]], str]:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    digest = hashlib.sha256()
    for tensor in tensors:
        if not is_split_tensor(tensor):  # of one that is split already, each rank has another part
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [tuple(tensor.shape) for tensor in tensors], digest.hexdigest()


def _said(shapes: list[tuple[int, ...]]) -> str:
    return f"inputs of shape {', '.join(map(str, shapes)) or '(none)'}"
