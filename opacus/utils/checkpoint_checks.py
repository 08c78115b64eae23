"""What keeps a checkpoint from being loaded: sentences. Nothing is changed here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from opacus.distributed.shard_noise import ShardNoise
from opacus.errors import ConfigurationError
from opacus.optimizers import DPOptimizer
from opacus.optimizers.arguments import is_number, positive_number_problems
from opacus.utils.random_states import state_problems
from opacus.utils.resumable import Sampling

__all__ = [
    "VERSION",
    "accountant_problems",
    "key_problems",
    "module_problems",
    "optimizer_problems",
    "run_problems",
    "scheduler_problems",
]

VERSION = 1  # of the run state: raise it when a file written before can no longer be continued


def key_problems(
    checkpoint: Mapping[str, Any], needed: Sequence[str], optional: Mapping[str, str]
) -> list[str]:
    """Missing keys, and values that are no dictionaries.

    Args:
        checkpoint: what was read.
        needed: keys that must be there.
        optional: further keys that must be there, with the argument that asks for each.
    """
    problems = [f"it has no {key!r}. Save with save_checkpoint." for key in needed if key not in checkpoint]
    problems += [
        f"it has no {key!r}. Pass {name}=None, or a checkpoint that was saved with it."
        for key, name in optional.items()
        if key not in checkpoint
    ]
    return problems + [
        f"{key!r} is a {type(checkpoint[key]).__name__}, not a dictionary."
        for key in (*needed, *optional)
        if key in checkpoint and not isinstance(checkpoint[key], Mapping)
    ]


class _WithoutCopies(TorchFunctionMode):
    """Loading under this mode checks names and shapes, but copies no values."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            return args[0]
        return function(*args, **(kwargs or {}))


def module_problems(target: nn.Module, weights: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Names and shapes that `target.load_state_dict(weights, **options)` would refuse."""
    if options.get("assign"):
        return [
            "module_load_dict_kwargs has assign=True, which would replace the parameters that optimizer and hooks hold. "
            "Leave it out."
        ]
    try:
        with _WithoutCopies():
            target.load_state_dict(dict(weights), **options)
    except (RuntimeError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        return [f"the module does not fit: {' '.join(lines)}"]
    return []


def accountant_problems(accountant: Any, state: Any) -> list[str]:
    """What `accountant.load_state_dict(state)` would refuse."""
    try:
        copy.deepcopy(accountant).load_state_dict(state)
    except ConfigurationError as error:
        return [f"the accountant: {problem}" for problem in error.problems]
    except (ValueError, KeyError, TypeError) as error:
        return [f"the accountant: {error}"]
    return []


def optimizer_problems(
    optimizer: Optimizer, state: Mapping[str, Any], saved: Any, here: Sequence[list[Any]]
) -> list[str]:
    """Groups and parameters that differ.

    Args:
        state: the saved state dict.
        saved: name and shape of each parameter when it was saved; None where the file does not say.
        here: name and shape of each parameter now.
    """
    groups = state.get("param_groups")
    if not isinstance(state.get("state"), Mapping) or not isinstance(groups, list):
        return ["the optimizer's state has no 'state' or no 'param_groups'. Save with save_checkpoint."]
    sizes = [len(group.get("params", ())) if isinstance(group, Mapping) else 0 for group in groups]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        return [f"the optimizer has groups of {own} parameters, the checkpoint of {sizes}."]
    known = {index for group in groups for index in group["params"]}
    problems = [
        f"the optimizer's state speaks of parameter {index!r}, which is in none of its groups."
        for index in state["state"]
        if index not in known
    ]
    if saved is None or saved == here:
        return problems
    if not isinstance(saved, list) or len(saved) != len(here):
        return [*problems, "the saved names of the optimizer's parameters do not match its groups."]
    return problems + [
        f"parameter {i} of the optimizer is {mine}, the checkpoint's is {theirs}."
        for i, (theirs, mine) in enumerate(zip(saved, here, strict=True))
        if theirs != mine
    ]


def scheduler_problems(name: str, scheduler: Any, state: Mapping[str, Any]) -> list[str]:
    """Keys that another kind of schedule has written."""
    own = scheduler.state_dict()
    unknown = [repr(key) for key in state if key not in own]
    missing = [repr(key) for key in own if key not in state and key != getattr(scheduler, "attribute", None)]
    if not unknown and not missing:
        return []
    what = [f"has {', '.join(unknown)}"] if unknown else []
    what += [f"lacks {', '.join(missing)}"] if missing else []
    return [f"{name}: the saved state {' and '.join(what)}; a {type(scheduler).__name__} did not write it."]


def run_problems(
    run: Any, sampling: Sampling | None, optimizer: Any, devices: Sequence[torch.device]
) -> list[str]:
    """Random states and privacy settings that cannot be taken over.

    Args:
        run: the saved run state, `VERSION` of it.
        sampling: of the data loader; None where there is none.
        optimizer: the optimizer; looked at if it is private.
        devices: of the module.
    """
    if not isinstance(run, Mapping) or run.get("version") != VERSION:
        version = run.get("version") if isinstance(run, Mapping) else run
        return [f"it has version {version!r}, not {VERSION}. Load it with the release that wrote it."]
    cpu = torch.device("cpu")
    problems = state_problems("the saved state of torch's generators", run.get("random"), [cpu, *devices])
    if not problems and "cpu" not in run["random"]:
        problems.append("the saved state of torch's generators has no 'cpu'.")
    if sampling is not None and "sampling" in run:
        problems += sampling.problems(run["sampling"])
    if isinstance(optimizer, DPOptimizer) and "privacy" in run:
        problems += _privacy_problems(optimizer, run["privacy"])
        stream = optimizer.noise_stream()
        if isinstance(stream, ShardNoise):
            problems += stream.state_problems(run.get("noise"))
        else:
            home = getattr(stream, "home", cpu)
            problems += state_problems("the saved state of the noise", run.get("noise"), [home, *devices])
    return problems


def _privacy_problems(optimizer: DPOptimizer, saved: Any) -> list[str]:
    wanted = ("noise_multiplier", "max_grad_norm", "nonfinite_samples")
    if not isinstance(saved, Mapping) or any(name not in saved for name in wanted):
        return [f"the optimizer's privacy settings are not complete: {', '.join(wanted)} are needed."]
    problems = []
    sigma, bounds = saved["noise_multiplier"], saved["max_grad_norm"]
    if not is_number(sigma) or not 0 <= sigma < math.inf:
        problems.append(f"the saved noise_multiplier is {sigma!r}, not a finite number of at least 0.")
    if not isinstance(saved["nonfinite_samples"], int):
        problems.append(
            f"the saved nonfinite_samples is {saved['nonfinite_samples']!r}, not a number of samples."
        )
    for bound in bounds if isinstance(bounds, list) else [bounds]:
        problems += positive_number_problems("the saved max_grad_norm", bound)
    own = getattr(optimizer, "max_grad_norms", None)
    saved_bounds = len(bounds) if isinstance(bounds, list) else None
    if saved_bounds != (None if own is None else len(own)):
        problems.append(
            f"{type(optimizer).__name__} has {_bounds(None if own is None else len(own))}, the checkpoint "
            f"{_bounds(saved_bounds)}. Use the clipping style it was saved with."
        )
    return problems


def _bounds(number: int | None) -> str:
    return "one clipping norm" if number is None else f"{number} clipping norms, one for each parameter"
