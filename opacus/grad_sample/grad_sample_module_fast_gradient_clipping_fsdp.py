"""Mode "ghost_fsdp". Not available in this version; the names import and refuse."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.distributed.unavailable import refuse
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

__all__ = ["GradSampleHooksFastGradientClippingFSDP", "GradSampleModuleFastGradientClippingFSDP"]


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """Not available in this version.

    Raises:
        ConfigurationError: always.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        max_grad_norm: float = 1,
    ) -> None:
        refuse(type(self).__name__)

    def get_norm_sample(self) -> Tensor:
        """Not reached: the constructor refuses."""
        refuse(type(self).__name__)


class GradSampleModuleFastGradientClippingFSDP(GradSampleModuleFastGradientClipping):
    """Not available in this version.

    Raises:
        ConfigurationError: always.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        refuse(type(self).__name__)
