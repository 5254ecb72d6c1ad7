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
import subprocess
import sys
import time
from pathlib import Path

import torch
from peak import Peak

import swapper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, Shape
from optimizers import MasterWeights

MODES = ("no optimizer", "plain", "plain with masters", "swapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, required=True)
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
    results = {mode: in_a_process(mode) for mode in arguments.modes}
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


def in_a_process(mode: str) -> dict[str, float]:
    command = [sys.executable, *sys.argv, "--only", mode]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def make_config(arguments: argparse.Namespace) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=arguments.nvme_path,
        pool_bytes=arguments.pool_bytes,
        bucket_bytes=arguments.bucket_bytes,
        offload_optimizer={"device": "nvme", "master_weights": True},
    )


def run(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    shape = Shape(arguments.layers, arguments.width // 64, arguments.width, arguments.context)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # The model is never whole in fp32, which would be the peak.
    model = GPT(shape, arguments.vocab_size)
    torch.set_default_dtype(default)
    masters = MasterWeights(model) if mode == "plain with masters" else None
    optimizer: torch.optim.Optimizer | None = None
    if mode != "no optimizer":
        parameters = [p for _, p in masters.named_masters] if masters else list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if mode == "swapped":
        assert optimizer is not None
        swapper.wrap_optimizer(optimizer, make_config(arguments))
    times_s = []
    with Peak() as peak:
        for step in range(arguments.steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(arguments.vocab_size, (1, arguments.context + 1), generator=generator)
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            start_s = time.perf_counter()
            if masters:
                masters.take_gradients()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if masters:
                masters.write_back()
            model.zero_grad()
            times_s.append(time.perf_counter() - start_s)
    times_s.sort()
    if mode == "swapped":
        assert optimizer is not None
        swapper.of(optimizer).close()
    numel = sum(p.numel() for p in model.parameters())
    return {"peak_bytes": peak.bytes, "numel": numel, "loss": loss.item(), "step_s": times_s[len(times_s) // 2]}


if __name__ == "__main__":
    main()
