"""Which call uses which parameter: the layer to hook for each parameter of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from opacus import integrations
from opacus.grad_sample.declarations import is_part_of_parent

__all__ = ["Slot", "all_parameters", "layers_with_parameters", "slots"]


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
    head the parent's `bias` is its decoder's, and only the decoder's call uses it. Containers without a
    forward (`ParameterDict`, `ModuleList`) are never called, so what they hold belongs to the parent.
    """
    below = {id(parameter) for child in _called_children(layer) for parameter in child.parameters()}
    return [
        slot
        for slot in _direct_slots(layer)
        if slot.parameter is not None and id(slot.parameter) not in below
    ]


def _never_called(module: nn.Module) -> bool:
    if is_part_of_parent(module):
        return True
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _called_children(layer: nn.Module) -> Iterator[nn.Module]:
    for child in layer.children():
        if _never_called(child):
            yield from _called_children(child)
        else:
            yield child


def _direct_slots(layer: nn.Module, prefix: str = "") -> Iterator[Slot]:
    for key in layer._parameters:
        yield Slot(prefix + key, layer, key)
    for name, child in layer.named_children():
        if _never_called(child):
            yield from _direct_slots(child, f"{prefix}{name}.")


def layers_with_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Module, list[Slot]]]:
    """`(path, layer, slots)` of each module whose own forward uses parameters, root first."""
    integrations.met()
    for path, layer in root.named_modules():
        if _never_called(layer) and layer is not root:
            continue
        found = slots(layer)
        if found:
            yield path, layer, found


def all_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Parameters of `root`, shared ones once; walked several times a step, so without names."""
    stack, met = [root], {id(root)}
    found: dict[int, nn.Parameter] = {}
    while stack:
        module = stack.pop()
        if module._parameters:  # most modules of a model with adapters have none
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[id(parameter)] = parameter
        if module._modules:
            for child in module._modules.values():
                if child is not None and id(child) not in met:
                    met.add(id(child))
                    stack.append(child)
    return list(found.values())
