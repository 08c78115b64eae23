"""Mode "ghost" as its interface has it: the wrapped criterion, its passes, the norms left behind; adaptive clipping on every path."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.grad_sample.book import Book
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizerFastGradientClipping
from opacus.optimizers.adaclipoptimizer import gradient_noise_multiplier
from opacus.tests import grad_sample_models_test as models
from opacus.tests.clipped_sums import Private, clipped_by_loop, norms_of
from opacus.tests.per_sample import assert_close, per_sample_loss
from opacus.utils.adaptive_clipping import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

IDS = torch.tensor([[3, 0, 3, 5], [0, 0, 0, 0], [1, 2, 5, 5]])


def language() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)).double()


def ghost(model, clip=0.05, reduction="mean", use_ghost=True):
    module = GradSampleModuleFastGradientClipping(
        model, loss_reduction=reduction, max_grad_norm=clip, use_ghost_clipping=use_ghost
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=clip,
        expected_batch_size=1,
        loss_reduction=reduction,
    )
    return module, optimizer


def of_tokens(output, targets):
    """The loss of each sequence: the mean over its tokens."""
    losses = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)


def sums(model, optimizer):
    optimizer.accumulate()
    found = {name: p.summed_grad for name, p in model.named_parameters()}
    optimizer.zero_grad(set_to_none=True)
    return found


def by_loop(model, x, loss, clip, whole):
    """`loss(output, sample)` one sample after the other; `whole` is the factor of each sample's own loss."""
    rows = {name: [] for name, _ in model.named_parameters()}
    for i in range(len(x)):
        grads = torch.autograd.grad(whole * loss(model(x[i : i + 1]), i), list(model.parameters()))
        for name, grad in zip(rows, grads, strict=True):
            rows[name].append(grad)
    rows = {name: torch.stack(found) for name, found in rows.items()}
    return clipped_by_loop(rows, clip), norms_of(rows)


@pytest.mark.parametrize("use_ghost", [True, False], ids=["ghost", "fast"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_as_rows_with_their_shape(reduction, use_ghost):
    model = language()
    targets = IDS.flip(1)
    whole = 1 if reduction == "mean" else targets.shape[1]
    want, norm_B = by_loop(
        copy.deepcopy(model), IDS, lambda out, i: of_tokens(out, targets[i : i + 1]).sum(), 0.05, whole
    )
    assert (norm_B > 0.05).all()
    module, optimizer = ghost(model, reduction=reduction, use_ghost=use_ghost)
    criterion = DPLossFastGradientClipping(
        module, optimizer, nn.CrossEntropyLoss(reduction=reduction), reduction
    )
    for shape in (targets.shape, None) if reduction == "mean" else (targets.shape,):
        loss = criterion(module(IDS).flatten(0, 1), targets.flatten(), shape=shape)
        loss.backward()
        assert_close(sums(model, optimizer), want, 1e-10)
        assert torch.allclose(module.per_sample_gradient_norms, norm_B)
        assert torch.allclose(module.get_norm_sample(), norm_B)
        assert torch.allclose(module.get_clipping_coef(), 0.05 / norm_B)
        joint = torch.stack([p._norm_sample for p in model.parameters()]).norm(dim=0)
        assert torch.allclose(joint, norm_B)


CRITERIA = {
    "MSELoss": (lambda reduction: nn.MSELoss(reduction=reduction), torch.randn(3, 4, 6).double()),
    "HuberLoss": (lambda reduction: nn.HuberLoss(reduction=reduction), torch.randn(3, 4, 6).double()),
    "a function": (lambda reduction: F.smooth_l1_loss, torch.randn(3, 4, 6).double()),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CRITERIA)
def test_losses_of_several_dimensions(name, reduction):
    make, targets = CRITERIA[name]
    model = language()
    alone = make(reduction)

    def loss(out, i):
        target = targets[i : i + 1]
        return alone(out, target, reduction=reduction) if name == "a function" else alone(out, target)

    want, _ = by_loop(copy.deepcopy(model), IDS, loss, 0.05, 1)
    module, optimizer = ghost(model, reduction=reduction)
    criterion = DPLossFastGradientClipping(module, optimizer, make(reduction), reduction)
    loss_of_batch = criterion(module(IDS), targets)
    plain = make(reduction)
    whole = (
        plain(model(IDS), targets, reduction=reduction)
        if name == "a function"
        else plain(model(IDS), targets)
    )
    assert loss_of_batch.item() == pytest.approx(whole.item())
    assert not loss_of_batch.detach().requires_grad
    loss_of_batch.backward()
    assert_close(sums(model, optimizer), want, 1e-10)
    if name != "a function":
        assert criterion.criterion.reduction == reduction


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"criterion": nn.CrossEntropyLoss(reduction="none")}, "reduction='none'"),
        ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "make them equal"),
        ({"loss_reduction": "median"}, "median"),
        ({"module": GradSampleModule(nn.Linear(2, 2))}, "GradSampleModule"),
    ],
)
def test_criteria_and_models_that_cannot_be_wrapped_are_named(arguments, named):
    module, optimizer = ghost(language())
    given = {
        "module": module,
        "optimizer": optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "loss_reduction": "mean",
    }
    with pytest.raises(ConfigurationError, match=named):
        DPLossFastGradientClipping(**{**given, **arguments})


