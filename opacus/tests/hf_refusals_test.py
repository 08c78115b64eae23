"""What keeps a trainer from being private is refused by name, before anything is changed; losses that mix samples are found."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

import accelerate
from datasets import Dataset
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.integrations.hf.calibration import find_contract
from opacus.integrations.hf.refusals import trainer_problems
from opacus.integrations.hf.refused_settings import ALLOWED_LOSSES, REFUSED
from opacus.integrations.transformers import DPTrainerMixin, make_trainer_private
from opacus.tests import hf_tiny as tiny
from opacus.tests.hf_trainers import adapters, arguments, make_trainer, trainable

RUN = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "accountant": "rdp"}
BERT = "Trainer, BERT classifier, full"
SFT = "SFT, Llama, LoRA"


def refusal_of(trainer, **changes) -> str:
    """The message, after checking that the trainer was left alone."""
    kind, before = type(trainer), trainable(trainer)
    with pytest.raises(ConfigurationError) as caught:
        make_trainer_private(trainer, **{**RUN, **changes})
    assert type(trainer) is kind
    after = trainable(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(m._forward_pre_hooks for m in trainer.model.modules())
    return str(caught.value)


# ------------------------------------------------------------- trainer, data


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("auto_find_batch_size", True, "starts again from step 0 with trained weights"),
        ("ignore_data_skip", True, "would draw the batches of its epoch again"),
        ("load_best_model_at_end", True, "a metric outside the mechanism"),
        ("include_num_input_tokens_seen", "all", "count of tokens"),
        ("use_liger_kernel", True, "replace the layers' forwards"),
        ("torch_compile", True, "not been tested in compiled models"),
        ("fp16", True, "GradScaler skips steps"),
        ("deepspeed", {"zero_optimization": {}}, "owns the backward"),
        ("optim", "adalomo", "during the backward"),
        ("optim", "galore_adamw_layerwise", "without layerwise"),
        ("optim", "schedule_free_adamw", "moves weights between training and evaluation"),
    ],
)
def test_settings_that_bypass_clipping_or_accounting_are_refused(setting, value, message):
    trainer = make_trainer(BERT)
    object.__setattr__(trainer.args, setting, value)  # some cannot even be set on this machine
    text = refusal_of(trainer)
    assert setting in text
    assert message in text


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_uploading_checkpoints_which_hold_the_seed_of_the_noise_is_refused(strategy):
    trainer = make_trainer(BERT)
    trainer.args.hub_strategy = HubStrategy(strategy)
    private = make_trainer_private(make_trainer(BERT, save_only_model=True), **RUN)
    private.args.hub_strategy = strategy
    trainer.args.push_to_hub = private.args.push_to_hub = True
    text = refusal_of(trainer)
    assert f"hub_strategy='{strategy}' uploads optimizer.pt" in text
    assert "'every_save'" in text
    private.train()  # saves no optimizer
    private.args.save_only_model = False
    with pytest.raises(ConfigurationError, match=r"uploads optimizer\.pt"):
        private.train()


@pytest.mark.parametrize("strategy", ["end", "every_save"])
def test_uploading_models_is_not_refused(strategy):
    trainer = make_trainer(BERT)
    trainer.args.push_to_hub, trainer.args.hub_strategy = True, HubStrategy(strategy)
    assert trainer_problems(trainer) == []


ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clipping": "adaptive"}, "unclipped_num_std must be given for adaptive clipping"),
        ({**ADAPTIVE, "target_unclipped_quantile": 2.0}, "target_unclipped_quantile must lie in"),
        ({**ADAPTIVE, "min_clipbound": 20.0}, r"must be below max_clipbound"),
        ({**ADAPTIVE, "noise_multiplier": 3.0}, "must be smaller than 2 . unclipped_num_std"),
        (
            {**ADAPTIVE, "noise_multiplier": None, "target_epsilon": 0.05},
            "must be smaller than 2 . unclipped_num_std",
        ),
        ({"clipping": "per_layer", "max_grad_norm": [1.0]}, "has 1 bounds for"),
        ({"max_grad_norm": [1.0, 1.0]}, r"must be a positive, finite number, not \[1.0, 1.0\]"),
        ({"reduction_device": "cuda:99"}, "reduction_device='cuda:99' cannot be used here"),
        ({"reduction_device": "meta"}, "reduction_device='meta' cannot be used here: it holds no values"),
        ({"target_epsilon": 1.0, "noise_multiplier": 0.0}, "keeps no target_epsilon"),
        ({"calibration_records": "ab"}, "calibration_records must be a list"),
        ({"calibration_records": [{"a": 1}, {"a": 2}]}, "cannot take calibration_records"),
    ],
)
def test_options_that_cannot_be_are_refused_before_training(changes, message):
    trainer = make_trainer(BERT)
    assert re.search(message, refusal_of(trainer, **changes))


def test_optimizers_that_need_a_closure_are_refused_whenever_they_come():
    trainer = make_trainer(BERT)
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())
    assert "LBFGS, computes the loss anew" in refusal_of(trainer)
    trainer.optimizer = None
    make_trainer_private(trainer, **RUN)
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())
    for start in (trainer.train, trainer.create_optimizer):
        with pytest.raises(ConfigurationError, match="LBFGS, computes the loss anew"):
            start()
    trainer.optimizer = None
    trainer.train()
    trainer.train()


def test_neftune_is_refused():
    trainer = make_trainer(SFT)
    trainer.neftune_noise_alpha = 5.0
    assert "NEFTune" in refusal_of(trainer)


def test_data_parallel_on_several_gpus_is_refused():
    trainer = make_trainer(BERT)
    trainer.args._n_gpu = 2
    assert "nn.DataParallel" in refusal_of(trainer)


def test_a_model_built_anew_by_train_is_refused():
    trainer = Trainer(
        model_init=lambda: tiny.llama(), args=arguments(TrainingArguments), train_dataset=tiny.token_data()
    )
    assert "model_init" in refusal_of(trainer)


def test_streams_and_missing_data_are_refused():
    trainer = make_trainer(BERT)
    trainer.train_dataset = tiny.labelled_data().to_iterable_dataset()
    assert "cannot be drawn from by index" in refusal_of(trainer)
    trainer.train_dataset = None
    assert "no train_dataset" in refusal_of(trainer)


def test_a_trainer_that_does_not_know_of_its_ranks_is_refused(monkeypatch):
    trainer = make_trainer(BERT)
    for name in ("runs_in_parallel", "torch.distributed.get_world_size"):
        monkeypatch.setattr(f"opacus.integrations.hf.refusals.{name}", lambda: 2)
    assert "arguments are for 1 process(es), and torch.distributed connects 2" in refusal_of(trainer)


def test_processes_that_would_each_train_alone_are_refused(monkeypatch):
    trainer = make_trainer(BERT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "started 2 processes, but each would train alone" in refusal_of(trainer)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_engines_that_keep_the_gradients_are_refused(kind, monkeypatch):
    trainer = make_trainer(BERT)
    kinds = accelerate.DistributedType
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", kinds(kind), raising=False)
    assert f"{kind} keeps gradients and optimizers to itself" in refusal_of(trainer)


@pytest.mark.parametrize("field", ["is_fsdp_enabled", "is_distributed_loading_by_transformers"])
def test_sharding_by_the_trainer_is_refused(field):
    trainer = make_trainer(BERT)
    setattr(trainer, field, True)
    assert "prepare_private" in refusal_of(trainer)


def test_tensor_and_context_parallel_inside_the_trainer_are_refused():
    trainer = make_trainer(BERT)
    trainer.args.parallelism_config = accelerate.ParallelismConfig(tp_size=2)
    assert "parallelism_config=ParallelismConfig: splitting tensors" in refusal_of(trainer)


def test_all_problems_are_named_at_once_with_wrong_arguments():
    trainer = make_trainer(BERT)
    trainer.args.auto_find_batch_size = True
    text = refusal_of(
        trainer,
        noise_multiplier=None,
        delta=2,
        max_grad_norm=-1,
        clipping="round",
        seed=-3,
        expected_batch_size=99,
        accountant="abacus",
        log_unprotected="no",
        secure_mode="no",
        calibration_records=5,
        shape=1,
    )
    for part in (
        "pass target_epsilon",
        "delta must lie between 0 and 1",
        "max_grad_norm must be a positive",
        "clipping 'round' is not available",
        "seed must be an integer",
        "from 1 to the data set's 12",
        "abacus",
        "log_unprotected must be True or False, not 'no'",
        "secure_mode must be True or False, not 'no'",
        "calibration_records must be a list of at least 2 records with the data set's columns, not 5",
        "shape is not an option",
        "auto_find_batch_size",
    ):
        assert part in text


def test_made_up_records_are_looked_at_in_place_of_the_data_set_s(monkeypatch):
    trainer = make_trainer("SFT, Llama, LoRA")
    made_up = [
        {"input_ids": [3 + i, 4, 5, 6][: 2 + i], "labels": [3 + i, 4, 5, 6][: 2 + i]} for i in range(3)
    ]
    own = type(trainer.train_dataset).__getitem__
    read: list[object] = []
    monkeypatch.setattr(
        type(trainer.train_dataset), "__getitem__", lambda data, key: read.append(key) or own(data, key)
    )
    make_trainer_private(trainer, **RUN, calibration_records=made_up)
    assert not read
    trainer.privacy.detach()
    for too_few in ([], made_up[:1]):
        assert "at least 2 records" in refusal_of(
            make_trainer("SFT, Llama, LoRA"), calibration_records=too_few
        )


def test_other_objects_are_refused():
    with pytest.raises(ConfigurationError, match=r"a Linear, not a transformers\.Trainer"):
        make_trainer_private(nn.Linear(1, 1), **RUN)


def test_a_delta_that_would_allow_publishing_a_record_is_warned_of():
    with pytest.warns(UserWarning, match="not below one over the number of records"):
        make_trainer_private(make_trainer(BERT), **{**RUN, "delta": 0.1})


# -------------------------------------------------------------------- models


def test_offloaded_trainable_parameters_are_refused():
    trainer = make_trainer(BERT)
    layer = trainer.model.bert.encoder.layer[0].output.dense
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    with pytest.raises(
        ConfigurationError, match=r"layer\.0\.output\.dense\.weight requires grad but is on the meta"
    ):
        make_trainer_private(trainer, **RUN)


def test_models_with_nothing_to_train_are_refused():
    trainer = make_trainer(BERT)
    trainer.model.requires_grad_(False)
    assert "nothing to train" in refusal_of(trainer)


def test_a_mixture_of_trainable_experts_and_its_auxiliary_loss_are_refused():
    config = MixtralConfig(
        vocab_size=len(tiny.TOKENIZER),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    text = refusal_of(make_trainer("Trainer, Llama, full", model=MixtralForCausalLM(config)))
    assert "mixture of experts" in text
    assert "output_router_logits=True" in text


def test_a_model_that_is_private_already_is_refused():
    trainer = make_trainer_private(make_trainer(BERT), **RUN)
    other = make_trainer(BERT, model=trainer.model)
    with pytest.raises(ConfigurationError, match="captured already"):
        make_trainer_private(other, **RUN)


def test_weights_used_outside_their_layer_are_refused():
    class Penalised(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss + model.classifier.weight.square().sum()

    trainer = make_trainer(BERT, max_steps=4)
    trainer.__class__ = Penalised
    make_trainer_private(trainer, **RUN)
    with pytest.raises(PerSampleGradientError, match=r"classifier\.weight.* outside its layer"):
        trainer.train()


# -------------------------------------------------------------------- losses


def dpo(data=None, **changes):
    args = arguments(DPOConfig, **changes)
    return DPOTrainer(
        model=tiny.llama(),
        args=args,
        train_dataset=equal_pairs() if data is None else data,
        processing_class=tiny.TOKENIZER,
        peft_config=adapters(),
    )


def kto(**changes):
    args = arguments(KTOConfig, **{"train_sampling_strategy": "sequential", **changes})
    return KTOTrainer(
        model=tiny.llama(),
        args=args,
        train_dataset=equal_judged(),
        processing_class=tiny.TOKENIZER,
        peft_config=adapters(),
    )


def sft(**changes):
    args = arguments(SFTConfig, **changes)
    return SFTTrainer(
        model=tiny.llama(), args=args, train_dataset=tiny.text_data(), processing_class=tiny.TOKENIZER
    )


WORDS = sorted({word for text in tiny.TEXTS for word in text.split()})


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(7 * start + 3 * i) % len(WORDS)] for i in range(count))


def equal_pairs() -> Dataset:
    """Of equal lengths: losses that sort the batch look independent where lengths differ."""
    return Dataset.from_list(
        [
            {"prompt": words(i, 4), "chosen": " " + words(i + 11, 5), "rejected": " " + words(i + 23, 5)}
            for i in range(12)
        ]
    )


def equal_judged() -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": words(i, 4), "completion": " " + words(i + 11, 5), "label": i % 3 != 0}
            for i in range(12)
        ]
    )


def test_dpo_losses_that_sort_or_average_over_the_batch_are_refused_by_name():
    for loss in ("aot", "aot_unpaired"):
        assert "the loss sorts the batch" in refusal_of(dpo(loss_type=[loss]))
    text = refusal_of(dpo(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]))
    assert "DPOTrainer: loss_types='sft'" in text
    assert "sigmoid, hinge, ipo" in text


def test_kto_names_the_loss_that_works():
    text = refusal_of(kto(loss_type="kto"))
    assert "KL baseline" in text
    assert "apo_zero_unpaired" in text


def test_packing_and_padding_free_are_refused_by_name():
    trainer = sft()
    trainer.args.packing = True
    assert "packing puts several samples into a row" in refusal_of(trainer)
    trainer = sft()
    trainer.padding_free = True
    assert "padding_free makes one row of the whole batch" in refusal_of(trainer)


def test_an_auxiliary_loss_is_refused():
    for trainer in (sft(), dpo()):
        trainer.aux_loss_enabled = True
        assert "auxiliary loss is a statistic of the batch" in refusal_of(trainer)


def test_trainers_that_generate_their_batches_are_refused():
    class GRPOTrainer(Trainer):
        pass

    trainer = make_trainer(BERT)
    trainer.__class__ = GRPOTrainer
    assert "generated and regrouped during training" in refusal_of(trainer)


def test_every_refusal_has_a_reason_and_every_list_of_losses_a_field():
    assert all(refused.reason.endswith(".") for entries in REFUSED.values() for refused in entries)
    assert all(field and allowed for field, allowed in ALLOWED_LOSSES.values())


# what the list says, measured: equal lengths, weights shaken by half their size
INDEPENDENT_DPO = (
    {"loss_type": ["sigmoid"]},
    {"loss_type": ["hinge"]},
    {"loss_type": ["ipo"]},
    {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
    {"loss_type": ["nca_pair"]},
    {"loss_type": ["robust"], "label_smoothing": 0.1},
    {"loss_type": ["bco_pair"]},
    {"loss_type": ["sppo_hard"]},
    {"loss_type": ["apo_zero"]},
    {"loss_type": ["apo_down"]},
    {"loss_type": ["discopop"]},
    {"loss_type": ["sigmoid_norm"]},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.5},
    {"loss_type": ["sigmoid"], "use_weighting": True},
    {"loss_type": ["sigmoid"], "f_divergence_type": "js_divergence"},
    {"loss_type": ["sigmoid"], "precompute_ref_log_probs": True},
)


def looked_at(trainer):
    data = trainer.get_train_dataloader().dataset
    return [data[i] for i in range(6)]


def contract_of(trainer, shake=0.5):
    return find_contract(trainer, looked_at(trainer), shake=shake)


@pytest.mark.parametrize("loss", INDEPENDENT_DPO, ids=lambda loss: "-".join(str(v) for v in loss.values()))
def test_dpo_losses_on_the_list_are_independent(loss):
    contract = contract_of(dpo(**loss))
    assert (contract.kind, contract.rows_per_sample) == ("mean over rows", 2)


def test_the_kto_loss_on_the_list_is_independent():
    assert contract_of(kto(loss_type="apo_zero_unpaired")).kind == "mean over rows"


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_sft_losses_on_the_list_are_sums_over_tokens(loss):
    contract = contract_of(sft(loss_type=loss))
    assert (contract.kind, contract.shifts_labels) == ("sum over tokens", True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dpo(loss_type=["aot"]),
        lambda: dpo(loss_type=["aot_unpaired"]),
        lambda: dpo(tiny.pair_data(), loss_type=["sft"]),  # a mean over tokens shows where lengths differ
        lambda: dpo(tiny.pair_data(), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 1.0]),
        lambda: kto(loss_type="kto", beta=1.0),
    ],
    ids=["aot", "aot_unpaired", "sft", "sigmoid and sft", "kto"],
)
def test_losses_off_the_list_are_found_too(make):
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        contract_of(make())


def custom(loss):
    class Custom(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model(**inputs), inputs, num_items_in_batch)

    trainer = make_trainer(BERT)
    trainer.__class__ = Custom
    return trainer


def own_losses(outputs, inputs):
    return nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")


def test_a_sum_over_rows_needs_nothing_undone():
    contract = contract_of(custom(lambda out, batch, count: own_losses(out, batch).sum()))
    assert contract.kind == "sum over rows"


@pytest.mark.parametrize(
    "mixing",
    [
        lambda out, batch, count: own_losses(out, batch).max(),
        lambda out, batch, count: own_losses(out, batch).square().mean().sqrt(),
        lambda out, batch, count: (
            (own_losses(out, batch) - own_losses(out, batch).mean().detach()).square().mean()
        ),
        lambda out, batch, count: nn.functional.cross_entropy(
            out.logits @ out.logits.T, torch.arange(len(out.logits))
        ),
    ],
    ids=["largest", "root mean square", "baseline", "in-batch negatives"],
)
def test_losses_that_mix_samples_are_found(mixing):
    with pytest.raises(PerSampleGradientError, match="samples are not isolated"):
        contract_of(custom(mixing))


def test_looking_leaves_no_trace():
    trainer = dpo()
    before, modes = trainable(trainer), [m.training for m in trainer.model.modules()]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    contract_of(trainer)
    after = trainable(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert modes == [m.training for m in trainer.model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert trainer._total_train_tokens == 0
    assert not any(trainer._metrics["train"].values())


# ------------------------------------------------------------------ subclass


def test_a_subclass_with_the_mixin_is_made_private_as_it_is_and_refuses_to_train_before():
    class Mine(DPTrainerMixin, Trainer):
        pass

    stock = make_trainer(BERT)
    trainer = Mine(
        model=tiny.bert(),
        args=arguments(TrainingArguments),
        train_dataset=tiny.labelled_data(),
        data_collator=stock.data_collator,
    )
    with pytest.raises(ConfigurationError, match="not private yet"):
        trainer.train()
    make_trainer_private(trainer, **RUN)
    assert type(trainer) is Mine
    trainer.train()
    assert len(trainer.privacy.accountant) == 1
