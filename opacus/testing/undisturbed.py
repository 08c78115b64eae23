"""Run a model for the sake of looking at it, and leave no trace: weights, buffers, gradients, modes, random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus.utils.random_states import default_states, restore_default_states
from opacus.validators.batch_norm import is_fixed_map

__all__ = ["Randomness", "Undisturbed", "same_randomness", "same_values"]


class Randomness:
    """States of the default generators of torch, NumPy and Python, to go back to."""

    def __init__(self, devices: set[torch.device]) -> None:
        self.devices = devices
        self._torch = default_states(devices)
        self._numpy = np.random.get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Go back."""
        restore_default_states(self._torch, self.devices)
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def drawn(self) -> bool:
        """Whether torch has drawn numbers since."""
        now = default_states(self.devices)
        return any(not torch.equal(state, now[name]) for name, state in self._torch.items())


@contextlib.contextmanager
def same_randomness(devices: set[torch.device]) -> Iterator[None]:
    """Afterwards the default generators go on as if nothing had been drawn within."""
    randomness = Randomness(devices)
    try:
        yield
    finally:
        randomness.restore()


def same_values(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether they are alike, NaN where the other is NaN included."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Undisturbed:
    """Within `with`, a model may be shaken and run; afterwards it is as it was, bit for bit.

    Dropout is off within, and every `again()` starts from the same buffers and the same random numbers.

    Args:
        model: its trainable weights, buffers, `.grad`s and modes are kept.
        train: put it into training mode within; only normalisation layers that are accepted in `eval()` stay there.
    """

    def __init__(self, model: nn.Module, train: bool = False) -> None:
        self.model = model
        self.train = train

    def __enter__(self) -> Undisturbed:
        model = self.model
        self._modes = [(module, module.training) for module in model.modules()]
        self._grads = [(p, p.grad) for p in model.parameters()]
        self._weights = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        tensors = [*model.parameters(), *model.buffers()]
        self.randomness = Randomness({t.device for t in tensors})
        if self.train:
            fixed = [
                m for m in model.modules() if isinstance(m, (_BatchNorm, _InstanceNorm)) and is_fixed_map(m)
            ]
            model.train()
            for norm in fixed:
                norm.training = False
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False
        for p in model.parameters():
            p.grad = None
        return self

    def __exit__(self, *exc: object) -> None:
        self.again()
        with torch.no_grad():
            for p, weight in self._weights:
                p.copy_(weight)
        for p, grad in self._grads:
            p.grad = grad
        for module, training in self._modes:
            module.training = training

    def again(self) -> None:
        """Buffers and random generators as they were at the start; no gradients."""
        with torch.no_grad():
            for module, name, buffer, kept in self._buffers:
                if buffer is not None and kept is not None:
                    buffer.copy_(kept)
                module._buffers[name] = buffer
        for p in self.model.parameters():
            p.grad = None
        self.randomness.restore()

    def changed_buffers(self) -> dict[str, Tensor | None]:
        """Copies of those that are not as they were at the start, by name; also new ones, and None for one that is gone."""
        before: dict[nn.Module, dict[str, Tensor | None]] = {}
        for module, name, _, kept in self._buffers:
            before.setdefault(module, {})[name] = kept
        found: dict[str, Tensor | None] = {}
        for path, module in self.model.named_modules():
            own = before.get(module, {})
            for name in sorted(own.keys() | module._buffers.keys()):
                now, kept = module._buffers.get(name), own.get(name)
                if not same_values(now, kept):
                    found[f"{path}.{name}" if path else name] = None if now is None else now.detach().clone()
        return found

    def shake(self, by: float = 0.02) -> None:
        """Move trainable weights a little: a zero-initialised adapter sends no gradient on, and hides what it will do.

        Args:
            by: standard deviation, relative to a weight's root mean square; absolute where that is zero.
        """
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p, weight in self._weights:
                noise = torch.randn(p.shape, generator=generator).to(p.device)
                size = weight.to(noise.dtype).square().mean().sqrt()
                p.add_((noise * by * torch.where(size > 0, size, 1.0)).to(p.dtype))
