"""Which directories a command is about: those it is given, else those that are usual."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["directories_or_default"]


def directories_or_default(named: Sequence[Path] | None, *usual: str) -> list[Path]:
    """`named`, else those of the environment variable SWAPPER_NVME_PATH, else one of `usual`, else ".".

    Several in SWAPPER_NVME_PATH are separated by colons, as in PATH. Of `usual` it is the first that exists.

    Returns:
        Absolute paths, each once.
    """
    chosen = list(named or [])
    if not chosen:
        chosen = [Path(name) for name in os.environ.get("SWAPPER_NVME_PATH", "").split(os.pathsep) if name]
    if not chosen:
        chosen = [next((Path(name) for name in usual if os.path.isdir(name)), Path())]
    return list(dict.fromkeys(Path(os.path.abspath(path)) for path in chosen))
