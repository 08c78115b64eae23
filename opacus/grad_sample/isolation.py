"""The isolation check: one sample's output must not reach another sample's rows.

Summed gradients look right even where rows and samples do not match: position ids of shape `[T]` while T happens to be
B, a layer that mixes the batch, a batch transposed on the way. So once, before the first backward, the last sample's
output alone is sent backwards. Where a layer's rows are its samples, only that sample's row receives anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.distributed.sharding import is_sharded_model
from opacus.errors import PerSampleGradientError
from opacus.grad_sample.owners import Owners

__all__ = ["Probe", "can_probe"]

logger = logging.getLogger(__name__)


def can_probe(model: nn.Module) -> bool:
    """Sharded models cannot: an extra backward would upset the hooks that gather and free their parameters."""
    return not is_sharded_model(model)


class Probe:
    """One backward of one sample's output.

    Args:
        rows: number of rows in the batch, at least 2.
        owners: rows to samples.
        batch_dim_of: the batch dimension of an output.
    """

    def __init__(self, rows: int, owners: Owners, batch_dim_of: Callable[[Tensor], int]) -> None:
        self.rows = rows
        self.owners = owners
        self.batch_dim_of = batch_dim_of
        self._reached: list[tuple[str, Tensor]] = []

    def run(self, output: Any, anchor: Tensor) -> bool:
        """Send the last row of `output` backwards; captured calls report to `look`.

        Returns:
            Whether the check could be made.

        Raises:
            PerSampleGradientError: naming the layers in which other samples' rows received a gradient.
        """
        last = [row for row in map(self._last_row, tree_leaves(output)) if row is not None]
        if not last:
            return False
        try:
            torch.autograd.grad(last, anchor, list(map(_uneven, last)), retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # reentrant checkpointing, compiled graphs
            logger.debug("the isolation check could not be made: %s", error)
            return False
        mixed = [where for where, reached in self._reached if bool(reached)]
        if mixed:
            raise PerSampleGradientError(
                "samples are not isolated",
                [
                    f"{where}: the output of one sample sends gradients to rows of others, so its rows are not the samples "
                    "(position ids [T] instead of [B, T]? a layer that mixes the batch?)."
                    for where in mixed[:5]
                ],
            )
        return bool(self._reached)

    def _last_row(self, leaf: Any) -> Tensor | None:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not leaf.dim():
            return None
        dim = self.batch_dim_of(leaf)
        return leaf.select(dim, -1) if leaf.shape[dim] == self.rows else None

    def look(self, where: str, grads: Sequence[Tensor]) -> None:
        """Note whether a call's other rows received anything; NaN does not count (0 * inf)."""
        for grad in grads:
            received = (
                grad.flatten(1).abs().amax(1) > 0 if grad.dim() > 1 and grad.numel() else grad.abs() > 0
            )
            rows_are_samples = grad.dim() > 0 and grad.shape[0] == self.rows
            self._reached.append(
                (where, (received & self._others(grad.device) if rows_are_samples else received).any())
            )

    def _others(self, device: torch.device) -> Tensor:
        owner = self.owners.index_on(device)
        return owner != owner[-1]


def _uneven(row: Tensor) -> Tensor:
    """A gradient that no softmax or normalisation cancels, as a constant one would be; draws no random numbers."""
    return torch.arange(1, row.numel() + 1, device=row.device).cos().reshape(row.shape).to(row.dtype)
