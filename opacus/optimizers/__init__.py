"""Private optimizers: clip, accumulate, add noise, scale, step. One class for each clipping style."""

from __future__ import annotations

from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from opacus.optimizers.automatic import AutomaticDPOptimizer
from opacus.optimizers.ddp_perlayeroptimizer import SimpleDistributedPerLayerOptimizer
from opacus.optimizers.ddp_styles import DistributedAdaClipDPOptimizer, DistributedAutomaticDPOptimizer
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer

__all__ = [
    "AdaClipDPOptimizer",
    "AutomaticDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedAdaClipDPOptimizer",
    "DistributedAutomaticDPOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "FSDPOptimizerFastGradientClipping",
    "SimpleDistributedPerLayerOptimizer",
    "get_optimizer_class",
]

_CLASSES: dict[tuple[str, bool], type[DPOptimizer]] = {
    ("flat", False): DPOptimizer,
    ("per_layer", False): DPPerLayerOptimizer,
    ("adaptive", False): AdaClipDPOptimizer,
    ("automatic", False): AutomaticDPOptimizer,
    ("flat", True): DistributedDPOptimizer,
    ("per_layer", True): SimpleDistributedPerLayerOptimizer,
    ("adaptive", True): DistributedAdaClipDPOptimizer,
    ("automatic", True): DistributedAutomaticDPOptimizer,
}
_GHOST: dict[type[DPOptimizer], type[DPOptimizer]] = {
    DPOptimizer: DPOptimizerFastGradientClipping,
    DistributedDPOptimizer: DistributedDPOptimizerFastGradientClipping,
}


def get_optimizer_class(
    clipping: str, distributed: bool, grad_sample_mode: str | None = None
) -> type[DPOptimizer]:
    """The optimizer class of a clipping style.

    Args:
        clipping: "flat", "per_layer", "adaptive" or "automatic".
        distributed: whether several processes train together.
        grad_sample_mode: the mode that forms the gradients.

    Raises:
        ValueError: if there is no such combination.
    """
    if grad_sample_mode in (
        "ghost_fsdp",
        "ghost_tp",
    ):  # what is reduced is reduced before any optimizer sees it
        distributed = False
    chosen = _CLASSES.get((clipping, distributed))
    if chosen is DPOptimizer and grad_sample_mode in ("ghost_fsdp", "ghost_tp"):
        return FSDPOptimizerFastGradientClipping
    if chosen is not None and grad_sample_mode == "ghost":
        chosen = _GHOST.get(chosen, chosen)
    if chosen is None:
        here = ", ".join(sorted({name for name, across in _CLASSES if across == distributed})) or "none"
        raise ValueError(
            f"clipping {clipping!r} is not available {'over several processes' if distributed else 'here'}"
            f"{f' in mode {grad_sample_mode!r}' if grad_sample_mode else ''}; available: {here}"
        )
    return chosen
