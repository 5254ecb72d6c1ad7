"""Overlap of compute, copies and the drive on the simulated accelerator, by its clock: the same on every machine.

    python benchmarks/overlap.py --nvme-path DIR [--ways drive copies compute ...]

A GPT in bf16 with AdamW and fp32 masters, with parameters, gradients and state on the drive and the step on the device:
that of the tests (`tests/sim_device`, built by `make sim-device`; needs what the tests need). Kernels, copies in each
direction and the drive take a set time there, so a step takes what it would on a device of such speeds. In each way
another of the three is made the longest; `compute, steps in backward` is the third with `step_in_backward`.

Prints, for a step in its steady state, the mean of several: the time that it takes, how long kernels, copies up,
copies down and the drive are busy in it, and the ratio of the step to the longest of these; the bar is 1.10. Which
records stay in memory changes from step to step, and the time by up to 5 percent. And the ratio to what the order of
things allows: without `step_in_backward` the optimizer's kernels begin when those of the backward are over, so that
each of the two takes no less than the longest of its own, with what is copied, read and written in it as it was.

The model is small, so that it can be computed in full. Records, buckets and pool are as small as it is, and the speeds:
each transfer takes as long as one of a model 16 times as large on usual hardware. What Python computes is not counted,
but for 5 microseconds for each call of the device: `device.py` and `scaling.py` measure it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from benchmark import bf16_model, keep_result, make_parser, only_in_a_process, random_batch, settings_of, system
from gpt import Shape

import swapper
from swapper import session
from swapper.io.devices import DEVICES
from swapper.parameter import records
from swapper.storage.writes import RecordWrites

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "sim_device"), str(TESTS / "support")]

SCALE = 16
WIDTH, CONTEXT, VOCAB_SIZE = 256, 64, 256
BAR = 1.10

SHARES = {
    "drive": {"compute": 0.1, "copies": 0.5, "drive": 1.0},
    "copies": {"compute": 0.1, "copies": 1.0, "drive": 0.5},
    "compute": {"compute": 1.0, "copies": 0.2, "drive": 0.3},
    "compute, steps in backward": {"compute": 1.0, "copies": 0.2, "drive": 0.3},
}
"""The ways. About how long each is busy in a step of 5 million parameters, in seconds."""

STEP_BYTES = {"copies": 18, "drive": 30}
"""For each parameter, about what goes up to the device in a step, and to and from the drive: sets the speeds."""

PARAMETERS = 5_000_000

PHASES = ("forward", "backward", "optimizer")
BUSY = {"kernels": "kernels_s", "up": "up_s", "down": "down_s", "drive": "drive_s"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="before those that are printed")
    parser.add_argument("--measured", type=int, default=4, help="steps that the mean is of")
    parser.add_argument("--pool-bytes", default="12MiB")
    parser.add_argument("--bucket-bytes", default="1MiB")
    parser.add_argument("--device-bytes", help="as in offload_param; by default the least that can overlap")
    parser.add_argument("--ways", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--only", choices=list(SHARES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run(arguments)))
        return
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for way in arguments.ways:
        print(f"running: {way}", file=sys.stderr)
        results[way] = only_in_a_process(way)
    record = {"arguments": settings_of(arguments), "system": system(), "ways": results}
    show(record)
    keep_result(arguments, "overlap", record)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One way: by name of the phase, and `step` for all of it, the mean times of a training step."""
    sim_device = importlib.import_module("sim_device")
    SimulatedDrive = importlib.import_module("sim_drive").SimulatedDrive
    DEVICES["sim"] = importlib.import_module("accelerators").SimCopies
    session.AsyncIOHandle = SimulatedDrive  # type: ignore[attr-defined]
    # The thread that starts writes would wait by the clock of all. Here the next call starts them, which is later.
    RecordWrites._watch = lambda self, key, copy: None  # type: ignore[method-assign]
    records.GROUP_BYTES //= SCALE
    config = swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={
            "device": "nvme",
            "master_weights": True,
            "step_device": "device",
            "step_in_backward": arguments.only.endswith("in backward"),
        },
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme", "device_bytes": arguments.device_bytes},
    )
    model = bf16_model(Shape(arguments.layers, 4, WIDTH, CONTEXT), VOCAB_SIZE).to("sim")
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = swapper.offload(model, optimizer, config)
    seconds = SHARES[arguments.only]
    bps = {name: PARAMETERS * length / seconds[name] for name, length in STEP_BYTES.items()}
    speeds = sim_device.Speeds(
        operations_per_s=6 * PARAMETERS * CONTEXT / seconds["compute"],
        memory_bps=3e12,
        up_bps=bps["copies"],
        down_bps=bps["copies"],
    )
    sim_device.keep_time(speeds)
    SimulatedDrive.bps = bps["drive"]
    spans = {name: dict.fromkeys(vars(sim_device.times()), 0.0) for name in (*PHASES, "step")}
    for number in range(arguments.steps + arguments.measured):
        marks = [sim_device.times()]
        data = [each.to("sim") for each in random_batch(VOCAB_SIZE, CONTEXT, number)]
        loss = model.loss(*data)
        marks.append(sim_device.times())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(sim_device.times())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(sim_device.times())
        if number < arguments.steps:
            continue
        for name, (before, after) in zip(spans, [*itertools.pairwise(marks), (marks[0], marks[-1])], strict=True):
            for key, seconds_of_it in vars(after.since(before)).items():
                spans[name][key] += seconds_of_it / arguments.measured
    model.loss(*data).backward()  # type: ignore[no-untyped-call]
    torch.accelerator.synchronize()
    before = sim_device.times()
    optimizer.step()
    torch.accelerator.synchronize()
    return {
        **spans,
        "step_kernels_s": sim_device.times().since(before).kernels_s,
        "parameters": numel,
        "drive_bps": SimulatedDrive.bps,
        "speeds": vars(speeds),
    }


