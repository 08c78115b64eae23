"""FSDP2 under the names that existing code imports, and walks over modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from opacus.distributed.fsdp import fsdp2_wrap

__all__ = ["FSDP2Wrapper", "has_params", "iterate_submodules"]


def has_params(module: nn.Module) -> bool:
    """Whether `module` owns parameters itself, not only through children.

    Example:
        >>> has_params(nn.Linear(1, 1)), has_params(nn.Sequential(nn.Linear(1, 1)))
        (True, False)
    """
    return any(True for _ in module.parameters(recurse=False))


def iterate_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Each submodule that owns parameters, parents before children.

    Example:
        >>> [type(m).__name__ for m in iterate_submodules(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))]
        ['Linear']
    """
    return (submodule for submodule in module.modules() if has_params(submodule))


def FSDP2Wrapper(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Shard a model with `fully_shard` for private training.

    Args:
        model: its weights equal on all ranks.
        **kwargs: as in `opacus.distributed.fsdp.fsdp2_wrap`: those of `fully_shard` (`mesh`, `mp_policy`, `offload_policy`,
            `reshard_after_forward`, ...), `opacus_high_precision_layers`, `units`, and `optimizer`, which follows the model.

    Returns:
        `model` itself.

    Raises:
        ConfigurationError: listing everything that is wrong; nothing was changed.
    """
    return fsdp2_wrap(model, **kwargs)
