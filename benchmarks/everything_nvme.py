"""Training with everything on the drive: step time and its parts, against the drive's speed and against DeepSpeed.

    python benchmarks/everything_nvme.py --nvme-path DIR [--deepspeed [PYTHON]]

GPT-2's small model with its own vocabulary (163M parameters), bf16, AdamW with fp32 masters; parameters, gradients and
optimizer state on the drive. Alternately, in one run: the drive's read and write speed, and a training step with its
whole cost, for what it still has to write is waited for. Then as many steps one after another, as in training, where
that is written under the next forward. Prints medians, and two figures that have bars:

waiting   The time that the training thread waits for the drive, as far as a drive that is busy all the time does not
          explain it: min(waited, step - bytes / speed), as a share of the step.
memory    The peak, held against baseline + pool_bytes + 2 x bucket_bytes + 50 MB. The baseline is the peak of forward
          and backward of the plain model, in a process of its own, less the parameters, where each gradient is dropped
          as it arrives: what Python, torch and the activations take. (An AdamW of one element is stepped there, for
          torch's optimizers import another 70 MB of torch.)

With `--deepspeed` the same model is trained by DeepSpeed ZeRO-3 with parameters and optimizer on the same drive, in a
process of its own, by this Python or the one that is named. Without it the figures of an earlier run are quoted. Its
steps come one after another, and what it still has to write is not waited for: so they are held against those of
swapper that do, all of them and the last writes, and, which is stricter, against steps with their whole cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from benchmark import (
    bf16_model,
    keep_result,
    make_parser,
    medians,
    only_in_a_process,
    random_batch,
    settings_of,
    system,
)
from deepspeed_peer import add_deepspeed, require_deepspeed, run_deepspeed
from drive_speed import Drive
from gpt import GPT, SIZES
from peak import Peak
from timeline import share_out

import swapper
from swapper.io.handle import AsyncIOHandle
from swapper.metrics import Timeline

ALLOWANCE_BYTES = 50 * 10**6
"""For what swapping keeps in Python's memory, and holes in the heap."""

EARLIER_PEER = (
    "DeepSpeed 0.19.8 was not run (--deepspeed). On 2 cores it took 3.3 s a step and 6.2 GB for 163M parameters, in "
    "the run kept as results/2026-11-27-everything-nvme-234948.json"
)

