"""Checks of a private optimizer's arguments: sentences, nothing built."""

from __future__ import annotations

import inspect
import math
import numbers
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["basic_problems", "is_number", "positive_number_problems"]


def is_number(value: Any) -> bool:
    """Whether `value` is a real number (numpy's are, a bool is not)."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def positive_number_problems(name: str, value: Any) -> list[str]:
    """Empty if `value` is a positive, finite number."""
    if is_number(value) and 0 < value < math.inf:
        return []
    return [f"{name} must be a positive, finite number, not {value!r}."]


def basic_problems(
    optimizer: Any,
    noise_multiplier: Any,
    expected_batch_size: Any,
    loss_reduction: Any,
    generator: Any,
    secure_mode: bool,
) -> list[str]:
    """What every private optimizer asks of its arguments."""
    problems = []
    if not isinstance(optimizer, Optimizer):
        problems.append(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    elif needs_closure(optimizer):
        problems.append(
            f"optimizer, a {type(optimizer).__name__}, evaluates the loss within its step by a closure: one batch's samples would be released "
            "several times from one draw of the sampler, which the accountant would count as several, and the loss itself without "
            "noise. Choose an optimizer that takes one gradient a step (SGD, Adam)."
        )
    if not is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        problems.append(f"noise_multiplier must be a finite number of at least 0, not {noise_multiplier!r}.")
    if loss_reduction not in ("mean", "sum"):
        problems.append(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}.")
    if expected_batch_size is None:
        if loss_reduction == "mean":
            problems.append("expected_batch_size is needed when loss_reduction is 'mean'.")
    else:
        problems += positive_number_problems("expected_batch_size", expected_batch_size)
    if generator is not None and not isinstance(generator, torch.Generator):
        problems.append(f"generator must be a torch.Generator, not {type(generator).__name__}.")
    if generator is not None and secure_mode:
        problems.append(
            "secure_mode takes its noise from the operating system; it cannot follow a generator."
        )
    return problems


def needs_closure(optimizer: Any) -> bool:
    """Whether `step()` cannot be called without something that computes the loss."""
    if isinstance(optimizer, torch.optim.LBFGS):  # whatever a subclass makes of the signature
        return True
    # of the class: the object's own may be a wrapper's, of a scheduler or of sharding
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
