"""The net under every layer rule: once per parameter, its per-sample gradients must add up to autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["disagreement", "expected_rounding", "noting", "unverifiable"]

# How far the sum may lie from autograd's gradient, relative to the sum of the samples' norms: well above the
# rounding of each dtype (TF32 and bf16 autocast for float32), well below any missing term.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.bfloat16: 1e-1, torch.float16: 1e-1}


def unverifiable() -> bool:
    """Under several processes a data-parallel reducer may have averaged `.grad` over ranks already."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def expected_rounding(backprops: list[Tensor]) -> Tensor:
    """A few units in the last place of each backprop, added up as independent errors are; a 0-dim tensor."""
    parts = []
    for g in backprops:
        dtype = torch.promote_types(g.dtype, torch.float32)
        parts.append(4 * torch.finfo(g.dtype).eps * torch.linalg.vector_norm(g, dtype=dtype))
    return torch.stack(parts).sum()


def disagreement(
    names: list[str], dtypes: list[torch.dtype], found: list[Tensor]
) -> tuple[list[str], list[bool]]:
    """Compare once for all parameters; waits for the devices.

    Args:
        names: of the parameters. dtypes: theirs.
        found: for each, `[3]`: norm of (sum - gradient), sum of the samples' norms, rounding to expect.

    Returns:
        `(problems, settled)`: a sentence for each wrong one; whether each is settled (NaN, an overflowing batch, is not).
    """
    problems, settled = [], []
    values = torch.stack([one.to("cpu", torch.float64) for one in found]).tolist() if found else []
    for name, dtype, (difference, size, rounding) in zip(names, dtypes, values, strict=True):
        # where the gradient is 0 (a bias before a normalisation) there is nothing but rounding on either side
        allowed = _TOLERANCE.get(dtype, 1e-1) * size + rounding
        settled.append(difference <= allowed)
        if difference > allowed:
            by = (
                f"{difference / size:.1%} of their norms"
                if size * 1e3 > difference
                else f"{difference:.3g}, all of it"
            )
            problems.append(
                f"{name}: the sum of its per-sample gradients differs from autograd's gradient by {by}. It is used outside "
                "its layer's forward too, or its layer's grad sampler is wrong."
            )
    return problems, settled


def noting(ids: set[int]) -> Callable[[Tensor], None]:
    """A hook that notes its parameter. It must not hold the book: torch's storage hides the cycle from the collector."""
    return lambda parameter: ids.add(id(parameter))
