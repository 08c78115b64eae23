"""Ranks for tests: results by rank, failures named by rank, no case that hangs; collectives on emulated devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from opacus.testing import RankError, Ranks
from opacus.testing.emulated_devices import is_supported

needs_emulation = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def collectives(place: str) -> dict[str, torch.Tensor | None]:
    """What every collective gives on this rank, for tensors on `place`."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device(place)

    def own() -> torch.Tensor:
        return torch.arange(2.0, device=device) + 10 * rank

    found: dict[str, torch.Tensor | None] = {}
    total = own()
    dist.all_reduce(total)
    found["all_reduce"] = total
    later = own()
    work = dist.all_reduce(later, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    found["all_reduce, not waiting"] = later
    sent = own()
    dist.broadcast(sent, size - 1)
    found["broadcast"] = sent
    parts = [torch.empty(2, device=device) for _ in range(size)]
    dist.all_gather(parts, own())
    found["all_gather"] = torch.stack(parts)
    swapped = torch.empty(size, device=device)
    dist.all_to_all_single(swapped, torch.arange(float(size), device=device) + 10 * rank)
    found["all_to_all"] = swapped
    towards = own()
    dist.reduce(towards, 0)
    found["reduce"] = towards if rank == 0 else None
    received = torch.zeros(2, device=device)
    if rank == 0:
        dist.send(own(), 1)
    if rank == 1:
        dist.recv(received, 0)
    found["recv"] = received
    assert all(value is None or value.device.type == device.type for value in found.values())
    dist.barrier()
    return {name: None if value is None else value.cpu() for name, value in found.items()}


@needs_emulation
def test_collectives_on_emulated_devices_give_what_they_give_on_the_host(
    two_ranks_with_devices: Ranks,
) -> None:
    host = two_ranks_with_devices.run(collectives, "cpu")
    emulated = two_ranks_with_devices.run(collectives, "emu:1")
    assert torch.equal(host[0]["all_reduce"], torch.tensor([10.0, 12.0]))
    for rank in (0, 1):
        for name, expected in host[rank].items():
            assert expected is None or torch.equal(emulated[rank][name], expected), name


def identity(value: object) -> tuple[object, int, int]:
    return value, dist.get_rank(), dist.get_world_size()


def test_results_come_by_rank_and_processes_are_kept(pair: Ranks) -> None:
    assert pair.run(identity, "a") == [("a", 0, 2), ("a", 1, 2)]
    before = [process.pid for process in pair._processes]
    assert pair.run(identity, "b") == [("b", 0, 2), ("b", 1, 2)]
    assert [process.pid for process in pair._processes] == before


def fails_on_one_rank() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this one")
    dist.all_reduce(torch.ones(1))


def test_an_exception_on_one_rank_is_named_and_the_next_case_runs(pair: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*ValueError: this one"):
        pair.run(fails_on_one_rank)
    assert pair.run(identity, 1) == [(1, 0, 2), (1, 1, 2)]


def dies_on_one_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def sleeps_on_one_rank() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return 5


def test_a_process_that_dies_or_hangs_is_named_and_the_next_case_runs(pair: Ranks) -> None:
    outcomes = pair.outcomes(dies_on_one_rank)
    assert "exit code 7" in str(outcomes[1].error)
    assert "Error" in str(outcomes[0].error)
    pair.run(identity, 1)  # started, and the functions imported
    pair.timeout = 10
    outcomes = pair.outcomes(sleeps_on_one_rank)
    pair.timeout = 60
    assert outcomes[0].value == 5
    assert "sleeps_on_one_rank" in str(outcomes[1].error)
    assert pair.run(identity, 1) == [(1, 0, 2), (1, 1, 2)]
