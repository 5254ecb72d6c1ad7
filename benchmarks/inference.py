"""Generating with the weights on the drive: tokens a second and memory beside the ways of others, against the drive.

    python benchmarks/inference.py --nvme-path DIR [--size 1.1b] [--pool-bytes 256MiB] [--repeats 3] [--rounds 9]

Needs transformers. The model of `examples/generate.py` (random weights, in shards) is made in DIR and removed. In one
run, by turns, each in a process of its own, with the same threads and the same prompt, one token after another:

swapper       `swapper.from_pretrained`: weights stay in the shards, read past the page cache
in memory     transformers alone: the floor of what computing takes
packed        with `--packed`: as the first, from a copy that `swapper.pack_weights` has made before anything is timed
accelerate    `disk_offload`, if accelerate is installed: one file a parameter, mapped; a module's are there as it runs
layer files   what AirLLM is described to do, written here: one safetensors file a layer, loaded as it is needed while
              the one before is computed, and dropped after it

Before each token of accelerate and of layer files their files are dropped from the page cache, as they were not in it
if the model were larger than memory; that none of them is in it is checked with mincore(2). The time of a token begins
after that. Swapper has no such pause, in which it would read ahead: one token follows another, and that nothing of the
files is in the page cache is checked before and after them. All must give the logits that the model gives in memory, to
the bit. The drive's own speed at the same files is taken before and after each.

Memory is what a cgroup of the process had at its peak, page cache included, where one can be made (else it is left
out); and the most that is anonymous or shared, which a process cannot do without. That is sampled while the model is
opened and makes its first tokens and a last one, and never while tokens are timed: the thread that samples needs the
interpreter that is measured.

Then, by turns in one process, medians of `--rounds` with the drive's own figure for the same file beside each: modules
that do nothing but touch their weights, in bytes a second.

`--contestants` runs some of it, and `--keep-model DIR` leaves the model there for the next run: so each part is short
enough for a machine that is quiet for a minute only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, make_parser, settings_of, system
from generate import SIZES, drive_bps, make_model, model_config, shapes_of
from memory_limit import limit_memory
from peak import Peak
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import swapper
from swapper.bench.measure import drop_from_cache
from swapper.bench.witness import resident_bytes
from swapper.handle import AsyncIOHandle
from swapper.storage.buffers import BufferPool

PROMPT_TOKENS = 16
M_MMAP_THRESHOLD = -3
"""Of mallopt(3): what is longer is mapped, and unmapped when it is freed."""

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""How a model is given its cache: before transformers 5.24 by the second name."""

TOUCHED_BYTES = 32 << 20
"""Of each module that only touches its weight; the pool has room for eight."""

TOUCHED = 48

NAMES = {
    "swapper": "swapper",
    "packed": "packed",
    "memory": "in memory",
    "accelerate": "accelerate",
    "layers": "layer files",
}
TOUCHING = "touch"
BARS = {"tokens": 3.0, "memory": 0.25, "model": 1.10, "touch": 0.95, "packed": 1.0, "packed bytes": 0.75}


