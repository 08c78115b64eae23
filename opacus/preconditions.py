"""What must hold before a run is made private. Everything is looked at, nothing is changed."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from opacus import integrations
from opacus.distributed.sharding import is_sharded_model, sharded_findings
from opacus.grad_sample import AbstractGradSampleModule, get_gsm_class, get_hooks_class
from opacus.grad_sample.capture import refuse_if_captured
from opacus.grad_sample.owners import rows_per_sample_problems
from opacus.grad_sample.tensor_axis import TensorAxis
from opacus.grad_sample.tensor_parallel import tensor_parallel_problems
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import criterion_problems
from opacus.utils.sample_rate import loader_problems
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError

__all__ = ["TWO_PASSES", "loader_findings", "make_private_findings", "mode_option_names"]

TWO_PASSES = ("ghost", "ghost_fsdp", "ghost_tp")  # modes with a wrapped criterion


def make_private_findings(
    *,
    module: Any,
    criterion: Any,
    optimizer: Any,
    data_loader: Any,
    noise_multiplier: Any,
    max_grad_norm: Any,
    batch_first: bool,
    loss_reduction: Any,
    clipping: str,
    noise_generator: Any,
    secure_mode: bool,
    grad_sample_mode: str,
    wrap_model: bool,
    options: dict[str, Any],
    mode_options: dict[str, Any],
    distributed: bool = False,
) -> tuple[list[str], list[UnsupportedModuleError]]:
    """Problems as sentences, and the layers that a validator refuses."""
    problems = loader_findings(data_loader)
    layer_errors: list[UnsupportedModuleError] = []
    if isinstance(module, AbstractGradSampleModule):
        problems += _wrapped_findings(module, batch_first, loss_reduction, grad_sample_mode)
        module = module._module
    elif isinstance(module, nn.Module):
        problems += _refusal(refuse_if_captured, module)
    if not isinstance(module, nn.Module):
        problems.append(f"module must be a torch.nn.Module, not {type(module).__name__}.")
    else:
        problems += _parameter_findings(module)
        problems += integrations.findings(module)
        layer_errors = ModuleValidator.layer_errors(module)
        if isinstance(optimizer, Optimizer):
            problems += _optimizer_findings(module, optimizer)
        if is_sharded_model(module):
            problems += tensor_parallel_problems(module)
            problems += sharded_findings(module, grad_sample_mode, TensorAxis(module).names)
    problems += _refusal(get_gsm_class if wrap_model else get_hooks_class, grad_sample_mode)
    if grad_sample_mode in TWO_PASSES:
        problems += criterion_problems(criterion, loss_reduction)
    problems += _row_findings(mode_options)
    refused = _refusal(get_optimizer_class, clipping, distributed, grad_sample_mode)
    problems += refused
    kind = DPOptimizer if refused else get_optimizer_class(clipping, distributed, grad_sample_mode)
    problems += kind.argument_problems(
        optimizer=optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=1,
        loss_reduction=loss_reduction,
        generator=noise_generator,
        secure_mode=secure_mode,
        options=options,
    )
    return problems, layer_errors


def mode_option_names(grad_sample_mode: str) -> tuple[str, ...]:
    """Keyword arguments of `make_private` that belong to the grad sample mode."""
    own = {"bk": ("stash_budget",), "ghost": ("use_ghost_clipping",)}.get(grad_sample_mode, ())
    return own if grad_sample_mode == "no_op" else (*own, "rows_per_sample", "row_order")


def _row_findings(mode_options: dict[str, Any]) -> list[str]:
    if "row_order" in mode_options and "rows_per_sample" not in mode_options:
        return ["row_order says how rows_per_sample rows lie: pass rows_per_sample too."]
    return rows_per_sample_problems(
        mode_options.get("rows_per_sample", 1), mode_options.get("row_order", "blocked")
    )


def loader_findings(data_loader: Any) -> list[str]:
    """What keeps a loader's sampling rate from being known."""
    return list(loader_problems(data_loader))


def _parameter_findings(module: nn.Module) -> list[str]:
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        return ["module has no parameter that requires grad: there is nothing to train."]
    lazy = [name for name, p in trainable if is_lazy(p)]
    if lazy:
        return [
            f"parameter {name} has no shape yet (a lazy layer): run the model on a batch once, then build the optimizer."
            for name in lazy
        ]
    computed = [
        f"parameter {name} is complex: clipping and noise are defined for real numbers. Train its real and imaginary parts as real "
        "parameters (torch.view_as_complex in the forward), or freeze it."
        for name, p in trainable
        if p.is_complex()
    ]
    computed += [
        f"{path or 'module'} computes its weights by a parametrization (weight norm, spectral norm, ...), outside any layer that sees "
        "samples: take it off (torch.nn.utils.parametrize.remove_parametrizations), or freeze the layer."
        for path, layer in module.named_modules()
        if is_parametrized(layer) and any(p.requires_grad for p in layer.parametrizations.parameters())
    ]
    return computed + [
        f"parameter {name} is on the meta device and requires grad (offloaded, or never loaded): load it to a device, "
        "or freeze it."
        for name, p in trainable
        if p.device.type == "meta"
    ]


def _optimizer_findings(module: nn.Module, optimizer: Optimizer) -> list[str]:
    names = {id(p): name for name, p in module.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [
        f"optimizer holds a parameter of shape {tuple(p.shape)} (number {j} of group {i}) that module does not have"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in names
    ]
    if strangers and is_sharded_model(module):
        return [
            f"optimizer was built before the model was sharded: {len(strangers)} of its parameters are no longer the model's, and would "
            "be trained in vain. Build it after fully_shard, or let it follow, state and schedulers included: "
            "model = opacus.distributed.fsdp.fsdp2_wrap(model, optimizer) in place of fully_shard; or, around your own sharding, "
            "binding = record(model, optimizer) before and rebind(model, optimizer, binding) after."
        ]
    more = f"; and {len(strangers) - 5} more" if len(strangers) > 5 else ""
    problems = [
        f"Module parameters are different than optimizer Parameters: {'; '.join(strangers[:5])}{more}. Build the optimizer "
        "from module.parameters() after all layers and adapters are in place."
    ][: len(strangers)]
    outside = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if outside and not problems:
        warnings.warn(
            f"{len(outside)} parameters require grad but are not in the optimizer ({', '.join(outside[:3])}...): they are not "
            "trained and not clipped. Freeze them, and never step them with another optimizer.",
            stacklevel=4,
        )
    return problems


def _wrapped_findings(
    module: AbstractGradSampleModule, batch_first: bool, loss_reduction: Any, grad_sample_mode: str
) -> list[str]:
    """A module wrapped before is used as it is, so its options must be the ones asked for."""
    problems = []
    try:
        wanted = get_gsm_class(grad_sample_mode)
    except ValueError:
        wanted = type(module)
    if type(module) is not wanted:
        problems.append(
            f"module is a {type(module).__name__}, grad_sample_mode {grad_sample_mode!r} needs a {wanted.__name__}: pass the "
            "plain module (to_standard_module)."
        )
    for name, asked in (("batch_first", batch_first), ("loss_reduction", loss_reduction)):
        if getattr(module, name) != asked:
            problems.append(
                f"module was wrapped with {name}={getattr(module, name)!r}, now {asked!r} is asked for."
            )
    return problems


def _refusal(choose: Any, *arguments: Any) -> list[str]:
    try:
        choose(*arguments)
    except ValueError as error:
        return [f"{error}."]
    return []
