"""Capture: pair each layer call's inputs with the gradient of its output.

A forward hook sends the layer's output through `_Tap`, an identity whose backward receives the
backprops and whose saved tensors are the layer's inputs. Because autograd itself keeps the inputs,
activation checkpointing and CPU offload handle them like any other saved tensor, and because the tap
sits in the graph below whatever follows, an in-place operation on the output cannot drop it.

All calls whose backprops arrive during one outermost backward form one physical batch: their
gradients add per parameter before any norm is taken (a module called twice, tied parameters, a model
called twice for one loss). What is done with a call is the policy's business, not this file's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus import integrations
from opacus.errors import PerSampleGradientError
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.isolation import Probe, can_probe
from opacus.grad_sample.owners import MISSING_INDEX, OwnerRule, Owners
from opacus.grad_sample.ownership import Slot, layers_with_parameters
from opacus.grad_sample.pieces import Piece, local_calls, pieces_of
from opacus.grad_sample.rows import (
    RowCount,
    bags_of,
    batch_dim,
    expand_position_ids,
    first_dim_is_batch,
    pad_rows,
    takes_ids,
)

__all__ = ["Capture", "Policy", "refuse_if_captured"]

logger = logging.getLogger(__name__)

_captured_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Policy(Protocol):
    """What becomes of captured calls. One physical batch: begin, receive any number of calls, end."""

    def begin(self) -> None:
        """The first call of an outermost backward is about to be received; may refuse by raising."""

    def receive(self, path: str, slots: Sequence[Slot], captured: Captured) -> None:
        """One call; runs on the backward thread of the layer's device, without autograd."""

    def end(self) -> None:
        """The outermost backward has ended: all its calls were received."""

    def discard(self) -> None:
        """The backward failed half-way: forget what was received since `begin`."""


def refuse_if_captured(root: nn.Module) -> None:
    """Raise if a layer of `root` is captured already.

    Raises:
        ValueError: naming such layers.
    """
    taken = [path or "(root)" for path, layer, _ in layers_with_parameters(root) if layer in _captured_layers]
    if taken:
        raise ValueError(
            f"hooks cannot be added twice: {', '.join(taken[:5])} is captured already. Use the wrapped module you "
            "have, or remove its hooks first (remove_hooks, to_standard_module)."
        )


