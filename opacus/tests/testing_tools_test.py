"""The public tools of `opacus.testing`: installing, counting, layouts, `spread`, and the pytest plugin."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import opacus
from opacus.errors import ConfigurationError
from opacus.testing import LAYOUTS, EmulationUnsupported, accelerators, count_copies, devices_for, spread
from opacus.testing.emulated_devices import install, is_installed, is_supported, unsupported_reasons

emulated_only = pytest.mark.skipif(not is_supported(), reason="; ".join(unsupported_reasons()))
ROOT = pathlib.Path(opacus.__file__).parents[1]


def _python(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, **options
    )


# --------------------------------------------------------------------------------------------- installing

NOTHING_IS_PATCHED = """
import torch
original = torch.Generator, torch.Tensor.data, torch.UntypedStorage.__new__, torch.autograd._engine_run_backward
import opacus.testing
from opacus.testing import emulated_devices, layouts

def assert_untouched():
    now = torch.Generator, torch.Tensor.data, torch.UntypedStorage.__new__, torch.autograd._engine_run_backward
    assert now == original
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert not hasattr(torch, "emu")
    assert not emulated_devices.is_installed()

def assert_refused(call, *words):
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("not refused")
    assert_untouched()

assert_untouched()                                       # importing installs nothing
assert_refused(lambda: emulated_devices.install(0, "cuda"), "2 problems", "n is 0", "'cuda'")

to_dlpack = torch._C._to_dlpack
del torch._C._to_dlpack                                  # a torch that lost a private name
assert_refused(emulated_devices.install, "1 problem", "torch._C._to_dlpack", torch.__version__)
torch._C._to_dlpack = to_dlpack

torch.cuda.device_count = lambda: 1                      # a process that sees a GPU
assert_refused(emulated_devices.install, "1 problem", "CUDA_VISIBLE_DEVICES")
assert_refused(lambda: layouts.devices_for("two"), "1 CUDA device", "CUDA_VISIBLE_DEVICES")
torch.cuda.device_count = lambda: 0

