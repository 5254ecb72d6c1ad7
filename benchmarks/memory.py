"""Peak memory of training a GPT: without an optimizer, with plain PyTorch, and with the state swapped.

    python benchmarks/memory.py --nvme-path DIR

Each runs in a process of its own: the same forward and backward, bf16, AdamW. What is measured is anonymous and shared
memory (a sampling thread reads /proc/self/status), which is what a process cannot do without; mapped file pages can be
dropped. Prints the peaks, and the bound that swapper promises:

    peak without an optimizer + pool_bytes + 2 x bucket_bytes + 100 MB
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from benchmark import bf16_model, make_parser, only_in_a_process, random_batch, timed
from gpt import Shape
from optimizers import MasterWeights
from peak import Peak

import swapper

MODES = ("no optimizer", "plain", "plain with masters", "swapped")


def main() -> None:
    parser = make_parser(__doc__, results=False)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pool-bytes", default="256MiB")
    parser.add_argument("--bucket-bytes", default="32MiB")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--only", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(run(arguments.only, arguments)))
        return
    results = {mode: only_in_a_process(mode) for mode in arguments.modes}
    if "swapped" in results and "no optimizer" in results:
        config = make_config(arguments)
        bound = results["no optimizer"]["peak_bytes"] + config.pool_bytes + 2 * config.bucket_bytes + 100 * 10**6
        results["swapped"]["bound_bytes"] = bound
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, pool {arguments.pool_bytes}")
    for mode, result in results.items():
        bound_text = f"  (bound {result['bound_bytes'] / 1e6:.0f} MB)" if "bound_bytes" in result else ""
        print(
            f"  {mode:<20} {result['numel'] / 1e6:.0f}M parameters  peak {result['peak_bytes'] / 1e6:7.0f} MB  "
            f"optimizer step {result['step_s']:.2f} s  last loss {result['loss']:.6f}{bound_text}"
        )


def make_config(arguments: argparse.Namespace) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={"device": "nvme", "master_weights": True},
    )


def run(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    shape = Shape(arguments.layers, arguments.width // 64, arguments.width, arguments.context)
    model = bf16_model(shape, arguments.vocab_size)
    masters = MasterWeights(model) if mode == "plain with masters" else None
    optimizer: torch.optim.Optimizer | None = None
    if mode != "no optimizer":
        parameters = [p for _, p in masters.named_masters] if masters else list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if mode == "swapped":
        assert optimizer is not None
        swapper.wrap_optimizer(optimizer, make_config(arguments))

    def step() -> None:
        if masters:
            masters.take_gradients()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if masters:
            masters.write_back()
        model.zero_grad()

    times_s = []
    with Peak() as peak:
        for number in range(arguments.steps):
            loss = model.loss(*random_batch(arguments.vocab_size, arguments.context, number))
            loss.backward()  # type: ignore[no-untyped-call]
            times_s.append(timed(step))
    if mode == "swapped":
        assert optimizer is not None
        swapper.of(optimizer).close()
    numel = sum(p.numel() for p in model.parameters())
    return {"peak_bytes": peak.bytes, "numel": numel, "loss": loss.item(), "step_s": statistics.median_high(times_s)}


if __name__ == "__main__":
    main()
