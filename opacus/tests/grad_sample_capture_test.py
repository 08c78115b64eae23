"""What capture refuses by name, and that a failure leaves the model able to go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleHooks, GradSampleModule, Owners, isolation, wrap_model
from opacus.grad_sample.capture import Capture
from opacus.grad_sample.isolation import Probe
from opacus.layers import DPLSTM
from opacus.testing import check_sample_isolation
from opacus.tests.per_sample import RuleViews, assert_close, expected, grad_samples, per_sample_loss


class Calls(nn.Module):
    """A model out of a function of itself and its input."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = forward

    def forward(self, *args):
        return self.function(self, *args)


class Standardises(nn.Module):
    """As BatchNorm does, in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3) if self.training else x


MODES = ["hooks", "functorch", "ew", "bk", "ghost"]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def broadcast(m: Calls, x_BTD: Tensor) -> Tensor:
    steps_TD = torch.ones(x_BTD.shape[1:])
    return m.head(m.lost(steps_TD) + x_BTD)


def positions(m: Calls, x_BTD: Tensor) -> Tensor:
    return m.head(m.lost(torch.arange(x_BTD.shape[1])) + x_BTD)


def first_of_one_row(m: Calls, x_BTD: Tensor) -> Tensor:
    return m.head(m.lost(torch.arange(x_BTD.shape[1])[None])[0] + x_BTD)


def folded(m: Calls, x_BTD: Tensor) -> Tensor:
    return m.head(m.lost(x_BTD.flatten(0, 1)).view_as(x_BTD))


def transposed(m: Calls, x_BTD: Tensor) -> Tensor:
    return m.head(m.lost(x_BTD.transpose(0, 1)).transpose(0, 1))


def mixed(m: Calls, x_BTD: Tensor) -> Tensor:
    h = m.lost(x_BTD)
    return m.head(h - h.mean(0))


def attends_over_the_batch(m: Calls, x_BTD: Tensor) -> Tensor:
    h_BE = m.lost(x_BTD).flatten(1)
    return m.head(x_BTD) + (torch.softmax(h_BE @ h_BE.t(), 1) @ h_BE).view_as(x_BTD)


def by_length(m: Calls, x_BTD: Tensor) -> Tensor:
    """Sorted for the layer, as packed sequences are, and back."""
    order = torch.arange(x_BTD.shape[0]).flip(0)
    return m.head(m.lost(x_BTD[order])[order])


def in_pieces(m: Calls, x_BTD: Tensor) -> Tensor:
    return m.head(torch.cat([m.lost(piece) for piece in x_BTD.split(2)]))


def several_rows_each(m: Calls, x_BTD: Tensor) -> Tensor:
    h = m.lost(x_BTD.repeat_interleave(2, 0))
    return m.head(h[::2] + h[1::2])


def only_some(m: Calls, x_BTD: Tensor) -> Tensor:
    y = m.head(x_BTD)
    return torch.cat([y[:1], y[1:] + m.lost(x_BTD[1:])])


LOST = {
    "sorted": (by_length, linear),
    "in pieces": (in_pieces, linear),
    "several rows each": (several_rows_each, linear),
    "only some": (only_some, linear),
    "broadcast": (broadcast, linear),
    "positions": (positions, lambda: nn.Embedding(9, 4)),
    "first of one row": (first_of_one_row, lambda: nn.Embedding(9, 4)),
    "folded": (folded, linear),
    "transposed": (transposed, linear),
    "mixed": (mixed, linear),
    "attention over the batch": (attends_over_the_batch, linear),
}


@pytest.mark.parametrize("detach", [False, True], ids=["hooks", "policy"])
@pytest.mark.parametrize("steps", [5, 3], ids=["T > B", "T = B"])
@pytest.mark.parametrize("how", LOST)
def test_a_layer_whose_rows_are_not_samples_is_named(how, steps, detach):
    """Where T happens to be B no shape tells, and summed gradients are right: only the isolation check sees it."""
    function, make = LOST[how]
    model = Calls(function, lost=make(), head=linear())
    capture = None
    if detach:
        capture = Capture(model, RuleViews(), detach_weights=True)
        capture.attach()
    else:
        model = GradSampleModule(model)
    with pytest.raises(PerSampleGradientError, match=r"lost"):
        model(torch.randn(3, steps, 4)).tanh().mean().backward()
    if capture is not None:
        capture.detach()


def test_the_batch_is_told_by_the_output_where_inputs_leave_a_choice():
    """A mask `[T, T]` would admit T rows; nothing but the table trains."""
    head = linear().requires_grad_(False)
    model = Calls(lambda m, x, mask: positions(m, x), lost=nn.Embedding(9, 4), head=head)
    with pytest.raises(PerSampleGradientError, match=r"lost"):
        GradSampleModule(model)(torch.randn(3, 5, 4), torch.ones(5, 5)).mean().backward()


@pytest.mark.parametrize("affine", [True, False])
def test_batch_normalisation_without_buffers_is_named_too(affine):
    norm = nn.BatchNorm1d(4, affine=affine, track_running_stats=False)
    model = GradSampleModule(nn.Sequential(linear(), norm, linear()))
    with pytest.raises(PerSampleGradientError, match=r"0 \(Linear\)"):
        model(torch.randn(5, 4)).sum().backward()


OUTSIDE = {
    "functional": lambda m, x: F.linear(x, m.used.weight) + m.head(x),
    "functional and called": lambda m, x: F.linear(x, m.used.weight) + m.used(x) + m.head(x),
    "penalty": lambda m, x: m.head(m.used(x)) + m.used.weight.square().sum(),
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_a_weight_used_outside_its_layer_is_named(how):
    model = GradSampleModule(Calls(OUTSIDE[how], used=linear(), head=linear()))
    with pytest.raises(PerSampleGradientError, match=r"used\.weight"):
        model(torch.randn(3, 4)).sum().backward()


def test_a_layer_put_in_after_wrapping_is_named():
    model = nn.Sequential(linear(), linear())
    wrapped = GradSampleModule(model)
    model[1] = linear()
    with pytest.raises(PerSampleGradientError, match=r"1\.weight received a gradient"):
        wrapped(torch.randn(3, 4)).sum().backward()


def test_an_output_that_is_no_tensor_is_named():
    class Box:
        def __init__(self, value):
            self.value = value

    class Boxed(nn.Linear):
        def forward(self, x):
            return Box(super().forward(x))

    model = GradSampleModule(Calls(lambda m, x: m.head(m.boxed(x).value), boxed=Boxed(4, 4), head=linear()))
    with pytest.raises(PerSampleGradientError, match=r"boxed\.weight"):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("rows", [3, 4], ids=["B < features", "B = features"])
def test_reparametrised_weights_are_named(rows):
    model = GradSampleModule(nn.Sequential(parametrizations.weight_norm(linear()), linear()))
    with pytest.raises(PerSampleGradientError, match=r"parametrizations\.weight"):
        model(torch.randn(rows, 4)).sum().backward()


def test_legacy_weight_norm_is_exact_or_named():
    with pytest.warns(FutureWarning):
        model = GradSampleModule(nn.Sequential(nn.utils.weight_norm(linear()), linear()))
    with pytest.raises(PerSampleGradientError, match=r"0\.weight_[gv]"):
        model(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_a_second_backward_through_one_forward_is_named(reentrant):
    def forward(m, x):
        if reentrant is None:
            return m.layer(x)
        return checkpoint(m.layer, x, use_reentrant=reentrant)

    model = GradSampleModule(Calls(forward, layer=linear()))
    loss = model(torch.randn(3, 4, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PerSampleGradientError, match="two backward passes"):
        loss.backward()
    assert isinstance(model.layer.weight.grad_sample, Tensor)


def test_gradients_of_inputs_train_nothing():
    """Adversarial examples: the gradient with respect to the input must not count as a backward of the samples."""
    model = Calls(lambda m, x: m.b(torch.tanh(m.a(x))), a=linear(), b=linear()).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    wrapped = GradSampleModule(model)
    loss = per_sample_loss(wrapped(x)).mean()
    (towards,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert model.a.weight.grad_sample is None
    loss.backward()
    harder = (x + towards.sign()).detach()
    want = expected(model, (x.detach(),), {}, 3)
    assert_close(grad_samples(model), want, 1e-10)
    wrapped.zero_grad(set_to_none=True)
    per_sample_loss(wrapped(harder)).mean().backward()
    assert_close(grad_samples(model), expected(model, (harder,), {}, 3), 1e-10)


@pytest.mark.parametrize("how", ["backward(inputs)", "autograd.grad"])
def test_gradients_asked_for_by_parameter_are_captured(how):
    model = linear().double()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = expected(model, (x,), {}, 3)
    loss = per_sample_loss(GradSampleModule(model)(x)).mean()
    if how == "autograd.grad":
        torch.autograd.grad(loss, list(model.parameters()))
    else:
        loss.backward(inputs=list(model.parameters()))
    assert_close(grad_samples(model), want, 1e-10)


def test_a_double_backward_is_named():
    model = GradSampleModule(Calls(lambda m, x: m.layer(x).tanh(), layer=linear()))
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(PerSampleGradientError, match=r"layer \(Linear\).*create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("on purpose")


def test_a_failed_backward_does_not_spoil_the_next_one():
    model = Calls(
        lambda m, x, fail: m.b(Fails.apply(m.a(x)) if fail else m.a(x)), a=linear(), b=linear()
    ).double()
    wrapped = GradSampleModule(model)
    wrapped.forbid_grad_accumulation()
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(ArithmeticError):
        wrapped(x, True).sum().backward()
    wrapped.zero_grad(set_to_none=True)
    want = expected(model, (x, False), {}, 3)
    per_sample_loss(wrapped(x, False)).mean().backward()
    assert_close(grad_samples(model), want, 1e-10)


@pytest.mark.parametrize("detach", [False, True])
def test_a_failed_forward_gives_the_weights_back(detach):
    model = nn.Sequential(linear(), linear())
    capture = Capture(model, RuleViews(), detach_weights=detach)
    capture.attach()
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert all(p.requires_grad for p in model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    assert set(capture.policy.by_name(model)) == {name for name, _ in model.named_parameters()}
    capture.detach()


def test_without_grad_nothing_is_captured():
    model = GradSampleModule(linear())
    with torch.no_grad():
        out = model(torch.randn(3, 4))
    assert not out.requires_grad
    model.disable_hooks()
    assert not model.hooks_enabled
    model(torch.randn(3, 4)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad_sample is None
    model.enable_hooks()
    model.zero_grad(set_to_none=True)
    model(torch.randn(3, 4)).sum().backward()
    assert model.weight.grad_sample.shape == (3, 4, 4)


def test_a_model_with_hooks_can_be_copied_and_the_copy_has_none():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    hooks = GradSampleHooks(model)
    twin = copy.deepcopy(model)
    twin(torch.randn(3, 4)).sum().backward()
    assert all(p.grad_sample is None for p in model.parameters())
    assert all(getattr(p, "grad_sample", None) is None for p in twin.parameters())
    model(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad_sample.shape == (3, 4, 4)
    hooks.cleanup()


def test_a_backward_that_meets_no_trainable_layer_is_no_batch():
    """Frozen, checkpointed layers are called again within it."""
    model = Calls(lambda m, x: checkpoint(m.frozen, x, use_reentrant=False), frozen=linear(), other=linear())
    model.frozen.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    GradSampleModule(model)(x).sum().backward()
    assert x.grad is not None
    assert model.other.weight.grad_sample is None


def test_a_loss_over_two_batches_of_different_size_is_named():
    model = GradSampleModule(linear())
    with pytest.raises(PerSampleGradientError, match=r"root.*\(2, 4\)|root.*\(3, 4\)"):
        (model(torch.randn(3, 4)).mean() + model(torch.randn(2, 4)).mean()).backward()


def test_a_bias_without_effect_is_no_false_alarm():
    """A bias before a normalisation has the gradient 0: only rounding is left to compare."""
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Conv1d(3, 4, 1), nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 1)).to(dtype)
        GradSampleModule(model)(torch.randn(8, 3, 16, dtype=dtype)).tanh().sum().backward()


def test_the_isolation_check_leaves_no_trace():
    model = GradSampleModule(nn.Sequential(linear(), nn.Tanh(), linear()))
    seen = []
    model.get_submodule("_module.1").register_full_backward_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    out = model(torch.ones(3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and p.grad_sample is None for p in model.parameters())
    assert len(seen) == 1
    out.sum().backward()
    assert len(seen) == 2


def test_the_isolation_check_is_made_five_times_in_each_mode_whatever_the_order(monkeypatch):
    rows: list[int] = []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda self, *args: rows.append(self.row) or run(self, *args))
    model = GradSampleModule(linear())
    model.train()
    at = []
    for forward in range(1, 41):
        before = len(rows)
        model(torch.randn(8, 4)).sum().backward()
        at += [forward] * (len(rows) - before)
        with torch.no_grad():
            model(torch.randn(8, 4))
        model(torch.randn(1, 4))
    assert at == [1, 2, 4, 8, 16]
    assert rows == [7, 0, 4, 2, 6]
    for _ in range(40):
        for training in (False, True):
            model.train(training)(torch.randn(8, 4)).sum().backward()
    assert len(rows) == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_mixes_in_training_mode_only_is_named_after_forwards_in_eval(mode):
    model = nn.Sequential(linear(), Standardises(), linear())
    private = wrap_model(model, mode)
    private.eval()
    for _ in range(3):
        private(torch.randn(5, 4)).sum()
    private.train()
    with pytest.raises(PerSampleGradientError, match=r"0 \(Linear\)"):
        private(torch.randn(5, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_branch_that_starts_at_zero_is_named_once_it_mixes(mode):
    def branch(m: nn.Module, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.head(x) + m.gate(y - y.mean(0))

    gate = nn.Linear(4, 4)
    nn.init.zeros_(gate.weight)
    model = Calls(branch, first=linear(), gate=gate, head=linear())
    private = wrap_model(model, mode)
    private(torch.randn(5, 4))
    with torch.no_grad():  # a step
        gate.weight.add_(0.1)
    with pytest.raises(PerSampleGradientError, match=r"first \(Linear\)"):
        private(torch.randn(5, 4))


def test_sorted_rows_are_named_though_the_last_is_in_place():
    def by_size(m: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.head(m.first(x[order]).tanh()[order.argsort()])

    model = GradSampleModule(Calls(by_size, first=linear(), head=linear()))
    x = torch.randn(6, 4)
    x[:, 0] = torch.tensor([2.0, 1.0, 4.0, 3.0, 5.0, 9.0])
    model(x)
    with pytest.raises(PerSampleGradientError, match=r"head|first"):
        model(x)


def test_states_of_as_many_layers_as_samples_are_no_false_alarm():
    class Tagger(nn.Module):
        """Returns all that its recurrent layer does: `[B, T, H]` and states `[layers, B, H]`."""

        def __init__(self) -> None:
            super().__init__()
            self.rnn = DPLSTM(4, 3, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x)

    model = GradSampleModule(Tagger())
    for _ in range(4):
        model(torch.randn(2, 5, 4))[0].sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("place", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("what", ["packed", "dropout", "checkpointed", "bfloat16", "convolutions"])
def test_models_without_mixing_pass_whichever_row_is_probed(monkeypatch, what, place):
    monkeypatch.setattr(isolation, "_PLACES", {1: place})
    made = []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda self, *args: made.append(run(self, *args)) or made[-1])
    x: Any = torch.randn(5, 4)
    inner: nn.Module = nn.Sequential(linear(), nn.LayerNorm(4), nn.Dropout(0.5), nn.ReLU(), linear())
    if what == "packed":

        def recurrent(m: nn.Module, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 3, 4]), True, enforce_sorted=False)
            return m.head(pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0])

        rnn = DPLSTM(4, 4, num_layers=2, bidirectional=True, batch_first=True)
        inner, x = Calls(recurrent, rnn=rnn, head=nn.Linear(8, 2)), torch.randn(5, 5, 4)
    elif what == "checkpointed":
        inner = Calls(
            lambda m, x: m.head(checkpoint(m.body, x, use_reentrant=False)), body=inner, head=linear()
        )
    elif what == "convolutions":
        inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 3))
        x = torch.randn(5, 3, 9, 9)
    model = GradSampleModule(inner)
    with torch.autocast("cpu", torch.bfloat16, enabled=what == "bfloat16"):
        out = model(x)
    assert made == [True]
    out.float().tanh().sum().backward()


def reentrant(m: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(m.body, m.first(x), use_reentrant=True)


def scalar(m: nn.Module, x: Tensor) -> Tensor:
    return m.body(m.first(x)).square().sum()


@pytest.mark.parametrize(
    ("how", "said"), [(reentrant, "use_reentrant"), (scalar, "one row for each")], ids=["reentrant", "scalar"]
)
def test_a_model_that_cannot_be_probed_is_said_to_be_so_once_and_is_tried_again(
    how, said, caplog, monkeypatch
):
    tried = []
    run = Probe.run
    monkeypatch.setattr(Probe, "run", lambda self, *args: tried.append(1) or run(self, *args))
    model = GradSampleModule(Calls(how, first=linear(), body=linear()), loss_reduction="sum")
    for _ in range(20):
        model(torch.randn(3, 4)).sum().backward()
        model.zero_grad()
    assert len(tried) == 5
    [record] = [r for r in caplog.records if r.name == isolation.__name__]
    assert record.levelname == "WARNING"
    assert said in record.message
    assert "check_isolation=True" in record.message


def test_layers_behind_the_part_that_cannot_be_probed_are():
    def mixes_behind(m: nn.Module, x: Tensor) -> Tensor:
        y = m.body(reentrant(m.inner, x))
        return m.head(y - y.mean(0))

    inner = Calls(reentrant, first=linear(), body=linear())
    model = GradSampleModule(Calls(mixes_behind, inner=inner, body=linear(), head=linear()))
    with pytest.raises(PerSampleGradientError, match=r"body \(Linear\)"):
        model(torch.randn(3, 4))


def test_nothing_is_said_of_a_model_that_the_explicit_check_passed(caplog):
    inner = Calls(reentrant, first=linear(), body=linear())
    check_sample_isolation(inner, lambda m, x: m(x).tanh().sum(), torch.randn(3, 4), loss_reduction="sum")
    GradSampleModule(inner)(torch.randn(3, 4)).sum().backward()
    assert not [r for r in caplog.records if r.name == isolation.__name__]


def said_of_parts(caplog: Any) -> list[str]:
    return [r.message for r in caplog.records if r.name == isolation.__name__]


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bk"])
def test_that_parts_called_by_themselves_were_not_searched_is_said_once(mode, caplog):
    inner = Calls(lambda m, x: m.head(m.first(x)), first=linear(), head=linear())
    model = wrap_model(inner, mode)
    for _ in range(3):
        y = checkpoint(inner.first, torch.randn(5, 4), use_reentrant=False)
        inner.head(y - y.mean(0)).sum().backward()
        model.zero_grad()
    [said] = said_of_parts(caplog)
    assert "Calls was not searched for layers that mix samples" in said
    assert "(Linear) took part" in said
    assert "check_sample_isolation" in said


@pytest.mark.parametrize("use", ["beside", "before", "one sample", "without gradients", "checked"])
def test_nothing_is_said_of_parts_beside_a_call_of_the_model_or_that_train_nothing(use, caplog):
    inner = Calls(lambda m, x: m.head(m.first(x)), first=linear(), head=linear())
    x = torch.randn(5, 4)
    if use == "checked":
        check_sample_isolation(inner, lambda m, x: m(x).tanh().sum(), x, loss_reduction="sum")
    model = GradSampleModule(inner)
    for _ in range(3):
        if use == "beside":
            out = model(x)
            (out.sum() + inner.head(out).sum()).backward()
        elif use == "before":
            (inner.head(x).sum() + model(x).sum()).backward()
        elif use == "without gradients":
            with torch.no_grad():
                inner.head(x)
            model(x).sum().backward()
        else:
            inner.head(x[:1] if use == "one sample" else x).sum().backward()
        model.zero_grad()
    assert not said_of_parts(caplog)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_are_no_parts_called_by_themselves(use_reentrant, caplog):
    body = lambda m, x: checkpoint(m.body, m.first(x), use_reentrant=use_reentrant)  # noqa: E731
    model = GradSampleModule(Calls(body, first=linear(), body=linear()))
    for _ in range(3):
        model(torch.randn(3, 4)).sum().backward()
        model.zero_grad()
    assert not any("parts of the model" in said for said in said_of_parts(caplog))


def test_one_sample_cannot_be_checked_so_the_check_waits_for_two():
    model = GradSampleModule(Calls(mixed, lost=linear(), head=linear()))
    model(torch.randn(1, 5, 4)).sum().backward()
    with pytest.raises(PerSampleGradientError, match="not isolated"):
        model(torch.randn(2, 5, 4))


def test_rows_of_one_sample_may_see_each_other():
    model = Calls(
        lambda m, x: m.head(m.lost(x).view(-1, 2, 4).mean(1).repeat_interleave(2, 0)),
        lost=linear(),
        head=linear(),
    )
    hooks = GradSampleHooks(model, loss_reduction="sum")
    hooks.set_owners(Owners(2, torch.tensor([0, 0, 1, 1])))
    model(torch.randn(4, 4)).sum().backward()
    assert model.lost.weight.grad_sample.shape == (2, 4, 4)
    hooks.set_owners(None)
    hooks.cleanup()
    with pytest.raises(PerSampleGradientError, match="not isolated"):
        GradSampleModule(model)(torch.randn(4, 4))


def test_a_frozen_layer_is_not_hooked_until_it_trains() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    private = GradSampleModule(model)
    assert not model[0]._forward_hooks
    private(torch.randn(2, 3)).sum().backward()
    assert getattr(model[0].weight, "grad_sample", None) is None
    model[0].requires_grad_(True)
    x = torch.randn(2, 3)
    private(x).sum().backward()
    expected = torch.einsum("d,bi->bdi", model[1].weight.detach().sum(0), x) * 2  # loss_reduction="mean"
    assert torch.allclose(model[0].weight.grad_sample, expected)


@pytest.mark.parametrize("mode", ["part", "late"])
def test_a_layer_that_trains_unseen_is_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    private = GradSampleModule(model)
    out = private(torch.randn(2, 3))
    model[0].requires_grad_(True)
    if mode == "part":
        out = model[1](model[0](torch.randn(2, 3)))
    with pytest.raises(PerSampleGradientError, match=r"0 trains since the forward"):
        out.sum().backward()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "bk"])
def test_weights_computed_from_parameters_are_refused_by_name(mode):
    """`functional_call` with them: the parameters' gradients come from outside any layer."""
    module = wrap_model(nn.Linear(3, 2), mode, True)
    doubled = {name: 2 * p for name, p in module.named_parameters()}
    with pytest.raises(PerSampleGradientError, match=r"not complete[\s\S]*weight[\s\S]*bias"):
        torch.func.functional_call(module, doubled, (torch.randn(4, 3),)).sum().backward()


class Remembers(nn.Module):
    """Keeps what it saw; `kind` says how."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 2)
        self.memory = nn.Module()
        self.memory.register_buffer("mean", torch.zeros(3))
        self.memory.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.memory.calls += 1
        if self.kind == "in place":
            self.memory.mean.lerp_(x.detach().mean(0), 0.1)
        if self.kind == "anew":
            self.memory.mean = 0.9 * self.memory.mean + 0.1 * x.detach().mean(0)
        return self.layer(x)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "bk"])
@pytest.mark.parametrize("kind", ["in place", "anew", "not at all"])
def test_buffers_that_the_forward_writes_are_named_once(kind, mode, caplog):
    module = wrap_model(Remembers(kind), mode, True)
    for training in (False, True, True):
        module.train(training)
        module(torch.randn(4, 3)).sum().backward()
        module.zero_grad()
        assert training or not caplog.messages
    said = [text for text in caplog.messages if "writes buffers" in text]
    assert len(said) == (kind != "not at all")
    assert all("(memory.mean)" in text for text in said)
