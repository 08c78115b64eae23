"""The policy of the `hooks` mode: per-sample gradients are formed and left on `p.grad_sample`.

Two nets stand under it. A parameter that received a plain gradient without its layer's call being captured was used
outside that layer: refused by name. And the first time a parameter is captured, the sum of its per-sample gradients
must be autograd's own gradient; a missing or wrong rule is found before a step is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.grad_sample.accumulate import create_or_accumulate_grad_sample, promote_current_grad_sample
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.ownership import Slot, all_parameters
from opacus.grad_sample.selection import rule_for
from opacus.grad_sample.verification import disagreement, expected_rounding, noting, unverifiable
from opacus.norms import as_rows
from opacus.optimizers.batch_count import BatchCount

__all__ = ["Instantiate"]

logger = logging.getLogger(__name__)


class Instantiate:
    """Forms `[B, *shape]` for every trained parameter of every captured call.

    Args:
        root: the model, for names and for parameters that took no part.
        accumulation_allowed: asked at the start of each backward.
        loss_reduction: "mean" or "sum", to compare with autograd's gradient.
        force_functorch: take functorch even where a built-in rule exists.
        strict: raise where a net finds something; otherwise log it.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        accumulation_allowed: Callable[[], bool],
        loss_reduction: str,
        force_functorch: bool = False,
        strict: bool = True,
    ) -> None:
        self.root = root
        self.accumulation_allowed = accumulation_allowed
        self.loss_reduction = loss_reduction
        self.force_functorch = force_functorch
        self.strict = strict
        self._n_samples: int | None = None
        self._fresh: set[int] = set()  # captured in this backward while `.grad` was None, by id
        self._compared: set[int] = set()
        self._plain: set[int] = set()
        self._rounding: dict[int, Tensor] = {}  # rounding error that a sum of backprops may have, by id
        self._watched: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.batches = BatchCount()
        self.watch()

    def watch(self) -> None:
        """Notice plain gradients of the parameters that train now (and were not watched yet)."""
        for parameter in all_parameters(self.root):
            known = self._watched.get(id(parameter))
            # asked of the parameter itself: an id may be another's by now, and a weak reference forbids swapping tensors
            on_it = known is not None and known.id in (parameter._post_accumulate_grad_hooks or ())
            if parameter.requires_grad and parameter.is_leaf and not on_it:
                handle = parameter.register_post_accumulate_grad_hook(noting(self._plain))
                self._watched[id(parameter)] = handle
                self._compared.discard(id(parameter))

    def close(self) -> None:
        """Take the watching hooks off."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def begin(self) -> None:
        self.batches.count()
        self._n_samples = None
        self._fresh.clear()
        self._rounding.clear()
        self._forget_current()
        if not self.accumulation_allowed() and any(
            getattr(p, "grad_sample", None) is not None for p in all_parameters(self.root)
        ):
            raise ValueError(
                "per-sample gradients of an earlier backward are still there, and grad accumulation is not "
                "compatible with Poisson sampling: call optimizer.step() and optimizer.zero_grad() after every "
                "backward, or use BatchMemoryManager to split a logical batch."
            )

    def receive(self, path: str, slots: Sequence[Slot], captured: Captured) -> None:
        captured = captured.scaled()
        self._n_samples = captured.owners.n_samples
        rule = rule_for(captured.layer, captured.names, force_functorch=self.force_functorch)
        found = rule.grad_sample(captured)
        for slot in slots:
            parameter = slot.parameter
            if parameter is None or slot.name not in found:
                continue
            grad_sample = found[slot.name]
            if grad_sample.shape[1:] != parameter.shape:
                raise PerSampleGradientError(
                    "a grad sampler returned the wrong shape",
                    [
                        f"{path}.{slot.name}: {tuple(grad_sample.shape)} for a parameter of shape "
                        f"{tuple(parameter.shape)}; a sampler returns [B, *parameter.shape]."
                    ],
                )
            if id(parameter) not in self._compared:
                earlier = self._rounding.get(id(parameter), 0.0)
                self._rounding[id(parameter)] = expected_rounding(list(captured.outputs)) + earlier
            if parameter.grad is None and getattr(parameter, "_current_grad_sample", None) is None:
                self._fresh.add(id(parameter))
            create_or_accumulate_grad_sample(
                param=parameter, grad_sample=grad_sample, max_batch_len=captured.owners.n_samples
            )

    def end(self) -> None:
        problems, compared = self._used_outside(), self._compare_with_autograd()
        self._plain.clear()
        if problems or compared:
            if self.strict:
                self.discard()
                raise_if_any(
                    "per-sample gradients are not complete", problems + compared, PerSampleGradientError
                )
            logger.warning("per-sample gradients are not complete: %s", "; ".join(problems + compared))
        for parameter in all_parameters(self.root):
            if not parameter.requires_grad or self._n_samples is None:
                continue
            if getattr(parameter, "_current_grad_sample", None) is None:
                # unused in this batch: a zero gradient, held as one number
                zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                absent = zero.expand(self._n_samples, *parameter.shape)
                absent._stands_for_zero = True  # type: ignore[attr-defined]
                parameter._current_grad_sample = absent  # type: ignore[attr-defined]
            promote_current_grad_sample(parameter)
        self._forget_current()  # of parameters frozen between forward and backward

    def discard(self) -> None:
        self._plain.clear()
        self._forget_current()

    def _forget_current(self) -> None:
        for parameter in all_parameters(self.root):
            if hasattr(parameter, "_current_grad_sample"):
                del parameter._current_grad_sample

    def _used_outside(self) -> list[str]:
        return [
            f"{name} received a gradient although its layer's call was not captured: it is used outside that layer's "
            "forward (functional call, penalty on weights, output that is no tensor). Call the layer itself, or freeze it."
            for name, parameter in self.root.named_parameters()
            if id(parameter) in self._plain and getattr(parameter, "_current_grad_sample", None) is None
        ]

    def _compare_with_autograd(self) -> list[str]:
        if unverifiable() or not self._n_samples:
            return []
        scale = self._n_samples if self.loss_reduction == "mean" else 1
        names, dtypes, differences = [], [], []
        for name, parameter in self.root.named_parameters():
            current = getattr(parameter, "_current_grad_sample", None)
            key = id(parameter)
            if current is None or parameter.grad is None or key in self._compared:
                continue
            if key not in self._fresh or key not in self._plain:
                continue
            names.append((name, key))
            dtypes.append(parameter.dtype)
            differences.append(_difference(current, parameter.grad, scale, self._rounding[key]))
        problems, settled = disagreement([name for name, _ in names], dtypes, differences)
        self._compared.update(key for (_, key), done in zip(names, settled, strict=True) if done)
        return problems


def _difference(grad_sample: Tensor, grad: Tensor, scale: int, rounding: Tensor) -> Tensor:
    """`[3]`: norm of the difference, sum of per-sample norms, rounding error to expect."""
    dtype = torch.promote_types(grad_sample.dtype, torch.float32)
    flat = as_rows(grad_sample).to(dtype)
    plain = (grad.to_dense() if grad.is_sparse else grad).flatten().to(dtype) * scale
    difference = torch.linalg.vector_norm(flat.sum(0) - plain)
    return torch.stack([difference, torch.linalg.vector_norm(flat, dim=1).sum(), rounding.to(flat)])
