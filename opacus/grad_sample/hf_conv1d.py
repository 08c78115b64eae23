"""Hugging Face's `Conv1D` (GPT-2): a linear layer that keeps its weight transposed, `[in, out]`.

Its class is known by name: Transformers is not imported, and need not be installed.

Shapes: R rows, K = 1 group, T positions (all middle dims folded), D in, P out. The weight gradient is `sum_t a_t g_t^T`, so
inputs and backprops take each other's place in the matrix product.
"""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample import linear
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.rules import matrix_product, register

__all__ = ["HF_CONV1D", "meet"]

_CLASS = ("transformers.pytorch_utils", "Conv1D")
_met: set[type[nn.Module]] = set()


def pairs(captured: Captured) -> tuple[Tensor, Tensor]:
    """`(g_R1TP, a_R1TD)`."""
    a_R1TD, g_R1TP = linear.pairs(captured)
    return g_R1TP, a_R1TD


def sizes(captured: Captured) -> tuple[int, int, int, int]:
    """`(T, P, D, K)`."""
    positions, d_in, p_out, groups = linear.sizes(captured)
    return positions, p_out, d_in, groups


HF_CONV1D = matrix_product(pairs, sizes, pairs_are_views=True)


def meet(layer: nn.Module) -> None:
    """Register the rule for `layer`'s class if it is Hugging Face's, or derived from it."""
    if type(layer) in _met:
        return
    _met.add(type(layer))
    for base in type(layer).__mro__:
        if (base.__module__, base.__qualname__) == _CLASS:
            register(base, rule=HF_CONV1D)
