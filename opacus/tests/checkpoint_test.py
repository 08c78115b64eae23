"""Checkpoints: a killed run goes on bit for bit, files are whole, nothing hostile is executed, nothing is half loaded."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.checkpoint import CheckpointError
from opacus.errors import ConfigurationError
from opacus.tests.checkpoint_run import ADAPTIVE, BATCHES, DELTA, EPOCHS, Case, Run, run

CASES = {
    "SGD with momentum": Case(),
    "Adam and schedules": Case(adam=True, schedules=True),
    "within an epoch": Case(every=1),
    "within an epoch, streams of their own": Case(every=2, own_streams=True, schedules=True),
    "within an epoch, physical batches": Case(every=1, physical=3),
    "adaptive clipping": Case(adam=True, every=1, options=ADAPTIVE),
    "per-layer clipping": Case(
        schedules=True, options={"clipping": "per_layer", "max_grad_norm": [0.3, 0.4, 0.5, 0.6]}
    ),
    "two devices": Case(layout="two", adam=True, every=1),
    "two devices, adaptive clipping": Case(layout="two", options=ADAPTIVE),
    "device and CPU": Case(layout="device+cpu", schedules=True, every=1),
    "device and CPU, streams of their own": Case(layout="device+cpu", own_streams=True),
}


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes forked from one that has imported torch but never run anything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["opacus.tests.checkpoint_run"])
    return context


def attempt(processes: Any, case: Case, folder: Path, **kill: Any) -> int:
    process = processes.Process(target=run, args=(case, folder), kwargs=kill)
    process.start()
    process.join(120)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode


def result(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "result.pt", weights_only=True)


def assert_same(one: Any, other: Any) -> None:
    """Equal to the last bit, at any depth."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def assert_same_run(one: Path, other: Path) -> None:
    assert_same(
        *({key: value for key, value in result(folder).items() if key != "calls"} for folder in (one, other))
    )


@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_any_moment_and_resumed_is_the_uninterrupted_run(name, processes, tmp_path):
    case = CASES[name]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert attempt(processes, case, whole) == 0
    calls = result(whole)["calls"]
    moments = random.Random(name)
    killed = [attempt(processes, case, broken, kill_at_call=moments.randrange(1, calls)) for _ in range(2)]
    assert killed[0] == -signal.SIGKILL
    if not (broken / "result.pt").exists():
        assert attempt(processes, case, broken) == 0
    assert_same_run(whole, broken)
    assert result(whole)["epsilon"] > 0
    assert sum(entry[2] for entry in result(broken)["history"]) == EPOCHS * BATCHES