def test_a_criterion_without_a_loss_per_sample_is_refused():
    module, optimizer = ghost(language())
    criterion = DPLossFastGradientClipping(module, optimizer, lambda output, reduction: output.mean(), "mean")
    with pytest.raises(ConfigurationError, match="per sample"):
        criterion(module(IDS))


@pytest.mark.parametrize("also_wrapped", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later"])
def test_a_loss_that_was_not_wrapped_makes_step_raise_and_changes_nothing(first, also_wrapped):
    """1.6.0 trains unclipped and reports an epsilon."""
    model = language()
    module, optimizer = ghost(model)
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())
    optimizer.attach_book(module.policy)
    targets = IDS.flatten()
    if not first:
        criterion(module(IDS).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    if also_wrapped:
        criterion(module(IDS).flatten(0, 1), targets).backward()
    F.cross_entropy(module(IDS).flatten(0, 1), targets).backward()
    with pytest.raises(PerSampleGradientError, match="not wrapped"):
        optimizer.step()
    assert_close(dict(model.state_dict()), before, 0.0)


def test_after_an_ordinary_backward_the_norms_are_there_all_the_same():
    model = language()
    module, _ = ghost(model)
    assert not hasattr(module, "per_sample_gradient_norms")
    _, norm_B = by_loop(
        copy.deepcopy(model), IDS, lambda out, i: of_tokens(out, IDS[i : i + 1]).sum(), 1.0, 1
    )
    of_tokens(module(IDS), IDS).mean().backward()
    assert torch.allclose(module.get_norm_sample(), norm_B)
    assert all(not uses.kept for uses in module.book._uses.values())


def test_between_the_passes_only_norms_are_kept():
    """What is found in the first pass is `[B]` for each parameter; uses of tied parameters are kept until it ends, no longer."""
    torch.manual_seed(0)
    model = models.TiedHead().double()
    private = Private(model, "ghost")
    seen = {}
    book = private.module.book
    end, factors = book.end, private.optimizer.book_factors

    def at_end():
        if book.stage.startswith("norms"):
            names = {id(p): name for name, p in model.named_parameters()}
            seen[book.stage] = {names[key] for key, uses in book._uses.items() if uses.kept}
        end()

    def between():
        found = factors()
        seen["between"] = {key for key, uses in book._uses.items() if uses.kept}
        return found

    book.end, private.optimizer.book_factors = at_end, between
    private.batch(IDS)
    assert seen.pop("norms again") == {"tokens.weight"}  # the first batch finds out which parameter it is
    seen.clear()
    private.batch(IDS)
    assert seen == {"norms": {"tokens.weight"}, "between": set()}


def test_the_two_passes_see_the_same_dropout():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    private = Private(model, "ghost", clip=0.1)
    private.batch(x)
    torch.manual_seed(4)
    found = private.batch(x)
    torch.manual_seed(4)
    mask = nn.functional.dropout(torch.ones(3, 6, dtype=torch.float64), 0.5)

    def forward(reference, i):
        return reference[2](reference[0](x[i : i + 1]) * mask[i : i + 1])

    rows = {name: [] for name, _ in plain.named_parameters()}
    for i in range(3):
        grads = torch.autograd.grad(per_sample_loss(forward(plain, i)).sum(), list(plain.parameters()))
        for name, grad in zip(rows, grads, strict=True):
            rows[name].append(grad)
    want = clipped_by_loop({name: torch.stack(grads) for name, grads in rows.items()}, 0.1)
    assert_close(found, want, 1e-10)


def test_a_backward_through_a_wrapped_loss_twice_is_refused():
    model = language()
    module, optimizer = ghost(model)
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())
    loss = criterion(module(IDS).flatten(0, 1), IDS.flatten())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert module.book.stage == "unwrapped"


# -------------------------------------------------------------------------------------- adaptive clipping


def data_of(n=40):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(n, 4, dtype=torch.float64) * 50, torch.randint(3, (n,)))


def adaptive(mode, style=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    engine = PrivacyEngineAdaptiveClipping(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data_of(), batch_size=10),
        noise_multiplier=options.pop("sigma", 1.0),
        max_grad_norm=0.5,
        grad_sample_mode=mode,
        poisson_sampling=False,
        min_clipbound=1e-3,
        **({} if style is None else {"clipping": style}),
        **options,
    )
    return engine, model, made[0], made[1], made[2] if mode == "ghost" else nn.CrossEntropyLoss(), made[-1]


