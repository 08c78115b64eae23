"""BatchNorm: a sample's output depends on the other samples of its batch, so no gradient is one sample's own.

One use is safe: a frozen BatchNorm in `eval()` with running statistics is a fixed affine map, per sample. It is
accepted, for as long as it stays in `eval()`. `model.train()` switches it back on, without a word; `guard_frozen`
hangs a check on such modules that refuses the next forward. A frozen BatchNorm in training mode normalises by
the batch and writes un-noised statistics of the data into its buffers: refused.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Union, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["BATCHNORM", "INSTANCENORM", "fix", "guard_frozen", "is_fixed_map", "validate"]

# typing.Union, not X | Y: the recorded interface
BATCHNORM = Union[nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]  # noqa: UP007
INSTANCENORM = Union[nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]  # noqa: UP007

_CLASSES = get_args(BATCHNORM)
_INSTANCE_NORM_FOR: dict[type, Any] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}
_MOST_GROUPS = 32  # GroupNorm's usual number (Wu and He, 2018)
_FEW_CHANNELS = 8


def is_fixed_map(module: Any) -> bool:
    """Whether a BatchNorm or InstanceNorm is frozen, in `eval()`, and normalises by stored statistics."""
    trainable = any(parameter.requires_grad for parameter in module.parameters())
    return not trainable and not module.training and module.running_mean is not None


@register_module_validator([_BatchNorm, *_CLASSES])
def validate(module: BATCHNORM) -> list[UnsupportedModuleError]:
    """Refuse BatchNorm and its subclasses, except a frozen one in `eval()` with running statistics.

    Returns:
        A list of at most one error.
    """
    if is_fixed_map(module):
        return []
    return [
        ShouldReplaceModuleError(
            "it normalises each sample by statistics of the whole batch, so samples cannot be told apart. "
            "Replace it by GroupNorm, which ModuleValidator.fix does for torch's own classes and keeps weight "
            "and bias; or freeze it, requires_grad_(False), and keep it in eval(), so that it uses stored statistics only"
        )
    ]


@register_module_fixer(_CLASSES)
def fix(
    module: BATCHNORM, *, replace_bn_with_in: bool = False, num_groups: int | None = None, **kwargs: Any
) -> nn.GroupNorm | INSTANCENORM:
    """The GroupNorm or InstanceNorm that replaces `module` and takes over its weight and bias.

    GroupNorm gets, by default, the largest number of groups up to 32 that is a power of two and divides the channels.

    Args:
        module: the BatchNorm.
        replace_bn_with_in: use InstanceNorm.
        num_groups: number of groups of GroupNorm, a divisor of the channels.
        **kwargs: options of other fixers, ignored.

    Raises:
        ValueError: `num_groups` does not divide the channels, or InstanceNorm is asked for too.
        UnsupportableModuleError: InstanceNorm is asked for a SyncBatchNorm, which does not say its dimensions.
    """
    if replace_bn_with_in and num_groups is not None:
        raise ValueError(
            f"replace_bn_with_in=True and num_groups={num_groups} ask for different layers: pass one of them"
        )
    flags: dict[str, Any] = {"eps": module.eps, "affine": module.affine, "device": "meta"}
    if module.affine and module.bias is None:
        flags["bias"] = False
    if replace_bn_with_in:
        if type(module) not in _INSTANCE_NORM_FOR:
            raise UnsupportableModuleError(
                f"{type(module).__name__} has no InstanceNorm of the same dimensions. Replace it by GroupNorm"
            )
        replacement = _INSTANCE_NORM_FOR[type(module)](module.num_features, **flags)
    else:
        groups = math.gcd(_MOST_GROUPS, module.num_features) if num_groups is None else num_groups
        if isinstance(module, nn.BatchNorm1d) and module.num_features // groups < _FEW_CHANNELS:
            warnings.warn(
                f"BatchNorm1d({module.num_features}) becomes GroupNorm({groups}, {module.num_features}). On inputs "
                "[B, C] it normalises over so few values that little or nothing is left of them: there, "
                f"put nn.LayerNorm({module.num_features}) in its place before calling fix.",
                stacklevel=2,
            )
        replacement = nn.GroupNorm(groups, module.num_features, **flags)
    replacement.weight, replacement.bias = module.weight, module.bias
    return replacement


def guard_frozen(model: nn.Module) -> list[RemovableHandle]:
    """Make accepted normalisation layers refuse to run once they are switched on again.

    Args:
        model: a validated model. Every frozen BatchNorm, and InstanceNorm with running statistics, in it gets a hook.

    Returns:
        Handles; `remove()` takes the hooks away.

    Formal guarantee:
        While the hooks are there, no forward normalises by, or stores, statistics of a batch in these modules.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2)).requires_grad_(False).eval()
        >>> handles = guard_frozen(model)
        >>> model.train()(torch.zeros(3, 2))
        Traceback (most recent call last):
        opacus.validators.errors.IllegalModuleConfigurationError: ...
    """
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, (_BatchNorm, _InstanceNorm)) and module.running_mean is not None:
            handles.append(module.register_forward_pre_hook(_Guard(path)))
    return handles


class _Guard:
    """A pre-hook that pickles and deep-copies along with its module."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not is_fixed_map(module):
            raise IllegalModuleConfigurationError(
                f"{self.path or 'the model itself'!r} ({type(module).__name__}) was accepted as a frozen layer in eval(), "
                "and was unfrozen or set to training mode since, where it mixes samples. "
                "Call .requires_grad_(False).eval() on it after model.train()"
            )
