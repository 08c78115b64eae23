"""What runs on each rank in the tests of `make_private` on sharded models, and of optimizers that follow them."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed.fsdp import fsdp2_wrap, rebind, record
from opacus.distributed.sharding import is_sharded
from opacus.grad_sample import GradSampleModule, isolation
from opacus.testing import check_sample_isolation
from opacus.tests.fsdp_cases import (
    Private,
    build,
    full,
    logits_and_targets,
    loss_of,
    mesh_of,
    parameters_of,
    shard,
    token_mean,
    tokens,
)
from opacus.utils.fsdp_utils import FSDP2Wrapper


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups with options of their own, in another order than the model's, and a schedule."""
    first = ("blocks.0.up.weight", "head.bias")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [named[n] for n in first if n in named], "lr": 0.05, "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in first], "lr": 0.01, "betas": (0.8, 0.99)},
    ]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def difference(model: nn.Module, reference: nn.Module) -> float:
    mine = parameters_of(model)
    return max(float((mine[name] - p).abs().max()) for name, p in reference.named_parameters())


def loader(n: int = 24, batch_size: int = 6, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(tokens(n), torch.arange(n)), batch_size=batch_size, generator=generator)


def train(
    kind: str = "fsdp",
    mode: str = "bk",
    *,
    wrap_model: bool = True,
    clipping: str = "flat",
    reduction: str = "mean",
    lora: bool = False,
    epochs: int = 5,
    reseeded: bool = True,
) -> dict[str, Any]:
    """`epochs` of 4 steps from the private loader; and one process on the union of what the ranks drew."""
    rank = dist.get_rank()
    model = build(lora=lora)
    reference = copy.deepcopy(model)
    optimizer, schedule = adamw(model)
    fsdp2_wrap(model, optimizer, mesh=mesh_of(kind))
    engine = PrivacyEngine(accountant="rdp")
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader(seed=rank if reseeded else 0),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        clipping=clipping,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        wrap_model=wrap_model,
    )
    private, dp_optimizer, private_loader = made[0], made[1], made[-1]
    runs = private if wrap_model else model
    inner, reference_schedule = adamw(reference)
    single = Private(reference, inner, clipping=clipping, clip=0.3, reduction=reduction, expected=6)
    seen: list[int] = []
    for _ in range(epochs):
        for ids, who in private_loader:
            dp_optimizer.zero_grad()
            if mode == "bk":
                loss_of(runs, ids, reduction).backward()
            else:
                tokens_of = _Scaled(made[2]) if reduction == "sum" else made[2]
                tokens_of(*logits_and_targets(runs, ids)).backward()
            dp_optimizer.step()
            schedule.step()
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (ids, who))
            seen += [int(i) for _, record_ids in parts for i in record_ids]
            single.step([torch.cat([part for part, _ in parts])])
            reference_schedule.step()
    return {
        "difference": difference(model, reference),
        "steps": len(engine.accountant),
        "epsilon": engine.get_epsilon(1e-5) if engine.accountant.history else 0.0,
        "expected": dp_optimizer.expected_batch_size,
        "rate": private_loader.sample_rate,
        "seen": seen,
        "moved": difference(model, build(lora=lora)),
    }


class _Scaled:
    """A criterion that sums over tokens, of which the reference takes the mean."""

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def __call__(self, logits: Tensor, targets: Tensor) -> Any:
        self.criterion.criterion = token_mean
        return self.criterion(logits, targets)


# --------------------------------------------------------------------------------------------------- re-binding


def rebound(kind: str, dtype: torch.dtype) -> float:
    """AdamW: 2 steps unsharded, then sharded and re-bound, 2 more; against 4 unsharded steps."""
    ids = tokens(12)
    rank, world = dist.get_rank(), dist.get_world_size()
    each = len(ids) // world
    mine = ids[rank * each : (rank + 1) * each]
    model = build().to(dtype)
    reference = copy.deepcopy(model)

    def steps(model: nn.Module, optimizer: Any, schedule: Any, ids: Tensor, n: int) -> Private:
        private = Private(model, optimizer, clip=1.0, expected=12)
        for _ in range(n):
            private.step([ids])
            schedule.step()
        return private

    steps(reference, *adamw(reference), ids, 4)
    optimizer, schedule = adamw(model)
    steps(model, optimizer, schedule, ids, 2).module.to_standard_module()
    groups = optimizer.param_groups
    assert fsdp2_wrap(model, optimizer, mesh=mesh_of(kind)) is model
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [2, len(list(model.parameters())) - 2]
    assert all(
        is_sharded(p) and is_sharded(optimizer.state[p]["exp_avg"]) for g in groups for p in g["params"]
    )
    steps(model, optimizer, schedule, mine, 2)
    return difference(model, reference)