@pytest.mark.parametrize("mode", ["ghost", "bk", "hooks"])
@pytest.mark.parametrize("style", [None, "flat", "adaptive"])
def test_nothing_is_unclipped_under_adaptive_clipping(style, mode):
    """1.6.0: norm 15643 for a bound of 64. Each step's sum, noise aside, is the loop's with that step's C."""
    _, model, module, optimizer, criterion, loader = adaptive(mode, style, sigma=0.0)
    assert isinstance(optimizer, AdaClipDPOptimizer)
    bounds = []
    for x, y in loader:
        bound = optimizer.max_grad_norm
        want, norm_B = by_loop(
            copy.deepcopy(model), x, lambda out, i, y=y: F.cross_entropy(out, y[i : i + 1]), bound, 1
        )
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad(set_to_none=True)
        criterion(module(x), y).backward()
        optimizer.step()
        found = {name: (before[name] - value) * 10 for name, value in model.state_dict().items()}
        assert_close(found, want, 1e-9)
        fraction = (norm_B <= bound).double().mean().item()
        assert optimizer.max_grad_norm == pytest.approx(bound * math.exp(-0.2 * (fraction - 0.5)), rel=1e-5)
        bounds.append(bound)
    assert len(set(bounds)) == 4


@pytest.mark.parametrize("mode", ["ghost", "bk", "hooks"])
def test_what_is_accounted_is_the_total_and_the_gradients_get_what_is_left(mode):
    engine, _, module, optimizer, criterion, loader = adaptive(mode, unclipped_num_std=2.0)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(1.0, 0.25, 4)]
    left = gradient_noise_multiplier(1.0, 2.0)
    std = optimizer.noise_std()
    std = std if isinstance(std, float) else std.on(torch.device("cpu")).item()
    assert std == pytest.approx(left * optimizer.max_grad_norm)
    assert left**-2 + (2 * 2.0) ** -2 == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["loss", "tensor"])
def test_the_adaptive_wrappers_clip_and_set_the_adaptation(kind):
    model = language()
    module = GradSampleModuleFastGradientClipping(model)
    optimizer = AdaClipDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.05,
        expected_batch_size=1,
        target_unclipped_quantile=0.9,
        clipbound_learning_rate=0.5,
        max_clipbound=10.0,
        min_clipbound=0.1,
        unclipped_num_std=1.0,
    )
    options = {
        "target_unclipped_quantile": 0.25,
        "min_clipbound": 0.01,
        "max_clipbound": 7.0,
        "clipbound_learning_rate": 0.3,
        "initial_noise_multiplier": 0.0,
    }
    want, _ = by_loop(copy.deepcopy(model), IDS, lambda out, i: of_tokens(out, IDS[i : i + 1]).sum(), 0.05, 1)
    if kind == "loss":
        criterion = DPLossFastGradientAdaptiveClipping(
            module, optimizer, nn.CrossEntropyLoss(), "mean", **options
        )
        criterion(module(IDS).flatten(0, 1), IDS.flatten(), shape=IDS.shape).backward()
    else:
        DPTensorFastGradientAdaptiveClipping(
            module, optimizer, of_tokens(module(IDS), IDS), "mean", **options
        ).backward()
    optimizer.clip_and_accumulate()
    assert_close({name: p.summed_grad for name, p in model.named_parameters()}, want, 1e-10)
    assert optimizer.target_unclipped_quantile == 0.25
    assert (optimizer.min_clipbound, optimizer.max_clipbound) == (0.01, 7.0)
    with pytest.raises(ConfigurationError, match="AdaClipDPOptimizer"):
        DPLossFastGradientAdaptiveClipping(module, ghost(language())[1], nn.CrossEntropyLoss(), "mean")


def test_a_count_that_no_step_took_is_dropped_with_its_sums():
    """Otherwise a batch run twice within a logical batch would count twice."""
    model = language()
    private = Private(model, "bk", style="adaptive", clip=1.0)
    optimizer = private.optimizer
    optimizer.signal_skip_step(True)
    private.backward(IDS)
    optimizer.step()
    counted = optimizer._centred_count.item()
    optimizer.zero_grad()
    private.backward(IDS)
    optimizer.zero_grad()  # thought better of
    private.backward(IDS)
    optimizer.clip_and_accumulate()
    assert optimizer._centred_count.item() == pytest.approx(2 * counted)
    assert abs(counted) == pytest.approx(1.5)


def test_an_engines_ghost_mode_has_a_book():
    model = language()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(IDS), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
        use_ghost_clipping=False,
    )
    assert isinstance(made[0].policy, Book)
    assert made[0].use_ghost_clipping is False
    assert made[0].max_grad_norm == 1.0
