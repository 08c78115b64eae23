"""Mode "ghost_fsdp": mode "ghost" on a model sharded by `fully_shard`, under its recorded name.

Norms need no communication, as a rank owns its samples; clipped sums are reduced to shards when the second backward ends. Until then a
rank holds whole sums of all trainable parameters, in float32: little for adapters, 4 bytes a parameter for full fine-tuning. (Mode
"bk" holds activations and backprops in their place, and one whole sum at a time.)
"""

from __future__ import annotations

from torch import nn

from opacus.grad_sample.grad_sample_module import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    check_max_grad_norm,
)

__all__ = ["GradSampleHooksFastGradientClippingFSDP", "GradSampleModuleFastGradientClippingFSDP"]


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """`GradSampleHooksFastGradientClipping` for a sharded model.

    Args:
        m: sharded, by `FSDP2Wrapper` or `fully_shard`.
        batch_first, loss_reduction, strict, max_grad_norm: as there.

    Raises:
        ConfigurationError: naming trainable parameters that are not sharded; otherwise as there.

    Formal guarantee:
        As there, of the samples of all ranks together.
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
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            max_grad_norm=max_grad_norm,
        )


class GradSampleModuleFastGradientClippingFSDP(GradSampleHooksFastGradientClippingFSDP, GradSampleModule):
    """`GradSampleHooksFastGradientClippingFSDP` as a wrapper.

    Args:
        m, batch_first, loss_reduction, strict, max_grad_norm: as there.
        force_functorch, use_ghost_clipping: as in `GradSampleModuleFastGradientClipping`.
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
        check_max_grad_norm(max_grad_norm)
        self.__dict__.update(max_grad_norm=max_grad_norm, use_ghost_clipping=use_ghost_clipping)
        GradSampleModule.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
