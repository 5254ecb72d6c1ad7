"""Measures the host's cost of swapping for each record, each use of a module and each parameter, and if it grows.

    python benchmarks/scaling.py --nvme-path DIR [--baseline PATH] [--only records|modules|parameters|buckets ...]

`--baseline` is another checkout of this project, built in place (`python setup.py build_ext --inplace`). Each tree is
measured by a process of its own that stays for the whole run, and the two take turns at every measurement, so that
whatever else the machine does meets both.

records      A step of an optimizer each of whose parameters is a record of its own: 100 to 10,000 of them, on the drive
             and with `device: cpu`; and the most of them with a pool that has room for 10 to 10,000. With
             `--descriptors N` the process of this tree may have N files open, and those of no more than N / 8 records
             are open at once; the baseline has as many as the system allows.
modules      A forward and a backward of as many small `Linear`s in a row, whose parameters are on the drive and all in
             the pool: every use is a hit.
parameters   A step of as many parameters in buckets of 64 MiB, in fp32 and in bf16 with fp32 masters, beside plain
             PyTorch.
buckets      A step of 163 million parameters with `device: cpu`, in buckets of 2 MiB and of 32 MiB.

Host time is the processor time of the thread that trains, on one thread of torch's: for the drive it does not wait, and
work of the I/O threads is not in it. Wall time stands beside it. Medians of `--rounds`. A cost is flat if no point but
the first, which has the costs of the step itself in it, is more than 20 % above the second. A baseline that would need
more than `--patience` seconds for one measurement, as the point before it foretells, is left out and said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmark import keep_result, make_parser, settings_of

PARTS = ("records", "modules", "parameters", "buckets")
COUNTS = (100, 1_000, 10_000)
POOLS = (10, 100, 1_000, 10_000)
FLAT = 1.2
BUCKETS_BAR = 1.2
USE_BAR_MS = 0.1

RECORD_NUMEL = 5 * 1024
"""fp32 elements of a parameter whose state (40 KiB) fills a bucket of the least size, of 64 KiB, alone."""

RECORD_BYTES = 48 << 10
"""Of the pool for one such record, its header included."""

PARAMETER_NUMEL = 4096
"""fp32 elements of the smallest parameter whose state moves."""

WIDTH = 64
"""Of the small modules: 16 KiB of weights and a bias each."""

DESCRIPTORS = 2
"""Files that a baseline may have open for one record, whatever their number."""

Point = dict[str, Any]


def main() -> None:
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--baseline", type=Path, help="another checkout, to be measured in turn with this one")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--most", type=int, default=max(COUNTS), help="of records, modules and parameters")
    parser.add_argument("--descriptors", type=int, help="that the process of this tree may have")
    parser.add_argument("--numel", type=int, default=163_000_000, help="parameters of the part on buckets")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that one measurement may take")
    arguments = parser.parse_args()

    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    print(f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread")
    print(f"medians of {arguments.rounds} rounds; us of host time (wall time)")
    here = Path(__file__).resolve().parent.parent
    trees = {"new": here} | ({"old": arguments.baseline.resolve()} if arguments.baseline else {})
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=arguments.nvme_path) as directory:
        measurer = Measurer(trees, Path(directory), arguments.rounds, arguments.patience, arguments.descriptors)
        try:
            for part in arguments.only:
                globals()[f"measure_{part}"](measurer, arguments)
        finally:
            measurer.close()
    keep_result(arguments, "scaling", {"arguments": settings_of(arguments), "points": measurer.points})
    print()
    for line in measurer.verdicts:
        print(line)
    sys.exit(any(": not " in line for line in measurer.verdicts))


# --- The parts -------------------------------------------------------------------------------------------------------


def measure_records(measurer: Measurer, arguments: argparse.Namespace) -> None:
    counts = [count for count in COUNTS if count <= arguments.most]
    stored = within_descriptors(counts) if arguments.baseline else counts
    for device in ("cpu", "nvme"):
        allowed = counts if device == "cpu" else stored
        points = [{"part": "records", "device": device, "count": n, "room": 64} for n in allowed]
        measurer.table(f"a record, {device}", "records", points, "step")
    most = stored[-1]
    rooms = sorted({min(room, most) for room in POOLS})
    points = [{"part": "records", "device": "nvme", "count": most, "room": room} for room in rooms]
    measurer.table(f"a record, nvme, of {most}", "records in the pool", points, "step", of="room")


def measure_modules(measurer: Measurer, arguments: argparse.Namespace) -> None:
    points = [{"part": "modules", "count": n} for n in COUNTS if n <= arguments.most]
    for phase in ("forward", "backward"):
        measured = measurer.table(
            f"a module's use in {phase} that hits", "modules", points, phase, less="plain_" + phase
        )
        worst_us = max(measured[1:])
        verdict = "at most" if worst_us <= USE_BAR_MS * 1e3 else "not at most"
        measurer.verdicts.append(f"a use in {phase}: {verdict} {USE_BAR_MS} ms beyond plain ({worst_us:.0f} us)")


def measure_parameters(measurer: Measurer, arguments: argparse.Namespace) -> None:
    counts = [count for count in COUNTS if count <= arguments.most]
    for kind in ("fp32", "bf16 with masters"):
        for device in ("none", "cpu", "nvme"):
            points = [{"part": "parameters", "kind": kind, "device": device, "count": n} for n in counts]
            name = "plain" if device == "none" else device
            measurer.table(f"a parameter, {kind}, {name}", "parameters", points, "step", judged=device != "none")


def measure_buckets(measurer: Measurer, arguments: argparse.Namespace) -> None:
    point = {"part": "buckets", "numel": arguments.numel, "count": 1}
    figures = measurer.measure(point, arguments.rounds)
    print(f"\n{arguments.numel / 1e6:.0f}M parameters, device: cpu, a step in ms of host time (wall time)")
    print(f"  {'':8}{'2 MiB buckets':>20}{'32 MiB buckets':>20}{'ratio':>8}")
    for tree, found in figures.items():
        if found is None:
            continue
        small, large = found["2MiB"], found["32MiB"]
        cells = "".join(f"{f'{cpu * 1e3:.0f} ({wall * 1e3:.0f})':>20}" for cpu, wall in (small, large))
        print(f"  {tree:8}{cells}{small[0] / large[0]:8.2f}")
        if tree == "new":
            verdict = "at most" if small[0] <= BUCKETS_BAR * large[0] else "not at most"
            measurer.verdicts.append(f"2 MiB buckets: {verdict} {BUCKETS_BAR} x 32 MiB ({small[0] / large[0]:.2f})")


def within_descriptors(counts: list[int]) -> list[int]:
    """`counts`, the largest lowered to the records whose files a baseline may have open."""
    allowed = (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 512) // DESCRIPTORS
    return sorted({min(count, allowed) for count in counts})


# --- The process that measures ---------------------------------------------------------------------------------------


class Measurer:
    """A process for each tree, which take turns."""

    def __init__(
        self, trees: dict[str, Path], directory: Path, rounds: int, patience_s: float, descriptors: int | None = None
    ) -> None:
        self.points: list[Point] = []
        self.verdicts: list[str] = []
        self._rounds, self._patience_s = rounds, patience_s
        self._children: dict[str, subprocess.Popen[str]] = {}
        for name, tree in trees.items():
            home = directory / name
            home.mkdir()
            command = [sys.executable, __file__, "--nvme-path", str(home), "--json", str(tree)]
            self._children[name] = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(tree), CHILD: str((name == "new" and descriptors) or 0)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def close(self) -> None:
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
            child.wait()

    def ask(self, name: str, what: str, point: Point | None = None) -> Any:
        """Have the process of tree `name` do something, and wait for its answer."""
        child = self._children[name]
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps({"do": what, "point": point}) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"the process that measures {name} has ended; see above")
        return json.loads(line)

    def measure(self, point: Point, rounds: int, but: frozenset[str] = frozenset()) -> dict[str, dict[str, Any] | None]:
        """For each tree the median of each figure: seconds of host time and of wall time. None for those in `but`."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self._children if name not in but}
        for name in found:
            self.ask(name, "make", point)
        for turn in range(rounds):
            for name in sorted(found, reverse=bool(turn % 2)):
                if sum(figures["took_s"] for figures in found[name]) < 2 * self._patience_s:
                    found[name].append(self.ask(name, "measure"))
        for name in found:
            self.ask(name, "drop")
        figures: dict[str, dict[str, Any] | None] = dict.fromkeys(self._children)
        for name, rows in found.items():
            figures[name] = {
                key: [statistics.median(row[key][i] for row in rows) for i in (0, 1)]
                if isinstance(rows[0][key], list)
                else statistics.median(row[key] for row in rows)
                for key in rows[0]
            }
        self.points.append({**point, "figures": figures})
        return figures

    def table(
        self,
        title: str,
        unit: str,
        points: list[Point],
        figure: str,
        *,
        of: str = "count",
        less: str | None = None,
        judged: bool = True,
    ) -> list[float]:
        """Measure `points`, print a row for each, and judge the tree of this file. Returns its host times, in us each.

        Args:
            title, unit: what costs, and what there is more and more of.
            figure: which of those that are measured.
            of: the point's key that is counted up.
            less: another figure, to be subtracted.
            judged: say whether it is flat.
        """
        print(f"\n{title}")
        names = list(self._children)
        print(
            f"  {unit:>20}"
            + "".join(f"{name:>22}{'/ second':>10}" for name in names)
            + ("   old / new" * (len(names) > 1))
        )
        rows: list[dict[str, tuple[float, float]]] = []
        slow: dict[str, float] = {}
        for position, point in enumerate(points):
            but = frozenset(name for name, expected_s in slow.items() if expected_s > self._patience_s)
            known = next((old for old in self.points if {**old, "figures": None} == {**point, "figures": None}), None)
            figures = known["figures"] if known else self.measure(point, self._rounds, but)
            row: dict[str, tuple[float, float]] = {}
            for name, found in figures.items():
                if found is None:
                    continue
                cpu, wall = (
                    (found[figure][i] - (found[less][i] if less else 0)) / point["count"] * 1e6 for i in (0, 1)
                )
                row[name] = cpu, wall
                if position + 1 < len(points):  # As if it grew with the square.
                    slow[name] = found["took_s"] * (points[position + 1]["count"] / point["count"]) ** 2
            rows.append(row)
        for point, row in zip(points, rows, strict=True):
            cells = ""
            for name in names:
                if name not in row:
                    cells += f"{'too slow':>22}{'':>10}"
                    continue
                second = rows[min(1, len(rows) - 1)].get(name)
                ratio = f"{row[name][0] / second[0]:.2f}" if second else "-"
                cells += f"{f'{row[name][0]:.1f} ({row[name][1]:.1f})':>22}{ratio:>10}"
            both = f"{row['old'][0] / row['new'][0]:12.1f}" if {"old", "new"} <= row.keys() else ""
            print(f"  {point[of]:>20,}{cells}{both}")
        mine = [row["new"][0] for row in rows if "new" in row]
        if judged and len(mine) < len(rows):
            self.verdicts.append(f"{title}: not known, as {len(rows) - len(mine)} points take too long (--patience)")
        elif judged and len(mine) > 2:
            worst = max(mine[2:]) / mine[1]
            self.verdicts.append(f"{title}: {'flat' if worst <= FLAT else 'not flat'} ({worst:.2f})")
        return mine


