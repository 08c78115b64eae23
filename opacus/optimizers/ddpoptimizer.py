"""Data parallel: every rank clips its own samples, rank 0 adds the noise, and the noisy sum over ranks is what all of them step on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from opacus.devices import NoiseStream, Placement
from opacus.distributed.errors import ReplicaError
from opacus.distributed.groups import default_group, size_of
from opacus.distributed.reduction import Reduction
from opacus.distributed.shard_noise import ShardNoise
from opacus.optimizers.noise import SecureNoise
from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["DistributedDPOptimizer"]


class DistributedDPOptimizer(DPOptimizer):
    """`DPOptimizer` for replicas that train together; each may span several devices.

    Args:
        optimizer: the inner optimizer, of the same kind and over the same parameters on every rank.
        noise_multiplier: sigma.
        max_grad_norm: C.
        expected_batch_size: of one rank: the noisy sum over ranks is divided by it times the number of ranks when `loss_reduction`
            is "mean". It need not be whole.
        loss_reduction, generator, secure_mode, **kwargs: as in `DPOptimizer`. Only the group's first rank draws noise; with
            `generator=None` from a stream of its own, seeded from that rank's default generator. A `generator` must not be
            the one that batches are drawn with.
        process_group (in **kwargs): ranks that train together; all ranks if None.

    Raises:
        ConfigurationError: naming every argument that cannot be, or if there is no process group.

    Formal guarantee:
        With per-sample gradients g_i of the samples of all ranks, `step` hands the inner optimizer on every rank the same bits,
        (sum_i c_i g_i + N(0, (sigma C)^2 I)) / scale with ||c_i g_i|| <= C: the guarantee of `DPOptimizer` for the union of
        the ranks' batches, whatever the number of ranks and devices and however samples are shared out, if no sample is on two ranks.
        Sums are formed in at least float32.
    """

    OPTIONS = (*DPOptimizer.OPTIONS, "process_group")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        self._reduction: Reduction | None = None
        self._reduced = True  # nothing waits to be added up
        process_group = kwargs.pop("process_group", None)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **kwargs,
        )
        self.process_group = default_group() if process_group is None else process_group

    @classmethod
    def argument_problems(cls, **arguments: Any) -> list[str]:
        """As for `DPOptimizer`; and there must be a process group."""
        problems = super().argument_problems(**arguments)
        if not dist.is_available() or not dist.is_initialized():
            problems.append(
                "there is no process group: call torch.distributed.init_process_group(...) first."
            )
        return problems

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that train together.

        Raises:
            ReplicaError: in a copy of an optimizer, which belongs to no group until one is set.
        """
        if self._reduction is None:
            raise ReplicaError(
                "this optimizer has no process group",
                ["it is a copy, and process groups cannot be copied: set optimizer.process_group."],
            )
        return self._reduction.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup) -> None:
        self._reduction = Reduction(group)

    @property
    def n_replicas(self) -> int:
        """Number of ranks."""
        return size_of(self.process_group)

    def draws_noise(self) -> bool:
        """True on the group's first rank."""
        return super().draws_noise() and dist.get_rank(self.process_group) == 0

    def noise_stream(self) -> NoiseStream | SecureNoise | ShardNoise:
        if self._noise is None and self.generator is None and not self.secure_mode:
            home = Placement(self.params, reduction_device=self.reduction_device).reduction_device
            # Ranks seeded alike take different amounts from their default generators once one of them draws noise there: numbers that
            # are noise on one would choose samples on another.
            self._noise = NoiseStream(None, home).branch("noise of all ranks", moving_on=self.draws_noise())
        return super().noise_stream()

    def add_noise(self) -> None:
        """Put each parameter's clipped sum into `grad`; on the group's first rank with noise.

        Formal guarantee:
            Every coordinate of the sum over ranks receives independent N(0, (noise_multiplier * max_grad_norm)^2) exactly
            once, in at least float32.
        """
        super().add_noise()
        self._reduced = False

    def reduce_gradients(self) -> None:
        """Replace each `grad` by its sum over ranks, before rounding to the parameter's dtype; a second call does nothing.

        Raises:
            ReplicaError: if ranks train different parameters.
            RankLostError: if a rank does not come. No `grad` is left.
        """
        if self._reduced:
            return
        parameters = [p for p in self.params if p.grad is not None]
        totals: list[Tensor] = []
        for p in parameters:
            held = self._unrounded.pop(id(p), None)
            totals.append(held[1] if held is not None and held[0] is p.grad else p.grad)  # type: ignore[arg-type]
        try:
            self._reduction_here().add_up(totals)
        except BaseException:
            for p in parameters:  # a rank's own sum, without noise on most of them
                p.grad = None
            self._drop_sums()
            raise
        for p, total in zip(parameters, totals, strict=True):
            if total is not p.grad:
                p.grad = total.to(p.dtype)
                self._unrounded[id(p)] = (p.grad, total)
        self._reduced = True

    def noisy_total(self, value: Tensor, std: float) -> Tensor:
        """`value`, a number, added up over ranks, with noise once."""
        # in one dtype on all ranks, whatever this rank's batch brought
        total = value.to(torch.float32 if value.device.type == "mps" else torch.float64, copy=True)
        if self.draws_noise():
            total += self.noise_stream().normal((), std, total.device, total.dtype)
        self._reduction_here().add_up([total], "add up a count over ranks")
        return total.to(value.dtype)

    def _reduction_here(self) -> Reduction:
        self.process_group  # noqa: B018  raises where there is none
        assert self._reduction is not None
        return self._reduction

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reduction": None}
