"""What `encoding: packed` makes of the state of a real training: its bytes, the codec's speed, and a step's time.

    python benchmarks/packing.py --nvme-path DIR [--steps 200] [--cap 1GB ...] [--numel 33554432] [--rounds 5]

A small GPT in bf16 with masters is trained with AdamW on text, with its state packed on the drive. Its state, repeated
to `--numel` elements, is what the rest is measured with: packing and unpacking in memory on one thread, and steps on a
drive that is capped (`FaultPlan.bytes_per_second`): unpacked, packed, and what `encoding: exact` chooses, in turn.
Each step is waited for until all of it is written.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmark import bf16_model, keep_result, make_parser, settings_of, system
from gpt import Shape
from text import batches, load_text
from torch import nn

import swapper
from swapper import session
from swapper.config import parse_size
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer.packing import plan_packed_record
from swapper.storage.layout import Entry

KEYS = ("exp_avg", "exp_avg_sq")
ENCODINGS = ("unpacked", "packed", "exact")


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=200, help="of the training")
    parser.add_argument("--cap", type=parse_size, nargs="+", default=[10**9], help="bytes per second of the drive")
    parser.add_argument("--numel", type=int, default=1 << 25, help="elements of the parameter of timed steps")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--data", type=Path, help="file to train on instead of Python's own source files")
    arguments = parser.parse_args()
    print(system(), flush=True)
    bytes_per_parameter, state = train(arguments)
    print(
        f"training, {arguments.steps} steps: {bytes_per_parameter:.2f} bytes a parameter each way (exact: 10)",
        flush=True,
    )
    codec = {key: codec_speed(repeated(state[key], arguments.numel), arguments.rounds) for key in KEYS}
    for key, (pack_bps, unpack_bps, part) in codec.items():
        print(
            f"{key:<12} packed to {part:.1%}; pack {pack_bps / 1e9:.1f} GB/s, unpack {unpack_bps / 1e9:.1f} GB/s a core"
        )
    steps: dict[int, dict[str, list[float]]] = {}
    chosen: dict[int, tuple[str, str]] = {}
    for cap in arguments.cap:
        times_s, chosen[cap] = step_times(arguments, cap, state)
        steps[cap] = times_s
        unpacked_s, packed_s, exact_s = (statistics.median(times_s[encoding]) for encoding in ENCODINGS)
        print(
            f"step of {arguments.numel:,} bf16 parameters at {cap / 1e9:.2f} GB/s: unpacked {unpacked_s:.3f} s; "
            f"packed {packed_s:.3f} s, {unpacked_s / packed_s:.2f} times as fast; exact, which is "
            f"{'packed' if chosen[cap][0] == 'packed' else 'unpacked'}, {exact_s:.3f} s, "
            f"{unpacked_s / exact_s:.2f} times as fast\n    ({chosen[cap][1]})",
            flush=True,
        )
    figures = {"bytes_per_parameter": bytes_per_parameter, "codec": codec, "step_s": steps, "chosen": chosen}
    keep_result(arguments, "packing", {"system": system(), "settings": settings_of(arguments), **figures})


def wrap(arguments: argparse.Namespace, optimizer: torch.optim.Optimizer, encoding: str) -> None:
    state = {"device": "nvme", "encoding": encoding, "native_step": "on", "master_weights": True}
    sizes = {"pool_bytes": "48MiB", "bucket_bytes": "8MiB"}  # Several records even of a small model; most do not stay.
    swapper.wrap_optimizer(
        optimizer, swapper.OffloadConfig(nvme_path=arguments.nvme_path, **sizes, offload_optimizer=state)
    )


def train(arguments: argparse.Namespace) -> tuple[float, dict[str, torch.Tensor]]:
    """Bytes that the last step wrote for each parameter whose state moves, and that state, joined."""
    context = 64
    shape = Shape(layers=arguments.layers, heads=4, width=arguments.width, context=context)
    model = bf16_model(shape, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrap(arguments, optimizer, "packed")
    for tokens, targets in itertools.islice(batches(load_text(arguments.data), 4, context, 0), arguments.steps):
        model.loss(tokens, targets).backward()  # type: ignore[no-untyped-call]
        before = swapper.of(optimizer).stats().bytes_written
        optimizer.step()
        optimizer.zero_grad()
    written_bytes = swapper.of(optimizer).stats().bytes_written - before
    large = [p for p in model.parameters() if p.numel() >= 4096]
    states = [swapper.of(optimizer).state(p) for p in large]
    state = {key: torch.cat([each[key].reshape(-1).clone() for each in states]) for key in KEYS}
    swapper.of(optimizer).close()
    return written_bytes / sum(p.numel() for p in large), state


def repeated(values: torch.Tensor, numel: int) -> torch.Tensor:
    return values.repeat(-(-numel // values.numel()))[:numel].contiguous()


def codec_speed(values: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """Bytes of values per second of the processor's time, packed and unpacked on one thread, and what part is left."""
    layout, packing = plan_packed_record([], [Entry("state", "F32", (values.numel(),), "packed")], 0)
    assert packing is not None
    data = torch.zeros(layout.length_bytes, dtype=torch.uint8)
    place = data[layout.offsets_bytes[-1] :][: values.nbytes]
    place.copy_(values.view(torch.uint8))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times_s: list[list[float]] = [[], []]
    length_bytes = 0
    for _ in range(rounds):
        begin_s = time.process_time()  # On one thread, and not of other programs.
        length_bytes = packing.pack(data, 0)
        packed_s = time.process_time()
        packing.unpack(data, 0)
        times_s[0].append(packed_s - begin_s)
        times_s[1].append(time.process_time() - packed_s)
    torch.set_num_threads(threads)
    if not torch.equal(place, values.view(torch.uint8)):
        sys.exit("what was packed did not come back")
    pack_bps, unpack_bps = (values.nbytes / statistics.median(each) for each in times_s)
    return pack_bps, unpack_bps, length_bytes / values.nbytes


