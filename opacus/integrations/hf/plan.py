"""What a private run of a trainer was asked to be, and the numbers that follow: rate, steps, noise, budget."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opacus.accountants import IAccountant, create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.errors import ConfigurationError
from opacus.optimizers import DPOptimizer, get_optimizer_class
from opacus.optimizers.arguments import is_number, positive_number_problems

__all__ = ["Plan", "plan_problems", "planned_steps", "steps_within"]


@dataclass
class Plan:
    """Numbers of one private run.

    Args:
        noise_multiplier: sigma.
        max_grad_norm: C; a list for per-layer clipping.
        delta: at which epsilon is stated.
        expected_batch_size: records in a logical batch on average.
        records: N.
        target_epsilon: training stops before it is exceeded; None: no limit.
        accountant: the accountant's name.
        clipping: the clipping style; `options` are its optimizer's.
        seed: of batches and noise.
        secure_mode: noise from the operating system's generator.
        log_unprotected: whether figures computed from private data without noise are logged.
    """

    noise_multiplier: float
    max_grad_norm: float | list[float]
    delta: float
    expected_batch_size: int
    records: int
    target_epsilon: float | None = None
    accountant: str = "prv"
    clipping: str = "flat"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: secrets.randbits(128))
    secure_mode: bool = False
    log_unprotected: bool = True

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.records

    @property
    def steps_per_epoch(self) -> int:
        """As many as batches of the expected size that cover the data set."""
        return math.ceil(self.records / self.expected_batch_size)


def planned_steps(args: Any, steps_per_epoch: int) -> int:
    """Optimizer steps of one `train()`."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)


def steps_within(accountant: IAccountant, plan: Plan, at_most: int) -> int:
    """How many further steps keep the accountant's epsilon at `plan.delta` within `plan.target_epsilon`; up to `at_most`."""
    target = plan.target_epsilon
    if target is None:
        return at_most
    probe = create_accountant(plan.accountant)

    def fits(steps: int) -> bool:
        probe.history = list(accountant.history)
        for _ in range(1 if steps else 0):
            probe.step(noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate)
            sigma, rate, count = probe.history[-1]
            probe.history[-1] = (sigma, rate, count + steps - 1)
        return not len(probe) or probe.get_epsilon(plan.delta) <= target

    if fits(at_most):
        return at_most
    low, high = 0, at_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plan_problems(
    *,
    target_epsilon: Any,
    noise_multiplier: Any,
    delta: Any,
    expected_batch_size: Any,
    records: int,
    seed: Any,
    accountant: Any,
    clipping: Any,
) -> list[str]:
    """What is wrong with arguments that do not concern the trainer, a sentence each."""
    problems = []
    if target_epsilon is None and noise_multiplier is None:
        problems.append("pass target_epsilon (the noise follows from it) or noise_multiplier.")
    if target_epsilon is not None:
        problems += positive_number_problems("target_epsilon", target_epsilon)
    if noise_multiplier is not None and (
        not is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf
    ):
        problems.append(f"noise_multiplier must be a finite number of at least 0, not {noise_multiplier!r}.")
    if target_epsilon is not None and is_number(noise_multiplier) and noise_multiplier == 0:
        problems.append(
            "noise_multiplier=0 keeps no target_epsilon: leave one of them out (without noise_multiplier, the noise follows)."
        )
    if not is_number(delta) or not 0 < delta < 1:
        problems.append(
            f"delta must lie between 0 and 1, below one over the number of records, not {delta!r}."
        )
    whole = isinstance(expected_batch_size, int) and not isinstance(expected_batch_size, bool)
    if not whole or not 1 <= expected_batch_size <= max(1, records):
        problems.append(
            f"expected_batch_size must be a number of records from 1 to the data set's {records}, not {expected_batch_size!r}."
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        problems.append(f"seed must be an integer of at least 0, or None, not {seed!r}.")
    for choose, arguments in (
        (create_accountant, (accountant,)),
        (get_optimizer_class, (clipping, False, "bk")),
    ):
        try:
            choose(*arguments)
        except ValueError as error:
            problems.append(f"{error}.")
    return problems


def optimizer_problems(
    clipping: str,
    max_grad_norm: Any,
    options: Mapping[str, Any],
    trained: Sequence[nn.Parameter],
    noise_multiplier: Any,
) -> list[str]:
    """What the clipping style's optimizer would refuse; it is built when training starts.

    Args:
        trained: parameters that require grad.
        noise_multiplier: None where it is not known yet; the rest as in `make_trainer_private`.
    """
    try:
        kind = get_optimizer_class(clipping, False, "bk")
    except ValueError:
        kind = DPOptimizer
    problems = [
        f"{name} is not an option of make_trainer_private with clipping={clipping!r}."
        for name in options
        if name not in kind.OPTIONS
    ]
    if not trained:
        return problems
    sigma = noise_multiplier if is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf else 0.0
    problems += kind.argument_problems(
        optimizer=torch.optim.SGD(trained, lr=0.0),  # in place of the trainer's
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        expected_batch_size=1,
        loss_reduction="mean",
        generator=None,
        secure_mode=False,
        options={name: value for name, value in options.items() if name in kind.OPTIONS},
    )
    return problems + _device_problems(options.get("reduction_device"))


def _device_problems(device: Any) -> list[str]:
    if device is None:
        return []
    try:
        usable = torch.empty(0, device=torch.device(device)).device.type != "meta"
        why = "it holds no values"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        usable, why = False, (str(error).strip() or type(error).__name__).splitlines()[0]
    return [] if usable else [f"reduction_device={device!r} cannot be used here: {why}."]


def noise_for(
    target_epsilon: float, delta: float, expected_batch_size: int, records: int, steps: int, accountant: str
) -> float:
    """The noise multiplier that spends `target_epsilon` in `steps`.

    Raises:
        ConfigurationError: if there is none.
    """
    try:
        return get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=delta,
            sample_rate=expected_batch_size / records,
            steps=steps,
            accountant=accountant,
            epsilon_tolerance=min(0.002, target_epsilon / 10),
        )
    except ConfigurationError as error:
        raise ConfigurationError("make_trainer_private cannot start", error.problems) from error


def warn_of_delta(delta: float, records: int) -> None:
    """A delta of one over the number of records allows publishing one record outright."""
    if delta >= 1 / records:
        warnings.warn(
            f"delta={delta:g} is not below one over the number of records ({records}): a mechanism that publishes one of them at "
            "random would pass. Lower it.",
            stacklevel=3,
        )
