"""Real models on real GPUs: two devices give one device's numbers, in every precision; the host is never waited for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.testing import accelerators

pytestmark = pytest.mark.gpu(2)

B, T, CLIP = 4, 64, 0.5


class GPT(nn.Module):
    """A decoder in the shape of GPT-2 small (fewer layers), position ids `[1, T]`, tied head."""

    def __init__(self, vocabulary: int = 5000, width: int = 768, heads: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(T, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x.to(next(block.parameters()).device))
        return self.head(self.norm(x.to(self.norm.weight.device)))

    def place(self, devices: list[torch.device]) -> GPT:
        self.to(devices[0])
        for i, block in enumerate(self.blocks):
            block.to(devices[i * len(devices) // len(self.blocks)])
        return self


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class ResNet(nn.Module):
    """A residual network with GroupNorm and in-place activations, in the shape of ResNet's first stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.ReLU(inplace=True)
        )
        self.stages = nn.ModuleList(Residual(c, 2 * c) for c in (64, 128, 256))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x.to(next(stage.parameters()).device))
        return self.head(x.mean((2, 3)).to(self.head.weight.device))

    def place(self, devices: list[torch.device]) -> ResNet:
        self.to(devices[0])
        self.stages[2].to(devices[-1])
        self.head.to(devices[-1])
        return self


class Residual(nn.Module):
    def __init__(self, c: int, p: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, p, 3, 2, 1, bias=False), nn.GroupNorm(32, p)
        self.conv2, self.norm2 = nn.Conv2d(p, p, 3, 1, 1, bias=False), nn.GroupNorm(32, p)
        self.short, self.relu = nn.Conv2d(c, p, 1, 2, bias=False), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.short(x)
        return self.relu(out)


def batch(kind: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "gpt":
        return torch.randint(5000, (B, T), generator=generator), torch.randint(
            5000, (B, T), generator=generator
        )
    return torch.randn(B, 3, 64, 64, generator=generator), torch.randint(10, (B,), generator=generator)


def build(kind: str) -> GPT | ResNet:
    torch.manual_seed(0)
    return GPT() if kind == "gpt" else ResNet()


def train(
    kind: str,
    devices: list[torch.device],
    dtype: torch.dtype,
    *,
    steps: int,
    generator_on: torch.device,
    noise: float,
) -> tuple[list[torch.Tensor], DPOptimizer]:
    module = GradSampleModule(build(kind).to(dtype).place(devices))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        expected_batch_size=B,
        generator=torch.Generator(generator_on).manual_seed(1),
    )
    for step in range(steps):
        x, y = batch(kind, step)
        optimizer.zero_grad()
        output = module(x.to(devices[0], dtype if x.is_floating_point() else None))
        loss = nn.functional.cross_entropy(output.flatten(0, -2).float(), y.flatten().to(output.device))
        loss.backward()
        optimizer.step()
    return [p.detach().cpu().double() for p in module.parameters()], optimizer


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
@pytest.mark.parametrize("generator_index", [0, 1])
def test_two_gpus_give_one_gpus_parameters_with_noise(kind, generator_index):
    devices = accelerators(2)
    one, _ = train(kind, devices[:1], torch.float32, steps=5, generator_on=devices[0], noise=0.1)
    two, _ = train(kind, devices, torch.float32, steps=5, generator_on=devices[generator_index], noise=0.1)
    assert max((a - b).abs().max().item() for a, b in zip(one, two, strict=True)) < 1e-5


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_noise_alone_is_bit_identical_on_two_gpus(kind):
    devices = accelerators(2)

    def noise(over: list[torch.device], where: torch.device) -> list[torch.Tensor]:
        module = GradSampleModule(build(kind).place(over))
        optimizer = DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=1.0),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
            generator=torch.Generator(where).manual_seed(1),
        )
        x, _ = batch(kind, 0)
        module(x[:0].to(over[0])).sum().backward()
        optimizer.step()
        return [p.grad.cpu() for p in module.parameters()]

    one, two, swapped = noise(devices[:1], devices[0]), noise(devices, devices[0]), noise(devices, devices[1])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, swapped, strict=True))


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_per_sample_gradients_equal_a_float64_loop(kind):
    devices = accelerators(2)
    reference = build(kind).double()
    module = GradSampleModule(copy.deepcopy(reference).place(devices))
    x, y = batch(kind, 0)
    x = x.double() if x.is_floating_point() else x
    output = module(x.to(devices[0]))
    nn.functional.cross_entropy(output.flatten(0, -2), y.flatten().to(output.device)).backward()
    reference = reference.place(devices[:1])
    for i in range(B):
        output = reference(x[i : i + 1].to(devices[0]))
        loss = nn.functional.cross_entropy(output.flatten(0, -2), y[i : i + 1].flatten().to(output.device))
        for p, g in zip(
            module.parameters(), torch.autograd.grad(loss, list(reference.parameters())), strict=True
        ):
            assert (p.grad_sample[i].cpu() - g.cpu()).abs().max() < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tf32", [False, True])
