"""Kernels that need more than the fallback: memory, copies, and what C++ takes for granted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.testing.emulated_devices.copies import record
from opacus.testing.emulated_devices.fallback import fallback, rebase
from opacus.testing.emulated_devices.relabel import CPU, CPU_KEYS, to_device, to_host
from opacus.testing.emulated_devices.state import state

__all__ = ["EXPLICIT", "METADATA_ONLY", "THROUGH_AUTOGRAD", "metadata_kernel"]

_aten = torch.ops.aten


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    host = _aten.empty.memory_format(size, dtype=dtype, device=CPU, memory_format=memory_format)
    return to_device(host, state.index(device))


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    host = _aten.empty_strided.default(size, stride, dtype=dtype, device=CPU)
    return to_device(host, state.index(device))


def _copy_from(src: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """Every copy to, from and between emulated devices passes here, so here they are counted."""
    if src.device != dst.device:
        for device in (src.device, dst.device):
            if device.type not in ("cpu", state.name):
                raise RuntimeError(f"cannot copy from {src.device} to {dst.device}")
        kind = "h2d" if src.device.type == "cpu" else "d2h" if dst.device.type == "cpu" else "cross"
        record(src.device, dst.device, src, kind)
    _aten.copy_.default(_with_bits(dst), _with_bits(src))
    return dst


def _with_bits(tensor: Tensor) -> Tensor:
    """`tensor` on the host, its conjugate and negative bits kept."""
    if tensor.device.type != state.name:
        return tensor
    host = to_host(tensor)
    host = torch.conj(host) if tensor.is_conj() else host
    return torch._neg_view(host) if tensor.is_neg() else host


def _resize_(
    tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> Tensor:
    wanted = _aten.empty.memory_format(size, dtype=tensor.dtype, device=CPU, memory_format=memory_format)
    nbytes = (tensor.storage_offset() + wanted.numel()) * wanted.element_size()
    if nbytes <= tensor.untyped_storage().nbytes():
        return _aten.resize_.default.redispatch(CPU_KEYS, tensor, size, memory_format=memory_format)
    kept = min(tensor.numel(), wanted.numel())
    if kept:
        wanted.view(-1)[:kept].copy_(to_host(tensor).reshape(-1)[:kept])
    return rebase(tensor, to_device(wanted, tensor.device.index))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    return fallback(_aten.convolution.default, x, weight, bias, *geometry)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *geometry_and_mask: Any) -> Any:
    *geometry, mask = geometry_and_mask
    _, _, _, transposed, _, groups = geometry
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    bias_sizes = [out_channels] if mask[2] else None
    return fallback(_aten.convolution_backward.default, grad, x, weight, bias_sizes, *geometry, mask)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if (
        attn_mask is not None and attn_mask.dtype is torch.bool
    ):  # the kernel below would add its ones and zeros
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    out, _ = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return out


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    new_cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * new_cell.tanh(), new_cell, cell.new_empty(0)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    in_r, in_z, in_n = _biased(input_gates, input_bias).chunk(3, 1)
    hid_r, hid_z, hid_n = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    n = (in_n + (in_r + hid_r).sigmoid() * hid_n).tanh()
    return (hidden - n) * (in_z + hid_z).sigmoid() + n, hidden.new_empty(0)


# The fallback under its own name, where PyTorch would otherwise take a slow composite (norms), fail on an `out=`
# of another shape (losses), or word the error differently (index_add).
_DIRECT = ("native_layer_norm", "native_group_norm", "mse_loss", "smooth_l1_loss", "index_add")

EXPLICIT: dict[str, Any] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "resize_": _resize_,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    **{name: functools.partial(fallback, getattr(_aten, name).default) for name in _DIRECT},
}

# C++ calls these without asking whether they exist for a device type like ours. Written with differentiable ops.
THROUGH_AUTOGRAD: dict[str, Any] = {
    "scaled_dot_product_attention": _attention,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": _gru_cell,
}

# These CPU kernels touch sizes and strides only, never memory, so they work on any device's tensors; with them,
# views, version counters and `_base` are PyTorch's own.
METADATA_ONLY = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
)


def metadata_kernel(name: str) -> Any:
    """The CPU kernel of metadata-only operator `name`, callable with tensors of any device."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(_aten, packet), overload or "default")
    return functools.partial(op.redispatch, CPU_KEYS)
