"""Poisson sampling, by distribution: bounds are exact binomial tails that fail with probability below 1e-6."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from scipy.stats import binom, chi2

from opacus.errors import ConfigurationError
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    poisson_mask,
    steps_per_epoch,
)

RARE = 1e-7


def draw(num_samples, sample_rate, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sampler = UniformWithReplacementSampler(
        num_samples=num_samples, sample_rate=sample_rate, generator=generator, steps=steps
    )
    mask = torch.zeros(steps, num_samples, dtype=torch.bool)
    for step, batch in enumerate(sampler):
        mask[step, batch] = True
    return mask


@pytest.mark.parametrize("sample_rate", [0.02, 0.3, 0.9])
def test_each_record_is_in_a_batch_with_the_stated_probability(sample_rate):
    steps, size = 4000, 20
    counts = draw(size, sample_rate, steps).sum(0)
    low, high = binom.ppf([RARE / size, 1 - RARE / size], steps, sample_rate)
    assert low <= counts.min()
    assert counts.max() <= high


def test_records_are_drawn_independently_of_one_another():
    steps, size, rate = 6000, 8, 0.25
    mask = draw(size, rate, steps, seed=1).double()
    together = mask.T @ mask
    low, high = binom.ppf([RARE / 56, 1 - RARE / 56], steps, rate**2)
    pairs = together[~torch.eye(size, dtype=torch.bool)]
    assert low <= pairs.min()
    assert pairs.max() <= high


def test_batch_sizes_are_binomial():
    steps, size, rate = 8000, 12, 0.2
    sizes = draw(size, rate, steps, seed=2).sum(1)
    observed = torch.bincount(sizes, minlength=7)[:7].double()
    observed[6] += (sizes > 6).sum()
    expected = torch.tensor([*binom.pmf(range(6), size, rate), binom.sf(5, size, rate)]) * steps
    assert ((observed - expected) ** 2 / expected).sum() < chi2.ppf(1 - RARE, df=6)


def test_successive_batches_are_independent():
    steps, rate = 8000, 0.3
    mask = draw(3, rate, steps, seed=3)
    both = (mask[1:] & mask[:-1]).sum(0)
    # overlapping pairs: their count spreads more than a binomial, so the bounds are wider
    low, high = binom.ppf([1e-12, 1 - 1e-12], steps - 1, rate**2)
    assert low <= both.min()
    assert both.max() <= high


def test_rates_are_resolved_much_finer_than_float32():
    """The rate from which on a record is drawn, found by bisection, is no multiple of float32's 2**-24.

    With float32 draws a rate of 1e-8 would act like 6e-8.
    """
    for record in range(6):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            drawn = poisson_mask(6, max(middle, 1e-300), torch.Generator().manual_seed(4))[record]
            low, high = (low, middle) if drawn else (middle, high)
        assert (high * 2**24) % 1 != 0
        assert (high * 2**40) % 1 != 0


def test_rate_one_takes_every_record_every_time():
    assert draw(50, 1.0, 20).all()


def test_a_large_data_set_is_drawn_in_pieces_of_the_right_total():
    mask = poisson_mask(2**22 + 5, 0.5, torch.Generator().manual_seed(0))
    assert mask.shape == (2**22 + 5,)
    assert mask[2**22 :].dtype == torch.bool


def test_iterating_twice_draws_anew_and_a_seed_repeats_the_run():
    def sampler():
        generator = torch.Generator().manual_seed(5)
        return UniformWithReplacementSampler(num_samples=200, sample_rate=0.2, generator=generator)

    first, second = sampler(), sampler()
    epochs = [list(first), list(first)]
    assert epochs[0] != epochs[1]
    assert [list(second), list(second)] == epochs


def test_without_a_generator_the_default_stream_decides():
    sampler = UniformWithReplacementSampler(num_samples=100, sample_rate=0.5, steps=3)
    torch.manual_seed(6)
    first = list(sampler)
    torch.manual_seed(6)
    assert list(sampler) == first


def test_an_epoch_has_as_many_batches_as_the_rate_says_despite_float_rounding():
    assert all(steps_per_epoch(1 / n) == n for n in range(1, 20000))
    assert [steps_per_epoch(q) for q in (0.3, 0.4, 0.6, 1.0, 0.15)] == [3, 2, 1, 1, 6]


@pytest.mark.parametrize("steps", [None, 0, 7])
def test_the_length_is_the_number_of_batches(steps):
    sampler = UniformWithReplacementSampler(num_samples=10, sample_rate=0.25, steps=steps)
    assert len(list(sampler)) == len(sampler) == (4 if steps is None else steps)


def test_all_bad_arguments_are_named_at_once():
    with pytest.raises(ConfigurationError, match="num_samples") as caught:
        UniformWithReplacementSampler(num_samples=0, sample_rate=float("nan"), steps=-1)
    assert len(caught.value.problems) == 3
    for rate in (0, -0.1, 1.5, float("inf"), "0.1", None):
        with pytest.raises(ConfigurationError, match="sample_rate"):
            UniformWithReplacementSampler(num_samples=5, sample_rate=rate)


def test_a_sampler_survives_pickling():
    sampler = UniformWithReplacementSampler(num_samples=10, sample_rate=1.0, steps=2)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)


@pytest.fixture
def as_rank(monkeypatch):
    """Play one rank of several: the sampler asks torch.distributed nothing but rank and world size."""

    def become(rank, world_size):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)

    return become


def batches_of_rank(as_rank, rank, world_size, seed, epoch=0, **kwargs):
    as_rank(rank, world_size)
    sampler = DistributedUniformWithReplacementSampler(
        total_size=23, sample_rate=0.4, generator=torch.Generator().manual_seed(seed), **kwargs
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_seeded_alike_together_draw_the_batches_of_one_process(as_rank, world_size, shuffle):
    generator = torch.Generator().manual_seed(8)
    alone = UniformWithReplacementSampler(num_samples=23, sample_rate=0.4, generator=generator)
    ranks = [batches_of_rank(as_rank, r, world_size, seed=8, shuffle=shuffle) for r in range(world_size)]
    assert [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)] == list(alone)


def test_every_record_belongs_to_exactly_one_rank_in_every_epoch(as_rank):
    owners = []
    for epoch in (0, 1):
        shares = []
        for rank in range(3):
            as_rank(rank, 3)
            sampler = DistributedUniformWithReplacementSampler(total_size=23, sample_rate=1.0)
            sampler.set_epoch(epoch)
            (batch,) = list(sampler)
            assert len(batch) == sampler.num_samples
            shares.append(batch)
        assert sorted(itertools.chain(*shares)) == list(range(23))
        owners.append(shares)
    assert [set(s) for s in owners[0]] != [set(s) for s in owners[1]]


def test_ranks_have_the_same_number_of_batches_whatever_their_seeds(as_rank):
    ranks = [batches_of_rank(as_rank, r, 4, seed=r, steps=11) for r in range(4)]
    assert [len(r) for r in ranks] == [11] * 4


def test_distributed_sampling_without_a_process_group_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="init_process_group") as caught:
        DistributedUniformWithReplacementSampler(total_size=0, sample_rate=2)
    assert len(caught.value.problems) == 3


def test_a_generator_on_an_accelerator_draws_there(two_devices):
    generator = torch.Generator(device=two_devices[1]).manual_seed(0)
    before = generator.get_state().clone()
    sampler = UniformWithReplacementSampler(num_samples=1000, sample_rate=0.2, generator=generator, steps=400)
    count = sum(len(batch) for batch in sampler)
    low, high = binom.ppf([RARE, 1 - RARE], 400_000, 0.2)
    assert low <= count <= high
    assert not torch.equal(before, generator.get_state())
