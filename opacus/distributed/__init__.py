"""Private training over several processes."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.distributed.unavailable import refuse

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "average_gradients"]


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Data parallel training with gradients reduced by the optimizer. Not available in this version.

    Args:
        model: the model.

    Raises:
        ConfigurationError: always.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        refuse(type(self).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not reached: the constructor refuses."""
        refuse(type(self).__name__)


def average_gradients(model: nn.Module) -> None:
    """Average `grad` over ranks. Not available in this version.

    Args:
        model: the model.

    Raises:
        ConfigurationError: always.
    """
    refuse("average_gradients")
