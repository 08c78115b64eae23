"""What ranks run in the tests of tensor parallel: a model, its plans, and one private step on it.

The expected values come from `expected_sums`: one process, float64, one sample after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.distributed.fsdp import rebind, record
from opacus.grad_sample import wrap_model
from opacus.optimizers import get_optimizer_class
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

VOCABULARY, WIDTH, HIDDEN, POSITIONS = 11, 6, 8, 4
NORM = 0.5  # C; samples' gradients are longer and shorter


class Net(nn.Module):
    """Every kind of layer that torch's styles know, one that is called twice, and one that is never called."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.ids = nn.Embedding(VOCABULARY, WIDTH, padding_idx=2)
        self.wide = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.ids(ids) + self.wide(ids))
        for _ in range(2):
            x = self.down(torch.tanh(self.up(x))) + x
        return self.head(self.beside(self.rms(x)))


def net(hidden: int = HIDDEN) -> Net:
    torch.manual_seed(0)
    return Net(hidden).double()


def plan(kind: str, local: bool = True) -> dict[str, Any]:
    """By name: `columns`, whole activations between layers; `positions`, activations split over positions between layers.

    `local=False` keeps DTensors between the two linear layers: torch needs them where ranks hold different widths.
    """
    if kind == "columns":
        return {
            "ids": RowwiseParallel(input_layouts=Replicate()),
            "wide": ColwiseParallel(output_layouts=Replicate()),
            "up": ColwiseParallel(use_local_output=local),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    return {
        "ids": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "wide": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=local),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "rms": SequenceParallel(),
        "beside": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
        "head": RowwiseParallel(),
    }


