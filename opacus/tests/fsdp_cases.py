"""What runs on each rank in the tests of sharded models: a small model with every trap in it, and its float64 reference.

The reference is one process and one sample at a time: autograd's gradient of each sample's own loss, clipped, and added up.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from opacus.distributed.sharding import Layouts, axes_of, layout_of, local_of, reshard
from opacus.grad_sample import wrap_model as wrapped
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

VOCABULARY, LENGTH = 11, 4


def columns(p: nn.Parameter) -> Shard:
    """Matrices are cut along their second dimension where the ranks divide it."""
    return Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else Shard(0)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(inplace=True)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows of 5 and 7 that no number of ranks divides, a block called twice, an unused layer, an in-place ReLU, ties."""

    def __init__(
        self, width: int = 5, hidden: int = 7, tied: bool = False, checkpointed: bool | None = None
    ) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.unused, self.head = nn.Linear(3, 2), nn.Linear(width, VOCABULARY)
        self.checkpointed = checkpointed  # None: not; else use_reentrant
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in [*self.blocks, self.blocks[0]]:
            x = (
                block(x)
                if self.checkpointed is None
                else checkpoint(block, x, use_reentrant=self.checkpointed)
            )
        return self.head(self.norm(x))


def logits_and_targets(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, V, T]` and `[B, T]`, as the cross entropy takes them."""
    logits = model(ids).transpose(1, 2)
    return logits.to(torch.promote_types(torch.float32, logits.dtype)), ids.roll(1, 1)


def token_mean(logits: Tensor, targets: Tensor, reduction: str = "none") -> Tensor:
    """`[B]`: the mean over each sample's tokens."""
    return F.cross_entropy(logits, targets, reduction=reduction).mean(1)


def loss_of(model: nn.Module, ids: Tensor, reduction: str) -> Tensor:
    """The mean over tokens of each sample, reduced over samples. Connected to the model even for no samples."""
    loss_B = token_mean(*logits_and_targets(model, ids))
    return loss_B.sum() / (max(1, len(ids)) if reduction == "mean" else 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "keep gathered": {"reshard_after_forward": False},
    "columns": {"shard_placement_fn": columns},
    "explicit": {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy()},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def build(lora: bool = False, **kw: Any) -> Net:
    """The same weights on every rank."""
    torch.manual_seed(0)
    model = Net(**kw)
    if lora:
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in ("down", "blocks.1.norm", "up.bias")))
    return model


def tokens(n: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (n, LENGTH), generator=torch.Generator().manual_seed(1))


def loop(model: nn.Module, ids: Tensor, clipping: str, clip: float) -> dict[str, Tensor]:
    """The clipped sum of all samples, float64, one sample at a time."""
    reference = copy.deepcopy(model).double()
    reference.checkpointed = None
    parameters = {name: p for name, p in reference.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for row in ids:
        grads = torch.autograd.grad(
            loss_of(reference, row[None], "sum"), list(parameters.values()), allow_unused=True
        )
        grads = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters.values(), strict=True)
        ]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for name, g in zip(parameters, grads, strict=True):
            own, bound = float(g.norm()), clip / math.sqrt(len(grads))
            factor = {
                "flat": min(1.0, clip / max(norm, 1e-30)),
                "automatic": clip / (norm + 0.01),
                "per_layer": min(1.0, bound / max(own, 1e-30)),
            }[clipping]
            total[name] += factor * g
    return total


def mesh_of(kind: str, device: str = "cpu") -> Any:
    """ "fsdp": one axis over all ranks; "hsdp": two replicas."""
    world = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh(device, (2, world // 2), mesh_dim_names=("replica", "shard"))
    return init_device_mesh(device, (world,), mesh_dim_names=("shard",))


def shard(model: Net, mesh: Any, wrap: str, **options: Any) -> Net:
    """`fully_shard` at one of four granularities."""
    from torch.distributed.fsdp import fully_shard

    if wrap == "leaf":
        for layer in [layer for block in model.blocks for layer in (block.norm, block.up, block.down)] + [
            model.norm
        ]:
            fully_shard(layer, mesh=mesh, **options)
    if wrap == "group":
        fully_shard([model.emb, model.norm, model.head], mesh=mesh, **options)
    if wrap in ("block", "group"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    reshard(model)
    return {name: full(p).detach() for name, p in model.named_parameters()}


class Private:
    """A private model and optimizer without a data loader: what `make_private` puts together."""

    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        mode: str = "bk",
        *,
        wrap_model: bool = True,
        clipping: str = "flat",
        sigma: float = 0.0,
        clip: float = 0.3,
        reduction: str = "mean",
        expected: int = 1,
        generator: torch.Generator | None = None,
        secure: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.reduction = reduction
        self.optimizer = get_optimizer_class(clipping, False, mode)(
            inner,
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=expected,
            loss_reduction=reduction,
            generator=generator,
            secure_mode=secure,
            **(options or {}),
        )
        self.module = wrapped(model, mode, wrap_model, loss_reduction=reduction)
        self.optimizer.attach_book(self.module.policy)
        self.model = self.module if wrap_model else model
        self.criterion = (
            DPLossFastGradientClipping(self.module, self.optimizer, token_mean, reduction)
            if mode.startswith("ghost")
            else None
        )

    def backward(self, ids: Tensor) -> None:
        if self.criterion is None:
            loss_of(self.model, ids, self.reduction).backward()
        else:
            self.criterion(*logits_and_targets(self.model, ids)).backward()

    def step(self, batches: list[Tensor]) -> None:
        """One logical batch of several physical ones."""
        for i, ids in enumerate(batches):
            self.optimizer.signal_skip_step(i < len(batches) - 1)
            self.backward(ids)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=i % 2 == 0)


def update_error(
    kind: str = "fsdp",
    wrap: str = "block",
    mode: str = "bk",
    *,
    wrap_model: bool = True,
    reduction: str = "mean",
    clipping: str = "flat",
    rows: tuple[tuple[int, ...], ...] = ((3, 2),),
    dtype: torch.dtype = torch.float64,
    clip: float = 0.3,
    options: dict[str, Any] | None = None,
    cap: int | None = None,
    small: int | None = None,
    prefetch: bool = False,
    device: str = "cpu",
    **build_options: Any,
) -> float:
    """Largest error of one private step, against the loop over the union of all ranks' samples; relative to its largest entry.

    Args:
        rows: for each physical batch, the rows of each rank (repeated as needed).
        cap: elements of a bucket. small: elements up to which parts are copied into it together.
    """
    from opacus.distributed import scatter

    world, rank = dist.get_world_size(), dist.get_rank()
    counts = [[batch[r % len(batch)] for r in range(world)] for batch in rows]
    ids = tokens(sum(map(sum, counts)))
    if device == "cuda":
        torch.cuda.set_device(rank)
    ids = ids.to(device)
    model = build(**build_options).to(device, dtype)
    reference = loop(model, ids, clipping, clip)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    shard(model, mesh_of(kind, device), wrap, **(options or {}))
    if prefetch:
        model.set_modules_to_forward_prefetch(list(model.blocks))
        model.set_modules_to_backward_prefetch(list(model.blocks)[::-1])
        model.set_reshard_after_backward(False)
        model.set_unshard_in_backward(True)
    expected = max(1, len(ids)) if reduction == "mean" else 1
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    private = Private(
        model,
        inner,
        mode,
        wrap_model=wrap_model,
        clipping=clipping,
        clip=clip,
        reduction=reduction,
        expected=expected,
    )
    start, batches = 0, []
    for batch in counts:
        at = start + sum(batch[:rank])
        batches.append(ids[at : at + batch[rank]])
        start += sum(batch)
    usual = scatter.BUCKET_ELEMENTS, scatter._SMALL
    scatter.BUCKET_ELEMENTS = cap or scatter.BUCKET_ELEMENTS
    scatter._SMALL = scatter._SMALL if small is None else small
    try:
        private.step(batches)
    finally:
        scatter.BUCKET_ELEMENTS, scatter._SMALL = usual
    after = parameters_of(model)
    before = {name: p.to(after[name].device) for name, p in before.items()}
    reference = {name: g.to(after[name].device) for name, g in reference.items()}
    size = max(float(g.abs().max()) for g in reference.values()) or 1.0
    worst = 0.0
    for name, start_value in before.items():
        want = reference.get(name, torch.zeros_like(start_value)) / expected
        worst = max(worst, float((start_value - after[name].double() - want).abs().max()) * expected / size)
    assert all(p.requires_grad == (name in reference) for name, p in model.named_parameters())
    assert all(local_of(p).isfinite().all() for p in model.parameters())
    return worst


# ------------------------------------------------------------------------------------------------------ noise


def noise_of(
    kind: str,
    *,
    sigma: float = 1.3,
    clip: float = 0.7,
    seed: int | None = 5,
    secure: bool = False,
    steps: int = 2,
    device: str = "cpu",
) -> list[list[Tensor]]:
    """The noise of `steps` steps on no samples: the whole gradient of each parameter, as this rank sees it."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    model = shard(build(width=64, hidden=130).to(device), mesh_of(kind, device), "block")
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    private = Private(
        model, inner, sigma=sigma, clip=clip, reduction="sum", generator=generator, secure=secure
    )
    seen = []
    for _ in range(steps):
        private.backward(tokens(0).to(device))
        private.optimizer.step()
        seen.append([full(p.grad).cpu() for p in private.optimizer.params])
        private.optimizer.zero_grad(set_to_none=True)
    return seen


def generator_state_after_noise(kind: str) -> tuple[str, dict[str, Any]]:
    model = shard(build(), mesh_of(kind), "block")
    private = Private(model, torch.optim.SGD(model.parameters(), lr=1.0), sigma=1.0, reduction="sum")
    private.backward(tokens(0))
    private.optimizer.step()
    return private.optimizer.noise_stream().pattern, private.optimizer.noise_stream().state_dict()


def adaptive_bound(rows: tuple[int, ...]) -> tuple[float, float]:
    """C after one step of adaptive clipping without noise, sharded; and on one process."""
    options = {
        "target_unclipped_quantile": 0.3,
        "clipbound_learning_rate": 0.5,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 100.0,
    }
    rank = dist.get_rank()
    ids = tokens(sum(rows))
    found = []
    for sharded in (True, False):
        model = build().double()
        mine = ids
        if sharded:
            shard(model, mesh_of("fsdp"), "block")
            mine = ids[sum(rows[:rank]) : sum(rows[: rank + 1])]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        private = Private(model, inner, clipping="adaptive", clip=1.2, expected=sum(rows), options=options)
        private.step([mine])
        found.append(private.optimizer.max_grad_norm)
    return found[0], found[1]


def known_layouts() -> None:
    """What is known of parameters is what a fresh look finds, whichever axes are tensor parallel by now, and after a new sharding."""
    known = Layouts()
    for model in (shard(build(), mesh_of("fsdp"), "block"), shard(build(width=6), mesh_of("fsdp"), "leaf")):
        parameters = list(model.parameters())
        axes = frozenset(axes_of(parameters[0].device_mesh))
        for model_axes in (frozenset(), axes, frozenset()):
            for p in parameters * 2:
                assert known.of(p, model_axes) == layout_of(p, model_axes)
        assert any(layout_of(p, axes) != layout_of(p) for p in parameters)


# ------------------------------------------------------------------------------------------------- collectives


def collectives(mode: str, cap: int | None = None, lora: bool = False) -> dict[str, dict[str, int]]:
    """Collectives of one forward and backward (and step) with and without DP, by name; float32, blocks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from opacus.distributed import scatter

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name
            if name.startswith("c10d::"):
                name = name.removeprefix("c10d::").strip("_")
                self.seen[name] = self.seen.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    ids = tokens(3)
    scatter.BUCKET_ELEMENTS = cap or scatter.BUCKET_ELEMENTS
    plain = shard(build(lora=lora), mesh_of("fsdp"), "block")
    with Count() as ordinary:
        loss_of(plain, ids, "mean").backward()
    model = shard(build(lora=lora), mesh_of("fsdp"), "block")
    trainable = [p for p in model.parameters() if p.requires_grad]
    private = Private(model, torch.optim.SGD(trainable, lr=1.0), mode)
    private.step([ids])  # the first time "ghost" learns which layers are called twice
    with Count() as dp:
        private.backward(ids)
        private.optimizer.step()
    return {"plain": ordinary.seen, "private": dp.seen, "parameters": {"n": len(trainable)}}
