"""The state of a trainer's private run: what is hooked, what was spent, and where it stands. One owner: the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from opacus.accountants import create_accountant
from opacus.devices import NoiseStream
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.grad_sample import RowsPerSample, wrap_model
from opacus.integrations.hf import saved
from opacus.integrations.hf.batches import PhysicalBatch, PoissonBatches
from opacus.integrations.hf.contract import LossContract, first_rows
from opacus.integrations.hf.fused_head import WholeHead
from opacus.integrations.hf.plan import Plan, steps_within
from opacus.integrations.hf.private_optimizer import private_optimizer
from opacus.integrations.hf.queries import stream_after
from opacus.integrations.hf.ranks import TrainerRanks, concealed
from opacus.integrations.hf.unwrapped import Unwrapped
from opacus.optimizers import DPOptimizer
from opacus.utils.checkpoint_file import CheckpointError
from opacus.validators.batch_norm import guard_frozen

__all__ = ["PrivateRun"]


@dataclass
class Line:
    """One training, among those that a run's checkpoints branch into.

    Args:
        stream: name of its stream of noise; empty before its first step.
        queries: what its sums follow from.
        elsewhere: steps accounted since it began that were made on other lines.
        replays: coming steps that repeat accounted ones, noise and all, so that they release nothing new.
        furthest: steps made of it, once it was left; those to be repeated included.
    """

    stream: str = ""
    queries: Mapping[str, str] = field(default_factory=dict)
    elsewhere: int = 0
    replays: int = 0
    furthest: int = 0


class PrivateRun:
    """Hooks, accountant, batches and optimizer of one trainer.

    Args:
        model: the trainer's; hooks are attached.
        plan: the run's numbers.
        contract: the loss's reduction.
        head: TRL's fused head, where it had to be replaced.
        ranks: those that train together; None where this process trains alone.

    Attributes:
        accountant: what was released so far.
        optimizer: the private optimizer, once the trainer has made its own.
        scale: what a loss is multiplied by within a training step; None outside.
        steps_before: steps accounted before the `train()` going on, which tell its batches from others'; None while a checkpoint is
            to say it.
        line: what noise and accounting of the `train()` going on follow from, besides.
        looked_at: `loss_parts` of the trainer when it was made private.
        args_before: of the trainer's arguments, those that were changed, as they were.
        unwrapped: keeps the trainer from wrapping the model, where it runs in several processes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        contract: LossContract,
        head: WholeHead | None = None,
        ranks: TrainerRanks | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.contract = contract
        self.ranks = ranks
        self.unwrapped: Unwrapped | None = None
        self.looked_at: dict[str, Any] = {}
        self.args_before: dict[str, Any] = {}
        self.accountant = create_accountant(plan.accountant)
        self.batches = PoissonBatches(
            plan.records,
            plan.expected_batch_size,
            plan.steps_per_epoch,
            lambda: (self.plan.seed, self.steps_before or 0),
            (0, 1) if ranks is None else (ranks.rank, ranks.count),
        )
        hooks: Any = wrap_model(model, "bk", False, loss_reduction="sum")
        self.hooks = hooks
        self.hooks.set_owners(RowsPerSample(contract.rows_per_sample, "blocked"))
        self.hooks.forbid_grad_accumulation()
        guard_frozen(model)
        self.optimizer: DPOptimizer | None = None
        self.scale: int | None = None
        self.steps_before: int | None = 0
        self.line = Line()
        self.line_left = Line()  # that of the `train()` before
        self._stop_at: int | None = None
        self._head = head

    # ------------------------------------------------------------ optimizer

    def private(self, optimizer: Any) -> Any:
        """The private optimizer around the one that the trainer made (or was given); itself if it is private already.

        Raises:
            ConfigurationError: if the optimizer, or an argument for it, cannot be.

        Formal guarantee:
            However often the trainer makes a new optimizer, noise goes on in the stream of the one before.
        """
        inner = optimizer
        while inner is not self.optimizer and isinstance(getattr(inner, "optimizer", None), Optimizer):
            inner = inner.optimizer  # Accelerate's wrapper, of an earlier train()
        if self.optimizer is not None and inner is self.optimizer:
            return optimizer
        if isinstance(inner, DPOptimizer):
            inner = inner.original_optimizer
        self.optimizer = private = private_optimizer(self, inner)
        record = self.accountant.get_optimizer_hook_fn(sample_rate=self.plan.sample_rate)

        def account(optimizer: DPOptimizer) -> None:
            if self.line.replays and optimizer.noise_multiplier == self.plan.noise_multiplier:
                self.line.replays -= 1
            else:
                record(optimizer)

        private.attach_step_hook(account)
        saved.carry(private, self)
        return private

    # ----------------------------------------------------------------- steps

    def start(self, resumes: bool, queries: Mapping[str, str]) -> None:
        """`train()` begins.

        Args:
            resumes: whether a checkpoint is to be loaded.
            queries: from `queries_of`.
        """
        if self.steps_before is not None and self.line.stream:
            self.line_left = replace(self.line, furthest=self.steps_made() + self.line.replays)
        self.steps_before = None if resumes else len(self.accountant)
        self.line = Line(queries=queries)
        self._stop_at = None
        self._drop_half_done()

    def steps_made(self) -> int:
        """Steps of the `train()` going on, before and after it was resumed."""
        assert self.steps_before is not None
        return len(self.accountant) - self.steps_before - self.line.elsewhere - self.line.replays

    def leave_stream(self, parent: str) -> None:
        """Draw noise from here on from a stream of its own, which follows from what was before, and from the queries.

        Args:
            parent: name of the stream so far.

        Formal guarantee:
            Two trainings that a run's seed and checkpoints lead to have noise in common only in steps that follow the same
            ones and have the same `queries`.
        """
        assert self.optimizer is not None
        assert self.steps_before is not None
        position = (self.steps_before + self.steps_made(), len(self.accountant))
        name, seed = stream_after(parent, self.plan.seed, position, self.line.queries)
        self.line.stream = name
        if not self.plan.secure_mode:
            home = self.optimizer.noise_stream().home  # type: ignore[union-attr]
            self.optimizer.generator = torch.Generator(home).manual_seed(seed)
            self.optimizer._noise = NoiseStream(self.optimizer.generator, home)

    def _drop_half_done(self) -> None:
        """Forget a logical batch that an error or an interrupt cut short: the next step must not add its records to its own."""
        self.scale = None
        if self.optimizer is not None:
            self.optimizer._step_skip_queue.clear()
            self.optimizer._is_last_step_skipped = False  # zero_grad keeps what skipped steps accumulated
            self.optimizer._sample_weight_B = None
            self.optimizer.zero_grad()

    def begin_step(self, state: Any) -> bool:
        """A logical batch is about to be computed.

        Args:
            state: the trainer's.

        Returns:
            Whether it is the last one that the budget allows.

        Raises:
            CheckpointError: if the trainer's count of steps and the accountant's differ.
            ConfigurationError: if the budget is spent; in the first step, if ranks would not train alike.
            PerSampleGradientError: if all that the optimizer holds was frozen since.
        """
        if self._stop_at is None and self.ranks is not None:
            self.ranks.compare(self._where(state), "training cannot go on", "the first step of train()")
        if self.steps_before is None:
            raise CheckpointError(
                "training cannot be resumed",
                [
                    "the checkpoint has no privacy state (saved with save_only_model=True, or without privacy?), so that its steps "
                    "would not be counted. Resume from one that was saved by a private trainer with its optimizer, or start anew."
                ],
            )
        done = self.steps_made()
        if done != state.global_step:
            raise CheckpointError(
                "training cannot go on",
                [
                    f"the trainer has made {state.global_step} steps, the accountant has recorded {done}: a checkpoint was loaded "
                    "without its privacy state, or the optimizer was stepped by something else."
                ],
            )
        assert self.optimizer is not None
        if not self.optimizer.params:
            raise nothing_trains()
        if not self.line.stream:
            self.leave_stream(self.line_left.stream)
        if self._stop_at is None:
            ahead = max(0, state.max_steps - done)
            new = max(0, ahead - self.line.replays)
            self._stop_at = done + min(
                ahead, self.line.replays + steps_within(self.accountant, self.plan, new)
            )
        if done >= self._stop_at and self.plan.target_epsilon is not None:
            raise ConfigurationError(
                "training cannot go on",
                [
                    f"the budget is spent: epsilon is {self.epsilon():.3f} at delta={self.plan.delta:g} after "
                    f"{len(self.accountant)} steps, and another step would exceed target_epsilon={self.plan.target_epsilon:g}."
                ],
            )
        return done + 1 >= self._stop_at

    def _where(self, state: Any) -> dict[str, Any]:
        """Where this rank stands, which must be where all stand."""
        assert self.optimizer is not None
        return {
            "the trainer's count of steps": state.global_step,
            "the steps that the trainer plans": state.max_steps,
            "the accountant's history": self.accountant.history,
            "the steps before this train()": self.steps_before,
            "the steps to be repeated": self.line.replays,
            "the seed": concealed(self.plan.seed),
            "the optimizer": type(self.optimizer.original_optimizer).__name__,
            **{
                f"{name} of the optimizer's group {number}": value
                for number, group in enumerate(self.optimizer.param_groups)
                for name, value in group.items()
                if name != "params"
            },
        }

    def begin_batch(self, batch: PhysicalBatch) -> None:
        """A physical batch is about to go through the model."""
        assert self.optimizer is not None
        rows, k = first_rows(batch.tensors), self.contract.rows_per_sample
        if rows != k * batch.n_samples:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    f"the collate function made {rows} rows of {batch.n_samples} records, where a record has {k}. Each record must "
                    "become rows of its own."
                ],
            )
        self.hooks.policy.n_samples = 0
        self.scale = self.contract.to_sum(batch.n_samples, batch.tensors)
        weight_B = self.contract.weights(batch.n_samples, batch.tensors)
        if weight_B is not None:
            self.optimizer.set_sample_weights(weight_B)

    def end_batch(self, batch: PhysicalBatch) -> None:
        """The backward of a physical batch has ended."""
        seen = self.hooks.policy.n_samples
        if not seen:
            raise nothing_trains()
        if seen != batch.n_samples:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [f"the model's layers saw {seen} samples in a physical batch of {batch.n_samples} records."],
            )

    def close_batch(self) -> None:
        """Another physical batch of the same logical batch follows: keep the clipped sums of the last."""
        assert self.optimizer is not None
        self.optimizer.signal_skip_step(True)
        self.optimizer.pre_step()

    def epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far."""
        return self.accountant.get_epsilon(self.plan.delta if delta is None else delta)

    def detach(self) -> None:
        """Leave the model as it was."""
        if self.unwrapped is not None:
            self.unwrapped.remove()
        self.hooks.cleanup()
        if self._head is not None:
            self._head.remove()

    # ----------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides what the trainer saves; see `saved`."""
        return saved.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        saved.restore(self, state)


def nothing_trains() -> PerSampleGradientError:
    """What to raise where nothing that was made private takes part in a step."""
    return PerSampleGradientError(
        "the step cannot be private",
        [
            "no layer that make_trainer_private has seen took part in the backward. Were layers or adapters replaced, or switched "
            "off, since? Make the trainer private when its model is complete."
        ],
    )
