"""Predicts the step of FSDP2 with the optimizer's state on each rank's drive, for 1 to 1,024 ranks.

    python benchmarks/scale.py table [--picture docs/scale.png]
    python benchmarks/scale.py predict --parameters 70e9 --layers 80 --ranks 64 --drive-gbps 3 ...
    python benchmarks/scale.py check --nvme-path DIR [--ranks 1 2 4]

The simulator plays the work of one rank, where all ranks are alike. A unit does one thing at a time: the processor,
the network, the drive. Layers are gathered one ahead of their use, forward and again backward, as FSDP2 does; a
gradient is reduced when its layer's backward is over. The optimizer follows bucket by bucket: state is read, stepped
and written, as many buckets ahead as the pool has room for; with `--step-in-backward` each layer's when its gradient is
reduced.

`check` measures the constants of its own machine for each number of ranks (gloo processes on one host): the model
alone, a gather and a reduction of one layer, a step of the optimizer with its state in memory, and the drive as it is
read and written at once, by all ranks together. Then it measures steps of FSDP2 with the state on the drive, and
compares. Predictions of which the median is more than 20 % off end the program with 1. There the network is the
processor's work too, so the two exclude each other.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, settings_of
from rank_processes import run_ranks
from torch.distributed.fsdp import FSDPModule, fully_shard

import swapper
from swapper.handle import AsyncIOHandle

TOLERANCE = 0.2
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SHOWN = (16, 64, 256, 1024)


@dataclass(frozen=True)
class Machine:
    """What one rank has.

    Attributes:
        flops: of the model's matrix products, per second.
        step_eps: elements per second that the optimizer steps, once their state is in memory.
        drive_read_bps, drive_write_bps: bytes per second of the drive, for this rank; it does one or the other.
        link_bps: between the host's memory and the device's, each way; 0 if the model is on the CPU.
        network_bps: bytes per second that a rank receives in a collective.
        network_s: of each collective, beside its bytes, per doubling of the ranks.
        gather_s, reduce_s: of each gather and each reduction, whatever the ranks.
        shares_processor: collectives are computed where the model is, as gloo's on a CPU.
    """

    flops: float
    step_eps: float
    drive_read_bps: float
    drive_write_bps: float
    network_bps: float
    link_bps: float = 0.0
    network_s: float = 20e-6
    gather_s: float = 0.0
    reduce_s: float = 0.0
    shares_processor: bool = False


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        parameters: elements.
        layers: equal ones, each gathered as a whole.
        tokens: per rank and step.
        parameter_bytes: of an element as it is gathered and reduced.
        state_bytes: of an element on the drive, that each step reads, and writes.
        forward_flops: per parameter and token.
        recompute: forward once more in backward.
    """

    parameters: float
    layers: int
    tokens: float
    parameter_bytes: float = 2
    state_bytes: float = 10
    forward_flops: float = 2
    recompute: bool = True


@dataclass(frozen=True)
class Prediction:
    """Of one step.

    Attributes:
        step_s: seconds.
        waiting: share of them in which the processor has no work.
        drive: share of them in which the drive has.
        rank_bytes: parameters and gradients that a rank keeps in memory, with two whole layers.
        drive_bytes: state on its drive.
    """

    step_s: float
    waiting: float
    drive: float
    rank_bytes: float
    drive_bytes: float


class Units:
    """Units that do one thing at a time, each when all that it needs is done."""

    def __init__(self, shared: bool) -> None:
        self._free: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self._names = {"network": "processor"} if shared else {}

    def run(self, unit: str, duration_s: float, *after_s: float) -> float:
        """When it ends, if it starts as soon as its unit and everything before it are done."""
        place = self._names.get(unit, unit)
        end = max(self._free.get(place, 0.0), *after_s, 0.0) + duration_s
        self._free[place] = end
        self.busy[place] = self.busy.get(place, 0.0) + duration_s
        return end


