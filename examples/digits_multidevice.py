"""Train a digit classifier with differential privacy, its layers spread over several devices.

    python examples/digits_multidevice.py --check

The data are scikit-learn's 1797 scanned digits (8 x 8 grey values, part of that package: nothing is
downloaded). The network is cut into as many pieces as there are devices: the GPUs of this machine, or two
emulated devices where it has none. `--check` trains once more on a single device and compares the weights.

Needs `pip install 'opacus[demo]'`. For repeatable runs the noise comes from `--seed`. Whoever knows that
seed can take the noise out again: for a model that leaves your hands, pass no `noise_generator`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import opacus
from opacus.accountants.utils import get_noise_multiplier
from opacus.errors import ConfigurationError
from opacus.testing import emulated_devices

TOLERANCE = 1e-6  # largest difference between the weights of the two runs of --check


class SpreadNetwork(nn.Module):
    """A small convolutional network; each block's weights live on the device given for it.

    GroupNorm in place of BatchNorm (which mixes the samples of a batch), tanh in place of ReLU (bounded
    activations keep per-sample gradients small, so less of them is clipped away).
    """

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.Tanh(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.Tanh(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.Tanh()),
            nn.Sequential(nn.Linear(32, 10)),
        ]
        self.devices = [devices[i * len(devices) // len(blocks)] for i in range(len(blocks))]
        self.blocks = nn.ModuleList(
            block.to(device) for block, device in zip(blocks, self.devices, strict=True)
        )

    def forward(self, images: Tensor) -> Tensor:
        for block, device in zip(self.blocks, self.devices, strict=True):
            images = block(images.to(device))
        return images


MOST_DEVICES = 4  # one block each


@dataclass
class Trained:
    """What one training run leaves behind."""

    model: nn.Module
    placement: list[dict[str, Any]]
    noise_multiplier: float
    history: list[dict[str, float]]
    steps: int
    seconds: float


# ------------------------------------------------------------------------------------- arguments


def read_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[torch.device]]:
    """Parse and check the command line; whatever is wrong is said at once, with exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--devices",
        default="auto",
        help="'auto' (the GPUs present, else emulated:2), 'emulated:N', or a list such as 'cuda:0,cuda:1'",
    )
    parser.add_argument("--epsilon", type=float, default=8.0, help="privacy budget (default: 8)")
    parser.add_argument("--delta", type=float, default=1e-4, help="privacy failure bound (default: 1e-4)")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the data (default: 60)")
    parser.add_argument(
        "--batch-size", type=int, default=512, help="largest mean size of a batch (default: 512)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=3.0,
        help="first learning rate of SGD, lowered along a cosine (default: 3)",
    )
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="clipping norm (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/digits"), help="folder for the plot and the JSON"
    )
    parser.add_argument("--check", action="store_true", help="train again on one device and compare")
    args = parser.parse_args(argv)

    samples = len(load_data()[0])
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)}: must be a positive, finite number"
        for name in ("epsilon", "lr", "max_grad_norm")
        if not (math.isfinite(getattr(args, name)) and getattr(args, name) > 0)
    ]
    if not 0 < args.delta < 1 / samples:
        problems.append(
            f"--delta {args.delta}: must lie between 0 and 1/{samples}, one over the training samples"
        )
    if args.epochs < 1:
        problems.append(f"--epochs {args.epochs}: must be at least 1")
    if not 1 <= args.batch_size <= samples:
        problems.append(
            f"--batch-size {args.batch_size}: must lie between 1 and the {samples} training samples"
        )
    if not 0 <= args.seed < 2**63:
        problems.append(f"--seed {args.seed}: must lie between 0 and 2**63 - 1")
    nearest = next(path for path in (args.out, *args.out.resolve().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        problems.append(f"--out {args.out}: {nearest} is no folder that can be written to")
    names, device_problems = find_devices(args.devices)
    problems += device_problems
    if not problems:
        try:
            get_noise_multiplier(
                target_epsilon=args.epsilon,
                target_delta=args.delta,
                sample_rate=1 / math.ceil(samples / args.batch_size),
                epochs=args.epochs,
                accountant="prv",
            )
        except ConfigurationError as error:
            problems += [f"--epsilon {args.epsilon}: {problem}" for problem in error.problems]
    if problems:
        parser.error("\n  ".join(problems))
    if emulated := sum(name.startswith("emu:") for name in names):
        emulated_devices.install(emulated)
    args.out.mkdir(parents=True, exist_ok=True)
    return args, [torch.device(name) for name in names]


def find_devices(wanted: str) -> tuple[list[str], list[str]]:
    """Names of the devices that `--devices` asks for, and what is wrong with them; emulates nothing yet."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if wanted == "auto":
        wanted = ",".join(gpus[:MOST_DEVICES]) or "emulated:2"
    devices: list[str] = []
    problems: list[str] = []
    for name in wanted.split(","):
        emulated = re.fullmatch(r"emulated:([1-9]\d{0,2})", name)
        if emulated:
            problems += [f"--devices {name}: {reason}" for reason in emulated_devices.unsupported_reasons()]
            devices += [f"emu:{index}" for index in range(int(emulated[1]))]
        elif name == "cpu" or name in gpus:
            devices.append(name)
        else:
            here = ", ".join(["cpu", *gpus])
            problems.append(f"--devices {name!r}: not here; this machine has {here}, and emulated:N")
    if len(devices) > MOST_DEVICES:
        problems.append(f"--devices {wanted}: {len(devices)} devices for a network of {MOST_DEVICES} blocks")
    if len(set(devices)) < len(devices):
        problems.append(f"--devices {wanted}: names a device twice")
    return devices, problems


# -------------------------------------------------------------------------------------- training


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then a held-out fifth: the same split for every seed."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    split = train_test_split(images, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)
    return train_images, train_labels, test_images, test_labels


def describe_placement(model: SpreadNetwork, rows: int) -> list[dict[str, Any]]:
    """Per device: its layers, their parameters, and the bytes of weights and grad samples of `rows` rows."""
    table = []
    for device in dict.fromkeys(model.devices):
        blocks = [b for b, place in zip(model.blocks, model.devices, strict=True) if place == device]
        layers = [layer for block in blocks for layer in block if any(True for _ in layer.parameters())]
        parameters = [p for layer in layers for p in layer.parameters()]
        weights = sum(p.numel() * p.element_size() for p in parameters)
        table.append(
            {
                "device": str(device),
                "layers": [type(layer).__name__ for layer in layers],
                "parameters": sum(p.numel() for p in parameters),
                "weight_bytes": weights,
                "grad_sample_bytes": weights * rows,
            }
        )
    return table


def print_placement(table: list[dict[str, Any]], rows: int) -> None:
    print(f"{'device':<10}{'layers':<42}{'parameters':>10}{'weights':>12}{'grad samples':>15}")
    for row in table:
        layers = ", ".join(
            f"{len(list(group))} {kind}" for kind, group in itertools.groupby(sorted(row["layers"]))
        )
        print(
            f"{row['device']:<10}{layers:<42}{row['parameters']:>10,}"
            f"{row['weight_bytes'] / 2**10:>8.1f} KiB{row['grad_sample_bytes'] / 2**20:>11.1f} MiB"
        )
    print(f"(grad samples: one gradient for each row of a batch of {rows})\n", flush=True)


def train(args: argparse.Namespace, devices: list[torch.device], label: str) -> Trained:
    """Train from `args.seed` with the layers spread over `devices`.

    Weights, Poisson batches and noise each have a stream of their own, started from the seed: they do not
    depend on the devices.
    """
    torch.manual_seed(args.seed)
    train_images, train_labels, test_images, test_labels = load_data()
    network = SpreadNetwork(devices)
    placement = describe_placement(network, args.batch_size)
    loader = DataLoader(
        TensorDataset(train_images, train_labels),
        batch_size=args.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(args.seed),
    )
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=args.lr),
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        noise_generator=torch.Generator(devices[0]).manual_seed(args.seed),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    criterion = nn.CrossEntropyLoss()
    history = []
    steps = 0
    start = time.perf_counter()
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log file needs no moving bar
    for epoch in (bar := tqdm(range(1, args.epochs + 1), desc=label, unit="epoch", mininterval=interval)):
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            logits = model(images)
            loss = criterion(logits, labels.to(logits.device))
            loss.backward()
            optimizer.step()
            steps += 1
            losses.append(loss.detach().cpu())
        schedule.step()
        history.append(
            {
                "epoch": epoch,
                "loss": torch.stack(losses).nanmean().item(),  # an empty Poisson batch has no mean loss
                "accuracy": accuracy(model, test_images, test_labels),
                "epsilon": float(engine.get_epsilon(args.delta)),
            }
        )
        bar.set_postfix({k: f"{v:.3f}" for k, v in history[-1].items() if k != "epoch"}, refresh=False)
    seconds = time.perf_counter() - start
    return Trained(network, placement, float(optimizer.noise_multiplier), history, steps, seconds)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = (model(images).argmax(1).cpu() == labels).float().mean().item()
    model.train()
    return right


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Largest absolute difference between two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)


# ---------------------------------------------------------------------------------------- report


def draw(history: list[dict[str, float]], args: argparse.Namespace, path: Path) -> None:
    """Accuracy and spent budget over the epochs, one panel each."""
    epochs = [row["epoch"] for row in history]
    figure = Figure(figsize=(7, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(epochs, [100 * row["accuracy"] for row in history], color="C0")
    label = f"{history[-1]['accuracy']:.1%} "
    top.annotate(
        label, (epochs[-1], 100 * history[-1]["accuracy"]), (0, -14), textcoords="offset points", ha="right"
    )
    top.set(
        ylabel="test accuracy (%)",
        ylim=(0, 102),
        title="Handwritten digits, learned with differential privacy",
    )
    bottom.plot(epochs, [row["epsilon"] for row in history], color="C1")
    bottom.axhline(args.epsilon, color="0.5", linestyle="--", linewidth=1)
    bottom.annotate(
        f"budget {args.epsilon:g}", (epochs[0], args.epsilon), (0, -11), textcoords="offset points"
    )
    bottom.set(xlabel="epoch", ylabel=f"epsilon at delta {args.delta:g}", ylim=(0, None))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    args, devices = read_arguments(argv)
    torch.backends.cudnn.deterministic = True  # on GPUs, so that two runs can be compared
    names = ", ".join(map(str, devices))
    count = f"{len(devices)} device" + "s" * (len(devices) > 1)
    print(f"opacus {opacus.__version__}, torch {torch.__version__}; {count}: {names}\n")
    print_placement(describe_placement(SpreadNetwork(devices), args.batch_size), args.batch_size)

    trained = train(args, devices, count)
    final = trained.history[-1]
    print(
        f"\ntest accuracy {final['accuracy']:.1%} on held-out digits at epsilon {final['epsilon']:.2f}, "
        f"delta {args.delta:g}\n({trained.steps} steps, noise multiplier {trained.noise_multiplier:.3f}, "
        f"{trained.seconds:.0f} s)"
    )
    record = {
        "arguments": {**vars(args), "out": str(args.out), "devices": [str(device) for device in devices]},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "opacus": opacus.__version__,
        },
        "placement": trained.placement,
        "noise_multiplier": trained.noise_multiplier,
        "history": trained.history,
        "final": {**final, "steps": trained.steps, "seconds": round(trained.seconds, 2)},
    }
    passed = True
    if args.check:
        difference = largest_difference(trained.model, train(args, devices[:1], "1 device").model)
        passed = difference <= TOLERANCE
        record["check"] = {"one_device": str(devices[0]), "largest_difference": difference}
        print(f"\nlargest difference to one device: {difference}")
        if not passed:
            print(f"check failed: above {TOLERANCE:g}", file=sys.stderr)

    draw(trained.history, args, args.out / "digits.png")
    (args.out / "digits.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{args.out / 'digits.png'}\n{args.out / 'digits.json'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
