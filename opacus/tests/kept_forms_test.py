"""What is kept of a parameter: every form's norm and clipped sum, and the joint norms of every pair of forms, from instantiation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GRAD_SAMPLERS, NORM_SAMPLERS, register_grad_sampler, register_norm_sampler
from opacus.grad_sample.kept import (
    KeptElsewhere,
    KeptLookup,
    KeptProduct,
    KeptRows,
    KeptWithNorm,
    LookedUp,
    joint_sq_norm,
)
from opacus.testing import devices_for
from opacus.tests.clipped_sums import WAYS, Private, check_sums

B, V, D = 3, 6, 4
SHAPE = torch.Size([V, D])


def rows(seed):
    torch.manual_seed(seed)
    return KeptRows(torch.randn(B, *SHAPE, dtype=torch.float64))


def product(seed, groups=1, positions=5):
    torch.manual_seed(seed)
    a = torch.randn(B, groups, positions, D, dtype=torch.float64)
    g = torch.randn(B, groups, positions, V // groups, dtype=torch.float64)
    return KeptProduct(lambda: (a, g), SHAPE)


def lookup(seed, rectangular=True, positions=4):
    torch.manual_seed(seed)
    ids = torch.randint(V, (B, positions))
    looked = LookedUp(
        ids.flatten(),
        torch.arange(B).repeat_interleave(positions),
        torch.randn(B * positions, D, dtype=torch.float64),
        rectangular,
    )
    return KeptLookup(looked, B, SHAPE)


def with_norm(seed):
    use = rows(seed)
    return KeptWithNorm(use, use.sq_norm().sqrt())


FORMS = {
    "rows": rows,
    "product": product,
    "one position": lambda seed: product(seed, positions=1),
    "groups": lambda seed: product(seed, groups=2),
    "lookup": lookup,
    "bags": lambda seed: lookup(seed, rectangular=False),
    "the user's norm": with_norm,
    "elsewhere": lambda seed: KeptElsewhere(product(seed), torch.device("cpu"), torch.device("cpu")),
}


@pytest.mark.parametrize("form", FORMS)
def test_norm_and_clipped_sum_follow_from_the_instantiated_gradient(form):
    use = FORMS[form](0)
    grad_B = use.instantiated()
    factor_B = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    assert torch.allclose(use.sq_norm(), grad_B.flatten(1).square().sum(1), rtol=1e-12)
    assert torch.allclose(use.clipped(factor_B), (factor_B.view(-1, 1, 1) * grad_B).sum(0), atol=1e-12)


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(FORMS, 2)), ids=" + ".join)
def test_gradients_of_every_pair_of_forms_add_before_the_norm(pair):
    uses = [FORMS[form](seed) for seed, form in enumerate(pair)]
    total = sum(use.instantiated() for use in uses)
    assert torch.allclose(joint_sq_norm(uses), total.flatten(1).square().sum(1), rtol=1e-12)


@pytest.mark.parametrize(
    "forms",
    [
        ["lookup", "lookup", "product"],
        ["product", "lookup", "product", "lookup"],
        ["bags", "lookup", "product"],
        ["rows", "product", "lookup"],
        ["groups", "product", "groups"],
    ],
    ids=" + ".join,
)
def test_more_than_two_uses(forms):
    uses = [FORMS[form](seed) for seed, form in enumerate(forms)]
    total = sum(use.instantiated() for use in uses)
    assert torch.allclose(joint_sq_norm(uses), total.flatten(1).square().sum(1), rtol=1e-12)


@pytest.mark.parametrize("form", ["product", "one position", "lookup", "rows", "groups"])
def test_no_sample_at_all(form):
    empty = {
        "rows": KeptRows(torch.zeros(0, *SHAPE)),
        "product": KeptProduct(lambda: (torch.zeros(0, 1, 5, D), torch.zeros(0, 1, 5, V)), SHAPE),
        "one position": KeptProduct(lambda: (torch.zeros(0, 1, 1, D), torch.zeros(0, 1, 1, V)), SHAPE),
        "groups": KeptProduct(lambda: (torch.zeros(0, 2, 5, D), torch.zeros(0, 2, 5, V // 2)), SHAPE),
        "lookup": KeptLookup(
            LookedUp(torch.zeros(0).long(), torch.zeros(0).long(), torch.zeros(0, D), True), 0, SHAPE
        ),
    }
    use = empty[form]
    for other in empty.values():
        assert joint_sq_norm([use, other]).shape == (0,)
    assert use.sq_norm().shape == (0,)
    assert torch.equal(use.clipped(torch.zeros(0)), torch.zeros(SHAPE))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("side", ["a", "g", "both"])
@pytest.mark.parametrize("wide", [True, False], ids=["wide inputs", "wide outputs"])
def test_a_sample_left_out_is_left_out_of_the_product_on_both_sides(wide, side, bad):
    torch.manual_seed(0)
    a, g = torch.randn(3, 1, 4, 8 if wide else 5), torch.randn(3, 1, 4, 5 if wide else 8)
    want = torch.einsum("btd,btp->pd", a[::2, 0], g[::2, 0])
    for x, name in ((a, "a"), (g, "g")):
        if side in (name, "both"):
            x[1] = bad
    use = KeptProduct(lambda: (a, g), torch.Size([g.shape[-1], a.shape[-1]]))
    assert torch.allclose(use.clipped(torch.tensor([1.0, 0.0, 1.0])), want, atol=1e-5)
    assert not (use.sq_norm()[1].isfinite() and use.sq_norm()[1] < 1e30)


def cancelling(kind, scale):
    """Uses of one parameter whose terms are of size S and nearly cancel."""
    a, g = torch.randn(1, 1, 1, 16).expand(1, 1, 64, 16), torch.randn(1, 1, 64, 8) * scale
    if kind == "product":
        g = g - g.mean(2, keepdim=True) + 1e-6 * scale
        return [KeptProduct(lambda: (a, g), torch.Size([8, 16]))]
    # every entry is looked up too, and takes back what the product gave
    back = -outer(a, g)[0].float() + 1e-5 * scale
    looked = LookedUp(torch.arange(8), torch.zeros(8, dtype=torch.long), back, rectangular=True)
    return [KeptProduct(lambda: (a, g), torch.Size([8, 16])), KeptLookup(looked, 1, torch.Size([8, 16]))]


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("kind", ["product", "tied"])
def test_a_norm_is_not_too_small_where_terms_cancel(kind, scale):
    """Inner products of float32 err by 1e-7 of S^2, far more than the squared norm of a gradient of 1e-5 S."""
    for seed in range(40):
        torch.manual_seed(seed)
        uses = cancelling(kind, scale)
        grad = outer(*uses[0].pairs()) + sum(use.instantiated().double() for use in uses[1:])
        found, true = joint_sq_norm(uses).sqrt().double().item(), grad.norm().item()
        assert 0.999 * true <= found <= true + 5e-3 * 64 * 4 * 3 * scale


def outer(a, g):
    return torch.einsum("bktd,bktp->bpd", a.double(), g.double())


def test_a_use_on_another_device_brings_home_what_it_is_asked_for():
    home, away = devices_for("two")
    a, g = torch.randn(2, 1, 5, 3), torch.randn(2, 1, 5, 4)
    there = KeptProduct(lambda: (a.to(away), g.to(away)), torch.Size([4, 3]))
    here = KeptProduct(lambda: (a.to(home), g.to(home)), torch.Size([4, 3]))
    use = KeptElsewhere(there, away, home)
    factor_B = torch.tensor([0.5, 1.0]).to(home)
    for found, want in [
        (use.sq_norm(), here.sq_norm()),
        (use.instantiated(), here.instantiated()),
        (use.clipped(factor_B), here.clipped(factor_B)),
        (joint_sq_norm([use, here]), 4 * here.sq_norm()),
    ]:
        assert found.device == home
        assert torch.allclose(found.cpu(), want.cpu(), rtol=1e-4)


# ------------------------------------------------------------- Hugging Face's Conv1D, and what users register


class Conv1D(nn.Module):
    """As in Hugging Face's GPT-2: `[in, out]`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        shape = (*x.shape[:-1], self.bias.shape[0])
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class HuggingFace(Conv1D):
    pass


