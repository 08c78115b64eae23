"""Torch works on emulated devices as on the CPU, and CPU work is untouched: the canary for new torch versions."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from opacus.testing.emulated_devices import count_copies, install
from opacus.testing.emulated_devices.support import OLDEST_TORCH

if torch.cuda.device_count():
    pytest.skip("emulated devices do not share a process with CUDA devices", allow_module_level=True)
if [int(part) for part in torch.__version__.split(".")[:2]] < [int(part) for part in OLDEST_TORCH.split(".")]:
    pytest.skip(f"emulated devices need torch {OLDEST_TORCH}", allow_module_level=True)

# On any newer torch this either works or fails loudly, naming what is missing.
DEVICES = install(4)
CPU = torch.device("cpu")


class Pipe(nn.Module):
    """Four layers spread over `devices`, activations moved by hand."""

    def __init__(self, devices, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.places = [devices[i * len(devices) // 4] for i in range(4)]
        for layer, device in zip(self.layers, self.places, strict=True):
            layer.to(device)

    def forward(self, x):
        for layer, device in zip(self.layers, self.places, strict=True):
            x = torch.tanh(layer(x.to(device)))
        return x


# ---------------------------------------------------------------------------------------------- tensors


def test_tensors_move_between_devices_and_stay_plain_tensors():
    x = torch.randn(2, 3)
    y = x.to("emu:1")
    assert type(y) is torch.Tensor
    assert y.device == DEVICES[1]
    assert (y.get_device(), y.is_cpu, y.is_emu) == (1, False, True)
    assert y.to("emu:1") is y
    assert y.emu(3).device == DEVICES[3]
    assert torch.equal(y.to("emu:2").cpu(), x)
    assert "emu:1" in repr(y)
    with pytest.raises(TypeError):
        y.numpy()


@pytest.mark.parametrize("factory", [torch.randn, torch.rand, torch.zeros, torch.ones, torch.empty])
def test_factories_make_tensors_on_the_device_asked_for(factory):
    assert factory(2, 3, device="emu:2").device == DEVICES[2]
    assert factory(2, device="emu").device == DEVICES[0]
    with DEVICES[1]:
        assert factory(2).device == DEVICES[1]
    with torch.get_device_module("emu").device(3):
        assert factory(2, device="emu").device == DEVICES[3]


def test_a_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match=r"emu.*9"):
        torch.zeros(1, device="emu:9")
    with pytest.raises(RuntimeError, match="ordinal 9"):
        torch.Generator(device="emu:9")


def test_the_backend_module_is_found_by_device():
    module = torch.get_device_module("emu:0")
    assert module is torch.emu
    assert module.device_count() >= 4  # another test may have asked for more
    assert (module.current_device(), module.is_available()) == (0, True)
    assert torch.accelerator.is_available()


def test_views_share_memory_and_version_counters():
    a = torch.zeros(4, 4, device="emu:1")
    view = a[1:3, ::2]
    view.add_(1)
    view.t()[0].mul_(3)
    assert a.sum().item() == 8
    assert view._base is a
    assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
    assert view.data_ptr() == a.data_ptr() + 4 * a.element_size()

    y = torch.ones(3, device="emu:1", requires_grad=True) * 2
    z = y.pow(2)
    y.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        z.sum().backward()


def test_empty_outputs_are_resized_and_full_ones_written():
    a = torch.arange(16.0, device="emu:1").view(4, 4)
    out = torch.empty(0, device="emu:1")
    torch.add(a, 1, out=out)
    assert torch.equal(out.cpu(), torch.arange(1.0, 17.0).view(4, 4))
    address = out.data_ptr()
    torch.add(a, 2, out=out)
    assert out.data_ptr() == address
    assert out[0, 0].item() == 2
    out.resize_(8, 8)
    assert (out.shape, out.device, out[0, 1].item()) == ((8, 8), DEVICES[1], 3)


def test_foreach_ops_work_on_lists_of_one_device_and_of_several():
    lists = [[torch.full((2,), float(i), device=d) for i, d in enumerate(DEVICES[:n])] for n in (1, 3)]
    for tensors in lists:
        devices = [t.device for t in tensors]
        assert [t.device for t in torch._foreach_norm(tensors)] == devices
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_add_(tensors, [torch.ones(2, device=d) for d in devices])
        assert [t[0].item() for t in tensors] == [2 * i + 1 for i in range(len(tensors))]


def test_bfloat16_ops_give_the_cpu_results():
    x = torch.randn(5, 8, dtype=torch.bfloat16)
    w = torch.randn(3, 8, dtype=torch.bfloat16)
    on_cpu, on_emu = (functional.linear(x.to(d), w.to(d)).softmax(-1) for d in (CPU, DEVICES[1]))
    assert on_emu.dtype == torch.bfloat16
    assert torch.equal(on_cpu, on_emu.cpu())


def test_shapes_that_depend_on_values_are_right():
    x = torch.tensor([3.0, 0.0, 3.0, 1.0], device="emu:1")
    assert x.nonzero().flatten().tolist() == [0, 2, 3]
    assert x[x > 1].tolist() == [3.0, 3.0]
    assert x.unique().tolist() == [0.0, 1.0, 3.0]
    assert (x % 3).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert x.topk(2)[1].device == DEVICES[1]
    assert torch.linalg.svd(torch.eye(3, device="emu:1"))[1].tolist() == [1.0, 1.0, 1.0]


# --------------------------------------------------------------------------------------------- generators


def test_same_seed_gives_the_numbers_of_the_cpu_generator():
    emulated = torch.Generator(device="emu:1").manual_seed(5)
    cpu = torch.Generator().manual_seed(5)
    assert isinstance(emulated, torch.Generator)
    assert emulated.device == DEVICES[1]
    for _ in range(3):
        drawn = torch.normal(0.0, 2.0, (4, 5), device="emu:1", generator=emulated)
        assert torch.equal(drawn.cpu(), torch.normal(0.0, 2.0, (4, 5), generator=cpu))


@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
@pytest.mark.parametrize("of", ["cpu", "emu:1"])
def test_generator_of_another_device_is_refused(draw, of):
    with pytest.raises(RuntimeError, match="generator"):
        draw(3, device="emu:0", generator=torch.Generator(device=of))


def test_handing_the_state_from_device_to_device_equals_drawing_all_on_one():
    single = torch.Generator(device="emu:0").manual_seed(11)
    expected = [torch.randn(7, device="emu:0", generator=single).cpu() for _ in range(6)]

    streams = [torch.Generator(device=device) for device in DEVICES]
    streams[0].manual_seed(11)
    state = streams[0].get_state()
    for turn, values in enumerate(expected):
        stream = streams[turn % 4]
        stream.set_state(state)
        drawn = torch.randn(7, device=stream.device, generator=stream)
        state = stream.get_state()
        assert torch.equal(drawn.cpu(), values)
    assert torch.equal(state, single.get_state())


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda stream: pickle.loads(pickle.dumps(stream)),
        lambda stream: stream.clone_state(),
    ],
    ids=["copy", "deepcopy", "pickle", "clone_state"],
)
@pytest.mark.parametrize("device", ["cpu", "emu:2"])
def test_copies_of_a_generator_keep_device_and_position(duplicate, device):
    stream = torch.Generator(device=device).manual_seed(3)
    torch.randn(5, device=device, generator=stream)
    twin = duplicate(stream)
    assert twin is not stream
    assert (type(twin), twin.device) == (type(stream), stream.device)
    assert twin.initial_seed() == 3
    for _ in range(2):
        assert torch.equal(*(torch.randn(3, device=device, generator=g) for g in (stream, twin)))


def test_cpu_generators_are_torchs_own():
    stream = torch.Generator()
    assert type(stream) is torch._C.Generator
    assert stream.device == CPU
    assert isinstance(torch.default_generator, torch.Generator)
    assert b"opacus" not in pickle.dumps(stream)

    class Named(torch.Generator):
        pass

    assert type(Named()) is Named
    assert isinstance(Named(), torch.Generator)
    assert not isinstance(stream, Named)


def test_each_device_has_a_default_stream_seeded_by_manual_seed():
    torch.manual_seed(0)
    first = torch.randn(3, device="emu:1")
    torch.randn(9, device="emu:0")
    torch.randn(2)
    second = torch.randn(3, device="emu:1")
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(3, device="emu:1"))
    assert torch.equal(second, torch.randn(3, device="emu:1"))


def test_dropout_draws_from_its_devices_stream_and_leaves_the_cpu_stream_alone():
    torch.manual_seed(0)
    cpu_state = torch.default_generator.get_state()
    masks = [functional.dropout(torch.ones(1000, device="emu:1")) for _ in range(2)]
    assert torch.equal(cpu_state, torch.default_generator.get_state())
    assert not torch.equal(*masks)
    torch.emu.manual_seed_all(0)
    assert torch.equal(masks[0], functional.dropout(torch.ones(1000, device="emu:1")))


# ----------------------------------------------------------------------------------------------- autograd


def test_gradients_across_devices_equal_the_cpu_gradients():
    reference, model, x = Pipe([CPU] * 4), Pipe(DEVICES), torch.randn(5, 8)
    model(x.to(DEVICES[0])).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad.device == p.device
        torch.testing.assert_close(p.grad.cpu(), q.grad)


def test_a_pipeline_copies_each_activation_once_and_each_gradient_once():
    model, x = Pipe(DEVICES), torch.randn(5, 8)
    with count_copies() as seen:
        model(x.to(DEVICES[0])).pow(2).mean().backward()
    assert seen.shapes("cross") == [(5, 8)] * (2 * 3)
    assert (seen.h2d, seen.d2h, seen.sync, seen.implicit) == (1, 0, 0, 0)


def test_hooks_run_on_the_device_of_their_layer():
    model, log = Pipe(DEVICES[:2]), []
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda m, x, out, i=i: log.append(("forward", i, out.device)))
        layer.register_full_backward_hook(lambda m, gx, g, i=i: log.append(("backward", i, g[0].device)))
        layer.weight.register_hook(lambda g, i=i: log.append(("tensor", i, g.device)))
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: log.append(("accumulated", i, p.grad.device))
        )
    model(torch.randn(3, 8, device="emu:0", requires_grad=True)).sum().backward()
    places = [DEVICES[0], DEVICES[0], DEVICES[1], DEVICES[1]]
    for kind in ("forward", "backward", "tensor", "accumulated"):
        assert sorted(entry[1:] for entry in log if entry[0] == kind) == sorted(enumerate(places)), kind


def test_a_callback_queued_in_a_backward_hook_runs_once_after_the_last_gradient():
    model, order = Pipe(DEVICES), []
    for i, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda p, i=i: order.append(i))
    queue = torch.autograd.Variable._execution_engine.queue_callback
    out = model(torch.randn(2, 8, device="emu:0"))
    out.register_hook(lambda g: queue(lambda: order.append("end")))
    out.sum().backward()
    assert order == [3, 2, 1, 0, "end"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    plain, checked = Pipe(DEVICES), Pipe(DEVICES)
    x = torch.randn(2, 8, device="emu:0", requires_grad=True)
    plain(x).sum().backward()
    checkpoint(checked, x, use_reentrant=use_reentrant).sum().backward()
    for p, q in zip(plain.parameters(), checked.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_custom_functions_and_double_backward_across_devices():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return (a * 2).to("emu:3")

        @staticmethod
        def backward(ctx, g):
            assert g.device == DEVICES[3]
            return (g * 2).to("emu:0")

    x = torch.randn(4, device="emu:0", requires_grad=True)
    (g,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert torch.equal(g, torch.full_like(x, 2.0))
    (slope,) = torch.autograd.grad((x**3).to("emu:2").sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(curvature, 6 * x)


def test_several_threads_run_backward_at_once():
    grads, errors = [], []

    def work():
        try:
            model = Pipe(DEVICES)
            model(torch.ones(2, 8, device="emu:0")).sum().backward()
            grads.append(model.layers[0].weight.grad.cpu())
        except Exception as error:
            errors.append(error)

    torch.manual_seed(0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(grads) == 4


def test_vmap_of_grad_equals_the_cpu_result():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    x, target = torch.randn(4, 1, 6, 6), torch.randint(3, (4,))
    results = []
    for device in (CPU, DEVICES[1]):
        placed = copy.deepcopy(model).to(device)

        def loss(parameters, x, target, placed=placed):
            out = torch.func.functional_call(placed, parameters, (x[None],))
            return functional.cross_entropy(out, target[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        parameters = {name: p.detach() for name, p in placed.named_parameters()}
        results.append(per_sample(parameters, x.to(device), target.to(device)))
    for name, expected in results[0].items():
        assert results[1][name].device == DEVICES[1]
        torch.testing.assert_close(results[1][name].cpu(), expected)


def test_ops_leave_no_reference_cycles():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(3, 3, device="emu:1")
        y = (x @ x + x).sum().to("emu:0")
        alive = weakref.ref(x), weakref.ref(y)
        del x, y
        assert [reference() for reference in alive] == [None, None]
        w = torch.randn(3, device="emu:1", requires_grad=True)
        (w * 2).sum().backward()
        assert w._use_count() == 1
    finally:
        gc.enable()


# --------------------------------------------------------------------------------- modules and optimizers


def _case(name, make, *shape, vocabulary=0):
    return pytest.param(make, shape, vocabulary, id=name)


MODULES = [
    _case("linear", lambda: nn.Linear(4, 5), 3, 4),
    _case("embedding", lambda: nn.Embedding(7, 4), 3, 4, vocabulary=7),
    _case("embedding_bag", lambda: nn.EmbeddingBag(7, 4), 3, 4, vocabulary=7),
    _case("layernorm", lambda: nn.LayerNorm(4), 3, 4),
    _case("rmsnorm", lambda: nn.RMSNorm(4), 3, 4),
    _case("groupnorm", lambda: nn.GroupNorm(2, 4), 3, 4, 5),
    _case("instancenorm", lambda: nn.InstanceNorm2d(4, affine=True), 3, 4, 5, 5),
    _case("batchnorm", lambda: nn.BatchNorm2d(4), 3, 4, 5, 5),
    _case("conv1d", lambda: nn.Conv1d(4, 6, 3, padding=1), 2, 4, 5),
    _case("conv2d", lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), 2, 4, 7, 7),
    _case("conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 2, 4, 4, 4),
    _case("conv_transposed", lambda: nn.ConvTranspose2d(4, 6, 3), 2, 4, 5, 5),
    _case("maxpool", lambda: nn.MaxPool2d(2), 2, 3, 6, 6),
    _case("avgpool", lambda: nn.AdaptiveAvgPool2d(2), 2, 3, 6, 6),
    _case("attention", lambda: nn.MultiheadAttention(4, 2, batch_first=True), 3, 5, 4),
    _case("transformer", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 3, 5, 4),
    _case("gru", lambda: nn.GRU(4, 5, batch_first=True), 3, 6, 4),
    _case("lstm", lambda: nn.LSTM(4, 5, batch_first=True), 3, 6, 4),
    _case("rnn", lambda: nn.RNN(4, 5), 3, 6, 4),
    _case("activations", lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.PReLU(), nn.Softmax(-1)), 3, 4),
    _case("upsample", lambda: nn.Upsample(scale_factor=2, mode="bilinear"), 1, 2, 3, 3),
    _case("unfold", lambda: nn.Unfold(2), 2, 3, 5, 5),
]


@pytest.mark.parametrize(("make", "shape", "vocabulary"), MODULES)
def test_modules_equal_the_cpu_forward_and_backward(make, shape, vocabulary):
    torch.manual_seed(0)
    reference = make()
    x = torch.randint(vocabulary, shape) if vocabulary else torch.randn(shape)
    seen = []
    for device in (CPU, DEVICES[1]):
        module = copy.deepcopy(reference).to(device)
        inputs = x.to(device).detach().clone().requires_grad_(not vocabulary)
        out = module(inputs, inputs, inputs) if isinstance(module, nn.MultiheadAttention) else module(inputs)
        out = out[0] if isinstance(out, tuple) else out
        assert out.device == device
        weights = torch.linspace(0, 1, out.numel(), device=device).view(out.shape)
        (out * weights).sum().backward()
        tensors = [out, *module.buffers(), *(p.grad for p in module.parameters())]
        tensors += [] if vocabulary else [inputs.grad]
        assert {t.device for t in tensors} == {device}
        seen.append([t.detach().cpu() for t in tensors])
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (functional.cross_entropy, torch.tensor([0, 2, 1, 1, 0])),
        (functional.mse_loss, torch.linspace(0, 1, 15).view(5, 3)),
        (functional.smooth_l1_loss, torch.linspace(0, 1, 15).view(5, 3)),
        (functional.binary_cross_entropy_with_logits, torch.linspace(0, 1, 15).view(5, 3)),
        (
            lambda x, t: functional.scaled_dot_product_attention(x, x, t, is_causal=True).sum(),
            torch.eye(5, 3),
        ),
    ],
    ids=["cross_entropy", "mse", "smooth_l1", "bce", "attention"],
)
def test_losses_equal_the_cpu_values_and_gradients(loss, target):
    x = torch.randn(5, 3)
    seen = []
    for device in (CPU, DEVICES[1]):
        leaf = x.to(device).detach().clone().requires_grad_()
        value = loss(leaf, target.to(device))
        value.backward()
        seen.append([value.detach().cpu(), leaf.grad.cpu()])
    torch.testing.assert_close(seen[1], seen[0])


def test_moving_a_module_keeps_its_parameters_their_attributes_and_gradients():
    layer = nn.Linear(3, 3)
    weight = layer.weight
    weight.tag = 7
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(torch.randn(2, 3)).sum().backward()
    grad, before = weight.grad.clone(), weight.detach().clone()

    layer.to("emu:1")
    assert layer.weight is weight
    assert (type(weight), weight.tag, weight.device) == (nn.Parameter, 7, DEVICES[1])
    assert weight.grad.device == DEVICES[1]
    assert torch.equal(weight.grad.cpu(), grad)
    optimizer.step()
    torch.testing.assert_close(weight.detach().cpu(), before - 0.1 * grad)

    for device in (DEVICES[2], CPU, DEVICES[0]):
        layer.to(device)
        assert layer.weight is weight
        assert (weight.device, weight.tag) == (device, 7)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "adam_loop": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_the_cpu_and_keep_state_on_each_parameters_device(name):
    final = []
    for devices in ([CPU] * 4, DEVICES):
        model = Pipe(devices)
        optimizer = OPTIMIZERS[name](model.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 8).to(devices[0])).pow(2).mean().backward()
            optimizer.step()
        restored = OPTIMIZERS[name](model.parameters())
        restored.load_state_dict(optimizer.state_dict())
        for p, state in restored.state.items():
            assert {v.device for k, v in state.items() if k != "step"} == {p.device}
        final.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(final[1], final[0])


def test_gradient_norms_over_devices_are_gathered_on_the_first():
    parameters = [nn.Parameter(torch.ones(2, device=device)) for device in DEVICES]
    for p in parameters:
        p.grad = torch.ones(2, device=p.device)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    assert (norm.device, norm.item()) == (DEVICES[0], pytest.approx(8**0.5))
    with pytest.raises(RuntimeError):
        parameters[0].grad = torch.ones(2, device="emu:1")


def test_deepcopy_save_and_load_keep_devices_and_values():
    model = Pipe(DEVICES[:2])
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    for loaded, devices in (
        (dict(copy.deepcopy(model).named_parameters()), None),
        (torch.load(io.BytesIO(saved.getvalue())), None),
        (torch.load(io.BytesIO(saved.getvalue()), map_location="cpu"), {CPU}),
    ):
        for name, p in model.named_parameters():
            assert torch.equal(loaded[name].cpu(), p.detach().cpu())
            assert loaded[name].device in (devices or {p.device})


# ----------------------------------------------------------------------------------------------- CPU work


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders_still_pin_shuffle_and_fork(workers):
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(
        data,
        batch_size=4,
        shuffle=True,
        pin_memory=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),
    )
    values = torch.cat([batch for (batch,) in loader])
    assert (values.device, sorted(values.tolist())) == (CPU, list(range(8)))


def test_assigning_data_on_the_cpu_is_unchanged():
    class Tagged(torch.Tensor):
        pass

    tagged = torch.ones(3).as_subclass(Tagged)
    tagged.data = torch.zeros(3)
    assert (type(tagged), type(tagged.data), tagged.tolist()) == (Tagged, Tagged, [0.0, 0.0, 0.0])
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    parameter.data = torch.zeros(3)
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(TypeError):
        parameter.data = 3


def test_cpu_ops_are_not_counted():
    with count_copies() as seen:
        layer = nn.Linear(3, 2)
        layer(torch.ones(4, 3)).sum().backward()
        assert layer.weight.grad.sum().item() == 24
    assert seen.copies == []


def test_autocast_is_accepted_and_casts_nothing():
    with torch.autocast("emu", dtype=torch.bfloat16):
        out = nn.Linear(3, 3).to("emu:1")(torch.randn(2, 3, device="emu:1"))
    assert out.dtype == torch.float32


def test_attention_takes_boolean_masks_as_the_cpu_does(two_devices):
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    mask = torch.rand(2, 1, 5, 5) < 0.6
    mask[..., 0] = True
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    there = [x.to(two_devices[1]) for x in (q, k, v, mask)]
    found = torch.nn.functional.scaled_dot_product_attention(*there[:3], attn_mask=there[3])
    torch.testing.assert_close(found.cpu(), wanted)
