"""What the search at `make_trainer_private` must see: behaviour of training only, rare labels and lengths, kept state."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertForMultipleChoice,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)
from trl.experimental.tpo import TPOConfig, TPOTrainer

from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.integrations.hf import calibration
from opacus.integrations.hf.calibration import find_contract
from opacus.integrations.hf.collation import Collation
from opacus.integrations.hf.looked_mode import TrainingWithoutRandomness
from opacus.integrations.transformers import make_trainer_private
from opacus.tests import hf_tiny as tiny
from opacus.tests.hf_trainers import (
    NAMES,
    arguments,
    clipped_sum,
    largest_error,
    make_trainer,
    norm,
    own_gradients,
    summed_gradient,
)

RUN = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "accountant": "rdp"}


class Classifier(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: nn.Module, weight: Tensor | None = None, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(8, 8), between, nn.Linear(8, classes)
        self.weight = weight

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.last(self.between(torch.tanh(self.first(x))))
        return {"loss": F.cross_entropy(scores, labels, weight=self.weight), "logits": scores}


def stacked(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


def classified(model: nn.Module, labels: list[int] | None = None, **changes: object) -> Trainer:
    labels = [i % 2 for i in range(40)] if labels is None else labels
    x = torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": torch.tensor(label)} for row, label in zip(x, labels, strict=True)]
    args = arguments(TrainingArguments, **changes)
    return Trainer(model=model, args=args, train_dataset=data, data_collator=stacked)


# ------------------------------------------------------------- training only


class InTraining(nn.Module):
    """Does something in training, and nothing in `eval()`."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(x) if self.training else x


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x / x.detach().abs().max(),
        lambda x: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-2),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: 0.7 * x + 0.3 * x.roll(1, 0),
    ],
    ids=["largest of the batch", "batch statistics", "batch norm", "mixup"],
)
def test_samples_that_see_each_other_in_training_only_are_found(mixing):
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        make_trainer_private(classified(Classifier(InTraining(mixing))), **RUN)


class Skips(nn.Module):
    """Drops whole layers by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layerdrop = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < self.layerdrop else 2 * x


@pytest.mark.parametrize(
    "between",
    [
        nn.Dropout(0.5),
        Skips(),
        InTraining(lambda x: F.dropout(x, 0.5)),
        InTraining(lambda x: x + torch.randn_like(x)),
        nn.Sequential(InTraining(lambda x: x * torch.rand(len(x), 1)), nn.Dropout(0.5)),
    ],
    ids=["dropout", "layer drop", "functional dropout", "noise", "noise and dropout"],
)
def test_randomness_of_training_is_no_dependence(between):
    model = Classifier(between)
    modes = [module.training for module in model.modules()]
    trainer = make_trainer_private(classified(model), **RUN)
    assert trainer.privacy.contract.kind == "mean over rows"
    assert [module.training for module in model.modules()] == modes


def test_dropout_of_attention_is_off_while_a_loss_is_looked_at_and_back_afterwards():
    trainer = make_trainer("Trainer, Llama, full", model=tiny.llama(attention_dropout=0.5))
    attention = trainer.model.model.layers[0].self_attn
    with TrainingWithoutRandomness(trainer.model):
        assert (attention.training, attention.attention_dropout) == (True, 0.0)
    assert attention.attention_dropout == 0.5
    make_trainer_private(trainer, **RUN)
    assert trainer.privacy.contract.counts_tokens


# ------------------------------------------------------ rare labels, lengths


RARE = [int(i in (5, 11)) for i in range(40)]
SORTED = [int(i >= 20) for i in range(40)]
MANY = [i % 7 for i in range(70)]


@pytest.mark.parametrize(
    ("labels", "weight"),
    [(RARE, [1.0, 50.0]), (SORTED, [1.0, 10.0]), (MANY, [1.0] * 6 + [9.0])],
    ids=["rare", "sorted", "one of seven"],
)
@pytest.mark.parametrize("physical", [1, 8])
def test_a_mean_weighted_by_class_is_found_wherever_its_classes_are(labels, weight, physical):
    def trainer(weight):
        model = Classifier(nn.Identity(), weight, classes=max(labels) + 1)
        return classified(model, labels, per_device_train_batch_size=physical)

    with pytest.raises(PerSampleGradientError, match="Class weights in a mean|the loss: "):
        make_trainer_private(trainer(torch.tensor(weight)), **RUN)
    make_trainer_private(trainer(None), **RUN)


class Pooled(nn.Module):
    """Classifies the mean over positions: over all of them, or over those that are no padding."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(len(tiny.TOKENIZER), 16), nn.Linear(16, 2)
        self.masked = masked

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen = attention_mask[..., None] if self.masked else torch.ones_like(attention_mask)[..., None]
        pooled = (torch.tanh(self.embed(input_ids)) * seen).sum(1) / seen.sum(1)
        return {"loss": F.cross_entropy(self.head(pooled), labels)}


