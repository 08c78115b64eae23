"""Data parallel, per-layer clipping."""

from __future__ import annotations

from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.perlayeroptimizer import (
    DPPerLayerOptimizer,
)
from opacus.optimizers.perlayeroptimizer import (
    clip_and_accumulate_parameter as _clip_and_accumulate_parameter,  # noqa: F401  imported by existing code
)

__all__ = ["DistributedPerLayerOptimizer", "SimpleDistributedPerLayerOptimizer"]


class SimpleDistributedPerLayerOptimizer(DPPerLayerOptimizer, DistributedDPOptimizer):
    """`DPPerLayerOptimizer` for replicas that train together.

    Takes the arguments of `DPPerLayerOptimizer`; `expected_batch_size` and `process_group` are those of `DistributedDPOptimizer`.

    Formal guarantee:
        That of `DPPerLayerOptimizer`, for the union of the ranks' batches.
    """

    OPTIONS = DistributedDPOptimizer.OPTIONS


class DistributedPerLayerOptimizer(SimpleDistributedPerLayerOptimizer):
    """`SimpleDistributedPerLayerOptimizer` under the name that existing code has for models in torch's DistributedDataParallel.

    Formal guarantee:
        That of `SimpleDistributedPerLayerOptimizer`.
    """
