"""What keeps a trainer from being private: its settings, model, data, optimizer and surroundings. All of it is looked at before any work."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from opacus import integrations
from opacus.distributed.groups import runs_in_parallel
from opacus.errors import ConfigurationError
from opacus.grad_sample.capture import refuse_if_captured
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.integrations.hf.refused_settings import ALLOWED_LOSSES, REFUSED
from opacus.optimizers.arguments import needs_closure
from opacus.validators import ModuleValidator

__all__ = [
    "base_model",
    "changed_problems",
    "loss_parts",
    "model_problems",
    "optimizer_kind_problems",
    "raise_unless_trainer",
    "trainer_problems",
]


# what a loss is made by, besides the class
_LOSS_PARTS = ("data_collator", "compute_loss_func", "label_smoother")
# modules whose classes' steps are known
_OURS = ("transformers.", "trl.", "opacus.integrations.")
# methods of DPTrainerMixin
_OF_THE_MIXIN = (
    "train",
    "get_train_dataloader",
    "get_total_train_batch_size",
    "create_optimizer",
    "training_step",
    "compute_loss",
    "floating_point_ops",
    "log",
)


def trainer_problems(trainer: Any) -> list[str]:
    """What of a trainer's settings, data and surroundings keeps it from being private, a sentence each."""
    problems = []
    for name in _class_names(trainer):
        for refused in REFUSED.get(name, ()):
            problems += [
                f"{name}: {refused.field}={_shown(value)}: {refused.reason}"
                for value in _set_values(trainer, refused.field)
                if (bool(value) if refused.values is None else value in refused.values)
            ]
        field, allowed = ALLOWED_LOSSES.get(name, ("", ()))
        others = [value for value in _set_values(trainer, field) if value not in allowed] if field else []
        if others:
            problems.append(
                f"{name}: {field}={', '.join(map(str, others))}: losses in which each sample's gradient is known to be its own: "
                f"{', '.join(allowed)}."
            )
    problems += _override_problems(trainer)
    problems += _upload_problems(trainer.args) + optimizer_kind_problems(trainer.optimizer)
    return problems + _data_problems(trainer) + _process_problems(trainer)


def loss_parts(trainer: Any) -> dict[str, Any]:
    """The objects that a trainer's loss is made by, which are looked at."""
    return {name: getattr(trainer, name, None) for name in _LOSS_PARTS}


def changed_problems(trainer: Any, records: int, parts: Mapping[str, Any]) -> list[str]:
    """What was changed on a private trainer since it was made private, so that it is no longer what was looked at or accounted for.

    Args:
        trainer: the trainer.
        records: number of records then.
        parts: `loss_parts` then.
    """
    problems = [
        f"{name} was replaced after make_trainer_private, which looked at the one before: whether samples see each other in the new one "
        "is not known. Set it before."
        for name, part in loss_parts(trainer).items()
        if part is not parts[name]
    ]
    steps = trainer.args.gradient_accumulation_steps
    if steps != 1:
        problems.append(
            f"args.gradient_accumulation_steps={steps} was set after make_trainer_private, which had made it 1: several Poisson batches "
            "in a step would need another accounting. Set it, or expected_batch_size, before."
        )
    data = trainer.train_dataset
    if hasattr(data, "__len__") and len(data) != records:
        problems.append(
            f"train_dataset has {len(data)} records, it had {records} when the trainer was made private: rate and noise were chosen for "
            "those. Build another trainer for other data."
        )
    return problems


def _override_problems(trainer: Any) -> list[str]:
    """Methods of the user's own that go around what makes a step private, or around what is looked at."""
    problems = [
        f"{name} was set on the trainer object itself, where it hides the method that makes the step private: override it in a subclass."
        for name in _OF_THE_MIXIN
        if name in vars(trainer)
    ]
    own = [
        cls.__qualname__
        for cls in type(trainer).__mro__
        if "training_step" in vars(cls) and not cls.__module__.startswith(_OURS)
    ]
    if own:
        problems.append(
            f"{own[0]} overrides training_step: what it does to batches and gradients is not looked at. Change the loss in compute_loss, "
            "and records in the data set or the collate function."
        )
    return problems


def model_problems(model: nn.Module) -> list[str]:
    """What of a model keeps it from being trained privately, a sentence each."""
    problems = []
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        problems.append("the model has no parameter that requires grad: there is nothing to train.")
    problems += [
        f"parameter {name} requires grad but is on the meta device (offloaded): adapters on offloaded layers cannot train. Keep "
        "that layer on a device (device_map), or freeze it."
        for name, p in trainable
        if p.device.type == "meta"
    ]
    problems += [str(error) for error in ModuleValidator.layer_errors(model)]
    problems += [str(error) for error in GradSampleHooks.validate(model, strict=False)]
    problems += integrations.findings(model)
    problems += _expert_problems(model, [name for name, _ in trainable])
    try:
        refuse_if_captured(model)
    except ValueError as error:
        problems.append(f"{error}")
    return problems


