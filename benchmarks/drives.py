"""Measures how bandwidths of several drives add up: records of one store, on one directory and on two.

    python benchmarks/drives.py --nvme-path DIR                 two directories in DIR, each capped
    python benchmarks/drives.py --nvme-path DIR DIR --cap 0     real drives, as fast as they are

On one machine with one drive two directories have no more bandwidth than one. So by default each directory's engine is
capped, as if it were a drive of that speed (`FaultPlan.bytes_per_second`); the drive below must be faster than all caps
together. Cases are measured alternately in one run: one directory, two of the same speed, and two of the same sum whose
speeds are 3 to 1. Prints for each the medians, the share of bytes that each directory got, and how much of the sum of
the caps was reached. With `--cap 0` the cases are each directory alone, and all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmark import keep_result, make_parser, settings_of, system

from swapper.config import parse_size
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.store import RecordKey, TensorStore


class Case:
    """Records on some directories, each with an engine of its own."""

    def __init__(self, name: str, paths: list[Path], caps: list[int], arguments: argparse.Namespace) -> None:
        self.name, self.caps = name, caps
        self.rounds: list[dict[str, float]] = []
        self._handles = [
            AsyncIOHandle(backend=arguments.backend, faults=FaultPlan(bytes_per_second=cap) if cap else None)
            for cap in caps
        ]
        for path, handle in zip(paths, self._handles, strict=True):
            with tempfile.NamedTemporaryFile(dir=path) as file, handle.open(file.name) as opened:
                if not opened.direct:
                    sys.exit(f"{path}: {opened.direct_reason}; this would measure the page cache, not a drive")
        self._store = TensorStore(paths, f"bench{id(self):x}", 0, self._handles)
        self._record_bytes = arguments.record_bytes
        self._keys = [RecordKey(0, "optim", i) for i in range(arguments.total_bytes // arguments.record_bytes)]
        self._store.plan(dict.fromkeys(self._keys, self._record_bytes))
        held = [sum(file.stat().st_size for file in d.glob("*.safetensors")) for d in self._store.directories]
        self.shares = [bytes_held / sum(held) for bytes_held in held]
        self._pool = BufferPool(self._record_bytes * arguments.in_flight, *self._handles)
        self._leases = [self._pool.acquire(self._record_bytes) for _ in range(arguments.in_flight)]
        self.backend = self._handles[0].backend
        self._timed("write")  # The first write of new blocks is slower and not what a step does.

    def measure(self) -> None:
        """One round: all records written, all records read."""
        self.rounds.append({"write_bps": self._timed("write"), "read_bps": self._timed("read")})

    def median(self, key: str) -> float:
        """Bytes per second."""
        return statistics.median(one[key] for one in self.rounds)

    def close(self) -> None:
        """Give back everything and remove the files."""
        for lease in self._leases:
            lease.release()
        self._store.close()
        self._pool.close()
        for handle in self._handles:
            handle.close()

    def _timed(self, operation: str) -> float:
        start_s = time.perf_counter()
        for i, key in enumerate(self._keys):
            lease = self._leases[i % len(self._leases)]
            wait_for(lease)
            if operation == "write":
                lease.transfer = self._store.write(key, lease, self._record_bytes)
            else:
                lease.transfer = self._store.read(key, lease)
        for lease in self._leases:
            wait_for(lease)
        moved_bytes: int = len(self._keys) * self._record_bytes
        return moved_bytes / (time.perf_counter() - start_s)


def wait_for(lease: Lease) -> None:
    if lease.transfer is not None:
        lease.transfer.wait()
        lease.transfer = None


def main() -> None:
    parser = make_parser(__doc__, rounds=5, several_paths=True)
    parser.add_argument(
        "--cap", type=parse_size, default="200MB", help="bytes per second of a capped directory; 0: none"
    )
    parser.add_argument("--total-bytes", type=parse_size, default="256MiB", help="moved in each direction and round")
    parser.add_argument("--record-bytes", type=parse_size, default="16MiB")
    parser.add_argument("--in-flight", type=int, default=4, help="records")
    parser.add_argument("--backend", default="auto")
    arguments = parser.parse_args()

    paths: list[Path] = arguments.nvme_path
    with tempfile.TemporaryDirectory(dir=paths[0], prefix="swapper-bench-") as scratch:
        if cap := arguments.cap:
            pair = [Path(scratch) / "a", Path(scratch) / "b"]
            for path in pair:
                path.mkdir()
            wanted = [
                ("one directory", pair[:1], [cap]),
                ("two, same speed", pair, [cap, cap]),
                ("two, 3 to 1", pair, [cap * 3 // 2, cap // 2]),
            ]
        else:
            wanted = [(str(path), [path], [0]) for path in paths]
            wanted += [("all of them", paths, [0] * len(paths))] if len(paths) > 1 else []
        cases: list[Case] = []
        try:
            for name, directories, caps in wanted:
                cases.append(Case(name, directories, caps, arguments))
            for _ in range(arguments.rounds):
                for case in cases:
                    case.measure()
        finally:
            for case in cases:
                case.close()
    show(cases, arguments)


def show(cases: list[Case], arguments: argparse.Namespace) -> None:
    description = f"{system()}, engine {cases[0].backend}"
    print(f"{description}; {arguments.total_bytes >> 20} MiB in records of {arguments.record_bytes >> 20} MiB")
    print(f"medians of {arguments.rounds} rounds, MB/s")
    width = max(len(case.name) for case in cases)
    print(f"{'':<{width}} {'caps':>9} {'shares':>11} {'write':>7} {'read':>7} {'of the caps':>12} {'of the first':>13}")
    rows = []
    for case in cases:
        write_bps, read_bps = case.median("write_bps"), case.median("read_bps")
        both_bps = 2 / (1 / write_bps + 1 / read_bps)
        first_bps = 2 / (1 / cases[0].median("write_bps") + 1 / cases[0].median("read_bps"))
        caps = "+".join(f"{cap / 1e6:.0f}" for cap in case.caps) if sum(case.caps) else "none"
        shares = " : ".join(f"{100 * share:.0f} %" for share in case.shares)
        of_caps = f"{both_bps / sum(case.caps):12.2f}" if sum(case.caps) else f"{'':>12}"
        print(
            f"{case.name:<{width}} {caps:>9} {shares:>11} {write_bps / 1e6:7.0f} {read_bps / 1e6:7.0f} {of_caps} "
            f"{both_bps / first_bps:13.2f}"
        )
        rows.append({"name": case.name, "caps": case.caps, "shares": case.shares, "rounds": case.rounds})
    keep_result(arguments, "drives", {"arguments": settings_of(arguments), "system": description, "cases": rows})


if __name__ == "__main__":
    main()
