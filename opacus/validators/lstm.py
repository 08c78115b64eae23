"""`nn.LSTM`: replaced by `DPLSTM`."""

from __future__ import annotations

from torch import nn

from opacus.layers.dp_rnn import DPLSTM
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.recurrent import arguments_of, refuse_fused, take_over
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["fix", "validate"]


@register_module_validator(nn.LSTM)
def validate(module: nn.LSTM) -> list[UnsupportedModuleError]:
    """Refuse a trainable `nn.LSTM`."""
    return refuse_fused(module, "DPLSTM")


@register_module_fixer(nn.LSTM)
def fix(module: nn.LSTM) -> DPLSTM:
    """The `DPLSTM` that computes the same; it takes over the parameters of `module`."""
    return take_over(DPLSTM(**arguments_of(module)), module)
