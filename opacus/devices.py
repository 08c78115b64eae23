"""Placement: which device adds up norms, what crosses between devices, and one noise stream over all of them.

Everything that combines tensors of two parameters goes through this file. It depends on torch alone (and `opacus.errors`). The only
tensors that cross devices on differential privacy's account are vectors of length B: each device's
squared norms to the reduction device, and the clip factors back.

Shapes: B samples of a physical batch, D devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from opacus.errors import RepeatedNoiseError, raise_if_any

__all__ = ["FactorCopies", "NoiseStream", "Placement", "computing_device", "total_norms"]

_SMALL = 2**16  # elements of a tensor whose noise is drawn together with others'
_REPEATS = (
    "its generator stands where it stood before an earlier draw: the noise would be that of an earlier step, and could be subtracted. "
    "Most likely a data set, a transform or a forward calls torch.manual_seed. Take that out, or give the noise a generator of its own: "
    "noise_generator=torch.Generator(device).manual_seed(...), which nothing else may seed again, or secure_mode=True. To go back to an "
    "earlier step on purpose, load a checkpoint (PrivacyEngine.load_checkpoint), or build a new optimizer."
)


def computing_device(parameter: Tensor) -> torch.device:
    """Where layers use `parameter`, and its gradients arise.

    Where it lies, but for a parameter that is sharded over processes: its part may wait on the CPU (offload).
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return _indexed(torch.device(mesh.device_type))


