"""The digits example: runs on two devices, agrees with one, and refuses bad arguments by name."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_multidevice.py"

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the examples")


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: emulated devices, once installed, stay for the life of a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits")
    run = run_example("--epochs=2", "--check", f"--out={out}")
    assert run.returncode == 0, run.stderr
    return run, json.loads((out / "digits.json").read_text()), out


def test_two_devices_end_with_the_weights_of_one(two_devices):
    run, record, _ = two_devices
    assert record["check"]["largest_difference"] <= 1e-6
    assert f"largest difference to one device: {record['check']['largest_difference']}" in run.stdout


def test_every_parameter_has_a_device_and_the_table_counts_them_all(two_devices):
    run, record, _ = two_devices
    # two 3 x 3 convolutions, two affine norms, two linear layers
    parameters = (9 + 1) * 32 + 2 * 32 + (9 * 32 + 1) * 32 + 2 * 32 + (128 + 1) * 32 + (32 + 1) * 10
    gpus = [f"cuda:{index}" for index in range(min(torch.cuda.device_count(), 4))]
    devices = gpus or ["emu:0", "emu:1"]
    assert [row["device"] for row in record["placement"]] == devices
    assert sum(row["parameters"] for row in record["placement"]) == parameters
    assert all(row["weight_bytes"] == 4 * row["parameters"] for row in record["placement"])
    assert all(f"\n{device} " in run.stdout for device in devices)


def test_the_loss_falls_and_the_budget_is_spent_up_to_but_not_over_the_target(two_devices):
    _, record, _ = two_devices
    first, last = record["history"]
    assert last["loss"] < first["loss"]
    assert first["epsilon"] < last["epsilon"] <= record["arguments"]["epsilon"]
    assert 0.9 * record["arguments"]["epsilon"] < last["epsilon"]
    assert record["final"]["epsilon"] == last["epsilon"]


def test_the_plot_is_a_png(two_devices):
    assert (two_devices[2] / "digits.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture
def main(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return importlib.import_module("digits_multidevice").main


def test_all_bad_arguments_are_named_in_one_message_with_status_2(main, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    bad = {
        "--devices": "cuda:99,tpu",
        "--epsilon": "-1",
        "--delta": "0.5",
        "--epochs": "0",
        "--batch-size": "9999",
        "--lr": "nan",
        "--max-grad-norm": "inf",
        "--seed": "-1",
        "--out": str(file),
    }
    with pytest.raises(SystemExit) as stop:
        main([f"{name}={value}" for name, value in bad.items()])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    for word in (*bad, "cuda:99", "tpu"):
        assert word in message.split("error:")[1], word


@pytest.mark.parametrize("devices", ["emulated:5", "cpu,cpu", "emulated:0", "emulated:2,emulated:2", ""])
def test_impossible_device_lists_are_refused_with_status_2(main, devices, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([f"--devices={devices}", f"--out={tmp_path}"])
    assert stop.value.code == 2
    assert "--devices" in capsys.readouterr().err.split("error:")[1]


def test_a_budget_out_of_reach_is_refused_with_status_2(main, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--devices=cpu", "--epsilon=1e-6", "--delta=1e-12", f"--out={tmp_path / 'new'}"])
    assert stop.value.code == 2
    assert "--epsilon" in capsys.readouterr().err.split("error:")[1]
    assert not (tmp_path / "new").exists()
