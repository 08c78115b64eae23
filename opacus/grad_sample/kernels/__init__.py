"""Fused GPU kernels (Triton), each beside the plain torch code that gives the same numbers and that every other device runs.

They pay where plain code reads and writes the same tensor several times, or where launching a kernel takes longer than
the kernel: one launch serves all layers of one shape. Accumulation is in float32. Kernels hold no state.
"""

from __future__ import annotations

from opacus.grad_sample.kernels.gram import gram_norms
from opacus.grad_sample.kernels.norm import norm_rows
from opacus.grad_sample.kernels.rows import row_sq_norms, weighted_rows
from opacus.grad_sample.kernels.scale import scale_pairs
from opacus.grad_sample.kernels.sums import position_sums
from opacus.grad_sample.kernels.support import fused

__all__ = [
    "fused",
    "gram_norms",
    "norm_rows",
    "position_sums",
    "row_sq_norms",
    "scale_pairs",
    "weighted_rows",
]
