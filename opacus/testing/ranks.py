"""Several ranks on one host, for tests: processes that are started once and run one function after another.

Every case gets a process group of its own, so that one that failed leaves nothing behind, and a time limit, so that none hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from opacus.errors import raise_if_any

__all__ = ["Outcome", "RankError", "Ranks"]

_STACKS = getattr(signal, "SIGUSR1", None)  # makes a rank write down where it is; not everywhere


class RankError(RuntimeError):
    """A rank raised, died, or did not end in time. The message has its traceback."""


@dataclass
class Outcome:
    """How a function ended on one rank.

    Attributes:
        value: what it returned.
        error: the traceback if it raised, else how the process ended, or where it stood when time was up; None if it returned.
    """

    value: Any = None
    error: str | None = None


class Ranks:
    """`world_size` processes with a gloo group between them; each `run` calls a function on all of them.

    Processes start on first use, with one thread each, and stay until `close`, so that a test suite pays for them once. They end
    with this process. After a case in which a process died or did not end in time they are started anew.

    Args:
        world_size: number of ranks, at least 1.
        emulated_devices: so many emulated devices exist on each rank, which then sees no real accelerator, and gloo serves them; 0
            leaves devices as they are.
        timeout: seconds a case may take.
        patience: the process group's timeout: seconds that a collective waits for other ranks; `timeout` if None.
        backend: of the process group.

    Raises:
        ConfigurationError: naming what is wrong with the arguments.

    Example:
        >>> import operator
        >>> with Ranks(2) as ranks:  # doctest: +SKIP
        ...     ranks.run(operator.add, 1, 2)
        [3, 3]
    """

    def __init__(
        self,
        world_size: int,
        *,
        emulated_devices: int = 0,
        timeout: float = 60.0,
        patience: float | None = None,
        backend: str = "gloo",
    ) -> None:
        problems = []
        if not isinstance(world_size, int) or world_size < 1:
            problems.append(f"world_size is {world_size!r}; pass a number of ranks.")
        if not timeout > 0:
            problems.append(f"timeout is {timeout!r}; pass a number of seconds.")
        raise_if_any("ranks cannot be started", problems)
        self.world_size = world_size
        self.timeout = timeout
        self._setting = _Setting(world_size, emulated_devices, backend, patience)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None
        self._cases = 0
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank, within an initialised process group.

        Args:
            function: picklable: defined at the top of a module. Arguments and results are pickled too.

        Returns:
            The results, by rank.

        Raises:
            RankError: with the traceback of every rank that failed.
        """
        outcomes = self.outcomes(function, *args, **kwargs)
        failed = [
            f"rank {rank}: {outcome.error}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error is not None
        ]
        if failed:
            name = getattr(function, "__name__", repr(function))
            raise RankError(
                f"{name} failed on {len(failed)} of {self.world_size} ranks:\n" + "\n".join(failed)
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Outcome]:
        """As `run`, for functions that are meant to fail: how each rank ended. Never raises on a rank's account."""
        job = pickle.dumps((function, args, kwargs))
        self._start()
        self._cases += 1
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has died: found out below
                pipe.send_bytes(pickle.dumps((self._cases, self._store.port, self.timeout, job)))
        outcomes = self._collect()
        late = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        for rank in late:
            outcomes[rank] = Outcome(
                error=f"not done after {self.timeout:g} s; it was at\n{self._where(rank)}"
            )
        if late or not all(process.is_alive() for process in self._processes):
            self._stop()
        return outcomes  # type: ignore[return-value]

    def close(self) -> None:
        """End the processes; `run` would start new ones."""
        self._stop()

    # ------------------------------------------------------------------ processes

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self._stop()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self._setting, str(self._stacks(rank))),
                daemon=True,
                name=f"rank {rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_START_UP) or pipe.recv_bytes() != _READY:
                self._stop()
                raise RankError(f"rank {rank} did not start within {_START_UP:g} s")

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for work ends by itself
        for process in self._processes:
            process.join(0.2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _collect(self) -> list[Outcome | None]:
        """Answers by rank; None where there was none in time."""
        outcomes: list[Outcome | None] = [None] * self.world_size
        # the collectives' own limit comes first, so that a rank can say itself what it waited for
        deadline = time.monotonic() + self.timeout + 5
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=deadline - time.monotonic()):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = Outcome(*pickle.loads(pipe.recv_bytes()))  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    outcomes[rank] = Outcome(
                        error=f"the process died (exit code {self._processes[rank].exitcode})"
                    )
        return outcomes

    def _stacks(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"stacks-{rank}"

    def _where(self, rank: int) -> str:
        process = self._processes[rank]
        if _STACKS is None or not process.is_alive():
            return "(unknown)"
        os.kill(process.pid, _STACKS)
        time.sleep(0.5)
        return self._stacks(rank).read_text()


_START_UP = 300.0  # seconds for importing torch on a busy machine
_READY = b"ready"


@dataclass
class _Setting:
    world_size: int
    emulated_devices: int
    backend: str
    patience: float | None


def _serve(pipe: Connection, rank: int, setting: _Setting, stacks: str) -> None:
    """A rank's life: one case after the other, until the pipe closes."""
    with open(stacks, "w") as file:
        if _STACKS is not None:
            faulthandler.register(_STACKS, file=file)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if setting.emulated_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            from opacus.testing.emulated_devices import install, register_gloo

            install(setting.emulated_devices)
            register_gloo()
        pipe.send_bytes(_READY)
        while True:
            try:
                case, port, timeout, job = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # at once: threads of a broken group may never end
            answer = _answer(case, port, timeout, job, rank, setting)
            with contextlib.suppress(OSError):
                pipe.send_bytes(answer)


def _answer(case: int, port: int, timeout: float, job: bytes, rank: int, setting: _Setting) -> bytes:
    limit = timedelta(seconds=timeout)
    try:
        function, args, kwargs = pickle.loads(job)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(setting.world_size))
        store = dist.PrefixStore(
            f"case {case}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        )
        store.set(f"here {rank}", "")
        store.wait([f"here {r}" for r in range(setting.world_size)])  # importing the function may take long
        if setting.patience is not None:
            limit = timedelta(seconds=setting.patience)
        dist.init_process_group(
            setting.backend, store=store, rank=rank, world_size=setting.world_size, timeout=limit
        )
        try:
            value = function(*args, **kwargs)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return pickle.dumps((value, None))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))
