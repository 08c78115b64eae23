"""The optimizer under a private one steps when the private one tells it to; by itself it would train on raw gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opacus.errors import PerSampleGradientError, raise_if_any

if TYPE_CHECKING:
    from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["guard_inner_step"]

_GUARD = "_opacus_guard"


def guard_inner_step(private: DPOptimizer, capturing: Callable[[], bool]) -> None:
    """Refuse `step()` of the optimizer that `private` wraps, except within a step of `private`, and a closure at any time.

    The mistake it is for: `model, private, loader = make_private(optimizer=optimizer, ...)`, and then `optimizer.step()`, which
    trains without clipping and noise and reports an epsilon of 0.

    Args:
        capturing: whether the model is private at this time (its hooks are in place and enabled).
    """
    inner, of = private.original_optimizer, weakref.ref(private)
    earlier = vars(inner).pop(_GUARD, None)
    if earlier is not None:
        earlier.remove()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        owner = of()
        if owner is None:
            return
        handed_over = owner.hands_over()
        if not capturing():
            return
        if handed_over:
            raise_if_any(
                "step() cannot go on",
                [
                    f"this {type(optimizer).__name__}, under a private optimizer, was given a closure: each evaluation would replace the "
                    "private gradients by another look at the same batch, which one draw of the sampler does not pay for. Let the "
                    "private optimizer evaluate it: optimizer.step(closure), or pre_step(closure) and then the inner step()."
                ]
                if any(value is not None for value in (*args[1:], *kwargs.values()))
                else [],
                PerSampleGradientError,
            )
            return
        raise_if_any(
            "step() cannot go on",
            [
                f"this {type(optimizer).__name__} is the one under a private optimizer; its step would use gradients that were neither "
                "clipped nor noised, and no accountant would hear of it. Call step() of the optimizer that make_private returned; "
                "to train without privacy, take the model's hooks off first (to_standard_module(), remove_hooks())."
            ],
            PerSampleGradientError,
        )

    setattr(inner, _GUARD, inner.register_step_pre_hook(before_step))