assert emulated_devices.install(3, "fake")[2] == torch.device("fake:2")
"""


@emulated_only
def test_import_and_every_refusal_leave_torch_untouched():
    ran = _python("-c", NOTHING_IS_PATCHED)
    assert ran.returncode == 0, ran.stderr


@emulated_only
def test_installing_again_returns_the_same_devices_and_adds_more():
    assert install(2) == install(4)[:2]
    before = torch.emu.device_count()
    install(before + 1)
    assert torch.emu.device_count() == before + 1
    assert torch.zeros(1, device=f"emu:{before}").device.index == before


@emulated_only
@pytest.mark.parametrize("n", [0, -1, 65, 2.0, True, None])
def test_a_bad_number_of_devices_is_refused_by_name(n):
    with pytest.raises(ConfigurationError, match="n is "):
        install(n)


@emulated_only
def test_another_name_than_the_installed_one_is_refused():
    install(2)
    with pytest.raises(ConfigurationError, match="devices named 'emu' are installed"):
        install(2, name="other")


@emulated_only
def test_what_a_torch_lacks_is_listed_in_full(monkeypatch):
    assert unsupported_reasons() == []
    monkeypatch.delattr(torch._C, "_from_dlpack")
    monkeypatch.delattr(torch, "_has_compatible_shallow_copy_type")
    reasons = unsupported_reasons()
    assert not is_supported()
    assert len(reasons) == 2
    assert "torch._C._from_dlpack" in reasons[0]
    assert "torch._has_compatible_shallow_copy_type" in reasons[1]


# ----------------------------------------------------------------------------------------------- counting


@emulated_only
def test_each_kind_of_transfer_is_counted_with_its_shape_and_dtype():
    first, second = install(2)
    host = torch.ones(2, 3, dtype=torch.bfloat16)
    with count_copies() as seen:
        x = host.to(first)
        y = x.to(second)
        y.cpu()
        y[0, 0].item()
        y[torch.tensor([0, 1])] += torch.tensor(1.0)
    assert (seen.h2d, seen.cross, seen.d2h, seen.sync, seen.implicit) == (2, 1, 1, 1, 2)
    (cross,) = seen.of("cross")
    assert cross == ("emu:0", "emu:1", (2, 3), torch.bfloat16, 12, "cross")
    assert seen.shapes("h2d") == [(2, 3), (2,)]  # the tensor, and the index to read by
    assert seen.shapes("implicit") == [(), (2,)]  # the scalar, and the index to write by
    with pytest.raises(ValueError, match="'sideways' is unknown"):
        seen.of("sideways")


@emulated_only
def test_counters_nest_and_stop_when_their_block_ends():
    first, second = install(2)
    x = torch.ones(3, device=first)
    with count_copies() as outer:
        with count_copies() as inner:
            x.to(second)
        x.to(second)
    x.to(second)
    assert (outer.cross, inner.cross) == (2, 1)


@emulated_only
def test_copies_in_other_threads_are_counted():
    import threading

    first, second = install(2)
    with count_copies() as seen:
        thread = threading.Thread(target=lambda: torch.ones(3, device=first).to(second))
        thread.start()
        thread.join()
    assert seen.cross == 1


def test_counting_without_emulated_devices_is_refused(monkeypatch):
    from opacus.testing.emulated_devices.state import state

    monkeypatch.setattr(state, "name", None)
    assert not is_installed()
    with pytest.raises(RuntimeError, match="none is installed"), count_copies():
        pass


# ------------------------------------------------------------------------------------------------ layouts


def test_layouts_name_one_two_and_four_devices_and_device_with_cpu(layout, request):
    name = request.node.callspec.params["layout"]
    assert len(layout) == {"one": 1, "two": 2, "four": 4, "device+cpu": 2}[name]
    assert len(set(layout)) == len(layout)
    assert layout == devices_for(name)
    assert (torch.device("cpu") in layout) == (name == "device+cpu")
    for device in layout:
        assert torch.zeros(1, device=device).device == device


@pytest.mark.parametrize("layout", ["two"], indirect=True)
def test_a_test_can_ask_for_some_layouts_only(layout, two_devices):
    assert layout == two_devices


def test_fixtures_give_devices_of_one_kind(two_devices, four_devices):
    assert four_devices[:2] == two_devices
    assert len({device.type for device in four_devices}) == 1


def test_an_unknown_layout_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'three'.*one, two, four, device\+cpu"):
        devices_for("three")
    assert LAYOUTS == ("one", "two", "four", "device+cpu")


def test_real_devices_are_used_where_there_are_enough_and_never_mixed_with_emulated_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert accelerators(2) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert devices_for("device+cpu") == [torch.device("cuda:0"), torch.device("cpu")]
    with pytest.raises(EmulationUnsupported, match=r"4 devices .*\n.* 2 CUDA device"):
        accelerators(4)


# ------------------------------------------------------------------------------------------------- spread


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Flatten())
    ).double()


def test_a_spread_model_computes_what_it_computed_on_the_cpu(layout):
    x = torch.randn(5, 6, dtype=torch.float64)
    reference = _layers()
    model = spread(copy.deepcopy(reference), layout)
    reference(x).square().sum().backward()
    out = model(x)
    assert out.device == layout[-1]
    out.square().sum().backward()
    assert list(dict.fromkeys(p.device for p in model.parameters())) == layout
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.device == p.device
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-12)


def test_layers_without_parameters_go_with_the_one_before(two_devices):
    model = spread(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), two_devices)
    places = []
    for layer in model:
        layer.register_forward_hook(lambda m, args, out: places.append(args[0].device))
    model(torch.zeros(2, 2, 2))
    assert places == [two_devices[0]] * 3 + [two_devices[1]]


@emulated_only
def test_activations_cross_once_per_boundary(four_devices):
    model = spread(_layers(), four_devices)
    x = torch.zeros(5, 6, dtype=torch.float64, device=four_devices[0])
    with count_copies() as seen:
        model(x).sum().backward()
    assert seen.shapes("cross") == [(5, 6)] * 6
    assert seen.sync == 0


def test_inputs_are_moved_ahead_of_other_hooks_and_inside_containers(two_devices):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, pair, *, extra):
            return self.scale * (pair[0] + extra["shift"])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.body:
                x = block((x, "label"), extra={"shift": torch.ones(3)})
            return x

    model, seen = Model(), []
    for block in model.body:
        block.register_forward_pre_hook(lambda m, args: seen.append(args[0][0].device))
    spread(model, two_devices, layers=["body.0", "body.1"])
    assert model(torch.zeros(3)).tolist() == [2.0, 2.0, 2.0]
    assert seen == two_devices


def test_a_spread_model_can_be_spread_again_copied_and_pickled(two_devices):
    first, second = two_devices
    model = spread(_layers(), two_devices)
    spread(model, [second, first])
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].weight.device == second
        assert twin(torch.zeros(2, 6, dtype=torch.float64)).device == first


def test_spread_refuses_what_it_cannot_place_and_moves_nothing(two_devices):
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    for model, devices, layers, words in (
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), two_devices, None, "1 layer.*2 devices"),
        (nn.Sequential(nn.Linear(2, 2)), [], None, "0 devices"),
        (_layers(), two_devices, ["0", "head", "0"], "(?s)2 problems.*'head'.*'0' is given twice"),
        (tied, two_devices, None, "'1.weight' is shared with layer '0'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            spread(model, devices, layers)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


# ------------------------------------------------------------------------------------------------- plugin

PLUGIN_USER = """
import pytest, torch

def test_two(two_devices):
    assert len(two_devices) == 2

def test_layout(layout):                 # "one" and "device+cpu" can be had with one GPU
    assert layout

@pytest.mark.gpu
def test_never_here():
    raise AssertionError("ran without GPUs")

@pytest.mark.gpu(1000)
def test_never_anywhere():
    raise AssertionError("ran without 1000 GPUs")

@pytest.mark.gpu(0)
def test_always():
    pass
"""
ONE_GPU = "import torch\ntorch.cuda.device_count = lambda: 1\n"


@emulated_only
def test_where_a_gpu_is_missing_the_plugin_skips(tmp_path):
    (tmp_path / "conftest.py").write_text(f'pytest_plugins = ["opacus.testing.pytest_plugin"]\n{ONE_GPU}')
    (tmp_path / "test_user.py").write_text(PLUGIN_USER)
    ran = _python("-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", ".", cwd=tmp_path)
    assert "3 passed, 5 skipped" in ran.stdout, ran.stdout + ran.stderr
