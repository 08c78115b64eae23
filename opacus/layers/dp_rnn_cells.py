"""One step of an RNN, a GRU or an LSTM, with every parameter in an `RNNLinear`.

Equations and gate order are those of `torch.nn.RNN`, `GRU` and `LSTM`.

Shapes: B samples (always dimension 0, in the batch's order), T steps, D input features, H hidden
features, P features of the recurrent output (H, or `proj_size` with an LSTM projection), G gates times H.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RNN_CELL_TYPES", "DPGRUCell", "DPLSTMCell", "DPRNNCell", "DPRNNCellBase", "RNNLinear"]


class RNNLinear(nn.Linear):
    """A linear layer inside a recurrent cell: dimension 0 of what it sees is the batch.

    It may be called once for a whole sequence (`[B, T, D]`) or once a step (`[B, H]`), several times a
    forward; a sample's gradient is the sum over calls. `max_batch_len` is the number of samples of the current
    forward. Whoever captures per-sample gradients reads from it that dimension 0 holds the samples,
    even where the rest of the model is laid out time first, and that missing rows have no gradient.

    Args:
        in_features: size of each input vector.
        out_features: size of each output vector.
        bias: whether a bias is added.
    """

    max_batch_len: int | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)


class DPRNNCellBase(nn.Module):
    """What the three cells share: an input product, a recurrent product, and their initial values.

    A cell defines `step(gates_BG, state) -> state`, where a state is `(h,)` or `(h, c)`.

    Args:
        input_size: D.
        hidden_size: H.
        bias: whether both products have a bias.
        num_chunks: number of gates: 1 (RNN), 3 (GRU), 4 (LSTM).
        proj_size: P of an LSTM with a projection; 0 without.
        device, dtype: of the parameters.
    """

    has_cell_state: bool = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        num_chunks: int,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias
        self.proj_size = proj_size
        gates = num_chunks * hidden_size
        self.ih = RNNLinear(input_size, gates, bias, device, dtype)
        self.hh = RNNLinear(proj_size or hidden_size, gates, bias, device, dtype)
        if proj_size:
            self.hr = RNNLinear(hidden_size, proj_size, False, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter from U(-1/sqrt(H), 1/sqrt(H)), as torch's recurrent layers do."""
        bound = 1.0 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def set_max_batch_length(self, max_batch_length: int) -> None:
        """Tell the cell's layers how many samples the current forward has."""
        for layer in self.children():
            if isinstance(layer, RNNLinear):
                layer.max_batch_len = max_batch_length

    def step(self, gates_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Advance by one step, given the input's product `ih(x)`."""
        raise NotImplementedError(f"{type(self).__name__} must define step(gates, state)")

    def initial_state(self, input: Tensor) -> tuple[Tensor, ...]:
        """Zeros for every row of `input`: `(h,)`, or `(h, c)` where the cell has one."""
        h_BP = input.new_zeros(input.shape[0], self.proj_size or self.hidden_size)
        return (h_BP, input.new_zeros(input.shape[0], self.hidden_size)) if self.has_cell_state else (h_BP,)

    def _advance(
        self, input: Tensor, state: tuple[Tensor, ...] | None, batch_size_t: int | None
    ) -> tuple[Tensor, ...]:
        state = self.initial_state(input) if state is None else state
        self.set_max_batch_length(state[0].shape[0])
        if batch_size_t is not None:
            input, state = input[:batch_size_t], tuple(part[:batch_size_t] for part in state)
        return self.step(self.ih(input), state)


class DPRNNCell(DPRNNCellBase):
    """`h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`, or relu.

    Args:
        input_size, hidden_size, bias: see `DPRNNCellBase`.
        nonlinearity: `"tanh"` or `"relu"`.

    Raises:
        ValueError: another nonlinearity.

    Example:
        >>> DPRNNCell(2, 3, bias=True)(torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity={nonlinearity!r}: an RNN takes 'tanh' or 'relu'")
        super().__init__(input_size, hidden_size, bias, num_chunks=1, device=device, dtype=dtype)
        self.nonlinearity = nonlinearity

    def step(self, gates_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = gates_BG + self.hh(state[0])
        return (torch.tanh(total) if self.nonlinearity == "tanh" else torch.relu(total),)

    def forward(self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None) -> Tensor:
        """One step.

        Args:
            input: `[B, D]`.
            hx: hidden state `[B, H]`; zeros by default.
            batch_size_t: only the first that many rows take the step (sequences sorted by length).

        Returns:
            The new hidden state of the rows that took the step, `[B, H]` or `[batch_size_t, H]`.
        """
        return self._advance(input, None if hx is None else (hx,), batch_size_t)[0]


class DPGRUCell(DPRNNCellBase):
    """Gated recurrent unit: `h' = (1 - z) n + z h`, `n = tanh(W_in x + b_in + r (W_hn h + b_hn))`.

    Args:
        input_size, hidden_size, bias: see `DPRNNCellBase`.
    """

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, num_chunks=3, device=device, dtype=dtype)

    def step(self, gates_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (h_BP,) = state
        x_reset, x_update, x_new = gates_BG.chunk(3, dim=-1)
        h_reset, h_update, h_new = self.hh(h_BP).chunk(3, dim=-1)
        reset = torch.sigmoid(x_reset + h_reset)
        update = torch.sigmoid(x_update + h_update)
        new = torch.tanh(x_new + reset * h_new)
        return (new + update * (h_BP - new),)

    def forward(self, input: Tensor, hx: Tensor | None = None, batch_size_t: int | None = None) -> Tensor:
        """One step; arguments and result as for `DPRNNCell.forward`."""
        return self._advance(input, None if hx is None else (hx,), batch_size_t)[0]


class DPLSTMCell(DPRNNCellBase):
    """Long short-term memory: `c' = f c + i g`, `h' = o tanh(c')`, projected by `hr` where `proj_size` is set.

    Args:
        input_size, hidden_size, bias, proj_size: see `DPRNNCellBase`.
    """

    has_cell_state = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, 4, proj_size, device, dtype)

    def step(self, gates_BG: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h_BP, c_BH = state
        enter, forget, new, out = (gates_BG + self.hh(h_BP)).chunk(4, dim=-1)
        c_BH = torch.sigmoid(forget) * c_BH + torch.sigmoid(enter) * torch.tanh(new)
        h_BP = torch.sigmoid(out) * torch.tanh(c_BH)
        return (self.hr(h_BP) if self.proj_size else h_BP), c_BH

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, batch_size_t: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            input: `[B, D]`.
            hx: hidden state `[B, P]` and cell state `[B, H]`; zeros by default.
            batch_size_t: only the first that many rows take the step (sequences sorted by length).

        Returns:
            The new hidden and cell state of the rows that took the step.
        """
        h_BP, c_BH = self._advance(input, hx, batch_size_t)
        return h_BP, c_BH


RNN_CELL_TYPES: dict[str, tuple[type[DPRNNCellBase], dict[str, Any]]] = {
    **{f"RNN_{name.upper()}": (DPRNNCell, {"nonlinearity": name}) for name in ("tanh", "relu")},
    "GRU": (DPGRUCell, {}),
    "LSTM": (DPLSTMCell, {}),
}
