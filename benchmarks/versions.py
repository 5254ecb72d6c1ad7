"""Compares this checkout with an older revision: the same benchmark of both, by turns, each in a process of its own.

    python benchmarks/versions.py REVISION --nvme-path DIR [--benchmarks optimizer_step everything_nvme] [--turns 5]

The revision is checked out beside this repository's files, in a temporary directory, and its core is built there. Each
version runs its own scripts, with the same arguments. "ratio" is the median step of this one by that of the older one,
of each turn; which of them begins changes with the turn.

What holds the bars of a step at most 1.02 and, with everything on NVMe, at most 0.9 of the time before there was one
cache for all kinds of records: `python benchmarks/versions.py 5ccc625 --nvme-path DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmark import keep_result, make_parser, settings_of, system

HERE = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("revision", help="of git")
    parser.add_argument("--benchmarks", nargs="+", default=["optimizer_step", "everything_nvme"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="of each benchmark in each turn")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="other arguments of the benchmarks; last")
    arguments = parser.parse_args()
    arguments.nvme_path.mkdir(parents=True, exist_ok=True)
    print(f"{system()}; this version by {arguments.revision}")
    rows = []
    with checkout(arguments.revision) as older:
        for name in arguments.benchmarks:
            for turn in range(arguments.turns):
                order = (older, HERE) if turn % 2 else (HERE, older)
                steps_s = {version: run(version, name, arguments) for version in order}
                row = {"benchmark": name, "older_s": steps_s[older], "step_s": steps_s[HERE]}
                rows.append({**row, "ratio": row["step_s"] / row["older_s"]})
                print(f"{name}: {row['older_s']:.3f} s then, {row['step_s']:.3f} s now", flush=True)
            ratio = statistics.median(row["ratio"] for row in rows if row["benchmark"] == name)
            print(f"{name}: ratio {ratio:.3f}", flush=True)
    keep_result(arguments, "versions", {"system": system(), "arguments": settings_of(arguments), "rows": rows})


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A directory with the files of `revision`, and its native core built."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "older"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), revision], check=True)
        try:
            subprocess.run(
                [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                cwd=place,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def run(version: Path, name: str, arguments: argparse.Namespace) -> float:
    """The median seconds of a step that a benchmark of `version` has measured."""
    with tempfile.TemporaryDirectory() as directory:
        figures = Path(directory) / "figures.json"
        script = version / "benchmarks" / f"{name}.py"
        command = [sys.executable, str(script), "--nvme-path", str(arguments.nvme_path), "--json", str(figures)]
        command += ["--rounds", str(arguments.rounds), *arguments.more]
        environment = {**os.environ, "PYTHONPATH": str(version)}  # Before the version that is installed.
        subprocess.run(command, cwd=version, env=environment, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads(figures.read_text())["median"]["step_s"])


if __name__ == "__main__":
    main()
