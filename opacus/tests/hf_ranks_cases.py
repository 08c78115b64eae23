"""What `hf_ranks_test` runs on each rank: trainers made private there, and the same trainers in one process.

Import it after `pytest.importorskip` of Transformers, TRL and PEFT.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from opacus.distributed import groups, replicas
from opacus.integrations.hf import ranks as hf_ranks
from opacus.integrations.transformers import make_trainer_private
from opacus.tests import hf_tiny as tiny
from opacus.tests.hf_trainers import LEARNING_RATE, make_trainer, override, summed_gradient

GPT2 = "Trainer, GPT-2 with tied head, full"
SFT = "SFT, Llama, LoRA"
DPO = "DPO, Llama, LoRA"
KTO = "KTO, Llama, LoRA"

SETTINGS: dict[str, Any] = {
    "noise_multiplier": 0.0,
    "delta": 1e-5,
    "max_grad_norm": 0.3,
    "expected_batch_size": 6,
    "accountant": "rdp",
    "seed": 3,
}
STEPS = 3
ARGUMENTS: dict[str, Any] = {"max_steps": STEPS, "learning_rate": 0.5, "per_device_train_batch_size": 2}


def as_a_launcher_would() -> None:
    """Tell Accelerate of this rank, whose process group is there already."""
    if not dist.is_initialized():
        return
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def over_two(model: nn.Module, devices: Sequence[torch.device | str], main: torch.device | str) -> None:
    """The first block and what comes before it on one device, all else on another; heads where inputs come from."""
    parts = {name.split(".")[0] for name, _ in model.named_parameters()}
    if "transformer" in parts:
        names = (
            [f"transformer.{part}" for part in ("wte", "wpe", "drop", "h.0")],
            [f"transformer.{part}" for part in ("h.1", "ln_f")],
        )
        head = {"lm_head": devices[0]}  # tied
    else:
        names = (
            [f"model.{part}" for part in ("embed_tokens", "rotary_emb", "layers.0")],
            [f"model.{part}" for part in ("layers.1", "norm")],
        )
        head = {"score" if hasattr(model, "score") else "lm_head": main}
    places = dict.fromkeys(names[0], devices[0]) | dict.fromkeys(names[1], devices[1]) | head
    accelerate.dispatch_model(model, places, main_device=main)


def emulated(model: nn.Module) -> None:
    """Over two emulated devices of this rank."""
    from opacus.testing import accelerators

    over_two(model, accelerators(2), torch.device("cpu"))


def private(
    name: str,
    *,
    devices: int = 1,
    settings: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer made private, on this rank or in the only process."""
    as_a_launcher_would()
    place = emulated if devices == 2 else prepare
    trainer = make_trainer(name, prepare=place, **{**ARGUMENTS, **changes})
    return make_trainer_private(trainer, **{**SETTINGS, **(settings or {})})


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