def batch(rows: int, seed: int = 1) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (rows, POSITIONS), generator=torch.Generator().manual_seed(seed))
    ids[: rows // 2, 0] = 2  # padding
    return ids


def sample_losses(output: Tensor, ids: Tensor) -> Tensor:
    """`[B]`, of different sizes, so that some samples are clipped and some are not."""
    return output.square().mean((1, 2)) * (0.02 + ids[:, 1] % 3)


class Losses(nn.Module):
    """`sample_losses` as a criterion."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, ids: Tensor) -> Tensor:
        losses = sample_losses(output, ids)
        if self.reduction == "none":
            return losses
        return losses.sum() / max(1, len(losses)) if self.reduction == "mean" else losses.sum()


def sample_gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """`[B, *shape]` of each parameter's gradient, one sample after the other."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for row in ids.split(1):
        model.zero_grad()
        sample_losses(model(row), row).sum().backward()
        for name, p in model.named_parameters():
            found[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(rows) for name, rows in found.items()}


def expected_sums(
    model: nn.Module,
    ids: Tensor,
    clipping: str = "flat",
    weights: Tensor | None = None,
    norm: float = NORM,
    without: str = "-",
) -> dict[str, Tensor]:
    """sum_i c_i g_i of each parameter whose name does not contain `without`."""
    if not len(ids):
        return {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    rows = {name: g for name, g in sample_gradients(model, ids).items() if without not in name}
    if weights is not None:
        rows = {name: torch.einsum("b,b...->b...", weights, g) for name, g in rows.items()}
    own = {name: g.flatten(1).norm(dim=1) for name, g in rows.items()}
    whole = torch.stack(list(own.values())).norm(dim=0)
    if clipping == "flat":
        factors = dict.fromkeys(rows, (norm / whole).clamp(max=1))
    elif clipping == "automatic":
        factors = dict.fromkeys(rows, norm / (whole + 0.01))
    else:
        each = norm / len(rows) ** 0.5
        factors = {name: torch.nan_to_num(each / one, posinf=1.0).clamp(max=1) for name, one in own.items()}
    return {name: torch.einsum("b,b...->...", factors[name], g) for name, g in rows.items()}


@dataclass
class Setting:
    """How the model is spread, and how it is trained."""

    plan: str = "columns"
    mode: str = "bk"
    reduction: str = "mean"
    clipping: str = "flat"
    hidden: int = HIDDEN
    shard: int = 1  # ranks of the data-parallel axis (FSDP2); 1: tensor parallel alone
    noise_multiplier: float = 0.0
    norm: float = NORM
    reshard: bool = True
    wrap: bool = True
    freeze: str = ""
    force_functorch: bool = False
    device: str = "cpu"
    dtype: torch.dtype = torch.float64


def private(
    setting: Setting, model: nn.Module | None = None, expected_batch_size: int = 1
) -> tuple[Any, Any, Any, Any]:
    """`(model, mode, optimizer, backward)`, the last a function of a batch."""
    model = net(setting.hidden) if model is None else model
    for name, p in model.named_parameters():
        p.requires_grad_(not setting.freeze or setting.freeze not in name)
    if setting.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    model.to(setting.device, setting.dtype)
    spread(model, setting)
    options = {"force_functorch": True} if setting.force_functorch else {}
    mode = wrap_model(model, setting.mode, setting.wrap, loss_reduction=setting.reduction, **options)
    optimizer = get_optimizer_class(setting.clipping, False, setting.mode)(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.norm,
        expected_batch_size=expected_batch_size,
        loss_reduction=setting.reduction,
        generator=torch.Generator().manual_seed(5),
    )
    optimizer.attach_book(mode.policy)
    criterion: Any = Losses(setting.reduction)
    if setting.mode.startswith("ghost"):
        criterion = DPLossFastGradientClipping(mode, optimizer, criterion, setting.reduction)
    runs = mode if setting.wrap else model
    return model, mode, optimizer, lambda ids: criterion(runs(ids), ids).backward()


def spread(model: nn.Module, setting: Setting) -> None:
    ranks = dist.get_world_size() // setting.shard
    if setting.shard == 1:
        mesh = init_device_mesh(setting.device, (ranks,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, plan(setting.plan, local=setting.hidden % 2 == 0))
        return
    mesh = init_device_mesh(setting.device, (setting.shard, ranks), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan(setting.plan))
    for name in ("up", "down", "rms"):
        fully_shard(model.get_submodule(name), mesh=mesh["dp"], reshard_after_forward=setting.reshard)
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=setting.reshard)


def own_rows(ids: Tensor, setting: Setting) -> Tensor:
    """This rank's share of the rows: an unequal part for each data-parallel rank, the same for all of a tensor axis."""
    if setting.shard == 1:
        return ids
    at = dist.get_rank() // (dist.get_world_size() // setting.shard)
    cut = 1 + len(ids) // 3
    return ids[:cut] if at == 0 else ids[cut:]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name."""
    return {name: whole(p.grad).cpu() for name, p in model.named_parameters() if p.requires_grad}


def one_step(setting: Setting, batches: Sequence[Tensor], weights: Tensor | None = None) -> dict[str, Tensor]:
    """What `p.grad` is after the clipped sums of `batches` (physical batches of one logical batch)."""
    model, _, optimizer, backward = private(setting)
    for ids in batches:
        if weights is not None:
            optimizer.set_sample_weights(weights)
        optimizer.signal_skip_step(ids is not batches[-1])
        backward(own_rows(ids, setting).to(setting.device))
        optimizer.pre_step()
        if ids is not batches[-1]:
            optimizer.zero_grad()
    for p in model.parameters():
        assert not p.requires_grad or p.grad is not None
    return gradients(model)


class Collectives(TorchDispatchMode):
    """Counts collectives by name, with the number of elements of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.seen.append((func.name(), sum(one.numel() for one in tensors if isinstance(one, Tensor))))
        return func(*args, **(kwargs or {}))

    def count(self, word: str) -> int:
        return sum(word in name for name, _ in self.seen)


# ----------------------------------------------------------------------------- other cases


def norms_after_a_backward(
    setting: Setting, ids: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, bool]]:
    """Mode ghost_tp without an optimizer: `get_norm_sample`, each parameter's own norms, and the pattern."""
    model = net()
    spread(model, setting)
    hooks = wrap_model(model, setting.mode, setting.wrap, loss_reduction=setting.reduction)
    output = hooks(ids) if setting.wrap else model(ids)
    Losses(setting.reduction)(output, ids).backward()
    own = {name: p._norm_sample for name, p in model.named_parameters() if hasattr(p, "_norm_sample")}
    return hooks.get_norm_sample(), own, hooks.norm_pattern


def collectives_of_a_step(setting: Setting, ids: Tensor) -> list[list[tuple[str, int]]]:
    """Collectives of a plain forward, of its backward, and of a private step after one that made the checks of a first."""
    plain = net()
    spread(plain, setting)
    with Collectives() as forward:
        loss = Losses("mean")(plain(ids), ids)
    with Collectives() as back:
        loss.backward()
    _, _, optimizer, backward = private(setting)
    backward(ids)
    optimizer.step()
    optimizer.zero_grad()
    with Collectives() as step:
        backward(ids)
        optimizer.step()
    return [forward.seen, back.seen, step.seen]


def noise_only(setting: Setting, steps: int) -> dict[str, Tensor]:
    """Whole gradients of noise alone, `[steps, *shape]`; replicated ones as this rank holds them."""
    model, _, optimizer, backward = private(setting)
    found: dict[str, list[Tensor]] = {}
    for _ in range(steps):
        backward(batch(0))
        optimizer.pre_step()
        for name, p in model.named_parameters():
            here = p.grad
            if isinstance(here, DTensor) and all(one.is_replicate() for one in here.placements):
                here = here.to_local()
            found.setdefault(name, []).append(whole(here))
        optimizer.zero_grad()
    return {name: torch.stack(rows) for name, rows in found.items()}


def ranks_with_other_samples(setting: Setting, rows: Sequence[int], seeds: Sequence[int]) -> str:
    """The error where each rank has a batch of its own."""
    _, _, _, backward = private(setting)
    rank = dist.get_rank()
    try:
        backward(batch(rows[rank], seeds[rank]))
    except ValueError as error:
        return str(error)
    return ""


class PartOfThePositions(nn.Module):
    """Between two layers of the plan a norm that is not named in it, though it sees a part of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def unnamed_norm(mode: str) -> str:
    torch.manual_seed(0)
    model = PartOfThePositions()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(
        model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))}
    )
    hooks = wrap_model(model, mode)
    optimizer = get_optimizer_class("flat", False, mode)(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=3,
    )
    optimizer.attach_book(hooks.policy)
    x = torch.randn(3, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1))
    loss: Any = lambda y, _: y.square().mean()  # noqa: E731
    try:
        if mode == "bk":
            loss(hooks(x), None).backward()
        else:
            per_sample = lambda y, reduction="mean": y.square().mean((1, 2))  # noqa: E731
            DPLossFastGradientClipping(hooks, optimizer, per_sample)(hooks(x)).backward()
    except ValueError as error:
        return str(error)
    return ""


class Odd(nn.Module):
    """Layers whose parameters may not be split, by name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def refusal_of(layer: nn.Module, names: Sequence[str], mode: str, dim: int = 0, axes: int = 1) -> str:
    """What is said of a model whose `layer` has parameters `names` split along `dim`."""
    from torch.distributed.tensor import distribute_tensor

    shape = (dist.get_world_size(),) if axes == 1 else (1,) * (axes - 1) + (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"axis{i}" for i in range(axes)))
    model = Odd(layer)
    for name in names:
        holder = layer.get_submodule(name.rpartition(".")[0])
        key = name.rpartition(".")[2]
        value = distribute_tensor(holder._parameters[key].data, mesh, [Shard(dim)] * axes)
        holder._parameters[key] = nn.Parameter(value)
    try:
        wrap_model(model, mode)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


