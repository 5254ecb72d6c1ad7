"""DeepSpeed beside a benchmark: the argument that names its Python, and its steps in a process of their own."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmark import in_a_process


def add_deepspeed(parser: argparse.ArgumentParser) -> None:
    """Add `--deepspeed`: None without it, else a Python."""
    parser.add_argument("--deepspeed", nargs="?", const=sys.executable, metavar="PYTHON", help="train with it too")


def require_deepspeed(parser: argparse.ArgumentParser, python: str | None) -> None:
    """End with an error, before anything is measured, if that Python is named and has no DeepSpeed."""
    if python and subprocess.run([python, "-c", "import deepspeed"], capture_output=True).returncode != 0:
        parser.error(f"--deepspeed: {python} cannot import deepspeed")


def run_deepspeed(arguments: argparse.Namespace, *flags: str) -> Any:
    """What the peer prints for the size and context of `arguments`; its files in a directory that goes afterwards."""
    directory = tempfile.mkdtemp(dir=arguments.nvme_path, prefix="deepspeed-")
    try:
        command = [arguments.deepspeed, str(Path(__file__).with_name("deepspeed_zero3.py")), "--nvme-path", directory]
        command += ["--size", arguments.size, "--vocab-size", str(arguments.vocab_size)]
        return in_a_process([*command, *flags])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
