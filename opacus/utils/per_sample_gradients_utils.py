"""Check a model of yours: its per-sample gradients, as the library forms them, against one backward for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from opacus.errors import ConfigurationError, raise_if_any
from opacus.grad_sample import AbstractGradSampleModule, wrap_model
from opacus.utils.module_utils import clone_module

__all__ = [
    "ModelWithLoss",
    "check_per_sample_gradients_are_correct",
    "check_torch_version_for_ew_sample",
    "clone_module",
    "compute_grad_samples_microbatch_and_opacus",
    "compute_microbatch_grad_sample",
    "compute_microbatch_grad_sample_tensor_or_seq",
    "compute_opacus_grad_sample",
    "get_grad_sample_modes",
    "is_batch_empty",
    "unpack_packedsequences",
]


class ModelWithLoss(nn.Module):
    """A module together with a loss of all its outputs, so that a call returns one number.

    Each element y of an output costs `y^2 / 2 + sin(y)`. A sample's loss is the mean of its elements for "mean", where
    the batch's loss is the mean over samples; and the sum of its elements for "sum", where the batch's loss is the
    sum over samples. Several outputs (nested, or packed sequences) add.

    Args:
        module: any module whose outputs hold the samples separately.
        loss_reduction: "mean" or "sum".

    Raises:
        ValueError: for another reduction.

    Example:
        >>> ModelWithLoss(nn.Identity(), "sum")(torch.tensor([[0.0, 2.0]]))
        tensor(2.9093)
    """

    supported_reductions: ClassVar[list[str]] = ["mean", "sum"]

    def __init__(self, module: nn.Module, loss_reduction: str = "mean") -> None:
        super().__init__()
        if loss_reduction not in self.supported_reductions:
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}.")
        self.wrapped_module = module
        self.loss_reduction = loss_reduction

    def forward(self, x: Any) -> Tensor:
        """The loss of the batch `x`."""
        outputs = tree_leaves(self.wrapped_module(x), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
        losses = [
            self._loss(output)
            for output in outputs
            if isinstance(output, PackedSequence)
            or (isinstance(output, Tensor) and output.is_floating_point())
        ]
        raise_if_any(
            "the module has no loss",
            [] if losses else ["its output holds no tensor of floating-point numbers."],
        )
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    def _loss(self, output: Tensor | PackedSequence) -> Tensor:
        if isinstance(output, PackedSequence):
            samples = [_element_losses(sample) for sample in unpack_packedsequences(output)]
        elif self.loss_reduction == "sum" or output.numel() == 0:
            return _element_losses(output).sum()
        else:
            return _element_losses(output).mean()  # of equally many elements for each sample
        losses = torch.stack([s.mean() if self.loss_reduction == "mean" else s.sum() for s in samples])
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()


def _element_losses(output: Tensor) -> Tensor:
    return output.square() / 2 + output.sin()


def compute_microbatch_grad_sample_tensor_or_seq(
    x: Tensor | PackedSequence | list[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
) -> dict[str, Tensor]:
    """`compute_microbatch_grad_sample`; a packed sequence goes in as packed sequences of one.

    Args:
        x, module, batch_first, loss_reduction: as in `compute_opacus_grad_sample`.

    Returns:
        `{name: [B, *shape]}` for each trainable parameter.
    """
    if isinstance(x, PackedSequence):
        return _grads_of(
            (pack_sequence([sample]) for sample in unpack_packedsequences(x)), module, loss_reduction
        )
    return compute_microbatch_grad_sample(x, module, batch_first, loss_reduction)


def compute_microbatch_grad_sample(
    x: Tensor | list[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterable[Tensor]] = iter,
) -> dict[str, Tensor]:
    """Per-sample gradients by plain autograd: one forward and backward for each sample.

    Args:
        x: a batch, or a list of samples.
        module: the model; it is left as it is.
        batch_first: whether dimension 0 of `x` is the batch (else 1).
        loss_reduction: "mean" or "sum"; see `ModelWithLoss`.
        chunk_method: takes the batch (batch first) apart into samples without a batch dimension.

    Returns:
        `{name: [B, *shape]}` for each trainable parameter.
    """
    rows = x.transpose(0, 1) if isinstance(x, Tensor) and not batch_first else x
    dim = 0 if batch_first else 1
    return _grads_of(
        (sample.unsqueeze(min(dim, sample.dim())) for sample in chunk_method(rows)), module, loss_reduction
    )


def _grads_of(samples: Iterable[Any], module: nn.Module, loss_reduction: str) -> dict[str, Tensor]:
    model = ModelWithLoss(clone_module(module), loss_reduction)
    trained = {name: p for name, p in model.wrapped_module.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trained}
    for sample in samples:
        grads = torch.autograd.grad(model(sample), list(trained.values()), allow_unused=True)
        for (name, p), grad in zip(trained.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad.to_dense())
    return {
        name: torch.stack(rows[name]) if rows[name] else p.detach().new_zeros(0, *p.shape)
        for name, p in trained.items()
    }


def compute_opacus_grad_sample(
    x: Tensor | PackedSequence | list[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Per-sample gradients as this library forms them in a private run.

    Args:
        x: a batch, passed to `module` as it is.
        module: the model; it is left as it is.
        batch_first: whether dimension 0 of `x` is the batch (else 1).
        loss_reduction: "mean" or "sum"; see `ModelWithLoss`.
        grad_sample_mode: one of `get_grad_sample_modes(use_ew=True)`.

    Returns:
        `{name: [B, *shape]}` for each trainable parameter.

    Raises:
        ConfigurationError: for a mode that leaves no per-sample gradients behind.
    """
    model = ModelWithLoss(clone_module(module), loss_reduction)
    wrapped = wrap_model(
        model, grad_sample_mode=grad_sample_mode, batch_first=batch_first, loss_reduction=loss_reduction
    )
    assert isinstance(wrapped, AbstractGradSampleModule)
    wrapped.zero_grad()
    wrapped(x).backward()
    found = {
        name: getattr(p, "grad_sample", None)
        for name, p in model.wrapped_module.named_parameters()
        if p.requires_grad
    }
    missing = [name for name, grad_sample in found.items() if not isinstance(grad_sample, Tensor)]
    if missing:
        raise ConfigurationError(
            "per-sample gradients cannot be compared",
            [
                f"grad_sample_mode {grad_sample_mode!r} leaves none on {', '.join(missing)}; choose one of "
                f"{', '.join(get_grad_sample_modes(use_ew=True))}."
            ],
        )
    return {name: grad_sample.detach() for name, grad_sample in found.items() if grad_sample is not None}