WARM_UP = 2
"""Steps before the first that counts: files are written for the first time, and the order of use is learnt."""


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--pool-bytes", default="320MiB")
    parser.add_argument("--bucket-bytes", default="16MiB")
    parser.add_argument("--encoding", default="exact", help="of the optimizer's state: exact, packed, bf16 or int8")
    parser.add_argument("--step-in-backward", action="store_true", help="no gradient goes to the drive")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--backend", default="auto")
    add_deepspeed(parser)
    parser.add_argument("--only", choices=["baseline", "swapped"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    require_deepspeed(parser, arguments.deepspeed)
    if arguments.only:
        print(json.dumps(run_baseline(arguments) if arguments.only == "baseline" else run_swapped(arguments)))
        return
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    baseline, swapped = only_in_a_process("baseline"), only_in_a_process("swapped")
    config = make_config(arguments)
    bound_bytes = baseline["peak_bytes"] + config.pool_bytes + 2 * config.bucket_bytes + ALLOWANCE_BYTES
    record = {
        "arguments": settings_of(arguments),
        "system": system(),
        "baseline_bytes": baseline["peak_bytes"],
        "bound_bytes": bound_bytes,
        **swapped,
    }
    if arguments.deepspeed:
        record["deepspeed"] = run_peer(arguments)
    show(record)
    keep_result(arguments, "everything-nvme", record)


def make_config(arguments: argparse.Namespace) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={
            "device": "nvme",
            "master_weights": True,
            "encoding": arguments.encoding,
            "step_in_backward": arguments.step_in_backward,
        },
        offload_gradient={"device": "nvme"},
        offload_param={"device": "nvme"},
        aio={"backend": arguments.backend},
    )


def make_model(arguments: argparse.Namespace) -> GPT:
    return bf16_model(SIZES[arguments.size], arguments.vocab_size, recompute=arguments.recompute)


def batch(arguments: argparse.Namespace, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_batch(arguments.vocab_size, arguments.context, number)


def run_baseline(arguments: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of the plain model."""
    element = torch.nn.Parameter(torch.ones(1))
    element.grad = torch.ones(1)
    torch.optim.AdamW([element]).step()
    model = make_model(arguments)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    with Peak() as peak:
        for number in range(6):
            model.loss(*batch(arguments, number)).backward()  # type: ignore[no-untyped-call]
    return {"peak_bytes": peak.bytes - sum(p.nbytes for p in model.parameters())}


def run_swapped(arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps, and between them the drive alone."""
    config = make_config(arguments)
    with swapper.init(config):
        model = make_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = swapper.offload(model, optimizer, config)
    numel = sum(p.numel() for p in model.parameters())
    rows = []
    peak_bytes = 0
    with AsyncIOHandle(backend=arguments.backend, block_bytes=config.aio.block_size) as handle:
        drive = Drive(handle, arguments.nvme_path)
        for number in range(WARM_UP + arguments.rounds):
            write_bps, read_bps = drive.measure() if number >= WARM_UP else (1.0, 1.0)
            with Peak() as peak:
                row = one_step(model, optimizer, batch(arguments, number), write_bps, read_bps)
            peak_bytes = max(peak_bytes, peak.bytes - Drive.POOL_BYTES)
            if number >= WARM_UP:
                rows.append(row)
        backend = handle.backend
        drive.close()
    start_s = time.perf_counter()
    for number in range(arguments.rounds):
        model.loss(*batch(arguments, number)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    write_the_rest(model, optimizer)
    in_turn_s = (time.perf_counter() - start_s) / arguments.rounds
    model.swapper.close()  # type: ignore[operator, union-attr]
    swapper.of(optimizer).close()
    return {
        "backend": backend,
        "numel": numel,
        "peak_bytes": peak_bytes,
        "median": medians(rows),
        "in_turn_s": in_turn_s,
        "rounds": rows,
    }


def write_the_rest(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Wait for what would be written under the next forward."""
    swapper.of(optimizer).flush()
    model.swapper.flush()  # type: ignore[operator, union-attr]


def one_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    write_bps: float,
    read_bps: float,
) -> dict[str, float]:
    start_s = time.perf_counter()
    with Timeline() as timeline:
        with timeline.span("forward"):
            loss = model.loss(*data)
        with timeline.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with timeline.span("step"):
            optimizer.step()
            write_the_rest(model, optimizer)
        optimizer.zero_grad()
    stop_s = time.perf_counter()
    events = timeline.events()
    shares = share_out(events, start_s, stop_s)
    moved = {
        f"{verb}_{kind}_bytes": float(
            sum(e.length_bytes for e in events if e.name == verb and e.record is not None and e.record[1] == kind)
        )
        for verb in ("read", "write")
        for kind in ("param", "grad", "optim")
    }
    read = sum(value for name, value in moved.items() if name.startswith("read"))
    written = sum(value for name, value in moved.items() if name.startswith("write"))
    drive_s = read / read_bps + written / write_bps
    waited_s = sum(shares.waits.values())
    excess_s = min(waited_s, max(0.0, shares.took - drive_s))
    return {
        "step_s": shares.took,
        "forward_s": shares.phases["forward"],
        "backward_s": shares.phases["backward"],
        "optimizer_s": shares.phases["step"],
        "waited_for_reads_s": shares.waits["waiting for reads"],
        "waited_for_writes_s": shares.waits["waiting for writes"],
        "drive_busy_s": shares.moving,
        "drive_s": drive_s,
        "excess_share": excess_s / shares.took,
        "read_gbps": read_bps / 1e9,
        "write_gbps": write_bps / 1e9,
        "read_bytes": read,
        "written_bytes": written,
        **moved,
    }


def run_peer(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = ["--context", str(arguments.context), "--threads", str(arguments.threads)]
    flags += ["--steps", str(WARM_UP + arguments.rounds)] + ["--recompute"] * arguments.recompute
    result = run_deepspeed(arguments, *flags)
    rows = result["rows"][WARM_UP:]
    return {**result, "median": medians(rows), "in_turn_s": statistics.mean(row["step_s"] for row in rows)}


def show(record: dict[str, Any]) -> None:
    median, arguments = record["median"], record["arguments"]
    print(f"{record['system']}, engine {record['backend']}")
    print(
        f"{record['numel'] / 1e6:.0f}M parameters, bf16, AdamW, fp32 masters, 1 x {arguments['context']} tokens; "
        f"pool {arguments['pool_bytes']}, buckets {arguments['bucket_bytes']}; medians of {arguments['rounds']} rounds"
    )
    for key, value in median.items():
        unit, shown = ("MB", value / 1e6) if key.endswith("_bytes") else ("", value)
        print(f"  {key:<24} {shown:9.3f} {unit}")
    print(f"  {'one after another':<24} {record['in_turn_s']:9.3f} a step")
    print(f"waiting beyond bytes / drive's speed: {median['excess_share']:.1%} of the step (bar: under 15 %)")
    fits = "within" if record["peak_bytes"] <= record["bound_bytes"] else "OVER"
    print(
        f"peak memory: {record['peak_bytes'] / 1e6:.0f} MB, {fits} {record['bound_bytes'] / 1e6:.0f} MB = baseline "
        f"{record['baseline_bytes'] / 1e6:.0f} MB + pool + 2 x bucket + {ALLOWANCE_BYTES / 1e6:.0f} MB"
    )
    if "deepspeed" not in record:
        print(EARLIER_PEER)
        return
    peer = record["deepspeed"]
    print("DeepSpeed ZeRO-3, parameters and optimizer on NVMe, the same model:")
    for key, value in peer["median"].items():
        print(f"  {key:<24} {value:9.3f}")
    print(
        f"  peak memory {peer['peak_bytes'] / 1e6:.0f} MB\n"
        f"swapper / DeepSpeed: steps one after another {record['in_turn_s'] / peer['in_turn_s']:.2f} (bar: 0.45, with "
        f"int8 0.35), with their whole cost {median['step_s'] / peer['median']['step_s']:.2f}, "
        f"memory {record['peak_bytes'] / peer['peak_bytes']:.2f} (bar: 0.25)"
    )


if __name__ == "__main__":
    main()
