"""Samples that own several rows: against a float64 loop over samples, each with its own loss over its own rows."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.grad_sample import GradSampleHooks, GradSampleModule, Owners, RowsPerSample
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.kept import KeptProduct, KeptRows
from opacus.grad_sample.routes import Route
from opacus.grad_sample.rules import builtin_rule
from opacus.testing import spread
from opacus.utils.batch_memory_manager import BatchMemoryManager

MODES = ["hooks", "functorch", "ew", "bk", "ghost"]
ORDERS = ["blocked", "interleaved"]
N, K, T, V = 4, 3, 5, 9


def index_of(order: str, n: int = N, k: int = K) -> Tensor:
    samples = torch.arange(n)
    return samples.repeat(k) if order == "blocked" else samples.repeat_interleave(k)


class Scorer(nn.Module):
    """Ids to one score a row: tied embedding and head, a layer used twice, a convolution, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 4)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(self.twice(torch.tanh(self.twice(x))))
        x = torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return torch.log_softmax(self.head(x), -1).gather(-1, ids.roll(-1, 1).unsqueeze(-1)).sum((1, 2))


def of_each(rows_NK: Tensor) -> Tensor:
    """`[n]`: a sample's loss, not additive over its k rows: DPO's shape, with the first row chosen."""
    return -torch.nn.functional.logsigmoid(rows_NK[:, 0] - rows_NK[:, 1:].logsumexp(1))


def grouped(rows: Tensor, order: str, k: int = K) -> Tensor:
    return rows.view(k, -1).t() if order == "blocked" else rows.view(-1, k)


class Preference(nn.Module):
    """The batch's loss from the rows' scores, as a criterion that mode "ghost" can wrap."""

    def __init__(self, order: str, reduction: str, k: int = K) -> None:
        super().__init__()
        self.order, self.reduction, self.k = order, reduction, k

    def forward(self, scores: Tensor) -> Tensor:
        loss = of_each(grouped(scores, self.order, self.k))
        return loss if self.reduction == "none" else getattr(loss, self.reduction)()


def looped(
    model: nn.Module, ids: Tensor, index: Tensor, n: int, loss: Callable[[Tensor], Tensor]
) -> list[list[Tensor]]:
    """Per sample, the gradient of its own loss over its own rows; float64."""
    reference = copy.deepcopy(model).cpu().double()
    found = []
    for i in range(n):
        rows = ids[index == i]
        value = loss(reference(rows)) if len(rows) else sum(p.sum() * 0 for p in reference.parameters())
        found.append(list(torch.autograd.grad(value, list(reference.parameters()))))
    return found


def clipped(grads: list[list[Tensor]], style: str, clip: Any) -> list[Tensor]:
    total = [torch.zeros_like(g) for g in grads[0]]
    for sample in grads:
        norms = [g.norm().item() for g in sample]
        if style == "per_layer":
            factors = [min(1.0, c / norm) if norm else 1.0 for c, norm in zip(clip, norms, strict=True)]
        elif style == "automatic":
            factors = [clip / (math.hypot(*norms) + 0.01)] * len(sample)
        else:
            norm = math.hypot(*norms)
            factors = [min(1.0, clip / norm) if norm else 1.0] * len(sample)
        for t, g, c in zip(total, sample, factors, strict=True):
            t += c * g
    return total


def private(
    model: nn.Module,
    mode: str,
    *,
    clip: Any = 0.4,
    reduction: str = "mean",
    clipping: str = "flat",
    **options: Any,
) -> Any:
    """`(module, optimizer, criterion or None)` of `make_private`."""
    criterion = options.pop("criterion", None) or Preference(options.get("row_order", "blocked"), reduction)
    module, optimizer, *rest = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, T)), batch_size=4),
        criterion=criterion,
        noise_multiplier=0.0,
        max_grad_norm=clip,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        clipping=clipping,
        poisson_sampling=False,
        **options,
    )
    return module, optimizer, (rest[0] if mode == "ghost" else criterion)


