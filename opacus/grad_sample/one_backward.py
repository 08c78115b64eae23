"""One outermost backward: all calls whose backprops arrive in it are one physical batch of the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from opacus.errors import PerSampleGradientError
from opacus.grad_sample.owners import OwnerRule, Owners

if TYPE_CHECKING:
    from opacus.grad_sample.tap import Call

__all__ = ["OneBackward", "used_twice"]


class OneBackward:
    """One outermost backward: the physical batch that its captures form."""

    def __init__(self) -> None:
        self.owners: Owners | None = None
        self.rule: OwnerRule | None = None
        self.first_seen = ""

    def agree(self, call: Call, outputs: Sequence[Tensor]) -> Owners:
        """The owners of this batch's rows; raises where a layer saw another number of rows, or had others' rule."""
        rule = call.rule
        rows = outputs[0].shape[0] if outputs[0].dim() else -1
        if len(outputs) > 1 and any(not output.dim() or output.shape[0] != rows for output in outputs):
            rows = -1
        if self.owners is None:
            where = call.where
            allowed = frozenset({rule.n_rows}) if isinstance(rule, Owners) else call.rows_allowed
            if rows >= 0 and (not allowed or rows in allowed):
                owners = Owners(rows) if rule is None else rule.owners_of(rows, where)
                self.rule, self.first_seen = rule, where
                self.owners = owners  # last: threads of other devices look at it first
                return self.owners
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [_lost(where, outputs, _expected(rule, allowed))],
            )
        if rule is not self.rule:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    f"{call.where} and {self.first_seen} take part in one backward, but their forwards ran under different owners "
                    "of rows (set_sample_index, set_owners). Run one backward for each."
                ],
            )
        if rows != self.owners.n_rows:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    _lost(
                        call.where,
                        outputs,
                        f"{self.first_seen} saw {self.owners.n_rows} in the same backward",
                    )
                ],
            )
        return self.owners


def _expected(rule: OwnerRule | None, allowed: frozenset[int] | None) -> str:
    if isinstance(rule, Owners):
        return f"the owners that were set are those of {rule.n_rows} rows"
    return f"the batch has {' or '.join(map(str, sorted(allowed or ())))}"


def _lost(where: str, outputs: Sequence[Tensor], against: str) -> str:
    shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
    return (
        f"{where}: the gradient of its output has shape {shapes}, whose first dimension is not the batch ({against}). "
        "Every trainable layer must see one row per sample: expand inputs that are broadcast later "
        "(position ids [T] to [B, T]), and do not fold other dimensions into the batch. In a model that is not yours, freeze that "
        "layer (relative position biases of T5, say), or train adapters of others."
    )


def used_twice(where: str) -> PerSampleGradientError:
    return PerSampleGradientError(
        "the same forward was used by two backward passes",
        [
            f"{where}: its samples were captured already; clipping them twice would double their influence. Add the "
            "losses and call backward once, or run forward again."
        ],
    )
