"""Sharded parameters (FSDP2, HSDP, either of them with tensor parallel): who holds which part of a gradient.

Everything is read from public attributes of `DTensor`: its mesh, its placements, its shape. Which ranks add up their samples'
gradients (data parallel) and which hold pieces of one layer (tensor parallel) is said by the names of the mesh axes.

FSDP2 swaps the parameter objects of a module between forward and step, so what a layer reports is brought home to
the object that the optimizer holds by where it hangs: `Homes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opacus.errors import raise_if_any
from opacus.grad_sample.ownership import Slot

__all__ = [
    "Homes",
    "Layout",
    "Layouts",
    "as_gradient",
    "axes_of",
    "is_fsdp",
    "is_sharded",
    "is_sharded_model",
    "layout_of",
    "local_of",
    "mode_problems",
    "reshard",
    "sharded_findings",
    "sharding_problems",
]

_RECIPE = "Use grad_sample_mode='bk' (one backward, any loss), or 'ghost_fsdp' with the criterion that make_private returns."
_MODES = (
    "bk",
    "ghost",
    "ghost_fsdp",
    "ghost_tp",
)  # that never need a per-sample gradient of a whole parameter at rest


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a `DTensor`."""
    return hasattr(tensor, "device_mesh")


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp import FSDPModule

    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def is_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` manages a part of `model`."""
    return any(True for _ in _fsdp_modules(model))


def is_sharded_model(model: nn.Module) -> bool:
    """Whether any parameter is spread over processes (FSDP2, HSDP, tensor parallel)."""
    return is_fsdp(model) or any(map(is_sharded, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Let every module show its sharded parameters: the root keeps whole ones after a forward without a backward."""
    for module in _fsdp_modules(model):
        module.reshard()


@dataclass(frozen=True)
class Layout:
    """How the ranks share out one parameter's gradient.

    Attributes:
        mesh: of the parameter; None where it is no `DTensor`.
        shard: `(mesh axis, tensor dimension)` over which data-parallel ranks hold pieces; None where each holds all.
        copies: data-parallel mesh axes over which it is repeated (HSDP).
        piece: shape of the gradient that the data-parallel ranks add up: whole, but for tensor parallel's split.
        split: whether tensor parallel splits it.
        local: shape of this rank's part. device: where it lies.
    """

    mesh: Any
    shard: tuple[int, int] | None
    copies: tuple[int, ...]
    piece: tuple[int, ...]
    split: bool
    local: tuple[int, ...]
    device: torch.device

    @functools.cached_property
    def ranks(self) -> int:
        """How many ranks share it out."""
        return self.mesh.size(self.shard[0]) if self.shard else 1

    @property
    def dim(self) -> int:
        """Dimension along which it is cut."""
        return self.shard[1] if self.shard else 0

    @functools.cached_property
    def padded(self) -> int:
        """Elements of the largest part: parts are padded to it, as `torch.chunk` would cut them."""
        if not self.piece:
            return 1
        rows = self.piece[self.dim]
        return -(-rows // self.ranks) * math.prod(self.piece[: self.dim] + self.piece[self.dim + 1 :])


def axes_of(mesh: Any) -> tuple[Any, ...]:
    """Names of a mesh's axes; places of them where it has no names."""
    names = mesh.mesh_dim_names
    return tuple(names) if names else tuple((mesh.ndim, d) for d in range(mesh.ndim))


def layout_of(parameter: Tensor, model_axes: Collection[Any] = ()) -> Layout:
    """How `parameter` is shared out.

    Args:
        parameter: of a model at rest (`reshard`).
        model_axes: names of the mesh axes that are tensor parallel.
    """
    shape = tuple(parameter.shape)
    if not is_sharded(parameter):
        return Layout(None, None, (), shape, False, shape, parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shard, copies, split, piece = None, [], False, list(shape)
    for d, (axis, placement) in enumerate(zip(axes_of(mesh), placements, strict=True)):
        if axis in model_axes:
            if not placement.is_replicate():
                split = True
                rows, size = shape[placement.dim], mesh.size(d)
                each = -(-rows // size)
                piece[placement.dim] = max(0, min(each, rows - mesh.get_local_rank(d) * each))
        elif placement.is_replicate():
            copies.append(d)
        else:
            shard = (d, placement.dim)
    local = local_of(parameter)
    return Layout(mesh, shard, tuple(copies), tuple(piece), split, tuple(local.shape), local.device)


class Layouts:
    """Layouts of parameters, looked at again only where one was sharded or moved since, or other axes are tensor parallel."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Any, Collection[Any], Layout]] = {}

    def of(self, parameter: Tensor, model_axes: Collection[Any] = ()) -> Layout:
        """As `layout_of`."""
        spec = getattr(parameter, "_spec", None)
        known = self._known.get(id(parameter))
        if known is not None:
            same, its_spec, its_axes, layout = known
            unmoved = its_spec is spec and layout.device == parameter.device
            if same is parameter and unmoved and its_axes == model_axes:
                return layout
        layout = layout_of(parameter, model_axes)
        self._known[id(parameter)] = parameter, spec, model_axes, layout
        return layout


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    if not is_sharded(tensor):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[attr-defined]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined]


def as_gradient(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, in the parameter's dtype, as what `parameter.grad` has to be."""
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor

    if local.device.type != parameter.device_mesh.device_type:  # type: ignore[attr-defined]
        # offloaded: from_local would move it to the mesh's devices, where the parameter is not
        gradient = torch.empty_like(parameter, requires_grad=False)
        local_of(gradient).copy_(local)
        return gradient
    # as FSDP2 makes its own; the checks of from_local take many times as long
    return DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[attr-defined]


class Homes:
    """The parameters of a model at rest, by where they hang: those that the optimizer holds.

    Args:
        root: the model.
        model_axes: names of the mesh axes that are tensor parallel.

    Raises:
        ConfigurationError: as `sharding_problems`.
    """

    def __init__(self, root: nn.Module, model_axes: Collection[Any] = ()) -> None:
        raise_if_any("the sharded model cannot be trained privately", sharding_problems(root, model_axes))
        self.root = root
        self.refresh()

    def refresh(self) -> None:
        """Look again: modules may have been replaced, or converted to another dtype."""
        reshard(self.root)
        self._by_place = {
            (id(module), key): p
            for module in self.root.modules()
            for key, p in module._parameters.items()
            if p is not None
        }
        # in the order of named_parameters, each once
        self.parameters = list({id(p): p for p in self._by_place.values()}.values())

    def of(self, slot: Slot) -> nn.Parameter | None:
        """The parameter at rest that hangs where `slot` says."""
        found = self._by_place.get((id(slot.holder), slot.key))
        return slot.parameter if found is None else found

    def clear_grads(self) -> None:
        """Forget gradients of an earlier step, so that one that appears is known to be of this backward."""
        for p in self.parameters:
            if p.requires_grad:
                p.grad = None

    def with_plain_gradient(self) -> list[str]:
        """Names of parameters that FSDP gave a gradient of its own."""
        found = {id(p) for p in self.parameters if p.requires_grad and p.grad is not None}
        if not found:
            return []
        reshard(self.root)
        return [name for name, p in self.root.named_parameters() if id(p) in found]


def sharded_findings(model: nn.Module, grad_sample_mode: str, model_axes: Collection[Any] = ()) -> list[str]:
    """What keeps a sharded model from being trained privately in this mode, a sentence each."""
    problems = mode_problems(model, grad_sample_mode) + sharding_problems(model, model_axes)
    ranks: dict[Any, int] = {}
    for p in model.parameters():
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None:
            ranks.update({axis: mesh.size(d) for d, axis in enumerate(axes_of(mesh))})
    world = torch.distributed.get_world_size()
    if math.prod(ranks.values()) != world:
        problems.append(
            f"the model's mesh has {math.prod(ranks.values())} ranks, torch.distributed runs {world}: records are dealt out to all of "
            "them. Shard over all ranks (a mesh with a second axis repeats the model: HSDP)."
        )
    return problems


def mode_problems(model: nn.Module, grad_sample_mode: str) -> list[str]:
    """Modes that leave per-sample gradients on parameters cannot work where a rank holds parts of them."""
    if grad_sample_mode in _MODES or not is_sharded_model(model):
        return []
    return [
        f"grad_sample_mode {grad_sample_mode!r} keeps a gradient of each sample on each parameter, but the model is sharded. {_RECIPE}"
    ]


def sharding_problems(model: nn.Module, model_axes: Collection[Any] = ()) -> list[str]:
    """What keeps a sharded model from being trained privately, a sentence each; nothing is changed but what `reshard` does.

    Args:
        model: the model.
        model_axes: names of the mesh axes that are tensor parallel.
    """
    reshard(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    problems = []
    if is_fsdp(model):
        problems += [
            f"{name} is trainable, but fully_shard does not manage it (ignored_params, or a part of the model that was not "
            "sharded): nobody would add up its gradients over ranks. Shard the whole model, or freeze it."
            for name, p in trainable
            if not is_sharded(p)
        ]
    sizes: dict[Any, int] = {}
    for name, p in trainable:
        if not is_sharded(p):
            continue
        mesh, cuts = p.device_mesh, []  # type: ignore[attr-defined]
        for d, axis in enumerate(axes_of(mesh)):
            if sizes.setdefault(axis, mesh.size(d)) != mesh.size(d):
                problems.append(
                    f"{name}: its mesh axis {axis!r} has {mesh.size(d)} ranks, another parameter's axis of that name "
                    f"{sizes[axis]}. Give axes of different size different names."
                )
            placement = p.placements[d]  # type: ignore[attr-defined]
            if placement.is_partial():
                problems.append(
                    f"{name} is a partial sum over mesh axis {axis!r}; it must be sharded or repeated."
                )
            if axis not in model_axes and not placement.is_replicate():
                cuts.append(axis)
        if len(cuts) > 1:
            problems.append(
                f"{name} is sharded over {len(cuts)} data-parallel axes ({', '.join(map(str, cuts))}); fully_shard uses one. "
                "Flatten them into one axis."
            )
    return problems
