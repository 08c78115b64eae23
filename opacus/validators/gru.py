"""`nn.GRU`: replaced by `DPGRU`."""

from __future__ import annotations

from torch import nn

from opacus.layers.dp_rnn import DPGRU
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.recurrent import arguments_of, refuse_fused, take_over
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["fix", "validate"]


@register_module_validator(nn.GRU)
def validate(module: nn.GRU) -> list[UnsupportedModuleError]:
    """Refuse a trainable `nn.GRU`."""
    return refuse_fused(module, "DPGRU")


@register_module_fixer(nn.GRU)
def fix(module: nn.GRU) -> DPGRU:
    """The `DPGRU` that computes the same; it takes over the parameters of `module`."""
    return take_over(DPGRU(**arguments_of(module)), module)
