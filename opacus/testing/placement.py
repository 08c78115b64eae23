"""Spreading the layers of a model over devices, activations following: the smallest model parallelism there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.errors import ConfigurationError, raise_if_any

__all__ = ["spread"]


def spread(
    model: nn.Module, devices: Sequence[torch.device | str], layers: Sequence[str] | None = None
) -> nn.Module:
    """Place `layers` on `devices` in contiguous blocks, and let activations follow.

    Layers with parameters or buffers are shared out evenly, in order; a layer without any goes where the one
    before it went. Before each layer's forward, tensors in its arguments (positional or keyword, also inside
    lists, tuples and dicts) are moved to its device, ahead of all other hooks. The output stays on the device
    of the layer that computed it, so move the targets to ``output.device``.

    The model stays the class it was, is changed in place, and may be spread again, copied and pickled.
    Parameters outside `layers` stay where they are.

    Args:
        model: any module whose `layers` are called one by one, such as `nn.Sequential`.
        devices: where to; the first layers go to the first device. One device is allowed.
        layers: qualified names of submodules, in the order of the forward pass. All direct children by default.

    Returns:
        `model`.

    Raises:
        ConfigurationError: a name is unknown or given twice, there are fewer layers with parameters than
            devices, or two layers that would part share a parameter. Nothing was moved.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus.testing import devices_for, spread
        >>> devices = devices_for("two")
        >>> model = spread(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), devices)
        >>> model(torch.zeros(3, 4)).device == devices[1]
        True
    """
    places = [torch.device(device) for device in devices]
    modules = dict(model.named_modules())
    names = [name for name, _ in model.named_children()] if layers is None else list(layers)
    raise_if_any("spread cannot place the layers", _name_problems(names, modules))
    plan = _plan(names, modules, places)
    raise_if_any("spread cannot place the layers", _shared_parameter_problems(plan, modules))

    for name, device in plan.items():
        modules[name].to(device)
        _follow(modules[name], device)
    return model


def _name_problems(names: list[str], modules: dict[str, nn.Module]) -> list[str]:
    problems = [
        f"the model has no layer '{name}'. Pass names that model.named_modules() yields."
        for name in names
        if name not in modules or name == ""
    ]
    problems += [
        f"layer '{name}' is given twice." for name in sorted({n for n in names if names.count(n) > 1})
    ]
    return problems


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _plan(
    names: list[str], modules: dict[str, nn.Module], devices: list[torch.device]
) -> dict[str, torch.device]:
    weighty = sum(_holds_tensors(modules[name]) for name in names)
    if not devices or weighty < len(devices):
        raise ConfigurationError(
            "spread cannot place the layers",
            [
                f"{weighty} layer(s) with parameters cannot occupy {len(devices)} devices. Pass between 1 and "
                f"{weighty} devices, or name more layers."
            ],
        )
    plan, seen = {}, 0
    for name in names:
        seen += _holds_tensors(modules[name])
        plan[name] = devices[max(seen - 1, 0) * len(devices) // weighty]
    return plan


def _shared_parameter_problems(plan: dict[str, torch.device], modules: dict[str, nn.Module]) -> list[str]:
    owner: dict[int, str] = {}
    problems = []
    for name, device in plan.items():
        for label, parameter in modules[name].named_parameters():
            first = owner.setdefault(id(parameter), name)
            if plan[first] != device:
                problems.append(
                    f"parameter '{name}.{label}' is shared with layer '{first}', which goes to {plan[first]} and "
                    f"not to {device}. Use fewer devices, or order the layers so that both fall into one block."
                )
    return problems


class _MoveInputs:
    """Pre-forward hook that brings a layer's tensor arguments to its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _moved(args, self.device), _moved(kwargs, self.device)


def _follow(layer: nn.Module, device: torch.device) -> None:
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, _MoveInputs):
            hook.device = device
            return
    layer.register_forward_pre_hook(_MoveInputs(device), prepend=True, with_kwargs=True)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value
