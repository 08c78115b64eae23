"""Per-sample gradients: what a layer saw (`capture`), what follows from it (one file per layer kind), and the modes."""

from torch import nn

from opacus.grad_sample.accumulate import create_or_accumulate_grad_sample
from opacus.grad_sample.captured import Captured
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.dp_multihead_attention import compute_sequence_bias_grad_sample
from opacus.grad_sample.dp_rnn import compute_rnn_linear_grad_sample
from opacus.grad_sample.embedding import (
    compute_embedding_grad_sample,
    compute_embedding_norm_sample,
    compute_embeddingbag_gradsampler,
)
from opacus.grad_sample.embedding_bag import EMBEDDING_BAG as _EMBEDDING_BAG  # noqa: F401  registers the rule
from opacus.grad_sample.grad_sample_module import GradSampleHooks, GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping_tp import (
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClippingTP,
)
from opacus.grad_sample.group_norm import compute_group_norm_grad_sample
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from opacus.grad_sample.gsm_book_keeping import GradSampleHooksBookKeeping, GradSampleModuleBookKeeping
from opacus.grad_sample.gsm_exp_weights import GradSampleModuleExpandedWeights
from opacus.grad_sample.gsm_no_op import GradSampleHooksNoOp, GradSampleModuleNoOp
from opacus.grad_sample.instance_norm import compute_instance_norm_grad_sample
from opacus.grad_sample.layer_norm import compute_layer_norm_grad_sample
from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
from opacus.grad_sample.owners import Owners, RowsPerSample
from opacus.grad_sample.rms_norm import compute_rms_norm_grad_sample
from opacus.grad_sample.selection import BUILT_IN, BUILT_IN_NORMS, GRAD_SAMPLERS, NORM_SAMPLERS
from opacus.grad_sample.utils import (
    get_gsm_class,
    get_hooks_class,
    prepare_module,
    register_grad_sampler,
    register_norm_sampler,
    wrap_model,
)
from opacus.layers import SequenceBias
from opacus.layers.dp_rnn import RNNLinear

BUILT_IN.update(
    {
        nn.Linear: compute_linear_grad_sample,
        nn.Conv1d: compute_conv_grad_sample,
        nn.Conv2d: compute_conv_grad_sample,
        nn.Conv3d: compute_conv_grad_sample,
        nn.Embedding: compute_embedding_grad_sample,
        nn.EmbeddingBag: compute_embeddingbag_gradsampler,
        nn.LayerNorm: compute_layer_norm_grad_sample,
        nn.RMSNorm: compute_rms_norm_grad_sample,
        nn.GroupNorm: compute_group_norm_grad_sample,
        nn.InstanceNorm1d: compute_instance_norm_grad_sample,
        nn.InstanceNorm2d: compute_instance_norm_grad_sample,
        nn.InstanceNorm3d: compute_instance_norm_grad_sample,
        RNNLinear: compute_rnn_linear_grad_sample,
        SequenceBias: compute_sequence_bias_grad_sample,
    }
)
GRAD_SAMPLERS.update(BUILT_IN)
BUILT_IN_NORMS.update({nn.Linear: compute_linear_norm_sample, nn.Embedding: compute_embedding_norm_sample})
NORM_SAMPLERS.update(BUILT_IN_NORMS)

__all__ = [
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "Captured",
    "GradSampleHooks",
    "GradSampleHooksBookKeeping",
    "GradSampleHooksFastGradientClipping",
    "GradSampleHooksFastGradientClippingFSDP",
    "GradSampleHooksFastGradientClippingTP",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleBookKeeping",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "GradSampleModuleFastGradientClippingFSDP",
    "GradSampleModuleFastGradientClippingTP",
    "GradSampleModuleNoOp",
    "Owners",
    "RowsPerSample",
    "compute_conv_grad_sample",
    "compute_embedding_grad_sample",
    "compute_embedding_norm_sample",
    "compute_embeddingbag_gradsampler",
    "compute_group_norm_grad_sample",
    "compute_instance_norm_grad_sample",
    "compute_layer_norm_grad_sample",
    "compute_linear_grad_sample",
    "compute_rms_norm_grad_sample",
    "compute_rnn_linear_grad_sample",
    "compute_sequence_bias_grad_sample",
    "create_or_accumulate_grad_sample",
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]
