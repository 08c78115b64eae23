"""Buffers that a model writes in its forward: neither clipped nor noised, and saved with the weights all the same."""

from __future__ import annotations

import logging

import torch
from torch import nn

__all__ = ["BufferWatch"]

logger = logging.getLogger(__name__)

_LOOKS = 2  # training forwards


class BufferWatch:
    """Says once which floating-point buffers the first training forwards of a model write.

    A running mean of activations, a codebook, a memory of features: what is computed from samples there leaves with `state_dict`
    as it is. Whether the numbers come from samples cannot be seen, so it is a warning.
    """

    def __init__(self) -> None:
        self._left = _LOOKS
        self._seen: dict[str, tuple[int, int]] | None = None

    def before(self, model: nn.Module) -> None:
        """A forward begins."""
        looks = self._left > 0 and model.training and torch.is_grad_enabled()
        self._seen = _state(model) if looks else None

    def after(self, model: nn.Module) -> None:
        """That forward has ended."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        self._left -= 1
        now = _state(model)
        written = [name for name, state in now.items() if seen.get(name) != state]
        if written:
            self._left = 0
            logger.warning(
                "the forward writes buffers (%s): what is in them was neither clipped nor noised, and state_dict holds it. If it is "
                "computed from samples, the guarantee does not cover the saved model: freeze those buffers, or leave them out of what "
                "you release.",
                ", ".join(written[:5]) + ", ..." * (len(written) > 5),
            )


def _state(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (id(buffer), buffer._version)
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not buffer.is_inference()
    }
