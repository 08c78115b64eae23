"""Clip factors: how much of each sample's gradient enters the sum. One function per clipping style."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["automatic_clip_factor", "flat_clip_factor"]


def flat_clip_factor(norm_B: Tensor, max_grad_norm: float | Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Factor that brings each sample's whole gradient inside the L2 ball of radius `max_grad_norm`.

    Implements the clipping of Abadi et al. (2016), algorithm 1: `min(1, C / norm)`; with weights,
    `w * min(1, C / (w * norm))`, which clips the weighted gradient `w * g`.

    Args:
        norm_B: L2 norm of each sample's gradient over all trainable parameters, `[B]`, at least float32.
            Non-finite entries mark samples whose gradient overflowed.
        max_grad_norm: radius C, positive; a 0-dim tensor where only the device knows it.
        weight_B: `[B]`, non-negative and finite, or None for ones.

    Returns:
        `[B]`, in the dtype of `norm_B`; in [0, 1] without weights. Zero for non-finite samples.

    Formal guarantee:
        `factor[i] * norm[i] <= max_grad_norm` holds in exact arithmetic after rounding: quotient and product are
        moved towards zero by more than their rounding errors. Hence the sum of clipped gradients has L2
        sensitivity C under adding or removing one sample.

    Example:
        >>> flat_clip_factor(torch.tensor([0.5, 4.0, float("inf")]), max_grad_norm=1.0)
        tensor([1.0000, 0.2500, 0.0000])
    """
    weighted_B = norm_B if weight_B is None else norm_B * weight_B.to(norm_B)
    # each of quotient, product and norm is off by half an ulp at most; four ulps below covers them all
    below = max_grad_norm * (1 - 4 * torch.finfo(norm_B.dtype).eps)
    factor_B = (below / weighted_B.clamp(min=torch.finfo(norm_B.dtype).tiny)).clamp(max=1.0)
    if weight_B is not None:
        factor_B = factor_B * weight_B.to(norm_B)
    # a factor below the normal range has lost the precision that the margin above counts on
    usable_B = weighted_B.isfinite() & norm_B.isfinite() & (factor_B >= torch.finfo(norm_B.dtype).tiny)
    return torch.where(usable_B, factor_B, torch.zeros_like(factor_B))


def automatic_clip_factor(
    norm_B: Tensor, max_grad_norm: float | Tensor, weight_B: Tensor | None = None, *, stability: float = 0.01
) -> Tensor:
    """Factor that brings every sample's gradient close to norm `max_grad_norm`: AUTO-S.

    Implements Bu et al., "Automatic Clipping" (NeurIPS 2023): `C / (norm + stability)`. C only scales the update, so it
    needs no tuning: with Adam any value gives the same training.

    Args:
        norm_B, max_grad_norm: as in `flat_clip_factor`.
        weight_B: `[B]`, non-negative and finite, or None for ones: the factor is that of the weighted gradient `w * g`, times w.
        stability: gamma, positive; keeps small gradients small.

    Returns:
        `[B]`, in the dtype of `norm_B`. Zero for non-finite samples.

    Formal guarantee:
        `factor[i] * norm[i] < max_grad_norm`, rounding included: the sum of scaled gradients has L2 sensitivity C under
        adding or removing one sample.

    Example:
        >>> automatic_clip_factor(torch.tensor([0.99, 3.99]), max_grad_norm=1.0)
        tensor([1.0000, 0.2500])
    """
    if weight_B is not None:
        weight_B = weight_B.to(norm_B).clamp(min=0)
    weighted_B = norm_B if weight_B is None else norm_B * weight_B
    below = max_grad_norm * (1 - 4 * torch.finfo(norm_B.dtype).eps)
    factor_B = below / (weighted_B + stability)
    if weight_B is not None:
        factor_B = factor_B * weight_B
    usable_B = weighted_B.isfinite() & norm_B.isfinite() & (factor_B >= torch.finfo(norm_B.dtype).tiny)
    return torch.where(usable_B, factor_B, torch.zeros_like(factor_B))
