"""A small private run, the same on one process and on several: what the tests of data parallel training compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.testing import spread
from opacus.utils.batch_memory_manager import BatchMemoryManager

RECORDS, WORDS, LENGTH, WIDTH, CLASSES = 24, 7, 3, 5, 4
WRAPPINGS = ("ours", "torch's", "none", "ours, after", "torch's, after")
ADAPTIVE = {
    "target_unclipped_quantile": 0.4,
    "clipbound_learning_rate": 0.3,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 2.0,
}


class Reader(nn.Module):
    """Embedding, normalisation and linear layers: one of each kind that has rules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.words(ids)))
        return self.head(self.norm(hidden.mean(1)))


def reader(seed: int = 0, dtype: torch.dtype = torch.float64) -> Reader:
    """The model with the weights of `seed`."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Reader().to(dtype)
    torch.set_rng_state(state)
    return model


def records() -> TensorDataset:
    """Token ids and classes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (RECORDS, LENGTH), generator=generator)
    return TensorDataset(ids, torch.randint(CLASSES, (RECORDS,), generator=generator))


def own_devices(count: int) -> list[torch.device]:
    """This rank's: emulated devices, which no other process has."""
    return [torch.device("emu", index) for index in range(count)]


def wrap(model: nn.Module, wrapping: str, when: str, **options: Any) -> nn.Module:
    """Put the wrapper that `wrapping` names around `model`, if this is the time for it."""
    late = wrapping.endswith(", after")
    if wrapping == "none" or late != (when == "after"):
        return model
    if wrapping.startswith("ours"):
        return DifferentiallyPrivateDistributedDataParallel(model, **options)
    return nn.parallel.DistributedDataParallel(model)


def train(
    *,
    mode: str = "hooks",
    clipping: str = "flat",
    reduction: str = "mean",
    wrapping: str = "none",
    devices: Sequence[torch.device] = (),
    steps: int = 20,
    batch_size: int = 6,
    noise_multiplier: float = 0.0,
    physical: int | None = None,
    dtype: torch.dtype = torch.float64,
    inner: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    seed_of_rank: bool = False,
    watch: Callable[[Any, Any], None] | None = None,
    shuffle: bool = True,
    splits: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train for `steps` logical batches; what came out, on the CPU.

    Args:
        wrapping: one of `WRAPPINGS`.
        devices: where the layers go; none leaves them on the CPU.
        physical: largest physical batch; None for no BatchMemoryManager.
        seed_of_rank: other initial weights on every rank, for broadcasts to mend.
        shuffle: the loader's.
        splits: give the loader a DistributedSampler for so many ranks.
        watch: called with optimizer and engine after each step.
        options: of `make_private`.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    model: nn.Module = reader(rank if seed_of_rank else 0, dtype)
    if devices:
        spread(model, devices, layers=["words", "inner", "norm", "head"])
    named = dict(model.named_parameters())
    model = wrap(model, wrapping, "before")
    generator = torch.Generator().manual_seed(5)
    data = records()
    if splits:  # records in turn, so that the ranks' batches are those of one process
        sampler = DistributedSampler(data, splits, rank, shuffle=False)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    else:
        loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle, generator=generator)
    if clipping == "adaptive":
        options = {**ADAPTIVE, **options}
    engine = PrivacyEngine(accountant="rdp", secure_mode=options.pop("secure_mode", False))
    parts = engine.make_private(
        module=model,
        optimizer=inner(model.parameters(), lr=0.5),
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        noise_multiplier=noise_multiplier,
        max_grad_norm=0.3,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        clipping=clipping,
        **options,
    )
    private, optimizer, *criterion, loader = parts
    if not isinstance(private, nn.Module):
        private = model  # hooked in place
    private = wrap(private, wrapping, "after")
    loss_of = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
    sizes: list[int] = []
    done = 0
    while done < steps:
        done += _pass(private, optimizer, loss_of, loader, steps - done, physical, sizes, engine, watch)
    return {
        "parameters": {name: p.detach().cpu().clone() for name, p in named.items()},
        "sizes": sizes,
        "steps": len(engine.accountant),
        "epsilon": engine.get_epsilon(1e-3) if noise_multiplier else None,
        "max_grad_norm": float(optimizer.max_grad_norm),
        "optimizer": type(optimizer).__name__,
    }


def _pass(
    private: nn.Module,
    optimizer: Any,
    loss_of: Any,
    loader: DataLoader,
    steps: int,
    physical: int | None,
    sizes: list[int],
    engine: PrivacyEngine,
    watch: Callable[[Any, Any], None] | None,
) -> int:
    taken = 0
    first = next(private.parameters()).device
    managed = physical is not None
    manager = (
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
        if managed
        else None
    )
    batches = loader if manager is None else manager.__enter__()
    for ids, classes in batches:
        optimizer.zero_grad()
        output = private(ids.to(first))
        loss_of(output, classes.to(output.device)).backward()
        optimizer.step()
        sizes.append(len(ids))
        if not optimizer._is_last_step_skipped:
            taken += 1
            if watch is not None:
                watch(optimizer, engine)
            if taken == steps:
                break
    if manager is not None:
        manager.__exit__()
    return taken


def on_this_rank(n_devices: int = 0, **arguments: Any) -> dict[str, Any]:
    """`train` on one of several ranks, with `n_devices` devices of its own."""
    return train(devices=own_devices(n_devices), **copy.deepcopy(arguments))