class Capture:
    """Hooks on every layer of `root` that uses parameters of its own.

    Args:
        root: the model.
        policy: receives the captured calls.
        batch_first: whether dimension 0 of inputs is the batch; otherwise dimension 1 of tensors of
            three or more dims (and of integer tensors of two) is.
        loss_reduction: with "mean", captures say that backprops are to be multiplied by the number of samples.
        detach_weights: let weights take part in the forward detached, so that autograd forms no plain
            weight gradient.
        keeps_attached: with `detach_weights`, parameters that take part as usual all the same.
        check_isolation: before the first backward, check that one sample's output reaches no other sample's rows
            (`isolation.py`).
    """

    def __init__(
        self,
        root: nn.Module,
        policy: Policy,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        detach_weights: bool = False,
        keeps_attached: Callable[[nn.Parameter], bool] | None = None,
        check_isolation: bool = True,
    ) -> None:
        self.root = root
        self.policy = policy
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.detach_weights = detach_weights
        self.keeps_attached = keeps_attached
        self.enabled = True
        self.owners: OwnerRule | None = None  # None: row i is sample i
        self._index: Owners | None = None  # the owners that only the next backward may use
        self._index_in_use = False  # a forward has run under it
        self.rows = RowCount(batch_first)
        self._anchor = torch.zeros((), requires_grad=True)
        self._whole_task = -1
        self._to_probe = check_isolation
        self._probe: Probe | None = None
        self._handles: list[Any] = []
        self._slots: list[Slot] = []  # of the hooked layers
        self._local = threading.local()
        self._open: _Backward | None = None
        self._repeated: _Backward | None = None
        self._lock = threading.RLock()

    # ---------------------------------------------------------------- hooks

    def attach(self) -> None:
        """Register the hooks.

        Raises:
            ValueError: if a layer is captured already, by this object or by another.
        """
        refuse_if_captured(self.root)
        if self._handles:
            raise ValueError("hooks cannot be added twice: call detach() first")
        self._handles += integrations.adapt(self.root)
        # functions of their own, not bound methods: a deep copy of the model must not copy this object
        copied_from = weakref.ref(self.root)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is copied_from():
                self.rows.enter(args, kwargs)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is copied_from():
                self._check_isolation(output)
                self.rows.leave()

        self._handles.append(self.root.register_forward_pre_hook(enter, with_kwargs=True))
        for path, layer, slots in list(layers_with_parameters(self.root)):
            _captured_layers.add(layer)
            self._slots += slots
            before, after = self._layer_hooks(path, layer, slots)
            self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(
                layer.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=True)
            )
        self._handles.append(self.root.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._slots.clear()
        for _, layer, _ in layers_with_parameters(self.root):
            _captured_layers.discard(layer)

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    @property
    def handles(self) -> list[Any]:
        """Handles of the hooks in place."""
        return self._handles

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the hooked layers, as they are now; those of layers and adapters added since are none of them."""
        for slot in self._slots:
            if slot.parameter is not None:
                yield slot.parameter

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this thread, layer calls are neither captured nor run with detached weights."""
        before = getattr(self._local, "paused", False)
        self._local.paused = True
        try:
            yield
        finally:
            self._local.paused = before

    def set_sample_index(self, owners: Owners | None) -> None:
        """The owners of the next forward and backward alone; None ends this, row i is sample i again.

        Raises:
            ValueError: if a forward under an earlier index still waits for its backward.
        """
        if owners is not None and self._index_in_use:
            raise ValueError(
                "set_sample_index: a forward that ran under the earlier index still waits for its backward. Call backward "
                "first, or set_sample_index(None) to drop that forward."
            )
        self.owners = self._index = owners
        self._index_in_use = False

    @property
    def lasting_owners(self) -> OwnerRule | None:
        """What a copy of this capture starts with: an index that was set for one batch is not the copy's."""
        return MISSING_INDEX if self._index is not None and self.owners is self._index else self.owners

    def _use_up_index(self, used: Owners) -> None:
        if used is self._index:
            if self.owners is used:
                self.owners = MISSING_INDEX
            self._index, self._index_in_use = None, False

    def _owners_now(self) -> OwnerRule | None:
        """What a call that runs now is bound to; recomputed calls (checkpointing) belong to the running backward."""
        if self._open is not None and self._open.owners is not None:
            return self._open.rule
        if self._index is not None and self.owners is self._index:
            self._index_in_use = True
        return self.owners

    def _check_isolation(self, output: Any) -> None:
        if not self._to_probe or not self.rows.outermost or not torch.is_grad_enabled() or output is None:
            return
        rows = self.rows.of_output(output)
        if not self.enabled or rows is None or rows < 2 or not can_probe(self.root):
            return
        try:
            owners = Owners(rows) if self.owners is None else self.owners.owners_of(rows, "the model")
        except PerSampleGradientError:
            return  # the backward says so, naming the layer
        if owners.n_samples < 2 or owners.n_rows != rows:
            return
        probe = Probe(rows, owners, partial(batch_dim, batch_first=self.batch_first, rows=frozenset({rows})))
        self._probe = probe
        try:
            self._to_probe = not probe.run(output, self._anchor)
        except PerSampleGradientError:
            self.rows.leave()
            raise
        finally:
            self._probe = None

    def _layer_hooks(
        self, path: str, hooked: nn.Module, slots: list[Slot]
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        stack: list[tuple[tuple[str, ...], list[nn.Parameter], list[tuple[Tensor, int]]]] = []
        original = weakref.ref(
            hooked
        )  # a deep copy of the layer carries this hook too, but not its parameters

        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            names: list[str] = []
            switched_off: list[nn.Parameter] = []
            idle = not self.enabled or getattr(self._local, "paused", False) or layer is not original()
            if not idle:
                self._drop_failed_backward()
                for slot in slots:
                    parameter = slot.parameter
                    if parameter is not None and parameter.requires_grad:
                        names.append(slot.name)
                        if self.detach_weights and not (
                            self.keeps_attached and self.keeps_attached(parameter)
                        ):
                            switched_off.append(parameter)
            seen = _versions(args, kwargs) if names and torch.is_grad_enabled() else []
            stack.append((tuple(names), switched_off, seen))
            for parameter in switched_off:
                parameter.requires_grad_(False)
            if names and takes_ids(args, kwargs):
                return expand_position_ids(args, kwargs, self.rows.expected, self.batch_first)
            return None

        def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not stack:  # another hook raised before ours ran
                return None
            names, switched_off, seen = stack.pop()
            for parameter in switched_off:
                parameter.requires_grad_(True)
            if not names or output is None or not torch.is_grad_enabled():
                return None
            if any(tensor._version != version for tensor, version in seen):
                raise PerSampleGradientError(
                    "per-sample gradients cannot be computed",
                    [
                        f"{path or '(root)'} ({type(layer).__name__}) changes its own input in place, so that what it "
                        "computed from is lost. Let it work on a copy."
                    ],
                )
            return self._tap(path, layer, slots, names, args, kwargs, output)

        return before, after

    def _tap(
        self,
        path: str,
        layer: nn.Module,
        slots: list[Slot],
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in args):
            inputs, structure = tree_flatten((args, kwargs))
        else:
            inputs, structure = list(args), None
        one = isinstance(output, Tensor)
        outputs, output_structure = ([output], None) if one else tree_flatten(output)
        differentiable = tuple(
            i
            for i, leaf in enumerate(outputs)
            if isinstance(leaf, Tensor)
            and leaf.is_floating_point()
            and (leaf.requires_grad or self.detach_weights)
        )
        if not differentiable:
            return None
        allowed = bags_of(layer, args, kwargs, self.rows.allowed)
        call = _Call(self, path, layer, slots, names, structure, differentiable, allowed, self._owners_now())
        call.pieces = pieces_of(path, slots, names)
        saved = []
        for leaf in inputs:
            if isinstance(leaf, Tensor):
                saved.append(leaf.detach())
                call.leaves.append(_TENSOR)
            else:
                call.leaves.append(leaf)
        tapped = _Tap.apply(self._anchor, call, *[outputs[i] for i in differentiable], *saved)
        if one:
            return tapped
        if len(differentiable) == 1:
            tapped = (tapped,)
        for i, leaf in zip(differentiable, tapped, strict=True):
            outputs[i] = leaf
        return tree_unflatten(outputs, output_structure)  # type: ignore[arg-type]

    # ------------------------------------------------- one outermost backward

    def _drop_failed_backward(self) -> None:
        """See a layer call. One outside any backward proves that a batch still open belongs to a failed one.

        A call inside a backward is a recomputation (checkpointing); noting it here, before a nested
        backward starts, ties the batch to the outermost backward.
        """
        if self._probe is not None:
            return
        node = torch._C._current_autograd_node()
        if node is not None:
            backward = self._ensure_open()
            # reentrant checkpointing builds new calls each time: its own node is what was used before
            if node.metadata.setdefault(_SPENT, backward) is not backward:  # type: ignore[attr-defined]
                raise _used_twice("a checkpointed part of the model")
        elif self._open is not None:
            with self._lock:
                self._open = None
                self.policy.discard()

    @contextlib.contextmanager
    def two_passes(self) -> Iterator[None]:
        """Within it, several backward passes go through the same forward on purpose; they are one physical batch."""
        self._repeated = _Backward()
        try:
            yield
        finally:
            self._repeated = None

    def _ensure_open(self) -> _Backward:
        with self._lock:
            if self._open is None:
                backward = self._repeated or _Backward()
                self.policy.begin()
                self._open = backward
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._close(backward))
            return self._open

    def _close(self, backward: _Backward) -> None:
        with self._lock:
            if self._open is backward:
                self._open = None
                with torch.no_grad():
                    self.policy.end()

    def _deliver(self, call: _Call, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if self._probe is not None:
            self._probe.look(call.where, self._padded(call, self._batch_first(call, grads)))
            return
        if not self.attached:
            return
        if torch.is_grad_enabled():
            raise PerSampleGradientError(
                "per-sample gradients cannot be captured",
                [
                    f"{call.where}: a backward with create_graph=True (double backward) was run through it. "
                    "Compute gradient penalties outside the private model, or with functorch transforms."
                ],
            )
        if not self._trains_now(call):
            return
        backward = self._ensure_open()
        if call.spent_by is not None and call.spent_by is not backward:
            raise _used_twice(call.where)
        call.spent_by = backward
        captured = self._assemble(call, saved, grads, backward)
        parts = [captured] if call.pieces is None else local_calls(captured, call.pieces, call.path)
        device_type = grads[0].device.type
        paused, self._local.paused = getattr(self._local, "paused", False), True
        try:
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    self._hand_over(call, parts)
            else:
                self._hand_over(call, parts)
        finally:
            self._local.paused = paused

    def _hand_over(self, call: _Call, parts: Sequence[Captured]) -> None:
        for part in parts:
            self.policy.receive(call.path, call.slots, part)

    def _trains_now(self, call: _Call) -> bool:
        """False in `torch.autograd.grad(loss, inputs)`: gradients of inputs (adversarial examples) train nothing."""
        task = torch._C._current_graph_task_id()
        if task == self._whole_task:
            return True
        if _is_wanted(
            self._anchor
        ):  # a backward asked for no inputs in particular: asked once, for all its calls
            self._whole_task = task
            return True
        leaves = [slot.parameter for slot in call.slots if slot.name in call.names]
        return any(_is_wanted(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad)

    def _batch_first(self, call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        dim_of = self._batch_dim_of(call)
        if dim_of is _first:
            return list(tensors)
        return [tensor.transpose(0, dim_of(tensor)) if tensor.dim() else tensor for tensor in tensors]

    def _padded(self, call: _Call, leaves: list[Any]) -> list[Any]:
        padded_to = call.padded_to
        if padded_to is None:
            return leaves
        return [pad_rows(leaf, padded_to) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _batch_dim_of(self, call: _Call) -> Callable[[Tensor], int]:
        # an RNN cell's rows, a convolution's batch: dim 0 whatever the model's layout
        if self.batch_first or call.padded_to is not None or first_dim_is_batch(call.layer):
            return _first
        return partial(batch_dim, batch_first=self.batch_first, rows=call.rows_allowed or frozenset())

    def _assemble(
        self, call: _Call, saved: Sequence[Tensor], grads: Sequence[Tensor], backward: _Backward
    ) -> Captured:
        if len(saved) == len(call.leaves):
            leaves = self._padded(call, list(saved))
        else:
            tensors = iter(saved)
            leaves = self._padded(call, [next(tensors) if leaf is _TENSOR else leaf for leaf in call.leaves])
        outputs = self._padded(call, self._batch_first(call, grads))
        args, kwargs = (
            (tuple(leaves), {}) if call.structure is None else tree_unflatten(leaves, call.structure)
        )
        owners = backward.agree(call.where, outputs, call.rows_allowed, call.rule)
        self._use_up_index(owners)
        return Captured(
            call.layer,
            call.names,
            args,
            kwargs,
            outputs,
            owners,
            self._batch_dim_of(call),
            call.differentiable,
            float(owners.n_samples) if self.loss_reduction == "mean" else 1.0,
        )


def _first(tensor: Tensor) -> int:
    return 0


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, int]]:
    plain = not kwargs and all(isinstance(leaf, Tensor) for leaf in args)
    leaves = args if plain else tree_flatten((args, kwargs))[0]
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _is_wanted(leaf: Tensor) -> bool:
    """Whether the running backward forms `leaf`'s gradient (where `leaf` is part of its graph)."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # its way to say that torch.autograd.grad was asked for this very leaf
        return True


def _used_twice(where: str) -> PerSampleGradientError:
    return PerSampleGradientError(
        "the same forward was used by two backward passes",
        [
            f"{where}: its samples were captured already; clipping them twice would double their influence. Add the "
            "losses and call backward once, or run forward again."
        ],
    )


_TENSOR = object()
_SPENT = "opacus: captured in"


class _Call:
    """What `_Tap` must remember of a layer call besides tensors; holds none, so nothing is kept alive."""

    def __init__(
        self,
        capture: Capture,
        path: str,
        layer: nn.Module,
        slots: list[Slot],
        names: tuple[str, ...],
        structure: Any,
        differentiable: tuple[int, ...],
        rows_allowed: frozenset[int] | None,
        rule: OwnerRule | None,
    ) -> None:
        self.capture = capture
        self.path = path
        self.layer = layer
        self.slots = slots
        self.names = names
        self.structure = structure
        self.differentiable = differentiable
        self.rows_allowed = rows_allowed
        self.rule = rule
        # of this forward: another one, with another batch, may run before the backward
        self.padded_to: int | None = getattr(layer, "max_batch_len", None)
        self.leaves: list[Any] = []
        self.pieces: dict[str, Piece] | None = None
        self.spent_by: _Backward | None = None

    @property
    def where(self) -> str:
        return f"{self.path or '(root)'} ({type(self.layer).__name__})"


class _Tap(torch.autograd.Function):
    """Identity on the outputs; saves the inputs; its backward is where inputs meet backprops."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, *tensors: Tensor) -> Any:
        count = len(call.differentiable)
        ctx.call = call
        ctx.save_for_backward(*tensors[count:])
        # detach() shares the version counter, so autograd still sees later in-place changes; .data would hide them
        outputs = tuple(tensor.detach() for tensor in tensors[:count])
        return outputs[0] if count == 1 else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved = ctx.saved_tensors
        ctx.call.capture._deliver(ctx.call, saved, grads)
        return (None, None, *grads, *([None] * len(saved)))


class _Backward:
    """One outermost backward: the physical batch that its captures form."""

    def __init__(self) -> None:
        self.owners: Owners | None = None
        self.rule: OwnerRule | None = None
        self.first_seen = ""

    def agree(
        self,
        where: str,
        outputs: Sequence[Tensor],
        rows_allowed: frozenset[int] | None,
        rule: OwnerRule | None,
    ) -> Owners:
        """The owners of this batch's rows; raises where a layer saw another number of rows, or had others' rule."""
        rows = outputs[0].shape[0] if outputs[0].dim() else -1
        if len(outputs) > 1 and any(not output.dim() or output.shape[0] != rows for output in outputs):
            rows = -1
        if self.owners is None:
            allowed = frozenset({rule.n_rows}) if isinstance(rule, Owners) else rows_allowed
            if rows >= 0 and (not allowed or rows in allowed):
                owners = Owners(rows) if rule is None else rule.owners_of(rows, where)
                self.rule, self.first_seen = rule, where
                self.owners = owners  # last: threads of other devices look at it first
                return self.owners
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [_lost(where, outputs, _expected(rule, allowed))],
            )
        if rule is not self.rule:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [
                    f"{where} and {self.first_seen} take part in one backward, but their forwards ran under different owners "
                    "of rows (set_sample_index, set_owners). Run one backward for each."
                ],
            )
        if rows != self.owners.n_rows:
            raise PerSampleGradientError(
                "samples cannot be told apart",
                [_lost(where, outputs, f"{self.first_seen} saw {self.owners.n_rows} in the same backward")],
            )
        return self.owners


def _expected(rule: OwnerRule | None, allowed: frozenset[int] | None) -> str:
    if isinstance(rule, Owners):
        return f"the owners that were set are those of {rule.n_rows} rows"
    return f"the batch has {' or '.join(map(str, sorted(allowed or ())))}"


def _lost(where: str, outputs: Sequence[Tensor], against: str) -> str:
    shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
    return (
        f"{where}: the gradient of its output has shape {shapes}, whose first dimension is not the batch ({against}). "
        "Every trainable layer must see one row per sample: expand inputs that are broadcast later "
        "(position ids [T] to [B, T]), and do not fold other dimensions into the batch."
    )
