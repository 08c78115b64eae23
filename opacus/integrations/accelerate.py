"""Accelerate: private training of what an `Accelerator` would otherwise prepare.

`Accelerator.prepare` deals batches to ranks, repeats rows to make them even, and averages gradients that are not private yet.
`prepare_private` takes its place for the model, the optimizer and the loader: every rank draws its own share of one Poisson
batch, the clipped sums are added up once per step, and what comes back counts as prepared.

Models with a `device_map` (`dispatch_model`, `from_pretrained(device_map=...)`) need nothing of this: `PrivacyEngine.make_private`
takes them as they are, on one process. Frozen layers may be offloaded; trainable ones are refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus.checkpoint import CheckpointError, privacy_state, restore_privacy
from opacus.errors import raise_if_any
from opacus.privacy_engine import PrivacyEngine
from opacus.utils.checkpoint_file import read, write
from opacus.utils.resumable import ResumableDataLoader

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Prepared", "prepare_private", "run_in_mixed_precision"]


class Prepared(NamedTuple):
    """What `prepare_private` returns, in the order of `Accelerator.prepare`.

    Attributes:
        model: the model to call.
        optimizer: an `AcceleratedOptimizer` around the private one (`optimizer.optimizer`), whose attributes show through.
        data_loader: Poisson batches on the accelerator's device.
        hooks: on the model; `hooks.cleanup()` leaves an ordinary model.
    """

    model: Any
    optimizer: Any
    data_loader: DataLoader
    hooks: Any


def prepare_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader,
    *,
    privacy_engine: PrivacyEngine,
    grad_sample_mode: str = "bk",
    **options: Any,
) -> Prepared:
    """`accelerator.prepare(model, optimizer, data_loader)` for private training.

    What the accelerator was set up for decides how: one process; one process for each rank with DDP, where the model of each rank may
    span several devices of its own (a `device_map`, a quantized base), which Accelerate itself refuses; or FSDP2, where the optimizer
    may have been built, and used, before the model is sharded.

    Schedulers are prepared by `accelerator.prepare(scheduler)` as usual. `accelerator.backward` and `accelerator.autocast` work;
    `clip_grad_norm_` finds nothing to clip. `accelerator.save_state` also keeps accountant, noise and sampling; after `load_state` the
    loader goes on within the epoch by itself (no `skip_first_batches`), and a folder without them is refused. Large logical
    batches are split by `BatchMemoryManager`, not by gradient accumulation.

    Args:
        accelerator: with mixed precision "no" or "bf16", gradient accumulation 1.
        model: not prepared; placed by a device map, or not placed yet (it goes to `accelerator.device`).
        optimizer: over its trainable parameters; not prepared.
        data_loader: not prepared. Its batch size is that of all ranks together, as in `make_private`: each rank draws its share.
        privacy_engine: accounts for the run.
        grad_sample_mode: "bk" or "hooks".
        **options: as in `PrivacyEngine.make_private`, or, where `target_epsilon` is among them, in
            `make_private_with_epsilon`.

    Returns:
        Model, optimizer, loader and hooks.

    Raises:
        ConfigurationError: listing everything that keeps the run from being private; nothing was changed.

    Formal guarantee:
        As for `make_private`: one step is one Poisson-subsampled Gaussian mechanism over the union of the ranks' batches, its noise
        added once, and is accounted once.
    """
    raise_if_any("prepare_private cannot start", _problems(accelerator, model, optimizer, data_loader))
    if grad_sample_mode not in ("bk", "hooks"):
        raise_if_any(
            "prepare_private cannot start",
            [f"grad_sample_mode is {grad_sample_mode!r}; choose 'bk' or 'hooks', which take any loss."],
        )
    spread = _spread(accelerator, model, optimizer)
    start: Callable[..., Any] = privacy_engine.make_private
    if "target_epsilon" in options:
        start = privacy_engine.make_private_with_epsilon
    hooks, private_optimizer, private_loader = start(
        module=spread,
        optimizer=optimizer,
        data_loader=data_loader,
        grad_sample_mode=grad_sample_mode,
        wrap_model=False,
        **options,
    )
    if accelerator.num_processes == 1:
        accelerator.prepare_model(
            model
        )  # moves it, unless it has a device map, and casts as mixed precision asks
    else:
        if not accelerator.is_fsdp2:  # there the plugin's policy casts
            run_in_mixed_precision(accelerator, model)
        accelerator._models.append(spread)
    if private_optimizer.state:  # of an optimizer used before the model was placed
        private_optimizer.load_state_dict(private_optimizer.state_dict())
    from opacus.integrations.accelerated_optimizer import PrivateAcceleratedOptimizer

    prepared_optimizer = PrivateAcceleratedOptimizer(private_optimizer)
    accelerator._optimizers.append(prepared_optimizer)
    _keep_in_checkpoints(accelerator, privacy_engine, model, private_optimizer)
    device = _input_device(accelerator, model)
    return Prepared(spread, prepared_optimizer, _placed(accelerator, private_loader, device), hooks)


def _problems(accelerator: Any, model: Any, optimizer: Any, data_loader: Any) -> list[str]:
    try:
        from accelerate import Accelerator, DistributedType
        from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
        from accelerate.optimizer import AcceleratedOptimizer
    except ImportError:
        return ["accelerate is not installed: install the extra hf (pip install 'opacus[hf]')."]
    if not isinstance(accelerator, Accelerator):
        return [f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__name__}."]
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        problems.append(
            "model is wrapped by torch's DistributedDataParallel (Accelerator.prepare does that), which averages gradients before they "
            "are private: pass the module inside it."
        )
    if isinstance(optimizer, AcceleratedOptimizer) or not isinstance(optimizer, Optimizer):
        problems.append(
            f"optimizer must be a torch.optim.Optimizer that was not prepared, not {type(optimizer).__name__}."
        )
    if isinstance(data_loader, (DataLoaderShard, DataLoaderDispatcher)):
        problems.append(
            "data_loader was prepared: Accelerate deals its batches to the ranks and repeats rows to make them even. Pass the loader "
            "as it was before."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        problems.append(
            f"mixed_precision is {accelerator.mixed_precision!r}: its loss scale changes with the data, so that a sample would reach "
            "later updates without noise. Use 'bf16' or 'no'."
        )
    if accelerator.gradient_accumulation_steps != 1:
        problems.append(
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}: several Poisson batches in a step would need another "
            "accounting. Set it to 1, give the loader the whole batch size, and split batches with BatchMemoryManager."
        )
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP:
        problems += _plugin_problems(accelerator.state.fsdp_plugin)
    refused = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
    if kind in refused:
        problems.append(
            f"{kind.value} keeps gradients and optimizers to itself: use one process with a device_map, DDP or FSDP2."
        )
    if accelerator.state.dynamo_plugin.backend.value != "NO":
        problems.append("torch.compile is set (dynamo_plugin), which would lose the hooks: switch it off.")
    return problems


def _spread(accelerator: Any, model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """The model as all ranks share it."""
    if accelerator.num_processes == 1:
        return model
    if accelerator.is_fsdp2:
        from opacus.distributed.fsdp import fsdp2_wrap

        return fsdp2_wrap(model, optimizer, **_sharding(accelerator))
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    if getattr(model, "hf_device_map", None) is None:
        model.to(accelerator.device)
    return DifferentiallyPrivateDistributedDataParallel(model)


def _sharding(accelerator: Any) -> dict[str, Any]:
    """What the accelerator's FSDP plugin asks for, in the words of `fsdp2_wrap`."""
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    chosen: dict[str, Any] = {"reshard_after_forward": bool(plugin.reshard_after_forward)}
    if mesh is not None:
        chosen["mesh"] = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    if plugin.mixed_precision_policy is not None:
        chosen["mp_policy"] = plugin.mixed_precision_policy
    if plugin.cpu_offload:
        chosen["offload_policy"] = plugin.cpu_offload
    names = plugin.transformer_cls_names_to_wrap
    if names:
        chosen["units"] = lambda path, module: type(module).__name__ in names
    return chosen


