"""Private data parallel training of a model that is itself spread over several devices.

    torchrun --nproc-per-node=2 examples/ddp_model_parallel.py            # GPUs over NCCL; without any, emulated devices over gloo
    torchrun --nproc-per-node=2 examples/ddp_model_parallel.py --devices 1

Every rank takes the next `--devices` accelerators of its host, and puts the model's layers on them. The private optimizer clips each
rank's samples where they are, adds noise once, and adds up over ranks once a step: first devices with first devices, second with
second. Every rank then prints the same checksum, and that of one process on all records with --noise 0 and the same --seed.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.testing import spread
from opacus.utils.batch_memory_manager import BatchMemoryManager


def own_devices(count: int) -> list[torch.device]:
    """This rank's share of the host's accelerators; where there are none, emulated ones, of which every process has its own."""
    if torch.cuda.is_available():
        first = int(os.environ.get("LOCAL_RANK", "0")) * count
        return [torch.device("cuda", first + i) for i in range(count)]
    from opacus.testing.emulated_devices import install, register_gloo

    devices = install(count)
    register_gloo()
    return devices


def main() -> None:
    """Train, and print what came out."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--devices", type=int, default=2, help="accelerators of one rank")
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--noise", type=float, default=1.0, help="noise multiplier")
    arguments.add_argument("--mode", default="bk", help="grad_sample_mode")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()

    devices = own_devices(options.devices)
    # no device_id: it would bind the group to one accelerator of a replica that has several
    dist.init_process_group("nccl" if devices[0].type == "cuda" else "gloo")

    generator = torch.Generator().manual_seed(options.seed)
    features = torch.randn(2048, 32, generator=generator)
    data = TensorDataset(features, (features[:, :8].sum(1) > 0).long())

    torch.manual_seed(options.seed)
    layers = [
        nn.Linear(32, 256),
        nn.Tanh(),
        nn.Linear(256, 256),
        nn.Tanh(),
        nn.LayerNorm(256),
        nn.Linear(256, 2),
    ]
    model = DifferentiallyPrivateDistributedDataParallel(spread(nn.Sequential(*layers), devices))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=256, generator=generator),  # of all ranks together
        noise_multiplier=options.noise,
        max_grad_norm=1.0,
        grad_sample_mode=options.mode,
    )
    for epoch in range(options.epochs):
        right = seen = 0
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=64, optimizer=optimizer
        ) as batches:
            for x, y in batches:
                optimizer.zero_grad()
                output = model(x.to(devices[0]))
                y = y.to(output.device)
                nn.functional.cross_entropy(output, y).backward()
                optimizer.step()
                right, seen = right + int((output.argmax(1) == y).sum()), seen + len(y)
        checksum = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
        spent = f", epsilon {engine.get_epsilon(1e-5):.2f} at delta 1e-5" if options.noise else ""
        print(
            f"epoch {epoch + 1}, rank {dist.get_rank()} on {', '.join(map(str, devices))}: {right / max(seen, 1):.1%} of {seen} own "
            f"samples right, weights {checksum:.4f}{spent}",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
