"""Ctrl-C, and other signals, put off for the few instructions in which a buffer, lock or descriptor changes hands."""

from __future__ import annotations

import os
import signal as signals
import threading

# The module beneath `signal`, whose functions spend ten times as long on turning numbers into enums and back.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any
from weakref import ref

__all__ = ["interrupts_deferred"]

Handler = Callable[[int, FrameType | None], Any]


class interrupts_deferred:  # Reads as a statement, like `contextlib.suppress`.
    """Context manager: Ctrl-C that arrives within it takes effect at its end, and so does another signal of a handler.

    CPython runs the handler of a signal between two instructions of the main thread, and the usual handler of SIGINT
    raises KeyboardInterrupt there: also after a call has acquired something and before its result has a name. So may
    a user's for a time that is over (SIGALRM), for the end of a job (SIGTERM, SIGUSR1), or torch's for a worker of a
    DataLoader that died (SIGCHLD). Within this, the handlers only take a note; the end restores them and calls them
    then. In other threads, where no handler ever runs, and of signals that have no handler of Python's, this does
    nothing.

        with interrupts_deferred():
            lease = pool.acquire(length_bytes)
            self._leases.append(lease)

    Surround what takes microseconds, never a wait: until the end Ctrl-C does nothing. May be nested. If the body
    raises, a noted interrupt is raised in its place, with the other exception as its context.
    """

    __slots__ = ("__weakref__", "_handlers", "_noted")
    _handlers: list[tuple[int, Handler]]
    _noted: dict[int, FrameType | None]

    def __enter__(self) -> None:
        # An interrupt before `signal` has replaced the handler is raised here, when nothing has changed; after that it
        # is noted. There is nothing in between: `signal` runs pending handlers before it replaces one.
        self._handlers = handlers = []
        if get_ident() != _main_thread:
            return
        self._noted = {}
        for number in _SIGNALS:
            handler = getsignal(number)
            if type(handler) is partial and handler.func is _note:
                section, handler = handler.args
                if section() is not None:
                    continue
            if callable(handler):
                handlers.append((number, handler))
                signal(number, partial(_note, ref(self), handler))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        handlers = self._handlers
        if len(handlers) == 1:  # Few programs have more, and this is called often.
            number, handler = handlers[0]
            signal(number, handler)
            if self._noted:
                handler(number, self._noted[number])
        elif handlers:
            self._end(handlers)

    def _end(self, handlers: list[tuple[int, Handler]]) -> None:
        """Restore `handlers`, and call those whose signals were noted. All of them, whatever any of them raises."""
        number, handler = handlers.pop()
        try:
            signal(number, handler)  # Another that is restored already may raise here, too.
            if number in self._noted:
                handler(number, self._noted[number])
        finally:
            if handlers:
                self._end(handlers)

    def end(self) -> list[int]:
        """In place of the end of the body. Signals that arrived are the caller's: returns their numbers."""
        if not self._handlers:
            return []
        for number, handler in self._handlers:
            signal(number, handler)
        return list(self._noted)


def _note(reference: ref[interrupts_deferred], handler: Handler, signum: int, frame: FrameType | None) -> None:
    """The handler within a section, with the section and the handler that it had found.

    It knows the section weakly: if the handler of another signal raises in `__enter__` or `__exit__`, the section is
    gone and nobody restores this one. Then this does.
    """
    section = reference()
    if section is None:
        signal(signum, handler)
        handler(signum, frame)
    else:
        section._noted[signum] = frame


def _set_main_thread() -> None:
    """After a fork the thread that forked is the main thread. A section of the former one has nobody who ends it."""
    global _main_thread
    if _main_thread != get_ident():
        _main_thread = get_ident()
        for number in _SIGNALS:
            handler = getsignal(number)
            if type(handler) is partial and handler.func is _note:
                signal(number, handler.args[1])


_SIGNALS = tuple(
    int(getattr(signals, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF")
)
"""The signals that programs have handlers of. None that cannot be deferred (SIGKILL), nor of an error (SIGSEGV)."""

_main_thread = threading.main_thread().ident
os.register_at_fork(after_in_child=_set_main_thread)
