"""Means over a batch that leave records out whose loss is NaN: their denominator must not depend on whose loss is.

TRL's KTO takes `losses.nanmean()`. A record without a loss would change the scale of the others in its physical batch, and with it how
they are clipped. Within `FixedDenominator` such a mean divides by the number of records, whatever their losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["FixedDenominator", "means_without_nan"]


class FixedDenominator(TorchFunctionMode):
    """Within it `nanmean` of a whole tensor is `nansum` divided by the number of entries.

    Example:
        >>> with FixedDenominator():
        ...     print(torch.tensor([1.0, float("nan"), 2.0]).nanmean())
        tensor(1.)
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.nanmean, Tensor.nanmean) and len(args) == 1 and not kwargs:
            return args[0].nansum() / args[0].numel()
        return func(*args, **(kwargs or {}))


def means_without_nan(trainer: Any) -> bool:
    """Whether `trainer`'s loss is such a mean: TRL's KTO, or derived from it."""
    return any(base.__name__ == "KTOTrainer" for base in type(trainer).__mro__)
