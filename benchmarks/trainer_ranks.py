"""What privacy costs inside TRL's trainers over several ranks, each on {its GPU, the CPU}: records per second and peak memory.

    python benchmarks/trainer_ranks.py --out out/trainer_ranks          # two GPUs, 1-billion Llama shape, LoRA; starts the ranks itself
    python benchmarks/trainer_ranks.py --shape tiny --records 8 --length 16 --physical 4 --steps 2     # a smoke test, also on a CPU

Some decoder layers of each replica (`--cpu-layers`, in the middle, frozen) are offloaded to the CPU's memory. Every rank computes
`--records` records a step on average, so that speeds of one and of several ranks compare by rank. The ordinary trainer refuses a
device map under several ranks: private ranks with one are compared with the ordinary trainer of one process on {GPU 0, CPU}; without
one (each replica on its GPU) with the ordinary trainer's own DistributedDataParallel. Runs of a layout follow each other in one
launch; GPUs and dtypes as in trainer_cost.py, whose pieces these are. Writes a table (standard output) and results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import disable_progress_bars
from trainer_cost import SHAPES, TRAINERS, measure

# ranks, whether layers are offloaded, whether private; those of one number of ranks are one launch
RUNS = ((1, True, False), (1, True, True), (2, False, False), (2, False, True), (2, True, True))
LAYOUTS = {
    (1, True): "one process on {GPU 0, CPU}",
    (2, False): "ranks, each on its GPU",
    (2, True): "ranks, each on {its GPU, CPU}",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainer", choices=TRAINERS, default="sft")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu-layers", type=int, default=2)
    parser.add_argument("--records", type=int, default=32, help="of a rank in a step")
    parser.add_argument("--physical", type=int, default=8, help="records in a forward")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--out", type=Path, default=Path("out/trainer_ranks"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.base = "bf16"
    options.gpus = min(torch.cuda.device_count(), options.ranks)
    if options.worker:
        work(options)
        return 0
    if 0 < options.gpus < options.ranks:
        parser.error(f"{options.ranks} ranks need as many GPUs, this machine has {options.gpus}")
    options.out.mkdir(parents=True, exist_ok=True)
    given = list(sys.argv[1:] if argv is None else argv)
    rows: list[dict[str, Any]] = []
    for ranks in (1, options.ranks):
        found = launch(ranks, given, options)
        rows += found
        for row in found:
            say(row)
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(options.gpus)],
        "options": {key: str(value) for key, value in vars(options).items()},
    }
    summary = summarise(rows)
    (options.out / "results.json").write_text(
        json.dumps({"about": about, "rows": rows, "summary": summary}, indent=1)
    )
    for line in summary:
        sys.stdout.write(
            f"{line['private']} against {line['ordinary']}: {line['speed']:.3f} x speed of a rank, "
            f"{line['memory']:.3f} x memory of a rank\n"
        )
    return int(any("error" in row for row in rows))


def launch(ranks: int, given: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of one number of ranks; rows of the table."""
    files = [options.out / f"{ranks}-ranks-{rank}.jsonl" for rank in range(ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    command = [sys.executable]
    environment = dict(os.environ)
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    elif options.gpus:  # of several that it sees the ordinary trainer would use all
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run([*command, __file__, *given, "--worker"], env=environment, check=False)
    told = [
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for file in files
    ]
    rows = []
    for number, (_, offloaded, private) in enumerate(run for run in RUNS if (run[0] > 1) == (ranks > 1)):
        layout = f"{ranks} " * (ranks > 1) + LAYOUTS[min(ranks, 2), offloaded]
        row: dict[str, Any] = {"layout": layout, "private": private, "ranks": ranks}
        mine = [of_rank[number] for of_rank in told if len(of_rank) > number]
        errors = [one["error"] for one in mine if "error" in one]
        if errors or len(mine) < ranks:
            row["error"] = errors[0] if errors else f"ended with exit code {done.returncode}"
        else:
            row["records_per_second"] = sum(one["records"] for one in mine) / max(
                one["seconds"] for one in mine
            )
            for found, measured in (
                ("gib_of_a_rank", "gib"),
                ("gib_of_first_look", "gib_of_first_look"),
                ("seconds_of_first_look", "seconds_of_first_look"),
            ):
                row[found] = max(one[measured] for one in mine)
        rows.append(row)
    return rows


def work(options: argparse.Namespace) -> None:
    """One rank: each run in turn, a line of JSON for each."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    options.world = ranks
    gpus = [int(os.environ.get("LOCAL_RANK", "0"))] if options.gpus else []
    for _, offloaded, private in (run for run in RUNS if (run[0] > 1) == (ranks > 1)):
        row: dict[str, Any]
        try:
            row = measure(options.trainer, private, options, gpus, places_of(options, gpus, offloaded))
        except Exception as error:  # what cannot run is a row of the table
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")}
        with (options.out / f"{ranks}-ranks-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def places_of(options: argparse.Namespace, gpus: list[int], offloaded: bool) -> dict[str, Any]:
    """The device map of a replica."""
    if not gpus:
        return {"": "cpu"}
    if not offloaded or not options.cpu_layers:
        return {"": gpus[0]}
    layers = SHAPES[options.shape]["num_hidden_layers"]
    first = (layers - options.cpu_layers) // 2
    away = range(first, first + options.cpu_layers)
    return {
        **{f"model.{part}": gpus[0] for part in ("embed_tokens", "rotary_emb", "norm")},
        **{f"model.layers.{i}": "cpu" if i in away else gpus[0] for i in range(layers)},
        "lm_head": gpus[0],
    }


def say(row: dict[str, Any]) -> None:
    kind = "private" if row["private"] else "ordinary"
    found = row.get("error") or (
        f"{row['records_per_second']:9.2f} records/s {row['records_per_second'] / row['ranks']:9.2f} of a rank "
        f"{row['gib_of_a_rank']:8.2f} GiB of a rank "
        f"(first look {row['gib_of_first_look']:.2f}, {row['seconds_of_first_look']:.1f} s)"
    )
    sys.stdout.write(f"{row['layout']:34s} {kind:9s} {found}\n")
    sys.stdout.flush()


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each private run over the ordinary one of its layout, or of one process where the ordinary trainer refuses the layout."""
    whole = [row for row in rows if "error" not in row]
    ordinary = {row["layout"]: row for row in whole if not row["private"]}
    one = ordinary.get(LAYOUTS[1, True])
    lines = []
    for row in whole:
        against = ordinary.get(row["layout"], one)
        if not row["private"] or against is None:
            continue
        speeds = [one_row["records_per_second"] / one_row["ranks"] for one_row in (row, against)]
        lines.append(
            {
                "private": row["layout"],
                "ordinary": against["layout"],
                "speed": speeds[0] / speeds[1],
                "memory": (row["gib_of_a_rank"] or 1.0) / (against["gib_of_a_rank"] or 1.0),
            }
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
