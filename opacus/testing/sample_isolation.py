"""`check_sample_isolation`: one sample's gradient must not depend on the other samples of the batch.

Clipping bounds what a sample adds to the sum through its own gradient. A sample that also changes the others' gradients
(a mean over the batch's tokens, batch statistics, in-batch negatives, a baseline over the batch) moves the sum without bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.errors import ConfigurationError, PerSampleGradientError, raise_if_any
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.grad_sample.isolation import can_probe, note_checked
from opacus.grad_sample.owners import Owners, RowsPerSample, rows_per_sample_problems
from opacus.testing.comparison import Comparison
from opacus.testing.deterministic import deterministic_kernels, has_no_deterministic_kernel
from opacus.testing.other_rounding import PATTERNS, Room, other_rounding
from opacus.testing.samples import Samples
from opacus.testing.undisturbed import Undisturbed
from opacus.testing.witness import Witness

__all__ = ["check_sample_isolation"]

# What rows of unchanged samples may change by, relative to their size. Batches of equal shape take the same kernels, so that
# only non-deterministic ones (measured by a repetition) differ at all; a batch of another size takes others.
_SAME_SHAPE = {torch.float64: 1e-9, torch.float32: 1e-5}
_OTHER_SHAPE = {torch.float64: 1e-6, torch.float32: 1e-2}


def check_sample_isolation(
    model: nn.Module | AbstractGradSampleHooks,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    loss_reduction: str | None = None,
    batch_first: bool | None = None,
    rows_per_sample: int | None = None,
    row_order: str | None = None,
    samples: int = 4,
    shake: float = 0.02,
    tolerance: float | None = None,
) -> None:
    """Raise if a sample's gradient depends on the data, or on the presence, of other samples in the batch.

    The batch is run again with one sample's data replaced by another's, for a few samples of different lengths, and with two
    samples alone, in either order. The others' activations at every module and gradients at every trainable layer must stay the same.
    Trainable weights are shaken a little meanwhile (zero-initialised adapters hide what they will do), dropout is off, and
    random numbers repeat; a model that draws some all the same is not checked for samples left out. What other kernels'
    rounding may do in 16 bits is measured and allowed for. A model in `eval()` is looked at as it is, then in `train()` too.
    Afterwards weights, buffers, gradients, modes and random generators are as before, bit for bit.

    Args:
        model: the model, plain or made private (then hooks are taken off meanwhile).
        loss_fn: `(model, batch) -> loss`: the loss as training computes it, reduced to one number.
        batch: tensors, in any nesting of tuples, lists and mappings; those with one entry a sample (or row) along the batch
            dimension are changed. At least 2 samples, and 3 to see a wrong `loss_reduction`; lengths that vary show more.
        loss_reduction: "mean" or "sum" over samples; by default that of the private model, else "mean".
        batch_first, rows_per_sample, row_order: as in `make_private`; by default those of the private model.
        samples: how many samples to change, one at a time.
        shake: by what part of their root mean square trainable weights are moved.
        tolerance: relative change of a gradient that passes for rounding. By default 1e-5 in float32, where only the values in the
            batch change: raise it for kernels whose order of summation follows the data.

    Raises:
        PerSampleGradientError: naming the modules, or the loss. No data is in the message.
        ConfigurationError: where nothing can be checked: fewer than 2 samples, samples that are all alike, no gradient.

    Formal guarantee:
        None: a search, on one batch, at one point. It finds dependence that this batch shows; what it finds is real.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
        >>> mean = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
        >>> check_sample_isolation(model, mean, batch)
        >>> def contrastive(model, batch):
        ...     scores = model(batch[0]) @ model(batch[0].flip(1)).T
        ...     return nn.functional.cross_entropy(scores, torch.arange(4))
        >>> check_sample_isolation(model, contrastive, batch)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ...
        opacus.errors.PerSampleGradientError: samples are not isolated: 1 problem:
          - the loss: ...
    """
    inner = model._module if isinstance(model, AbstractGradSampleHooks) else model
    used = model if isinstance(model, nn.Module) else inner
    private = model if isinstance(model, GradSampleHooks) else None
    rule = private.capture.lasting_owners if private is not None else None
    own = rule if isinstance(rule, RowsPerSample) else RowsPerSample(1)
    count = own.count if rows_per_sample is None else rows_per_sample
    order = own.order if row_order is None else row_order
    reduction: Any = loss_reduction or getattr(model, "loss_reduction", "mean")
    first = getattr(model, "batch_first", True) if batch_first is None else batch_first
    problems = rows_per_sample_problems(count, order)
    if reduction not in ("mean", "sum"):
        problems.append(f"loss_reduction must be 'mean' or 'sum', not {reduction!r}.")
    if not 0 <= shake < 10:
        problems.append(f"shake is a fraction of the weights' size, not {shake!r}.")
    if not isinstance(samples, int) or samples < 1:
        problems.append(f"samples must be an integer of at least 1, not {samples!r}.")
    if rule is not None and not isinstance(rule, RowsPerSample) and rows_per_sample is None:
        problems.append(
            "the model's rows are given to samples by an index: the check needs equally many rows for each (rows_per_sample)."
        )
    if not can_probe(inner):
        problems.append("the model's parameters are sharded: check it before sharding.")
    raise_if_any("sample isolation cannot be checked", problems)
    with contextlib.ExitStack() as stack:
        if private is not None:
            stack.enter_context(private.unhooked())
        for train in (False,) if inner.training else (False, True):
            with Undisturbed(inner, train=train) as undisturbed:
                undisturbed.shake(shake)
                run = _Runs(inner, used, loss_fn, reduction, first, RowsPerSample(count, order), undisturbed)
                found = _findings(run, batch, samples, tolerance or 0.0)
                raise_if_any("samples are not isolated", found, PerSampleGradientError)
    note_checked(inner)


class _Runs:
    """Runs the loss on one batch after the other, from the same state."""

    def __init__(
        self,
        inner: nn.Module,
        used: nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        loss_reduction: str,
        batch_first: bool,
        rule: RowsPerSample,
        undisturbed: Undisturbed,
    ) -> None:
        self.inner, self.used, self.loss_fn = inner, used, loss_fn
        self.loss_reduction, self.batch_first, self.rule = loss_reduction, batch_first, rule
        self.undisturbed = undisturbed
        # on a GPU, as far as all of the model's operations have such kernels
        self.deterministic = any(p.device.type == "cuda" for p in inner.parameters())

    def __call__(self, batch: Any, rows: int | None = None) -> Witness:
        if self.deterministic:
            try:
                with deterministic_kernels():
                    return self._run(batch, rows)
            except RuntimeError as error:
                if not has_no_deterministic_kernel(error):
                    raise
                self.deterministic = False
        return self._run(batch, rows)

    def room(self, before: Witness, batch: Any, owners: Owners) -> Room:
        """How far other kernels' rounding may move what each call has, where activations have few bits."""
        moved = []
        for pattern in PATTERNS if before.lowest not in _SAME_SHAPE else ():
            with other_rounding(self.inner, pattern):
                moved.append(self(batch, owners.n_rows))
        return Room(before, moved)

    def _run(self, batch: Any, rows: int | None) -> Witness:
        self.undisturbed.again()
        witness = Witness(self.batch_first, rows)
        capture = Capture(
            self.inner,
            witness,
            batch_first=self.batch_first,
            loss_reduction=self.loss_reduction,
            detach_weights=True,
            check_isolation=False,
        )
        capture.owners = self.rule
        capture.attach()
        handles = witness.watch(self.inner)
        try:
            with torch.enable_grad():
                loss = self.loss_fn(self.used, batch)
                loss = getattr(loss, "_reduced", lambda: loss)()  # mode "ghost": the wrapped criterion's
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise ConfigurationError(
                        "sample isolation cannot be checked",
                        ["loss_fn must return the loss as one number that trainable layers take part in."],
                    )
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
            capture.detach()
        return witness


