"""Private LoRA fine-tuning of a model that is sharded over all ranks (FSDP2).

    torchrun --nproc_per_node=2 examples/fsdp2_lora.py            # on GPUs with NCCL, else on CPUs with gloo
    torchrun --nproc_per_node=4 examples/fsdp2_lora.py --replicas 2     # HSDP: two replicas of two shards

The model learns to continue sequences that count up by a step of their own, from records each of which is protected. Every rank
holds a part of each weight, draws its share of every Poisson batch, clips its own samples, and noises its own part.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed.fsdp import fsdp2_wrap

TOKENS, LENGTH = 16, 12


class LoRA(nn.Module):
    """A frozen linear layer, and a trainable product of two thin ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LoRA(nn.Linear(width, 3 * width)), LoRA(nn.Linear(width, width))
        self.up, self.down = LoRA(nn.Linear(width, 4 * width)), LoRA(nn.Linear(4 * width, width))
        for norm in (self.norm1, self.norm2):
            norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, width).requires_grad_(False)
        self.positions = nn.Embedding(LENGTH, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over the batch of each sequence's own mean; a rank's share of a batch may be empty."""
    logits = model(ids[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1).sum() / max(1, len(ids))


def sequences(records: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start, step = torch.randint(0, TOKENS, (2, records, 1), generator=generator)
    return (start + (1 + step % 3) * torch.arange(LENGTH)) % TOKENS


def main() -> float:
    """Train, and return the loss on the records at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.6)
    parser.add_argument("--save", help="folder for a checkpoint")
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(
        kind, (options.replicas, world // options.replicas), mesh_dim_names=("replica", "shard")
    )

    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    fsdp2_wrap(
        model, optimizer, mesh=mesh if options.replicas > 1 else mesh["shard"]
    )  # the optimizer follows

    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(sequences(2048)), batch_size=256)  # 256 over all ranks together
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=options.noise,
        max_grad_norm=1.0,
        grad_sample_mode="bk",
    )
    shown = sequences(2048)[rank::world][:64].to(device)
    for epoch in range(options.epochs):
        for (ids,) in loader:
            optimizer.zero_grad()
            loss_of(model, ids.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            loss = loss_of(model, shown)
        dist.all_reduce(loss)
        if rank == 0:
            epsilon = engine.get_epsilon(delta=1e-4)
            sys.stdout.write(
                f"epoch {epoch + 1}: loss {loss / world:.3f}, epsilon {epsilon:.2f} at delta 1e-4\n"
            )
    if options.save:
        engine.save_checkpoint(path=options.save, module=model, optimizer=optimizer)
    dist.destroy_process_group()
    return float(loss / world)


if __name__ == "__main__":
    main()
