"""How layers are put together: reuse, tying, in-place changes, ownership, checkpointing, several devices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from opacus.grad_sample import GradSampleModule, Owners
from opacus.testing import devices_for, spread
from opacus.tests.per_sample import (
    VIEWS,
    assert_close,
    check,
    expected,
    grad_samples,
    per_sample_loss,
    policy_grads,
)

IDS = torch.tensor([[3, 0, 3, 5], [0, 0, 0, 0], [1, 2, 5, 5]])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class TiedLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class TiedHead(nn.Module):
    """A language model whose head is its embedding table."""

    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.tokens(ids))))


class MaskedHead(nn.Module):
    """BERT's: the head's bias hangs on its parent too."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 4)
        self.bias = self.decoder.bias

    def forward(self, x):
        return self.decoder(x)


class Held(nn.Module):
    """Parameters in containers that are never called themselves, at any depth."""

    def __init__(self):
        super().__init__()
        self.by_name = nn.ParameterDict(
            {"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))}
        )
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])
        self.deeper = nn.ModuleDict(
            {"in": nn.ParameterDict({"c": nn.Parameter(torch.randn(4))}), "out": nn.Linear(4, 4)}
        )
        self.stack = nn.ModuleList([nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.randn(4))])])

    def forward(self, x):
        h = self.stack[0](x * self.by_name["a"] @ self.listed[0] + self.by_name["b"])
        return self.deeper["out"](torch.tanh(h) * self.deeper["in"]["c"]) * self.stack[1][0]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.used(self.frozen(x))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x, *, scale):
        return self.b(input=self.norm(input=self.a(input=x)) * scale)


class InPlaceAfter(nn.Module):
    """In-place operations on a layer's output: some of these outputs are views."""

    def __init__(self, how, bias):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)

    def forward(self, x):
        h = self.first(x)
        if self.how == "relu":
            h = F.relu(h, inplace=True)
        elif self.how == "+=":
            h += x
        else:
            h.mul_(2).add_(x)
            h[..., 0] = 0
        out = self.second(h)
        out += h.detach()
        return out


