"""What ranks must not do, and what happens when one of them is gone: the same named error on every rank, no collective before, no hang."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel, RankLostError, ReplicaError
from opacus.distributed.replicas import _own_problems
from opacus.errors import ConfigurationError
from opacus.optimizers import DistributedDPOptimizer
from opacus.testing import Ranks, spread
from opacus.testing.emulated_devices import is_supported
from opacus.tests.replicas import own_devices, reader, records

pytestmark = pytest.mark.skipif(not is_supported(), reason="no emulated devices here")
_SHARED = ("EMU-shared-0", "EMU-shared-1")


@pytest.fixture(scope="module")
def impatient_three() -> Iterator[Ranks]:
    with Ranks(3, patience=30) as ranks:
        yield ranks


def caught(
    prepare: Callable[..., tuple[nn.Module, dict[str, Any]]], *args: Any
) -> tuple[str | None, bool, int]:
    """What wrapping the model raises, whether it left the model alone, and how many collectives it started."""
    model, options = prepare(*args)
    before = copy.deepcopy({name: p for name, p in model.named_parameters() if p.device.type != "meta"})
    started: list[str] = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather", "barrier")}
    for name, function in real.items():
        setattr(dist, name, _noted(function, name, started))
    message = None
    try:
        DifferentiallyPrivateDistributedDataParallel(model, **options)
    except ReplicaError as error:
        message = str(error)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    after = dict(model.named_parameters())
    return message, all(torch.equal(after[name].cpu(), p.cpu()) for name, p in before.items()), len(started)


def _noted(function: Callable[..., Any], name: str, started: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        started.append(name)
        return function(*args, **kwargs)

    return noted


def assert_refused_alike(outcomes: list[tuple[str | None, bool, int]], *parts: str) -> None:
    assert len({message for message, _, _ in outcomes}) == 1, outcomes
    message, _, collectives = outcomes[0]
    assert message is not None
    for part in parts:
        assert part in message, message
    assert all(untouched for _, untouched, _ in outcomes)
    assert collectives == 0


def devices_in_common(allow: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Each rank numbers the same two devices differently, as CUDA_VISIBLE_DEVICES may."""
    rank = dist.get_rank()
    module = torch.emu  # type: ignore[attr-defined]
    real = module.get_device_properties

    def properties(device: Any) -> Any:
        found = real(device)
        found.uuid = _SHARED[(torch.device(device).index + rank) % 2]
        return found

    module.get_device_properties = properties
    return spread(reader(rank), own_devices(2), layers=["words", "inner", "norm", "head"]), {
        "allow_shared_devices": allow
    }


def caught_on_shared_devices(allow: bool) -> tuple[str | None, bool, int]:
    real = torch.emu.get_device_properties  # type: ignore[attr-defined]
    try:
        return caught(devices_in_common, allow)
    finally:
        torch.emu.get_device_properties = real  # type: ignore[attr-defined]


def test_an_accelerator_of_two_ranks_is_named_with_its_index_on_each(two_ranks_with_devices: Ranks) -> None:
    assert_refused_alike(
        two_ranks_with_devices.run(caught_on_shared_devices, False),
        "2 problems",
        "ranks 0 and 1 both use EMU-shared-0 (emu:0 on rank 0, emu:1 on rank 1)",
        "ranks 0 and 1 both use EMU-shared-1 (emu:1 on rank 0, emu:0 on rank 1)",
        "allow_shared_devices=True",
    )


def test_sharing_on_purpose_is_accepted(two_ranks_with_devices: Ranks) -> None:
    outcomes = two_ranks_with_devices.run(caught_on_shared_devices, True)
    assert [message for message, _, _ in outcomes] == [None, None]
    assert outcomes[0][1]  # the first rank's parameters stay
    assert not outcomes[1][1]  # the second's become the first's
    assert all(collectives > 0 for _, _, collectives in outcomes)


