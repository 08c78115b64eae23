"""Layer rules: from one captured call to per-sample gradients, their norms, or their clipped sum.

Every rule is bilinear in (activations, backprops), so the clipped sum of sample gradients G_i is the
ordinary product with the backprops of sample i scaled by its factor: sum_i c_i G(a_i, g_i) = G(a, c * g).

A rule is registered for a layer class under the names of the parameters it covers. A layer whose class
overrides `forward`, or that trains other parameters, falls back to functorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured

__all__ = ["Instantiated", "MatrixProduct", "Rule", "builtin_rule", "compute_dtype", "register", "sq_norm"]

GradSampler = Callable[[nn.Module, list[Tensor], Tensor], Mapping[nn.Parameter, Tensor]]


class Rule(Protocol):
    """Three views of one layer call's per-sample gradients; keys are parameter names."""

    def grad_sample(self, captured: Captured) -> dict[str, Tensor]:
        """Per-sample gradients, `[n_samples, *shape]` for each trained parameter."""

    def norm_sample(self, captured: Captured) -> dict[str, Tensor]:
        """Squared norms of this call's per-sample gradients alone, `[n_samples]`, at least float32.

        Valid for a parameter captured once in the batch; calls that share a parameter add their
        gradients before the norm is taken.
        """

    def clipped_grad(self, captured: Captured, factor_B: Tensor) -> dict[str, Tensor]:
        """Sum over samples of factor times gradient, in the parameter's shape, at least float32."""


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """At least float32: what norms, factors and sums over samples are kept in."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def sq_norm(rows: Tensor) -> Tensor:
    """Squared L2 norm of each row of `[B, ...]`: `[B]`, at least float32."""
    return torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=compute_dtype(rows)).square()


@dataclass(frozen=True)
class Instantiated:
    """A rule whose per-sample gradients are small enough to keep; norm and clipped sum follow from them.

    Args:
        rows: `captured -> {name: [R, *shape]}`, gradient of each row.
    """

    rows: Callable[[Captured], dict[str, Tensor]]

    def grad_sample(self, captured: Captured) -> dict[str, Tensor]:
        return {name: captured.owners.add_up(rows) for name, rows in self.rows(captured).items()}

    def norm_sample(self, captured: Captured) -> dict[str, Tensor]:
        return {name: sq_norm(grad) for name, grad in self.grad_sample(captured).items()}

    def clipped_grad(self, captured: Captured, factor_B: Tensor) -> dict[str, Tensor]:
        return {name: weighted_sum(factor_B, grad) for name, grad in self.grad_sample(captured).items()}


@dataclass(frozen=True)
class MatrixProduct:
    """A layer that multiplies inputs by one matrix per group: weight gradient `sum_t g_t a_t^T`.

    Shapes: R rows, B samples, K groups, T positions (all middle dims folded), D in, P out, both per group.

    Args:
        pairs: `captured -> (a_RKTD, g_RKTP)`; `[K, P, D]` reshapes to the weight's shape.
        rows: `captured -> [R, *weight.shape]`, where a layer kind has a faster way to each row's gradient.
    """

    pairs: Callable[[Captured], tuple[Tensor, Tensor]]
    rows: Callable[[Captured], Tensor] | None = None

    def grad_sample(self, captured: Captured) -> dict[str, Tensor]:
        grads = {}
        if captured.trains("weight"):
            grads["weight"] = captured.owners.add_up(self._weight_rows(captured))
        if captured.trains("bias"):
            grads["bias"] = captured.owners.add_up(_bias_rows(captured))
        return grads

    def norm_sample(self, captured: Captured) -> dict[str, Tensor]:
        norms = {}
        if captured.trains("weight"):
            # rows of one sample would need a joint Gram matrix; they are added instead
            if captured.owners.index_R is None:
                norms["weight"] = ghost_sq_norm(*self.pairs(captured))
            else:
                norms["weight"] = sq_norm(captured.owners.add_up(self._weight_rows(captured)))
        if captured.trains("bias"):
            norms["bias"] = sq_norm(captured.owners.add_up(_bias_rows(captured)))
        return norms

    def clipped_grad(self, captured: Captured, factor_B: Tensor) -> dict[str, Tensor]:
        index = captured.owners.index_R
        factor_R = factor_B if index is None else factor_B[index.to(factor_B.device)]
        grads = {}
        if captured.trains("weight"):
            a_RKTD, g_RKTP = self.pairs(captured)
            dtype = compute_dtype(a_RKTD, g_RKTP)
            scaled = g_RKTP.to(dtype) * factor_R.to(dtype)[:, None, None, None]
            product_KPD = torch.einsum("rktp,rktd->kpd", scaled, a_RKTD.to(dtype))
            grads["weight"] = product_KPD.reshape(captured.layer.weight.shape)
        if captured.trains("bias"):
            grads["bias"] = weighted_sum(factor_R, _bias_rows(captured))
        return grads

    def _weight_rows(self, captured: Captured) -> Tensor:
        if self.rows is not None:
            return self.rows(captured)
        a_RKTD, g_RKTP = self.pairs(captured)
        dtype = torch.promote_types(a_RKTD.dtype, g_RKTP.dtype)
        product = torch.einsum("rktp,rktd->rkpd", g_RKTP.to(dtype), a_RKTD.to(dtype))
        return product.reshape(product.shape[0], *captured.layer.weight.shape)


def _bias_rows(captured: Captured) -> Tensor:
    """Gradient of a bias added to every position: backprops summed over all dims but batch and channels."""
    g = captured.backprops
    channel = g.dim() - 1 if isinstance(captured.layer, nn.Linear) else 1
    middle = [dim for dim in range(1, g.dim()) if dim != channel]
    return g.sum(middle, dtype=compute_dtype(g)) if middle else g.to(compute_dtype(g))


def ghost_sq_norm(a_RKTD: Tensor, g_RKTP: Tensor) -> Tensor:
    """Squared norm of `sum_t g_t a_t^T` per row without forming it: `<a a^T, g g^T>` (Goodfellow, 2015).

    Args:
        a_RKTD: activations. g_RKTP: backprops.

    Returns:
        `[R]`, at least float32, clamped at 0 (rounding may make a sum of products slightly negative).
    """
    dtype = compute_dtype(a_RKTD, g_RKTP)
    a, g = a_RKTD.to(dtype), g_RKTP.to(dtype)
    if a.shape[2] == 1:
        return (a.square().sum(-1) * g.square().sum(-1)).flatten(1).sum(1)
    gram = torch.einsum("rktd,rksd->rkts", a, a).mul_(torch.einsum("rktp,rksp->rkts", g, g))
    return gram.flatten(1).sum(1).clamp_(min=0)


def weighted_sum(factor_B: Tensor, grad_B: Tensor) -> Tensor:
    """`sum_i factor_i * grad_i` in at least float32; a matrix-vector product, never in TF32."""
    dtype = compute_dtype(grad_B)
    flat = grad_B.flatten(1).to(dtype)
    return torch.mv(flat.t(), factor_B.to(device=flat.device, dtype=dtype)).view(grad_B.shape[1:])


_BUILTIN: dict[type[nn.Module], tuple[Rule, frozenset[str]]] = {}


def register(*layers: type[nn.Module], rule: Rule, names: tuple[str, ...] = ("weight", "bias")) -> None:
    """Make `rule` the rule of `layers` for the parameters `names`."""
    for layer in layers:
        _BUILTIN[layer] = (rule, frozenset(names))


def builtin_rule(layer: nn.Module, names: tuple[str, ...]) -> Rule | None:
    """The registered rule that computes what `layer` does, or None.

    A subclass inherits the rule as long as it runs the registered class' own forward on parameters the
    rule knows (`NonDynamicallyQuantizableLinear`); weight normalisation, say, trains other names.
    """
    for base in type(layer).__mro__:
        if base in _BUILTIN:
            rule, known = _BUILTIN[base]
            return rule if _runs(layer, base) and known.issuperset(names) else None
    return None


def _runs(layer: nn.Module, base: type[nn.Module]) -> bool:
    """Whether calling `layer` runs `base.forward`; Accelerate's dispatch keeps the original as `_old_forward`."""
    own = vars(layer).get("forward")
    if own is not None and "_hf_hook" in vars(layer):
        own = vars(layer).get("_old_forward")
    return (
        type(layer).forward is base.forward if own is None else getattr(own, "__func__", None) is base.forward
    )
