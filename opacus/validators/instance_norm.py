"""InstanceNorm with running statistics: it writes un-noised statistics of the data into its buffers.

Without them InstanceNorm normalises each sample by itself and is safe. Frozen and in `eval()`, it uses stored
statistics only and is accepted like BatchNorm (see `batch_norm.guard_frozen`).
"""

from __future__ import annotations

from typing import Any, Union, get_args

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus.validators.batch_norm import is_fixed_map
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["INSTANCENORM", "fix", "validate"]

INSTANCENORM = Union[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]  # noqa: UP007
_CLASSES = get_args(INSTANCENORM)


@register_module_validator([_InstanceNorm, *_CLASSES])
def validate(module: INSTANCENORM) -> list[UnsupportedModuleError]:
    """Refuse running statistics, except in a frozen module in `eval()`.

    Returns:
        A list of at most one error.
    """
    if module.running_mean is None or is_fixed_map(module):
        return []
    return [
        IllegalModuleConfigurationError(
            "its running statistics are computed from the data without noise. Build it with "
            "track_running_stats=False, as ModuleValidator.fix does"
        )
    ]


@register_module_fixer(_CLASSES)
def fix(module: INSTANCENORM) -> INSTANCENORM:
    """The same InstanceNorm without running statistics; it takes over weight and bias."""
    if not module.track_running_stats:
        return module
    flags: dict[str, Any] = {"eps": module.eps, "momentum": module.momentum, "affine": module.affine}
    if module.affine and module.bias is None:
        flags["bias"] = False
    replacement = type(module)(module.num_features, **flags, device="meta")
    replacement.weight, replacement.bias = module.weight, module.bias
    return replacement
