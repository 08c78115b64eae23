"""Where per-sample gradients lie on a parameter, within one backward and over several.

`_current_grad_sample` adds up calls of one backward (a module used twice); at its end it is promoted: `grad_sample`
is None, then a tensor `[B, *shape]`, then, when further backwards accumulate, a list of such tensors.
"""

from __future__ import annotations

from torch import Tensor, nn

from opacus.grad_sample.rows import pad_rows

__all__ = ["create_or_accumulate_grad_sample", "promote_current_grad_sample"]


def create_or_accumulate_grad_sample(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Add one call's per-sample gradient to what this backward has found for `param`.

    Args:
        param: the parameter.
        grad_sample: `[b, *param.shape]`; rows missing up to `max_batch_len` are zero.
        max_batch_len: number of samples B in the physical batch.
    """
    grad_sample = pad_rows(grad_sample, max_batch_len)
    current = getattr(param, "_current_grad_sample", None)
    param._current_grad_sample = grad_sample if current is None else current + grad_sample  # type: ignore[attr-defined]


def promote_current_grad_sample(p: nn.Parameter) -> None:
    """End of a backward: append what it found to `p.grad_sample`."""
    if not p.requires_grad or getattr(p, "_current_grad_sample", None) is None:
        return
    found = p._current_grad_sample  # type: ignore[attr-defined]
    earlier = getattr(p, "grad_sample", None)
    if earlier is None:
        p.grad_sample = found  # type: ignore[attr-defined]
    elif isinstance(earlier, list):
        earlier.append(found)
    else:
        p.grad_sample = [earlier, found]  # type: ignore[attr-defined]
    del p._current_grad_sample  # type: ignore[attr-defined]
