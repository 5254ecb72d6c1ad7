"""Files that were records of a removed checkpoint: their blocks were written before, so writing them again is faster.

[Note: unread files] A checkpoint that is removed may still be read, by a process that opened it before: its content
must not change under that reader. A write lease (fcntl(2), F_SETLEASE) is granted only on a file that nobody else
has open, and while it is held, whoever opens the file waits. So a file of which a lease was granted, which then lost
its public name, and for which nobody waited at the end, has no reader and can get none. Where a lease is not granted,
or the file system has none, the file is not used again.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import logging
import os
import signal
import stat
import threading
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

__all__ = ["RecycledFiles", "is_unread"]

log = logging.getLogger(__name__)


@contextlib.contextmanager
def _leased(path: Path) -> Iterator[int]:
    """A descriptor of a file of which a write lease was granted.

    Raises:
        OSError: it was not.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # SIGIO, which tells the holder otherwise that somebody waits, ends a process that does not expect it.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield descriptor
    finally:
        os.close(descriptor)


def _nobody_waits(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_WRLCK


def is_unread(path: Path) -> bool:
    """Tell if nobody has the file open, this process included. See [Note: unread files]."""
    try:
        with _leased(path) as descriptor:
            return _nobody_waits(descriptor)
    except OSError:
        return False


class _RecycledFile(NamedTuple):
    path: Path
    size_bytes: int


class RecycledFiles:
    """The files in one directory that were records of a removed checkpoint. Thread-safe.

    Args:
        directory: private to this process; whoever removes it removes them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # Re-entrant: a finalizer that writes may run at any allocation.
        self._all: list[_RecycledFile] = []  # the shortest first
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        with self._lock:
            return self._total_bytes

    def adopt(self, path: Path, room_bytes: int) -> bool:
        """Move a file here, if nobody reads it and it has no other name.

        Args:
            path: its only name.
            room_bytes: the longest it may be.

        Returns:
            False: it stays where it is, as it is.
        """
        recycled = self._directory / f"spare-{next(self._numbers):06d}"
        try:
            with _leased(path) as descriptor:
                status = os.fstat(descriptor)
                usable = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= room_bytes
                if not usable or not status.st_size:
                    return False
                os.rename(path, recycled)
                if not _nobody_waits(descriptor):  # It was opened before it lost its name.
                    os.rename(recycled, path)
                    return False
                os.fchmod(descriptor, 0o600)
        except OSError:
            return False
        with self._lock:
            bisect.insort(self._all, _RecycledFile(recycled, status.st_size), key=attrgetter("size_bytes"))
            self._total_bytes += status.st_size
        return True

    def take(self, length_bytes: int, path: Path) -> bool:
        """Give the file whose length is nearest to `length_bytes` the name `path`. False if there is none."""
        while True:
            with self._lock:
                if not self._all:
                    return False
                at = bisect.bisect_left(self._all, length_bytes, key=attrgetter("size_bytes"))
                near = self._all[max(at - 1, 0) : at + 1]
                found = min(near, key=lambda each: abs(each.size_bytes - length_bytes))
                if found not in self._all:  # A finalizer has taken it meanwhile.
                    continue
                self._all.remove(found)
                self._total_bytes -= found.size_bytes
            try:
                if is_unread(found.path):
                    os.rename(found.path, path)
                    return True
                found.path.unlink()
            except OSError as error:  # As when somebody removed it.
                log.debug("the recycled file %s is not used: %s", found.path, str(error))

    def drop(self) -> None:
        """Remove all of them."""
        with self._lock:
            files, self._all, self._total_bytes = self._all, [], 0
        for found in files:
            with contextlib.suppress(OSError):
                found.path.unlink()
