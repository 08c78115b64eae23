"""Ghost or instantiate: which way a matrix-product layer's per-sample gradients take through the backward.

Instantiating forms `[B, P, D]` once: one product, `B P D` numbers to keep, and norm and clipped sum are then reads of
them. The ghost route keeps activations and backprops, `B T (D + P)` numbers, takes the norm from two `T x T` Gram matrices,
`B T^2 (D + P)` multiplications, and forms the clipped sum by a second product of `B T P D`.

    multiplications saved by instantiating:  T^2 (D + P)       (the Gram matrices)
    numbers kept in place of the pair:       P D - T (D + P)

So with `P D <= T (D + P)` instantiating is both faster and smaller (always so for LoRA matrices). Beyond, it costs memory;
a budget of extra bytes may be spent on it as long as the Gram matrices cost at least half of what the product does.
"""

from __future__ import annotations

__all__ = ["Route"]


class Route:
    """Chooses for each call, from its actual sizes, and keeps the budget of one physical batch.

    Args:
        budget: extra bytes that instantiated gradients may take beyond the pairs they replace.
        always_instantiate: for modes whose result is the per-sample gradient itself.

    Example:
        >>> Route().instantiates(batch=8, positions=512, d_in=2048, p_out=16, pair_bytes=2)  # LoRA
        True
        >>> Route().instantiates(batch=8, positions=512, d_in=4096, p_out=4096, pair_bytes=2)
        False
        >>> Route().instantiates(batch=8, positions=1, d_in=64, p_out=64, pair_bytes=4)  # the norm is |a| |g|
        False
    """

    ROW_BYTES = 4  # instantiated gradients are kept in float32 at least

    def __init__(self, *, budget: int = 0, always_instantiate: bool = False) -> None:
        self.budget = budget
        self.always_instantiate = always_instantiate

    def instantiates(self, *, batch: int, positions: int, d_in: int, p_out: int, pair_bytes: int) -> bool:
        """Whether this call is instantiated; takes what that costs from the budget.

        Args:
            batch: samples times groups. positions: T. d_in: D. p_out: P. pair_bytes: bytes of a number of the pair.
        """
        if self.always_instantiate:
            return True
        by_pair = positions * (d_in + p_out) * pair_bytes
        by_rows = p_out * d_in * max(self.ROW_BYTES, pair_bytes)
        if by_rows <= by_pair:
            return True
        extra = batch * (by_rows - by_pair)
        if 2 * positions * (d_in + p_out) < p_out * d_in or extra > self.budget:
            return False
        self.budget -= extra
        return True
