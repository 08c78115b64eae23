"""Checkpoints of a private run: all that a resumed run needs to go on bit for bit, checked before anything is changed.

How the file is written and read is `opacus.utils.checkpoint_file`'s business.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.devices import NoiseStream
from opacus.distributed.sharded_checkpoint import (
    Shards,
    flat,
    of_this_rank,
    open_shards,
    save_shards,
    states_of_all_ranks,
    without_tensors,
)
from opacus.distributed.sharding import is_sharded_model, reshard
from opacus.errors import raise_if_any
from opacus.grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.checkpoint_checks import (
    VERSION,
    accountant_problems,
    key_problems,
    module_problems,
    optimizer_problems,
    run_problems,
    scheduler_problems,
)
from opacus.utils.checkpoint_file import CheckpointError, FileLike, read, write
from opacus.utils.random_states import dealt_anew, default_states, restore_default_states, restore_noise

if TYPE_CHECKING:
    from opacus.privacy_engine import PrivacyEngine

__all__ = ["CheckpointError", "load", "privacy_state", "restore_privacy", "save"]

_MODULE, _ACCOUNTANT, _OPTIMIZER = (
    "module_state_dict",
    "privacy_accountant_state_dict",
    "optimizer_state_dict",
)
_SCHEDULERS = {
    "noise_scheduler": "noise_scheduler_state_dict",
    "grad_clip_scheduler": "grad_clip_scheduler_state_dict",
}
_RUN = "private_run_state"  # what Opacus 1.6.0 does not save; see `_run_state`
_WRAPPER = "_module."


def save(
    engine: PrivacyEngine,
    *,
    path: FileLike,
    module: Any,
    optimizer: Optimizer | None,
    schedulers: Mapping[str, Any],
    checkpoint_dict: Mapping[str, Any] | None,
    module_state_dict_kwargs: Mapping[str, Any] | None,
    torch_save_kwargs: Mapping[str, Any] | None,
) -> None:
    """See `PrivacyEngine.save_checkpoint`; `schedulers` by parameter name, None where there is none."""
    reshard(_inner(module))
    if getattr(optimizer, "_is_last_step_skipped", False):
        warnings.warn(
            "the checkpoint is taken within a logical batch, whose physical batches so far will be missing after loading it. "
            "Save after a step that was not skipped (with BatchMemoryManager, between logical batches or epochs).",
            stacklevel=3,
        )
    content = dict(checkpoint_dict or {})
    content[_MODULE] = _stateful(module).state_dict(**(module_state_dict_kwargs or {}))
    content[_ACCOUNTANT] = engine.accountant.state_dict()
    if optimizer is not None:
        content[_OPTIMIZER] = optimizer.state_dict()
    for name, scheduler in schedulers.items():
        if scheduler is not None:
            content[_SCHEDULERS[name]] = scheduler.state_dict()
    run = _run_state(engine, module, optimizer)
    if not is_sharded_model(_inner(module)):
        content[_RUN] = run
        write(content, path, torch_save_kwargs)
        return
    content[_RUN] = {"version": VERSION, "ranks": states_of_all_ranks(run)}
    tensors = flat(_MODULE, content[_MODULE])
    content[_MODULE] = without_tensors(content[_MODULE])
    if optimizer is not None:
        saved = content[_OPTIMIZER]
        tensors |= flat(_OPTIMIZER, saved["state"])
        content[_OPTIMIZER] = {**saved, "state": without_tensors(saved["state"])}
    save_shards(content, tensors, path, torch_save_kwargs)


def load(
    engine: PrivacyEngine,
    *,
    path: FileLike,
    module: Any,
    optimizer: Optimizer | None,
    schedulers: Mapping[str, Any],
    module_load_dict_kwargs: Mapping[str, Any] | None,
    torch_load_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """See `PrivacyEngine.load_checkpoint`; `schedulers` by parameter name, None where there is none."""
    shards = open_shards(path, torch_load_kwargs)
    raise_if_any("the checkpoint cannot be loaded", _kind_problems(module, shards), CheckpointError)
    checkpoint = read(path, torch_load_kwargs) if shards is None else _contents(shards, module, optimizer)
    if not isinstance(checkpoint, Mapping):
        problem = f"it holds a {type(checkpoint).__name__}, not a dictionary. Save with save_checkpoint."
        raise CheckpointError("the checkpoint cannot be loaded", [problem])
    given = {name: scheduler for name, scheduler in schedulers.items() if scheduler is not None}
    keys = {_SCHEDULERS[name]: name for name in given}
    if optimizer is not None:
        keys[_OPTIMIZER] = "optimizer"
    target, options = _stateful(module), dict(module_load_dict_kwargs or {})
    run = checkpoint.get(_RUN, {"version": None})  # Opacus writes none

    problems = key_problems(checkpoint, [_MODULE, _ACCOUNTANT], keys)
    saved = {key: value for key, value in checkpoint.items() if isinstance(value, Mapping)}
    if _MODULE in saved:
        weights = _with_prefix_of(target, saved[_MODULE])
        problems += module_problems(target, weights, options)
    if _ACCOUNTANT in saved:
        problems += accountant_problems(engine.accountant, saved[_ACCOUNTANT])
    if optimizer is not None and _OPTIMIZER in saved:
        names = run.get("parameters") if _RUN in saved else None
        problems += optimizer_problems(optimizer, saved[_OPTIMIZER], names, _parameters(optimizer, module))
    for name, scheduler in given.items():
        if _SCHEDULERS[name] in saved:
            problems += scheduler_problems(name, scheduler, saved[_SCHEDULERS[name]])
    if _RUN in checkpoint:
        problems += run_problems(run, engine.sampling, optimizer, _devices(module))
    raise_if_any("the checkpoint cannot be loaded", problems, CheckpointError)
    if shards is not None:
        shards.fetch()

    if len(engine.accountant) > sum(int(entry[2]) for entry in saved[_ACCOUNTANT]["history"]):
        warnings.warn(
            f"the accountant has recorded {len(engine.accountant)} steps, more than the checkpoint. They are forgotten, so "
            "nothing they produced may be kept or have been looked at.",
            stacklevel=3,
        )
    if optimizer is not None:
        optimizer.load_state_dict(dict(saved[_OPTIMIZER]))
    target.load_state_dict(weights, **options)
    engine.accountant.load_state_dict(saved[_ACCOUNTANT])
    for name, scheduler in given.items():
        scheduler.load_state_dict(saved[_SCHEDULERS[name]])
    if _RUN in checkpoint:
        _restore_run(engine, module, optimizer, run)
    hidden = {_RUN, _OPTIMIZER, *_SCHEDULERS.values()}
    return {key: value for key, value in checkpoint.items() if key not in hidden}


# ---------------------------------------------------------------------------------------------- sharded models


def privacy_state(engine: PrivacyEngine, module: Any, optimizer: Optimizer) -> dict[str, Any]:
    """What a private run is besides weights and the optimizer's state, for checkpoints that another library writes."""
    run = _run_state(engine, module, optimizer)
    return {_ACCOUNTANT: engine.accountant.state_dict(), _RUN: run}


