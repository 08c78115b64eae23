"""What emulated devices claim about CUDA, asked of both: every test here also runs on real GPUs (``-m gpu``).

Which ops refuse tensors of two devices, which let CPU scalars and CPU indices through, and which make the host
wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

from opacus.testing.emulated_devices import count_copies

MESSAGE = "Expected all tensors to be on the same device"


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu(2))])
def pair(request):
    """Two devices: emulated, and in a second round (on a machine that has them) real."""
    if request.param == "emulated" and torch.cuda.device_count():
        pytest.skip("emulated devices do not share a process with CUDA devices")
    return request.getfixturevalue("two_devices")


MIXTURES = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "batch_norm": lambda a, b: functional.batch_norm(a, b[0], b[1], training=False),
    "bmm": lambda a, b: torch.bmm(a[None], b[None].mT),
    "cat": lambda a, b: torch.cat([a, b]),
    "conv": lambda a, b: functional.conv1d(a[None], b[..., None]),
    "cross_entropy": lambda a, b: functional.cross_entropy(a, b[:, 0].long().abs() % 3),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "embedding": lambda a, b: functional.embedding(b.long().abs() % 3, a),
    "equal": lambda a, b: torch.equal(a, b),
    "foreach_add": lambda a, b: torch._foreach_add([a], [b]),
    "gather": lambda a, b: a.gather(0, b.long().abs() % 3),
    "index_add": lambda a, b: a.index_add(0, torch.arange(3, device=a.device), b),
    "index_put": lambda a, b: a.index_put((torch.zeros(1, dtype=torch.long),), b[:1]),
    "layer_norm": lambda a, b: functional.layer_norm(a, (3,), b[0]),
    "linear": lambda a, b: functional.linear(a, b),
    "maximum": lambda a, b: torch.maximum(a, b),
    "mm": lambda a, b: a @ b.t(),
    "mse": lambda a, b: functional.mse_loss(a, b),
    "mul_out": lambda a, b: torch.mul(a, b, out=torch.empty_like(a)),
    "stack": lambda a, b: torch.stack([a, b]),
    "where": lambda a, b: torch.where(a > 0, a, b),
}


@pytest.mark.parametrize("other", ["second device", "cpu"])
@pytest.mark.parametrize("op", MIXTURES)
def test_tensors_of_two_devices_are_refused(op, other, pair):
    first, second = pair
    a = torch.randn(3, 3).to(first)
    b = torch.randn(3, 3).to("cpu" if other == "cpu" else second)
    # The sentence differs for a few ops on a GPU; that they refuse does not.
    with pytest.raises(RuntimeError, match=MESSAGE if first.type != "cuda" else None):
        MIXTURES[op](a, b)
    MIXTURES[op](a, b.to(first))


SCALARS = {
    "add": lambda a, s: a + s,
    "reflected mul": lambda a, s: s * a,
    "add_": lambda a, s: a.add_(s),
    "addcmul": lambda a, s: torch.addcmul(a, a, s),
    "fill_": lambda a, s: a.fill_(s),
    "foreach_mul_": lambda a, s: torch._foreach_mul([a], s)[0],
    "lerp": lambda a, s: torch.lerp(a, a, s),
    "masked_fill": lambda a, s: a.masked_fill(a > 0, s),
    "maximum": lambda a, s: torch.maximum(a, s),
    "where": lambda a, s: torch.where(a > 0, a, s),
}


@pytest.mark.parametrize("op", SCALARS)
def test_zero_dim_cpu_tensors_are_let_through(op, pair):
    a = torch.randn(3).to(pair[1])
    out = SCALARS[op](a, torch.tensor(2.0))
    assert out.device == pair[1]


REFUSED_SCALARS = {
    "stack": lambda a, s, _: torch.stack([a[0], s]),
    "one element, not 0-dim": lambda a, s, _: a + s[None],
    "bound of clamp": lambda a, s, _: a.clamp(max=s),
    "0-dim of another device": lambda a, s, first: a + s.to(first),
}


@pytest.mark.parametrize("op", REFUSED_SCALARS)
def test_other_cpu_scalars_are_refused(op, pair):
    with pytest.raises(RuntimeError, match=MESSAGE):
        REFUSED_SCALARS[op](torch.randn(3).to(pair[1]), torch.tensor(2.0), pair[0])


def test_cpu_index_tensors_are_let_through(pair):
    a = torch.tensor([5.0, 6.0, 7.0], device=pair[1])
    picked = a[torch.tensor([0, 2])]
    assert (picked.device, picked.tolist()) == (pair[1], [5.0, 7.0])


# x: `[3, 3]` ones; mask: `[3, 3]` of True; i: `[3]` positions.
WAITING = {
    "item": lambda x, mask, i: x[0, 0].item(),
    "bool": lambda x, mask, i: bool(mask.all()),
    "float of sum": lambda x, mask, i: float(x.sum()),
    "equal": lambda x, mask, i: torch.equal(x, x + 1),
    "nonzero": lambda x, mask, i: x.nonzero(),
    "masked_select": lambda x, mask, i: x.masked_select(mask),
    "unique": lambda x, mask, i: x.unique(),
    "read by mask": lambda x, mask, i: x[mask],
    "read rows by mask": lambda x, mask, i: x[mask[0]],
    "write rows by mask": lambda x, mask, i: x.__setitem__(mask[0], x[0].clone()),
    "index_put by mask": lambda x, mask, i: x.index_put((mask[0],), x[0]),
    "repeat_interleave": lambda x, mask, i: x.repeat_interleave(i, 0),
}
NOT_WAITING = {
    "read by position": lambda x, mask, i: x[i],
    "write number by mask": lambda x, mask, i: x.__setitem__(mask, 0.0),
    "masked_fill": lambda x, mask, i: x.masked_fill(mask, 0.0),
    "where": lambda x, mask, i: torch.where(mask, x, 0.0),
    "index_add": lambda x, mask, i: x.index_add(0, i, x),
    "index_put by position": lambda x, mask, i: x.index_put((i,), x[0], accumulate=True),
    "repeat_interleave with size": lambda x, mask, i: x.repeat_interleave(i, 0, output_size=3),
    "nan_to_num": lambda x, mask, i: x.nan_to_num(0.0),
    "topk": lambda x, mask, i: x.topk(2),
    "embedding": lambda x, mask, i: functional.embedding(i, x),
    "foreach norm": lambda x, mask, i: torch._foreach_norm([x, x]),
    "clip_grad_norm_": lambda x, mask, i: nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0),
    "clamped row norms": lambda x, mask, i: x.norm(dim=1).clamp(max=1.0).mul(2.0),
}


@contextmanager
def _waits(device: torch.device) -> Iterator[list[bool]]:
    """A list that holds, after the block, whether the host waited for `device` in it."""
    answer: list[bool] = []
    if device.type != "cuda":
        with count_copies() as seen:
            yield answer
        answer.append(seen.sync > 0)
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield answer
        answer.append(False)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        answer.append(True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("op", "waits"), [(op, True) for op in WAITING] + [(op, False) for op in NOT_WAITING]
)
def test_the_host_waits_where_a_value_or_shape_depends_on_data(op, waits, pair):
    x = torch.ones(3, 3, device=pair[0])
    arguments = x, x > 0, torch.tensor([1, 1, 1], device=pair[0])
    run = (WAITING if waits else NOT_WAITING)[op]
    with _waits(pair[0]) as answer:
        run(*arguments)
    assert answer == [waits]


@pytest.mark.parametrize("op", WAITING)
def test_each_wait_is_counted_once(op, two_devices):
    if two_devices[0].type == "cuda":
        pytest.skip("counts come from emulated devices")
    x = torch.ones(3, 3, device=two_devices[0])
    mask, positions = x > 0, torch.tensor([1, 1, 1], device=two_devices[0])
    with count_copies() as seen:
        WAITING[op](x, mask, positions)
    assert (seen.sync, seen.cross, seen.d2h) == (1, 0, 0)
