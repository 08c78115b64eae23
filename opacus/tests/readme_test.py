"""The README: its code runs as printed, and the commands it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="installed without the repository")


def test_python_blocks_run_one_after_the_other_and_stay_within_the_stated_budget():
    blocks = re.findall(
        r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    budget = float(re.search(r"target_epsilon=([\d.]+)", blocks[0]).group(1))
    # a process of its own: emulated devices, once installed, stay for the life of a process
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # the README counts copies between emulated devices
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    epsilon, steps = re.fullmatch(r"epsilon ([\d.]+) after (\d+) steps\n", run.stdout).groups()
    assert 0.9 * budget < float(epsilon) <= budget
    assert int(steps) == 5 * (2000 // 200)


def test_make_targets_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / document).read_text(), re.MULTILINE))
        assert named, document
        assert named <= targets, document
