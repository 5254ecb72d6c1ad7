"""Train a byte-level GPT with its optimizer state on disk.

    mkdir -p .swapper && python examples/train_gpt.py --config config/tiny.yaml --nvme-path .swapper --compare

Everything that swapping needs is in `train`: load a config, wrap the optimizer, close it at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from gpt import GPT, SIZES, Shape
from optimizers import NAMES, MasterWeights, make_optimizers
from program import peak_resident_bytes, positive, run
from rich.console import Console
from screen import Bar, Result, Traffic, table
from text import batches, decode, encode, load_text
from torch.optim.lr_scheduler import LambdaLR

import swapper

_CONFIG = Path(__file__).resolve().parents[1] / "config" / "tiny.yaml"
_PROMPT = "def "
_GENERATED_BYTES = 400


class Arguments(argparse.Namespace):
    """The command line, typed."""

    size: str
    vocab_size: int
    tied: bool
    data: Path | None
    config: Path
    nvme_path: list[Path] | None
    steps: int
    batch_size: int
    context: int | None
    dtype: str
    device: str
    optimizer: str
    lr: float | None
    seed: int
    threads: int
    compare: bool
    plain: bool
    generate: bool
    json: Path | None


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with its optimizer state on disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="nanoGPT's size class")
    parser.add_argument("--vocab-size", type=positive, default=256, help="token ids; bytes need 256")
    parser.add_argument("--tied", action="store_true", help="share the embedding's weight with the output layer")
    parser.add_argument("--data", type=Path, help="file to train on instead of Python's own source files")
    parser.add_argument("--config", type=Path, default=_CONFIG, help="what to swap, and how")
    parser.add_argument("--nvme-path", type=Path, nargs="+", help="directories to swap to, instead of the config's")
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--context", type=positive, help="bytes in a window, instead of the size class's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--optimizer", choices=NAMES, default="adamw")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the optimizer's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="torch's, on the CPU")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--compare", action="store_true", help="then run the same steps without swapping, and compare")
    mode.add_argument("--plain", action="store_true", help="run without swapping")
    parser.add_argument("--no-generate", dest="generate", action="store_false", help="end without generated text")
    parser.add_argument("--json", type=Path, help="write the results to this file instead of showing them")
    arguments = parser.parse_args(namespace=Arguments())
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if arguments.vocab_size < 256:
        parser.error("--vocab-size: a byte can have 256 values")
    if arguments.lr is not None and arguments.lr < 0:
        parser.error("--lr: must not be negative")
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(f"--data: {arguments.data} is not a file")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json: {arguments.json.parent} is not a directory")
    return arguments


def make_model(arguments: Arguments) -> GPT:
    size = SIZES[arguments.size]
    shape = Shape(size.layers, size.heads, size.width, arguments.context or size.context)
    model = GPT(shape, arguments.vocab_size, arguments.tied)
    return model.to(device=arguments.device, dtype=getattr(torch, arguments.dtype))


def train(model: GPT, arguments: Arguments, console: Console) -> Result:
    """Train `model` in place, swapping unless `arguments.plain`. No file of the swapper's is left behind."""
    text = load_text(arguments.data)
    config = swapper.OffloadConfig.load(arguments.config, nvme_path=arguments.nvme_path)
    # The plain run that a swapped one equals to the bit has masters where the config asks swapper for them.
    mixed = arguments.dtype != "float32" and config.offload_optimizer.master_weights
    masters = MasterWeights(model) if arguments.plain and mixed else None
    named_parameters = model.named_parameters() if masters is None else masters.named_masters
    optimizers = make_optimizers(arguments.optimizer, named_parameters, arguments.lr)
    swapped: list[swapper.OptimizerSwapper] = []
    losses: list[float] = []
    step_s: list[float] = []
    optimizer_step_s: list[float] = []
    try:
        if not arguments.plain:
            for optimizer in optimizers:
                swapper.wrap_optimizer(optimizer, config)
                swapped.append(swapper.of(optimizer))
        schedulers = [LambdaLR(o, lambda step: _lr_factor(step, arguments.steps)) for o in optimizers]
        data = batches(text, arguments.batch_size, model.context, arguments.seed)
        with Bar(console, "plain" if arguments.plain else "swapped", arguments.steps) as bar:
            for step in range(arguments.steps):
                start_s = _now_s(arguments.device)
                tokens, targets = (tensor.to(arguments.device) for tensor in next(data))
                loss = model.loss(tokens, targets)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                before_s = _now_s(arguments.device)
                if masters is not None:
                    masters.take_gradients()
                for optimizer in optimizers:
                    optimizer.step()
                if masters is not None:
                    masters.write_back()
                end_s = _now_s(arguments.device)
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.zero_grad()
                    scheduler.step()
                losses.append(loss.item())
                step_s.append(end_s - start_s)
                optimizer_step_s.append(end_s - before_s)
                bar.update(step + 1, losses[-1], step_s[-1], _traffic(swapped))
        for each in swapped:
            each.flush()
        traffic = _traffic(swapped)
        peak_bytes = peak_resident_bytes()
    finally:
        for each in swapped:
            each.close()
    return Result(
        losses=[loss.hex() for loss in losses],
        parameters_sha256=_sha256(model),
        step_s=statistics.median(step_s),
        optimizer_step_s=statistics.median(optimizer_step_s),
        peak_resident_bytes=peak_bytes,
        peak_cuda_bytes=torch.cuda.max_memory_allocated() if arguments.device == "cuda" else 0,
        traffic=traffic,
    )


