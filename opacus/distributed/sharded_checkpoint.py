"""Checkpoints of sharded models: a folder with every rank's shards, and one file that says what they are.

`PATH/run.pt` holds what is no shard (accountant, schedules, random states of all ranks) and the name of the folder beside it with
the shards, in the format of `torch.distributed.checkpoint`. Replacing that one file replaces the checkpoint, so that whoever opens
`PATH` finds the previous checkpoint or the new one. Shards can be read by any number of ranks, each reading its own part.

torch's own reader unpickles the shards' table of contents; here it is read by an unpickler that knows a few harmless
classes and nothing else.
"""

from __future__ import annotations

import os
import pickle
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opacus.utils.checkpoint_file import CheckpointError, FileLike, read, write

__all__ = [
    "Shards",
    "flat",
    "of_this_rank",
    "open_shards",
    "save_shards",
    "states_of_all_ranks",
    "without_tensors",
]

_FILE, _FOLDER = "run.pt", "shards"


# ---------------------------------------------------------------------------------------------------------- writing


def save_shards(
    rest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    path: FileLike,
    options: Mapping[str, Any] | None,
) -> None:
    """Write a checkpoint. Collective; `path` must be on storage that all ranks see.

    Args:
        rest: what is no shard, equal on all ranks.
        tensors: sharded or equal on all ranks, by group and keys: `"group/key/..."`.
        path: a folder, made where there is none.
        options: for `torch.save` of what is no shard.

    Raises:
        CheckpointError: on every rank, naming what failed. The checkpoint that was there still is.
    """
    if not isinstance(path, (str, os.PathLike)):
        problem = f"path is a {type(path).__name__}; a sharded model is saved to a folder, so pass its path."
        raise CheckpointError("the checkpoint cannot be saved", [problem])
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        problem = f"{os.fspath(folder)!r} is a file; a sharded model is saved to a folder. Pass another path."
        raise CheckpointError("the checkpoint cannot be saved", [problem])
    name = f"{_FOLDER}-{_agreed(uuid.uuid4().hex)}"
    _on_first(lambda: (folder / name).mkdir(parents=True))
    try:
        _save_tensors(dict(tensors), folder / name)
        _on_first(lambda: write({**rest, "shards": name}, folder / _FILE, options))
    except BaseException:
        if _is_first():
            shutil.rmtree(folder / name, ignore_errors=True)
        raise
    _on_first(lambda: _forget_others(folder, name))


