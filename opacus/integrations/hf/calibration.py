"""Which reduction a trainer's loss has, measured on its gradients; and a search for samples that see each other.

What a trainer says of its loss cannot be relied on: models accept a token count and ignore it, and counts of tokens differ from
what the loss takes. So gradients decide: of samples alone, together, and told different counts, at weights that are
shaken first (at their initial values adapters are zero, and every token costs the same). This is a net under the list of
losses known to mix samples, not a proof. It looks at records outside any accounted step: no number of theirs gets out.

Shapes: n samples, R rows, T positions.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.integrations.hf.contract import IGNORED, LossContract, first_rows, label_tokens
from opacus.integrations.hf.looked_mode import TrainingWithoutRandomness
from opacus.integrations.hf.upcast import in_float32
from opacus.testing.sample_isolation import check_sample_isolation
from opacus.testing.undisturbed import Undisturbed

__all__ = ["find_contract"]

logger = logging.getLogger(__name__)

_HEADING = "the trainer's loss cannot be made private"
_TOGETHER = 3  # samples whose gradients are compared with that of their batch
_SHAKE = 0.1


def find_contract(trainer: Any, records: Sequence[Any], *, shake: float = _SHAKE) -> LossContract:
    """Measure how `trainer.compute_loss` reduces over samples, and check that samples are independent.

    Args:
        trainer: a trainer whose `compute_loss` and data loader are its own still.
        records: a few items of its data set, or made-up ones with the same columns; at least 2.
        shake: by what part of their size trainable weights are moved meanwhile.

    Raises:
        PerSampleGradientError: if a sample's gradient depends on the others' data or presence.
        ConfigurationError: if the reduction is none of those that can be undone.

    Formal guarantee:
        None: a search on a few records. Nothing but what is raised, or the contract, depends on them.
    """
    with _same_figures(trainer), TrainingWithoutRandomness(trainer.model) as mode:
        try:
            with in_float32(trainer.model):
                return _look(trainer, records, shake, mode)
        except torch.OutOfMemoryError:
            logger.info("the loss is looked at in the model's own precision: float32 takes too much memory")
        return _look(trainer, records, shake, mode)  # here, where the failed look is forgotten


def _look(
    trainer: Any, records: Sequence[Any], shake: float, mode: TrainingWithoutRandomness
) -> LossContract:
    with Undisturbed(trainer.model) as undisturbed:
        undisturbed.shake(shake)
        probe = _Probe(trainer, records, mode, undisturbed)
        contract = probe.contract()
    mode.apply()
    _check_isolation(trainer, probe, contract, shake)
    return contract


@contextlib.contextmanager
def _same_figures(trainer: Any) -> Iterator[None]:
    """Figures that the trainer gathers for its log do not change."""
    figures = {
        name: copy.deepcopy(vars(trainer)[name])
        for name in ("_metrics", "_total_train_tokens")
        if name in vars(trainer)
    }
    try:
        yield
    finally:
        vars(trainer).update(figures)


class _Probe:
    """Gradients of the trainer's own loss on batches of few records."""

    def __init__(
        self,
        trainer: Any,
        records: Sequence[Any],
        mode: TrainingWithoutRandomness,
        undisturbed: Undisturbed,
    ) -> None:
        self.trainer, self.mode, self.undisturbed = trainer, mode, undisturbed
        self.collate = trainer.get_train_dataloader().collate_fn
        self.records = [records[i % len(records)] for i in range(max(_TOGETHER, len(records)))]
        self.parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        self.tolerance = rounding(trainer)

    def batch(self, records: Sequence[Any]) -> dict[str, Any]:
        """Collated, on the CPU; the trainer's loss is given a copy."""
        batch = dict(self.collate([copy.deepcopy(record) for record in records]))
        return {name: _as_tensor(value, len(records)) for name, value in batch.items()}

    def loss(self, batch: Mapping[str, Any], count: int | None) -> Tensor:
        trainer = self.trainer
        inputs = trainer._prepare_inputs(dict(batch))
        told = None if count is None else torch.tensor(count)
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=told)

    def gradient(self, batch: Mapping[str, Any], count: int | None = 1) -> list[Tensor]:
        self.undisturbed.again()  # each from the same buffers
        self.loss(batch, count).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return found

    def contract(self) -> LossContract:
        rows = first_rows(self.batch(self.records[:1]))
        sizes = [first_rows(self.batch(self.records[:n])) for n in (1, 2, _TOGETHER)]
        if rows < 1 or sizes != [rows, 2 * rows, _TOGETHER * rows]:
            _refuse(
                f"batches of 1, 2 and {_TOGETHER} records have {', '.join(map(str, sizes))} rows: each record must become the same "
                "number of rows of its own (no packing, no padding_free)."
            )
        chosen = self.records[:_TOGETHER]
        alone = [self._shortened(self.batch([record]), index) for index, record in enumerate(chosen)]
        together = self.batch(chosen)
        for index in range(_TOGETHER):
            together = self._shortened(together, index, row=index)
        whole = self.mode.settled(lambda: self.gradient(together))
        parts = self._alone(alone)
        if not any(bool(g.any()) for part in (whole, *parts) for g in part):
            _refuse("no trainable parameter received a gradient. Are all adapters switched off or frozen?")
        ones = [1.0] * _TOGETHER
        if self._is(whole, parts, ones):
            return self._sum_contract(rows, chosen[0], parts[0], alone[0])
        if self._is(whole, parts, [1 / _TOGETHER] * _TOGETHER):
            return LossContract("mean over rows", rows)
        if _has_token_labels(together):
            for shifts in (True, False):
                tokens = [float(label_tokens(batch, shifts).sum()) for batch in alone]
                if self._is(whole, parts, [count / max(1.0, sum(tokens)) for count in tokens]):
                    return LossContract("mean over tokens", rows, shifts)
        raise PerSampleGradientError(
            "samples are not isolated",
            [
                f"{type(self.trainer).__name__}.compute_loss: the gradient of a batch is neither the sum nor the mean (over rows or "
                "label tokens) of its samples' own gradients, so that a sample's gradient depends on the others. A statistic or "
                "baseline over the batch, in-batch negatives, sorting or an auxiliary loss do this: compute each sample's loss from "
                "its own rows."
            ],
        )

    def _alone(self, batches: list[dict[str, Any]]) -> list[list[Tensor]]:
        """Gradients of batches of one record, which must work where those of several do."""
        try:
            return [self.gradient(batch) for batch in batches]
        except torch.OutOfMemoryError:
            raise
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise PerSampleGradientError(
                "samples are not isolated",
                [
                    f"{type(self.trainer).__name__}.compute_loss fails on a batch of one record ({type(error).__name__}), though not on "
                    f"one of {_TOGETHER}: a record's own loss is not defined. Statistics of the batch do this."
                ],
            ) from error

    def _sum_contract(
        self, rows: int, record: Any, own: list[Tensor], batch: Mapping[str, Any]
    ) -> LossContract:
        """A sum: over tokens if the loss divides by the count it is told, over rows if it ignores it."""
        told_two = self.gradient(batch, 2)
        if self._is(told_two, [own], [1.0]):
            return LossContract("sum over rows", rows)
        if not self._is(told_two, [own], [0.5]):
            _refuse("the loss depends on num_items_in_batch, yet is not divided by it.")
        if not _has_token_labels(batch):
            _refuse(
                "the loss is divided by num_items_in_batch, but the batch has no labels [rows, T] to count."
            )
        with torch.no_grad():
            # with a label at position 0, which a shifted loss leaves out
            marked = self._with_first_label(self.batch([record]))
            counted = float(self.loss(marked, 1)) / float(self.loss(marked, None))
        for shifts in (True, False):
            if math.isclose(counted, float(label_tokens(marked, shifts).sum()), rel_tol=10 * self.tolerance):
                return LossContract("sum over tokens", rows, shifts)
        _refuse(
            "the loss takes other tokens than those whose label is not -100, so that each sample's number of them is not known."
        )
        raise AssertionError

    def _is(self, whole: list[Tensor], parts: list[list[Tensor]], factors: list[float]) -> bool:
        """Whether `whole` is the sum of factor times part, up to rounding."""
        off = size = 0.0
        for i, g in enumerate(whole):
            expected = sum(factor * part[i].float() for factor, part in zip(factors, parts, strict=True))
            off += float((g.float() - expected).double().square().sum())
            size += float(
                sum(
                    (factor * part[i].double()).square().sum()
                    for factor, part in zip(factors, parts, strict=True)
                )
            )
        return math.sqrt(off) <= self.tolerance * math.sqrt(size)

    def _shortened(self, batch: dict[str, Any], index: int, row: int = 0) -> dict[str, Any]:
        """Leave labels out, more of the first samples: numbers of tokens then differ, whatever the records."""
        if not _has_token_labels(batch):
            return batch
        labels_RT = batch["labels"].clone()
        taken = (labels_RT[row] != IGNORED).nonzero().flatten()
        keep = max(2, len(taken) * (index + 1) // _TOGETHER)
        labels_RT[row, taken[keep:]] = IGNORED
        return {**batch, "labels": labels_RT}

    def _with_first_label(self, batch: dict[str, Any]) -> dict[str, Any]:
        labels_RT = batch["labels"].clone()
        for row in labels_RT:
            taken = row[row != IGNORED]
            if len(taken):
                row[0] = taken[-1]
        return {**batch, "labels": labels_RT}


def _check_isolation(trainer: Any, probe: _Probe, contract: LossContract, shake: float) -> None:
    k = contract.rows_per_sample

    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        n_samples = first_rows(batch) // k
        return probe.loss(batch, 1) * contract.to_sum(n_samples, batch)

    check_sample_isolation(
        trainer.model,
        loss,
        probe.batch(probe.records[: _shown(trainer)]),
        loss_reduction="sum",
        rows_per_sample=k,
        shake=shake,
        tolerance=max(probe.tolerance, 1e-4),
    )


def _shown(trainer: Any) -> int:
    """How many records the search for dependence takes at once: in float32 about the memory of a step's batch in bf16.

    It needs some beside the one that is changed, so where steps take few records it takes more memory than they do.
    """
    return max(_TOGETHER, trainer.args.per_device_train_batch_size // 2)


def rounding(trainer: Any) -> float:
    """Relative rounding to expect of a gradient."""
    dtypes = {p.dtype for p in trainer.model.parameters() if p.is_floating_point()}
    full = {torch.float32, torch.float64} >= dtypes and not getattr(
        trainer.model, "quantization_method", None
    )
    if not full or torch.is_autocast_enabled():
        return 0.1  # 0.01 was seen over 16 blocks in bfloat16; sum and means differ by far more
    reduced = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
    return 1e-2 if reduced else 1e-3


def _has_token_labels(batch: Mapping[str, Any]) -> bool:
    labels = batch.get("labels")
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _as_tensor(value: Any, n: int) -> Any:
    """Lists of one number a sample as tensors, so that samples can be exchanged."""
    plain = (
        isinstance(value, list) and len(value) == n and all(isinstance(v, (bool, int, float)) for v in value)
    )
    return torch.tensor(value) if plain else value


def _refuse(problem: str) -> None:
    raise ConfigurationError(_HEADING, [problem])
