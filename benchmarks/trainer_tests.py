"""The tests that transformers has of its Trainer, plain and with a `SwapCallback` in each Trainer that they make.

What passes plain has to pass swapped. Ends with an error if it does not. The tests are not in the package: they come
from a checkout of transformers at the installed version. Those that need a network, a GPU or a package that is not
installed are skipped or fail plain, and do not count.

    python benchmarks/trainer_tests.py CHECKOUT [--everything] [--files tests/trainer/test_trainer.py] [-- -k resume]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

DIRECTORY, EVERYTHING = "TRAINER_TESTS_DIRECTORY", "TRAINER_TESTS_EVERYTHING"
"""Set for a run of the tests that is swapped: see `pytest_configure`."""


def pytest_configure() -> None:
    """This module is a plugin of those runs: where `DIRECTORY` is set, each Trainer gets a callback."""
    if DIRECTORY not in os.environ:
        return
    from transformers import Trainer

    from swapper.hf import SwapCallback

    config: dict[str, Any] = {
        "nvme_path": os.environ[DIRECTORY],
        "pool_bytes": "64MiB",
        "offload_optimizer": {"device": "nvme"},
    }
    if EVERYTHING in os.environ:
        config |= {"offload_gradient": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    plain = Trainer.__init__

    def swapped(self: Any, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        self.add_callback(SwapCallback(config))

    Trainer.__init__ = swapped  # type: ignore[method-assign]


def outcomes(checkout: Path, arguments: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Run tests in `checkout`. Returns the outcome of each: passed, skipped, or the first line of why it failed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, f"--rootdir={checkout}", f"--junitxml={report}", *arguments]
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
        defaults = {"HF_HUB_OFFLINE": "1", "SWAPPER_ALLOW_TMPFS": "1", "PYTHONPATH": path}
        subprocess.run(command, cwd=checkout, env={**os.environ, **defaults, **environment}, check=False)
        if not report.exists():
            sys.exit("pytest did not come to an end: see above")
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            bad = [case.find(kind) for kind in ("failure", "error", "skipped")]
            message = next((each for each in bad if each is not None), None)
            if message is None:
                found[name] = "passed"
            else:
                found[name] = "skipped" if message.tag == "skipped" else (message.get("message") or "").split("\n")[0]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of transformers, at the version that is installed")
    parser.add_argument("--files", nargs="+", default=["tests/trainer/test_trainer.py"])
    parser.add_argument("--everything", action="store_true", help="gradients and parameters too, not the state alone")
    parser.add_argument("more", nargs="*", help="for pytest")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    with tempfile.TemporaryDirectory() as directory:
        environment = {DIRECTORY: directory, **({EVERYTHING: "1"} if given.everything else {})}
        runs = [outcomes(checkout, [*given.files, *given.more], each) for each in ({}, environment)]
    print(f"\n{'':10}{'passed':>10}{'skipped':>10}{'failed':>10}")
    for name, run in zip(("plain", "swapped"), runs, strict=True):
        counts = [sum(outcome == kind for outcome in run.values()) for kind in ("passed", "skipped")]
        print(f"{name:10}{counts[0]:10}{counts[1]:10}{len(run) - sum(counts):10}")
    worse = {name: runs[1].get(name, "missing") for name, outcome in runs[0].items() if outcome == "passed"}
    worse = {name: outcome for name, outcome in worse.items() if outcome != "passed"}
    for name, outcome in worse.items():
        print(f"{name}: {outcome}")
    sys.exit(bool(worse) or not any(outcome == "passed" for outcome in runs[0].values()))


if __name__ == "__main__":
    main()
