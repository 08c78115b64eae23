"""A private trainer's run: batches, accounting, budget, logs, checkpoints, and what it leaves behind."""

from __future__ import annotations

import glob
import itertools
import math
import random
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

from peft import PeftModel
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from opacus.accountants import create_accountant
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.integrations.hf.batches import SplitCollate
from opacus.integrations.hf.random_records import randomness_of_records
from opacus.integrations.transformers import DPTrainerMixin, make_trainer_private
from opacus.tests import hf_tiny as tiny
from opacus.tests.hf_trainers import (
    NAMES,
    Fixed,
    adapters,
    arguments,
    make_trainer,
    norm,
    summed_gradient,
    trainable,
)
from opacus.utils.checkpoint_file import CheckpointError

GPT2 = "Trainer, GPT-2 with tied head, full"
SFT = "SFT, Llama, LoRA"
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "lr_scheduler_type": "linear"}
# made-up records, so that short tests need not look for the reduction among the trainer's
QUICK = {"delta": 1e-5, "max_grad_norm": 1.0, "accountant": "rdp"}


def private(name: str = SFT, *, run: dict | None = None, **changes: object):
    options = {**QUICK, "noise_multiplier": 1.0, "seed": 3, **(run or {})}
    return make_trainer_private(make_trainer(name, **changes), **options)


class KilledError(Exception):
    pass


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KilledError


