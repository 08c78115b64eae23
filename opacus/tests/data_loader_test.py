"""DPDataLoader: batches of every structure, empty ones included, and the sampling rate of any loader."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import default_collate

from opacus.data_loader import (
    CollateFnWithEmpty,
    DPDataLoader,
    dtype_safe,
    loader_problems,
    sample_rate_of,
    shape_safe,
    switch_generator,
    wrap_collate_with_empty,
)
from opacus.errors import ConfigurationError

NEVER = 1e-12  # a rate at which every batch is empty
Point = collections.namedtuple("Point", ["x", "label"])


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor
    names: list[str]


class Records(Dataset):
    """Record i, made by a function of i."""

    def __init__(self, make, size=6):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same_structure(batch, other, where="batch"):
    """Same classes, fields, dtypes and trailing shapes; only numbers of rows may differ."""
    assert type(batch) is type(other), where
    if isinstance(batch, torch.Tensor):
        assert batch.dtype == other.dtype, where
        assert batch.shape[1:] == other.shape[1:], where
    elif isinstance(batch, collections.abc.Mapping):
        assert list(batch) == list(other), where
        for key in batch:
            same_structure(batch[key], other[key], f"{where}[{key}]")
    elif isinstance(batch, (list, tuple)) and not all(isinstance(item, str) for item in [*batch, *other]):
        assert len(batch) == len(other), where
        for i, (a, b) in enumerate(zip(batch, other, strict=True)):
            same_structure(a, b, f"{where}[{i}]")


def tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, collections.abc.Mapping) else batch
    return [t for v in values if not isinstance(v, (str, int, type(None))) for t in tensors_of(v)]


RECORDS = {
    "tensor": lambda i: torch.full((3, 2), float(i)),
    "pair": lambda i: (torch.full((3,), float(i), dtype=torch.bfloat16), i),
    "numbers": lambda i: (i, i / 2, bool(i % 2)),
    "strings": lambda i: (torch.ones(2), f"record {i}"),
    "dict": lambda i: {"input_ids": torch.arange(5), "text": "abc", "label": i},
    "ordered dict": lambda i: collections.OrderedDict(a=torch.ones(1), b=i),
    "nested": lambda i: {"a": [torch.ones(2), {"b": (torch.zeros(4, 1).int(), "s")}], "c": (i, [i, i])},
    "named tuple": lambda i: Point(torch.ones(2, 2), i),
    "numpy": lambda i: (np.ones((2, 3), np.float16), np.int32(i)),
    "single field": lambda i: (torch.ones(3),),
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_very_first_batch_may_be_empty_with_workers_too(num_workers):
    data = TensorDataset(torch.randn(5, 3, 2), torch.arange(5))
    loader = DPDataLoader(data, sample_rate=NEVER, num_workers=num_workers)
    x, y = next(iter(loader))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3, 2), torch.float32, (0,), torch.int64)


@pytest.mark.parametrize("kind", RECORDS)
def test_empty_batches_have_the_structure_of_any_other(kind):
    data = Records(RECORDS[kind])
    empty = next(iter(DPDataLoader(data, sample_rate=NEVER)))
    full = next(iter(DPDataLoader(data, sample_rate=1.0)))
    same_structure(empty, full)
    assert all(len(tensor) == 0 for tensor in tensors_of(empty))


def test_strings_of_an_empty_batch_are_empty_lists():
    empty = next(iter(DPDataLoader(Records(RECORDS["dict"]), sample_rate=NEVER)))
    assert empty["text"] == []
    assert empty["input_ids"].shape == (0, 5)


def collate_time_first(records):
    return pad_sequence([x for x, _ in records]), torch.tensor([y for _, y in records])


def collate_offsets(records):
    lengths = torch.tensor([0] + [len(x) for x, _ in records])
    return torch.cat([x for x, _ in records]), lengths.cumsum(0), len(records)


def collate_detection(records):
    return tuple(zip(*records, strict=True))


def collate_popping(records):
    labels = [record.pop("label") for record in records]
    return {"labels": torch.tensor(labels), **default_collate(records)}


def collate_example(records):
    return Example(torch.stack([x for x, _ in records]), [str(y) for _, y in records])


def test_time_first_padding_loses_the_second_dimension_without_being_told():
    data = Records(lambda i: (torch.ones(4, 3), i))
    x, y = next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_time_first)))
    assert (x.shape, y.shape) == ((4, 0, 3), (0,))


def test_offsets_with_one_entry_more_than_records_keep_that_entry():
    data = Records(lambda i: (torch.arange(4), i))
    tokens, offsets, count = next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_offsets)))
    assert tokens.shape == (0,)
    assert offsets.tolist() == [0]
    assert count == 0


def test_per_record_lists_of_a_custom_collate_function_become_empty():
    data = Records(lambda i: (torch.ones(3, 10 + i, 5), {"boxes": torch.ones(2, 4)}))
    empty = next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_detection)))
    assert empty == () or empty == ((), ())


def test_a_collate_function_that_empties_its_records_leaves_the_data_set_alone():
    records = [{"x": torch.ones(2), "label": i} for i in range(3)]
    loader = DPDataLoader(records, sample_rate=NEVER, collate_fn=collate_popping)
    assert next(iter(loader))["labels"].shape == (0,)
    assert all("label" in record for record in records)


def test_dataclasses_keep_their_class():
    data = Records(lambda i: (torch.ones(3), i))
    empty = next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_example)))
    assert type(empty) is Example
    assert empty.x.shape == (0, 3)
    assert empty.names == []


def collate_packed(records):
    return pack_sequence(records)


def test_packed_sequences_become_packed_sequences_of_no_sequence():
    data = Records(lambda i: torch.ones(4, 3))
    empty = next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_packed)))
    assert isinstance(empty, PackedSequence)
    assert empty.data.shape == (0, 3)
    assert empty.batch_sizes.sum() == 0


def test_what_belongs_to_the_batch_is_kept():
    def collate(records):
        return {
            "x": torch.stack(records),
            "task": "mnli",
            "temperature": 0.7,
            "mask": None,
            "total": 3 * len(records),
        }

    empty = next(iter(DPDataLoader(Records(lambda i: torch.ones(2)), sample_rate=NEVER, collate_fn=collate)))
    assert empty.pop("x").shape == (0, 2)
    assert empty == {"task": "mnli", "temperature": 0.7, "mask": None, "total": 0}


def test_no_tensor_of_an_empty_batch_holds_a_records_values():
    def collate(records):
        return {"mean": torch.stack(records).mean(0), "sum": sum(r.sum() for r in records)}

    empty = next(iter(DPDataLoader(Records(lambda i: torch.ones(2)), sample_rate=NEVER, collate_fn=collate)))
    assert empty["mean"].tolist() == [0, 0]
    assert empty["sum"].item() == 0


def test_a_collate_function_only_ever_sees_records():
    seen = []

    def collate(records):
        seen.append(len(records))
        return default_collate(records)

    data = TensorDataset(torch.ones(3, 2))
    sizes = [
        len(x)
        for _ in range(30)
        for (x,) in DPDataLoader(data, sample_rate=0.2, collate_fn=collate, generator=seeded())
    ]
    assert 0 in sizes
    assert 0 not in seen


def collate_distinct(records):
    assert len({id(r) for r in records}) == len(records) == 1
    return torch.stack(records, 1)


def test_where_two_records_cannot_be_collated_batch_first_says_what_to_cut():
    data = Records(lambda i: torch.ones(4))
    for batch_first, shape in ((True, (0, 1)), (False, (4, 0))):
        loader = DPDataLoader(data, sample_rate=NEVER, collate_fn=collate_distinct, batch_first=batch_first)
        assert next(iter(loader)).shape == shape


class Opaque:
    def __init__(self, records):
        self.records = records


def test_an_object_without_an_empty_form_is_refused_by_name_only_when_needed():
    def collate(records):
        return {"graph": Opaque(records), "more": [Opaque(records)]}

    data = Records(lambda i: torch.ones(2))
    assert isinstance(next(iter(DPDataLoader(data, sample_rate=1.0, collate_fn=collate)))["graph"], Opaque)
    with pytest.raises(ConfigurationError, match=r"batch\['graph'\] is a .*Opaque") as caught:
        next(iter(DPDataLoader(data, sample_rate=NEVER, collate_fn=collate)))
    assert len(caught.value.problems) == 2


def test_a_data_set_that_fetches_lists_of_records_is_asked_that_way():
    class Fetched(Records):
        def __getitem__(self, index):
            raise AssertionError("records are fetched in lists")

        def __getitems__(self, indices):
            return [self.make(i) for i in indices]

    (x,) = next(iter(DPDataLoader(Fetched(lambda i: (torch.ones(7),)), sample_rate=NEVER)))
    assert x.shape == (0, 7)


def test_a_model_trains_on_empty_batches():
    data = TensorDataset(torch.randn(6, 3), torch.zeros(6, dtype=torch.int64))
    model = torch.nn.Linear(3, 2)
    x, y = next(iter(DPDataLoader(data, sample_rate=NEVER)))
    torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    assert model.weight.grad.eq(0).all()


def test_rand_on_empty_yields_one_made_up_record_and_says_what_that_costs():
    data = TensorDataset(torch.full((6, 3), 9.0), torch.full((6,), 7))
    with pytest.warns(UserWarning, match="sensitivity"):
        loader = DPDataLoader(data, sample_rate=NEVER, rand_on_empty=True)
    x, y = next(iter(loader))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((1, 3), torch.float32, (1,), torch.int64)
    assert {*x.flatten().tolist(), *y.tolist()} <= {0, 1}


def test_collate_with_given_shapes_answers_before_any_record_was_seen():
    collate = CollateFnWithEmpty(default_collate, True, False, [(0, 3), (0,), ()], [torch.float64, int, str])
    x, y, text = collate([])
    assert (x.shape, x.dtype, y.shape, y.dtype, text) == ((0, 3), torch.float64, (0,), torch.int64, [])


def test_collate_without_a_data_set_learns_from_the_first_record():
    collate = wrap_collate_with_empty(collate_fn=None)
    with pytest.warns(UserWarning, match="empty list"):
        assert collate([]) == []
    assert collate([{"a": torch.ones(3), "b": "x"}] * 2)["a"].shape == (2, 3)
    empty = collate([])
    assert empty["a"].shape == (0, 3)
    assert empty["b"] == []


def test_shape_and_dtype_of_anything():
    assert (shape_safe(torch.ones(2, 3)), dtype_safe(torch.ones(1).half())) == ((2, 3), torch.float16)
    assert (shape_safe("ab"), dtype_safe("ab"), dtype_safe(1)) == ((), str, int)


@pytest.mark.parametrize(("size", "batch_size"), [(100, 10), (101, 10), (49, 1), (7, 20), (60000, 256)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rate_of_a_plain_loader_is_one_over_its_length(size, batch_size, drop_last):
    loader = DataLoader(range(size), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    if len(loader) == 0:
        assert "drop_last" in loader_problems(loader)[0]
        return
    assert sample_rate_of(loader) == 1 / len(loader)
    private = DPDataLoader.from_data_loader(loader)
    assert len(private) == len(loader)
    assert private.sample_rate == 1 / len(loader)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda data: WeightedRandomSampler([1.0] * len(data), 50),
        lambda data: SubsetRandomSampler(range(40)),
        lambda data: RandomSampler(data, replacement=True, num_samples=5000),
    ],
)
def test_a_samplers_own_length_does_not_move_the_rate_and_its_loss_is_said(make_sampler):
    data = TensorDataset(torch.ones(1000, 1))
    sampler = make_sampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    with pytest.warns(UserWarning, match=type(sampler).__name__) as caught:
        private = DPDataLoader.from_data_loader(loader)
    assert len(caught) == 1
    assert private.sample_rate == 0.008


def test_plain_loaders_are_replaced_without_a_warning():
    data = TensorDataset(torch.ones(20, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shuffle in (True, False):
            private = DPDataLoader.from_data_loader(
                DataLoader(data, batch_size=4, shuffle=shuffle, drop_last=True)
            )
            assert DPDataLoader.from_data_loader(private).sample_rate == 0.2


def test_a_batch_samplers_batch_size_is_used():
    batches = BatchSampler(RandomSampler(range(100)), batch_size=20, drop_last=False)
    assert sample_rate_of(DataLoader(range(100), batch_sampler=batches)) == 0.2


@pytest.mark.parametrize("world_size", [2, 3])
def test_under_a_distributed_sampler_the_rate_is_that_of_all_ranks_together(world_size):
    data = range(100)
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, num_replicas=world_size, rank=0))
    assert sample_rate_of(loader) == 1 / len(loader)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Lengthless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Stream()), "Stream.*IterableDataset"),
        (DataLoader(Lengthless(), sampler=[0, 1]), "Lengthless.*no length"),
        (DataLoader([], batch_size=2), "list.*is empty"),
        (DataLoader(range(5), batch_size=None), "batch_size=None"),
        (DataLoader(range(5), batch_sampler=[[0], [1, 2]]), "list.*no batch_size"),
        ([1, 2], "a list"),
    ],
)
def test_loaders_that_cannot_be_poisson_sampled_are_refused_by_name(loader, words):
    with pytest.raises(ConfigurationError, match=words):
        sample_rate_of(loader)
    with pytest.raises(ConfigurationError, match=words):
        DPDataLoader.from_data_loader(loader)


def test_a_batch_size_of_zero_is_named():
    batches = BatchSampler(range(5), batch_size=1, drop_last=False)
    batches.batch_size = 0
    assert "batch_size is 0" in loader_problems(DataLoader(range(5), batch_sampler=batches))[0]


def test_a_usable_loader_has_no_problems():
    assert loader_problems(DataLoader(range(5), batch_size=2)) == []


def test_all_bad_arguments_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        DPDataLoader([], sample_rate=2.0, batch_size=3, shuffle=True)
    message = str(caught.value)
    assert all(word in message for word in ("empty", "sample_rate", "batch_size", "shuffle"))


def test_drop_last_is_ignored_and_said():
    with pytest.warns(UserWarning, match="drop_last"):
        assert len(DPDataLoader(range(10), sample_rate=0.25, drop_last=True)) == 4


def test_how_a_loader_loads_is_carried_over():
    loader = DataLoader(
        TensorDataset(torch.ones(6, 1)),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=5,
        timeout=7,
        multiprocessing_context="spawn",
        worker_init_fn=print,
        pin_memory=True,
        collate_fn=collate_detection,
        generator=seeded(),
    )
    private = DPDataLoader.from_data_loader(loader)
    for name in (
        "num_workers",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
        "pin_memory",
    ):
        assert getattr(private, name) == getattr(loader, name)
    assert private.multiprocessing_context.get_start_method() == "spawn"
    assert private.collate_fn.collator_fn is collate_detection
    assert private.generator is private.batch_sampler.generator is loader.generator
    again = DPDataLoader.from_data_loader(private)
    assert again.collate_fn.collator_fn is collate_detection


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_seed_repeats_the_batches_and_a_new_epoch_draws_others(num_workers):
    data = TensorDataset(torch.arange(100))

    def epochs():
        loader = DPDataLoader(
            data,
            sample_rate=0.2,
            generator=seeded(3),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        return [[x.tolist() for (x,) in loader] for _ in range(2)]

    first = epochs()
    assert first == epochs()
    assert first[0] != first[1]


def test_the_loader_shows_each_record_with_the_stated_probability():
    data = TensorDataset(torch.arange(10))
    loader = DPDataLoader(data, sample_rate=0.01, generator=seeded(1))
    drawn = torch.cat([x for _ in range(60) for (x,) in loader])
    low, high = binom.ppf([1e-8, 1 - 1e-8], 6000, 0.01)
    counts = torch.bincount(drawn, minlength=10)
    assert low <= counts.min()
    assert counts.max() <= high


def test_the_collate_function_survives_pickling():
    collate = DPDataLoader(TensorDataset(torch.ones(3, 4)), sample_rate=0.5).collate_fn
    assert pickle.loads(pickle.dumps(collate))([])[0].shape == (0, 4)


def test_switching_the_generator_leaves_the_first_loader_alone():
    data = TensorDataset(torch.arange(50))
    old, new = seeded(1), seeded(2)
    for loader in (
        DPDataLoader(data, sample_rate=0.2, generator=old),
        DataLoader(data, 5, shuffle=True, generator=old),
    ):
        state = copy.deepcopy(old.get_state())
        switched = switch_generator(data_loader=loader, generator=new)
        new.manual_seed(2)
        first = [x.tolist() for (x,) in switched]
        new.manual_seed(2)
        assert [x.tolist() for (x,) in switched] == first
        assert torch.equal(old.get_state(), state)
        assert len(switched) == len(loader)


def test_switching_the_generator_of_a_loader_that_draws_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="SequentialSampler"):
        switch_generator(data_loader=DataLoader(range(4)), generator=seeded())


def test_a_subset_is_sampled_within_itself():
    data = Subset(TensorDataset(torch.arange(100)), range(40, 60))
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=5))
    assert loader.sample_rate == 0.25
    assert {int(v) for (x,) in loader for v in x} <= set(range(40, 60))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_on_an_accelerator_serves_the_loader(num_workers, two_devices):
    data = TensorDataset(torch.arange(50))
    generator = torch.Generator(device=two_devices[1]).manual_seed(3)
    loader = DPDataLoader(
        data, sample_rate=0.2, generator=generator, num_workers=num_workers, pin_memory=True
    )
    first = [x.tolist() for (x,) in loader]
    generator.manual_seed(3)
    assert [x.tolist() for (x,) in loader] == first
    assert DPDataLoader.from_data_loader(loader).batch_sampler.generator is generator


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_ranks_loaders_together_show_the_batches_of_one_process(world_size, monkeypatch):
    data = TensorDataset(torch.arange(30))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        loader = DPDataLoader(data, sample_rate=0.1, generator=seeded(2), distributed=True)
        shares.append([x.tolist() for (x,) in loader])
    together = [sorted(v for share in batches for v in share) for batches in zip(*shares, strict=True)]
    assert together == [x.tolist() for (x,) in DPDataLoader(data, sample_rate=0.1, generator=seeded(2))]


def test_sampling_over_ranks_without_a_process_group_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="init_process_group"):
        DPDataLoader(range(5), sample_rate=0.5, distributed=True)
