"""Clipped sums that a book (`bk`, `ghost`) hands over: from the backward that formed them to the step that uses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from opacus.devices import Placement, computing_device
from opacus.distributed.scatter import reduce_to_shards
from opacus.distributed.sharding import Layouts, is_fsdp, local_of
from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.grad_sample.blocks import SMALL, Block, clipped_sums, launch_budget
from opacus.grad_sample.book import Book
from opacus.optimizers.batch_count import ONE_OPTIMIZER
from opacus.optimizers.utils import alike, describe

if TYPE_CHECKING:
    from opacus.optimizers.optimizer import DPOptimizer

__all__ = ["BookedSums"]


_SHARDED_SINCE = "; was it sharded since? Shard first, opacus.distributed.fsdp.fsdp2_wrap(model, optimizer), then call make_private"


class Sums:
    """One backward's clipped sums, formed when they are asked for: those that were not yet exist as what they follow from.

    Args:
        formed: sums that are there already.
        blocks: what the norms were taken of. factors: `[B]` for each block.
    """

    def __init__(
        self,
        formed: Sequence[tuple[nn.Parameter, Tensor]],
        blocks: Sequence[Block],
        factors: Sequence[Tensor],
    ) -> None:
        self.budget = launch_budget(blocks)
        self._formed = {id(parameter): total for parameter, total in formed}
        self._waiting = {
            id(p): (block, factor_B)
            for block, factor_B in zip(blocks, factors, strict=True)
            for p in block.parameters
        }

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of `parameters`, each once; None where the batch did not use one."""
        asked = [self._waiting[id(p)] for p in parameters if id(p) in self._waiting]
        found = list({id(block): (block, factor_B) for block, factor_B in asked}.values())
        del asked  # what is summed is given back at once
        blocks, factors = [block for block, _ in found], [factor_B for _, factor_B in found]
        for block in blocks:
            for p in block.parameters:
                del self._waiting[id(p)]
        for p, total in clipped_sums(blocks, factors, self.budget):
            self._formed[id(p)] = total
        return [self._formed.pop(id(p), None) for p in parameters]


