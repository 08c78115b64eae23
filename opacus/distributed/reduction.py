"""The one place where gradients cross ranks: sums in buckets, once per logical batch.

A bucket holds tensors of one device and one dtype, up to a size, so there are as many collectives as buckets, not as parameters.
Ranks hold the same tensors in the same order on devices of their own: the first device of one rank's replica meets the first of the
others', the second the second.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.distributed.errors import RankLostError, ReplicaError
from opacus.distributed.groups import exchange, in_words, lost_rank

__all__ = ["BUCKET_BYTES", "Reduction", "broadcast"]

BUCKET_BYTES = 64 * 2**20
_IN_FLIGHT = 3  # buckets that hold memory at once


class Reduction:
    """Sums over the ranks of `group`.

    Args:
        group: its ranks all reduce the same shapes in the same order.
        bucket_bytes: size of a bucket; a larger tensor is one of its own, and is not copied.

    Formal guarantee:
        Afterwards every rank holds the sum of all ranks' tensors, added in their own dtype, and the same bits.
    """

    def __init__(self, group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.group = group
        self.bucket_bytes = bucket_bytes
        self._agreed: set[str] = set()

    def add_up(self, tensors: Sequence[Tensor], doing: str = "add up clipped gradients over ranks") -> None:
        """Replace each tensor by its sum over ranks, in place.

        The first time that a list of shapes comes, ranks compare theirs through the store.

        Raises:
            ReplicaError: naming the ranks whose list differs.
            RankLostError: if a rank does not come.
        """
        self._agree(tensors)

        def start(bucket: Tensor) -> Any:
            return dist.all_reduce(bucket, op=dist.ReduceOp.SUM, group=self.group, async_op=True)

        _in_buckets(tensors, self.bucket_bytes, start, self.group, doing)

    def _agree(self, tensors: Sequence[Tensor]) -> None:
        positions = _positions(tensors)
        layout = [[positions[t.device], str(t.dtype), list(t.shape)] for t in tensors]
        mine = hashlib.sha256(json.dumps(layout).encode()).hexdigest()
        if mine in self._agreed:
            return
        every = exchange([mine, len(layout)], self.group, "the first reduction of these gradients")
        others = [rank for rank, (digest, _) in enumerate(every) if digest != every[0][0]]
        if others:
            raise ReplicaError(
                "gradients cannot be added up over ranks",
                [
                    f"{in_words(others)} would reduce other tensors than rank 0 (numbers of tensors by rank: "
                    f"{[count for _, count in every]}): every rank must train the same parameters, of the same shapes and "
                    "dtypes, placed on its devices in the same way. Freeze and unfreeze them on all ranks at once."
                ],
            )
        self._agreed.add(mine)


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Give every rank the values of the group's first rank, in place.

    Raises:
        RankLostError: if a rank does not come.
    """

    def start(bucket: Tensor) -> Any:
        return dist.broadcast(bucket, group=group, group_src=0, async_op=True)

    with torch.no_grad():
        _in_buckets(
            [t.detach() for t in tensors], bucket_bytes, start, group, "take over rank 0's parameters"
        )


def _in_buckets(
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    start: Callable[[Tensor], Any],
    group: dist.ProcessGroup,
    doing: str,
) -> None:
    flying: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def land() -> None:
        work, flat, members = flying.popleft()
        work.wait()
        if len(members) > 1 or members[0].data_ptr() != flat.data_ptr():
            parts = flat.split([t.numel() for t in members])
            torch._foreach_copy_(
                members, [part.view(t.shape) for part, t in zip(parts, members, strict=True)]
            )

    try:
        for members in _buckets(tensors, bucket_bytes):
            alone = len(members) == 1 and members[0].is_contiguous()
            flat = members[0].view(-1) if alone else torch.cat([t.reshape(-1) for t in members])
            flying.append((start(flat), flat, members))
            if len(flying) == _IN_FLIGHT:
                land()
        while flying:
            land()
    except RankLostError:
        raise
    except RuntimeError as error:
        raise lost_rank(group, doing, error) from error


def _positions(tensors: Sequence[Tensor]) -> dict[torch.device, int]:
    """Devices in the order of first use."""
    positions: dict[torch.device, int] = {}
    for t in tensors:
        positions.setdefault(t.device, len(positions))
    return positions


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors that travel together; the same on ranks whose tensors agree."""
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for t in tensors:
        kind, size = (t.device, t.dtype), t.numel() * t.element_size()
        if size == 0:
            continue
        if size >= bucket_bytes:
            yield [t]
            continue
        if sizes.get(kind, 0) + size > bucket_bytes:
            yield filling.pop(kind)
            sizes[kind] = 0
        filling.setdefault(kind, []).append(t)
        sizes[kind] = sizes.get(kind, 0) + size
    yield from filling.values()
