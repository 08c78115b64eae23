"""What the ranks of a sharded model must have in common before they train together. Nothing is changed here.

A parameter that only some ranks train, or train in another order, would be added up with another one of the same shape. So ranks
compare through the store first, and every rank comes to the same list of problems before any collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus.distributed.errors import ReplicaError
from opacus.distributed.following import sampling_settings, split_problems
from opacus.distributed.groups import default_group, size_of
from opacus.distributed.replicas import replica_problems
from opacus.distributed.sharding import axes_of, is_sharded

__all__ = ["agree_on_shards", "data_ranks"]


def data_ranks(model: nn.Module, model_axes: Collection[Any] = ()) -> int:
    """How many ranks have samples of their own; ranks of one place on a tensor-parallel axis count as one."""
    sizes: dict[Any, int] = {}
    for p in model.parameters():
        if is_sharded(p):
            mesh = p.device_mesh  # type: ignore[attr-defined]
            sizes.update(
                {axis: mesh.size(d) for d, axis in enumerate(axes_of(mesh)) if axis not in model_axes}
            )
    count = 1
    for size in sizes.values():
        count *= size
    return count


def agree_on_shards(
    model: nn.Module,
    optimizer: Any,
    *,
    model_axes: Collection[Any],
    data_loader: Any,
    poisson_sampling: bool,
    settings: Mapping[str, Any],
    problems: Sequence[str],
) -> None:
    """Compare with the other ranks, and let every rank know of all problems.

    Args:
        model: sharded.
        optimizer, data_loader, poisson_sampling: as in `make_private`.
        model_axes: names of the mesh axes that are tensor parallel.
        settings: further arguments that must be equal on all ranks.
        problems: this rank's so far. If all ranks have these and no others, nothing is raised.

    Raises:
        ReplicaError: with the same problems on every rank.
        RankLostError: naming ranks that did not come to `make_private`.
    """
    group = default_group()
    if size_of(group) == 1:
        return
    here = list(problems)
    count = data_ranks(model, model_axes)
    if not poisson_sampling and count > 1 and isinstance(data_loader, DataLoader):
        here += split_problems(data_loader, count)
    agreed = replica_problems(
        None,
        group,
        "make_private",
        settings={
            **settings,
            **_described(model, optimizer),
            **sampling_settings(data_loader),
            "poisson_sampling": poisson_sampling,
        },
        own_problems=here,
    )
    if agreed != list(problems):
        raise ReplicaError("make_private cannot start", agreed)


def _described(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    names = {id(p): name for name, p in model.named_parameters()}
    held = (
        [names.get(id(p), "a stranger") for group in optimizer.param_groups for p in group["params"]]
        if isinstance(optimizer, Optimizer)
        else []
    )
    place = {name: i for i, name in enumerate(held)}
    return {
        f"parameter {name}": (
            tuple(p.shape),
            str(p.dtype),
            "trainable" if p.requires_grad else "frozen",
            str(getattr(p, "placements", "not sharded")),
            f"number {place[name]} of the optimizer" if name in place else "not in the optimizer",
        )
        for name, p in model.named_parameters()
    }