def flat(prefix: str, place: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors in a dictionary of dictionaries, named by their keys."""
    found: dict[str, Tensor] = {}
    for key, value in place.items():
        if isinstance(value, Tensor):
            found[f"{prefix}/{key}"] = value.detach()
        elif isinstance(value, Mapping):
            found.update(flat(f"{prefix}/{key}", value))
    return found


def without_tensors(place: Mapping[Any, Any]) -> dict[Any, Any]:
    """What `flat` leaves."""
    return {
        key: without_tensors(value) if isinstance(value, Mapping) else value
        for key, value in place.items()
        if not isinstance(value, Tensor)
    }


def _save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:
        raise CheckpointError("the checkpoint cannot be saved", _failures(error)) from error


def _forget_others(folder: Path, name: str) -> None:
    for other in folder.glob(f"{_FOLDER}-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- reading


class Shards:
    """A checkpoint folder: what is in it, to be checked first and fetched then.

    Args:
        rest: what is no shard.
        folder: of the shards.
        metadata: their table of contents.
    """

    def __init__(self, rest: dict[str, Any], folder: Path, metadata: Any) -> None:
        self.rest = rest
        self._folder = folder
        self._metadata = metadata
        self._wanted: dict[str, Tensor] = {}

    def group(
        self, name: str, like: Callable[[tuple[str, ...]], Tensor | None]
    ) -> dict[tuple[str, ...], Tensor]:
        """Tensors of a group, to be filled by `fetch`; those that nothing here is like are on the meta device, and stay there.

        Args:
            like: from a tensor's keys below the group to what it is to be shaped and shared out like; None: on the CPU.
        """
        found = {}
        for key, saved in self._metadata.state_dict_metadata.items():
            first, *rest = key.split("/")
            if first != name:
                continue
            model, dtype = like(tuple(rest)), saved.properties.dtype
            if model is None:
                tensor = torch.empty(saved.size, dtype=dtype)
            elif tuple(model.shape) != tuple(saved.size):
                tensor = torch.empty(saved.size, dtype=dtype, device="meta")
            else:
                tensor = torch.empty_like(model, dtype=dtype, requires_grad=False)
            if tensor.device.type != "meta":
                self._wanted[key] = tensor
            found[tuple(rest)] = tensor
        return found

    def sizes(self, name: str) -> dict[tuple[str, ...], tuple[int, ...]]:
        """Shapes of a group's tensors."""
        return {
            tuple(keys): tuple(saved.size)
            for key, saved in self._metadata.state_dict_metadata.items()
            for first, *keys in [key.split("/")]
            if first == name
        }

    def fetch(self) -> None:
        """Read this rank's parts into the tensors that `group` handed out. Collective.

        Raises:
            CheckpointError: on every rank.
        """
        import torch.distributed.checkpoint as dcp

        try:
            dcp.load(
                dict(self._wanted),
                storage_reader=_reader(self._folder),
                no_dist=not dist.is_initialized(),
            )
        except dcp.CheckpointException as error:
            raise CheckpointError("the checkpoint cannot be loaded", _failures(error)) from error


def open_shards(path: FileLike, options: Mapping[str, Any] | None) -> Shards | None:
    """The checkpoint in the folder `path`; None where `path` is no folder.

    Args:
        options: for `torch.load` of what is no shard.

    Raises:
        CheckpointError: it is damaged, or not to be trusted.

    Formal guarantee:
        No code in the folder is executed.
    """
    if not isinstance(path, (str, os.PathLike)) or not Path(path).is_dir():
        return None
    folder = Path(path)
    rest = read(folder / _FILE, options)
    name = rest.get("shards") if isinstance(rest, Mapping) else None
    if not isinstance(name, str) or not name.startswith(f"{_FOLDER}-") or Path(name).name != name:
        problem = f"{_FILE} does not name a folder of shards. Save with save_checkpoint."
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be loaded", [problem])
    try:
        metadata = _reader(folder / name).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        problem = (
            f"the table of contents of its shards is damaged, or holds what is not to be trusted ({error})."
        )
        raise CheckpointError(f"checkpoint {os.fspath(path)!r} cannot be loaded", [problem]) from error
    return Shards({key: value for key, value in rest.items() if key != "shards"}, folder / name, metadata)


_KNOWN = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
}


class _Unpickler(pickle.Unpickler):
    """Builds what a table of contents of tensors is made of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _reader(folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(folder / ".metadata", "rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, dcp.metadata.Metadata):
                raise pickle.UnpicklingError("it is no table of contents")
            # entries of other kinds would be unpickled by torch; files lie in this folder and nowhere else
            for key, entry in metadata.state_dict_metadata.items():
                if not isinstance(entry, dcp.metadata.TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{key} is no tensor")
            for place in metadata.storage_data.values():
                if Path(place.relative_path).name != place.relative_path:
                    raise pickle.UnpicklingError(f"it points to {place.relative_path!r}")
            return metadata

    return Reader(folder)


# ------------------------------------------------------------------------------------------------------- all ranks


def states_of_all_ranks(mine: Any) -> list[Any]:
    """What every rank has, by rank. Collective."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def of_this_rank(states: list[Any], otherwise: Callable[[list[Any], int], Any]) -> Any:
    """This rank's own of what `states_of_all_ranks` returned; on another number of ranks `otherwise(states, rank)`."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return states[rank] if len(states) == world else otherwise(states, rank)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agreed(value: Any) -> Any:
    """The first rank's."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _on_first(action: Callable[[], Any]) -> None:
    """Run on the first rank; what it raises is raised on all."""
    failed: Exception | None = None
    if _is_first():
        try:
            action()
        except Exception as error:
            failed = error
    problems = _agreed(
        getattr(failed, "problems", [f"{type(failed).__name__}: {failed}"]) if failed is not None else None
    )
    if failed is not None:
        raise failed
    if problems is not None:
        raise CheckpointError("the first rank could not save the checkpoint", problems)


def _failures(error: Any) -> list[str]:
    return [
        f"rank {rank}: {type(failure[0]).__name__}: {failure[0]}" for rank, failure in error.failures.items()
    ] or [str(error)]