class Placement:
    """Devices of a model's trainable parameters, and the one where norms are added up.

    Args:
        parameters: trainable parameters.
        reduction_device: overrides the choice; by default the accelerator that holds most trainable
            elements, or the CPU where there is no accelerator.

    Raises:
        ValueError: if a parameter is on the meta device (its values are elsewhere, or nowhere).
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, reduction_device: torch.device | str | None = None
    ) -> None:
        elements: dict[torch.device, int] = {}
        for parameter in parameters:
            if parameter.device.type == "meta":
                raise ValueError(
                    f"a trainable parameter of shape {tuple(parameter.shape)} is on the meta device: load it to a "
                    "device, or freeze it, before training privately"
                )
            device = computing_device(parameter)
            elements[device] = elements.get(device, 0) + parameter.numel()
        self.devices: tuple[torch.device, ...] = tuple(elements)
        if reduction_device is not None:
            self.reduction_device = torch.device(reduction_device)
        else:
            accelerators = {d: n for d, n in elements.items() if d.type != "cpu"}
            choices = accelerators or elements or {torch.device("cpu"): 0}
            self.reduction_device = max(choices, key=lambda device: choices[device])


def total_norms(norms_by_device: dict[torch.device, list[Tensor]], reduction_device: torch.device) -> Tensor:
    """L2 norm of each sample's whole gradient, given the norms of its parts.

    Args:
        norms_by_device: for each device, one `[B]` vector of per-sample norms for each parameter there.
        reduction_device: where the result is wanted.

    Returns:
        `[B]` on `reduction_device`, at least float32. At most D - 1 vectors of length B were copied (D where the
        reduction device holds no parameter).

    Raises:
        ValueError: if the vectors differ in length.
    """
    lengths = {norm.shape[0] for norms in norms_by_device.values() for norm in norms}
    if len(lengths) > 1:
        raise ValueError(f"parameters disagree on the number of samples: {sorted(lengths)}")
    total: Tensor | None = None
    dtype = torch.float32
    # the reduction device's own sum first, the rest in the order of first use: the same order whatever the copies cost
    for device in sorted(norms_by_device, key=lambda d: d != reduction_device):
        stacked = torch.stack(norms_by_device[device])
        dtype = torch.promote_types(dtype, stacked.dtype)
        # in float64, so that the result does not depend on how parameters are shared out over devices
        squared = stacked.to(_widest(device, reduction_device)).square_().sum(0)
        squared = squared.to(reduction_device, non_blocking=device.type == reduction_device.type)
        total = squared if total is None else total + squared
    if total is None:
        raise ValueError("there are no norms to add up")
    return total.sqrt_().to(dtype)


def _widest(*devices: torch.device) -> torch.dtype:
    """float64, where all `devices` have it (Apple's GPUs do not)."""
    return torch.float32 if any(device.type == "mps" for device in devices) else torch.float64


class FactorCopies:
    """Clip factors, copied to each device once, and cast there once per dtype.

    Args:
        factor_B: `[B]`, on the reduction device.
    """

    def __init__(self, factor_B: Tensor) -> None:
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {
            (factor_B.device, factor_B.dtype): factor_B
        }
        self._source = factor_B

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """The factors on `device`, in `dtype` (their own if None)."""
        wanted = self._source.dtype if dtype is None else dtype
        if (device, wanted) not in self._copies:
            if (device, self._source.dtype) not in self._copies:
                same_type = device.type == self._source.device.type
                self._copies[device, self._source.dtype] = self._source.to(device, non_blocking=same_type)
            self._copies[device, wanted] = self._copies[device, self._source.dtype].to(wanted)
        return self._copies[device, wanted]


class NoiseStream:
    """One stream of Gaussian noise for parameters on any number of devices.

    For a parameter on the stream's own device, values are drawn from the stream. On another device of the same type,
    the stream's state is handed over to a generator there, the values drawn, and the state taken back: the numbers
    are those one device would have drawn. On a device of another type values come from a child generator, seeded once
    from the stream's state; it is a stream of its own over all devices of that type.

    Args:
        generator: the user's stream. None: the default generator of `home`, so that `torch.manual_seed` rules. (The
            default generators of several devices seeded alike would repeat each other's numbers, and two
            parameters' noise could be cancelled; there is one stream for that reason.)
        home: the device whose default generator stands in where `generator` is None.

    Formal guarantee:
        Draws never overlap: every value of a call of `normal` comes from a part of a stream that no other call used,
        whatever the devices. Others may set the generator back between calls (`torch.manual_seed` in a data set): a call that would
        begin where an earlier one began is refused.
    """

    def __init__(self, generator: torch.Generator | None, home: torch.device) -> None:
        self.generator = generator
        self.home = _indexed(generator.device if generator is not None else home)
        self._hands: dict[torch.device, torch.Generator] = {}
        self._children: dict[str, NoiseStream] = {}
        self._begun: set[bytes] = set()  # digests of the states at which draws began

    def normal(self, shape: Sequence[int], std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent draws from N(0, std^2), a tensor of `shape` on `device`.

        Raises:
            RepeatedNoiseError: if an earlier call began at the same state; nothing was drawn.
        """
        if device.type == self.home.type and all(shape):
            self._refuse_repeating()
        return self._draw(shape, std, device, dtype)

    def _refuse_repeating(self) -> None:
        """Before a draw from the stream's own generator, which others may have set back. Children's generators nobody else has."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # a state may not be read while a CUDA graph is recorded
        state = self._get_state().cpu().numpy().tobytes()
        digest = hashlib.blake2b(state, digest_size=8).digest()
        raise_if_any("noise cannot be drawn", [_REPEATS] if digest in self._begun else [], RepeatedNoiseError)
        self._begun.add(digest)

    def _draw(self, shape: Sequence[int], std: float, device: torch.device, dtype: torch.dtype) -> Tensor:
        device = _indexed(device)
        if device.type != self.home.type:
            return self._child(device)._draw(shape, std, device, dtype)
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        if device == self.home:
            return out.normal_(0, std, generator=self.generator)
        hand = self._hands.get(device)
        if hand is None:
            hand = self._hands[device] = torch.Generator(device)
        hand.set_state(self._get_state())
        out.normal_(0, std, generator=hand)
        self._set_state(hand.get_state())
        return out

    def branch(self, label: str, *, moving_on: bool = True) -> NoiseStream:
        """A stream of its own, seeded from this one (32 bits).

        Args:
            label: streams of different labels differ.
            moving_on: draw from this stream, so that its next branch differs too.
        """
        start = self._get_state()
        if moving_on:
            torch.empty(1, dtype=torch.int64, device=self.home).random_(generator=self.generator)
        generator = torch.Generator(self.home)
        generator.manual_seed(_derived_seed(start, label))
        return NoiseStream(generator, self.home)

    def normals(
        self, wanted: Sequence[tuple[Sequence[int], torch.device, torch.dtype]], std: float
    ) -> list[Tensor]:
        """Independent draws from N(0, std^2), a tensor for each of `wanted`: `(shape, device, dtype)`.

        All small tensors are parts of one draw: launching takes longer than drawing. Where they lie on several devices, each of
        these draws all of it from the same state and takes its part, so that the numbers are those of one device. That takes
        devices that turn a state into the same numbers: on unlike ones each tensor is a draw of its own, or parts could repeat.

        Raises:
            RepeatedNoiseError: if an earlier call began at the same state; nothing was drawn.
        """
        if any(device.type == self.home.type and all(shape) for shape, device, _ in wanted):
            self._refuse_repeating()
        out: dict[int, Tensor] = {}
        small: dict[tuple[str, torch.dtype], list[int]] = {}
        alike = _draw_alike({_indexed(device) for _, device, _ in wanted})
        for i, (shape, device, dtype) in enumerate(wanted):
            if alike and math.prod(shape) <= _SMALL:
                small.setdefault((device.type, dtype), []).append(i)
            else:
                out[i] = self._draw(shape, std, device, dtype)
        for (_, dtype), members in small.items():
            sizes = [math.prod(wanted[i][0]) for i in members]
            drawn = self._on_each({_indexed(wanted[i][1]): None for i in members}, sum(sizes), std, dtype)
            parts = {device: block.split(sizes) for device, block in drawn.items()}
            for place, i in enumerate(members):
                shape, device, _ = wanted[i]
                out[i] = parts[_indexed(device)][place].view(tuple(shape))
        return [out[i] for i in range(len(wanted))]

    def _on_each(
        self, devices: Collection[torch.device], n: int, std: float, dtype: torch.dtype
    ) -> dict[torch.device, Tensor]:
        """The same `n` draws on each of `devices`, which are of one type."""
        found: dict[torch.device, Tensor] = {}
        stream, before = self, None
        for device in devices:
            if device.type != self.home.type:
                stream = self._child(device)
            if before is not None:
                stream._set_state(before)
            elif len(devices) > 1:
                before = stream._get_state()
            found[device] = stream._draw((n,), std, device, dtype)
        return found

    def _child(self, device: torch.device) -> NoiseStream:
        child = self._children.get(device.type)
        if child is None:
            generator = torch.Generator(device)
            generator.manual_seed(_derived_seed(self._get_state(), device.type))
            child = self._children[device.type] = NoiseStream(generator, device)
        return child

    def _get_state(self) -> Tensor:
        if self.generator is not None:
            return self.generator.get_state()
        if self.home.type == "cpu":
            return torch.get_rng_state()
        return torch.get_device_module(self.home).get_rng_state(self.home)

    def _set_state(self, state: Tensor) -> None:
        if self.generator is not None:
            self.generator.set_state(state)
        elif self.home.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(self.home).set_rng_state(state, self.home)

    def state_dict(self) -> dict[str, Tensor]:
        """States by device type, as byte tensors on the CPU; enough to continue the stream bit for bit."""
        states = {self.home.type: self._get_state().cpu().clone()}
        for child in self._children.values():
            states.update(child.state_dict())
        return states

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continue where `states` was taken; the devices' types must include the stream's own.

        Going back on purpose: what was drawn before is forgotten, and may be drawn again.
        """
        if self.home.type not in states:
            raise ValueError(
                f"the saved noise states are for {', '.join(states)}, this stream lives on {self.home.type}"
            )
        self._begun.clear()
        self._set_state(states[self.home.type].cpu())
        for device_type, state in states.items():
            if device_type != self.home.type:
                child = self._child(_indexed(torch.device(device_type)))
                child._set_state(state.cpu())


def _draw_alike(devices: Collection[torch.device]) -> bool:
    """Whether devices of one type among these give the same numbers from one state: GPUs of one model do."""
    models: dict[str, set[object]] = {}
    for device in devices:
        models.setdefault(device.type, set()).add(device)
    for device_type, same_type in models.items():
        if len(same_type) > 1:
            module = torch.get_device_module(device_type)
            known = [module.get_device_properties(device) for device in same_type]
            if len({(p.name, getattr(p, "multi_processor_count", None)) for p in known}) > 1:
                return False
    return True


def _indexed(device: torch.device) -> torch.device:
    """`cuda` means the current device; comparisons need its number."""
    if device.type == "cpu" or device.index is not None:
        return torch.device("cpu") if device.type == "cpu" else device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _derived_seed(state: Tensor, label: str) -> int:
    """A seed that depends on the whole state, taken without drawing from the stream or waiting for a device.

    Only 32 bits: a CPU generator ignores the rest.
    """
    digest = hashlib.sha256(label.encode() + bytes(state.cpu().numpy().tobytes())).digest()
    return int.from_bytes(digest[:4], "little")
