"""The wrapped criterion of mode "ghost": a loss whose `backward()` clips.

`DPLossFastGradientClipping` stands in for the criterion, and returns a `DPTensorFastGradientClipping` for the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opacus.errors import ConfigurationError, raise_if_any
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleHooksFastGradientClipping
from opacus.grad_sample.owners import Owners
from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["DPLossFastGradientClipping", "DPTensorFastGradientClipping"]


class DPTensorFastGradientClipping:
    """A batch's loss, kept per sample; `backward()` runs both passes and hands the clipped sums to the optimizer.

    Args:
        module: the model in mode "ghost".
        optimizer: its optimizer.
        loss_per_sample: `[B]`.
        loss_reduction: "mean" or "sum".

    Formal guarantee:
        After `backward()` the optimizer holds sum_i c_i g_i, with g_i the gradient of `loss_per_sample[i]` and ||c_i g_i|| <= C
        for the optimizer's present C.
    """

    def __init__(
        self,
        module: GradSampleHooksFastGradientClipping,
        optimizer: DPOptimizer,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.loss_per_sample = loss_per_sample
        self.loss_reduction = loss_reduction

    def _reduced(self) -> Tensor:
        return self.loss_per_sample.mean() if self.loss_reduction == "mean" else self.loss_per_sample.sum()

    def item(self) -> float:
        """The reduced loss as a number; waits for the device."""
        return self._reduced().detach().item()

    def detach(self) -> Tensor:
        """The reduced loss, detached."""
        return self._reduced().detach()

    def backward(self) -> None:
        """Find the norms in a first pass, the clipped sums in a second."""
        loss = self._reduced()
        optimizer, module = self.optimizer, self.module
        optimizer.attached_to(module.book)

        def backward(retain_graph: bool) -> None:
            loss.backward(retain_graph=retain_graph)

        module.backward_twice(backward, optimizer.book_factors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._reduced()!r})"


class DPLossFastGradientClipping:
    """A criterion that returns `DPTensorFastGradientClipping`.

    Args:
        module: the model in mode "ghost".
        optimizer: its optimizer.
        criterion: a loss module with an attribute `reduction`, or a function with a keyword `reduction`.
        loss_reduction: "mean" or "sum"; must be the criterion's own.

    Raises:
        ConfigurationError: if the criterion cannot give a loss per sample, or reduces otherwise.
    """

    def __init__(
        self,
        module: GradSampleHooksFastGradientClipping,
        optimizer: DPOptimizer,
        criterion: Any,
        loss_reduction: str = "mean",
    ) -> None:
        problems = criterion_problems(criterion, loss_reduction)
        if not isinstance(module, GradSampleHooksFastGradientClipping):
            problems.append(
                f"module is a {type(module).__name__}: pass what make_private(grad_sample_mode='ghost') returns, or the model in a "
                "GradSampleModuleFastGradientClipping."
            )
        raise_if_any("the criterion cannot be wrapped", problems)
        self.module = module
        self.optimizer = optimizer
        self.criterion = criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, shape: torch.Size | tuple[int, ...] | None = None, **kwargs: Any) -> Any:
        """The loss of a batch.

        Args:
            *args, **kwargs: for the criterion.
            shape: `(B, T)` where the criterion sees the `B * T` tokens of B sequences as rows: a sample is a sequence, and its
                loss the mean (or sum) over its tokens.

        Returns:
            `DPTensorFastGradientClipping`. Under a sample index (`set_sample_index`) a sample's loss is the mean (or sum) over its
            rows, if the criterion returns a loss for each row.
        """
        loss = self._unreduced(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim() == 0:
            raise ConfigurationError(
                "the loss cannot be clipped per sample",
                ["the criterion gave no loss per sample although it was asked for reduction='none'."],
            )
        if shape is not None and loss.shape[0] == shape[0] * shape[1]:
            loss = loss.view(shape[0], shape[1], *loss.shape[1:])
        if loss.dim() > 1:
            loss = loss.flatten(1).mean(1) if self.loss_reduction == "mean" else loss.flatten(1).sum(1)
        return self._wrapped(self._by_samples(loss))

    def _by_samples(self, loss: Tensor) -> Tensor:
        """`[rows]` as `[samples]`, where samples own different numbers of rows: the mean (or sum) over each one's own.

        A mean over all rows would make a sample's share depend on how many rows the others have. Where every sample owns k rows, it
        is the mean over samples already.
        """
        owners = self.module.capture.owners
        if not isinstance(owners, Owners) or owners.rows_each is not None or loss.shape[0] != owners.n_rows:
            return loss
        total = owners.add_up(loss)
        if self.loss_reduction == "sum":
            return total
        return total / owners.add_up(torch.ones_like(loss)).clamp_(min=1)

    def _wrapped(self, loss_per_sample: Tensor) -> DPTensorFastGradientClipping:
        return DPTensorFastGradientClipping(self.module, self.optimizer, loss_per_sample, self.loss_reduction)

    def _unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, reduction="none", **kwargs)
        before, self.criterion.reduction = self.criterion.reduction, "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before


def criterion_problems(criterion: Any, loss_reduction: Any) -> list[str]:
    """What keeps a criterion from giving a loss per sample, a sentence each.

    Args:
        criterion: a loss module or function. loss_reduction: "mean" or "sum".
    """
    own = getattr(criterion, "reduction", None)
    problems = []
    if loss_reduction not in ("mean", "sum"):
        problems.append(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}.")
    elif isinstance(criterion, nn.Module) and own not in ("mean", "sum"):
        problems.append(
            f"criterion ({type(criterion).__name__}) has reduction={own!r}: it needs an attribute reduction of 'mean' or "
            "'sum', set to 'none' inside to get a loss per sample. Use grad_sample_mode='bk' for other losses."
        )
    elif own is not None and own != loss_reduction:
        problems.append(
            f"criterion.reduction is {own!r}, loss_reduction is {loss_reduction!r}: make them equal."
        )
    return problems
