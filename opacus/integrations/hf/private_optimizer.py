"""The private optimizer of a trainer's run, around the one that the trainer makes (a new one for each `train()`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim import Optimizer

from opacus.devices import Placement
from opacus.errors import raise_if_any
from opacus.integrations.hf.refusals import optimizer_kind_problems
from opacus.optimizers import DPOptimizer, get_optimizer_class

if TYPE_CHECKING:
    from opacus.integrations.hf.run import PrivateRun

__all__ = ["private_optimizer"]


def private_optimizer(run: PrivateRun, inner: Optimizer) -> DPOptimizer:
    """Clip and noise by the run's plan, in the clipped sums of the run's hooks.

    Args:
        run: whose optimizer of before, if there is one, hands on its noise.
        inner: the trainer's own optimizer.

    Raises:
        ConfigurationError: if the optimizer, or an argument for it, cannot be.

    Formal guarantee:
        However often the trainer makes a new optimizer, noise goes on in the stream of the one before: noise that starts again
        is taken off by subtracting two updates.
    """
    raise_if_any("the trainer's optimizer cannot be made private", optimizer_kind_problems(inner))
    plan, ranks, earlier = run.plan, run.ranks, run.optimizer
    if earlier is not None:
        generator = earlier.generator
    elif plan.secure_mode:
        generator = None
    else:
        trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
        home = Placement(trained, reduction_device=plan.options.get("reduction_device")).reduction_device
        generator = torch.Generator(home).manual_seed(_noise_seed(plan.seed))
    together: dict[str, Any] = {} if ranks is None else {"process_group": ranks.group}
    private = get_optimizer_class(plan.clipping, ranks is not None, "bk")(
        inner,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,  # type: ignore[arg-type]
        expected_batch_size=plan.expected_batch_size / (1 if ranks is None else ranks.count),  # type: ignore[arg-type]
        loss_reduction="mean",
        generator=generator,
        secure_mode=plan.secure_mode,
        **plan.options,
        **together,
    )
    if earlier is not None:
        private._noise = earlier.noise_stream()
        private._nonfinite = earlier._nonfinite
    private.made_for_one_process = ranks is None
    private.param_names = {id(p): name for name, p in run.model.named_parameters()}
    private.attach_book(run.hooks.policy)
    return private


def _noise_seed(seed: int) -> int:
    """The noise's own seed: independent of the batches', which follow from the same number."""
    return int(np.random.SeedSequence(seed, spawn_key=(2**32 - 1,)).generate_state(1, np.uint64)[0] >> 1)