def base_model(model: nn.Module) -> Any:
    """The model inside PEFT's wrapper, or the model."""
    get: Any = getattr(model, "get_base_model", None)
    return model if get is None else get()


def _expert_problems(model: nn.Module, trainable: list[str]) -> list[str]:
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = [
        getattr(text, name, 0) or 0 for name in ("num_local_experts", "num_experts", "n_routed_experts")
    ]
    if not any(isinstance(count, int) and count > 1 for count in counts):
        return []
    problems = [
        f"parameter {name} belongs to a mixture of experts, which regroups the batch's tokens: freeze router and experts, and "
        "train adapters of other layers."
        for name in trainable
        if any(part in ("gate", "router", "experts") or "expert" in part for part in name.split("."))
    ][:5]
    if getattr(text, "output_router_logits", False):
        problems.append(
            "the model's config has output_router_logits=True: the auxiliary loss it adds is a statistic of the batch. Set it False."
        )
    return problems


def _data_problems(trainer: Any) -> list[str]:
    data = getattr(trainer, "train_dataset", None)
    if data is None:
        return ["the trainer has no train_dataset."]
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        return [
            f"train_dataset, a {type(data).__name__}, cannot be drawn from by index, as Poisson sampling needs: use a data set with a "
            "length (datasets.Dataset without streaming)."
        ]
    return [] if len(data) > 1 else [f"train_dataset has {len(data)} record: pass a data set with records."]


def optimizer_kind_problems(optimizer: Any) -> list[str]:
    """Whether an optimizer, if there is one, can be stepped by a trainer."""
    while (
        inner := getattr(optimizer, "original_optimizer", getattr(optimizer, "optimizer", None))
    ) is not None:
        optimizer = inner
    if optimizer is None or not needs_closure(optimizer):
        return []
    return [
        f"the optimizer, {type(optimizer).__name__}, computes the loss anew within its step by a closure, which trainers give to none. "
        "Choose another optimizer."
    ]


def _upload_problems(args: Any) -> list[str]:
    strategy = str(getattr(getattr(args, "hub_strategy", None), "value", getattr(args, "hub_strategy", None)))
    whole = strategy in ("checkpoint", "all_checkpoints")
    if not (getattr(args, "push_to_hub", False) and whole) or getattr(args, "save_only_model", False):
        return []
    return [
        f"args.push_to_hub with hub_strategy={strategy!r} uploads optimizer.pt, from whose privacy state the noise can be computed and "
        "taken off the weights. Use hub_strategy='every_save' or 'end', which upload the model."
    ]


def _process_problems(trainer: Any) -> list[str]:
    world = getattr(trainer.args, "world_size", 1)
    connected = torch.distributed.get_world_size() if runs_in_parallel() else 1
    started = int(os.environ.get("WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1
    problems = []
    if world != connected:
        problems.append(
            f"the trainer's arguments are for {world} process(es), and torch.distributed connects {connected}: make them in each rank, "
            "after init_process_group if you call it yourself, and start ranks with torchrun."
        )
    elif started > connected:
        problems.append(
            f"a launcher started {started} processes, but each would train alone (on CPUs the trainer takes part with use_cpu=True "
            "among its arguments only)."
        )
    kind = str(getattr(trainer.accelerator.distributed_type, "value", "NO"))
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        problems.append(
            f"{kind} keeps gradients and optimizers to itself: use device_map, several ranks with a replica each, or sharding by "
            "opacus.integrations.accelerate.prepare_private."
        )
    return problems


def _class_names(trainer: Any) -> Iterator[str]:
    """Names of the trainer's classes; those that a list speaks of."""
    yield from dict.fromkeys(cls.__name__ for cls in type(trainer).__mro__)


def _set_values(trainer: Any, field: str) -> list[Any]:
    """What is set: each entry of a list, or the one value."""
    value: Any = trainer
    for part in field.split("."):
        value = getattr(value, part, None)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [getattr(v, "value", v) for v in values if v is not None]


def _shown(value: Any) -> str:
    plain = isinstance(value, (bool, int, float, str))
    return repr(value) if plain else type(value).__name__


def raise_unless_trainer(trainer: Any) -> None:
    """Raise unless `trainer` is one of Transformers'.

    Raises:
        ModuleNotFoundError: if Transformers is not installed.
        ConfigurationError: if it is something else.
    """
    try:
        from transformers import Trainer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "opacus.integrations.transformers needs Transformers: pip install 'opacus[hf]'"
        ) from error
    if not isinstance(trainer, Trainer):
        raise ConfigurationError(
            "make_trainer_private cannot start",
            [f"trainer is a {type(trainer).__name__}, not a transformers.Trainer (TRL's trainers are)."],
        )
