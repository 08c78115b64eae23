"""The order of forwards, backwards and steps in modes "bk" and "ghost": what counts, once; what does not; what is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.errors import PerSampleGradientError
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.blocks import SMALL
from opacus.tests import grad_sample_models_test as models
from opacus.tests.clipped_sums import WAYS, Private, clipped_by_loop, norms_of
from opacus.tests.per_sample import assert_close, expected, per_sample_loss
from opacus.utils.batch_memory_manager import BatchMemoryManager

BOTH = ["bk", "ghost"]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def batches(*sizes):
    torch.manual_seed(1)
    return [torch.randn(size, 4, dtype=torch.float64) for size in sizes]


def loop(model, x, clip=0.5, **kwargs):
    return clipped_by_loop(expected(model, (x,), {}, len(x), **kwargs), clip)


def added(*sums):
    return {name: sum(total[name] for total in sums) for name in sums[0]}


def with_large_matrices() -> nn.Module:
    """Small sums of several backwards are added together, large ones each by itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, SMALL // 4 + 1), nn.Tanh(), nn.Linear(SMALL // 4 + 1, 3)).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", [small, with_large_matrices])
def test_several_backwards_before_a_step_all_count(build, way):
    model = build()
    assert (max(p.numel() for p in model.parameters()) > SMALL) == (build is with_large_matrices)
    x, y, z = batches(3, 2, 4)
    want = added(*(loop(model, one) for one in (x, y, z)))
    private = Private(model, way, clip=0.5)
    for one in (x, y, z):
        private.backward(one)
    assert_close(private.sums(), want, 1e-10)
    assert private.optimizer.accumulated_iterations == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("style", ["flat", "adaptive"])
def test_physical_batches_of_a_logical_batch_add_up_to_one_step(style, way):
    model = small()
    data = batches(3, 0, 2, 4)
    want = added(*(loop(model, one) for one in data if len(one)))
    private = Private(model, way, clip=0.5, style=style, lr=1.0, loss_reduction="sum")
    before = copy.deepcopy(model.state_dict())
    for one, last in zip(data, [False, False, False, True], strict=True):
        private.optimizer.signal_skip_step(not last)
        private.optimizer.zero_grad()
        private.backward(one)
        private.optimizer.step()
    found = {name: before[name] - value for name, value in model.state_dict().items()}
    assert_close(found, want, 1e-10)


@pytest.mark.parametrize("way", BOTH)
def test_batch_memory_manager_with_poisson_batches(way):
    """The whole run equals one with ordinary batches."""
    ends = []
    for physical in (None, 3):
        torch.manual_seed(0)
        model = small()
        data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,)))
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=0.0,
            max_grad_norm=0.3,
            grad_sample_mode=way,
        )
        module, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if way == "ghost" else nn.CrossEntropyLoss()

        def train(loader, module=module, optimizer=optimizer, criterion=criterion):
            torch.manual_seed(3)
            for x, y in loader:
                optimizer.zero_grad()
                criterion(module(x), y).backward()
                optimizer.step()

        if physical is None:
            train(loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as pieces:
                train(pieces)
        ends.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_close(ends[0], ends[1], 1e-10)


@pytest.mark.parametrize("way", BOTH)
def test_under_poisson_sampling_a_second_backward_is_refused_and_a_step_clears_it(way):
    private = Private(small(), way)
    private.module.forbid_grad_accumulation()
    x, y = batches(3, 2)
    private.backward(x)
    with pytest.raises(ValueError, match="Poisson"):
        private.backward(y)
    private.optimizer.step()
    private.backward(y)
    private.optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_grad_stays_none_and_no_plain_gradient_is_formed_after_the_first_batch(way):
    model = small()
    private = Private(model, way)
    x, y = batches(3, 3)
    formed = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(formed.append)
    private.batch(x)
    assert len(formed) >= 6  # what the verification compared with
    formed.clear()
    for _ in range(2):
        private.backward(y)
        assert all(p.grad is None for p in model.parameters())
        private.optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        private.optimizer.zero_grad(set_to_none=True)
    assert formed == []


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_without_samples_gives_zero_sums_and_a_step(way):
    model = small()
    private = Private(model, way, loss_reduction="sum", lr=1.0)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        private.backward(torch.zeros(0, 4, dtype=torch.float64))
        private.optimizer.step()
        private.optimizer.zero_grad()
    assert_close(dict(model.state_dict()), before, 0.0)
    (x,) = batches(3)
    assert_close(private.batch(x), loop(model, x, 1.0), 1e-10)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, use="ab"):
        for name in use:
            x = torch.tanh(getattr(self, name)(x))
        return x


