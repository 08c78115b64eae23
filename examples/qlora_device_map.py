"""Private LoRA on an int8 base whose layers lie on several devices: `device_map`, torchao, PEFT, one `make_private`.

    pip install 'opacus[hf]' torchao
    python examples/qlora_device_map.py            # GPUs where there are two, else two emulated devices

Runs offline: a tiny Llama from a config, characters as tokens. For a real model replace the first block by
`AutoModelForCausalLM.from_pretrained(name, device_map="auto", quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))`.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import dispatch_model
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import LlamaConfig, LlamaForCausalLM

from opacus import PrivacyEngine
from opacus.testing import accelerators

TEXT = "she sells sea shells by the sea shore. the shells she sells are sea shells, i am sure. "
WIDTH, LAYERS, LENGTH = 64, 4, 24


def base(devices: list[torch.device]) -> LlamaForCausalLM:
    """A quantized Llama, half of its blocks on each device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    quantize_(model.model, Int8WeightOnlyConfig())
    first, last = devices[0], devices[-1]
    where = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}
    where |= {f"model.layers.{i}": devices[i * len(devices) // LAYERS] for i in range(LAYERS)}
    return dispatch_model(model, {name: str(device) for name, device in where.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    options = parser.parse_args()
    devices = accelerators(2)
    codes = torch.tensor([ord(c) for c in TEXT * 4])
    data = TensorDataset(codes.unfold(0, LENGTH, 1))

    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base(devices), lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    engine = PrivacyEngine()
    hooks, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=32),
        target_epsilon=options.epsilon,
        target_delta=1e-3,
        epochs=options.epochs,
        max_grad_norm=1.0,
        grad_sample_mode="bk",
        wrap_model=False,
    )
    for epoch in range(options.epochs):
        seen = []
        for (ids,) in loader:  # a Poisson sample, empty at times
            optimizer.zero_grad()
            loss = model(
                input_ids=ids, labels=ids
            ).loss  # rows are equally long: the mean over tokens is the mean over rows
            loss.backward()
            optimizer.step()
            seen += [loss.item()] if len(ids) else []
        print(
            f"epoch {epoch + 1}: loss {sum(seen) / max(1, len(seen)):.3f}, epsilon {engine.get_epsilon(1e-3):.2f}"
        )

    hooks.cleanup()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base(devices), folder)  # plain PEFT, no trace of privacy
    with torch.no_grad():
        difference = (loaded(ids).logits - model(ids).logits).abs().max() if len(ids) else torch.zeros(())
    print(
        f"{len(devices)} devices: {', '.join(map(str, devices))}; the saved adapter differs by {float(difference):.1g}"
    )


if __name__ == "__main__":
    main()
