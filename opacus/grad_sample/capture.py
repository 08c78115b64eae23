"""Capture: pair each layer call's inputs with the gradient of its output.

A forward hook sends the layer's output through `Tap`, an identity whose backward receives the
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
from opacus.grad_sample.autocast import as_multiplied
from opacus.grad_sample.buffers import BufferWatch
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.isolation import PARTS, SHARDED, Probe, Schedule, can_probe, graph_is_recorded
from opacus.grad_sample.one_backward import OneBackward, used_twice
from opacus.grad_sample.owners import MISSING_INDEX, OwnerRule, Owners
from opacus.grad_sample.ownership import Slot, layers_with_parameters
from opacus.grad_sample.pieces import local_calls
from opacus.grad_sample.rows import (
    RowCount,
    bags_of,
    batch_dim,
    expand_position_ids,
    first_dim_is_batch,
    pad_rows,
    takes_ids,
)
from opacus.grad_sample.tap import TENSOR, Call, Tap

__all__ = ["Capture", "Policy", "refuse_if_captured"]

logger = logging.getLogger(__name__)

_SPENT = "opacus: captured in"
_FIRST = (0,)
_IDLE: tuple[tuple[str, ...], list[nn.Parameter], list[tuple[Tensor, int]]] = ((), [], [])
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


class _Here(threading.local):
    """What is so in this thread alone."""

    paused = False


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
    """Hooks on every layer of `root` that uses parameters of its own, from the first forward on in which one of these trains.

    Args:
        root: the model.
        policy: receives the captured calls.
        batch_first: whether dimension 0 of inputs is the batch; otherwise dimension 1 of tensors of
            three or more dims (and of integer tensors of two) is.
        loss_reduction: with "mean", captures say that backprops are to be multiplied by the number of samples.
        detach_weights: let weights take part in the forward detached, so that autograd forms no plain
            weight gradient.
        keeps_attached: with `detach_weights`, parameters that take part as usual all the same.
        check_isolation: in a few forwards, from the first on, check that one sample's output reaches no other sample's
            rows (`isolation.py`).
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
        self._schedule = Schedule()
        self._buffers = BufferWatch()
        self._probe: Probe | None = None
        self._called = False  # the model, since a backward ended
        self._part_called = ""  # a layer outside a call of the model, since then
        self._handles: list[Any] = []
        self._slots: list[Slot] = []  # of the layers
        self._asleep: list[tuple[str, nn.Module, list[Slot]]] = []  # frozen layers, not hooked
        self._local = _Here()
        self._open: OneBackward | None = None
        self._repeated: OneBackward | None = None
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
                self._wake()
                self.rows.enter(args, kwargs)
                self._called = self._called or torch.is_grad_enabled()
                if self.rows.outermost and self.enabled:
                    self._buffers.before(module)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is copied_from():
                if self.rows.outermost:
                    self._buffers.after(module)
                self._check_isolation(output)
                self.rows.leave()

        self._handles.append(self.root.register_forward_pre_hook(enter, with_kwargs=True))
        for path, layer, slots in list(layers_with_parameters(self.root)):
            _captured_layers.add(layer)
            self._slots += slots
            if layer is self.root or any(_trains(slot) for slot in slots):
                self._hook(path, layer, slots)
            else:
                self._asleep.append((path, layer, slots))
        self._handles.append(self.root.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self._slots.clear()
        self._asleep.clear()
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
        """Parameters of the layers that were there when hooks were attached, frozen ones too, as they are now; those of layers and
        adapters added since are none of them."""
        for slot in self._slots:
            if slot.parameter is not None:
                yield slot.parameter

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this thread, layer calls are neither captured nor run with detached weights."""
        before = self._local.paused
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
        training = self.root.training
        if not self._to_probe or self._schedule.done(training) or not self.rows.outermost:
            return
        if not self.enabled or not torch.is_grad_enabled() or output is None or graph_is_recorded():
            return
        rows = self.rows.of_output(output)
        if rows is None or rows < 2:
            return
        try:
            owners = Owners(rows) if self.owners is None else self.owners.owners_of(rows, "the model")
        except PerSampleGradientError:
            return  # the backward says so, naming the layer
        if owners.n_samples < 2 or owners.n_rows != rows:
            return
        place = self._schedule.count(training)
        if place is None:
            return
        if not can_probe(self.root):
            self._schedule.cannot(self.root, SHARDED)
            self._to_probe = False
            return
        dim_of = partial(batch_dim, batch_first=self.batch_first, rows=frozenset({rows}))
        self._probe = probe = Probe(rows, owners, dim_of, place)
        try:
            met = probe.run(output, self._anchor)
        except PerSampleGradientError:
            self._schedule.put_off(training)  # the same model is refused again
            self.rows.leave()
            raise
        finally:
            self._probe = None
        if probe.obstacle:
            self._schedule.cannot(self.root, probe.obstacle)
        elif not met:
            self._schedule.put_off(training)

    def _hook(self, path: str, layer: nn.Module, slots: list[Slot]) -> None:
        before, after = self._layer_hooks(path, layer, slots)
        self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(
            layer.register_forward_hook(after, prepend=True, with_kwargs=True, always_call=True)
        )

    def _wake(self) -> None:
        """Before a forward: hook layers that were frozen until now; hooks on frozen ones would only take time."""
        trains = [any(_trains(slot) for slot in slots) for _, _, slots in self._asleep]
        if any(trains):
            for (path, layer, slots), now in zip(self._asleep, trains, strict=True):
                if now:
                    self._hook(path, layer, slots)
            self._asleep = [one for one, now in zip(self._asleep, trains, strict=True) if not now]

    def _refuse_unseen(self) -> None:
        """Layers that train by now, but were frozen when the model was last called: what ran of them was not captured."""
        unseen = [path for path, _, slots in self._asleep if any(_trains(slot) for slot in slots)]
        if unseen:
            raise PerSampleGradientError(
                "per-sample gradients cannot be computed",
                [
                    f"{', '.join(unseen[:5])} trains since the forward, or only a part of the model was called since it trains: "
                    "change requires_grad before the forward, and call the model that was made private."
                ],
            )

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
            if self.enabled and layer is original() and not self._local.paused:
                self._drop_failed_backward()
                for slot in slots:
                    parameter = slot.parameter
                    if parameter is not None and parameter.requires_grad:
                        names.append(slot.name)
                        if self.detach_weights and not (
                            self.keeps_attached and self.keeps_attached(parameter)
                        ):
                            switched_off.append(parameter)
            if not names:
                stack.append(_IDLE)
                return None
            changed = None
            if takes_ids(args, kwargs):
                changed = expand_position_ids(args, kwargs, self.rows.expected, self.batch_first)
            elif not kwargs:
                changed = as_multiplied(layer, args)
            if changed is not None:
                args, kwargs = changed
            stack.append((tuple(names), switched_off, _versions(args, kwargs)))
            for parameter in switched_off:
                parameter.requires_grad = False
            return changed

        def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if not stack:  # another hook raised before ours ran
                return None
            names, switched_off, seen = stack.pop()
            for parameter in switched_off:
                parameter.requires_grad = True
            if not names or output is None or not torch.is_grad_enabled():
                return None
            for tensor, version in seen:
                if tensor._version != version:
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
        one = isinstance(output, Tensor)
        outputs, output_structure = ([output], None) if one else tree_flatten(output)
        differentiable = (
            _FIRST
            if one and self._differentiable(output)
            else tuple(i for i, leaf in enumerate(outputs) if self._differentiable(leaf))
        )
        if not differentiable:
            return None
        if _only_tensors(args, kwargs):
            leaves, structure, saved = None, None, [leaf.detach() for leaf in args]
        else:
            inputs, structure = tree_flatten((args, kwargs))
            leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in inputs]
            saved = [leaf.detach() for leaf in inputs if isinstance(leaf, Tensor)]
        allowed = bags_of(layer, args, kwargs, self.rows.allowed)
        owners = self._owners_now()
        call = Call(self, path, layer, slots, names, leaves, structure, differentiable, allowed, owners)
        if not self.rows.in_model and torch._C._current_graph_task_id() == -1:  # and it is no recomputation
            self._part_called = call.where
        if one:
            return Tap.apply(self._anchor, call, output, *saved)
        tapped = Tap.apply(self._anchor, call, *[outputs[i] for i in differentiable], *saved)
        if len(differentiable) == 1:
            tapped = (tapped,)
        for i, leaf in zip(differentiable, tapped, strict=True):
            outputs[i] = leaf
        return tree_unflatten(outputs, output_structure)  # type: ignore[arg-type]

    def _differentiable(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.is_floating_point()
            and (self.detach_weights or leaf.requires_grad)
        )

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
                raise used_twice("a checkpointed part of the model")
        elif self._open is not None:
            with self._lock:
                self._open = None
                self.policy.discard()

    @contextlib.contextmanager
    def two_passes(self) -> Iterator[None]:
        """Within it, several backward passes go through the same forward on purpose; they are one physical batch."""
        self._repeated = OneBackward()
        try:
            yield
        finally:
            self._repeated = None

    def _ensure_open(self) -> OneBackward:
        with self._lock:
            if self._open is None:
                self._refuse_unseen()
                backward = self._repeated or OneBackward()
                self.policy.begin()
                self._open = backward
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._close(backward))
            return self._open

    def _close(self, backward: OneBackward) -> None:
        with self._lock:
            if self._open is backward:
                self._open = None
                self._tell_of_parts(backward)
                with torch.no_grad():
                    self.policy.end()

    def _tell_of_parts(self, backward: OneBackward) -> None:
        """A batch that went through parts of the model alone was not searched for layers that mix its samples."""
        part, called = self._part_called, self._called
        self._part_called, self._called = "", False
        if part and not called and self._to_probe and backward.owners and backward.owners.n_samples > 1:
            self._schedule.cannot(self.root, PARTS.format(where=part))

    def deliver(self, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        if self._probe is not None:
            self._probe.look(call.where, self._padded(call, self._batch_first(call, grads)))
            return
        if not self._handles:
            return
        if torch.is_grad_enabled():
            raise PerSampleGradientError(
                "per-sample gradients cannot be captured",
                [
                    f"{call.where}: a backward with create_graph=True (double backward) was run through it. "
                    "Compute gradient penalties outside the private model, or with functorch transforms."
                ],
            )
        if torch._C._current_graph_task_id() != self._whole_task and not self._trains_now(call):
            return
        backward = self._open or self._ensure_open()
        if call.spent_by is not backward:
            if call.spent_by is not None:
                raise used_twice(call.where)
            call.spent_by = backward
        captured = self._assemble(call, saved, grads, backward)
        parts = [captured] if call.pieces is None else local_calls(captured, call.pieces, call.path)
        device_type = grads[0].device.type
        paused, self._local.paused = self._local.paused, True
        try:
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    self._hand_over(call, parts)
            else:
                self._hand_over(call, parts)
        finally:
            self._local.paused = paused

    def _hand_over(self, call: Call, parts: Sequence[Captured]) -> None:
        for part in parts:
            self.policy.receive(call.path, call.slots, part)

    def _trains_now(self, call: Call) -> bool:
        """False in `torch.autograd.grad(loss, inputs)`: gradients of inputs (adversarial examples) train nothing."""
        # a backward asked for no inputs in particular: asked once, for all its calls
        if _is_wanted(self._anchor):
            self._whole_task = torch._C._current_graph_task_id()
            return True
        leaves = [slot.parameter for slot in call.slots if slot.name in call.names]
        return any(_is_wanted(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad)

    def _batch_first(self, call: Call, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        dim_of = self._batch_dim_of(call)
        if dim_of is _first:
            return tensors
        return [tensor.transpose(0, dim_of(tensor)) if tensor.dim() else tensor for tensor in tensors]

    def _padded(self, call: Call, leaves: Sequence[Any]) -> Sequence[Any]:
        padded_to = call.padded_to
        if padded_to is None:
            return leaves
        return [pad_rows(leaf, padded_to) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def _batch_dim_of(self, call: Call) -> Callable[[Tensor], int]:
        # an RNN cell's rows, a convolution's batch: dim 0 whatever the model's layout
        if self.batch_first or call.padded_to is not None or first_dim_is_batch(call.layer):
            return _first
        return partial(batch_dim, batch_first=self.batch_first, rows=call.rows_allowed or frozenset())

    def _assemble(
        self, call: Call, saved: Sequence[Tensor], grads: Sequence[Tensor], backward: OneBackward
    ) -> Captured:
        kwargs: dict[str, Any] = {}
        if call.leaves is None:
            args = tuple(self._padded(call, saved))
        else:
            tensors = iter(saved)
            leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in call.leaves]
            args, kwargs = tree_unflatten(self._padded(call, leaves), call.structure)
        outputs = self._padded(call, self._batch_first(call, grads))
        owners = backward.agree(call, outputs)
        if self._index is not None:
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


def _trains(slot: Slot) -> bool:
    parameter = slot.parameter
    return parameter is not None and parameter.requires_grad


def _only_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs:
        return False
    for leaf in args:  # noqa: SIM110  # a generator costs more than the question
        if not isinstance(leaf, Tensor):
            return False
    return True


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, int]]:
    if not torch.is_grad_enabled():
        return []
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return [] if args[0].is_inference() else [(args[0], args[0]._version)]
    leaves = args if _only_tensors(args, kwargs) else tree_flatten((args, kwargs))[0]
    return [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]


def _is_wanted(leaf: Tensor) -> bool:
    """Whether the running backward forms `leaf`'s gradient (where `leaf` is part of its graph)."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # its way to say that torch.autograd.grad was asked for this very leaf
        return True
