"""Tensor parallel: what this rank's piece of a parameter has to do with a layer's call.

`parallelize_module` makes a layer compute with DTensors. A call is captured inside the style's own hooks, so its inputs and
backprops are DTensors too, however the style laid them out. Here they are brought to what the piece of the parameter needs,
and handed to the ordinary layer rules as plain tensors:

    Linear, split along P          a whole, g split along P
    Linear, split along D          a split along D, g whole
    Embedding, split along V       ids whole, shifted, those of other ranks masked
    Embedding, split along D       ids whole, g split along D
    LayerNorm, RMSNorm, T split    a and g as they lie; each sample's rows are added up over the ranks (`adds_up`)
    anything else, held whole      a and g whole

Nothing moves for the styles of torch as they are; a rank computes from what it holds.

Shapes: B samples, T positions, D in, P out, V table entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.embedding import EMBEDDING
from opacus.grad_sample.layer_norm import LAYER_NORM
from opacus.grad_sample.linear import LINEAR
from opacus.grad_sample.ownership import Slot
from opacus.grad_sample.rms_norm import RMS_NORM
from opacus.grad_sample.rules import builtin_rule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from opacus.grad_sample.captured import Captured

__all__ = ["Piece", "axis_of", "can_be_split", "is_split_tensor", "local_calls", "pieces_of"]


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that this rank of a tensor-parallel axis holds, as its layer sees it in a forward.

    Attributes:
        mesh: the axis, a mesh of one dimension.
        dim: the dimension along which the parameter is split; None: every rank holds all of it.
        shape: of the piece.
        start: index of the piece's first entry along `dim`.
    """

    mesh: DeviceMesh
    dim: int | None
    shape: torch.Size
    start: int = 0

    @property
    def split(self) -> bool:
        return self.dim is not None


