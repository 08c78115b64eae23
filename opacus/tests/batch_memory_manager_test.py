"""BatchMemoryManager: one step for each logical batch, whatever the sizes, workers and early exits."""

from __future__ import annotations

import contextlib
import math
import warnings

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from opacus.data_loader import DPDataLoader
from opacus.errors import ConfigurationError
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager, BatchSplittingSampler, wrap_data_loader
from opacus.utils.uniform_sampler import UniformWithReplacementSampler


class Recorder:
    """What `DPOptimizer` promises about signals and nothing else: a FIFO queue, one signal a step, kept sums."""

    def __init__(self):
        self._step_skip_queue = []
        self._is_last_step_skipped = False
        self.accumulated, self.steps = [], []

    def signal_skip_step(self, do_skip=True):
        self._step_skip_queue.append(do_skip)

    def step(self, records=()):
        self.accumulated += list(records)
        self._is_last_step_skipped = self._step_skip_queue.pop(0)
        if not self._is_last_step_skipped:
            self.steps.append(self.accumulated)
            self.accumulated = []

    def zero_grad(self):
        if not self._is_last_step_skipped:
            self.accumulated = []


def numbers(size):
    return TensorDataset(torch.arange(size))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def train(loader, optimizer, stop_after=math.inf):
    sizes = []
    for (x,) in loader:
        optimizer.zero_grad()
        optimizer.step(x.tolist())
        sizes.append(len(x))
        if len(sizes) >= stop_after:
            break
    return sizes


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("sizes", [[5, 0, 1, 4], [0, 0], [7], [6, 6], []])
def test_the_last_piece_of_every_logical_batch_steps_and_no_other(limit, sizes):
    batches = [[10 * i + j for j in range(size)] for i, size in enumerate(sizes)]
    optimizer = Recorder()
    pieces = list(BatchSplittingSampler(sampler=batches, max_batch_size=limit, optimizer=optimizer))
    for piece in pieces:
        optimizer.step(piece)
    assert optimizer.steps == batches
    assert optimizer.accumulated == []
    assert all(len(piece) <= limit for piece in pieces)
    assert len(pieces) == sum(max(1, math.ceil(size / limit)) for size in sizes)


def test_pieces_of_a_logical_batch_differ_in_size_by_at_most_one():
    for size in range(1, 40):
        splitter = BatchSplittingSampler(sampler=[list(range(size))], max_batch_size=7, optimizer=Recorder())
        pieces = [len(piece) for piece in splitter]
        assert max(pieces) - min(pieces) <= 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_sum_over_the_logical_batches_with_workers_running_ahead_too(num_workers):
    data = numbers(30)
    loader = DPDataLoader(data, sample_rate=0.1, generator=seeded(4), num_workers=num_workers)
    plain = DPDataLoader(data, sample_rate=0.1, generator=seeded(4), num_workers=num_workers)
    expected = [x.tolist() for (x,) in plain]
    optimizer = Recorder()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as physical:
        sizes = train(physical, optimizer)
    assert optimizer.steps == expected
    assert max(sizes) <= 2
    assert optimizer._step_skip_queue == []


def test_empty_logical_batches_step():
    optimizer = Recorder()
    loader = DPDataLoader(numbers(10), sample_rate=1e-12)
    splitter = BatchSplittingSampler(
        sampler=UniformWithReplacementSampler(num_samples=10, sample_rate=1e-12, steps=3),
        max_batch_size=2,
        optimizer=optimizer,
    )
    split = DataLoader(loader.dataset, batch_sampler=splitter, collate_fn=loader.collate_fn)
    assert train(split, optimizer) == [0, 0, 0]
    assert optimizer.steps == [[], [], []]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_between_logical_batches_leaves_nothing_behind_and_says_nothing(num_workers):
    optimizer = Recorder()
    loader = DataLoader(numbers(40), batch_size=4, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical:
            train(physical, optimizer, stop_after=4)
    assert optimizer._step_skip_queue == []
    assert optimizer.steps == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_logical_batch_left_half_done_is_dropped_and_named(num_workers):
    optimizer = Recorder()
    loader = DataLoader(numbers(40), batch_size=4, num_workers=num_workers)
    with pytest.warns(UserWarning, match="half done"):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical:
            train(physical, optimizer, stop_after=3)
    assert optimizer._step_skip_queue == []
    assert optimizer.accumulated == []
    assert optimizer.steps == [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starting_over_inside_the_context_never_mixes_two_logical_batches(num_workers):
    optimizer = Recorder()
    loader = DataLoader(numbers(12), batch_size=4, num_workers=num_workers)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as physical:
        train(physical, optimizer, stop_after=1)
        with pytest.warns(UserWarning, match="half done"):
            train(physical, optimizer)
        train(physical, optimizer)
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert optimizer.steps == epoch + epoch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_made_anew_drops_what_the_one_before_it_left_half_done(num_workers):
    optimizer = Recorder()
    loader = DataLoader(numbers(12), batch_size=4, num_workers=num_workers)

    def split():
        return wrap_data_loader(data_loader=loader, max_batch_size=2, optimizer=optimizer)

    train(split(), optimizer, stop_after=3)
    with pytest.warns(UserWarning, match="half done"):
        train(split(), optimizer)
    assert optimizer.steps == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert optimizer._step_skip_queue == []


def test_an_error_in_training_leaves_no_signal_behind():
    optimizer = Recorder()
    manager = BatchMemoryManager(
        data_loader=DataLoader(numbers(8), batch_size=4), max_physical_batch_size=4, optimizer=optimizer
    )
    with contextlib.suppress(RuntimeError), manager as physical:
        next(iter(physical))
        raise RuntimeError("the user's")
    assert optimizer._step_skip_queue == []
    with manager as physical:
        train(physical, optimizer)
    assert optimizer.steps == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_steps_that_were_never_taken_are_counted_in_a_warning():
    optimizer = Recorder()
    loader = DataLoader(numbers(8), batch_size=4)
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught, manager as physical:
        warnings.simplefilter("always")
        for i, (x,) in enumerate(physical):
            if i != 1:
                optimizer.step(x.tolist())
    assert "not called for 1 of 4" in str(caught[0].message)


def test_signals_of_others_stay_in_the_queue():
    optimizer = Recorder()
    optimizer.signal_skip_step(False)
    with BatchMemoryManager(
        data_loader=DataLoader(numbers(4), batch_size=4), max_physical_batch_size=2, optimizer=optimizer
    ) as physical:
        next(iter(physical))
    assert optimizer._step_skip_queue == [False]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sample_rate", [0.05, 0.4])
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_the_real_optimizer_ends_where_whole_logical_batches_end(loss_reduction, sample_rate, num_workers):
    """Clipping, noise of the same seed, momentum; at the lower rate many logical batches are empty."""
    x, y = torch.randn(20, 3, generator=seeded(1)).double(), torch.randn(20, 1, generator=seeded(2)).double()

    def trained(limit):
        torch.manual_seed(0)
        model = GradSampleModule(torch.nn.Linear(3, 1).double(), loss_reduction=loss_reduction)
        steps = []
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            noise_multiplier=0.5,
            max_grad_norm=0.7,
            expected_batch_size=20 * sample_rate,
            loss_reduction=loss_reduction,
            generator=seeded(3),
        )
        optimizer.attach_step_hook(steps.append)
        loader = DPDataLoader(
            TensorDataset(x, y), sample_rate=sample_rate, generator=seeded(4), num_workers=num_workers
        )
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer
        ) as physical:
            for inputs, target in physical:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), target, reduction=loss_reduction).backward()
                optimizer.step()
        assert optimizer._step_skip_queue == []
        assert len(steps) == len(loader)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(trained(limit=3), trained(limit=1000), rtol=1e-12, atol=1e-12)


