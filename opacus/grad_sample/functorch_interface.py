"""The recorded functions of `opacus.grad_sample.functorch`: one layer's per-sample gradients, and modules as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from opacus.grad_sample.interface import capture_of
from opacus.grad_sample.ownership import slots

__all__ = ["ft_compute_per_sample_gradient", "make_functional", "prepare_layer"]


def prepare_layer(layer: nn.Module, batch_first: bool = True) -> None:
    """Give a layer the function `ft_compute_sample_grad` that `ft_compute_per_sample_gradient` calls.

    Args:
        layer: any layer.
        batch_first: whether the layer itself takes its batch in dimension 0 (else 1).
    """
    # a partial, so that the model can still be pickled and deep-copied
    layer.ft_compute_sample_grad = partial(_sample_grads, layer, batch_first)  # type: ignore[assignment]


def _sample_grads(
    layer: nn.Module, batch_first: bool, activations: Sequence[Tensor], backprops: Tensor
) -> dict[str, Tensor]:
    from opacus.grad_sample.functorch import functorch_rows  # which re-exports this file's functions

    captured = capture_of(layer, activations, backprops)
    if not batch_first:
        args = tuple(a.transpose(0, 1) if a.dim() > 1 else a for a in activations)
        captured = replace(captured, args=args, batch_dim_of=lambda tensor: int(tensor.dim() > 1))
    return functorch_rows(captured)


def ft_compute_per_sample_gradient(
    layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of a layer's trainable parameters, from one call's inputs and backprops.

    Args:
        layer: any layer; prepared for `batch_first=True` unless `prepare_layer` was called.
        activations: the tensor inputs of the call, batch first.
        backprops: gradient of the loss with respect to the output, batch first.

    Returns:
        `[B, *shape]` for each trainable parameter.

    Raises:
        PerSampleGradientError: if the layer draws random numbers, or no input has a row per sample.

    Example:
        >>> import torch
        >>> layer = nn.Linear(3, 2)
        >>> found = ft_compute_per_sample_gradient(layer, [torch.ones(5, 3)], torch.ones(5, 2))
        >>> found[layer.weight].shape
        torch.Size([5, 2, 3])
    """
    if "ft_compute_sample_grad" not in vars(layer):
        prepare_layer(layer)
    compute: Any = layer.ft_compute_sample_grad
    found = compute(activations, backprops)
    return {
        slot.parameter: found[slot.name]
        for slot in slots(layer)
        if slot.parameter is not None and slot.name in found
    }


def make_functional(
    mod: nn.Module, disable_autograd_tracking: bool = False
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A module as a function of its parameters.

    Args:
        mod: the module; it is left as it is, and its buffers are the function's too.
        disable_autograd_tracking: return the parameters' detached values instead of the parameters.

    Returns:
        `(function, parameters)`: `function(parameters, *args, **kwargs)` is `mod(*args, **kwargs)` with those parameters.

    Example:
        >>> import torch
        >>> function, parameters = make_functional(nn.Linear(3, 2))
        >>> function(parameters, torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """
    names = [name for name, _ in mod.named_parameters()]

    def function(parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(mod, dict(zip(names, parameters, strict=True)), args, kwargs)

    values = (p.detach() if disable_autograd_tracking else p for p in mod.parameters())
    return function, tuple(values)
