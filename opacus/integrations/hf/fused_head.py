"""TRL's fused language-model head, where the head trains: go through the head's own call.

SFT, DPO and KTO trainers replace the model's forward by one that multiplies with `lm_head.weight` directly, in tiles. A
weight that trains would there be used outside its layer, unseen and unclipped. Such a head is called as a layer
again; the logits this needs are `[rows, T, vocabulary]`. A frozen head keeps TRL's path.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from opacus.integrations.hf.contract import IGNORED

__all__ = ["WholeHead"]


class WholeHead:
    """Lets a causal model with TRL's fused head run its head as a layer while the head trains.

    Args:
        model: the base model, as the trainer has patched it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active = True
        self._fused = model.forward

        @functools.wraps(type(model).forward)  # generation checks its arguments against this signature
        def forward(
            model: nn.Module, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any
        ) -> Any:
            if labels is not None:
                kwargs["labels"] = labels
            if fused_lm_head and self.active and torch.is_grad_enabled() and _head_trains(model):
                return self._whole(*args, **kwargs)
            return self._fused(*args, fused_lm_head=fused_lm_head, **kwargs)

        self._whole_forward = forward
        model.forward = types.MethodType(forward, model)

    @staticmethod
    def is_fused(model: nn.Module) -> bool:
        """Whether TRL has patched `model`'s forward."""
        function = getattr(model.forward, "__func__", model.forward)
        code = getattr(function, "__code__", None)
        return (
            code is not None
            and "fused_lm_head" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        )

    def remove(self) -> None:
        """Go back to TRL's forward."""
        self.active = False  # Accelerate may have wrapped this forward since
        if getattr(self.model.forward, "__func__", None) is self._whole_forward:
            self.model.forward = self._fused

    def _whole(
        self,
        *args: Any,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        from trl.trainer.utils import FusedCausalLMOutput

        kwargs["use_cache"] = False
        logits_RTV = self._fused(*args, **kwargs).logits
        if shift_labels is None:
            logits_RTV, labels_RT = logits_RTV[:, :-1], labels[:, 1:]
        else:
            labels_RT = shift_labels
        logits_RTV, labels_RT = logits_RTV.float(), labels_RT.to(logits_RTV.device)
        mask_RT = labels_RT != IGNORED
        log_p_RTV = logits_RTV.log_softmax(-1)
        taken_RT = log_p_RTV.gather(-1, labels_RT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        log_probs_RT = taken_RT.masked_fill(~mask_RT, 0)
        count = mask_RT.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        with torch.no_grad():
            entropy_RT = -(log_p_RTV.exp() * log_p_RTV).sum(-1)
            extra = {
                "entropy": entropy_RT.masked_fill(~mask_RT, 0),
                "log_sum_sq_probs": (2 * log_p_RTV).logsumexp(-1).masked_fill(~mask_RT, 0),
                "mean_logits": logits_RTV.mean(-1).masked_fill(~mask_RT, 0),
                "is_top1": (logits_RTV.argmax(-1) == labels_RT) & mask_RT,
            }
        return FusedCausalLMOutput(
            loss=-log_probs_RT.sum() / count, log_probs=log_probs_RT, label_mask=mask_RT, **extra
        )


def _head_trains(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and any(p.requires_grad for p in head.parameters())
