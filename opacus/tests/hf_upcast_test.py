"""A model in reduced precision is looked at in float32 where that fits, and is afterwards what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

from opacus.integrations.hf.calibration import find_contract
from opacus.integrations.hf.upcast import in_float32
from opacus.integrations.transformers import make_trainer_private
from opacus.tests.hf_trainers import make_trainer, override

NAME = "SFT, Llama, LoRA"


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("steps", torch.arange(4))
        self.register_buffer("scale", torch.ones(2))


def tensors(model: nn.Module) -> list[tuple[torch.dtype, int]]:
    return [(t.dtype, t.data_ptr()) for t in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("fails", [False, True])
def test_within_it_is_float32_and_afterwards_the_very_tensors_that_it_was(fails: bool) -> None:
    model = Norms().bfloat16()
    before, values = tensors(model), [t.clone() for t in model.parameters()]
    try:
        with in_float32(model):
            assert [t.dtype for t in model.parameters()] == [torch.float32] * 2
            assert (model.scale.dtype, model.steps.dtype) == (torch.float32, torch.int64)
            assert all(torch.equal(t, v.float()) for t, v in zip(model.parameters(), values, strict=True))
            model.layer.weight.grad = torch.ones(2, 3)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert tensors(model) == before
    assert all(torch.equal(t, v) for t, v in zip(model.parameters(), values, strict=True))
    assert model.layer.weight.grad is None


def test_where_memory_ends_on_the_way_nothing_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Norms().bfloat16()
    before, widen, widened = tensors(model), Tensor.float, []

    def float_until_full(tensor: Tensor) -> Tensor:
        if len(widened) == 2:
            raise torch.OutOfMemoryError("full")
        widened.append(tensor)
        return widen(tensor)

    monkeypatch.setattr(Tensor, "float", float_until_full)
    with in_float32(model):
        assert tensors(model) == before


def in_bfloat16() -> Any:
    return make_trainer(NAME, prepare=lambda model: model.bfloat16(), bf16=True)


def weight_dtypes(trainer: Any, fails_in: torch.dtype | None) -> list[torch.dtype]:
    """The base model's dtype at each call of the trainer's loss, which finds no memory in one of them."""
    seen: list[torch.dtype] = []
    compute = trainer.compute_loss

    def loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtype = next(p.dtype for name, p in model.named_parameters() if "embed_tokens" in name)
        seen.append(dtype)
        if dtype == fails_in:
            raise torch.OutOfMemoryError("full")
        return compute(model, *args, **kwargs)

    override(trainer, "compute_loss", loss)
    return seen


def test_a_loss_in_bfloat16_is_looked_at_in_float32() -> None:
    trainer = in_bfloat16()
    seen = weight_dtypes(trainer, fails_in=None)
    before = tensors(trainer.model)
    make_trainer_private(trainer, noise_multiplier=1.0, delta=1e-5, max_grad_norm=1.0)
    assert set(seen) == {torch.float32}
    assert tensors(trainer.model) == before


def test_where_float32_takes_too_much_memory_the_same_is_found_in_the_models_own_precision() -> None:
    trainer = in_bfloat16()
    records = looked_at(trainer)
    wanted = find_contract(in_bfloat16(), records)
    seen = weight_dtypes(trainer, fails_in=torch.float32)
    before = tensors(trainer.model)
    assert find_contract(trainer, records) == wanted
    assert (seen[0], set(seen[1:])) == (torch.float32, {torch.bfloat16})
    assert tensors(trainer.model) == before
    assert all(p.grad is None for p in trainer.model.parameters())


def looked_at(trainer: Any) -> list[Any]:
    data = trainer.get_train_dataloader().dataset
    return [data[i] for i in range(4)]
