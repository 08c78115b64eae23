"""Which rule a layer call takes: the user's own sampler, a built-in rule, or functorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.functorch import FUNCTORCH
from opacus.grad_sample.hf_conv1d import meet
from opacus.grad_sample.ownership import slots
from opacus.grad_sample.rules import Rule, builtin_rule, instantiated

__all__ = ["GRAD_SAMPLERS", "NORM_SAMPLERS", "GradSampler", "norms_by_user", "rule_for", "sampled_by_user"]

GradSampler = Callable[[Any, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]

# The recorded registry: layer class to function. Built-in functions stand here too, so that users can look one up,
# replace it or delete it; a class that maps to its built-in function takes the built-in rule.
GRAD_SAMPLERS: dict[type[nn.Module], GradSampler] = {}
BUILT_IN: dict[type[nn.Module], GradSampler] = {}

# Likewise for norms: `(layer, activations, backprops) -> {parameter: [B]}`, used by the modes "ghost" and "bk".
NORM_SAMPLERS: dict[type[nn.Module], GradSampler] = {}
BUILT_IN_NORMS: dict[type[nn.Module], GradSampler] = {}


def sampled_by_user(kind: type[nn.Module]) -> bool:
    """Whether the user registered a sampler, of gradients or of norms, for layers of this class."""
    return bool(_users_own(GRAD_SAMPLERS, BUILT_IN, kind) or _users_own(NORM_SAMPLERS, BUILT_IN_NORMS, kind))


def _users_own(
    registry: Mapping[type[nn.Module], GradSampler],
    built_in: Mapping[type[nn.Module], GradSampler],
    kind: type[nn.Module],
) -> GradSampler | None:
    sampler = registry.get(kind)
    return None if sampler is built_in.get(kind) else sampler


def norms_by_user(captured: Captured) -> dict[str, Tensor]:
    """Norms `[B]`, by name, from a norm sampler that the user registered for the layer's class, if there is one."""
    sampler = _users_own(NORM_SAMPLERS, BUILT_IN_NORMS, type(captured.layer))
    if sampler is None or captured.owners.rows_each != 1:
        return {}
    found = sampler(captured.layer, captured.inputs, captured.backprops)
    return {
        slot.name: found[slot.parameter]
        for slot in slots(captured.layer)
        if slot.parameter is not None and slot.parameter in found
    }


def rule_for(layer: nn.Module, names: tuple[str, ...], *, force_functorch: bool = False) -> Rule:
    """The rule for a call of `layer` in which the parameters `names` train."""
    sampler = _users_own(GRAD_SAMPLERS, BUILT_IN, type(layer))
    if sampler is not None:
        return instantiated(_SampledRows(sampler))
    # bags given as one line of ids cannot be cut into rows by functorch
    if force_functorch and not isinstance(layer, nn.EmbeddingBag):
        return FUNCTORCH
    meet(layer)
    return builtin_rule(layer, names) or FUNCTORCH


@dataclass(frozen=True)
class _SampledRows:
    """A user's sampler, asked for what trained in the call."""

    sampler: GradSampler

    def __call__(self, captured: Captured) -> dict[str, Tensor]:
        layer = captured.layer
        found = self.sampler(layer, captured.inputs, captured.backprops)
        return {
            slot.name: found[slot.parameter]
            for slot in slots(layer)
            if captured.trains(slot.name) and slot.parameter is not None and slot.parameter in found
        }
