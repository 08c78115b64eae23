"""Tensor tools against loops, torch's own unfold and torch's own convolutions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from opacus.utils.tensor_utils import (
    calc_sample_norms,
    calc_sample_norms_one_layer,
    filter_dilated_rows,
    sum_over_all_but_batch_and_last_n,
    unfold2d,
    unfold3d,
)


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_flat_norms_are_those_of_the_whole_gradient():
    grads = [("a", random(4, 2, 3)), ("b", random(4, 5)), ("c", random(4)), ("d", random(4, 1, 2, 2, 2))]
    expected = [
        math.sqrt(sum(float(v) ** 2 for _, grad in grads for v in grad[sample].flatten()))
        for sample in range(4)
    ]
    (norm_B,) = calc_sample_norms(iter(grads))
    assert norm_B.tolist() == pytest.approx(expected, rel=1e-14)


def test_norms_per_parameter_come_in_order():
    grads = [("a", random(3, 2, 3)), ("b", random(3, 5))]
    norms = calc_sample_norms(grads, flat=False)
    for (_, grad), norm_B in zip(grads, norms, strict=True):
        assert norm_B.tolist() == pytest.approx([float(sample.norm()) for sample in grad], rel=1e-14)


def test_no_parameters_and_no_samples_have_no_norms():
    assert calc_sample_norms([]) == []
    assert calc_sample_norms([("a", torch.ones(0, 2, 3))])[0].shape == (0,)


def test_norms_of_bf16_gradients_are_taken_in_float32():
    grad = torch.ones(2, 100_000, dtype=torch.bfloat16)
    norm_B = calc_sample_norms_one_layer(grad)
    assert norm_B.dtype == torch.float32
    assert norm_B.tolist() == pytest.approx([math.sqrt(100_000)] * 2, rel=1e-6)


def test_norms_of_non_contiguous_gradients():
    grad = random(5, 4, 3).permute(2, 0, 1)
    assert calc_sample_norms_one_layer(grad).tolist() == pytest.approx(
        [float(g.norm()) for g in grad], rel=1e-14
    )


@pytest.mark.parametrize("kept", range(4))
def test_sums_keep_the_batch_and_the_last_dimensions(kept):
    tensor = random(2, 3, 4, 5)
    between = [range(size) for size in tensor.shape[1 : 4 - kept]]
    expected = sum(tensor[(slice(None), *index)] for index in itertools.product(*between))
    torch.testing.assert_close(sum_over_all_but_batch_and_last_n(tensor, kept), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_unfold2d_equals_torchs_unfold(data):
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    kernel, stride, dilation = data.draw(pair), data.draw(pair), data.draw(pair)
    padding = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    x = random(2, 3, 8, 9)
    expected = F.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
    assert torch.equal(
        unfold2d(x, kernel_size=kernel, padding=padding, stride=stride, dilation=dilation), expected
    )


@pytest.mark.parametrize("padding", ["same", "valid", 0, 2])
@pytest.mark.parametrize(("kernel", "dilation"), [((2, 4), (2, 3)), ((3, 3), (1, 1)), ((1, 2), (1, 2))])
def test_patches_times_weight_is_the_2d_convolution(padding, kernel, dilation):
    x, weight = random(2, 3, 9, 11), random(4, 3, *kernel, seed=1)
    expected = F.conv2d(x, weight, padding=padding, dilation=dilation)
    patches = unfold2d(x, kernel_size=kernel, padding=padding, stride=1, dilation=dilation)
    torch.testing.assert_close((weight.flatten(1) @ patches).reshape(expected.shape), expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_unfold3d_equals_a_loop_over_positions(data):
    triple = st.tuples(*[st.integers(1, 2)] * 3)
    kernel, stride, dilation = data.draw(triple), data.draw(triple), data.draw(triple)
    padding = data.draw(st.tuples(*[st.integers(0, 1)] * 3))
    x = random(2, 2, 3, 4, 5)
    padded = F.pad(x, [padding[2], padding[2], padding[1], padding[1], padding[0], padding[0]])
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    columns = [
        padded[
            (
                slice(None),
                slice(None),
                *(slice(p, p + n, d) for p, n, d in zip(place, spans, dilation, strict=True)),
            )
        ].flatten(1)
        for place in itertools.product(
            *(range(0, size - n + 1, s) for size, n, s in zip(padded.shape[2:], spans, stride, strict=True))
        )
    ]
    found = unfold3d(x, kernel_size=kernel, padding=padding, stride=stride, dilation=dilation)
    assert torch.equal(found, torch.stack(columns, dim=2))


@pytest.mark.parametrize("padding", ["same", "valid", 1])
def test_patches_times_weight_is_the_3d_convolution(padding):
    x, weight = random(2, 3, 8, 9, 7), random(4, 3, 2, 3, 4, seed=1)
    stride = (1, 1, 1) if padding == "same" else (2, 1, 2)
    dilation = (2, 1, 1)
    expected = F.conv3d(x, weight, padding=padding, stride=stride, dilation=dilation)
    patches = unfold3d(x, kernel_size=(2, 3, 4), padding=padding, stride=stride, dilation=dilation)
    torch.testing.assert_close((weight.flatten(1) @ patches).reshape(expected.shape), expected)


def test_one_number_stands_for_every_dimension():
    x = random(1, 2, 6, 6, 6)
    assert torch.equal(
        unfold3d(x, kernel_size=2, padding=1), unfold3d(x, kernel_size=(2, 2, 2), padding=(1, 1, 1))
    )


def test_tensors_of_another_rank_and_odd_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3, 8, 9\]"):
        unfold3d(torch.ones(2, 3, 8, 9), kernel_size=2)
    with pytest.raises(ValueError, match="mirror"):
        unfold3d(torch.ones(1, 1, 3, 3, 3), kernel_size=2, padding="mirror")
    with pytest.raises(ValueError, match="2 entries where 3"):
        unfold3d(torch.ones(1, 1, 3, 3, 3), kernel_size=(2, 2))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_filtering_a_dilated_kernels_gradient_gives_the_kernels_gradient(dims):
    """A dilated convolution is a plain one with a kernel that has zeros in between."""
    kernel, dilation = (3, 2, 2)[:dims], (2, 3, 1)[:dims]
    spans = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    x = random(2, 2, *[8] * dims)
    weight = random(3, 2, *kernel, seed=1).requires_grad_()
    wide = torch.zeros(3, 2, *spans, dtype=torch.float64)
    wide[(..., *(slice(None, None, d) for d in dilation))] = weight.detach()
    wide.requires_grad_()
    convolve(x, weight, dilation=dilation).square().sum().backward()
    convolve(x, wide).square().sum().backward()
    torch.testing.assert_close(filter_dilated_rows(wide.grad, dilation, spans, kernel), weight.grad)


def test_filtering_with_sizes_that_do_not_belong_together_is_refused():
    with pytest.raises(ValueError, match="span"):
        filter_dilated_rows(torch.ones(5), (2,), (4,), (3,))
