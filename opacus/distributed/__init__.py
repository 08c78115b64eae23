"""Private training over several processes."""

from __future__ import annotations

from opacus.distributed.data_parallel import DifferentiallyPrivateDistributedDataParallel, average_gradients
from opacus.distributed.errors import RankLostError, ReplicaError

__all__ = [
    "DifferentiallyPrivateDistributedDataParallel",
    "RankLostError",
    "ReplicaError",
    "average_gradients",
]
