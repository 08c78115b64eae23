"""What RNN, GRU and LSTM share: why torch's are refused, and how their parameters move to the private twin."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators.errors import ShouldReplaceModuleError, UnsupportedModuleError

__all__ = ["arguments_of", "refuse_fused", "take_over"]

Twin = TypeVar("Twin", bound=DPRNNBase)


def refuse_fused(module: nn.Module, twin: str) -> list[UnsupportedModuleError]:
    """One error that names `twin`, unless `module` is frozen: then it has no gradient to clip."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return []
    return [
        ShouldReplaceModuleError(
            f"its fused kernels hide the gradient of each sample. Use opacus.layers.{twin}, which takes the same "
            "arguments and state dict; ModuleValidator.fix puts it in place of torch's own class and keeps the weights"
        )
    ]


def arguments_of(module: nn.RNNBase) -> dict[str, Any]:
    """The constructor arguments that torch's layer and its private twin share."""
    return {
        "input_size": module.input_size,
        "hidden_size": module.hidden_size,
        "num_layers": module.num_layers,
        "bias": module.bias,
        "batch_first": module.batch_first,
        "dropout": module.dropout
        if module.num_layers > 1
        else 0.0,  # no effect there, and warned about before
        "bidirectional": module.bidirectional,
        "proj_size": module.proj_size,
        "device": "meta",
    }


def take_over(twin: Twin, module: nn.RNNBase) -> Twin:
    """Give `twin` the very parameters of `module`, so that ties, devices and dtypes stay; returns `twin`."""
    for name, parameter in module.named_parameters():
        setattr(twin, name, parameter)
    return twin.train(module.training)
