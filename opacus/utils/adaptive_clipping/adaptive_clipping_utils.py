"""Adaptive clipping in mode "ghost": the wrapped criterion and an engine that puts both together.

The adaptation itself is the optimizer's (`AdaClipDPOptimizer`), on this path as on every other: C moves by a noisy count
after each release, the noise on gradients and count together costs the accounted noise multiplier.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from opacus.errors import raise_if_any
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from opacus.privacy_engine import PrivacyEngine
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping, DPTensorFastGradientClipping

__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]


def _adapt(
    optimizer: Any,
    target_unclipped_quantile: float,
    min_clipbound: float,
    max_clipbound: float,
    clipbound_learning_rate: float,
    initial_noise_multiplier: float,
) -> None:
    if not isinstance(optimizer, AdaClipDPOptimizer):
        raise_if_any(
            "adaptive clipping cannot start",
            [
                f"optimizer is a {type(optimizer).__name__}, which keeps its clipping norm: use AdaClipDPOptimizer, or "
                "PrivacyEngineAdaptiveClipping.make_private, which builds one."
            ],
        )
    optimizer.target_unclipped_quantile = target_unclipped_quantile
    optimizer.min_clipbound, optimizer.max_clipbound = min_clipbound, max_clipbound
    optimizer.clipbound_learning_rate = clipbound_learning_rate
    optimizer.noise_multiplier = initial_noise_multiplier


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """A batch's loss, kept per sample, for an optimizer whose clipping norm adapts.

    Args:
        module, optimizer, loss_per_sample, loss_reduction: as in `DPTensorFastGradientClipping`; the optimizer is an
            `AdaClipDPOptimizer`.
        target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate: as there.
        initial_noise_multiplier: the total noise multiplier, as accounted.

    Raises:
        ConfigurationError: for another optimizer.

    Formal guarantee:
        That of `DPTensorFastGradientClipping`, with the optimizer's present C.
    """

    def __init__(
        self,
        module: GradSampleHooksFastGradientClipping,
        optimizer: AdaClipDPOptimizer,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        _adapt(
            optimizer,
            target_unclipped_quantile,
            min_clipbound,
            max_clipbound,
            clipbound_learning_rate,
            initial_noise_multiplier,
        )
        super().__init__(module, optimizer, loss_per_sample, loss_reduction)


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """A criterion for mode "ghost" with an optimizer whose clipping norm adapts.

    Args:
        module, optimizer, criterion, loss_reduction: as in `DPLossFastGradientClipping`; the optimizer is an
            `AdaClipDPOptimizer`.
        target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate: as there.
        initial_noise_multiplier: the total noise multiplier, as accounted.

    Raises:
        ConfigurationError: for another optimizer, or a criterion that cannot be wrapped.
    """

    def __init__(
        self,
        module: GradSampleHooksFastGradientClipping,
        optimizer: AdaClipDPOptimizer,
        criterion: Any,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        super().__init__(module, optimizer, criterion, loss_reduction)
        _adapt(
            optimizer,
            target_unclipped_quantile,
            min_clipbound,
            max_clipbound,
            clipbound_learning_rate,
            initial_noise_multiplier,
        )


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """A `PrivacyEngine` whose `make_private` clips adaptively, in mode "ghost" unless another is named.

    Args:
        accountant, secure_mode: as in `PrivacyEngine`.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        super().__init__(accountant=accountant, secure_mode=secure_mode)

    def make_private(self, **arguments: Any) -> Any:
        """As `PrivacyEngine.make_private`, with `clipping="adaptive"`.

        Args:
            **arguments: those of `PrivacyEngine.make_private`, and any of `target_unclipped_quantile` (0.5), `min_clipbound` (1),
                `max_clipbound` (1e8), `clipbound_learning_rate` (0.2), `unclipped_num_std` (a twentieth of the batch size, and at
                least the noise multiplier).

        Returns:
            What `PrivacyEngine.make_private` returns for the mode.

        Raises:
            ConfigurationError: as `PrivacyEngine.make_private`.
        """
        batch_size = getattr(arguments.get("data_loader"), "batch_size", None) or 1
        sigma = arguments.get("noise_multiplier", 1.0)
        defaults = {
            "grad_sample_mode": "ghost",
            "clipping": "adaptive",
            "target_unclipped_quantile": 0.5,
            "min_clipbound": 1.0,
            "max_clipbound": 1e8,
            "clipbound_learning_rate": 0.2,
            "unclipped_num_std": max(
                batch_size / 20, sigma if isinstance(sigma, (int, float)) else 1.0, 1e-3
            ),
        }
        if arguments.get("clipping") == "flat":  # the default of the interface
            arguments.pop("clipping")
        return super().make_private(**{**defaults, **arguments})
