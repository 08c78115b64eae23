"""The FSDP2 example runs under torchrun, learns, and saves shards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_lora.py"

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="installed without the examples")


def test_it_learns_on_two_ranks_and_saves_shards(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(EXAMPLE), "--epochs=2", f"--save={tmp_path / 'shards'}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(EXAMPLE.parents[1]),
    }
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    lines = re.findall(r"epoch (\d): loss ([\d.]+), epsilon ([\d.]+) at delta 1e-4", run.stdout)
    assert [int(epoch) for epoch, _, _ in lines] == [1, 2]
    losses, spent = [float(loss) for _, loss, _ in lines], [float(epsilon) for _, _, epsilon in lines]
    assert losses[1] < losses[0] < 2.77  # the loss of 16 equally likely tokens
    assert 0 < spent[0] < spent[1] < 15
    assert (tmp_path / "shards" / "run.pt").exists()
