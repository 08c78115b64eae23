"""The private optimizer as Accelerate's schedulers and checkpoints want one. Needs accelerate."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from opacus.optimizers import DPOptimizer

__all__ = ["PrivateAcceleratedOptimizer"]


class PrivateAcceleratedOptimizer(AcceleratedOptimizer):
    """Steps on every call, counts physical batches as skipped, and shows the private optimizer's attributes.

    They can be set here, too: a noise multiplier or a loss scale that only this object knew of would change nothing.

    Args:
        optimizer: what `make_private` returned.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: DPOptimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step ended a physical batch only, so that schedulers have to wait."""
        return self.optimizer._is_last_step_skipped

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("optimizer")
        own = inner is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(inner, name)
        super().__setattr__(name, value) if own else setattr(inner, name, value)
