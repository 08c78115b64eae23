"""`make_private(check_isolation=True)`: the isolation check on a batch of the run's own records, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from opacus.distributed.sharding import is_sharded_model
from opacus.errors import ConfigurationError
from opacus.grad_sample.owners import RowsPerSample
from opacus.utils.collate import CollateFnWithEmpty

__all__ = ["IsolationRequest"]

_MOST_RECORDS = 16


class IsolationRequest:
    """What `make_private` was asked to check.

    Args:
        check_isolation: whether to check at all.
        isolation_loss: `(model, batch) -> loss`; None: `criterion(model(x), y)` for a batch `(x, y)`, `model(**batch).loss` for a
            mapping (Hugging Face models given labels).
        criterion: the loss.
    """

    def __init__(self, check_isolation: Any, isolation_loss: Any, criterion: Any) -> None:
        self.wanted = check_isolation
        self.isolation_loss = isolation_loss
        self.criterion = criterion

    def problems(self, module: Any) -> list[str]:
        """What is wrong with the arguments, a sentence each."""
        problems = []
        if self.wanted is True and isinstance(module, nn.Module) and is_sharded_model(module):
            problems.append(
                "check_isolation cannot run on a sharded model: run opacus.testing.check_sample_isolation on the model before it is "
                "sharded (a small one of the same class does), and leave check_isolation out."
            )
        if not isinstance(self.wanted, bool):
            problems.append(f"check_isolation must be True or False, not {self.wanted!r}.")
        if self.isolation_loss is not None and not callable(self.isolation_loss):
            problems.append("isolation_loss must be a function (model, batch) -> loss.")
        if self.isolation_loss is not None and self.wanted is False:
            problems.append("isolation_loss is used by check_isolation=True only.")
        return problems

    def check(
        self,
        module: nn.Module,
        data_loader: DataLoader,
        rows: RowsPerSample,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Run the check on records taken evenly over the data set.

        Raises:
            PerSampleGradientError, ConfigurationError: as `opacus.testing.check_sample_isolation`.
        """
        if not self.wanted:
            return
        # that room imports much of this package, and only this request needs it here
        from opacus.testing.sample_isolation import check_sample_isolation
        from opacus.testing.undisturbed import same_randomness

        with same_randomness({p.device for p in module.parameters()}):
            batch = _some_records(data_loader)
        check_sample_isolation(
            module,
            self.isolation_loss or self._usual_loss,
            batch,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            rows_per_sample=rows.count,
            row_order=rows.order,
        )

    def _usual_loss(self, model: Callable[..., Any], batch: Any) -> Any:
        device = next(model.parameters()).device  # type: ignore[attr-defined]
        if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[1], Tensor):
            output = model(_to(batch[0], device))
            return self.criterion(output, _to(batch[1], getattr(output, "device", device)))
        if isinstance(batch, Mapping):
            loss = getattr(model(**{name: _to(value, device) for name, value in batch.items()}), "loss", None)
            if loss is not None:
                return loss
        raise ConfigurationError(
            "sample isolation cannot be checked",
            [
                "the loss is not known for batches of this form: check_isolation computes criterion(model(x), y) for batches (x, y) "
                "and model(**batch).loss for mappings. Pass isolation_loss=(model, batch) -> loss."
            ],
        )


def _some_records(data_loader: DataLoader) -> Any:
    dataset: Any = data_loader.dataset
    size = len(dataset)
    count = min(size, data_loader.batch_size or _MOST_RECORDS, _MOST_RECORDS)
    count = min(size, max(count, 2))
    collate = data_loader.collate_fn
    if isinstance(collate, CollateFnWithEmpty):
        collate = collate.collator_fn
    return collate([dataset[j * size // count] for j in range(count)])


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
