"""`DPRNN`, `DPGRU`, `DPLSTM`: torch's recurrent layers, built so that per-sample gradients can be taken.

Same arguments, outputs, gradients and state dicts as `nn.RNN`, `nn.GRU`, `nn.LSTM`.
"""

from __future__ import annotations

from typing import Any

from opacus.layers.dp_rnn_base import DPRNNBase
from opacus.layers.dp_rnn_cells import (
    RNN_CELL_TYPES,
    DPGRUCell,
    DPLSTMCell,
    DPRNNCell,
    DPRNNCellBase,
    RNNLinear,
)
from opacus.layers.packed_rows import apply_permutation

__all__ = [
    "DPGRU",
    "DPLSTM",
    "DPRNN",
    "RNN_CELL_TYPES",
    "DPGRUCell",
    "DPLSTMCell",
    "DPRNNBase",
    "DPRNNCell",
    "DPRNNCellBase",
    "RNNLinear",
    "apply_permutation",
]


class DPRNN(DPRNNBase):
    """`nn.RNN` whose per-sample gradients can be taken; arguments as there and in `DPRNNBase`.

    Example:
        >>> import torch
        >>> output, h = DPRNN(2, 3, num_layers=2)(torch.zeros(5, 4, 2))
        >>> output.shape, h.shape
        (torch.Size([5, 4, 3]), torch.Size([2, 4, 3]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity={nonlinearity!r}: an RNN takes 'tanh' or 'relu'")
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, bias, batch_first, dropout,
            bidirectional, proj_size, device=device, dtype=dtype,
        )  # fmt: skip
        self.nonlinearity = nonlinearity


class DPGRU(DPRNNBase):
    """`nn.GRU` whose per-sample gradients can be taken; arguments as there and in `DPRNNBase`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device=device, dtype=dtype,
        )  # fmt: skip


class DPLSTM(DPRNNBase):
    """`nn.LSTM` whose per-sample gradients can be taken; arguments as there and in `DPRNNBase`.

    Example:
        >>> import torch
        >>> output, (h, c) = DPLSTM(2, 3, batch_first=True, proj_size=1)(torch.zeros(4, 5, 2))
        >>> output.shape, h.shape, c.shape
        (torch.Size([4, 5, 1]), torch.Size([1, 4, 1]), torch.Size([1, 4, 3]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device=device, dtype=dtype,
        )  # fmt: skip
