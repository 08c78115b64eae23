"""What every grad sample mode offers: a model whose parameters carry `grad_sample`, wrapped or not."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["OPACUS_PARAM_MONKEYPATCH_ATTRS", "AbstractGradSampleHooks", "AbstractGradSampleModule"]

OPACUS_PARAM_MONKEYPATCH_ATTRS = ["grad_sample", "_current_grad_sample", "_norm_sample", "summed_grad"]


class AbstractGradSampleHooks(abc.ABC):
    """Per-sample gradients for a model that is used as it is, without a wrapper.

    Args:
        m: the model.
        batch_first: whether dimension 0 of its inputs is the batch (else dimension 1).
        loss_reduction: "mean" or "sum": how the loss reduces over samples.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.grad_accumulation_allowed = True
        for parameter in self._own_parameters():
            parameter.grad_sample = None  # type: ignore[attr-defined]

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in self._module.parameters() if p.requires_grad)

    def set_grad_sample_to_none(self) -> None:
        """Forget all per-sample gradients."""
        for parameter in self._module.parameters():
            if hasattr(parameter, "grad_sample"):
                parameter.grad_sample = None

    def del_grad_sample(self) -> None:
        """Delete the `grad_sample` attribute of every parameter."""
        for parameter in self._module.parameters():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def forbid_grad_accumulation(self) -> None:
        """Make a backward raise while the per-sample gradients of an earlier one are still there.

        Under Poisson sampling one logical batch is one step; accumulating two would need another accounting.
        """
        self.grad_accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Let backward passes add further entries to `grad_sample`."""
        self.grad_accumulation_allowed = True

    @abc.abstractmethod
    def remove_hooks(self) -> None:
        """Remove all hooks from the model."""

    def cleanup(self) -> None:
        """Remove the hooks and everything that was attached to parameters."""
        self.remove_hooks()
        for parameter in self._module.parameters():
            for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                if hasattr(parameter, name):
                    delattr(parameter, name)


class AbstractGradSampleModule(nn.Module, AbstractGradSampleHooks):
    """The same, as a module around the model: forwards calls and attributes to it.

    Args:
        m, batch_first, loss_reduction: as in `AbstractGradSampleHooks`.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        nn.Module.__init__(self)
        AbstractGradSampleHooks.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)

    @abc.abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules") or {}
            if name == "_module" or "_module" not in modules:
                raise
            return getattr(modules["_module"], name)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear `grad` and `grad_sample`; the latter always becomes None."""
        self.set_grad_sample_to_none()
        super().zero_grad(set_to_none)

    def to_standard_module(self) -> nn.Module:
        """Take the model out again, without hooks or attributes left on it."""
        self.cleanup()
        return self._module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"
