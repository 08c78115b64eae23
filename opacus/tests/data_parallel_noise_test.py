"""Several processes: noise once, drawn by one; every step accounted once; collectives by bucket; resumed runs go on the same."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scipy.stats import chi2
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel, average_gradients
from opacus.distributed.reduction import Reduction
from opacus.optimizers import get_optimizer_class
from opacus.testing import Ranks, spread
from opacus.testing.emulated_devices import is_supported
from opacus.tests.replicas import ADAPTIVE, on_this_rank, own_devices, reader, records, train

pytestmark = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")
SIGMA, C, WIDE = 1.3, 0.7, 120


def wide_model(devices: list[torch.device]) -> nn.Module:
    torch.manual_seed(0)
    return spread(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)), devices)


def noisy_gradient(
    mode: str, style: str, seeds: str, secure: bool, reduction: str = "sum"
) -> tuple[list[Tensor], list[Tensor]]:
    """One step's gradient with noise, and the clipped sum without, as every rank has them; "sum" divides by nothing."""
    found = []
    for sigma in (SIGMA, 0.0):
        generator = None
        if seeds.startswith("generator"):
            generator = torch.Generator().manual_seed(dist.get_rank() if seeds.endswith("differ") else 3)
        model = DifferentiallyPrivateDistributedDataParallel(wide_model(own_devices(2)))
        data = TensorDataset(torch.ones(8, WIDE), torch.zeros(8, dtype=torch.int64))
        parts = PrivacyEngine(accountant="rdp", secure_mode=secure).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(data, batch_size=8),
            criterion=nn.CrossEntropyLoss(reduction=reduction),
            noise_multiplier=sigma,
            max_grad_norm=C,
            loss_reduction=reduction,
            grad_sample_mode=mode,
            clipping=style,
            noise_generator=generator,
            **({**ADAPTIVE, "unclipped_num_std": 1e9} if style == "adaptive" else {}),
        )
        private, optimizer, *criterion, loader = parts
        torch.manual_seed(dist.get_rank() if seeds == "default, differ" else 17)
        loss_of = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
        for x, y in loader:
            optimizer.zero_grad()
            output = private(x.to("emu:0"))
            loss_of(output, y.to(output.device)).backward()
            optimizer.step()
            break
        found.append([p.grad.cpu().clone() for p in model.parameters()])
    return found[0], found[1]


def assert_spread(noise: Tensor, std: float) -> None:
    """Mean 0 and standard deviation `std`, by bounds that fail once in a million runs."""
    n = noise.numel()
    low, high = chi2.ppf([5e-7, 1 - 5e-7], n) / n
    assert low < float(noise.double().square().mean()) / std**2 < high
    assert abs(float(noise.double().mean())) < 5 * std / math.sqrt(n)


@pytest.mark.parametrize(
    ("mode", "style", "seeds", "secure"),
    [
        ("hooks", "flat", "default, alike", False),
        ("bk", "flat", "default, differ", False),
        ("ghost", "flat", "generator, alike", False),
        ("bk", "per_layer", "generator, differ", False),
        ("bk", "adaptive", "default, alike", False),
        ("hooks", "automatic", "default, alike", False),
        ("bk", "flat", "default, alike", True),
    ],
)
def test_noise_is_added_once_over_two_ranks_and_all_step_on_the_same(
    two_ranks_with_devices: Ranks, mode: str, style: str, seeds: str, secure: bool
) -> None:
    check_noise(two_ranks_with_devices, mode, style, seeds, secure)


@pytest.mark.parametrize(("mode", "seeds"), [("hooks", "default, alike"), ("bk", "default, differ")])
def test_noise_is_added_once_over_four_ranks_and_all_step_on_the_same(
    four_ranks_with_devices: Ranks, mode: str, seeds: str
) -> None:
    check_noise(four_ranks_with_devices, mode, "flat", seeds, False)