# --- What is measured, in the process of one tree --------------------------------------------------------------------

CHILD = "SWAPPER_SCALING_CHILD"


def serve(nvme_path: Path) -> None:
    """Do what is asked on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What else is printed is no answer.
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ[CHILD]) or most, most))
    measure: Callable[[], dict[str, Any]] | None = None
    close: Callable[[], None] | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if asked["do"] == "make":
            measure, close = MAKERS[asked["point"]["part"]](nvme_path, asked["point"])
            measure()  # Makes state, writes files for the first time, and learns the order of use.
            measure()
        elif asked["do"] == "measure":
            assert measure is not None
            start_s = time.perf_counter()
            answer = measure()
            answer["took_s"] = time.perf_counter() - start_s
        else:
            assert close is not None
            close()
            measure = close = None
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


Made = tuple[Callable[[], dict[str, Any]], Callable[[], None]]


def timed(work: Callable[[], object]) -> list[float]:
    """Seconds of processor time of this thread, and of wall time."""
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    work()
    return [time.thread_time() - cpu_s, time.perf_counter() - wall_s]


def parameters_of(count: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)]
    for p in made:
        p.grad = torch.full_like(p, 1e-3)
    return made


def step_of(optimizer: torch.optim.Optimizer, swapped: bool) -> Made:
    import swapper

    def measure() -> dict[str, Any]:
        figures = timed(optimizer.step)
        if swapped:
            swapper.of(optimizer).flush()
        return {"step": figures}

    return measure, (lambda: swapper.of(optimizer).close()) if swapped else (lambda: None)


def make_records(nvme_path: Path, point: Point) -> Made:
    import swapper

    optimizer = torch.optim.AdamW(parameters_of(point["count"], RECORD_NUMEL))
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        offload_optimizer={"device": point["device"]},
        bucket_bytes=64 << 10,
        pool_bytes=max((point["room"] + 1) * RECORD_BYTES, 4 * (64 << 10)),
    )
    return step_of(swapper.wrap_optimizer(optimizer, config), True)


def make_parameters(nvme_path: Path, point: Point) -> Made:
    import swapper

    masters = point["kind"] != "fp32"
    dtype = torch.bfloat16 if masters else torch.float32
    # Its masters move, too, if they are as many bytes as the state.
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters_of(point["count"], PARAMETER_NUMEL, dtype))
    if point["device"] == "none":
        return step_of(optimizer, False)
    settings = {"device": point["device"], "master_weights": masters}
    config = swapper.OffloadConfig(
        nvme_path=nvme_path, offload_optimizer=settings, bucket_bytes="64MiB", pool_bytes="320MiB"
    )
    return step_of(swapper.wrap_optimizer(optimizer, config), True)


def make_modules(nvme_path: Path, point: Point) -> Made:
    import swapper

    def model() -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(point["count"])))

    def run(which: torch.nn.Module, prefix: str) -> dict[str, Any]:
        losses: list[torch.Tensor] = []
        forward = timed(lambda: losses.append(which(inputs).sum()))
        backward = timed(lambda: torch.autograd.backward(losses[0]))
        which.zero_grad()
        return {f"{prefix}forward": forward, f"{prefix}backward": backward}

    inputs = torch.randn(4, WIDTH, requires_grad=True)
    plain, swapped = model(), model()
    numel = sum(p.numel() for p in swapped.parameters())
    config = swapper.OffloadConfig(
        nvme_path=nvme_path,
        offload_optimizer={"device": "none"},
        offload_param={"device": "nvme"},
        bucket_bytes="16MiB",
        pool_bytes=8 * numel + (256 << 20),
    )
    # A list of optimizers, none of which there is: what is measured is forward and backward.
    swapper.offload(swapped, [], config)
    offloaded: Any = swapped  # mypy does not know its `swapper`
    return lambda: {**run(plain, "plain_"), **run(swapped, "")}, offloaded.swapper.close


def make_buckets(nvme_path: Path, point: Point) -> Made:
    import swapper

    # As a small language model has them: one long, then matrices and vectors.
    sizes = [point["numel"] // 4]
    while (left := point["numel"] - sum(sizes)) > 0:
        sizes += [min(left, 2_359_296), min(768, max(left - 2_359_296, 1))]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(numel)) for numel in sizes]
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    optimizers = {}
    for size in ("2MiB", "32MiB"):
        config = swapper.OffloadConfig(offload_optimizer={"device": "cpu"}, bucket_bytes=size)
        optimizers[size] = swapper.wrap_optimizer(torch.optim.AdamW(parameters), config)

    def close() -> None:
        for optimizer in optimizers.values():
            swapper.of(optimizer).close()

    return lambda: {size: timed(optimizer.step) for size, optimizer in optimizers.items()}, close


MAKERS: dict[str, Callable[[Path, Point], Made]] = {
    "records": make_records,
    "modules": make_modules,
    "parameters": make_parameters,
    "buckets": make_buckets,
}


if __name__ == "__main__":
    if os.environ.get(CHILD):
        serve(Path(sys.argv[sys.argv.index("--nvme-path") + 1]))
    else:
        main()
