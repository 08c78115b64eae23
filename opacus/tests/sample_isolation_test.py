"""The isolation check finds losses and modules by which one sample changes another's gradient, and passes those without."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import ConfigurationError, PerSampleGradientError
from opacus.grad_sample import GradSampleHooks, GradSampleModule, RowsPerSample, wrap_model
from opacus.layers import DPLSTM
from opacus.testing import check_sample_isolation, spread
from opacus.testing.deterministic import deterministic_kernels
from opacus.testing.undisturbed import Undisturbed
from opacus.testing.witness import _as_reached

N, T, V, D = 6, 5, 11, 8
IGNORED = -100


class Language(nn.Module):
    """GPT-2-shaped: position ids of shape [1, T], attention, layer norms, dropout, tied head."""

    def __init__(self, dropout: float = 0.1, checkpointed: str = "no") -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(T, D)
        self.norm = nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.tokens.weight
        self.checkpointed = checkpointed

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(mixed))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(T, device=ids.device).unsqueeze(0))
        if self.checkpointed == "no":
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.checkpointed == "reentrant")
        return self.head(x)


def tokens(seed: int = 0) -> dict[str, Tensor]:
    """Sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, V, (N, T), generator=generator)
    labels = ids.clone()
    for i in range(N):
        labels[i, 1 + i % T :] = IGNORED
    return {"ids": ids, "labels": labels}


def token_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(
        logits.transpose(1, 2).double(),
        batch["labels"].to(logits.device),
        reduction="none",
        ignore_index=IGNORED,
    )


def own_mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Each sample's mean over its own tokens, then the mean over samples."""
    losses = token_losses(model, batch)
    counts = (batch["labels"].to(losses.device) != IGNORED).sum(1)
    return (losses.sum(1) / counts).mean()


