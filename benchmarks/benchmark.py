"""Shared by the benchmarks: arguments, timing, medians, processes, results as JSON. Needs torch, and not swapper.

Importing it makes the modules of `examples/` importable, so it comes before them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before torch, and for processes that are started here, a peer's too: threads of OpenMP that wait shall sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT, Shape

RESULTS = Path(__file__).with_name("results")


def make_parser(
    description: str | None, *, rounds: int | None = None, results: bool = True, several_paths: bool = False
) -> argparse.ArgumentParser:
    """A parser with the arguments of most scripts, as far as they are wanted."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = (
        {"nargs": "+", "help": "directories; must exist"} if several_paths else {"help": "a directory on the drive"}
    )
    parser.add_argument("--nvme-path", type=Path, required=True, **several)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="of all that is measured in turn")
    if results:
        parser.add_argument("--save", action="store_true", help=f"keep the result in {RESULTS.name}/")
        parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The arguments for a result, without paths of the machine."""
    hidden = ("nvme_path", "json", "baseline", "deepspeed")
    return {key: "..." if value and key in hidden else str(value) for key, value in vars(arguments).items()}


def keep_result(arguments: argparse.Namespace, name: str, result: Mapping[str, Any]) -> None:
    """Write `result` where `--save` and `--json` say."""
    text = json.dumps(result, indent=1, default=str) + "\n"
    if arguments.save:
        path = RESULTS / time.strftime(f"%Y-%m-%d-{name}-%H%M%S.json")
        path.write_text(text)
        print(f"saved: {path}")
    if arguments.json:
        arguments.json.write_text(text)


def system() -> str:
    """The machine and torch, in a line."""
    return f"{platform.system()} {platform.release()}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def timed(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over `rows` of each figure."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def in_a_process(command: Sequence[str]) -> dict[str, Any]:
    """The last line that `command` prints, as JSON."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output.rstrip().splitlines()[-1])
    return result


def only_in_a_process(part: str) -> dict[str, Any]:
    """The last line of this script with `--only PART`, in a process of its own, as JSON."""
    return in_a_process([sys.executable, *sys.argv, "--only", part])


def bf16_model(shape: Shape, vocab_size: int, *, recompute: bool = False) -> GPT:
    """A GPT in bf16, which is never whole in fp32: that would be the peak of memory."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = GPT(shape, vocab_size, recompute=recompute)
    torch.set_default_dtype(default)
    return model


def random_batch(vocab_size: int, context: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, int64 of shape (1, context); the same for the same `number`."""
    generator = torch.Generator().manual_seed(number)
    window = torch.randint(vocab_size, (1, context + 1), generator=generator)
    return window[:, :-1], window[:, 1:]
