"""What a private run asks of its records, besides its seed: one checkpoint's noise may go on only with what it was meant for.

The same noise on two queries is taken off by subtracting the answers. A resumed run draws the same noise as the run that was saved,
which is right where it computes the same sums. Where records or settings differ, it gets a stream of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from typing import Any

from opacus.integrations.hf.plan import Plan
from opacus.integrations.hf.same_records import digests_of

__all__ = ["differing", "queries_of", "stream_after"]

_WHOLE = 2**30  # bytes; of larger data sets some records are looked at
_LOOKED_AT = 256
_AT_ONCE = 1000
# how arguments begin that change nothing in a step
_NO_MATTER = (
    *("average_tokens", "batch_eval", "data_seed", "dataloader", "ddp", "debug", "disable_tqdm", "do_"),
    *(
        "enable_jit",
        "eval",
        "greater",
        "hub",
        "ignore_data_skip",
        "include",
        "load_best",
        "local_rank",
        "log",
    ),
    *("metric", "output_dir", "per_device_eval", "prediction_loss", "project", "push", "report", "restore"),
    *("resume", "run_name", "save", "skip_memory", "trackio"),
)


def queries_of(trainer: Any, plan: Plan, ranks: int, randomness: str) -> dict[str, str]:
    """What the sums of a run follow from, by name, in text that is the same whenever they are.

    Args:
        trainer: its arguments and records are looked at. A `datasets.Dataset` of up to 1 GiB is read whole, of others 256
            records, evenly taken. Not seen: other code of loss, collator or model, and frozen weights.
        plan: the run's.
        ranks: how many train together.
        randomness: from `randomness_of_records`.
    """
    args = trainer.args
    unscheduled = (
        str(_plain(args.lr_scheduler_type)) == "constant"
    )  # how many steps are planned does not matter
    found = {
        f"args.{field.name}": repr(_plain(getattr(args, field.name)))
        for field in dataclasses.fields(args)
        if not field.name.startswith(_NO_MATTER)
        and not (unscheduled and field.name in ("max_steps", "num_train_epochs"))
    }
    options = {name: value for name, value in plan.options.items() if name != "reduction_device"}
    return {
        **found,
        "the trainer": type(trainer).__name__,
        "noise_multiplier": repr(float(plan.noise_multiplier)),
        "max_grad_norm": repr(_plain(plan.max_grad_norm)),
        "clipping": f"{plan.clipping} {_plain(options)}",
        "the number of ranks": str(ranks),
        "random numbers in records": randomness,
        "train_dataset": _digest_of_all(trainer.train_dataset) or _digest_of_some(trainer.train_dataset),
    }


def differing(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Names of what is not the same in both."""
    return sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))


def stream_after(
    parent: str, seed: int, position: tuple[int, int], queries: Mapping[str, str]
) -> tuple[str, int]:
    """Name and seed (63 bits) of the stream of noise that leaves `parent` at `position`, for `queries`.

    Args:
        parent: name of the stream before; empty for the first one.
        seed: the run's secret.
        position: numbers of steps made on the parent, and accounted.
        queries: from `queries_of`.
    """
    told = repr((parent, seed, position, sorted(queries.items())))
    digest = hashlib.sha256(told.encode()).digest()
    return digest[8:24].hex(), int.from_bytes(digest[:8], "big") >> 1


def _plain(value: Any) -> Any:
    """`value`, where its text says what it is; of other objects only the kind, whose text may hold an address."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return sorted((str(name), _plain(part)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return type(value).__name__


def _digest_of_all(data: Any) -> str | None:
    """Of a `datasets.Dataset` that is not too large; its own fingerprint would not do, which can be another in each process."""
    size = getattr(getattr(data, "data", None), "nbytes", None)
    if size is None or size > _WHOLE or not hasattr(data, "with_format"):
        return None
    import pyarrow as pa  # datasets needs it

    total = hashlib.sha256()
    for rows in data.with_format("arrow").iter(batch_size=_AT_ONCE):
        table = rows.replace_schema_metadata(None).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        total.update(sink.getvalue())
    return f"{len(data)} records, all of them, {total.hexdigest()}"


def _digest_of_some(data: Any) -> str:
    return f"{len(data)} records, some of them, {digests_of(data, b'train_dataset', _LOOKED_AT)}"