def batch_mean(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all tokens of the batch."""
    return token_losses(model, batch).sum() / (batch["labels"] != IGNORED).sum()


def kto(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Each sample against the batch's mean, which no gradient goes through."""
    rewards = -token_losses(model, batch).sum(1)
    return (1 - torch.sigmoid(rewards - rewards.mean().detach())).mean()


def vectors(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def classify(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output, batch[1].to(output.device))


def contrastive(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    z = F.normalize(model(batch[0]), dim=-1)
    scores = z @ F.normalize(model(batch[0].flip(1)), dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


class Experts(nn.Module):
    """A router whose load is balanced over the batch by an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = nn.Linear(D, 2), nn.Linear(D, 2 * D), nn.Linear(D, 3)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        self.balance = share.mean(0).square().sum()
        return self.head((self.experts(x).unflatten(-1, (2, D)) * share.unsqueeze(-1)).sum(1))


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, D), *middle, nn.Tanh(), nn.Linear(D, 3))


def refused(model: Any, loss: Any, batch: Any, **options: Any) -> str:
    with pytest.raises(PerSampleGradientError, match="samples are not isolated") as caught:
        check_sample_isolation(model, loss, batch, **options)
    return str(caught.value)


@pytest.mark.parametrize("checkpointed", ["no", "plain", "reentrant"])
def test_a_language_model_with_means_of_each_sample_s_own_tokens_passes(checkpointed):
    torch.manual_seed(0)
    check_sample_isolation(Language(checkpointed=checkpointed), own_mean, tokens())
    check_sample_isolation(
        Language(checkpointed=checkpointed),
        lambda m, b: token_losses(m, b).sum(),
        tokens(),
        loss_reduction="sum",
    )


@pytest.mark.parametrize("checkpointed", ["no", "plain", "reentrant"])
def test_a_mean_over_the_tokens_of_the_batch_is_found(checkpointed):
    torch.manual_seed(0)
    said = refused(Language(checkpointed=checkpointed), batch_mean, tokens())
    assert "the loss" in said
    assert "one factor, as with a mean over the tokens" in said


def test_with_equal_lengths_a_token_mean_is_the_mean_over_samples():
    batch = tokens()
    check_sample_isolation(Language(), batch_mean, {"ids": batch["ids"], "labels": batch["ids"]})


def test_a_baseline_over_the_batch_is_found_though_no_gradient_goes_through_it():
    said = refused(Language(), kto, tokens())
    assert "the loss" in said
    assert "baseline" in said


def test_in_batch_negatives_are_found():
    assert "the loss" in refused(mlp(), contrastive, vectors())


def test_two_views_of_one_sample_are_its_own_rows():
    def views(model: Any, batch: Tensor) -> Tensor:
        z = model(torch.cat([batch, batch.flip(1)]))
        return -F.cosine_similarity(*z.chunk(2)).mean()

    x = vectors()[0]
    check_sample_isolation(mlp(), views, x, rows_per_sample=2)
    refused(mlp(), views, x, rows_per_sample=2, row_order="interleaved")


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_found_by_name_and_passes_with_fixed_statistics(affine):
    model = mlp(nn.BatchNorm1d(D, affine=affine))
    said = refused(model, classify, vectors())
    assert "1 (BatchNorm1d)" in said
    assert "the loss" not in said
    model[1].eval()
    check_sample_isolation(model, classify, vectors())


class Standardises(nn.Module):
    """As BatchNorm does, in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3) if self.training else x


def test_a_model_in_eval_is_looked_at_in_training_mode_too_and_goes_back():
    for model in (mlp(Standardises()), mlp(nn.Dropout(), Standardises().eval())):
        model.eval()
        assert "(Standardises)" in refused(model, classify, vectors())
        with pytest.raises(PerSampleGradientError, match="Standardises"):
            private(model, TensorDataset(*vectors()), check_isolation=True)
        assert not any(module.training for module in model.modules())


def test_what_a_model_mixes_in_eval_only_is_still_found():
    class Ranks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x - x.mean(0)

    assert "Ranks" in refused(mlp(Ranks()).eval(), classify, vectors())


def test_a_part_that_stays_in_eval_while_the_model_trains_is_taken_as_it_is():
    model = mlp(Standardises().eval())
    check_sample_isolation(model, classify, vectors())
    assert model.training
    assert not model[1].training


def test_in_eval_honest_models_pass_with_dropout_and_frozen_statistics():
    model = mlp(nn.BatchNorm1d(D).requires_grad_(False), nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    check_sample_isolation(model, classify, vectors())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())

    class Keeps(nn.Module):
        """Its `train` leaves a part in `eval()`."""

        def __init__(self) -> None:
            super().__init__()
            self.fixed = Standardises().eval()

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.fixed.training = False
            return self

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.fixed(x), 0.5, self.training)

    check_sample_isolation(mlp(Keeps()).eval(), classify, vectors())


def test_code_of_a_model_that_mixes_is_found_in_the_module_it_stands_in():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x - x.mean(0))

    said = refused(mlp(Centred()), classify, vectors())
    assert "1 (Centred)" in said
    assert "1.lin" not in said


def test_an_auxiliary_loss_over_the_batch_is_found_at_the_layer_it_starts_from():
    def loss(model: Any, batch: Any) -> Tensor:
        return classify(model, batch) + 0.1 * model.balance

    said = refused(Experts(), loss, vectors())
    assert "auxiliary" in said
    assert "router (Linear)" in said
    check_sample_isolation(Experts(), classify, vectors())


def test_a_loss_reduced_otherwise_than_said_is_found():
    total = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum")  # noqa: E731
    assert "loss_reduction='mean'" in refused(mlp(), total, vectors())
    check_sample_isolation(mlp(), total, vectors(), loss_reduction="sum")
    assert "loss_reduction='sum'" in refused(mlp(), classify, vectors(), loss_reduction="sum")


def test_a_zero_initialised_adapter_hides_nothing(monkeypatch):
    class Adapted(nn.Module):
        """A frozen layer with a low-rank update, which starts at zero."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(D, 3).requires_grad_(False)
            self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, 3, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            self.update = self.up(self.down(x))
            return self.base(x) + self.update

    def loss(model: Any, batch: Any) -> Tensor:
        """Updates are drawn to the batch's own mean: no gradient while all of them are zero."""
        ordinary = classify(model, batch)
        return ordinary + (model.update - model.update.mean(0).detach()).square().mean()

    assert "up (Linear)" in refused(Adapted(), loss, vectors())
    monkeypatch.setattr(Undisturbed, "shake", lambda self, by: None)
    check_sample_isolation(Adapted(), loss, vectors())  # what would be missed


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bk", "ghost"])
@pytest.mark.parametrize("wrap", [True, False])
def test_private_models_are_checked_and_stay_private(mode, wrap):
    torch.manual_seed(0)
    model = Language(dropout=0.0)
    private = wrap_model(model, mode, wrap)
    check_sample_isolation(private, own_mean, tokens())
    refused(private, batch_mean, tokens())
    if mode in ("hooks", "functorch"):
        own_mean(private if wrap else model, tokens()).backward()
        assert model.qkv.weight.grad_sample.shape == (N, 3 * D, D)
    assert private.capture.attached


def test_rows_per_sample_of_a_private_model_are_taken_over():
    model = GradSampleModule(mlp())
    model.set_owners(RowsPerSample(2))
    pairs = lambda m, x: F.logsigmoid(m(x).sum(1).view(2, -1).diff(dim=0)).mean()  # noqa: E731
    check_sample_isolation(model, pairs, vectors()[0])
    model.set_sample_index(torch.zeros(N, dtype=torch.long), 1)
    with pytest.raises(ConfigurationError, match="by an index"):
        check_sample_isolation(model, pairs, vectors()[0])


@pytest.mark.parametrize("found", [True, False])
def test_everything_is_restored_bit_for_bit(found):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.3), nn.Linear(D, 3))
    model[1].train(found)  # then it writes its statistics in every forward
    model[3].weight.grad = torch.full_like(model[3].weight, 2.0)
    model[0].bias.requires_grad_(False)
    handle = model[0].register_forward_hook(lambda m, a, out: None)
    x, y = vectors()
    batch = (x, y)
    before = copy.deepcopy(model.state_dict())
    kept = (x.clone(), y.clone())
    modes = [m.training for m in model.modules()]
    parameters = [id(p) for p in model.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def loss(model: Any, batch: Any) -> Tensor:
        torch.rand(2), np.random.rand(2), random.random()
        return classify(model, batch)

    if found:
        refused(model, loss, batch)
    else:
        check_sample_isolation(model, loss, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert parameters == [id(p) for p in model.parameters()]
    assert torch.equal(model[3].weight.grad, torch.full_like(model[3].weight, 2.0))
    assert model[0].weight.grad is None
    assert not model[0].bias.requires_grad
    assert model[0].weight.requires_grad
    assert modes == [m.training for m in model.modules()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    handle.remove()
    GradSampleHooks(mlp())  # nothing of the check stays registered


def test_state_is_restored_where_the_loss_raises():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError):
        check_sample_isolation(model, lambda m, b: m(b[0]).sum() / (1 // 0), vectors())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    check_sample_isolation(model, classify, vectors())


def test_no_value_of_the_data_is_in_the_message():
    x, y = vectors()
    x = x + 31337.0
    ids = tokens()
    ids["ids"][:, 0] = 7
    for said in (
        refused(mlp(nn.BatchNorm1d(D)), classify, (x, y)),
        refused(Language(), batch_mean, ids),
    ):
        assert "31337" not in said
        assert not any(
            digit in said.replace("BatchNorm1d", "").replace("1 problem", "") for digit in "3456789"
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_dtype(dtype):
    torch.manual_seed(0)
    check_sample_isolation(Language().to(dtype), own_mean, tokens())
    refused(Language().to(dtype), batch_mean, tokens())


def test_models_over_several_devices(layout):
    torch.manual_seed(0)
    x, y = vectors()
    batch = x.to(layout[0]), y
    deep = nn.LayerNorm(D), nn.Linear(D, D)
    check_sample_isolation(spread(mlp(*copy.deepcopy(deep)), layout), classify, batch)
    assert "BatchNorm1d" in refused(spread(mlp(*deep, nn.BatchNorm1d(D)), layout), classify, batch)


@pytest.mark.parametrize(
    ("loss", "batch", "options", "said"),
    [
        (classify, (vectors()[0][:1], vectors()[1][:1]), {}, "1 samples"),
        (classify, (torch.ones(4, D), torch.zeros(4, dtype=torch.long)), {}, "alike"),
        (lambda m, b: m(b[0]).sum() * 0, vectors(), {}, "no gradient"),
        (lambda m, b: m(b[0]), vectors(), {}, "one number"),
        (lambda m, b: 1.0, vectors(), {}, "one number"),
        (
            lambda m, b: classify(m, b) * torch.empty(()).uniform_(1, 2, generator=STREAM),
            vectors(),
            {},
            "two runs",
        ),
        (classify, vectors(), {"rows_per_sample": 0, "samples": 0, "loss_reduction": "none"}, "3 problems"),
    ],
    ids=["one sample", "alike", "no gradient", "not reduced", "no tensor", "random", "arguments"],
)
def test_what_cannot_be_checked_is_said(loss, batch, options, said):
    with pytest.raises(ConfigurationError, match=said):
        check_sample_isolation(mlp(), loss, batch, **options)


STREAM = torch.Generator()


def private(model: nn.Module, data: Any, **options: Any) -> Any:
    return PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


class Records(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: value[i] for name, value in tokens().items()}


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_make_private_checks_on_request_before_anything_is_changed(mode):
    torch.manual_seed(0)
    model = Language()
    state = torch.get_rng_state()
    with pytest.raises(PerSampleGradientError, match="the loss"):
        private(model, Records(), grad_sample_mode=mode, check_isolation=True, isolation_loss=batch_mean)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    private(model, Records(), grad_sample_mode=mode, check_isolation=True, isolation_loss=own_mean)


def test_make_private_checks_the_criterion_on_pairs():
    class Ranked(nn.Module):
        def forward(self, scores: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(scores - scores.logsumexp(0), y)

    data = TensorDataset(*vectors())
    private(mlp(), data, check_isolation=True)
    with pytest.raises(PerSampleGradientError, match="the loss"):
        private(mlp(), data, check_isolation=True, criterion=Ranked())
    private(mlp(), data, criterion=Ranked())  # only on request


def test_make_private_takes_the_loss_that_a_model_computes_from_its_labels():
    class Labelled(Language):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            lookup = super().forward
            loss = self.reduce(lambda given: lookup(given), {"ids": ids, "labels": labels})
            return type("Output", (), {"loss": loss})()

    good, bad = Labelled(), Labelled()
    good.reduce, bad.reduce = own_mean, batch_mean
    private(good, Records(), check_isolation=True)
    with pytest.raises(PerSampleGradientError, match="tokens of the whole batch"):
        private(bad, Records(), check_isolation=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"check_isolation": 1}, "True or False"),
        ({"check_isolation": True, "isolation_loss": 3}, "function"),
        ({"isolation_loss": classify}, "check_isolation=True only"),
    ],
    ids=["no bool", "no function", "a loss without the check"],
)
def test_bad_requests_are_named(options, said):
    with pytest.raises(ConfigurationError, match=said):
        private(mlp(), TensorDataset(*vectors()), **options)


def test_a_batch_of_unknown_form_needs_a_loss():
    with pytest.raises(ConfigurationError, match="isolation_loss"):
        private(mlp(), TensorDataset(vectors()[0]), check_isolation=True)


class RoundsBySize(nn.Module):
    """As kernels that are chosen by the size of a batch do: the last place of each number depends on it."""

    def forward(self, x: Tensor) -> Tensor:
        pattern = torch.arange(x.shape[-1], device=x.device).add(len(x)).mul(2.3).sin()
        return x * (1 + torch.finfo(x.dtype).eps * pattern).to(x.dtype)


def deep(dtype: torch.dtype) -> nn.Sequential:
    """Small differences grow from layer to layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(24):
        layer = nn.Linear(32, 32)
        nn.init.normal_(layer.weight, std=2 / 32**0.5)
        layers += [layer, nn.Tanh(), RoundsBySize()]
    return nn.Sequential(nn.Linear(D, 32), *layers, nn.Linear(32, 3)).to(dtype)


@pytest.mark.parametrize("count", [2, 3, 4, N])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_that_grows_over_many_layers_is_no_dependence(dtype, count):
    x, y = (tensor[:count] for tensor in vectors())
    model, batch = deep(dtype), (x.to(dtype), y)
    check_sample_isolation(model, classify, batch)
    with torch.no_grad():  # and it is much
        whole, few = model(torch.cat([batch[0], batch[0]]))[:2].float(), model(batch[0][:2]).float()
    assert float((whole - few).norm() / whole.norm()) > 10 * torch.finfo(dtype).eps


def vanishing() -> nn.Sequential:
    """Each layer's gradient is a fraction of the next one's: the first layers' squares are below float32."""
    torch.manual_seed(0)
    layers = [layer for _ in range(56) for layer in (nn.Linear(D, D), nn.ReLU())]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=0.35 / D**0.5)
    return nn.Sequential(*layers, nn.Linear(D, 3))


def test_gradients_whose_squares_float32_does_not_have_are_compared():
    x, y = vectors()
    model = vanishing()
    whole = torch.autograd.grad(classify(model, (x, y)), model[0].bias)[0]
    assert 0 < float(whole.abs().max()) < 1e-23
    check_sample_isolation(model, classify, (x, y))
    mixes = lambda m, b: classify(m, b) + 1e-20 * m[0](b[0]).mean(0).square().sum()  # noqa: E731
    assert " 0 (Linear)" in refused(model, mixes, (x, y))


class TwoHeads(nn.Module):
    """One head sees its input, the other what is left of it beside a number far larger."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.blurred, self.large = nn.Linear(D, 3), nn.Linear(D, 3), nn.Identity()
        self.by_size = RoundsBySize()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        beside = self.by_size(self.large(x.detach() + 512.0))
        return self.head(x), self.blurred(beside - 512.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_rounding_decides_one_layer_the_others_are_still_compared(dtype):
    x, y = vectors()
    model, batch = TwoHeads().to(dtype), (x.to(dtype), y)
    both = lambda m, b: sum(F.cross_entropy(part, b[1]) for part in m(b[0]))  # noqa: E731
    check_sample_isolation(model, both, batch)
    said = refused(model, both, batch, loss_reduction="sum")
    assert "with loss_reduction='sum' the loss must be the sum" in said
    with torch.no_grad():  # and it does decide
        whole, few = model(torch.cat([batch[0], batch[0]]))[1][:2].float(), model(batch[0][:2])[1].float()
    assert float((whole - few).norm() / whole.norm()) > (0.5 if dtype == torch.bfloat16 else 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_too_a_wrong_reduction_is_found(dtype):
    x, y = vectors()
    model = mlp().to(dtype)
    said = refused(model, classify, (x.to(dtype), y), loss_reduction="sum")
    assert "with loss_reduction='sum' the loss must be the sum" in said
    check_sample_isolation(model, classify, (x.to(dtype), y), loss_reduction="mean")


def test_a_loss_that_leaves_the_last_sample_of_a_batch_out_is_found_in_16_bits():
    x, y = vectors()
    losses = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")  # noqa: E731
    refused(
        mlp().bfloat16(),
        lambda m, b: losses(m, b)[:-1].sum(),
        (x.bfloat16(), y),
        loss_reduction="sum",
    )


def test_deterministic_kernels_leave_the_process_as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for mode in ("default", "warn"):
        torch.set_deterministic_debug_mode(mode)
        try:
            before = torch.get_deterministic_debug_mode()
            with pytest.raises(KeyError), deterministic_kernels():
                assert torch.are_deterministic_algorithms_enabled()
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
                assert "CUBLAS_WORKSPACE_CONFIG" in os.environ
                raise KeyError
            assert torch.get_deterministic_debug_mode() == before
            assert torch.utils.deterministic.fill_uninitialized_memory
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        finally:
            torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("said", [None, ":16:8", ":4096:8", ":4096:2:16:8", ""])
def test_a_workspace_that_was_chosen_for_cublas_does_not_stop_deterministic_kernels(monkeypatch, said):
    if said is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", said)
    with deterministic_kernels():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")  # all that torch lets pass
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == said


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_models_whose_kernels_have_no_deterministic_form_are_checked_too(dtype):
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3))
    attends = Attends()
    for model, x in ((pooled, torch.randn(N, 3, 9, 9)), (attends, torch.randn(N, 64, 32))):
        batch = x.to("cuda", dtype), torch.randint(0, 3, (N,), device="cuda")
        check_sample_isolation(model.to("cuda", dtype), classify, batch)
        refused(model, classify, batch, loss_reduction="sum")
    assert not torch.are_deterministic_algorithms_enabled()


class Attends(nn.Module):
    """Attention, whose backward on GPUs adds up in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 96) for _ in range(12))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x.mean(1))