def by_hand() -> float:
    """`record`, one's own sharding, `rebind`; SGD with momentum."""
    ids = tokens(8)
    model = build().double()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        loss_of(m, ids, "mean").backward()
        optimizer.step()
        optimizer.zero_grad()
    binding = record(model, optimizers[0])
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rebind(model, optimizers[0], binding)
    half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    Private(model, optimizers[0], clip=1.0, expected=8).step([ids[half]])
    Private(reference, optimizers[1], clip=1.0, expected=8).step([ids])
    return difference(model, reference)


class Factored(torch.optim.SGD):
    """Keeps row sums, as Adafactor does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = torch.zeros(p.shape[0] + 1)


def refused(what: str) -> tuple[str, bool]:
    """The message of a binding that must fail, and whether model and optimizer are as they were."""
    model = build()
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    options: dict[str, Any] = {}
    if what == "stranger":
        optimizer = torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(2))], lr=0.1)
    elif what == "none":
        optimizer = torch.optim.SGD(build().parameters(), lr=0.1)
    elif what == "twice":
        optimizer.param_groups[0]["params"].append(parameters[0])
    elif what == "factored":
        optimizer = Factored(parameters, lr=0.1)
        optimizer.step()
    elif what == "lbfgs":
        optimizer = torch.optim.LBFGS(parameters)
    elif what == "meta":
        model.blocks[1].up.to("meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif what == "option":
        options["reshard"] = True
    elif what == "tied apart":
        model = build(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options["units"] = [nn.Embedding]
    elif what == "sharded already":
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [list(group["params"]) for group in optimizer.param_groups]
    weights = dict(model.named_parameters())
    try:
        fsdp2_wrap(model, optimizer, **options)
    except ValueError as error:
        same = all(
            a is b
            for before, group in zip(held, optimizer.param_groups, strict=True)
            for a, b in zip(before, group["params"], strict=True)
        )
        return str(error), same and all(p is weights[name] for name, p in model.named_parameters())
    return "", False


def changed_between(what: str) -> tuple[str, bool]:
    """`rebind` after the model changed otherwise too."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    binding = record(model, optimizer)
    if what == "gone":
        model.blocks[1].up = nn.Linear(5, 7, bias=False)
        model.head = nn.Linear(5, 12)
    fully_shard(model)
    if what == "frozen":
        model.head.weight.requires_grad_(False)
    held = list(optimizer.param_groups[0]["params"])
    try:
        rebind(model, optimizer, binding)
    except ValueError as error:
        return str(error), all(a is b for a, b in zip(held, optimizer.param_groups[0]["params"], strict=True))
    return "", False


# ----------------------------------------------------------------------------------------------------- refusals


def _private(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    usual = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": "bk"}
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader(), **{**usual, **options}
    )


def make_private_refuses(what: str) -> str:
    """The message of a `make_private` (or a step) that must fail."""
    model = build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "sharded afterwards":
        private = Private(model, early)
        fully_shard(model)
        loss_of(private.model, tokens(2), "mean").backward()
        return _message(private.optimizer.step)
    if what == "ignored":
        fully_shard(model, ignored_params={model.head.bias, model.emb.weight})
    elif what == "part":
        fully_shard(model.blocks[0])
    else:
        FSDP2Wrapper(model)
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    if what.startswith("rank 1"):
        options: dict[str, Any] = {}
        if dist.get_rank() == 1 and what == "rank 1 trains another":
            model.norm.weight.requires_grad_(False)
            model.norm.bias.requires_grad_(False)
        if dist.get_rank() == 1 and what == "rank 1 orders otherwise":
            late = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1)
        if dist.get_rank() == 1 and what == "rank 1 adds less noise":
            options["noise_multiplier"] = 0.5
        if what == "rank 1 sees the same records":
            options["poisson_sampling"] = False
        if dist.get_rank() == 1 and what == "rank 1 wants hooks":
            options["grad_sample_mode"] = "hooks"
        return _message(lambda: _private(model, late, **options))
    if what == "stale":
        return _message(lambda: _private(model, early))
    if what == "wrapped by hand":
        return _message(lambda: GradSampleModule(model))
    if what == "isolation":
        return _message(lambda: _private(model, late, check_isolation=True))
    if what in ("ignored", "part"):
        return _message(lambda: _private(model, late))
    if what in ("outside", "unused reduced"):
        private = Private(model, late)
        if what == "outside":
            model.head.register_forward_hook(lambda layer, args, out: out + layer.bias.square())
        else:
            model.set_reduce_scatter_unused_params(True)
        return _message(lambda: loss_of(private.model, tokens(2), "mean").backward())
    return _message(lambda: _private(model, late, grad_sample_mode=what))