class BookedSums:
    """Takes each physical batch's clipped sums from `book`, with the clip factors of `optimizer`'s style.

    Args:
        optimizer: whose clipping style and parameters count.
        book: what captured the calls.

    Formal guarantee:
        What is added for one backward is sum_i c_i g_i over that backward's samples, each sample once, with
        ||c_i g_i|| <= C over the optimizer's parameters.
    """

    def __init__(self, optimizer: DPOptimizer, book: Book) -> None:
        self.optimizer = optimizer
        self.book = book
        self.backwards = 0  # since the last step
        self.iterations = 1  # of the last step
        self._fresh: dict[int, Tensor] = {}
        self._layouts = Layouts()
        self.listen()

    def listen(self) -> None:
        """Be the one that the book hands its sums to: another optimizer may have taken its place since."""
        self.book.on_batch = self.take
        self.book.pending = lambda: self.backwards > 0

    def take(self, book: Book) -> None:
        """The backward has ended: clip, and keep the sums."""
        optimizer = self.optimizer
        if book.two_passes:
            self._add_all(book, book.clipped(), [], [])
        else:
            wanted = {id(p) for p in optimizer.params}
            blocks = book.blocks(join=optimizer.JOINS_PARAMETERS, wanted=wanted)
            first = [block.parameters[0] for block in blocks]
            factors = self.factors(first, [block.norm_B for block in blocks])  # type: ignore[misc]
            self._add_all(book, [], blocks, factors)
        self.backwards += 1

    def _add_all(
        self,
        book: Book,
        formed: Sequence[tuple[nn.Parameter, Tensor]],
        blocks: Sequence[Block],
        factors: Sequence[Tensor],
    ) -> None:
        if book.homes is not None:
            sums = Sums(formed, blocks, factors)
            del formed  # so that each is given back as it leaves
            reduce_to_shards(self._in_order(), sums.of, self._add, self._layouts, model_axes=book.axis.names)
            return
        earlier: list[Tensor] = []
        small: list[Tensor] = []
        for parameter, total in itertools.chain(formed, clipped_sums(blocks, factors, launch_budget(blocks))):
            if total.numel() <= SMALL and id(parameter) in self._fresh:
                earlier.append(self._fresh[id(parameter)])
                small.append(total)
            else:
                self._add(parameter, total)
        for group in alike(earlier, small) if small else ():  # many: in a few launches
            torch._foreach_add_(*group)

    def _in_order(self) -> list[nn.Parameter]:
        """The optimizer's parameters in the order that is the same on every rank: the model's."""
        assert self.book.homes is not None
        wanted = {id(p) for p in self.optimizer.params}
        return [p for p in self.book.homes.parameters if id(p) in wanted]

    def add_nothing(self) -> None:
        """A physical batch without samples, which needs no backward."""
        self.optimizer.before_clipping()
        self._add_all(self.book, [], [], [])
        self.backwards += 1

    def factors(self, parameters: list[nn.Parameter], norms: list[Tensor]) -> list[Tensor]:
        """What to multiply each sample's raw gradient with, `[B]` for each parameter (or block), on its device."""
        optimizer = self.optimizer
        weight_B = optimizer.take_sample_weights(self.book.n_samples)
        optimizer.before_clipping()
        if not norms:  # the batch used none of the optimizer's parameters
            return []
        placement = Placement(optimizer.params, reduction_device=optimizer.reduction_device)
        if optimizer.loss_scale != 1:
            norms = [norm_B / optimizer.loss_scale for norm_B in norms]
        factors = optimizer.clip_factors(parameters, norms, placement.reduction_device, weight_B)
        scale = self.book.scale / optimizer.loss_scale
        scaled = {id(factor_B): factor_B * scale for factor_B in factors}
        return [scaled[id(factor_B)] for factor_B in factors]

    def factors_between_passes(self) -> Callable[[nn.Parameter], Tensor]:
        """Ghost: factors from the norms of the first pass, for the parameters of the second.

        A parameter that is not the optimizer's takes no part in norms or sums.
        """
        wanted = {id(p) for p in self.optimizer.params}
        found = [(p, norm_B) for p, norm_B in zip(*self.book.norms(), strict=True) if id(p) in wanted]
        parameters = [p for p, _ in found]
        factors = dict(zip(map(id, parameters), self.factors(parameters, [n for _, n in found]), strict=True))

        def factor_of(parameter: nn.Parameter) -> Tensor:
            known = factors.get(id(parameter))
            if known is not None:
                return known
            return torch.zeros(self.book.n_samples, device=computing_device(parameter))

        return factor_of

    def _add(self, parameter: Tensor, total: Tensor) -> None:
        earlier = self._fresh.get(id(parameter))
        self._fresh[id(parameter)] = total if earlier is None else earlier.add_(total)

    def accumulate(self) -> None:
        """A step: move the fresh sums to `summed_grad` of each parameter; zero where a parameter was not used.

        Raises:
            PerSampleGradientError: naming parameters that are not part of the captured model, or if a loss was not wrapped.
            ValueError: if there was no backward since the last step.
        """
        optimizer, book = self.optimizer, self.book
        if book.unwrapped_backward:
            book.unwrapped_backward = False
            raise PerSampleGradientError(
                "step() cannot go on",
                [
                    "a backward was run on a loss that was not wrapped, so nothing was clipped. In grad_sample_mode 'ghost' call "
                    "backward() on the result of the criterion that make_private returned (DPLossFastGradientClipping); or use "
                    "grad_sample_mode 'bk', which takes any loss."
                ],
            )
        if not self.backwards and book.on_batch != self.take:
            raise_if_any(
                "step() cannot go on",
                [f"the model was made private again, with another optimizer. {ONE_OPTIMIZER}"],
                PerSampleGradientError,
            )
        if not self.backwards:
            raise ValueError(
                "per-sample gradients are not there: no backward pass was captured since the last step. Call "
                "loss.backward() on the output of the private module before step(), and check that its hooks are enabled."
            )
        inside = book.inside()
        outside = [p for p in optimizer.params if id(p) not in inside]
        if outside:  # the rest of the question walks over the model
            since = _SHARDED_SINCE if is_fsdp(book.root) else ""
            raise_if_any(
                "step() cannot go on",
                [
                    f"{describe(optimizer, p)} is not part of the model that was made private (were layers or adapters replaced "
                    f"since?{since}), so an update would not be private."
                    for p in outside
                ],
                PerSampleGradientError,
            )
        earlier: list[Tensor] = []
        later: list[Tensor] = []
        for p in optimizer.params:
            fresh = self._fresh.pop(id(p), None)
            summed = getattr(p, "summed_grad", None)
            if fresh is None:
                if summed is None:
                    dtype = torch.promote_types(p.dtype, torch.float32)
                    p.summed_grad = torch.zeros_like(local_of(p), dtype=dtype)  # type: ignore[attr-defined]
            elif summed is None:
                p.summed_grad = fresh  # type: ignore[attr-defined]
            else:
                earlier.append(summed)
                later.append(fresh)
        for group in alike(earlier, later) if earlier else ():
            torch._foreach_add_(*group)
        self._fresh.clear()
        book.settle()
        self.iterations, self.backwards = self.backwards, 0

    def drop(self) -> None:
        """`zero_grad`: forget sums that no step has taken."""
        self._fresh.clear()
        self.backwards = 0
        self.book.unwrapped_backward = False
