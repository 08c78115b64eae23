"""Batches of no record, from the batches of one and two copies of a record."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from opacus.errors import ConfigurationError
from opacus.utils.empty_batch import batch_without_records, random_batch


class Settings:
    """Equal to every other one."""

    def __eq__(self, other):
        return isinstance(other, Settings)

    __hash__ = object.__hash__


class Incomparable:
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = object.__hash__


def test_arrays_lose_what_grows_and_keep_their_dtype():
    empty = batch_without_records(np.ones((4, 1, 3), np.float16), np.ones((4, 2, 3), np.float16))
    assert (empty.shape, empty.dtype) == ((4, 0, 3), np.float16)
    made_up = random_batch(np.full((4, 1), 9, np.int32), np.full((4, 2), 9, np.int32))
    assert made_up.shape == (4, 1)
    assert made_up.dtype == np.int32
    assert set(made_up.flatten().tolist()) <= {0, 1}


def test_every_dimension_that_grows_goes():
    assert batch_without_records(torch.ones(1, 5, 1), torch.ones(2, 5, 2)).shape == (0, 5, 0)


@pytest.mark.parametrize(("batch_dim", "shape"), [(0, (0, 3)), (1, (2, 0)), (5, (2, 0))])
def test_with_one_batch_only_the_stated_dimension_goes(batch_dim, shape):
    assert batch_without_records(torch.ones(2, 3), batch_dim=batch_dim).shape == shape
    assert batch_without_records(torch.ones(7), batch_dim=batch_dim).shape == (0,)
    assert batch_without_records(torch.tensor(7.0), batch_dim=batch_dim).item() == 0


def test_with_one_batch_only_strings_and_numbers_do_not_survive():
    one = {"text": ["a record's"], "id": "record 0", "length": 12, "mask": None, "fields": [torch.ones(1, 2)]}
    empty = batch_without_records(one)
    assert empty.pop("fields")[0].shape == (0, 2)
    assert empty == {"text": [], "id": "", "length": 0, "mask": None}


def test_mappings_that_cannot_be_changed_are_made_anew():
    one, two = (types.MappingProxyType({"x": torch.ones(n, 2)}) for n in (1, 2))
    empty = batch_without_records(one, two)
    assert type(empty) is types.MappingProxyType
    assert empty["x"].shape == (0, 2)


def test_constant_objects_are_kept_and_others_refused_by_place():
    assert isinstance(batch_without_records([Settings()], [Settings()])[0], Settings)
    assert batch_without_records([torch.float16], [torch.float16]) == [torch.float16]
    with pytest.raises(ConfigurationError, match=r"batch\[0\]\['a'\] is a .*Incomparable"):
        batch_without_records([{"a": Incomparable()}], [{"a": Incomparable()}])


def test_a_made_up_record_holds_no_string_of_a_real_one():
    one, two = (
        {"x": torch.full((n, 2), 5, dtype=torch.bool), "names": ["secret"] * n, "task": "t"} for n in (1, 2)
    )
    made_up = random_batch(one, two)
    assert (made_up["x"].shape, made_up["x"].dtype) == ((1, 2), torch.bool)
    assert made_up["names"] == [""]
    assert made_up["task"] == "t"


def test_the_example_batches_are_left_as_they_are():
    one, two = ({"x": torch.ones(n, 2), "l": ["a"] * n} for n in (1, 2))
    batch_without_records(one, two)
    assert one["x"].shape == (1, 2)
    assert one["l"] == ["a"]