@pytest.mark.parametrize("count", [40, 1500])
def test_padding_that_counts_is_found_where_few_records_have_another_length(count):
    short = (7, 17) if count == 40 else (1203,)
    data = [
        {"input_ids": [5 + (i + j) % 9 for j in range(4 if i in short else 8)], "labels": i % 2}
        for i in range(count)
    ]

    def trainer(masked):
        return Trainer(
            model=Pooled(masked=masked),
            args=arguments(TrainingArguments),
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tiny.TOKENIZER),
        )

    with pytest.raises(PerSampleGradientError, match="padding that counts"):
        make_trainer_private(trainer(False), **RUN)
    make_trainer_private(trainer(True), **RUN)


def preferences() -> Dataset:
    """Of equal lengths throughout."""
    words = sorted({word for text in tiny.TEXTS for word in text.split()})

    def text(i: int) -> str:
        return " " + " ".join(words[(7 * i + 3 * j) % len(words)] for j in range(4))

    names = ("prompt", "chosen", "rejected", "reference")
    return Dataset.from_list([{name: text(i + 11 * j) for j, name in enumerate(names)} for i in range(12)])


def tpo(**changes: object) -> TPOTrainer:
    args = arguments(TPOConfig, **changes)
    return TPOTrainer(
        model=tiny.llama(), args=args, train_dataset=preferences(), processing_class=tiny.TOKENIZER
    )


def test_the_mean_over_gold_tokens_of_tpo_is_refused_by_name_and_found_though_lengths_are_equal():
    trainer = tpo()
    with pytest.raises(ConfigurationError, match=r"TPOTrainer: tpo_alpha=1\.0: .* Set tpo_alpha=0"):
        make_trainer_private(trainer, **RUN)
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        find_contract(trainer, trainer.train_dataset)


def test_tpo_without_that_term_takes_pairs():
    contract = make_trainer_private(tpo(tpo_alpha=0.0), **RUN).privacy.contract
    assert (contract.kind, contract.rows_per_sample) == ("mean over rows", 2)


@pytest.mark.parametrize("name", ["CPOTrainer", "ORPOTrainer"])
def test_trainers_that_join_answers_inside_their_loss_are_refused_by_name(name):
    trainer = make_trainer("Trainer, BERT classifier, full")
    trainer.__class__ = type(name, (Trainer,), {})
    with pytest.raises(ConfigurationError, match=rf"{name}: .* Use DPOTrainer"):
        make_trainer_private(trainer, **RUN)


# ------------------------------------------------------------------- buffers


class Keeps(nn.Module):
    """Updates a buffer in training."""

    def __init__(self, update, buffer: Tensor) -> None:
        super().__init__()
        self.update = update
        self.register_buffer("kept", buffer)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.kept = self.update(self.kept, x)
        return x


@pytest.mark.parametrize(
    ("update", "buffer"),
    [
        (lambda kept, x: kept.lerp(x.mean(0), 0.5), torch.zeros(8)),
        (lambda kept, x: kept.lerp_(x.mean(0), 0.5), torch.zeros(8)),
        (lambda kept, x: torch.maximum(kept, x.abs().max()), torch.zeros(())),
        (lambda kept, x: kept + (x > 0.1).sum(0), torch.zeros(8, dtype=torch.long)),
    ],
    ids=["moving average", "in place", "largest", "histogram"],
)
def test_a_buffer_that_keeps_the_data_is_refused_by_name_and_restored(update, buffer):
    trainer = classified(Classifier(Keeps(update, buffer)))
    with pytest.raises(ConfigurationError, match=r"buffer between\.kept: .* keeps in it what it saw"):
        make_trainer_private(trainer, **RUN)
    assert not trainer.model.between.kept.any()


