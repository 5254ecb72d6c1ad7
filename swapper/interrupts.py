"""Ctrl-C put off for the few instructions in which a buffer, a lock or a descriptor changes hands."""

from __future__ import annotations

import threading

# The module beneath `signal`, whose functions spend ten times as long on turning numbers into enums and back.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from signal import SIGINT
from threading import get_ident
from types import FrameType, TracebackType

__all__ = ["interrupts_deferred"]


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

    __slots__ = ("_frame", "_handler", "_noted")

    def __enter__(self) -> None:
        # An interrupt before `signal` has replaced the handler is raised here, when nothing has changed; after
        # that it is noted. There is nothing in between: `signal` runs pending handlers before it replaces one.
        self._handler = None
        self._noted = False
        if get_ident() == _MAIN_THREAD.ident:
            handler = getsignal(_SIGINT)
            if callable(handler) and not isinstance(getattr(handler, "__self__", None), interrupts_deferred):
                self._handler = handler
                signal(_SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        handler = self._handler
        signal(_SIGINT, handler)
        if self._noted:
            handler(_SIGINT, self._frame)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted, self._frame = True, frame


_SIGINT = int(SIGINT)
_MAIN_THREAD = threading.main_thread()
