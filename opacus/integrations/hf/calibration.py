"""Which reduction a trainer's loss has, measured on its gradients; and a search for samples that see each other.

What a trainer says of its loss cannot be relied on: models accept a token count and ignore it, and counts of tokens differ from
what the loss takes. So gradients decide: of samples alone, together, and told different counts, at weights that are
shaken first (at their initial values adapters are zero, and every token costs the same), in training mode without its randomness.
This is a net under the list of losses known to mix samples, not a proof. It looks at records outside any accounted step: no number of theirs gets out.

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
from opacus.integrations.hf.collation import Collation, repeated
from opacus.integrations.hf.contract import LossContract, first_rows, label_tokens
from opacus.integrations.hf.counted_tokens import (
    TOGETHER,
    has_token_labels,
    mark_first_position,
    shortened,
    tells_which_tokens_count,
    with_first_label,
)
from opacus.integrations.hf.looked_at import most_different
from opacus.integrations.hf.looked_mode import TrainingWithoutRandomness
from opacus.integrations.hf.upcast import in_float32
from opacus.testing.sample_isolation import check_sample_isolation
from opacus.testing.undisturbed import Undisturbed, same_values

__all__ = ["find_contract"]

logger = logging.getLogger(__name__)

_HEADING = "the trainer's loss cannot be made private"
_MOST_SHOWN = 6
_MOST_CLASSES = 16  # that one record of each is looked at
_MOST_TOGETHER = 64  # whose loss is compared with that of them together
_SHAKE = 0.1


def find_contract(trainer: Any, records: Sequence[Any], *, shake: float = _SHAKE) -> LossContract:
    """Measure how `trainer.compute_loss` reduces over samples, and check that samples are independent.

    Args:
        trainer: a trainer whose `compute_loss` and data loader are its own still.
        records: items of its data set, or made-up ones with the same columns, at least 2; of many, those are taken that differ most
            in labels and lengths.
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
        probe.tokens_count_alike(contract)
        probe.labels_count_alike(contract)
        probe.whole_batch_counts_alike(contract)
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
        picked = most_different(records, _MOST_CLASSES)
        size = min(_MOST_TOGETHER, trainer.args.per_device_train_batch_size, len(records))
        self.physical = most_different(records, size) if size > _MOST_SHOWN else []
        self.records = [picked[i % len(picked)] for i in range(max(TOGETHER, len(picked)))]
        self.collation = Collation(trainer.get_train_dataloader().collate_fn, self.records[:TOGETHER])
        self.parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        self.tolerance = rounding(trainer)

    def loss(self, batch: Mapping[str, Any], count: int | None) -> Tensor:
        trainer = self.trainer
        inputs = trainer._prepare_inputs(dict(batch))
        told = None if count is None else torch.tensor(count)
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=told)

    def gradient(
        self, batch: Mapping[str, Any], count: int | None = 1, of: list[Tensor] | None = None
    ) -> list[Tensor]:
        self.undisturbed.again()  # each from the same buffers
        if of is not None:
            return list(torch.autograd.grad(self.loss(batch, count), of))
        self.loss(batch, count).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return found

    def contract(self) -> LossContract:
        sizes = [first_rows(self.collation.batch(self.records[:n])) for n in (1, 2, TOGETHER)]
        rows = sizes[0]
        if rows < 1 or sizes != [rows, 2 * rows, TOGETHER * rows]:
            _refuse(
                f"batches of 1, 2 and {TOGETHER} records have {', '.join(map(str, sizes))} rows: each record must become the same "
                "number of rows of its own (no packing, no padding_free)."
            )
        chosen = self.records[:TOGETHER]
        self.collation.refuse_mixing(chosen)
        whole_length, together = self.collation.pair(chosen)
        alone = [shortened(batch, index, 0, 1) for index, batch in enumerate(whole_length)]
        for index in range(TOGETHER):
            together = shortened(together, index, index, TOGETHER)
        mark_first_position(alone, together)
        whole = self.mode.settled(lambda: self.gradient(together))
        self._refuse_kept_data(together)
        parts = self._alone(alone)
        self._reached = {p for p, g in zip(self.parameters, parts[0], strict=True) if bool(g.any())}
        if not any(bool(g.any()) for part in (whole, *parts) for g in part):
            _refuse("no trainable parameter received a gradient. Are all adapters switched off or frozen?")
        ones = [1.0] * TOGETHER
        if self._is(whole, parts, ones):
            return self._sum_contract(rows, whole_length[0], parts[0], alone[0])
        if self._is(whole, parts, [1 / TOGETHER] * TOGETHER):
            return LossContract("mean over rows", rows)
        if has_token_labels(together):
            for shifts in (True, False):
                tokens = [float(label_tokens(batch, shifts).sum()) for batch in alone]
                if self._is(whole, parts, [count / max(1.0, sum(tokens)) for count in tokens]):
                    return LossContract("mean over tokens", rows, shifts)
        _raise_mixed(self.trainer)
        raise AssertionError

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
                    f"one of {TOGETHER}: a record's own loss is not defined. Statistics of the batch do this."
                ],
            ) from error

    def _refuse_kept_data(self, batch: dict[str, Any]) -> None:
        """Raise if what a forward left in buffers tells what the data were: it would be saved, and never gets noise.

        `batch` was run last. Caches for a length, and counters, are the same after another batch of one shape.
        """
        changed = self.undisturbed.changed_buffers()
        if not changed:
            return
        others = []
        for place in (0, TOGETHER - 1):
            self.gradient(repeated(batch, place, TOGETHER))
            others.append(self.undisturbed.changed_buffers())
        self.undisturbed.again()
        names = dict.fromkeys(name for found in (changed, *others) for name in found)
        telling = [
            name
            for name in names
            if not all(name in changed and name in o and same_values(changed[name], o[name]) for o in others)
        ]
        if telling:
            raise ConfigurationError(
                _HEADING,
                [
                    f"buffer {name}: in training the model keeps in it what it saw (a moving average, say), without noise; it would be "
                    "saved with the model. Fix it, or compute it from public data before."
                    for name in telling
                ],
            )

    def _sum_contract(
        self, rows: int, unchanged: dict[str, Any], own: list[Tensor], batch: Mapping[str, Any]
    ) -> LossContract:
        """A sum: over tokens if the loss divides by the count it is told, over rows if it ignores it."""
        told_two = self.gradient(batch, 2)
        if self._is(told_two, [own], [1.0]):
            return LossContract("sum over rows", rows)
        if not self._is(told_two, [own], [0.5]):
            _refuse("the loss depends on num_items_in_batch, yet is not divided by it.")
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and tuple(labels.shape) == (1,):
            return LossContract("sum over rows", rows)  # a record alone has one item, and that is told
        if not has_token_labels(batch):
            _refuse(
                "the loss is divided by num_items_in_batch, but the batch has no labels to count: one for each record, or [rows, T]."
            )
        with torch.no_grad():
            # with a label at position 0, which a shifted loss leaves out
            marked = with_first_label(unchanged)
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

    def tokens_count_alike(self, contract: LossContract) -> None:
        """Raise if a sample's share changes with how many tokens of the others are counted by masks, at one layer.

        Apart from the first comparison: a loss that sorts the batch does nothing where numbers of tokens differ.

        Raises:
            PerSampleGradientError: if so, as in a mean over the tokens of the batch.
        """
        last = self._last_reached()
        alone, together = self.collation.pair(self.records[:TOGETHER])
        masks = [
            name for name, v in together.items() if name != "labels" and tells_which_tokens_count(name, v)
        ]
        if last is None or not masks or contract.counts_tokens:
            return
        parts = [
            self.gradient(shortened(batch, index, 0, 1, masks=True), of=[last])
            for index, batch in enumerate(alone)
        ]
        for index in range(TOGETHER):
            together = shortened(together, index, index, TOGETHER, masks=True)
        share = 1.0 if contract.kind == "sum over rows" else 1 / TOGETHER
        if not self._is(self.gradient(together, of=[last]), parts, [share] * TOGETHER):
            _raise_mixed(self.trainer)

    def whole_batch_counts_alike(self, contract: LossContract) -> None:
        """Raise unless the loss of as many records as a step takes at once is that of them one by one; without gradients.

        Raises:
            PerSampleGradientError: if not, as where the largest losses count, or what is far from the batch's mean does not.
        """
        records = self.physical
        while records:
            sums = self._sums(records, contract)
            if sums is not None:
                break
            records = records[: len(records) // 2] if len(records) > 2 * _MOST_SHOWN else []
        else:
            return
        whole, parts = sums
        size = sum(abs(part) for part in parts)
        if math.isfinite(size) and not abs(whole - sum(parts)) <= self.tolerance * size:
            _raise_mixed(self.trainer, f"of {len(parts)} records")

    def _sums(self, records: Sequence[Any], contract: LossContract) -> tuple[float, list[float]] | None:
        """The summed loss of records together, and that of each alone; None where that cannot be computed, as without enough memory."""
        alone, together = self.collation.pair(records)
        try:
            with torch.no_grad():
                parts = [self._summed(batch, 1, contract) for batch in alone]
                return self._summed(together, len(alone), contract), parts
        except RuntimeError as error:  # of memory, or of a loss that takes gradients itself
            logger.info("%d records cannot be looked at together (%s)", len(records), type(error).__name__)
        return None

    def _summed(self, batch: Mapping[str, Any], n: int, contract: LossContract) -> float:
        self.undisturbed.again()
        return float(self.loss(batch, 1) * contract.to_sum(n, batch))

    def _last_reached(self) -> Tensor | None:
        """The last trainable parameter that gets a gradient, the cheapest to compare."""
        return next((p for p in reversed(self.parameters) if p in self._reached), None)

    def labels_count_alike(self, contract: LossContract) -> None:
        """Raise unless records of every label count as much as the first one: three labels at a time, at one layer.

        Raises:
            PerSampleGradientError: if not, as in a mean that is weighted by class.
        """
        chosen: dict[int, Any] = {}
        for record in self.records:
            labels = self.collation.batch([record]).get("labels")
            if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
                return
            chosen.setdefault(int(labels[0]), record)
        first, *others = chosen.values()
        last = self._last_reached()
        for start in range(TOGETHER - 1, len(others) if last is not None else 0, TOGETHER - 1):
            assert last is not None
            alone, together = self.collation.pair([first, *others[start : start + TOGETHER - 1]])
            parts = [self.gradient(batch, of=[last]) for batch in alone]
            share = 1.0 if contract.kind == "sum over rows" else 1 / len(parts)
            if not self._is(self.gradient(together, of=[last]), parts, [share] * len(parts)):
                _raise_mixed(self.trainer)


def _check_isolation(trainer: Any, probe: _Probe, contract: LossContract, shake: float) -> None:
    k = contract.rows_per_sample

    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        n_samples = first_rows(batch) // k
        return probe.loss(batch, 1) * contract.to_sum(n_samples, batch)

    records = probe.records[: _shown(trainer)]
    shown = probe.collation.pair(records)[1]
    try:
        check_sample_isolation(
            trainer.model,
            loss,
            shown,
            loss_reduction="sum",
            rows_per_sample=k,
            shake=shake,
            tolerance=max(probe.tolerance, 1e-4),
        )
    except RuntimeError:
        choices = {name: v.shape[1] for name, v in shown.items() if _holds_sequences(v)}
        if not choices:
            raise
        _refuse(
            *(
                f"{name} has {count} sequences in each row (multiple choice), which the model takes as rows of their own, so that they "
                "are not told apart by record. Make every choice a record with a label of its own (a classifier of one output)."
                for name, count in choices.items()
            )
        )


def _holds_sequences(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and not value.is_floating_point()


def _shown(trainer: Any) -> int:
    """How many records the search for dependence takes at once: in float32 about the memory of a step's batch in bf16.

    It needs some beside the one that is changed, so where steps take few records it takes more memory than they do.
    """
    return min(_MOST_SHOWN, max(TOGETHER, trainer.args.per_device_train_batch_size // 2))


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


def _raise_mixed(trainer: Any, size: str = "") -> None:
    raise PerSampleGradientError(
        "samples are not isolated",
        [
            f"{type(trainer).__name__}.compute_loss: the {'loss' if size else 'gradient'} of a batch{' ' * bool(size)}{size} is neither "
            f"the sum nor the mean (over rows or label tokens) of its samples' own {'losses' if size else 'gradients'}, so that a "
            "sample's gradient depends on the others. Class weights in a mean, a "
            "statistic or baseline over the batch, padding that counts, in-batch negatives, sorting or an auxiliary loss do this: "
            "compute each sample's loss from its own rows."
        ],
    )


def _refuse(*problems: str) -> None:
    raise ConfigurationError(_HEADING, list(problems))
