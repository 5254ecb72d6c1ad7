"""Train a model that does not fit: a GPT of 1.3 billion parameters in 3 GB of memory, everything of it on the drive.

    mkdir -p .swapper && python examples/train_xl.py --nvme-path .swapper

What a program of your own needs is in `train`: `swapper.init` around the model, `swapper.offload` for it and its
optimizer, and then the loop as ever. The rest of this file starts it under a hard limit of memory, and shows where the
time went.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpt import GPT, SIZES
from memory_limit import limit_memory
from program import add_limit_by, gb, peak_resident_bytes, positive, run
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from text import batches, load_text
from timeline import PHASES, draw, share_out, sketch

import swapper
from swapper.metrics import Timeline, TimelineEvent
from swapper.storage.runs import remove_stale_runs

_CONFIG = Path(__file__).resolve().parents[1] / "config" / "everything_nvme.yaml"
_NAMES = {"forward": "  forward", "backward": "  backward", "step": "  optimizer.step()"}
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
    parser.add_argument("--lr", type=float, default=7e-7, help="of AdamW; so low because there is no warm-up")
    parser.add_argument("--data", type=Path, help="file to train on instead of Python's own source files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="torch's")
    parser.add_argument("--config", type=Path, default=_CONFIG, help="what to swap, and how")
    parser.add_argument("--nvme-path", type=Path, nargs="+", help="directories to swap to, instead of the config's")
    parser.add_argument("--memory-limit", default="3GB", help="the most memory that training may have")
    add_limit_by(parser)
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
        model.swapper.close()  # type: ignore[operator, union-attr]
        swapper.of(optimizer).close()


class Steps:
    """Progress of `steps` steps: on a terminal a live bar, which moves with each block that is computed.

    A context manager.
    """

    def __init__(self, console: Console, model: GPT, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._done = 0
        self._loss = ""
        self._times_s: dict[str, float] = {}
        # In forward each block is computed once, in backward once more; the step is as much as one of them.
        self._part = len(model.blocks)
        self._progress = Progress(
            TextColumn("step {task.fields[number]}/{task.fields[steps]} {task.description:<8}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=3 * self._part * steps, number=1, steps=steps, loss="")
        self._hooks = [
            block.register_forward_hook(lambda *_: self._progress.advance(self._task)) for block in model.blocks
        ]

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` within it."""
        self._progress.update(self._task, description=name, number=self._done + 1)
        start_s = time.perf_counter()
        yield
        self._times_s[name] = time.perf_counter() - start_s

    def done(self, loss: float) -> None:
        """A step is over."""
        self._done += 1
        times = ", ".join(f"{name} {took_s:.1f} s" for name, took_s in self._times_s.items())
        self._progress.update(self._task, completed=3 * self._part * self._done, loss=f"loss {loss:.3f}")
        self._console.print(f"step {self._done}/{self._steps}  loss {loss:.3f}  {times}", highlight=False)


def show(console: Console, events: list[TimelineEvent], picture: Path, what: str) -> None:
    """Show where the time of the steps went, and draw the last of them."""
    starts_s = [event.start_s for event in events if event.name == PHASES[0]]
    stops_s = [event.stop_s for event in events if event.name == PHASES[-1]]
    steps = [(*bounds, share_out(events, *bounds)) for bounds in zip(starts_s, stops_s, strict=True)]
    grid = Table()
    grid.add_column("seconds")
    for number in range(len(steps)):
        grid.add_column(f"step {number + 1}", justify="right")

    shares = [each for *_, each in steps]
    rows = {"step": [each.took for each in shares]}
    rows |= {_NAMES[phase]: [each.phases[phase] for each in shares] for phase in PHASES}
    rows |= {wait: [each.waits[wait] for each in shares] for wait in shares[0].waits}
    rows["drive at work"] = [each.moving for each in shares]
    for name, values in rows.items():
        grid.add_row(name, *(f"{value:.1f}" for value in values))
    for verb in ("read", "write"):
        moved = [sum(e.length_bytes for e in events if e.name == verb and a <= e.start_s < b) for a, b, _ in steps]
        grid.add_row(f"GB {'read' if verb == 'read' else 'written'}", *(f"{each / 1e9:.1f}" for each in moved))
    console.print(grid)

    start_s, stop_s, _ = steps[-1]
    width = max(20, min(100, console.width) - 28)
    console.print(f"The last step, {stop_s - start_s:.1f} s from left to right:")
    for name, shades in sketch(events, start_s, stop_s, width):
        console.print(f"{name:>26} {shades}", highlight=False, markup=False, no_wrap=True)
    try:
        parts_s = [middle_of(name, events, start_s, stop_s) for name in ("forward", "step")]
        draw(picture, events, start_s, stop_s, parts_s, title=what)
    except ImportError:
        console.print("No picture: that needs matplotlib (pip install matplotlib).")
    else:
        console.print(f"Timeline: {picture.resolve()}", soft_wrap=True, highlight=False)


