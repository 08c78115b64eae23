"""Four GPUs of one host, or eight: one process over all, replicas of two GPUs each, FSDP2 over all; private and ordinary.

    python benchmarks/replicas.py --gpus 4 --shape 1b --out out/replicas          # checks, then the table
    python benchmarks/replicas.py --gpus 8 --shape 7b --only table --out out/replicas8
    python benchmarks/replicas.py --gpus 4 --shape tiny --smoke                   # without GPUs: gloo, emulated devices

Every row is a launch of its own (`torchrun`), so that none inherits another's memory. The checks, in float32: the update of five steps
over ranks against one process with the union of the batches (float32 tolerance), noise once over all ranks, and the error when two
ranks are put on one GPU. Needs transformers, accelerate and peft; torchao for `lora-int8`.
Writes results.json and table.md. The workers are in `replica_worker.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def ranks_of(layout: str, gpus: int) -> int:
    """Processes that a layout runs in."""
    return {"single": 1, "one": 1, "replicas": gpus // 2, "prepared": gpus // 2, "shared": 2}.get(
        layout, gpus
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--shape", default="1b", help="tiny, 1b or 7b")
    parser.add_argument("--only", choices=["checks", "table"], help="one part; by default both")
    parser.add_argument("--tasks", default="lora,lora-int8,full", help="of the table")
    parser.add_argument("--layouts", default="one,replicas,fsdp", help="of the table")
    parser.add_argument("--check-tasks", default="lora-int8,lora,full")
    parser.add_argument("--check-layouts", default="replicas,prepared,hsdp,fsdp_tp")
    parser.add_argument("--rows", type=int, default=16, help="samples of a process in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--smoke", action="store_true", help="gloo, CPUs and emulated devices")
    parser.add_argument("--limit", type=int, default=240, help="seconds a launch may take")
    parser.add_argument("--out", type=Path, default=Path("out/replicas"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if options.only != "table":
        rows += checks(options)
    if options.only != "checks":
        rows += table(options)
    about = {"gpus": options.gpus, "shape": options.shape, "command": " ".join(sys.argv), "rows": rows}
    (options.out / "results.json").write_text(json.dumps(about, indent=1))
    return int(any(row.get("ok") is False for row in rows))


def checks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Updates against one GPU's, noise, and the refusal."""
    found = run(options, "shared", "lora", "refusal")
    layouts = options.check_layouts.split(",")
    for task in options.check_tasks.split(","):
        # a quantized base is not cut into shards
        wanted = [x for x in layouts if task != "lora-int8" or x in ("replicas", "prepared")]
        wanted = [x for x in wanted if task != "full" or x != "prepared"]
        reference = options.out / f"update-{task}.pt"
        found += run(options, "single", task, "update", "--save", str(reference))
        for layout in wanted:
            what = "update,noise" if task == "lora" and layout != "prepared" else "update"
            found += run(options, layout, task, what, "--compare", str(reference))
        reference.unlink(missing_ok=True)
    return found


def table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples per second and peak memory."""
    rows: list[dict[str, Any]] = []
    for task in options.tasks.split(","):
        for layout in options.layouts.split(","):
            if task == "lora-int8" and layout not in ("one", "replicas", "prepared"):
                continue
            rows += run(options, layout, task, "speed")
    speed = {
        (r["task"], r["layout"], r["mode"]): r["samples_per_second"]
        for r in rows
        if "samples_per_second" in r
    }
    lines = [
        "| task | layout | mode | samples/s | private / ordinary | against one process | peak GiB of each GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "samples_per_second" not in row:
            continue
        task, layout, mode = row["task"], row["layout"], row["mode"]
        ordinary, one = speed.get((task, layout, "ordinary")), speed.get((task, "one", mode))
        share = f"{row['samples_per_second'] / ordinary:.2f}" if ordinary else ""
        against = f"{row['samples_per_second'] / one:.2f}" if one else ""
        peak = ", ".join(f"{x:.1f}" for x in row["peak_gib"])
        lines.append(
            f"| {task} | {layout} | {mode} | {row['samples_per_second']:.1f} | {share} | {against} | {peak} |"
        )
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return rows


def run(options: argparse.Namespace, layout: str, task: str, what: str, *more: str) -> list[dict[str, Any]]:
    """One launch; the rows that its ranks printed. A launch that fails is a row with an error."""
    ranks = ranks_of(layout, options.gpus)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(HERE / "replica_worker.py"), "--layout", layout, "--task", task, "--what", what]
    for name in ("gpus", "shape", "rows", "length", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--smoke"] if options.smoke else []
    threads = "1" if options.smoke else os.environ.get("OMP_NUM_THREADS", "4")
    path = f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    start = time.time()
    try:
        done = subprocess.run(
            [*command, *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=options.limit,
            check=False,
        )
        output, errors, failed = done.stdout, done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired as late:
        output, errors, failed = str(late.stdout or ""), f"took longer than {options.limit} s", True
    lines = output.replace('}{"layout"', '}\n{"layout"').splitlines()
    rows = [json.loads(line) for line in lines if line.startswith('{"layout"')]
    if failed:
        rows.append({"layout": layout, "task": task, "what": what, "ok": False, "error": errors[-3000:]})
    for row in rows:
        row["launch_seconds"] = round(time.time() - start, 1)
        print(json.dumps({k: v for k, v in row.items() if k != "error"}), row.get("error", ""), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