class KeepWeights(TrainerCallback):
    """Copies of the trained weights before the first and after each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.kept = [weights(trainer)]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.kept.append(weights(self.trainer))


def trained(name: str, **options: Any) -> dict[str, Any]:
    """Train; what came out."""
    trainer = private(name, **options)
    shares = list(trainer.get_train_dataloader().batch_sampler)
    keep = KeepWeights(trainer)
    trainer.add_callback(keep)
    trainer.train()
    return {
        "weights": keep.kept,
        "shares": shares,
        "steps": len(trainer.privacy.accountant),
        "epsilon": trainer.get_epsilon() if trainer.privacy.plan.noise_multiplier else None,
        "log": [entry for entry in trainer.state.log_history if "loss" in entry],
        "devices": len({p.device for p in trainer.model.parameters()}),
        "wrapped": trainer.model_wrapped is not trainer.model,
    }


def first_step(name: str, **settings: Any) -> list[dict[str, Tensor]]:
    """Weights before and after one step."""
    return trained(name, settings=settings, max_steps=1, learning_rate=1.0)["weights"]


def clipped_sums_of(batches: Sequence[Sequence[int]], bound: float) -> list[dict[str, Tensor]]:
    """What the ranks make of each batch of records, shared out among them, without noise."""
    trainer = private(SFT, settings={"max_grad_norm": bound}, learning_rate=LEARNING_RATE, max_steps=1)
    ranks = trainer.privacy.ranks
    return [summed_gradient(trainer, records[ranks.rank :: ranks.count]) for records in batches]


class KilledError(Exception):
    pass


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


def resumed(folder: str, points: Sequence[int]) -> dict[str, Any]:
    """An uninterrupted run; and one that was killed, and resumed from what it had saved in `folder` at each of `points`."""

    def start(seed: int | None, **changes: Any) -> Any:
        return private(
            GPT2,
            settings={"noise_multiplier": 0.7, "seed": seed, "expected_batch_size": 4},
            model=tiny.gpt2(dropout=0.1),
            max_steps=6,  # 3 an epoch
            optim="adamw_torch",
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            output_dir=folder,
            **changes,
        )

    straight = start(3)
    straight.train()
    killed = start(3, save_strategy="steps", save_steps=1)
    killed.add_callback(KillAt(max(points) + 1))
    with contextlib.suppress(KilledError):
        killed.train()
    found = []
    for point in points:
        again = start(None)  # batches and noise go on by what the checkpoint says
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{point}")
        found.append((weights(again), again.get_epsilon(), len(again.privacy.accountant)))
    return {
        "killed at": killed.state.global_step,
        "straight": (weights(straight), straight.get_epsilon(), 6),
        "resumed": found,
    }


def stopped_by_the_budget() -> tuple[int, float, str]:
    trainer = private(SFT, settings={"noise_multiplier": 1.0, "target_epsilon": 6.0}, max_steps=50)
    trainer.train()
    return trainer.state.global_step, trainer.get_epsilon(), message_of(trainer.train)


def seeds_taken() -> tuple[int, list[list[int]]]:
    trainer = private(SFT, settings={"seed": None})
    return trainer.privacy.plan.seed, list(trainer.get_train_dataloader().batch_sampler)


def left_behind() -> dict[str, Any]:
    """By a run that was detached."""
    as_a_launcher_would()
    trainer = make_trainer(SFT, bf16=True, max_steps=1)
    before = sorted(vars(trainer.model)), sorted(vars(trainer.accelerator))
    make_trainer_private(trainer, **SETTINGS)
    trainer.train()
    model = trainer.detach_privacy()
    after = sorted(vars(model)), sorted(vars(trainer.accelerator))
    return {
        "new on the model": set(after[0]) - set(before[0]),
        "new on the accelerator": set(after[1]) - set(before[1]),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    }


def evaluations() -> list[float]:
    """Losses of one data set before and after training, of a model over two devices of each rank."""
    trainer = private(GPT2, devices=2, max_steps=2)
    found = [trainer.evaluate(trainer.train_dataset)["eval_loss"]]
    trainer.train()
    return [*found, trainer.evaluate(trainer.train_dataset)["eval_loss"]]


# ---------------------------------------------------------------- refusals


def message_of(function: Callable[[], Any]) -> str:
    """Kind and text of the error that `function` raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_settings() -> str:
    rank = dist.get_rank()
    own = {"noise_multiplier": 1.0 + rank, "seed": rank, "delta": (1e-5, 2.0)[rank]}
    changes = {"lr_scheduler_kwargs": {"power": 1.0 + rank}, "logging_first_step": not rank}
    return message_of(lambda: private(SFT, settings=own, learning_rate=0.1 + rank, **changes))


def other_weights() -> str:
    def freeze(model: nn.Module) -> None:
        if dist.get_rank():
            model.transformer.wpe.weight.requires_grad_(False)  # type: ignore[union-attr, operator]

    return message_of(lambda: private(GPT2, prepare=freeze))


def other_records() -> str:
    as_a_launcher_would()
    trainer = make_trainer(GPT2, **ARGUMENTS)
    trainer.train_dataset = trainer.train_dataset.shuffle(seed=dist.get_rank())
    return message_of(lambda: make_trainer_private(trainer, **SETTINGS))


def what_ranks_tell_of_records() -> list[Any]:
    """What goes through the store where two trainers on the same records are made private one after the other."""
    told: list[Any] = []
    own = hf_ranks.exchange

    def overheard(message: Any, group: Any, purpose: str) -> list[Any]:
        told.append(message.get("records") if isinstance(message, dict) else None)
        return own(message, group, purpose)

    hf_ranks.exchange = overheard
    try:
        for _ in range(2):
            private(GPT2)
    finally:
        hf_ranks.exchange = own
    return [records for records in told if records is not None]