def _findings(run: _Runs, batch: Any, count: int, least: float) -> list[str]:
    scout = run(batch)
    owners = scout.owners
    if owners is None or not any(
        gradient is not None and bool((gradient[:, 1] > 0).any())
        for seen in scout.backward.values()
        for gradient in seen.outputs
    ):
        _refuse("no gradient reached a trainable layer, so there is nothing to compare.")
    assert owners is not None
    if owners.n_samples < 2:
        _refuse(f"the batch has {owners.n_samples} samples: pass at least 2.")
    changed = Samples(batch, owners, run.batch_first)
    if not changed.tensors:
        _refuse(f"no tensor of the batch has {owners.n_samples} entries along its batch dimension.")
    before = run(batch, owners.n_rows)
    everyone = range(owners.n_samples)
    noise = Comparison(before, run(batch, owners.n_rows), owners, everyone, 0.0).largest()
    # where kernels have no deterministic form they add up in an order of their own each time: in 8 bits that shows
    if noise > (1e-3 if before.lowest in _SAME_SHAPE else 5e-2):
        _refuse(
            "two runs on the same batch differ: loss_fn or the model draws random numbers of its own, or keeps a state. Fix its seed."
        )
    tolerance = max(_SAME_SHAPE.get(before.lowest, 1e-3), 10 * noise, least)
    picked = changed.spread_out(count)
    compared = 0
    for sample, donor in zip(picked, reversed(picked), strict=True):
        for other in (donor, *everyone):
            replaced = changed.replaced(sample, other) if other != sample else None
            if replaced is not None:
                break
        else:
            continue
        compared += 1
        others = [i for i in everyone if i != sample]
        found = Comparison(before, run(replaced, owners.n_rows), owners, others, tolerance)
        if found.problems("data"):
            return found.problems("data")
    if not compared:
        _refuse("all samples of the batch are alike, so that none can take another's place.")
    if not run.undisturbed.randomness.drawn():
        kept = sorted(changed.spread_out(2))
        room = run.room(before, batch, owners)
        least = max(_OTHER_SHAPE.get(before.lowest, 0.1), tolerance)
        # in each other's places too: a loss that weighs or drops samples by their place may do the same to the ends
        for order, what in ((kept, "presence"), (kept[::-1], "place")):
            if len(kept) < owners.n_samples or what == "place":
                few = run(changed.only(order), len(order) * run.rule.count)
                found = Comparison(before, few, owners, order, least, alone=True, room=room)
                if found.problems(what, run.loss_reduction):
                    return found.problems(what, run.loss_reduction)
    return []


def _refuse(problem: str) -> None:
    raise ConfigurationError("sample isolation cannot be checked", [problem])
