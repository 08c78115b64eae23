"""Batches that are changed so that what a loss counts shows: labels and masks `[rows, T]` of records that go together.

Shapes: n samples, R rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opacus.integrations.hf.contract import IGNORED, label_tokens

__all__ = [
    "TOGETHER",
    "has_token_labels",
    "mark_first_position",
    "shortened",
    "tells_which_tokens_count",
    "with_first_label",
]

TOGETHER = 3  # samples whose gradients are compared with that of their batch


def shortened(
    batch: dict[str, Any], index: int, place: int, n: int, *, masks: bool = False
) -> dict[str, Any]:
    """Leave labels (or counted tokens) out, more of the first samples: numbers of tokens then differ, whatever the records.

    Args:
        batch: of n samples.
        index: how much to leave out.
        place: of the sample in the batch.
        masks: whether masks are changed, and not labels.
    """
    changed = dict(batch)
    for name, value in batch.items():
        if (name == "labels") == masks or not tells_which_tokens_count(name, value):
            continue
        ignored = IGNORED if name == "labels" else 0
        tokens_RT = value.clone()
        for row in tokens_RT[place::n]:
            taken = (row != ignored).nonzero().flatten()
            row[taken[max(2, len(taken) * (index + 1) // TOGETHER) :]] = ignored
        changed[name] = tokens_RT
    return changed


def tells_which_tokens_count(name: str, value: Any) -> bool:
    """Labels `[rows, T]`; masks of them, though not those of what is attended to, which say how long a sample is."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
        return False
    if name == "labels":
        return True
    of_length = any(word in name for word in ("attention", "padding", "pixel", "input"))
    return name.endswith(("mask", "masks")) and not of_length and bool(((value == 0) | (value == 1)).all())


def mark_first_position(alone: list[dict[str, Any]], together: dict[str, Any]) -> None:
    """Where no sample has a label at position 0, give one to a sample without padding: a mean that shifts labels leaves it out."""
    if not has_token_labels(together):
        return
    if not torch.equal(label_tokens(together, True), label_tokens(together, False)):
        return
    n = len(alone)
    for place, batch in enumerate(alone):
        if batch["labels"].shape[1] == together["labels"].shape[1]:
            alone[place] = marked = with_first_label(batch)
            labels_RT = together["labels"].clone()
            labels_RT[place::n] = marked["labels"]
            together["labels"] = labels_RT
            return


def with_first_label(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with each row's last label at its first position too."""
    labels_RT = batch["labels"].clone()
    for row in labels_RT:
        taken = row[row != IGNORED]
        if len(taken):
            row[0] = taken[-1]
    return {**batch, "labels": labels_RT}


def has_token_labels(batch: Mapping[str, Any]) -> bool:
    """Whether there is a label for each token."""
    labels = batch.get("labels")
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
