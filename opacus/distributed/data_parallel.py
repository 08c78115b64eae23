"""Data parallel training: every rank a replica, which may span several devices; the optimizer adds up clipped gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.distributed.errors import ReplicaError
from opacus.distributed.groups import default_group, size_of
from opacus.distributed.reduction import Reduction, broadcast
from opacus.distributed.replicas import replica_problems
from opacus.errors import raise_if_any

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "average_gradients", "start_alike"]


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Marks a model as one of several replicas that train together, and gives all of them rank 0's parameters and buffers.

    Gradients are not reduced in the backward, where they are not private yet: the private optimizer adds up clipped gradients over
    ranks, once per logical batch. Pass the wrapped model to `make_private`. A replica may lie on one device, or its layers on
    several, placed by hand or by a `device_map`; replicas must not share an accelerator.

    Args:
        model: this rank's replica, in place on its devices.
        process_group: ranks that train together, this one among them; all ranks if None. Make it without `device_id` where replicas
            span several accelerators.
        allow_shared_devices: let ranks use one accelerator. NCCL cannot; gloo can.

    Raises:
        ReplicaError: the same on every rank, listing all problems of all ranks: accelerators that two of them use, replicas that
            differ in names, shapes, dtypes, `requires_grad` or devices, trainable parameters on the meta device, a process group
            that cannot serve a replica's devices. No collective was started, nothing was changed.
        RankLostError: naming ranks that did not come within the group's timeout.

    Example:
        >>> model = DifferentiallyPrivateDistributedDataParallel(model)  # doctest: +SKIP
        >>> model, optimizer, loader = PrivacyEngine().make_private(module=model, ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        allow_shared_devices: bool = False,
    ) -> None:
        super().__init__()
        group = default_group() if process_group is None else process_group
        heading = "data-parallel training cannot start"
        if not isinstance(model, nn.Module):
            raise ReplicaError(heading, [f"model must be a torch.nn.Module, not {type(model).__name__}."])
        if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise ReplicaError(heading, [f"rank {dist.get_rank()} is not in the process group."])
        problems = replica_problems(
            model,
            group,
            type(self).__name__,
            allow_shared_devices=allow_shared_devices,
            settings={"allow_shared_devices": allow_shared_devices},
            own_problems=_model_problems(model),
        )
        raise_if_any(heading, problems, ReplicaError)
        self.module = model
        self.process_group: dist.ProcessGroup | None = group
        self.allow_shared_devices = allow_shared_devices
        start_alike(model, group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # belongs to this process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if dist.is_available() and dist.is_initialized():
            self.process_group = dist.group.WORLD


def average_gradients(model: nn.Module) -> None:
    """Replace each parameter's `grad` by its mean over ranks.

    The private optimizers do this themselves, with sums; this is for other gradients. A parameter without `grad` on this rank must
    have none on the others.

    Args:
        model: wrapped (then over the ranks of its process group) or not.

    Raises:
        ReplicaError: if there is no process group, or ranks hold other gradients.
        RankLostError: if a rank does not come.
    """
    group = getattr(model, "process_group", None) or default_group()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    Reduction(group).add_up(wide, "average gradients over ranks")
    with torch.no_grad():
        for grad, total in zip(grads, wide, strict=True):
            grad.copy_(total.div_(size_of(group)))


def start_alike(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's first rank; frozen ones on the meta device have no values."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    broadcast([part for t in tensors if t.device.type != "meta" for part in _parts(t)], group)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a tensor subclass (a quantized weight) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]


def _model_problems(model: nn.Module) -> list[str]:
    problems = []
    for name, module in model.named_modules():
        if isinstance(
            module, (nn.parallel.DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)
        ):
            problems.append(
                f"{name or 'model'} is a {type(module).__name__} already: wrap the plain model, or pass that one to make_private."
            )
    sharded = [name for name, p in model.named_parameters() if hasattr(p, "placements")]
    if sharded:
        problems.append(
            f"{len(sharded)} parameters are sharded over ranks ({', '.join(sharded[:3])}...): a sharded model is data parallel "
            "already, and needs no wrapper."
        )
    return problems
