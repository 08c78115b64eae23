"""GradSampleModule and GradSampleHooks as users meet them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleModule,
    create_or_accumulate_grad_sample,
    get_gsm_class,
    get_hooks_class,
    prepare_module,
    wrap_model,
)
from opacus.tests.per_sample import assert_close, expected, grad_samples, per_sample_loss

X = torch.randn(4, 5, dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def backward(model, x: Tensor = X) -> None:
    per_sample_loss(model(x)).mean().backward()


def test_backward_passes_accumulate_as_a_list():
    model = network()
    wrapped = GradSampleModule(model)
    parts = [X[:1], X[1:], X[2:3]]
    for part in parts:
        backward(wrapped, part)
    found = grad_samples(model)
    for k, part in enumerate(parts):
        assert_close(
            {name: g[k] for name, g in found.items()}, expected(model, (part,), {}, len(part)), 1e-10
        )


def test_accumulation_can_be_forbidden_and_allowed():
    wrapped = GradSampleModule(network())
    wrapped.forbid_grad_accumulation()
    backward(wrapped)
    first = wrapped.get_parameter("_module.0.weight").grad_sample.clone()
    with pytest.raises(ValueError, match=r"Poisson sampling.*zero_grad"):
        backward(wrapped)
    assert torch.equal(wrapped.get_parameter("_module.0.weight").grad_sample, first)
    wrapped.zero_grad()
    backward(wrapped)
    wrapped.allow_grad_accumulation()
    backward(wrapped)
    assert len(wrapped.get_parameter("_module.0.weight").grad_sample) == 2


def test_zero_grad_and_deleting():
    wrapped = GradSampleModule(network())
    backward(wrapped)
    wrapped.zero_grad()
    assert all(p.grad_sample is None for p in wrapped.parameters())
    backward(wrapped)
    wrapped.set_grad_sample_to_none()
    assert all(p.grad_sample is None and p.grad is not None for p in wrapped.parameters())
    wrapped.del_grad_sample()
    assert not any(hasattr(p, "grad_sample") for p in wrapped.parameters())


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    ) + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("between", ["before", "forward", "backward"])
def test_taking_the_model_out_leaves_nothing_on_it(between):
    model = network()
    wrapped = GradSampleModule(model)
    loss = None
    if between != "before":
        loss = wrapped(X).sum()
    if between == "backward":
        loss.backward()
    assert hooks_on(model) > 0
    out = wrapped.to_standard_module()
    if between == "forward":
        loss.backward()
    assert out is model
    assert hooks_on(model) == 0
    assert not any(vars(p) for p in model.parameters())
    backward(GradSampleModule(model))  # and it can be wrapped again
    assert model[0].weight.grad_sample.shape == (4, 4, 5)


def test_hooks_without_a_wrapper():
    model = network()
    hooks = GradSampleHooks(model)
    want = expected(model, (X,), {}, 4)
    backward(model)
    assert_close(grad_samples(model), want, 1e-10)
    hooks.remove_hooks()
    assert hooks_on(model) == 0
    hooks.add_hooks(loss_reduction="sum")
    hooks.set_grad_sample_to_none()
    per_sample_loss(model(X)).sum().backward()
    assert_close(grad_samples(model), want, 1e-10)
    with pytest.raises(ValueError, match="twice"):
        hooks.add_hooks()
    hooks.cleanup()
    assert not any(vars(p) for p in model.parameters())


@pytest.mark.parametrize("second", [GradSampleModule, GradSampleHooks])
@pytest.mark.parametrize("part", ["whole", "child", "parent"])
def test_hooking_twice_is_refused_and_changes_nothing(part, second):
    model = network()
    wrapped = GradSampleModule(model)
    backward(wrapped)
    found = {name: g.clone() for name, g in grad_samples(model).items()}
    other = {"whole": model, "child": model[0], "parent": nn.Sequential(model, nn.Linear(3, 3).double())}[
        part
    ]
    before = hooks_on(other)
    with pytest.raises(ValueError, match="twice"):
        second(other)
    assert hooks_on(other) == before
    assert_close(grad_samples(model), found, 0.0)
    if part == "parent":
        assert not hasattr(other[1].weight, "grad_sample")


def test_a_copy_has_hooks_of_its_own():
    wrapped = GradSampleModule(network(), loss_reduction="sum")
    wrapped.forbid_grad_accumulation()
    twin = copy.deepcopy(wrapped)
    assert twin.loss_reduction == "sum"
    assert not twin.grad_accumulation_allowed
    want = expected(twin._module, (X,), {}, 4)
    per_sample_loss(twin(X)).sum().backward()
    assert_close(grad_samples(twin._module), want, 1e-10)
    assert all(p.grad_sample is None for p in wrapped.parameters())
    per_sample_loss(wrapped(X)).sum().backward()
    assert_close(grad_samples(wrapped._module), want, 1e-10)


@pytest.mark.parametrize("mode", ["hooks", "bk", "ghost"])
def test_a_whole_model_can_be_saved_and_goes_on_as_it_was(tmp_path, mode):
    wrapped = wrap_model(network(), mode, loss_reduction="sum")
    wrapped.forbid_grad_accumulation()
    torch.save(wrapped, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(again) is type(wrapped)
    assert (again.loss_reduction, again.grad_accumulation_allowed) == ("sum", False)
    assert_close(dict(again.state_dict()), dict(wrapped.state_dict()), 0.0)
    assert wrapped.capture.attached
    if mode == "hooks":
        want = expected(again._module, (X,), {}, 4)
        per_sample_loss(again(X)).sum().backward()
        assert_close(grad_samples(again._module), want, 1e-10)


def test_attributes_and_state_of_the_model_are_reached_through_the_wrapper():
    model = network()
    wrapped = GradSampleModule(model)
    assert wrapped[0] is model[0] if hasattr(type(wrapped), "__getitem__") else wrapped.append == model.append
    assert list(wrapped.state_dict()) == [f"_module.{name}" for name in model.state_dict()]
    assert "Linear" in repr(wrapped)
    with pytest.raises(AttributeError, match="no_such_thing"):
        wrapped.no_such_thing  # noqa: B018
    model.eval()
    assert not GradSampleModule(wrapped.to_standard_module()).training


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=True),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_trainable_layers_with_buffers_are_refused_by_name(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(NotImplementedError, match=rf"1 \({type(layer).__name__}\).*running_mean"):
        GradSampleModule(model)
    assert hooks_on(model) == 0
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert len(GradSampleModule.validate(model)) == 1
    GradSampleModule(model, strict=False)


@pytest.mark.parametrize("wrapper", [GradSampleModule, GradSampleHooks])
def test_data_parallel_is_refused_by_name_also_inside(wrapper):
    for model, name in [(nn.DataParallel(network()), "m"), (nn.Sequential(nn.DataParallel(network())), "0")]:
        with pytest.raises(ValueError, match=rf"{name} is an nn.DataParallel"):
            wrapper(model)


def test_all_wrong_arguments_are_told_at_once():
    with pytest.raises(ValueError, match=r"(?s)2 problems.*torch.nn.Module.*'median'"):
        GradSampleModule("model", loss_reduction="median")


def test_the_modes_agree():
    found = {}
    for mode in ("hooks", "functorch"):
        for wrapped_as_module in (True, False):
            model = network()
            wrap_model(model, mode, wrapped_as_module)
            backward(model)
            found[mode, wrapped_as_module] = grad_samples(model)
    first = found.pop(("hooks", True))
    for other in found.values():
        assert_close(other, first, 1e-12)
    assert get_gsm_class("hooks") is GradSampleModule
    assert get_hooks_class("hooks") is GradSampleHooks
    assert isinstance(prepare_module(network(), "hooks"), GradSampleModule)
    with pytest.raises(ValueError, match="no such mode"):
        get_gsm_class("no such mode")


def test_the_two_hooks_by_hand_form_the_same_gradients():
    model = network()
    hooks = GradSampleHooks(model)
    want = expected(model, (X,), {}, 4)
    h = model[1](model[0](X)).detach()
    hooks.disable_hooks()
    out = model[2](h)
    (g,) = torch.autograd.grad(per_sample_loss(out).mean(), out)
    hooks.capture_activations_hook(model[2], [h], out)
    hooks.capture_backprops_hook(model[2], None, (g,), "mean", True)
    found = {name: g for name, g in grad_samples(model).items() if g is not None}
    assert_close(found, {name: want[name] for name in ("2.weight", "2.bias")}, 1e-10)
    with pytest.raises(ValueError, match="Linear"):
        hooks.rearrange_grad_samples(module=model[2], backprops=g, loss_reduction="mean", batch_first=True)


def test_short_grad_samples_are_padded_and_added():
    p = nn.Parameter(torch.zeros(2))
    create_or_accumulate_grad_sample(param=p, grad_sample=torch.ones(1, 2), max_batch_len=3)
    create_or_accumulate_grad_sample(param=p, grad_sample=torch.ones(2, 2), max_batch_len=3)
    assert p._current_grad_sample.tolist() == [[2, 2], [1, 1], [0, 0]]


def test_lists_of_captured_layers():
    model = network()
    model[0].requires_grad_(False)
    wrapped = GradSampleModule(model)
    assert list(wrapped.iterate_submodules(model)) == [model[2]]
    assert GradSampleModule.is_supported(model[0])