def losses(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").float()


BY_PLACE = {
    "the first is left out": lambda m, b: losses(m, b)[1:].sum(),
    "the last is left out": lambda m, b: losses(m, b)[:-1].sum(),
    "the middle is left out": lambda m, b: losses(m, b).sum() - losses(m, b)[len(b[0]) // 2],
    "weights rise": lambda m, b: (losses(m, b) * torch.linspace(0, 2, len(b[0]))).sum(),
}


@pytest.mark.parametrize("loss", BY_PLACE.values(), ids=BY_PLACE)
@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_treats_samples_by_their_place_in_the_batch_is_found(dtype, n, loss):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, D, generator=generator).to(dtype)
    for y in (torch.arange(n) % 3, torch.ones(n, dtype=torch.long)):
        said = refused(mlp().to(dtype), loss, (x, y), loss_reduction="sum")
        assert "of another sample" in said
        check_sample_isolation(mlp().to(dtype), lambda m, b: losses(m, b).sum(), (x, y), loss_reduction="sum")


@pytest.mark.parametrize("row_order", ["blocked", "interleaved"])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_rows_of_one_sample_stay_together_when_few_are_left(n, row_order):
    def preference(model: Any, batch: tuple[Tensor], weigh: bool = False) -> Tensor:
        scores = model(batch[0])[:, 0]
        pairs = scores.unflatten(0, (2, -1)) if row_order == "blocked" else scores.unflatten(0, (-1, 2)).T
        each = -F.logsigmoid(pairs[0] - 2 * pairs[1])
        return (each * torch.arange(len(each)) if weigh else each).mean()

    batch = (torch.randn(2 * n, D, generator=torch.Generator().manual_seed(3)),)
    options: dict[str, Any] = {"rows_per_sample": 2, "row_order": row_order}
    check_sample_isolation(mlp(), preference, batch, **options)
    refused(mlp(), lambda m, b: preference(m, b, weigh=True), batch, **options)


class Packed(nn.Module):
    """Sequences of different lengths: how many steps the layer takes follows from the longest."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = DPLSTM(D, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if self.rnn.bidirectional else 8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0].sum(1))


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 2}], ids=str)
@pytest.mark.parametrize("n", [2, 5])
def test_lengths_of_others_are_no_dependence_though_they_decide_how_many_steps_are_taken(n, options):
    x = torch.randn(n, 7, D, generator=torch.Generator().manual_seed(1))
    batch = x, torch.tensor([2, 7, 3, 5, 4])[:n], torch.arange(n) % 3
    scores = lambda m, b: m(b[0], b[1])  # noqa: E731
    check_sample_isolation(Packed(**options), lambda m, b: F.cross_entropy(scores(m, b), b[2]), batch)
    refused(
        Packed(**options),
        lambda m, b: F.cross_entropy(scores(m, b) - scores(m, b).logsumexp(0), b[2]),
        batch,
    )

    def by_length(model: Any, batch: Any) -> Tensor:
        each = F.cross_entropy(scores(model, batch), batch[2], reduction="none")
        return (each * batch[1]).sum() / batch[1].sum()

    refused(Packed(**options), by_length, batch)


def test_a_recurrent_layer_that_mixes_samples_is_found_though_lengths_differ():
    class Mixes(Packed):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(x + 0.1 * x.mean(0), lengths)

    batch = torch.randn(5, 7, D), torch.tensor([2, 7, 3, 5, 4]), torch.arange(5) % 3
    refused(Mixes(), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), batch)


def test_positions_that_only_rounding_reached_take_no_part():
    """A query that sees one key: its gradient is what is left of two equal numbers, 0 in some kernels."""
    torch.manual_seed(0)
    inputs, gradient = torch.randn(2, 4, 3), torch.rand(2, 4, 5) + 0.5
    gradient[0] *= 1e-3  # each row by itself
    gradient[:, 0] = 0.0
    noisy = gradient.clone()
    noisy[:, 0] = 1e-8 * gradient[:, 1]
    found = [_as_reached(inputs, g) for g in (gradient, noisy)]
    assert torch.allclose(*found, rtol=0, atol=1e-7)
    assert not found[0][:, 0].any()
    assert (found[0][:, 1:] / inputs[:, 1:]).amax((1, 2)).tolist() == pytest.approx([1.0, 1.0])
    assert (found[0][:, 1:] / inputs[:, 1:]).amin() > 0.05
    assert not _as_reached(inputs, torch.zeros(2, 4, 5)).any()
    assert _as_reached(inputs[:0], gradient[:0]).shape == (0, 4, 3)
