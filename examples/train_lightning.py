"""Train the GPT of `train_gpt.py` under Lightning, with its optimizer state on disk.

    python examples/train_lightning.py fit --trainer.strategy swapper.lightning.SwapStrategy \
        --trainer.strategy.config config/tiny.yaml
    python examples/train_lightning.py fit ... --ckpt_path last  # goes on where an epoch ended

`make train-lightning` runs the first.

Nothing in here knows of swapper but the monitor: the strategy is an argument of the command line, as are the files of
`config/`. Without one the same bits are computed in memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from gpt import GPT, SIZES
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from text import load_text
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import swapper
from swapper.lightning import SwapMonitor

_CHECKPOINTS = ".swapper/lightning"


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Random windows of a text, of which each number has its own; targets are one byte later."""

    def __init__(self, text: Tensor, context: int, count: int, seed: int) -> None:
        self._text, self._context, self._count, self._seed = text, context, count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        start = int(torch.randint(len(self._text) - self._context, (), generator=generator))
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]


class Text(L.LightningDataModule):
    """Python's own source files as bytes, or a file.

    Args:
        data: a file to train on instead.
        batch_size: windows in a batch.
        context: bytes in a window.
        steps: batches in an epoch.
        seed: of the windows.
    """

    def __init__(
        self, data: Path | None = None, batch_size: int = 8, context: int = 128, steps: int = 150, seed: int = 0
    ) -> None:
        super().__init__()
        self.data, self.batch_size, self.context, self.steps, self.seed = data, batch_size, context, steps, seed

    def setup(self, stage: str) -> None:
        self.text = load_text(self.data)

    def _loader(self, batches: int, seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
        windows = Windows(self.text, self.context, batches * self.batch_size, seed)
        return DataLoader(windows, batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(self.steps, self.seed + 1 + self._epoch())

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return self._loader(4, self.seed)

    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0


class Model(L.LightningModule):
    """The GPT, with AdamW and a learning rate that falls to a tenth.

    Args:
        size: nanoGPT's size class: tiny, small, medium, 1.3b or xl.
        lr: peak learning rate.
    """

    def __init__(self, size: str = "tiny", lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.lr = size, lr
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:  # Lightning calls this again; and with parameters on disk, this is where they go there.
            self.gpt = GPT(SIZES[self.size], 256, tied=False)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        assert self.gpt is not None
        loss = self.gpt.loss(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        assert self.gpt is not None
        self.log("val_loss", self.gpt.loss(*batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = max(1, int(self.trainer.estimated_stepping_batches))
        scheduler = LambdaLR(optimizer, lambda step: 1 - 0.9 * min(1.0, step / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def digest(model: torch.nn.Module) -> str:
    """Of all parameters: the same for the same bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        with swapper.gathered(parameter):
            found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    callbacks = [ModelCheckpoint(_CHECKPOINTS, monitor="val_loss", save_last=True), SwapMonitor()]
    # Each epoch has windows of its own; they are those of its number, also when a run is resumed.
    defaults = {"max_epochs": 3, "devices": 1, "logger": False, "reload_dataloaders_every_n_epochs": 1}
    cli = LightningCLI(
        Model,
        Text,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={**defaults, "callbacks": callbacks},
    )
    print(f"parameters: {digest(cli.model)}")


if __name__ == "__main__":
    main()
