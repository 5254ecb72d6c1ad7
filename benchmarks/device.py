"""Training on an accelerator with everything on the drive, against host memory, and against no swapping where it fits.

    python benchmarks/device.py --nvme-path DIR [--size 1.3b] [--tokens 4096]

A GPT in bf16 with its own vocabulary, AdamW with fp32 masters, on this machine's accelerator. Four ways, each in a
process of its own:

drive     parameters, gradients and optimizer state on the drive
memory    the same with `device: cpu`: all three in page-locked memory
plain     nothing is swapped
compute   forward and backward of the plain model, where each gradient is dropped as it arrives, and AdamW on a piece of
          the parameters, scaled up: what no swapping could be faster than

A way for which the device or the host has too little memory is left out, and that is said. Prints, as medians: the
time of a step and its share of waiting, the bytes that moved, the peaks of device and host memory, the speed of the
drive and of copies between host and device as measured in the same run, and the ratio of `drive` to the largest of
compute, bytes / drive and bytes / copies. 7b takes 98 GB on the drive; 2.7b takes 38.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from benchmark import bf16_model, keep_result, make_parser, medians, only_in_a_process, settings_of, system
from drive_speed import Drive
from gpt import GPT, SIZES, Shape
from peak import Peak
from timeline import share_out

import swapper
from swapper.io.handle import AsyncIOHandle
from swapper.metrics import Timeline
from swapper.storage.buffers import BufferPool

SHAPES = {
    **SIZES,
    "2.7b": Shape(layers=32, heads=20, width=2560, context=1024),
    "7b": Shape(layers=32, heads=32, width=4096, context=1024),
}

WAYS = ("compute", "plain", "memory", "drive")

WARM_UP = 2
"""Steps before the first that counts: files are written for the first time, and the order of use is learnt."""

PIECE_NUMEL = 1 << 26
"""Elements on which AdamW alone is measured."""

COPY_BYTES = 256 << 20

Step = Callable[[int], dict[str, float]]


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--size", choices=sorted(SHAPES), default="1.3b")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step; sequences of the model's length")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--pool-bytes", default="4GiB", help="of the way `drive`")
    parser.add_argument("--bucket-bytes", default="64MiB")
    parser.add_argument("--step-device", choices=["auto", "cpu", "device"], default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if torch.accelerator.current_accelerator() is None:
        parser.error("this machine has no accelerator that torch can use: there is nothing to measure")
    if arguments.only:
        print(json.dumps(run(arguments)))
        return
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for way in arguments.ways:
        print(f"measuring: {way}", file=sys.stderr)
        try:
            results[way] = only_in_a_process(way)
        except subprocess.CalledProcessError as error:
            print(f"{way}: failed with exit status {error.returncode}; what it printed is above", file=sys.stderr)
    record = {"arguments": settings_of(arguments), "system": system(), "device": name_of_device(), "ways": results}
    show(record)
    keep_result(arguments, "device", record)


# --- The ways ---------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One way: steps, and between them the drive and the copies alone."""
    device = current_device()
    accelerator = torch.get_device_module(device)
    step = {"compute": compute, "plain": plain, "memory": swapped, "drive": swapped}[arguments.only](arguments, device)
    rows = []
    host_bytes = 0
    with AsyncIOHandle() as handle:
        drive = Drive(handle, arguments.nvme_path)
        copies = CopySpeed(device)
        for number in range(WARM_UP + arguments.rounds):
            speeds = {**drive_speed(drive), **copies.measure()} if number >= WARM_UP else {}
            if number == WARM_UP:
                accelerator.reset_peak_memory_stats(device)
            with Peak() as peak:
                row = step(number)
            host_bytes = max(host_bytes, peak.bytes - Drive.POOL_BYTES - COPY_BYTES)
            if number >= WARM_UP:
                rows.append({**row, **speeds})
        device_bytes = accelerator.max_memory_allocated(device) - COPY_BYTES
        drive.close()
    return {"median": medians(rows), "rounds": rows, "device_bytes": device_bytes, "host_bytes": host_bytes}


