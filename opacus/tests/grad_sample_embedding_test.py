"""Embedding and EmbeddingBag: ids of any shape and strides, padding, every form of bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import (
    GradSampleModule,
    compute_embedding_grad_sample,
    compute_embedding_norm_sample,
    compute_embeddingbag_gradsampler,
)
from opacus.tests.per_sample import VIEWS, assert_close, check

IDS = torch.tensor([[3, 0, 3, 5], [0, 0, 0, 0], [1, 2, 5, 5]])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -1}, {"sparse": True}], ids=str)
@pytest.mark.parametrize(
    "ids",
    [IDS, IDS[:, 0], IDS.reshape(3, 2, 2), IDS.reshape(3, 1, 2, 2), IDS.int()],
    ids=["matrix", "vector", "rank 3", "rank 4", "int32"],
)
def test_embedding_is_exact(ids, options, view):
    check(lambda: nn.Embedding(6, 3, **options), ids, view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "ids",
    [IDS[:, :1].expand(3, 4), IDS.t().contiguous().t(), IDS.repeat(2, 2)[::2, ::2]],
    ids=["expanded", "transposed", "every second"],
)
def test_embedding_takes_ids_of_any_strides(ids, view):
    check(lambda: nn.Embedding(6, 3), ids, view=view)


@pytest.mark.parametrize("view", VIEWS)
def test_the_padding_entry_stays_untouched(view):
    torch.manual_seed(0)
    model = GradSampleModule(nn.Embedding(6, 3, padding_idx=0), force_functorch=view == "functorch")
    model(IDS).sum().backward()
    assert not model.weight.grad_sample[:, 0].any()
    assert model.weight.grad_sample[:, 5].any()


@pytest.mark.parametrize("view", VIEWS)
def test_ids_with_the_batch_second(view):
    check(lambda: nn.Embedding(6, 3), IDS.t(), view=view, batch_dim=1, n=3)


class WithPositions(nn.Module):
    """GPT-2's way: position ids `[1, T]`, looked up once and added to every sample."""

    def __init__(self, keyword: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 3)
        self.positions = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 2)
        self.keyword = keyword

    def forward(self, ids: Tensor) -> Tensor:
        position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
        p = self.positions(input=position_ids) if self.keyword else self.positions(position_ids)
        return self.head(torch.tanh(self.tokens(ids) + p))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rows", [3, 1, 4], ids=["B=3", "B=1", "B=T"])
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_position_ids_of_one_row_are_exact(keyword, rows, view):
    check(lambda: WithPositions(keyword), IDS.repeat(2, 1)[:rows], view=view)


OFFSETS = [
    torch.tensor([0, 4, 4, 9]),
    torch.tensor([0, 0, 4, 12]),
]  # with an empty bag inside, in front and at the end


def split_bags(batch: Any, rows: slice, n: int, batch_dim: int) -> Any:
    """The ids of the given bags; `per_sample_weights` go with them."""
    (ids, offsets), kwargs = batch
    starts = offsets[:n]
    ends = torch.cat([starts[1:], torch.tensor([len(ids)])])
    chosen = list(range(n))[rows]
    kept = [torch.arange(int(starts[i]), int(ends[i])) for i in chosen]
    index = torch.cat([*kept, torch.zeros(0, dtype=torch.long)])
    lengths = torch.tensor([0, *[len(k) for k in kept]]).cumsum(0)
    kwargs = {key: value[index] for key, value in kwargs.items()}
    # the rest of the batch is told by the number of offsets: one more with include_last_offset
    return (ids[index], lengths if len(offsets) > n else lengths[:-1]), kwargs


BAG_OPTIONS = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "max"},
    {"mode": "sum", "padding_idx": 0},
    {"mode": "mean", "padding_idx": 0},
    {"mode": "max", "padding_idx": 0},
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("options", BAG_OPTIONS, ids=str)
def test_bags_as_a_matrix_are_exact(options, view):
    check(lambda: nn.EmbeddingBag(6, 3, **options), IDS, view=view)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("last", [False, True], ids=["", "include_last_offset"])
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("options", BAG_OPTIONS, ids=str)
def test_bags_with_offsets_are_exact(options, offsets, last, view):
    ids = IDS.flatten()
    if last:
        offsets = torch.cat([offsets, torch.tensor([len(ids)])])
    check(
        lambda: nn.EmbeddingBag(6, 3, include_last_offset=last, **options),
        ids,
        offsets,
        view=view,
        n=4,
        split=split_bags,
    )


@pytest.mark.parametrize("view", ["float64", "float32", "policy", "empty"])
@pytest.mark.parametrize("padding", [None, 0])
def test_weighted_bags_are_exact(padding, view):
    make = lambda: nn.EmbeddingBag(6, 3, mode="sum", padding_idx=padding)  # noqa: E731
    weights = torch.randn(12)
    check(make, IDS.flatten(), OFFSETS[0], view=view, n=4, split=split_bags, per_sample_weights=weights)
    check(make, IDS, view=view, per_sample_weights=weights.view(3, 4))


@pytest.mark.parametrize("view", ["float64", "policy"])
def test_bags_are_rows_in_a_model_with_the_batch_second(view):
    check(lambda: nn.EmbeddingBag(6, 3), IDS[:, :3], view=view, batch_dim=0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3)

        def forward(self, ids_TB: Tensor) -> Tensor:
            return self.bag(ids_TB.t())

    check(Model, IDS.t(), view=view, batch_dim=1, n=3)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_options_by_which_the_batch_decides_are_refused_by_name(kind, option):
    model = nn.Sequential(kind(6, 3, **option))
    (name,) = option
    with pytest.raises(NotImplementedError, match=rf"0 \({kind.__name__}\) has {name}"):
        GradSampleModule(model)
    lenient = GradSampleModule(model, strict=False)
    with pytest.raises(PerSampleGradientError, match=name):
        lenient(IDS).sum().backward()


def test_the_recorded_functions_agree_with_the_loop():
    layer, bag = nn.Embedding(6, 3).double(), nn.EmbeddingBag(6, 3).double()
    g, h = torch.randn(3, 4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    want = torch.stack([torch.autograd.grad((layer(IDS[i]) * g[i]).sum(), layer.weight)[0] for i in range(3)])
    found = compute_embedding_grad_sample(layer, [IDS], g)[layer.weight]
    assert_close({"weight": found}, {"weight": want}, 1e-10)
    norm = compute_embedding_norm_sample(layer, [IDS], g)[layer.weight]
    assert_close({"norm": norm}, {"norm": want.flatten(1).norm(dim=1)}, 1e-10)
    loops = [torch.autograd.grad((bag(IDS[i : i + 1]) * h[i]).sum(), bag.weight)[0] for i in range(3)]
    found = compute_embeddingbag_gradsampler(bag, [IDS], h)[bag.weight]
    assert_close({"weight": found}, {"weight": torch.stack(loops)}, 1e-10)
