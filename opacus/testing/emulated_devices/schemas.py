"""What the fallback kernel must know of an operator, read once from its schema."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["OpFacts", "Return", "facts_of"]

# Not tagged `pointwise`, yet CUDA accepts a 0-dim CPU tensor there.
_SCALAR_FRIENDLY = frozenset(
    [
        *("fill_", "masked_fill_", "masked_fill", "where", "index_fill_"),
        *("index_put_", "_index_put_impl_", "lerp", "lerp_"),
        "_amp_foreach_non_finite_check_and_unscale_",
    ]
)
# CUDA accepts index tensors that lie on the CPU there.
_TAKES_INDICES = frozenset(["index", "index_put_", "_index_put_impl_", "_unsafe_index"])


class Return(NamedTuple):
    """One returned tensor: the argument it aliases (position and name, None for fresh memory), and whether
    that argument was written and is therefore itself returned."""

    source: tuple[int, str] | None
    written: bool


class OpFacts(NamedTuple):
    """Facts about one operator overload.

    Attributes:
        name: operator name without namespace and overload.
        returns: how each returned value relates to the arguments.
        scalar_friendly: whether 0-dim CPU tensors are welcome.
        takes_indices: whether CPU index tensors are welcome in its lists.
        writes_by_index: whether they say where to write.
        random: whether it draws random numbers.
        takes_generator: whether it has a `generator` parameter.
        writes: whether it writes into an argument.
        waits: whether the host must wait for a value or a shape; for indexing, only if an index is boolean.
        tensor_positions: positions of the parameters that are single tensors.
    """

    name: str
    returns: list[Return]
    scalar_friendly: bool
    takes_indices: bool
    writes_by_index: bool
    random: bool
    takes_generator: bool
    writes: bool
    waits: bool
    tensor_positions: frozenset[int]


_known: dict[torch._ops.OpOverload, OpFacts] = {}


def facts_of(op: torch._ops.OpOverload) -> OpFacts:
    """The facts about `op`; worked out on first use."""
    facts = _known.get(op)
    if facts is None:
        facts = _known[op] = _read(op)
    return facts


def _read(op: torch._ops.OpOverload) -> OpFacts:
    schema = op._schema
    namespace, name = schema.name.split("::")
    arguments = schema.arguments
    value_tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return OpFacts(
        name=name,
        returns=[_return(value, arguments) for value in schema.returns],
        scalar_friendly=name in _SCALAR_FRIENDLY or (namespace == "aten" and _any_overload_pointwise(name)),
        takes_indices=name in _TAKES_INDICES,
        writes_by_index=name in _TAKES_INDICES and "put" in name,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        takes_generator=any(argument.name == "generator" for argument in arguments),
        writes=any(_is_written(argument) for argument in arguments),
        waits=bool(value_tags & set(op.tags)),
        tensor_positions=frozenset(
            position
            for position, argument in enumerate(arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        ),
    )


def _return(value: torch.Argument, arguments: list[torch.Argument]) -> Return:
    if value.alias_info is None:
        return Return(None, False)
    source = None
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & value.alias_info.before_set:
            source = (position, argument.name)
    return Return(source, value.alias_info.is_write)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _any_overload_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )
