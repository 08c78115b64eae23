"""The recorded function form of a rule: `(layer, activations, backprops) -> {parameter: tensor}`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from opacus.grad_sample.captured import Captured, Owners
from opacus.grad_sample.ownership import slots
from opacus.grad_sample.rules import Rule

__all__ = ["by_parameter", "capture_of", "norms_by_parameter"]


def capture_of(layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor) -> Captured:
    """The call that `activations` and `backprops` (both batch first) describe, row i being sample i."""
    names = tuple(
        slot.name for slot in slots(layer) if slot.parameter is not None and slot.parameter.requires_grad
    )
    return Captured(layer, names, tuple(activations), {}, [backprops], Owners(backprops.shape[0]))


def by_parameter(
    rule: Rule, layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """`rule`'s per-sample gradients, keyed by parameter."""
    return _keyed(layer, rule.grad_sample(capture_of(layer, activations, backprops)))


def norms_by_parameter(
    rule: Rule, layer: nn.Module, activations: Sequence[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """`rule`'s per-sample gradient norms `[B]`, keyed by parameter."""
    squared = rule.norm_sample(capture_of(layer, activations, backprops))
    return _keyed(layer, {name: norm.sqrt() for name, norm in squared.items()})


def _keyed(layer: nn.Module, found: dict[str, Tensor]) -> dict[nn.Parameter, Tensor]:
    return {
        slot.parameter: found[slot.name]
        for slot in slots(layer)
        if slot.parameter is not None and slot.name in found
    }
