"""What RNN, GRU and LSTM share: why torch's are refused, and how their parameters move to the private twin."""

from __future__ import annotations

from torch import nn

from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators.errors import ShouldReplaceModuleError, UnsupportedModuleError

__all__ = ["private_twin", "refuse_fused"]


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


def private_twin(module: nn.RNNBase, twin_class: type[DPRNNBase], **arguments: str) -> DPRNNBase:
    """A `twin_class` with the arguments and the very parameters of `module`."""
    twin = twin_class(
        module.input_size,
        module.hidden_size,
        module.num_layers,
        module.bias,
        module.batch_first,
        module.dropout
        if module.num_layers > 1
        else 0.0,  # without effect there, and warned about at construction
        module.bidirectional,
        module.proj_size,
        **arguments,
        device="meta",
    )
    for name, parameter in module.named_parameters():
        setattr(twin, name, parameter)
    return twin.train(module.training)
