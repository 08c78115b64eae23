"""`import opacus` brings in little beside torch: what is slow to import waits until it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# each takes a noticeable part of torch's own import time, or is optional
HEAVY = (
    "scipy",
    "pandas",
    "sklearn",
    "matplotlib",
    "dp_accounting",
    "lightning",
    "pytorch_lightning",
    "transformers",
    "accelerate",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    "opacus.testing",
    "pytest",
)


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Modules that `import opacus` adds to those `import torch` has brought in, in a fresh process."""
    code = (
        "import json, sys, torch; before = set(sys.modules); import opacus; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_modules_wait(name, imported):
    assert not {module for module in imported if module == name or module.startswith(name + ".")}


def test_hardly_anything_foreign_is_imported(imported):
    foreign = {module for module in imported if module.split(".")[0] != "opacus"}
    assert len(foreign) <= 20, sorted(foreign)
    assert "opacus.privacy_engine" in imported
