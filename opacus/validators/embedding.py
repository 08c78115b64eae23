"""Embedding and EmbeddingBag options that make one sample's gradient depend on the others."""

from __future__ import annotations

from torch import nn

from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.utils import register_module_validator

__all__ = ["validate"]


@register_module_validator([nn.Embedding, nn.EmbeddingBag])
def validate(module: nn.Embedding | nn.EmbeddingBag) -> list[UnsupportedModuleError]:
    """Refuse `max_norm` and `scale_grad_by_freq`.

    Example:
        >>> [str(error)[:18] for error in validate(nn.Embedding(3, 2, scale_grad_by_freq=True))]
        ['scale_grad_by_freq']
    """
    errors: list[UnsupportedModuleError] = []
    if module.scale_grad_by_freq:
        errors.append(
            IllegalModuleConfigurationError(
                "scale_grad_by_freq divides gradients by counts over the whole batch, so one sample changes the others' "
                "gradients. Set it to False."
            )
        )
    if module.max_norm is not None:
        errors.append(
            IllegalModuleConfigurationError(
                "max_norm rescales table rows in the forward, outside clipping and noise. Set it to None."
            )
        )
    return errors
