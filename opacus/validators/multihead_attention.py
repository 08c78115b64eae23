"""`nn.MultiheadAttention`: replaced by `DPMultiheadAttention`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opacus.layers.attention_state import from_torch_names
from opacus.layers.dp_multihead_attention import DPMultiheadAttention
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.recurrent import refuse_fused
from opacus.validators.utils import register_module_fixer, register_module_validator

__all__ = ["fix", "validate"]


@register_module_validator(nn.MultiheadAttention)
def validate(module: nn.MultiheadAttention) -> list[UnsupportedModuleError]:
    """Refuse a trainable `nn.MultiheadAttention`."""
    return refuse_fused(module, "DPMultiheadAttention")


@register_module_fixer(nn.MultiheadAttention)
def fix(module: nn.MultiheadAttention) -> DPMultiheadAttention:
    """The `DPMultiheadAttention` that computes the same, with copies of the parameters of `module`."""
    twin = DPMultiheadAttention(
        module.embed_dim,
        module.num_heads,
        module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
        device="meta",
    )
    values: dict[str, Tensor] = dict(module.named_parameters())
    with torch.enable_grad():
        from_torch_names(values, prefix="")  # pieces of a stacked parameter require grad as it does
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        setattr(twin.get_submodule(owner), attribute, parameter)
    return twin.train(module.training)


@register_module_fixer(nn.TransformerEncoder)
def fix_encoder(module: nn.TransformerEncoder) -> nn.TransformerEncoder:
    """Turn off nested tensors, which only torch's own attention takes, where that attention is about to be replaced."""
    if any(validate(part) for part in module.modules() if isinstance(part, nn.MultiheadAttention)):
        module.use_nested_tensor = False
    return module
