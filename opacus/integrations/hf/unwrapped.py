"""Keeping a trainer's accelerator from wrapping a replica, and from asking other ranks for figures within a step.

DistributedDataParallel would find no gradients to average: they are clipped during the backward and added up by the private
optimizer, once a step. Accelerate also refuses to wrap models that span devices. And ranks cut their shares of a logical batch into
different numbers of physical batches, so that a figure gathered in one rank's forward would wait for a forward that never comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from opacus.integrations.accelerate import run_in_mixed_precision

__all__ = ["Unwrapped", "alone"]

_ASKING = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


class Unwrapped:
    """Lets `accelerator` take `model` for prepared as it is: placed by its owner, in mixed precision if the accelerator is.

    Args:
        accelerator: the trainer's.
        model: this rank's replica.
    """

    def __init__(self, accelerator: Any, model: Any) -> None:
        self.accelerator = accelerator
        self.model = model
        self._own = {
            name: vars(model)[name] for name in ("forward", "_is_accelerate_prepared") if name in vars(model)
        }
        if "_is_accelerate_prepared" not in self._own:  # an evaluation may have prepared it already
            run_in_mixed_precision(accelerator, model)
        self.model._is_accelerate_prepared = True
        self._prepare = accelerator.prepare
        accelerator.prepare = self.prepare

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """`accelerator.prepare` of everything but the model."""
        if not any(one is self.model for one in objects):
            return self._prepare(*objects, **options)
        if self.model not in self.accelerator._models:
            self.accelerator._models.append(self.model)
        prepared = tuple(one if one is self.model else self._prepare(one, **options) for one in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def remove(self) -> None:
        """Leave accelerator and model as they were."""
        vars(self.accelerator).pop("prepare", None)
        for name in ("forward", "_is_accelerate_prepared"):
            vars(self.model).pop(name, None)
        vars(self.model).update(self._own)


@contextlib.contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Within it the trainer's loss sees this rank only: figures that it would gather are this rank's own, and no factor of the
    number of ranks is in the loss."""
    accelerator, args = vars(trainer.accelerator), trainer.args
    before = {name: accelerator[name] for name in _ASKING if name in accelerator}
    averages = args.average_tokens_across_devices
    accelerator.update(dict.fromkeys(_ASKING, _as_it_is))
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = averages
        for name in _ASKING:
            del accelerator[name]
        accelerator.update(before)


def _as_it_is(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value