def compute_grad_samples_microbatch_and_opacus(
    x: Tensor | PackedSequence | list[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterable[Tensor]] = iter,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both: by one backward for each sample, and as the library forms them.

    Args:
        x, module, batch_first, loss_reduction, grad_sample_mode: as in `compute_opacus_grad_sample`.
        chunk_method: as in `compute_microbatch_grad_sample`; for a packed sequence only its own parts are samples.

    Returns:
        `(by samples, by the library)`.
    """
    if isinstance(x, PackedSequence):
        by_samples = compute_microbatch_grad_sample_tensor_or_seq(x, module, batch_first, loss_reduction)
    else:
        by_samples = compute_microbatch_grad_sample(x, module, batch_first, loss_reduction, chunk_method)
    return by_samples, compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)


def check_per_sample_gradients_are_correct(
    x: Tensor | PackedSequence | list[Tensor],
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Whether the library's per-sample gradients of your model are right, for both loss reductions.

    Args:
        x: a batch, not empty: a tensor, a packed sequence, or what else `module` takes as its one input.
        module: the model, without dropout or other randomness; it is left as it is.
        batch_first: whether dimension 0 of `x` is the batch (else 1).
        atol, rtol: as in `torch.allclose`.
        grad_sample_mode: one of `get_grad_sample_modes(use_ew=True)`.

    Returns:
        True if every parameter's gradients agree for every sample.

    Raises:
        RuntimeError: if `x` is empty.
        ConfigurationError, NotImplementedError, PerSampleGradientError: naming the layer, where the model mixes samples.

    Example:
        >>> check_per_sample_gradients_are_correct(torch.randn(4, 3), nn.Linear(3, 2))
        True
    """
    if is_batch_empty(x):
        raise RuntimeError("x is empty: pass a batch of at least one sample")
    for loss_reduction in ModelWithLoss.supported_reductions:
        by_samples, by_library = compute_grad_samples_microbatch_and_opacus(
            x, module, batch_first, loss_reduction, grad_sample_mode
        )
        for name, expected in by_samples.items():
            found = by_library[name]
            if found.shape != expected.shape or not torch.allclose(found, expected, atol=atol, rtol=rtol):
                return False
    return True


def unpack_packedsequences(X: PackedSequence) -> list[Tensor]:
    """The sequences of a packed batch, `[T_i, ...]` each, in the order in which they were packed."""
    padded, lengths = pad_packed_sequence(X, batch_first=True)
    return [sequence[:length] for sequence, length in zip(padded, lengths.tolist(), strict=True)]


def is_batch_empty(batch: Any) -> bool:
    """Whether the first tensor of a batch (any nesting of tensors) has no elements, or there is none."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    return first is None or first.numel() == 0


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Modes that leave `grad_sample` on parameters: "hooks", "functorch", and "ew" if asked for."""
    return ["hooks", "functorch", *(["ew"] if use_ew else [])]


def check_torch_version_for_ew_sample() -> bool:
    """Whether mode "ew" is available: always, as it does not depend on torch's expanded weights."""
    return True
