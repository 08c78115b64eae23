"""Process groups: who takes part, and what ranks tell each other without a collective.

Messages go through the group's key-value store, so they work before it is known whether ranks could reduce anything together, and
a rank that does not come is named.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from opacus.distributed.errors import RankLostError, ReplicaError

__all__ = [
    "default_group",
    "exchange",
    "in_words",
    "largest",
    "lost_rank",
    "runs_in_parallel",
    "size_of",
    "timeout_of",
]

_meetings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def runs_in_parallel() -> bool:
    """Whether this process is one of several that `torch.distributed` connects."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def default_group() -> dist.ProcessGroup:
    """The group of all ranks.

    Raises:
        ReplicaError: if there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ReplicaError(
            "private training over several processes cannot start",
            ["there is no process group: call torch.distributed.init_process_group(...) first."],
        )
    return dist.group.WORLD  # type: ignore[return-value]


def size_of(group: dist.ProcessGroup) -> int:
    """Number of ranks."""
    return dist.get_world_size(group)


def exchange(message: Any, group: dist.ProcessGroup, purpose: str) -> list[Any]:
    """Give every rank of `group` every rank's message.

    Args:
        message: plain values that JSON can hold.
        group: its ranks all call this, for the same purpose.
        purpose: what they have come for, e.g. "make_private".

    Returns:
        The messages, by rank within the group.

    Raises:
        RankLostError: naming the ranks that did not come within the group's timeout.
        ReplicaError: if ranks have come for different purposes.
    """
    rank, size = dist.get_rank(group), size_of(group)
    meeting = _meetings[group] = _meetings.get(group, 0) + 1
    store = _store(group)
    keys = [f"meeting {meeting} rank {r}" for r in range(size)]
    try:
        store.set(keys[rank], json.dumps([purpose, message]))
        store.wait(keys, *_patience(group))
        answers = [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:  # of the store: too late, or its owner has ended
        raise RankLostError(_absent(store, keys, rank, purpose)) from error
    purposes = [answer[0] for answer in answers]
    if len(set(purposes)) > 1:
        raise ReplicaError(
            "ranks cannot train together",
            [f"rank {r} is at {p}." for r, p in enumerate(purposes)]
            + ["every rank must call the same functions in the same order."],
        )
    return [answer[1] for answer in answers]


def largest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest `value` of all ranks; waits for them.

    Args:
        value: this rank's.
        group: its ranks all call this.
        device: an accelerator that `group` serves, for groups that do not serve the CPU.

    Raises:
        RankLostError: if a rank does not come.
    """
    place = torch.device("cpu") if "cpu" in served(group) else device
    found = torch.tensor([value], dtype=torch.int64, device=place)
    try:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return int(found.item())
    except RuntimeError as error:
        raise lost_rank(group, "agree on the number of physical batches", error) from error


def served(group: dist.ProcessGroup) -> set[str]:
    """Device types whose tensors `group` can reduce."""
    return {device.type for device in getattr(group, "_device_types", ())}


def lost_rank(group: dist.ProcessGroup, doing: str, error: BaseException) -> RankLostError:
    """The error for a collective that failed.

    Args:
        group: whose collective.
        doing: what could not be done, as in "could not <doing>".
        error: what torch raised.
    """
    rank, size = dist.get_rank(group), size_of(group)
    keys = [f"collective failed, rank {r}" for r in range(size)]
    try:  # others that live find out at about the same time, and say so
        store = _store(group)
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=2))
        silent = ""
    except RuntimeError:
        silent = _silent(store, keys, rank)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RankLostError(
        f"rank {rank} of {size} could not {doing}: another rank has ended, or did not come within the process group's "
        f"timeout.{silent} The model was not updated by this step, and no step was accounted for it. Look at the other ranks' "
        f"messages, and start all ranks again from the last checkpoint. ({first_line})"
    )


def in_words(ranks: Sequence[int]) -> str:
    """Ranks as a person would list them.

    Example:
        >>> in_words([1]), in_words([0, 2, 3])
        ('rank 1', 'ranks 0, 2 and 3')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long the group's ranks wait for each other; None where torch does not tell it."""
    for device in getattr(group, "_device_types", ()):
        try:
            return group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None


def _patience(group: dist.ProcessGroup) -> tuple[timedelta, ...]:
    """The group's timeout, as an argument; nothing where torch does not tell it, and the store's own holds."""
    timeout = timeout_of(group)
    return () if timeout is None else (timeout,)


def _store(group: dist.ProcessGroup) -> Any:
    whole = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"opacus {group.group_name}", whole)


def _absent(store: Any, keys: list[str], rank: int, purpose: str) -> str:
    return (
        f"rank {rank} waited at {purpose} for the other {len(keys) - 1} ranks, which did not all come within the process group's "
        f"timeout.{_silent(store, keys, rank)} Every rank must call {purpose}; look at the other ranks' messages."
    )


def _silent(store: Any, keys: list[str], rank: int) -> str:
    try:
        silent = [r for r, key in enumerate(keys) if r != rank and not store.check([key])]
    except RuntimeError:
        return " The store that ranks meet at is gone, and with it the rank that kept it (rank 0, as a rule)."
    return f" There is no word from {in_words(silent)}." if silent else ""
