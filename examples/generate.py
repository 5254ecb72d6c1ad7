"""Generate with a model that does not fit: a Llama of 2.2 GB in 1.2 GB of memory, its weights in its own files.

    mkdir -p .swapper && python examples/generate.py --nvme-path .swapper

What a program of your own needs is in `open_swapped`: `swapper.from_pretrained`. The rest of this file makes a model
(random weights of TinyLlama's shape, in shards as a download has them), starts the generation under a hard limit of
memory, runs it in plain transformers as well, without a limit, and compares all tokens and logits.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from memory_limit import limit_memory
from program import add_limit_by, gb, peak_resident_bytes, positive, run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.generation.streamers import BaseStreamer

import swapper
from swapper.handle import AsyncIOHandle
from swapper.storage.buffers import BufferPool
from swapper.storage.runs import remove_stale_runs

SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1024},
    "1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000},
    "2.9b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "vocab_size": 32000},
}
"""By name: what is not the same for all. "1.1b" is TinyLlama's shape, "2.9b" that of Llama 3.2 3B but for its words."""

SHARD_BYTES = 256 << 20
PROMPT_TOKENS = 16
LINES_WITHOUT_TERMINAL = 4

for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which tells what it has not found.
    logging.getLogger(name).setLevel(logging.ERROR)
transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class Arguments(argparse.Namespace):
    """The command line, typed."""

    size: str
    dtype: str
    tokens: int
    seed: int
    threads: int
    nvme_path: Path
    pool_bytes: str
    memory_limit: str
    limit_by: str
    plain: bool
    inside: str | None
    model: Path | None
    result: Path | None


@dataclass(frozen=True)
class Result:
    """What a run ended with. The first token's figures are apart: that one reads all, and computes the prompt."""

    tokens: list[int]
    logits_sha256: str
    open_s: float
    first_s: float
    token_s: float
    token_bytes: float
    peak_resident_bytes: int
    written_bytes: int


def parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(
        description="Generate with a model whose weights do not fit in memory, from its own files.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", choices=SIZES, default="1.1b", help="of the Llama that is made")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=positive, default=24, help="that are generated, by sampling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="torch's")
    parser.add_argument("--nvme-path", type=Path, required=True, help="a directory; the model's files are made there")
    parser.add_argument("--pool-bytes", default="512MiB", help="of page-locked memory, which the weights pass through")
    parser.add_argument("--memory-limit", default="1.2GB", help="the most memory that the generation may have")
    add_limit_by(parser)
    parser.add_argument("--no-plain", dest="plain", action="store_false", help="without the plain run and comparison")
    parser.add_argument("--inside", choices=["swapped", "plain"], help=argparse.SUPPRESS)  # One run, in its process.
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(namespace=Arguments())
    if not os.access(arguments.nvme_path, os.W_OK):
        parser.error(f"--nvme-path: {arguments.nvme_path} is not a directory that can be written to")
    return arguments


# --- The two ways to a model ------------------------------------------------------------------------------------------


def open_swapped(path: Path, arguments: Arguments) -> Any:
    """The model with its weights in its files, from which they come as they are used."""
    config = swapper.OffloadConfig(
        nvme_path=arguments.nvme_path, pool_bytes=arguments.pool_bytes, offload_param={"device": "nvme"}
    )
    return swapper.from_pretrained(path, config)


