"""The privacy state of a run, inside the optimizer's state dict: written with the optimizer, read with `weights_only=True`.

A trainer's other places will not do: callbacks' states are restored only if asked for, and random states are those of the
default generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from opacus.errors import raise_if_any
from opacus.optimizers import DPOptimizer
from opacus.utils.checkpoint_checks import accountant_problems
from opacus.utils.checkpoint_file import CheckpointError
from opacus.utils.random_states import restore_noise, state_problems

if TYPE_CHECKING:
    from opacus.integrations.hf.run import PrivateRun

__all__ = ["KEY", "carry", "restore", "state_of"]

KEY = "privacy"
_NAMES = ("accountant", "steps_before", "noise", "seed", "records", "expected_batch_size")
_VERSION = 1  # raise it when a state written before can no longer be continued


def carry(optimizer: DPOptimizer, run: PrivateRun) -> None:
    """Let `optimizer`'s state dict carry the state of `run`.

    On this object, not by hooks of the inner optimizer: not every optimizer's own `load_state_dict` calls them.
    """
    save, load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        return {**save(), KEY: run.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        if KEY not in state:
            raise CheckpointError(
                "training cannot be resumed",
                [
                    "the optimizer's state has no privacy state: the checkpoint was saved by a trainer that was not private, and its "
                    "steps would not be counted. Load its weights into the model and start a private run of its own."
                ],
            )
        run.load_state_dict(state[KEY])
        load({name: value for name, value in state.items() if name != KEY})

    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def state_of(run: PrivateRun) -> dict[str, Any]:
    """Plain numbers, strings and byte tensors."""
    optimizer, plan = run.optimizer, run.plan
    assert optimizer is not None
    return {
        "version": _VERSION,
        "accountant": dict(run.accountant.state_dict()),
        "steps_before": run.steps_before,
        "noise": optimizer.noise_stream().state_dict(),
        "rank": _rank(run),
        "seed": str(plan.seed),
        "records": plan.records,
        "expected_batch_size": plan.expected_batch_size,
        "noise_multiplier": float(optimizer.noise_multiplier),
        "max_grad_norm": _bounds(optimizer),
        "nonfinite_samples": optimizer.nonfinite_samples,
    }


def restore(run: PrivateRun, state: Mapping[str, Any]) -> None:
    """Go on where `state_of` was called.

    Raises:
        CheckpointError: naming all that does not fit; nothing was changed.

    Formal guarantee:
        Afterwards the accountant knows every step that led to the checkpoint, batches and noise go on as in the run that was
        saved, and no number of the noise's stream is drawn twice.
    """
    optimizer = run.optimizer
    assert optimizer is not None
    raise_if_any("training cannot be resumed", _problems(run, state), CheckpointError)
    here = {"noise_multiplier": float(optimizer.noise_multiplier), "max_grad_norm": _bounds(optimizer)}
    for name, value in here.items():
        if value != state[name] and run.plan.clipping != "adaptive":
            warnings.warn(
                f"the checkpoint was saved with {name} {state[name]}; training goes on with {value}.",
                stacklevel=2,
            )
    run.accountant.load_state_dict(state["accountant"])
    run.steps_before = state["steps_before"]
    run.plan.seed = int(state["seed"])
    counted = state["nonfinite_samples"] if _rank(run) == state.get("rank", 0) else 0
    optimizer._nonfinite = {torch.device("cpu"): torch.tensor(counted)}
    devices = {p.device for p in optimizer.params}
    restore_noise(optimizer.noise_stream(), {name: s.cpu() for name, s in state["noise"].items()}, devices)


def _problems(run: PrivateRun, state: Any) -> list[str]:
    wanted = (*_NAMES, "noise_multiplier", "max_grad_norm", "nonfinite_samples")
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        return [f"the privacy state has not version {_VERSION}. Resume with the release that saved it."]
    missing = [name for name in wanted if name not in state]
    if missing:
        return [f"the privacy state lacks {', '.join(missing)}."]
    problems = accountant_problems(run.accountant, state["accountant"])
    problems += [
        f"the checkpoint is of a run with {name}={state[name]}, this one has {getattr(run.plan, name)}: batches of a resumed run "
        "must be drawn as before. Pass the same data and batch size."
        for name in ("records", "expected_batch_size")
        if state[name] != getattr(run.plan, name)
    ]
    if _rank(run) == 0 and state.get("rank", 0) != 0:
        problems.append(
            f"the checkpoint was saved by rank {state['rank']}, whose noise stream stands still while rank 0 draws: noise would be "
            "drawn a second time. Resume from the folder that rank 0 saved."
        )
    if not str(state["seed"]).isdecimal():
        problems.append("the saved seed is not a number.")
    assert run.optimizer is not None
    noise = state["noise"]
    if isinstance(noise, Mapping):
        noise = {name: s.cpu() if isinstance(s, torch.Tensor) else s for name, s in noise.items()}
    home = getattr(run.optimizer.noise_stream(), "home", torch.device("cpu"))
    return problems + state_problems("the saved state of the noise", noise, [home])


def _rank(run: PrivateRun) -> int:
    return 0 if run.ranks is None else run.ranks.rank


def _bounds(optimizer: DPOptimizer) -> float | list[float]:
    bounds = getattr(optimizer, "max_grad_norms", None)  # of each parameter, in per-layer clipping
    return float(optimizer.max_grad_norm) if bounds is None else [float(c) for c in bounds]