def middle_of(name: str, events: list[TimelineEvent], start_s: float, stop_s: float) -> tuple[float, float]:
    """A part of a phase of the step between: long enough for a few records."""
    phase = next(event for event in events if event.name == name and start_s <= event.start_s < stop_s)
    middle_s = (phase.start_s + phase.stop_s) / 2
    half_s = (stop_s - start_s) / 100
    return middle_s - half_s, middle_s + half_s


def run_inside(arguments: Arguments) -> int:
    """Under the limit: train, and show how it went."""
    console = Console()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    events = train(arguments, console)
    peak_bytes = peak_resident_bytes()
    show(console, events, arguments.picture, f"GPT {arguments.size}: parameters, gradients and optimizer on the drive")
    console.print(f"Peak resident memory: {gb(peak_bytes)} of {arguments.memory_limit}", highlight=False)
    return 0


def run_limited(arguments: Arguments) -> int:
    """Say what is to come, and start this script again under the limit."""
    console = Console(soft_wrap=True, highlight=False)
    limit_bytes = swapper.config.parse_size(arguments.memory_limit)
    config = swapper.OffloadConfig.load(arguments.config, nvme_path=arguments.nvme_path)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in GPT(SIZES[arguments.size]).parameters())
    plain_bytes = _PLAIN_BYTES * numel
    console.print(f"GPT {arguments.size}: {numel:,} parameters, bf16 with fp32 master weights, AdamW")
    console.print(
        f"Plain PyTorch needs {gb(plain_bytes)} ({_PLAIN_BYTES} bytes a parameter) and activations; "
        f"allowed are {gb(limit_bytes)}, {plain_bytes / limit_bytes:.1f} times less"
    )
    disk_bytes = int(_DISK_BYTES * numel)
    free_bytes = sum(shutil.disk_usage(path).free for path in config.nvme_paths)
    places = " and ".join(map(str, config.nvme_paths))
    if disk_bytes > free_bytes:
        raise swapper.SwapError(
            f"{gb(disk_bytes)} of files are needed ({_DISK_BYTES} bytes a parameter), and {gb(free_bytes)} are free "
            f"in {places}; name another directory by --nvme-path"
        )
    console.print(f"On the drive: {gb(disk_bytes)} of files; {gb(free_bytes)} are free in {places}")
    with limit_memory(limit_bytes, by=arguments.limit_by) as limit:
        console.print(f"Limit of memory: {limit.how}" + (f" ({limit.why_not})" if limit.why_not else ""))
        outcome = limit.run([sys.executable, __file__, *sys.argv[1:], "--inside"])
    for path in config.nvme_paths:
        remove_stale_runs(path)  # If the kernel ended it: what was on the drive is of no use to anyone.
    if outcome.over_limit:
        raise swapper.SwapError(
            f"the kernel ended the training, which wanted more than {gb(limit_bytes)}; allow more by --memory-limit, "
            "or set a smaller pool_bytes in the config"
        )
    if outcome.peak_bytes:
        console.print(f"Peak of the cgroup, page cache and Python's libraries included: {gb(outcome.peak_bytes)}")
    return outcome.returncode


def main() -> int:
    arguments = parse_arguments()
    return run_inside(arguments) if arguments.inside else run_limited(arguments)


if __name__ == "__main__":
    run("train_xl", main, inner="--inside" in sys.argv)
