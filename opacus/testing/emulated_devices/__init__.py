"""Several accelerator devices on a machine that has only a CPU, for testing code that spans devices.

    >>> import torch
    >>> from opacus.testing.emulated_devices import count_copies, install
    >>> first, second = install(2)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8).to(first), torch.nn.Linear(8, 2).to(second))
    >>> with count_copies() as seen:
    ...     hidden = model[0](torch.zeros(5, 8, device=first))
    ...     model[1](hidden.to(second)).sum().backward()
    >>> seen.cross, seen.sync  # one copy forward, one backward
    (2, 0)

Tensors on ``emu:0`` and ``emu:1`` are plain `torch.Tensor` objects. Emulated as on GPUs: ops across devices raise
("Expected all tensors to be on the same device..."), 0-dim CPU tensors and CPU index tensors are let through where
CUDA does so; generators belong to a device; ``module.to(device)`` keeps its Parameters; autograd, hooks,
optimizers, `torch.func`, checkpointing, saving and loading work. Numbers equal the CPU's.

Not emulated: speed; memory limits; streams (every op has finished when it returns, so a missing synchronisation
cannot show); autograd's thread per device (backward runs on the calling thread); autocast (accepted, casts
nothing); kernels and code paths chosen by ``is_cuda``; sparse tensors; torch.compile; pinned memory
(`Tensor.pin_memory` returns its tensor); collectives other than gloo's (`register_gloo`). Complex tensors mostly work; their backward may crash. `out=` of a wrong
and non-empty shape fails. ``torch.accelerator.synchronize()`` raises. Hooks set on a Parameter before its module
moves between CPU and an emulated device stay behind: move first.

It works by private parts of PyTorch, listed in `support.NEEDED_FROM_TORCH`; where one is missing, `install` raises
`EmulationUnsupported` naming it. Tested on torch 2.10, 2.13 and 2.14. It takes PyTorch's one slot for out-of-tree
devices, for the life of the process, so it refuses a process that has CUDA devices.

The pieces: `relabel` (the trick), `fallback` and `schemas` (one kernel for all ops), `kernels` (exceptions),
`generators`, `patches`, `backend` (``torch.emu``), `collectives`, `copies` (counting), `support` (can it work here), `installation`.
"""

from opacus.testing.emulated_devices.collectives import register_gloo
from opacus.testing.emulated_devices.copies import Copy, count_copies
from opacus.testing.emulated_devices.installation import install, is_installed
from opacus.testing.emulated_devices.support import EmulationUnsupported, is_supported, unsupported_reasons

__all__ = [
    "Copy",
    "EmulationUnsupported",
    "count_copies",
    "install",
    "is_installed",
    "is_supported",
    "register_gloo",
    "unsupported_reasons",
]
