"""One step of a private trainer equals a loop over samples through the unmodified trainer's own loss."""

from __future__ import annotations

import functools
import statistics

import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

import accelerate

from opacus.integrations.transformers import make_trainer_private
from opacus.tests.hf_trainers import (
    EXPECTED,
    LEARNING_RATE,
    NAMES,
    clipped_sum,
    drawn,
    largest_error,
    make_trainer,
    norm,
    own_gradients,
    summed_gradient,
    trainable,
)

CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


@functools.cache
def gradients_of(name: str, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Each record's own, from the stock trainer."""
    return own_gradients(make_trainer(name, prepare=lambda model: model.to(dtype)))


def clipped_to(bound: float, trainer):
    """The trainer made private, without noise."""
    return make_trainer_private(
        trainer,
        noise_multiplier=0.0,
        delta=1e-5,
        max_grad_norm=bound,
        expected_batch_size=EXPECTED,
        accountant="rdp",
        seed=6,
    )


def error_of_one_step(
    name: str, *, dtype: torch.dtype = torch.float32, prepare=None, **changes: object
) -> float:
    """Of the update of one step of an unnoised private run, relative to its largest entry."""

    def prepared(model: torch.nn.Module) -> None:
        model.to(dtype)
        if prepare is not None:
            prepare(model)

    gradients = gradients_of(name, dtype)
    bound = statistics.median(map(norm, gradients))  # half of the records are clipped
    trainer = make_trainer(name, prepare=prepared, **changes)
    before = trainable(trainer)
    clipped_to(bound, trainer)
    records = drawn(trainer)
    assert len(records) == 8
    trainer.train()
    after = trainable(trainer)
    moved = {key: (before[key] - after[key]) * (EXPECTED / LEARNING_RATE) for key in before}
    return largest_error(moved, clipped_sum([gradients[i] for i in records], bound))


@pytest.mark.parametrize("name", NAMES)
def test_one_step_equals_a_loop_over_samples_through_the_trainers_own_loss(name):
    assert error_of_one_step(name) < 2e-6


@pytest.mark.parametrize("checkpointing", [CHECKPOINTED, REENTRANT], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_blocks_give_the_same_step(name, checkpointing):
    assert error_of_one_step(name, **checkpointing) < 2e-6


@pytest.mark.parametrize("physical", [2, 16])
@pytest.mark.parametrize("name", NAMES)
def test_one_and_four_physical_batches_give_the_same_step(name, physical):
    assert error_of_one_step(name, per_device_train_batch_size=physical) < 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_in_float64_the_step_is_as_exact_as_the_loss_which_may_be_float32_inside(name):
    assert error_of_one_step(name, dtype=torch.float64) < 1e-6


# modules of each model on the first device; all others go to the second
FIRST = {
    "Llama": ("model.embed_tokens", "model.rotary_emb", "model.layers.0"),
    "GPT-2": ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "lm_head"),
    "BERT classifier": (
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.pooler",
        "dropout",
        "classifier",  # where its labels are
    ),
    "BERT masked": ("bert.embeddings", "bert.encoder.layer.0", "cls"),
}
SECOND = {
    "Llama": ("model.layers.1", "model.norm"),
    "GPT-2": ("transformer.h.1", "transformer.ln_f"),
    "BERT classifier": ("bert.encoder.layer.1",),
    "BERT masked": ("bert.encoder.layer.1",),
}


def dispatched(name: str, model: torch.nn.Module, devices: list[torch.device]) -> None:
    kind = next(kind for kind in FIRST if kind in name)
    places = dict.fromkeys(FIRST[kind], devices[0]) | dict.fromkeys(SECOND[kind], devices[1])
    main = devices[0]
    if kind == "Llama":
        head = "score" if "Reward" in name else "lm_head"
        places[head] = devices[0] if "tied" in name else devices[1]
        if (
            "DPO" in name or "KTO" in name
        ):  # these want what the head gives on the trainer's own device, here the CPU
            places[head] = main = torch.device("cpu")
    accelerate.dispatch_model(model, places, main_device=main)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_dispatched_over_two_devices_takes_the_same_step(name, two_devices):
    def prepare(model: torch.nn.Module) -> None:
        dispatched(name, model, two_devices)
        assert {p.device for p in model.parameters()} >= set(two_devices)

    assert error_of_one_step(name, prepare=prepare) < 2e-6


def test_a_record_whose_loss_is_nan_leaves_the_others_as_they_are():
    """KTO's mean leaves such a record out of its denominator, too: the others would count for more."""
    name = "KTO, Llama, LoRA"
    gradients = own_gradients(make_trainer(name), [2, 3])
    bound = 1.2 * max(norm(g) for g in gradients)  # so that a changed scale is not clipped away

    trainer = clipped_to(bound, make_trainer(name, per_device_train_batch_size=3))
    trainer.desirable_weight = torch.tensor([torch.nan, 1.0])  # records 1 and 2 are the desirable ones
    found = summed_gradient(trainer, [1, 2, 3])
    assert largest_error(found, clipped_sum(gradients, bound)) < 2e-6