def a_loss_that_fails_on_one_rank() -> str:
    as_a_launcher_would()
    trainer = make_trainer(GPT2, **ARGUMENTS)
    if dist.get_rank():
        whole = trainer.compute_loss
        override(trainer, "compute_loss", lambda *args, **kwargs: whole(*args, **kwargs).square())  # no mean
    message = message_of(lambda: make_trainer_private(trainer, **SETTINGS))
    assert not any(module._forward_hooks for module in trainer.model.modules())
    return message


def one_accelerator_for_two_ranks(allowed: bool) -> str:
    own, replicas._identity = replicas._identity, lambda device: f"GPU {device.index}"
    try:
        return message_of(lambda: private(GPT2, devices=2, settings={"allow_shared_devices": allowed}))
    finally:
        replicas._identity = own


def other_arguments_at_train() -> str:
    trainer = private(GPT2)
    if dist.get_rank():
        trainer.args.logging_steps = 3
        trainer.args.ignore_data_skip = True
    return message_of(trainer.train)


def other_learning_rates() -> str:
    as_a_launcher_would()
    trainer = make_trainer(GPT2, **ARGUMENTS)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0 + dist.get_rank())
    make_trainer_private(trainer, **SETTINGS)
    message = message_of(trainer.train)
    assert len(trainer.privacy.accountant) == 0
    return message


def a_rank_that_stays_away() -> str:
    own, groups._patience = groups._patience, lambda group: (timedelta(seconds=1),)
    try:
        return "away" if dist.get_rank() else message_of(lambda: private(GPT2))
    finally:
        groups._patience = own


class LosePatience(TrainerCallback):
    """Let collectives wait for seconds only, once the first step has gone well."""

    def __init__(self, trainer: Any) -> None:
        self.group = trainer.privacy.ranks.group

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        for group in (None, self.group):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)


def a_loss_that_fails_in_the_second_step() -> tuple[str, int]:
    trainer = private(GPT2)
    if dist.get_rank():
        step, calls = trainer.training_step, []

        def failing(*args: Any) -> Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise KilledError
            return step(*args)

        override(trainer, "training_step", failing)
    trainer.add_callback(LosePatience(trainer))
    return message_of(trainer.train), len(trainer.privacy.accountant)


class LeaveEarly(TrainerCallback):
    """Rank 0 stops after the first step, and reduces as many numbers of its own as a step would."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if dist.get_rank() == 0 and state.global_step == 1:
            control.should_training_stop = True
            self.work = dist.all_reduce(torch.zeros(self.size), async_op=True)


def a_callback_that_stops_one_rank() -> tuple[str, int, int]:
    """The message, steps accounted, and steps that moved the weights."""
    trainer = private(GPT2, settings={"noise_multiplier": 1.0})
    keep = KeepWeights(trainer)
    trainer.add_callback(LosePatience(trainer))
    trainer.add_callback(LeaveEarly(sum(w.numel() for w in keep.kept[0].values())))
    trainer.add_callback(keep)
    message = message_of(trainer.train)
    return message, len(trainer.privacy.accountant), len(keep.kept) - 1


class Augmented(torch.utils.data.Dataset):
    """Records whose last token is drawn at each reading, in an order of each rank's own if so asked for."""

    def __init__(self, records: Any, order: Sequence[int]) -> None:
        self.records = records
        self.order = order

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = dict(self.records[self.order[index]])
        record["input_ids"] = [*record["input_ids"][:-1], int(torch.randint(2, 9, ()))]
        return record


def augmented_records(own_order: bool) -> str:
    as_a_launcher_would()
    trainer = make_trainer(GPT2, **ARGUMENTS)
    count = len(trainer.train_dataset)
    turn = dist.get_rank() if own_order else 0
    torch.manual_seed(dist.get_rank())
    trainer.train_dataset = Augmented(trainer.train_dataset, [(i + turn) % count for i in range(count)])
    return message_of(lambda: make_trainer_private(trainer, **SETTINGS))
