"""`DPMultiheadAttention`: `nn.MultiheadAttention`, built so that per-sample gradients can be taken.

Each projection is a layer of its own. All of them see `[B, T, E]`, whatever `batch_first` says, and carry
`max_batch_len` to say so (see `RNNLinear`): a model laid out time first and one laid out batch first both
get the gradient of each sample.

Shapes: B samples, T queries, S keys, E features, N heads, H = E / N features of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from opacus.layers.attention_masks import merged_mask
from opacus.layers.attention_state import from_torch_names, to_torch_names

__all__ = ["DPMultiheadAttention", "SequenceBias"]


class SequenceBias(nn.Module):
    """Append one learned vector to the end of every sequence (`bias_k`, `bias_v` of `nn.MultiheadAttention`).

    Args:
        embed_dim: E.
        batch_first: sequences are `[B, S, E]` instead of `[S, B, E]`.
        device, dtype: of the vector.

    Example:
        >>> SequenceBias(4)(torch.zeros(3, 2, 4)).shape  # [S, B, E] -> [S + 1, B, E]
        torch.Size([4, 2, 4])
        >>> SequenceBias(4, batch_first=True)(torch.zeros(3, 2, 4)).shape  # [B, S, E] -> [B, S + 1, E]
        torch.Size([3, 3, 4])
    """

    max_batch_len: int | None = None

    def __init__(
        self, embed_dim: int, batch_first: bool = False, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from N(0, 1)."""
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Append the vector.

        Args:
            x: `[S, B, E]`, or `[B, S, E]` with `batch_first`.

        Returns:
            `[S + 1, B, E]`, or `[B, S + 1, E]`; the vector is last.
        """
        first, second, _ = x.shape
        if self.batch_first:
            return torch.cat([x, self.bias.expand(first, 1, -1)], dim=1)
        return torch.cat([x, self.bias.expand(1, second, -1)], dim=0)

    def extra_repr(self) -> str:
        return f"{self.bias.numel()}, batch_first={self.batch_first}"


class DPMultiheadAttention(nn.Module):
    """Attention of Vaswani et al. (2017); same values, gradients and state dict as `nn.MultiheadAttention`.

    Initial values are those of `nn.Linear` and `SequenceBias`, as in Opacus; torch's layer draws wider weights and
    starts its biases at zero.

    Args:
        embed_dim: E, of queries and of the result.
        num_heads: N, a divisor of E.
        dropout: probability of dropping an attention weight, while training.
        bias: whether projections have a bias.
        add_bias_kv: append a learned vector to keys and to values.
        add_zero_attn: append a zero vector to keys and to values.
        kdim, vdim: features of keys and values; E by default.
        batch_first: queries, keys, values and the result are `[B, T, E]` instead of `[T, B, E]`.
        device, dtype: of the parameters.

    Raises:
        ValueError: `embed_dim` is not a positive multiple of `num_heads`, or dropout lies outside [0, 1].

    Example:
        >>> attention = DPMultiheadAttention(4, 2, batch_first=True)
        >>> x = torch.zeros(3, 5, 4)
        >>> result, weights = attention(x, x, x)
        >>> result.shape, weights.shape
        (torch.Size([3, 5, 4]), torch.Size([3, 5, 5]))
    """

    # nn.TransformerEncoderLayer asks for these before its fused inference path, which would go past the layers
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first
        made = {"device": device, "dtype": dtype}
        self.qlinear = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.klinear = nn.Linear(self.kdim, embed_dim, bias, **made)
        self.vlinear = nn.Linear(self.vdim, embed_dim, bias, **made)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)
        self.seq_bias_k = SequenceBias(embed_dim, batch_first=True, **made) if add_bias_kv else None
        self.seq_bias_v = SequenceBias(embed_dim, batch_first=True, **made) if add_bias_kv else None
        self.dropout = nn.Dropout(dropout)
        self._register_state_dict_hook(_to_torch_names)  # first, so that other hooks see torch's names

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: `[T, B, E]`, `[B, T, E]` with `batch_first`, or one sequence `[T, E]`.
            key: likewise with S and `kdim`.
            value: likewise with S and `vdim`.
            key_padding_mask: `[B, S]` (`[S]` for one sequence): True, or -inf, for keys to leave out; floats are
                added to the scores.
            need_weights: return the weights too (slower and larger: no fused kernel).
            attn_mask: `[T, S]` or `[B * N, T, S]`, of the same two kinds.
            is_causal: a hint that `attn_mask` is the causal mask; the mask itself is what is applied.
            average_attn_weights: average the returned weights over heads.

        Returns:
            The result, laid out like `query`, and the weights `[B, T, S]` (`[B, N, T, S]` when not averaged; without
            B for one sequence; S counts appended keys), or None.

        Raises:
            ValueError: shapes that do not fit, or `is_causal` without `attn_mask`.
        """
        single = query.dim() == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        self._check(query, key, value, is_causal and attn_mask is None)
        for layer in self.children():
            if not isinstance(layer, nn.Dropout):
                layer.max_batch_len = query.shape[0]  # type: ignore[assignment]

        q_BTE, k_BSE, v_BSE = self.qlinear(query), self.klinear(key), self.vlinear(value)
        if self.seq_bias_k is not None and self.seq_bias_v is not None:
            k_BSE, v_BSE = self.seq_bias_k(k_BSE), self.seq_bias_v(v_BSE)
        if self.add_zero_attn:
            k_BSE, v_BSE = functional.pad(k_BSE, (0, 0, 0, 1)), functional.pad(v_BSE, (0, 0, 0, 1))
        q_BNTH, k_BNSH, v_BNSH = (self._heads(x) for x in (q_BTE, k_BSE, v_BSE))
        mask = merged_mask(attn_mask, key_padding_mask, self.num_heads, q_BNTH, key.shape[1], k_BNSH.shape[2])

        dropout = self.dropout.p if self.dropout.training else 0.0
        weights_BNTS = None
        if need_weights:
            scores_BNTS = (q_BNTH * math.sqrt(1 / self.head_dim)) @ k_BNSH.transpose(-2, -1)
            weights_BNTS = functional.softmax(scores_BNTS if mask is None else scores_BNTS + mask, dim=-1)
            weights_BNTS = functional.dropout(weights_BNTS, dropout)
            heads_BNTH = weights_BNTS @ v_BNSH
        else:
            heads_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, mask, dropout)
        result = self.out_proj(heads_BNTH.transpose(1, 2).flatten(2))

        if weights_BNTS is not None and average_attn_weights:
            weights_BNTS = weights_BNTS.mean(dim=1)
        if single:
            return result.squeeze(0), None if weights_BNTS is None else weights_BNTS.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights_BNTS

    def _heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _check(self, query: Tensor, key: Tensor, value: Tensor, hint_without_mask: bool) -> None:
        problems = []
        for name, x, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if x.dim() != 3:
                problems.append(f"{name} and the others must all have 2 or all have 3 dimensions")
            elif x.shape[-1] != size:
                problems.append(f"{name} has {x.shape[-1]} features, expected {size}")
        if key.shape[:2] != value.shape[:2]:
            problems.append("key and value differ in length or batch size")
        if key.shape[0] != query.shape[0]:
            problems.append(f"query has {query.shape[0]} samples, key has {key.shape[0]}")
        if hint_without_mask:
            problems.append("is_causal=True is a hint about attn_mask: pass the mask too")
        if problems:
            raise ValueError("DPMultiheadAttention: " + "; ".join(dict.fromkeys(problems)))

    def unsqueeze_0_2(self, t: Tensor) -> Tensor:
        """Give a mask dimensions for samples and heads: `[T, S]` -> `[1, 1, T, S]`."""
        return t.unsqueeze(0).unsqueeze(0)

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """State under the names of `nn.MultiheadAttention`, which loads it; as `nn.Module.state_dict` otherwise.

        The stacked `in_proj_weight` and `in_proj_bias` are copies of this layer's parameters.
        """
        into: Any = destination  # None makes a new one
        return super().state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        from_torch_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _to_torch_names(
    layer: DPMultiheadAttention, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    to_torch_names(state_dict, prefix, packed=layer.kdim == layer.vdim == layer.embed_dim)
