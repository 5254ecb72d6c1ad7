"""Saves that go on in the background: `SaveHandle` waits for one of them."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable

from swapper.errors import SwapError, SwapIOError
from swapper.process.finalizers import finalizer

__all__ = ["PendingSave", "SaveHandle"]

log = logging.getLogger(__name__)


class SaveHandle:
    """A save that goes on in the background. From `save(..., background=True)` and `save_checkpoint`.

    May be dropped: the save goes on, also at interpreter exit, which waits for it. A failure is then logged.

    Args:
        path: of the file or directory.
        write: writes it; called in a thread. None if it was complete before anybody could wait for it.

    Attributes:
        path: of the file or directory.

    Raises:
        SwapIOError: the system starts no more threads.
    """

    def __init__(self, path: str, write: Callable[[], None] | None) -> None:
        self.path = path
        self._pid = os.getpid()
        self._outcome = _Outcome(path)
        self._finalizer = finalizer(self, self._outcome.abandon)
        if write is None:
            self._outcome.over.set()
            return
        thread = threading.Thread(target=self._outcome.run, args=(write,), name="swapper-save", daemon=False)
        try:
            thread.start()
        except BaseException as error:
            self._finalizer.detach()
            if isinstance(error, RuntimeError):
                raise SwapIOError(errno.EAGAIN, "start a thread for", path, detail=str(error)) from None
            raise

    def __repr__(self) -> str:
        state = "done" if self.done() else "in progress"
        return f"SaveHandle({self.path!r}, {state})"

    def done(self) -> bool:
        """True if it is over, well or not. Never blocks or raises."""
        return self._outcome.over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the file is complete and synced, under its name.

        Ctrl-C interrupts the wait, not the save.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            SwapIOError: it failed; nothing is left of it, and what was under the name before is whole. The same at
                every call. Other exceptions as from `save`.
            TimeoutError: it is still in progress.
            SwapError: in a forked child.
        """
        if os.getpid() != self._pid:
            raise SwapError("this save was started before a fork: it can be waited for in the parent only")
        if not self._outcome.over.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"{self.path} is still being saved")
        self._finalizer.detach()
        self._outcome.observe()


class _Outcome:
    """The end of a save in the background. Separate from its handle, which may be dropped."""

    def __init__(self, path: str) -> None:
        self.over = threading.Event()
        self._path = path
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        self._seen = False

    def run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
            part: BaseException | None = error
            while part is not None:
                part.with_traceback(None)  # Its frames hold the tensors that were saved.
                part = part.__context__
        del write  # It holds them too: whoever waits may expect their memory to be free.
        with self._lock:
            self.over.set()
            self._log_unseen()

    def observe(self) -> None:
        self._seen = True
        if self._error is not None:
            raise self._error.with_traceback(None)

    def abandon(self) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                self._abandoned = True
                self._log_unseen()

    def _log_unseen(self) -> None:
        if self._abandoned and self.over.is_set() and self._error is not None and not self._seen:
            self._seen = True
            log.error("saving %s failed, and nobody waited for it: %s", self._path, str(self._error))


class PendingSave:
    """The last save that somebody started, until it is waited for."""

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None

    def keep(self, handle: SaveHandle) -> None:
        """Have the next `wait` wait for `handle`, and raise its failure."""
        self._handle = handle

    def wait(self) -> None:
        """Wait for the save, if there is one.

        Raises:
            SwapIOError: it failed. Raised once.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()
