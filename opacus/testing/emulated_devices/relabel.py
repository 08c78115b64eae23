"""The same memory under another device: the trick all else stands on.

A DLPack capsule is how libraries hand tensors to each other without copying. Its device fields are plain
integers, and PyTorch maps DLPack's device type "extension" to its own slot for out-of-tree devices. So a CPU
tensor goes out as a capsule, the two integers are overwritten, and what comes back is an ordinary
`torch.Tensor` with a real storage on, say, ``emu:1``, over the same host memory. The way back is the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

__all__ = ["CPU", "CPU_KEYS", "capsule_fields", "to_device", "to_host"]

CPU = torch.device("cpu")
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12

# struct DLTensor starts { void* data; int32 device_type; int32 device_id; ... }: device_type and device_id
# are one 64-bit word, 8 bytes in.
_DEVICE_OFFSET = 8
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_word_at = ctypes.c_int64.from_address
# Looked up once: both run for every tensor argument of every op.
_to_dlpack, _from_dlpack = torch._C._to_dlpack, torch._C._from_dlpack
_as_strided = torch.ops.aten.as_strided.default


def _relabelled(tensor: Tensor, device_word: int) -> Tensor:
    capsule = _to_dlpack(tensor)
    _word_at(_capsule_pointer(capsule, b"dltensor") + _DEVICE_OFFSET).value = device_word
    out = _from_dlpack(capsule)
    if out.stride() != tensor.stride():  # DLPack normalises the strides of dimensions of size 1
        out = _as_strided.redispatch(CPU_KEYS, out, tensor.shape, tensor.stride(), 0)
    return out


def to_host(tensor: Tensor) -> Tensor:
    """`tensor`'s memory as a CPU tensor. Nothing is copied; conjugate and negative bits are dropped."""
    return _relabelled(tensor, _DLPACK_CPU)


def to_device(tensor: Tensor, index: int) -> Tensor:
    """`tensor`'s memory as a tensor on emulated device `index`. Nothing is copied."""
    return _relabelled(tensor, _DLPACK_EXTENSION | (index << 32))


def capsule_fields(tensor: Tensor) -> tuple[int, int, int]:
    """Address, device type and device index as a DLPack capsule of `tensor` states them."""
    capsule = _to_dlpack(tensor)
    pointer = _capsule_pointer(capsule, b"dltensor")
    word = _word_at(pointer + _DEVICE_OFFSET).value
    return _word_at(pointer).value, word & 0xFFFFFFFF, word >> 32