class Records(torch.utils.data.Dataset):
    """Each record is a row of ids, twice: input and target of `Losses`."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.ids[i], self.ids[i]


@dataclass
class Run:
    """What one rank saw and ended with."""

    batches: list[Tensor]
    parameters: dict[str, Tensor]
    steps: int
    epsilon: float


def train(
    setting: Setting, records: int, batch_size: int, epochs: int = 1, physical: int | None = None
) -> Run:
    """`make_private` and plain SGD of step 0.5; ranks are seeded differently."""
    model = net()
    spread(model, setting)
    torch.manual_seed(100 + dist.get_rank())
    data = Records(batch(records, seed=3))
    engine = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=Losses(setting.reduction),
        data_loader=torch.utils.data.DataLoader(data, batch_size=batch_size),
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=setting.norm,
        loss_reduction=setting.reduction,
        clipping=setting.clipping,
        grad_sample_mode=setting.mode,
        wrap_model=setting.wrap,
    )
    module, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else Losses(setting.reduction)
    runs = module if setting.wrap else model
    batches: list[Tensor] = []
    for _ in range(epochs):
        with contextlib.ExitStack() as stack:
            if physical is not None:
                loader_now = stack.enter_context(
                    BatchMemoryManager(
                        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
                    )
                )
            else:
                loader_now = loader
            logical: list[Tensor] = []
            for ids, target in loader_now:
                optimizer.zero_grad()
                criterion(runs(ids), target).backward()
                optimizer.step()
                logical.append(ids)
                if not optimizer._is_last_step_skipped:
                    batches.append(torch.cat(logical))
                    logical = []
    optimizer.zero_grad()
    parameters = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return Run(batches, parameters, len(engine.accountant), engine.get_epsilon(1e-5))


def expected_run(batches: Sequence[Tensor], setting: Setting, batch_size: int) -> dict[str, Tensor]:
    """The parameters after the same steps in one process."""
    model = net()
    for ids in batches:
        sums = expected_sums(model, ids, norm=setting.norm)
        for name, p in model.named_parameters():
            p.data -= 0.5 * sums[name] / (batch_size if setting.reduction == "mean" else 1)
    return {name: p.detach() for name, p in model.named_parameters()}


def shuffled_loader_error() -> str:
    """Without Poisson sampling, a shuffled loader whose ranks are seeded differently."""
    model = net()
    spread(model, Setting())
    torch.manual_seed(100 + dist.get_rank())
    data = Records(batch(64, seed=3))
    module, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="bk",
        poisson_sampling=False,
    )
    try:
        module(next(iter(loader))[0])
    except ValueError as error:
        return str(error)
    return ""


def data_parallel_wrapper_error() -> str:
    """A data-parallel wrapper around a tensor-parallel model."""
    model = net()
    spread(model, Setting())
    try:
        DifferentiallyPrivateDistributedDataParallel(model)
    except ValueError as error:
        return str(error)
    return ""


def uninterrupted_and_resumed(setting: Setting, path: str) -> list[tuple[dict[str, Tensor], int]]:
    """Parameters and steps after ten steps, and after five, a checkpoint, another model, and five more.

    The optimizer (AdamW) is built before the model is split, and follows it.
    """

    def started() -> tuple[nn.Module, PrivacyEngine, tuple[Any, Any, Any]]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        binding = record(model, optimizer)
        spread(model, setting)
        rebind(model, optimizer, binding)
        engine = PrivacyEngine(accountant="rdp")
        made = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(Records(batch(20, seed=3)), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=NORM,
            noise_generator=torch.Generator().manual_seed(3 + dist.get_rank()),
            grad_sample_mode=setting.mode,
        )
        return model, engine, made

    def run(made: tuple[Any, Any, Any], steps: int) -> None:
        module, optimizer, loader = made
        batches = iter(loader)
        for _ in range(steps):
            ids, target = next(batches)
            optimizer.zero_grad()
            Losses("mean")(module(ids), target).backward()
            optimizer.step()

    found = []
    model, engine, made = started()
    run(made, 5)
    engine.save_checkpoint(path=path, module=made[0], optimizer=made[1])
    run(made, 5)
    found.append(({name: whole(p.detach()) for name, p in model.named_parameters()}, len(engine.accountant)))
    model, engine, made = started()
    engine.load_checkpoint(path=path, module=made[0], optimizer=made[1])
    run(made, 5)
    found.append(({name: whole(p.detach()) for name, p in model.named_parameters()}, len(engine.accountant)))
    return found
