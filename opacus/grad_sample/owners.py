"""Whose rows: which sample (privacy unit) each row that the model sees belongs to.

Row i is sample i unless said otherwise. A rule says otherwise: fixed `Owners`, `RowsPerSample` for batches of any size, or
a sample index that is given anew for each batch. Rows of one sample add up before any norm is taken.

Shapes: R rows, B samples, k rows of each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from opacus.errors import PerSampleGradientError, raise_if_any

__all__ = [
    "MISSING_INDEX",
    "OwnerRule",
    "Owners",
    "RowsPerSample",
    "index_problems",
    "rows_per_sample_problems",
]

ORDERS = ("blocked", "interleaved")


class OwnerRule(Protocol):
    """From the number of rows of a batch to their owners."""

    def owners_of(self, n_rows: int, where: str) -> Owners:
        """The owners of `n_rows` rows that the layer `where` saw; raises where they do not fit."""


@dataclass(frozen=True)
class Owners:
    """Which sample (privacy unit) each row of a physical batch belongs to.

    Args:
        n_samples: number of samples B in the physical batch.
        index_R: `[R]`, int64: the sample that owns each of R rows. None: row i is sample i, R = B.
        layout: in place of an index, where every sample owns equally many rows.
    """

    n_samples: int
    index_R: Tensor | None = None
    layout: RowsPerSample | None = None

    @property
    def n_rows(self) -> int:
        if self.layout is not None:
            return self.n_samples * self.layout.count
        return self.n_samples if self.index_R is None else self.index_R.shape[0]

    @property
    def rows_each(self) -> int | None:
        """Rows of every sample; None where their number varies."""
        if self.layout is not None:
            return self.layout.count
        return 1 if self.index_R is None else None

    def owners_of(self, n_rows: int, where: str) -> Owners:
        """These owners, whatever layer asks."""
        return self

    def index_on(self, device: torch.device) -> Tensor:
        """`[R]`, int64: the sample that owns each row."""
        if self.index_R is not None:
            return self.index_R.to(device)
        samples = torch.arange(self.n_samples, device=device)
        if self.layout is None:
            return samples
        k = self.layout.count
        return samples.repeat(k) if self.layout.order == "blocked" else samples.repeat_interleave(k)

    def folded(self, rows: Tensor) -> Tensor:
        """`[R, ...]` as `[B, k, ...]` (a view), where every sample owns k rows."""
        k = self.rows_each
        assert k is not None
        if self.layout is not None and self.layout.order == "blocked":
            return rows.view(k, self.n_samples, *rows.shape[1:]).transpose(0, 1)
        return rows.reshape(self.n_samples, k, *rows.shape[1:])

    def add_up(self, rows: Tensor) -> Tensor:
        """Sum `[R, ...]` over the rows of each sample: `[B, ...]`.

        A sample's gradient is the sum of its rows' gradients; adding comes before any norm is taken.
        """
        if self.rows_each == 1:
            return rows
        if self.rows_each is not None:
            return self.folded(rows).sum(1)
        out = rows.new_zeros(self.n_samples, *rows.shape[1:])
        return out.index_add_(0, self.index_on(rows.device), rows)


@dataclass(frozen=True)
class RowsPerSample:
    """Every sample owns `count` rows of each batch.

    Args:
        count: k, at least 1.
        order: "blocked": the first rows of all samples, then the second rows of all, and so on (direct preference
            optimisation: n chosen, then n rejected; two views of an image batch). "interleaved": all rows of sample 0, then
            all of sample 1.

    Raises:
        ConfigurationError: for another count or order.

    Example:
        >>> RowsPerSample(2, "blocked").owners_of(6, "").index_on(torch.device("cpu")).tolist()
        [0, 1, 2, 0, 1, 2]
        >>> RowsPerSample(2, "interleaved").owners_of(6, "").index_on(torch.device("cpu")).tolist()
        [0, 0, 1, 1, 2, 2]
    """

    count: int
    order: Literal["blocked", "interleaved"] | str = "blocked"

    def __post_init__(self) -> None:
        raise_if_any("rows cannot be given to samples", rows_per_sample_problems(self.count, self.order))

    def owners_of(self, n_rows: int, where: str) -> Owners:
        """The owners of a batch of `n_rows` rows.

        Raises:
            PerSampleGradientError: if that is no multiple of `count`.
        """
        if n_rows % self.count:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    f"{where} saw {n_rows} rows, which is not a multiple of rows_per_sample={self.count}: each item of the data set "
                    f"must be one sample that owns {self.count} rows of what the model sees."
                ],
            )
        return Owners(n_rows // self.count, layout=self if self.count > 1 else None)


class _MissingIndex:
    """Stands where a sample index was used up: a batch without one must not pass for one row a sample."""

    def owners_of(self, n_rows: int, where: str) -> Owners:
        raise PerSampleGradientError(
            "samples cannot be told apart",
            [
                f"{where} saw a batch for which no sample index was set: call set_sample_index(index, n_samples) before each "
                "forward, or set_sample_index(None) to go back to one row a sample."
            ],
        )


MISSING_INDEX = _MissingIndex()


def rows_per_sample_problems(count: Any, order: Any) -> list[str]:
    """What is wrong with these arguments of `RowsPerSample`, a sentence each."""
    problems = []
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        problems.append(f"rows_per_sample must be an integer of at least 1, not {count!r}.")
    if order not in ORDERS:
        problems.append(f"row_order must be 'blocked' or 'interleaved', not {order!r}.")
    return problems


def index_problems(index_R: Any, n_samples: Any) -> list[str]:
    """What is wrong with a sample index, a sentence each.

    Its values are looked at on the CPU only; an accelerator would have to be waited for, and finds them by itself.
    """
    problems = []
    if (
        not isinstance(index_R, Tensor)
        or index_R.dim() != 1
        or index_R.dtype not in (torch.int64, torch.int32)
    ):
        given = (
            f"{index_R.dtype} {tuple(index_R.shape)}"
            if isinstance(index_R, Tensor)
            else type(index_R).__name__
        )
        problems.append(
            f"index must be an integer tensor [rows] with the sample that owns each row, not {given}."
        )
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 0:
        problems.append(f"n_samples must be the number of samples in the batch, not {n_samples!r}.")
    if problems or index_R.device.type != "cpu" or not index_R.numel():
        return problems
    if int(index_R.min()) < 0 or int(index_R.max()) >= n_samples:
        problems.append(f"index has entries outside 0 to {n_samples - 1} (n_samples={n_samples}).")
    return problems
