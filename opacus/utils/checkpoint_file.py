"""Checkpoint files: written whole or not at all, and read without executing anything.

What the dictionary in such a file means is `opacus.checkpoint`'s business.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from opacus.errors import ConfigurationError, raise_if_any

__all__ = ["CheckpointError", "read", "write"]

FileLike = str | os.PathLike[str] | BinaryIO


class CheckpointError(ConfigurationError):
    """A checkpoint cannot be written or read; files and objects are as they were."""


def write(content: Mapping[str, Any], path: FileLike, torch_save_kwargs: Mapping[str, Any] | None) -> None:
    """Save `content`, after making sure that `read` will accept it.

    A file is written next to `path`, flushed to the disk, read back, and then renamed over `path`: whoever opens `path`
    finds the previous file or the new one, never a part of one. A process killed meanwhile leaves a file
    `.NAME.*.tmp` behind, which may be deleted.

    Args:
        content: what to save; tensors and plain Python values.
        path: a path, or a binary file object open for writing. Into a file object everything goes in one `write`.
        torch_save_kwargs: passed on to `torch.save`.

    Raises:
        CheckpointError: naming what `read` would refuse. Nothing was replaced.
    """
    options = dict(torch_save_kwargs or {})
    if not isinstance(path, (str, os.PathLike)):
        buffer = io.BytesIO()
        torch.save(dict(content), buffer, **options)
        buffer.seek(0)
        _check_readable(content, buffer)
        path.write(buffer.getbuffer())
        return
    target = Path(os.path.realpath(path))  # through a link: the file it points to is replaced, not the link
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(dict(content), file, **options)
            file.flush()
            os.fsync(file.fileno())
        _check_readable(content, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def read(path: FileLike, torch_load_kwargs: Mapping[str, Any] | None) -> Any:
    """Load what `write`, or `torch.save` of tensors and plain Python values, has saved; to the CPU by default.

    Args:
        path: a path, or a binary file object open for reading.
        torch_load_kwargs: passed on to `torch.load`. `weights_only` is True whatever they say.

    Raises:
        CheckpointError: the file is damaged, or holds anything that only executing code could restore.

    Formal guarantee:
        No code from the file is executed: it is read by `torch.load(weights_only=True)` alone.
    """
    options = {"map_location": "cpu", **(torch_load_kwargs or {})}
    problems = []
    if not options.pop("weights_only", True):
        problems.append(
            "torch_load_kwargs has weights_only=False, which lets a file execute code. Leave it out; allow classes you "
            "trust with torch.serialization.add_safe_globals."
        )
    if options.pop("pickle_module", None) is not None:
        problems.append(
            "torch_load_kwargs has a pickle_module, which lets a file execute code. Leave it out."
        )
    raise_if_any(f"{_called(path)} cannot be loaded", problems, CheckpointError)
    try:
        return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{_called(path)} cannot be loaded",
            [
                f"it holds more than tensors and plain Python values, which could execute code, or is damaged ({_first_line(error)}). "
                "If you trust the file and the class it names, call torch.serialization.add_safe_globals([...]) first."
            ],
        ) from error
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        problem = f"it is damaged, or not written by torch.save ({_first_line(error)}). Load an earlier one."
        raise CheckpointError(f"{_called(path)} cannot be loaded", [problem]) from error


def _check_readable(content: Mapping[str, Any], saved: Path | io.BytesIO) -> None:
    # mapped into memory, only the structure is read, not the tensors
    mapped = isinstance(saved, Path) and zipfile.is_zipfile(saved)
    try:
        torch.load(
            str(saved) if isinstance(saved, Path) else saved,
            map_location="cpu",
            weights_only=True,
            mmap=mapped,
        )
    except Exception as error:
        problems = [
            f"{name!r} is not made of tensors and plain Python values ({found}). Convert it, or allow its class with "
            "torch.serialization.add_safe_globals([...]) when saving and when loading."
            for name, value in content.items()
            if (found := _why_unreadable(value))
        ]
        raise CheckpointError(
            "the checkpoint could not be loaded again, so it was not saved", problems or [_first_line(error)]
        ) from error


def _why_unreadable(value: Any) -> str:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        return _first_line(error)
    return ""


def _flush_folder(folder: Path) -> None:
    """Bring the renaming itself to the disk, where the system offers it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _called(path: FileLike) -> str:
    return f"checkpoint {os.fspath(path)!r}" if isinstance(path, (str, os.PathLike)) else "the checkpoint"


def _first_line(error: Exception) -> str:
    """What torch says, without its advice to switch the protection off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return ([*named, *lines, type(error).__name__])[0].removeprefix("WeightsUnpickler error: ")