def other_replicas(what: str) -> tuple[nn.Module, dict[str, Any]]:
    first = dist.get_rank() == 0
    model: nn.Module = reader(dist.get_rank())
    if what == "name" and not first:
        model.tail, model.head = model.head, nn.Identity()  # type: ignore[assignment]
    if what == "shape" and not first:
        model.inner = nn.Linear(3, 5).double()
    if what == "dtype" and not first:
        model.inner = model.inner.float()  # type: ignore[operator]
    if what == "requires_grad" and not first:
        model.words.weight.requires_grad_(False)  # type: ignore[union-attr]
    if what == "buffer" and not first:
        model.register_buffer("shift", torch.zeros(2))
    if what == "device count":
        spread(model, own_devices(2 if first else 1), layers=["words", "inner", "norm", "head"])
    if what == "device kind" and not first:
        model.to("emu:0")
    if what == "place":
        order = own_devices(2) if first else own_devices(2)[::-1]
        model.words.to(order[0])  # type: ignore[union-attr]
        model.inner.to(order[0 if first else 1])  # type: ignore[operator]
        for layer in (model.norm, model.head):
            layer.to(order[1])  # type: ignore[operator]
        model.shift = model.shift.to(order[1])
    if what == "meta" and not first:
        model.inner = nn.Linear(5, 5, device="meta", dtype=torch.float64)
    if what == "wrapped" and not first:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model, init_sync=False))
    return model, {}


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        (
            "name",
            (
                "rank 1's model has no parameter 'head.weight' that rank 0 trains",
                "rank 1's model has a parameter 'tail.bias'",
            ),
        ),
        ("shape", ("parameter 'inner.weight' has shape [5, 3] on rank 1, [5, 5] on rank 0",)),
        ("dtype", ("parameter 'inner.bias' has dtype torch.float32 on rank 1, torch.float64 on rank 0",)),
        ("requires_grad", ("parameter 'words.weight' has requires_grad False on rank 1, True on rank 0",)),
        ("buffer", ("buffer 'shift' has shape [2] on rank 1, [1] on rank 0",)),
        (
            "device count",
            ("rank 1's replica spans 2 devices, rank 0's 3 devices",),
        ),  # and the host, with the buffer
        ("device kind", ("rank 1's replica lies on devices of types emu, rank 0's on cpu",)),
        ("place", ("parameter 'inner.weight' has device of the replica 1 on rank 1, 0 on rank 0",)),
        ("meta", ("rank 1: parameter inner.weight is on the meta device and requires grad",)),
    ],
)
def test_replicas_that_differ_are_refused_on_every_rank_by_name(
    two_ranks_with_devices: Ranks, what: str, parts: tuple[str, ...]
) -> None:
    assert_refused_alike(two_ranks_with_devices.run(caught, other_replicas, what), *parts)


class Bound:
    """A group as `init_process_group(device_id=...)` makes it; gloo does not offer one."""

    bound_device_id = property(lambda self: torch.device("emu", 0))


def bound_group_problems() -> list[str]:
    model = spread(reader(), own_devices(2), layers=["words", "inner", "norm", "head"])
    return _own_problems(model, Bound())  # type: ignore[arg-type]


def test_a_group_bound_to_one_device_is_refused_for_replicas_on_several(
    two_ranks_with_devices: Ranks,
) -> None:
    for (message,) in two_ranks_with_devices.run(bound_group_problems):
        assert "bound to emu:0, but the replica has tensors on emu:1 too" in message
        assert "leave device_id" in message


def private_parts(rank_0: dict[str, Any], others: dict[str, Any]) -> str:
    """What make_private says on this rank."""
    options = {"module": reader(), "batch_size": 6, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    options.update(rank_0 if dist.get_rank() == 0 else others)
    model = options.pop("module")
    if options.pop("static_graph", False):
        model = nn.parallel.DistributedDataParallel(model, static_graph=True)
    generator = torch.Generator().manual_seed(0)
    if options.pop("one_generator", False):
        options["noise_generator"] = generator
    loader = DataLoader(
        options.pop("data", records()),
        batch_size=options.pop("batch_size"),
        shuffle=True,
        generator=generator,
    )
    try:
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, **options
        )
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("rank_0", "others", "part"),
    [
        ({}, {"noise_multiplier": 0.5}, "noise_multiplier is 1.0 on rank 0, 0.5 on rank 1"),
        ({}, {"batch_size": 8}, "sample rate is 0.25 on rank 0, 0.3333333333333333 on rank 1"),
        ({}, {"grad_sample_mode": "bk"}, "grad_sample_mode is 'hooks' on rank 0, 'bk' on rank 1"),
        ({}, {"max_grad_norm": -1.0}, "rank 1: max_grad_norm must be a positive, finite number, not -1.0"),
        ({"one_generator": True}, {"one_generator": True}, "noise_generator is the data loader's generator"),
        ({"static_graph": True}, {"static_graph": True}, "static_graph=True"),
        (
            {"clipping": "nosuch"},
            {"clipping": "nosuch"},
            "clipping 'nosuch' is not available over several processes",
        ),
    ],
)
def test_make_private_refuses_the_same_on_every_rank(
    two_ranks: Ranks, rank_0: dict[str, Any], others: dict[str, Any], part: str
) -> None:
    first, second = two_ranks.run(private_parts, rank_0, others)
    assert first == second
    assert part in first


