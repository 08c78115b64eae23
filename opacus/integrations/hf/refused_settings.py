"""What keeps a trainer from being private, as data: class, setting, values, reason.

Losses are on a list because measuring is blind to some: a loss that sorts the batch changes nothing where samples have different
lengths, and a baseline with a small coefficient hides in rounding. Measured with Transformers 5.24 and TRL 1.16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ALLOWED_LOSSES", "REFUSED", "Refused"]


@dataclass(frozen=True)
class Refused:
    """A setting of a trainer under which samples see each other, or private data gets around the mechanism.

    Args:
        field: attribute of the trainer; after "args." of its arguments.
        values: those that are refused; None: any that is set.
        reason: a sentence with what to do.
    """

    field: str
    values: tuple[Any, ...] | None
    reason: str


_GENERATES = (
    "its batches are generated and regrouped during training, so that they are not what the data loader drew."
)

_JOINS = (
    "it makes one batch of chosen and rejected answers inside its loss, whose rows are not those of the data loader's batch, and adds a "
    "mean over the answers' tokens of the whole batch. Use DPOTrainer."
)

_PADDING_FREE = Refused(
    "padding_free",
    None,
    "padding_free makes one row of the whole batch, so that rows are not samples. Set padding_free=False.",
)

_AUXILIARY_LOSS = Refused(
    "aux_loss_enabled",
    None,
    "the auxiliary loss is a statistic of the batch. Set its coefficient to 0.",
)

REFUSED: dict[str, tuple[Refused, ...]] = {
    "Trainer": (
        Refused(
            "args.n_gpu",
            tuple(range(2, 1025)),
            "the trainer would wrap the model in nn.DataParallel. Load it with a device_map to spread it over the GPUs, or show the "
            "process one GPU (CUDA_VISIBLE_DEVICES).",
        ),
        Refused("args.fp16", None, "its GradScaler skips steps by what the gradients are. Use bf16."),
        Refused(
            "neftune_noise_alpha",
            None,
            "NEFTune's noise depends on the length that a sample is padded to, hence on the other samples. Leave it out.",
        ),
        Refused(
            "args.auto_find_batch_size",
            None,
            "after running out of memory training starts again from step 0 with trained weights. Set per_device_train_batch_size, "
            "which may be small: it does not change the logical batch.",
        ),
        Refused(
            "model_init",
            None,
            "train() would build another model than the one made private. Pass the model itself.",
        ),
        Refused(
            "args.ignore_data_skip",
            None,
            "a resumed run would draw the batches of its epoch again, which accountants do not allow. Leave it False.",
        ),
        Refused(
            "args.load_best_model_at_end",
            None,
            "weights would be chosen by a metric outside the mechanism. Evaluate the saved checkpoints, on data that are not private.",
        ),
        Refused(
            "args.include_num_input_tokens_seen",
            ("all", "non_padding", True),
            "the trainer's count of tokens reads one batch at a time. Leave it out.",
        ),
        Refused(
            "args.use_liger_kernel",
            None,
            "its kernels replace the layers' forwards when training starts. Leave it out.",
        ),
        Refused(
            "args.torch_compile",
            None,
            "what layers saw is taken by hooks, which have not been tested in compiled models. Leave it out.",
        ),
        Refused(
            "args.deepspeed",
            None,
            "DeepSpeed owns the backward and the optimizer. Use device_map to spread a model over GPUs, or sharding by "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "is_fsdp_enabled",
            None,
            "sharding by the trainer is not supported. Use device_map, or opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "args.parallelism_config",
            None,
            "splitting tensors or sequences over ranks inside the trainer is not supported. Use device_map, or "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "is_distributed_loading_by_transformers",
            None,
            "the model was sharded when it was loaded (distributed_config). Use device_map, or "
            "opacus.integrations.accelerate.prepare_private.",
        ),
        Refused(
            "args.optim",
            ("lomo", "adalomo"),
            "the optimizer updates weights during the backward, from gradients without noise. Choose another.",
        ),
        Refused(
            "args.optim",
            (
                "galore_adamw_layerwise",
                "galore_adamw_8bit_layerwise",
                "galore_adafactor_layerwise",
                "apollo_adamw_layerwise",
            ),
            "the optimizer updates each layer during the backward, from gradients without noise. Choose one without layerwise.",
        ),
        Refused(
            "args.optim",
            ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
            "it moves weights between training and evaluation by itself. Choose another optimizer.",
        ),
    ),
    "SFTTrainer": (
        Refused(
            "args.packing",
            None,
            "packing puts several samples into a row (or cuts one in pieces), so that rows are not samples. Set packing=False.",
        ),
        _PADDING_FREE,
        _AUXILIARY_LOSS,
    ),
    "DPOTrainer": (
        Refused(
            "loss_types",
            ("aot", "aot_unpaired"),
            "the loss sorts the batch, so that a sample's gradient depends on the others' rank.",
        ),
        Refused(
            "loss_types",
            ("sft",),
            "the loss is a mean over the chosen tokens of the whole batch, so that a sample's gradient depends on the others' lengths.",
        ),
        _PADDING_FREE,
        _AUXILIARY_LOSS,
    ),
    "KTOTrainer": (
        Refused(
            "loss_type",
            ("kto",),
            "its KL baseline is a mean over the other samples' completions and scales each sample's gradient; the completions are taken "
            "from neighbours in the data set.",
        ),
        _AUXILIARY_LOSS,
    ),
    "TPOTrainer": (
        Refused(
            "tpo_alpha",
            None,
            "its term for the gold responses is a mean over all their tokens in the batch, so that a sample's gradient depends on the "
            "others' lengths. Set tpo_alpha=0.",
        ),
    ),
    **{name: (Refused("args", None, _JOINS),) for name in ("CPOTrainer", "ORPOTrainer")},
    **{
        name: (Refused("args", None, _GENERATES),)
        for name in (
            "GRPOTrainer",
            "AsyncGRPOTrainer",
            "A2POTrainer",
            "RLOOTrainer",
            "OnlineDPOTrainer",
            "PPOTrainer",
            "DistillationTrainer",
            "AsyncDistillationTrainer",
            "GKDTrainer",
            "GOLDTrainer",
            "IWOPDTrainer",
            "SDFTTrainer",
            "SDPOTrainer",
        )
    },
}

# losses in which every term belongs to one sample; another value of the field is refused, and these are named
ALLOWED_LOSSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "SFTTrainer": ("args.loss_type", ("nll", "dft")),
    "DPOTrainer": (
        "loss_types",
        (
            "sigmoid",
            "hinge",
            "ipo",
            "exo_pair",
            "nca_pair",
            "robust",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
            "sigmoid_norm",
        ),
    ),
    "KTOTrainer": ("loss_type", ("apo_zero_unpaired",)),
}
