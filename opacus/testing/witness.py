"""What the rows of a batch did in one run of a model: a short fingerprint of each row at every module and capture.

Two numbers stand for a row of a tensor, its norm and its inner product with a fixed vector, so that a run can be compared
with another without keeping activations. They never leave this package: error messages name modules, not values.

Shapes: R rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.grad_sample.captured import Captured
from opacus.grad_sample.owners import Owners
from opacus.grad_sample.ownership import Slot
from opacus.grad_sample.rows import batch_dim

__all__ = ["Prints", "Seen", "Witness", "common_factor", "difference"]

# layers that treat positions one by one
_ONE_BY_ONE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)

Prints = list["Tensor | None"]  # one for each tensor: `[R, 2]`, None where rows are not told apart
Key = tuple[str, int]  # a module's path, and which of its calls


@dataclass
class Seen:
    """One call.

    Attributes:
        kind: the module's class name.
        inputs, outputs: of the forward; for a capture, what the layer saw and the gradient of its output.
    """

    kind: str
    inputs: Prints
    outputs: Prints


@dataclass
class Witness:
    """Records one run; also the policy of the capture that runs along.

    Attributes:
        forward: every module call. backward: every captured call, in the order of the backward.
        owners: of the captured rows, None if nothing was captured.
        lowest: the least precise floating-point type that was met.
    """

    batch_first: bool
    rows: int | None = None
    forward: dict[Key, Seen] = field(default_factory=dict)
    backward: dict[Key, Seen] = field(default_factory=dict)
    owners: Owners | None = None
    lowest: torch.dtype = torch.float64
    _count: Counter[tuple[str, str]] = field(default_factory=Counter)

    def watch(self, model: nn.Module) -> list[Any]:
        """Put hooks on every module; returns their handles."""
        handles: list[Any] = []
        for path, module in model.named_modules():
            stack: list[Prints] = []

            def before(
                module: nn.Module, args: Any, kwargs: Any, stack: list[Prints] = stack, path: str = path
            ) -> None:
                stack.append([] if _recomputing() else self._prints((args, kwargs)))

            def after(
                module: nn.Module, args: Any, output: Any, stack: list[Prints] = stack, path: str = path
            ) -> None:
                inputs = stack.pop()
                if not _recomputing():
                    key = self._key("forward", path)
                    self.forward[key] = Seen(type(module).__name__, inputs, self._prints(output))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        return handles

    # ------------------------------------------------ the policy of a capture

    def begin(self) -> None:
        """A backward starts."""

    def receive(self, path: str, slots: Sequence[Slot], captured: Captured) -> None:
        """A captured call; its gradients are scaled as its samples' own losses have them."""
        self.owners = captured.owners
        gradients = [_fingerprint(g, captured.scale) if g.dim() else None for g in captured.outputs]
        for g in captured.outputs:
            self._note(g)
        arguments = list(captured.arguments.values())
        if isinstance(captured.layer, _ONE_BY_ONE) and len(captured.outputs) == 1:
            arguments = [_as_reached(one, captured.outputs[0]) for one in arguments]
        key = self._key("backward", path)
        self.backward[key] = Seen(type(captured.layer).__name__, self._prints(tuple(arguments), 0), gradients)

    def end(self) -> None:
        """A backward has ended."""

    def discard(self) -> None:
        """A backward failed."""

    # ----------------------------------------------------------------------

    def calls(self, path: str) -> int:
        """How many calls of the module at `path` the backward met."""
        return self._count["backward", path]

    def _key(self, what: str, path: str) -> Key:
        self._count[what, path] += 1
        return path, self._count[what, path]

    def _note(self, tensor: Tensor) -> None:
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(self.lowest).eps:
            self.lowest = tensor.dtype

    def _prints(self, value: Any, dim: int | None = None) -> Prints:
        found: Prints = []
        for leaf in tree_leaves(value):
            if not isinstance(leaf, Tensor):
                continue
            self._note(leaf)
            found.append(self._print(leaf.detach(), dim))
        return found

    def _print(self, leaf: Tensor, dim: int | None) -> Tensor | None:
        if not leaf.dim() or leaf.is_complex() or leaf.is_sparse:
            return None
        if dim is None:
            dim = batch_dim(leaf, self.batch_first, frozenset({self.rows} if self.rows else ()))
        if self.rows is not None and leaf.shape[dim] != self.rows:
            return None
        return _fingerprint(leaf.transpose(0, dim))


def _as_reached(argument: Any, gradient: Tensor) -> Any:
    """`argument` with each position weighed by its gradient, relative to the row's largest.

    Padding, up to the batch's longest sample, takes no part. Nor, to speak of, do positions that only rounding reached, which kernels
    may leave at 0 or not, by the length of the batch: a query that sees one key has no gradient but what is left of two
    equal numbers.
    """
    lead = gradient.shape[:-1]
    if not isinstance(argument, Tensor) or len(lead) < 2 or argument.shape[: len(lead)] != lead:
        return argument
    if not gradient.numel():
        return argument
    size = gradient.abs().amax(-1).to(torch.promote_types(gradient.dtype, torch.float32))
    largest = size.flatten(1).amax(1).clamp(min=torch.finfo(size.dtype).tiny)
    weight = (size / largest.reshape(-1, *[1] * (size.dim() - 1))).to(argument.device)
    return argument * weight.reshape(*lead, *[1] * (argument.dim() - len(lead)))


def _recomputing() -> bool:
    return torch._C._current_graph_task_id() != -1


def _fingerprint(rows: Tensor, scale: float = 1.0) -> Tensor:
    """`[R, 2]`: inner product with a fixed vector, and norm; what is no number (masks of -inf) counts as 0.

    Computed of values near 1 and scaled back in float64: float32 has no squares of 1e-25, which a gradient may be behind many layers.
    The scale is a power of two, so that it rounds nothing.
    """
    flat = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32)).nan_to_num(0.0, 0.0, 0.0)
    fixed = torch.arange(flat.shape[1], device=flat.device, dtype=flat.dtype).mul_(0.7).add_(0.3).cos_()
    exponent = math.frexp(float(flat.abs().max()))[1] if flat.numel() else 0
    exponent = min(max(exponent, -120), 120)
    flat = flat * 2.0**-exponent
    both = torch.stack([torch.mv(flat, fixed), torch.linalg.vector_norm(flat, dim=1)], 1)
    return both.cpu().double() * (scale * 2.0**exponent)


def difference(before: Prints, after: Prints) -> float:
    """The largest change of a row, relative to its size (or to a hundredth of the largest row's)."""
    largest = 0.0
    for a, b in zip(before, after, strict=False):
        if a is None or b is None or a.shape != b.shape or not a.numel():
            continue
        size = torch.maximum(a[:, 1], b[:, 1])
        size = torch.maximum(size, 0.01 * size.max())
        change = (a - b).abs().amax(1)
        largest = max(largest, float((change / size.clamp(min=1e-30)).max()))
    return largest


def common_factor(before: Prints, after: Prints, tolerance: float) -> bool:
    """Whether all rows changed by one factor."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a is not None and b is not None]
    rows = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=False) if x[1] > 0]
    if not rows:
        return False
    factor = rows[0][1][1] / rows[0][0][1]
    return all(float((y - factor * x).abs().max()) <= tolerance * float(y[1]) for x, y in rows)
