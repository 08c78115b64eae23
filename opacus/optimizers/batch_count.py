"""One batch, one release: which optimizer stepped on a model's last backward."""

from __future__ import annotations

import weakref
from typing import Any

from opacus.errors import PerSampleGradientError, raise_if_any

__all__ = ["ONE_OPTIMIZER", "BatchCount"]


class BatchCount:
    """Backwards of one private model, and who stepped on the last of them.

    Two optimizers that step on one batch release its samples' gradients twice, from one draw of the sampler. An accountant that
    is told of two steps, each amplified by a draw of its own, would say less than was spent.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._released = 0
        self._by: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by": None}  # a copy has other optimizers

    def count(self) -> None:
        """A backward has begun."""
        self.backwards += 1

    def refuse_another(self, optimizer: Any) -> None:
        """Before a step of `optimizer`, which changes nothing yet.

        Raises:
            PerSampleGradientError: if another one has stepped on the same backward.
        """
        earlier = self._by() if self._by is not None else None
        again = earlier is not None and earlier is not optimizer and 0 < self._released == self.backwards
        raise_if_any(
            "step() cannot go on",
            ["another optimizer has stepped on this batch. " + ONE_OPTIMIZER] if again else [],
            PerSampleGradientError,
        )

    def release(self, optimizer: Any) -> None:
        """`optimizer` steps on what the last backward found."""
        self._released, self._by = self.backwards, weakref.ref(optimizer)


ONE_OPTIMIZER = (
    "Samples' gradients would be released twice from one draw, which the accountant would count as two. Make the model private with one "
    "optimizer of several parameter groups, or run a batch of its own for each optimizer."
)
