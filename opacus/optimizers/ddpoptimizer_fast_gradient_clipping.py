"""Data parallel, mode "ghost": the recorded name."""

from __future__ import annotations

from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

__all__ = ["DistributedDPOptimizerFastGradientClipping"]


class DistributedDPOptimizerFastGradientClipping(DPOptimizerFastGradientClipping, DistributedDPOptimizer):
    """`DistributedDPOptimizer` under its recorded name for mode "ghost".

    Takes the arguments of `DistributedDPOptimizer`. A step without a backward of the wrapped loss is refused.

    Formal guarantee:
        That of `DistributedDPOptimizer`.
    """
