"""What private training costs: time and peak memory of a step, against ordinary training in the same run.

    python benchmarks/clipping_cost.py --out out/bench [--published FOLDER]

`FOLDER` holds the published package (`pip install --target FOLDER --no-deps opacus==1.6.0 opt_einsum`); each package
runs in a process of its own. Writes a table (standard output), results.json and results.png. Needs CUDA; for BERT, ViT
and LoRA also transformers, accelerate and peft.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OURS = ("ordinary", "bk", "ghost", "hooks")
PUBLISHED = ("ghost", "hooks")
HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="gpt,bert,vit,lora")
    parser.add_argument("--dtypes", default="tf32,bf16")
    parser.add_argument(
        "--gpus", default="1", help="numbers of GPUs, such as 1,2 (gpt and lora only run on several)"
    )
    parser.add_argument("--modes", default=",".join(OURS))
    parser.add_argument("--published", type=Path, help="folder with the published package")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--profile", help="print a profile of this mode instead")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        return work(options)
    options.out.mkdir(parents=True, exist_ok=True)
    packages = [("ours", HERE.parent, options.modes)]
    if options.published:
        packages.append(("published", options.published.resolve(), ",".join(PUBLISHED)))
    rows: list[dict[str, Any]] = []
    for package, folder, modes in packages:
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [
            sys.executable,
            __file__,
            "--worker",
            package,
            "--modes",
            modes,
            "--models",
            options.models,
        ]
        command += ["--dtypes", options.dtypes, "--gpus", options.gpus]
        if options.profile:
            command += ["--profile", options.profile]
        done = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=HERE)
        assert done.stdout is not None
        for line in done.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                say(rows[-1], rows)
            else:
                sys.stdout.write(line)
        done.wait()
    about = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "python": platform.python_version(),
    }
    (options.out / "results.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    if rows:
        draw(rows, options.out / "results.png")
    return 0


def say(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line of the table, with ratios to ordinary training of the same model, precision and devices."""
    key = ("model", "dtype", "gpus")
    base = next((r for r in rows if r["mode"] == "ordinary" and all(r[k] == row[k] for k in key)), None)
    name = f"{row['model']:5s} {row['dtype']:5s} {row['gpus']} GPU  {row['package']:9s} {row['mode']:9s}"
    if "error" in row:
        sys.stdout.write(f"{name} {row['error']}\n")
    else:
        ratios = ""
        if base and "ms" in base:
            ratios = f"  {row['ms'] / base['ms']:5.2f} x time {row['gib'] / base['gib']:5.2f} x memory"
        sys.stdout.write(f"{name} {row['ms']:8.1f} ms {row['gib']:7.2f} GiB{ratios}\n")
    sys.stdout.flush()


def work(options: argparse.Namespace) -> int:
    """Measure in this process, with the `opacus` that is importable here; one JSON line a measurement."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_float32_matmul_precision("high")
    from models import MODELS

    for model in options.models.split(","):
        for count in map(int, options.gpus.split(",")):
            if count > 1 and model not in ("gpt", "lora"):
                continue
            for dtype in options.dtypes.split(","):
                for mode in options.modes.split(","):
                    row = {
                        "package": options.worker,
                        "model": model,
                        "dtype": dtype,
                        "gpus": count,
                        "mode": mode,
                    }
                    devices = [torch.device("cuda", i) for i in range(count)]
                    torch.manual_seed(0)
                    try:
                        task = MODELS[model](devices, torch.bfloat16 if dtype == "bf16" else torch.float32)
                        task.model.train()
                        step = make_step(mode, task, options.worker == "published")
                        if options.profile == mode:
                            profile(step)
                        row |= measure(step, devices)
                    except Exception as error:  # a mode that cannot run is a row of the table
                        row["error"] = f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
                    sys.stdout.write(json.dumps(row) + "\n")
                    sys.stdout.flush()
                    task = step = None
                    gc.collect()
                    torch.cuda.empty_cache()
    return 0


def make_step(mode: str, task: Any, published: bool) -> Any:
    """A function that runs one step of `mode`."""
    model, losses = task.model, task.losses
    inner = task.optimizer([p for p in model.parameters() if p.requires_grad])
    if mode == "ordinary":

        def step() -> None:
            inner.zero_grad()
            losses(model).sum().backward()
            inner.step()

        return step
    from opacus.grad_sample.utils import wrap_model
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    options = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    hooks = wrap_model(model, mode, False, loss_reduction="sum", strict=False, **options)
    kind = DPOptimizerFastGradientClipping if mode == "ghost" else DPOptimizer
    optimizer = kind(
        inner,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=task.batch_size,
        loss_reduction="sum",
    )
    if mode == "bk":
        optimizer.attach_book(hooks.policy)

    def backward(loss_B: Tensor) -> None:
        if mode != "ghost":
            loss_B.sum().backward()
        elif not published:
            DPTensorFastGradientClipping(hooks, optimizer, loss_B, "sum").backward()
        else:  # the published class wants the wrapped module; these are its two passes
            loss_B.sum().backward(retain_graph=True)
            optimizer.zero_grad()
            coefficients = hooks.get_clipping_coef()
            hooks.disable_hooks()
            (coefficients.to(loss_B.device) * loss_B).sum().backward()
            hooks.enable_hooks()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        backward(losses(model))
        optimizer.step()

    return step


def measure(step: Any, devices: list[torch.device], warm: int = 4, repeats: int = 8) -> dict[str, float]:
    """Median wall time of a step in ms, and the largest memory allocated, summed over devices, in GiB."""

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    for _ in range(warm):
        step()
    wait()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        wait()
        begin = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - begin)
    peak = sum(torch.cuda.max_memory_allocated(device) for device in devices)
    return {"ms": sorted(times)[len(times) // 2] * 1e3, "gib": peak / 2**30}


def profile(step: Any) -> None:
    """Print where a step's GPU and CPU time goes."""
    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    for order in ("cuda_time_total", "cpu_time_total"):
        table = found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
        sys.stdout.write("\n".join(line[:60] + line[-110:] for line in table.splitlines()) + "\n")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of time and memory relative to ordinary training."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((r["model"], r["dtype"], r["gpus"]) for r in rows))
    modes = list(dict.fromkeys((r["package"], r["mode"]) for r in rows if r["mode"] != "ordinary"))
    figure = Figure(figsize=(3 + 1.6 * len(cases), 7))
    for axes, what in zip(figure.subplots(2, 1, sharex=True), ("ms", "gib"), strict=True):
        for i, (package, mode) in enumerate(modes):
            heights = []
            for model, dtype, gpus in cases:
                same = [
                    r
                    for r in rows
                    if (r["model"], r["dtype"], r["gpus"]) == (model, dtype, gpus) and what in r
                ]
                base = next((r[what] for r in same if r["mode"] == "ordinary"), None)
                found = next((r[what] for r in same if (r["package"], r["mode"]) == (package, mode)), None)
                heights.append(found / base if base and found else 0.0)
            places = [c + i * 0.8 / len(modes) for c in range(len(cases))]
            label = f"{mode}" if package == "ours" else f"{mode}, Opacus 1.6.0"
            axes.bar(places, heights, width=0.8 / len(modes), label=label)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylabel("time of a step" if what == "ms" else "peak memory")
    axes.set_xticks([c + 0.4 for c in range(len(cases))], [f"{m}\n{d}\n{g} GPU" for m, d, g in cases])
    figure.axes[0].set_title("relative to ordinary training")
    figure.axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
