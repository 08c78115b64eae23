"""What each rank of `replicas.py` does: one layout, one task, one measurement. Prints one line of JSON per result."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from llama import SHAPES, build, losses, parameters, spread, tensor_parallel_plan
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError

UPDATE_STEPS, UPDATE_ROWS, UPDATE_LENGTH = 5, 8, 64
TOLERANCE = (
    2e-3  # of the updates, relative to their largest entry: float32, other kernels, other orders of adding
)


class Rank:
    """Where this process stands, and which devices are its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.index, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.devices = [self._device(i) for i in self._numbers()]
        if self.devices[0].type == "cuda":
            torch.cuda.set_device(self.devices[0])
        if self.world > 1:
            # no device_id: the ranks of replicas have several devices each
            dist.init_process_group("gloo" if options.smoke else "nccl")

    def _numbers(self) -> list[int]:
        gpus, layout = self.options.gpus, self.options.layout
        if layout in ("single", "shared"):
            return [0]
        if layout == "one":
            return list(range(gpus))
        if layout in ("replicas", "prepared"):
            return [2 * self.index, 2 * self.index + 1]
        return [self.index]

    def _device(self, number: int) -> torch.device:
        if not self.options.smoke:
            return torch.device("cuda", number)
        if self.options.layout in ("replicas", "prepared", "one"):
            from opacus.testing import accelerators
            from opacus.testing.emulated_devices import register_gloo

            devices = accelerators(self.options.gpus)
            register_gloo()
            return devices[number]
        return torch.device("cpu")

    @property
    def sharded(self) -> bool:
        return self.options.layout in ("fsdp", "hsdp", "fsdp_tp")

    @property
    def data_rank(self) -> tuple[int, int]:
        """Which share of the batch is this rank's, of how many: tensor-parallel peers have the same."""
        return (
            (self.index // 2, self.world // 2)
            if self.options.layout == "fsdp_tp"
            else (self.index, self.world)
        )

    def say(self, **result: Any) -> None:
        names = ("layout", "task", "what")
        line = json.dumps({**{name: getattr(self.options, name) for name in names}, **result})
        sys.stdout.write(line + "\n")  # in one piece: ranks share the pipe
        sys.stdout.flush()

    def wait(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def model_of(rank: Rank, dtype: torch.dtype) -> nn.Module:
    """The task's model, placed; not sharded yet."""
    layers = SHAPES[rank.options.shape]["num_hidden_layers"]
    return build(rank.options.shape, rank.options.task, rank.devices[0], dtype, spread(rank.devices, layers))


def shard(rank: Rank, model: nn.Module, optimizer: Any) -> None:
    """FSDP2 over all ranks, in two groups of replicas, or by tensor-parallel pairs; the optimizer follows."""
    from torch.distributed.device_mesh import init_device_mesh

    from opacus.distributed.fsdp import fsdp2_wrap

    kind, half = rank.devices[0].type, rank.world // 2
    blocks = (type(next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")),)
    if rank.options.layout == "fsdp":
        mesh = init_device_mesh(kind, (rank.world,))
    elif rank.options.layout == "hsdp":
        mesh = init_device_mesh(kind, (2, half), mesh_dim_names=("replicate", "shard"))
    else:
        from torch.distributed.tensor.parallel import parallelize_module

        from opacus.distributed.fsdp import rebind, record

        both = init_device_mesh(kind, (half, 2), mesh_dim_names=("dp", "tp"))
        bound = record(model, optimizer)
        parallelize_module(model, both["tp"], tensor_parallel_plan(model))
        rebind(model, optimizer, bound)
        mesh = both["dp"]
    fsdp2_wrap(model, optimizer, units=blocks, mesh=mesh)


def make_private(
    rank: Rank, model: nn.Module, optimizer: Any, sigma: float, clip: float
) -> tuple[Any, Any, Any]:
    """`(model to call, optimizer to step, backward)`."""
    engine = PrivacyEngine(accountant="rdp")
    loader = DataLoader(TensorDataset(torch.arange(1024)), batch_size=8)
    settings: dict[str, Any] = {"noise_multiplier": sigma, "max_grad_norm": clip, "loss_reduction": "sum"}
    if rank.options.layout == "prepared":
        from accelerate import Accelerator

        from opacus.integrations.accelerate import prepare_private

        accelerator = Accelerator(cpu=rank.options.smoke)
        if rank.devices[0].type == "cuda":
            torch.cuda.set_device(rank.devices[0])  # Accelerate takes the one of the local rank
        prepared = prepare_private(accelerator, model, optimizer, loader, privacy_engine=engine, **settings)
        return prepared.model, prepared.optimizer, accelerator.backward
    if rank.options.layout in ("replicas", "shared"):
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

        model = DifferentiallyPrivateDistributedDataParallel(model)
    _, private, _ = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        grad_sample_mode="bk",
        wrap_model=False,
        **settings,
    )
    return model, private, lambda loss: loss.backward()


def batch(rank: Rank, rows: int, length: int, *, share: bool) -> Tensor:
    """Token ids, the same on every rank; or this rank's unequal share of them."""
    vocabulary = SHAPES[rank.options.shape]["vocab_size"]
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))
    if share:
        mine, of = rank.data_rank
        cuts = [0] + [min(rows, rows * (i + 1) // of + 1) for i in range(of - 1)] + [rows]
        ids = ids[cuts[mine] : cuts[mine + 1]]
    return ids.to(rank.devices[0])


def whole(p: Tensor) -> Tensor:
    """A copy of a parameter's values, float32 on the CPU."""
    p = p.detach()
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).to("cpu", torch.float32, copy=True)


def watched(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Adapters, or of a whole model its ends: 1 billion numbers need not be compared."""
    last = max(
        int(n.split("layers.")[1].split(".")[0]) for n, _ in model.named_parameters() if "layers." in n
    )
    for name, p in model.named_parameters():
        end = any(f"layers.{i}." in name for i in (0, last)) or "layers." not in name
        if p.requires_grad and ("lora_" in name or end):
            yield name, p


def update(rank: Rank) -> None:
    """Five steps without noise; compared with the file of one process."""
    model = model_of(rank, torch.float32)
    optimizer: Any = torch.optim.SGD(parameters(model), lr=0.5, momentum=0.9)
    if rank.sharded:
        shard(rank, model, optimizer)
    before = {name: whole(p) for name, p in watched(model)}
    called, optimizer, backward = make_private(rank, model, optimizer, sigma=0.0, clip=0.1)
    ids = batch(rank, UPDATE_ROWS, UPDATE_LENGTH, share=True)
    for _ in range(UPDATE_STEPS):
        optimizer.zero_grad()
        backward(losses(called, ids).sum())
        optimizer.step()
    with reshared(model):
        moved = {name: whole(p) - before[name] for name, p in watched(model)}
    if rank.options.save:
        torch.save(moved, rank.options.save)
        rank.say(ok=True, saved=len(moved))
        return
    wanted = torch.load(rank.options.compare, weights_only=True)
    top = max(float(w.abs().max()) for w in wanted.values())
    error = max(float((moved[name] - w).abs().max()) for name, w in wanted.items()) / top
    rank.say(
        rank=rank.index,
        devices=len(rank.devices),
        relative_error=error,
        ok=error < TOLERANCE and moved.keys() == wanted.keys(),
    )


@contextlib.contextmanager
def reshared(model: nn.Module) -> Iterator[None]:
    """Sharded parameters are read after resharding."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    yield


def noise(rank: Rank) -> None:
    """One step whose gradients are all zero: what moved the parameters is the noise, of std 1, the same on every replica."""
    model = model_of(rank, torch.float32)
    optimizer: Any = torch.optim.SGD(parameters(model), lr=1.0)
    if rank.sharded:
        shard(rank, model, optimizer)
    before = {name: whole(p) for name, p in watched(model)}
    called, optimizer, backward = make_private(rank, model, optimizer, sigma=2.0, clip=0.5)
    backward(0.0 * losses(called, batch(rank, UPDATE_ROWS, UPDATE_LENGTH, share=True)).sum())
    optimizer.step()
    with reshared(model):
        drawn = torch.cat([(whole(p) - before[name]).flatten() for name, p in watched(model)])
    std, n = float(drawn.std()), drawn.numel()
    digests: list[Any] = [None] * rank.world
    dist.all_gather_object(digests, float(drawn.double().sum()))
    alike = len(set(digests)) == 1
    within = 5 / (2 * n) ** 0.5 + 1e-5  # subtracting parameters rounds
    rank.say(rank=rank.index, std=std, numbers=n, alike=alike, ok=alike and abs(std - 1) < within)


def refusal(rank: Rank) -> None:
    """Both ranks on one GPU: an error that names it, on both, soon."""
    model = model_of(rank, torch.float32)
    optimizer = torch.optim.SGD(parameters(model), lr=1.0)
    start = time.time()
    try:
        make_private(rank, model, optimizer, 1.0, 1.0)
        rank.say(
            rank=rank.index,
            ok=rank.options.smoke,
            note="accepted (ranks share a CPU)" if rank.options.smoke else "accepted",
        )
    except ConfigurationError as error:
        seconds = time.time() - start
        named = "cuda:0" in str(error)
        rank.say(rank=rank.index, seconds=round(seconds, 2), ok=named and seconds < 10, message=str(error))


def speed(rank: Rank) -> None:
    """Median step and peak memory, ordinary then private, each on a model of its own."""
    for mode in ("ordinary", "private"):
        result = timed(rank, mode)
        if rank.index == 0:
            rank.say(mode=mode, **result)


def timed(rank: Rank, mode: str) -> dict[str, Any]:
    options = rank.options
    model = model_of(rank, torch.float32 if options.smoke else torch.bfloat16)
    make = torch.optim.SGD if options.task == "full" else torch.optim.AdamW
    optimizer: Any = make(parameters(model), lr=1e-4)
    if rank.sharded:
        shard(rank, model, optimizer)
    called: Any = model
    backward: Any = lambda loss: loss.backward()  # noqa: E731
    if mode == "private":
        called, optimizer, backward = make_private(rank, model, optimizer, 1.0, 1.0)
    elif rank.world > 1 and not rank.sharded:
        called = nn.parallel.DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
    ids = batch(rank, options.rows, options.length, share=False)
    seconds = []
    for step in range(options.steps + 3):
        if step == 3:
            for device in rank.devices:
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
        rank.wait()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        backward(losses(called, ids).sum())
        optimizer.step()
        rank.wait()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[3:])
    peak = [torch.cuda.max_memory_allocated(d) / 2**30 if d.type == "cuda" else 0.0 for d in rank.devices]
    every: list[Any] = [(median, peak)]
    if rank.world > 1:
        every = [None] * rank.world
        dist.all_gather_object(every, (median, peak))
    slowest = max(m for m, _ in every)
    rows = options.rows * (rank.data_rank[1] if rank.world > 1 else 1)
    del model, called, optimizer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "samples_per_second": rows / slowest,
        "step_ms": 1000 * slowest,
        "rows": rows,
        "peak_gib": [x for _, peaks in every for x in peaks],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layout", "task", "what", "shape"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("gpus", "rows", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--save")
    parser.add_argument("--compare")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rank = Rank(options)
    measure = {"update": update, "noise": noise, "refusal": refusal, "speed": speed}
    for what in options.what.split(","):
        options.what = what
        measure[what](rank)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rank.world > 1:
        dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