def simulate(
    model: Model, machine: Machine, ranks: int, *, buckets: int = 64, ahead: int = 4, step_in_backward: bool = False
) -> Prediction:
    """Predict a step.

    Args:
        model, machine: as they are.
        ranks: all; each has `1 / ranks` of every layer.
        buckets: that the state of a rank is cut into.
        ahead: buckets that the pool has room for beside the one that is stepped.
        step_in_backward: a layer's state is stepped when its gradient is reduced.
    """
    units = Units(machine.shares_processor)
    layer = model.parameters / model.layers
    collective = 0.0
    if ranks > 1:
        doublings = (ranks - 1).bit_length()
        received = layer * model.parameter_bytes * (ranks - 1) / ranks
        collective = received / machine.network_bps + machine.network_s * doublings
    gather, reduce = collective + machine.gather_s, collective + machine.reduce_s
    forward = layer * model.forward_flops * model.tokens / machine.flops

    durations = [forward] * model.layers + [forward * (3 if model.recompute else 2)] * model.layers
    gathered, done, reduced = [units.run("network", gather)], [0.0], []
    for number, duration in enumerate(durations):
        if number + 1 < len(durations):  # The next layer is gathered as soon as the last one is freed.
            gathered.append(units.run("network", gather, done[-1]))
        done.append(units.run("processor", duration, gathered[number], done[-1]))
        if number >= model.layers:
            reduced.append(units.run("network", reduce, done[-1]))

    # On a device the step is short, and has a stream of its own.
    stepper = "stream" if machine.link_bps else "processor"
    share = model.parameters / ranks
    count = model.layers if step_in_backward else buckets
    moved = share * model.state_bytes / count
    stepped: list[float] = []
    written: list[float] = []
    reads: list[float] = []

    def write(number: int) -> None:
        up = units.run("up", moved / machine.link_bps if machine.link_bps else 0.0, stepped[number])
        written.append(units.run("drive", moved / machine.drive_write_bps, up))

    for number in range(count):
        ready = reduced[number] if step_in_backward else reduced[-1]
        room = written[number - ahead] if number >= ahead else 0.0
        reads.append(units.run("drive", moved / machine.drive_read_bps, room, ready))
        down = units.run("down", moved / machine.link_bps if machine.link_bps else 0.0, reads[-1])
        stepped.append(units.run(stepper, share / count / machine.step_eps, down, ready))
        if number >= 1:  # The drive reads one ahead of what it writes.
            write(number - 1)
    write(count - 1)

    step_s = max(written[-1], stepped[-1], reduced[-1])
    busy = units.busy["processor"]
    if machine.shares_processor:
        busy -= model.layers * (2 * gather + reduce)
    memory = 2 * share * model.parameter_bytes + 2 * layer * model.parameter_bytes
    return Prediction(step_s, 1 - busy / step_s, units.busy["drive"] / step_s, memory, share * model.state_bytes)


# --- Tables ----------------------------------------------------------------------------------------------------------

MODELS = {
    "70B": Model(70e9, 80, 8192),
    "405B": Model(405e9, 126, 8192),
    "1T": Model(1e12, 128, 8192),
}
"""16-bit parameters and gradients; AdamW with fp32 masters, which cost 2 bytes: 10 bytes are read and written."""

MACHINES = {
    "DGX-2": Machine(50e12, 30e9, 1.6e9, 1.6e9, 6e9, link_bps=3e9),
    "H100": Machine(400e12, 100e9, 6e9, 5e9, 45e9, link_bps=50e9),
    "A100, one drive for 8": Machine(150e12, 60e9, 0.8e9, 0.5e9, 20e9, link_bps=25e9),
}
"""Assumed, for each rank: see docs/scale.md."""

MEMORY_BYTES = {"DGX-2": 32e9, "H100": 80e9, "A100, one drive for 8": 80e9}


def table() -> list[dict[str, Any]]:
    """Rows for each machine, model and number of ranks."""
    rows = []
    for machine_name, machine in MACHINES.items():
        for model_name, model in MODELS.items():
            for ranks in RANKS:
                found = {way: simulate(model, machine, ranks, step_in_backward=way) for way in (False, True)}
                fits = found[False].rank_bytes < 0.8 * MEMORY_BYTES[machine_name]  # The rest is for activations.
                rows.append({"machine": machine_name, "model": model_name, "ranks": ranks, "fits": fits, **_row(found)})
    return rows


