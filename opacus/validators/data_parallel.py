"""`nn.DataParallel`: refused. It splits each batch over copies of the model that hooks do not reach."""

from __future__ import annotations

from torch import nn

from opacus.validators.errors import UnsupportableModuleError, UnsupportedModuleError
from opacus.validators.utils import register_module_validator

__all__ = ["validate"]


@register_module_validator(nn.DataParallel)
def validate(module: nn.DataParallel) -> list[UnsupportedModuleError]:
    """Refuse `nn.DataParallel`."""
    return [
        UnsupportableModuleError(
            "nn.DataParallel copies the model for every forward, and samples that a copy sees are neither clipped nor "
            "counted. Pass its .module; for several devices use one process each, with "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel, or spread the layers over devices"
        )
    ]
