"""The recorded optimizer of mode "ghost"."""

from __future__ import annotations

from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["DPOptimizerFastGradientClipping"]


class DPOptimizerFastGradientClipping(DPOptimizer):
    """`DPOptimizer` under its recorded name for mode "ghost": clipped sums come from the model's book.

    Takes the arguments of `DPOptimizer`. A step without a backward of the wrapped loss is refused.

    Formal guarantee:
        That of `DPOptimizer`.
    """

    def accumulate(self) -> None:
        """Add the clipped sums of the backward passes since the last step to `summed_grad` of each parameter."""
        self.clip_and_accumulate()
