"""Private trainers on real GPUs: two ranks, each on {its GPU, the CPU}, give one process's weights on the same batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

import accelerate

from opacus.testing import Ranks
from opacus.tests import hf_ranks_cases as cases

pytestmark = pytest.mark.gpu(2)

# full float32: the bounds below are those of rounding
EXACT: dict[str, Any] = {"tf32": False, "bf16": False, "use_cpu": False}


def offloaded(model: nn.Module, gpu: torch.device) -> None:
    """The second block, frozen, in the CPU's memory; computed on the GPU."""
    places = {
        "model.embed_tokens": gpu,
        "model.rotary_emb": gpu,
        "model.layers.0": gpu,
        "model.layers.1": "cpu",
    }
    accelerate.dispatch_model(model, places | {"model.norm": gpu, "lm_head": gpu}, main_device=gpu)


def computed(model: nn.Module, gpu: torch.device) -> None:
    """The first block on the CPU, its adapters too; all else on the GPU, where inputs come from."""
    cpu = torch.device("cpu")
    model.to(gpu)
    for part in (model.model.embed_tokens, model.model.layers[0]):  # type: ignore[union-attr, index]
        accelerate.hooks.add_hook_to_module(part.to(cpu), accelerate.hooks.AlignDevicesHook(cpu))
    for part in (model.model.rotary_emb, model.model.layers[1]):  # type: ignore[union-attr, index]
        accelerate.hooks.add_hook_to_module(part, accelerate.hooks.AlignDevicesHook(gpu))
    accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(gpu, io_same_device=True))
    # what dispatch_model, which only offloads to a CPU beside a GPU, would leave
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "": gpu.index}


PLACES: dict[str, Callable[[nn.Module, torch.device], None]] = {"offloaded": offloaded, "computed": computed}


@pytest.fixture(scope="module")
def over_nccl() -> Iterator[Ranks]:
    with Ranks(2, timeout=300, patience=120, backend="nccl") as two:
        yield two


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[Ranks]:
    with Ranks(2, timeout=300, patience=120) as two:
        yield two


def on_a_gpu_and_the_cpu(name: str, place: str | None, **options: Any) -> dict[str, Any]:
    """`cases.trained` on this rank's GPU, some of the model on the CPU."""
    gpu = torch.device("cuda", dist.get_rank() if dist.is_initialized() else 0)
    torch.cuda.set_device(gpu)
    prepare = None if place is None else functools.partial(PLACES[place], gpu=gpu)
    if dist.is_initialized():
        options["ddp_backend"] = dist.get_backend()
    return cases.trained(name, prepare=prepare, **EXACT, **options)


def assert_alike(together: list[dict[str, Any]], alone: dict[str, Any], within: float) -> None:
    first, last = alone["weights"][0], alone["weights"][-1]
    size = max(float(w.abs().max()) for w in last.values())
    assert max(float((last[name] - w).abs().max()) for name, w in first.items()) > 1e-2 * size  # they moved
    for own in together:
        assert own["steps"] == alone["steps"]
        assert not own["wrapped"]
        for name, w in last.items():
            assert torch.equal(own["weights"][-1][name], together[0]["weights"][-1][name]), name
            assert float((own["weights"][-1][name] - w).abs().max()) <= within * size, name


@pytest.mark.parametrize("name", [cases.SFT, cases.DPO])
@pytest.mark.parametrize("place", [None, "offloaded", "computed"])
@pytest.mark.parametrize("group", ["over_nccl", "over_gloo"])
def test_two_ranks_train_as_one_process(
    request: pytest.FixtureRequest, group: str, place: str | None, name: str
) -> None:
    ranks = request.getfixturevalue(group)
    adapted = {"layers": [0]} if place == "offloaded" else {}
    together = ranks.run(on_a_gpu_and_the_cpu, name, place, **adapted)
    alone = on_a_gpu_and_the_cpu(name, None, **adapted)
    assert_alike(together, alone, within=1e-5)  # devices of two kinds, kernels of several shapes


def test_noise_over_a_gpu_and_the_cpu_is_added_once_and_equal_on_both_ranks(over_nccl: Ranks) -> None:
    settings = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "expected_batch_size": 6}
    options: dict[str, Any] = {"max_steps": 1, "learning_rate": 1.0}
    noisy = over_nccl.run(on_a_gpu_and_the_cpu, cases.SFT, "computed", settings=settings, **options)
    settings["noise_multiplier"] = 0.0
    plain = over_nccl.run(on_a_gpu_and_the_cpu, cases.SFT, "computed", settings=settings, **options)
    first, second = (own["weights"][-1] for own in noisy)
    assert all(torch.equal(first[name], w) for name, w in second.items())
    without = plain[0]["weights"][-1]
    z = torch.cat([(first[name] - w).double().flatten() for name, w in without.items()]) * (6 / (2 * 0.5))
    assert abs(float(z.mean())) < 5 / z.numel() ** 0.5
    assert abs(float(z.var()) - 1) < 5 * (2 / z.numel()) ** 0.5


def test_two_ranks_on_one_gpu_are_refused(over_nccl: Ranks) -> None:
    uuid = torch.cuda.get_device_properties(0).uuid
    for message in over_nccl.run(both_on_the_first_gpu):
        assert f"ranks 0 and 1 both use {uuid}" in message


def both_on_the_first_gpu() -> str:
    """As where `device_map={"": 0}` is written for one process, and started with two."""

    def place(model: nn.Module) -> None:
        model.to("cuda:0")
        model.hf_device_map = {"": 0}

    torch.cuda.set_device(dist.get_rank())
    return cases.message_of(lambda: cases.private(cases.SFT, prepare=place, **EXACT))
