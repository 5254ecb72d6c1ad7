"""A save with an annex that is killed (-9) at its n-th call of the system: `python annex_kills.py DIRECTORY DRIVE N`.

Trains a step beyond what it finds in DIRECTORY, and saves it, with an annex in DRIVE. With N of -1 it is not killed.
"""

from __future__ import annotations

import fcntl
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from checkpoints import SmallTraining

from swapper.checkpoint import index
from swapper.storage import atomic

CALLS = ("rename", "link", "fsync", "open", "mkdir", "unlink", "rmdir", "listdir", "fchmod")


class KilledAt:
    """Ends this process before the n-th of the calls that change files, from 0, in any thread."""

    def __init__(self, n: int) -> None:
        self._left = n
        self._lock = threading.Lock()
        for name in CALLS:
            self._count(os, name)
        self._count(fcntl, "flock")
        self._count(io, "open")
        self._count(atomic, "exchange")
        self._count(index, "open", open)

    def _count(self, where: Any, name: str, real: Any = None) -> None:
        real = real or getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._left -= 1
                if self._left == -1:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(where, name, call)


def main() -> None:
    directory, drive, n = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    training = SmallTraining(drive)
    if (directory / "saved").exists():
        training.load(directory / "saved")
    training.steps()
    if n >= 0:
        KilledAt(n)
    training.save(directory / "saved", drive / "annexes").wait()


if __name__ == "__main__":
    main()
