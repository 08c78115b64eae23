"""Per-layer clipping: each parameter has a bound of its own, so nothing crosses devices for clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.grad_sample.kept import KeptRows
from opacus.optimizers.arguments import positive_number_problems
from opacus.optimizers.clipping import flat_clip_factor
from opacus.optimizers.optimizer import DPOptimizer, by_device
from opacus.optimizers.utils import params

__all__ = ["DPPerLayerOptimizer"]


class DPPerLayerOptimizer(DPOptimizer):
    """`DPOptimizer` that clips the per-sample gradient of each parameter by a bound of its own.

    Args:
        optimizer: the inner optimizer.
        noise_multiplier: sigma.
        max_grad_norm: one bound C_k for each parameter that requires grad, in the optimizer's order; or one number C, shared
            out evenly (C / sqrt(K) each for the K parameters that require grad at the step).
        expected_batch_size, loss_reduction, generator, secure_mode, **kwargs: as in `DPOptimizer`.

    Raises:
        ConfigurationError: naming every argument that cannot be.

    Formal guarantee:
        Each sample moves the part of parameter k by at most C_k, hence the whole sum by at most C = sqrt(sum_k C_k^2), and
        noise of standard deviation sigma * C is added to every coordinate: the guarantee of `DPOptimizer` with that C.
        A sample whose gradient is not finite in one parameter contributes zero there (and is counted once for each such
        parameter).
    """

    JOINS_PARAMETERS = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **kwargs,
        )

    @classmethod
    def _max_grad_norm_problems(cls, max_grad_norm: Any, optimizer: Any) -> list[str]:
        if not isinstance(max_grad_norm, (list, tuple)):
            return positive_number_problems("max_grad_norm", max_grad_norm)
        problems = [
            problem
            for k, bound in enumerate(max_grad_norm)
            for problem in positive_number_problems(f"max_grad_norm[{k}]", bound)
        ]
        if isinstance(optimizer, Optimizer) and len(max_grad_norm) != len(params(optimizer)):
            problems.append(
                f"max_grad_norm has {len(max_grad_norm)} bounds for {len(params(optimizer))} parameters that require grad: "
                "give one for each, or one number."
            )
        return problems

    @property
    def max_grad_norms(self) -> list[float]:
        """C_k of each parameter that requires grad, in the optimizer's order."""
        if isinstance(self._bounds, list):
            return self._bounds
        count = len(self.params)
        return [self._bounds / math.sqrt(count)] * count

    @property
    def max_grad_norm(self) -> float:
        """C, the bound on a sample's whole gradient: the root of the sum of squared bounds."""
        return float(self._bounds) if not isinstance(self._bounds, list) else math.hypot(*self._bounds)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | list[float] | tuple[float, ...]) -> None:
        """A list sets each bound; a number becomes C: a list set before is scaled, else C is shared out evenly."""
        self._check_new_norm(value)
        earlier = getattr(self, "_bounds", None)
        if isinstance(value, (list, tuple)):
            self._bounds: float | list[float] = [float(bound) for bound in value]
        elif isinstance(earlier, list):
            self._bounds = [bound * (value / math.hypot(*earlier)) for bound in earlier]
        else:
            self._bounds = value

    def clip_factors(
        self,
        parameters: Sequence[nn.Parameter],
        norms: Sequence[Tensor],
        reduction_device: torch.device,
        weight_B: Tensor | None,
    ) -> list[Tensor]:
        """Factors from each parameter's own norms and bound; computed where the parameter lies."""
        everything, max_grad_norms = self.params, self.max_grad_norms
        if len(max_grad_norms) != len(everything):
            raise ValueError(
                f"max_grad_norm has {len(max_grad_norms)} bounds, but {len(everything)} parameters require grad now: set it to "
                "a list with one for each"
            )
        for norms_there in by_device(norms).values():
            self._count_nonfinite(torch.stack(norms_there))
        bounds = {id(p): bound for p, bound in zip(everything, max_grad_norms, strict=True)}
        return [
            flat_clip_factor(norm_B, bounds[id(p)], None if weight_B is None else weight_B.to(norm_B.device))
            for p, norm_B in zip(parameters, norms, strict=True)
        ]


def clip_and_accumulate_parameter(p: nn.Parameter, max_grad_norm: float) -> None:
    """Clip one parameter's per-sample gradients by a bound of its own, and add their sum to `p.summed_grad`.

    Args:
        p: with `grad_sample`, `[B, *shape]` (or a list of such, after several backward passes).
        max_grad_norm: its bound.

    Formal guarantee:
        Each sample moves `p.summed_grad` by at most `max_grad_norm`.
    """
    entries = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]  # type: ignore[attr-defined]
    for entry in entries:
        kept = KeptRows(entry)
        clipped = kept.clipped(flat_clip_factor(kept.sq_norm().sqrt(), max_grad_norm))
        earlier = getattr(p, "summed_grad", None)
        p.summed_grad = clipped if earlier is None else earlier + clipped  # type: ignore[attr-defined]
