"""States of random generators, kept so that a resumed run draws the numbers the uninterrupted one would have drawn.

Where a state belongs to a kind of device that is not used here, nothing can be continued bit for bit; a new stream is then
seeded from the saved state, so that numbers drawn earlier are not drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opacus.devices import NoiseStream, _derived_seed

__all__ = [
    "dealt_anew",
    "default_states",
    "generator_state",
    "restore_default_states",
    "restore_generator",
    "restore_noise",
    "state_problems",
]


def default_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """States of torch's default generators: the CPU's and those of `devices`; byte tensors on the CPU, by device name."""
    states = {"cpu": torch.get_rng_state()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            states[str(device)] = torch.get_device_module(device).get_rng_state(device).cpu()
    return states


def restore_default_states(states: Mapping[str, Tensor], devices: Iterable[torch.device]) -> None:
    """Set the default generators of the CPU and of those `devices` that have a saved state."""
    torch.set_rng_state(states["cpu"])
    for device in devices:
        if device.type not in ("cpu", "meta") and str(device) in states:
            torch.get_device_module(device).set_rng_state(states[str(device)], device)


def dealt_anew(runs: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """The state of a run on another number of ranks: what is the ranks' own is seeded anew from all of theirs.

    Args:
        runs: the saved states, by rank: torch's generators under "random", the loader's under "sampling".
        rank: whose the new state is.

    Returns:
        The first rank's state with other states of generators, and with the other ranks' counts added.

    Formal guarantee:
        Seeds are 32 bits of a hash of all saved states and the rank. (The noise is no part of this: `ShardNoise` counts its seeds.)
    """
    first = dict(runs[0])
    names = {name for run in runs for name in run["random"]} | _current_devices()
    first["random"] = {
        name: _mixed([run["random"].get(name) for run in runs], rank, name)
        for name in names
        if _is_here(name)
    }
    if "sampling" in first:
        of_all = [run["sampling"]["generators"] for run in runs]
        first["sampling"] = {
            **first["sampling"],
            "generators": {
                which: {
                    name: _mixed([one[which].get(name) for one in of_all], rank, name)
                    for name in states
                    if _is_here(name)
                }
                for which, states in of_all[0].items()
            },
        }
    if "privacy" in first:
        skipped = sum(run["privacy"]["nonfinite_samples"] for run in runs)
        first["privacy"] = {**first["privacy"], "nonfinite_samples": skipped if rank == 0 else 0}
    return first


def _current_devices() -> set[str]:
    return {f"cuda:{torch.cuda.current_device()}"} if torch.cuda.is_available() else set()


def _is_here(device: str) -> bool:
    """Whether this machine has it."""
    kind, _, index = device.partition(":")
    return kind == "cpu" or int(index or 0) < torch.get_device_module(kind).device_count()


def _mixed(states: Sequence[Tensor | None], rank: int, device: str) -> Tensor:
    known = torch.cat(
        [state.flatten() for state in states if state is not None] + [torch.tensor([rank], dtype=torch.uint8)]
    )
    return torch.Generator(device).manual_seed(_derived_seed(known, device)).get_state().cpu()


def generator_state(generator: torch.Generator | None) -> dict[str, Tensor]:
    """A generator's state by device type; empty for None."""
    return {} if generator is None else {generator.device.type: generator.get_state().cpu()}


def restore_generator(generator: torch.Generator | None, states: Mapping[str, Tensor]) -> None:
    """Continue `generator` from `generator_state`; on another type of device, with a stream seeded from it."""
    if generator is not None and states:
        generator.set_state(_for_type(states, generator.device))


def restore_noise(stream: Any, states: Mapping[str, Tensor], devices: Iterable[torch.device]) -> None:
    """Continue a noise stream.

    Args:
        stream: a `NoiseStream`, or what has its `load_state_dict`.
        states: what `stream.state_dict()` returned.
        devices: devices of the parameters; states of other types are left out.

    Formal guarantee:
        The stream continues behind every number drawn from it before `states` was taken, or, on a type of device it has
        not used, is seeded from all of `states` (32 bits).
    """
    if not states or not isinstance(stream, NoiseStream):
        stream.load_state_dict(dict(states))
        return
    types = {device.type for device in devices}
    here = {name: state for name, state in states.items() if name in types}
    stream.load_state_dict({**here, stream.home.type: _for_type(states, stream.home)})


def state_problems(name: str, states: Any, devices: Iterable[torch.device]) -> list[str]:
    """What is wrong with saved states, a sentence each; nothing is set.

    Args:
        name: what to call them.
        states: byte tensors by device name or type.
        devices: the devices whose generators are going to be set.
    """
    if not isinstance(states, Mapping):
        return [f"{name} is a {type(states).__name__}, not a dictionary of states."]
    problems = []
    for key, state in states.items():
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.device.type != "cpu":
            problems.append(f"{name}[{key!r}] is not the state of a generator.")
            continue
        for device in devices:
            if key in (device.type, str(device)):
                try:
                    torch.Generator(device).set_state(state)
                except (RuntimeError, TypeError, ValueError) as error:
                    problems.append(f"{name}[{key!r}] is not the state of a generator on {device} ({error}).")
                break
    return problems


def _for_type(states: Mapping[str, Tensor], device: torch.device) -> Tensor:
    if device.type in states:
        return states[device.type]
    everything = torch.cat([states[name].flatten() for name in sorted(states)])
    return torch.Generator(device).manual_seed(_derived_seed(everything, device.type)).get_state()
