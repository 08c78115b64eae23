"""DPOptimizer on models that span devices: the same numbers as one device, two [B] copies per further device, no sync."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.testing import accelerators, count_copies, spread
from opacus.testing.emulated_devices import is_installed

B, D, CLASSES = 6, 5, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(D, CLASSES))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(B + step % 3, D, generator=generator),
            torch.randint(CLASSES, (B + step % 3,), generator=generator),
        )
        for step in range(steps)
    ]


def train(
    devices: list[torch.device],
    *,
    steps: int,
    kind: str = "sgd",
    noise_multiplier: float = 1.0,
    generator_on: torch.device | None = None,
    reduction: str = "mean",
    model: nn.Module | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """Parameters (on the CPU) after `steps` private steps with the layers spread over `devices`."""
    inner = spread(copy.deepcopy(model) if model is not None else network(), devices)
    module = GradSampleModule(inner, loss_reduction=reduction)
    generator = None
    if generator_on is not None:
        generator = torch.Generator(generator_on).manual_seed(11)
    else:
        torch.manual_seed(11)
    optimizer = DPOptimizer(
        OPTIMIZERS[kind](module.parameters()),
        noise_multiplier=noise_multiplier,
        max_grad_norm=0.7,
        expected_batch_size=B,
        loss_reduction=reduction,
        generator=generator,
        **options,
    )
    loss_of = nn.CrossEntropyLoss(reduction=reduction)
    for x, y in batches(steps):
        optimizer.zero_grad()
        output = module(x.to(devices[0]))
        loss_of(output, y.to(output.device)).backward()
        optimizer.step()
    return [p.detach().cpu() for p in module.parameters()]


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 20])
def test_parameters_equal_one_device(layout, kind, steps):
    one = train(layout[:1], steps=steps, kind=kind, noise_multiplier=0.0)
    many = train(layout, steps=steps, kind=kind, noise_multiplier=0.0)
    # the sum of squared norms is added in another order: rounding only (Adam divides by roots of tiny numbers)
    assert largest_difference(one, many) < (1e-6 if kind == "sgd" else 2e-5)


@pytest.mark.parametrize("layout", ["two", "four"], indirect=True)
@pytest.mark.parametrize("seeded", ["generator", "manual_seed"])
def test_same_seed_same_noise_on_any_number_of_devices(layout, seeded):
    where = layout[0] if seeded == "generator" else None
    one = train(layout[:1], steps=20, generator_on=where)
    many = train(layout, steps=20, generator_on=where)
    assert largest_difference(one, many) < 1e-5


@pytest.mark.parametrize("layout", ["two", "four"], indirect=True)
@pytest.mark.parametrize("generator_index", [0, -1])
def test_noise_alone_is_bit_identical_on_any_number_of_devices(layout, generator_index):
    def noise(devices: list[torch.device]) -> list[torch.Tensor]:
        module = GradSampleModule(spread(network(), devices))
        generator = torch.Generator(devices[generator_index]).manual_seed(5)
        optimizer = DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=1.0),
            noise_multiplier=1.3,
            max_grad_norm=0.5,
            expected_batch_size=1,
            generator=generator,
        )
        module(torch.zeros(0, D, device=devices[0])).sum().backward()
        optimizer.step()
        return [p.grad.cpu() for p in module.parameters()]

    for ours, reference in zip(noise(layout), noise(layout[:1]), strict=True):
        assert torch.equal(ours, reference)


def test_generator_on_another_device_type_than_every_parameter_works(layout):
    first = train(layout, steps=2, generator_on=torch.device("cpu"))
    again = train(layout, steps=2, generator_on=torch.device("cpu"))
    other = train(layout, steps=2, noise_multiplier=0.0)
    assert largest_difference(first, again) == 0.0
    assert largest_difference(first, other) > 1e-3


def test_default_generators_of_two_devices_do_not_repeat_each_others_noise(layout):
    """`torch.manual_seed` seeds the default generators of all devices alike; noise must not come from each of them."""
    torch.manual_seed(0)
    module = GradSampleModule(spread(nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in layout]), layout))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    module(torch.zeros(1, 40, device=layout[0])).sum().mul(0).backward()
    optimizer.step()
    drawn = [p.grad.flatten().cpu() for p in module.parameters()]
    for i, a in enumerate(drawn):
        for b in drawn[i + 1 :]:
            correlation = (a @ b / (a.norm() * b.norm())).abs().item()
            assert correlation < 5.5 / 40  # 5.5 standard deviations of the correlation of 1600 pairs
            assert not torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="copies are counted on emulated devices")
@pytest.mark.parametrize("parameters", [4, 400])
@pytest.mark.parametrize("layout", ["one", "two", "four"], indirect=True)
def test_clipping_and_noise_copy_one_vector_each_way_per_further_device(layout, parameters):
    """2 (D - 1) vectors of length B and no host sync, for 4 and for 400 parameters."""
    devices = layout
    per_layer = 1 if parameters == 4 else 2
    layers = [nn.Linear(D, D, bias=per_layer == 2) for _ in range(parameters // per_layer)]
    module = GradSampleModule(spread(nn.Sequential(*layers), devices))
    assert len(list(module.parameters())) == parameters
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
        generator=torch.Generator(devices[0]).manual_seed(0),
    )
    for x, y in batches(2):
        optimizer.zero_grad()
        output = module(x.to(devices[0]))
        nn.functional.cross_entropy(output, y.to(output.device)).backward()
        with count_copies() as seen:
            optimizer.step()
        assert seen.cross == 2 * (len(devices) - 1)
        assert all(tuple(c.shape) == (len(x),) for c in seen.copies)
        assert (seen.h2d, seen.d2h, seen.sync) == (0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="copies are counted on emulated devices")
def test_backward_and_step_never_wait_for_the_host(two_devices):
    module = GradSampleModule(spread(network(), two_devices))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
    )
    for step, (x, y) in enumerate(batches(7), 1):
        x, y = x.to(two_devices[0]), y.to(two_devices[1])
        with count_copies() as seen:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        # the first batch compares per-sample gradients with autograd's once, which waits; in the 2nd and 4th forward it is read
        # whether samples are isolated, once from each device
        if step in (2, 4):
            assert seen.sync + seen.d2h == 2
        elif step > 1:
            assert (seen.sync, seen.d2h) == (0, 0)
            # one activation forward, one gradient backward, and the two vectors of clipping
            assert seen.cross == 4


def test_norms_are_added_where_most_trainable_elements_are(two_devices):
    small, large = two_devices
    model = nn.Sequential(nn.Linear(D, 4).to(small), nn.Linear(4, 50).to(large))
    module = GradSampleModule(spread(model, two_devices))
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
    )
    module(torch.ones(B, D, device=small)).sum().backward()
    optimizer.step()
    assert list(optimizer._nonfinite) == [large]


def test_a_reduction_device_can_be_named(two_devices):
    default = train(two_devices, steps=3)
    cpu = train(two_devices, steps=3, reduction_device="cpu", generator_on=two_devices[0])
    named = train(two_devices, steps=3, reduction_device=two_devices[1], generator_on=two_devices[0])
    assert largest_difference(cpu, named) < 1e-6
    assert len(default) == len(cpu)


def test_parameters_moved_between_steps_are_followed(two_devices):
    module = GradSampleModule(network())
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=B,
    )
    (x, y), *_ = batches(1)
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    module.to(two_devices[1])
    nn.functional.cross_entropy(module(x.to(two_devices[1])), y.to(two_devices[1])).backward()
    if not is_installed():  # emulated devices swap Parameters on a move, CUDA does not
        optimizer.step()
    assert all(p.grad_sample.device == two_devices[1] for p in module.parameters())


@pytest.mark.gpu(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_gpus_equal_one(kind):
    devices = accelerators(2)
    one = train(devices[:1], steps=20, kind=kind, generator_on=devices[0])
    two = train(devices, steps=20, kind=kind, generator_on=devices[0])
    assert largest_difference(one, two) < 2e-4


def test_unlike_devices_share_no_draw(monkeypatch):
    """Two models of GPU make other numbers of one state: parts of one draw could then repeat on both."""
    from opacus import devices

    wanted = [((5,), torch.device("cpu"), torch.float32), ((3, 2), torch.device("cpu"), torch.float32)]
    monkeypatch.setattr(devices, "_draw_alike", lambda _: False)
    apart = devices.NoiseStream(torch.Generator().manual_seed(3), torch.device("cpu")).normals(wanted, 2.0)
    one_by_one = devices.NoiseStream(torch.Generator().manual_seed(3), torch.device("cpu"))
    for found, (shape, device, dtype) in zip(apart, wanted, strict=True):
        assert torch.equal(found, one_by_one.normal(shape, 2.0, device, dtype))