def test_one_more_sample_moves_the_sum_by_at_most_c_on_gpus(dtype, tf32):
    """I1 where kernels may round to TF32: norms and sums must not."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    devices = accelerators(2)
    module = GradSampleModule(build("gpt").to(dtype).place(devices), loss_reduction="sum")
    x, y = batch("gpt", 0)

    def clipped_sum(rows: int) -> torch.Tensor:
        optimizer = DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1),
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            expected_batch_size=None,
            loss_reduction="sum",
        )
        output = module(x[:rows].to(devices[0]))
        target = y[:rows].flatten().to(output.device)
        nn.functional.cross_entropy(output.flatten(0, -2).float(), target, reduction="sum").backward()
        optimizer.clip_and_accumulate()
        total = torch.cat([p.summed_grad.flatten().cpu().double() for p in optimizer.params])
        optimizer.zero_grad()
        return total

    # the same kernels on 1 row and on none: what one sample adds is its clipped gradient
    assert clipped_sum(1).norm().item() <= CLIP * (1 + 1e-6)
    assert clipped_sum(1).norm().item() > CLIP * (1 - 1e-4)


def test_backward_and_step_do_not_wait_for_the_gpus():
    devices = accelerators(2)
    module = GradSampleModule(build("gpt").place(devices))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
    )
    x, y = (t.to(devices[0]) for t in batch("gpt", 0))
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(module(x).flatten(0, -2), y.flatten())
        torch.cuda.set_sync_debug_mode(
            "default" if step == 0 else "error"
        )  # the first batch compares with autograd once
        try:
            loss.backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_device_map_models_train(request):
    """Accelerate's dispatch moves inputs inside the patched forward, after hooks saw them; the tied head included."""
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    devices = accelerators(2)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=128, n_head=4, vocab_size=500, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config)
    mapped = copy.deepcopy(plain)
    mapped.tie_weights()
    device_map = {"transformer.wte": 0, "transformer.wpe": 0, "lm_head": 0, "transformer.ln_f": 1}
    device_map |= {f"transformer.h.{i}": int(i >= 2) for i in range(4)}
    mapped = accelerate.dispatch_model(mapped, device_map)
    ids = torch.randint(500, (3, 16), generator=torch.Generator().manual_seed(0))

    def samples(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
        module = GradSampleModule(model)
        module(ids.to(device), labels=ids.to(device)).loss.backward()
        return {name: p.grad_sample.cpu() for name, p in model.named_parameters()}

    ours, reference = samples(mapped, devices[0]), samples(plain.to(devices[0]), devices[0])
    assert ours.keys() == reference.keys()
    for name, expected in reference.items():
        assert torch.allclose(ours[name], expected, atol=1e-5), name