class Watch(TrainerCallback):
    """Copies of the weights after each step."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer
        self.weights = [trainable(trainer)]

    def on_step_end(self, args, state, control, **kwargs):
        self.weights.append(trainable(self.trainer))

    def moved(self, step: int) -> float:
        before, after = self.weights[step], self.weights[step + 1]
        return norm({name: after[name] - before[name] for name in after})


# -------------------------------------------------------------- sensitivity


@pytest.mark.parametrize("name", NAMES)
def test_a_record_more_moves_the_sum_by_at_most_c_whatever_its_length(name):
    bound = 0.05
    trainer = private(name, run={"noise_multiplier": 0.0, "max_grad_norm": bound, "expected_batch_size": 8})
    records = [0, 1, 2, 3, 4, 7, 9]
    lengths = [len(tiny.TEXTS[i]) for i in records]
    whole = summed_gradient(trainer, records)
    for extreme in (max(lengths), min(lengths)):
        left = [i for i, length in zip(records, lengths, strict=True) if length != extreme]
        less = summed_gradient(trainer, left)
        share = norm({key: whole[key] - less[key] for key in whole})
        assert bound * 0.9 < share < bound * (1 + 1e-4)  # all are longer than so small a bound


@pytest.mark.parametrize("clipping", ["automatic", "per_layer", "adaptive"])
def test_every_clipping_style_bounds_a_record(clipping):
    count = len(trainable(make_trainer(SFT)))
    bound, options = 0.05, {}
    if clipping == "per_layer":
        bound = [0.01] * count
    if clipping == "adaptive":
        options = {
            "target_unclipped_quantile": 0.5,
            "clipbound_learning_rate": 0.2,
            "max_clipbound": 10.0,
            "min_clipbound": 0.01,
            "unclipped_num_std": 10.0,
        }
    total = math.sqrt(sum(b * b for b in bound)) if isinstance(bound, list) else bound
    run = {"noise_multiplier": 0.0, "max_grad_norm": bound, "clipping": clipping, **options}
    if clipping == "adaptive":
        run["noise_multiplier"] = 1e-4
    trainer = private(SFT, run=run)
    alone = summed_gradient(trainer, [2])
    assert 0.5 * total < norm(alone) < total * 1.05


# -------------------------------------------------------- batches and steps


def test_batches_are_poisson_at_the_stated_rate_and_differ_between_epochs_and_runs():
    trainer = private(run={"expected_batch_size": 3})
    batches = trainer.get_train_dataloader().batch_sampler
    assert len(batches) == 4
    seen = []
    for epoch in range(400):
        batches.set_epoch(epoch)
        seen += list(batches)
    sizes = torch.tensor([len(batch) for batch in seen], dtype=torch.float64)
    # binomial(12, 1/4): mean 3, variance 9/4; 1600 draws
    assert abs(float(sizes.mean()) - 3) < 5 * math.sqrt(2.25 / 1600)
    assert abs(float(sizes.var()) - 2.25) < 0.5
    assert len({tuple(batch) for batch in seen}) > 500
    first = list(batches)
    trainer.privacy.steps_before = 7
    assert list(batches) != first


def test_an_empty_batch_is_a_step_of_noise_alone_and_accounted():
    trainer = private(run={"noise_multiplier": 0.0, "expected_batch_size": 1}, max_steps=12)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    sizes = [len(batch) for batch in trainer.get_train_dataloader().batch_sampler]
    assert 0 in sizes
    assert any(sizes)
    trainer.train()
    assert len(trainer.privacy.accountant) == trainer.state.global_step == 12
    assert [watch.moved(step) > 0 for step in range(12)] == [size > 0 for size in sizes]


def test_noise_of_a_step_has_the_stated_size_once():
    run = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "expected_batch_size": 4}
    trainer = private(GPT2, run=run, learning_rate=1.0)
    before = trainable(trainer)
    trainer.privacy.batches = Fixed([])
    trainer.train()
    after = trainable(trainer)
    z = torch.cat([(after[name] - before[name]).flatten() for name in before]) * (4 / (2.0 * 0.5))
    n = z.numel()
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.var()) - 1) < 5 * math.sqrt(2 / n)


def test_two_trains_in_a_row_draw_other_batches_and_add_up():
    trainer = private(run={"expected_batch_size": 4}, max_steps=2)
    trainer.train()
    first = list(trainer.get_train_dataloader().batch_sampler)
    trainer.train()
    assert list(trainer.get_train_dataloader().batch_sampler) != first
    assert len(trainer.privacy.accountant) == 4


@pytest.mark.parametrize("error", [KilledError, KeyboardInterrupt])
def test_a_logical_batch_that_was_cut_short_leaves_nothing_for_the_next_train(error, monkeypatch):
    bound = 0.01
    trainer = private(
        run={"noise_multiplier": 0.0, "max_grad_norm": bound, "expected_batch_size": 8},
        per_device_train_batch_size=1,
    )
    step, calls = type(trainer).__mro__[2].training_step, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 4:  # three physical batches are clipped and summed by then
            raise error
        return step(self, *args)

    monkeypatch.setattr(type(trainer).__mro__[2], "training_step", interrupted)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.privacy.batches = Fixed([0, 1, 2, 3])
    with pytest.raises(error):
        trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == before
    assert norm(summed_gradient(trainer, [4])) < 1.001 * bound
    assert len(trainer.privacy.accountant) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: setattr(t.args, "gradient_accumulation_steps", 2),
            "gradient_accumulation_steps=2 was set",
        ),
        (lambda t: setattr(t.args, "ignore_data_skip", True), "would draw the batches of its epoch again"),
        (
            lambda t: setattr(t, "train_dataset", t.train_dataset.select(range(6))),
            "6 records, it had 12",
        ),
        (
            lambda t: setattr(t, "data_collator", lambda records: t.data_collator(records)),
            "data_collator was replaced",
        ),
        (
            lambda t: setattr(t, "compute_loss_func", lambda outputs, labels, **_: outputs.loss),
            "compute_loss_func was replaced",
        ),
        (lambda t: setattr(t, "compute_loss", t.compute_loss), "compute_loss was set on the trainer object"),
    ],
    ids=["accumulation", "a setting that is refused", "data", "collate function", "loss", "method"],
)
def test_what_was_changed_after_make_trainer_private_is_refused_by_train(change, message):
    trainer = private()
    change(trainer)
    with pytest.raises(ConfigurationError, match=message):
        trainer.train()
    assert len(trainer.privacy.accountant) == 0


class Reset(TrainerCallback):
    """Lets the trainer make (or takes) another optimizer when a training ends."""

    def __init__(self, trainer, make) -> None:
        self.trainer, self.make = trainer, make

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.optimizer = self.make()


@pytest.mark.parametrize("reset", ["none", "new"])
def test_noise_goes_on_where_it_was_when_the_optimizer_is_built_anew(reset):
    def updates(make):
        trainer = private(GPT2, run={"noise_multiplier": 50.0}, max_steps=2, learning_rate=1.0)
        if make is not None:
            trainer.add_callback(Reset(trainer, lambda: make(trainer)))
        watch = Watch(trainer)
        trainer.add_callback(watch)
        trainer.train()
        trainer.train()
        assert len(trainer.privacy.accountant) == 4
        flat = [torch.cat([w.flatten() for w in weights.values()]) for weights in watch.weights]
        return torch.stack([after - before for before, after in itertools.pairwise(flat)])

    def given(trainer):
        groups = [{"params": group["params"]} for group in trainer.privacy.optimizer.param_groups]
        return torch.optim.SGD(groups, lr=1.0)

    makers = {"none": lambda trainer: None, "new": given}
    found, uninterrupted = updates(makers[reset]), updates(None)
    # SGD keeps nothing between steps: the same noise on the same gradients, to the last bit, whatever optimizer stands in its place
    assert torch.equal(found, uninterrupted)
    size = found.shape[1]
    cosines = torch.nn.functional.normalize(found, dim=1) @ torch.nn.functional.normalize(found, dim=1).T
    assert (
        float((cosines - torch.eye(4)).abs().max()) < 6 / math.sqrt(size) + 0.01
    )  # gradients share a little


def test_the_users_own_optimizer_is_made_private():
    trainer = make_trainer(SFT)
    own = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=1.0)
    trainer.optimizer = own
    make_trainer_private(trainer, noise_multiplier=1.0, **QUICK)
    trainer.train()
    assert trainer.privacy.optimizer.original_optimizer is own
    assert len(trainer.privacy.accountant) == 1


def test_bf16_steps_stay_close_to_float32_and_within_the_bound():
    run = {"noise_multiplier": 0.0, "max_grad_norm": 0.05, "expected_batch_size": 8}
    full = summed_gradient(private(run=run), [0, 2, 4])
    low = summed_gradient(private(run=run, bf16=True), [0, 2, 4])
    assert norm({name: low[name] - full[name] for name in full}) < 0.05 * norm(full)
    assert norm(low) < 3 * 0.05 * 1.001


# ------------------------------------------------------- budget and figures


def test_the_target_is_reached_and_not_exceeded_and_logged():
    trainer = private(run={"noise_multiplier": None, "target_epsilon": 5.0}, num_train_epochs=2, max_steps=-1)
    trainer.train()
    assert trainer.state.global_step == 8  # 2 epochs of 12 / 3 steps
    assert 4.9 < trainer.get_epsilon() <= 5.0
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["privacy_steps"] for entry in logged] == list(range(1, 9))
    assert logged[-1]["epsilon"] == pytest.approx(trainer.get_epsilon(), abs=1e-5)
    assert not any("grad_norm" in entry for entry in trainer.state.log_history)


def test_training_stops_before_the_target_is_exceeded_and_does_not_go_on():
    trainer = private(run={"target_epsilon": 6.0}, max_steps=50, save_strategy="steps", save_steps=1000)
    trainer.train()
    done = trainer.state.global_step
    assert 0 < done < 50
    reference = create_accountant("rdp")
    reference.history = [(1.0, 3 / 12, done + 1)]
    assert trainer.get_epsilon() <= 6.0 < reference.get_epsilon(1e-5)
    assert glob.glob(f"{trainer.args.output_dir}/checkpoint-{done}")
    with pytest.raises(ConfigurationError, match="the budget is spent"):
        trainer.train()


def test_unprotected_figures_can_be_left_out():
    trainer = private(run={"log_unprotected": False}, max_steps=2)
    result = trainer.train()
    known = {"learning_rate", "epoch", "step", "epsilon", "privacy_steps", "train_runtime"}
    assert set().union(*trainer.state.log_history) <= known | {"train_steps_per_second"}
    assert result.training_loss == 0


# ------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("saved_at", [1, 4], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize("name", [GPT2, SFT])
def test_a_killed_run_resumes_bit_for_bit(name, saved_at):
    model = {"model": tiny.gpt2(dropout=0.1)} if name == GPT2 else {}
    run = {"expected_batch_size": 4}  # 3 steps an epoch

    def start(run_options, **changes):
        if model:
            changes["model"] = tiny.gpt2(dropout=0.1)
        return private(name, run=run_options, max_steps=6, **ADAM, **changes)

    straight = start(run)
    straight.train()
    killed = start(run, save_strategy="steps", save_steps=saved_at)
    killed.add_callback(KillAt(saved_at + 1))
    with pytest.raises(KilledError):
        killed.train()
    resumed = start({**run, "seed": None})  # batches and noise go on by what the checkpoint says
    resumed.train(resume_from_checkpoint=f"{killed.args.output_dir}/checkpoint-{saved_at}")
    wanted, found = trainable(straight), trainable(resumed)
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    assert resumed.get_epsilon() == straight.get_epsilon()
    assert len(resumed.privacy.accountant) == 6


def test_a_checkpoint_without_optimizer_is_refused_at_the_first_step():
    saved = private(max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True)
    saved.train()
    resumed = private(max_steps=3)
    before = trainable(resumed)
    with pytest.raises(CheckpointError, match="no privacy state"):
        resumed.train(resume_from_checkpoint=f"{saved.args.output_dir}/checkpoint-1")
    assert len(resumed.privacy.accountant) == 0
    assert before.keys() == trainable(resumed).keys()


def test_a_checkpoint_of_a_trainer_that_was_not_private_is_refused():
    plain = make_trainer(SFT, max_steps=2, save_strategy="steps", save_steps=1)
    plain.train()
    with pytest.raises(CheckpointError, match="was not private"):
        private(max_steps=3).train(resume_from_checkpoint=f"{plain.args.output_dir}/checkpoint-1")


def test_a_checkpoint_of_a_run_with_another_rate_is_refused():
    saved = private(max_steps=2, save_strategy="steps", save_steps=1)
    saved.train()
    other = private(run={"expected_batch_size": 5}, max_steps=3)
    with pytest.raises(CheckpointError, match="expected_batch_size=3, this one has 5"):
        other.train(resume_from_checkpoint=f"{saved.args.output_dir}/checkpoint-1")


# ------------------------------------------- one checkpoint, resumed otherwise

# weights, and the sums that move them, as good as nothing: what is left of two updates is noise
LOUD = {"noise_multiplier": 50.0, "seed": None, "expected_batch_size": 12}
SAVING = {"save_strategy": "steps", "save_steps": 1}


def saved_at_one(**changes):
    trainer = private(GPT2, run=LOUD, **{"max_steps": 1, "learning_rate": 1.0, **SAVING, **changes})
    trainer.train()
    return f"{trainer.args.output_dir}/checkpoint-1"


def other_records(trainer):
    rows = trainer.train_dataset.to_list()
    rows[5]["input_ids"] = rows[5]["input_ids"][::-1]
    trainer.train_dataset = type(trainer.train_dataset).from_list(rows)


@pytest.mark.parametrize(
    ("changes", "change", "named"),
    [
        ({}, other_records, "train_dataset"),
        ({"weight_decay": 0.5}, None, r"args\.weight_decay"),
        ({"run": {"max_grad_norm": 0.5}}, None, "max_grad_norm"),
        ({}, None, None),
    ],
    ids=["records", "a setting", "clipping norm", "nothing"],
)
def test_noise_of_a_checkpoint_goes_on_only_with_what_it_was_for(changes, change, named):
    checkpoint = saved_at_one()

    def noise(changes, change, named):
        run = {**LOUD, **changes.get("run", {})}
        others = {name: value for name, value in changes.items() if name != "run"}
        trainer = private(GPT2, run=run, **{"max_steps": 2, "learning_rate": 1.0, **others})
        if change is not None:
            change(trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=checkpoint)
        said = [str(w.message) for w in caught if "noise of its own" in str(w.message)]
        assert len(said) == (named is not None)
        assert named is None or re.search(f"with other {named}\\. ", said[0])
        assert len(trainer.privacy.accountant) == 2
        return torch.cat([w.flatten() for w in trainable(trainer).values()])

    start = GPT2LMHeadModel.from_pretrained(checkpoint)
    before = torch.cat([p.detach().double().flatten() for p in start.parameters()])
    plain, other = noise({}, None, None) - before, noise(changes, change, named) - before
    cosine = float(torch.nn.functional.cosine_similarity(plain, other, dim=0))
    if named is None:
        assert torch.equal(plain, other)
    else:
        assert abs(cosine) < 6 / math.sqrt(plain.numel()) + 0.01
        assert torch.equal(
            noise(changes, change, named) - before, other
        )  # the same branch again gives nothing new


def test_going_back_to_a_checkpoint_repeats_what_was_released_and_is_not_accounted_twice():
    trainer = private(GPT2, run={"seed": None}, max_steps=4, **SAVING)
    trainer.train()
    first, spent = trainable(trainer), trainer.get_epsilon()
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    again = trainable(trainer)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert trainer.get_epsilon() == spent
    trainer.args.max_steps = 5  # the schedule is constant: the same training, longer
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert len(trainer.privacy.accountant) == 5
    assert trainer.state.global_step == 5


class Perturbed:
    """Records with a token exchanged, at a place from a generator of the data set's own."""

    def __init__(self, data, generator) -> None:
        self.data, self.generator = data, generator

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int):
        record = dict(self.data[i])
        place = int(self.generator() * len(record["input_ids"]))
        record["input_ids"] = [5 if j == place else t for j, t in enumerate(record["input_ids"])]
        return record


