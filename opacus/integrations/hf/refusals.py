"""What keeps a trainer from being private, as data: class, setting, values, reason. All of it is looked at before any work.

Losses are on a list because measuring is blind to some: a loss that sorts the batch changes nothing where samples have different
lengths, and a baseline with a small coefficient hides in rounding. Measured with Transformers 5.24 and TRL 1.16.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from opacus import integrations
from opacus.distributed.groups import runs_in_parallel
from opacus.errors import ConfigurationError
from opacus.grad_sample.capture import refuse_if_captured
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.validators import ModuleValidator

__all__ = [
    "ALLOWED_LOSSES",
    "REFUSED",
    "Refused",
    "base_model",
    "changed_problems",
    "model_problems",
    "optimizer_kind_problems",
    "trainer_problems",
]


@dataclass(frozen=True)
class Refused:
    """A setting of a trainer under which samples see each other, or private data gets around the mechanism.

    Args:
        field: attribute of the trainer; after "args." of its arguments.
        values: those that are refused; None: any that is set.
        reason: a sentence with what to do.
    """

    field: str
    values: tuple[Any, ...] | None
    reason: str


_GENERATES = (
    "its batches are generated and regrouped during training, so that they are not what the data loader drew."
)

_JOINS = (
    "it makes one batch of chosen and rejected answers inside its loss, whose rows are not those of the data loader's batch, and adds a "
    "mean over the answers' tokens of the whole batch. Use DPOTrainer."
)

REFUSED: dict[str, tuple[Refused, ...]] = {
    "Trainer": (
        Refused(
            "args.n_gpu",
            tuple(range(2, 1025)),
            "the trainer would wrap the model in nn.DataParallel. Load it with a device_map to spread it over the GPUs, or show the "
            "process one GPU (CUDA_VISIBLE_DEVICES).",
        ),
        Refused("args.fp16", None, "its GradScaler skips steps by what the gradients are. Use bf16."),
        Refused(
            "neftune_noise_alpha",
            None,
            "NEFTune's noise depends on the length that a sample is padded to, hence on the other samples. Leave it out.",
        ),
        Refused(
            "args.auto_find_batch_size",
            None,
            "after running out of memory training starts again from step 0 with trained weights. Set per_device_train_batch_size, "
            "which may be small: it does not change the logical batch.",
        ),
        Refused(
            "model_init",
            None,
            "train() would build another model than the one made private. Pass the model itself.",
        ),
        Refused(
            "args.ignore_data_skip",
            None,
            "a resumed run would draw the batches of its epoch again, which accountants do not allow. Leave it False.",
        ),
        Refused(
            "args.load_best_model_at_end",
            None,
            "weights would be chosen by a metric outside the mechanism. Evaluate the saved checkpoints, on data that are not private.",
        ),
        Refused(
            "args.include_num_input_tokens_seen",
            ("all", "non_padding", True),
            "the trainer's count of tokens reads one batch at a time. Leave it out.",
        ),
        Refused(
            "args.use_liger_kernel",
            None,
            "its kernels replace the layers' forwards when training starts. Leave it out.",
        ),
        Refused(
            "args.torch_compile",
            None,
            "what layers saw is taken by hooks, which have not been tested in compiled models. Leave it out.",
        ),
        Refused(
            "args.deepspeed",
            None,
            "DeepSpeed owns the backward and the optimizer. Use device_map to spread a model over GPUs, or sharding by "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "is_fsdp_enabled",
            None,
            "sharding by the trainer is not supported. Use device_map, or opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "args.parallelism_config",
            None,
            "splitting tensors or sequences over ranks inside the trainer is not supported. Use device_map, or "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "is_distributed_loading_by_transformers",
            None,
            "the model was sharded when it was loaded (distributed_config). Use device_map, or "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "args.optim",
            ("lomo", "adalomo"),
            "the optimizer updates weights during the backward, from gradients without noise. Choose another.",
        ),
        Refused(
            "args.optim",
            (
                "galore_adamw_layerwise",
                "galore_adamw_8bit_layerwise",
                "galore_adafactor_layerwise",
                "apollo_adamw_layerwise",
            ),
            "the optimizer updates each layer during the backward, from gradients without noise. Choose one without layerwise.",
        ),
        Refused(
            "args.optim",
            ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
            "it moves weights between training and evaluation by itself. Choose another optimizer.",
        ),
    ),
    "SFTTrainer": (
        Refused(
            "args.packing",
            None,
            "packing puts several samples into a row (or cuts one in pieces), so that rows are not samples. Set packing=False.",
        ),
        Refused(
            "padding_free",
            None,
            "padding_free makes one row of the whole batch, so that rows are not samples. Set padding_free=False.",
        ),
        Refused(
            "aux_loss_enabled",
            None,
            "the auxiliary loss is a statistic of the batch. Set its coefficient to 0.",
        ),
    ),
    "DPOTrainer": (
        Refused(
            "loss_types",
            ("aot", "aot_unpaired"),
            "the loss sorts the batch, so that a sample's gradient depends on the others' rank.",
        ),
        Refused(
            "loss_types",
            ("sft",),
            "the loss is a mean over the chosen tokens of the whole batch, so that a sample's gradient depends on the others' lengths.",
        ),
        Refused(
            "padding_free",
            None,
            "padding_free makes one row of the whole batch, so that rows are not samples. Set padding_free=False.",
        ),
        Refused(
            "aux_loss_enabled",
            None,
            "the auxiliary loss is a statistic of the batch. Set its coefficient to 0.",
        ),
    ),
    "KTOTrainer": (
        Refused(
            "loss_type",
            ("kto",),
            "its KL baseline is a mean over the other samples' completions and scales each sample's gradient; the completions are taken "
            "from neighbours in the data set.",
        ),
        Refused(
            "aux_loss_enabled",
            None,
            "the auxiliary loss is a statistic of the batch. Set its coefficient to 0.",
        ),
    ),
    "TPOTrainer": (
        Refused(
            "tpo_alpha",
            None,
            "its term for the gold responses is a mean over all their tokens in the batch, so that a sample's gradient depends on the "
            "others' lengths. Set tpo_alpha=0.",
        ),
    ),
    **{name: (Refused("args", None, _JOINS),) for name in ("CPOTrainer", "ORPOTrainer")},
    **{
        name: (Refused("args", None, _GENERATES),)
        for name in (
            "GRPOTrainer",
            "AsyncGRPOTrainer",
            "A2POTrainer",
            "RLOOTrainer",
            "OnlineDPOTrainer",
            "PPOTrainer",
            "DistillationTrainer",
            "AsyncDistillationTrainer",
            "GKDTrainer",
            "GOLDTrainer",
            "IWOPDTrainer",
            "SDFTTrainer",
            "SDPOTrainer",
        )
    },
}

# losses in which every term belongs to one sample; another value of the field is refused, and these are named
ALLOWED_LOSSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "SFTTrainer": ("args.loss_type", ("nll", "dft")),
    "DPOTrainer": (
        "loss_types",
        (
            "sigmoid",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
            "sigmoid_norm",
        ),
    ),
    "KTOTrainer": ("loss_type", ("apo_zero_unpaired",)),
}


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
    problems += _upload_problems(trainer.args) + optimizer_kind_problems(trainer.optimizer)
    return problems + _data_problems(trainer) + _process_problems(trainer)


def changed_problems(trainer: Any, records: int) -> list[str]:
    """What was changed on a private trainer since it was made private, so that its batches are no longer those accounted for.

    Args:
        trainer: the trainer.
        records: number of records then.
    """
    problems = []
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
    if optimizer is None:
        return []
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
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
