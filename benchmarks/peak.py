"""Peak memory of this process, sampled. Imports nothing but the standard library, so that any program can use it."""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["Peak"]


class Peak:
    """The most anonymous and shared memory of this process, in bytes, since it was entered.

    It is what a process cannot do without; mapped file pages can be dropped.
    """

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines)
            now = sum(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem"))
            self.bytes = max(self.bytes, now)
            if self._stop.wait(0.002):  # Last: on a busy machine a short block would have no sample at all.
                return
