"""Ghost or instantiate: the rule at its edges, its budget, and that either way gives the same sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from opacus.grad_sample.kept import KeptProduct, KeptRows
from opacus.grad_sample.routes import Route
from opacus.tests.clipped_sums import Private


def asked(route, *, batch=1, positions, d_in, p_out, pair_bytes=4):
    return route.instantiates(batch=batch, positions=positions, d_in=d_in, p_out=p_out, pair_bytes=pair_bytes)


@pytest.mark.parametrize(("positions", "wanted"), [(49, False), (50, True), (51, True)])
def test_instantiates_as_soon_as_the_pair_is_no_smaller(positions, wanted):
    """P D = 100 * 100 numbers against T (D + P) = 200 T."""
    assert asked(Route(), positions=positions, d_in=100, p_out=100) is wanted


@pytest.mark.parametrize(("pair_bytes", "edge"), [(2, 100), (4, 50), (8, 50)])
def test_what_counts_are_bytes(pair_bytes, edge):
    """Instantiated gradients take float32 at least, whatever the pair's dtype, and float64 for float64."""
    assert not asked(Route(), positions=edge - 1, d_in=100, p_out=100, pair_bytes=pair_bytes)
    assert asked(Route(), positions=edge, d_in=100, p_out=100, pair_bytes=pair_bytes)


def test_lora_matrices_are_always_instantiated_and_rows_of_a_wide_layer_never():
    assert asked(Route(), positions=16, d_in=4096, p_out=8, pair_bytes=4)
    assert not asked(Route(budget=10**12), positions=1, d_in=4096, p_out=4096)


@pytest.mark.parametrize(("positions", "wanted"), [(24, False), (25, True)])
def test_a_budget_is_spent_only_where_gram_matrices_cost_half_the_product(positions, wanted):
    """2 T (D + P) >= P D: 400 T against 10 000."""
    assert asked(Route(budget=10**9), positions=positions, d_in=100, p_out=100) is wanted


def test_the_budget_is_spent_to_the_last_byte_and_no_further():
    extra = 3 * 4 * (100 * 100 - 40 * 200)
    for budget, wanted in [(extra - 1, [False]), (extra, [True, False]), (2 * extra, [True, True, False])]:
        route = Route(budget=budget)
        assert [asked(route, batch=3, positions=40, d_in=100, p_out=100) for _ in wanted] == wanted
    assert route.budget == 0


def test_an_empty_batch_takes_nothing_from_the_budget():
    route = Route(budget=5)
    asked(route, batch=0, positions=40, d_in=100, p_out=100)
    assert route.budget == 5


def test_always_instantiate_asks_for_no_budget():
    assert asked(Route(always_instantiate=True), positions=1, d_in=4096, p_out=4096)


@pytest.mark.parametrize(
    ("way", "kinds"),
    [("bk", [KeptProduct, KeptRows]), ("bk with budget", [KeptRows, KeptRows])],
)
def test_the_budget_of_a_physical_batch_is_new_for_each_and_changes_no_number(way, kinds):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    private = Private(model, way, clip=0.5)
    x = torch.randn(3, 6, 20, dtype=torch.float64)
    seen = []
    book, take = private.module.policy, private.module.policy.on_batch

    def look(book):
        weights = [uses for uses in book._uses.values() if uses.parameter.dim() == 2]
        seen.append({tuple(uses.parameter.shape): type(uses.kept[0]) for uses in weights})
        take(book)

    book.on_batch = look
    first = private.batch(x)
    again = private.batch(x)
    assert [seen[-1][20, 20], seen[-1][2, 20]] == kinds
    assert seen[0] == seen[1]
    torch.manual_seed(0)
    other = Private(nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)).double(), "ghost", clip=0.5)
    for name, total in other.batch(x).items():
        assert torch.allclose(total, first[name], atol=1e-12)
        assert torch.allclose(total, again[name], atol=1e-12)
