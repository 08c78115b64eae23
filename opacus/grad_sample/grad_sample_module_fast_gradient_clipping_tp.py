"""Mode "ghost_tp": mode "ghost" for models whose layers are split over ranks (`parallelize_module`).

The ranks of a tensor-parallel axis train one model on the same samples. What each finds for its pieces of the parameters
adds up, in one collective per physical batch, to the norms of whole gradients; parameters that all ranks hold count once.
"""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample.grad_sample_module import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    check_max_grad_norm,
)
from opacus.grad_sample.tensor_parallel import split_of

__all__ = ["GradSampleHooksFastGradientClippingTP", "GradSampleModuleFastGradientClippingTP"]


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    """Hooks of the two-pass mode for a tensor-parallel model.

    Args:
        m: the model, after `parallelize_module`; `fully_shard` may have been applied to it too. A model without
            tensor-parallel layers is trained as in mode "ghost".
        batch_first, loss_reduction, strict, force_functorch, max_grad_norm, use_ghost_clipping: as in
            `GradSampleHooksFastGradientClipping`.

    Raises:
        ConfigurationError: naming each parameter that is split in a way for which no exact per-sample gradient is known.
        NotImplementedError, ValueError: as `GradSampleHooks`.

    Formal guarantee:
        As mode "ghost": the attached optimizer receives sum_i c_i g_i with ||c_i g_i|| <= C, where g_i is sample i's gradient
        with respect to all parameters, on all ranks of the axis together. It receives it as this rank's pieces.
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
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
            max_grad_norm=max_grad_norm,
            use_ghost_clipping=use_ghost_clipping,
        )
        self.set_pattern_param_sample_norm_sum()

    def get_norm_sample(self) -> Tensor:
        """L2 norm of each sample's gradient over all parameters on all ranks of the axis, `[B]`, after a backward.

        The first call after a backward is a collective of the axis, if no optimizer has asked for the norms before.
        """
        return super().get_norm_sample()

    def set_pattern_param_sample_norm_sum(self) -> None:
        """Note, by name, how each tensor-parallel parameter enters a sample's norm: `norm_pattern`.

        True where ranks hold pieces (squared norms add up over them), False where all hold it whole (it counts once). Called by
        the constructor; what is clipped follows the placements that a layer has when it runs.
        """
        self.__dict__["norm_pattern"] = split_of(self._module)


class GradSampleModuleFastGradientClippingTP(GradSampleHooksFastGradientClippingTP, GradSampleModule):
    """`GradSampleHooksFastGradientClippingTP` as a wrapper.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch, max_grad_norm: as there.
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
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        self.__dict__.update(max_grad_norm=max_grad_norm, use_ghost_clipping=True)
        GradSampleModule.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
        self.set_pattern_param_sample_norm_sum()