@pytest.mark.parametrize("way", WAYS)
def test_layers_unused_at_first_are_verified_when_they_are_used(way):
    """After a step `.grad` is not None any more; the net stands all the same, and once only."""
    torch.manual_seed(0)
    model = Parts().double()
    private = Private(model, way, clip=0.5)
    (x,) = batches(3)
    private.backward(x, use="a")
    private.optimizer.step()
    private.optimizer.zero_grad()  # zeros, not None
    formed = []
    model.b.weight.register_post_accumulate_grad_hook(formed.append)
    for counts in ([1, 2], None):
        private.backward(x)
        rows = expected(model, (x,), {}, 3)
        private.optimizer.clip_and_accumulate()
        found = {name: p.summed_grad for name, p in model.named_parameters()}
        assert_close(found, clipped_by_loop(rows, 0.5), 1e-10)
        assert len(formed) in counts if counts else not formed
        private.optimizer.zero_grad()
        formed.clear()


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_that_uses_none_of_the_optimizers_parameters_is_not_the_step_before(way):
    torch.manual_seed(0)
    model = Parts().double()
    private = Private(model, way, lr=1.0, loss_reduction="sum")
    private.optimizer.param_groups[0]["params"] = list(model.a.parameters())
    (x,) = batches(3)
    private.backward(x, use="ab")
    private.optimizer.step()
    model.zero_grad()  # the model's: clipped sums are the optimizer's to clear
    before = copy.deepcopy(model.state_dict())
    private.backward(x, use="b")
    private.optimizer.step()
    assert_close(dict(model.state_dict()), before, 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_freezing_is_followed_at_every_call(way):
    torch.manual_seed(0)
    model = Parts().double()
    private = Private(model, way, clip=0.5)
    (x,) = batches(3)
    for frozen, free in [("a", "b"), ("b", "a"), ("a", "b")]:
        model.get_submodule(frozen).requires_grad_(False)
        model.get_submodule(free).requires_grad_(True)
        assert_close(private.batch(x), loop(model, x), 1e-10)


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("way", BOTH)
def test_step_without_backward_and_a_second_step_are_refused(way):
    model = small()
    private = Private(model, way, lr=1.0)
    with pytest.raises(ValueError, match="no backward"):
        private.optimizer.step()
    (x,) = batches(3)
    private.backward(x)
    private.optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no backward"):
        private.optimizer.step()
    assert_close(dict(model.state_dict()), before, 0.0)


def test_the_same_forward_cannot_be_counted_twice():
    private = Private(small(), "bk")
    x, y = batches(3, 2)
    loss = per_sample_loss(private.run(x)).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(PerSampleGradientError, match="two backward"):
        loss.backward()
    private.optimizer.zero_grad(set_to_none=True)
    assert_close(private.batch(y), loop(private.model, y, 1.0), 1e-10)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later"])
def test_after_a_backward_that_failed_half_way_the_next_is_whole(first, way):
    model = small()
    private = Private(model, way, clip=0.5)
    x, y = batches(3, 2)
    if not first:
        private.batch(y)
    output = private.run(x)
    handle = model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    output = private.run(x)
    with pytest.raises(ZeroDivisionError):
        private.backward_of(per_sample_loss(output))
    handle.remove()
    with pytest.raises(ValueError, match="no backward"):
        private.optimizer.step()
    assert_close(private.batch(x), loop(model, x), 1e-10)


class Penalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.used = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, functional=True):
        h = nn.functional.linear(x, self.inside.weight) if functional else self.inside(x)
        return self.used(torch.tanh(h))


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later"])
def test_a_weight_used_outside_its_layer_is_refused_by_name(first, way):
    torch.manual_seed(0)
    private = Private(Penalised().double(), way)
    (x,) = batches(3)
    if not first:
        private.batch(x, functional=False)
    with pytest.raises(PerSampleGradientError, match=r"inside\.weight"):
        private.backward(x)
    with pytest.raises(ValueError, match="no backward"):
        private.optimizer.step()


@pytest.mark.parametrize("first", [True, False], ids=["first batch", "later"])
def test_a_penalty_on_weights_in_the_loss_is_refused_by_name(first):
    torch.manual_seed(0)
    private = Private(small(), "bk")
    (x,) = batches(3)
    if not first:
        private.batch(x)
    loss = per_sample_loss(private.run(x)).mean() + private.model[0].weight.square().sum()
    with pytest.raises(PerSampleGradientError, match=r"0\.weight"):
        loss.backward()


