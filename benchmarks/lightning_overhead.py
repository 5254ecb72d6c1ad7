"""Measures what `SwapStrategy` adds to a step when nothing is swapped: Lightning's strategy and ours in turn.

    python benchmarks/lightning_overhead.py --rounds 121 --steps 100

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
    parser.add_argument("--rounds", type=int, default=121, help="of both strategies in turn")
    parser.add_argument("--steps", type=int, default=100, help="in each")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, lightning {L.__version__}")
    stock: list[float] = []
    ours: list[float] = []
    for number in range(arguments.rounds):
        pair = [(stock, "auto"), (ours, swapper.lightning.SwapStrategy({}))]
        for found, strategy in pair if number % 2 else reversed(pair):
            found.append(step_s(strategy, arguments.steps))
    ratios = sorted(mine / theirs for mine, theirs in zip(ours, stock, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(f"stock strategy: {1e6 * statistics.median(stock):8.1f} us a step, the median of {arguments.rounds} rounds")
    print(f"SwapStrategy:   {1e6 * statistics.median(ours):8.1f} us a step")
    print(f"ratio, the median of rounds: {statistics.median(ratios):.3f}, half of them from {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