def restore_privacy(
    engine: PrivacyEngine, module: Any, optimizer: Optimizer, saved: Mapping[str, Any]
) -> None:
    """Go on where `privacy_state` was called.

    Raises:
        CheckpointError: listing all that is missing or of another mechanism. Nothing was changed.
    """
    problems = key_problems(saved, [_ACCOUNTANT, _RUN], {})
    if not problems:
        problems += accountant_problems(engine.accountant, saved[_ACCOUNTANT])
        problems += run_problems(saved[_RUN], engine.sampling, optimizer, _devices(module))
    raise_if_any("the state of privacy cannot be restored", problems, CheckpointError)
    engine.accountant.load_state_dict(saved[_ACCOUNTANT])
    _restore_run(engine, module, optimizer, saved[_RUN])


def _kind_problems(module: Any, shards: Shards | None) -> list[str]:
    if is_sharded_model(_inner(module)) == (shards is not None):
        return []
    if shards is None:
        return [
            "it is a single file, but the module is sharded. Load it before sharding, or save from the sharded module."
        ]
    return ["it is a folder of shards, but the module is not sharded. Shard it as when it was saved."]


def _contents(shards: Shards, module: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    """What a checkpoint's file would hold; tensors have their shapes, and their values once they are fetched."""
    inner = _inner(module)
    reshard(inner)
    own = {key.removeprefix(_WRAPPER): value for key, value in _stateful(module).state_dict().items()}
    contents = dict(shards.rest)
    weights = shards.group(_MODULE, lambda keys: own.get("/".join(keys).removeprefix(_WRAPPER)))
    contents[_MODULE] = {
        **contents.get(_MODULE, {}),
        **{"/".join(keys): tensor for keys, tensor in weights.items()},
    }
    if optimizer is not None and isinstance(contents.get(_OPTIMIZER), Mapping):
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        saved = {**contents[_OPTIMIZER], "state": dict(contents[_OPTIMIZER].get("state", {}))}
        sizes = shards.sizes(_OPTIMIZER)

        def like(keys: tuple[str, ...]) -> Tensor | None:
            index = int(keys[0])
            fits = index < len(everything) and tuple(everything[index].shape) == sizes[keys]
            return everything[index] if fits else None

        for (index, *names), tensor in shards.group(_OPTIMIZER, like).items():
            entry = saved["state"][int(index)] = dict(saved["state"].get(int(index), {}))
            entry["/".join(names)] = tensor
        contents[_OPTIMIZER] = saved
    run = contents.get(_RUN)
    if isinstance(run, Mapping) and isinstance(run.get("ranks"), list) and run["ranks"]:
        contents[_RUN] = {"version": run.get("version"), **of_this_rank(run["ranks"], dealt_anew)}
    return contents


# --------------------------------------------------------------- what a run is, besides weights and counts


def _run_state(engine: PrivacyEngine, module: Any, optimizer: Optimizer | None) -> dict[str, Any]:
    # first: it may draw its seed
    noise = optimizer.noise_stream().state_dict() if isinstance(optimizer, DPOptimizer) else None
    run: dict[str, Any] = {"version": VERSION, "random": default_states(_devices(module))}
    if engine.sampling is not None:
        run["sampling"] = engine.sampling.state_dict()
    if optimizer is not None:
        run["parameters"] = _parameters(optimizer, module)
    if isinstance(optimizer, DPOptimizer):
        bounds = getattr(optimizer, "max_grad_norms", None)  # of each parameter, in per-layer clipping
        run["privacy"] = {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "max_grad_norm": float(optimizer.max_grad_norm) if bounds is None else [float(c) for c in bounds],
            "nonfinite_samples": optimizer.nonfinite_samples,
        }
        run["noise"] = noise
    return run


def _restore_run(
    engine: PrivacyEngine, module: Any, optimizer: Optimizer | None, run: Mapping[str, Any]
) -> None:
    devices = _devices(module)
    restore_default_states(run["random"], devices)
    if engine.sampling is not None and "sampling" in run:
        engine.sampling.load_state_dict(run["sampling"])
    if isinstance(optimizer, DPOptimizer) and "privacy" in run:
        optimizer._is_last_step_skipped = (
            False  # so that zero_grad drops a logical batch of the run left behind
        )
        optimizer.zero_grad()
        _tell_of_changes(optimizer, run["privacy"])
        optimizer._nonfinite = {torch.device("cpu"): torch.tensor(run["privacy"]["nonfinite_samples"])}
        if _repeats_default_stream(optimizer, run):
            optimizer._noise = None  # a new one
            optimizer.noise_stream()
        else:
            restore_noise(optimizer.noise_stream(), run["noise"], devices)


def _repeats_default_stream(optimizer: DPOptimizer, run: Mapping[str, Any]) -> bool:
    """Whether noise came from torch's default generator when the run was saved, and comes from a stream of its own now.

    Both would draw the same numbers if both went on from the saved state: over several processes, and saved by one.
    """
    stream = optimizer.noise_stream()
    if not isinstance(stream, NoiseStream) or optimizer.generator is not None or stream.generator is None:
        return False
    return any(
        torch.equal(state, default) for state in run["noise"].values() for default in run["random"].values()
    )


def _tell_of_changes(optimizer: DPOptimizer, saved: Mapping[str, Any]) -> None:
    """What `make_private` was told holds, as in Opacus; schedulers and adaptive clipping bring their own values along."""
    for name in ("noise_multiplier", "max_grad_norm"):
        now = (
            getattr(optimizer, "max_grad_norms", optimizer.max_grad_norm) if name == "max_grad_norm" else None
        )
        now = optimizer.noise_multiplier if now is None else now
        if now != saved[name]:
            warnings.warn(
                f"the checkpoint was saved with {name} {saved[name]}; training goes on with {now}, the value of this "
                "optimizer. Pass the scheduler that changed it, or set it, to go on as before.",
                stacklevel=5,
            )


# ------------------------------------------------------------------------------------------- small questions


def _stateful(module: Any) -> nn.Module:
    """The module whose state dict is meant: hooks stand for the model they are on."""
    return module if isinstance(module, nn.Module) else module._module


def _inner(module: Any) -> nn.Module:
    return (
        module._module if isinstance(module, (AbstractGradSampleModule, AbstractGradSampleHooks)) else module
    )


def _devices(module: Any) -> list[torch.device]:
    tensors = [*_inner(module).parameters(), *_inner(module).buffers()]
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def _parameters(optimizer: Optimizer, module: Any) -> list[list[Any]]:
    """Name and shape of each of the optimizer's parameters, in its order."""
    names = {id(p): name for name, p in _inner(module).named_parameters()}
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    return [[names.get(id(p), "an unnamed parameter"), list(p.shape)] for p in everything]


def _with_prefix_of(target: nn.Module, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weights saved from the wrapped module for the plain one, and the other way round."""
    wrapped = isinstance(target, AbstractGradSampleModule)
    prefixed = bool(weights) and all(key.startswith(_WRAPPER) for key in weights)
    if wrapped and not prefixed:
        return {_WRAPPER + key: value for key, value in weights.items()}
    if prefixed and not wrapped and not any(key.startswith(_WRAPPER) for key in target.state_dict()):
        return {key.removeprefix(_WRAPPER): value for key, value in weights.items()}
    return weights