def open_plain(path: Path) -> Any:
    """The model in memory, as transformers loads it."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():  # At multiples of 64 bytes, as torch allocates them: kernels depend on it.
        parameter.data = parameter.data.clone()
    return model


# --- The model that is made -------------------------------------------------------------------------------------------


def model_config(name: str, dtype: str) -> LlamaConfig:
    """The config of the model of one of `SIZES`."""
    size: dict[str, Any] = SIZES[name]
    heads = size["hidden_size"] // 64
    return LlamaConfig(
        **size,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        max_position_embeddings=2048,
        dtype=dtype,
    )


def shapes_of(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Tensors without values, by their names in the files."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return dict(model.state_dict())


def make_model(path: Path, config: LlamaConfig, seed: int, console: Console) -> None:
    """Write a model of random weights to `path`, shard by shard: not more than one is ever in memory."""
    config.save_pretrained(path)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes_of(config).items():
        if shards[-1] and sum(each.nbytes for each in shards[-1].values()) + shape.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    generator = torch.Generator().manual_seed(seed)
    with bar(console, "making the model", len(shards)) as advance:
        for file, shard in zip(files, shards, strict=True):
            save_file(
                {name: values_for(shape, generator) for name, shape in shard.items()}, path / file, {"format": "pt"}
            )
            settle(path / file)
            advance()
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def values_for(shape: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if shape.ndim == 1:  # The norms' weights.
        return torch.ones_like(shape, device="cpu")
    return torch.empty_like(shape, device="cpu").normal_(0, 0.02, generator=generator)


def settle(file: Path) -> None:
    """Have the file on the drive, and out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def drive_bps(files: Sequence[Path]) -> float:
    """Bytes a second that the drive gives of these very files: 16 MiB at once, four in flight, no page cache."""
    block_bytes = 16 << 20
    with AsyncIOHandle() as handle:
        pool = BufferPool(4 * block_bytes, handle)
        leases = itertools.cycle([pool.acquire(block_bytes) for _ in range(4)])
        opened = [handle.open(file) for file in files]
        lengths = [file.stat().st_size // 4096 * 4096 for file in files]
        start_s = time.perf_counter()
        for file, length in zip(opened, lengths, strict=True):
            for offset in range(0, length, block_bytes):
                lease = next(leases)
                if lease.transfer is not None:
                    lease.transfer.wait()
                lease.transfer = handle.read(file, lease.tensor[: min(block_bytes, length - offset)], offset)
        for lease in itertools.islice(leases, 4):
            if lease.transfer is not None:
                lease.transfer.wait()
        took_s = time.perf_counter() - start_s
        for lease in itertools.islice(leases, 4):
            lease.release()
        for each in opened:
            each.close()
        pool.close()
    return sum(lengths) / took_s


# --- One run ----------------------------------------------------------------------------------------------------------


class Watch(BaseStreamer):
    """Notes when each token is there, and what was read for it."""

    def __init__(self, model: Any, advance: Callable[[], None]) -> None:
        self._owner = getattr(model, "swapper", None)
        self._advance = advance
        self.seen: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """The prompt has come, or a token."""
        self.seen.append((time.perf_counter(), self._owner.metrics.bytes_read if self._owner else 0))
        if len(self.seen) > 1:
            self._advance()

    def end(self) -> None:
        """All have come."""


def run_inside(arguments: Arguments) -> int:
    """In a process of its own: generate, and write the `Result`."""
    assert arguments.model is not None and arguments.result is not None
    torch.set_num_threads(arguments.threads)
    start_s = time.perf_counter()
    swapped = arguments.inside == "swapped"
    model = open_swapped(arguments.model, arguments) if swapped else open_plain(arguments.model)
    open_s = time.perf_counter() - start_s
    try:
        torch.manual_seed(arguments.seed)
        prompt = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS))
        with bar(Console(), f"generating, {arguments.inside}", arguments.tokens) as advance:
            watch = Watch(model, advance)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                min_new_tokens=arguments.tokens,
                max_new_tokens=arguments.tokens,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
                streamer=watch,
            )
    finally:
        if swapped:
            written_bytes = model.swapper.stats().bytes_written
            model.swapper.close()
    digest = hashlib.sha256()
    for logits in out.logits:
        digest.update(logits.contiguous().view(torch.uint8).numpy().data)
    steps = list(itertools.pairwise(watch.seen))
    result = Result(
        tokens=out.sequences[0].tolist(),
        logits_sha256=digest.hexdigest(),
        open_s=open_s,
        first_s=steps[0][1][0] - steps[0][0][0],
        token_s=statistics.median(after[0] - before[0] for before, after in steps[1:] or steps),
        token_bytes=statistics.mean(after[1] - before[1] for before, after in steps[1:] or steps),
        peak_resident_bytes=peak_resident_bytes(),
        written_bytes=written_bytes if swapped else 0,
    )
    arguments.result.write_text(json.dumps(asdict(result)))
    return 0


# --- All of it --------------------------------------------------------------------------------------------------------


