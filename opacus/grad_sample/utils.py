"""From the name of a grad sample mode to the class behind it, and the registry of users' own rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_tp import (
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClippingTP,
)
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from opacus.grad_sample.gsm_book_keeping import GradSampleHooksBookKeeping, GradSampleModuleBookKeeping
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.grad_sample.gsm_no_op import GradSampleHooksNoOp, GradSampleModuleNoOp
from opacus.grad_sample.selection import GRAD_SAMPLERS, NORM_SAMPLERS, GradSampler

__all__ = [
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]

_MODULES: dict[str, type[AbstractGradSampleModule]] = {
    "hooks": GradSampleModule,
    "functorch": GradSampleModule,
    "ew": GradSampleModuleExpandedWeights,
    "no_op": GradSampleModuleNoOp,
    "bk": GradSampleModuleBookKeeping,
    "ghost": GradSampleModuleFastGradientClipping,
    "ghost_fsdp": GradSampleModuleFastGradientClippingFSDP,
    "ghost_tp": GradSampleModuleFastGradientClippingTP,
}
_HOOKS: dict[str, type[AbstractGradSampleHooks]] = {
    "hooks": GradSampleHooks,
    "functorch": GradSampleHooks,
    "no_op": GradSampleHooksNoOp,
    "bk": GradSampleHooksBookKeeping,
    "ghost": GradSampleHooksFastGradientClipping,
    "ghost_fsdp": GradSampleHooksFastGradientClippingFSDP,
    "ghost_tp": GradSampleHooksFastGradientClippingTP,
}


def register_grad_sampler(
    target_class_or_classes: type[nn.Module] | Iterable[type[nn.Module]],
) -> Callable[[GradSampler], GradSampler]:
    """Decorator: use a function for the per-sample gradients of one or several layer classes.

    Args:
        target_class_or_classes: exact classes; a subclass needs its own registration.

    Returns:
        A decorator of `(layer, activations, backprops) -> {parameter: [B, *parameter.shape]}`, where activations (the
        tensor inputs of the call) and backprops come batch first.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.by = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.by
        >>> import torch
        >>> @register_grad_sampler(Scale)
        ... def scale_grad_sample(layer, activations, backprops):
        ...     return {layer.by: activations[0] * backprops}
    """
    return _registration(GRAD_SAMPLERS, target_class_or_classes)


def register_norm_sampler(
    target_class_or_classes: type[nn.Module] | Iterable[type[nn.Module]],
) -> Callable[[GradSampler], GradSampler]:
    """Decorator: use a function for the norms of per-sample gradients, in modes "ghost" and "bk".

    Args:
        target_class_or_classes: exact classes; a subclass needs its own registration.

    Returns:
        A decorator of `(layer, activations, backprops) -> {parameter: [B]}`: the L2 norm of each sample's gradient of each
        parameter that requires grad. It must be the norm of what the layer's grad sampler returns: a smaller one
        leaves samples unclipped. In TF32 or bf16 it must allow for the rounding of the layer's own matrix product.
    """
    return _registration(NORM_SAMPLERS, target_class_or_classes)


def _registration(
    table: dict[type[nn.Module], GradSampler],
    target_class_or_classes: type[nn.Module] | Iterable[type[nn.Module]],
) -> Callable[[GradSampler], GradSampler]:
    one = isinstance(target_class_or_classes, type)
    targets = [target_class_or_classes] if one else list(target_class_or_classes)  # type: ignore[arg-type]

    def register(sampler: GradSampler) -> GradSampler:
        for target in targets:
            table[target] = sampler  # type: ignore[index]
        return sampler

    return register


def get_gsm_class(grad_sample_mode: str) -> type[AbstractGradSampleModule]:
    """The wrapper class of a grad sample mode.

    Raises:
        ValueError: for an unknown mode.
    """
    return _look_up(_MODULES, grad_sample_mode)


def get_hooks_class(grad_sample_mode: str) -> type[AbstractGradSampleHooks]:
    """The class of a grad sample mode that hooks a model without wrapping it.

    Raises:
        ValueError: for an unknown mode, or one that has to wrap.
    """
    return _look_up(_HOOKS, grad_sample_mode)


def _look_up(table: dict[str, Any], grad_sample_mode: str) -> Any:
    if grad_sample_mode not in table:
        raise ValueError(
            f"grad_sample_mode {grad_sample_mode!r} is not available here; choose one of {', '.join(table)}"
        )
    return table[grad_sample_mode]


def wrap_model(
    model: nn.Module, grad_sample_mode: str, wrap_model: bool = True, *args: Any, **kwargs: Any
) -> AbstractGradSampleModule | AbstractGradSampleHooks:
    """Give `model` per-sample gradients in the given mode.

    Args:
        model: the model.
        grad_sample_mode: the mode's name.
        wrap_model: return a module around the model (True), or hooks on the model itself (False).
        *args, **kwargs: passed on to the mode's class.

    Raises:
        ValueError: for an unknown mode.
    """
    choose = get_gsm_class if wrap_model else get_hooks_class
    if grad_sample_mode == "functorch":
        kwargs["force_functorch"] = True
    return choose(grad_sample_mode)(model, *args, **kwargs)


prepare_module = wrap_model
