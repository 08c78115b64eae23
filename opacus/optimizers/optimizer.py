"""DPOptimizer: clip, accumulate, add noise, scale, and let the user's optimizer step.

A thin order of small methods; relatives replace one of them. Devices are `opacus.devices`' business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from opacus.devices import FactorCopies, NoiseStream, Placement, total_norms
from opacus.distributed.errors import ReplicaError
from opacus.distributed.groups import runs_in_parallel
from opacus.distributed.scatter import sum_over_data_ranks
from opacus.distributed.shard_noise import ShardNoise
from opacus.distributed.sharding import as_gradient, is_sharded, local_of
from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.grad_sample.book import Book
from opacus.norms import as_rows, row_norms
from opacus.optimizers.arguments import basic_problems, positive_number_problems
from opacus.optimizers.batch_count import BatchCount
from opacus.optimizers.booked import BookedSums
from opacus.optimizers.clipping import flat_clip_factor
from opacus.optimizers.grad_samples import (
    accumulated_iterations,
    is_zero,
    mark_spent,
    physical_batches,
    sq_norm_dtype,
)
from opacus.optimizers.noise import SecureNoise
from opacus.optimizers.utils import alike, all_params, params

__all__ = ["DPOptimizer", "by_device"]


class DPOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose step is differentially private (DP-SGD, Abadi et al., 2016).

    Each sample's gradient over all trainable parameters is clipped to L2 norm C, clipped gradients are summed,
    Gaussian noise of standard deviation sigma * C is added to every coordinate of the sum once, and the inner
    optimizer steps on it. The parameters may lie on any number of devices.

    Args:
        optimizer: the inner optimizer; its groups, state and defaults show through.
        noise_multiplier: sigma, finite and at least 0.
        max_grad_norm: C, finite and positive.
        expected_batch_size: what the noisy sum is divided by when `loss_reduction` is "mean".
        loss_reduction: "mean" or "sum".
        generator: stream of the noise, on any device; None takes the default generator (`torch.manual_seed`).
        secure_mode: take noise from the operating system's cryptographic generator instead.
        reduction_device: where `[B]` norms are added up; by default the accelerator with most trainable elements.
        loss_scale: what losses are multiplied by before `backward` (float16 needs it); gradients are divided by it before
            they are clipped. Powers of two are exact. It may be set anew before a backward, but must not follow the data.

    Raises:
        ConfigurationError: naming every argument that cannot be.

    Formal guarantee:
        With per-sample gradients g_i on the parameters, `step` hands the inner optimizer
        (sum_i c_i g_i + N(0, (sigma C)^2 I)) / scale with ||c_i g_i|| <= C, so one step is a Gaussian mechanism of
        sensitivity C and noise multiplier sigma under adding or removing one sample, whatever the devices or dtypes.
        A parameter without a clipped gradient makes `step` raise; a sample with a non-finite gradient contributes zero.

    Example:
        >>> from torch import nn
        >>> from opacus.grad_sample import GradSampleModule
        >>> model = GradSampleModule(nn.Linear(3, 1))
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
        >>> model(torch.ones(4, 3)).mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("reduction_device", "loss_scale")
    # whether the clipping style looks at a sample's whole gradient only, so that small parameters can be normed together
    JOINS_PARAMETERS: ClassVar[bool] = True
    # GradScaler.step then leaves gradients as they are and says that it is there: see _refuse_grad_scaler
    _step_supports_amp_scaling = True
    # by make_private, which then let this process draw whole batches: it must not become one of several ranks afterwards
    made_for_one_process = False

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: int | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        reduction_device: torch.device | str | None = None,
        loss_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        problems = self.argument_problems(
            optimizer=optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            options={**kwargs, "loss_scale": loss_scale},
        )
        raise_if_any(f"{type(self).__name__} cannot be built", problems)
        self.original_optimizer = optimizer
        self.batches: BatchCount | None = None  # of the model
        self.noise_multiplier = noise_multiplier
        self._sums_pending = False  # clipped to the present C, and waiting for noise
        self.max_grad_norm = max_grad_norm
        self.loss_reduction = loss_reduction
        self.expected_batch_size = expected_batch_size
        self.generator = generator
        self.secure_mode = secure_mode
        self.reduction_device = reduction_device
        self.loss_scale = loss_scale
        self.step_hook: Callable[[DPOptimizer], None] | None = None
        self.param_names: dict[int, str] = {}
        self._noise: NoiseStream | SecureNoise | ShardNoise | None = None
        self._step_skip_queue: list[bool] = []
        self._is_last_step_skipped = False
        self._hands_over = False  # what `.grad` holds is private, and no step has used it
        self._booked: BookedSums | None = None
        self._copied_from_booked = False
        self._sample_weight_B: Tensor | None = None
        self._nonfinite: dict[torch.device, Tensor] = {}
        self._unrounded: dict[int, tuple[Tensor, Tensor]] = {}
        # what Optimizer.__init__ sets up besides groups and state, which are the inner optimizer's
        super().__setstate__({})
        for p in self.params:
            p.summed_grad = None  # type: ignore[attr-defined]

    @classmethod
    def argument_problems(
        cls,
        *,
        optimizer: Any,
        noise_multiplier: Any,
        max_grad_norm: Any,
        expected_batch_size: Any,
        loss_reduction: Any,
        generator: Any,
        secure_mode: bool,
        options: Mapping[str, Any],
    ) -> list[str]:
        """What is wrong with arguments of the constructor, a sentence each; nothing is built.

        Args:
            options: further keyword arguments; the rest as in the constructor.
        """
        problems = basic_problems(
            optimizer, noise_multiplier, expected_batch_size, loss_reduction, generator, secure_mode
        )
        if isinstance(optimizer, DPOptimizer):
            problems.append("optimizer is a DPOptimizer already; pass its original_optimizer.")
        problems += cls._max_grad_norm_problems(max_grad_norm, optimizer)
        if "loss_scale" in options:
            problems += positive_number_problems("loss_scale", options["loss_scale"])
        unknown = [name for name in options if name not in cls.OPTIONS]
        return problems + [f"{name} is not an option of {cls.__name__}." for name in unknown]

    @classmethod
    def _max_grad_norm_problems(cls, max_grad_norm: Any, optimizer: Any) -> list[str]:
        return positive_number_problems("max_grad_norm", max_grad_norm)

    @property
    def max_grad_norm(self) -> float:
        """C, the bound on the norm of a sample's whole gradient; it can be set between logical batches."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._check_new_norm(value)
        self._max_grad_norm = value

    def _check_new_norm(self, value: Any) -> None:
        raise_if_any("max_grad_norm cannot be set", self._max_grad_norm_problems(value, self))
        if self._sums_pending:
            raise ValueError(
                "max_grad_norm cannot change within a logical batch, whose gradients were clipped to it already: set it (or step "
                "its scheduler) after a step that was not skipped"
            )

    # ------------------------------------------------------------ one step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, add noise, account, and let the inner optimizer update the parameters.

        Args:
            closure: recomputes the loss; called once. The inner optimizer is not given it: evaluated again it would release the
                batch's samples again from one draw of the sampler, and its loss is no private number. Optimizers that need it
                (LBFGS) are refused at construction.

        Returns:
            The loss, where a closure was given and the step was not skipped.

        Raises:
            PerSampleGradientError: if a parameter would be updated by a gradient that was not clipped, or by one used
                before.
            ValueError: if there was no backward pass, or a GradScaler calls this.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.pre_step():
            return None
        inner = self.original_optimizer.step()
        return loss if closure is not None else inner

    def hands_over(self) -> bool:
        """Asked when the inner optimizer steps: whether its gradients come from a step of this one. Once for each."""
        yes, self._hands_over = self._hands_over, False
        return yes

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """All of a step but the inner optimizer's update.

        Args:
            closure: recomputes the loss; called first, where given.

        Returns:
            False if this was a physical batch of a logical batch still going on: the clipped sum is kept.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._refuse_grad_scaler()
        self._refuse_later_ranks()
        for p in all_params(self):
            if not p.requires_grad:  # frozen since its backward: what gradient it has was not clipped
                p.grad = None
        if not self.params:
            return not self._check_skip_next_step()
        if self.batches is not None:
            self.batches.refuse_another(self)
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        if self.batches is not None:
            self.batches.release(self)
        self.add_noise()
        self._sums_pending = False
        self.reduce_gradients()
        self.scale_grad()
        if self.step_hook is not None:
            self.step_hook(self)
        self._is_last_step_skipped = False
        self._hands_over = True
        return True

    def _refuse_grad_scaler(self) -> None:
        """GradScaler says that it is there by `found_inf`; it would leave it there if this step raised."""
        if not hasattr(self, "found_inf"):
            return
        del self.found_inf, self.grad_scale  # type: ignore[attr-defined]
        raise ValueError(
            "torch.amp.GradScaler cannot drive a private optimizer: it changes the loss scale by whether any sample's gradient "
            "overflowed, so that a sample would reach later updates without noise. Use bfloat16, which needs no "
            "scaling, or a constant scale and no scaler: optimizer.loss_scale = 1024.0, (1024.0 * loss).backward(), "
            "optimizer.step(). GradScaler(enabled=False) is fine."
        )

    def _refuse_later_ranks(self) -> None:
        if self.made_for_one_process and runs_in_parallel():
            raise ReplicaError(
                "step() cannot go on",
                [
                    "make_private was called before torch.distributed connected this process with others: each rank would draw whole "
                    "batches and train a model of its own. Call init_process_group first, then make_private on every rank."
                ],
            )

    def clip_and_accumulate(self) -> None:
        """Clip each sample's gradient and add the sum over samples to `summed_grad` of each parameter.

        Formal guarantee:
            Adding or removing one sample changes `summed_grad`, over all parameters together, by at most
            `max_grad_norm` in L2 norm.
        """
        if self._copied_from_booked:
            raise PerSampleGradientError(
                "step() cannot go on",
                [
                    "this optimizer is a copy: the model that clips for the original does not clip for it. Make a private optimizer "
                    "for the copied model's parameters and give it the copy's clipped sums: optimizer.attach_book(module.policy)."
                ],
            )
        if self._booked is not None:
            self._booked.accumulate()
            return
        parameters = self.params
        batches = physical_batches(self, parameters)
        if self._sample_weight_B is not None and len(batches) != 1:
            raise ValueError("sample weights belong to one physical batch: step after each backward")
        weight_B = self.take_sample_weights(len(batches[0][0]))
        self.before_clipping()
        for batch in batches:
            self._clip_batch(parameters, batch, weight_B)
        mark_spent(batches)

    def attach_book(self, book: Book) -> None:
        """Take clipped sums from `book` (modes "bk" and "ghost") in place of per-sample gradients on the parameters.

        Args:
            book: the policy of the model that was made private.
        """
        self._booked = BookedSums(self, book)
        self._copied_from_booked = False

    def attached_to(self, book: Book) -> None:
        """Attach `book` if it is not the one attached."""
        if self._booked is None or self._booked.book is not book:
            self.attach_book(book)
        else:
            self._booked.listen()

    def book_factors(self) -> Callable[[nn.Parameter], Tensor]:
        """Mode "ghost", between the passes: what to multiply each sample's gradient of a parameter with, `[B]`."""
        assert self._booked is not None
        return self._booked.factors_between_passes()

    def before_clipping(self) -> None:
        """A physical batch is about to be clipped and added to the sums."""
        if not self._sums_pending:  # those of the step before, where zero_grad of the model cleared the rest
            self._drop_sums()
        self._sums_pending = True

    def add_empty_batch(self) -> None:
        """Count a physical batch without samples, for which neither forward nor backward can be run.

        The next `step` then releases what was accumulated (nothing, in an empty logical batch) with its noise, and is accounted.
        For models that run in mode "bk"; others run forward and backward on zero rows.

        Raises:
            ValueError: if the clipped sums do not come from a book.
        """
        if self._booked is None:
            raise ValueError(
                "add_empty_batch() is for grad_sample_mode 'bk': run the model on a batch of zero rows instead"
            )
        self._booked.add_nothing()

    def take_sample_weights(self, n_samples: int) -> Tensor | None:
        """Weights set for this physical batch of `n_samples`, once."""
        weight_B, self._sample_weight_B = self._sample_weight_B, None
        if weight_B is not None and weight_B.shape != (n_samples,):
            raise ValueError(
                f"set_sample_weights was given shape {tuple(weight_B.shape)}, but the batch has {n_samples} samples"
            )
        return weight_B

    def _clip_batch(
        self, parameters: list[nn.Parameter], batch: list[Tensor], weight_B: Tensor | None
    ) -> None:
        used = [(p, entry) for p, entry in zip(parameters, batch, strict=True) if not is_zero(entry)]
        if not used:
            used = [(parameters[0], batch[0])]
        placement = Placement(parameters, reduction_device=self.reduction_device)
        norms = [row_norms(as_rows(entry), sq_norm_dtype(entry)) for _, entry in used]
        if self.loss_scale != 1:
            norms = [norm_B / self.loss_scale for norm_B in norms]
        factors = self.clip_factors([p for p, _ in used], norms, placement.reduction_device, weight_B)
        for (p, entry), factor_B in zip(used, factors, strict=True):
            dtype = sq_norm_dtype(entry)
            factor_B = factor_B.to(dtype)
            rows = as_rows(entry).to(dtype).contiguous()
            if not is_zero(entry):
                # zero times infinity is no zero: a sample left out must be left out of the product too
                rows.masked_fill_((factor_B == 0).unsqueeze(1), 0)
            clipped_sum = torch.mv(rows.t(), factor_B).view(p.shape)
            if self.loss_scale != 1:
                clipped_sum.div_(self.loss_scale)
            p.summed_grad = clipped_sum if _summed(p) is None else p.summed_grad.add_(clipped_sum)  # type: ignore[attr-defined]
        for p in parameters:
            if _summed(p) is None:
                p.summed_grad = torch.zeros_like(p, dtype=sq_norm_dtype(p))  # type: ignore[attr-defined]

    def clip_factors(
        self,
        parameters: Sequence[nn.Parameter],
        norms: Sequence[Tensor],
        reduction_device: torch.device,
        weight_B: Tensor | None,
    ) -> list[Tensor]:
        """The clipping style: how much of each sample's gradient enters each parameter's sum.

        Args:
            parameters: those that took part in the batch.
            norms: for each of them, `[B]` per-sample norms of its own gradient, on its device.
            reduction_device: where norms of several devices meet.
            weight_B: sample weights, or None.

        Returns:
            `[B]` factors for each parameter, on its device.
        """
        norm_B = total_norms(by_device(norms), reduction_device)
        self._count_nonfinite(norm_B)
        if weight_B is not None:
            weight_B = weight_B.to(reduction_device)
        copies = FactorCopies(self.factor_of(norm_B, weight_B))
        return [copies.on(norm.device) for norm in norms]

    def factor_of(self, norm_B: Tensor, weight_B: Tensor | None) -> Tensor:
        """Clip factors `[B]` for per-sample norms `[B]` of the whole gradient."""
        return flat_clip_factor(norm_B, self.max_grad_norm, weight_B)

    def add_noise(self) -> None:
        """Add noise to each parameter's clipped sum, and put the result into `grad`.

        Raises:
            RepeatedNoiseError: if the generator was set back to where an earlier draw began; no `grad` was written.

        Formal guarantee:
            Every coordinate of the sum receives independent N(0, (noise_multiplier * max_grad_norm)^2) exactly once,
            drawn in at least float32 on the parameter's own device, before the cast to the parameter's dtype.
        """
        std = self.noise_std()
        stream = self.noise_stream() if self.draws_noise() else None
        self._unrounded.clear()
        parameters = self.params
        sums = [summed for p in parameters if (summed := _summed(p)) is not None]
        if len(sums) != len(parameters):
            raise ValueError("add_noise() needs clipped sums: call clip_and_accumulate() first")
        if stream is None:
            noisy = [summed.to(sq_norm_dtype(summed), copy=True) for summed in sums]
        else:
            noisy = _drawn_for(stream, parameters, sums, std if isinstance(std, float) else 1.0)
            if not isinstance(std, float):
                for noise in noisy:
                    noise.mul_(std.on(noise.device, noise.dtype))
            for group in alike(noisy, sums):
                torch._foreach_add_(*group)
        if self._booked is not None:  # half the memory: the sums are formed anew by the next backward
            for p in parameters:
                p.summed_grad = None  # type: ignore[attr-defined]
        for p, total, rounded in zip(parameters, noisy, _rounded(parameters, noisy), strict=True):
            p.grad = rounded if type(p) is nn.Parameter else as_gradient(rounded, p)
            if rounded is not total:  # keep what rounding lost until scale_grad is done
                self._unrounded[id(p)] = (p.grad, total)

    def draws_noise(self) -> bool:
        """Whether this process adds the noise; of several that train together, one does."""
        return self.noise_multiplier > 0

    def reduce_gradients(self) -> None:
        """Add up what several processes hold in `grad`; a single process holds it all."""

    @property
    def n_replicas(self) -> int:
        """How many processes train together, each on `expected_batch_size` samples a step."""
        return 1

    def noise_std(self) -> float | FactorCopies:
        """Standard deviation of the noise on the clipped sum; a tensor's copies where only a device knows it."""
        return float(self.noise_multiplier) * float(self.max_grad_norm)

    def noise_stream(self) -> NoiseStream | SecureNoise | ShardNoise:
        if self._noise is None:
            if any(map(is_sharded, self.params)):
                self._noise = ShardNoise(all_params(self), self.generator, secure=self.secure_mode)
            elif self.secure_mode:
                self._noise = SecureNoise()
            else:
                home = Placement(self.params, reduction_device=self.reduction_device).reduction_device
                self._noise = NoiseStream(self.generator, home)
        return self._noise

    def noisy_total(self, value: Tensor, std: float) -> Tensor:
        """`value`, a number, added up over all ranks, with noise of standard deviation `std` once (none where sigma is 0)."""
        value = self.sum_over_ranks(value)
        if self.draws_noise():
            value = value + self.noise_stream().normal((), std, value.device, value.dtype)
        return value

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """What all ranks' samples add up to, of a value that each rank computed from its own; `value` itself in one process."""
        if not any(map(is_sharded, self.params)):
            return value
        axes = self._booked.book.axis.names if self._booked is not None else ()
        return sum_over_data_ranks(value, self.params, axes)

    def scale_grad(self) -> None:
        """Divide `grad` by the expected batch size where the loss is a mean over samples.

        A sum of several accumulated backward passes is divided by their number too.
        """
        if self.loss_reduction != "mean":
            self._unrounded.clear()
            return
        assert self.expected_batch_size is not None
        divisor = self.expected_batch_size * self.n_replicas * self.accumulated_iterations
        whole: list[Tensor] = []
        rounded: list[Tensor] = []
        for p in self.params:
            if p.grad is None:
                continue
            grad = p.grad if type(p.grad) is Tensor else local_of(p.grad)
            held = self._unrounded.pop(id(p), None)
            if held is not None and held[0] is p.grad:
                whole.append(held[1])
                rounded.append(grad)
            else:
                whole.append(grad)
                rounded.append(grad)
        for totals, grads in alike(whole, rounded):
            torch._foreach_div_(totals, divisor)
            pairs = [(grad, total) for grad, total in zip(grads, totals, strict=True) if grad is not total]
            for to, of in alike(*zip(*pairs, strict=True)) if pairs else ():
                torch._foreach_copy_(to, of)

    # ------------------------------------------------------- around a step

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters that require grad, in the order of the groups."""
        return params(self)

    @property
    def grad_samples(self) -> list[Tensor]:
        """Per-sample gradients of all parameters, accumulated passes one after the other, `[B, *shape]` each.

        Raises:
            PerSampleGradientError, ValueError: as `step`.
        """
        batches = physical_batches(self, self.params)
        if len(batches) == 1:
            return batches[0]
        return [torch.cat(entries) for entries in zip(*batches, strict=True)]

    @property
    def accumulated_iterations(self) -> int:
        """Number of backward passes accumulated since `zero_grad`.

        Raises:
            ValueError: if parameters disagree.
        """
        return accumulated_iterations(self.params) if self._booked is None else self._booked.iterations

    @property
    def nonfinite_samples(self) -> int:
        """How many samples contributed zero because their gradient was infinite or NaN; waits for the device."""
        return sum(int(count) for count in self._nonfinite.values())

    def _count_nonfinite(self, norm_B: Tensor) -> None:
        count = norm_B.isfinite().logical_not_().sum()
        earlier = self._nonfinite.get(count.device)
        self._nonfinite[count.device] = count if earlier is None else earlier + count

    def set_sample_weights(self, weight_B: Tensor) -> None:
        """Weigh the samples of the next physical batch: sample i's gradient becomes `weight_B[i]` times itself, then clipped.

        Args:
            weight_B: `[B]`, finite, non-negative, known without looking at other samples.
        """
        self._sample_weight_B = weight_B.detach()

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Queue whether a coming step ends a physical batch only (True) or a logical batch (False).

        Each `step` takes one entry, first in first out; an empty queue means False.
        """
        self._step_skip_queue.append(do_skip)

    def _check_skip_next_step(self, pop_next: bool = True) -> bool:
        if not self._step_skip_queue:
            return False
        return self._step_skip_queue.pop(0) if pop_next else self._step_skip_queue[0]

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call `fn(optimizer)` on every step that releases a noised gradient (the accountant does).

        Args:
            fn: replaces the hook attached before.
        """
        self.step_hook = fn

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear `grad` and per-sample gradients; clipped sums too, unless the last step was skipped.

        Args:
            set_to_none: for `grad`, as in torch. Per-sample gradients always become None.
        """
        self.zero_grad_samples()
        self.original_optimizer.zero_grad(set_to_none)

    def zero_grad_samples(self) -> None:
        """Clear per-sample gradients, and clipped sums unless a logical batch is still going on."""
        for p in all_params(self):
            p.grad_sample = None  # type: ignore[attr-defined]
        if self._booked is not None:
            self._booked.drop()
        if not self._is_last_step_skipped:
            self._drop_sums()

    def _drop_sums(self) -> None:
        self._sums_pending = False
        for p in all_params(self):
            p.summed_grad = None  # type: ignore[attr-defined]

    # ------------------------------------------- the inner optimizer, seen through

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = param_groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer; its parameters must belong to the private model."""
        self.original_optimizer.add_param_group(param_group)
        for p in self.params:
            if not hasattr(p, "summed_grad"):
                p.summed_grad = None  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state dict."""
        self.original_optimizer.load_state_dict(state_dict)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register with the inner optimizer, whose state dict it is."""
        return self.original_optimizer.register_state_dict_pre_hook(hook, prepend=prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register with the inner optimizer, whose state dict it is."""
        return self.original_optimizer.register_state_dict_post_hook(hook, prepend=prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register with the inner optimizer, whose state dict it is."""
        return self.original_optimizer.register_load_state_dict_pre_hook(hook, prepend=prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Register with the inner optimizer, whose state dict it is."""
        return self.original_optimizer.register_load_state_dict_post_hook(hook, prepend=prepend)

    def __getstate__(self) -> dict[str, Any]:
        # LR schedulers put a bound `step` on the instance; it belongs to this object, not to a copy. So does the book
        state = {name: value for name, value in self.__dict__.items() if name != "step"}
        state["_copied_from_booked"] = self._copied_from_booked or self._booked is not None
        state["_booked"] = state["batches"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> DPOptimizer:
        """A copy that goes on by itself, on one stream of noise with this one: a copied stream would repeat its noise."""
        if self._booked is None and not self._copied_from_booked and self.params:
            stream = self.noise_stream()
            memo[id(stream)] = stream
        if self.generator is not None:
            memo[id(self.generator)] = self.generator
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_names = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"


def _drawn_for(
    stream: NoiseStream | ShardNoise | SecureNoise,
    parameters: Sequence[nn.Parameter],
    sums: Sequence[Tensor],
    std: float,
) -> list[Tensor]:
    """Noise for each parameter's clipped sum, where that lies."""
    if isinstance(stream, NoiseStream):
        return stream.normals([(total.shape, total.device, sq_norm_dtype(total)) for total in sums], std)
    if isinstance(stream, ShardNoise):
        return stream.normals_for(parameters, sums, std, [sq_norm_dtype(total) for total in sums])
    return [stream.normal(total.shape, std, total.device, sq_norm_dtype(total)) for total in sums]


def _rounded(parameters: Sequence[nn.Parameter], totals: Sequence[Tensor]) -> list[Tensor]:
    """`totals` in the parameters' dtypes; the same tensor where it has it already."""
    found = [
        total if total.dtype == p.dtype else torch.empty_like(total, dtype=p.dtype)
        for p, total in zip(parameters, totals, strict=True)
    ]
    pairs = [(to, of) for to, of in zip(found, totals, strict=True) if to is not of]
    for to, of in alike(*zip(*pairs, strict=True)) if pairs else ():
        torch._foreach_copy_(to, of)
    return found


def _summed(p: nn.Parameter) -> Tensor | None:
    return getattr(p, "summed_grad", None)


def by_device(norms: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Norms by device, in the widest dtype among them, so that devices can be added."""
    dtype = torch.float32
    for norm in norms:
        dtype = torch.promote_types(dtype, norm.dtype)
    grouped: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        grouped.setdefault(norm.device, []).append(norm.to(dtype))
    return grouped


def _generate_noise(
    std: float,
    reference: Tensor,
    generator: torch.Generator | None = None,
    secure_mode: bool = False,
) -> Tensor:
    """Gaussian noise for one tensor, under the name that existing code imports.

    Args:
        std: standard deviation; 0 gives zeros.
        reference: gives shape, dtype and device.
        generator: the stream, on any device.
        secure_mode: draw from the operating system's entropy instead.
    """
    if std == 0:
        return torch.zeros_like(reference)
    stream = SecureNoise() if secure_mode else NoiseStream(generator, reference.device)
    return stream.normal(reference.shape, std, reference.device, reference.dtype)