HuggingFace.__module__, HuggingFace.__qualname__ = "transformers.pytorch_utils", "Conv1D"


class Derived(HuggingFace):
    pass


class TiedConv1D(nn.Module):
    """Its weight `[V, D]` is an embedding table too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(6, 4), HuggingFace(4, 6)
        self.out.weight = self.tokens.weight

    def forward(self, ids):
        return self.out(torch.cat([self.tokens(ids), self.tokens(ids)[..., :2]], -1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 5), (3, 2, 2, 5), (3, 9, 5)], ids=str)
@pytest.mark.parametrize("kind", [Conv1D, HuggingFace, Derived])
def test_conv1d_of_hugging_face(kind, shape, way):
    check_sums(lambda: kind(6, 5), torch.randn(shape), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_conv1d_tied_to_an_embedding(way):
    check_sums(TiedConv1D, torch.randint(6, (3, 2)), way=way)


def test_conv1d_is_known_by_name_and_by_nothing_else():
    from opacus.grad_sample.functorch import FUNCTORCH
    from opacus.grad_sample.hf_conv1d import HF_CONV1D
    from opacus.grad_sample.selection import rule_for

    names = ("weight", "bias")
    assert rule_for(HuggingFace(2, 3), names) is HF_CONV1D
    assert rule_for(Derived(2, 3), names) is HF_CONV1D
    assert rule_for(Conv1D(2, 3), names) is FUNCTORCH


class Own(nn.Linear):
    pass


@pytest.fixture
def registered():
    """Samplers of the user's; taken back afterwards."""
    yield
    GRAD_SAMPLERS.pop(Own, None)
    NORM_SAMPLERS.pop(Own, None)


