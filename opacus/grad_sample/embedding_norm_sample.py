"""The recorded import path of the embedding's norm; the rule itself lies in `embedding.py`."""

from opacus.grad_sample.embedding import compute_embedding_norm_sample

__all__ = ["compute_embedding_norm_sample"]
