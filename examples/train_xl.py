"""Train a model that does not fit: a GPT of 1.3 billion parameters in 3 GB of memory, everything of it on the drive.

    mkdir -p .swapper && python examples/train_xl.py --nvme-path .swapper

What a program of your own needs is in `train`: `swapper.init` around the model, `swapper.offload` for it and its
optimizer, and then the loop as ever. The rest of this file starts it under a hard limit of memory, and shows where the
time went.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
from gpt import GPT, SIZES
from memory_limit import limit_memory
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text import batches, load_text
from timeline import PHASES, Shares, draw, share_out, sketch

import swapper
from swapper.metrics import Timeline, TimelineEvent

_CONFIG = Path(__file__).resolve().parents[1] / "config" / "everything_nvme.yaml"
_PLAIN_BYTES = 16
"""Of plain PyTorch, per parameter: bf16 parameter and gradient, fp32 master weight, and AdamW's two moments in fp32."""
_DISK_BYTES = 14.3
"""Of files, per parameter: the same without the half of the master that is the parameter, and some rounding up."""


class Arguments(argparse.Namespace):
    """The command line, typed."""

    size: str
    steps: int
    batch_size: int
    context: int
    lr: float
    data: Path | None
    seed: int
    threads: int
    config: Path
    nvme_path: list[Path] | None
    memory_limit: str
    limit_by: str
    picture: Path
    inside: bool


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(
        description="Train a GPT whose parameters, gradients and optimizer state do not fit in memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", choices=SIZES, default="1.3b", help="size class of examples/gpt.py")
    parser.add_argument("--steps", type=positive, default=3, help="a step is tens of seconds on two cores")
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=512, help="bytes in a window")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of AdamW")
    parser.add_argument("--data", type=Path, help="file to train on instead of Python's own source files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="torch's")
    parser.add_argument("--config", type=Path, default=_CONFIG, help="what to swap, and how")
    parser.add_argument("--nvme-path", type=Path, nargs="+", help="directories to swap to, instead of the config's")
    parser.add_argument("--memory-limit", default="3GB", help="the most memory that training may have")
    parser.add_argument(
        "--limit-by",
        choices=["auto", "cgroup", "rlimit"],
        default="auto",
        help="what enforces the limit: a cgroup, which counts everything, or RLIMIT_DATA, which needs no permission",
    )
    parser.add_argument("--picture", type=Path, default=Path("train-xl.png"), help=".png or .svg of the last step")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # It is under the limit already.
    arguments = parser.parse_args(namespace=Arguments())
    if arguments.context > SIZES[arguments.size].context:
        parser.error(f"--context: {arguments.size} has {SIZES[arguments.size].context} positions")
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(f"--data: {arguments.data} is not a file")
    if arguments.picture.suffix not in (".png", ".svg") or not os.access(arguments.picture.parent, os.W_OK):
        parser.error(f"--picture: {arguments.picture} is not a .png or .svg in a directory that can be written to")
    return arguments


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def train(arguments: Arguments, console: Console) -> list[TimelineEvent]:
    """Train, and return what happened when. No file of the swapper's is left behind."""
    config = swapper.OffloadConfig.load(arguments.config, nvme_path=arguments.nvme_path)
    torch.set_default_dtype(torch.bfloat16)
    with swapper.init(config):
        model = GPT(SIZES[arguments.size], recompute=True)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    model, optimizer = swapper.offload(model, optimizer, config)
    data = batches(load_text(arguments.data), arguments.batch_size, arguments.context, arguments.seed)
    try:
        with Timeline() as timeline, Steps(console, model, arguments.steps) as steps:
            for _ in range(arguments.steps):
                tokens, targets = next(data)
                with timeline.span("forward"), steps.phase("forward"):
                    loss = model.loss(tokens, targets)
                with timeline.span("backward"), steps.phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                with timeline.span("step"), steps.phase("step"):
                    optimizer.step()
                optimizer.zero_grad()
                steps.done(loss.item())
            swapper.of(optimizer).flush()
        return timeline.events()
    finally:
        swapper.close(model, optimizer)
