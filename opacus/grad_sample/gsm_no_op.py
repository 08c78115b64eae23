"""Mode "no_op": the user's own code puts per-sample gradients on the parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule

__all__ = ["GradSampleHooksNoOp", "GradSampleModuleNoOp"]


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """No hooks: `p.grad_sample` is to be set by the training loop, for instance from `torch.func`.

    The optimizer refuses a step for parameters on which it is missing. Whether what stands there is a gradient per
    sample is the caller's responsibility.

    Args:
        m, batch_first, loss_reduction: as in `AbstractGradSampleHooks`.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def remove_hooks(self) -> None:
        """There are none."""


class GradSampleModuleNoOp(AbstractGradSampleModule):
    """`GradSampleHooksNoOp` as a wrapper.

    Args:
        m, batch_first, loss_reduction: as in `AbstractGradSampleHooks`.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._module(x, *args, **kwargs)

    def remove_hooks(self) -> None:
        """There are none."""