def check_noise(ranks: Ranks, mode: str, style: str, seeds: str, secure: bool) -> None:
    by_rank = ranks.run(noisy_gradient, mode, style, seeds, secure)
    noisy, clean = by_rank[0]
    for others, other_clean in by_rank:
        assert all(torch.equal(a, b) for a, b in zip(noisy, others, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(clean, other_clean, strict=True))
    parts = [a - b for a, b in zip(noisy, clean, strict=True)]
    for part in (parts[0], parts[2]):  # on either device
        assert_spread(part, SIGMA * C)
    assert_spread(torch.cat([part.flatten() for part in parts]), SIGMA * C)
    correlation = float((parts[0] * parts[2]).mean()) / (SIGMA * C) ** 2
    assert abs(correlation) < 5 / WIDE


def streams_of_ranks_seeded_alike() -> tuple[Tensor, Tensor]:
    """What the first rank adds as noise, and what any rank's default generator gives next from the same seed."""
    noisy, clean = noisy_gradient("bk", "flat", "default, alike", False)
    torch.manual_seed(17)
    return noisy[0] - clean[0], torch.randn(2 * WIDE * WIDE)


def test_noise_does_not_repeat_the_numbers_that_other_ranks_draw_batches_with(
    two_ranks_with_devices: Ranks,
) -> None:
    noise, numbers = two_ranks_with_devices.run(streams_of_ranks_seeded_alike)[1]
    flat = noise.flatten() / (SIGMA * C)
    for start in (0, WIDE * WIDE // 2, WIDE * WIDE):
        assert abs(float((flat * numbers[start : start + flat.numel()]).mean())) < 5 / WIDE


def counts_of_adaptive_steps(steps: int) -> list[list[float]]:
    """Noise on the count of unclipped samples, step by step, recovered from how C moves."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = nn.Linear(3, 1, device="emu:0")
    optimizer = get_optimizer_class("adaptive", True, "hooks")(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=5,
        generator=generator,
        **{**ADAPTIVE, "max_clipbound": 1e30, "min_clipbound": 0.0, "unclipped_num_std": 4.0},
    )
    bounds = [1.0]
    counts = []
    for _ in range(steps):
        for p in model.parameters():
            p.grad_sample = torch.zeros(3, *p.shape, device=p.device)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        bounds.append(float(optimizer.max_grad_norm))
        change = math.log(bounds[-1] / bounds[-2]) / -ADAPTIVE["clipbound_learning_rate"]
        counts.append((change + ADAPTIVE["target_unclipped_quantile"] - 0.5) * 5 * dist.get_world_size())
    return [bounds, counts]


def test_the_count_of_unclipped_samples_is_that_of_all_ranks_with_noise_once(
    two_ranks_with_devices: Ranks,
) -> None:
    (bounds, counts), (other_bounds, _) = two_ranks_with_devices.run(counts_of_adaptive_steps, 300)
    assert bounds == other_bounds
    assert_spread(torch.tensor(counts) - 0.5 * 3 * 2, 4.0)  # three samples on each rank, all unclipped


def test_every_step_is_accounted_once(two_ranks: Ranks) -> None:
    alone = train(noise_multiplier=1.0, steps=9, batch_size=1, physical=1)
    together = two_ranks.run(
        on_this_rank, noise_multiplier=1.0, steps=9, batch_size=1, physical=1, wrapping="ours"
    )
    assert [own["steps"] for own in together] == [9, 9]
    assert [own["epsilon"] for own in together] == [alone["epsilon"]] * 2


# ------------------------------------------------------------------ collectives


def collectives_of_three_steps(style: str, mode: str, wrapping: str, bucket_bytes: int | None) -> list[int]:
    """How many reductions each step starts; the backward must start none."""
    started: list[int] = []
    real = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        started.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    ends: list[int] = []
    dist.all_reduce = counted
    try:

        def watch(optimizer: Any, engine: Any) -> None:
            if bucket_bytes is not None:
                optimizer._reduction.bucket_bytes = bucket_bytes
            ends.append(len(started))

        train(mode=mode, clipping=style, wrapping=wrapping, devices=own_devices(2), steps=4, watch=watch)
    finally:
        dist.all_reduce = real
    return [b - a for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_a_step_has_one_collective_for_each_bucket(two_ranks_with_devices: Ranks, mode: str) -> None:
    run = two_ranks_with_devices.run
    one_for_each_device = [[2, 2, 2]] * 2
    assert run(collectives_of_three_steps, "flat", mode, "ours", None) == one_for_each_device
    assert run(collectives_of_three_steps, "per_layer", mode, "torch's", None) == one_for_each_device
    assert run(collectives_of_three_steps, "adaptive", mode, "none", None) == [[3, 3, 3]] * 2  # and the count
    smaller = run(collectives_of_three_steps, "flat", mode, "ours", 25 * 8)[0]
    assert smaller == [smaller[0]] * 3
    assert 2 < smaller[0] <= 7  # the model has seven parameters


def gradients_after_a_backward_in_torchs_wrapper() -> tuple[bool, bool]:
    """Whether plain gradients are this rank's own after the backward, in the first batch and in the second."""
    rank = dist.get_rank()
    model = reader()
    wrapped = nn.parallel.DistributedDataParallel(model)
    private, optimizer, _ = PrivacyEngine().make_private(
        module=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.0),
        data_loader=DataLoader(records(), batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
    )
    ids, classes = records().tensors
    ids, classes = ids[4 * rank : 4 * rank + 4], classes[4 * rank : 4 * rank + 4]
    twin = reader()
    nn.functional.cross_entropy(twin(ids), classes).backward()
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(ids), classes).backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        found.append(all(torch.allclose(p.grad, q.grad) for p, q in pairs))  # type: ignore[arg-type]
        optimizer.step()
    return found[0], found[1]


def test_torchs_wrapper_reduces_nothing_in_the_backward(two_ranks: Ranks) -> None:
    assert two_ranks.run(gradients_after_a_backward_in_torchs_wrapper) == [(True, True)] * 2


def sums_of_many_shapes(device: str, bucket_bytes: int) -> list[Tensor]:
    rank = dist.get_rank()
    shapes = [(3,), (2, 5), (), (4, 4), (0,), (7,), (2, 3, 2)]
    tensors = [
        torch.full(shape, rank + 1.0, device=device, dtype=torch.float32 if i % 3 else torch.float64)
        for i, shape in enumerate(shapes)
    ]
    tensors.append((torch.arange(12.0, device=device).view(3, 4) * (rank + 1)).t())
    Reduction(dist.group.WORLD, bucket_bytes).add_up(tensors)  # type: ignore[arg-type]
    return [t.cpu() for t in tensors]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_sums_in_buckets_are_sums_whatever_shape_dtype_and_strides(
    two_ranks_with_devices: Ranks, bucket_bytes: int
) -> None:
    for tensors in two_ranks_with_devices.run(sums_of_many_shapes, "emu:1", bucket_bytes):
        assert all(bool((t == 3).all()) for t in tensors[:-1])
        torch.testing.assert_close(tensors[-1], (torch.arange(12.0).view(3, 4) * 3).t())


def averaged() -> list[Tensor | None]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    for p in model[1].parameters():
        p.grad = torch.full_like(p, float(dist.get_rank()))
    average_gradients(model)
    return [p.grad for p in model.parameters()]


def test_average_gradients_is_the_mean_over_ranks_and_leaves_none_alone(two_ranks: Ranks) -> None:
    for grads in two_ranks.run(averaged):
        assert grads[:2] == [None, None]
        assert all(torch.equal(g, torch.full_like(g, 0.5)) for g in grads[2:])
        assert all(g.dtype == torch.bfloat16 for g in grads[2:])


# ------------------------------------------------------------------ half of the ranks, and resumed runs


def train_in_pairs() -> dict[str, Tensor]:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = dist.get_rank() // 2
    model = reader(pair)
    wrapped = DifferentiallyPrivateDistributedDataParallel(model, process_group=groups[pair])
    generator = torch.Generator().manual_seed(5)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=wrapped,
        optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.5),
        data_loader=DataLoader(records(), batch_size=6, shuffle=True, generator=generator),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        grad_sample_mode="bk",
    )
    for ids, classes in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(ids), classes).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_process_group_may_be_a_part_of_all_ranks(four_ranks: Ranks) -> None:
    alone = train(steps=4, mode="bk")["parameters"]
    by_rank = four_ranks.run(train_in_pairs)
    for rank, own in enumerate(by_rank):
        assert all(torch.equal(p, by_rank[rank // 2 * 2][name]) for name, p in own.items())
    for name, expected in alone.items():
        torch.testing.assert_close(by_rank[0][name], expected, rtol=0, atol=1e-9)
        assert not torch.equal(by_rank[0][name], by_rank[2][name])


def run_in_two_parts(folder: str, resume: bool, one_file: bool) -> tuple[list[Tensor], int]:
    """Six steps; after three a checkpoint, from which a new run goes on if `resume`."""
    path = Path(folder) / ("all.pt" if one_file else f"rank-{dist.get_rank()}.pt")

    def parts() -> tuple[Any, ...]:
        torch.manual_seed(31)
        model = DifferentiallyPrivateDistributedDataParallel(reader(dtype=torch.float32))
        generator = torch.Generator().manual_seed(5)
        engine = PrivacyEngine(accountant="rdp")
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            data_loader=DataLoader(records(), batch_size=4, shuffle=True, generator=generator),
            noise_multiplier=1.0,
            max_grad_norm=0.3,
            clipping="adaptive",
            grad_sample_mode="bk",
            **ADAPTIVE,
        )

    engine, private, optimizer, loader = parts()
    for step, (ids, classes) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(ids), classes).backward()
        optimizer.step()
        if step == 2:
            if not one_file or dist.get_rank() == 0:
                engine.save_checkpoint(path=path, module=private, optimizer=optimizer)
            if resume:
                break
    if resume:
        dist.barrier()
        torch.manual_seed(99)
        engine, private, optimizer, loader = parts()
        torch.manual_seed(100)
        engine.load_checkpoint(path=path, module=private, optimizer=optimizer)
        for ids, classes in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(ids), classes).backward()
            optimizer.step()
    return [p.detach() for p in private.parameters()], len(engine.accountant)


