"""Ctrl-C put off for the few instructions in which a buffer, a lock or a descriptor changes hands."""

from __future__ import annotations

import os
import threading

# The module beneath `signal`, whose functions spend ten times as long on turning numbers into enums and back.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from functools import partial
from signal import SIGINT
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any
from weakref import ref

__all__ = ["interrupts_deferred"]

Handler = Callable[[int, FrameType | None], Any]


class interrupts_deferred:  # Reads as a statement, like `contextlib.suppress`.
    """Context manager: a SIGINT that arrives within it takes effect at its end.

    CPython runs the handler of a signal between two instructions of the main thread, and the usual handler raises
    KeyboardInterrupt there: also after a call has acquired something and before its result has a name. Within this,
    the handler only takes a note; the end restores it and calls it then. In other threads, where no handler ever runs,
    and where SIGINT has no handler of Python's, this does nothing.

        with interrupts_deferred():
            lease = pool.acquire(length_bytes)
            self._leases.append(lease)

    Surround what takes microseconds, never a wait: until the end Ctrl-C does nothing. May be nested. If the body
    raises, a noted interrupt is raised in its place, with the other exception as its context.
    """

    __slots__ = ("__weakref__", "_frame", "_handler", "_noted")
    _frame: FrameType | None
    _handler: Handler | None
    _noted: bool

    def __enter__(self) -> None:
        # An interrupt before `signal` has replaced the handler is raised here, when nothing has changed; after that it
        # is noted. There is nothing in between: `signal` runs pending handlers before it replaces one.
        self._handler = None
        if get_ident() == _main_thread:
            handler = getsignal(_SIGINT)
            if type(handler) is partial and handler.func is _note:
                section, handler = handler.args
                if section() is not None:
                    return
            if callable(handler):
                self._noted = False
                self._handler = handler
                signal(_SIGINT, partial(_note, ref(self), handler))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handler = self._handler
        if handler is not None:
            signal(_SIGINT, handler)
            if self._noted:
                handler(_SIGINT, self._frame)

    def end(self) -> bool:
        """In place of the end of the body. An interrupt that arrived is the caller's: returns True if one did."""
        if self._handler is None:
            return False
        signal(_SIGINT, self._handler)
        return self._noted


def _note(reference: ref[interrupts_deferred], handler: Handler, signum: int, frame: FrameType | None) -> None:
    """The handler within a section, with the section and the handler that it had found.

    It knows the section weakly: if the handler of another signal raises in `__enter__` or `__exit__`, the section is
    gone and nobody restores SIGINT's handler. Then this does.
    """
    section = reference()
    if section is None:
        signal(_SIGINT, handler)
        handler(signum, frame)
    else:
        section._noted, section._frame = True, frame


def _set_main_thread() -> None:
    """After a fork the thread that forked is the main thread. A section of the former one has nobody who ends it."""
    global _main_thread
    if _main_thread != get_ident():
        _main_thread = get_ident()
        handler = getsignal(_SIGINT)
        if type(handler) is partial and handler.func is _note:
            signal(_SIGINT, handler.args[1])


_SIGINT = int(SIGINT)
_main_thread = threading.main_thread().ident
os.register_at_fork(after_in_child=_set_main_thread)