@pytest.mark.parametrize("way", BOTH)
def test_a_new_clipping_norm_waits_for_the_step(way):
    """Sums are clipped in the backward: noise for another norm would be too little."""
    private = Private(small(), way, clip=5.0)
    (x,) = batches(3)
    private.backward(x)
    with pytest.raises(ValueError, match="max_grad_norm"):
        private.optimizer.max_grad_norm = 1.0
    private.optimizer.step()
    private.optimizer.max_grad_norm = 1.0


@pytest.mark.parametrize("way", BOTH)
def test_sample_weights_of_a_wrong_length_are_refused(way):
    private = Private(small(), way)
    (x,) = batches(3)
    private.optimizer.set_sample_weights(torch.ones(1))
    with pytest.raises(ValueError, match="3 samples"):
        private.backward(x)
    with pytest.raises(ValueError, match="no backward"):
        private.optimizer.step()


# ------------------------------------------------------------------------------ odd samples, scaled losses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [small, lambda: wide(), lambda: models.convolutional().double()])
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e300])
def test_a_sample_that_is_not_finite_contributes_zero_and_is_counted(bad, make, way):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(4, *((2, 4, 4) if isinstance(model[0], nn.Conv2d) else (4,)), dtype=torch.float64)
    want = loop(model, x[[0, 1, 3]])
    private = Private(model, way, clip=0.5, loss_reduction="sum")
    for count in (1, 2):
        with_bad = x.clone()
        with_bad[2] = bad
        losses = per_sample_loss(private.run(with_bad)) * torch.tensor([1, 1, bad, 1], dtype=torch.float64)
        private.backward_of(losses)
        assert_close(private.sums(), want, 1e-10)
        assert private.optimizer.nonfinite_samples == count
        private.optimizer.zero_grad(set_to_none=True)


def wide() -> nn.Module:
    """Weights large enough for activations and backprops to be kept."""
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 31), nn.ReLU(), nn.Linear(31, 2)).double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1024.0, 2.0**-10])
def test_a_constant_loss_scale_is_taken_out_before_clipping(scale, way):
    model = small()
    (x,) = batches(4)
    clip = norms_of(expected(model, (x,), {}, 4)).median().item()
    private = Private(model, way, clip=clip, loss_scale=scale)
    for _ in range(2):
        assert_close(private.batch(x, scale=scale), loop(model, x, clip), 1e-10)