@pytest.mark.parametrize("one_file", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path, one_file: bool) -> None:
    whole = two_ranks.run(run_in_two_parts, str(tmp_path), False, one_file)
    resumed = two_ranks.run(run_in_two_parts, str(tmp_path), True, one_file)
    for (expected, steps), (own, own_steps) in zip(whole, resumed, strict=True):
        assert steps == own_steps == 6
        assert all(torch.equal(a, b) for a, b in zip(expected, own, strict=True))


def noise_after_loading_a_checkpoint_of_one_process(path: str) -> tuple[Tensor, Tensor]:
    """States of the noise's stream and of the default generator."""
    model = DifferentiallyPrivateDistributedDataParallel(reader())
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(records(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=0.3,
    )
    weights = torch.load(path, weights_only=True)
    weights["module_state_dict"] = {
        name.replace("_module.", "_module.module.", 1): value
        for name, value in weights["module_state_dict"].items()
    }
    weights["private_run_state"]["parameters"] = [
        [f"module.{name}", shape] for name, shape in weights["private_run_state"]["parameters"]
    ]
    torch.save(weights, f"{path}.{dist.get_rank()}")
    engine.load_checkpoint(path=f"{path}.{dist.get_rank()}", module=private, optimizer=optimizer)
    return copy.copy(optimizer.noise_stream().generator.get_state()), torch.get_rng_state()


def test_noise_and_batches_part_ways_where_one_process_becomes_several(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "one.pt"
    model = reader()
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(records(), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=0.3,
    )
    engine.save_checkpoint(path=path, module=private, optimizer=optimizer)
    for noise, default in two_ranks.run(noise_after_loading_a_checkpoint_of_one_process, str(path)):
        assert not torch.equal(noise, default)
