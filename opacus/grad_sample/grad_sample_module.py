"""GradSampleHooks and GradSampleModule: `p.grad_sample` for every trainable parameter after a backward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opacus.distributed.sharding import mode_problems
from opacus.errors import ConfigurationError, raise_if_any
from opacus.grad_sample.accumulate import create_or_accumulate_grad_sample, promote_current_grad_sample
from opacus.grad_sample.book import Book
from opacus.grad_sample.capture import Capture, refuse_if_captured
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.declarations import has_constant_buffers
from opacus.grad_sample.embedding import mixing_options
from opacus.grad_sample.functorch import FUNCTORCH, prepare_layer
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from opacus.grad_sample.instantiate import Instantiate
from opacus.grad_sample.owners import OwnerRule, Owners, index_problems
from opacus.grad_sample.ownership import layers_with_parameters, slots
from opacus.grad_sample.selection import GRAD_SAMPLERS, rule_for
from opacus.grad_sample.tensor_parallel import agreement_check, tensor_mesh, tensor_parallel_problems

__all__ = [
    "GradSampleHooks",
    "GradSampleModule",
    "create_or_accumulate_grad_sample",
    "promote_current_grad_sample",
]


class GradSampleHooks(AbstractGradSampleHooks):
    """Hooks that leave per-sample gradients on the parameters of a model used as it is.

    After `loss.backward()` every trainable parameter carries `grad_sample`, `[B, *shape]`: row i is the gradient of
    sample i's own loss. Calls add up within one backward; further backwards append (see `allow_grad_accumulation`).

    Args:
        m: the model; its layers may lie on any number of devices.
        batch_first: whether dimension 0 of the inputs is the batch; with False it is dimension 1.
        loss_reduction: "mean" if the loss is the mean over samples, "sum" if it is their sum.
        strict: refuse models with trainable layers that hold buffers, and per-sample gradients that do not add up to
            autograd's; with False they are logged.
        force_functorch: use functorch even for layers with a built-in rule.

    Raises:
        NotImplementedError: with `strict`, naming each layer that mixes samples.
        ValueError: if the model has such hooks already, or an argument is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> hooks = GradSampleHooks(model)
        >>> model(torch.ones(4, 3)).mean(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([4, 2, 3])
        >>> hooks.cleanup()
    """

    GRAD_SAMPLERS = GRAD_SAMPLERS
    _agreeing: Any = None  # tensor parallel: the hook that compares the ranks' batches
    MODE_OPTIONS: ClassVar[tuple[str, ...]] = ()  # attributes that a mode needs before it starts

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ) -> None:
        check_arguments(m, loss_reduction)
        self.validate(m, strict=strict)
        refuse_if_captured(m)
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.force_functorch = force_functorch
        self.strict = strict
        self._start(batch_first, loss_reduction, force_functorch)

    def _start(self, batch_first: bool, loss_reduction: str, force_functorch: bool) -> None:
        policy = self._make_policy(loss_reduction, force_functorch)
        if not isinstance(policy, Book):
            raise_if_any("per-sample gradients cannot be set up", mode_problems(self._module, "hooks"))
        capture = Capture(
            self._module,
            policy,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            detach_weights=isinstance(policy, Book),
            keeps_attached=policy.keeps_attached if isinstance(policy, Book) else None,
            check_isolation=self.strict,
        )
        try:
            capture.attach()
        except ValueError:
            policy.close()
            raise
        if isinstance(policy, Book):
            policy.parameters = capture.parameters
        self.policy, self.capture = policy, capture
        # the recorded name, on the object that users hold: the wrapper, or the model itself
        self._holder().autograd_grad_sample_hooks = capture.handles
        for _, layer, own in layers_with_parameters(self._module):
            names = tuple(slot.name for slot in own)
            if rule_for(layer, names, force_functorch=force_functorch) is FUNCTORCH:
                prepare_layer(layer, batch_first)
        self._watch_forwards()

    def _make_policy(self, loss_reduction: str, force_functorch: bool) -> Instantiate | Book:
        """What becomes of captured calls in this mode."""
        return Instantiate(
            self._module,
            accumulation_allowed=lambda: self.grad_accumulation_allowed,
            loss_reduction=loss_reduction,
            force_functorch=force_functorch,
            strict=self.strict,
        )

    def _watch_forwards(self) -> None:
        """Before each forward, as layers may have been unfrozen, added or replaced since."""
        policy = self.policy
        self._watching = self._module.register_forward_pre_hook(lambda module, args: policy.watch())
        mesh = tensor_mesh(self._module)
        if mesh is not None:
            check = agreement_check(mesh, self.strict)
            self._agreeing = self._module.register_forward_pre_hook(check, prepend=True, with_kwargs=True)

    def add_hooks(
        self, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """Attach the hooks again after `remove_hooks`, possibly with other options.

        Raises:
            ValueError: if they are attached.
        """
        check_arguments(self._module, loss_reduction)
        if self.capture.attached:
            raise ValueError("hooks cannot be added twice to the same model: call remove_hooks() first")
        self.batch_first, self.loss_reduction, self.force_functorch = (
            batch_first,
            loss_reduction,
            force_functorch,
        )
        owners = self.capture.lasting_owners
        self._start(batch_first, loss_reduction, force_functorch)
        self.capture.owners = owners

    def remove_hooks(self) -> None:
        """Remove the hooks; `grad_sample` attributes stay (see `cleanup`)."""
        self.capture.detach()
        self.policy.close()
        self._watching.remove()
        if self._agreeing is not None:
            self._agreeing.remove()
        vars(self._holder()).pop("autograd_grad_sample_hooks", None)
        for layer in self._module.modules():
            vars(layer).pop("ft_compute_sample_grad", None)

    @contextlib.contextmanager
    def unhooked(self) -> Iterator[nn.Module]:
        """Within it the model, which is handed out, is without hooks."""
        attached = self.capture.attached
        if attached:
            self.remove_hooks()
        try:
            yield self._module
        finally:
            if attached:
                self.capture.attach()
                self._holder().autograd_grad_sample_hooks = self.capture.handles
                self._watch_forwards()

    def _holder(self) -> Any:
        return self if isinstance(self, nn.Module) else self._module

    @property
    def hooks_enabled(self) -> bool:
        """Whether layer calls are captured."""
        return self.capture.enabled

    def enable_hooks(self) -> None:
        """Capture layer calls again after `disable_hooks`."""
        self.capture.enabled = True

    def disable_hooks(self) -> None:
        """Run the model as if it had no hooks, until `enable_hooks`."""
        self.capture.enabled = False

    def set_owners(self, owners: OwnerRule | None) -> None:
        """Say whose each row of the following physical batches is, where a sample owns several rows.

        Args:
            owners: `RowsPerSample` for batches of any size, or `Owners` for batches of one size; None means row i is sample i.
        """
        self.capture.set_sample_index(None)
        self.capture.owners = owners

    def set_sample_index(self, index: Tensor | None, n_samples: int | None = None) -> None:
        """Say whose each row of the next batch is: user-level privacy, samples with varying numbers of rows.

        Call it before each forward. The forward is bound to the index, its backward uses it up, and a backward without a
        fresh one is refused: an old index would give rows to the wrong samples. Rows of one sample may lie anywhere in the
        batch, but must all be in it: a sample whose rows are spread over two physical batches of a step is clipped
        twice, and moves the sum by 2 C. So each item of the data set should be one sample (all of a user's records), which also
        is what the accountant counts.

        Args:
            index: `[rows]`, int64: the sample, 0 to `n_samples - 1`, that owns each row of what the model is given.
                None goes back to one row a sample.
            n_samples: number of samples in the batch; those without rows have gradient zero. "mean" is the mean over them.

        Raises:
            ConfigurationError: listing what is wrong with the arguments. On an accelerator values out of range are found
                by the device, during the backward.
            ValueError: if a forward that ran under an earlier index still waits for its backward.

        Formal guarantee:
            Row r counts towards sample `index[r]` alone, and all rows of a sample are clipped together. The index itself is trusted:
            a row into which several samples were packed is one row, so give each sample rows of its own. So is the loss, whose
            scale must not depend on how many rows the other samples have.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> model = GradSampleModule(nn.Linear(3, 2), loss_reduction="sum")
            >>> model.set_sample_index(torch.tensor([1, 0, 1, 1]), n_samples=3)
            >>> model(torch.ones(4, 3)).sum().backward()
            >>> model.bias.grad_sample[:, 0]
            tensor([1., 3., 0.])
        """
        if index is None:
            self.capture.set_sample_index(None)
            return
        raise_if_any("the sample index cannot be used", index_problems(index, n_samples))
        self.capture.set_sample_index(Owners(n_samples, index.detach().long()))  # type: ignore[arg-type]

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """The layers that are captured: those whose own forward uses a trainable parameter."""
        return iterate_trained_layers(module)

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Iterable[Tensor], _forward_output: Tensor
    ) -> None:
        """Keep one call's inputs by hand, for `capture_backprops_hook`; ordinary training needs neither."""
        if not hasattr(module, "activations"):
            module.activations = []  # type: ignore[assignment]
        module.activations.append([t.detach() for t in forward_input if isinstance(t, Tensor)])  # type: ignore[union-attr, operator]

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: tuple[Tensor, ...],
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Form per-sample gradients of the last call kept by `capture_activations_hook`, given its backprops."""
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0].detach(),
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        own = slots(module)
        names = tuple(
            slot.name for slot in own if slot.parameter is not None and slot.parameter.requires_grad
        )
        captured = Captured(module, names, tuple(activations), {}, [backprops], Owners(backprops.shape[0]))
        with torch.no_grad(), self.capture.paused():
            self.policy.receive("", own, captured)
        for slot in own:
            if slot.parameter is not None:
                promote_current_grad_sample(slot.parameter)

    def rearrange_grad_samples(
        self, *, module: nn.Module, backprops: Tensor, loss_reduction: str, batch_first: bool
    ) -> tuple[list[Tensor], Tensor]:
        """Take the activations kept last, and bring both batch first and undo the loss's mean.

        Returns:
            `(activations, backprops)`, batch first; backprops multiplied by the batch size for "mean".

        Raises:
            ValueError: if no activations were kept for `module`.
        """
        kept = getattr(module, "activations", None)
        if not kept:
            raise ValueError(
                f"no activations were captured for {type(module).__name__}: run its forward first"
            )
        activations = kept.pop()
        if not batch_first and not hasattr(module, "max_batch_len"):
            activations = [a.transpose(0, 1) if a.dim() > 1 else a for a in activations]
            backprops = backprops.transpose(0, 1)
        if loss_reduction == "mean":
            backprops = backprops * backprops.shape[0]
        return activations, backprops

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Whether per-sample gradients of `module`'s own parameters can be formed: by a rule or by functorch, always.

        Layers that mix samples are `validate`'s business.
        """
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Find layers that let samples see each other: buffers of trainable layers, embeddings that rescale.

        Args:
            module: the model.
            strict: raise instead of returning.

        Returns:
            One error per layer.

        Raises:
            NotImplementedError: with `strict`, if there is any.
        """
        errors = [
            NotImplementedError(
                f"{path or '(root)'} ({type(layer).__name__}) is trainable and has buffers "
                f"({', '.join(name for name, _ in layer.named_buffers(recurse=False))}): what a forward writes there would "
                "carry data past the clipping. Replace the layer (ModuleValidator.fix), freeze it, or pass strict=False "
                "if its buffers never change."
            )
            for path, layer, own in layers_with_parameters(module)
            if not has_constant_buffers(layer)
            and any(True for _ in layer.named_buffers(recurse=False))
            and any(slot.parameter.requires_grad for slot in own if slot.parameter is not None)
        ]
        errors += [
            NotImplementedError(
                f"{path or '(root)'} ({type(layer).__name__}) has {' and '.join(options)} set, by which the ids of the "
                "whole batch rescale entries or gradients: build it without."
            )
            for path, layer in module.named_modules()
            if (options := mixing_options(layer))
        ]
        if strict and errors:
            raise NotImplementedError("\n".join(str(error) for error in errors))
        return errors


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):
    """`GradSampleHooks` as a wrapper: a module that runs the model and holds the hooks.

    State dict keys carry the prefix `_module.`; attributes of the model are reached through the wrapper.

    Args:
        m, batch_first, loss_reduction, strict, force_functorch: as in `GradSampleHooks`.

    Raises:
        NotImplementedError, ValueError: as in `GradSampleHooks`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = GradSampleModule(nn.Linear(3, 2))
        >>> model(torch.ones(4, 3)).mean(1).mean().backward()
        >>> model.weight.grad_sample.shape
        torch.Size([4, 2, 3])
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ) -> None:
        check_arguments(m, loss_reduction)
        self.validate(m, strict=strict)
        refuse_if_captured(m)
        AbstractGradSampleModule.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.training = m.training
        self.force_functorch = force_functorch
        self.strict = strict
        self._start(batch_first, loss_reduction, force_functorch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradSampleModule:
        """A copy with hooks of its own: the original's hooks belong to the original's parameters."""
        with self.unhooked():
            module = copy.deepcopy(self._module, memo)
        clone = memo[id(self)] = _wrapped_again(type(self), module, self._settings())
        return clone

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled (`torch.save(model)`) as the model and how it was wrapped; per-sample gradients are not."""
        with self.unhooked():
            module = copy.deepcopy(self._module)
        return _wrapped_again, (type(self), module, self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "options": {name: getattr(self, name) for name in self.MODE_OPTIONS},
            "arguments": {
                "batch_first": self.batch_first,
                "loss_reduction": self.loss_reduction,
                "strict": self.strict,
                "force_functorch": self.force_functorch,
            },
            "attached": self.capture.attached,
            "enabled": self.capture.enabled,
            "owners": self.capture.lasting_owners,
            "accumulation": self.grad_accumulation_allowed,
        }


def _wrapped_again(
    kind: type[GradSampleModule], module: nn.Module, settings: dict[str, Any]
) -> GradSampleModule:
    """A wrapper around `module` like the one that `settings` are of."""
    clone = kind.__new__(kind)
    clone.__dict__.update(settings["options"])
    GradSampleModule.__init__(clone, module, **settings["arguments"])
    clone.capture.enabled = settings["enabled"]
    clone.capture.owners = settings["owners"]
    clone.grad_accumulation_allowed = settings["accumulation"]
    if not settings["attached"]:
        clone.remove_hooks()
    return clone


def iterate_trained_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers whose own forward uses a trainable parameter."""
    for _, layer, own in layers_with_parameters(module):
        if any(slot.parameter is not None and slot.parameter.requires_grad for slot in own):
            yield layer


def check_arguments(m: nn.Module, loss_reduction: str) -> None:
    """Raise one error for all that is wrong with the arguments of a grad sample mode."""
    problems = []
    if not isinstance(m, nn.Module):
        problems.append(f"m must be a torch.nn.Module, not {type(m).__name__}.")
    else:
        problems += [
            f"{path or 'm'} is an nn.DataParallel, which copies the model for every forward: its replicas cannot be captured. Pass the "
            "module inside it; a model may span several devices without it."
            for path, module in m.named_modules()
            if isinstance(module, nn.DataParallel)
        ]
        problems += tensor_parallel_problems(m)
    if loss_reduction not in ("mean", "sum"):
        problems.append(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}.")
    if problems:
        raise ConfigurationError("per-sample gradients cannot be set up", problems)
