# ruff: noqa: E402
"""`prepare_private` over ranks: one process's numbers on the union of the batches."""

from __future__ import annotations

import pytest

accelerate = pytest.importorskip("accelerate", reason="needs the extra hf (accelerate)")

pytest.importorskip("peft", reason="needs the extra hf (peft)")

from opacus.tests import accelerate_cases as cases


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "optimizer with state"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_parameters_are_those_of_one_process(two_ranks, kind, warm):
    for error, steps in two_ranks.run(cases.update_error, kind, warm=warm):
        assert error < 1e-10
        assert steps == cases.STEPS


@pytest.mark.parametrize("quantized", [False, True], ids=["float64", "int8 base"])
def test_each_rank_may_have_a_device_map_of_its_own(two_ranks_with_devices, quantized):
    if quantized:
        pytest.importorskip("torchao", reason="needs torchao")
    for error, devices, steps in two_ranks_with_devices.run(cases.device_map_error, quantized):
        assert error < (1e-5 if quantized else 1e-11)
        assert devices == 2
        assert steps == 1
