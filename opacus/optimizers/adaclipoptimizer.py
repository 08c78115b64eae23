"""Adaptive clipping: the clipping norm follows a quantile of the per-sample gradient norms, privately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from opacus.devices import FactorCopies, Placement
from opacus.optimizers.arguments import is_number, positive_number_problems
from opacus.optimizers.clipping import flat_clip_factor
from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["AdaClipDPOptimizer", "gradient_noise_multiplier"]


def gradient_noise_multiplier(noise_multiplier: float, unclipped_num_std: float) -> float:
    """Noise multiplier left for the gradients when the count of unclipped samples is released too.

    Theorem 1 of Andrew et al. (2021): releasing the gradient sum with multiplier z and the centred count (sensitivity 1/2)
    with standard deviation b costs as much as one release with `(z^-2 + (2 b)^-2)^(-1/2)`; solved for z.

    Args:
        noise_multiplier: the total sigma, as accounted.
        unclipped_num_std: b, positive.

    Raises:
        ValueError: if no z gives so much noise: `noise_multiplier >= 2 * unclipped_num_std`.

    Example:
        >>> round(gradient_noise_multiplier(1.0, 10.0), 5)
        1.00125
    """
    if noise_multiplier == 0:
        return 0.0
    if noise_multiplier >= 2 * unclipped_num_std:
        raise ValueError(
            f"noise_multiplier ({noise_multiplier}) must stay below twice unclipped_num_std ({unclipped_num_std}): the count "
            "alone would spend more than the whole budget. Raise unclipped_num_std."
        )
    return (noise_multiplier**-2 - (2 * unclipped_num_std) ** -2) ** -0.5


class AdaClipDPOptimizer(DPOptimizer):
    """`DPOptimizer` whose clipping norm C moves towards a quantile of the norms (Andrew et al., NeurIPS 2021, algorithm 1).

    Each step also releases, with noise, how many samples were not clipped, and multiplies C by
    `exp(-clipbound_learning_rate * (fraction - target_unclipped_quantile))`. C lives on the reduction device: no step waits
    for the host. Reading `max_grad_norm` does.

    Args:
        optimizer: the inner optimizer.
        noise_multiplier: the total sigma: gradients and count together cost what one release with it costs, and it is what
            is accounted. Below `2 * unclipped_num_std`.
        target_unclipped_quantile: wanted fraction of unclipped samples, in [0, 1].
        clipbound_learning_rate: speed of the change of C, at least 0.
        max_clipbound, min_clipbound: C stays between them from the second step on; infinity and 0 set no limit.
        unclipped_num_std: standard deviation of the noise on the count, positive. Andrew et al. use a twentieth of the
            expected batch size.
        max_grad_norm: C of the first step.
        expected_batch_size: number the count is divided by; needed for either reduction. (The true size of a Poisson batch
            is private.)
        loss_reduction, generator, secure_mode, **kwargs: as in `DPOptimizer`.

    Raises:
        ConfigurationError: naming every argument that cannot be.

    Formal guarantee:
        One step, count included, is a Gaussian mechanism of noise multiplier `noise_multiplier` under adding or removing one
        sample. The next step's C is a function of noisy releases only.
    """

    OPTIONS = (
        *DPOptimizer.OPTIONS,
        "target_unclipped_quantile",
        "clipbound_learning_rate",
        "max_clipbound",
        "min_clipbound",
        "unclipped_num_std",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        target_unclipped_quantile: float,
        clipbound_learning_rate: float,
        max_clipbound: float,
        min_clipbound: float,
        unclipped_num_std: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        self._clipbound: float | Tensor = max_grad_norm
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            max_clipbound=max_clipbound,
            min_clipbound=min_clipbound,
            unclipped_num_std=unclipped_num_std,
            **kwargs,
        )
        self.target_unclipped_quantile = target_unclipped_quantile
        self.clipbound_learning_rate = clipbound_learning_rate
        self.max_clipbound = max_clipbound
        self.min_clipbound = min_clipbound
        self.unclipped_num_std = unclipped_num_std
        self._centred_count: Tensor | None = None
        self._fresh_count: Tensor | None = None  # of physical batches whose sums no step has taken

    @classmethod
    def argument_problems(cls, **arguments: Any) -> list[str]:
        """As for `DPOptimizer`, and for the options of the adaptation."""
        options = arguments["options"]
        problems = super().argument_problems(**arguments)
        needed = [name for name in AdaClipDPOptimizer.OPTIONS if name not in DPOptimizer.OPTIONS]
        missing = [name for name in needed if name not in options]
        if missing:
            return [*problems, f"{', '.join(missing)} must be given for adaptive clipping."]
        problems += positive_number_problems("unclipped_num_std", options["unclipped_num_std"])
        for name in ("clipbound_learning_rate", "max_clipbound", "min_clipbound"):
            if not is_number(options[name]) or not options[name] >= 0:
                problems.append(f"{name} must be a number of at least 0, not {options[name]!r}.")
        quantile = options["target_unclipped_quantile"]
        if not is_number(quantile) or not 0 <= quantile <= 1:
            problems.append(f"target_unclipped_quantile must lie in [0, 1], not {quantile!r}.")
        if not problems and options["min_clipbound"] >= options["max_clipbound"]:
            problems.append(
                f"min_clipbound ({options['min_clipbound']}) must be below max_clipbound ({options['max_clipbound']})."
            )
        if not problems and arguments["noise_multiplier"] >= 2 * options["unclipped_num_std"]:
            problems.append(
                f"noise_multiplier must be smaller than 2 * unclipped_num_std, but {arguments['noise_multiplier']} is not below "
                f"2 * {options['unclipped_num_std']}: the count alone would spend more than the whole budget."
            )
        if arguments["expected_batch_size"] is None:
            problems.append("expected_batch_size is needed for adaptive clipping.")
        return problems

    @property
    def max_grad_norm(self) -> float:
        """C; waits for the device that holds it."""
        return float(self._clipbound)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._check_new_norm(value)
        self._clipbound = value

    def _bound_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if not isinstance(self._clipbound, Tensor):
            self._clipbound = torch.full((), self._clipbound, device=device, dtype=dtype)
        return self._clipbound.to(device, dtype)

    def factor_of(self, norm_B: Tensor, weight_B: Tensor | None) -> Tensor:
        """Clip factors `[B]`; also adds this batch to the centred count of unclipped samples."""
        bound = self._bound_on(norm_B.device, norm_B.dtype)
        weighted_B = norm_B if weight_B is None else norm_B * weight_B
        # each sample adds or takes away one half: sensitivity 1/2
        count = (weighted_B <= bound).to(norm_B.dtype).sub_(0.5).sum()
        self._fresh_count = _added(self._fresh_count, count)
        return flat_clip_factor(norm_B, bound, weight_B)

    def clip_and_accumulate(self) -> None:
        """As in `DPOptimizer`; the count of a batch enters with its sum."""
        super().clip_and_accumulate()
        fresh, self._fresh_count = self._fresh_count, None
        if fresh is not None:
            self._centred_count = _added(self._centred_count, fresh)

    def noise_std(self) -> float | FactorCopies:
        """The gradients' share of the noise, times C."""
        sigma = gradient_noise_multiplier(float(self.noise_multiplier), self.unclipped_num_std)
        if isinstance(self._clipbound, Tensor):
            return FactorCopies(self._clipbound * sigma)
        return sigma * self._clipbound

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """All of a step but the inner update; C moves after the noisy release.

        Args:
            closure: as in `DPOptimizer.pre_step`.
        """
        released = super().pre_step(closure)
        if released and self.params:
            self.update_max_grad_norm()
        return released

    def update_max_grad_norm(self) -> None:
        """Move C by the noisy fraction of unclipped samples.

        Formal guarantee:
            The count is used with Gaussian noise of standard deviation `unclipped_num_std` (none where `noise_multiplier` is
            0) and is divided by the expected, not the true, batch size.
        """
        home = Placement(self.params, reduction_device=self.reduction_device).reduction_device
        bound = self._bound_on(home, torch.float32)
        count = self._centred_count if self._centred_count is not None else bound.new_zeros(())
        count = self.noisy_total(count, self.unclipped_num_std)
        assert self.expected_batch_size is not None
        expected = self.expected_batch_size * self.n_replicas * self.accumulated_iterations
        fraction = count / expected + 0.5
        change = torch.exp(-self.clipbound_learning_rate * (fraction - self.target_unclipped_quantile))
        self._clipbound = (bound * change.to(bound)).clamp(self.min_clipbound, self.max_clipbound)
        self._centred_count = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, and C under "max_grad_norm"."""
        return {**super().state_dict(), "max_grad_norm": self.max_grad_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state, and C where it was saved.

        Args:
            state_dict: of this class, or of the inner optimizer.
        """
        if "max_grad_norm" in state_dict:
            self.max_grad_norm = state_dict["max_grad_norm"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "max_grad_norm"})

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in `DPOptimizer`; the count is kept as long as the clipped sums are.

        Args:
            set_to_none: as in torch.
        """
        self._fresh_count = None
        if not self._is_last_step_skipped:
            self._centred_count = None
        super().zero_grad(set_to_none)


def _added(earlier: Tensor | None, count: Tensor) -> Tensor:
    return count if earlier is None else earlier.to(count) + count