class Hidden:
    """Random numbers whose state nothing tells."""

    __slots__ = ("of",)

    def __init__(self) -> None:
        self.of = random.Random(0)

    def __call__(self) -> float:
        return self.of.random()


def own_of_numpy(data):
    data.own = np.random.default_rng(0)
    data.generator = lambda: data.own.random()


def own_of_torch(data):
    data.own = torch.Generator().manual_seed(0)
    data.generator = lambda: float(torch.rand((), generator=data.own))


def own_of_python(data):
    data.own = random.Random(0)
    data.generator = lambda: data.own.random()


def hidden(data):
    data.generator = Hidden()


def of_default(data):
    data.generator = random.random


def none(data):
    data.generator = lambda: 0.5


@pytest.mark.parametrize("make", [own_of_numpy, own_of_torch, own_of_python, hidden, of_default, none])
@pytest.mark.parametrize("process", ["same", "another"])
def test_a_step_that_may_have_other_random_records_draws_other_noise_and_is_accounted(make, process):
    def made(**changes):
        trainer = private(GPT2, run=LOUD, max_steps=2, learning_rate=1.0, **changes)
        trainer.train_dataset = Perturbed(trainer.train_dataset, None)
        make(trainer.train_dataset)
        return trainer

    trainer = made(**SAVING)
    trainer.train()
    flat = lambda t: torch.cat([w.flatten() for w in trainable(t).values()])  # noqa: E731
    checkpoint = f"{trainer.args.output_dir}/checkpoint-1"
    start = GPT2LMHeadModel.from_pretrained(checkpoint)
    before = torch.cat([p.detach().double().flatten() for p in start.parameters()])
    first = flat(trainer) - before
    again = trainer if process == "same" else made()
    again.train(resume_from_checkpoint=checkpoint)
    second = flat(again) - before
    cosine = float(torch.nn.functional.cosine_similarity(first, second, dim=0))
    repeats = make is none
    assert cosine > 0.999 if repeats else abs(cosine) < 6 / math.sqrt(first.numel()) + 0.01
    assert len(again.privacy.accountant) == (2 if repeats or process == "another" else 3)


