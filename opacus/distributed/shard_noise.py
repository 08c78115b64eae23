"""Noise for sharded parameters: each rank draws for its own part only, from streams that no two parts share.

A stream belongs to a shard pattern: the coordinates, over all mesh axes of the model, at which a rank's part lies; an axis that
does not cut the parameter counts as one coordinate of its own. Ranks that hold the same part (HSDP, tensor parallel's
repeated parameters) have the same stream, and so the same noise; ranks that hold different parts never do.

Seeds are numbers counted up from one base, not hashes: a CPU generator keeps 32 bits of its seed, so that hashes of it would
meet, and two parts with equal noise give it away by their difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.distributed.sharding import axes_of, is_sharded
from opacus.errors import raise_if_any
from opacus.optimizers.noise import SecureNoise

__all__ = ["ShardNoise"]

_SEEDS = 2**32  # what a CPU generator can tell apart
_DRAWN_TOGETHER = 2**25  # elements: launching takes longer than drawing a small tensor


class ShardNoise:
    """The noise's streams on this rank.

    Args:
        parameters: those of the optimizer, frozen ones too; the same on every rank.
        generator: seeds the streams: its next number on the first rank is the base. None: torch's default CPU generator.
        secure: take noise from the operating system's entropy; ranks that hold the same part are sent the same.

    Raises:
        ConfigurationError: if axes of one name differ in size, or there are more patterns than seeds.

    Formal guarantee:
        Each coordinate of the whole parameter receives one draw, independent of every other coordinate's up to the quality of
        torch's generators; ranks that hold the same coordinate receive the same draw.
    """

    def __init__(
        self, parameters: Iterable[Tensor], generator: torch.Generator | None, *, secure: bool = False
    ) -> None:
        self.generator = generator
        self.secure = SecureNoise() if secure else None
        self._axes: dict[Any, tuple[Any, int]] = {}  # name to (mesh, its dimension there)
        problems = []
        for p in parameters:
            if is_sharded(p):
                mesh = p.device_mesh  # type: ignore[attr-defined]
                for d, axis in enumerate(axes_of(mesh)):
                    home, there = self._axes.setdefault(axis, (mesh, d))
                    if home.size(there) != mesh.size(d):
                        problems.append(
                            f"mesh axes of {home.size(there)} and of {mesh.size(d)} ranks are both called {axis!r}: give them "
                            "different names."
                        )
        self.span = math.prod(mesh.size(d) + 1 for mesh, d in self._axes.values())
        if self.span >= _SEEDS:
            problems.append(f"its axes have {self.span} shard patterns, a generator tells 2**32 apart.")
        raise_if_any("noise cannot be drawn for this mesh", list(dict.fromkeys(problems)))
        self.base: int | None = None
        self.offset = 0  # behind the seeds of earlier layouts of this run
        self._streams: dict[tuple[int, torch.device], torch.Generator] = {}
        self._saved: dict[str, Tensor] = {}  # of streams that have not drawn since they were loaded
        self._keys: dict[Any, int] = {}

    # ------------------------------------------------------------------ drawing

    def normals_for(
        self, parameters: Sequence[Tensor], likes: Sequence[Tensor], std: float, dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Draws from N(0, std^2) for this rank's parts of `parameters`, those of one stream together in few draws.

        Args:
            likes: have the parts' shapes, and lie where the noise is wanted.
        """
        if self.secure is not None:
            return [
                self._draw(self._repeated_axes(p), 0, like.shape, std, like.device, dtype)
                for p, like, dtype in zip(parameters, likes, dtypes, strict=True)
            ]
        together: dict[tuple[int, torch.device, torch.dtype], list[int]] = {}
        for i, (p, like, dtype) in enumerate(zip(parameters, likes, dtypes, strict=True)):
            together.setdefault((self._key(p), like.device, dtype), []).append(i)
        found: dict[int, Tensor] = {}
        for (key, device, dtype), members in together.items():
            for part in _up_to(_DRAWN_TOGETHER, members, [like.numel() for like in likes]):
                sizes = [likes[i].numel() for i in part]
                drawn = self._draw([], key, (sum(sizes),), std, device, dtype)
                for i, values in zip(part, drawn.split(sizes), strict=True):
                    found[i] = values.view(likes[i].shape)
        return [found[i] for i in range(len(likes))]

    def normal(self, shape: Sequence[int], std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Draws that every rank makes alike (for what is released once, not a part of a parameter)."""
        return self._draw(list(self._axes), 0, shape, std, device, dtype)

    def _draw(
        self,
        repeated: list[Any],
        key: int,
        shape: Sequence[int],
        std: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        if self.secure is not None:
            return self._agreed(self.secure.normal(shape, std, device, dtype), repeated)
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        return out.normal_(0, std, generator=self._stream(key, device))

    def _stream(self, key: int, device: torch.device) -> torch.Generator:
        stream = self._streams.get((key, device))
        if stream is None:
            stream = self._streams[key, device] = torch.Generator(device)
            saved = self._saved.get(f"{key}/{device.type}")
            if saved is None:
                stream.manual_seed((self._agreed_base() + self.offset + key) % _SEEDS)
            else:
                stream.set_state(saved)
        return stream

    # ------------------------------------------------------------- who holds what

    def _key(self, parameter: Tensor) -> int:
        """The pattern's number: in mixed radix over all axes, 0 where the axis does not cut, else the coordinate + 1."""
        if not is_sharded(parameter):
            return 0
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        known = self._keys.get((mesh, placements))
        if known is None:
            strange = [axis for axis in axes_of(mesh) if axis not in self._axes]
            raise_if_any(
                "noise cannot be drawn for this mesh",
                [f"axis {axis!r} is one that no parameter had when the noise began." for axis in strange],
            )
            at = {
                axis: mesh.get_local_rank(d) + 1
                for d, axis in enumerate(axes_of(mesh))
                if not placements[d].is_replicate()
            }
            known = 0
            for axis, (home, d) in self._axes.items():
                known = known * (home.size(d) + 1) + at.get(axis, 0)
            self._keys[mesh, placements] = known
        return known

    def _repeated_axes(self, parameter: Tensor) -> list[Any]:
        if not is_sharded(parameter):
            return list(self._axes)
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        cut = {axis for d, axis in enumerate(axes_of(mesh)) if not placements[d].is_replicate()}
        return [axis for axis in self._axes if axis not in cut]

    def _agreed(self, mine: Tensor, axes: Iterable[Any]) -> Tensor:
        """What the ranks at coordinate 0 of `axes` have."""
        for axis in axes:
            mesh, d = self._axes[axis]
            if mesh.size(d) > 1:
                there = mine if mesh.device_type == mine.device.type else mine.to(mesh.device_type)
                there = there.contiguous()
                dist.broadcast(there, group=mesh.get_group(d), group_src=0)
                mine = there.to(mine.device)
        return mine

    def _agreed_base(self) -> int:
        if self.base is None:
            device = "cpu" if self.generator is None else self.generator.device
            drawn = torch.randint(0, _SEEDS, (1,), generator=self.generator, device=device).cpu()
            self.base = int(self._agreed(drawn, self._axes))
        return self.base

    # ------------------------------------------------------------------ resuming

    @property
    def pattern(self) -> str:
        """Names and sizes of the axes: what streams can be continued on."""
        return ", ".join(f"{axis}: {mesh.size(d)}" for axis, (mesh, d) in self._axes.items())

    def state_dict(self) -> dict[str, Any]:
        """All ranks' streams: enough to go on bit for bit on as many ranks. Collective."""
        if self.secure is not None:
            return {}
        base = self._agreed_base()
        mine = {f"{key}/{device.type}": g.get_state().cpu() for (key, device), g in self._streams.items()}
        return {
            "base": base,
            "offset": self.offset,
            "span": self.span,
            "pattern": self.pattern,
            "streams": dict(
                itertools.chain(self._saved.items(), *(part.items() for part in self._everyone(mine)))
            ),
        }

    def _everyone(self, mine: Any) -> Iterator[Any]:
        gathered = [mine]
        for mesh, d in self._axes.values():
            parts: list[Any] = [None] * mesh.size(d)
            dist.all_gather_object(parts, gathered, group=mesh.get_group(d))
            gathered = [one for part in parts for one in part]
        yield from gathered

    def state_problems(self, state: Any) -> list[str]:
        """What `load_state_dict` could not use, a sentence each."""
        if self.secure is not None or state == {}:
            return []
        wanted = {"base": int, "offset": int, "span": int, "pattern": str, "streams": dict}
        if not isinstance(state, Mapping):
            return [f"the saved state of the noise is a {type(state).__name__}, not a dictionary."]
        return [
            f"the saved state of the noise has no {name!r}, or no {kind.__name__} there."
            for name, kind in wanted.items()
            if not isinstance(state.get(name), kind)
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind every number drawn before `state` was taken.

        On another layout of ranks the streams cannot be continued. New ones are seeded with numbers of the same base that no
        layout of this run has used.
        """
        if self.secure is not None or not state:
            return
        self._streams.clear()
        same = state["pattern"] == self.pattern
        self.base, self.offset = state["base"], state["offset"] + (0 if same else state["span"])
        self._saved = dict(state["streams"]) if same else {}


def _up_to(limit: int, members: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """`members` in runs whose sizes add up to `limit` at most; one that is larger is alone."""
    run: list[int] = []
    room = limit
    for i in members:
        if run and room < sizes[i]:
            yield run
            run, room = [], limit
        run.append(i)
        room -= sizes[i]
    if run:
        yield run
