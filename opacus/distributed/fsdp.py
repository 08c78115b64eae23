"""Sharding a model that an optimizer was built for: the optimizer follows, with its state, order, options and schedulers.

`fully_shard` gives a model new parameter objects. An optimizer built before holds the old ones, and would train what no layer
uses any more. So names are written down before (`record`), and the optimizer is given the new objects of the same names
(`rebind`). `fsdp2_wrap` does all of it in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.distributed.sharding import is_sharded, is_sharded_model, reshard
from opacus.errors import raise_if_any

__all__ = ["Binding", "fsdp2_wrap", "rebind", "record"]


@dataclass(frozen=True)
class _Bound:
    """One parameter as it was: values, as the object itself may change before `rebind`."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Binding:
    """Which of a model's parameters an optimizer holds, by name, group by group. See `record`."""

    groups: tuple[tuple[_Bound, ...], ...]


def record(model: nn.Module, optimizer: Optimizer) -> Binding:
    """Write down which parameters `optimizer` holds, before the model is sharded. Changes nothing.

    Args:
        model: not sharded yet.
        optimizer: over its parameters, with or without state.

    Returns:
        What `rebind` needs.

    Raises:
        ConfigurationError: naming each parameter of the optimizer that is not the model's, or is held twice; each trainable
            parameter on the meta device; each state that cannot be cut into shards (Adafactor's rows and columns).
    """
    raise_if_any("the optimizer cannot follow a sharded model", binding_problems(model, optimizer))
    names = {id(p): name for name, p in model.named_parameters()}
    return Binding(
        tuple(
            tuple(_Bound(names[id(p)], p, tuple(p.shape), p.dtype, p.requires_grad) for p in group["params"])
            for group in optimizer.param_groups
        )
    )


def binding_problems(model: Any, optimizer: Any) -> list[str]:
    """What keeps `optimizer` from following `model`, a sentence each."""
    from opacus.optimizers.optimizer import DPOptimizer

    if not isinstance(optimizer, Optimizer):
        return [f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}."]
    if isinstance(optimizer, DPOptimizer):
        return [
            "optimizer is private already: shard the model first, and call make_private with what results."
        ]
    names = {id(p): name for name, p in model.named_parameters()}
    held = [
        (i, j, p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])
    ]
    if held and not any(id(p) in names for _, _, p in held):
        return [
            "none of the optimizer's parameters is the model's. Build it from model.parameters(), after all layers and adapters "
            "are in place."
        ]
    problems, seen = [], set()
    for i, j, p in held:
        name = names.get(id(p))
        if name is None:
            problems.append(
                f"the optimizer holds a parameter of shape {tuple(p.shape)} (number {j} of group {i}) that the model does not "
                "have. Build it from model.parameters(), after all layers and adapters are in place."
            )
            continue
        if id(p) in seen:
            problems.append(f"the optimizer holds {name} twice. Give it each parameter once.")
        seen.add(id(p))
        if p.requires_grad and p.device.type == "meta":
            problems.append(f"{name} is on the meta device and requires grad: load it, or freeze it, first.")
        problems += [
            f"{name}: the optimizer's state {key!r} {what}, so it cannot be cut into the parameter's shards (factored state, as "
            "Adafactor's; a history, as LBFGS's). Shard before the first step, or use another optimizer."
            for key, value in optimizer.state.get(p, {}).items()
            if (what := _uncuttable(value, p))
        ]
    kept = {id(p) for _, _, p in held}
    problems += [
        f"{type(optimizer).__name__} keeps a list of parameters of its own ({key}), which would stay as it is. Build it after sharding."
        for key, value in vars(optimizer).items()
        if key not in ("param_groups", "state", "defaults")
        and isinstance(value, (list, tuple))
        and any(id(item) in kept for item in value)
    ]
    return problems


def _uncuttable(value: Any, p: Tensor) -> str:
    """What is wrong with an entry of a parameter's state; empty if it is a number, or has the parameter's shape."""
    if isinstance(value, Tensor):
        if value.numel() == 1 or value.shape == p.shape:
            return ""
        return f"has shape {tuple(value.shape)}, the parameter {tuple(p.shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"is a {type(value).__name__}"
    return ""