@pytest.mark.parametrize("make", [own_of_numpy, own_of_torch, own_of_python])
def test_runs_with_one_seed_are_equal_where_records_are_random_too(make):
    def trained():
        trainer = private(GPT2, run={**LOUD, "seed": 3}, max_steps=2)
        trainer.train_dataset = Perturbed(trainer.train_dataset, None)
        make(trainer.train_dataset)
        trainer.train()
        return trainable(trainer)

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_noise_of_a_masked_language_model_is_not_repeated_with_other_masks():
    """A resumed trainer puts the default generators back when its first batch was made already."""

    def made(**changes):
        args = arguments(TrainingArguments, max_steps=2, learning_rate=1.0, **changes)
        masks = DataCollatorForLanguageModeling(tiny.TOKENIZER, mlm=True, mlm_probability=0.5)
        trainer = Trainer(
            model=tiny.bert_masked(), args=args, train_dataset=tiny.token_data(), data_collator=masks
        )
        return make_trainer_private(trainer, **{**QUICK, **LOUD, "noise_multiplier": 50.0})

    trainer = made(**SAVING)
    trainer.train()
    first = torch.cat([w.flatten() for w in trainable(trainer).values()])
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    second = torch.cat([w.flatten() for w in trainable(trainer).values()])
    # two draws of one size, of which neither is in the other
    assert float((first - second).norm()) > 50.0 / LOUD["expected_batch_size"] * math.sqrt(len(first))
    assert len(trainer.privacy.accountant) == 3