@pytest.mark.parametrize(
    ("update", "buffer"),
    [
        (lambda kept, x: kept + 1, torch.zeros((), dtype=torch.long)),
        (lambda kept, x: torch.arange(float(max(len(kept), x.shape[0]))), torch.zeros(1)),
        (lambda kept, x: kept * 0.5, torch.full((2,), 8.0)),
    ],
    ids=["counter", "cache for a size", "schedule"],
)
def test_buffers_that_change_whatever_the_data_are_accepted(update, buffer):
    before = buffer.clone()
    trainer = make_trainer_private(classified(Classifier(Keeps(update, buffer))), **RUN)
    assert torch.equal(trainer.model.between.kept, before)


# --------------------------------------------------- one label for each record


def pictures() -> list[dict[str, object]]:
    stream = torch.Generator().manual_seed(2)
    return [{"pixel_values": torch.randn(3, 16, 16, generator=stream), "labels": i % 3} for i in range(12)]


def vision() -> Trainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=3, **sizes, **drops))
    args = arguments(TrainingArguments)
    return Trainer(model=model, args=args, train_dataset=pictures(), data_collator=default_data_collator)


def divided_by_the_count(outputs, labels, num_items_in_batch=None) -> Tensor:
    total = F.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def with_own_loss() -> Trainer:
    trainer = make_trainer("Trainer, BERT classifier, full")
    trainer.compute_loss_func = divided_by_the_count
    return trainer


@pytest.mark.parametrize(
    "make",
    [
        vision,
        with_own_loss,
        lambda: make_trainer("Trainer, BERT classifier, full", label_smoothing_factor=0.1),
    ],
    ids=["ViT", "compute_loss_func", "label smoothing"],
)
def test_losses_divided_by_the_count_of_records_take_the_step_of_a_loop_over_records(make):
    gradients = own_gradients(make())
    bound = statistics.median(map(norm, gradients))
    trainer = make_trainer_private(make(), **{**RUN, "noise_multiplier": 0.0, "max_grad_norm": bound})
    records = [0, 1, 3, 4, 5, 8, 11]
    found = summed_gradient(trainer, records)
    assert largest_error(found, clipped_sum([gradients[i] for i in records], bound)) < 2e-6


# ------------------------------------------- what few records do not show


def with_loss(reduce, physical: int, columns=lambda i: {}, classes: int = 2, labels=None) -> Trainer:
    """A classifier whose loss is `reduce(losses of the samples, inputs)`."""

    class Reduced(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            scores = model(x=inputs["x"], labels=inputs["labels"])["logits"]
            return reduce(F.cross_entropy(scores, inputs["labels"], reduction="none"), inputs)

    plain = classified(
        Classifier(nn.Tanh(), classes=classes),
        labels=[i % classes for i in range(80)] if labels is None else labels,
        per_device_train_batch_size=physical,
        remove_unused_columns=False,
    )
    data = [
        {**record, **{name: torch.tensor(v) for name, v in columns(i).items()}}
        for i, record in enumerate(plain.train_dataset)
    ]
    return Reduced(model=plain.model, args=plain.args, train_dataset=data, data_collator=stacked)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses, _: losses.topk(min(8, len(losses))).values.mean(),
        lambda losses, _: losses.topk(min(8, len(losses))).values.sum(),
        lambda losses, _: losses.sum() / max(7, len(losses)),
    ],
    ids=["mean of the hardest", "sum of the hardest", "denominator with a floor"],
)
def test_a_loss_that_changes_in_batches_of_a_step_s_size_only_is_found(reduce):
    with pytest.raises(PerSampleGradientError, match="the loss of a batch of 16 records is neither"):
        make_trainer_private(with_loss(reduce, physical=16), **RUN)