def main() -> None:
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--size", choices=SIZES, default="1.1b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--pool-bytes", default="256MiB")
    parser.add_argument("--tokens", type=int, default=5, help="that are timed, after the prompt's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="of every contestant, by turns")
    parser.add_argument("--contestants", nargs="+", choices=[*NAMES, TOUCHING], default=[*NAMES, TOUCHING])
    parser.add_argument("--packed", action="store_true", help="swapper with packed weights, too")
    parser.add_argument("--keep-model", type=Path, help="where to make the model, or to find it, and leave it")
    parser.add_argument("--only", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--made", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only:
        arguments.result.write_text(json.dumps(run(arguments)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.nvme_path, prefix="inference-") as directory:
        record = run_all(arguments, Path(directory))
    show(record)
    keep_result(arguments, "inference", record)


def run_all(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    config = model_config(arguments.size, arguments.dtype)
    model = arguments.keep_model or directory / "model"
    if not (model / "model.safetensors.index.json").exists():
        model.mkdir(exist_ok=True)
        make_model(model, config, 0, Console(stderr=True))
    files = sorted(model.glob("*.safetensors"))
    names = [name for name in NAMES if name in arguments.contestants and (name != "packed" or arguments.packed)]
    if not importlib.util.find_spec("accelerate"):
        names = [name for name in names if name != "accelerate"]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name in PREPARE:
        if name in names:
            PREPARE[name](model, directory / name)
    if "packed" in names:
        swapper.pack_weights(model, directory / "packed")
    for number in range(arguments.repeats):
        for name in names:
            print(f"running: {NAMES[name]}, {number + 1} of {arguments.repeats}", file=sys.stderr)
            before_bps = drive_bps(files)
            ended = in_its_group(name, model, directory)
            runs[name].append({**ended, "drive_bps": statistics.mean([before_bps, drive_bps(files)])})
    record = {
        "arguments": settings_of(arguments),
        "system": system(),
        "model_bytes": sum(shape.nbytes for shape in shapes_of(config).values()),
        "results": {name: {"runs": each, **summary_of(each)} for name, each in runs.items()},
    }
    if TOUCHING in arguments.contestants:
        print("running: modules that touch their weights", file=sys.stderr)
        record["touch"] = touch(arguments, directory)
    return record


def summary_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the times, and the largest of what memory was used."""
    medians = {key: statistics.median(run[key] for run in runs) for key in ("first_s", "token_s", "drive_bps")}
    most = {key: max(run[key] for run in runs) for key in ("group_peak_bytes", "private_peak_bytes", "written_bytes")}
    digests = sorted({run["logits_sha256"] for run in runs})
    token_bytes = statistics.mean(run["token_bytes"] for run in runs)
    return {**medians, **most, "token_bytes": token_bytes, "logits_sha256": " and ".join(digests)}


def in_its_group(name: str, model: Path, directory: Path) -> dict[str, Any]:
    """One contestant, in a process and, where one can be made, in a cgroup that has all memory and counts it."""
    result = directory / "result.json"
    with limit_memory(1 << 45, by="auto") as limit:
        inside = ["--only", name, "--model", str(model), "--made", str(directory / name), "--result", str(result)]
        outcome = limit.run([sys.executable, *sys.argv, *inside])
    if outcome.returncode != 0:
        raise SystemExit(f"{NAMES[name]} ended with {outcome.returncode}")
    ended: dict[str, Any] = json.loads(result.read_text())
    return {**ended, "group_peak_bytes": outcome.peak_bytes}


# --- One contestant ---------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate greedily, and time each token."""
    files = sorted(arguments.model.glob("*.safetensors"))
    is_cold = arguments.only in PREPARE
    if is_cold or arguments.only == "packed":
        files = sorted(each for each in arguments.made.iterdir() if each.suffix != ".json")
    is_swapped = arguments.only in ("swapper", "packed")
    if is_cold or is_swapped:
        forget(files)  # What is in the page cache from before is in no peak: it was charged to who read or wrote it.
    torch.manual_seed(0)
    digest = hashlib.sha256()
    times_s: list[float] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        with Peak() as first_peak:
            model = stack.enter_context(CONTESTANTS[arguments.only](arguments.model, arguments))
            ids = torch.randint(model.config.vocab_size, (1, PROMPT_TOKENS))
            ids, cache = step(model, ids, None, digest, times_s)
            ids, cache = step(model, ids, cache, digest, times_s)  # To learn the order of use: not counted.
        if is_swapped:
            forget(files)
        read_bytes = bytes_from_drives()
        for _ in range(arguments.tokens):
            if is_cold:
                forget(files)
            ids, cache = step(model, ids, cache, digest, times_s)
        read_bytes = bytes_from_drives() - read_bytes
        if is_swapped:
            check_forgotten(files, but_bytes=4096 * len(files))  # What ends in a page is read through the cache.
        if is_cold:
            forget(files)
        with Peak() as last_peak:
            step(model, ids, cache, digest, [])
        written_bytes = model.swapper.metrics.bytes_written if is_swapped else 0
    return {
        "first_s": times_s[0],
        "token_s": statistics.median(times_s[2:]),
        "tokens_s": times_s[2:],
        "token_bytes": read_bytes / arguments.tokens,
        "logits_sha256": digest.hexdigest(),
        "private_peak_bytes": max(first_peak.bytes, last_peak.bytes),
        "written_bytes": written_bytes,
    }


def step(model: Any, ids: torch.Tensor, cache: Any, digest: Any, times_s: list[float]) -> tuple[torch.Tensor, Any]:
    """Make one token: the time of the forward is added to `times_s`, and the logits to `digest`."""
    start_s = time.perf_counter()
    out = model(ids, **{CACHE: cache}, use_cache=True)
    times_s.append(time.perf_counter() - start_s)
    logits = out.logits[:, -1]
    digest.update(logits.contiguous().view(torch.uint8).numpy().data)
    return logits.argmax(-1, keepdim=True), out[CACHE]


def bytes_from_drives() -> int:
    """What drives have given this process up to now, by the kernel's count; what the page cache had is not in it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def forget(files: Sequence[Path]) -> None:
    """Have none of the files in the page cache.

    Raises:
        SystemExit: something holds them there.
    """
    gc.collect()  # What maps a file keeps it there.
    for file in files:
        drop_from_cache(file)
    check_forgotten(files)


def check_forgotten(files: Sequence[Path], but_bytes: int = 0) -> None:
    """Raise SystemExit if more than `but_bytes` of the files are in the page cache."""
    if (left_bytes := sum(map(resident_bytes, files))) > but_bytes:
        raise SystemExit(f"{left_bytes} bytes of the model stay in the page cache: the figures would be of memory")


@contextlib.contextmanager
def in_swapper(path: Path, arguments: argparse.Namespace) -> Iterator[Any]:
    config = swapper.OffloadConfig(
        nvme_path=arguments.nvme_path, pool_bytes=arguments.pool_bytes, offload_param={"device": "nvme"}
    )
    model = swapper.from_pretrained(path, config)
    yield model
    model.swapper.close()


def in_packed(path: Path, arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    return in_swapper(arguments.made, arguments)


@contextlib.contextmanager
def in_memory(path: Path, arguments: argparse.Namespace) -> Iterator[Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    for parameter in model.parameters():  # At multiples of 64 bytes, as torch allocates them.
        parameter.data = parameter.data.clone()
    yield model


def hollow(path: Path) -> Any:
    """The model with its parameters on the meta device, and its buffers made as the model makes them."""
    config = AutoConfig.from_pretrained(path)
    register = torch.nn.Module.register_parameter

    def register_hollow(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    torch.nn.Module.register_parameter = register_hollow  # type: ignore[assignment, method-assign]
    try:
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    return model.eval()


def prepare_accelerate(path: Path, directory: Path) -> None:
    """The files that `disk_offload` makes of a model in memory, and finds the next time."""
    from accelerate.utils import offload_weight, save_offload_index  # type: ignore[import-untyped]

    directory.mkdir()
    index: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            index = offload_weight(tensor, name, str(directory), index=index)
    save_offload_index(index, str(directory))


@contextlib.contextmanager
def in_accelerate(path: Path, arguments: argparse.Namespace) -> Iterator[Any]:
    from accelerate import disk_offload  # type: ignore[import-untyped]

    model = disk_offload(hollow(path), str(arguments.made), execution_device=torch.device("cpu"))
    yield model


def prepare_layers(path: Path, directory: Path) -> None:
    """One file a layer: the embedding, each decoder layer, the norm, the head."""
    directory.mkdir()
    places = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    layers: dict[str, list[str]] = {}
    for name in places:
        parts = name.split(".")
        layers.setdefault(".".join(parts[:3] if parts[1] == "layers" else parts[:-1]), []).append(name)
    for layer, names in layers.items():
        tensors = {}
        for name in names:
            with safe_open(path / places[name], "pt") as shard:
                tensors[name.removeprefix(f"{layer}.")] = shard.get_tensor(name)
        save_file(tensors, directory / layer)


@contextlib.contextmanager
def in_layers(path: Path, arguments: argparse.Namespace) -> Iterator[Any]:
    """The model's own forward, with a hook before each layer that has it loaded, and one after it that drops it."""
    model = hollow(path)
    directory = arguments.made
    # Else glibc keeps what the thread frees: a model's worth of it, which would not be the method's own.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    modules = dict(model.named_modules())
    first = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(model.config.num_hidden_layers))]
    order = [*first, "model.norm", "lm_head"]
    loading: dict[str, Future[dict[str, torch.Tensor]]] = {}
    with ThreadPoolExecutor(1) as thread:

        def load(name: str) -> dict[str, torch.Tensor]:
            return {key: tensor.clone() for key, tensor in load_file(directory / name).items()}

        def before(name: str) -> None:
            tensors = (loading.pop(name, None) or thread.submit(load, name)).result()
            position = order.index(name) + 1
            if position < len(order):
                loading[order[position]] = thread.submit(load, order[position])
            modules[name].load_state_dict(tensors, assign=True)

        def after(name: str) -> None:
            modules[name].to("meta")

        for name in order:
            modules[name].register_forward_pre_hook(lambda *_, name=name: before(name))
            modules[name].register_forward_hook(lambda *_, name=name: after(name))
        yield model


CONTESTANTS: dict[str, Callable[[Path, argparse.Namespace], contextlib.AbstractContextManager[Any]]] = {
    "swapper": in_swapper,
    "packed": in_packed,
    "memory": in_memory,
    "accelerate": in_accelerate,
    "layers": in_layers,
}
PREPARE = {"accelerate": prepare_accelerate, "layers": prepare_layers}


# --- Modules that only touch their weights ----------------------------------------------------------------------------


class Touch(torch.nn.Module):
    """Looks at one element of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(TOUCHED_BYTES // 2, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


def touch(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Bytes a second of a pass over modules that only touch their weights, and of plain reads of the same file."""
    file = directory / "touched.safetensors"
    weight = torch.empty(TOUCHED_BYTES // 8, dtype=torch.int64).random_().view(torch.bfloat16)
    save_file({f"{i}.weight": weight.clone() for i in range(TOUCHED)}, file)
    drop_from_cache(file)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Touch() for _ in range(TOUCHED)))
    config = swapper.OffloadConfig(
        nvme_path=directory, pool_bytes=8 * TOUCHED_BYTES + (1 << 20), offload_param={"device": "nvme"}
    )
    swapper.offload(model, config=config, weights=file)
    metrics = model.swapper.metrics  # type: ignore[union-attr]
    rows = []
    with torch.inference_mode(), AsyncIOHandle() as handle:
        pool = BufferPool(8 * TOUCHED_BYTES, handle)
        opened, lease = handle.open(file), pool.acquire(8 * TOUCHED_BYTES)
        length_bytes = file.stat().st_size // 4096 * 4096

        def read() -> int:
            """As `swapper bench`: as much as there is memory for in one transfer."""
            for offset in range(0, length_bytes, 8 * TOUCHED_BYTES):
                handle.read(opened, lease.tensor[: min(8 * TOUCHED_BYTES, length_bytes - offset)], offset).wait()
            return length_bytes

        def use() -> int:
            before = metrics.bytes_read  # type: ignore[union-attr]
            model(torch.zeros(1, dtype=torch.bfloat16))
            return int(metrics.bytes_read - before)  # type: ignore[union-attr,operator]

        use(), use()
        for _ in range(arguments.rounds):
            row = {}
            for name, move in (("drive_bps", read), ("touch_bps", use)):
                start_s = time.perf_counter()
                moved = move()
                row[name] = moved / (time.perf_counter() - start_s)
            rows.append({**row, "ratio": row["touch_bps"] / row["drive_bps"]})
        opened.close()
        lease.release()
        pool.close()
    model.swapper.close()  # type: ignore[union-attr,operator]
    return {"rounds": rows, "ratio": statistics.median(row["ratio"] for row in rows)}


# --- What is printed --------------------------------------------------------------------------------------------------


def show(record: dict[str, Any]) -> None:
    results = record["results"]
    print(record["system"])
    print(
        f"Llama {record['arguments']['size']}, {record['arguments']['dtype']}, {record['model_bytes'] / 1e9:.2f} GB, "
        f"pool {record['arguments']['pool_bytes']}"
    )
    if results:
        print(
            f"{'':<14}{'tokens/s':>10}{'s a token':>11}{'drive GB/s':>12}{'read, MB':>10}{'peak, all':>11}"
            f"{'private':>10}  same bits"
        )
    for name, result in results.items():
        same = all(result["logits_sha256"] == each["logits_sha256"] for each in results.values())
        peak, private = (f"{result[key] / 1e6:.0f} MB" for key in ("group_peak_bytes", "private_peak_bytes"))
        print(
            f"{NAMES[name]:<14}{1 / result['token_s']:>10.2f}{result['token_s']:>11.3f}"
            f"{result['drive_bps'] / 1e9:>12.2f}{result['token_bytes'] / 1e6:>10.0f}"
            f"{peak:>11}{private:>10}  {'yes' if same else 'NO'}"
        )
    print(f"{'':<50}{'ratio':>8}   bar")
    ours = results.get("swapper")
    for name in PREPARE if ours else ():
        if name in results:
            row(f"tokens/s, of {NAMES[name]}", results[name]["token_s"] / ours["token_s"], BARS["tokens"], least=True)
            peaks = [each["group_peak_bytes"] for each in (ours, results[name])]
            if all(peaks):
                row(f"peak of memory, of {NAMES[name]}", peaks[0] / peaks[1], BARS["memory"])
    if ours and (packed := results.get("packed")):
        row("tokens/s packed, of plain files", ours["token_s"] / packed["token_s"], BARS["packed"], least=True)
        row("bytes read a token, of plain files", packed["token_bytes"] / ours["token_bytes"], BARS["packed bytes"])
    if ours and "memory" in results:
        memory_s = results["memory"]["token_s"]
        ratio = statistics.median(
            each["token_s"] / max(each["token_bytes"] / each["drive_bps"], memory_s) for each in ours["runs"]
        )
        drive_s = ours["token_bytes"] / ours["drive_bps"]
        row(f"s a token, of max(drive {drive_s:.3f}, in memory {memory_s:.3f})", ratio, BARS["model"])
    if "touch" in record:
        row("bytes/s of touched weights, of plain reads", record["touch"]["ratio"], BARS["touch"], least=True)
        speeds = [f"{each['drive_bps'] / 1e9:.2f}" for each in record["touch"]["rounds"]]
        print(f"plain reads, GB/s: {', '.join(speeds)}")
    if ours:
        print(f"read a token: {ours['token_bytes'] / 1e6:.0f} MB; written: {ours['written_bytes']} bytes")


def row(what: str, ratio: float, bar: float, *, least: bool = False) -> None:
    passed = ratio >= bar if least else ratio <= bar
    print(f"{what:<50}{ratio:>8.2f}   {'>=' if least else '<='} {bar:.2f}  {'PASS' if passed else 'short of the bar'}")


if __name__ == "__main__":
    main()
