"""Tensor arithmetic of per-sample gradients: norms, sums, and the patches a convolution sees.

Shapes: B samples, C channels, L output positions, kernel sizes kD, kH, kW.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opacus.devices import total_norms
from opacus.norms import as_rows, row_norms

__all__ = [
    "calc_sample_norms",
    "calc_sample_norms_one_layer",
    "filter_dilated_rows",
    "sum_over_all_but_batch_and_last_n",
    "unfold2d",
    "unfold3d",
]


def calc_sample_norms(named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True) -> list[Tensor]:
    """L2 norm of each sample's gradient.

    Args:
        named_params: name and per-sample gradient `[B, *shape]` of each parameter.
        flat: one norm over all parameters together, rather than one for each. Only `[B]` vectors then travel, to the
            first gradient's device.

    Returns:
        With `flat` a list of one `[B]` tensor (empty where there is no parameter), else one for each parameter, in order;
        float32 or wider.

    Example:
        >>> calc_sample_norms([("a", torch.tensor([[3.0], [0.0]])), ("b", torch.tensor([[4.0], [2.0]]))])
        [tensor([5., 2.])]
    """
    norms = [calc_sample_norms_one_layer(grad_sample) for _, grad_sample in named_params]
    if not flat or not norms:
        return norms
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm_B in norms:
        by_device.setdefault(norm_B.device, []).append(norm_B)
    return [total_norms(by_device, norms[0].device)]


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """L2 norm of each sample's gradient for one parameter.

    Args:
        param: per-sample gradient, `[B, *shape]`.

    Returns:
        `[B]`, accumulated in float32 or wider.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    return row_norms(as_rows(param), dtype)


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Sum over every dimension except the first and the last `n_dims`.

    Args:
        tensor: `[B, ..., *last]`.
        n_dims: number of trailing dimensions kept.

    Returns:
        `[B, *last]`; the tensor itself where nothing is between.

    Example:
        >>> sum_over_all_but_batch_and_last_n(torch.ones(2, 3, 4, 5), n_dims=1).shape
        torch.Size([2, 5])
    """
    between = tuple(range(1, tensor.dim() - n_dims))
    return tensor.sum(between) if between else tensor


def unfold2d(
    input: Tensor,
    *,
    kernel_size: int | Sequence[int],
    padding: int | str | Sequence[int],
    stride: int | Sequence[int],
    dilation: int | Sequence[int],
) -> Tensor:
    """Patches that a 2-D convolution multiplies with its weight; `torch.nn.functional.unfold` with string padding too.

    Args:
        input: `[B, C, H, W]`.
        kernel_size: `(kH, kW)`, or one number for both; so for the other arguments.
        padding: zeros on each side, or `"same"` or `"valid"` as `torch.nn.Conv2d` means them.
        stride: distance between patches.
        dilation: distance between a patch's entries.

    Returns:
        `[B, C * kH * kW, L]`, so that `weight.flatten(1) @ patches` is the convolution's output.

    Example:
        >>> unfold2d(torch.ones(1, 3, 8, 9), kernel_size=(3, 2), padding="valid", stride=1, dilation=1).shape
        torch.Size([1, 18, 48])
    """
    return _unfold(input, kernel_size, padding, stride, dilation, spatial_dims=2)


def unfold3d(
    tensor: Tensor,
    *,
    kernel_size: int | Sequence[int],
    padding: int | str | Sequence[int] = 0,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Patches that a 3-D convolution multiplies with its weight, as `unfold2d` for two dimensions.

    Args:
        tensor: `[B, C, D, H, W]`.
        kernel_size: `(kD, kH, kW)`, or one number for all; so for the other arguments.
        padding: zeros on each side, or `"same"` or `"valid"`.
        stride: distance between patches.
        dilation: distance between a patch's entries.

    Returns:
        `[B, C * kD * kH * kW, L]`.

    Raises:
        ValueError: for a tensor of another rank.
    """
    return _unfold(tensor, kernel_size, padding, stride, dilation, spatial_dims=3)


def filter_dilated_rows(
    tensor: Tensor,
    dilation: Sequence[int],
    dilated_kernel_size: Sequence[int],
    kernel_size: Sequence[int],
) -> Tensor:
    """Keep the entries of a dilated kernel that carry weights, dropping those between them.

    Args:
        tensor: `[..., *dilated_kernel_size]`.
        dilation: distance between weights, for each of the last dimensions.
        dilated_kernel_size: `dilation * (kernel_size - 1) + 1` for each.
        kernel_size: number of weights in each.

    Returns:
        `[..., *kernel_size]`.

    Raises:
        ValueError: when the sizes do not belong together.

    Example:
        >>> filter_dilated_rows(torch.arange(5), dilation=(2,), dilated_kernel_size=(5,), kernel_size=(3,))
        tensor([0, 2, 4])
    """
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel_size, strict=True)]
    have = list(tensor.shape[-len(spans) :])
    if list(dilated_kernel_size) != spans or have != spans:
        raise ValueError(
            f"dilation {tuple(dilation)} and kernel_size {tuple(kernel_size)} span {spans}, but dilated_kernel_size is "
            f"{tuple(dilated_kernel_size)} and the tensor ends in {have}."
        )
    weights: tuple[Any, ...] = (Ellipsis, *(slice(None, None, d) for d in dilation))
    return tensor[weights]


def _unfold(
    tensor: Tensor,
    kernel_size: int | Sequence[int],
    padding: int | str | Sequence[int],
    stride: int | Sequence[int],
    dilation: int | Sequence[int],
    spatial_dims: int,
) -> Tensor:
    if tensor.dim() != spatial_dims + 2:
        raise ValueError(
            f"the tensor must be [B, C] and {spatial_dims} more dimensions, but is {list(tensor.shape)}."
        )
    kernel = _per_dim(kernel_size, spatial_dims)
    strides = _per_dim(stride, spatial_dims)
    dilations = _per_dim(dilation, spatial_dims)
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    pads = [
        pad for sides in reversed(_padding_sides(padding, spans)) for pad in sides
    ]  # F.pad counts from the last
    patches = F.pad(tensor, pads)
    for dim, (span, step, gap) in enumerate(zip(spans, strides, dilations, strict=True), start=2):
        patches = patches.unfold(dim, span, step)[..., ::gap]
    # [B, C, *positions, *kernel] -> [B, C, *kernel, *positions]
    order = [0, 1, *range(spatial_dims + 2, 2 * spatial_dims + 2), *range(2, spatial_dims + 2)]
    patches = patches.permute(order)
    return patches.flatten(spatial_dims + 2).flatten(1, spatial_dims + 1)


def _padding_sides(padding: int | str | Sequence[int], spans: list[int]) -> list[tuple[int, int]]:
    if padding == "valid":
        return [(0, 0) for _ in spans]
    if padding == "same":
        return [((span - 1) // 2, span - 1 - (span - 1) // 2) for span in spans]
    if isinstance(padding, str):
        raise ValueError(f"padding is {padding!r}. Pass numbers, 'same' or 'valid'.")
    return [(pad, pad) for pad in _per_dim(padding, len(spans))]


def _per_dim(value: int | Sequence[int], dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    if len(values) != dims:
        raise ValueError(f"{tuple(values)} has {len(values)} entries where {dims} are wanted.")
    return values
