"""No sample's clipped gradient is longer than C by what floating point rounds: wide parameters, several uses, parts that cancel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.norms import row_norms
from opacus.tests.clipped_sums import ADAPTIVE, WAYS, Private

ROOM = 2.0**-22  # float64 finds the length of a float32 sum: nothing but the sum's own rounding is left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 255, 256, 257, 5000, 10**6, 5 * 10**6 + 3])
def test_norms_of_rows_err_by_less_than_the_clip_leaves_room_for(width, dtype):
    torch.manual_seed(0)
    rows = (torch.rand(2, width) + 0.5).to(dtype)
    true = torch.stack([row.double().square().sum().sqrt() for row in rows])
    found = row_norms(rows, torch.promote_types(dtype, torch.float32))
    assert (found.double() / true - 1).abs().max() < torch.finfo(torch.float32).eps


def test_norms_of_empty_and_of_infinite_rows():
    assert row_norms(torch.zeros(0, 1000)).shape == (0,)
    assert torch.equal(row_norms(torch.zeros(2, 0)), torch.zeros(2))
    rows = torch.ones(2, 1000)
    rows[1, 700] = torch.inf
    assert row_norms(rows)[1] == torch.inf


class Several(nn.Module):
    """A layer called several times; parts of the gradients that the calls find cancel."""

    def __init__(self, layer: nn.Module, calls: int) -> None:
        super().__init__()
        self.layer, self.calls = layer, calls

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.layer(x) for _ in range(self.calls)]


def clipped_length(private: Private, losses: Any) -> float:
    private.backward_of(losses)
    sums = private.sums()
    return sum(total.double().square().sum() for total in sums.values()).sqrt().item()


LAYERS = {
    "layer norm": (lambda: nn.LayerNorm(8), (1, 6, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (1, 8, 6)),
    "prelu": (lambda: nn.PReLU(8), (1, 8, 6)),
    "convolution": (lambda: nn.Conv1d(8, 8, 1), (1, 8, 6)),
    "linear": (lambda: nn.Linear(8, 8), (1, 6, 8)),
    "linear, one position": (lambda: nn.Linear(8, 8), (1, 8)),
}


@pytest.mark.parametrize("ratio", [1.0, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAYERS)
def test_calls_whose_gradients_cancel_are_not_clipped_too_little(kind, way, ratio):
    build, shape = LAYERS[kind]
    torch.manual_seed(0)
    private = Private(Several(build(), 2), way, loss_reduction="sum")
    for _ in range(3):  # with the verification, with what it taught, and again
        x, pull, rest = torch.randn(shape), torch.randn(shape), torch.randn(shape)
        one, other = private.run(x)
        length = clipped_length(private, (ratio * pull * (one - other) + rest * other).flatten(1).sum(1))
        assert 0 < length <= 1 + ROOM
        private.optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_calls_in_low_precision_are_clipped_as_one_gradient(way, dtype):
    torch.manual_seed(0)
    private = Private(Several(nn.Conv1d(8, 8, 3), 16).to(dtype), way, loss_reduction="sum")
    for _ in range(3):
        outputs = private.run(torch.randn(1, 8, 100).to(dtype))
        losses = sum((out.float() * torch.randn(out.shape)).flatten(1).sum(1) for out in outputs)
        assert 0.99 < clipped_length(private, losses) <= 1 + ROOM
        private.optimizer.zero_grad()


@pytest.mark.parametrize("ratio", [1.0, 1e4, 1e6, 1e7])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_lookups_of_one_entry_that_cancel_are_not_clipped_too_little(way, calls, ratio):
    torch.manual_seed(0)
    private = Private(Several(nn.Embedding(7, 5), calls), way, loss_reduction="sum")
    for _ in range(3):
        ids, pull = torch.tensor([[2, 4, 2, 2]]), ratio * torch.randn(1, 5)
        found = private.run(ids)
        losses = sum((pull * (out[:, 0] - out[:, 2]) + torch.randn(1, 5) * out[:, 3]).sum(1) for out in found)
        assert 0.5 < clipped_length(private, losses) <= 1 + ROOM
        private.optimizer.zero_grad()


@pytest.mark.parametrize("style", ["flat", "per_layer", "automatic", "adaptive"])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "bk"])
def test_a_wide_table_is_clipped_to_c(mode, style):
    torch.manual_seed(0)
    model, data = nn.Embedding(2000, 768), TensorDataset(torch.zeros(1, 1))
    module, optimizer, *_ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        loss_reduction="sum",
        clipping=style,
        **(ADAPTIVE if style == "adaptive" else {}),
    )
    (module(torch.randperm(2000)[None]) * torch.randn(1, 2000, 768)).sum().backward()
    optimizer.clip_and_accumulate()
    # automatic clipping divides by the norm and 0.01
    assert 0.9999 < model.weight.summed_grad.double().norm().item() <= 1 + ROOM


@pytest.mark.gpu(1)
@pytest.mark.parametrize("width", [1000, 10**6, 10**7 + 3])
def test_norms_of_rows_on_gpus_err_by_less_than_the_clip_leaves_room_for(width):
    from opacus.grad_sample.kernels import row_sq_norms

    torch.manual_seed(0)
    rows = torch.rand(2, width, device="cuda") + 0.5
    true = rows.double().square().sum(1).sqrt()
    for found in (row_norms(rows), row_sq_norms([rows])[0].sqrt()):
        assert (found.double() / true - 1).abs().max() < torch.finfo(torch.float32).eps


@pytest.mark.gpu(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "ratio"), [(torch.float32, 1.0), (torch.float32, 1e6), (torch.bfloat16, 1.0)]
)
def test_several_uses_on_a_gpu_are_not_clipped_too_little(dtype, way, ratio):
    torch.manual_seed(0)
    for build, shape in (*LAYERS.values(), (lambda: nn.Embedding(7, 8), None)):
        private = Private(Several(build(), 2).to("cuda", dtype), way, loss_reduction="sum")
        for _ in range(3):
            x = torch.tensor([[2, 4, 2, 2, 1, 0]]) if shape is None else torch.randn(shape).to(dtype)
            one, other = private.run(x.cuda())
            pull, rest = torch.randn_like(one), torch.randn_like(one)
            length = clipped_length(
                private, (ratio * pull * (one - other) + rest * other).float().flatten(1).sum(1)
            )
            assert 0 < length <= 1 + ROOM
            private.optimizer.zero_grad()
