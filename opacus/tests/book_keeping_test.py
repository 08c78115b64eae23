"""Modes "bk" and "ghost" give the clipped sums of a float64 loop over samples: every layer kind, every way of composing layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.testing import devices_for, spread
from opacus.tests import grad_sample_models_test as models
from opacus.tests.clipped_sums import WAYS, check_sums

IDS = torch.tensor([[3, 0, 3, 5], [0, 0, 0, 0], [1, 2, 5, 5]])


class Scale(nn.Module):
    """No rule knows it: functorch."""

    def __init__(self):
        super().__init__()
        self.by, self.mix = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return torch.tanh(x * self.by) @ self.mix


class Recurrent(nn.Module):
    def __init__(self, kind, **flags):
        super().__init__()
        self.cells = kind(3, 4, batch_first=True, **flags)

    def forward(self, x):
        return self.cells(x)[0]


class Attention(nn.Module):
    def __init__(self, **flags):
        super().__init__()
        self.attention = DPMultiheadAttention(4, 2, batch_first=True, **flags)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Bags(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.table = nn.EmbeddingBag(6, 4, mode=mode, padding_idx=0)

    def forward(self, ids):
        return self.table(ids)


LAYERS = {
    "linear of rows": (lambda: nn.Linear(5, 6), torch.randn(4, 5)),
    "linear of positions": (lambda: nn.Linear(5, 6), torch.randn(4, 3, 5)),
    "linear of many positions": (lambda: nn.Linear(5, 6), torch.randn(4, 7, 3, 5)),
    "linear of rank 4, one position": (lambda: nn.Linear(5, 6, bias=False), torch.randn(4, 1, 1, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 2, stride=2, groups=2), torch.randn(3, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, dilation=2), torch.randn(3, 4, 6, 5)),
    "conv2d, two positions": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="valid"), torch.randn(3, 4, 3, 4)),
    "conv2d, circular": (
        lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        torch.randn(3, 2, 3, 3),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2), torch.randn(3, 2, 3, 2, 2)),
    "transposed conv1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        torch.randn(3, 4, 2),
    ),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), torch.randn(3, 3, 2, 2)),
    "embedding": (lambda: nn.Embedding(6, 4), IDS),
    "embedding, padding": (lambda: nn.Embedding(6, 4, padding_idx=0), IDS),
    "bags, mean": (lambda: Bags("mean"), IDS),
    "bags, max": (lambda: Bags("max"), IDS),
    "layer norm": (lambda: nn.LayerNorm((2, 4)), torch.randn(3, 5, 2, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(4, bias=False), torch.randn(3, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), torch.randn(3, 5, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), torch.randn(3, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), torch.randn(3, 4, 3, 3)),
    "rnn": (lambda: Recurrent(DPRNN), torch.randn(3, 4, 3)),
    "lstm": (lambda: Recurrent(DPLSTM, num_layers=2, bidirectional=True), torch.randn(3, 4, 3)),
    "gru": (lambda: Recurrent(DPGRU, bias=False), torch.randn(3, 4, 3)),
    "attention": (lambda: Attention(add_bias_kv=True), torch.randn(3, 5, 4)),
    "functorch": (Scale, torch.randn(3, 2, 4)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_clipped_sums_of_every_layer_kind_are_exact(name, way):
    make, x = LAYERS[name]
    check_sums(make, x, way=way)


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("name", LAYERS)
def test_in_float32_they_are_exact_up_to_rounding(name, way):
    make, x = LAYERS[name]
    check_sums(make, x, way=way, dtype=torch.float32, tolerance=2e-5)


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("name", sorted({*LAYERS} - {"rnn", "lstm", "gru"}))
def test_in_bf16_they_are_as_exact_as_its_forward_is(name, way):
    """Eight bits of mantissa in activations and backprops; everything after them is float32."""
    make, x = LAYERS[name]
    check_sums(make, x, way=way, dtype=torch.bfloat16, tolerance=4e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", models.MODELS)
def test_reuse_tying_containers_and_frozen_parts(name, way):
    make, x = models.MODELS[name]
    check_sums(make, x, way=way)


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("how", ["relu", "+=", "several"])
def test_in_place_changes_after_a_layer(how, shape, way):
    check_sums(lambda: models.InPlaceAfter(how, True), torch.randn(shape), way=way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_is_exact(reentrant, tied, nested, way):
    check_sums(
        lambda: models.Checkpointed(reentrant, nested, tied),
        torch.randn(3, 2, 4),
        way=way,
        reference=models._Plain,
        batches=3,
    )


class TwiceCheckpointed(nn.Module):
    """One layer in two checkpointed blocks: the second to be recomputed finds what the first left."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.layer(torch.tanh(self.layer(x)))
        if self.reentrant:
            x = x.clone().requires_grad_()
        block = lambda h: torch.tanh(self.layer(h))  # noqa: E731
        h = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return torch.utils.checkpoint.checkpoint(self.layer, h, use_reentrant=self.reentrant)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_in_two_checkpointed_blocks_is_exact(reentrant, way):
    def reference(model):
        plain = TwiceCheckpointed(None).double()
        plain.load_state_dict(model.state_dict())
        return plain

    check_sums(
        lambda: TwiceCheckpointed(reentrant), torch.randn(3, 2, 4), way=way, reference=reference, batches=3
    )


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("style", ["flat", "per_layer", "automatic", "adaptive"])
@pytest.mark.parametrize("weigh", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("make", [models.TiedHead, models.language], ids=["tied", "plain"])
def test_clipping_styles_and_sample_weights(make, weigh, style, way):
    check_sums(make, IDS, way=way, style=style, weigh=weigh)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", [True, False], ids=["wrapped", "hooks"])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_reductions_and_wrapping(loss_reduction, wrap, way):
    check_sums(models.TiedHead, IDS, way=way, loss_reduction=loss_reduction, wrap=wrap)


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("layout", ["one", "two", "four", "device+cpu"])
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (models.convolutional, torch.randn(3, 2, 4, 4)),
        (models.language, IDS),
        (models.Branches, torch.randn(3, 4)),
    ],
    ids=["images", "text", "branches"],
)
def test_layers_on_several_devices(make, x, layout, way):
    layers = 3 if make is models.convolutional else 4
    if layout == "four" and layers < 4:
        layout = "two"
    check_sums(
        make,
        x,
        way=way,
        dtype=torch.float32,
        tolerance=2e-5,
        place=lambda model: spread(model, devices_for(layout)),
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_whose_children_lie_elsewhere(way):
    def place(model):
        devices = devices_for("two")
        spread(model, devices, ["block", "head"])
        model.token.data = model.token.data.to(devices[0])

    check_sums(models.Root, torch.randn(3, 3, 4), way=way, dtype=torch.float32, tolerance=2e-5, place=place)


@pytest.mark.parametrize("way", ["bk", "ghost"])
def test_batch_in_the_second_dimension(way):
    make = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))  # noqa: E731
    check_sums(make, torch.randn(6, 3, 4), way=way, batch_dim=1)


class Positions(nn.Module):
    """GPT-2's: position ids `[1, T]` for the whole batch; here the table of positions is the head as well."""

    def __init__(self, tied):
        super().__init__()
        self.tokens, self.places = nn.Embedding(6, 4, padding_idx=0), nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.places.weight

    def forward(self, ids):
        place = torch.arange(ids.shape[1])[None]
        return self.head(torch.tanh(self.tokens(ids) + self.places(place)))


class Heads(nn.Module):
    """A table that is looked up twice and used as head twice, with a padding entry that heads still train."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 4, padding_idx=0)
        self.again = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.again.weight = self.tokens.weight

    def forward(self, ids):
        h = torch.tanh(self.tokens(ids) * self.again(ids.flip(1)))
        return [self.head(h), self.head(torch.sin(h[:, :2]))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "make", [lambda: Positions(False), lambda: Positions(True), Heads], ids=["positions", "tied", "heads"]
)
def test_tables_that_are_looked_up_and_multiplied_with(make, way):
    check_sums(make, IDS, way=way)
