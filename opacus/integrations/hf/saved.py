"""The privacy state of a run, inside the optimizer's state dict: written with the optimizer, read with `weights_only=True`.

A trainer's other places will not do: callbacks' states are restored only if asked for, and random states are those of the
default generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from opacus.accountants.accountant import HistoryEntry
from opacus.errors import raise_if_any
from opacus.integrations.hf.queries import differing
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
        "elsewhere": run.line.elsewhere + run.line.replays,
        "stream": run.line.stream,
        "queries": dict(run.line.queries),
    }


def restore(run: PrivateRun, state: Mapping[str, Any]) -> None:
    """Go on where `state_of` was called.

    Raises:
        CheckpointError: naming all that does not fit; nothing was changed.

    Formal guarantee:
        Afterwards the accountant knows every step that led to the checkpoint, and every one that this process made besides.
        Batches and noise go on as in the run that was saved, whose answers are then given again; where what is asked has
        changed (see `queries_of`), noise is drawn from a stream of its own.
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
    changed = differing(state.get("queries", {}), run.line.queries)
    _account(run, state, changed)
    run.plan.seed = int(state["seed"])
    counted = state["nonfinite_samples"] if _rank(run) == state.get("rank", 0) else 0
    optimizer._nonfinite = {torch.device("cpu"): torch.tensor(counted)}
    devices = {p.device for p in optimizer.params}
    restore_noise(optimizer.noise_stream(), {name: s.cpu() for name, s in state["noise"].items()}, devices)
    run.line.stream = state.get("stream", "")
    if changed and run.steps_before is not None:
        run.leave_stream(run.line.stream)
        if optimizer.noise_multiplier and not run.plan.secure_mode:
            said = ", ".join(changed) if "queries" in state else "what its noise was for (it does not say)"
            warnings.warn(
                f"the checkpoint was saved with other {said}. Its noise must not meet other queries, which could be subtracted from "
                "each other: training goes on with noise of its own, and not as that run would have gone on.",
                stacklevel=2,
            )


def _account(run: PrivateRun, state: Mapping[str, Any], changed: Sequence[str]) -> None:
    """Take the checkpoint's steps, and keep what this process spent besides."""
    own, left, here = list(run.accountant.history), run.line_left, run.line
    spent, elsewhere = len(run.accountant), state.get("elsewhere", 0)
    stands = (run.steps_before, here.stream, here.elsewhere + here.replays, own)
    run.accountant.load_state_dict(state["accountant"])
    if stands == (state["steps_before"], state.get("stream"), elsewhere, run.accountant.history):
        return  # Accelerate saves and loads what it prepares
    run.steps_before = state["steps_before"]
    here.elsewhere, here.replays = elsewhere, 0
    if not spent or run.steps_before is None:
        return
    further = left.furthest - run.steps_made()
    if left.stream and left.stream == state.get("stream") and further >= 0 and elsewhere <= left.elsewhere:
        # a checkpoint of the line that this process was on: its steps are among those accounted
        run.accountant.history = own
        here.elsewhere = left.elsewhere
        # noise of the operating system is another each time: what it is added to again is released again
        if changed or left.queries != here.queries or run.plan.secure_mode:
            here.elsewhere += further
        else:
            here.replays = further
    else:
        run.accountant.history = _composed(own, run.accountant.history)
        here.elsewhere += spent
    if here.elsewhere > elsewhere:
        warnings.warn(
            f"{here.elsewhere - elsewhere} steps that this trainer made are no part of the training that is resumed. What they "
            "spent stays accounted: epsilon is that of all.",
            stacklevel=2,
        )


def _composed(first: Sequence[HistoryEntry], second: Sequence[HistoryEntry]) -> list[HistoryEntry]:
    """Both histories; equal steps that follow each other are one entry, as in an accountant's own."""
    whole = list(first)
    for sigma, rate, steps in second:
        if whole and whole[-1][:2] == (sigma, rate):
            steps += whole.pop()[2]
        whole.append((sigma, rate, steps))
    return whole


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
