# ruff: noqa: E402
"""Models that Accelerate dispatched over devices, offloaded in part, or quantized: the update is that of a loop over samples."""

from __future__ import annotations

import logging
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("transformers", reason="needs the extra hf (transformers)")
accelerate = pytest.importorskip("accelerate", reason="needs the extra hf (accelerate)")
peft = pytest.importorskip("peft", reason="needs the extra hf (peft)")

from opacus import PrivacyEngine
from opacus.checkpoint import CheckpointError
from opacus.data_loader import DPDataLoader
from opacus.errors import ConfigurationError
from opacus.integrations.accelerate import prepare_private
from opacus.schedulers import ExponentialNoise
from opacus.testing import count_copies
from opacus.tests.adapter_models import (
    LAYERS,
    batch,
    expected_sum,
    largest_error,
    llama,
    losses,
    make_private,
    private_sum,
    shaken,
    trained,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager


def over(devices: list[torch.device], **moved: str) -> dict[str, str]:
    """A device map that shares the blocks out; `moved` puts a part elsewhere."""
    names = [str(device) for device in devices]
    where = {"model.embed_tokens": names[0], "model.rotary_emb": names[0]}
    where |= {f"model.layers.{i}": names[i * len(names) // LAYERS] for i in range(LAYERS)}
    where |= {"model.norm": names[-1], "lm_head": names[-1]}
    return where | {
        f"model.layers.{name[5:]}" if name.startswith("block") else name: to for name, to in moved.items()
    }


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


# ------------------------------------------------------------------------------------------------ device maps


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_full_fine_tuning_over_a_device_map(tied, two_devices):
    wanted, clip = expected_sum(llama(tied=tied).train())
    model = llama(tied=tied).train()
    where = over(two_devices) | ({"lm_head": str(two_devices[0])} if tied else {})
    accelerate.dispatch_model(model, where)
    assert {p.device for p in model.parameters()} == set(two_devices)
    if tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert largest_error(private_sum(model, clip), wanted) < 1e-11


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_may_be_added_before_or_after_the_model_is_placed(when, two_devices):
    wanted, clip = expected_sum(shaken(with_lora(llama())))
    if when == "before":
        model = with_lora(llama())
        accelerate.dispatch_model(model.base_model.model, over(two_devices))
    else:
        model = with_lora(accelerate.dispatch_model(llama(), over(two_devices)))
    shaken(model)
    assert {p.device for p in trained(model).values()} == set(two_devices)
    assert largest_error(private_sum(model, clip), wanted) < 1e-11


def test_norms_and_factors_are_all_that_crosses_devices_on_privacys_account(two_devices):
    model = shaken(with_lora(accelerate.dispatch_model(llama(), over(two_devices))))
    plain, private = _copies_of_a_step(model, None), _copies_of_a_step(model, 1.0)
    assert private - plain == 2  # 2 (D - 1)


def _copies_of_a_step(model: nn.Module, clip: float | None) -> int:
    """Copies between accelerators in a third step (before, gradients are compared with autograd's, and samples' isolation is probed)."""
    optimizer: Any = torch.optim.SGD(trained(model).values(), lr=0.0)
    if clip is not None:
        _, optimizer, _ = make_private(model, clip)
    for _ in range(3):
        optimizer.zero_grad()
        with count_copies() as seen:
            losses(model, batch()).sum().backward()
            optimizer.step()
    return seen.cross


@pytest.mark.parametrize("place", ["device and CPU", "CPU and disk", "device and disk"])
def test_frozen_layers_may_be_offloaded(place, two_devices, tmp_path):
    wanted, clip = expected_sum(shaken(with_lora(llama(), layers_to_transform=[1])))
    main, away = {
        "device and CPU": (two_devices[0], "cpu"),
        "CPU and disk": (torch.device("cpu"), "disk"),
        "device and disk": (two_devices[0], "disk"),
    }[place]
    model = llama()
    accelerate.dispatch_model(model, over([main], block0=away, lm_head=away), offload_dir=str(tmp_path))
    model = shaken(with_lora(model, layers_to_transform=[1]))
    assert any(p.device.type == "meta" for p in model.parameters())
    assert largest_error(private_sum(model, clip), wanted) < 1e-11


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
def test_trainable_parameters_that_are_offloaded_are_refused_by_name(adapters, two_devices):
    model = accelerate.dispatch_model(llama(), over(two_devices[:1], block0="cpu"))
    if adapters:
        model = with_lora(model)
    name = "model.layers.0.self_attn.q_proj" + (".lora_A.default" if adapters else "") + ".weight"
    with pytest.raises(ConfigurationError, match=rf"{name} is on the meta device and requires grad"):
        make_private(model, 1.0)


# ------------------------------------------------------------------------------------------- quantized bases


def torchao_base(config: Callable[[], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
        model = llama(dtype=torch.float32)
        quantization.quantize_(
            model.model, config(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear)
        )
        return model

    return make


def int8_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def int4_config() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))


def bitsandbytes_base(bits: int, threshold: float = 0.0) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
        model = llama(dtype=torch.float32)
        for path, layer in list(model.model.named_modules()):
            if isinstance(layer, nn.Linear):
                sizes = (layer.in_features, layer.out_features)
                if bits == 8:
                    quantized = bnb.nn.Linear8bitLt(
                        *sizes, bias=False, has_fp16_weights=False, threshold=threshold
                    )
                    weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
                else:
                    quantized = bnb.nn.Linear4bit(
                        *sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                    )
                    weight = bnb.nn.Params4bit(
                        layer.weight.data, requires_grad=False, quant_type="nf4", blocksize=64
                    )
                quantized.weight = weight
                parent, _, name = path.rpartition(".")
                setattr(model.model.get_submodule(parent), name, quantized.to("cpu"))
        setattr(model, f"is_loaded_in_{bits}bit", True)
        return model

    return make


QUANTIZED = {
    "torchao int8": torchao_base(int8_config),
    "torchao int4": torchao_base(int4_config),
    "bitsandbytes 8 bit": bitsandbytes_base(8),
    "bitsandbytes 4 bit": bitsandbytes_base(4),
}


@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3", "saved whole"])
@pytest.mark.parametrize("base", QUANTIZED)
def test_adapters_on_a_quantized_base(base, adapter):
    if base == "bitsandbytes 8 bit" and adapter == "dora":
        pytest.skip("plain training of this pair fails on a CPU")
    logging.getLogger("opacus.grad_sample.functorch").setLevel(logging.ERROR)
    model = QUANTIZED[base]()
    if adapter == "ia3":
        model = peft.get_peft_model(
            model,
            peft.IA3Config(
                target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"
            ),
        )
    else:
        model = with_lora(
            model,
            use_dora=adapter == "dora",
            modules_to_save=["lm_head"] if adapter == "saved whole" else None,
        )
    shaken(model)
    wanted, clip = expected_sum(model)
    assert (
        largest_error(private_sum(model, clip), wanted) < 1e-5
    )  # float32, quantized weights multiplied as they are


@pytest.mark.parametrize("base", QUANTIZED)
def test_adapters_on_a_quantized_base_over_two_devices(base, two_devices):
    with (
        warnings.catch_warnings(),
        torch.compiler.set_stance("force_eager"),
    ):  # bitsandbytes compiles, for minutes
        warnings.simplefilter("ignore")
        model = shaken(with_lora(accelerate.dispatch_model(QUANTIZED[base](), over(two_devices))))
        assert {p.device for p in trained(model).values()} == set(two_devices)
        wanted, clip = expected_sum(model)
        found = private_sum(model, clip)
    # 8-bit layers of bitsandbytes compute in float16 where they are not on a CPU
    assert largest_error(found, wanted) < (1e-2 if base == "bitsandbytes 8 bit" else 1e-5)


def test_eight_bit_layers_that_look_at_the_whole_batch_are_refused_by_name(two_devices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = accelerate.dispatch_model(bitsandbytes_base(8, threshold=6.0)(), over(two_devices))
    with pytest.raises(ConfigurationError, match=r"layers\.0\.self_attn\.q_proj.*llm_int8_threshold=0\.0"):
        make_private(with_lora(model), 1.0)


def test_quantized_activations_are_refused_by_name():
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model = torchao_base(quantization.Int8DynamicActivationInt8WeightConfig)()
    with pytest.raises(ConfigurationError, match=r"q_proj.*quantizes activations.*Int8WeightOnlyConfig"):
        make_private(with_lora(model), 1.0)


# ----------------------------------------------------------------------------------------- one accelerator


class Records(torch.utils.data.Dataset):
    """Records as mappings, as tokenized data sets have them."""

    def __init__(self, n: int) -> None:
        self.ids_NT = torch.randint(3, 40, (n, 7), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids_NT)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids_NT[i], "attention_mask": torch.ones(7, dtype=torch.long)}


@pytest.fixture
def accelerator():
    accelerate.state.AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def run(
    accelerator: Any | None, way: str, *, physical: int | None = None
) -> tuple[dict[str, torch.Tensor], int, float]:
    """Parameters, steps and epsilon after an epoch, through Accelerate in one `way` or without it."""
    model = shaken(with_lora(llama()))
    optimizer: Any = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    loader: Any = DataLoader(Records(24), batch_size=6, generator=torch.Generator().manual_seed(4))
    engine = PrivacyEngine(accountant="rdp")
    settings: dict[str, Any] = {
        "noise_multiplier": 0.7,
        "max_grad_norm": 0.5,
        "noise_generator": torch.Generator().manual_seed(5),
    }
    if way == "prepare_private":
        model, optimizer, loader, _ = prepare_private(
            accelerator, model, optimizer, loader, privacy_engine=engine, **settings
        )
    else:
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            grad_sample_mode="bk",
            wrap_model=False,
            **settings,
        )
    schedule: Any = torch.optim.lr_scheduler.LinearLR(
        optimizer.optimizer if way == "prepare_private" else optimizer, total_iters=4
    )
    if way == "prepare":
        optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    elif way == "prepare_private":
        schedule = accelerator.prepare(schedule)
        assert accelerator.prepare(loader) is loader
        assert accelerator.prepare(optimizer) is optimizer

    def epoch(batches: Any) -> None:
        for inputs in batches:
            optimizer.zero_grad()
            value = losses(model, inputs)
            loss = value.sum() / max(1, len(value))
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            if accelerator is not None:
                assert float(accelerator.clip_grad_norm_(model.parameters(), 1e-9)) == 0
            optimizer.step()
            schedule.step()

    if physical is None:
        epoch(loader)
    else:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as split:
            epoch(split)
    return (
        {n: p.detach().clone() for n, p in trained(model).items()},
        len(engine.accountant),
        engine.get_epsilon(1e-3),
    )


@pytest.mark.parametrize("way", ["prepare", "prepare_private"])
def test_through_accelerate_the_run_is_the_one_without_it(way, accelerator):
    plain, through = run(None, "none"), run(accelerator, way)
    assert through[1:] == plain[1:]
    for name, p in plain[0].items():
        torch.testing.assert_close(through[0][name], p, rtol=0, atol=0)


def test_physical_batches_through_accelerate_step_and_schedule_once_for_each_logical_batch(accelerator):
    whole, split = run(None, "none"), run(accelerator, "prepare_private", physical=2)
    assert split[1:] == whole[1:]
    for name, p in whole[0].items():
        torch.testing.assert_close(split[0][name], p, rtol=0, atol=1e-7)  # AdamW divides rounding by rounding


def test_what_is_set_on_the_prepared_optimizer_reaches_the_private_one(accelerator):
    prepared, _ = resumable(accelerator)
    private = prepared.optimizer.optimizer
    for name, value in (("noise_multiplier", 2.0), ("max_grad_norm", 0.25), ("loss_scale", 4.0)):
        setattr(prepared.optimizer, name, value)
        assert getattr(private, name) == getattr(prepared.optimizer, name) == value
    ExponentialNoise(prepared.optimizer, gamma=0.5).step()
    assert private.noise_multiplier == 1.0


def test_a_logical_batch_left_half_done_leaves_nothing_for_the_next_step(accelerator):
    prepared, _ = resumable(accelerator)
    manager = BatchMemoryManager(
        data_loader=prepared.data_loader, max_physical_batch_size=1, optimizer=prepared.optimizer
    )
    losses(prepared.model, next(iter(manager.__enter__()))).sum().backward()
    prepared.optimizer.step()
    assert prepared.optimizer.step_was_skipped
    with pytest.warns(UserWarning, match="half done"):
        manager.__exit__()
    assert all(p.summed_grad is None for p in prepared.optimizer.params)
    assert not prepared.optimizer.optimizer._is_last_step_skipped


def resumable(accelerator: Any) -> tuple[Any, PrivacyEngine]:
    model = shaken(with_lora(llama()))
    engine = PrivacyEngine(accountant="rdp")
    prepared = prepare_private(
        accelerator,
        model,
        torch.optim.AdamW(trained(model).values(), lr=1e-2),
        DataLoader(Records(24), batch_size=6, generator=torch.Generator().manual_seed(4)),
        privacy_engine=engine,
        noise_multiplier=0.7,
        max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(5),
    )
    return prepared, engine


def train(accelerator: Any, prepared: Any, save_before: int | None = None, folder: str = "") -> None:
    """One pass over the loader; `save_state` before the step of that number."""
    batches = iter(prepared.data_loader)
    for step in range(len(prepared.data_loader)):
        if step == save_before:
            accelerator.save_state(folder)
        inputs = next(batches, None)
        if inputs is None:
            return
        prepared.optimizer.zero_grad()
        value = losses(prepared.model, inputs)
        accelerator.backward(value.sum() / max(1, len(value)))
        prepared.optimizer.step()


def test_a_run_resumed_from_accelerates_checkpoint_is_the_uninterrupted_one(accelerator, tmp_path):
    whole, engine = resumable(accelerator)
    train(accelerator, whole, save_before=2, folder=str(tmp_path))
    accelerate.state.AcceleratorState._reset_state(True)
    second = accelerate.Accelerator(cpu=True)
    resumed, counted = resumable(second)
    second.load_state(str(tmp_path))
    assert len(counted.accountant) == 2
    train(second, resumed)  # the rest of the epoch
    assert len(counted.accountant) == len(engine.accountant) == 4
    for a, b in zip(trained(whole.model).values(), trained(resumed.model).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_two_private_models_of_an_accelerator_keep_a_state_each(accelerator, tmp_path):
    first, counted = resumable(accelerator)
    _, other = resumable(accelerator)
    train(accelerator, first)
    accelerator.save_state(str(tmp_path))
    train(accelerator, first)
    accelerator.load_state(str(tmp_path))
    assert (len(counted.accountant), len(other.accountant)) == (4, 0)


def test_a_checkpoint_without_the_state_of_privacy_is_refused(accelerator, tmp_path):
    resumable(accelerator)
    accelerator.save_state(str(tmp_path))
    (tmp_path / "privacy_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"privacy_0\.pt is not there"):
        accelerator.load_state(str(tmp_path))


def test_a_budget_may_be_given_in_place_of_noise(accelerator):
    model = with_lora(llama())
    engine = PrivacyEngine(accountant="rdp")
    prepared = prepare_private(
        accelerator,
        model,
        torch.optim.SGD(trained(model).values(), lr=0.1),
        DataLoader(Records(24), batch_size=6),
        privacy_engine=engine,
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
    )
    assert isinstance(prepared.data_loader, DPDataLoader)
    for inputs in prepared.data_loader:
        prepared.optimizer.zero_grad()
        value = losses(prepared.model, inputs)
        accelerator.backward(value.sum() / max(1, len(value)))
        prepared.optimizer.step()
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0


def test_everything_that_cannot_be_private_is_said_at_once():
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(3, 2)
    optimizer, loader = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(torch.ones(4, 3))),
    )
    with pytest.raises(ConfigurationError) as raised:
        prepare_private(
            accelerator,
            model,
            accelerator.prepare(optimizer),
            accelerator.prepare(loader),
            privacy_engine=PrivacyEngine(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert len(raised.value.problems) == 3
    for word in ("AcceleratedOptimizer", "data_loader was prepared", "gradient_accumulation_steps is 4"):
        assert word in str(raised.value)
    accelerate.state.AcceleratorState._reset_state(True)


def test_loss_scaling_is_refused(accelerator):
    accelerator.state._mixed_precision = "fp16"
    with pytest.raises(ConfigurationError, match="mixed_precision is 'fp16'"):
        prepare_private(
            accelerator,
            nn.Linear(3, 2),
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
            DataLoader(TensorDataset(torch.ones(4, 3))),
            privacy_engine=PrivacyEngine(),
        )


def test_batches_arrive_on_the_accelerators_device(accelerator, two_devices):
    accelerator.state.device = accelerate.PartialState().device = two_devices[0]
    model = nn.Linear(3, 2)
    prepared = prepare_private(
        accelerator,
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4),
        privacy_engine=PrivacyEngine(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert model.weight.device == two_devices[0]
    for (x,) in prepared.data_loader:
        assert x.device == two_devices[0]
        prepared.optimizer.zero_grad()
        accelerator.backward(prepared.model(x).sum(1).mean() if len(x) else prepared.model(x).sum())
        prepared.optimizer.step()
    assert prepared.optimizer.state[model.weight]["exp_avg"].device == two_devices[0]


def test_the_example_of_a_quantized_base_over_a_device_map_runs(two_devices, capsys, monkeypatch):
    example = Path(__file__).resolve().parents[2] / "examples" / "qlora_device_map.py"
    if not example.exists():
        pytest.skip("the examples are not part of an installed package")
    pytest.importorskip("torchao", reason="needs torchao")
    monkeypatch.setattr("sys.argv", [str(example), "--epochs", "1"])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "epsilon 8.00" in printed or "epsilon 7.9" in printed
    assert "the saved adapter differs by 0" in printed
