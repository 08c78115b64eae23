"""Sharded runs are saved to a folder and go on, on as many ranks bit for bit, on others without repeating any noise."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path

import pytest
import torch

from opacus import PrivacyEngine
from opacus.checkpoint import CheckpointError
from opacus.grad_sample import GradSampleModule
from opacus.tests import fsdp_checkpoint_cases as cases
from opacus.tests.fsdp_cases import build


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run")


@pytest.mark.parametrize("wrap_model", [True, False])
def test_on_as_many_ranks_the_run_goes_on_bit_for_bit(two_ranks, path, wrap_model):
    for (saved, ended), (loaded, resumed) in zip(
        two_ranks.run(cases.start, path, wrap_model=wrap_model),
        two_ranks.run(cases.resume, path, wrap_model=wrap_model),
        strict=True,
    ):
        for before, after in ((saved, loaded), (ended, resumed)):
            assert same(before["parameters"], after["parameters"])
            assert same(before["moments"], after["moments"])
            assert before["epsilon"] == after["epsilon"]
            assert before["lr"] == after["lr"]
        assert [saved["steps"], ended["steps"]] == [2, 4] == [loaded["steps"], resumed["steps"]]
        assert all(torch.equal(a, b) for a, b in zip(ended["noise"][2:], resumed["noise"], strict=True))


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_on_other_ranks_weights_and_state_are_the_same_and_the_noise_is_new(
    two_ranks, four_ranks, path, kind
):
    saved, _ = two_ranks.run(cases.start, path)[0]
    results = four_ranks.run(cases.resume, path, kind)
    for loaded, resumed in results:
        assert same(saved["parameters"], loaded["parameters"])
        assert same(saved["moments"], loaded["moments"])
        assert saved["epsilon"] == loaded["epsilon"]
        assert saved["lr"] == loaded["lr"]
        assert resumed["steps"] == 4
        assert not {v for n in saved["noise"] for v in n.flatten().tolist()} & {
            v for n in resumed["noise"] for v in n.flatten().tolist()
        }
        assert same(results[0][1]["parameters"], resumed["parameters"])


def test_no_seed_is_used_by_two_layouts_of_a_run(two_ranks, four_ranks, path):
    """2 ranks, then 4, then 2 x 2, then 2: ranges of seeds do not meet, and the base is one."""
    two_ranks.run(cases.start, path)
    first = two_ranks.run(cases.seeds, path, "fsdp")[0]
    ranges = [first]
    for pool, kind in ((four_ranks, "fsdp"), (four_ranks, "hsdp"), (two_ranks, "fsdp")):
        pool.run(cases.move_on, path, kind)
        ranges.append(pool.run(cases.seeds, path, kind)[0])
    assert len({base for base, _, _ in ranges}) == 1
    spans = sorted((start, end) for _, start, end in ranges)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_saving_again_replaces_the_shards(two_ranks, path):
    two_ranks.run(cases.start, path)
    first = {entry.name for entry in Path(path).iterdir()}
    two_ranks.run(cases.move_on, path, "fsdp")
    second = {entry.name for entry in Path(path).iterdir()}
    assert len(first) == len(second) == 2
    assert first & second == {"run.pt"}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("lora", ["groups"]),
        ("wider", ["head.weight", "size mismatch"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(two_ranks, path, what, says):
    two_ranks.run(cases.start, path)
    for message, untouched in two_ranks.run(cases.refused, path, what):
        assert untouched
        assert all(part in message for part in says), message


def test_a_folder_of_shards_is_no_checkpoint_of_one_process(two_ranks, path):
    two_ranks.run(cases.start, path)
    module = GradSampleModule(build())
    with pytest.raises(CheckpointError, match="folder of shards, but the module is not sharded"):
        PrivacyEngine().load_checkpoint(path=path, module=module)


def test_a_single_file_is_no_sharded_checkpoint(two_ranks, path):
    torch.save({"module_state_dict": {}}, path)
    for message, untouched in two_ranks.run(cases.refused, path, "a file"):
        assert untouched
        assert "single file" in message


def test_a_save_that_fails_leaves_the_checkpoint_there_was(two_ranks, path):
    two_ranks.run(cases.start, path)
    before = sorted(entry.name for entry in Path(path).iterdir())
    for message, _ in two_ranks.run(cases.refused, path, "unsaveable"):
        assert "cannot" in message or "could not" in message
    assert sorted(entry.name for entry in Path(path).iterdir()) == before
    Path(f"{path}-file").write_text("mine")
    for message, _ in two_ranks.run(cases.refused, path, "to a file"):
        assert "is a file" in message
    assert Path(f"{path}-file").read_text() == "mine"


class Exploit:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("where", ["contents", "shard", "damaged"])
def test_no_code_in_a_checkpoint_is_executed(two_ranks, path, tmp_path, where):
    two_ranks.run(cases.start, path)
    shards = next(Path(path).glob("shards-*"))
    poison = pickle.dumps(Exploit(str(tmp_path / "exploited")))
    if where == "contents":
        (shards / ".metadata").write_bytes(poison)
    elif where == "damaged":
        (shards / ".metadata").write_bytes((shards / ".metadata").read_bytes()[:50])
    else:
        for shard in shards.glob("*.distcp"):
            shard.write_bytes(poison + bytes(shard.stat().st_size))
    for message, untouched in two_ranks.run(cases.refused, path, where):
        assert untouched
        assert "cannot be loaded" in message
    assert not (tmp_path / "exploited").exists()
