"""What `accelerate_ranks_test` runs on each rank: training through `prepare_private` against one process on the union of the batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import accelerate
import peft
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.integrations.accelerate import prepare_private

ROWS, STEPS, C = 12, 3, 0.3


class Blocks(nn.Module):
    """Two blocks and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(ROWS, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (ROWS,), generator=generator),
    )


def accelerator_for(kind: str, **options: Any) -> accelerate.Accelerator:
    """An accelerator for this rank's group; Accelerate knows FSDP on accelerators only, so on CPUs it is told."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # the group is there already
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    assert accelerator.num_processes == dist.get_world_size()
    if kind == "fsdp2":
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False
        )
    return accelerator


def shares(rank: int, world: int) -> Iterator[slice]:
    """For each step, the rows of one rank; the ranks' shares differ in size, and one is empty."""
    cuts = ((0, 5), (0, 0), (0, ROWS)) if world == 2 else ()
    for start, cut in cuts:
        yield slice(start, cut) if rank == 0 else slice(cut, ROWS)


def train(model: Any, optimizer: Any, mine: Any, backward: Any) -> None:
    x, y = rows()
    for share in mine:
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(x[share]), y[share], reduction="sum"))
        optimizer.step()


def settings() -> dict[str, Any]:
    return {
        "noise_multiplier": 0.0,
        "max_grad_norm": C,
        "loss_reduction": "sum",
    }


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step that leaves state in the optimizer."""
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def update_error(kind: str, *, warm: bool) -> tuple[float, int]:
    """Largest difference of this rank's trained parameters from one process's; and steps accounted."""
    accelerator = accelerator_for(kind)
    model: Any = Blocks()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    if warm:
        warm_up(model, optimizer)
    engine = PrivacyEngine()
    plain = model
    loader = DataLoader(TensorDataset(*rows()), batch_size=ROWS)
    model, optimizer, _, _ = prepare_private(
        accelerator, model, optimizer, loader, privacy_engine=engine, **settings()
    )
    train(
        model, optimizer, shares(accelerator.process_index, accelerator.num_processes), accelerator.backward
    )
    wanted = one_process(warm)
    if hasattr(plain, "reshard"):
        plain.reshard()
    worst = 0.0
    for name, p in plain.named_parameters():
        found = p.full_tensor() if hasattr(p, "full_tensor") else p
        worst = max(worst, float((found.detach() - wanted[name]).abs().max()))
    return worst, len(engine.accountant)


def device_map_error(quantized: bool) -> tuple[float, int, int]:
    """LoRA on a Llama whose blocks lie on two devices of this rank; largest error of its first update, devices, steps."""
    from opacus.testing import accelerators
    from opacus.tests.adapter_models import batch, expected_sum, largest_error, llama, losses, shaken, trained

    def adapted(devices: list[torch.device] | None) -> nn.Module:
        model = llama(dtype=torch.float32 if quantized else torch.float64)
        if quantized:
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model.model, Int8WeightOnlyConfig())
        if devices is not None:
            first, last = map(str, devices)
            where = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
            accelerate.dispatch_model(
                model, where | {"model.layers.1": last, "model.norm": last, "lm_head": last}
            )
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return shaken(peft.get_peft_model(model, lora))

    wanted, clip = expected_sum(adapted(None))
    accelerator = accelerator_for("ddp")
    model = adapted(accelerators(2))
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    engine = PrivacyEngine()
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    prepared = prepare_private(
        accelerator,
        model,
        torch.optim.SGD(trained(model).values(), lr=1.0),
        loader,
        privacy_engine=engine,
        **{**settings(), "max_grad_norm": clip},
    )
    mine = slice(0, 3) if accelerator.process_index == 0 else slice(3, None)
    accelerator.backward(losses(prepared.model, {name: value[mine] for name, value in batch().items()}).sum())
    prepared.optimizer.step()
    found = {name: (before[name] - p.detach()).double().cpu() for name, p in trained(model).items()}
    devices = {p.device for p in trained(model).values()}
    return largest_error(found, wanted), len(devices), len(engine.accountant)


def one_process(warm: bool) -> dict[str, Tensor]:
    """One process on the union of the batches: plain torch, sample by sample."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if warm:
        warm_up(model, optimizer)
    x, y = rows()
    for _ in range(STEPS):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for i in range(ROWS):
            loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = float(torch.cat([g.flatten() for g in grads]).norm())
            for total, g in zip(sums, grads, strict=True):
                total += g * min(1.0, C / norm)
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}
