"""Any layer: per-sample gradients by running its forward again under `vmap`, over all its inputs.

Exact for every forward that is a function of its inputs and parameters. A forward that `vmap` cannot
follow (data-dependent branches, in-place changes of captured tensors) is run sample by sample. One that draws random
numbers cannot be repeated exactly, so it is refused.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.declarations import draws_in_vain
from opacus.grad_sample.functorch_interface import (
    ft_compute_per_sample_gradient,
    make_functional,
    prepare_layer,
)
from opacus.grad_sample.rules import instantiated

__all__ = [
    "FUNCTORCH",
    "ft_compute_per_sample_gradient",
    "functorch_rows",
    "make_functional",
    "prepare_layer",
]

logger = logging.getLogger(__name__)
_told: set[type[nn.Module]] = set()
# arguments of a layer that once did not have one row per sample: they never do, even where a size happens to match
_shared: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def functorch_rows(captured: Captured) -> dict[str, Tensor]:
    """Gradient of each row for every trained parameter, `[R, *shape]`."""
    layer = captured.layer
    own = dict(layer.named_parameters())
    parameters = {name: own[name].detach() for name in captured.names}
    named, structure = tree_flatten_with_path((captured.args, dict(captured.kwargs)))
    leaves = [leaf for _, leaf in named]
    shared = _shared.setdefault(layer, set())
    rows = captured.owners.n_rows
    widest = _widest_dtype(own.values())
    tensors, dims = [], []
    for where, leaf in named:
        if isinstance(leaf, Tensor):
            dim = captured.batch_dim_of(leaf)
            size = leaf.shape[dim] if leaf.dim() > dim else 0
            if size not in (1, rows):
                shared.add(keystr(where))
            batched = leaf.dim() > dim and size == rows and keystr(where) not in shared
            leaf = _at_least(leaf, widest)
            tensors.append(leaf.transpose(0, dim) if batched and dim else leaf)
            dims.append(dim if batched else None)
    if rows and not any(dim is not None for dim in dims):
        raise PerSampleGradientError(
            "samples cannot be told apart",
            [
                f"{type(layer).__name__}: none of its inputs has one row per sample ({rows}); its parameters "
                f"{', '.join(captured.names)} act on the batch as a whole."
            ],
        )
    if rows == 0:
        return {name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}

    def one_row(parameters: dict[str, Tensor], inputs: list[Tensor], gs: list[Tensor]) -> Tensor:
        """<output, backprops> of one sample, fed as a batch of one."""
        supply = iter(
            tensor if dim is None else tensor.unsqueeze(dim) for tensor, dim in zip(inputs, dims, strict=True)
        )
        args, kwargs = tree_unflatten(
            [next(supply) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        named_parameters = {f"layer.{name}": p for name, p in parameters.items()}
        output = functional_call(_ForwardOnly(layer), named_parameters, args, kwargs, tie_weights=False)
        outputs = tree_flatten(output)[0]
        total = None
        for index, g in zip(captured.output_index, gs, strict=True):
            y = outputs[index]
            dim = captured.batch_dim_of(y)
            if y.dim() <= dim or y.shape[dim] != 1 or y.squeeze(dim).shape != g.shape:
                raise PerSampleGradientError(
                    "samples cannot be told apart",
                    [
                        f"{type(layer).__name__}: for one sample its output has shape {tuple(y.shape)}, where the batch "
                        f"has {tuple(g.shape)} a sample; its parameters {', '.join(captured.names)} act on the batch."
                    ],
                )
            term = (y.squeeze(dim) * g).sum()
            total = term if total is None else total + term
        assert total is not None
        return total

    repeatable = draws_in_vain(layer)
    in_dims: Any = (None, [None if dim is None else 0 for dim in dims], [0] * len(captured.outputs))
    try:
        with torch.random.fork_rng(devices=[], enabled=repeatable):
            per_row = vmap(grad(one_row), in_dims=in_dims, randomness="same" if repeatable else "error")
            return per_row(parameters, tensors, list(captured.outputs))
    except RuntimeError as error:
        if "randomness" in str(error):
            raise _random(layer) from error
        if type(layer) not in _told:
            _told.add(type(layer))
            logger.warning(
                "%s cannot be vectorised over samples (%s); its per-sample gradients are computed one sample at "
                "a time. Registering a rule with opacus.grad_sample.register_grad_sampler makes it fast.",
                type(layer).__name__,
                str(error).split("\n")[0],
            )
    with torch.random.fork_rng(devices=[], enabled=repeatable):
        return _row_by_row(one_row, parameters, tensors, dims, captured)


def _widest_dtype(parameters: Iterable[Tensor]) -> torch.dtype | None:
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _at_least(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Autocast is over when a layer runs again, and an input of low precision would not fit its parameters."""
    if dtype is None or not leaf.is_floating_point() or torch.promote_types(leaf.dtype, dtype) != dtype:
        return leaf
    return leaf.to(dtype)


class _ForwardOnly(nn.Module):
    """A layer without its hooks: those before it have seen the captured inputs, those after come after the backprops."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.forward(*args, **kwargs)


def _row_by_row(
    one_row: Any,
    parameters: dict[str, Tensor],
    tensors: list[Tensor],
    dims: list[int | None],
    captured: Captured,
) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    device = captured.outputs[0].device
    state = _random_state(device)
    for row in range(captured.owners.n_rows):
        inputs = [tensor if dim is None else tensor[row] for tensor, dim in zip(tensors, dims, strict=True)]
        with torch.enable_grad():
            leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
            value = one_row(leaves, inputs, [g[row] for g in captured.outputs])
            grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        for (name, p), g in zip(parameters.items(), grads, strict=True):
            found[name].append(torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)
    if not draws_in_vain(captured.layer) and not torch.equal(state, _random_state(device)):
        raise _random(captured.layer)
    return {name: torch.stack(rows) for name, rows in found.items()}


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _random(layer: nn.Module) -> PerSampleGradientError:
    return PerSampleGradientError(
        "per-sample gradients cannot be computed",
        [
            f"{type(layer).__name__} owns parameters and draws random numbers in the same forward (dropout?), so that its "
            "forward cannot be repeated per sample. Move the parameters or the random part into a layer of its own."
        ],
    )


FUNCTORCH = instantiated(functorch_rows)
