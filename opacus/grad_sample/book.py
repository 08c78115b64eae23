"""The policy of the `bk` and `ghost` modes: clipped sums without per-sample gradients (Bu et al., ICML 2023).

Weights take part in the forward detached, so autograd forms no plain weight gradient. Of each call the rule keeps what
its parameters' norms and clipped sums follow from (`kept.py`). When the backward has ended, the norms of all parameters are
joined, the clip factors found, and one product per parameter forms the clipped sum.

`bk` keeps everything until then: one backward. `ghost` keeps nothing but norms, and forms the clipped sums in a second
backward through the same forward: less memory, more time.

Shapes: B samples of a physical batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from opacus.devices import computing_device
from opacus.distributed.sharding import Homes, is_fsdp
from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.grad_sample.blocks import Block, is_small, joined, take_norms
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.kept import (
    Kept,
    KeptElsewhere,
    KeptRows,
    KeptWithNorm,
    can_merge,
    joint_sq_norm,
    merged,
)
from opacus.grad_sample.ownership import Slot, all_parameters
from opacus.grad_sample.routes import Route
from opacus.grad_sample.selection import norms_by_user, rule_for
from opacus.grad_sample.tensor_axis import TensorAxis, add_rows
from opacus.grad_sample.verification import disagreement, expected_rounding, noting, unverifiable

__all__ = ["Book"]

logger = logging.getLogger(__name__)

# "norms again": the same forward once more, where a use of a parameter was dropped before the next one came
Stage = Literal["one pass", "norms", "norms again", "sums", "unwrapped"]
_OUTSIDE = (
    "it is used outside its layer's forward (functional call, penalty on weights, output that is no tensor), where it cannot be "
    "clipped. Call the layer itself, or freeze it."
)
_FIRST = ("one pass", "norms", "unwrapped")  # of a forward: what was formed for comparison is compared then


@dataclass
class _Uses:
    """What the calls of one backward said about one parameter."""

    parameter: nn.Parameter
    shape: torch.Size  # of the gradient that is found here
    kept: list[Kept] = field(default_factory=list)
    sq_norm_B: Tensor | None = None  # of the first call alone, until a second one comes
    clipped: Tensor | None = None  # ghost, second pass
    split: bool = False  # tensor parallel: this rank saw a piece of the parameter
    # for verification: the plain sum, the samples' norms, the rounding to expect
    unclipped: Tensor | None = None
    size: Tensor | float = 0.0
    rounding: Tensor | float = 0.0

    def note_unclipped(self, use: Kept, captured: Captured) -> None:
        everyone_B = torch.ones(captured.owners.n_samples, device=self.parameter.device)
        total = use.clipped(everyone_B)
        self.unclipped = total if self.unclipped is None else self.unclipped + total
        self.size = use.sq_norm().sqrt().sum() + self.size
        rounding = expected_rounding(list(captured.outputs))
        self.rounding = rounding.to(self.parameter.device) + self.rounding

    def add_clipped(self, use: Kept, factor_of: Callable[[nn.Parameter], Tensor]) -> None:
        clipped = use.clipped(factor_of(self.parameter))
        self.clipped = clipped if self.clipped is None else self.clipped.add_(clipped)

    def forget_kept(self) -> None:
        """Norms alone are left."""
        if self.kept:
            self.sq_norm_B = joint_sq_norm(self.kept)
            self.kept.clear()


class Book:
    """Keeps, per parameter, what the backward passes of a physical batch said; then clips.

    Args:
        root: the model, for names.
        accumulation_allowed: asked at the start of each backward.
        force_functorch: take functorch even where a built-in rule exists.
        strict: raise where a net finds something; otherwise log it.
        two_passes: ghost: the first backward finds norms, a second one the clipped sums.
        ghost_norms: False instantiates every per-sample gradient for its norm (fast gradient clipping).
        stash_budget: bytes that instantiated gradients may take beyond what they replace; see `routes.py`.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        accumulation_allowed: Callable[[], bool],
        force_functorch: bool = False,
        strict: bool = True,
        two_passes: bool = False,
        ghost_norms: bool = True,
        stash_budget: int = 0,
    ) -> None:
        self.root = root
        self.accumulation_allowed = accumulation_allowed
        self.force_functorch = force_functorch
        self.strict = strict
        self.two_passes = two_passes
        self.ghost_norms = ghost_norms
        self.stash_budget = stash_budget
        self.stage: Stage = "unwrapped" if two_passes else "one pass"
        self.unwrapped_backward = False
        self.on_batch: Callable[[Book], None] | None = None
        self.pending: Callable[[], bool] = lambda: False
        self.parameters: Callable[[], Iterable[nn.Parameter]] = lambda: all_parameters(
            root
        )  # that calls are captured of
        self.n_samples = 0
        self.scale = 1.0
        self._uses: dict[int, _Uses] = {}
        self._lock = threading.Lock()  # layers of several devices report from a thread each
        self._norms: tuple[list[nn.Parameter], list[Tensor]] = ([], [])
        self._factor_of: Callable[[nn.Parameter], Tensor]
        self._repeated: set[int] = set()  # used by several calls, as seen in an earlier backward
        self._route = Route()
        self._plain: set[int] = set()
        self._verified: set[int] = set()
        # verified, from the next forward on: recomputation must repeat this one
        self._settled: set[int] = set()
        self._attached: set[int] = set()  # taking part as usual, to be verified
        self._watched: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.axis = TensorAxis(root)
        # FSDP2 shows layers other parameter objects than the optimizer holds
        self.homes = Homes(root, self.axis.names) if is_fsdp(root) else None
        self.watch()

    # ------------------------------------------------------ one backward

    def begin(self) -> None:
        self._uses.clear()
        # in both passes: sums of other numbers than the norms' might be longer than these say
        self._route = Route(budget=self.stash_budget, always_instantiate=not self.ghost_norms)
        if self.stage in _FIRST and self.pending() and not self.accumulation_allowed():
            raise ValueError(
                "the clipped gradients of an earlier backward are still there, and grad accumulation is not compatible "
                "with Poisson sampling: call optimizer.step() and optimizer.zero_grad() after every backward, or use "
                "BatchMemoryManager to split a logical batch."
            )

    def receive(self, path: str, slots: Sequence[Slot], captured: Captured) -> None:
        rule = rule_for(captured.layer, captured.names, force_functorch=self.force_functorch)
        kept = rule.keep(captured, self._route)
        norms = norms_by_user(captured)
        if captured.adds_up is not None:
            kept = add_rows(kept, captured.adds_up)
        device = captured.outputs[0].device
        with self._lock:
            self.unwrapped_backward |= self.stage == "unwrapped"
            self.n_samples, self.scale = captured.owners.n_samples, captured.scale
            for slot in slots:
                parameter = slot.parameter
                if parameter is None or slot.name not in kept:
                    continue
                use = kept[slot.name]
                shape = captured.shape_here(slot.name, parameter)
                if isinstance(use, KeptRows) and use.grad_B.shape != (self.n_samples, *shape):
                    raise _wrong_shape(f"{path}.{slot.name}", use.grad_B.shape, self.n_samples, shape)
                if slot.name in norms:
                    use = KeptWithNorm(use, norms[slot.name])
                if device != parameter.device:
                    use = KeptElsewhere(use, device, parameter.device)
                home = self.homes.of(slot) if self.homes is not None else parameter
                assert home is not None
                uses = self._uses.setdefault(id(home), _Uses(home, shape))
                piece = captured.pieces.get(slot.name)
                if piece is not None:
                    self.axis.check(piece.mesh, f"{path}.{slot.name}")
                    uses.split = piece.split
                self._note(uses, use, captured)

    def _note(self, uses: _Uses, use: Kept, captured: Captured) -> None:
        key = id(uses.parameter)
        if key in self._attached and self.stage in _FIRST:
            uses.note_unclipped(use, captured)
        if self.stage == "sums":
            if key in self._repeated and can_merge(use):
                uses.kept.append(use)
            else:
                uses.add_clipped(use, self._factor_of)
        elif self.stage in ("one pass", "unwrapped") or key in self._repeated or uses.sq_norm_B is not None:
            uses.kept.append(use)
            if len(uses.kept) == 1 and key not in self._repeated and not use.waits:
                uses.sq_norm_B = use.sq_norm()
        else:
            uses.sq_norm_B = use.sq_norm()

    def end(self) -> None:
        problems = self._used_outside() + self._disagreement() if self.stage in _FIRST else []
        self._forget_plain()
        if problems and self.strict:
            self._uses.clear()
            raise_if_any("per-sample gradients are not complete", problems, PerSampleGradientError)
        if problems:
            logger.warning("per-sample gradients are not complete: %s", "; ".join(problems))
        if self.stage == "one pass":
            self._repeated |= {key for key, uses in self._uses.items() if len(uses.kept) > 1}
        if self.stage == "unwrapped":
            self.norms()
        if self.stage in ("one pass", "sums") and self.on_batch is not None:
            self.on_batch(self)
            self._uses.clear()

    def discard(self) -> None:
        self._forget_plain()
        self._uses.clear()

    # ----------------------------------------------------- norms and sums

    def blocks(self, *, join: bool, wanted: set[int]) -> list[Block]:
        """What the norms are to be taken of, for parameters with ids in `wanted`.

        Args:
            join: all small gradients of a device are one block.
        """
        blocks: list[Block] = []
        small: dict[tuple[torch.device, bool], list[_Uses]] = {}
        # the ranks of a tensor-parallel axis compare parameters one by one, once
        join = join and self.axis.agrees_on(wanted & self._uses.keys())
        for key, uses in self._uses.items():
            if not uses.kept or key not in wanted:
                continue
            sq_norm_B = uses.sq_norm_B if len(uses.kept) == 1 else None
            uses.kept = merged(uses.kept)
            if join and len(uses.kept) == 1 and is_small(uses.kept[0]):
                small.setdefault((computing_device(uses.parameter), uses.split), []).append(uses)
            else:
                blocks.append(Block([uses.parameter], [uses.shape], uses.kept, sq_norm_B, uses.split))
        self._uses.clear()  # the blocks hold what was kept, until it is summed
        blocks += [
            joined(
                [uses.parameter for uses in group],
                [uses.shape for uses in group],
                [uses.kept[0] for uses in group],
                split,
            )
            for (_, split), group in small.items()
        ]
        take_norms(blocks, self.scale, self.axis)
        return blocks

    def norms(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Ghost, after the first pass: each parameter's per-sample norms `[B]`, also left on `p._norm_sample`.

        Whatever was kept to find them is dropped. After the second pass they are still those of the first.
        """
        if self._uses:
            parameters, squared, norms = [], [], []
            for uses in self._uses.values():
                uses.forget_kept()
                assert uses.sq_norm_B is not None
                parameters.append(uses.parameter)
                squared.append(uses.sq_norm_B)
            squared = self.axis.whole(squared, [uses.split for uses in self._uses.values()], parameters)
            for parameter, sq_norm_B in zip(parameters, squared, strict=True):
                parameter._norm_sample = sq_norm_B.sqrt() * self.scale  # type: ignore[attr-defined]
                norms.append(parameter._norm_sample)  # type: ignore[attr-defined]
            self._norms = parameters, norms
        return self._norms

    def incomplete(self) -> bool:
        """Ghost, after the first pass: whether a parameter was used again after what its first use kept was dropped.

        Its uses are known from then on; the first pass has to be repeated.
        """
        again = {key for key, uses in self._uses.items() if uses.kept and uses.sq_norm_B is not None}
        fresh = again - self._repeated
        self._repeated |= again
        return bool(fresh)

    def use_factors(self, factor_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Ghost, before the second pass: what to multiply each sample's gradient of a parameter with, `[B]`."""
        self._factor_of = factor_of

    def clipped(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Ghost, after the second pass: the clipped sum of each parameter that was used; given away."""
        for uses in self._uses.values():
            for use in merged(uses.kept):
                uses.add_clipped(use, self._factor_of)
        found = [(uses.parameter, uses.clipped) for uses in self._uses.values() if uses.clipped is not None]
        self._uses.clear()
        return found

    # ------------------------------------------------------------- nets

    def keeps_attached(self, parameter: nn.Parameter) -> bool:
        """The first time, a parameter takes part as usual, so that autograd's gradient can be compared with."""
        key = id(parameter)
        if key in self._verified or unverifiable() or not torch.is_grad_enabled():
            return False
        if key not in self._attached:
            parameter.grad = None  # of an earlier step; the next one sets it anew
            self._attached.add(key)
        return True

    def settle(self) -> None:
        """Parameters found right in the last batch take part detached from now on."""
        self._verified |= self._settled
        self._attached -= self._settled
        self._settled.clear()

    def watch(self) -> None:
        """Before a forward: notice plain gradients of the parameters that train now (and were not watched yet)."""
        self.settle()
        if self.homes is not None:
            self.homes.clear_grads()
            return
        for parameter in all_parameters(self.root):
            key = id(parameter)
            known = self._watched.get(key)
            # asked of the parameter itself: an id may be another's by now, and a weak reference forbids swapping tensors
            on_it = known is not None and known.id in (parameter._post_accumulate_grad_hooks or ())
            if parameter.requires_grad and parameter.is_leaf and not on_it:
                self._watched[key] = parameter.register_post_accumulate_grad_hook(noting(self._plain))
                self._verified.discard(key)
                self._attached.discard(key)
            elif key in self._attached:
                parameter.grad = None  # of an earlier step, after a batch that could not be compared

    def close(self) -> None:
        """Take the watching hooks off."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def inside(self) -> set[int]:
        """Ids of the parameters that calls are captured of, as the optimizer has to hold them."""
        if self.homes is not None:
            self.homes.refresh()
        return {id(p) for p in self.parameters()}

    def _used_outside(self) -> list[str]:
        if self.homes is not None:
            return [
                f"{name} received a gradient of its own from FSDP: {_OUTSIDE} Or FSDP was told to reduce parameters that have none "
                "(set_reduce_scatter_unused_params): switch that off."
                for name in self.homes.with_plain_gradient()
            ]
        if not self._plain:
            return []
        return [
            f"{name} received a gradient of its own: {_OUTSIDE}"
            for name, parameter in self.root.named_parameters()
            if id(parameter) in self._plain
            and (id(parameter) not in self._uses or id(parameter) not in self._attached)
        ]

    def _disagreement(self) -> list[str]:
        names: list[str] = []
        checked: list[nn.Parameter] = []
        found: list[Tensor] = []
        if not self._plain:
            return []
        for name, parameter in self.root.named_parameters():
            uses = self._uses.get(id(parameter))
            if (
                uses is None
                or uses.unclipped is None
                or id(parameter) not in self._plain
                or not self.n_samples
            ):
                continue
            grad = parameter.grad
            if grad is None:
                continue
            grad = (grad.to_dense() if grad.is_sparse else grad).to(uses.unclipped.dtype)
            difference = torch.linalg.vector_norm(uses.unclipped - grad)
            size, rounding = (
                torch.as_tensor(x, device=grad.device).to(difference) for x in (uses.size, uses.rounding)
            )
            names.append(name)
            checked.append(parameter)
            found.append(torch.stack([difference, size, rounding]))
        problems, settled = disagreement(names, [p.dtype for p in checked], found)
        self._settled.update(id(p) for p, done in zip(checked, settled, strict=True) if done)
        return problems

    def _forget_plain(self) -> None:
        """Take away the gradients that were formed for comparison only: `.grad` belongs to the optimizer's step."""
        for uses in self._uses.values():
            if id(uses.parameter) in self._plain:
                uses.parameter.grad = None
            uses.unclipped = None
        self._plain.clear()


def _wrong_shape(where: str, found: torch.Size, n_samples: int, shape: torch.Size) -> PerSampleGradientError:
    """A user's grad sampler may have returned anything."""
    return PerSampleGradientError(
        "a grad sampler returned the wrong shape",
        [
            f"{where}: {tuple(found)} for {n_samples} samples and a parameter of shape {tuple(shape)}; a sampler returns "
            "[B, *parameter.shape]."
        ],
    )
