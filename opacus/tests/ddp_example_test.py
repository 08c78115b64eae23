"""The data parallel example runs under torchrun on emulated devices: ranks end with the same weights and the same epsilon, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opacus.testing.emulated_devices import is_supported

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_model_parallel.py"
pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the examples"),
    pytest.mark.skipif(not is_supported(), reason="no emulated devices here"),
]


def test_replicas_of_two_devices_learn_and_stay_alike() -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(EXAMPLE),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    run = subprocess.run(
        [*command, "--epochs=2"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    line = r"epoch (\d), rank (\d) on emu:0, emu:1: ([\d.]+)% of (\d+) own samples right, weights ([\d.]+), epsilon ([\d.]+)"
    lines = re.findall(line, run.stdout)
    assert sorted((epoch, rank) for epoch, rank, *_ in lines) == [
        ("1", "0"),
        ("1", "1"),
        ("2", "0"),
        ("2", "1"),
    ]
    last = [found for found in lines if found[0] == "2"]
    assert last[0][4:] == last[1][4:]  # weights and epsilon
    assert all(float(right) > 75 for _, _, right, *_ in last)
    assert all(500 < int(samples) < 1500 for _, _, _, samples, *_ in last)  # a share of the records each
