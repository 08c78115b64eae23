"""What cannot be trained privately is named with its path, and replaced without losing weights, devices or ties."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from opacus.validators import ModuleValidator, register_module_fixer, register_module_validator
from opacus.validators import batch_norm as batch_norm_kind
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    NotYetSupportedModuleError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedError,
    UnsupportedModuleError,
)

BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
INSTANCE_NORMS = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]
TWINS = [
    (lambda: nn.RNN(3, 4, 2, bidirectional=True), DPRNN, (5, 2, 3)),
    (lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True), DPRNN, (2, 5, 3)),
    (lambda: nn.GRU(3, 4, 2, bias=False), DPGRU, (5, 2, 3)),
    (lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2, dropout=0.5), DPLSTM, (5, 2, 3)),
]
ATTENTIONS = [
    {},
    {"bias": False, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.1},
    {"kdim": 6, "vdim": 4},
]


def messages(model):
    return [str(error) for error in ModuleValidator.layer_errors(model)]


# --- what is refused


def test_every_problem_is_named_by_path_and_class_in_one_error():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "b": nn.LSTM(2, 2)})
    errors = ModuleValidator.layer_errors(model)
    assert [type(error) for error in errors] == [ShouldReplaceModuleError] * 2
    assert str(errors[0]).startswith("'a.1' (BatchNorm1d): ")
    assert str(errors[1]).startswith("'b' (LSTM): ")
    assert "DPLSTM" in str(errors[1])
    assert "GroupNorm" in str(errors[0])
    with pytest.raises(UnsupportedModuleError, match=r"(?s)2 modules.*'a\.1'.*'b'") as raised:
        ModuleValidator.validate(model, strict=True)
    assert [str(error) for error in raised.value.args[0]] == [str(error) for error in errors]
    assert ModuleValidator.layer_errors(model)


def test_a_refused_model_itself_is_named():
    assert messages(nn.GRU(2, 2))[0].startswith("the model itself (GRU): ")


@pytest.mark.parametrize(
    ("module", "twin"),
    [(nn.RNN(2, 2), "DPRNN"), (nn.GRU(2, 2), "DPGRU"), (nn.LSTM(2, 2), "DPLSTM"),
     (nn.MultiheadAttention(2, 1), "DPMultiheadAttention")],
)  # fmt: skip
def test_fused_layers_are_refused_by_the_name_of_their_twin_unless_frozen(module, twin):
    assert len(messages(module)) == 1
    assert twin in messages(module)[0]
    assert len(messages(module.eval())) == 1
    assert messages(module.requires_grad_(False)) == []
    next(module.parameters()).requires_grad_()
    assert len(messages(module)) == 1


def test_what_is_safe_is_accepted_in_training_and_in_evaluation():
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.Embedding(3, 2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Dropout(),
        nn.InstanceNorm2d(2, affine=True), DPLSTM(2, 2), DPGRU(2, 2), DPRNN(2, 2), DPMultiheadAttention(2, 1),
        nn.LSTMCell(2, 2),
    )  # fmt: skip
    assert not ModuleValidator.layer_errors(model)
    assert not ModuleValidator.layer_errors(model.eval())
    assert ModuleValidator.validate(model.train(), strict=True) == []
    assert ModuleValidator.is_valid(model)
    assert not ModuleValidator.is_valid(model.eval())


def test_data_parallel_is_refused_by_name_and_not_unwrapped():
    errors = ModuleValidator.validate(nn.DataParallel(nn.Linear(2, 2)))
    assert [type(error) for error in errors] == [UnsupportableModuleError]
    assert "DataParallel" in str(errors[0])
    assert ".module" in str(errors[0])
    with pytest.raises(UnsupportedModuleError, match="DataParallel"):
        ModuleValidator.fix_and_validate(nn.DataParallel(nn.Linear(2, 2)))


@pytest.mark.parametrize("kind", BATCH_NORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_is_accepted_only_where_nothing_depends_on_the_batch(
    kind, affine, track, frozen, training
):
    module = kind(4, affine=affine, track_running_stats=track).requires_grad_(not frozen).train(training)
    trainable = affine and not frozen
    assert (not ModuleValidator.layer_errors(module)) == (not trainable and not training and track)


@pytest.mark.parametrize("kind", BATCH_NORMS[:3])
def test_an_accepted_batch_norm_maps_each_sample_alone_and_stores_nothing(kind):
    module = kind(4).requires_grad_(False).eval()
    module.running_mean.normal_()
    assert not ModuleValidator.layer_errors(module)
    x = torch.randn(3, 4, *[2] * (1 + BATCH_NORMS.index(kind)))
    before = copy.deepcopy(module.state_dict())
    torch.testing.assert_close(module(x)[1:2], module(x[1:2]))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_switching_an_accepted_batch_norm_on_again_is_found_by_validate_and_by_the_guard():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).requires_grad_(False)).eval()
    assert not ModuleValidator.layer_errors(model)
    handles = batch_norm_kind.guard_frozen(model)
    x = torch.randn(3, 2)
    before = model[1].running_mean.clone()
    wanted = model(x)
    for guarded in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        guarded.train()
        assert ModuleValidator.layer_errors(guarded)
        with pytest.raises(IllegalModuleConfigurationError, match=r"'1' \(BatchNorm1d\).*eval\(\)"):
            guarded(x)
        guarded[1].eval()
        assert torch.equal(guarded(x), wanted)
    model[1].weight.requires_grad_()
    with pytest.raises(IllegalModuleConfigurationError, match="unfrozen"):
        model(x)
    assert torch.equal(model[1].running_mean, before)
    for handle in handles:
        handle.remove()
    model.train()(x)


@pytest.mark.parametrize("kind", INSTANCE_NORMS)
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_is_refused_for_running_statistics_only(kind, affine):
    tracking = kind(4, affine=affine, track_running_stats=True)
    errors = ModuleValidator.layer_errors(tracking)
    assert [type(error) for error in errors] == [IllegalModuleConfigurationError]
    assert "track_running_stats=False" in str(errors[0])
    assert not ModuleValidator.layer_errors(kind(4, affine=affine))
    assert (not ModuleValidator.layer_errors(tracking.eval())) == (not affine)
    assert not ModuleValidator.layer_errors(tracking.requires_grad_(False))


def test_subclasses_are_refused_and_not_replaced():
    class NormAndReLU(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    class Renamed(nn.LSTM):
        pass

    model = nn.Sequential(NormAndReLU(4), Renamed(2, 2))
    fixed = ModuleValidator.fix(model)
    assert [type(module) for module in fixed] == [NormAndReLU, Renamed]
    assert [text.split(":")[0] for text in messages(fixed)] == ["'0' (NormAndReLU)", "'1' (Renamed)"]


# --- what replaces it


@pytest.mark.parametrize("kind", BATCH_NORMS)
@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (4, 4), (6, 2), (32, 32), (33, 1), (48, 16), (96, 32)]
)
@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_batch_norm_becomes_a_group_norm_with_its_weight_and_bias(kind, channels, groups):
    module = kind(channels, eps=1e-3)
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    fixed = ModuleValidator.fix_and_validate(module)
    assert type(fixed) is nn.GroupNorm
    assert (fixed.num_groups, fixed.num_channels, fixed.eps) == (groups, channels, 1e-3)
    assert torch.equal(fixed.weight, module.weight)
    assert torch.equal(fixed.bias, module.bias)
    assert fixed.weight is not module.weight
    assert ModuleValidator.fix(kind(channels, affine=False)).affine is False


@pytest.mark.parametrize("kind", BATCH_NORMS[:3])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_becomes_an_instance_norm_on_request(kind, affine):
    model = nn.Sequential(kind(4, affine=affine), nn.GRU(2, 2))
    if affine:
        nn.init.normal_(model[0].weight)
    fixed = ModuleValidator.fix_and_validate(model, replace_bn_with_in=True)
    assert type(fixed[0]) is INSTANCE_NORMS[BATCH_NORMS.index(kind)]
    assert not fixed[0].track_running_stats
    assert not affine or torch.equal(fixed[0].weight, model[0].weight)
    assert type(fixed[1]) is DPGRU


def test_the_number_of_groups_may_be_chosen():
    model = nn.Sequential(nn.BatchNorm2d(16), nn.LSTM(2, 2))
    assert ModuleValidator.fix(model, num_groups=4)[0].num_groups == 4
    with pytest.raises(ValueError, match="divisible"):
        ModuleValidator.fix(model, num_groups=5)
    with pytest.raises(ValueError, match="num_groups=4"):
        ModuleValidator.fix(model, num_groups=4, replace_bn_with_in=True)


def test_sync_batch_norm_has_no_instance_norm():
    with pytest.raises(UnsupportableModuleError, match="SyncBatchNorm"):
        ModuleValidator.fix(nn.SyncBatchNorm(4), replace_bn_with_in=True)


def test_a_group_of_few_features_is_warned_about():
    with pytest.warns(UserWarning, match=r"nn\.LayerNorm\(4\)"):
        ModuleValidator.fix(nn.BatchNorm1d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModuleValidator.fix(nn.Sequential(nn.BatchNorm1d(256), nn.BatchNorm2d(4)))


@pytest.mark.parametrize("kind", INSTANCE_NORMS)
def test_instance_norm_keeps_all_but_its_statistics(kind):
    module = kind(4, affine=True, track_running_stats=True, eps=1e-3)
    nn.init.normal_(module.weight)
    fixed = ModuleValidator.fix_and_validate(module)
    assert type(fixed) is kind
    x = torch.randn(3, 4, *[2] * (1 + INSTANCE_NORMS.index(kind)))
    torch.testing.assert_close(fixed(x), module(x))
    assert fixed.running_mean is None


@pytest.mark.parametrize(("make", "twin", "shape"), TWINS)
def test_recurrent_layers_become_their_twin_and_compute_the_same(make, twin, shape):
    module = make().double()
    fixed = ModuleValidator.fix_and_validate(module)
    assert type(fixed) is twin
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(fixed.eval()(x), module.eval()(x))
    assert fixed.dropout == module.dropout
    assert all(torch.equal(a, b) and a is not b
               for a, b in zip(fixed.parameters(), module.parameters(), strict=True))  # fmt: skip


@pytest.mark.parametrize("flags", ATTENTIONS, ids=str)
def test_attention_becomes_its_twin_and_computes_the_same(flags):
    module = nn.MultiheadAttention(6, 2, **flags).double()
    fixed = ModuleValidator.fix_and_validate(module)
    assert type(fixed) is DPMultiheadAttention
    x = [torch.randn(3, 3, size, dtype=torch.float64) for size in (6, module.kdim, module.vdim)]
    torch.testing.assert_close(fixed.eval()(*x), module.eval()(*x))
    assert fixed.dropout.p == module.dropout


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_dtype_device_and_requires_grad_are_kept(training):
    model = nn.Sequential(
        nn.BatchNorm2d(8), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2, add_bias_kv=True),
        nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
    )  # fmt: skip
    model = model.to(torch.bfloat16).train(training)
    model[0].weight.requires_grad_(False)
    model[1].bias_hh_l0.requires_grad_(False)
    model[2].in_proj_weight.requires_grad_(False)
    model[2].bias_v.requires_grad_(False)
    for place in ("cpu", "meta"):
        fixed = ModuleValidator.fix(model.to(place))
        assert all(module.training == training for module in fixed.modules())
        assert {(p.dtype, p.device.type) for p in fixed.parameters()} == {(torch.bfloat16, place)}
        frozen = {name for name, p in fixed.named_parameters() if not p.requires_grad}
        assert frozen == {
            "0.weight", "1.bias_hh_l0", "2.qlinear.weight", "2.klinear.weight", "2.vlinear.weight", "2.seq_bias_v.bias"
        }  # fmt: skip


def test_fixing_leaves_the_original_and_the_random_stream_as_they_were():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2))
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    fixed = ModuleValidator.fix(model)
    assert torch.equal(torch.get_rng_state(), stream)
    for parameter in fixed.parameters():
        nn.init.zeros_(parameter)
    assert [type(module) for module in model] == [nn.BatchNorm2d, nn.LSTM, nn.MultiheadAttention]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shared_modules_and_tied_parameters_stay_one():
    shared = nn.GRU(2, 2)
    tied = nn.GRU(2, 2)
    tied.weight_hh_l0 = shared.weight_hh_l0
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, tied])})
    fixed = ModuleValidator.fix_and_validate(model)
    assert fixed["a"] is fixed["b"][0]
    assert fixed["b"][1].weight_hh_l0 is fixed["a"].weight_hh_l0
    assert fixed["b"][1].l0.hh.weight is fixed["a"].l0.hh.weight


def test_nested_containers_are_fixed_and_paths_are_kept():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleDict({"norm": nn.BatchNorm2d(16), "none": nn.Identity()})
            self.nothing = None
            self.register_module("unused", None)

    model = nn.Sequential(nn.ModuleList([Block()]), nn.Sequential(nn.Sequential(nn.RNN(2, 2))))
    fixed = ModuleValidator.fix_and_validate(model)
    assert [name for name, _ in fixed.named_modules() if "." in name][:3] == [
        "0.0",
        "0.0.norms",
        "0.0.norms.norm",
    ]
    assert type(fixed.get_submodule("0.0.norms.norm")) is nn.GroupNorm
    assert type(fixed.get_submodule("1.0.0")) is DPRNN


def test_what_is_valid_already_is_copied_unchanged():
    model = nn.Sequential(nn.BatchNorm2d(4).requires_grad_(False).eval(), nn.LSTM(2, 2).requires_grad_(False))
    fixed = ModuleValidator.fix_and_validate(model)
    assert [type(module) for module in fixed] == [nn.BatchNorm2d, nn.LSTM]
    assert fixed[0] is not model[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:.*nested.tensor")
def test_a_fixed_transformer_computes_the_same_in_training_and_evaluation(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).double()
    fixed = ModuleValidator.fix_and_validate(model)
    x = torch.randn(3, 3, 6, dtype=torch.float64)
    padding = torch.tensor([[False, False, True], [False] * 3, [False] * 3])
    seen = ~(padding if batch_first else padding.T)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            results = [m.train(training)(x, src_key_padding_mask=padding)[seen] for m in (fixed, model)]
        torch.testing.assert_close(*results)
    model.load_state_dict(fixed.state_dict())


# --- registering further kinds


def test_every_replaced_class_has_entries_of_its_own():
    replaced = {*BATCH_NORMS, *INSTANCE_NORMS, nn.RNN, nn.GRU, nn.LSTM, nn.MultiheadAttention}
    assert replaced <= set(ModuleValidator.VALIDATORS)
    assert replaced <= set(ModuleValidator.FIXERS)


@pytest.fixture
def validator_class():
    class Own(ModuleValidator):
        VALIDATORS = {}  # noqa: RUF012
        FIXERS = {}  # noqa: RUF012

    return Own


class Noisy(nn.Module):
    pass


class Noisier(Noisy):
    pass


def test_registered_functions_decide_for_their_classes(validator_class):
    @register_module_validator([Noisy, nn.ReLU], validator_class)
    def refuse(module):
        return [NotYetSupportedModuleError("first"), UnsupportedModuleError("second")]

    @register_module_fixer(Noisy, validator_class)
    def replace(module, size=1):
        return nn.Linear(size, size)

    assert {Noisy: refuse, nn.ReLU: refuse} == validator_class.VALIDATORS
    assert {Noisy: replace} == validator_class.FIXERS
    assert refuse.__name__ == "refuse"
    model = nn.Sequential(Noisy(), Noisier(), nn.ReLU(), nn.BatchNorm1d(2))
    found = [str(error) for error in validator_class.validate(model)]
    assert found[:2] == ["'0' (Noisy): first", "'0' (Noisy): second"]
    assert len(found) == 6
    fixed = validator_class.fix(model, size=3, unrelated=True)
    assert fixed[0].in_features == 3
    assert type(fixed[1]) is Noisier
    assert Noisy not in ModuleValidator.VALIDATORS


def test_a_subclass_with_an_entry_of_its_own_is_judged_by_it(validator_class):
    register_module_validator(Noisy, validator_class)(lambda module: [UnsupportedModuleError("no")])
    register_module_validator(Noisier, validator_class)(lambda module: [])
    assert not validator_class.is_valid(Noisy())
    assert validator_class.is_valid(Noisier())


def test_a_fixer_without_a_validator_is_applied(validator_class):
    register_module_fixer(Noisy, validator_class)(lambda module: nn.Identity())
    assert type(validator_class.fix(nn.Sequential(Noisy()))[0]) is nn.Identity


def test_errors_are_value_errors_with_one_message_or_a_list():
    for kind in (IllegalModuleConfigurationError, NotYetSupportedModuleError, ShouldReplaceModuleError,
                 UnsupportableModuleError):  # fmt: skip
        assert issubclass(kind, UnsupportedModuleError)
        assert str(kind("why")) == "why"
    assert issubclass(UnsupportedModuleError, UnsupportedError)
    assert issubclass(UnsupportedError, ValueError)
    both = UnsupportedModuleError([ShouldReplaceModuleError("x"), ShouldReplaceModuleError("y")])
    assert str(both) == "2 modules cannot be trained privately:\n  - x\n  - y"
    assert str(pickle.loads(pickle.dumps(both))) == str(both)
    assert str(UnsupportedModuleError()) == ""
