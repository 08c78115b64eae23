"""Tiny language models for tests of adapters and device maps, and what a private step on them must come to.

The expected update is a loop over samples, each alone through the same model, clipped and added; never our own output.
Shapes: B samples, T positions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine

VOCABULARY, B, T, LAYERS = 40, 5, 7, 2
LENGTHS = (7, 4, 6, 3, 5)


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A Llama of two blocks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2(*, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A GPT-2 of two blocks: Conv1D layers, position ids `[1, T]`, tied head."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config).to(dtype)


def batch() -> dict[str, Tensor]:
    """Token ids and mask, `[B, T]`, of lengths that differ widely."""
    ids_BT = torch.randint(3, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(3))
    mask_BT = (torch.arange(T)[None] < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT}


def losses(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """`[B]`: each sample's mean over its own tokens."""
    logits = model(**inputs, use_cache=False).logits
    ids_BT, mask_BT = (inputs[name].to(logits.device) for name in ("input_ids", "attention_mask"))
    logits_BTV = logits[:, -ids_BT.shape[1] :][:, :-1].double()  # virtual tokens come first
    losses_BT = nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"
    ).view(len(ids_BT), -1)
    weight_BT = mask_BT[:, 1:]
    return (losses_BT * weight_BT).sum(1) / weight_BT.sum(1)


def shaken(model: nn.Module) -> nn.Module:
    """Trainable parameters moved at random: adapters start at zero, where gradients vanish. In training mode."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model.train()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def expected_sum(
    model: nn.Module, inputs: Mapping[str, Tensor] | None = None, clip: float | None = None
) -> tuple[dict[str, Tensor], float]:
    """Clipped sum of each parameter over samples taken alone, float64 on the CPU; and the bound, by default the median norm."""
    inputs = batch() if inputs is None else inputs
    parameters = trained(model)
    rows = []
    for i in range(len(inputs["input_ids"])):
        alone = {name: value[i : i + 1] for name, value in inputs.items()}
        grads = torch.autograd.grad(losses(model, alone).sum(), list(parameters.values()), allow_unused=True)
        rows.append(
            [
                (torch.zeros_like(p) if g is None else g).detach().double().cpu()
                for p, g in zip(parameters.values(), grads, strict=True)
            ]
        )
    return clipped_sum(list(parameters), rows, clip)


def clipped_sum(
    names: list[str], rows: list[list[Tensor]], clip: float | None = None
) -> tuple[dict[str, Tensor], float]:
    """Sum of `min(1, clip / norm)` times each row of gradients."""
    norms = [float(torch.cat([g.flatten() for g in row]).norm()) for row in rows]
    bound = sorted(norms)[len(norms) // 2] if clip is None else clip
    total = {
        name: sum(row[j] * min(1.0, bound / norm) for row, norm in zip(rows, norms, strict=True))
        for j, name in enumerate(names)
    }
    return total, bound  # type: ignore[return-value]


def make_private(model: nn.Module, clip: float, **options: Any) -> tuple[Any, Any, Any]:
    """What `make_private` returns for plain descent at rate 1, without noise, in mode "bk"."""
    loader = DataLoader(TensorDataset(torch.arange(B)), batch_size=B)
    settings: dict[str, Any] = {
        "grad_sample_mode": "bk",
        "wrap_model": False,
        "loss_reduction": "sum",
        **options,
    }
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained(model).values(), lr=1.0),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=clip,
        poisson_sampling=False,
        **settings,
    )


def private_sum(
    model: nn.Module,
    clip: float,
    inputs: Mapping[str, Tensor] | None = None,
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] = losses,
    **options: Any,
) -> dict[str, Tensor]:
    """By how much one private step moved each parameter, float64 on the CPU."""
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    _, optimizer, _ = make_private(model, clip, **options)
    loss(model, batch() if inputs is None else inputs).sum().backward()
    optimizer.step()
    return {
        name: (before[name] - p.detach()).double().cpu()
        for name, p in model.named_parameters()
        if name in before
    }


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of the sum."""
    assert found.keys() == wanted.keys()
    top = max(float(want.abs().max()) for want in wanted.values())
    assert top > 0
    return max(float((found[name] - want).abs().max()) for name, want in wanted.items()) / top
