"""Training on several ranks: FSDP2 with its optimizer on the drive, beside plain FSDP2 and DeepSpeed ZeRO-3.

    python benchmarks/sharded.py --nvme-path DIR [--ranks 2] [--deepspeed [PYTHON]]

GPT-2's small model with its own vocabulary (163M parameters), bf16, AdamW with fp32 masters; gloo ranks on this host,
one thread each. Every contestant makes its shards without ever having the whole model, and trains in processes of its
own, in which memory that is freed goes back to the system; the contestants take turns, `--rounds` times. Prints
medians, and figures that have bars:

step     swapper's, with every write waited for, against DeepSpeed's with its optimizer on the same drive.
memory   the peak of the largest rank: against DeepSpeed's, and against the sum that a rank has to fit in: plain FSDP2
         without optimizer state + pool_bytes + 2 x bucket_bytes + 100 MB.

`gradients` has gradients on the drive, too, as the peer has; `everything` has parameters and gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmark import keep_result, make_parser, only_in_a_process, random_batch, settings_of, system
from deepspeed_peer import add_deepspeed, require_deepspeed, run_deepspeed
from gpt import GPT, SIZES
from peak import Peak
from rank_processes import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapper

ALLOWANCE_BYTES = 100 * 10**6
WARM_UP = 2
"""Steps before the first that counts: files are written for the first time."""


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="of each contestant in each round")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--pool-bytes", default="96MiB", help="of each rank")
    parser.add_argument("--bucket-bytes", default="8MiB")
    add_deepspeed(parser)
    parser.add_argument("--only", choices=sorted(CONTESTANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_deepspeed(parser, arguments.deepspeed)
    # Else glibc keeps what a thread frees: as much again as the model's gradients, which is no contestant's own. What
    # is mapped anew for each tensor is in huge pages then, or the kernel would clear it in small ones for a third of a
    # step. It reads both when a process starts, so they hold for the ranks.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    if arguments.only:
        print(json.dumps(run_ranks(train, arguments.ranks, arguments, arguments.only)))
        return
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    names = [*CONTESTANTS, *(["deepspeed"] if arguments.deepspeed else [])]
    found: dict[str, list[Any]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            found[name].append(run_peer(arguments) if name == "deepspeed" else only_in_a_process(name))
    result = {
        "arguments": settings_of(arguments),
        "system": system(),
        "contestants": {name: summary(runs) for name, runs in found.items()},
    }
    show(result, config_of(arguments))
    keep_result(arguments, "sharded", result)


def config_of(arguments: argparse.Namespace, *others: str) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={"device": "nvme", "master_weights": True},
        **{f"offload_{other}": {"device": "nvme"} for other in others},
    )


def swapped(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> Callable[[], object]:
    """State on the drive, and masters; every write is waited for."""
    swapper.wrap_optimizer(optimizer, config_of(arguments))
    return step_and_flush(optimizer)


def gradients(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> Callable[[], object]:
    """Gradients on the drive, too, as DeepSpeed has them where its optimizer is there."""
    swapper.offload(model, optimizer, config_of(arguments, "gradient"))
    return step_and_flush(optimizer)


def everything(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> Callable[[], object]:
    """Parameters and gradients on the drive, too."""
    swapper.offload(model, optimizer, config_of(arguments, "param", "gradient"))
    return step_and_flush(optimizer)


def step_and_flush(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    def step() -> None:
        optimizer.step()
        swapper.of(optimizer).flush()

    return step


def plain(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> Callable[[], object]:
    """Plain FSDP2, state in memory, without masters."""
    return optimizer.step


def stateless(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace
) -> Callable[[], object]:
    """Forward and backward of plain FSDP2 alone, after an AdamW of one element: its imports take memory, too."""
    element = torch.nn.Parameter(torch.ones(1))
    element.grad = torch.ones(1)
    torch.optim.AdamW([element]).step()
    return lambda: None


CONTESTANTS = {
    "swapper": swapped,
    "gradients": gradients,
    "everything": everything,
    "plain": plain,
    "stateless": stateless,
}


SWAPPED = ("swapper", "gradients", "everything")


def train(rank: int, arguments: argparse.Namespace, name: str) -> dict[str, Any]:
    """Steps of one contestant on one rank."""
    with Peak() as peak:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = GPT(SIZES[arguments.size], arguments.vocab_size)
        torch.set_default_dtype(default)
        for module in (model.tokens, *model.blocks, model.head):
            fully_shard(module)
        fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                assert isinstance(p, DTensor)
                p.to_local().normal_(std=0.02)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        optimizer_step = CONTESTANTS[name](model, optimizer, arguments)
        rows = []
        for number in range(WARM_UP + arguments.steps):
            data = random_batch(arguments.vocab_size, arguments.context, number * arguments.ranks + rank)
            torch.distributed.barrier()
            start_s = time.perf_counter()
            model.loss(*data).backward()  # type: ignore[no-untyped-call]
            middle_s = time.perf_counter()
            optimizer_step()
            torch.distributed.barrier()  # The slowest rank's step is the step.
            stop_s = time.perf_counter()
            optimizer.zero_grad()
            rows.append({"step_s": stop_s - start_s, "optimizer_s": stop_s - middle_s})
        if name in SWAPPED:
            swapper.of(optimizer).close()
        if name == "everything":
            model.swapper.close()  # type: ignore[operator, union-attr]
    return {"peak_bytes": peak.bytes, "rows": rows[WARM_UP:]}


def run_peer(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    flags = ["--context", str(arguments.context), "--steps", str(WARM_UP + arguments.steps), "--threads", "1"]
    results = run_deepspeed(arguments, *flags, "--ranks", str(arguments.ranks), "--parameters-in-memory")
    return [{**each, "rows": each["rows"][WARM_UP:]} for each in results]


def summary(runs: list[Any]) -> dict[str, float]:
    """Medians of the steps of the first rank, of all runs, and of the largest rank's peaks."""
    rows = [row for ranks in runs for row in ranks[0]["rows"]]
    return {
        "step_s": statistics.median(row["step_s"] for row in rows),
        "optimizer_s": statistics.median(row["optimizer_s"] for row in rows),
        "peak_bytes": statistics.median(max(each["peak_bytes"] for each in ranks) for ranks in runs),
    }


