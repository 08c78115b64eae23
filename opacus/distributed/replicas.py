"""What ranks must have in common before they train together, and what they must not share. Nothing is changed here.

A replica is a rank's copy of the model; it may span several devices. Ranks describe theirs to each other through the store, so that
every rank comes to the same list of problems, and no collective is started that could hang.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.distributed.groups import default_group, exchange, in_words, served, timeout_of

__all__ = ["group_serving", "replica_problems"]

_groups: weakref.WeakKeyDictionary[Any, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
_LISTED = 5  # differences of one rank; more are counted


def replica_problems(
    module: nn.Module | None,
    group: dist.ProcessGroup,
    purpose: str,
    *,
    allow_shared_devices: bool = False,
    settings: Mapping[str, Any] | None = None,
    own_problems: Sequence[str] = (),
) -> list[str]:
    """What keeps the ranks of `group` from training together, a sentence each, the same on every rank.

    Args:
        module: this rank's replica; None leaves it out.
        group: its ranks all call this.
        purpose: where from, e.g. "make_private".
        allow_shared_devices: let two ranks use one accelerator.
        settings: values that must be equal on all ranks, by name; compared as they are printed.
        own_problems: found on this rank already; every rank learns of them.

    Raises:
        RankLostError: naming the ranks that did not come.
    """
    replica = None if module is None else _described(module, group)
    here = list(own_problems) + ([] if module is None else _own_problems(module, group))
    message = {
        "host": _host(),
        "problems": here,
        "settings": {name: repr(value) for name, value in (settings or {}).items()},
        "devices": [] if replica is None else replica["devices"],
        "backend": dist.get_backend(group),
        "digest": hashlib.sha256(json.dumps(_comparable(replica)).encode()).hexdigest(),
    }
    messages = exchange(message, group, purpose)
    problems = _found_by_ranks([m["problems"] for m in messages])
    problems += _setting_differences([m["settings"] for m in messages])
    problems += _shared_devices(messages, allow_shared_devices)
    if (
        len({m["digest"] for m in messages}) > 1
    ):  # every rank sees this, so every rank comes to the second meeting
        problems += _differences(exchange(_comparable(replica), group, f"{purpose} (details)"))
    return problems


# ------------------------------------------------------------------ this rank


def _described(module: nn.Module, group: dist.ProcessGroup) -> dict[str, Any]:
    positions: dict[torch.device, int] = {}

    def place(tensor: Tensor) -> int:
        if tensor.device.type == "meta":
            return -1
        return positions.setdefault(tensor.device, len(positions))

    parameters = {
        _plain(name): [list(p.shape), str(p.dtype), p.requires_grad, place(p)]
        for name, p in module.named_parameters()
    }
    buffers = {
        _plain(name): [list(b.shape), str(b.dtype), False, place(b)] for name, b in module.named_buffers()
    }
    return {
        "parameters": parameters,
        "buffers": buffers,
        "kinds": [device.type for device in positions],
        "devices": [[_identity(device), str(device)] for device in positions if device.type != "cpu"],
    }


def _comparable(replica: dict[str, Any] | None) -> dict[str, Any]:
    """What must be equal: all but which devices these are. The order of parameters counts."""
    if replica is None:
        return {"parameters": [], "buffers": [], "kinds": []}
    return {
        "parameters": list(replica["parameters"].items()),
        "buffers": list(replica["buffers"].items()),
        "kinds": replica["kinds"],
    }


def _plain(name: str) -> str:
    """A parameter's name without the wrappers around the model, which ranks need not share."""
    while name.startswith(("module.", "_module.")):
        name = name.split(".", 1)[1]
    return name


def _own_problems(module: nn.Module, group: dist.ProcessGroup) -> list[str]:
    problems = [
        f"parameter {name} is on the meta device and requires grad (offloaded, or never loaded): load it to a device, or "
        "freeze it."
        for name, p in module.named_parameters()
        if p.requires_grad and p.device.type == "meta"
    ]
    spread = [name for name, p in module.named_parameters() if hasattr(p, "placements")]
    if spread:
        problems.append(
            f"{len(spread)} parameters are DTensors ({', '.join(spread[:3])}...), spread over ranks by fully_shard or "
            "parallelize_module, so that a rank holds no replica: leave the data-parallel wrapper out. Data parallel next to tensor "
            "parallel is fully_shard over a second mesh axis."
        )
    devices = {t.device for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}
    bound = getattr(group, "bound_device_id", None)
    outside = sorted(str(d) for d in devices if bound is not None and d.type == bound.type and d != bound)
    if outside:
        problems.append(
            f"the process group is bound to {bound}, but the replica has tensors on {', '.join(outside)} too: leave device_id "
            "out of init_process_group (or new_group)."
        )
    types = served(group)
    unserved = sorted({d.type for d in devices} - types) if types else []
    if unserved:
        problems.append(
            f"the process group has no backend for tensors on {', '.join(unserved)}: make it with "
            f'init_process_group("{_backends({d.type for d in devices})}").'
        )
    return problems


