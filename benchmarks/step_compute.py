"""What the arithmetic of a step costs: bf16 parameters with masters, state in memory, nothing on a drive.

Each optimizer is measured in turn with plain `AdamW(fused=True)` on fp32 parameters of the same shapes, once
natively and once with `native_step: off`. "ratio" is its time by that of the plain one in the same round.

    python benchmarks/step_compute.py [--size small] [--threads 1 2] [--bucket-bytes 32MiB 2MiB] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, settings_of, system, timed
from gpt import GPT, SIZES

import swapper

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW(fused=True)": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "SGD(momentum=0.9)": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--bucket-bytes", nargs="+", default=["32MiB"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--native", choices=["auto", "on", "off"], nargs="+", default=["auto", "off"])
    parser.add_argument("--save", action="store_true", help="keep the result in results/")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    with torch.device("meta"):
        shapes = [p.shape for p in GPT(SIZES[arguments.size], arguments.vocab_size).parameters()]
    numel = sum(shape.numel() for shape in shapes)
    plain = OPTIMIZERS["AdamW(fused=True)"](made(shapes, torch.float32))
    plain.step()
    print(f"{system()}; {numel / 1e6:.0f}M parameters, bf16 with masters, state in memory", flush=True)
    print(f"{'optimizer':<20}{'native':>7}{'threads':>8}{'bucket':>8}{'plain s':>9}{'step s':>9}{'ratio':>7}")
    rows = []
    for name, make in OPTIMIZERS.items():
        for bucket_bytes in arguments.bucket_bytes:
            for native in arguments.native:
                for threads in arguments.threads:
                    torch.set_num_threads(threads)
                    row = measure(make, shapes, plain, bucket_bytes, native, arguments.rounds)
                    rows.append(
                        {"optimizer": name, "native": native, "threads": threads, "bucket_bytes": bucket_bytes, **row}
                    )
                    print(
                        f"{name:<20}{native:>7}{threads:>8}{bucket_bytes:>8}{row['plain_s']:>9.3f}"
                        f"{row['step_s']:>9.3f}{row['ratio']:>7.2f}",
                        flush=True,
                    )
    keep_result(arguments, "step-compute", {"system": system(), "arguments": settings_of(arguments), "rows": rows})


def made(shapes: list[torch.Size], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn(p.shape).to(dtype).mul_(1e-2)
    return parameters


def measure(
    make: Callable[[Any], torch.optim.Optimizer],
    shapes: list[torch.Size],
    plain: torch.optim.Optimizer,
    bucket_bytes: str,
    native: str,
    rounds: int,
) -> dict[str, float]:
    """Median seconds of a step of both, and of the ratio of each round."""
    config = swapper.OffloadConfig(
        pool_bytes="256MiB",
        bucket_bytes=bucket_bytes,
        offload_optimizer={"device": "cpu", "master_weights": True, "native_step": native},
    )
    optimizer = swapper.wrap_optimizer(make(made(shapes, torch.bfloat16)), config)
    for _ in range(2):  # The first makes the state, the second tries what is native.
        optimizer.step()
    times = [(timed(plain.step), timed(optimizer.step)) for _ in range(rounds)]
    swapper.of(optimizer).close()
    return {
        "plain_s": statistics.median(a for a, _ in times),
        "step_s": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


if __name__ == "__main__":
    main()
