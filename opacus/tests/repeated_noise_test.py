"""Noise of one stream does not repeat: whoever sets its generator back is told, before a parameter changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from opacus import PrivacyEngine
from opacus.devices import NoiseStream
from opacus.errors import RepeatedNoiseError

CPU = torch.device("cpu")
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 8.0,
    "min_clipbound": 0.05,
    "unclipped_num_std": 1.0,
}


class Seeding(Dataset[tuple[Tensor, Tensor]]):
    """Augments each item reproducibly, by the generator that noise comes from."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        return torch.randn(4) + i, torch.tensor(i % 2)


class SeedingForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return self.net(nn.functional.dropout(x, 0.1))


def private(net: nn.Module, data: Any, secure: bool = False, **options: Any) -> Any:
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure)
    made = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=options.pop("noise_multiplier", 1.0),
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )
    return engine, *made


def train(module: nn.Module, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def fixed() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 2)


@pytest.mark.parametrize(
    "options", [{}, {"grad_sample_mode": "bk"}, ADAPTIVE], ids=["flat", "bk", "adaptive"]
)
@pytest.mark.parametrize("where", ["data set", "forward"])
def test_noise_set_back_by_a_data_set_or_a_forward_is_refused_and_moves_nothing(where, options):
    net, data = (nn.Linear(4, 2), Seeding()) if where == "data set" else (SeedingForward(), fixed())
    engine, module, optimizer, loader = private(net, data, **options)
    batches = iter(loader)
    train(module, optimizer, [next(batches)])
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        RepeatedNoiseError, match=r"torch\.manual_seed[\s\S]*noise_generator=torch\.Generator"
    ):
        train(module, optimizer, [next(batches)])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("how", ["generator", "secure_mode", "no noise"])
def test_what_the_refusal_advises_trains(how):
    options: dict[str, Any] = {
        "generator": {"noise_generator": torch.Generator().manual_seed(5)},
        "secure_mode": {"secure": True},
        "no noise": {"noise_multiplier": 0.0},
    }[how]
    engine, module, optimizer, loader = private(SeedingForward(), Seeding(), **options)
    train(module, optimizer, loader)
    assert len(engine.accountant) == 4


def test_a_generator_seeded_again_is_refused_wherever_the_draw_lies():
    stream = NoiseStream(torch.Generator().manual_seed(3), CPU)
    wanted = [((5,), CPU, torch.float32), ((2, 3), CPU, torch.float64)]
    stream.normals(wanted, 1.0)
    stream.normal((4,), 1.0, CPU, torch.float32)
    for again in (lambda: stream.normals(wanted, 1.0), lambda: stream.normal((), 1.0, CPU, torch.float32)):
        stream.generator.manual_seed(3)
        with pytest.raises(RepeatedNoiseError):
            again()


def test_a_stream_that_goes_on_is_never_refused():
    stream = NoiseStream(torch.Generator().manual_seed(3), CPU)
    for n in [1, 0, 0, 2, 15, 16, 17, 1000] * 20:
        stream.normal((n,), 1.0, CPU, torch.float32)
        stream.normals([((n,), CPU, torch.float32)] * 2, 1.0)


def test_parameters_of_another_type_of_device_leave_the_stream_where_it_is(two_devices):
    """Their numbers come from a generator of their own: that the home's stands still is no repetition."""
    stream = NoiseStream(torch.Generator().manual_seed(3), CPU)
    wanted = [((5,), two_devices[0], torch.float32), ((5,), two_devices[1], torch.float32)]
    first, second = (torch.cat([n.cpu() for n in stream.normals(wanted, 1.0)]) for _ in range(2))
    assert not torch.equal(first, second)
    accelerated = NoiseStream(torch.Generator(two_devices[0]).manual_seed(3), two_devices[0])
    for _ in range(3):
        accelerated.normals(wanted, 1.0)
    accelerated.generator.manual_seed(3)
    with pytest.raises(RepeatedNoiseError):
        accelerated.normals(wanted, 1.0)


def test_going_back_to_saved_states_gives_the_same_noise_again():
    stream = NoiseStream(torch.Generator().manual_seed(3), CPU)
    saved = stream.state_dict()
    first = stream.normal((8,), 1.0, CPU, torch.float32)
    stream.load_state_dict(saved)
    assert torch.equal(stream.normal((8,), 1.0, CPU, torch.float32), first)