def rebind(model: nn.Module, optimizer: Optimizer, binding: Binding) -> None:
    """Give `optimizer` the parameters that `model` has now under the recorded names.

    Groups keep their options and their order, state is cut into shards without communication (every rank holds all of it), and
    schedulers go on, as the optimizer and its groups are the same objects.

    Args:
        model: sharded since `record`.
        optimizer: the one recorded.
        binding: what `record` returned.

    Raises:
        ConfigurationError: listing every parameter that is gone, has another shape, dtype or `requires_grad`, or whose state
            has. Neither model nor optimizer was changed.
    """
    reshard(model)
    now = dict(model.named_parameters())
    problems: list[str] = []
    if [len(group) for group in binding.groups] != [len(group["params"]) for group in optimizer.param_groups]:
        problems.append("the optimizer's groups changed since they were recorded. Record them again.")
    for group in binding.groups:
        for bound in group:
            problems += _changes(bound, now.get(bound.name), optimizer)
    raise_if_any("the optimizer cannot be given the sharded parameters", problems)
    state = {
        now[bound.name]: {
            key: _like(value, now[bound.name], bound)
            for key, value in optimizer.state[bound.parameter].items()
        }
        for group in binding.groups
        for bound in group
        if bound.parameter in optimizer.state
    }
    for options, bounds in zip(optimizer.param_groups, binding.groups, strict=True):
        options["params"][:] = [now[bound.name] for bound in bounds]
    optimizer.state.clear()
    optimizer.state.update(state)  # type: ignore[arg-type]


def _changes(bound: _Bound, p: nn.Parameter | None, optimizer: Optimizer) -> list[str]:
    if p is None:
        return [f"{bound.name} was recorded, and the model has it no longer."]
    problems = [
        f"{bound.name} had {what} {before}, now {after}."
        for what, before, after in (
            ("shape", bound.shape, tuple(p.shape)),
            ("dtype", bound.dtype, p.dtype),
            ("requires_grad", bound.requires_grad, p.requires_grad),
        )
        if before != after
    ]
    return problems + [
        f"{bound.name}: the optimizer's state {key!r} {what}, so it cannot be cut into the parameter's shards."
        for key, value in optimizer.state.get(bound.parameter, {}).items()
        if (what := _uncuttable(value, bound.parameter))
    ]