def show(result: dict[str, Any], config: swapper.OffloadConfig) -> None:
    arguments, found = result["arguments"], result["contestants"]
    print(
        f"{result['system']}; {arguments['ranks']} ranks, bf16, AdamW, {arguments['context']} tokens a rank; pool "
        f"{arguments['pool_bytes']}, buckets {arguments['bucket_bytes']}; {arguments['rounds']} rounds in turn"
    )
    for name, figures in found.items():
        print(
            f"  {name:<10} step {figures['step_s']:6.2f} s, of which optimizer {figures['optimizer_s']:6.2f} s; "
            f"peak of a rank {figures['peak_bytes'] / 1e6:7.0f} MB"
        )
    mine = found["swapper"]
    bound_bytes = found["stateless"]["peak_bytes"] + config.pool_bytes + 2 * config.bucket_bytes + ALLOWANCE_BYTES
    fits = "within" if mine["peak_bytes"] <= bound_bytes else "OVER"
    print(f"memory of a rank: {fits} {bound_bytes / 1e6:.0f} MB = without state + pool + 2 x bucket + 100 MB")
    if peer := found.get("deepspeed"):
        for name in SWAPPED:
            mine = found[name]
            print(
                f"{name} / DeepSpeed: step {mine['step_s'] / peer['step_s']:.2f} (bar: 0.5), "
                f"memory {mine['peak_bytes'] / peer['peak_bytes']:.2f} (bar: 0.25)"
            )


if __name__ == "__main__":
    main()