def _message(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def evaluation_in_between() -> float:
    """Forwards without a backward leave the root gathered; steps and names must not mind."""
    ids = tokens(4)
    model = build().double()
    reference = copy.deepcopy(model)
    fsdp2_wrap(model)
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), expected=4)
    single = Private(reference, torch.optim.SGD(reference.parameters(), lr=0.1), expected=4)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for _ in range(3):
        private.backward(ids[half])
        with torch.no_grad():
            private.model(ids)
        private.optimizer.step()
        private.model.eval()
        private.model(ids)
        private.model.train()
        private.optimizer.zero_grad()
        single.step([ids])
    return difference(model, reference)


def wrapped_units() -> tuple[list[str], list[str], str]:
    """Names of the units chosen by default and by class; the dtype in which a precise layer computes."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    def units(model: nn.Module) -> list[str]:
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    usual, chosen = fsdp2_wrap(build()), fsdp2_wrap(build(), units=[nn.Linear])
    precise = FSDP2Wrapper(
        build(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), opacus_high_precision_layers=(nn.LayerNorm,)
    )
    seen = []
    precise.norm.register_forward_hook(lambda layer, args, out: seen.append(str(layer.weight.dtype)))
    precise(tokens(2))
    return units(usual), units(chosen), seen[0]


def offloaded(kind: str) -> float:
    """CPUOffloadPolicy on a CPU mesh: parts stay where they are."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    ids = tokens(4)
    model = build().double()
    reference = copy.deepcopy(model)
    fsdp2_wrap(model, mesh=mesh_of(kind), offload_policy=CPUOffloadPolicy(pin_memory=False))
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), expected=4)
    single = Private(reference, torch.optim.SGD(reference.parameters(), lr=0.1), expected=4)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    private.step([ids[half]])
    single.step([ids])
    return difference(model, reference)


def gradient_kind() -> tuple[bool, tuple[int, ...]]:
    """What `p.grad` is after a step."""
    model = fsdp2_wrap(build())
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1), sigma=1.0)
    private.backward(tokens(2))
    private.optimizer.step()
    grad = model.head.weight.grad
    return is_sharded(grad) and grad.placements == model.head.weight.placements, tuple(full(grad).shape)


def epsilon_after(steps: int) -> float:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2_wrap(model, optimizer)
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, private_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="bk",
    )
    for _ in range(steps // len(private_loader)):
        for ids, _ in private_loader:
            optimizer.zero_grad()
            loss_of(private, ids, "mean").backward()
            optimizer.step()
    return engine.get_epsilon(1e-5)


def thawed_later() -> float:
    """A part that is frozen when the model is sharded, and trains from the second step on; another one stops training."""
    ids = tokens(4)
    model = build(lora=True).double()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    fsdp2_wrap(model, optimizers[0])
    private = Private(model, optimizers[0], expected=4)
    single = Private(reference, optimizers[1], expected=4)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for _ in range(3):
        private.step([ids[half]])
        single.step([ids])
        for m in (model, reference):
            m.head.weight.requires_grad_(True)
            m.blocks[1].norm.weight.requires_grad_(False)
    assert difference(model, build(lora=True).double()) > 1e-3
    return difference(model, reference)


def last_rank_dies_before_it_reduces() -> None:
    """The other ranks wait for its clipped sums."""
    from opacus.distributed import scatter

    model = fsdp2_wrap(build())
    private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1))
    usual = scatter._send
    if dist.get_rank() == dist.get_world_size() - 1:

        def fail(*args: Any) -> Any:
            os._exit(3)

        scatter._send = fail
    try:
        private.backward(tokens(2))
    finally:
        scatter._send = usual


def said_of_isolation(checked: bool) -> list[str]:
    """What is logged over three forwards of a sharded model, which was checked before it was sharded or not."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(isolation.__name__)
    logger.addHandler(handler)
    try:
        model = build()
        if checked:
            check_sample_isolation(model, lambda m, x: loss_of(m, x, "mean"), tokens(6))
        shard(model, mesh_of("fsdp"), "block")
        private = Private(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            loss_of(private.model, tokens(6), "mean").backward()
    finally:
        logger.removeHandler(handler)
    return said
