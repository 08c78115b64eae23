"""Conv1d/2d/3d and their transposes: a matrix product over unfolded patches, per group.

Shapes: R rows, K groups, T output positions, D = (in channels / K) * kernel elements, P = out channels / K.
A transposed convolution is the adjoint of a convolution with the same weight, so its weight gradient is that
convolution's with input and backprops exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as weight_grads

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.interface import by_parameter
from opacus.grad_sample.rules import matrix_product, register

__all__ = [
    "compute_conv_grad_sample",
    "convolution2d_backward_as_a_convolution",
    "pairs",
    "transposed_pairs",
    "unfold_patches",
]

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def unfold_patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Patches under each output position: `[R, C, *L]` to a view `[R, C, *out, *kernel]`."""
    dims = len(kernel)
    for i in range(dims):
        window = dilation[i] * (kernel[i] - 1) + 1
        x = x.unfold(2 + i, window, stride[i])
        x = x[..., :: dilation[i]]
    return x


def explicit_padding(layer: _Conv, x: Tensor) -> Tensor:
    """`x` padded the way `layer` pads it: numbers, "same"/"valid", zeros or any other `padding_mode`."""
    sides: list[int] = []  # F.pad wants the last dimension first
    for i in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            total = layer.dilation[i] * (layer.kernel_size[i] - 1)
            sides += [total // 2, total - total // 2]
        elif layer.padding == "valid":
            sides += [0, 0]
        else:
            sides += [int(layer.padding[i])] * 2
    if not any(sides):
        return x
    return F.pad(x, sides, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)


def pairs(captured: Captured) -> tuple[Tensor, Tensor]:
    """`(a_RKTD, g_RKTP)` of a convolution."""
    layer = captured.layer
    x = explicit_padding(layer, _batched(captured))
    return _matrices(layer, x, captured.backprops)


def transposed_pairs(captured: Captured) -> tuple[Tensor, Tensor]:
    """`(a_RKTD, g_RKTP)` of a transposed convolution: the roles of input and backprops exchanged."""
    layer = captured.layer
    return _matrices(layer, _reached(layer, _batched(captured), captured.backprops), _batched(captured))


def _reached(layer: _Conv, x: Tensor, g: Tensor) -> Tensor:
    """Backprops of a transposed convolution, padded, without the positions that no kernel element reaches.

    `output_padding` adds such positions at the end.
    """
    sides = [side for i in reversed(range(len(layer.kernel_size))) for side in [int(layer.padding[i])] * 2]
    g = F.pad(g, sides)
    for i, size in enumerate(x.shape[2:]):
        needed = layer.stride[i] * (size - 1) + layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        g = g.narrow(2 + i, 0, needed)
    return g


def _matrices(layer: _Conv, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    rows, groups, dims = x.shape[0], layer.groups, len(layer.kernel_size)
    patches = unfold_patches(x, layer.kernel_size, layer.stride, layer.dilation)
    out = patches.shape[2 : 2 + dims]
    positions, elements = out.numel(), patches.shape[2 + dims :].numel()
    channels = x.shape[1] // groups
    # [R, K, C/K, *out, *kernel] -> [R, K, *out, C/K, *kernel]
    patches = patches.unflatten(1, (groups, channels)).movedim(2, 2 + dims)
    a_RKTD = patches.reshape(rows, groups, positions, channels * elements)
    g_RKTP = g.reshape(rows, groups, g.shape[1] // groups, positions).transpose(2, 3)
    return a_RKTD, g_RKTP


def weight_rows(captured: Captured) -> Tensor:
    """Weight gradient of each row, `[R, *weight.shape]`: one convolution with the rows as groups.

    Measured on CPU this is up to four times as fast as unfolding, and it forms no patches.
    """
    layer = captured.layer
    x = _batched(captured)
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not plain:
        x = explicit_padding(layer, x)
    return _grouped(layer, x, captured.backprops, layer.padding if plain else 0)


def transposed_weight_rows(captured: Captured) -> Tensor:
    """Weight gradient of each row of a transposed convolution, `[R, *weight.shape]`."""
    layer, x = captured.layer, _batched(captured)
    return _grouped(layer, _reached(layer, x, captured.backprops), x, 0)


def _grouped(layer: _Conv, x: Tensor, g: Tensor, padding: int | tuple[int, ...]) -> Tensor:
    rows = x.shape[0]
    shape = layer.weight.shape
    dtype = torch.promote_types(x.dtype, g.dtype)
    if rows == 0:
        return x.new_zeros(0, *shape, dtype=dtype)
    weight_grad = _WEIGHT_GRAD[len(layer.kernel_size)]
    grad = weight_grad(
        x.to(dtype).reshape(1, -1, *x.shape[2:]),
        (rows * shape[0], *shape[1:]),
        g.to(dtype).reshape(1, -1, *g.shape[2:]),
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        groups=rows * layer.groups,
    )
    return grad.view(rows, *shape)


_WEIGHT_GRAD = {
    1: weight_grads.conv1d_weight,
    2: weight_grads.conv2d_weight,
    3: weight_grads.conv3d_weight,
}


def _batched(captured: Captured) -> Tensor:
    return captured.batched(2 + len(captured.layer.kernel_size), exactly=True)


def sizes(captured: Captured) -> tuple[int, int, int, int]:
    """`(T, D, P, K)` of a convolution: a position is an output position."""
    return _sizes(captured.layer, captured.backprops)


def transposed_sizes(captured: Captured) -> tuple[int, int, int, int]:
    """`(T, D, P, K)` of a transposed convolution: a position is an input position."""
    return _sizes(captured.layer, _batched(captured))


def _sizes(layer: _Conv, over: Tensor) -> tuple[int, int, int, int]:
    weight = layer.weight.shape
    return over.shape[2:].numel(), weight[1:].numel(), weight[0] // layer.groups, layer.groups


CONV = matrix_product(pairs, sizes, weight_rows)
register(nn.Conv1d, nn.Conv2d, nn.Conv3d, rule=CONV)
register(
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    rule=matrix_product(transposed_pairs, transposed_sizes, transposed_weight_rows),
)


def compute_conv_grad_sample(
    layer: _Conv, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of Conv1d, Conv2d or Conv3d.

    Args:
        layer: the layer. activations: its inputs, batch first. backprops: gradient of its output, batch first.

    Returns:
        `{parameter: [B, *parameter.shape]}` for each parameter that requires grad.
    """
    return by_parameter(CONV, layer, activations, backprops)


def convolution2d_backward_as_a_convolution(
    layer: nn.Conv2d, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    """Per-sample gradients of Conv2d by one grouped convolution; here the way every convolution takes."""
    return compute_conv_grad_sample(layer, activations, backprops)