def summed(optimizer: Any) -> list[Tensor]:
    before = [p.detach().clone() for p in optimizer.params]
    optimizer.step()
    # lr 1, no noise: the update is the clipped sum, divided by the expected batch size for "mean"
    scale = optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else 1
    return [(b - p.detach()).cpu().double() * scale for b, p in zip(before, optimizer.params, strict=True)]


def assert_sums(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-9) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=tolerance * max(1.0, want.abs().max().item()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_s_rows_are_clipped_together(mode, order, reduction):
    torch.manual_seed(0)
    model, ids = Scorer().double(), torch.randint(0, V, (N * K, T))
    grads = looped(model, ids, index_of(order), N, lambda scores: of_each(scores.view(1, K)).sum())
    norms = [math.hypot(*(g.norm().item() for g in sample)) for sample in grads]
    clip = sorted(norms)[1] * 1.01  # some samples are clipped, some are not
    module, optimizer, criterion = private(
        model, mode, clip=clip, reduction=reduction, rows_per_sample=K, row_order=order
    )
    criterion(module(ids)).backward()
    assert_sums(summed(optimizer), clipped(grads, "flat", clip))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_grad_samples_are_those_of_samples(mode, order):
    torch.manual_seed(1)
    model, ids = Scorer().double(), torch.randint(0, V, (N * K, T))
    grads = looped(model, ids, index_of(order), N, lambda scores: of_each(scores.view(1, K)).sum())
    module, _, criterion = private(model, mode, rows_per_sample=K, row_order=order)
    criterion(module(ids)).backward()
    for j, p in enumerate(model.parameters()):
        assert torch.allclose(p.grad_sample, torch.stack([sample[j] for sample in grads]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_every_clipping_style_sees_samples(mode, clipping):
    torch.manual_seed(2)
    model, ids = Scorer().double(), torch.randint(0, V, (N * K, T))
    clip = [0.05] * len(list(model.parameters())) if clipping == "per_layer" else 0.4
    grads = looped(model, ids, index_of("blocked"), N, lambda scores: of_each(scores.view(1, K)).sum())
    module, optimizer, criterion = private(model, mode, clip=clip, clipping=clipping, rows_per_sample=K)
    criterion(module(ids)).backward()
    assert_sums(summed(optimizer), clipped(grads, clipping, clip))


def chain() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(T, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 1), nn.Flatten(0)
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", MODES)
def test_layers_on_several_devices(mode, order, layout):
    torch.manual_seed(3)
    model, x = chain(), torch.randn(N * K, T)
    grads = looped(model, x.double(), index_of(order), N, lambda scores: of_each(scores.view(1, K)).sum())
    spread(model, layout)
    module, optimizer, criterion = private(model, mode, clip=0.3, rows_per_sample=K, row_order=order)
    criterion(module(x.to(layout[0]))).backward()
    assert_sums(summed(optimizer), clipped(grads, "flat", 0.3), 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch_changes_nothing_and_batches_may_vary_in_size(mode):
    torch.manual_seed(4)
    model = Scorer().double()
    before = copy.deepcopy(model)
    module, optimizer, criterion = private(model, mode, rows_per_sample=K, reduction="sum")
    criterion(module(torch.zeros(0, T, dtype=torch.long))).backward()
    optimizer.step()
    optimizer.zero_grad()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
    for n in (2, 1):
        grads_of = torch.randint(0, V, (n * K, T))
        grads = looped(model, grads_of, index_of("blocked", n), n, lambda s: of_each(s.view(1, K)).sum())
        criterion(module(grads_of)).backward()
        assert_sums(summed(optimizer), clipped(grads, "flat", 0.4))
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_one_row_a_sample_is_the_default_and_k_1_the_same(mode):
    torch.manual_seed(5)
    model, ids = Scorer().double(), torch.randint(0, V, (N, T))
    found = []
    for options in ({}, {"rows_per_sample": 1, "row_order": "interleaved"}):
        module, optimizer, criterion = private(copy.deepcopy(model), mode, criterion=Plain("mean"), **options)
        criterion(module(ids)).backward()
        found.append(summed(optimizer))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Plain(nn.Module):
    """A loss for each row."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, scores: Tensor) -> Tensor:
        loss = scores.square()
        return loss if self.reduction == "none" else getattr(loss, self.reduction)()


@pytest.mark.parametrize("mode", MODES)
def test_the_mean_over_rows_is_the_mean_over_samples_of_their_rows_mean(mode):
    torch.manual_seed(6)
    model, ids = Scorer().double(), torch.randint(0, V, (N * K, T))
    grads = looped(model, ids, index_of("interleaved"), N, lambda scores: scores.square().mean())
    module, optimizer, criterion = private(
        model, mode, criterion=Plain("mean"), rows_per_sample=K, row_order="interleaved"
    )
    criterion(module(ids)).backward()
    assert_sums(summed(optimizer), clipped(grads, "flat", 0.4))


INDEX = torch.tensor([2, 0, 2, 2, 4, 0, 4])  # samples 1 and 3 own no row


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_index_gives_any_rows_to_any_sample(mode, reduction):
    torch.manual_seed(7)
    model, ids = Scorer().double(), torch.randint(0, V, (len(INDEX), T))
    own = (lambda s: s.square().mean()) if reduction == "mean" else (lambda s: s.square().sum())
    grads = looped(model, ids, INDEX, 5, own)
    clip = sorted(math.hypot(*(g.norm().item() for g in sample)) for sample in grads)[3] * 1.01
    module, optimizer, criterion = private(
        model, mode, clip=clip, criterion=Plain(reduction), reduction=reduction
    )
    module.set_sample_index(INDEX, 5)
    scores = module(ids)
    if mode == "ghost":
        criterion(scores).backward()
    else:
        weight = 1 / INDEX.bincount(minlength=5).double()[INDEX] if reduction == "mean" else 1.0
        (scores.square() * weight).sum().div(5 if reduction == "mean" else 1).backward()
    assert_sums(summed(optimizer), clipped(grads, "flat", clip))


@pytest.mark.parametrize("mode", ["hooks", "bk"])
@pytest.mark.parametrize("order", ORDERS)
def test_order_and_index_agree_under_checkpointing(mode, order):
    torch.manual_seed(8)
    model, x = chain().double(), torch.randn(N * K, T, dtype=torch.float64)

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module, reentrant: bool) -> None:
            super().__init__()
            self.first, self.inner, self.reentrant = inner[0], inner[1:], reentrant

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)

    found = []
    for reentrant in (False, True):
        for by_index in (False, True):
            options = {} if by_index else {"rows_per_sample": K, "row_order": order}
            module, optimizer, _ = private(Checkpointed(copy.deepcopy(model), reentrant), mode, **options)
            for _ in range(2):
                if by_index:
                    module.set_sample_index(index_of(order), N)
                of_each(grouped(module(x), order)).mean().backward()
                found.append(summed(optimizer))
                optimizer.zero_grad()
    for step in (0, 1):
        for other in found[2 + step :: 2]:
            assert_sums(other, found[step], 1e-12)


def test_a_batch_without_a_fresh_index_is_refused_by_name():
    model = GradSampleModule(nn.Sequential(nn.Linear(2, 1)))
    for _ in range(2):
        model.set_sample_index(torch.tensor([0, 0, 1]), 2)
        model(torch.randn(3, 2)).sum().backward()
    with pytest.raises(PerSampleGradientError, match=r"0 \(Linear\).*set_sample_index"):
        model(torch.randn(3, 2)).sum().backward()
    model.set_sample_index(None)
    model.zero_grad()
    model(torch.randn(3, 2)).sum().backward()
    assert model._module[0].weight.grad_sample.shape == (3, 1, 2)


def test_forwards_under_two_indices_share_no_backward_and_wait_for_none():
    model = GradSampleModule(nn.Linear(2, 1))
    model.set_sample_index(torch.tensor([0, 0, 1]), 2)
    first = model(torch.randn(3, 2)).sum()
    with pytest.raises(ValueError, match="waits for its backward"):
        model.set_sample_index(torch.tensor([0, 1, 1]), 2)
    model.set_sample_index(None)
    with pytest.raises(PerSampleGradientError, match="different owners"):
        (first + model(torch.randn(3, 2)).sum()).backward()


def test_a_copy_does_not_reuse_the_index_of_one_batch():
    model = GradSampleModule(nn.Linear(2, 1))
    model.set_sample_index(torch.tensor([0, 0, 1]), 2)
    with pytest.raises(PerSampleGradientError, match="set_sample_index"):
        copy.deepcopy(model)(torch.randn(3, 2)).sum().backward()
    fixed = GradSampleModule(nn.Linear(2, 1))
    fixed.set_owners(RowsPerSample(2))
    clone = copy.deepcopy(fixed)
    clone(torch.randn(4, 2)).sum().backward()
    assert clone.weight.grad_sample.shape[0] == 2


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bk", "ghost"])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_batch_that_is_no_multiple_is_refused_at_the_layer(mode, wrap_model):
    model = nn.Sequential(nn.Linear(2, 1))
    _kept, _, criterion = private(
        model, mode, criterion=Plain("mean"), rows_per_sample=3, wrap_model=wrap_model
    )
    with pytest.raises(
        PerSampleGradientError, match=r"0 \(Linear\) saw 4 rows.*multiple of rows_per_sample=3"
    ):
        criterion(model(torch.randn(4, 2))).backward()


def test_an_index_of_another_length_is_refused_at_the_layer():
    model = GradSampleModule(nn.Sequential(nn.Linear(2, 1)))
    model.set_sample_index(torch.tensor([0, 1]), 2)
    with pytest.raises(
        PerSampleGradientError, match=r"0 \(Linear\).*owners that were set are those of 2 rows"
    ):
        model(torch.randn(3, 2)).sum().backward()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows_per_sample": 0}, "at least 1, not 0"),
        ({"rows_per_sample": 1.5}, "not 1.5"),
        ({"rows_per_sample": True}, "not True"),
        ({"rows_per_sample": 2, "row_order": "alternating"}, "'alternating'"),
        ({"row_order": "blocked"}, "pass rows_per_sample too"),
        ({"rows_per_sample": 2, "grad_sample_mode": "no_op"}, "rows_per_sample"),
    ],
    ids=str,
)
def test_bad_options_are_named_and_nothing_is_changed(options, said):
    model = nn.Linear(2, 1)
    options = dict(options)
    with pytest.raises((ConfigurationError, TypeError), match=said):
        private(model, options.pop("grad_sample_mode", "hooks"), **options)
    assert not model._forward_hooks
    assert not hasattr(model.weight, "grad_sample")


@pytest.mark.parametrize(
    ("index", "n", "said"),
    [
        (torch.tensor([0.0, 1.0]), 2, "integer tensor"),
        (torch.tensor([[0, 1]]), 2, "integer tensor"),
        ([0, 1], 2, "not list"),
        (torch.tensor([0, 2]), 2, "outside 0 to 1"),
        (torch.tensor([-1, 0]), 2, "outside 0 to 1"),
        (torch.tensor([0, 0]), -1, "n_samples"),
        (torch.tensor([0, 0]), None, "n_samples"),
    ],
    ids=str,
)
def test_bad_indices_are_named(index, n, said):
    with pytest.raises(ConfigurationError, match=said):
        GradSampleHooks(nn.Linear(2, 1)).set_sample_index(index, n)


def test_uniform_rows_keep_the_ghost_route():
    """No `[rows, P, D]` is formed for a wide layer: the k rows of a sample are further positions of it."""
    kept = {}

    class Look:
        def begin(self) -> None: ...
        def end(self) -> None: ...
        def discard(self) -> None: ...
        def receive(self, path: str, slots: Any, captured: Any) -> None:
            rule = builtin_rule(captured.layer, captured.names)
            kept.update(rule.keep(captured, Route()))

    model = nn.Linear(64, 64)
    for rule, kind in ((RowsPerSample(2), KeptProduct), (Owners(2, torch.tensor([0, 0, 1, 1])), KeptRows)):
        capture = Capture(model, Look(), detach_weights=True)
        capture.owners = rule
        capture.attach()
        model(torch.randn(4, 3, 64)).square().sum().backward()
        capture.detach()
        assert isinstance(kept["weight"], kind)
        assert kept["weight"].sq_norm().shape == (2,)


def test_rows_of_one_sample_may_see_each_other_but_not_those_of_others():
    class Mixes(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            self.lin, self.order = nn.Linear(3, 3), order

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x)
            pair = y.view(2, -1, 3).mean(0) if self.order == "blocked" else y.view(-1, 2, 3).mean(1)
            return pair.repeat(2, 1) if self.order == "blocked" else pair.repeat_interleave(2, 0)

    for order in ORDERS:
        for mixes in ORDERS:
            model = GradSampleModule(Mixes(mixes))
            model.set_owners(RowsPerSample(2, order))
            if order == mixes:
                model(torch.randn(6, 3)).sum().backward()
                continue
            with pytest.raises(PerSampleGradientError, match="not isolated"):
                model(torch.randn(6, 3))


class Pairs(torch.utils.data.Dataset):
    """An item is one sample: a chosen and a rejected sequence."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        return torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(i))


def chosen_then_rejected(pairs: list[Tensor]) -> Tensor:
    return torch.stack(pairs, 1).flatten(0, 1)


def descend(model: nn.Module, pairs: list[Tensor]) -> None:
    """One step of descent on the clipped sum over pairs, 2 being expected; lr 0.3, C 0.4."""
    if not pairs:
        return
    index = index_of("interleaved", len(pairs), 2)
    grads = looped(model, torch.cat(pairs), index, len(pairs), lambda s: of_each(s.view(1, 2)).sum())
    with torch.no_grad():
        for p, total in zip(model.parameters(), clipped(grads, "flat", 0.4), strict=True):
            p -= 0.3 * total / 2


@pytest.mark.parametrize("physical", [None, 2])
@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_a_loader_that_draws_samples_trains_on_their_rows(mode, physical):
    """Poisson batches, empty ones too, and logical batches cut into physical ones: always whole samples, counted as such."""
    torch.manual_seed(9)
    model = Scorer().double()
    reference = copy.deepcopy(model)
    engine = PrivacyEngine(accountant="rdp")
    module, optimizer, *rest = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        criterion=Preference("blocked", "mean", 2),
        data_loader=DataLoader(Pairs(), batch_size=2, collate_fn=chosen_then_rejected),
        noise_multiplier=0.0,
        max_grad_norm=0.4,
        grad_sample_mode=mode,
        rows_per_sample=2,
    )
    criterion = rest[0] if mode == "ghost" else Preference("blocked", "mean", 2)
    assert optimizer.expected_batch_size == 2
    managed = (
        contextlib.nullcontext(rest[-1])
        if physical is None
        else BatchMemoryManager(data_loader=rest[-1], max_physical_batch_size=physical, optimizer=optimizer)
    )
    sizes, logical = [], []
    with managed as loader:
        for _ in range(3):
            for rows in loader:
                assert physical is None or len(rows) <= 2 * physical
                logical += list(rows.view(2, len(rows) // 2, T).transpose(0, 1))
                criterion(module(rows)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if not optimizer._is_last_step_skipped:
                    sizes.append(len(logical))
                    descend(reference, logical)
                    logical = []
    assert len(engine.accountant) == len(sizes) == 18
    assert min(sizes) == 0
    assert max(sizes) > 2
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)
