"""Two runs of a model compared: what changed for samples that were not changed themselves, and which module or loss did it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opacus.grad_sample.owners import Owners
from opacus.testing.other_rounding import Room
from opacus.testing.samples import rows_in_order
from opacus.testing.witness import Key, Prints, Seen, Witness, common_factor, difference

__all__ = ["Comparison"]


class Comparison:
    """Two runs, in the rows of samples that were not changed.

    Args:
        before, after: the runs.
        others: the samples that were not changed.
        tolerance: relative change that is none.
        alone: whether `after` ran with the others alone, in their order.
        room: what rounding may do to each call; more than `tolerance` passes where it may do more.
    """

    def __init__(
        self,
        before: Witness,
        after: Witness,
        owners: Owners,
        others: Sequence[int],
        tolerance: float,
        *,
        alone: bool = False,
        room: Room | None = None,
    ) -> None:
        self.room = room or Room(before, [])
        self.before, self.after, self.tolerance, self.alone = before, after, tolerance, alone
        self.n_rows = owners.n_rows
        self.rows = rows_in_order(owners.index_on(torch.device("cpu")), others)

    def _before(self, prints: Prints) -> Prints:
        """The others' rows."""
        return [one[self.rows] if one is not None and len(one) == self.n_rows else None for one in prints]

    def _after(self, prints: Prints) -> Prints:
        if not self.alone:
            return self._before(prints)
        return [one if one is not None and len(one) == len(self.rows) else None for one in prints]

    def _by(self, before: Prints, after: Prints) -> float:
        return difference(self._before(before), self._after(after))

    def largest(self) -> float:
        """The largest change of a gradient."""
        pairs = [(seen, self.after.backward.get(key)) for key, seen in self.before.backward.items()]
        return max((self._by(a.outputs, b.outputs) for a, b in pairs if b is not None), default=0.0)

    def problems(self, what: str, loss_reduction: str = "") -> list[str]:
        """A sentence for each module that mixes samples; one for the loss where gradients change and no module does."""
        paths = dict.fromkeys(path for path, _ in self.before.backward)
        changed = next((found for found in map(self._changed, paths) if found is not None), None)
        if changed is None:
            return []
        modules = self._mixing()
        if modules:
            return [_module_problem(path, kind, what) for path, kind in modules]
        return [self._loss_problem(*changed, what, loss_reduction)]

    def _changed(self, path: str) -> tuple[Key, Seen] | None:
        """A call of the module at `path` whose gradient differs, and the same call of the other run.

        Layers that take a step for each position, up to the longest sample's, may be called more or less often there. Then
        calls are the same if those counted from the first are, or those counted from the last.
        """
        more = self.after.calls(path) - self.before.calls(path)
        found = [self._changed_call(path, shift) for shift in dict.fromkeys((0, more))]
        return None if None in found else found[0]

    def _changed_call(self, path: str, shift: int) -> tuple[Key, Seen] | None:
        for call in range(1, self.before.calls(path) + 1):
            other = self.after.backward.get((path, call + shift))
            if other is not None and self._differs((path, call), other):
                return (path, call), other
        return None

    def _differs(self, key: Key, b: Seen) -> bool:
        a = self.before.backward[key]
        of_inputs, of_gradient = self._allowed(self.room.backward(key))
        if self._by(a.outputs, b.outputs) > of_gradient:
            return True
        reached = any(g is not None and bool((g[:, 1] > 0).any()) for g in self._before(a.outputs))
        return reached and self._by(a.inputs, b.inputs) > of_inputs

    def _allowed(self, room: tuple[float, float]) -> tuple[float, float]:
        return max(self.tolerance, room[0]), max(self.tolerance, room[1])

    def _mixing(self) -> list[tuple[str, str]]:
        """Innermost modules whose outputs changed for the others while their inputs did not."""
        found: dict[str, str] = {}
        for key, a in self.before.forward.items():
            b = self.after.forward.get(key)
            if b is None:
                continue
            of_inputs, of_outputs = self._allowed(self.room.forward(key))
            if self._by(a.inputs, b.inputs) <= of_inputs and self._by(a.outputs, b.outputs) > of_outputs:
                found[key[0]] = a.kind
        return [
            (path, kind)
            for path, kind in found.items()
            if not any(other != path and other.startswith(f"{path}." if path else "") for other in found)
        ]

    def _loss_problem(self, key: Key, changed: Seen, what: str, loss_reduction: str) -> str:
        path, kind = key[0] or "(root)", self.before.backward[key].kind
        a, b = self.before.backward[key].outputs, changed.outputs
        inside = next(iter(self.before.backward)) != key
        tolerance = self._allowed(self.room.backward(key))[1]
        one_factor = common_factor(self._before(a), self._after(b), tolerance)
        origin = "an auxiliary loss, or a gradient that mixes samples" if inside else "the loss"
        start = (
            f"{origin}: the gradient that one sample sends to {path} ({kind}) changes with the {what} of another sample, though "
            "no module mixes samples in the forward. "
        )
        if what == "presence" and one_factor:
            return start + (
                f"All gradients change by one factor: with loss_reduction={loss_reduction!r} the loss must be the "
                f"{loss_reduction} over samples of each one's own loss."
            )
        if one_factor:
            return start + (
                "All gradients change by one factor, as with a mean over the tokens of the whole batch: divide each sample's loss by "
                "its own number of tokens, or by a constant."
            )
        return start + (
            "In-batch negatives, a baseline or statistics over the batch do this. Compute each sample's loss from its own rows "
            "(rows_per_sample), or compare it with constants or public data."
        )


def _module_problem(path: str, kind: str, what: str) -> str:
    return (
        f"{path or '(root)'} ({kind}): what it computes for one sample changes with the {what} of another sample (batch statistics, "
        "mixing along the batch dimension). Use a layer that treats samples one by one (GroupNorm for BatchNorm)."
    )