def swapped(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Everything on the drive, or in page-locked memory."""
    config = make_config(arguments)
    built_on_the_drive = swapper.init(config) if arguments.only == "drive" else nullcontext()
    with built_on_the_drive, device:
        model = make_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = swapper.offload(model, optimizer, config)

    def step(number: int) -> dict[str, float]:
        data = batch(arguments, number, device)
        start_s = time.perf_counter()
        with Timeline() as timeline:
            with timeline.span("forward"):
                loss = model.loss(*data)
            with timeline.span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            with timeline.span("step"):
                optimizer.step()
                # What would move under the next forward is waited for: a step with its whole cost.
                swapper.of(optimizer).flush()
                model.swapper.flush()  # type: ignore[operator, union-attr]
                torch.accelerator.synchronize(device)
            optimizer.zero_grad()
        stop_s = time.perf_counter()
        events = timeline.events()
        shares = share_out(events, start_s, stop_s)
        moved = {verb: float(sum(e.length_bytes for e in events if e.name == verb)) for verb in ("read", "write")}
        return {
            "step_s": shares.took,
            "waiting_share": sum(shares.waits.values()) / shares.took,
            "read_bytes": moved["read"],
            "written_bytes": moved["write"],
        }

    return step


def plain(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Nothing is swapped: fp32 masters beside the bf16 parameters, as everybody writes it."""
    with device:
        model = make_model(arguments)
    parameters: list[torch.Tensor] = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    def step(number: int) -> dict[str, float]:
        data = batch(arguments, number, device)
        start_s = time.perf_counter()
        model.loss(*data).backward()  # type: ignore[no-untyped-call]
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        optimizer.zero_grad()
        torch.accelerator.synchronize(device)
        return {"step_s": time.perf_counter() - start_s}

    return step


def compute(arguments: argparse.Namespace, device: torch.device) -> Step:
    """Forward, backward and AdamW, and nothing kept between them but the parameters."""
    with device:
        model = make_model(arguments)
        piece = torch.nn.Parameter(torch.zeros(PIECE_NUMEL))
        piece.grad = torch.zeros(PIECE_NUMEL)
    optimizer = torch.optim.AdamW([piece], lr=1e-4)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    pieces = sum(p.numel() for p in model.parameters()) / PIECE_NUMEL

    def step(number: int) -> dict[str, float]:
        data = batch(arguments, number, device)
        start_s = time.perf_counter()
        model.loss(*data).backward()  # type: ignore[no-untyped-call]
        torch.accelerator.synchronize(device)
        middle_s = time.perf_counter()
        optimizer.step()
        torch.accelerator.synchronize(device)
        return {"step_s": middle_s - start_s + pieces * (time.perf_counter() - middle_s)}

    return step


def make_config(arguments: argparse.Namespace) -> swapper.OffloadConfig:
    where = {"device": "nvme" if arguments.only == "drive" else "cpu"}
    return swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={**where, "master_weights": True, "step_device": arguments.step_device},
        offload_gradient=where,
        offload_param=where,
    )


def make_model(arguments: argparse.Namespace) -> GPT:
    return bf16_model(SHAPES[arguments.size], arguments.vocab_size, recompute=arguments.recompute)


def batch(arguments: argparse.Namespace, number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, int64 of shape (sequences, length)."""
    length = min(SHAPES[arguments.size].context, arguments.tokens)
    generator = torch.Generator().manual_seed(number)
    window = torch.randint(arguments.vocab_size, (arguments.tokens // length, length + 1), generator=generator)
    return window[:, :-1].to(device), window[:, 1:].to(device)


# --- The machine ------------------------------------------------------------------------------------------------------


def current_device() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def name_of_device() -> str:
    module = torch.get_device_module(current_device())
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else current_device().type


def drive_speed(drive: Drive) -> dict[str, float]:
    write_bps, read_bps = drive.measure()
    return {"write_bps": write_bps, "read_bps": read_bps}


class CopySpeed:
    """The speed of copies between memory of a pool and the device, each direction alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What torch page-locks itself is in no count of the process where the driver has it: see `Peak`.
        self._lease = BufferPool(COPY_BYTES, device=device).acquire(COPY_BYTES)
        self._there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)

    def measure(self) -> dict[str, float]:
        host = self._lease.tensor
        return {"up_bps": self._run(self._there, host), "down_bps": self._run(host, self._there)}

    def _run(self, destination: torch.Tensor, source: torch.Tensor) -> float:
        start_s = time.perf_counter()
        for _ in range(4):
            destination.copy_(source, non_blocking=True)
        torch.accelerator.synchronize(self._device)
        return 4 * COPY_BYTES / (time.perf_counter() - start_s)


# --- What is printed --------------------------------------------------------------------------------------------------


def show(record: dict[str, Any]) -> None:
    arguments, ways = record["arguments"], record["ways"]
    print(f"{record['system']}, {record['device']}")
    print(
        f"GPT {arguments['size']}, bf16, AdamW, fp32 masters, {arguments['tokens']} tokens a step; pool "
        f"{arguments['pool_bytes']}, buckets {arguments['bucket_bytes']}; medians of {arguments['rounds']} rounds"
    )
    print(f"{'':<10}{'step':>9}{'waiting':>9}{'read':>10}{'written':>10}{'device':>10}{'host':>10}")
    for way, result in ways.items():
        median = result["median"]
        waiting = f"{median['waiting_share']:.1%}" if "waiting_share" in median else ""
        moved = [f"{median[key] / 1e9:.2f} GB" if key in median else "" for key in ("read_bytes", "written_bytes")]
        peaks = [f"{result[key] / 1e9:.2f} GB" for key in ("device_bytes", "host_bytes")]
        cells = "".join(f"{cell:>10}" for cell in (*moved, *peaks))
        print(f"{way:<10}{median['step_s']:>7.2f} s{waiting:>9}{cells}")
    if "drive" not in ways:
        return
    median = ways["drive"]["median"]
    speeds = {key: median[key] for key in ("read_bps", "write_bps", "up_bps", "down_bps")}
    print("drive: " + ", ".join(f"{key[:-4]} {value / 1e9:.2f} GB/s" for key, value in speeds.items()))
    bounds = {
        "drive": median["read_bytes"] / speeds["read_bps"] + median["written_bytes"] / speeds["write_bps"],
        "copies": max(median["read_bytes"] / speeds["up_bps"], median["written_bytes"] / speeds["down_bps"]),
    }
    if "compute" in ways:
        bounds["compute"] = ways["compute"]["median"]["step_s"]
    longest = max(bounds, key=lambda name: bounds[name])
    print(f"step / {longest} ({bounds[longest]:.2f} s, the longest bound): {median['step_s'] / bounds[longest]:.2f}")
    for way in ("memory", "plain"):
        if way in ways:
            print(f"step / {way}: {median['step_s'] / ways[way]['median']['step_s']:.2f}")


if __name__ == "__main__":
    main()
