"""What `SwapStrategy` adds to a step of Lightning's when nothing is swapped: the stock strategy and ours in turn.

    python benchmarks/lightning_overhead.py --rounds 5 --steps 400

Times are of the whole `fit`, without its first steps, of a model so small that Lightning's own work is most of a step.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import swapper.lightning

_FIRST_STEPS = 20


class Tiny(L.LightningModule):
    """Two small layers, trained with AdamW and clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.times_s: list[float] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        self.times_s.append(time.perf_counter())
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def step_s(strategy: Any, steps: int) -> float:
    """The median time from one step to the next."""
    model = Tiny()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps + _FIRST_STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(torch.randn(4 * (steps + _FIRST_STEPS), 32), batch_size=4))  # type: ignore[arg-type]
    times = model.times_s[_FIRST_STEPS:]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description="What SwapStrategy adds to a step when nothing is swapped.")
    parser.add_argument("--rounds", type=int, default=5, help="of both strategies in turn")
    parser.add_argument("--steps", type=int, default=400, help="in each")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, lightning {L.__version__}")
    stock: list[float] = []
    ours: list[float] = []
    for _ in range(arguments.rounds):
        stock.append(step_s("auto", arguments.steps))
        ours.append(step_s(swapper.lightning.SwapStrategy({}), arguments.steps))
    # What else the machine did can only make a round slower, so the fastest of each is nearest to what it takes.
    print(f"stock strategy: {1e6 * min(stock):8.1f} us a step, the fastest of {arguments.rounds} rounds")
    print(f"SwapStrategy:   {1e6 * min(ours):8.1f} us a step: {100 * (min(ours) / min(stock) - 1):+.1f} %")


if __name__ == "__main__":
    main()