def _like(value: Any, p: nn.Parameter, bound: _Bound) -> Any:
    """A whole state tensor, equal on all ranks, as this rank's part of it."""
    if (
        not isinstance(value, Tensor)
        or tuple(value.shape) != bound.shape
        or not value.dim()
        or not is_sharded(p)
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(
        value.detach().to(p.device_mesh.device_type),  # type: ignore[attr-defined]
        p.device_mesh,  # type: ignore[attr-defined]
        p.placements,  # type: ignore[attr-defined]
        src_data_rank=None,
    )
    return cut.to(p.device)  # a part that is offloaded takes its state along


def fsdp2_wrap(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    units: Callable[[str, nn.Module], bool] | Iterable[type[nn.Module]] | None = None,
    opacus_high_precision_layers: Sequence[type[nn.Module]] = (),
    **options: Any,
) -> nn.Module:
    """Shard a model with `fully_shard` for private training, and let an optimizer built before follow. Then call `make_private`.

    Args:
        model: its weights equal on all ranks.
        optimizer: built from its parameters; changed in place (see `rebind`).
        units: what is gathered together, besides what is left over: layer classes, or a function of `(name, module)`. By default
            the outermost members of `ModuleList`s: a transformer's blocks.
        opacus_high_precision_layers: layer classes that compute in float32, whatever `mp_policy` says.
        **options: of `torch.distributed.fsdp.fully_shard`: `mesh`, `mp_policy`, `offload_policy`, `reshard_after_forward`,
            `shard_placement_fn`, `ignored_params`, ...

    Returns:
        `model` itself.

    Raises:
        ConfigurationError: listing everything that is wrong; nothing was changed.

    Example:
        >>> from torch.distributed.fsdp import MixedPrecisionPolicy
        >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = fsdp2_wrap(model, optimizer, mp_policy=policy)  # doctest: +SKIP
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, grad_sample_mode="bk", ...
        ... )  # doctest: +SKIP
    """
    from torch.distributed.fsdp import fully_shard

    chosen = _units(model, units, opacus_high_precision_layers) if isinstance(model, nn.Module) else []
    problems = _wrap_problems(model, chosen, options)
    if optimizer is not None and isinstance(model, nn.Module):
        problems += binding_problems(model, optimizer)
    raise_if_any("the model cannot be sharded", problems)
    binding = None if optimizer is None else record(model, optimizer)
    for unit in chosen:
        precise = isinstance(unit, tuple(opacus_high_precision_layers))
        fully_shard(unit, **(_in_float32(options) if precise else options))
    fully_shard(model, **options)
    if optimizer is not None and binding is not None:
        rebind(model, optimizer, binding)
    return model


def _in_float32(options: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    around = options.get("mp_policy") or MixedPrecisionPolicy()
    return {
        **options,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=around.reduce_dtype, output_dtype=around.param_dtype
        ),
    }


def _units(
    model: nn.Module,
    units: Callable[[str, nn.Module], bool] | Iterable[type[nn.Module]] | None,
    precise: Sequence[type[nn.Module]],
) -> list[nn.Module]:
    """Modules to shard each on their own, inner ones before outer ones."""
    if units is None:
        found = _list_members(model)
    elif isinstance(units, Iterable):
        kinds = tuple(units)
        found = [module for module in model.modules() if isinstance(module, kinds)]
    else:
        found = [module for name, module in model.named_modules() if units(name, module)]
    wanted = {id(m) for m in found if m is not model and any(True for _ in m.parameters())}
    wanted |= {
        id(m) for m in model.modules() if isinstance(m, tuple(precise)) and any(True for _ in m.parameters())
    }
    return [module for module in reversed(list(model.modules())) if id(module) in wanted]


def _list_members(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += list(child.children())
        else:
            found += _list_members(child)
    return found


def _wrap_problems(model: Any, units: Sequence[nn.Module], options: dict[str, Any]) -> list[str]:
    if not isinstance(model, nn.Module):
        return [f"model must be a torch.nn.Module, not {type(model).__name__}."]
    from torch.distributed.fsdp import fully_shard

    known = [name for name in inspect.signature(inspect.unwrap(fully_shard)).parameters if name != "module"]
    problems = [
        f"{name} is not an option of fully_shard, which takes {', '.join(known)}."
        for name in options
        if known and name not in known and "kwargs" not in known
    ]
    if is_sharded_model(model) and any(
        type(p).__name__ == "DTensor" or is_sharded(p) for p in model.parameters()
    ):
        from torch.distributed.fsdp import FSDPModule

        problems += [
            f"{name or 'the model'} is sharded already. Shard a model once."
            for name, module in model.named_modules()
            if isinstance(module, FSDPModule)
        ][:1]
    left_out = {id(p) for p in options.get("ignored_params") or ()}
    for name, p in model.named_parameters():
        if id(p) in left_out:
            continue
        if not p.dim():
            problems.append(f"{name} has no dimension to cut: give it one, [1].")
        elif not p.is_contiguous():
            problems.append(f"{name} is not contiguous, and fully_shard cuts rows: make it contiguous.")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        problems.append(
            "there is no process group. Start with torchrun, and call torch.distributed.init_process_group() first."
        )
    return problems + _ties_between(model, units)


def _ties_between(model: nn.Module, units: Sequence[nn.Module]) -> list[str]:
    """Parameters that two units share: each would gather, and train, a copy of its own."""
    unit_of: dict[int, tuple[int, str]] = {}
    claimed: dict[int, int] = {}
    for i, unit in enumerate(units):  # inner before outer: the first to claim a module has it
        for module in unit.modules():
            claimed.setdefault(id(module), i)
    problems = []
    for path, module in model.named_modules():
        own = claimed.get(id(module), -1)
        for key, p in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            first, first_name = unit_of.setdefault(id(p), (own, name))
            if first != own:
                problems.append(
                    f"{name} and {first_name} are one parameter, but would be sharded apart. Choose units that hold both, or neither."
                )
    return problems
