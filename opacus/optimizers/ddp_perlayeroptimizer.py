"""Data parallel, per-layer clipping. Not available in this version; the names import and refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from opacus.distributed.unavailable import refuse
from opacus.optimizers.optimizer import DPOptimizer
from opacus.optimizers.perlayeroptimizer import (
    clip_and_accumulate_parameter as _clip_and_accumulate_parameter,  # noqa: F401  imported by existing code
)

__all__ = ["DistributedPerLayerOptimizer", "SimpleDistributedPerLayerOptimizer"]


class DistributedPerLayerOptimizer(DPOptimizer):
    """Not available in this version.

    Raises:
        ConfigurationError: always.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse(type(self).__name__)


class SimpleDistributedPerLayerOptimizer(DPOptimizer):
    """Not available in this version.

    Raises:
        ConfigurationError: always.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse(type(self).__name__)
