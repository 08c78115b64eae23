"""What a layer saw in one call: its inputs, the gradient of its output, and whose rows they are.

This room holds data only. How it is collected is `capture.py`; what is made of it are the layer rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.owners import Owners

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from opacus.grad_sample.pieces import Piece

__all__ = ["Captured", "Owners", "bind"]


@dataclass
class Captured:
    """One call of one layer, met by its backprops.

    Attributes:
        layer: the module that was called.
        names: the parameters that trained in this call, as dotted names relative to `layer`.
        args, kwargs: what the call was given, as given, tensors detached.
        outputs: gradient of the loss with respect to each differentiable output, batch first.
        scale: what undoes a mean over the batch: row i of `scale * outputs` belongs to sample i's own loss.
        owners: rows to samples.
        batch_dim_of: the batch dimension of an input tensor.
        output_index: for a call with several outputs, the positions (among the output's tensor leaves)
            that `outputs` belong to.
        pieces: tensor parallel: by name, this rank's pieces of the parameters (`pieces.py`); the tensors are what they need.
        adds_up: tensor parallel: the axis over whose ranks the positions of a call are split, so that a sample's gradient is
            the sum of what they find.
    """

    layer: Any  # an nn.Module; its attributes are those of its kind
    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Tensor]
    owners: Owners
    batch_dim_of: Callable[[Tensor], int] = lambda tensor: 0
    output_index: tuple[int, ...] = (0,)
    scale: float = 1.0
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    adds_up: DeviceMesh | None = None
    _bound: dict[str, Any] | None = field(default=None, init=False, repr=False)
    _inputs: list[Tensor] | None = field(default=None, init=False, repr=False)

    def scaled(self) -> Captured:
        """The same call with `scale` multiplied into its outputs."""
        if self.scale == 1.0:
            return self
        return replace(self, outputs=[g * self.scale for g in self.outputs], scale=1.0)

    @property
    def backprops(self) -> Tensor:
        """Gradient with respect to the layer's one output, `[R, ...]`."""
        if len(self.outputs) != 1:
            raise ValueError(
                f"{type(self.layer).__name__} has {len(self.outputs)} outputs; its rule expects one"
            )
        return self.outputs[0]

    @property
    def inputs(self) -> list[Tensor]:
        """All tensor inputs, batch first, in the order of the signature, keyword arguments included."""
        if self._inputs is None:
            # positions are the signature's order: no need to bind
            values = (
                self.arguments.values()
                if self.kwargs or self._bound is not None
                else [self._brought(value) for value in self.args]
            )
            self._inputs = [value for value in values if isinstance(value, Tensor)]
        return self._inputs

    @property
    def arguments(self) -> dict[str, Any]:
        """Inputs bound to the names of `layer.forward`'s signature; tensors batch first, on the backprops' device.

        Accelerate moves inputs inside the patched forward, after hooks saw them.
        """
        if self._bound is None:
            bound = bind(self.layer, self.args, self.kwargs)
            self._bound = {name: self._brought(value) for name, value in bound.items()}
        return self._bound

    def batched(self, dims: int, exactly: bool = False) -> Tensor:
        """The first input, which has to have `dims` dims (at least, or exactly) for one of them to be the batch.

        Raises:
            PerSampleGradientError: it has fewer: torch takes it as one unbatched sample.
        """
        x = self.inputs[0]
        if x.dim() < dims or (exactly and x.dim() != dims):
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    f"{type(self.layer).__name__} was called with an input of shape {tuple(x.shape)}, which has no batch "
                    "dimension: pass [B, ...]."
                ],
            )
        return x

    def _brought(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = self.outputs[0].device
        there = self.batch_first(value)
        return there if there.device == device else there.to(device)

    def batch_first(self, tensor: Tensor) -> Tensor:
        """`tensor` with its batch dimension in front (a view)."""
        dim = self.batch_dim_of(tensor)
        return tensor.transpose(0, dim) if dim else tensor

    def shape_here(self, name: str, parameter: Tensor) -> torch.Size:
        """Shape of the gradient that this rank finds for the parameter `name`."""
        return self.pieces[name].shape if name in self.pieces else parameter.shape

    def trains(self, name: str) -> bool:
        """Whether the parameter `name` was trainable when the layer was called."""
        return name in self.names


_signatures: dict[Any, inspect.Signature] = {}


def _signature(function: Any, layer: nn.Module) -> inspect.Signature:
    """The signature of `layer.forward` without self; read once for each function."""
    try:
        known = _signatures.get(function)
    except TypeError:  # a callable that cannot be hashed
        return inspect.signature(layer.forward)
    if known is None:
        known = _signatures[function] = inspect.signature(layer.forward)
    return known


def bind(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the inputs of a call as `layer.forward`'s signature does; `*args` count one by one."""
    signature = _signature(getattr(layer.forward, "__func__", layer.forward), layer)
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments.update({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        else:
            arguments[name] = value
    return arguments
