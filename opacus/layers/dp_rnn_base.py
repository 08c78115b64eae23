"""`DPRNNBase`: runs a stack of recurrent cells over sequences.

One rule holds for every call of an `RNNLinear` in here: dimension 0 is the batch, whole and in the batch's own
order. Therefore

- the input product of a layer is one call over all steps, `[B, T, D]` (faster, and one capture in place of T);
  the recurrent product is one call a step, `[B, P]`;
- packed sequences are padded in the batch's order; a sample that has no step t keeps its state
  (`torch.where`), so its row gets a gradient of exactly zero from that step.

Shapes: B samples, T steps, D input features, H hidden features, P features of the recurrent output
(H, or `proj_size`), L layers times directions.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from opacus.layers.dp_rnn_cells import RNN_CELL_TYPES, DPLSTMCell, DPRNNCellBase
from opacus.layers.packed_rows import pack_rows, steps_taken, unpack_rows
from opacus.layers.param_rename import RenameParamsMixin

__all__ = ["DPRNNBase"]

# Optimizer states count parameters in this order.
_TORCH_ORDER = (("weight", "ih"), ("weight", "hh"), ("bias", "ih"), ("bias", "hh"), ("weight", "hr"))


class DPRNNBase(RenameParamsMixin, nn.Module):
    """A stack of recurrent cells; the three public layers choose the cell.

    Args:
        mode: a key of `RNN_CELL_TYPES`, or a cell class of your own.
        input_size: D.
        hidden_size: H.
        num_layers: number of layers.
        bias: whether cells have biases.
        batch_first: input and output are `[B, T, ...]` instead of `[T, B, ...]`. States never are.
        dropout: probability of dropping an output of each layer but the last, while training.
        bidirectional: add a second set of cells that runs from the last step to the first.
        proj_size: P, for an LSTM with a projection; 0 without.
        cell_params: further arguments of the cell.
        device, dtype: of the parameters.

    Raises:
        ValueError: an unknown mode, a dropout outside [0, 1], a size out of range, or a projection for a cell
            without one.
    """

    def __init__(
        self,
        mode: str | type[DPRNNCellBase],
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        cell_params: dict[str, Any] | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        cell_type, defaults = _cell_type(mode)
        problems = _problems(cell_type, hidden_size, num_layers, dropout, proj_size)
        if problems:
            raise ValueError(f"{type(self).__name__} cannot be built: " + "; ".join(problems))
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} has no effect with num_layers=1: it acts between layers", stacklevel=3
            )
        self.mode = mode
        self.cell_type = cell_type
        optional = {"proj_size": proj_size or None, "device": device, "dtype": dtype}
        given = {name: value for name, value in optional.items() if value is not None}
        self.cell_params = {**defaults, **(cell_params or {}), **given}
        self.has_cell_state = cell_type.has_cell_state
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size
        self.num_directions = 2 if bidirectional else 1
        self.initialize_cells()

    @property
    def cells(self) -> list[DPRNNCellBase]:
        """Cells in the order of the states: layer by layer, forward before reverse."""
        return [getattr(self, name) for name in self._cell_names()]

    def _cell_names(self) -> list[str]:
        suffixes = ["", "_reverse"][: self.num_directions]
        return [f"l{layer}{suffix}" for layer in range(self.num_layers) for suffix in suffixes]

    def initialize_cells(self) -> None:
        """Create the cells `l0`, `l0_reverse`, `l1`, ... and give their parameters torch's names."""
        output_size = (self.proj_size or self.hidden_size) * self.num_directions
        names: dict[str, str] = {}
        for index, cell_name in enumerate(self._cell_names()):
            size = self.input_size if index < self.num_directions else output_size
            cell = self.cell_type(size, self.hidden_size, self.bias, **self.cell_params)
            self.add_module(cell_name, cell)
            for kind, product in _TORCH_ORDER:
                if getattr(getattr(cell, product, None), kind, None) is not None:
                    names[f"{cell_name}.{product}.{kind}"] = f"{kind}_{product}_{cell_name}"
        self.set_rename_map(names)

    def iterate_layers(self, *args: Sequence[Any]) -> Iterator[tuple[int, Iterator[tuple[int, tuple]]]]:
        """Walk lists that hold one entry for each layer and direction.

        Args:
            *args: lists of length L, in the order of `cells`.

        Yields:
            The layer's number, and an iterator over (direction, entries of each list).
        """
        entries = list(zip(*args, strict=True))
        for layer in range(self.num_layers):
            first = layer * self.num_directions
            yield layer, enumerate(entries[first : first + self.num_directions])

    def forward(
        self, input: Tensor | PackedSequence, state_init: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor | tuple[Tensor, Tensor]]:
        """Run the sequences through all layers.

        Args:
            input: `[T, B, D]`, `[B, T, D]` with `batch_first`, one sequence `[T, D]`, or a `PackedSequence`.
            state_init: initial hidden state `[L, B, P]`, for an LSTM with the cell state `[L, B, H]`; in the
                batch's order, packed or not; without B for one sequence. Zeros by default.

        Returns:
            The last layer's outputs, laid out like `input` with P times directions features, and the final state,
            shaped like `state_init`: `h`, for an LSTM `(h, c)`. A sample's final state is that of its own
            last step.

        Raises:
            ValueError: input or state of the wrong shape, or sequences without a step.
        """
        single = isinstance(input, Tensor) and input.dim() == 2
        x_BTD, taken_TB = self._rows(input)
        states = self._states(x_BTD, state_init, single)
        rows, steps = x_BTD.shape[:2]
        finals = []
        for layer, directions in self.iterate_layers(self.cells, *states):
            outputs = []
            for direction, (cell, h_0, c_0) in directions:
                output, h_n, c_n = self.forward_layer(
                    x_BTD, h_0, c_0, taken_TB, cell, rows, steps, taken_TB is not None, direction == 1
                )
                outputs.append(output)
                finals.append((h_n,) if c_n is None else (h_n, c_n))
            x_BTD = torch.cat([output.to(outputs[0].device) for output in outputs], dim=-1)
            if self.dropout and layer < self.num_layers - 1:
                x_BTD = functional.dropout(x_BTD, self.dropout, self.training)
        state = [torch.stack([h_n.to(x_BTD.device) for h_n in parts]) for parts in zip(*finals, strict=True)]
        result: Tensor | PackedSequence
        if isinstance(input, PackedSequence):
            result = pack_rows(x_BTD, like=input)
        elif single:
            result, state = x_BTD.squeeze(0), [part.squeeze(1) for part in state]
        else:
            result = x_BTD if self.batch_first else x_BTD.transpose(0, 1)
        return result, (state[0], state[1]) if self.has_cell_state else state[0]

    def forward_layer(
        self,
        x: Tensor,
        h_0: Tensor,
        c_0: Tensor | None,
        batch_sizes: Tensor | None,
        cell: DPRNNCellBase,
        max_batch_size: int,
        seq_length: int,
        is_packed: bool,
        reverse_layer: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run one cell over all steps.

        Args:
            x: `[B, T, D]`, whatever `batch_first` says.
            h_0: `[B, P]`.
            c_0: `[B, H]`; None for a cell without a cell state.
            batch_sizes: with `is_packed`, which rows take step t, `[T, B]` bool; or how many, `[T]`,
                where rows are sorted by length.
            cell: the cell to run.
            max_batch_size: B.
            seq_length: T.
            is_packed: whether some rows have fewer than T steps.
            reverse_layer: run from step T-1 to step 0.

        Returns:
            Outputs `[B, T, P]` (a row without a step t repeats its state there), and each row's final h and c.
        """
        cell.set_max_batch_length(max_batch_size)
        gates = cell.ih(x).unbind(1)
        state = tuple(part.to(gates[0].device) for part in (h_0, c_0) if part is not None)
        taken_TB1 = None
        if is_packed and batch_sizes is not None:
            taken = steps_taken(batch_sizes) if batch_sizes.dim() == 1 else batch_sizes
            taken_TB1 = taken.to(gates[0].device).unsqueeze(-1)
        outputs: list[Any] = [None] * seq_length
        for t in reversed(range(seq_length)) if reverse_layer else range(seq_length):
            advanced = cell.step(gates[t], state)
            if taken_TB1 is not None:
                advanced = tuple(
                    torch.where(taken_TB1[t], new, kept) for new, kept in zip(advanced, state, strict=True)
                )
            state = advanced
            outputs[t] = state[0]
        return torch.stack(outputs, dim=1), state[0], state[1] if self.has_cell_state else None

    def flatten_parameters(self) -> None:
        """Nothing to do: there is no fused buffer. Scripts written for torch's layers call it."""

    def _rows(self, input: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
        taken_TB = None
        if isinstance(input, PackedSequence):
            x_BTD, taken_TB = unpack_rows(input)
        elif input.dim() == 2:
            x_BTD = input.unsqueeze(0)
        elif input.dim() == 3:
            x_BTD = input if self.batch_first else input.transpose(0, 1)
        else:
            raise ValueError(f"{type(self).__name__}: input has {input.dim()} dimensions, expected 2 or 3")
        if x_BTD.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: input has {x_BTD.shape[-1]} features, input_size={self.input_size}"
            )
        if x_BTD.shape[1] == 0:
            raise ValueError(f"{type(self).__name__}: sequences need at least one step")
        return x_BTD, taken_TB

    def _states(
        self, x_BTD: Tensor, state_init: Any, single: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        cells = self.cells
        if state_init is None:
            zeros = [cell.initial_state(x_BTD) for cell in cells]
            return [state[0] for state in zeros], [state[1] if len(state) == 2 else None for state in zeros]
        given = tuple(state_init) if self.has_cell_state else (state_init,)
        if single:
            given = tuple(part.unsqueeze(1) for part in given)
        sizes = (self.proj_size or self.hidden_size, self.hidden_size)
        for name, part, size in zip(("hidden", "cell"), given, sizes, strict=False):
            wanted = (len(cells), x_BTD.shape[0], size)
            if tuple(part.shape) != wanted:
                raise ValueError(
                    f"{type(self).__name__}: {name} state has shape {tuple(part.shape)}, expected {wanted}"
                )
        return given[0], given[1] if self.has_cell_state else [None] * len(cells)

    def extra_repr(self) -> str:
        shown = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        changed = [
            f"{name}={getattr(self, name)}"
            for name, usual in (*shown.items(), ("proj_size", 0))
            if getattr(self, name) != usual
        ]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])


def _cell_type(mode: str | type[DPRNNCellBase]) -> tuple[type[DPRNNCellBase], dict[str, Any]]:
    if isinstance(mode, str):
        if mode not in RNN_CELL_TYPES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(RNN_CELL_TYPES)}, or a cell class")
        return RNN_CELL_TYPES[mode]
    return mode, {}


def _problems(
    cell_type: type[DPRNNCellBase], hidden_size: int, num_layers: int, dropout: float, proj_size: int
) -> list[str]:
    problems = []
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Number) or not 0 <= dropout <= 1:
        problems.append(f"dropout={dropout!r} is no probability between 0 and 1")
    if hidden_size <= 0 or num_layers <= 0:
        problems.append(f"hidden_size={hidden_size} and num_layers={num_layers} must be positive")
    if proj_size and not issubclass(cell_type, DPLSTMCell):
        problems.append(f"proj_size={proj_size}: only an LSTM has a projection")
    elif not 0 <= proj_size < hidden_size:
        problems.append(f"proj_size={proj_size} must lie between 0 and hidden_size={hidden_size}, exclusive")
    return problems
