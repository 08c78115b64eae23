"""The ranks that a trainer's replicas train on: what they compare before any work, and how none starts without the others.

Ranks describe themselves to each other through the store of their process group. What one of them cannot do, all of them refuse,
with the same message; no collective is started before they agree.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from opacus.distributed.data_parallel import start_alike
from opacus.distributed.errors import ReplicaError
from opacus.distributed.groups import default_group, exchange, in_words, runs_in_parallel, served, size_of
from opacus.distributed.reduction import broadcast
from opacus.distributed.replicas import group_serving, replica_problems
from opacus.errors import ConfigurationError
from opacus.integrations.hf.same_records import digests_of, record_problems

if TYPE_CHECKING:
    from opacus.integrations.hf.run import PrivateRun

__all__ = ["TrainerRanks", "concealed", "training_settings"]

_PURPOSE = "make_trainer_private"
_HEADING = "make_trainer_private cannot start"

# of the trainer's arguments: what decides how the weights move, and when all ranks meet to log, evaluate or save
_COMPARED = (
    "num_train_epochs",
    "max_steps",
    "optim",
    "learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
    "bf16",
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "eval_strategy",
    "eval_steps",
    "eval_delay",
    "eval_on_start",
    "load_best_model_at_end",
    "save_strategy",
    "save_steps",
)


class TrainerRanks:
    """This process and the others that train replicas of one model.

    Args:
        group: all of them.
        allow_shared_devices: let two of them use one accelerator.
    """

    def __init__(self, group: dist.ProcessGroup, allow_shared_devices: bool = False) -> None:
        self.group = group
        self._of_its_own = False
        self.allow_shared_devices = allow_shared_devices

    @classmethod
    def here(cls, allow_shared_devices: bool) -> TrainerRanks | None:
        """All ranks that `torch.distributed` connects; None where this process is alone."""
        return cls(default_group(), allow_shared_devices) if runs_in_parallel() else None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        return size_of(self.group)

    def agree(
        self, model: nn.Module, settings: Mapping[str, Any], problems: Sequence[str], purpose: str = _PURPOSE
    ) -> list[str]:
        """Compare replicas and settings; the problems of all ranks, the same on every rank.

        Private sums get a group of their own, that serves all of the replicas' devices (of a model over a GPU and the CPU, too). In
        the trainer's own group they could meet whatever else a rank asks for that has left the training early (a callback that
        stops it on one rank): a rank would take another's figures for clipped sums and noise.

        Raises:
            RankLostError: naming ranks that did not come.
        """
        kinds = {t.device.type for t in (*model.parameters(), *model.buffers())} - {"meta"}
        wanted = set().union(*exchange(sorted(kinds), self.group, f"{purpose} (devices)"))
        if not self._of_its_own or not wanted <= served(self.group):
            self.group, self._of_its_own = group_serving(wanted), True
        return replica_problems(
            model,
            self.group,
            purpose,
            allow_shared_devices=self.allow_shared_devices,
            settings={**settings, "allow_shared_devices": self.allow_shared_devices},
            own_problems=problems,
        )

    def start_together(self, build: Callable[[], PrivateRun], data: Any) -> PrivateRun:
        """Build this rank's run, without collectives; all ranks go on, with the first one's seed and weights, or none does.

        Args:
            build: may raise on some ranks only.
            data: the trainer's records, which must be the same on every rank, in the same order.

        Raises:
            ReplicaError: naming the other ranks on which `build` raised; a rank on which it did raises its own error.
            RankLostError: naming ranks that did not come.
        """
        run: PrivateRun | None = None

        def built() -> dict[str, Any]:
            nonlocal run
            run = build()
            return {"contract": repr(run.contract), "bits": run.plan.seed.bit_length()}

        try:
            every = self._all_or_none(built, f"{_PURPOSE} (the trainer's loss)", _unlike_losses)
            assert run is not None
            salt = self._bytes_of_the_first(secrets.token_bytes(32), run.model)
            records = lambda: {"records": digests_of(data, salt)}  # noqa: E731
            self._all_or_none(records, f"{_PURPOSE} (the records)", _unlike_records)
            size = max(1, (every[0]["bits"] + 7) // 8)
            own = run.plan.seed.to_bytes(size, "big") if self.rank == 0 else bytes(size)
            run.plan.seed = int.from_bytes(self._bytes_of_the_first(own, run.model), "big")
            start_alike(run.model, self.group)
        except BaseException:
            if run is not None:
                run.detach()
            raise
        return run

    def _all_or_none(
        self,
        facts: Callable[[], dict[str, Any]],
        purpose: str,
        unlike: Callable[[Sequence[Mapping[str, Any]]], list[str]],
    ) -> list[dict[str, Any]]:
        """Every rank's facts. Where those of one cannot be found, or are unlike the others', all ranks raise."""
        failure = None
        try:
            own = facts()
        except Exception as error:
            failure, own = error, {"failure": _told(error)}
        every = exchange(own, self.group, purpose)
        if failure is not None:
            raise failure
        problems = _failures(every) or unlike(every)
        if problems:
            raise ReplicaError(_HEADING, problems)
        return every

    def _bytes_of_the_first(self, own: bytes, model: nn.Module) -> bytes:
        """Rank 0's, by a collective: whatever reaches the port of the store could read them there as long as the job runs."""
        device = next(p.device for p in model.parameters() if p.requires_grad)
        secret = torch.tensor(list(own), dtype=torch.uint8, device=device)
        broadcast([secret], self.group)
        return bytes(secret.tolist())

    def joined(self, own: str) -> str:
        """The different texts of all ranks, the same on every rank.

        Raises:
            RankLostError: naming ranks that did not come.
        """
        return " ".join(sorted(set(exchange(own, self.group, "train"))))

    def compare(self, settings: Mapping[str, Any], heading: str, purpose: str) -> None:
        """Raise on every rank if `settings` differ.

        Raises:
            ReplicaError: naming what differs.
            RankLostError: naming ranks that did not come.
        """
        problems = replica_problems(None, self.group, purpose, settings=settings)
        if problems:
            raise ReplicaError(heading, problems)


