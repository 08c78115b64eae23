"""Quantized frozen layers under trainable adapters (torchao, bitsandbytes): those that keep samples apart, and those that do not.

Weights that are stored in few bits and multiplied with ordinary activations change nothing for privacy. A layer that quantizes
activations while it runs may take one scale, or one choice of columns, from the whole batch: then one sample changes
what the others' gradients are, and clipping each of them bounds nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["adapt", "findings"]

_SHOWN = 3


def findings(model: nn.Module) -> list[str]:
    """Quantized layers of `model` whose outputs depend on more than one sample, a sentence for each kind."""
    by_threshold, by_scale = [], []
    for path, layer in model.named_modules():
        if type(layer).__module__.startswith("bitsandbytes.") and _picks_columns(layer):
            by_threshold.append(path)
        if any(_quantizes_activations(p) for p in layer._parameters.values()):
            by_scale.append(path)
    problems = []
    if by_threshold:
        problems.append(
            f"{_listed(by_threshold)}: 8-bit layers of bitsandbytes with a threshold look for large activations in the whole batch, and "
            "compute their columns in another precision for every sample. Load the model with llm_int8_threshold=0.0."
        )
    if by_scale:
        problems.append(
            f"{_listed(by_scale)}: its weights are quantized by torchao with a config that quantizes activations too, by scales that may "
            "be those of the whole batch; adapters below get no gradient. Use a weight-only config (Int8WeightOnlyConfig)."
        )
    return problems


def adapt(model: nn.Module) -> list[Any]:
    """Nothing has to be changed."""
    return []


def _picks_columns(layer: Any) -> bool:
    state = getattr(layer, "state", None)
    weight = getattr(layer, "weight", None)
    # on a CPU weights are dequantized and multiplied as they are
    elsewhere = weight is not None and weight.device.type not in ("cpu", "xpu")
    return elsewhere and bool(getattr(state, "threshold", 0.0))


def _quantizes_activations(parameter: Any) -> bool:
    if parameter is None or not type(parameter).__module__.startswith("torchao."):
        return False
    return any(
        getattr(parameter, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization")
    )


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
