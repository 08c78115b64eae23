"""The models that the benchmark trains, and their losses per sample. Weights are random: cost does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Task"]


class Task(NamedTuple):
    """A model on its devices, its batch, and `model -> loss [B]`."""

    model: nn.Module
    losses: Callable[[nn.Module], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """24 layers of width 1024, 32000 tokens: 370 million parameters."""

    def __init__(
        self, vocabulary: int = 32000, width: int = 1024, heads: int = 16, layers: int = 24, length: int = 512
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x.to(block.norm1.weight.device))
        return self.head(self.norm(x))

    def shard(self, devices: list[torch.device]) -> GPT:
        n = len(self.blocks)
        self.tokens.to(devices[0])
        self.positions.to(devices[0])
        for i, block in enumerate(self.blocks):
            block.to(devices[i * len(devices) // n])
        self.norm.to(devices[-1])
        self.head.to(devices[-1])
        return self


def _tokens_loss(logits: Tensor, ids: Tensor) -> Tensor:
    targets = ids[:, 1:].to(logits.device)
    return (
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
        .view(len(ids), -1)
        .mean(1)
    )


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def gpt(devices: list[torch.device], dtype: torch.dtype) -> Task:
    """Full fine-tuning of a 370-million GPT, 16 sequences of 512 tokens."""
    model = GPT().to(dtype).shard(devices)
    ids = torch.randint(0, 32000, (16, 512), device=devices[0])
    return Task(model, lambda m: _tokens_loss(m(ids), ids), _sgd, 16)


def bert(devices: list[torch.device], dtype: torch.dtype) -> Task:
    """Full fine-tuning of BERT-base for classification, 32 sequences of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(num_labels=2)).to(devices[0], dtype)
    ids, labels = (
        torch.randint(0, 30000, (32, 128), device=devices[0]),
        torch.randint(0, 2, (32,), device=devices[0]),
    )
    return Task(
        model, lambda m: F.cross_entropy(m(input_ids=ids).logits.float(), labels, reduction="none"), _sgd, 32
    )


def vit(devices: list[torch.device], dtype: torch.dtype) -> Task:
    """Full fine-tuning of ViT-B/16 (its class token and positions are parameters of the embedding module), 32 images."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_labels=10)).to(devices[0], dtype)
    images = torch.randn(32, 3, 224, 224, device=devices[0], dtype=dtype)
    labels = torch.randint(0, 10, (32,), device=devices[0])
    return Task(
        model,
        lambda m: F.cross_entropy(m(pixel_values=images).logits.float(), labels, reduction="none"),
        _sgd,
        32,
    )


def lora(devices: list[torch.device], dtype: torch.dtype) -> Task:
    """LoRA r=16 on q and v of a 1.1-billion Llama, 16 sequences of 512 tokens."""
    from accelerate import dispatch_model
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        intermediate_size=5632,
        vocab_size=32000,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
    )
    with devices[0]:
        model = LlamaForCausalLM(config).to(dtype)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters).base_model.model
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.02)
    if len(devices) > 1:
        where = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
        where |= {f"model.layers.{i}": int(i >= 11) for i in range(22)}
        model = dispatch_model(model, where)
    else:
        model = model.to(devices[0])
    ids = torch.randint(0, 32000, (16, 512), device=devices[0])
    return Task(model, lambda m: _tokens_loss(m(input_ids=ids, use_cache=False).logits, ids), _adamw, 16)


MODELS = {"gpt": gpt, "bert": bert, "vit": vit, "lora": lora}
