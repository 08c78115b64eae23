"""The per-sample gradients an optimizer step may use: complete, of one batch each, and never used twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.optimizers.utils import describe

__all__ = ["accumulated_iterations", "is_zero", "mark_spent", "physical_batches"]


def is_zero(grad_sample: Tensor) -> bool:
    """Whether this stands in for a parameter that a batch did not use (other constants are expanded numbers too)."""
    return getattr(grad_sample, "_stands_for_zero", False)


def _entries(parameter: nn.Parameter) -> list[Tensor]:
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        return []
    return found if isinstance(found, list) else [found]


def accumulated_iterations(parameters: Sequence[nn.Parameter]) -> int:
    """Number of backward passes whose per-sample gradients lie on the parameters; 1 where there are none.

    Raises:
        ValueError: if parameters disagree.
    """
    counts = {len(entries) for p in parameters if (entries := _entries(p))}
    if len(counts) > 1:
        raise ValueError(
            f"parameters carry per-sample gradients of different numbers of backward passes ({sorted(counts)}): "
            "clear them with zero_grad() before the first one"
        )
    return counts.pop() if counts else 1


def physical_batches(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """For each backward pass since `zero_grad`, the per-sample gradients of all `parameters`, in order.

    Raises:
        PerSampleGradientError: naming every parameter that the optimizer would update without a clipped gradient, or
            whose per-sample gradients were used by an earlier step.
        ValueError: if no backward pass was captured at all, or passes differ between parameters.
    """
    entries = [_entries(p) for p in parameters]
    if parameters and not any(entries):
        raise ValueError(
            "per-sample gradients are not there: no backward pass was captured since zero_grad(). Call loss.backward() on "
            "the output of the private module before step(), and check that its hooks are enabled."
        )
    problems = []
    for parameter, found in zip(parameters, entries, strict=True):
        if not found:
            problems.append(
                f"{describe(optimizer, parameter)} has no per-sample gradient, so an update would not be private. It is "
                "not part of the model that was made private (were layers or adapters replaced since?), or its layer "
                "was never called through the hooks."
            )
        elif any(getattr(entry, "_spent", False) for entry in found):
            problems.append(
                f"{describe(optimizer, parameter)} still has the per-sample gradient that an earlier step used: call "
                "optimizer.zero_grad() after each step."
            )
    raise_if_any("step() cannot go on", problems, PerSampleGradientError)
    accumulated_iterations(parameters)
    batches = [list(batch) for batch in zip(*entries, strict=True)]
    for batch in batches:
        rows = {entry.shape[0] for entry in batch}
        if len(rows) > 1:
            listed = [
                f"{describe(optimizer, p)} has {entry.shape[0]} rows"
                for p, entry in zip(parameters, batch, strict=True)
            ]
            raise PerSampleGradientError("parameters disagree on the number of samples", listed)
    return batches


def mark_spent(batches: Sequence[Sequence[Tensor]]) -> None:
    """Note that these gradients entered a sum; using them again would double their samples' influence."""
    for batch in batches:
        for entry in batch:
            entry._spent = True  # type: ignore[attr-defined]


def sq_norm_dtype(entry: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(entry.dtype, torch.float32)
