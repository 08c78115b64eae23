"""Clipped sums of the modes without per-sample gradients, and what mathematics says they are.

The expected sum is `sum_i w_i min(1, C / |w_i g_i|) g_i` over the float64 gradients of a loop over samples (`per_sample.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opacus.grad_sample import wrap_model
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.tests.per_sample import assert_close, expected, in_dtype, per_sample_loss, take
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

# how clipped sums are found: name -> (mode, options of the mode)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "bk": ("bk", {}),
    "bk with budget": ("bk", {"stash_budget": 10**9}),
    "ghost": ("ghost", {}),
    "fast": ("ghost", {"use_ghost_clipping": False}),
}

ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 1e8,
    "min_clipbound": 1e-8,
    "unclipped_num_std": 1.0,
}


class Private:
    """A model whose batches are clipped in one of `WAYS`.

    Args:
        model: changed in place.
        way: one of `WAYS`.
        clip: C. style: clipping style. sigma: noise multiplier.
        wrap: a wrapper, or hooks. loss_reduction, batch_dim: of the model and its loss.
        **options: of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        way: str,
        *,
        clip: Any = 1.0,
        style: str = "flat",
        sigma: float = 0.0,
        wrap: bool = True,
        loss_reduction: str = "mean",
        batch_dim: int = 0,
        lr: float = 0.0,
        **options: Any,
    ) -> None:
        mode, mode_options = WAYS[way]
        self.model, self.mode, self.batch_dim = model, mode, batch_dim
        self.loss_reduction = loss_reduction
        self.module = wrap_model(
            model, mode, wrap, batch_first=batch_dim == 0, loss_reduction=loss_reduction, **mode_options
        )
        self.run = self.module if wrap else model
        kind = get_optimizer_class(style, False, mode)
        self.optimizer: DPOptimizer = kind(
            torch.optim.SGD(model.parameters(), lr=lr),
            noise_multiplier=sigma,
            max_grad_norm=clip,
            expected_batch_size=1,
            loss_reduction=loss_reduction,
            **(ADAPTIVE if style == "adaptive" else {}),
            **options,
        )
        self.optimizer.attach_book(self.module.policy)

    def backward_of(self, losses: Tensor, scale: float = 1.0) -> None:
        """One batch's backward, given its loss per sample."""
        if self.mode == "ghost":
            DPTensorFastGradientClipping(
                self.module, self.optimizer, losses * scale, self.loss_reduction
            ).backward()
        else:
            (scale * (losses.mean() if self.loss_reduction == "mean" else losses.sum())).backward()

    def backward(
        self, *args: Any, loss: Callable[..., Tensor] = per_sample_loss, scale: float = 1.0, **kwargs: Any
    ) -> None:
        """Forward and backward."""
        self.backward_of(loss(self.run(*args, **kwargs), self.batch_dim), scale)

    def sums(self) -> dict[str, Tensor]:
        """What the optimizer holds after clipping; `.grad` was formed by nobody."""
        assert all(p.grad is None for p in self.model.parameters())
        self.optimizer.clip_and_accumulate()
        named = {name: p.summed_grad for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                assert named[name].device == p.device, name
                assert named[name].dtype == torch.promote_types(p.dtype, torch.float32), name
        return named

    def batch(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The clipped sums of one batch, leaving nothing behind."""
        self.backward(*args, **kwargs)
        found = self.sums()
        self.optimizer.zero_grad(set_to_none=True)
        return found


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    """`[B]`: norm of each sample's whole gradient."""
    return torch.stack([g.flatten(1).square().sum(1) for g in rows.values()]).sum(0).sqrt()


def clipped_by_loop(
    rows: dict[str, Tensor],
    clip: Any,
    style: str = "flat",
    weight_B: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sum that a clipping style makes of float64 gradients `{name: [B, *shape]}`, one sample after the other."""
    n = next(iter(rows.values())).shape[0]
    weights = torch.ones(n, dtype=torch.float64) if weight_B is None else weight_B.double()
    total = {name: torch.zeros(g.shape[1:], dtype=torch.float64) for name, g in rows.items()}
    bounds = clip if isinstance(clip, list) else [clip / len(rows) ** 0.5] * len(rows)
    for i in range(n):
        of_sample = {name: weights[i] * g[i] for name, g in rows.items()}
        norms = {name: g.norm().item() for name, g in of_sample.items()}
        whole = sum(norm**2 for norm in norms.values()) ** 0.5
        for (name, g), bound in zip(of_sample.items(), bounds, strict=True):
            if style == "per_layer":
                factor = min(1.0, bound / max(norms[name], 1e-300))
            elif style == "automatic":
                factor = clip / (whole + 0.01)
            else:
                factor = min(1.0, clip / max(whole, 1e-300))
            total[name] += factor * g
    return total


def check_sums(
    make: Callable[[], nn.Module],
    *args: Any,
    way: str,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    style: str = "flat",
    weigh: bool = False,
    n: int | None = None,
    batch_dim: int = 0,
    loss: Callable[..., Tensor] = per_sample_loss,
    split: Callable[..., Any] = take,
    place: Callable[[nn.Module], Any] = lambda model: None,
    reference: Callable[[nn.Module], nn.Module] = lambda model: model,
    batches: int = 2,
    wrap: bool = True,
    loss_reduction: str = "mean",
    **kwargs: Any,
) -> None:
    """Compare one batch's clipped sums with the loop, the first time (with the verification) and again (without).

    About half of the samples are clipped: C is their median norm.
    """
    torch.manual_seed(0)
    model = make().to(dtype)
    args, kwargs = in_dtype((args, kwargs), dtype)
    first: Sequence[Tensor] = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    n = first[0].shape[batch_dim] if n is None else n
    rows = expected(reference(model), args, kwargs, n, batch_dim=batch_dim, loss=loss, split=split)
    rows = {name.removeprefix("model."): g for name, g in rows.items()}
    weight_B = torch.linspace(0.2, 2.0, n, dtype=torch.float64) if weigh else None
    clip = norms_of(rows).median().item()
    assert clip > 1e-3, "a test on zero gradients shows nothing"
    want = clipped_by_loop(rows, clip, style, weight_B)
    place(model)
    private = Private(
        model, way, clip=clip, style=style, wrap=wrap, loss_reduction=loss_reduction, batch_dim=batch_dim
    )
    for _ in range(batches):
        if weight_B is not None:
            private.optimizer.set_sample_weights(weight_B)
        if style == "adaptive":
            private.optimizer.max_grad_norm = clip
        assert_close(private.batch(*args, loss=loss, **kwargs), want, tolerance)
