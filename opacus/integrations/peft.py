"""PEFT: which adapters are exact, what has to be done for them, and which are refused by name.

Most kinds need nothing: LoRA, its variants, VeRA, IA3, prefix tuning and others are layers (or parents of parameters) like any, and their
per-sample gradients follow from what the layers saw. Here is what cannot be seen from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opacus.grad_sample.declarations import declare

__all__ = ["adapt", "findings"]

declare("peft.tuners.lora.dora", "DoraEmbeddingLayer", part_of_parent=True)
declare("peft.tuners.oft.layer", "OFTRotationModule", constant_buffers=True)
declare("peft.tuners.boft.layer", "Linear", "Conv2d", constant_buffers=True)


def _keeps_all(layer: Any) -> bool:
    rates = (*getattr(layer, "rank_dropout", {}).values(), *getattr(layer, "module_dropout", {}).values())
    return not any(rates)


for _method in ("loha", "lokr"):
    declare(f"peft.tuners.{_method}.layer", "Linear", "Conv1d", "Conv2d", draws_in_vain=_keeps_all)

_WORKING = "LoRA (with DoRA, rsLoRA), VeRA, IA3, prefix and prompt tuning are exact"

_REFUSED = {
    "ADALORA": "its forward adds a penalty on the weights of all its layers to the loss, outside any sample's gradient",
    "CPT": "it masks gradients and projects weights by hooks of its own, which clipping would not see",
    "OSF": "it projects weight gradients by hooks of its own, which clipping would not see",
    "PVERA": "it draws its scaling at random in the forward that uses it, which cannot be repeated for one sample",
    "POLY": "it draws a random mixture of its parameters in each forward, which cannot be repeated for one sample",
}

# kinds whose dropout is a layer of its own, or is never used in training
_DROPOUT_APART = ("LORA", "OFT", "P_TUNING", "XLORA")

# given one row of virtual tokens, whose result is repeated for the batch: the sum over samples would be all that is left
_REPEATED = ("PROMPT_TUNING", "P_TUNING")


def findings(model: nn.Module) -> list[str]:
    """Adapters of `model` that train and cannot be clipped, a sentence each."""
    problems: list[str] = []
    for config, adapter in _trained_configs(model):
        kind = _kind(config)
        if kind in _REFUSED:
            problems.append(f"adapter '{adapter}' ({kind}): {_REFUSED[kind]}. {_WORKING}.")
        problems += [
            f"adapter '{adapter}' ({kind}) has {name}={rate}: it drops at random in the forward that uses its parameters, which "
            f"cannot be repeated for one sample. Set {name}=0."
            for name, rate in vars(config).items()
            if name.endswith("dropout") and rate and kind not in _REFUSED and kind not in _DROPOUT_APART
        ]
        if getattr(config, "target_parameters", None):
            problems.append(
                f"adapter '{adapter}' ({kind}) has target_parameters={list(config.target_parameters)}: they are added to the weights "
                "before any layer is called, so that no call says which sample used them. Use target_modules."
            )
    return problems


def adapt(model: nn.Module) -> list[Any]:
    """Give virtual tokens one row per sample wherever `model` would look them up once for the batch."""
    import peft

    return [
        _PromptPerSample(module)
        for module in model.modules()
        if isinstance(module, peft.PeftModel)
        and any(_kind(config) in _REPEATED for config in module.peft_config.values())
    ]


class _PromptPerSample:
    """`get_prompt` of one model with a row of virtual tokens for each sample; the values are the same."""

    def __init__(self, model: Any) -> None:
        self.model = model
        original: Callable[..., Any] = model.get_prompt

        def get_prompt(batch_size: int, *args: Any, **kwargs: Any) -> Any:
            config = model.active_peft_config
            if _kind(config) not in _REPEATED or config.inference_mode:
                return original(batch_size, *args, **kwargs)
            encoder = model.prompt_encoder[model.active_adapter]
            handle = encoder.register_forward_pre_hook(
                lambda module, given: (given[0].expand(batch_size, -1), *given[1:]), prepend=True
            )
            try:
                return original(1, *args, **kwargs)
            finally:
                handle.remove()

        model.get_prompt = get_prompt

    def remove(self) -> None:
        """Back to the method of the class."""
        vars(self.model).pop("get_prompt", None)


def _trained_configs(model: nn.Module) -> list[tuple[Any, str]]:
    """Configurations of adapters, each once, that have a trainable parameter."""
    found: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        configs = getattr(module, "peft_config", None)  # of prompt learning it is a property
        if isinstance(configs, dict):
            for adapter, config in configs.items():
                if not getattr(config, "inference_mode", False):
                    found.setdefault(id(config), (config, adapter))
    return list(found.values())


def _kind(config: Any) -> str:
    kind = getattr(config, "peft_type", "")
    return str(getattr(kind, "value", kind))
