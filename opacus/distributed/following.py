"""What `make_private` does where several processes train: find out how the model is run, agree with the other ranks, start alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from opacus.distributed.data_parallel import DifferentiallyPrivateDistributedDataParallel, start_alike
from opacus.distributed.errors import ReplicaError
from opacus.distributed.groups import default_group, runs_in_parallel, size_of
from opacus.distributed.replicas import replica_problems
from opacus.errors import raise_if_any
from opacus.utils.sample_rate import loader_problems, sample_rate_of

__all__ = ["DataParallel", "loader_splits", "sampling_settings", "split_problems"]

logger = logging.getLogger(__name__)
_Torch = nn.parallel.DistributedDataParallel


class DataParallel:
    """The ranks that a model's replicas train on.

    Args:
        group: the ranks.
        wrappers: torch's own data-parallel wrappers in the model; their reductions are switched off.
        wrapped: whether a wrapper has given all ranks the same parameters.
    """

    def __init__(self, group: dist.ProcessGroup, wrappers: Sequence[_Torch], wrapped: bool) -> None:
        self.group = group
        self.wrappers = list(wrappers)
        self.wrapped = wrapped

    @classmethod
    def of(cls, module: Any) -> DataParallel | None:
        """How `module` is trained in parallel; None where this process trains alone, or the model is sharded.

        A model without wrapper is a replica where the process group has several ranks.
        """
        modules = list(module.modules()) if isinstance(module, nn.Module) else []
        ours = [m for m in modules if isinstance(m, DifferentiallyPrivateDistributedDataParallel)]
        theirs = [m for m in modules if isinstance(m, _Torch)]
        if ours or theirs:
            group = (ours[0].process_group if ours else theirs[0].process_group) or default_group()
            return cls(group, theirs, _outermost(module) in (*ours, *theirs))
        if not runs_in_parallel() or any(
            hasattr(p, "placements") for m in modules for p in m.parameters(False)
        ):
            return None
        return cls(default_group(), [], False)

    @property
    def n_replicas(self) -> int:
        """Number of ranks."""
        return size_of(self.group)

    def agree(
        self,
        module: Any,
        *,
        data_loader: Any,
        poisson_sampling: bool,
        noise_generator: Any,
        allow_shared_devices: bool,
        settings: Mapping[str, Any],
        problems: Sequence[str],
    ) -> None:
        """Compare with the other ranks, and let every rank know of all problems.

        Args:
            module: the model. data_loader, poisson_sampling, noise_generator: as in `make_private`.
            allow_shared_devices: let two ranks use one accelerator.
            settings: further arguments that must be equal on all ranks.
            problems: this rank's so far. If all ranks have these and no others, nothing is raised.

        Raises:
            ReplicaError: with the same problems on every rank.
            RankLostError: naming ranks that did not come to `make_private`.
        """
        here = list(problems)
        for wrapper in self.wrappers:
            here += _torch_wrapper_problems(wrapper)
        if not poisson_sampling and self.n_replicas > 1 and isinstance(data_loader, DataLoader):
            here += split_problems(data_loader, self.n_replicas)
        if any(generator is noise_generator for generator in _generators(data_loader)):
            here.append(
                "noise_generator is the data loader's generator: only one rank draws noise, so its numbers would be noise on one rank "
                "and choose samples on another. Give them a generator each."
            )
        model = module if isinstance(module, nn.Module) else None
        shared_before = any(
            getattr(m, "allow_shared_devices", False) for m in (model.modules() if model else ())
        )
        agreed = replica_problems(
            model,
            self.group,
            "make_private",
            allow_shared_devices=allow_shared_devices or shared_before,
            settings={**settings, **sampling_settings(data_loader), "poisson_sampling": poisson_sampling},
            own_problems=here,
        )
        if agreed != list(problems):
            raise ReplicaError("make_private cannot start", agreed)

    def start(self, module: nn.Module) -> None:
        """Switch off what would reduce gradients a second time, and give all ranks the first one's parameters."""
        for wrapper in self.wrappers:
            wrapper.require_backward_grad_sync = False
        if not self.wrapped:
            logger.info(
                "the model is one of %d replicas: it takes over the parameters of the first", self.n_replicas
            )
            start_alike(module, self.group)

    def follow_later_wrapping(self, private_module: Any, inner: nn.Module) -> None:
        """Notice torch's wrapper where it is put around the model after `make_private`."""
        if not self.wrappers:
            target = private_module if isinstance(private_module, nn.Module) else inner
            target.register_forward_pre_hook(_silence_active_wrapper)


def sampling_settings(data_loader: Any) -> dict[str, Any]:
    """What must be equal on all ranks for their draws to be one."""
    if loader_problems(data_loader):
        return {}
    return {"number of records": len(data_loader.dataset), "sample rate": sample_rate_of(data_loader)}


def loader_splits(data_loader: DataLoader) -> int | None:
    """Over how many ranks a loader's sampler shares out records; None if that cannot be told."""
    batching: Any = data_loader.batch_sampler
    for sampler in (batching, getattr(batching, "sampler", None), data_loader.sampler):
        for name in ("num_replicas", "num_processes"):
            count = getattr(sampler, name, None)
            if isinstance(count, int):
                return count
    return None


def split_problems(data_loader: DataLoader, n_replicas: int) -> list[str]:
    """A sampler that would show a record to several ranks, whose influence it would multiply."""
    splits = loader_splits(data_loader)
    if splits == n_replicas:
        return []
    how = (
        "does not share out records over ranks"
        if splits is None
        else f"shares out records over {splits} ranks"
    )
    return [
        f"the data loader {how}, and {n_replicas} train: a record that several ranks use in one step would count several times. "
        "Leave poisson_sampling=True, or give the loader a torch.utils.data.DistributedSampler."
    ]


def _generators(data_loader: Any) -> list[Any]:
    batching = getattr(data_loader, "batch_sampler", None)
    holders = (
        data_loader,
        batching,
        getattr(batching, "sampler", None),
        getattr(data_loader, "sampler", None),
    )
    return [g for g in (getattr(holder, "generator", None) for holder in holders) if g is not None]


def _outermost(module: Any) -> Any:
    """`module` without wrappers that clip."""
    while hasattr(module, "_module") and not isinstance(module, _Torch):
        module = module._module
    return module


def _torch_wrapper_problems(wrapper: _Torch) -> list[str]:
    problems = []
    if getattr(wrapper, "static_graph", False):
        problems.append(
            "DistributedDataParallel has static_graph=True, which reduces gradients by itself: leave it out."
        )
    if getattr(wrapper, "mixed_precision", None) is not None:
        problems.append("DistributedDataParallel has mixed_precision: leave it out, and use torch.autocast.")
    return problems


def _silence_active_wrapper(module: nn.Module, args: Any) -> None:
    """Forward pre-hook. The private optimizer adds up clipped gradients; plain ones need not, and in mode "bk" do not exist."""
    find = getattr(_Torch, "_get_active_ddp_module", None)
    active = None if find is None else find()
    if active is None or not active.require_backward_grad_sync:
        return
    raise_if_any("the model cannot be trained", _torch_wrapper_problems(active), ReplicaError)
    active.require_backward_grad_sync = False