def group_serving(kinds: Collection[str]) -> dist.ProcessGroup:
    """A group of all ranks that reduces tensors on devices of these kinds, as patient as the default one; every rank asks for it.

    Nobody else's collectives are in it. Asked again for the same kinds, it is the same group.

    Args:
        kinds: device types, e.g. "cpu" and "cuda"; the same on every rank.
    """
    whole = default_group()
    backends = dist.get_backend_config(whole) if served(whole).issuperset(kinds) else _backends(kinds)
    made = _groups.setdefault(whole, {})
    if backends not in made:
        made[backends] = dist.new_group(backend=backends, timeout=timeout_of(whole))
    return made[backends]


def _backends(kinds: Collection[str]) -> str:
    known = {"cuda": "nccl", "xpu": "xccl"}
    return ",".join(f"{kind}:{known.get(kind, 'gloo')}" for kind in sorted(kinds))


def _identity(device: torch.device) -> str:
    """What tells an accelerator from all others. Its index does not: ranks may number the same ones differently."""
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
    except (AttributeError, AssertionError, RuntimeError):
        uuid = None
    return f"{_host()}/{device}" if uuid is None else str(uuid)


def _host() -> str:
    boot = Path(
        "/proc/sys/kernel/random/boot_id"
    )  # containers of one machine may have names of their own, or one name
    try:
        return boot.read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{os.getenv('HOSTNAME', '')}"


# ------------------------------------------------------------------ all ranks


def _found_by_ranks(found: Sequence[Sequence[str]]) -> list[str]:
    """Every problem once: as it is where all ranks have it, else with the ranks that do."""
    ranks: dict[str, list[int]] = {}
    for rank, problems in enumerate(found):
        for problem in dict.fromkeys(problems):
            ranks.setdefault(problem, []).append(rank)
    return [
        problem if len(having) == len(found) else f"{in_words(having)}: {problem}"
        for problem, having in ranks.items()
    ]


def _setting_differences(settings: Sequence[Mapping[str, str]]) -> list[str]:
    problems = []
    for name in dict.fromkeys(name for own in settings for name in own):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(settings):
            ranks.setdefault(own.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            listed = ", ".join(f"{value} on {in_words(having)}" for value, having in ranks.items())
            problems.append(f"{name} is {listed}: make it the same on every rank.")
    return problems


def _shared_devices(messages: Sequence[Mapping[str, Any]], allowed: bool) -> list[str]:
    users: dict[str, dict[int, str]] = {}
    for rank, message in enumerate(messages):
        for identity, label in message["devices"]:
            users.setdefault(identity, {})[rank] = label
    shared = {identity: names for identity, names in users.items() if len(names) > 1}
    problems = []
    for identity, names in shared.items():
        who = f"{in_words(list(names))} {'both' if len(names) == 2 else 'all'} use {identity}"
        labels = ", ".join(f"{label} on rank {rank}" for rank, label in names.items())
        if not allowed:
            problems.append(
                f"{who} ({labels}). Give each rank its own devices, or pass allow_shared_devices=True to share them on purpose."
            )
        elif any("nccl" in messages[rank]["backend"] for rank in names):
            problems.append(
                f'{who} ({labels}), which NCCL cannot do: make the process group with init_process_group("gloo").'
            )
    return problems


def _differences(replicas: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    first = replicas[0]
    for rank, replica in enumerate(replicas[1:], start=1):
        if len(replica["kinds"]) != len(first["kinds"]):
            problems.append(
                f"rank {rank}'s replica spans {_count(replica['kinds'])}, rank 0's {_count(first['kinds'])}: place its layers "
                "on as many."
            )
        elif replica["kinds"] != first["kinds"]:
            problems.append(
                f"rank {rank}'s replica lies on devices of types {', '.join(replica['kinds'])}, rank 0's on "
                f"{', '.join(first['kinds'])}: make them the same, in the same order."
            )
        found = _tensor_differences("parameter", rank, dict(replica["parameters"]), dict(first["parameters"]))
        found += _tensor_differences("buffer", rank, dict(replica["buffers"]), dict(first["buffers"]))
        if not found and [n for n, _ in replica["parameters"]] != [n for n, _ in first["parameters"]]:
            found = [f"rank {rank}'s model has the parameters of rank 0 in another order."]
        problems += found[:_LISTED]
        if len(found) > _LISTED:
            problems.append(f"rank {rank} differs from rank 0 in {len(found) - _LISTED} more tensors.")
    return problems


def _tensor_differences(kind: str, rank: int, own: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in dict.fromkeys((*first, *own)):
        if name not in own:
            trains = " trains" if first[name][2] else " has"
            problems.append(f"rank {rank}'s model has no {kind} '{name}' that rank 0{trains}.")
            continue
        if name not in first:
            problems.append(f"rank {rank}'s model has a {kind} '{name}' that rank 0 does not have.")
            continue
        for what, mine, theirs in zip(
            ("shape", "dtype", "requires_grad", "device of the replica"), own[name], first[name], strict=True
        ):
            if mine != theirs:
                problems.append(f"{kind} '{name}' has {what} {mine} on rank {rank}, {theirs} on rank 0.")
    return problems


def _count(kinds: Sequence[str]) -> str:
    return "1 device" if len(kinds) == 1 else f"{len(kinds)} devices"