def is_split_tensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor (asked without importing torch's module of them)."""
    return type(tensor) is not nn.Parameter and isinstance(tensor, Tensor) and hasattr(tensor, "placements")


def axis_of(parameter: Any, where: str) -> tuple[DeviceMesh, int | None]:
    """`(mesh, dim)` of a DTensor parameter as a layer sees it: the axis, and the dimension that is split over it.

    Raises:
        PerSampleGradientError: if it lies on a mesh of several dimensions, or is a sum that was not taken yet.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or placements[0].is_partial():
        raise PerSampleGradientError(
            "per-sample gradients cannot be computed",
            [
                f"{where} is a DTensor with placements {placements} on a mesh of {mesh.ndim} dimensions: tensor parallel layers "
                "are supported over one mesh dimension, split or replicated (parallelize_module)."
            ],
        )
    if placements[0].is_replicate():
        return mesh, None
    return mesh, placements[0].dim % parameter.dim()


def pieces_of(path: str, slots: Sequence[Slot], names: tuple[str, ...]) -> dict[str, Piece] | None:
    """This rank's pieces of the parameters `names`, at the time of a call; None where they are plain tensors."""
    found: dict[str, Piece] = {}
    for slot in slots:
        parameter: Any = slot.parameter
        if slot.name not in names or not is_split_tensor(parameter):
            continue
        mesh, dim = axis_of(parameter, f"{path}.{slot.name}")
        local = parameter.to_local().shape
        start = 0
        if dim is not None:  # as torch.chunk cuts
            chunk = -(-parameter.shape[dim] // mesh.size())
            start = min(parameter.shape[dim], chunk * mesh.get_local_rank())
        found[slot.name] = Piece(mesh, dim, local, start)
    return found or None


def can_be_split(layer: nn.Module, name: str) -> bool:
    """Whether the parameter `name` of `layer` may be split: whether its rule is known for a piece of it."""
    return builtin_rule(layer, (name,)) in (LINEAR, EMBEDDING)


def local_calls(captured: Captured, pieces: Mapping[str, Piece], where: str) -> list[Captured]:
    """The call as this rank's pieces see it: plain tensors, a call for each way that they need them.

    Args:
        captured: a call with DTensors. pieces: of its parameters. where: the layer, for messages.

    Raises:
        PerSampleGradientError: if a parameter is split whose layer has no rule for a piece.
    """
    groups: dict[str, list[str]] = {}
    for name in captured.names:
        if name in pieces and pieces[name].split and not can_be_split(captured.layer, name):
            raise PerSampleGradientError(
                "per-sample gradients cannot be computed", [refusal(f"{where}.{name}", captured.layer)]
            )
        groups.setdefault(_way(captured.layer, name, pieces), []).append(name)
    return [_local_call(captured, way, tuple(names), pieces) for way, names in groups.items()]


def refusal(where: str, layer: nn.Module) -> str:
    """Why a split parameter of `layer` is refused."""
    return (
        f"{where} is split over tensor-parallel ranks, and for a piece of a {type(layer).__name__}'s parameter no exact "
        "per-sample gradient is known (it is for Linear and Embedding): replicate it, or freeze it."
    )


def _way(layer: nn.Module, name: str, pieces: Mapping[str, Piece]) -> str:
    """What the parameter needs of the call; see the table above."""
    rule = builtin_rule(layer, (name,))
    dim = pieces[name].dim if name in pieces else None
    if dim is None:
        if rule is LINEAR and name == "bias" and "weight" in pieces and pieces["weight"].dim == 1:
            return "in"  # the bias needs g whole as the weight does, and nothing of a
        return "positions" if rule in (LAYER_NORM, RMS_NORM) and name in pieces else "whole"
    if isinstance(layer, nn.Embedding):
        return "vocabulary" if dim == 0 else "out"
    return "in" if dim == 1 else "out"


def _local_call(
    captured: Captured, way: str, names: tuple[str, ...], pieces: Mapping[str, Piece]
) -> Captured:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def whole(tensor: Any) -> Tensor:
        return _local(tensor, Replicate())

    def last_split(tensor: Any) -> Tensor:
        return _local(tensor, Shard(tensor.dim() - 1))

    local = replace(captured, layer=_standing_in(captured.layer, names, pieces), names=names, pieces=pieces)
    if way == "positions":
        placement = _positions_split(captured)
        if placement is not None:
            local.args, local.kwargs = tree_map_only(
                DTensor, lambda t: _local(t, t.placements[0]), (captured.args, dict(captured.kwargs))
            )
            local.outputs = [_local(g, placement) for g in captured.outputs]
            local.adds_up = pieces[names[0]].mesh
            return local
    inputs = last_split if way == "in" else whole
    local.args, local.kwargs = tree_map_only(DTensor, inputs, (captured.args, dict(captured.kwargs)))
    local.outputs = [last_split(g) if way == "out" else whole(g) for g in captured.outputs]
    return _of_entries(local, pieces[names[0]]) if way == "vocabulary" else local


def _positions_split(captured: Captured) -> Any:
    """How a normalisation's input, batch first, is split over positions; None if it is not."""
    x: Any = next(
        (leaf for leaf in tree_leaves((captured.args, captured.kwargs)) if is_split_tensor(leaf)), None
    )
    if x is None:
        return None
    placement = captured.batch_first(x).placements[0]  # type: ignore[attr-defined]
    last = x.dim() - len(captured.layer.normalized_shape)
    return placement if placement.is_shard() and 0 < placement.dim < last else None


def _local(tensor: Any, placement: Any) -> Tensor:
    if not is_split_tensor(tensor):
        return tensor
    local = tensor.redistribute(placements=[placement]).to_local()
    # a collective still under way: kernels that take addresses must not see its stand-in
    return local.wait() if hasattr(local, "wait") else local


def _standing_in(layer: nn.Module, names: tuple[str, ...], pieces: Mapping[str, Piece]) -> nn.Module:
    """`layer` with this rank's pieces as its parameters, for rules and samplers that ask for their shapes or values."""
    parameters: dict[str, nn.Parameter | None] = {}
    for name, parameter in layer._parameters.items():
        if parameter is None or name not in pieces:
            parameters[name] = parameter
            continue
        piece, whole = pieces[name], parameter.detach()
        local: Tensor = whole.to_local() if is_split_tensor(whole) else whole  # type: ignore[attr-defined]
        if local.shape != piece.shape:  # sharded again since the forward: its shape is all there is
            local = torch.full((), torch.nan, dtype=local.dtype, device=local.device).expand(piece.shape)
        parameters[name] = nn.Parameter(local, requires_grad=name in names)
    # a class that fully_shard made builds another layer in its __new__
    standing_in = object.__new__(type(layer))
    standing_in.__dict__.update(layer.__dict__, _parameters=parameters)
    return standing_in


def _of_entries(captured: Captured, piece: Piece) -> Captured:
    """An embedding's call with ids counted from the first entry that this rank holds; others' ids take nothing."""
    ids, g = captured.inputs[0], captured.backprops
    here = (ids >= piece.start) & (ids < piece.start + piece.shape[0])
    if captured.layer.padding_idx is not None:
        here &= ids != captured.layer.padding_idx
        captured.layer.padding_idx = None  # of the stand-in
    g = torch.where(here.unsqueeze(-1), g, torch.zeros((), dtype=g.dtype, device=g.device))
    ids = torch.where(here, ids - piece.start, torch.zeros_like(ids))
    # batch first already, as `inputs` and `backprops` are
    return replace(captured, args=(ids,), kwargs={}, outputs=[g], batch_dim_of=_first)


def _first(tensor: Tensor) -> int:
    return 0