def training_settings(args: Any) -> dict[str, Any]:
    """Those of a trainer's arguments that must be the same on every rank."""
    return {f"args.{name}": getattr(args, name, None) for name in _COMPARED}


def concealed(secret: int | None) -> str:
    """What tells a secret number from others in a message."""
    return (
        "not given"
        if secret is None
        else f"one with digest {hashlib.sha256(str(secret).encode()).hexdigest()[:8]}"
    )


def _told(error: BaseException) -> list[str]:
    if isinstance(error, ConfigurationError):
        return error.problems
    return [f"{type(error).__name__}: {str(error).strip() or 'no message'}"]


def _failures(every: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"rank {rank}: {problem}" for rank, facts in enumerate(every) for problem in facts.get("failure", [])
    ]


def _unlike_losses(every: Sequence[Mapping[str, Any]]) -> list[str]:
    others = [rank for rank, facts in enumerate(every) if facts["contract"] != every[0]["contract"]]
    if not others:
        return []
    return [
        f"the loss of {in_words(others)} reduces over records in another way than rank 0's "
        f"({', '.join(facts['contract'] for facts in every)}): give all ranks the same trainer."
    ]


def _unlike_records(every: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    found = list(record_problems([facts["records"] for facts in every]))
    others = [rank for rank, problem in found if problem == "differs"]
    if others:
        problems.append(
            f"train_dataset of {in_words(others)} has other records than rank 0's, or in another order: ranks share out one batch by "
            "the records' numbers, so that a record could be used twice. Load and shuffle it in the same way on every rank."
        )
    if any(problem == "tells nothing" for _, problem in found):
        problems.append(
            "train_dataset gives other records each time that it is read, so that ranks cannot see whether theirs have the same order: "
            "draw augmentation from torch's, NumPy's or Python's default generators, or keep a field that tells records apart."
        )
    return problems
