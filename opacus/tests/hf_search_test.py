"""What the search at `make_trainer_private` must see: behaviour of training only, rare labels and lengths, kept state."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from opacus.errors import PerSampleGradientError
from opacus.integrations.hf.looked_mode import TrainingWithoutRandomness
from opacus.integrations.transformers import make_trainer_private
from opacus.tests import hf_tiny as tiny
from opacus.tests.hf_trainers import arguments, make_trainer

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
