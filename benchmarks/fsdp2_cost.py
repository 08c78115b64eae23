"""What private training of a sharded model costs: time and peak memory of a step, against ordinary FSDP2 in the same run.

    torchrun --nproc_per_node=2 benchmarks/fsdp2_cost.py --out out/fsdp2            # a 1.1-billion Llama shape on GPUs, NCCL
    torchrun --nproc_per_node=2 benchmarks/fsdp2_cost.py --tiny --out out/fsdp2     # a smoke run; also on CPUs, gloo

Parameters and optimizer state are float32 and sharded, layers compute in bf16 (on a CPU in float32), AdamW steps. Writes a table
(standard output) and results.json. Weights are random: cost does not depend on them.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed.fsdp import fsdp2_wrap

GOALS = {"lora": 1.08, "full": 1.20}


class Shape(NamedTuple):
    """Of a Llama: grouped-query attention, gated MLP, RMSNorm, no biases."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


LLAMA = Shape(2048, 5632, 22, 32, 4, 32000)  # 1.1 billion parameters
TINY = Shape(64, 128, 2, 4, 2, 128)


class LoRA(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = s.heads, s.kv_heads
        kv = s.width // s.heads * s.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.q, self.out = (nn.Linear(s.width, s.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(s.width, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(s.width, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = nn.RMSNorm(s.width), nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(kind: str, shape: Shape, device: torch.device) -> nn.Module:
    """The same weights on every rank; "lora" trains rank 16 beside q and v."""
    torch.manual_seed(0)
    with device:
        model = Llama(shape)
        if kind == "lora":
            model.requires_grad_(False)
            for block in model.blocks:
                block.q, block.v = LoRA(block.q, 16), LoRA(block.v, 16)
    return model


def token_mean(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Each sequence's mean over its tokens."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1) if reduction == "none" else losses.mean()


def make_step(
    mode: str, kind: str, shape: Shape, ids: Tensor, options: argparse.Namespace
) -> Callable[[], None]:
    """A function that runs one step of `mode`."""
    model = make_model(kind, shape, ids.device)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trainable, lr=1e-4)
    precision = (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
        if ids.device.type == "cuda"
        else {}
    )
    model = fsdp2_wrap(model, optimizer, **precision)
    criterion: Any = token_mean
    if mode != "ordinary":
        records = TensorDataset(ids.cpu().repeat(dist.get_world_size(), 1))
        model, optimizer, *more = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=token_mean,
            data_loader=DataLoader(records, len(ids), sampler=DistributedSampler(records)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        criterion = more[0] if mode == "ghost_fsdp" else token_mean

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(ids)[:, :-1], ids[:, 1:]).backward()
        optimizer.step()

    return step


def measure(step: Callable[[], None], device: torch.device, steps: int) -> dict[str, float]:
    """Median time of a step and peak memory, of the slowest and the fullest rank."""
    for _ in range(3):
        step()
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        step()
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    worst = torch.tensor([statistics.median(times), peak], device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {"ms": float(worst[0]), "gib": float(worst[1])}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="lora,full")
    parser.add_argument("--modes", default="ordinary,bk,ghost_fsdp")
    parser.add_argument("--batch", type=int, default=8, help="sequences on each rank")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences")
    parser.add_argument("--out", type=Path, default=Path("out/fsdp2"))
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    shape = TINY if options.tiny else LLAMA
    length = min(options.length, 16) if options.tiny else options.length
    ids = torch.randint(
        0, shape.vocabulary, (options.batch, length), generator=torch.Generator().manual_seed(rank)
    ).to(device)
    rows: list[dict[str, Any]] = []
    for kind in options.kinds.split(","):
        for mode in options.modes.split(","):
            row: dict[str, Any] = {"kind": kind, "mode": mode}
            try:
                row |= measure(make_step(mode, kind, shape, ids, options), device, options.steps)
            except Exception as error:  # a mode that cannot run is a row of the table
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")
            rows.append(row)
            if rank == 0:
                say(row, rows)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    if rank == 0:
        about = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(0) if on_gpu else platform.processor(),
            "ranks": dist.get_world_size(),
            "batch on each rank": options.batch,
            "length": length,
            "shape": shape._asdict(),
            "goals": GOALS,
        }
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    dist.destroy_process_group()
    return int(any("error" in row for row in rows))


def say(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line of the table, with ratios to ordinary FSDP2."""
    base = next((r for r in rows if r["kind"] == row["kind"] and r["mode"] == "ordinary" and "ms" in r), None)
    line = f"{row['kind']:5s} {row['mode']:11s}"
    if "error" in row:
        line += f" {row['error']}"
    else:
        line += f" {row['ms']:9.1f} ms {row['gib']:7.2f} GiB"
        if base is not None:
            line += f"  {row['ms'] / base['ms']:5.2f} x time"
            line += f" {row['gib'] / base['gib']:5.2f} x memory" if base["gib"] else ""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