def test_random_records_are_told_alike_from_the_start_only():
    loader = SimpleNamespace(
        dataset=RandomItems(), collate_fn=SimpleNamespace(collate=lambda r: {"x": torch.tensor(r)})
    )
    assert [randomness_of_records(loader, False) for _ in range(2)] == ["", ""]
    first, second = (randomness_of_records(loader, True) for _ in range(2))
    assert first != second


class RandomItems:
    """Numbers from torch's default generator."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> float:
        return float(torch.rand(()))


def test_going_back_with_noise_of_the_operating_system_is_accounted_again():
    """It is other noise on the same sums: a second release."""
    trainer = private(GPT2, run={"seed": None, "secure_mode": True}, max_steps=4, **SAVING)
    trainer.train()
    spent = trainer.get_epsilon()
    with pytest.warns(UserWarning, match="2 steps that this trainer made are no part"):
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert len(trainer.privacy.accountant) == 6
    assert trainer.get_epsilon() > spent
    assert trainer.state.global_step == 4


def test_going_back_to_a_checkpoint_and_on_in_another_way_accounts_for_both_ways():
    trainer = private(GPT2, run={"seed": None}, max_steps=4, **SAVING)
    trainer.train()
    spent = trainer.get_epsilon()
    trainer.args.learning_rate = 0.5
    with pytest.warns(UserWarning, match="2 steps that this trainer made are no part"):
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert len(trainer.privacy.accountant) == 6
    assert trainer.get_epsilon() > spent
    resumed = private(GPT2, run={"seed": None}, max_steps=5, learning_rate=0.5)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-4")
    assert len(resumed.privacy.accountant) == 7
    assert resumed.state.global_step == 5


def test_what_a_trainer_spent_before_it_resumed_another_run_stays_accounted():
    checkpoint = saved_at_one()
    trainer = private(GPT2, run=LOUD, max_steps=2, learning_rate=1.0)
    trainer.train()
    with pytest.warns(UserWarning, match="2 steps that this trainer made are no part"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.privacy.accountant.history == [(50.0, 1.0, 4)]
    trainer.train()
    assert trainer.privacy.accountant.history == [(50.0, 1.0, 6)]


def test_a_replay_takes_nothing_of_the_budget():
    trainer = private(GPT2, run={"target_epsilon": 6.0}, max_steps=50, **SAVING)
    trainer.train()
    done, spent = trainer.state.global_step, trainer.get_epsilon()
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    assert trainer.state.global_step == done
    assert trainer.get_epsilon() == spent <= 6.0


def test_one_seed_gives_trainings_of_other_settings_other_noise():
    def update(rate):
        trainer = private(GPT2, run={**LOUD, "seed": 7}, learning_rate=rate)
        before = trainable(trainer)
        trainer.train()
        after = trainable(trainer)
        return torch.cat([(after[name] - before[name]).flatten() for name in before])

    one, other = update(1.0), update(0.5)
    cosine = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
    assert abs(cosine) < 6 / math.sqrt(one.numel()) + 0.01
    assert torch.equal(update(1.0), one)


# ------------------------------------------------------- what is left behind


def test_save_model_writes_an_ordinary_model(tmp_path):
    trainer = private(GPT2, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path))
    loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path))
    wanted = trainer.model.state_dict()
    assert loaded.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in loaded.state_dict().items())


def test_saved_adapters_are_ordinary_too(tmp_path):
    trainer = private(SFT, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path))
    loaded = PeftModel.from_pretrained(tiny.llama(), str(tmp_path))
    found = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    wanted = dict(trainer.model.named_parameters())
    assert found
    assert all(torch.equal(p, wanted[name]) for name, p in found.items())


def test_detaching_leaves_no_hook_and_no_attribute():
    changed = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.7, "average_tokens_across_devices": True}
    trainer = private("SFT, Llama, full", max_steps=1, **changed)
    assert trainer.args.gradient_accumulation_steps == 1
    hooks = {name for name, module in trainer.model.named_modules() if module._forward_hooks}
    assert hooks
    trainer.train()
    spent = trainer.get_epsilon(), trainer.get_epsilon(1e-3)
    model = trainer.detach_privacy()
    assert {name: getattr(trainer.args, name) for name in changed} == changed
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(hasattr(p, "summed_grad") or p._post_accumulate_grad_hooks for p in model.parameters())
    assert (trainer.get_epsilon(), trainer.get_epsilon(1e-3)) == spent
    assert 0 < spent[1] < spent[0]
    for again in (trainer.train, lambda: make_trainer_private(trainer, noise_multiplier=1.0, **QUICK)):
        with pytest.raises(ConfigurationError, match="another one would not count what it spent"):
            again()


def test_a_trainer_of_a_private_kind_is_refused_until_it_was_made_private():
    kind = type(private(SFT))
    trainer = kind.__new__(kind)
    with pytest.raises(ConfigurationError, match="not private yet"):
        trainer.train()


def test_a_trainer_stays_what_it_was():
    trainer = private(SFT)
    assert isinstance(trainer, DPTrainerMixin)
    assert type(trainer).__mro__[2].__name__ == "SFTTrainer"
    assert trainer.args.gradient_accumulation_steps == 1
    with pytest.raises(ConfigurationError, match="private already"):
        make_trainer_private(trainer, noise_multiplier=1.0, **QUICK)


def test_accumulation_is_part_of_the_logical_batch():
    trainer = private(gradient_accumulation_steps=2)
    assert trainer.privacy.plan.expected_batch_size == 6
    assert trainer.privacy.plan.steps_per_epoch == 2


def test_adapters_exchanged_after_make_private_are_refused_at_the_step():
    trainer = private(SFT)
    base = trainer.model.unload()
    trainer.model = trainer.model_wrapped = PeftModel(base, adapters(task_type="CAUSAL_LM"))
    with pytest.raises(PerSampleGradientError, match="took part in the backward"):
        trainer.train()


class Change(TrainerCallback):
    def __init__(self, change) -> None:
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.change(model)


@pytest.mark.parametrize("size", [1, 8], ids=["many physical batches", "one physical batch"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_adapter("other"),
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
    ],
    ids=["set_adapter", "merge_adapter", "disable_adapter_layers"],
)
def test_adapters_switched_off_by_a_callback_are_named(change, size):
    trainer = make_trainer(SFT, per_device_train_batch_size=size, max_steps=3)
    trainer.model.add_adapter("other", adapters(task_type="CAUSAL_LM"))
    run = {**QUICK, "noise_multiplier": 1.0, "expected_batch_size": 8}
    make_trainer_private(trainer, **run)
    trainer.add_callback(Change(change))
    with pytest.raises(PerSampleGradientError, match="Were layers or adapters replaced, or switched off"):
        trainer.train()
    assert len(trainer.privacy.accountant) == 1


@pytest.mark.parametrize(("records", "sizes"), [(0, []), (1, [1]), (3, [3]), (4, [2, 2]), (10, [2, 3, 2, 3])])
def test_physical_batches_hold_every_record_once_in_equal_parts(records, sizes):
    split = SplitCollate(lambda part: {"rows": torch.tensor(part)}, 3)
    batches = split(list(range(records)))
    assert [batch.n_samples for batch in batches] == sizes
    assert [int(i) for batch in batches for i in batch.tensors["rows"]] == list(range(records))
