"""Under autocast a layer's input is kept as it was multiplied: the copy in reduced precision, of which autograd takes gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus import PrivacyEngine
from opacus.grad_sample import GRAD_SAMPLERS, NORM_SAMPLERS, GradSampleModule
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.captured import Captured

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 5), (4, 3, 6)),
    "one position": (nn.Linear(6, 5), (4, 6)),
    "convolution": (nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 5)),
}


class Seen:
    """A policy that notes what calls were captured with."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def begin(self) -> None: ...

    def receive(self, path: str, slots: Sequence[Any], captured: Captured) -> None:
        self.inputs += captured.inputs

    def end(self) -> None: ...

    def discard(self) -> None: ...


def seen_by(layer: nn.Module, x: Tensor, autocast: bool = True) -> list[Tensor]:
    seen = Seen()
    capture = Capture(layer, seen, detach_weights=True)
    capture.attach()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x)
    out.float().sum().backward()
    capture.detach()
    return seen.inputs


@pytest.mark.parametrize("kind", ["linear", "one position"])
def test_a_multiplying_layer_is_captured_with_the_copy_that_it_multiplied(kind: str) -> None:
    layer, shape = LAYERS[kind]
    x = torch.randn(shape)
    (kept,) = seen_by(layer, x)
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, x.bfloat16())


@pytest.mark.parametrize("kind", LAYERS)
def test_without_autocast_nothing_is_cast(kind: str) -> None:
    layer, shape = LAYERS[kind]
    x = torch.randn(shape)
    (kept,) = seen_by(layer, x, autocast=False)
    assert torch.equal(kept, x)


def test_a_convolution_keeps_its_input_whose_gradients_stay_in_float32() -> None:
    x = torch.randn(4, 2, 5, 5)
    (kept,) = seen_by(nn.Conv2d(2, 3, 3), x)
    assert torch.equal(kept, x)


def test_a_layer_that_autocast_runs_in_float32_keeps_its_input() -> None:
    x = torch.randn(4, 3, 6)
    (kept,) = seen_by(nn.LayerNorm(6), x)
    assert torch.equal(kept, x)


def test_a_layer_with_a_forward_of_its_own_keeps_its_input() -> None:
    class Rounds(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.round(decimals=4))

    x = torch.randn(4, 6)
    (kept,) = seen_by(Rounds(6, 5), x)
    assert torch.equal(kept, x)


@pytest.mark.parametrize("samplers", [GRAD_SAMPLERS, NORM_SAMPLERS])
def test_a_users_own_sampler_is_given_inputs_as_they_come(
    samplers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(samplers, nn.Linear, lambda layer, activations, backprops: {})
    x = torch.randn(4, 3, 6)
    (kept,) = seen_by(nn.Linear(6, 5), x)
    assert torch.equal(kept, x)


def test_hugging_faces_conv1d_is_captured_with_the_copy_too() -> None:
    utilities = pytest.importorskip("transformers.pytorch_utils", reason="needs Transformers (extra hf)")
    x = torch.randn(4, 3, 6)
    (kept,) = seen_by(utilities.Conv1D(5, 6), x)
    assert torch.equal(kept, x.bfloat16())


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_under_autocast_are_float32(transposed: bool) -> None:
    """The layer is linear in its input: kernel element (k, l) gets the sum over positions of backprop times shifted input."""
    x = torch.randn(5, 2, 6, 6)
    layer = nn.ConvTranspose2d(2, 3, 3) if transposed else nn.Conv2d(2, 3, 3)
    weight = torch.randn(5, 3, *((8, 8) if transposed else (4, 4))).bfloat16()
    private = GradSampleModule(layer, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        out = private(x)
    (out.float() * weight.float()).sum().backward()
    wide, narrow = (weight.double(), x.double()) if transposed else (x.double(), weight.double())
    patches = wide.unfold(2, 3, 1).unfold(3, 3, 1)  # [B, channels, rows, columns, 3, 3]
    expected = torch.einsum("bors,birskl->boikl", narrow, patches)
    assert layer.weight.grad_sample.dtype == torch.float32
    assert torch.allclose(layer.weight.grad_sample.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_and_input_gradients_under_autocast_are_those_of_the_bare_layer(kind: str) -> None:
    layer, shape = LAYERS[kind]
    found = []
    for private in (False, True):
        x = torch.arange(torch.Size(shape).numel()).reshape(shape).div(7).sin().requires_grad_()
        model = GradSampleModule(layer) if private else layer
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().sum().backward()
        if private:
            model.to_standard_module()
        layer.zero_grad()
        found.append((out.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["bk", "hooks", "ghost"])
def test_clipped_sums_under_autocast_follow_from_the_rounded_input(mode: str) -> None:
    b, t, d, p, bound = 5, 3, 6, 4, 0.5
    x, weight = torch.randn(b, t, d), torch.randn(b, t, p).bfloat16()
    layer = nn.Linear(d, p, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    data = torch.utils.data.TensorDataset(x, weight.float())

    def loss_of(out: Tensor, weight: Tensor) -> Tensor:
        return (out.float() * weight.float()).sum((1, 2))

    class Criterion(nn.Module):
        reduction = "sum"

        def forward(self, out: Tensor, weight: Tensor) -> Tensor:
            per_sample = loss_of(out, weight)
            return per_sample if self.reduction == "none" else per_sample.sum()

    criterion: Any = Criterion()
    made = PrivacyEngine().make_private(
        module=layer,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=b),
        criterion=criterion,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        grad_sample_mode=mode,
        loss_reduction="sum",
        poisson_sampling=False,
    )
    model, private = made[0], made[1]
    criterion = made[2] if mode == "ghost" else criterion
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        loss = criterion(out, weight)
    loss.backward()
    private.step()
    # the gradient of a linear loss: backprops are its weights, exact in bfloat16; inputs as they were multiplied
    rows = torch.einsum("btp,btd->bpd", weight.double(), x.bfloat16().double())
    norms = rows.flatten(1).norm(dim=1)
    factor = (bound / norms).clamp(max=1)
    expected = torch.einsum("b,bpd->pd", factor, rows)
    grad = next(model.parameters()).grad
    assert grad is not None
    assert torch.allclose(grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_under_autocast_half_the_bytes_of_an_input_are_kept() -> None:
    b, t, d = 4, 8, 64
    layer = nn.Linear(d, 3)
    private = GradSampleModule(layer)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        private(torch.randn(b, t, d))
    inputs = {tensor.data_ptr(): tensor.nbytes for tensor in kept if tensor.shape == (b, t, d)}
    assert sum(inputs.values()) == 2 * b * t * d
