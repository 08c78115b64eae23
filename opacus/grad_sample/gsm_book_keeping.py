"""Mode "bk": book-keeping. One backward, any loss, no per-sample gradients (Bu et al., ICML 2023, PMLR 202)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from opacus.grad_sample.book import Book
from opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule

__all__ = ["GradSampleHooksBookKeeping", "GradSampleModuleBookKeeping"]


class GradSampleHooksBookKeeping(GradSampleHooks):
    """Hooks that clip while the backward runs: the optimizer attached (`DPOptimizer.attach_book`) gets clipped sums.

    `p.grad_sample` is never formed, and `p.grad` stays None until `optimizer.step()`.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch: as in `GradSampleHooks`.
        stash_budget: bytes that may be spent beyond the memory-optimal route for speed (`routes.py`).

    Formal guarantee:
        The attached optimizer receives sum_i c_i g_i with ||c_i g_i|| <= C, as in mode "hooks"; in reduced precision the norm
        is taken larger by the rounding of its products.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        stash_budget: int = 0,
    ) -> None:
        self.stash_budget = stash_budget
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )

    def _make_policy(self, loss_reduction: str, force_functorch: bool) -> Book:
        return book_of(
            self._module,
            lambda: self.grad_accumulation_allowed,
            force_functorch,
            self.strict,
            self.stash_budget,
        )


class GradSampleModuleBookKeeping(GradSampleModule):
    """`GradSampleHooksBookKeeping` as a wrapper.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch, stash_budget: as in `GradSampleHooksBookKeeping`.
    """

    MODE_OPTIONS = ("stash_budget",)
    stash_budget: int

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        stash_budget: int = 0,
    ) -> None:
        self.__dict__["stash_budget"] = stash_budget  # before nn.Module is set up
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )

    def _make_policy(self, loss_reduction: str, force_functorch: bool) -> Book:
        return book_of(
            self._module,
            lambda: self.grad_accumulation_allowed,
            force_functorch,
            self.strict,
            self.stash_budget,
        )


def book_of(
    module: nn.Module, allowed: Callable[[], bool], force_functorch: bool, strict: bool, stash_budget: int
) -> Book:
    """A one-pass book."""
    return Book(
        module,
        accumulation_allowed=allowed,
        force_functorch=force_functorch,
        strict=strict,
        stash_budget=stash_budget,
    )