@pytest.mark.parametrize("kill_in", ["fsync", "replace"])
def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(kill_in, processes, tmp_path):
    case = Case(every=1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert attempt(processes, case, whole) == 0
    assert attempt(processes, case, broken, kill_in=kill_in) == -signal.SIGKILL
    assert list(broken.glob(".checkpoint.pt.*.tmp"))  # killed with the new file next to the old one
    assert attempt(processes, case, broken) == 0
    assert_same_run(whole, broken)


def stepped(case: Case = Case(), epochs: int = 1) -> Run:  # noqa: B008
    """A run that has trained in this process."""
    made = Run(case)
    for epoch in range(epochs):
        made.train_epoch(Path("unused"), epoch)
    return made


def everything(made: Run) -> Any:
    """All of a run that loading could change."""
    return copy.deepcopy(
        {
            **made.result(),
            "groups": made.optimizer.state_dict()["param_groups"],
            "noise": made.optimizer.noise_stream().state_dict(),
            "random": torch.get_rng_state(),
            "sampling": made.engine.sampling.state_dict(),
            "schedules": {name: schedule.state_dict() for name, schedule in made.schedules.items()},
        }
    )


def test_a_write_cut_short_leaves_the_previous_file(tmp_path, monkeypatch):
    made = stepped()
    path = tmp_path / "checkpoint.pt"
    made.save(path, 1)
    before = path.read_bytes()

    def half(content: Any, file: Any, **options: Any) -> None:
        file.write(before[: len(before) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space left"):
        made.save(path, 2)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


@pytest.mark.parametrize("kind", ["str", "path", "file", "buffer", "link"])
def test_paths_and_file_objects_hold_a_checkpoint(kind, tmp_path):
    made = stepped()
    path = tmp_path / "checkpoint.pt"
    if kind == "link":
        (tmp_path / "target.pt").touch()
        path.symlink_to(tmp_path / "target.pt")
    target: Any = {"str": str(path), "buffer": io.BytesIO()}.get(kind, path)
    if kind == "file":
        with open(path, "wb") as file:
            made.engine.save_checkpoint(path=file, module=made.model, optimizer=made.optimizer)
    else:
        made.engine.save_checkpoint(path=target, module=made.model, optimizer=made.optimizer)
    if kind == "buffer":
        target.seek(0)
    assert path.is_symlink() == (kind == "link")
    fresh = Run(Case())
    fresh.engine.load_checkpoint(path=target, module=fresh.model, optimizer=fresh.optimizer)
    assert_same(fresh.result(), made.result())


def test_what_the_user_adds_comes_back_and_stays_the_users(tmp_path):
    made = stepped()
    own = {"epoch": 3, "best": [0.5, None], "mask": torch.tensor([True, False]), "module_state_dict": "mine"}
    made.engine.save_checkpoint(path=tmp_path / "c.pt", module=made.model, checkpoint_dict=own)
    assert list(own) == ["epoch", "best", "mask", "module_state_dict"]
    loaded = made.engine.load_checkpoint(path=tmp_path / "c.pt", module=made.model)
    assert set(loaded) == {"epoch", "best", "mask", "module_state_dict", "privacy_accountant_state_dict"}
    assert loaded["best"] == [0.5, None]
    assert_same(loaded["module_state_dict"]["_module.0.weight"], made.model._module[0].weight.detach())


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("form", ["torch", "legacy", "pickle", "nested"])
def test_a_hostile_pickle_is_refused_and_executes_nothing(form, tmp_path):
    made, mark, path = stepped(), tmp_path / "executed", tmp_path / "c.pt"
    made.save(path, 1)
    content = torch.load(path, weights_only=True)
    if form == "nested":
        content["module_state_dict"]["_module.0.weight"] = Hostile(mark)
    else:
        content["extra"] = Hostile(mark)
    if form == "pickle":
        path.write_bytes(pickle.dumps({"extra": Hostile(mark)}, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form != "legacy")
    before = everything(made)
    with pytest.raises(CheckpointError, match="could execute code"):
        made.load(path)
    for option in ({"weights_only": False}, {"pickle_module": pickle}):
        with pytest.raises(CheckpointError, match="execute code. Leave it out"):
            made.engine.load_checkpoint(path=path, module=made.model, torch_load_kwargs=option)
    assert not mark.exists()
    assert_same(everything(made), before)
    torch.load(path, weights_only=False) if form != "pickle" else pickle.loads(path.read_bytes())
    assert mark.exists()  # the file was hostile indeed


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    made, path = stepped(), tmp_path / "c.pt"
    made.save(path, 1)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="'where' is not made of tensors"):
        made.engine.save_checkpoint(
            path=path, module=made.model, checkpoint_dict={"where": Hostile(tmp_path / "x"), "epoch": 1}
        )
    assert path.read_bytes() == before


@pytest.mark.parametrize("length", [0, 1, 100, 0.5, 0.99])
def test_a_damaged_file_is_refused_by_name(length, tmp_path):
    made, path = stepped(), tmp_path / "c.pt"
    made.save(path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: length if isinstance(length, int) else int(length * len(whole))])
    before = everything(made)
    with pytest.raises(CheckpointError, match=r"c\.pt' cannot be loaded"):
        made.load(path)
    assert_same(everything(made), before)


def edited(path: Path, **changes: Any) -> None:
    content = torch.load(path, weights_only=True)
    for where, value in changes.items():
        *outer, last = where.split("__")
        holder = content
        for key in outer:
            holder = holder[key]
        if value is KeyError:
            del holder[last]
        else:
            holder[last] = value
    torch.save(content, path)


PROBLEMS = {
    "no weights": ({"module_state_dict": KeyError}, "no 'module_state_dict'"),
    "no accountant": ({"privacy_accountant_state_dict": KeyError}, "no 'privacy_accountant_state_dict'"),
    "no optimizer": ({"optimizer_state_dict": KeyError}, "no 'optimizer_state_dict'. Pass optimizer=None"),
    "no schedule": ({"noise_scheduler_state_dict": KeyError}, "no 'noise_scheduler_state_dict'"),
    "not a dictionary": ({"optimizer_state_dict": [1]}, "'optimizer_state_dict' is a list"),
    "another mechanism": ({"privacy_accountant_state_dict__mechanism": "gdp"}, "mechanism 'gdp'"),
    "negative steps": ({"privacy_accountant_state_dict__history": [(1.0, 0.1, -3)]}, "steps"),
    "history of nonsense": ({"privacy_accountant_state_dict__history": [5]}, r"history\[0\]"),
    "another schedule": ({"noise_scheduler_state_dict__step_size": 2}, "noise_scheduler: .*'step_size'"),
    "missing setting": ({"noise_scheduler_state_dict__gamma": KeyError}, "noise_scheduler: .*lacks 'gamma'"),
    "unknown weight": ({"module_state_dict___module.9.bias": torch.ones(2)}, "Unexpected key.*9.bias"),
    "missing weight": ({"module_state_dict___module.3.bias": KeyError}, "Missing key.*3.bias"),
    "shape": ({"module_state_dict___module.3.bias": torch.ones(7)}, "size mismatch for _module.3.bias"),
    "groups": (
        {"optimizer_state_dict__param_groups": []},
        r"groups of \[4\] parameters, the checkpoint of \[\]",
    ),
    "unknown parameter": (
        {"optimizer_state_dict__state": {17: {"momentum_buffer": torch.ones(2)}}},
        "parameter 17, which is in none of its groups",
    ),
    "order of parameters": (
        {
            "private_run_state__parameters": [
                ["3.bias", [2]],
                ["3.weight", [2, 4]],
                ["0.weight", [4, 3]],
                ["0.bias", [4]],
            ]
        },
        r"parameter 0 of the optimizer is \['0.weight', \[4, 3\]\], the checkpoint's is \['3.bias', \[2\]\]",
    ),
    "version": ({"private_run_state__version": 99}, "version 99"),
    "noise multiplier": ({"private_run_state__privacy__noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
    "clipping norms": ({"private_run_state__privacy__max_grad_norm": [1.0] * 4}, "4 clipping norms"),
    "clipping norm": ({"private_run_state__privacy__max_grad_norm": 0.0}, "max_grad_norm .*0.0"),
    "noise state": (
        {"private_run_state__noise": {"cpu": torch.zeros(3, dtype=torch.uint8)}},
        "state of the noise",
    ),
    "random state": ({"private_run_state__random": {"cpu": torch.zeros(3)}}, "state of torch's generators"),
    "position": ({"private_run_state__sampling__position": -1}, "position is -1"),
}


@pytest.mark.parametrize(
    "names", [*([name] for name in PROBLEMS), ["shape", "another mechanism", "noise multiplier"]]
)
def test_all_problems_are_named_and_nothing_is_changed(names, tmp_path):
    case = Case(schedules=True)
    made, path = stepped(case), tmp_path / "c.pt"
    made.save(path, 1)
    made = stepped(case, epochs=2)
    for name in names:
        edited(path, **PROBLEMS[name][0])
    before = everything(made)
    with pytest.raises(CheckpointError) as refused:
        made.load(path)
    assert_same(everything(made), before)
    for name in names:
        refused.match(PROBLEMS[name][1])
    assert len(refused.value.problems) == (4 if names == ["order of parameters"] else len(names))


def test_a_parameter_order_of_equal_shapes_is_not_mixed_up(tmp_path):
    def build(order: list[int]) -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        inner = torch.optim.Adam([p for i in order for p in net[i].parameters()], lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3)), batch_size=2)
        engine = PrivacyEngine(accountant="rdp")
        return engine, *engine.make_private(
            module=net, optimizer=inner, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    engine, model, optimizer, _ = build([0, 1])
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    engine, model, optimizer, _ = build([1, 0])
    with pytest.raises(CheckpointError, match="parameter 0 of the optimizer is"):
        engine.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)


def test_weights_go_between_the_wrapped_and_the_plain_module(tmp_path):
    made = stepped()
    weights = made.result()["weights"]
    made.engine.save_checkpoint(path=tmp_path / "wrapped.pt", module=made.model)
    made.engine.save_checkpoint(path=tmp_path / "plain.pt", module=made.model._module)
    for name in ("wrapped.pt", "plain.pt"):
        fresh = Run(Case())
        fresh.engine.load_checkpoint(path=tmp_path / name, module=fresh.model)
        assert_same(fresh.result()["weights"], weights)
        plain = Run(Case())
        plain.engine.load_checkpoint(path=tmp_path / name, module=plain.model._module)
        assert_same(plain.result()["weights"], weights)


def test_hooks_stand_for_their_model(tmp_path):
    made = stepped(Case(options={"wrap_model": False}), epochs=0)
    made.engine.save_checkpoint(path=tmp_path / "c.pt", module=made.model, optimizer=made.optimizer)
    made.engine.load_checkpoint(path=tmp_path / "c.pt", module=made.model, optimizer=made.optimizer)
    assert "0.weight" in torch.load(tmp_path / "c.pt", weights_only=True)["module_state_dict"]


def test_assign_is_refused_and_strict_is_followed(tmp_path):
    made, path = stepped(), tmp_path / "c.pt"
    made.save(path, 1)
    edited(path, **{"module_state_dict___module.3.bias": KeyError})
    with pytest.raises(CheckpointError, match="assign=True"):
        made.engine.load_checkpoint(path=path, module=made.model, module_load_dict_kwargs={"assign": True})
    made.engine.load_checkpoint(path=path, module=made.model, module_load_dict_kwargs={"strict": False})


def test_a_checkpoint_of_opacus_is_loaded(tmp_path):
    """The keys and forms that Opacus 1.6.0 was seen to write."""
    made, path = stepped(Case(schedules=True)), tmp_path / "c.pt"
    made.save(path, 1)
    edited(
        path,
        private_run_state=KeyError,
        noise_scheduler_state_dict={"gamma": 1.1, "last_epoch": 4},
        grad_clip_scheduler_state_dict={"step_size": 2, "gamma": 0.7, "last_epoch": 4},
        privacy_accountant_state_dict={"history": [(1.0, 0.25, 4)], "mechanism": "rdp"},
    )
    fresh = Run(Case(schedules=True))
    assert fresh.load(path) == 1
    assert_same(fresh.result()["weights"], made.result()["weights"])
    assert_same(fresh.result()["state"], made.result()["state"])
    assert fresh.engine.accountant.history == [(1.0, 0.25, 4)]
    assert fresh.schedules["noise_scheduler"].last_epoch == 4


def test_epsilon_counts_every_step_before_and_after_loading(tmp_path):
    made, path = stepped(epochs=2), tmp_path / "c.pt"
    made.save(path, 2)
    fresh = Run(Case())
    fresh.load(path)
    fresh.train_epoch(path, 2)
    by_hand = create_accountant("rdp")
    by_hand.history = [(1.0, 1 / BATCHES, 3 * BATCHES)]
    assert fresh.engine.get_epsilon(DELTA) == by_hand.get_epsilon(DELTA)


def test_going_back_to_fewer_steps_is_said(tmp_path):
    made, path = stepped(), tmp_path / "c.pt"
    made.save(path, 1)
    made.train_epoch(path, 1)
    with pytest.warns(UserWarning, match=f"recorded {2 * BATCHES} steps, more than the checkpoint"):
        made.load(path)
    assert len(made.engine.accountant) == BATCHES


def test_saving_within_a_logical_batch_is_said_and_its_half_is_not_mixed_into_the_next(tmp_path):
    made, path = stepped(), tmp_path / "c.pt"
    made.optimizer.zero_grad()
    made.optimizer.signal_skip_step(True)
    nn.functional.cross_entropy(made.model(torch.ones(2, 3)), torch.ones(2, dtype=torch.long)).backward()
    made.optimizer.step()
    with pytest.warns(UserWarning, match="within a logical batch"):
        made.save(path, 1)
    made.load(path)
    assert all(p.summed_grad is None and p.grad_sample is None for p in made.optimizer.params)
    assert not made.optimizer._is_last_step_skipped


def test_broken_off_epochs_are_not_resumed_and_begun_ones_are():
    made = Run(Case())
    for _ in made.loader:
        assert made.engine.sampling.state_dict()["position"] == 1
        break
    assert made.engine.sampling.state_dict()["position"] == 0
    assert len(list(made.loader)) == BATCHES
    made.engine.sampling.load_state_dict({**made.engine.sampling.state_dict(), "position": 3})
    assert made.engine.sampling.state_dict()["position"] == 3
    assert [len(list(made.loader)) for _ in range(2)] == [1, BATCHES]
    made.engine.sampling.load_state_dict({"position": 3, "batches": 7, "generators": {}})
    assert len(list(made.loader)) == BATCHES


def test_noise_and_batches_are_the_same_on_another_number_of_devices(tmp_path, two_devices):
    made, path = stepped(Case(layout="one", own_streams=True)), tmp_path / "c.pt"
    made.save(path, 1)
    fresh = Run(Case(layout="two", own_streams=True))
    fresh.load(path)
    assert_same(fresh.optimizer.noise_stream().state_dict(), made.optimizer.noise_stream().state_dict())
    assert_same([x for x, _ in fresh.loader], [x for x, _ in made.loader])
    devices = {p.device for p in fresh.model.parameters()}
    assert len(devices) == 2
    for p in fresh.optimizer.params:
        assert fresh.optimizer.state[p]["momentum_buffer"].device == p.device
    for one, other in zip(made.optimizer.params, fresh.optimizer.params, strict=True):
        drawn = [
            r.optimizer.noise_stream().normal(p.shape, 1.0, p.device, p.dtype)
            for r, p in ((made, one), (fresh, other))
        ]
        assert_same(drawn[0].cpu(), drawn[1].cpu())


def test_on_another_type_of_device_the_noise_is_new_and_depends_on_all_that_was_drawn(tmp_path, two_devices):
    def drawn(epochs: int) -> torch.Tensor:
        made, path = stepped(Case(), epochs=epochs), tmp_path / "c.pt"
        made.save(path, epochs)
        fresh = Run(Case(layout="two", own_streams=True))
        start = fresh.optimizer.noise_stream().state_dict()
        fresh.load(path)
        found = fresh.optimizer.noise_stream().state_dict()
        assert start.keys() == found.keys()
        assert all(not torch.equal(start[name], found[name]) for name in start)
        return fresh.optimizer.noise_stream().normal((64,), 1.0, two_devices[0], torch.float32).cpu()

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.isclose(drawn(1), drawn(2)).any()


def test_errors_are_value_errors_like_all_named_errors_here():
    assert issubclass(CheckpointError, ConfigurationError)
    assert issubclass(CheckpointError, ValueError)