def run_all(arguments: Arguments) -> int:
    """Make the model, generate under the limit and plain, and compare."""
    console = Console(soft_wrap=True, highlight=False)
    limit_bytes = swapper.config.parse_size(arguments.memory_limit)
    config = model_config(arguments.size, arguments.dtype)
    shapes = shapes_of(config)
    model_bytes = sum(shape.nbytes for shape in shapes.values())
    numel = sum(shape.numel() for shape in shapes.values())
    console.print(f"Llama {arguments.size}: {numel:,} parameters, {arguments.dtype}, {gb(model_bytes)} of files")
    if limit_bytes < model_bytes:
        console.print(f"Allowed are {gb(limit_bytes)} of memory for all of Python, torch and the model")
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path, prefix="generate-") as directory:
        path = Path(directory)
        make_model(path, config, arguments.seed, console)
        files = sorted(path.glob("*.safetensors"))
        speeds_bps = [drive_bps(files)]
        with limit_memory(limit_bytes, by=arguments.limit_by) as limit:
            console.print(f"Limit of memory: {limit.how}" + (f" ({limit.why_not})" if limit.why_not else ""))
            result = path / "result.json"
            outcome = limit.run(_command("swapped", path, result))
        remove_stale_runs(arguments.nvme_path)  # If the kernel ended it: its lock file is of no use to anyone.
        if outcome.over_limit:
            raise swapper.SwapError(
                f"the kernel ended the generation, which wanted more than {gb(limit_bytes)}; allow more by "
                "--memory-limit, or take a smaller --pool-bytes"
            )
        if outcome.returncode != 0:
            return outcome.returncode
        results["swapped"] = Result(**json.loads(result.read_text()))
        speeds_bps.append(drive_bps(files))
        if arguments.plain:
            # In a session of its own Ctrl-C reaches only this process, which then ends the other.
            ended = subprocess.run(_command("plain", path, result), start_new_session=True)
            if ended.returncode != 0:
                return ended.returncode
            results["plain"] = Result(**json.loads(result.read_text()))
    speed_bps = statistics.mean(speeds_bps)
    console.print(table(results, speed_bps))
    if outcome.peak_bytes:
        console.print(f"Peak of the cgroup, page cache and Python's libraries included: {gb(outcome.peak_bytes)}")
    if "plain" not in results:
        return 0
    same = [(each.tokens, each.logits_sha256) for each in results.values()]
    console.print(f"equal to the bit: {'yes' if same[0] == same[1] else 'NO'} (tokens, and the logits of each)")
    return 0 if same[0] == same[1] else 1


def _command(way: str, model: Path, result: Path) -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], "--inside", way, "--model", str(model), "--result", str(result)]


def table(results: dict[str, Result], speed_bps: float) -> Table:
    """A column for each run."""
    grid = Table()
    grid.add_column("")
    runs = list(results.values())
    for name in results:
        grid.add_column(name, justify="right")
    rows = {
        "tokens/s": [f"{1 / run.token_s:.2f}" for run in runs],
        "seconds a token": [f"{run.token_s:.3f}" for run in runs],
        "bytes read a token": [gb(run.token_bytes) for run in runs],
        "of the drive's speed": [f"{run.token_bytes / run.token_s / speed_bps:.0%}" for run in runs],
        "prompt and first token": [f"{run.first_s:.2f} s" for run in runs],
        "until it can begin": [f"{run.open_s:.2f} s" for run in runs],
        "peak resident memory": [gb(run.peak_resident_bytes) for run in runs],
        "written to the drive": [gb(run.written_bytes) for run in runs],
    }
    for name, cells in rows.items():
        grid.add_row(name, *cells)
    grid.caption = f"the drive reads these files at {speed_bps / 1e9:.2f} GB/s"
    return grid


@contextmanager
def bar(console: Console, what: str, steps: int) -> Iterator[Callable[[], None]]:
    """Progress of `steps` steps: a live bar on a terminal, elsewhere a few plain lines. Call what it yields."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=steps)

        def advance() -> None:
            nonlocal done
            done += 1
            progress.advance(task)
            if not console.is_terminal and (done == steps or done % max(1, steps // LINES_WITHOUT_TERMINAL) == 0):
                console.print(f"{what}: {done} of {steps}", highlight=False)

        yield advance


def main() -> int:
    arguments = parse_arguments()
    return run_inside(arguments) if arguments.inside else run_all(arguments)


if __name__ == "__main__":
    run("generate", main, inner="--inside" in sys.argv)
