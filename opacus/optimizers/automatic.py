"""Automatic clipping (AUTO-S): every sample's gradient is normalised, so the clipping norm needs no tuning."""

from __future__ import annotations

from torch import Tensor

from opacus.optimizers.clipping import automatic_clip_factor
from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["AutomaticDPOptimizer"]


class AutomaticDPOptimizer(DPOptimizer):
    """`DPOptimizer` with the factor of Bu et al. (NeurIPS 2023), `C / (norm + 0.01)`, in place of `min(1, C / norm)`.

    Takes the arguments of `DPOptimizer`.

    Formal guarantee:
        That of `DPOptimizer`: each sample's scaled gradient has norm below C.
    """

    def factor_of(self, norm_B: Tensor, weight_B: Tensor | None) -> Tensor:
        """Clip factors `[B]` for per-sample norms `[B]` of the whole gradient."""
        return automatic_clip_factor(norm_B, self.max_grad_norm, weight_B)
