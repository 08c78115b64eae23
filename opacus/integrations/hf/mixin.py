"""`DPTrainerMixin`: in front of a trainer's class, it makes the trainer's public methods those of a private run."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from opacus.accountants import IAccountant
from opacus.errors import ConfigurationError, raise_if_any
from opacus.integrations.hf.batches import PhysicalBatch, PoissonLoader
from opacus.integrations.hf.nan_losses import FixedDenominator, means_without_nan
from opacus.integrations.hf.queries import queries_of
from opacus.integrations.hf.random_records import randomness_of_records
from opacus.integrations.hf.ranks import training_settings
from opacus.integrations.hf.refusals import changed_problems, trainer_problems
from opacus.integrations.hf.run import PrivateRun, nothing_trains
from opacus.integrations.hf.unwrapped import alone

__all__ = ["RUN_ENDED", "DPTrainerMixin"]

RUN_ENDED = (
    "the trainer's private run was ended by detach_privacy(), and another one would not count what it spent. Build another trainer, "
    "and add up what both spend if they train on the same records."
)
# figures in a trainer's log that are not computed from private data
_HARMLESS = ("learning_rate", "epoch", "train_runtime", "train_steps_per_second")


class DPTrainerMixin:
    """Private training for a subclass of `transformers.Trainer`; put it in front of the trainer.

    `make_trainer_private` does that by itself to any trainer, by exchanging the object's class. Whoever subclasses a trainer may
    name the mixin, and calls `make_trainer_private` on the object all the same (in `__init__`, say). Until then
    `train()` refuses to start.

    Attributes:
        privacy: the private run; None until `make_trainer_private`.

    Example:
        .. code-block:: python

            class MyTrainer(DPTrainerMixin, Trainer):
                def compute_loss(self, model, inputs, return_outputs=False, **kwargs): ...

            trainer = make_trainer_private(MyTrainer(model=model, args=args, train_dataset=data), ...)
    """

    privacy: PrivateRun | None = None
    _ended: tuple[IAccountant, float] | None = (
        None  # after `detach_privacy`: what counted, and at which delta
    )
    # the trainer's
    args: Any
    state: Any
    control: Any
    model: Any
    optimizer: Any

    def _run(self) -> PrivateRun:
        if self._ended is not None:
            raise ConfigurationError("training cannot start", [RUN_ENDED])
        if self.privacy is None:
            raise ConfigurationError(
                "training cannot start",
                [f"{type(self).__name__} is not private yet: call make_trainer_private(trainer, ...) first."],
            )
        return self.privacy

    def get_epsilon(self, delta: float | None = None) -> float:
        """Epsilon spent so far, of a run that was detached too.

        Args:
            delta: between 0 and 1; by default that of the run.
        """
        if self._ended is not None:
            accountant, of_run = self._ended
            return accountant.get_epsilon(of_run if delta is None else delta)
        return self._run().epsilon(delta)

    def detach_privacy(self) -> Any:
        """Take hooks and all else off the model, which is then as before, trained; and put the trainer's arguments back.

        Returns:
            The model. Training it further with this trainer is refused: another run would not count what this one spent.
        """
        run = self._run()
        run.detach()
        for name, value in run.args_before.items():
            setattr(self.args, name, value)
        self._ended = run.accountant, run.plan.delta
        self.privacy = None
        return self.model

    # ------------------------------------------------- what the trainer calls

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's; stops where the budget is spent.

        Raises:
            CheckpointError: at the first step, if the checkpoint has no privacy state.
            ConfigurationError: if the budget is spent already, or what `make_trainer_private` looked at was changed since to
                something that it refuses.
        """
        run = self._run()
        problems = trainer_problems(self) + changed_problems(self, run.plan.records, run.looked_at)
        if run.ranks is not None:
            settings = {
                **training_settings(self.args),
                "resume_from_checkpoint": bool(resume_from_checkpoint),
            }
            problems = run.ranks.agree(self.model, settings, problems, "train")
        raise_if_any("training cannot start", problems)
        replicas = 1 if run.ranks is None else run.ranks.count
        randomness = randomness_of_records(self.get_train_dataloader(), bool(resume_from_checkpoint))
        if run.ranks is not None:
            randomness = run.ranks.joined(randomness)
        run.start(bool(resume_from_checkpoint), queries_of(self, run.plan, replicas, randomness))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Poisson-sampled logical batches."""
        base = super().get_train_dataloader()  # type: ignore[misc]
        if self.privacy is None:
            return base
        return PoissonLoader(base, self.privacy.batches, self.args.per_device_train_batch_size)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Records in a logical batch on average."""
        return self._run().plan.expected_batch_size

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's optimizer (or the one it was given), made private."""
        self.optimizer = self._run().private(super().create_optimizer(*args, **kwargs))  # type: ignore[misc]
        return self.optimizer

    def training_step(
        self, model: Any, inputs: list[PhysicalBatch], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of this rank's share of a logical batch, one physical batch after the other."""
        run = self._run()
        if model is not self.model:
            raise ConfigurationError(
                "the step cannot be private",
                [
                    f"the trainer wrapped the model in a {type(model).__name__}, which would work on gradients before they are private. "
                    "Was its accelerator replaced since make_trainer_private?"
                ],
            )
        if run.begin_step(self.state):
            self.control.should_training_stop = True
            self.control.should_log = True
            self.control.should_save = str(getattr(self.args.save_strategy, "value", "no")) != "no"
        total = torch.zeros((), device=self.args.device)
        one = torch.tensor(1)  # on the CPU, where it can meet a loss on any device
        for number, batch in enumerate(inputs):
            if number:
                run.close_batch()
            try:
                run.begin_batch(batch)
                with contextlib.nullcontext() if run.ranks is None else alone(self):
                    loss = super().training_step(model, batch.tensors, one)  # type: ignore[misc]
            finally:
                run.scale = None  # also where it fails: an evaluation afterwards computes its loss as it is
            run.end_batch(batch)
            total += loss.to(total.device).float() * (batch.n_samples * run.contract.to_mean(*batch))
        if not inputs:
            assert run.optimizer is not None
            run.optimizer.add_empty_batch()
        if not run.plan.log_unprotected:
            return torch.zeros_like(total)
        return total / max(1, sum(batch.n_samples for batch in inputs))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own loss; within a training step, multiplied to be the sum over samples."""
        scale = None if self.privacy is None else self.privacy.scale
        if scale is None:
            return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        with FixedDenominator() if means_without_nan(self) else contextlib.nullcontext():
            found = super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not (found[0] if isinstance(found, tuple) else found).requires_grad:
            raise nothing_trains()
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a logical batch; the trainer's own count of one physical batch, which walks the model, is taken once."""
        if not isinstance(inputs, list):
            return super().floating_point_ops(inputs)  # type: ignore[misc]
        name = getattr(self.model, "main_input_name", "input_ids")
        sizes = [batch.tensors[name].numel() for batch in inputs if name in batch.tensors]
        if not sizes or not sizes[0]:
            return 0
        return super().floating_point_ops(inputs[0].tensors) * sum(sizes) // sizes[0]  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the trainer's, with epsilon; without gradient norms, and without unprotected figures if so asked for."""
        run = self._run()
        logs.pop("grad_norm", None)
        if not all(name.startswith("eval_") or name == "epoch" for name in logs):
            if not run.plan.log_unprotected:
                for name in [name for name in logs if name not in _HARMLESS]:
                    del logs[name]
                for figures in getattr(self, "_metrics", {}).values():
                    figures.clear()
            logs["epsilon"] = round(run.epsilon(), 6)
            logs["privacy_steps"] = len(run.accountant)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
