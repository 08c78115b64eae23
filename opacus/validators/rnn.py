"""`nn.RNN`: replaced by `DPRNN`."""

from __future__ import annotations

from torch import nn

from opacus.layers.dp_rnn import DPRNN
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.recurrent import arguments_of, refuse_fused, take_over
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["fix", "validate"]


@register_module_validator(nn.RNN)
def validate(module: nn.RNN) -> list[UnsupportedModuleError]:
    """Refuse a trainable `nn.RNN`."""
    return refuse_fused(module, "DPRNN")


@register_module_fixer(nn.RNN)
def fix(module: nn.RNN) -> DPRNN:
    """The `DPRNN` that computes the same; it takes over the parameters of `module`."""
    return take_over(DPRNN(**arguments_of(module), nonlinearity=module.nonlinearity), module)
