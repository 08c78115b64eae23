"""DPLightningDataModule inside a real Lightning Trainer, where Lightning is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opacus.data_loader import DPDataLoader
from opacus.errors import ConfigurationError

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
needs_lightning = pytest.mark.skipif(not HAS_LIGHTNING, reason="needs the lightning extra")

WITHOUT = """
import sys
sys.modules["lightning"] = sys.modules["lightning.pytorch"] = sys.modules["pytorch_lightning"] = None
from opacus.lightning import DPLightningDataModule
try:
    DPLightningDataModule(None)
except ModuleNotFoundError as error:
    assert "opacus[lightning]" in str(error), error
else:
    raise SystemExit("no error")
"""


def test_without_lightning_the_module_imports_and_names_the_extra_when_used():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def numbers():
    return TensorDataset(torch.arange(100.0).reshape(100, 1))


def make_datamodule():
    import lightning.pytorch as pl

    class Data(pl.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.calls = []

        def prepare_data(self):
            self.calls.append("prepare_data")

        def setup(self, stage=None):
            self.calls.append(("setup", stage))

        def teardown(self, stage=None):
            self.calls.append(("teardown", stage))

        def train_dataloader(self):
            self.calls.append(f"train, trainer {self.trainer is not None}")
            return DataLoader(numbers(), batch_size=25)

        def val_dataloader(self):
            return DataLoader(numbers(), batch_size=10)

        def test_dataloader(self):
            return "test"

        def predict_dataloader(self):
            return "predict"

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [x + 1000 for x in batch]

        def state_dict(self):
            return {"position": 7}

        def load_state_dict(self, state_dict):
            self.calls.append(state_dict)

    return Data()


@needs_lightning
def test_training_batches_are_poisson_sampled_and_the_stream_is_the_given_one():
    from opacus.lightning import DPLightningDataModule

    def batches():
        data = DPLightningDataModule(make_datamodule(), torch.Generator().manual_seed(3))
        data.trainer = object()
        loader = data.train_dataloader()
        assert type(loader) is DPDataLoader
        assert loader.sample_rate == 0.25
        return [x.flatten().tolist() for (x,) in loader]

    assert batches() == batches()


@needs_lightning
def test_everything_else_is_passed_through():
    from opacus.lightning import DPLightningDataModule

    inner = make_datamodule()
    data = DPLightningDataModule(inner)
    assert (data.test_dataloader(), data.predict_dataloader()) == ("test", "predict")
    assert data.val_dataloader().batch_size == 10
    assert data.state_dict() == {"position": 7}
    data.load_state_dict({"position": 8})
    assert inner.calls == [{"position": 8}]


@needs_lightning
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_fits_on_it(tmp_path):
    import lightning.pytorch as pl

    from opacus.lightning import DPLightningDataModule

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.sizes, self.smallest = [], []

        def training_step(self, batch, index):
            (x,) = batch
            self.sizes.append(len(x))
            self.smallest.append(x.min().item())
            return self.layer(x).sum()

        def validation_step(self, batch, index):
            assert len(batch[0]) == 10

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    inner, model = make_datamodule(), Model()
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, DPLightningDataModule(inner, torch.Generator().manual_seed(0)))
    assert len(model.sizes) == 5 * 4
    assert len(set(model.sizes)) > 1  # Poisson batches vary in size
    assert min(model.smallest) >= 1000
    assert inner.calls == ["prepare_data", ("setup", "fit"), "train, trainer True", ("teardown", "fit")]


@needs_lightning
def test_another_data_module_is_refused_by_name():
    from opacus.lightning import DPLightningDataModule

    with pytest.raises(ConfigurationError, match="DataLoader, not a lightning"):
        DPLightningDataModule(DataLoader(numbers()))
