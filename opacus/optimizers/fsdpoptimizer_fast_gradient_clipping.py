"""The recorded optimizer of mode "ghost_fsdp"."""

from __future__ import annotations

from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping

__all__ = ["FSDPOptimizerFastGradientClipping"]


class FSDPOptimizerFastGradientClipping(DPOptimizerFastGradientClipping):
    """`DPOptimizer` under its recorded name for sharded models. (Every private optimizer works on sharded parameters.)

    Takes the arguments of `DPOptimizer`; `expected_batch_size` counts the samples of all ranks together.

    Formal guarantee:
        That of `DPOptimizer`, for the sum over all ranks' samples: each coordinate of a whole parameter is noised once.
    """