# --------------------------------------------------------------------- copies, checkpoints, and other owners


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimizer_refuses_until_it_is_given_a_book(how, way):
    private = Private(small(), way, clip=0.5)
    (x,) = batches(3)
    private.backward(x)
    if how == "deepcopy":
        module, optimizer = copy.deepcopy((private.module, private.optimizer))
    else:
        optimizer = pickle.loads(pickle.dumps(private.optimizer))
        module = None
    assert optimizer.max_grad_norm == 0.5
    with pytest.raises(PerSampleGradientError, match="attach_book"):
        optimizer.step()
    # the original is untouched
    assert_close(private.sums(), loop(private.model, x), 1e-10)
    if module is None:
        return
    optimizer.attach_book(module.policy)
    optimizer.zero_grad(set_to_none=True)
    for p in optimizer.params:
        assert not any(p is q for q in private.model.parameters())
    losses = per_sample_loss(module(x))
    private.module, private.optimizer, private.model = module, optimizer, module._module
    private.backward_of(losses)
    assert_close(private.sums(), loop(private.model, x), 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_module_keeps_the_modes_options(way):
    private = Private(small(), way)
    clone = copy.deepcopy(private.module)
    for name in private.module.MODE_OPTIONS:
        assert getattr(clone, name) == getattr(private.module, name)
    assert clone.policy is not private.module.policy
    assert clone.policy.root is clone._module


@pytest.mark.parametrize("way", BOTH)
def test_state_dicts_are_those_of_the_inner_optimizer_and_the_model(way):
    model = small()
    private = Private(model, way, sigma=1.0, lr=0.1)
    private.optimizer.original_optimizer.param_groups[0]["momentum"] = 0.9
    (x,) = batches(3)
    private.backward(x)
    private.optimizer.step()
    other = Private(small(), way, lr=0.5)
    file = io.BytesIO()
    torch.save({"m": private.module.state_dict(), "o": private.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.module.load_state_dict(saved["m"])
    other.optimizer.load_state_dict(saved["o"])
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    ours, theirs = private.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[k]["momentum_buffer"], theirs[k]["momentum_buffer"]) for k in ours)
    assert_close(dict(other.model.state_dict()), dict(model.state_dict()), 0.0)


@pytest.mark.parametrize("way", BOTH)
def test_of_two_optimizers_only_the_one_attached_last_gets_sums(way):
    model = small()
    first = Private(model, way, clip=0.5)
    (x,) = batches(3)
    second = type(first.optimizer)(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=2.0,
        expected_batch_size=1,
    )
    second.attach_book(first.module.policy)
    if way == "ghost":  # the wrapped loss says whose it is
        assert_close(first.batch(x), loop(model, x, 0.5), 1e-10)
        with pytest.raises(PerSampleGradientError, match="with another optimizer"):
            second.step()
    else:
        first.backward(x)
        with pytest.raises(PerSampleGradientError, match="with another optimizer"):
            first.optimizer.step()
        second.clip_and_accumulate()
        found = {name: p.summed_grad for name, p in model.named_parameters()}
        assert_close(found, loop(model, x, 2.0), 1e-10)


@pytest.mark.parametrize("way", BOTH)
def test_a_stranger_among_the_parameters_makes_step_raise(way):
    private = Private(small(), way, lr=1.0)
    stranger = nn.Parameter(torch.ones(2))
    private.optimizer.add_param_group({"params": [stranger]})
    private.backward(batches(3)[0])
    with pytest.raises(PerSampleGradientError, match="group 1"):
        private.optimizer.step()


@pytest.mark.parametrize("way", BOTH)
def test_checkpoints_continue_bit_for_bit(way, tmp_path):
    def build():
        torch.manual_seed(0)
        model = small()
        data = TensorDataset(torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,)))
        engine = PrivacyEngine(accountant="rdp")
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=0.3,
            grad_sample_mode=way,
        )
        return engine, made[0], made[1], made[2] if way == "ghost" else nn.CrossEntropyLoss(), made[-1]

    def epoch(made):
        for x, y in made[4]:
            made[2].zero_grad()
            made[3](made[1](x), y).backward()
            made[2].step()

    whole, resumed = build(), build()
    torch.manual_seed(7)
    epoch(whole)
    whole[0].save_checkpoint(path=tmp_path / "c.pt", module=whole[1], optimizer=whole[2])
    epoch(whole)
    torch.manual_seed(99)
    resumed[0].load_checkpoint(path=tmp_path / "c.pt", module=resumed[1], optimizer=resumed[2])
    epoch(resumed)
    assert_close(dict(resumed[1].state_dict()), dict(whole[1].state_dict()), 0.0)


def test_mode_hooks_of_the_same_seed_makes_the_same_updates():
    """I2: the noise is drawn for the same parameters in the same order."""
    ends = {}
    for mode in ("hooks", "bk", "ghost"):
        torch.manual_seed(0)
        model = small().float()
        data = TensorDataset(torch.randn(20, 4), torch.randint(3, (20,)))
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(data, batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=0.3,
            noise_generator=torch.Generator().manual_seed(5),
            grad_sample_mode=mode,
        )
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        torch.manual_seed(3)
        for x, y in made[-1]:
            made[1].zero_grad()
            criterion(made[0](x), y).backward()
            made[1].step()
        ends[mode] = dict(model.state_dict())
    assert_close(ends["bk"], ends["hooks"], 2e-5)
    assert_close(ends["ghost"], ends["hooks"], 2e-5)


@pytest.mark.parametrize("way", BOTH)
def test_nothing_of_a_model_outlives_it(way):
    private = Private(small(), way)
    private.batch(batches(3)[0])
    model = weakref.ref(private.model)
    del private
    gc.collect()
    assert model() is None


def test_hooks_and_bk_hold_the_same_sums():
    model = small()
    x, y = batches(3, 4)
    private = Private(copy.deepcopy(model), "bk", clip=0.5)
    wrapped = GradSampleModule(model)
    from opacus.optimizers import DPOptimizer

    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=1,
    )
    for one in (x, y):
        per_sample_loss(wrapped(one)).mean().backward()
        optimizer.clip_and_accumulate()
        found = {name: p.summed_grad.clone() for name, p in model.named_parameters()}
        assert_close(private.batch(one), found, 1e-12)
        optimizer.zero_grad()
