"""FSDP2 on GPUs over NCCL: the same numbers, the same noise on every rank's part once; skipped where there are fewer than two."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from opacus.testing.ranks import Ranks
from opacus.tests import fsdp_cases as cases

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[Ranks]:
    with Ranks(2, backend="cpu:gloo,cuda:nccl", timeout=120) as ranks:
        yield ranks


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
@pytest.mark.parametrize("rows", [((5, 1),), ((3, 2), (2, 0), (0, 0))], ids=str)
@pytest.mark.parametrize("wrap", ["root", "block", "leaf"])
def test_the_numbers_of_one_process(two_gpus, wrap, rows, mode):
    assert max(two_gpus.run(cases.update_error, device="cuda", wrap=wrap, rows=rows, mode=mode)) < 1e-12


@pytest.mark.parametrize(
    "case", [{"checkpointed": False}, {"lora": True}, {"tied": True, "wrap": "root"}], ids=str
)
def test_checkpointing_frozen_parts_and_ties(two_gpus, case):
    assert max(two_gpus.run(cases.update_error, device="cuda", **case)) < 1e-12


@pytest.mark.parametrize("mode", ["bk", "ghost_fsdp"])
def test_parts_on_the_cpu_and_layers_on_gpus(two_gpus, mode):
    from torch.distributed.fsdp import CPUOffloadPolicy

    options = {"offload_policy": CPUOffloadPolicy()}
    assert max(two_gpus.run(cases.update_error, device="cuda", mode=mode, options=options)) < 1e-12


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_every_part_once(two_gpus, secure):
    sigma, clip = 1.3, 0.7
    by_rank = two_gpus.run(
        cases.noise_of, "fsdp", sigma=sigma, clip=clip, secure=secure, seed=None, device="cuda"
    )
    flat = [torch.cat([g.flatten() for g in step]).double() for step in by_rank[0]]
    n = flat[0].numel()
    assert all(abs(float(noise.std()) / (sigma * clip) - 1) < 6 / math.sqrt(2 * n) for noise in flat)
    assert torch.cat(flat).unique().numel() > 0.98 * 2 * n
    assert all(torch.equal(a, b) for a, b in zip(by_rank[0][0], by_rank[1][0], strict=True))
