"""Tables for kernels: memory is not written again before the copies out of it are done. (The GPU's part is played here.)"""

from __future__ import annotations

import torch

from opacus.grad_sample.kernels.ring import Ring

CPU = torch.device("cpu")


class Late:
    """A GPU that copies as late as it may: when an event behind the copy is waited for."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, list[int]]] = []

    def event(self) -> Late.Event:
        return Late.Event(self)

    class Event:
        def __init__(self, gpu: Late) -> None:
            self.gpu = gpu
            self.behind = 0

        def record(self) -> None:
            self.behind = len(self.gpu.asked)

        def synchronize(self) -> None:
            self.gpu.copy(self.behind)

    def copy(self, count: int) -> None:
        for source, wanted in self.asked[:count]:
            assert source.tolist() == wanted
        self.asked[:count] = [(torch.tensor(wanted), wanted) for _, wanted in self.asked[:count]]


def test_what_was_sent_is_there_until_it_was_copied():
    gpu = Late()
    ring = Ring(CPU, entries=16, event=gpu.event)
    for step in range(200):
        numbers = list(range(step, step + 1 + step % 8))
        # on a CPU `send` gives the pinned memory itself, which is what a late copy would read
        gpu.asked.append((ring.send(numbers), numbers))
    gpu.copy(len(gpu.asked))


def test_a_table_that_is_larger_than_half_a_ring_is_sent_all_the_same():
    assert Ring(CPU, entries=16).send(list(range(9))).tolist() == list(range(9))


def test_tables_of_one_half_do_not_wait():
    waits = []

    class Counted:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            waits.append(1)

    ring = Ring(CPU, entries=1024, event=Counted)
    for _ in range(64):
        ring.send([1] * 8)
    assert not waits
    for _ in range(129):
        ring.send([1] * 8)
    assert len(waits) == 2
