"""The examples for trainers run offline, from start to end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs Transformers (extra hf)")
pytest.importorskip("trl", reason="needs TRL (extra hf)")
pytest.importorskip("peft", reason="needs PEFT (extra hf)")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("hf_trainer", []), ("hf_trainer", LAUNCHER), ("trl_dpo", []), ("trl_kto", [])],
    ids=["hf_trainer", "hf_trainer on two ranks", "trl_dpo", "trl_kto"],
)
def test_example_runs_offline_and_spends_what_it_was_allowed(name, launcher, tmp_path):
    if not EXAMPLES.is_dir():
        pytest.skip("the examples are not installed with the package")
    script = [
        str(EXAMPLES / f"{name}.py"),
        "--records",
        "512" if launcher else "256",
        "--epochs",
        "1",
        "--epsilon",
        "4",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, *launcher, *script, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count(", epsilon ") == 1  # one rank tells
    epsilon = float(re.search(r"epsilon ([\d.]+)", run.stdout.splitlines()[-1]).group(1))
    assert 3.9 < epsilon <= 4.0
    assert list((tmp_path / "out").glob("*.safetensors"))
