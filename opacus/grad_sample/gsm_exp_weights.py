"""Mode "ew": the interface of expanded weights, on the one capture mechanism of this library."""

from __future__ import annotations

from typing import Any

from torch import nn

from opacus.errors import ConfigurationError
from opacus.grad_sample.grad_sample_module import GradSampleModule

__all__ = ["GradSampleModuleExpandedWeights"]


class GradSampleModuleExpandedWeights(GradSampleModule):
    """`GradSampleModule` under the name of PyTorch's expanded weights.

    Expanded weights (`torch.nn.utils.stateless`, prototype) form the same per-sample gradients for fewer layers and refuse
    modules called twice; so this mode takes the library's own capture, and works wherever "hooks" does.

    Args:
        m: the model.
        batch_first: must be True.
        loss_reduction: "mean" or "sum".

    Raises:
        ConfigurationError: for `batch_first=False`.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        if not batch_first:
            raise ConfigurationError(
                "grad_sample_mode 'ew' cannot be set up",
                ["batch_first=False is not part of expanded weights. Use grad_sample_mode='hooks'."],
            )
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._module(x, *args, **kwargs)
