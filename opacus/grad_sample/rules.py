"""Layer rules: from one captured call to what is kept of each parameter's per-sample gradient.

Every rule is bilinear in (activations, backprops), so the clipped sum of sample gradients G_i is the
ordinary product with the backprops of sample i scaled by its factor: sum_i c_i G(a_i, g_i) = G(a, c * g).

A rule is registered for a layer class under the names of the parameters it covers. A layer whose class
overrides `forward`, or that trains other parameters, falls back to functorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.kept import Kept, KeptLookup, KeptPositions, KeptProduct, KeptRows, LookedUp
from opacus.grad_sample.owners import Owners
from opacus.grad_sample.products import grams_fused, outer_rows
from opacus.grad_sample.routes import Route

__all__ = ["Rule", "builtin_rule", "compute_dtype", "instantiated", "lookup", "matrix_product", "register"]


@dataclass(frozen=True)
class Rule:
    """What one kind of layer makes of a captured call.

    Args:
        keep: `(captured, route) -> {name: Kept}`, an entry for each parameter that trained in the call. The route
            decides between forms where a rule has a choice.
    """

    keep: Callable[[Captured, Route], dict[str, Kept]]

    def grad_sample(self, captured: Captured) -> dict[str, Tensor]:
        """Per-sample gradients, `[n_samples, *shape]` for each trained parameter."""
        kept = self.keep(captured, Route(always_instantiate=True))
        return {name: use.instantiated() for name, use in kept.items()}

    def norm_sample(self, captured: Captured) -> dict[str, Tensor]:
        """Squared norms of this call's per-sample gradients alone, `[n_samples]`, at least float32.

        Valid for a parameter captured once in the batch; for several uses see `kept.joint_sq_norm`.
        """
        return {name: use.sq_norm() for name, use in self.keep(captured, Route()).items()}

    def clipped_grad(self, captured: Captured, factor_B: Tensor) -> dict[str, Tensor]:
        """Sum over samples of factor times gradient, in the parameter's shape, at least float32."""
        return {name: use.clipped(factor_B) for name, use in self.keep(captured, Route()).items()}


def instantiated(rows: Callable[[Captured], dict[str, Tensor]]) -> Rule:
    """Rule of layers whose per-sample gradients are small enough to keep.

    Args:
        rows: `captured -> {name: [R, *shape]}`, gradient of each row.
    """

    def keep(captured: Captured, route: Route) -> dict[str, Kept]:
        return {name: KeptRows(captured.owners.add_up(found)) for name, found in rows(captured).items()}

    return Rule(keep)


def matrix_product(
    pairs: Callable[[Captured], tuple[Tensor, Tensor]],
    sizes: Callable[[Captured], tuple[int, int, int, int]],
    rows: Callable[[Captured], Tensor] | None = None,
    pairs_are_views: bool = False,
) -> Rule:
    """Rule of layers that multiply inputs by one matrix per group: weight gradient `sum_t g_t a_t^T`.

    Shapes: R rows, B samples, K groups, T positions (all middle dims folded), D in, P out, both per group.

    Args:
        pairs: `captured -> (a_RKTD, g_RKTP)`; `[K, P, D]` reshapes to the weight's shape.
        sizes: `captured -> (T, D, P, K)`, without forming the pairs.
        rows: `captured -> [R, *weight.shape]`, where a layer kind has a faster way to each row's gradient.
        pairs_are_views: forming the pairs takes neither time nor memory.
    """

    def weight_rows(captured: Captured) -> Tensor:
        if rows is not None:
            return rows(captured)
        product = outer_rows(*pairs(captured))
        return product.reshape(product.shape[0], *captured.layer.weight.shape)

    def keep(captured: Captured, route: Route) -> dict[str, Kept]:
        found: dict[str, Kept] = {}
        if captured.trains("weight"):
            positions, d_in, p_out, groups = sizes(captured)
            owners = captured.owners
            # the k rows of a sample are k T positions of it; where k varies, rows are instantiated and added
            if owners.rows_each is None or route.instantiates(
                batch=owners.n_samples * groups,
                positions=positions * owners.rows_each,
                d_in=d_in,
                p_out=p_out,
                pair_bytes=captured.backprops.element_size(),
            ):
                found["weight"] = KeptRows(owners.add_up(weight_rows(captured)))
            elif pairs_are_views and owners.rows_each == 1 and grams_fused(*(pair := pairs(captured))):
                found["weight"] = _waiting(pair, captured.layer.weight.shape)
                if captured.trains("bias"):
                    found["bias"] = KeptPositions(captured.backprops.view(owners.n_rows, positions, -1))
            else:
                found["weight"] = KeptProduct(
                    lambda: _of_samples(pairs(captured), owners), captured.layer.weight.shape
                )
        if captured.trains("bias") and "bias" not in found:
            found["bias"] = KeptRows(captured.owners.add_up(_bias_rows(captured)))
        return found

    return Rule(keep)


def _waiting(pair: tuple[Tensor, Tensor], shape: torch.Size) -> KeptProduct:
    """A product that is normed and summed together with others of its shape."""
    a, g = pair
    like = (a.shape, g.shape, a.dtype, a.device)
    return KeptProduct(lambda: pair, shape, like, (a.numel() + g.numel()) * a.element_size())


def _of_samples(pair: tuple[Tensor, Tensor], owners: Owners) -> tuple[Tensor, Tensor]:
    """`(a_RKTD, g_RKTP)` with the rows of a sample as further positions: `[B, K, k T, *]`."""
    if owners.rows_each == 1:
        return pair
    a, g = (owners.folded(x).transpose(1, 2).flatten(2, 3) for x in pair)
    return a, g


def _bias_rows(captured: Captured) -> Tensor:
    """Gradient of a bias added to every position: backprops summed over all dims but batch and channels."""
    g = captured.backprops
    channel = 1 if isinstance(captured.layer, nn.modules.conv._ConvNd) else g.dim() - 1
    middle = [dim for dim in range(1, g.dim()) if dim != channel]
    return g.sum(middle, dtype=compute_dtype(g)) if middle else g.to(compute_dtype(g))


def lookup(find: Callable[[Captured], LookedUp]) -> Rule:
    """Rule of layers whose weight is a table.

    Args:
        find: flattens a call into the entries its rows looked up.
    """

    def keep(captured: Captured, route: Route) -> dict[str, Kept]:
        if not captured.trains("weight"):
            return {}
        owners = captured.owners
        looked = _looked_up_by_samples(find(captured), owners)
        return {"weight": KeptLookup(looked, owners.n_samples, captured.layer.weight.shape)}

    return Rule(keep)


def _looked_up_by_samples(looked: LookedUp, owners: Owners) -> LookedUp:
    """The same entries, said to be their samples'."""
    if owners.rows_each == 1:
        return looked
    if owners.rows_each is None or not looked.rectangular:
        return LookedUp(looked.ids_N, owners.index_on(looked.rows_N.device)[looked.rows_N], looked.g_ND)
    # a matrix of ids stays one, [B, k T], for the cross term with a tied head
    rows, n_entries = owners.n_rows, looked.ids_N.shape[0]
    positions = n_entries // max(1, rows)
    ids_N, g_ND = (
        owners.folded(x.reshape(rows, positions, *x.shape[1:])).flatten(0, 2)
        for x in (looked.ids_N, looked.g_ND)
    )
    samples = torch.arange(owners.n_samples, device=ids_N.device)
    rows_N = samples.repeat_interleave(positions * owners.rows_each)
    return LookedUp(ids_N, rows_N, g_ND, rectangular=True)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """At least float32: what norms, factors and sums over samples are kept in."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


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
