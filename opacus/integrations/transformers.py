"""Private training with the trainers of Transformers and TRL.

Trainers compute their own loss and own optimizer, sampler, accumulation, saving and logging, so nothing can be wrapped from
outside. `make_trainer_private` puts a mixin in front of the trainer's class instead, and leaves the trainer's loss and loop as they
are. Needs the extra `hf`: `pip install 'opacus[hf]'`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from opacus.distributed.errors import ReplicaError
from opacus.errors import ConfigurationError, PerSampleGradientError, raise_if_any
from opacus.integrations.hf.calibration import find_contract
from opacus.integrations.hf.contract import LossContract
from opacus.integrations.hf.fused_head import WholeHead
from opacus.integrations.hf.looked_at import some_records
from opacus.integrations.hf.mixin import RUN_ENDED, DPTrainerMixin
from opacus.integrations.hf.plan import (
    Plan,
    noise_for,
    optimizer_problems,
    plan_problems,
    planned_steps,
    warn_of_delta,
)
from opacus.integrations.hf.ranks import TrainerRanks, concealed, training_settings
from opacus.integrations.hf.refusals import (
    base_model,
    loss_parts,
    model_problems,
    raise_unless_trainer,
    trainer_problems,
)
from opacus.integrations.hf.run import PrivateRun
from opacus.integrations.hf.unwrapped import Unwrapped, alone

__all__ = ["DPTrainerMixin", "make_trainer_private"]

_HEADING = "make_trainer_private cannot start"
# of the trainer's arguments, until its privacy is detached
_SET = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "average_tokens_across_devices": False}


def make_trainer_private(
    trainer: Any,
    *,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float,
    max_grad_norm: float | list[float],
    clipping: str = "flat",
    expected_batch_size: int | None = None,
    accountant: str = "prv",
    seed: int | None = None,
    secure_mode: bool = False,
    log_unprotected: bool = True,
    calibration_records: Sequence[Any] | None = None,
    allow_shared_devices: bool = False,
    **options: Any,
) -> Any:
    """Make a `transformers.Trainer`, or a TRL trainer (SFT, DPO, KTO, Reward), train with differential privacy.

    Call it once the trainer is complete, then `trainer.train()` as usual. Batches are Poisson sampled; the trainer's loss is called
    as it is, one physical batch of up to `per_device_train_batch_size` records after the other; each record's gradient is
    clipped while the backward runs (mode "bk"); the trainer's optimizer steps on the noisy sum. One record of `train_dataset` is one
    sample: for DPO and Reward a pair, chosen and rejected together. A record's loss is what the trainer computes for it alone
    (a mean over its own tokens, for language models).

    Changed on the trainer: its class (a subclass, so `isinstance` holds), its optimizer when training starts, and of its
    arguments `gradient_accumulation_steps=1` (see `expected_batch_size`), `max_grad_norm=0` (its own clipping, whose norms are private
    data, is off) and `average_tokens_across_devices=False`. Checkpoints hold the privacy state in `optimizer.pt` and resume bit for
    bit; with other records or settings, or records that are made with random numbers (masked tokens, augmentation), with noise of their
    own and a warning. Going back to a checkpoint keeps what was spent
    since. `save_model` writes an ordinary model. Logs have `epsilon` and `privacy_steps`.

    Under `torchrun` every rank builds the same trainer around a replica of its own, on one device or several (`device_map`), and calls
    this. Ranks share out each logical batch; clipped sums are added up once a step, with noise once; the model is not wrapped, and all
    ranks end each step with the same weights. The loss in the log is the mean of the ranks' means; other figures of TRL's trainers
    (rewards, numbers of tokens) are those of the writing rank's records. A loss must not call collectives itself.

    Args:
        trainer: any trainer that is built on `transformers.Trainer` and computes its loss from the batch it is given.
        target_epsilon: epsilon of the whole run at `delta`. Without `noise_multiplier` the noise is chosen for the steps that the
            trainer's arguments plan. Training stops before it is exceeded.
        noise_multiplier: sigma, in place of the one that follows from `target_epsilon`.
        delta: delta, below one over the number of records.
        max_grad_norm: C, the norm that each record's gradient is clipped to; a list for `clipping="per_layer"`.
        clipping: the clipping style: "flat", "automatic", "per_layer", "adaptive".
        expected_batch_size: records in a logical batch on average, of all ranks together. By default
            `per_device_train_batch_size * gradient_accumulation_steps` of the trainer's arguments, times the number of ranks.
        accountant: name of the accountant.
        seed: of batches and noise, for runs that can be repeated. None takes one from the operating system, which checkpoints keep.
            Whoever knows it can compute the noise and take it off: keep it, and checkpoints, as secret as the data. Do not give one
            seed to two trainings on other data, models or settings whose results are both released: noise that is the same in both
            is gone from their difference. (It is another where arguments or records differ, but code and models are not looked at.)
        secure_mode: take noise from the operating system's cryptographic generator; a resumed run then is not bit for bit the same.
        log_unprotected: whether the trainer's own figures (loss, rewards, entropy, numbers of tokens), which are computed from private
            data without noise, appear in its log. They are outside the guarantee.
        calibration_records: made-up records with the data set's columns, to find the loss's reduction with; let labels and lengths
            differ. By default a few hundred of the data set's own are read, and up to 16 of them looked at, of which nothing but
            refusals gets out.
        allow_shared_devices: let ranks use one accelerator. NCCL cannot; gloo can.
        **options: of the clipping style's optimizer, and `reduction_device`.

    Returns:
        `trainer`, whose `get_epsilon()` says what was spent, and whose `detach_privacy()` gives the bare model back, and puts the
            arguments back that were changed.

    Raises:
        ConfigurationError: listing everything in the trainer, its model, data and arguments that keeps the run from being
            private; nothing was changed. Of several ranks, all raise it (a ReplicaError), with what is wrong on any of them.
        RankLostError: naming ranks that did not come.
        PerSampleGradientError: if samples' gradients depend on each other; nothing was changed.
        ModuleNotFoundError: if Transformers is not installed.

    Formal guarantee:
        Every optimizer step is a Gaussian mechanism of noise multiplier sigma on the Poisson-subsampled sum of records' gradients,
        clipped to C, at rate `expected_batch_size / len(train_dataset)`, and is recorded once, empty batches and resumed runs
        included: the weights are (epsilon, delta)-differentially private under adding or removing one record. Ranks draw one batch
        with one secret, every record of it is on exactly one rank, and noise is added once to their sum. This rests on each
        record's loss being its own: losses known to mix records are refused by name, others are searched for dependence.
        It covers the weights; not the log's figures, evaluation on private data, nor what the trainer prepared from the whole data set
        before (a vocabulary, statistics).

    Example:
        .. code-block:: python

            trainer = DPOTrainer(model=model, args=args, train_dataset=pairs, processing_class=tokenizer)
            trainer = make_trainer_private(trainer, target_epsilon=8.0, delta=1e-5, max_grad_norm=1.0)
            trainer.train()
            trainer.save_model("adapter")
    """
    raise_unless_trainer(trainer)
    args, model = trainer.args, trainer.model
    ranks = TrainerRanks.here(allow_shared_devices)
    records = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 0
    if expected_batch_size is None:
        replicas = 1 if ranks is None else ranks.count
        expected_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * replicas
    trained = [p for p in model.parameters() if p.requires_grad]
    problems = (
        plan_problems(
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            expected_batch_size=expected_batch_size,
            records=records,
            seed=seed,
            accountant=accountant,
            clipping=clipping,
        )
        + [
            f"{name} must be True or False, not {value!r}."
            for name, value in (
                ("secure_mode", secure_mode),
                ("log_unprotected", log_unprotected),
                ("allow_shared_devices", allow_shared_devices),
            )
            if not isinstance(value, bool)
        ]
        + _calibration_problems(calibration_records)
        + optimizer_problems(clipping, max_grad_norm, options, trained, noise_multiplier)
        + trainer_problems(trainer)
        + model_problems(model)
    )
    if isinstance(trainer, DPTrainerMixin) and trainer.privacy is not None:
        problems = ["the trainer is private already; build another one for another run."]
    elif isinstance(trainer, DPTrainerMixin) and trainer._ended is not None:
        problems = [RUN_ENDED]
    if ranks is not None:
        settings = {
            "the trainer": type(trainer).__name__,
            "target_epsilon": target_epsilon,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "max_grad_norm": max_grad_norm,
            "clipping": clipping,
            "expected_batch_size": expected_batch_size,
            "number of records": records,
            "accountant": accountant,
            "seed": concealed(seed),
            "secure_mode": secure_mode,
            "log_unprotected": log_unprotected,
            **training_settings(args),
            **{name: value for name, value in options.items() if name != "reduction_device"},  # a rank's own
        }
        problems = ranks.agree(model, settings, problems)
    raise_if_any(_HEADING, problems, ConfigurationError if ranks is None else ReplicaError)
    warn_of_delta(delta, records)
    plan = Plan(
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        delta=delta,
        expected_batch_size=expected_batch_size,
        records=records,
        target_epsilon=target_epsilon,
        accountant=accountant,
        clipping=clipping,
        options=options,
        secure_mode=secure_mode,
        log_unprotected=log_unprotected,
        **({} if seed is None else {"seed": seed}),
    )
    if noise_multiplier is None:
        assert target_epsilon is not None
        steps = planned_steps(args, plan.steps_per_epoch)
        noise_multiplier = noise_for(target_epsilon, delta, expected_batch_size, records, steps, accountant)
        raise_if_any(
            _HEADING, optimizer_problems(clipping, max_grad_norm, options, trained, noise_multiplier)
        )
    plan.noise_multiplier = noise_multiplier

    build = functools.partial(_look_and_hook, trainer, plan, calibration_records, ranks)
    run = build() if ranks is None else ranks.start_together(build, trainer.train_dataset)
    run.looked_at = loss_parts(trainer)
    run.args_before = {name: getattr(args, name) for name in _SET}
    for name, value in _SET.items():
        setattr(args, name, value)
    if not isinstance(trainer, DPTrainerMixin):
        kind = type(trainer)
        trainer.__class__ = type(
            f"DP{kind.__name__}", (DPTrainerMixin, kind), {"__module__": kind.__module__}
        )
    if ranks is not None:
        run.unwrapped = Unwrapped(trainer.accelerator, model)
    trainer.privacy = run
    return trainer


def _look_and_hook(
    trainer: Any, plan: Plan, calibration_records: Sequence[Any] | None, ranks: TrainerRanks | None
) -> PrivateRun:
    """Find out how the loss reduces, and attach hooks to the model; leaves it as it was where that fails."""
    base = base_model(trainer.model)
    head = WholeHead(base) if WholeHead.is_fused(base) else None
    try:
        records = calibration_records
        if records is None:
            records = some_records(trainer.get_train_dataloader().dataset)  # as the loader sees them
        with contextlib.nullcontext() if ranks is None else alone(trainer):
            contract = _contract(trainer, records, made_up=calibration_records is not None)
        return PrivateRun(trainer.model, plan, contract, head, ranks)
    except BaseException:
        if head is not None:
            head.remove()
        raise


def _contract(trainer: Any, records: Sequence[Any], made_up: bool) -> LossContract:
    try:
        return find_contract(trainer, records)
    except (ConfigurationError, PerSampleGradientError):
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if not made_up:
            raise
        raise ConfigurationError(
            _HEADING,
            [
                "the trainer's collate function or loss cannot take calibration_records "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}): make them up with all of "
                "the columns that records of train_dataset have."
            ],
        ) from error


def _calibration_problems(records: Any) -> list[str]:
    rows = hasattr(records, "__len__") and hasattr(records, "__getitem__")
    if records is None or (rows and not isinstance(records, (str, bytes, Mapping)) and len(records) > 1):
        return []
    return [
        "calibration_records must be a list of at least 2 records with the data set's columns, not "
        f"{records if isinstance(records, int) else type(records).__name__}."
    ]