def frozen_on_one_rank() -> str:
    model = nn.Linear(2, 1)
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    if dist.get_rank() == 1:
        model.bias.requires_grad_(False)
    for p in model.parameters():
        p.grad_sample = torch.ones(1, *p.shape)  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except ReplicaError as error:
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        return str(error)
    return "no error"


def test_parameters_frozen_on_one_rank_only_are_refused_before_a_step(two_ranks: Ranks) -> None:
    for message in two_ranks.run(frozen_on_one_rank):
        assert "rank 1 would reduce other tensors than rank 0" in message


def made_before_the_group(wrap_later: bool) -> tuple[str, int, bool]:
    """What a step says where `make_private` was called before there were ranks, the accounted steps, and whether weights stayed."""
    model = nn.Linear(5, 2)
    before = copy.deepcopy(model.state_dict())
    engine = PrivacyEngine(accountant="rdp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opacus.distributed.following.runs_in_parallel", lambda: False)
        private, optimizer, _ = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(8, 5)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    trained = nn.parallel.DistributedDataParallel(private) if wrap_later else private
    trained(torch.randn(4, 5)).sum().backward()
    message = "no error"
    try:
        optimizer.step()
    except ReplicaError as error:
        message = str(error)
    same = all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    return message, len(engine.accountant), same or wrap_later  # torch's wrapper lets all begin with rank 0's


@pytest.mark.parametrize("wrap_later", [True, False], ids=["wrapped", "not wrapped"])
def test_what_was_made_private_before_there_were_ranks_does_not_step(
    two_ranks: Ranks, wrap_later: bool
) -> None:
    for message, steps, same in two_ranks.run(made_before_the_group, wrap_later):
        assert "Call init_process_group first, then make_private on every rank" in message
        assert steps == 0
        assert same


def copied_optimizer() -> str:
    model = nn.Linear(2, 1)
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    twin = copy.deepcopy(optimizer)
    try:
        twin.process_group  # noqa: B018
    except ReplicaError as error:
        twin.process_group = dist.group.WORLD  # type: ignore[assignment]
        assert twin.n_replicas == 2
        return str(error)
    return "no error"


def test_a_copied_optimizer_asks_for_a_process_group(two_ranks: Ranks) -> None:
    assert all("set optimizer.process_group" in message for message in two_ranks.run(copied_optimizer))


def test_without_a_process_group_everything_says_so() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ReplicaError, match="init_process_group"):
        DifferentiallyPrivateDistributedDataParallel(model)
    with pytest.raises(ConfigurationError, match="init_process_group"):
        DistributedDPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=1,
        )


# ------------------------------------------------------------------ ranks that are gone


def stays_away() -> str:
    """The last rank never wraps its model."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    if dist.get_rank() == dist.get_world_size() - 1:
        return ""
    try:
        DifferentiallyPrivateDistributedDataParallel(reader(), process_group=group)
    except RankLostError as error:
        return str(error)
    return "no error"


def test_ranks_that_do_not_come_are_named_when_time_is_up(impatient_three: Ranks) -> None:
    for message in impatient_three.run(stays_away)[:2]:
        assert re.search(r"no word from rank(s [01] and)? 2\.", message), message
        assert "Every rank must call DifferentiallyPrivateDistributedDataParallel" in message


def dies_in_training(mode: str, style: str, dies_at: int) -> tuple[str, int, bool]:
    """Rank 1 ends without a word after some steps: what the others raise, steps accounted, whether the model stayed."""
    model = reader()
    engine = PrivacyEngine(accountant="rdp")
    data = TensorDataset(*records().tensors)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        clipping=style,
    )
    for step, (ids, classes) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(private(ids), classes).backward()
        if step == dies_at and dist.get_rank() == 1:
            os._exit(1)
        before = [p.detach().clone() for p in model.parameters()]
        try:
            optimizer.step()
        except RankLostError as error:
            same = all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
            bare = all(p.grad is None for p in model.parameters())
            return str(error), len(engine.accountant), same and bare
    return "no error", len(engine.accountant), False


@pytest.mark.parametrize(("mode", "dies_at"), [("hooks", 1), ("bk", 3)])
def test_when_a_rank_dies_the_others_end_with_a_named_error(
    impatient_three: Ranks, mode: str, dies_at: int
) -> None:
    outcomes = impatient_three.outcomes(dies_in_training, mode, "flat", dies_at)
    assert "exit code 1" in str(outcomes[1].error)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        message, accounted, untouched = outcomes[rank].value
        assert "rank 1" in message
        assert accounted == dies_at
        assert untouched
