"""Which call uses which parameter: the layer to hook for each parameter of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["Slot", "layers_with_parameters", "slots"]

_NEVER_CALLED = (nn.ParameterDict, nn.ParameterList)


@dataclass(frozen=True)
class Slot:
    """Where a parameter hangs: `holder.<key>`, called `name` by the layer that uses it.

    The parameter object itself is looked up when needed: sharding and offloading swap it.
    """

    name: str
    holder: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter | None:
        return self.holder._parameters.get(self.key)


def slots(layer: nn.Module) -> list[Slot]:
    """Parameters that `layer`'s own forward uses: direct ones, and those of containers never called.

    A parameter that a child owns too belongs to the child (the deepest owner): in BERT's masked-LM
    head the parent's `bias` is its decoder's, and only the decoder's call uses it. `ParameterDict` and
    `ParameterList` children are never called themselves, so their parameters belong to the parent.
    """
    below = {
        id(parameter)
        for child in layer.children()
        if not isinstance(child, _NEVER_CALLED)
        for parameter in child.parameters()
    }
    return [
        slot
        for slot in _direct_slots(layer)
        if slot.parameter is not None and id(slot.parameter) not in below
    ]


def _direct_slots(layer: nn.Module, prefix: str = "") -> Iterator[Slot]:
    for key in layer._parameters:
        yield Slot(prefix + key, layer, key)
    for name, child in layer.named_children():
        if isinstance(child, _NEVER_CALLED):
            yield from _direct_slots(child, f"{prefix}{name}.")


def layers_with_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, list[Slot]]]:
    """`(path, layer, slots)` of each module whose own forward uses parameters, root first."""
    for path, layer in root.named_modules():
        if isinstance(layer, _NEVER_CALLED) and layer is not root:
            continue
        found = slots(layer)
        if found:
            yield path, layer, found
