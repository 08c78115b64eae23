"""Mode "ghost": per-sample norms in a first backward, clipped sums in a second one through the same forward.

Needs the wrapped criterion that `make_private` returns (`DPLossFastGradientClipping`). Keeps less memory than any
other mode; mode "bk" needs one backward and takes any loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.devices import Placement, total_norms
from opacus.errors import raise_if_any
from opacus.grad_sample.book import Book
from opacus.grad_sample.functorch import FUNCTORCH
from opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from opacus.grad_sample.interface import capture_of
from opacus.grad_sample.ownership import slots
from opacus.grad_sample.selection import NORM_SAMPLERS, rule_for
from opacus.norms import as_rows, row_norms
from opacus.optimizers.clipping import flat_clip_factor

__all__ = [
    "GradSampleHooksFastGradientClipping",
    "GradSampleModuleFastGradientClipping",
    "create_norm_sample",
]

logger = logging.getLogger(__name__)


def create_norm_sample(*, param: nn.Parameter, grad_sample: Tensor, max_batch_len: int) -> None:
    """Put the per-sample norms of `grad_sample` on `param._norm_sample`.

    Args:
        param: the parameter.
        grad_sample: `[b, *param.shape]`.
        max_batch_len: number of samples B; rows missing up to it have norm 0.
    """
    if not param.requires_grad:
        return
    flat = as_rows(grad_sample)
    norm_B = flat.new_zeros(max_batch_len, dtype=torch.promote_types(flat.dtype, torch.float32))
    norm_B[: flat.shape[0]] = row_norms(flat, norm_B.dtype)
    param._norm_sample = norm_B  # type: ignore[attr-defined]


class GradSampleHooksFastGradientClipping(GradSampleHooks):
    """Hooks of the two-pass mode.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch: as in `GradSampleHooks`.
        max_grad_norm: C, for `get_clipping_coef` where no optimizer is attached.
        use_ghost_clipping: take norms without forming per-sample gradients where a rule has such a way; False forms them
            layer by layer ("fast gradient clipping", Lee and Kifer, 2020).

    Raises:
        ConfigurationError, NotImplementedError, ValueError: as `GradSampleHooks`; for a `max_grad_norm` that is not positive.

    Formal guarantee:
        As mode "hooks": an attached optimizer receives sum_i c_i g_i with ||c_i g_i|| <= C.
    """

    NORM_SAMPLERS = NORM_SAMPLERS
    max_grad_norm: float
    use_ghost_clipping: bool
    MODE_OPTIONS = ("max_grad_norm", "use_ghost_clipping")

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        self.__dict__.update(max_grad_norm=max_grad_norm, use_ghost_clipping=use_ghost_clipping)
        super().__init__(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )

    def _make_policy(self, loss_reduction: str, force_functorch: bool) -> Book:
        return Book(
            self._module,
            accumulation_allowed=lambda: self.grad_accumulation_allowed,
            force_functorch=force_functorch,
            strict=self.strict,
            two_passes=True,
            ghost_norms=self.use_ghost_clipping,
        )

    @property
    def book(self) -> Book:
        """What the backward passes said."""
        assert isinstance(self.policy, Book)
        return self.policy

    def backward_twice(
        self, backward: Callable[[bool], None], factors_of: Callable[[], Callable[[nn.Parameter], Tensor]]
    ) -> None:
        """Both passes of one physical batch.

        Args:
            backward: runs one backward of the unweighted loss; its argument says whether to keep the graph.
            factors_of: called between the passes; returns what to multiply each sample's gradient of a parameter with.
        """
        book = self.book
        try:
            with self.capture.two_passes():
                book.stage = "norms"
                backward(True)
                while book.incomplete():
                    book.stage = "norms again"
                    backward(True)
                book.use_factors(factors_of())
                book.stage = "sums"
                backward(False)
        finally:
            book.stage = "unwrapped"

    def get_norm_sample(self) -> Tensor:
        """L2 norm of each sample's gradient over all parameters, `[B]`, after a backward.

        Each parameter's own norms lie on `p._norm_sample`.
        """
        parameters, norms = self.book.norms()
        by_device: dict[torch.device, list[Tensor]] = {}
        for norm_B in norms:
            by_device.setdefault(norm_B.device, []).append(norm_B)
        return total_norms(by_device, Placement(parameters).reduction_device)

    def get_clipping_coef(self) -> Tensor:
        """Flat clip factors `[B]` for `max_grad_norm`, after a backward."""
        return flat_clip_factor(self.get_norm_sample(), self.max_grad_norm)

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Norms `[B]` of the last backward.

        Raises:
            AttributeError: before the first one.
        """
        if not self.book.norms()[0]:
            raise AttributeError("per_sample_gradient_norms: no backward has been run yet")
        return self.get_norm_sample()

    def log_module_gradient_sample_mode(
        self, module: nn.Module, *, force_functorch: bool = False, use_ghost_clipping: bool = True
    ) -> None:
        """Log, per layer, by which rule its norms are found (level INFO).

        Args:
            module: the model. force_functorch, use_ghost_clipping: as in the constructor.
        """
        log_modes(self.iterate_submodules(module), force_functorch, use_ghost_clipping)

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: tuple[Tensor, ...],
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Find the norms of the last call kept by `capture_activations_hook`, given its backprops: `p._norm_sample`."""
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        captured = capture_of(module, activations, backprops)
        rule = rule_for(module, captured.names, force_functorch=self.force_functorch)
        with torch.no_grad(), self.capture.paused():
            squared = rule.norm_sample(captured)
        for slot in slots(module):
            if slot.name in squared:
                slot.parameter._norm_sample = squared[slot.name].sqrt()  # type: ignore[union-attr]


class GradSampleModuleFastGradientClipping(GradSampleHooksFastGradientClipping, GradSampleModule):
    """`GradSampleHooksFastGradientClipping` as a wrapper.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch, max_grad_norm, use_ghost_clipping: as there.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ) -> None:
        check_max_grad_norm(max_grad_norm)
        self.__dict__.update(max_grad_norm=max_grad_norm, use_ghost_clipping=use_ghost_clipping)
        GradSampleModule.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )


def check_max_grad_norm(max_grad_norm: Any) -> None:
    """Raise for a clipping norm that is not positive."""
    values = max_grad_norm if isinstance(max_grad_norm, (list, tuple)) else [max_grad_norm]
    bad = [value for value in values if not (isinstance(value, (int, float)) and value > 0)]
    raise_if_any(
        "per-sample gradients cannot be set up",
        [f"max_grad_norm must be positive, not {value!r}." for value in bad],
    )


def log_modes(layers: Iterable[nn.Module], force_functorch: bool, use_ghost_clipping: bool) -> None:
    """Log the rule of each layer."""
    for layer in layers:
        names = tuple(slot.name for slot in slots(layer))
        rule = rule_for(layer, names, force_functorch=force_functorch)
        way = (
            "functorch"
            if rule is FUNCTORCH
            else "ghost norms"
            if use_ghost_clipping
            else "instantiated norms"
        )
        logger.info("%s: %s", type(layer).__name__, way)
