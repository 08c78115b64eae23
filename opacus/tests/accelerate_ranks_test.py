# ruff: noqa: E402
"""`prepare_private` over ranks: one process's numbers on the union of the batches."""

from __future__ import annotations

import pytest

accelerate = pytest.importorskip("accelerate", reason="needs the extra hf (accelerate)")

from opacus.tests import accelerate_cases as cases


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "optimizer with state"])
@pytest.mark.parametrize("kind", ["fsdp2"])
def test_parameters_are_those_of_one_process(two_ranks, kind, warm):
    for error, steps in two_ranks.run(cases.update_error, kind, warm=warm):
        assert error < 1e-10
        assert steps == cases.STEPS
