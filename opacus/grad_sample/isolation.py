"""The isolation check: one sample's output must not reach another sample's rows.

Summed gradients look right even where rows and samples do not match: position ids of shape `[T]` while T happens to be
B, a layer that mixes the batch, a batch transposed on the way. So in a few forwards, before their backward, one sample's
output alone is sent backwards. Where a layer's rows are its samples, only that sample's rows receive anything.

One look is not enough: a branch that starts at zero mixes nothing yet, samples that the model sorts may lie in order, and
`train()` may mix where `eval()` does not. `Schedule` says when to look, and where in the batch.

The probe follows gradients only: dependence through detached values (statistics of the batch taken under `no_grad`) is found by
`opacus.testing.check_sample_isolation` alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.distributed.sharding import is_sharded_model
from opacus.errors import PerSampleGradientError
from opacus.grad_sample.owners import Owners

__all__ = ["PARTS", "SHARDED", "Probe", "Schedule", "can_probe", "graph_is_recorded", "note_checked"]

logger = logging.getLogger(__name__)

# at which forwards of a mode, and where in the batch the probed row stands: 0 the first, 1 the last
_PLACES = {1: 1.0, 2: 0.0, 4: 0.5, 8: 0.25, 16: 0.75}
_LAST = max(_PLACES)
SHARDED = (
    "its parameters are sharded, and a backward of its own would need all ranks. Run opacus.testing.check_sample_isolation on "
    "the model before it is sharded (a small one of the same class does)."
)
PARTS = (
    "{where} took part in a backward, but only parts of the model were called, and the search looks at calls of the model that was made "
    "private. Call that, with what is done between its parts in its forward; or run opacus.testing.check_sample_isolation on model and loss."
)
_CHECK = "Pass check_isolation=True to make_private, or run opacus.testing.check_sample_isolation, which need no such backward."
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def can_probe(model: nn.Module) -> bool:
    """Sharded models cannot: an extra backward would upset the hooks that gather and free their parameters."""
    return not is_sharded_model(model)


def graph_is_recorded() -> bool:
    """Whether a CUDA graph is being recorded: nothing may be waited for, so the probe waits for another forward."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def note_checked(model: nn.Module) -> None:
    """`check_sample_isolation` has passed `model`: nothing is left to be asked for where it cannot be probed."""
    _checked.add(model)


class Schedule:
    """When to probe: the 1st, 2nd, 4th, 8th and 16th forward in `train()`, and as many in `eval()`.

    Only forwards that lead to a backward and hold several samples count.
    """

    def __init__(self) -> None:
        self._forwards = {True: 0, False: 0}
        self._told = False

    def done(self, training: bool) -> bool:
        """Whether no further forward in this mode is to be probed."""
        return self._forwards[training] >= _LAST

    def count(self, training: bool) -> float | None:
        """Count a forward. Returns the place of the row to probe, None where none is."""
        self._forwards[training] += 1
        return _PLACES.get(self._forwards[training])

    def put_off(self, training: bool) -> None:
        """No trained layer took part in that forward: it does not count."""
        self._forwards[training] -= 1

    def cannot(self, model: nn.Module, why: str) -> None:
        """Say once that the model could not be probed and what to do, unless it was checked otherwise."""
        if not self._told and model not in _checked:
            self._told = True
            logger.warning("%s was not searched for layers that mix samples: %s", type(model).__name__, why)


class Probe:
    """One backward of one sample's output.

    Args:
        rows: number of rows in the batch, at least 2.
        owners: rows to samples.
        batch_dim_of: the batch dimension of an output.
        place: where in the batch the row stands, from 0 (the first) to 1 (the last).

    Attributes:
        obstacle: why the check could not be made; empty where it could.
    """

    def __init__(
        self, rows: int, owners: Owners, batch_dim_of: Callable[[Tensor], int], place: float = 1.0
    ) -> None:
        self.rows = rows
        self.owners = owners
        self.batch_dim_of = batch_dim_of
        self.row = min(int(place * rows), rows - 1)
        self.obstacle = ""
        self._reached: list[tuple[str, Tensor]] = []

    def run(self, output: Any, anchor: Tensor) -> bool:
        """Send one row of `output` backwards; captured calls report to `look`.

        Returns:
            Whether any captured call was met.

        Raises:
            PerSampleGradientError: naming the layers in which other samples' rows received a gradient.
        """
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            return False
        row = [leaf.select(self.batch_dim_of(leaf), self.row) for leaf in self._batched(leaves)]
        if not row:
            self.obstacle = (
                f"no part of its output has one row for each of the {self.rows} that it was given. {_CHECK}"
            )
            return False
        try:
            torch.autograd.grad(row, anchor, list(map(_uneven, row)), retain_graph=True, allow_unused=True)
        except Exception as error:  # reentrant checkpointing; what is wrong with a hook of the user's own, the backward says too
            logger.debug("the isolation check could not be made: %s", error)
            self.obstacle = (
                f"one sample's output could not be sent backwards alone ({type(error).__name__}: {_start_of(error)}). "
                + _CHECK
            )
        mixed = self._mixed()
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

    def _mixed(self) -> list[str]:
        """Calls in which other rows were reached; each device is waited for once."""
        mixed: list[str] = []
        for device in dict.fromkeys(reached.device for _, reached in self._reached):
            here = [(where, reached) for where, reached in self._reached if reached.device == device]
            flags = torch.stack([reached for _, reached in here]).tolist()
            mixed += [where for (where, _), flag in zip(here, flags, strict=True) if flag]
        return mixed

    def _batched(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Those with a row for each; where others are clear, not states `[layers, B, H]` that happen to have B layers."""
        found = [leaf for leaf in leaves if leaf.dim() and leaf.shape[self.batch_dim_of(leaf)] == self.rows]
        clear = [leaf for leaf in found if leaf.dim() < 3 or leaf.shape[0] != leaf.shape[1]]
        return clear or found

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
        return owner != owner[self.row]


def _uneven(row: Tensor) -> Tensor:
    """A gradient that no softmax or normalisation cancels, as a constant one would be; draws no random numbers."""
    return torch.arange(1, row.numel() + 1, device=row.device).cos().reshape(row.shape).to(row.dtype)


def _start_of(error: Exception) -> str:
    return str(error).split(". ")[0].splitlines()[0][:150] if str(error) else ""