def _row(found: dict[bool, Prediction]) -> dict[str, float]:
    after, inside = found[False], found[True]
    return {
        "step_s": after.step_s,
        "waiting": after.waiting,
        "in_backward_s": inside.step_s,
        "in_backward_waiting": inside.waiting,
        "rank_gb": after.rank_bytes / 1e9,
        "drive_gb": after.drive_bytes / 1e9,
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("| machine | model | ranks | memory of a rank | its drive | step | waiting | step in backward | waiting |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if row["ranks"] not in SHOWN:
            continue
        memory = f"{row['rank_gb']:.0f} GB" + ("" if row["fits"] else ", does not fit")
        print(
            f"| {row['machine']} | {row['model']} | {row['ranks']} | {memory} | {row['drive_gb']:.0f} GB | "
            f"{row['step_s']:.1f} s | {row['waiting']:.0%} | {row['in_backward_s']:.1f} s | "
            f"{row['in_backward_waiting']:.0%} |"
        )


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the share of waiting against the number of ranks. Hollow: it does not fit."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    axes = picture.subplots(1, len(MACHINES), sharey=True)
    for place, machine in zip(axes, MACHINES, strict=True):
        for number, model in enumerate(MODELS):
            mine = [row for row in rows if (row["machine"], row["model"]) == (machine, model)]
            for key, style in (("waiting", "-"), ("in_backward_waiting", ":")):
                values = [100 * row[key] for row in mine]
                place.plot([row["ranks"] for row in mine], values, style, color=f"C{number}", lw=1)
                for row, value in zip(mine, values, strict=True):
                    face = f"C{number}" if row["fits"] else "white"
                    place.plot(row["ranks"], value, "o", ms=4, color=f"C{number}", mfc=face)
            place.plot([], [], color=f"C{number}", label=model)
        place.set(xscale="log", xlabel="ranks", title=machine, ylim=(0, 100))
    axes[0].set_ylabel("waiting, % of a step")
    axes[0].plot([], [], ":", color="gray", label="step in backward")
    axes[0].legend(fontsize=7, frameon=False)
    picture.savefig(path)
    print(f"picture: {path}")


# --- The check -------------------------------------------------------------------------------------------------------

WIDTH, LAYERS, TOKENS, STEPS = 1024, 4, 64, 7
BLOCK_NUMEL = 2 * (WIDTH * 2 * WIDTH)
BUCKET_BYTES = 2 << 20
POOL_BYTES = 10 << 20
AHEAD = 3


def blocks() -> torch.nn.Sequential:
    """A model of equal layers, of 4 million parameters each."""

    def one() -> torch.nn.Module:
        inner = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=False), torch.nn.GELU()
        return torch.nn.Sequential(*inner, torch.nn.Linear(2 * WIDTH, WIDTH, bias=False))

    torch.manual_seed(0)
    return torch.nn.Sequential(*(one() for _ in range(LAYERS)))


def wrapped(optimizer: torch.optim.Optimizer, **settings: Any) -> torch.optim.Optimizer:
    sizes = {"pool_bytes": POOL_BYTES, "bucket_bytes": BUCKET_BYTES}
    return swapper.wrap_optimizer(optimizer, {**sizes, **settings})


def least_s(work: Callable[[], object], rounds: int = STEPS) -> float:
    """The least time, of all ranks at once: what else the machine does disturbs it least."""
    times = []
    for number in range(rounds + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        work()
        if number:  # The first warms up.
            times.append(time.perf_counter() - start)
    return min(times)


def constants(directory: Path, ranks: int) -> dict[str, float]:
    """Measure the parts of a step, each alone, on all ranks at once."""
    model, x = blocks(), torch.randn(TOKENS, WIDTH)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def both() -> None:
        model(x).sum().backward()
        model.zero_grad()

    found = {"forward_s": least_s(forward), "both_s": least_s(both)}
    layer = blocks()[0]
    fully_shard(layer)
    assert isinstance(layer, FSDPModule)

    def gather() -> None:
        layer.unshard()
        layer.reshard()

    def both_of_one() -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    both_of_one()  # Sets it up.
    found["gather_s"] = least_s(gather, 9)
    # It gathers once: FSDP2 does not reshard the outermost module after its forward.
    found["reduce_s"] = max(0.0, least_s(both_of_one, 9) - found["both_s"] / LAYERS - found["gather_s"])
    numel = LAYERS * BLOCK_NUMEL // ranks
    p = torch.nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel)
    optimizer = wrapped(torch.optim.AdamW([p], lr=1e-3), offload_optimizer={"device": "cpu"})
    found["step_s"] = least_s(optimizer.step)
    swapper.of(optimizer).close()
    del optimizer, p
    # As a step does: some buckets are read while others are written, each to its place in one file.
    count = max(2 * AHEAD, 8 * numel // BUCKET_BYTES)
    memory = mmap.mmap(-1, (2 * AHEAD + 1) * BUCKET_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # As the pool.
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    slab = slab[-slab.data_ptr() % BUCKET_BYTES :][: 2 * AHEAD * BUCKET_BYTES].zero_()
    pieces = slab.reshape(-1, BUCKET_BYTES)
    paths = [directory / f"rank{torch.distributed.get_rank()}-{number}" for number in range(count)]
    with AsyncIOHandle(threads=2) as handle, ExitStack() as stack:
        files = [stack.enter_context(handle.open(str(path), "rw")) for path in paths]  # As the store: one a record.

        def fill() -> None:
            for file in files:
                handle.write(file, pieces[0]).wait()

        def exchange() -> None:
            flying: list[Any] = []
            for number in range(count):
                if number >= AHEAD:
                    for transfer in flying[:2]:
                        transfer.wait()
                    del flying[:2]
                piece = 2 * (number % AHEAD)
                flying.append(handle.read(files[number], pieces[piece]))
                flying.append(handle.write(files[(number - AHEAD) % count], pieces[piece + 1]))
            for transfer in flying:
                transfer.wait()

        fill()
        found["exchange_s"] = least_s(exchange) * 8 * numel / (count * BUCKET_BYTES)
    for path in paths:
        path.unlink()
    return found


def measured(directory: Path) -> tuple[float, float]:
    """Seconds of a step of FSDP2 with its optimizer's state on the drive, and those of them in `optimizer.step`."""
    model, x = blocks(), torch.randn(TOKENS, WIDTH)
    for each in model:
        fully_shard(each)
    fully_shard(model)
    optimizer = wrapped(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        nvme_path=str(directory),
        offload_optimizer={"device": "nvme", "encoding": "unpacked"},
    )

    inside: list[float] = []

    def step() -> None:
        model(x).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        inside.append(time.perf_counter() - start)
        optimizer.zero_grad()

    step()
    before = swapper.of(optimizer).stats()
    found = least_s(step)
    moved = swapper.of(optimizer).stats().bytes_read - before.bytes_read
    whole = (STEPS + 1) * 8 * LAYERS * BLOCK_NUMEL // torch.distributed.get_world_size()
    if moved < 0.95 * whole:
        raise SystemExit(f"a step reads {moved / whole:.0%} of the state from the drive, and not all of it")
    swapper.of(optimizer).close()
    return found, min(inside)


def predicted(found: dict[str, float], ranks: int) -> Prediction:
    """What the simulator says of the model of `measured`, with these constants."""
    numel = LAYERS * BLOCK_NUMEL
    flops = numel * 2 * TOKENS / found["forward_s"]
    moved = 8 * numel / ranks
    machine = Machine(
        flops,
        numel / ranks / found["step_s"],
        2 * moved / found["exchange_s"],
        2 * moved / found["exchange_s"],
        float("inf"),
        network_s=0.0,
        gather_s=found["gather_s"],
        reduce_s=found["reduce_s"],
        shares_processor=True,
    )
    # Backward is what a forward with gradients takes beside a forward, and not exactly twice.
    model = Model(numel, LAYERS, TOKENS, parameter_bytes=4, state_bytes=8, recompute=False)
    extra = found["both_s"] - 3 * found["forward_s"]
    guess = simulate(model, machine, ranks, buckets=max(1, round(moved / BUCKET_BYTES)), ahead=4)
    return replace(guess, step_s=guess.step_s + extra)


def check_rank(rank: int, ranks: int, directory: str) -> tuple[dict[str, float], tuple[float, float]]:
    return constants(Path(directory), ranks), measured(Path(directory))


def check(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and compare, for each number of ranks."""
    rows = []
    for number in range(arguments.rounds):  # Ranks in turn: what else the machine does changes from minute to minute.
        for ranks in arguments.ranks:
            with tempfile.TemporaryDirectory(dir=arguments.nvme_path) as directory:
                everything = run_ranks(check_rank, ranks, ranks, directory)
            found = {key: max(each[0][key] for each in everything) for key in everything[0][0]}
            step_s, optimizer_s = (
                statistics.median(each) for each in zip(*(each[1] for each in everything), strict=True)
            )
            guess = predicted(found, ranks)
            error = guess.step_s / step_s - 1
            rows.append({"ranks": ranks, "measured_s": step_s, "optimizer_s": optimizer_s, "predicted_s": guess.step_s})
            rows[-1] |= {"round": number, "error": error, "waiting": guess.waiting, **found}
            print(
                f"{ranks} ranks: measured {step_s * 1e3:.0f} ms, predicted {guess.step_s * 1e3:.0f} ms "
                f"({error:+.0%}), waiting {guess.waiting:.0%}",
                flush=True,
            )
    return rows


def median_errors(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Of each number of ranks."""
    numbers = dict.fromkeys(row["ranks"] for row in rows)
    return {ranks: statistics.median(row["error"] for row in rows if row["ranks"] == ranks) for ranks in numbers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    each = commands.add_parser("table", help="the table of docs/scale.md")
    each.add_argument("--picture", type=Path, help="also draw it there, as PNG")
    each = commands.add_parser("predict", help="one step")
    for name, default in (("parameters", 70e9), ("layers", 80), ("tokens", 8192), ("ranks", 64)):
        each.add_argument(f"--{name}", type=type(default), default=default)
    each.add_argument("--tflops", type=float, default=400, help="of a rank, as the model gets them")
    each.add_argument("--drive-gbps", type=float, nargs=2, default=(6.0, 5.0), metavar=("READ", "WRITE"))
    each.add_argument("--link-gbps", type=float, default=50, help="PCIe; 0 if the model is on the CPU")
    each.add_argument("--network-gbps", type=float, default=45, help="gigabytes per second and rank")
    each.add_argument("--step-geps", type=float, default=8, help="billions of elements stepped per second")
    each.add_argument("--state-bytes", type=float, default=10, help="on the drive, per parameter")
    each.add_argument("--step-in-backward", action="store_true")
    each = commands.add_parser("check", help="compare with steps measured here")
    each.add_argument("--nvme-path", type=Path, required=True, help="a directory on the drive")
    each.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    each.add_argument("--rounds", type=int, default=3, help="of all numbers of ranks in turn")
    each.add_argument("--save", action="store_true", help="keep the result in results/")
    each.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    if arguments.command == "table":
        rows = table()
        print_table(rows)
        if arguments.picture:
            draw(rows, arguments.picture)
    elif arguments.command == "predict":
        given = vars(arguments)
        read, write = (1e9 * each for each in given["drive_gbps"])
        network, link = 1e9 * given["network_gbps"], 1e9 * given["link_gbps"]
        machine = Machine(1e12 * given["tflops"], 1e9 * given["step_geps"], read, write, network, link_bps=link)
        model = Model(given["parameters"], given["layers"], given["tokens"], state_bytes=given["state_bytes"])
        guess = simulate(model, machine, given["ranks"], step_in_backward=given["step_in_backward"])
        print(json.dumps(vars(guess), indent=1))
    else:
        rows = check(arguments)
        keep_result(arguments, "scale", {"settings": settings_of(arguments), "rows": rows})
        errors = median_errors(rows)
        print("median errors: " + ", ".join(f"{ranks} ranks {error:+.0%}" for ranks, error in errors.items()))
        return 1 if any(abs(error) > TOLERANCE for error in errors.values()) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
