"""`bk` and `ghost` on two real GPUs, with the shapes people train: the clipped sum of a loop over samples in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opacus.grad_sample.utils import wrap_model
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.testing import accelerators
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

pytestmark = pytest.mark.gpu(2)

B, T = 4, 96
# largest difference of the clipped sum, relative to its norm
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}


@pytest.fixture(autouse=True)
def full_precision():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def build(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":  # tied head, position ids [1, T], Conv1D
        config = transformers.GPT2Config(
            n_layer=4, n_embd=128, n_head=4, vocab_size=500, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return transformers.GPT2LMHeadModel(config)
    if kind == "bert":
        config = transformers.BertConfig(
            num_hidden_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            intermediate_size=256,
            vocab_size=500,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
        return transformers.BertForSequenceClassification(config)
    if kind == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            vocab_size=500,
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.ViTConfig(
        num_hidden_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=64,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    return transformers.ViTForImageClassification(config)


def halves(model: nn.Module, devices: list[Any]) -> dict[str, Any]:
    """A device map: the first half of the layers with the embeddings, the second half with what follows them."""
    stack = max(
        (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)),
        key=lambda name: sum(p.numel() for p in model.get_submodule(name).parameters()),
    )
    tied = getattr(model, "_tied_weights_keys", None) and model.config.tie_word_embeddings
    found: dict[str, Any] = {}

    def assign(prefix: str, module: nn.Module) -> None:
        before = True
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path == stack:
                for i in range(len(child)):
                    found[f"{path}.{i}"] = devices[2 * i // len(child)]
                before = False
            elif stack.startswith(f"{path}."):
                assign(f"{path}.", child)
                before = False
            else:
                found[path] = devices[0] if before or (tied and path == "lm_head") else devices[1]

    assign("", model)
    return found


def spread(model: nn.Module, devices: list[torch.device]) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    names = [device.index if device.type == "cuda" else str(device) for device in devices]
    return accelerate.dispatch_model(model, halves(model, names), main_device=names[0], force_hooks=True)


def inputs(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        return torch.randn(B, 3, 64, 64, generator=generator), torch.randint(10, (B,), generator=generator)
    ids = torch.randint(500, (B, T), generator=generator)
    return ids, torch.randint(2, (B,), generator=generator) if kind == "bert" else ids


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """`[B]`."""
    logits = model(x).logits
    y = y.to(logits.device)
    if logits.dim() == 2:
        return nn.functional.cross_entropy(logits, y, reduction="none")
    each = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none")
    return each.view(len(y), -1).mean(1)


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    found = []
    for i in range(B):
        model.zero_grad()
        losses(model, x[i : i + 1], y[i : i + 1]).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def check_clipped_sum(kind: str, mode: str, dtype: torch.dtype, devices: list[torch.device]) -> None:
    model = build(kind).to(dtype)
    x, y = (t.to(devices[0]) for t in inputs(kind))
    reference = copy.deepcopy(model).to(devices[0], torch.float64)
    grads = per_sample(reference, x.double() if x.is_floating_point() else x, y)
    norms = [torch.stack([g.norm() for g in grad.values()]).norm() for grad in grads]
    clip = torch.stack(norms).median().item()
    expected = {
        name: sum(min(1.0, clip / n.item()) * grad[name] for grad, n in zip(grads, norms, strict=True))
        for name in grads[0]
    }
    model = spread(model, devices)
    assert len({p.device for p in model.parameters()}) == len(set(devices))
    options = {"max_grad_norm": clip} if mode == "ghost" else {}
    hooks = wrap_model(model, mode, False, loss_reduction="sum", **options)
    kind_of = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
    optimizer = kind_of(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    if mode == "bk":
        optimizer.attach_book(hooks.policy)
    x = x.to(dtype) if x.is_floating_point() else x
    for step in range(3):  # the first compares with autograd, the others take the short way
        optimizer.zero_grad()
        loss_B = losses(model, x, y)
        if mode == "bk":
            if step == 2 and devices[0].type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss_B.sum().backward()
                optimizer.clip_and_accumulate()
            finally:
                if devices[0].type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        else:
            DPTensorFastGradientClipping(hooks, optimizer, loss_B, "sum").backward()
            optimizer.clip_and_accumulate()
        found = {name: p.summed_grad for name, p in model.named_parameters()}
        size = torch.stack([e.norm() for e in expected.values()]).norm().item()
        for name, total in found.items():
            wanted = expected.get(name)
            wanted = torch.zeros_like(total, dtype=torch.float64) if wanted is None else wanted
            difference = (total.to(devices[0], torch.float64) - wanted.to(devices[0])).norm().item()
            assert difference <= TOLERANCE[dtype] * size, (name, step, difference / size)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mode", ["bk", "ghost"])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "vit"])
def test_the_clipped_sum_on_two_gpus_is_that_of_a_loop_over_samples(kind, mode, dtype):
    check_clipped_sum(kind, mode, dtype, accelerators(2))
