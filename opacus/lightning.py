"""Private training data for Lightning: a data module whose training batches are Poisson sampled.

Needs the `lightning` extra (`pip install opacus[lightning]`). Both import names of the library are supported,
`lightning.pytorch` and `pytorch_lightning`; where both are installed, the one imported first is used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist

from opacus.data_loader import DPDataLoader
from opacus.errors import ConfigurationError

__all__ = ["DPLightningDataModule"]

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def _data_module_class() -> Any:
    """Lightning's own class; `object` where Lightning is missing, which is said when a data module is made."""
    for name in sorted(_LIBRARIES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).LightningDataModule
        except ModuleNotFoundError:
            continue
    return object


_LightningDataModule: Any = _data_module_class()


class DPLightningDataModule(_LightningDataModule):
    """Wraps a Lightning data module: training batches are Poisson sampled, all else is passed through.

    Under an initialised process group of several ranks each rank draws its share of the Poisson batch; then pass
    `use_distributed_sampler=False` to the Trainer, which would replace the sampling otherwise.

    Args:
        datamodule: a `LightningDataModule` whose `train_dataloader` gives one `DataLoader`.
        generator: stream of the draws; the loader's own when `None`.

    Raises:
        ModuleNotFoundError: when Lightning is not installed.
        ConfigurationError: when `datamodule` is of another class than the installed Lightning's.

    Formal guarantee:
        As for `DPDataLoader`: each training record is in each batch independently with probability at most the
        loader's sample rate.
    """

    def __init__(self, datamodule: Any, generator: torch.Generator | None = None) -> None:
        if _LightningDataModule is object:
            raise ModuleNotFoundError("DPLightningDataModule needs Lightning: pip install opacus[lightning]")
        super().__init__()
        if not isinstance(datamodule, _LightningDataModule):
            base = _LightningDataModule
            raise ConfigurationError(
                "DPLightningDataModule cannot start",
                [
                    f"datamodule is a {type(datamodule).__qualname__}, not a {base.__module__}.{base.__qualname__}. Derive "
                    f"it from that class, or import your Lightning library before opacus.lightning."
                ],
            )
        self.datamodule = datamodule
        self.generator = generator

    def train_dataloader(self) -> DPDataLoader:
        """Poisson-sampled loader in place of the wrapped data module's.

        Raises:
            ConfigurationError: listing what is wrong with the wrapped data module's loader.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return DPDataLoader.from_data_loader(
            self.datamodule.train_dataloader(), generator=self.generator, distributed=several
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning sets `trainer`; the wrapped data module's hooks expect to find it too."""
        super().__setattr__(name, value)
        if name == "trainer" and "datamodule" in vars(self):
            self.datamodule.trainer = value

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.datamodule.setup(stage)

    def teardown(self, stage: str | None = None) -> None:
        self.datamodule.teardown(stage)

    def val_dataloader(self) -> Any:
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self.datamodule.transfer_batch_to_device(batch, device, dataloader_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_before_batch_transfer(batch, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.datamodule.on_after_batch_transfer(batch, dataloader_idx)

    def on_exception(self, exception: BaseException) -> None:
        self.datamodule.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        return self.datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(state_dict)
