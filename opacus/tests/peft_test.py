# ruff: noqa: E402
"""Adapters of PEFT: each kind's private update is that of a loop over samples, or the kind is refused by name before training."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="needs the extra hf (transformers)")
peft = pytest.importorskip("peft", reason="needs the extra hf (peft)")

from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.tests.adapter_models import (
    batch,
    clipped_sum,
    expected_sum,
    gpt2,
    largest_error,
    llama,
    losses,
    make_private,
    private_sum,
    shaken,
    trained,
)

QV, QO = ["q_proj", "v_proj"], ["q_proj", "o_proj"]


def tied_llama() -> nn.Module:
    return llama(tied=True)


def lora(**options: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(**{"r": 4, "target_modules": QV, "task_type": "CAUSAL_LM", **options})


def config(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, name)(task_type="CAUSAL_LM", **options)


# (model, config); loops over samples are in float64
EXACT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lora": (llama, lora()),
    "lora rank-stabilised, with bias": (llama, lora(use_rslora=True, lora_bias=True)),
    "lora on all linear layers": (llama, lora(target_modules="all-linear")),
    "lora on Conv1D, biases": (
        gpt2,
        lora(target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, bias="all"),
    ),
    "lora on embeddings": (llama, lora(target_modules=["embed_tokens", "q_proj"])),
    "lora on position embeddings": (gpt2, lora(target_modules=["wte", "wpe", "c_attn"], fan_in_fan_out=True)),
    "lora on the head": (llama, lora(target_modules=["lm_head"])),
    "lora, layers saved whole": (llama, lora(modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "lora, tied layers saved whole": (
        tied_llama,
        lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "lora, replicated layers": (llama, lora(layer_replication=[[0, 2], [1, 2]])),
    "lora, trainable tokens, tied": (tied_llama, lora(trainable_token_indices=list(range(3, 30)))),
    "dora": (llama, lora(use_dora=True)),
    "dora on Conv1D": (gpt2, lora(target_modules=["c_attn"], use_dora=True, fan_in_fan_out=True)),
    "dora on embeddings": (llama, lora(target_modules=["embed_tokens"], use_dora=True)),
    "ia3": (
        llama,
        config(
            "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
    ),
    "ia3 on Conv1D": (
        gpt2,
        config(
            "IA3Config",
            target_modules=["c_attn", "mlp.c_proj"],
            feedforward_modules=["mlp.c_proj"],
            fan_in_fan_out=True,
        ),
    ),
    "vera": (llama, config("VeraConfig", r=4, target_modules=QO)),
    "loha": (llama, config("LoHaConfig", r=4, target_modules=QV)),
    "lokr": (llama, config("LoKrConfig", r=4, target_modules=QV)),
    "boft": (llama, config("BOFTConfig", boft_block_size=4, target_modules=QV)),
    "oft": (llama, config("OFTConfig", r=0, oft_block_size=4, target_modules=QV)),
    "hra": (llama, config("HRAConfig", r=4, target_modules=QV)),
    "miss": (llama, config("MissConfig", r=4, target_modules=QV)),
    "norms": (llama, config("LNTuningConfig", target_modules=["input_layernorm", "norm"])),
    "fourier": (llama, config("FourierFTConfig", n_frequency=20, target_modules=QV)),
    "vblora": (
        llama,
        config("VBLoRAConfig", r=4, num_vectors=8, vector_length=8, topk=2, target_modules=QO),
    ),
    "trainable tokens": (
        llama,
        config("TrainableTokensConfig", token_indices=list(range(3, 30)), target_modules=["embed_tokens"]),
    ),
    "prefix tuning": (llama, config("PrefixTuningConfig", num_virtual_tokens=3)),
    "prefix tuning, projected": (
        llama,
        config("PrefixTuningConfig", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=16),
    ),
    "prompt tuning": (llama, config("PromptTuningConfig", num_virtual_tokens=3)),
    "prompt tuning, positions": (gpt2, config("PromptTuningConfig", num_virtual_tokens=3)),
    "p-tuning": (llama, config("PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=16)),
}


def adapted(name: str) -> nn.Module:
    make, configuration = EXACT[name]
    return shaken(peft.get_peft_model(make(), configuration()).double())


@pytest.mark.parametrize("name", EXACT)
def test_the_update_is_that_of_a_loop_over_samples(name, caplog):
    caplog.set_level(logging.ERROR)
    model = adapted(name)
    wanted, clip = expected_sum(model)
    assert largest_error(private_sum(model, clip), wanted) < 1e-11


@pytest.mark.parametrize("name", ["lora", "dora on embeddings", "prompt tuning", "loha"])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_other_modes_give_the_same_update(name, mode):
    model = adapted(name)
    wanted, clip = expected_sum(model)
    if mode == "hooks":
        found = private_sum(model, clip, grad_sample_mode="hooks")
    else:
        before = {key: p.detach().clone() for key, p in trained(model).items()}
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(5)), batch_size=5)
        from opacus import PrivacyEngine

        _, optimizer, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(trained(model).values(), lr=1.0),
            criterion=_Itself(),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=clip,
            poisson_sampling=False,
            grad_sample_mode="ghost",
            wrap_model=False,
            loss_reduction="sum",
        )
        value = losses(model, batch())
        criterion(value, torch.zeros_like(value)).backward()
        optimizer.step()
        found = {key: (before[key] - p.detach()).double() for key, p in trained(model).items()}
    assert largest_error(found, wanted) < 1e-11


class _Itself(nn.Module):
    """Takes losses as they are, as a criterion that can be reduced."""

    reduction = "sum"

    def forward(self, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return value.sum() if self.reduction == "sum" else value


@pytest.mark.parametrize(
    "configuration",
    [
        lora(lora_dropout=0.3),
        lora(lora_dropout=0.3, use_dora=True),
        lora(lora_dropout=0.3, target_modules=[*QV, "embed_tokens"]),
        config("OFTConfig", r=0, oft_block_size=4, target_modules=QV, module_dropout=0.3),
    ],
    ids=["lora", "dora", "embedding", "oft"],
)
def test_with_dropout_each_sample_keeps_the_mask_that_its_forward_drew(configuration):
    model = shaken(peft.get_peft_model(llama(), configuration()).double())
    parameters = trained(model)
    torch.manual_seed(5)
    rows = [
        [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(
                parameters.values(),
                torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True),
                strict=True,
            )
        ]
        for loss in losses(model, batch())
    ]
    wanted, clip = clipped_sum(list(parameters), rows)

    def same_draws(model: nn.Module, inputs: Any) -> torch.Tensor:
        torch.manual_seed(5)
        return losses(model, inputs)

    assert largest_error(private_sum(model, clip, loss=same_draws), wanted) < 1e-11


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "adalora": (
        config("AdaLoraConfig", init_r=4, target_r=2, total_step=100, target_modules=QV),
        r"ADALORA.*penalty on the weights",
    ),
    "cpt": (
        config("CPTConfig", cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 2]),
        r"CPT.*masks gradients",
    ),
    "osf": (config("OSFConfig", target_modules=QV), r"OSF.*projects weight gradients"),
    "poly": (
        config("PolyConfig", r=4, n_tasks=2, n_skills=2, n_splits=1, target_modules=QV),
        r"POLY.*random mixture",
    ),
    "pvera": (config("PveraConfig", r=4, target_modules=QO), r"PVERA.*at random"),
    "target_parameters": (
        lora(target_modules=[], target_parameters=["q_proj.weight"]),
        r"target_parameters=\['q_proj.weight'\].*target_modules",
    ),
    "vera with dropout": (
        config("VeraConfig", r=4, target_modules=QO, vera_dropout=0.1),
        r"vera_dropout=0.1.*Set vera_dropout=0",
    ),
    "loha with dropout": (
        config("LoHaConfig", r=4, target_modules=QV, rank_dropout=0.1),
        r"rank_dropout=0.1.*Set rank_dropout=0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_kinds_that_cannot_be_clipped_are_refused_by_name_before_training(name):
    configuration, message = REFUSED[name]
    model = peft.get_peft_model(llama(), configuration())
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    with pytest.raises(ConfigurationError, match=message):
        make_private(model, 1.0)
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


def test_an_adapter_that_was_there_and_is_switched_on_later_is_clipped():
    model = peft.get_peft_model(llama(), lora()())
    model.add_adapter("second", lora(target_modules=["k_proj"])())
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    shaken(model)
    wanted: dict[str, torch.Tensor] = {}

    def with_second(model: Any, inputs: Any) -> torch.Tensor:
        model.set_adapter("second")
        return losses(model, inputs)

    model.set_adapter("second")
    expected, clip = expected_sum(model)
    model.set_adapter("default")
    model.base_model.set_requires_grad("second", True)  # both are the optimizer's
    wanted = {name: expected.get(name, torch.zeros_like(p)) for name, p in trained(model).items()}
    found = private_sum(model, clip, loss=with_second)
    assert largest_error(found, wanted) < 1e-11


def test_a_second_adapter_added_after_make_private_is_refused_when_it_is_used():
    model = shaken(peft.get_peft_model(llama(), lora()()))
    _, optimizer, _ = make_private(model, 1.0)
    model.add_adapter("late", lora(target_modules=["k_proj"])())
    model.set_adapter("late")
    optimizer.add_param_group({"params": [p for name, p in trained(model).items() if "late" in name]})
    losses(model, batch()).sum().backward()  # nothing is captured
    with pytest.raises(ValueError, match="no backward pass was captured"):
        optimizer.step()
    model.base_model.set_adapter(["default", "late"])
    with pytest.raises(
        PerSampleGradientError, match=r"k_proj\.lora_A\.late\.weight received a gradient of its own"
    ):
        losses(model, batch()).sum().backward()


def test_parameters_of_a_second_adapter_that_was_never_hooked_are_not_stepped_with_noise_alone():
    model = shaken(peft.get_peft_model(llama(), lora()()))
    _, optimizer, _ = make_private(model, 1.0)
    model.add_adapter("late", lora(target_modules=["k_proj"])())
    late = [p for name, p in model.named_parameters() if "late" in name]
    for p in late:
        p.requires_grad_(True)
    optimizer.add_param_group({"params": late})
    losses(model, batch()).sum().backward()  # through the first one
    with pytest.raises(PerSampleGradientError, match="not part of the model that was made private"):
        optimizer.step()


def test_adapters_put_on_anew_after_make_private_are_refused():
    model = shaken(peft.get_peft_model(llama(), lora()()))
    _, optimizer, _ = make_private(model, 1.0)
    replaced = shaken(peft.get_peft_model(model.unload(), lora()()))
    optimizer.add_param_group({"params": list(trained(replaced).values())})
    losses(replaced, batch()).sum().backward()
    with pytest.raises(ValueError, match=r"not part of the model|no backward pass was captured"):
        optimizer.step()


def test_a_prompt_is_what_it_was_when_the_hooks_are_gone():
    model = shaken(peft.get_peft_model(llama(), config("PromptTuningConfig", num_virtual_tokens=3)()))
    with torch.no_grad():
        before = model(**batch()).logits
    hooks, _, _ = make_private(model, 1.0)
    torch.testing.assert_close(model(**batch()).logits.detach(), before, rtol=0, atol=1e-12)
    hooks.remove_hooks()
    assert "get_prompt" not in vars(model)
    torch.testing.assert_close(model(**batch()).logits.detach(), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "prompt tuning", "lora, layers saved whole"])
def test_a_saved_adapter_is_an_ordinary_one(name, tmp_path):
    model = adapted(name)
    plain_keys = set(peft.get_peft_model_state_dict(copy.deepcopy(model)))
    make_private_and_step(model)
    assert set(peft.get_peft_model_state_dict(model)) == plain_keys
    model.save_pretrained(tmp_path, safe_serialization=True)
    loaded = peft.PeftModel.from_pretrained(EXACT[name][0](), tmp_path).double()
    with torch.no_grad():
        model.eval(), loaded.eval()
        torch.testing.assert_close(loaded(**batch()).logits, model(**batch()).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3"])
def test_a_merged_model_is_a_plain_one_with_the_trained_function(name):
    model = adapted(name)
    hooks = make_private_and_step(model)
    with torch.no_grad():
        trained_logits = model.eval()(**batch()).logits
    hooks.cleanup()
    merged = model.merge_and_unload()
    assert not any(hasattr(p, "grad_sample") for p in merged.parameters())
    fresh = EXACT[name][0]().eval()
    fresh.load_state_dict(merged.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fresh(**batch()).logits, trained_logits, rtol=0, atol=1e-10)


def make_private_and_step(model: nn.Module) -> Any:
    hooks, optimizer, _ = make_private(model, 1.0)
    losses(model, batch()).sum().backward()
    optimizer.step()
    return hooks
