"""One private run that can be killed at any moment, for `checkpoint_test.py`: its processes are forked from this module.

A run trains a few epochs, saves as its case says, and goes on from its checkpoint where there is one. It is killed by
SIGKILL at the n-th function call, so that any moment, also within a write, can be hit, and hit again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.schedulers import ExponentialNoise, StepGradClip
from opacus.testing import devices_for, spread
from opacus.utils.batch_memory_manager import BatchMemoryManager

N, D, EPOCHS, BATCHES = 24, 3, 3, 4
DELTA = 1e-3
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 8.0,
    "min_clipbound": 0.05,
    "unclipped_num_std": 1.0,
}


# torch imports its compiler (seconds) with the first optimizer; forked processes then have it
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@dataclass(frozen=True)
class Case:
    """What is trained, and when it is saved.

    Attributes:
        layout: of devices, see `opacus.testing.layouts`; "cpu" for none.
        adam: Adam with a learning-rate schedule, or SGD with momentum.
        schedules: noise and clipping schedules.
        every: batches between checkpoints within an epoch; 0 saves at the end of an epoch only.
        physical: largest physical batch; 0 trains without `BatchMemoryManager`.
        own_streams: noise and batches from generators of their own, or from torch's default one.
        options: of `make_private`.
    """

    layout: str = "cpu"
    adam: bool = False
    schedules: bool = False
    every: int = 0
    physical: int = 0
    own_streams: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Run:
    """The objects of a run, made anew as a restarted script makes them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(5)
        devices = [torch.device("cpu")] if case.layout == "cpu" else devices_for(case.layout)
        data = TensorDataset(torch.randn(N, D), torch.randint(2, (N,)))
        net = nn.Sequential(nn.Linear(D, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 2))
        spread(net, devices, ["0", "3"] if len(devices) == 2 else None)
        inner: torch.optim.Optimizer = (
            torch.optim.Adam(net.parameters(), lr=0.1)
            if case.adam
            else torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        )
        streams = [torch.Generator(devices[0]).manual_seed(8), torch.Generator().manual_seed(9)]
        self.case = case
        self.has_checkpoint = False
        self.engine = PrivacyEngine(accountant="rdp")
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=net,
            optimizer=inner,
            data_loader=DataLoader(
                data, batch_size=N // BATCHES, generator=streams[1] if case.own_streams else None
            ),
            noise_multiplier=1.0,
            noise_generator=streams[0] if case.own_streams else None,
            **{"max_grad_norm": 1.0, **case.options},
        )
        self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9) if case.adam else None
        self.schedules: dict[str, Any] = {}
        if case.schedules:
            self.schedules = {
                "noise_scheduler": ExponentialNoise(self.optimizer, gamma=1.1),
                "grad_clip_scheduler": StepGradClip(self.optimizer, step_size=2, gamma=0.7),
            }

    def save(self, path: Path, epoch: int) -> None:
        rates = {} if self.rates is None else {"rates": self.rates.state_dict()}
        self.engine.save_checkpoint(
            path=path,
            module=self.model,
            optimizer=self.optimizer,
            checkpoint_dict={"epoch": epoch, **rates},
            **self.schedules,
        )
        self.has_checkpoint = True

    def load(self, path: Path) -> int:
        loaded = self.engine.load_checkpoint(
            path=path, module=self.model, optimizer=self.optimizer, **self.schedules
        )
        if self.rates is not None:
            self.rates.load_state_dict(loaded["rates"])
        self.has_checkpoint = True
        return loaded["epoch"]

    def train(self, path: Path, epochs: int = EPOCHS) -> None:
        start = self.load(path) if path.exists() else 0
        for epoch in range(start, epochs):
            self.train_epoch(path, epoch)
            for schedule in (self.rates, *self.schedules.values()):
                if schedule is not None:
                    schedule.step()
            self.save(path, epoch + 1)

    def train_epoch(self, path: Path, epoch: int) -> None:
        batches: Any = contextlib.nullcontext(self.loader)
        if self.case.physical:
            batches = BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=self.case.physical, optimizer=self.optimizer
            )
        with batches as loader:
            for x, y in loader:
                self.optimizer.zero_grad()
                output = self.model(x)
                nn.functional.cross_entropy(output, y.to(output.device)).backward()
                self.optimizer.step()
                whole = not self.optimizer._is_last_step_skipped
                if self.case.every and whole and len(self.engine.accountant) % self.case.every == 0:
                    self.save(path, epoch)

    def result(self) -> dict[str, Any]:
        """What a run is compared by: weights, the optimizer's state, settings, and what was accounted."""
        return {
            "weights": {name: p.detach().cpu() for name, p in self.model.named_parameters()},
            "state": tree_map_only(torch.Tensor, torch.Tensor.cpu, self.optimizer.state_dict()["state"]),
            "bounds": (self.optimizer.noise_multiplier, self.optimizer.max_grad_norm),
            "history": self.engine.accountant.history,
            "epsilon": self.engine.get_epsilon(DELTA),
        }


def run(case: Case, folder: Path, kill_at_call: int = 0, kill_in: str = "") -> None:
    """Train to the end and leave the result in `folder`, unless killed on the way.

    Args:
        kill_at_call: which function call, once there is a checkpoint, is not survived; 0: none.
        kill_in: a function of `os` whose third call from then on is not survived.
    """
    torch.set_num_threads(1)
    made = Run(case)
    calls = named = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, named
        if event in ("call", "c_call") and made.has_checkpoint:
            calls += 1
            named += event == "c_call" and argument is getattr(os, kill_in, None)
            if calls == kill_at_call or named == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    made.train(folder / "checkpoint.pt")
    sys.setprofile(None)
    torch.save({**made.result(), "calls": calls}, folder / "partial.pt")
    os.replace(folder / "partial.pt", folder / "result.pt")