@pytest.mark.parametrize("physical", [3, 16])
def test_a_mean_over_records_of_a_step_s_size_is_accepted(physical):
    trainer = make_trainer_private(with_loss(lambda losses, _: losses.mean(), physical=physical), **RUN)
    assert trainer.privacy.contract.kind == "mean over rows"


@pytest.mark.parametrize("name", NAMES)
def test_every_trainer_s_loss_of_a_step_s_records_is_that_of_them_one_by_one(name, monkeypatch):
    compared = []
    own = calibration._Probe._sums

    def sums(self, records, contract):
        compared.append(own(self, records, contract))
        return compared[-1]

    monkeypatch.setattr(calibration._Probe, "_sums", sums)
    make_trainer_private(make_trainer(name, per_device_train_batch_size=8), **RUN)
    ((whole, parts),) = compared
    assert len(parts) == 8
    assert whole == pytest.approx(sum(parts), rel=1e-5)


@pytest.mark.parametrize("physical", [3, 17])
@pytest.mark.parametrize("values", [(1, 10), (1.0, 10.0)], ids=["whole numbers", "fractions"])
def test_weights_that_a_column_gives_to_few_records_are_found(values, physical):
    weighted = lambda losses, inputs: (losses * inputs["weight"]).sum() / inputs["weight"].sum()  # noqa: E731
    columns = lambda i: {"weight": values[i % 20 == 13]}  # noqa: E731
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        make_trainer_private(with_loss(weighted, physical, columns), **RUN)


@pytest.mark.parametrize("physical", [3, 17])
def test_a_weight_of_the_commonest_of_many_classes_is_found(physical):
    weights = torch.ones(40)
    weights[0] = 0.05

    def weighted(losses, inputs):
        of_each = weights[inputs["labels"]]
        return (losses * of_each).sum() / of_each.sum()

    labels = [0 if i % 2 else (i // 2) % 40 for i in range(240)]
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        make_trainer_private(with_loss(weighted, physical, classes=40, labels=labels), **RUN)


def test_a_step_of_the_user_s_own_is_refused_for_it_is_not_looked_at():
    class Mixes(Trainer):
        def training_step(self, model, inputs, *args):
            inputs["x"] = 0.5 * (inputs["x"] + inputs["x"].flip(0))
            return super().training_step(model, inputs, *args)

    plain = classified(Classifier(nn.Tanh()))
    own = Mixes(model=plain.model, args=plain.args, train_dataset=plain.train_dataset, data_collator=stacked)
    with pytest.raises(ConfigurationError, match="Mixes overrides training_step"):
        make_trainer_private(own, **RUN)


# -------------------------------------------------- collate functions that draw


class Remembers:
    """Collates as another function does, and keeps the batches."""

    def __init__(self, collate) -> None:
        self.collate = collate
        self.batches: list[dict[str, Tensor]] = []

    def __call__(self, records):
        batch = self.collate(records)
        self.batches.append({name: value.clone() for name, value in batch.items()})
        return batch


@pytest.mark.parametrize("seed", [None, 3])
def test_masked_language_models_whose_masks_are_drawn_take_the_step_of_a_loop_over_records(seed):
    def masked() -> Trainer:
        draws = DataCollatorForLanguageModeling(tiny.TOKENIZER, mlm=True, mlm_probability=0.6, seed=seed)
        data = [{"input_ids": (row["input_ids"] * 6)[:60]} for row in tiny.token_data()]
        args = arguments(TrainingArguments)
        return Trainer(
            model=tiny.bert_masked(), args=args, train_dataset=data, data_collator=Remembers(draws)
        )

    trainer = make_trainer_private(masked(), **{**RUN, "noise_multiplier": 0.0, "max_grad_norm": 0.5})
    contract = trainer.privacy.contract
    assert (contract.kind, contract.shifts_labels) == ("mean over tokens", False)
    seen = trainer.data_collator.batches
    seen.clear()
    found = summed_gradient(trainer, range(8))

    stock, gradients = masked(), []
    for batch in seen[2:]:  # before the first step records are collated twice, to see whether that is random
        for i in range(len(batch["labels"])):
            length = int(batch["attention_mask"][i].sum())
            alone = {name: value[i : i + 1, :length] for name, value in batch.items()}
            if not alone["labels"].ne(-100).any():
                continue  # nothing of it was masked: no loss
            stock.model.zero_grad()
            stock.compute_loss(stock.model, alone).backward()
            gradients.append({name: p.grad.double().clone() for name, p in stock.model.named_parameters()})
    assert len(gradients) >= 6
    assert largest_error(found, clipped_sum(gradients, 0.5)) < 2e-6


def augmented(change) -> Trainer:
    def collate(records):
        batch = stacked(records)
        return {**batch, "x": change(batch["x"])}

    trainer = classified(Classifier(nn.Identity()))
    trainer.data_collator = collate
    return trainer


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + torch.randn_like(x),
        lambda x: torch.stack([row * random.choice((-1, 1)) for row in x]),
        lambda x: x * torch.from_numpy(np.random.rand(len(x), 1).astype("float32")),
    ],
    ids=["torch", "random", "numpy"],
)
def test_augmentation_of_each_record_by_itself_is_accepted_and_generators_go_on_as_they_were(change):
    trainer = augmented(change)
    states = torch.get_rng_state(), random.getstate()
    make_trainer_private(trainer, **RUN, seed=1)
    assert trainer.privacy.contract.kind == "mean over rows"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + torch.rand(()) * (x[torch.randperm(len(x))] - x),
        lambda x: x + torch.randn_like(x) * x.std(),
        lambda x: x * torch.rand(()) + x.roll(1, 0),
    ],
    ids=["mixup", "scaled by the batch", "neighbour"],
)
def test_augmentation_that_mixes_records_is_refused(change):
    with pytest.raises(PerSampleGradientError, match="data_collator: what it makes of one record changes"):
        make_trainer_private(augmented(change), **RUN)