class Root(nn.Module):
    """A vision transformer's way: the model itself owns parameters, and layers."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))
        self.block, self.head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(x.shape[0], -1, -1).to(x.device), x], 1) + self.place.to(x.device)
        return self.head(self.block(h)[:, 0])


MODELS = {
    "called twice": (Twice, torch.randn(3, 4)),
    "tied linears": (TiedLinears, torch.randn(3, 2, 4)),
    "tied embedding and head": (TiedHead, IDS),
    "owned by parent and child": (MaskedHead, torch.randn(3, 4)),
    "parameter containers": (Held, torch.randn(3, 4)),
    "unused and frozen layers": (Unused, torch.randn(3, 4)),
    "parameters of the root": (Root, torch.randn(3, 3, 4)),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", MODELS)
def test_model_is_exact(name, view):
    make, x = MODELS[name]
    check(make, x, view=view)


@pytest.mark.parametrize("view", VIEWS)
def test_keyword_arguments_of_models_and_layers(view):
    check(Keywords, view=view, x=torch.randn(3, 4), scale=torch.randn(3, 1))


@pytest.mark.parametrize("view", ["float64", "functorch", "policy"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (3, 2, 2, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["relu", "+=", "several"])
def test_in_place_changes_after_a_layer(how, bias, shape, view):
    check(lambda: InPlaceAfter(how, bias), torch.randn(shape), view=view)


@pytest.mark.parametrize("view", ["float64", "policy"])
def test_in_place_relu_after_a_convolution_and_a_norm(view):
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    check(make, torch.randn(3, 2, 4, 4), view=view)


class Checkpointed(nn.Module):
    def __init__(self, reentrant, nested=False, tied=False):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        if tied:
            self.b.weight = self.a.weight
        self.reentrant, self.nested = reentrant, nested

    def inner(self, x):
        return F.relu(self.b(x), inplace=True)

    def outer(self, x):
        h = self.norm(torch.tanh(self.a(x)))
        return checkpoint(self.inner, h, use_reentrant=self.reentrant) if self.nested else self.inner(h)

    def forward(self, x):
        if self.reentrant:
            x = x.clone().requires_grad_()  # reentrant checkpointing needs an input that requires grad
        return self.c(checkpoint(self.outer, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("view", ["float64", "float32", "policy"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_is_exact(reentrant, tied, nested, view):
    # the loop takes one gradient after the other, which reentrant checkpointing does not allow: compute it without
    torch.manual_seed(0)
    model = Checkpointed(reentrant, nested, tied).to(torch.float32 if view == "float32" else torch.float64)
    x = torch.randn(3, 2, 4).to(model.c.weight.dtype)
    want = {name.removeprefix("model."): grad for name, grad in expected(_Plain(model), (x,), {}, 3).items()}
    if view == "policy":
        found = policy_grads(model, (x,), {})
    else:
        per_sample_loss(GradSampleModule(model)(x)).mean().backward()
        found = grad_samples(model)
    assert_close(found, want, 1e-10 if view != "float32" else 1e-5)


class _Plain(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        m = self.model
        return m.c(m.inner(m.norm(torch.tanh(m.a(x)))))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_policy_sees_the_same_calls_with_and_without_checkpointing(reentrant):
    model = Checkpointed(reentrant).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    found = policy_grads(model, (x,), {})
    again = policy_grads(_Plain(model), (x,), {})
    assert_close(found, {name.removeprefix("model."): grad for name, grad in again.items()}, 1e-12)


def test_a_model_called_twice_for_one_loss_adds_up():
    model = Twice().double()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    wrapped = GradSampleModule(model)
    want = expected(_Both(copy.deepcopy(model)), (x, y), {}, 3)
    (per_sample_loss(wrapped(x)) + per_sample_loss(wrapped(y))).mean().backward()
    assert_close(grad_samples(model), {name.removeprefix("model."): g for name, g in want.items()}, 1e-10)


class _Both(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return [self.model(x), self.model(y)]


def test_eval_mode_trains_like_train_mode():
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()

    check(make, torch.randn(3, 4))


def test_freezing_and_unfreezing_is_followed():
    model = Keywords().double()
    model.a.requires_grad_(False)
    wrapped = GradSampleModule(model)
    x, scale = torch.randn(3, 4, dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    for frozen, free in [("a", "b"), ("b", "a"), ("a", "b")]:
        model.get_submodule(frozen).requires_grad_(False)
        model.get_submodule(free).requires_grad_(True)
        wrapped.zero_grad(set_to_none=True)
        want = expected(model, (x,), {"scale": scale}, 3)
        per_sample_loss(wrapped(x, scale=scale)).mean().backward()
        assert_close(grad_samples(model), want, 1e-10)


def test_a_layer_frozen_between_forward_and_backward_leaves_nothing_behind():
    model = Twice().double()
    wrapped = GradSampleModule(model)
    x = torch.randn(3, 4, dtype=torch.float64)
    loss = per_sample_loss(wrapped(x)).mean()
    model.layer.weight.requires_grad_(False)
    loss.backward()
    model.layer.weight.requires_grad_(True)
    wrapped.zero_grad(set_to_none=True)
    want = expected(model, (x,), {}, 3)
    per_sample_loss(wrapped(x)).mean().backward()
    assert_close(grad_samples(model), want, 1e-10)


@pytest.mark.parametrize("index", [[0, 0, 1, 2, 2], [2, 0, 1, 0, 2], [0, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), Twice]
)
def test_rows_of_one_sample_add_up(make, index):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(5, 4, dtype=torch.float64)
    owners = Owners(3, torch.tensor(index))
    rows = expected(model, (x,), {}, 5)
    want = {n: torch.stack([g[owners.index_R == i].sum(0) for i in range(3)]) for n, g in rows.items()}
    assert_close(policy_grads(model, (x,), {}, owners=owners), want, 1e-10)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    wrapped.set_owners(owners)
    per_sample_loss(wrapped(x)).sum().backward()
    assert_close(grad_samples(model), want, 1e-10)


def test_rows_of_one_sample_add_up_for_tables_and_images():
    owners = Owners(2, torch.tensor([1, 0, 1]))
    for model, x in [
        (nn.Embedding(6, 3), IDS),
        (nn.Conv1d(2, 3, 2), torch.randn(3, 2, 5, dtype=torch.float64)),
    ]:
        rows = expected(model.double(), (x,), {}, 3)
        want = {n: torch.stack([g[1], g[0] + g[2]]) for n, g in rows.items()}
        assert_close(policy_grads(model, (x,), {}, owners=owners), want, 1e-10)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


def language() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))


class Branches(nn.Module):
    """Two devices work side by side in the backward."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.up, self.down = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        left, right = self.left(x), self.down(self.up(self.right(x)))
        return left + right.to(left.device)


@pytest.mark.parametrize("layout", ["two", "four", "device+cpu"])
@pytest.mark.parametrize("view", ["float32", "policy"])
@pytest.mark.parametrize(
    ("make", "x"),
    [(convolutional, torch.randn(3, 2, 4, 4)), (language, IDS), (Branches, torch.randn(3, 4))],
    ids=["images", "text", "branches"],
)
def test_layers_on_several_devices_are_exact(make, x, layout, view):
    check(make, x, view=view, place=lambda model: spread(model, devices_for(layout)))


@pytest.mark.parametrize("view", ["float32", "functorch", "policy"])
def test_a_layer_whose_children_lie_elsewhere_is_exact(view):
    def place(model):
        devices = devices_for("two")
        spread(model, devices, ["block", "head"])
        model.token.data = model.token.data.to(devices[0])

    check(Root, torch.randn(3, 3, 4), view=view, place=place)


def test_bf16_and_autocast_stay_within_their_rounding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(4, 5, 8)
    want = expected(model, (x,), {}, 4)
    wrapped = GradSampleModule(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = wrapped(x)
    per_sample_loss(out.float()).mean().backward()
    assert_close(grad_samples(model), want, 3e-2)  # eight bits of mantissa, a sum of twenty terms
    half = copy.deepcopy(wrapped.to_standard_module()).bfloat16()
    half.zero_grad()
    want = expected(half, (x.bfloat16(),), {}, 4)
    per_sample_loss(GradSampleModule(half)(x.bfloat16()).float()).mean().backward()
    assert_close(grad_samples(half), want, 5e-2)