def train_plain(arguments: Arguments) -> Result:
    """The same steps without swapping, in a second process, so that each has a peak memory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "plain.json"
        same = [argument for argument in sys.argv[1:] if argument != "--compare"]
        command = [sys.executable, __file__, *same, "--plain", "--no-generate", "--json", str(file)]
        # In a session of its own Ctrl-C reaches only this process, which then ends the other.
        ended = subprocess.run(command, start_new_session=True)
        if ended.returncode != 0:
            raise SystemExit(ended.returncode)
        return Result(**json.loads(file.read_text())["plain"])


def _lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
    return min(1.0, (step + 1) / (steps / 10)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _now_s(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _traffic(swapped: list[swapper.OptimizerSwapper]) -> Traffic | None:
    """The counters of every optimizer together: bytes add up, the pool is one and the same."""
    if not swapped:
        return None
    stats = [each.stats() for each in swapped]
    return Traffic(
        read=sum(s.bytes_read for s in stats),
        written=sum(s.bytes_written for s in stats),
        wait_s=sum(s.wait_read_s + s.wait_write_s for s in stats),
        state=sum(s.state_bytes for s in stats),
        pool=max(s.pool_bytes for s in stats),
        pool_used=max(s.pool_used_bytes for s in stats),
        pool_peak=max(s.pool_peak_bytes for s in stats),
    )


def _sha256(model: GPT) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        digest.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return digest.hexdigest()


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":  # kernels that add in no fixed order would hide what --compare looks for
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    model = make_model(arguments)

    name = "plain" if arguments.plain else "swapped"
    results = {name: train(model, arguments, console)}
    if arguments.compare:
        results["plain"] = train_plain(arguments)
    if arguments.generate:
        console.rule("generated")
        tokens = model.generate(encode(_PROMPT), _GENERATED_BYTES, seed=arguments.seed)
        console.print(decode(tokens), markup=False, highlight=False, soft_wrap=True)
        console.rule()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: asdict(result) for name, result in results.items()}))
        return 0

    numel = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"GPT {arguments.size}, {numel:,} parameters, {arguments.dtype}, {arguments.optimizer}")
    console.print(f"{arguments.steps} steps of {arguments.batch_size} x {model.context} bytes on {arguments.device}")
    console.print(table(results))
    if not arguments.compare:
        return 0
    same_losses = results["swapped"].losses == results["plain"].losses
    same_parameters = results["swapped"].parameters_sha256 == results["plain"].parameters_sha256
    console.print(f"losses equal to the bit: {'yes' if same_losses else 'NO'}")
    console.print(f"parameters equal to the bit: {'yes' if same_parameters else 'NO'}")
    return 0 if same_losses and same_parameters else 1


if __name__ == "__main__":
    run("train_gpt", main)