def _plugin_problems(plugin: Any) -> list[str]:
    problems = []
    if plugin.fsdp_version != 2:
        problems.append("FSDP version 1 is not supported: FullyShardedDataParallelPlugin(fsdp_version=2).")
    if plugin.cpu_ram_efficient_loading:
        problems.append(
            "cpu_ram_efficient_loading is set, by which ranks other than the first hold no weights: set it to False and load the model "
            "on every rank."
        )
    if plugin.activation_checkpointing:
        problems.append(
            "activation_checkpointing is set in the FSDP plugin: call model.gradient_checkpointing_enable() in its place."
        )
    if plugin.ignored_modules is not None:
        problems.append(
            "ignored_modules is set in the FSDP plugin: shard the model with fsdp2_wrap, and call make_private."
        )
    return problems


def run_in_mixed_precision(accelerator: Any, model: nn.Module) -> None:
    """What `accelerator.prepare` does about bf16; it would refuse a model with a device map."""
    if not accelerator.native_amp:
        return
    from accelerate.utils import convert_outputs_to_fp32

    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return plain(*args, **kwargs)

    model.forward = convert_outputs_to_fp32(forward)


def _keep_in_checkpoints(accelerator: Any, engine: PrivacyEngine, model: nn.Module, optimizer: Any) -> None:
    """A file of each rank beside what `save_state` writes; Accelerate would read objects of its users by executing them.

    Each model that the accelerator trains privately has its own, numbered in the order they were prepared.
    """
    kinds = [type(prepared).__name__ for prepared in accelerator._optimizers]
    earlier = kinds.count("PrivateAcceleratedOptimizer") - 1
    name = f"privacy_{accelerator.process_index}{f'_{earlier}' if earlier else ''}.pt"

    def path(folder: str) -> Path:
        return Path(folder) / name

    def save(models: Any, weights: Any, folder: str) -> None:
        write(privacy_state(engine, model, optimizer), path(folder), None)

    def load(models: Any, folder: str) -> None:
        if not path(folder).exists():
            problem = f"{path(folder)} is not there: without it steps already taken would not be counted. Use a folder that save_state wrote."
            raise CheckpointError("the checkpoint cannot be loaded", [problem])
        restore_privacy(engine, model, optimizer, read(path(folder), None))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _input_device(accelerator: Any, model: nn.Module) -> Any:
    """The first device of a device map: the accelerator's own may be another rank's, and outputs come back to where inputs were."""
    placed = (getattr(model, "hf_device_map", None) or {}).values()
    return next((device for device in placed if str(device) not in ("cpu", "disk")), accelerator.device)


def _placed(accelerator: Any, loader: Any, device: Any) -> Any:
    """The loader, its batches on `device`; it counts as prepared, so that nobody deals its batches."""
    from accelerate.utils import send_to_device

    if not isinstance(loader, ResumableDataLoader):  # the user's own, under poisson_sampling=False
        return accelerator.prepare_data_loader(loader) if accelerator.num_processes == 1 else loader
    if accelerator.device_placement:
        loader.place = functools.partial(send_to_device, device=device)
    loader._is_accelerate_prepared = True
    return loader