def show(record: dict[str, Any]) -> None:
    arguments = record["arguments"]
    print(record["system"])
    print(
        f"GPT of {arguments['layers']} layers of {WIDTH}, bf16, AdamW, fp32 masters, all on the drive; pool "
        f"{arguments['pool_bytes']}, buckets {arguments['bucket_bytes']}; seconds by the clock of the simulated device"
    )
    head = "".join(f"{name:>9}" for name in ("step", "waiting", *BUSY))
    print(f"{'longest':<28}{head}{'ratio':>9}{'in order':>10}")
    for way, result in record["ways"].items():
        step = result["step"]
        ratio = step["now_s"] / max(step[key] for key in BUSY.values())
        verdict = "" if ratio <= BAR else f"   over {BAR:.2f}"
        print(f"{way:<28}{cells(step)}{ratio:>9.3f}{step['now_s'] / in_order(way, result):>10.3f}{verdict}")
        for phase in PHASES:
            print(f"{'  ' + phase:<28}{cells(result[phase])}")


def cells(times: dict[str, float]) -> str:
    """A row of the table."""
    return "".join(f"{times[key]:>9.3f}" for key in ("now_s", "waited_s", *BUSY.values()))


def in_order(way: str, result: dict[str, Any]) -> float:
    """The least that a step could take, in seconds: see the head of this file."""
    longest = max(float(result["step"][key]) for key in BUSY.values())
    if way.endswith("in backward"):
        return longest
    # The host is through with the backward before its kernels are: those of the step itself were counted by themselves.
    optimizer = {**result["optimizer"], "kernels_s": result["step_kernels_s"]}
    passes = {key: float(result["step"][key] - optimizer[key]) for key in BUSY.values()}
    return max(passes.values()) + max(float(optimizer[key]) for key in BUSY.values())


if __name__ == "__main__":
    main()
