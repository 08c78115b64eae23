"""One kernel for every operator: check the devices, run the CPU kernel on the same memory, relabel the results.

PyTorch's own C++ code runs before it (autograd, views, version counters, shape checks, most of the "same
device" checks), so errors read as they do on a GPU. What is special about an operator stands in its schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from opacus.testing.emulated_devices.copies import record
from opacus.testing.emulated_devices.generators import emulated_generator, using_default_stream
from opacus.testing.emulated_devices.relabel import CPU, CPU_KEYS, to_device, to_host
from opacus.testing.emulated_devices.schemas import OpFacts, Return, facts_of
from opacus.testing.emulated_devices.state import state

__all__ = ["fallback", "rebase"]

_as_strided = torch.ops.aten.as_strided.default
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset


class _Call:
    """One operator call on its way to the CPU kernel and back.

    No function in here calls itself through a closure: such a cycle would keep the arguments alive until the
    garbage collector runs, and PyTorch asks for use counts.
    """

    __slots__ = ("cpu_operand", "facts", "generator", "hosts", "index", "masked", "wanted")

    def __init__(self, facts: OpFacts) -> None:
        self.facts = facts
        self.index: int | None = None  # the device all arguments share
        self.wanted: torch.device | None = None  # the `device=` argument of a factory
        self.hosts: list[tuple[Tensor, Tensor]] = []  # (CPU alias, argument)
        self.cpu_operand = False
        self.generator: torch.Generator | None = None
        self.masked = False  # an index is boolean

    def to_host(self, value: Any) -> Any:
        """`value` as the CPU kernel may see it."""
        if isinstance(value, Tensor):
            return self._tensor_to_host(value)
        if type(value) in (list, tuple):
            if self.facts.takes_indices:
                return [self._index_to_host(item) for item in value]
            return [self.to_host(item) for item in value]
        if isinstance(value, torch.device):
            self.wanted = value
            return CPU
        if isinstance(value, torch._C.Generator):
            self.generator = emulated_generator(value)
        return value

    def _tensor_to_host(self, tensor: Tensor) -> Tensor:
        device = tensor.device
        if device.type != state.name:
            if tensor.dim() or not self.facts.scalar_friendly:
                self.cpu_operand = True
            else:
                record(device, state.name, tensor, "implicit")
            return tensor
        if self.index is None:
            self.index = device.index
        elif self.index != device.index:
            self._refuse_mixture(device)
        # An empty `out=` is there to be resized, which an alias cannot be.
        replace = self.facts.writes and not tensor.numel()
        host = torch.empty(tensor.shape, dtype=tensor.dtype) if replace else to_host(tensor)
        self.hosts.append((host, tensor))
        return host

    def _index_to_host(self, index: Tensor | None) -> Tensor | None:
        if index is None:
            return None
        if index.device.type == "cpu":
            if self.facts.writes_by_index:  # to read by it, PyTorch has copied it already
                record("cpu", state.name, index, "implicit")
            return index
        self.masked = self.masked or index.dtype in (torch.bool, torch.uint8)
        return self._tensor_to_host(index)

    def _refuse_mixture(self, other: object) -> NoReturn:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{state.name}:{self.index} and {other}! "
            f"(when checking arguments in method wrapper_{state.name}_{self.facts.name})"
        )

    def as_tensor(self, number: complex) -> Tensor:
        """The 3 of ``t % 3``: C++ made it a 0-dim tensor, which reaches Python as a bare number."""
        dtype = None
        if isinstance(number, bool):
            dtype = torch.bool
        elif isinstance(number, int):
            dtype = torch.int64
        elif isinstance(number, float):
            dtype = next((host.dtype for host, _ in self.hosts if host.is_floating_point()), None)
        return torch.scalar_tensor(number, dtype=dtype)

    def settle_device(self) -> bool:
        """Decide which device runs this call; False if it is none of ours."""
        if self.index is None:
            if self.wanted is not None and self.wanted.type != state.name:
                return False
            self.index = state.index(self.wanted)
        elif self.cpu_operand:
            self._refuse_mixture("cpu")
        if self.generator is not None and self.generator.device.index != self.index:
            raise RuntimeError(
                f"Expected a '{state.name}:{self.index}' generator but found '{self.generator.device}'"
            )
        return True

    def to_device(self, result: Any, how: Return, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`result` of the CPU kernel, on the call's device."""
        if type(result) in (list, tuple):
            return [self.to_device(item, how, args, kwargs) for item in result]
        if not isinstance(result, Tensor):
            return result
        if how.source is not None:
            position, name = how.source
            base = kwargs[name] if name in kwargs else args[position]
            if how.written:
                return base
            offset = base.storage_offset() + result.storage_offset()
            return _as_strided.redispatch(CPU_KEYS, base, result.shape, result.stride(), offset)
        for host, argument in self.hosts:
            if host is result:
                return argument
        assert self.index is not None
        return to_device(result, self.index)

    def host_waits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the host would have to learn a value or a shape from the device."""
        if self.facts.takes_indices:
            # A mask becomes positions, whose number the host must learn. Reading by mask has passed `nonzero`
            # before it came here. `x[mask] = number` is a masked fill on a GPU, which waits for nothing.
            return self.masked and self.facts.writes_by_index and args[2].numel() > 1
        # repeat_interleave(output_size=n) is told the shape it would wait for.
        return self.facts.waits and bool(self.hosts) and kwargs.get("output_size") is None

    def adopt_resized(self) -> None:
        """Point each `out=` that the CPU kernel had to fill elsewhere at that memory."""
        assert self.index is not None
        for host, argument in self.hosts:
            if host.data_ptr() != argument.data_ptr() or host.shape != argument.shape:
                rebase(argument, to_device(host, self.index))


def rebase(tensor: Tensor, onto: Tensor) -> Tensor:
    """Make `tensor` a view of all of `onto`: its storage, shape and strides."""
    return _set_storage.redispatch(
        CPU_KEYS, tensor, onto.untyped_storage(), onto.storage_offset(), onto.shape, onto.stride()
    )


def fallback(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the emulated device its arguments share.

    Raises:
        RuntimeError: the arguments lie on different devices, or a generator on another device than they.
    """
    facts = facts_of(op)
    call = _Call(facts)
    host_args = [call.to_host(value) for value in args]
    host_kwargs = {name: call.to_host(value) for name, value in kwargs.items()}
    for position in facts.tensor_positions:
        if position < len(host_args) and type(host_args[position]) in (int, float, bool, complex):
            host_args[position] = call.as_tensor(host_args[position])
    if not call.settle_device():
        return op(*args, **kwargs)
    assert call.index is not None

    if facts.takes_generator and call.generator is None:
        host_kwargs["generator"] = state.generators[call.index]
    if facts.random and not facts.takes_generator:
        with using_default_stream(call.index):
            out = op(*host_args, **host_kwargs)
    else:
        out = op(*host_args, **host_kwargs)

    if call.host_waits(args, kwargs):
        record(call.hosts[0][1].device, "cpu", call.hosts[0][1], "sync")
    if facts.writes:
        call.adopt_resized()
    if len(facts.returns) == 1:
        return call.to_device(out, facts.returns[0], args, kwargs)
    if not facts.returns:
        return None
    return tuple(
        call.to_device(value, how, args, kwargs) for value, how in zip(out, facts.returns, strict=True)
    )