class TwoOwn(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.own, self.twice = Own(4, 4, bias=False), twice

    def forward(self, x):
        return self.own(torch.tanh(self.own(x))) if self.twice else self.own(x)


def by_user(layer, activations, backprops):
    return {layer.weight: torch.einsum("b...p,b...d->bpd", backprops, activations[0])}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("norm_too", [False, True])
def test_the_users_samplers_are_used(twice, way, norm_too, registered):
    asked = []

    @register_grad_sampler(Own)
    def rows_of(layer, activations, backprops):
        asked.append("rows")
        return by_user(layer, activations, backprops)

    if norm_too:

        @register_norm_sampler(Own)
        def norms_of(layer, activations, backprops):
            asked.append("norms")
            return {p: g.flatten(1).norm(dim=1) for p, g in by_user(layer, activations, backprops).items()}

    check_sums(lambda: TwoOwn(twice), torch.randn(3, 2, 4), way=way)
    assert set(asked) == {"rows", "norms"} if norm_too else {"rows"}


@pytest.mark.parametrize("way", ["bk", "ghost"])
def test_a_users_norm_decides_how_much_is_clipped(way, registered):
    register_norm_sampler(Own)(
        lambda layer, activations, backprops: {layer.weight: torch.full((len(backprops),), 8.0)}
    )
    private = Private(TwoOwn(False), way, clip=2.0, loss_reduction="sum")
    x = torch.randn(3, 4)
    found = private.batch(x, loss=lambda output, dim: output.sum(1))["own.weight"]
    assert torch.allclose(found, torch.ones(4, 1) * x.sum(0) * 2 / 8, rtol=1e-4)


@pytest.mark.parametrize("way", ["bk", "ghost"])
@pytest.mark.parametrize("wrong", [(3, 4, 3), (4, 4), (2, 4, 4)], ids=str)
def test_a_sampler_of_the_wrong_shape_is_named(way, wrong, registered):
    register_grad_sampler(Own)(lambda layer, activations, backprops: {layer.weight: torch.zeros(wrong)})
    with pytest.raises(PerSampleGradientError, match=r"own\.weight"):
        Private(TwoOwn(False), way).backward(torch.randn(3, 4))
