"""One parameter under two names: the layer that owns it, and the name users know it by.

A per-sample gradient needs each parameter in a small layer of its own (`l0.ih.weight`), while scripts and
checkpoints speak of `weight_ih_l0`. The mixin keeps both names on one `nn.Parameter`: `named_parameters`
and state dicts show the public one, whatever is assigned, loaded or moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["RenameParamsMixin", "filter_out_old_keys"]


class RenameParamsMixin:
    """Give parameters of submodules a second, public name; to be listed before `nn.Module`.

    Call `set_rename_map` at the end of `__init__`. State dicts then hold public names only, and loading takes
    either name, at any depth of nesting.

    Example:
        >>> class Encoder(RenameParamsMixin, nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Linear(2, 3, bias=False)
        ...         self.set_rename_map({"body.weight": "kernel"})
        >>> encoder = Encoder()
        >>> list(encoder.state_dict()), encoder.kernel is encoder.body.weight
        (['kernel'], True)
    """

    old_to_new: dict[str, str]

    def set_rename_map(self: Any, rename_map: dict[str, str]) -> None:
        """Name parameters of submodules.

        Args:
            rename_map: dotted name of the owned parameter -> public name on this module.

        Raises:
            AttributeError: a name on the left does not lead to a parameter.
        """
        named = {new: _owned(self, old) for old, new in rename_map.items()}
        self.old_to_new = dict(rename_map)
        for new, parameter in named.items():
            self.register_parameter(new, parameter)
        if filter_out_old_keys not in self._state_dict_hooks.values():
            self._register_state_dict_hook(filter_out_old_keys)
            self.register_load_state_dict_post_hook(_after_loading)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for old, new in self.__dict__.get("old_to_new", {}).items():
            if new == name:
                owner, _, attribute = old.rpartition(".")
                setattr(self.get_submodule(owner), attribute, value)

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        _tie(self)  # to_empty and conversions between backends make new parameters
        return self

    def _load_from_state_dict(
        self: Any, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for old, new in self.old_to_new.items():
            source = prefix + new if prefix + new in state_dict else prefix + old
            if source in state_dict:
                state_dict[prefix + new] = state_dict[prefix + old] = state_dict[source]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; keys are public names or those of the owned parameters."""
        return super().load_state_dict(state_dict, strict=strict, assign=assign)  # type: ignore[misc]


def filter_out_old_keys(
    self: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """State-dict hook: keep the public name of each renamed parameter only."""
    for old in self.old_to_new:
        state_dict.pop(prefix + old, None)


def _after_loading(module: Any, incompatible_keys: Any) -> None:
    _tie(module)  # load_state_dict(assign=True) makes a parameter for each name
    missing = incompatible_keys.missing_keys
    for key in list(missing):
        for old, new in module.old_to_new.items():
            if key.endswith(old) and key.removesuffix(old) + new in missing:
                missing.remove(key)


def _tie(module: Any) -> None:
    for old, new in module.old_to_new.items():
        module._parameters[new] = _owned(module, old)


def _owned(module: nn.Module, dotted: str) -> nn.Parameter | None:
    owner, _, attribute = dotted.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)