def test_a_collate_function_whose_draws_cannot_be_repeated_is_refused_by_name():
    hidden = torch.Generator().manual_seed(1)
    trainer = augmented(lambda x: x + torch.randn(x.shape, generator=hidden))
    with pytest.raises(
        ConfigurationError, match="data_collator draws random numbers that cannot be repeated"
    ):
        make_trainer_private(trainer, **RUN)


def test_a_collate_function_s_own_generator_goes_on_as_if_it_had_not_been_called():
    collate = DataCollatorForLanguageModeling(tiny.TOKENIZER, mlm=True, seed=3)
    records = list(tiny.token_data())[:3]
    collation = Collation(collate, records)
    assert collation.draws
    collation.pair(records)
    fresh = DataCollatorForLanguageModeling(tiny.TOKENIZER, mlm=True, seed=3)
    for _ in range(2):
        found, wanted = collate(records), fresh(records)
        assert torch.equal(found["labels"], wanted["labels"])
        collation.batch(records)


def test_several_choices_in_a_row_are_refused_by_name():
    data = [{"input_ids": torch.arange(12).view(2, 6) % 7 + 5 + i % 3, "labels": i % 2} for i in range(12)]
    trainer = Trainer(
        model=tiny.bert(BertForMultipleChoice),
        args=arguments(TrainingArguments),
        train_dataset=data,
        data_collator=default_data_collator,
    )
    with pytest.raises(ConfigurationError, match="input_ids has 2 sequences in each row"):
        make_trainer_private(trainer, **RUN)


@pytest.mark.parametrize(("name", "shifts"), [("BERT masked LM", False), ("Llama", True)])
def test_whether_the_first_label_counts_is_found_though_no_record_looked_at_has_one(name, shifts):
    """A mean over tokens: a count that leaves labels out would weigh records by each other's."""
    trainer = make_trainer(f"Trainer, {name}, full")
    trainer.model_accepts_loss_kwargs = False
    data = [
        {"input_ids": row["input_ids"] * 2, "labels": [-100, *(row["input_ids"] * 2)[1:]]}
        for row in tiny.token_data()
    ]
    trainer.data_collator = DataCollatorForTokenClassification(tiny.TOKENIZER)
    contract = find_contract(trainer, data)
    assert (contract.kind, contract.shifts_labels) == ("mean over tokens", shifts)
