"""Measures how long `swapper.save_checkpoint` holds training, with everything on disk, beside `torch.save` with fsync.

    python benchmarks/checkpoint.py --nvme-path DIR
    python benchmarks/checkpoint.py --nvme-path DIR --replicas 2 [--cap 100MB] [--sizes 0.4GB]

For each size of state (parameters and AdamW's moments, fp32) a model is trained for a few steps with a checkpoint
after each and `keep_last: 2`. The stall is what `save_checkpoint` takes until it returns, with everything synced; the
cost per record is that over the files that were linked. Beside it `torch.save` of tensors of the same bytes, which are
in memory already, into a new file that is synced: alternately, medians. And the first writes after each checkpoint, to
blocks that were never written, which are slower: there are none once the files of old checkpoints come back.

With `--replicas` so many gloo ranks have the same model and state in memory, as under DDP, and what each writes goes at
most at the speed of one drive (`FaultPlan.bytes_per_second`), as with a drive, or a way to the drives, for each rank.
Rank 0 alone, while the others wait, and all together (`together=True`) save in turn; medians and their ratio.
Ends with 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, make_parser, settings_of, timed
from rank_processes import run_ranks
from torch import nn

import swapper
from swapper.bench.contestants import torch_save
from swapper.bench.machine import machine, swapper_version
from swapper.config import format_size, parse_size
from swapper.files import file_buffers
from swapper.io.handle import AsyncIOHandle, FaultPlan

FEATURES = 1024
"""A layer of so many by four times so many is 16 MiB."""


@dataclass
class Result:
    """Of one size of state."""

    state_bytes: int
    records: int = 0
    stalls_s: list[float] = field(default_factory=list)
    torch_save_s: list[float] = field(default_factory=list)
    first_writes: list[int] = field(default_factory=list)

    def line(self) -> str:
        stall_s = statistics.median(self.stalls_s)
        text = f"{format_size(self.state_bytes):>9}  {self.records:4} records  stall {stall_s * 1e3:7.1f} ms"
        text += f" ({min(self.stalls_s) * 1e3:.1f} to {max(self.stalls_s) * 1e3:.1f})"
        text += f"  {stall_s / self.records * 1e6:6.0f} us per record"
        if self.torch_save_s:
            torch_s = statistics.median(self.torch_save_s)
            text += f"  torch.save {torch_s:6.2f} s  ratio {stall_s / torch_s:.4f}"
        return text + f"  first writes after each: {self.first_writes}"


def measure(nvme_path: Path, state_bytes: int, rounds: int, compare: bool) -> Result:
    layer_bytes = 3 * 4 * FEATURES * 4 * FEATURES
    model = nn.Sequential(*(nn.Linear(FEATURES, 4 * FEATURES, bias=False) for _ in range(state_bytes // layer_bytes)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="512MiB",
        offload_optimizer={"device": "nvme"},
        offload_param={"device": "nvme"},
        checkpoint={"keep_last": 2},
    )
    swapper.offload(model, optimizer, config)
    parameters = vars(model)["swapper"]
    result = Result(state_bytes)
    directory = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=nvme_path))
    try:
        before = 0
        for turn in range(rounds):
            for p in model.parameters():
                p.grad = torch.full((1,), 1e-3).expand(p.shape)  # Without memory of its own.
            optimizer.step()
            optimizer.zero_grad()
            swapper.of(optimizer).flush()
            parameters.flush()
            now = swapper.of(optimizer).stats().first_writes
            if turn:
                result.first_writes.append(now - before)
            before = now
            target = directory / f"step-{turn}"
            start_s = time.perf_counter()
            swapper.save_checkpoint(target, model, optimizer).wait()
            result.stalls_s.append(time.perf_counter() - start_s)
            result.records = sum(name.endswith(".safetensors") for name in os.listdir(target)) - 1
            if compare:
                result.torch_save_s.append(time_torch_save(directory / "plain.pt", state_bytes))
            print(f"  {format_size(state_bytes)}, checkpoint {turn + 1} of {rounds}", end="\r", flush=True)
    finally:
        shutil.rmtree(directory)
        swapper.of(optimizer).close()
        parameters.close(keep_values=False)
    return result


def time_torch_save(path: Path, length_bytes: int) -> float:
    """Seconds to save tensors of so many bytes, in memory, and sync them."""
    piece_bytes = 16 << 20
    state = {str(i): torch.full((piece_bytes // 4,), float(i)) for i in range(length_bytes // piece_bytes)}
    took_s = timed(lambda: torch_save(state, path))
    path.unlink()
    return took_s


def save_replicas(rank: int, directory: str, state_bytes: int, rounds: int, cap: int) -> dict[str, list[float]]:
    """Seconds of each save until it is there, by who has written, of parameters and moments in memory."""
    drive: Any = functools.partial(AsyncIOHandle, faults=FaultPlan(bytes_per_second=cap))
    file_buffers.AsyncIOHandle = drive  # type: ignore[attr-defined]
    torch.manual_seed(0)
    layers = state_bytes // (3 * 4 * FEATURES * 4 * FEATURES)
    model = nn.Sequential(*(nn.Linear(FEATURES, 4 * FEATURES, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for p in model.parameters():
        p.grad = torch.full((1,), 1e-3).expand(p.shape)
    optimizer.step()
    times_s: dict[str, list[float]] = {"rank 0": [], "together": []}
    for turn in range(rounds):
        for who, each in times_s.items():
            target = f"{directory}/{who.replace(' ', '-')}-{turn}"
            torch.distributed.barrier()
            start_s = time.perf_counter()
            if who == "together" or rank == 0:
                swapper.save_checkpoint(target, model, optimizer, together=who == "together").wait()
            torch.distributed.barrier()
            each.append(time.perf_counter() - start_s)
            if rank == 0:
                shutil.rmtree(target)
    return times_s


def compare_replicas(arguments: argparse.Namespace) -> None:
    cap = parse_size(arguments.cap)
    found = {}
    for size in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.nvme_path) as directory:
            work = (directory, parse_size(size), arguments.rounds, cap)
            found[size] = times_s = run_ranks(save_replicas, arguments.replicas, *work)[0]
        alone_s, together_s = (statistics.median(each) for each in times_s.values())
        spread = ", ".join(f"{who} {min(each):.2f} to {max(each):.2f} s" for who, each in times_s.items())
        print(
            f"{size} on {arguments.replicas} ranks, {cap / 1e9:.2f} GB/s each: rank 0 alone {alone_s:.2f} s, together "
            f"{together_s:.2f} s, ratio {together_s / alone_s:.2f} ({spread})"
        )
    content = {"swapper": swapper_version(), "machine": asdict(machine()), "arguments": settings_of(arguments)}
    keep_result(arguments, "checkpoint-replicas", content | {"times_s": found})


def main() -> None:
    parser = make_parser(__doc__, rounds=6)
    parser.add_argument("--replicas", type=int, help="ranks that have the same, and save it together")
    parser.add_argument("--cap", default="100MB", help="bytes per second that each of the replicas writes")
    parser.add_argument("--sizes", default="0.5GB,2GB,8GB", help="of state, separated by commas")
    parser.add_argument("--compare-up-to", default="2GB", help="largest size that torch.save is timed for")
    arguments = parser.parse_args()
    if arguments.replicas:
        compare_replicas(arguments)
        return
    results = []
    for size in arguments.sizes.split(","):
        state_bytes = parse_size(size)
        compare = state_bytes <= parse_size(arguments.compare_up_to)
        results.append(measure(arguments.nvme_path, state_bytes, arguments.rounds, compare))
        print(results[-1].line())
    content = {"swapper": swapper_version(), "machine": asdict(machine()), "results": [asdict(r) for r in results]}
    keep_result(arguments, "checkpoint", content)


if __name__ == "__main__":
    main()
