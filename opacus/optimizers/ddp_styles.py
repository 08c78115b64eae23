"""Data parallel, adaptive and automatic clipping."""

from __future__ import annotations

from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from opacus.optimizers.automatic import AutomaticDPOptimizer
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer

__all__ = ["DistributedAdaClipDPOptimizer", "DistributedAutomaticDPOptimizer"]


class DistributedAdaClipDPOptimizer(AdaClipDPOptimizer, DistributedDPOptimizer):
    """`AdaClipDPOptimizer` for replicas that train together: the count of unclipped samples is that of all ranks.

    Takes the arguments of `AdaClipDPOptimizer`; `expected_batch_size` and `process_group` are those of `DistributedDPOptimizer`.

    Formal guarantee:
        That of `AdaClipDPOptimizer`, for the union of the ranks' batches: count and gradients receive noise once, and C is the same
        on every rank.
    """

    OPTIONS = (*AdaClipDPOptimizer.OPTIONS, "process_group")


class DistributedAutomaticDPOptimizer(AutomaticDPOptimizer, DistributedDPOptimizer):
    """`AutomaticDPOptimizer` for replicas that train together.

    Takes the arguments of `DistributedDPOptimizer`.

    Formal guarantee:
        That of `DistributedDPOptimizer`.
    """
