"""The trainers under test, by name, and what a loop over samples through their own unmodified loss gives.

Import it after `pytest.importorskip` of Transformers, TRL and PEFT.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from opacus.tests import hf_tiny as tiny

LEARNING_RATE = 64.0  # so large that the weights' own rounding does not show in an update
EXPECTED = 8

_ARGUMENTS: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "per_device_train_batch_size": 3,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "max_steps": 1,
    "disable_tqdm": True,
}


def override(trainer: Any, name: str, function: Callable[..., Any]) -> None:
    """Let `function`, called without the trainer, stand for a method of this one trainer, as a class of its library would."""
    kind = type(trainer)
    method = lambda self, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    trainer.__class__ = type(kind.__name__, (kind,), {name: method, "__module__": kind.__module__})


def arguments(kind: type, **changes: Any) -> Any:
    """Of one trainer class, in a folder of its own."""
    args = kind(**{"output_dir": tempfile.mkdtemp(), **_ARGUMENTS, **changes})
    args._n_gpu = min(
        args.n_gpu, 1
    )  # on a machine of several GPUs too; trainers refuse several when they are made
    return args


def adapters(**options: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, **options)


def _causal(model: nn.Module, changes: dict[str, Any]) -> Trainer:
    collate = DataCollatorForLanguageModeling(tiny.TOKENIZER, mlm=False)
    args = arguments(TrainingArguments, **changes)
    return Trainer(model=model, args=args, train_dataset=tiny.token_data(), data_collator=collate)


def _classifier(model: nn.Module, changes: dict[str, Any]) -> Trainer:
    collate = DataCollatorWithPadding(tiny.TOKENIZER)
    args = arguments(TrainingArguments, **changes)
    return Trainer(model=model, args=args, train_dataset=tiny.labelled_data(), data_collator=collate)


def _masked(model: nn.Module, changes: dict[str, Any]) -> Trainer:
    collate = DataCollatorForTokenClassification(tiny.TOKENIZER)
    args = arguments(TrainingArguments, **changes)
    return Trainer(model=model, args=args, train_dataset=tiny.masked_data(), data_collator=collate)


def _trl(trainer: type, config: type, data: Callable[[], Any], **peft: Any) -> Callable[..., Any]:
    def make(model: nn.Module, changes: dict[str, Any]) -> Any:
        changes = dict(changes)
        layers = changes.pop("layers", None)
        adapted = {} if layers is None else {"layers_to_transform": layers}
        return trainer(
            model=model,
            args=arguments(config, **changes),
            train_dataset=data(),
            processing_class=tiny.TOKENIZER,
            **{name: make_one(**adapted) for name, make_one in peft.items()},
        )

    return make


def _apo(model: nn.Module, changes: dict[str, Any]) -> Any:
    make = _trl(KTOTrainer, KTOConfig, tiny.judged_data, peft_config=adapters)
    return make(model, {"loss_type": "apo_zero_unpaired", **changes})


_MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "Trainer, Llama, full": (tiny.llama, _causal),
    "Trainer, GPT-2 with tied head, full": (tiny.gpt2, _causal),
    "Trainer, BERT classifier, full": (tiny.bert, _classifier),
    "Trainer, BERT masked LM, full": (tiny.bert_masked, _masked),
    "SFT, Llama, LoRA": (tiny.llama, _trl(SFTTrainer, SFTConfig, tiny.text_data, peft_config=adapters)),
    "SFT, Llama, full": (tiny.llama, _trl(SFTTrainer, SFTConfig, tiny.text_data)),
    "SFT, Llama with tied head, full": (
        lambda: tiny.llama(tied=True),
        _trl(SFTTrainer, SFTConfig, tiny.text_data),
    ),
    "DPO, Llama, LoRA": (tiny.llama, _trl(DPOTrainer, DPOConfig, tiny.pair_data, peft_config=adapters)),
    "KTO, Llama, LoRA": (tiny.llama, _apo),
    "Reward, Llama, LoRA": (
        tiny.llama_scorer,
        _trl(
            RewardTrainer,
            RewardConfig,
            tiny.pair_data,
            peft_config=functools.partial(adapters, task_type="SEQ_CLS"),
        ),
    ),
}

NAMES = tuple(_MAKERS)


def make_trainer(
    name: str,
    *,
    model: nn.Module | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer, the same each time, whose adapters are not zero.

    Args:
        name: one of `NAMES`.
        model: in place of the trainer's usual one.
        prepare: is given the model before the trainer is made.
        **changes: of its arguments; and `layers`, the numbers of those that get adapters, of TRL's trainers.
    """
    make_model, make = _MAKERS[name]
    model = make_model() if model is None else model
    if prepare is not None:
        prepare(model)
    trainer = make(model, changes)
    stream = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for path, p in trainer.model.named_parameters():
            if "lora_B" in path:
                p.copy_(0.3 * torch.randn(p.shape, generator=stream))
    return trainer


def trainable(trainer: Any) -> dict[str, Tensor]:
    """Copies of the trainable weights, on the CPU, in float64."""
    return {
        name: p.detach().cpu().double().clone()
        for name, p in trainer.model.named_parameters()
        if p.requires_grad
    }


def own_gradients(trainer: Any, records: Sequence[int] | None = None) -> list[dict[str, Tensor]]:
    """Each record's gradient: the stock trainer's own loss on a batch of that one record.

    Args:
        trainer: not private.
        records: which; all by default.
    """
    loader = trainer.get_train_dataloader()
    data, collate = loader.dataset, loader.collate_fn
    trainer.model.train()
    found = []
    for index in range(len(data)) if records is None else records:
        trainer.model.zero_grad()
        batch = trainer._prepare_inputs(dict(collate([copy.deepcopy(data[index])])))
        trainer.compute_loss(trainer.model, batch).backward()
        found.append(
            {
                name: torch.zeros(p.shape, dtype=torch.float64)
                if p.grad is None
                else p.grad.detach().cpu().double().clone()
                for name, p in trainer.model.named_parameters()
                if p.requires_grad
            }
        )
    trainer.model.zero_grad()
    return found


def norm(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradient.values()]).norm())


def clipped_sum(gradients: Sequence[dict[str, Tensor]], bound: float) -> dict[str, Tensor]:
    return {name: sum(min(1.0, bound / norm(g)) * g[name] for g in gradients) for name in gradients[0]}


def largest_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative to the largest entry of all."""
    assert found.keys() == wanted.keys()
    size = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) / size


def drawn(trainer: Any, step: int = 0) -> list[int]:
    """The records of a logical batch of a private trainer's first epoch."""
    return list(trainer.get_train_dataloader().batch_sampler)[step]


class Fixed:
    """In place of a private trainer's Poisson batches: these records, in every step."""

    def __init__(self, records: Sequence[int], steps: int = 1) -> None:
        self.records, self.steps = list(records), steps

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        """Nothing depends on it."""

    def __iter__(self) -> Any:
        return iter([self.records] * self.steps)


def summed_gradient(trainer: Any, records: Sequence[int]) -> dict[str, Tensor]:
    """What one step of a private trainer without noise divides by the expected batch size; weights stay as they are."""
    before = trainable(trainer)
    trainer.privacy.batches = Fixed(records)
    trainer.train()
    after = trainable(trainer)
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            if p.requires_grad:
                p.copy_(before[name].to(p))
    size = trainer.privacy.plan.expected_batch_size
    return {name: (before[name] - after[name]) * (size / LEARNING_RATE) for name in before}
