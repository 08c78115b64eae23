"""What runs on each rank in the tests of sharded checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus import PrivacyEngine
from opacus.distributed.fsdp import fsdp2_wrap
from opacus.tests.fsdp_cases import build, full, loss_of, mesh_of, parameters_of
from opacus.tests.fsdp_front_cases import adamw, loader


class Run:
    """A private run with AdamW, noise, and dropout-like use of torch's generator."""

    def __init__(
        self,
        kind: str = "fsdp",
        *,
        seed: int = 0,
        wrap_model: bool = True,
        lora: bool = False,
        mode: str = "bk",
    ) -> None:
        torch.manual_seed(seed + dist.get_rank())
        data = loader(seed=seed)
        self.inner = build(lora=lora)
        optimizer, self.schedule = adamw(self.inner)
        fsdp2_wrap(self.inner, optimizer, mesh=mesh_of(kind))
        self.engine = PrivacyEngine(accountant="rdp")
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.inner,
            optimizer=optimizer,
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=0.3,
            noise_generator=torch.Generator().manual_seed(seed),
            grad_sample_mode=mode,
            wrap_model=wrap_model,
        )
        self.model = self.module if wrap_model else self.inner
        self.noise: list[Tensor] = []

    def train(self, steps: int) -> None:
        """`steps` within an epoch of 4, which goes on where it was broken off."""
        batches = iter(self.loader)
        for _ in range(steps):
            ids, _ = next(batches)
            self.optimizer.zero_grad()
            loss_of(self.model, ids, "mean").backward()
            self.optimizer.step()
            self.noise.append(
                full(self.inner.unused.weight.grad).clone()
            )  # an unused layer's gradient is noise
        self.schedule.step()

    def save(self, path: str, **more: Any) -> None:
        self.engine.save_checkpoint(
            path=path,
            module=self.module,
            optimizer=self.optimizer,
            checkpoint_dict={"epoch": 1, "schedule": self.schedule.state_dict()},
            **more,
        )

    def load(self, path: str) -> dict[str, Any]:
        found = self.engine.load_checkpoint(path=path, module=self.module, optimizer=self.optimizer)
        self.schedule.load_state_dict(found["schedule"])
        return found

    def result(self) -> dict[str, Any]:
        named = {id(p): name for name, p in self.inner.named_parameters()}
        return {
            "parameters": parameters_of(self.inner),
            "moments": {
                named[id(p)]: full(state["exp_avg_sq"]).clone() for p, state in self.optimizer.state.items()
            },
            "steps": len(self.engine.accountant),
            "epsilon": self.engine.get_epsilon(1e-5),
            "noise": self.noise,
            "lr": [group["lr"] for group in self.optimizer.param_groups],
        }


def start(path: str, kind: str = "fsdp", wrap_model: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train 2 steps, save, train 2 more: what it was when it was saved, and in the end."""
    run = Run(kind, wrap_model=wrap_model)
    run.train(2)
    run.save(path)
    saved = run.result()
    saved["noise"] = list(run.noise)
    run.train(2)
    return saved, run.result()


def resume(
    path: str, kind: str = "fsdp", wrap_model: bool = True, steps: int = 2
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the saved run was, seeded otherwise: after loading, and after 2 more steps."""
    run = Run(kind, seed=77, wrap_model=wrap_model)
    found = run.load(path)
    assert found["epoch"] == 1
    loaded = run.result()
    run.train(steps)
    return loaded, run.result()


def move_on(path: str, kind: str) -> list[Tensor]:
    """Resume, train and save again in place: the noise drawn."""
    run = Run(kind, seed=5)
    run.load(path)
    run.train(2)
    run.save(path)
    return run.noise


def seeds(path: str, kind: str) -> tuple[int, int, int]:
    """Base, first and last seed of the run after loading."""
    run = Run(kind, seed=5)
    run.load(path)
    stream = run.optimizer.noise_stream()
    return stream.base, stream.offset, stream.offset + stream.span


def refused(path: str, what: str) -> tuple[str, bool]:
    """The message of a load (or save) that must fail; whether the parameters are as they were."""
    run = Run(lora=what == "lora")
    if what == "wider":
        run.inner.head = nn.Linear(5, 12)
    before = {name: full(p).clone() for name, p in run.inner.named_parameters()}
    try:
        if what == "unsaveable":
            run.save(path, torch_save_kwargs={"pickle_protocol": -7})
        elif what == "to a file":
            run.save(f"{path}-file")
        else:
            run.load(path)
    except ValueError as error:
        after = {name: full(p) for name, p in run.inner.named_parameters()}
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "", False