def step_times(
    arguments: argparse.Namespace, cap: int, state: dict[str, torch.Tensor]
) -> tuple[dict[str, list[float]], tuple[str, str]]:
    """Seconds of each step, until all is written, of one large parameter whose state is `state`, repeated.

    And what `encoding: exact` has chosen, and why.
    """
    drive: Any = functools.partial(AsyncIOHandle, faults=FaultPlan(bytes_per_second=cap))
    session.AsyncIOHandle = drive  # type: ignore[attr-defined]
    optimizers = {}
    for encoding in ENCODINGS:
        p = nn.Parameter(torch.randn(arguments.numel, generator=torch.Generator().manual_seed(0)).bfloat16())
        p.grad = torch.zeros_like(p)  # The averages shrink, all alike: they stay as packed as they are.
        optimizer = optimizers[encoding] = torch.optim.AdamW([p], lr=1e-5)
        wrap(arguments, optimizer, encoding)
        optimizer.step()
        kept = optimizer.state_dict()
        kept["state"][0] |= {key: repeated(value, arguments.numel) for key, value in state.items()}
        optimizer.load_state_dict(kept)
        del kept
        swapper.of(optimizer).flush()  # The next one measures the drive.
    times_s: dict[str, list[float]] = {encoding: [] for encoding in optimizers}
    for _ in range(arguments.rounds + 1):  # The first is not counted: it has first writes.
        for encoding, optimizer in optimizers.items():
            swapper.of(optimizer).flush()
            begin_s = time.perf_counter()
            optimizer.step()
            swapper.of(optimizer).flush()
            times_s[encoding].append(time.perf_counter() - begin_s)
    stats = swapper.of(optimizers["exact"]).stats()
    for optimizer in optimizers.values():
        swapper.of(optimizer).close()
    return {encoding: each[1:] for encoding, each in times_s.items()}, (stats.encoding, stats.encoding_reason)


if __name__ == "__main__":
    main()
