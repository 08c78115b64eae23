"""Layers that stand in for torch's fused ones, built so that every sample's gradient can be taken."""

from opacus.layers.dp_multihead_attention import DPMultiheadAttention, SequenceBias
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN
from opacus.layers.param_rename import RenameParamsMixin

__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention", "RenameParamsMixin", "SequenceBias"]
