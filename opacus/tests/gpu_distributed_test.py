"""Data parallel on real GPUs: replicas of {a GPU, the CPU}, replicas that share both GPUs on purpose, and one GPU for each over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel, ReplicaError
from opacus.testing import Ranks
from opacus.tests.replicas import reader, train

pytestmark = pytest.mark.gpu(2)
PLACES = {
    "a GPU each": ("cuda:{rank}",),
    "a GPU each, and the CPU": ("cuda:{rank}", "cpu"),
    "both GPUs shared": ("cuda:0", "cuda:1"),
}


@pytest.fixture(scope="module")
def over_gloo() -> Iterator[Ranks]:
    with Ranks(2, timeout=300, patience=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def over_nccl() -> Iterator[Ranks]:
    with Ranks(2, timeout=300, patience=60, backend="cpu:gloo,cuda:nccl") as ranks:
        yield ranks


def train_on(places: tuple[str, ...], **arguments: Any) -> dict[str, Any]:
    """`train` on this rank's devices."""
    devices = [torch.device(place.format(rank=dist.get_rank())) for place in places]
    torch.cuda.set_device(devices[0])
    return train(devices=devices, **arguments)


@pytest.mark.parametrize("style", ["flat", "adaptive"])
@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
@pytest.mark.parametrize(
    ("group", "places"),
    [
        ("over_nccl", "a GPU each"),
        ("over_nccl", "a GPU each, and the CPU"),
        ("over_gloo", "a GPU each, and the CPU"),
        ("over_gloo", "both GPUs shared"),
    ],
)
def test_two_ranks_train_as_one_process(
    request: pytest.FixtureRequest, group: str, places: str, mode: str, style: str
) -> None:
    options = {"allow_shared_devices": True} if "shared" in places else {}
    arguments: dict[str, Any] = {"mode": mode, "clipping": style, "physical": 4}
    alone = train(**arguments)
    together = request.getfixturevalue(group).run(
        train_on, PLACES[places], wrapping="none", seed_of_rank=True, **arguments, **options
    )
    for own in together:
        assert own["steps"] == alone["steps"]
        for name, expected in alone["parameters"].items():
            torch.testing.assert_close(own["parameters"][name], expected, rtol=0, atol=1e-6)
            assert torch.equal(own["parameters"][name], together[0]["parameters"][name])


def wrapped_on(places: tuple[str, ...], **options: Any) -> str:
    model = reader()
    model.to(places[0].format(rank=dist.get_rank()))
    if len(places) > 1:
        model.head.to(places[1])
    try:
        DifferentiallyPrivateDistributedDataParallel(model, **options)
    except ReplicaError as error:
        return str(error)
    return "no error"


def test_gpus_of_two_ranks_are_refused_without_the_flag_and_over_nccl(
    over_gloo: Ranks, over_nccl: Ranks
) -> None:
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)]
    for message in over_gloo.run(wrapped_on, PLACES["both GPUs shared"]):
        assert all(f"ranks 0 and 1 both use {uuid}" in message for uuid in uuids)
    for message in over_nccl.run(wrapped_on, PLACES["both GPUs shared"], allow_shared_devices=True):
        assert "which NCCL cannot do" in message


def noise_on_gpus() -> list[torch.Tensor]:
    """One noisy step of a zero gradient: the noise alone, on a GPU and on the CPU."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(400, 400, device=f"cuda:{rank}"), nn.Linear(400, 400))
    from opacus.optimizers import DistributedDPOptimizer

    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        expected_batch_size=None,
        loss_reduction="sum",
    )
    for p in model.parameters():
        p.grad_sample = torch.zeros(1, *p.shape, device=p.device)  # type: ignore[attr-defined]
    optimizer.step()
    return [p.grad.cpu() for p in model.parameters()]  # type: ignore[union-attr]


def test_noise_is_added_once_and_is_the_same_on_every_rank(over_nccl: Ranks) -> None:
    first, second = over_nccl.run(noise_on_gpus)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for noise in (first[0], first[2]):
        assert abs(float(noise.std()) - 1.0) < 5 / (2 * 160_000) ** 0.5