def test_the_real_optimizer_forgets_a_logical_batch_left_half_done():
    model = GradSampleModule(torch.nn.Linear(1, 1))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as physical:
            (x,) = next(iter(physical))
            model(x).mean().backward()
            optimizer.step()
            assert all(p.summed_grad is not None for p in model.parameters())
    assert all(p.summed_grad is None and p.grad_sample is None for p in model.parameters())


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    ("size", "batch", "limit"), [(20, 7, 3), (21, 7, 3), (20, 7, 7), (5, 8, 3), (20, 4, 100)]
)
def test_the_length_for_batches_of_fixed_size_is_exact(size, batch, limit, drop_last):
    batches = BatchSampler(SequentialSampler(range(size)), batch, drop_last)
    splitter = BatchSplittingSampler(sampler=batches, max_batch_size=limit, optimizer=Recorder())
    assert len(splitter) == len(list(splitter))


def test_the_length_for_poisson_batches_is_the_expected_number():
    """Against the definition: sum over all sizes of probability times pieces."""
    size, rate, limit, steps = 30, 0.1, 2, 500
    mean = sum(
        math.comb(size, k) * rate**k * (1 - rate) ** (size - k) * max(1, math.ceil(k / limit))
        for k in range(size + 1)
    )
    sampler = UniformWithReplacementSampler(num_samples=size, sample_rate=rate, steps=steps)
    splitter = BatchSplittingSampler(sampler=sampler, max_batch_size=limit, optimizer=Recorder())
    assert len(splitter) == round(steps * mean)


def test_how_the_loader_loads_and_collates_is_kept():
    loader = DPDataLoader(
        numbers(10), sample_rate=0.5, num_workers=1, persistent_workers=True, generator=seeded()
    )
    split = wrap_data_loader(data_loader=loader, max_batch_size=2, optimizer=Recorder())
    assert split.dataset is loader.dataset
    assert split.collate_fn is loader.collate_fn
    assert split.generator is loader.generator
    assert (split.num_workers, split.persistent_workers) == (1, True)
    assert type(loader.batch_sampler) is UniformWithReplacementSampler


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_everything_that_cannot_be_split_is_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        BatchMemoryManager(data_loader=DataLoader(Stream()), max_physical_batch_size=0, optimizer=object())
    message = str(caught.value)
    assert all(
        word in message for word in ("max_physical_batch_size is 0", "Stream", "make_private returned")
    )
    split = wrap_data_loader(data_loader=DataLoader(numbers(4)), max_batch_size=2, optimizer=Recorder())
    with pytest.raises(ConfigurationError, match="already"):
        wrap_data_loader(data_loader=split, max_batch_size=1, optimizer=Recorder())


def test_shuffled_batches_are_split_too():
    optimizer = Recorder()
    batches = BatchSampler(RandomSampler(range(10), generator=seeded()), 4, False)
    loader = DataLoader(numbers(10), batch_sampler=batches)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as physical:
        train(physical, optimizer)
    assert sorted(sum(optimizer.steps, [])) == list(range(10))  # noqa: RUF017
    assert [len(step) for step in optimizer.steps] == [4, 4, 2]
