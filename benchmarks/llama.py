"""Llama shapes with random weights, placed for the benchmark of replicas: on one GPU, over several, or sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SHAPES", "build", "losses", "parameters", "spread", "tensor_parallel_plan"]

# "tiny" is for a smoke run without GPUs
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000},
    "7b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000},
}  # fmt: skip
Place = Callable[[nn.Module], nn.Module]


def build(shape: str, task: str, device: torch.device, dtype: torch.dtype, place: Place) -> nn.Module:
    """The model of a task, the same on every rank.

    Args:
        shape: one of `SHAPES`.
        task: "full", "lora", or "lora-int8" (adapters on a base that torchao quantized).
        device: where weights are drawn.
        dtype: of the base; adapters are float32.
        place: puts the base where it belongs, before adapters are added.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cpu" if device.type not in ("cpu", "cuda") else device):
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    if task == "lora-int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    model = place(model)
    if task != "full":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        generator = torch.Generator().manual_seed(
            1
        )  # zeros would leave half of the adapters without gradient
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data.copy_(0.02 * torch.randn(p.shape, generator=generator))
    return model.train()


def spread(devices: list[torch.device], layers: int) -> Place:
    """Blocks in equal parts over `devices`, by a `device_map`; one device needs none."""
    if len(devices) == 1:
        return lambda model: model.to(devices[0])
    names = [str(device) for device in devices]
    where = {"model.embed_tokens": names[0], "model.rotary_emb": names[0]}
    where |= {f"model.layers.{i}": names[i * len(names) // layers] for i in range(layers)}
    where |= {"model.norm": names[-1], "lm_head": names[-1]}

    def place(model: nn.Module) -> nn.Module:
        from accelerate import dispatch_model

        return dispatch_model(model, where)

    return place


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that train."""
    return [p for p in model.parameters() if p.requires_grad]


def losses(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """`[B]`: each sample's mean over its tokens."""
    logits = model(input_ids=ids_BT, use_cache=False).logits
    targets = ids_BT[:, 1:].to(logits.device)
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.view(len(ids_BT), -1).mean(1)


def tensor_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """Attention and feed-forward matrices split by columns, then by rows; adapters follow the matrix they are added to."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        parts = name.split(".")
        if "lora_A" in parts:
            continue
        if any(part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") for part in parts):
            plan[name] = ColwiseParallel()
        elif any(part in ("o_proj", "down_proj") for part in parts):
            plan[name] = RowwiseParallel()
    return plan
