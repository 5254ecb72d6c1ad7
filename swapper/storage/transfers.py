"""Joins the transfers of one record's shares, which lie on several drives."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swapper.errors import SwapIOError, renewed
from swapper.io.transfer import Transfer, end_all

__all__ = [
    "AnyTransfer",
    "BothTransfers",
    "DroppedReads",
    "FailedTransfer",
    "JoinedTransfer",
    "RecordTransfer",
    "start_all",
]


class AnyTransfer(Protocol):
    """Uses the memory of a lease: a transfer, or a `devices.Copy`. See `Transfer` for the contracts."""

    def done(self) -> bool:
        """Return True if it is over, well or not."""

    def wait(self) -> int:
        """Wait until it is over; returns the bytes moved, raises what failed."""

    def wait_quietly(self) -> None:
        """Wait until it is over, and leave a failure unobserved."""


class RecordTransfer(AnyTransfer, Protocol):
    """Reads or writes a record: a `Transfer` or a `JoinedTransfer`."""

    def times_s(self) -> tuple[float, float]:
        """Return the times at which it began to move and was over."""


class DroppedReads:
    """Reads that are not wanted any more. They are waited for, so that no handle reports that one has failed."""

    def __init__(self) -> None:
        self._transfers: deque[AnyTransfer] = deque()

    def append(self, transfer: AnyTransfer) -> None:
        """Have one more."""
        self._transfers.append(transfer)

    def collect(self) -> None:
        """Forget the oldest, as far as they are over."""
        while self._transfers and self._transfers[0].done():
            _wait(self._transfers[0])
            self._transfers.popleft()

    def wait_quietly(self) -> None:
        """Wait until all are over."""
        for transfer in self._transfers:
            transfer.wait_quietly()

    def wait(self) -> None:
        """Wait until all are over, and forget them."""
        for transfer in self._transfers:
            _wait(transfer)
        self._transfers.clear()


def _wait(transfer: AnyTransfer) -> None:
    with contextlib.suppress(SwapIOError):
        transfer.wait()


class FailedTransfer:
    """Stands for a transfer that could not be made, because what comes before it has failed."""

    __slots__ = ("_error",)

    def __init__(self, error: SwapIOError) -> None:
        # Not the one that was raised: its traceback would keep the parameters of the frames that it passed, and so the
        # pool, and so this.
        self._error = renewed(error)

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> int:
        """Raise what has failed."""
        raise renewed(self._error)

    def wait_quietly(self) -> None:
        """Do nothing."""


class JoinedTransfer:
    """Transfers that are over when all of them are, and failed when any of them has.

    May be dropped, as each of its parts may: those go on, and a failure is raised by the `close` of its handle.

    Attributes:
        parts: at least one, of any handles and files.
    """

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self.parts = tuple(parts)

    def __repr__(self) -> str:
        return f"JoinedTransfer({', '.join(map(repr, self.parts))})"

    def done(self) -> bool:
        """Return True if all parts are over, well or not. Never blocks or raises."""
        return all(part.done() for part in self.parts)

    def wait(self) -> int:
        """Wait until all parts are over.

        Returns:
            Bytes moved by all parts. The same at every call.

        Raises:
            SwapIOError: a part failed: the error of the first that did, which names its file; where more did, the
                message has them too. The same at every call. Nothing is in flight any more.
            SwapError: in a forked child.
        """
        # A failure is observed only when nothing can cut this off any more: else it could be forgotten.
        self.wait_quietly()
        moved_bytes = 0
        failures: list[SwapIOError] = []
        for part in self.parts:
            try:
                moved_bytes += part.wait()
            except SwapIOError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            first, *others = failures
            detail = "; ".join(filter(None, [first.detail, *(f"also {other}" for other in others)]))
            raise renewed(first, detail=detail) from first
        return moved_bytes

    def wait_quietly(self) -> None:
        """Wait until all parts are over, well or not. Failures stay unobserved.

        Raises:
            SwapError: in a forked child.
        """
        for part in self.parts:
            part.wait_quietly()

    def times_s(self) -> tuple[float, float]:
        """Return the times at which the first part began to move and the last was over. See `Transfer.times_s`."""
        times_s = [part.times_s() for part in self.parts]
        return min(begun_s for begun_s, _ in times_s), max(ended_s for _, ended_s in times_s)


@dataclass(eq=False, slots=True)
class BothTransfers:
    """Two transfers that use one buffer: a write, and a copy to a device."""

    first: AnyTransfer
    second: AnyTransfer

    def done(self) -> bool:
        """Tell if both are over, well or not."""
        return self.first.done() and self.second.done()

    def wait(self) -> int:
        """Wait for both. Raises what failed, the first before the second."""
        self.second.wait_quietly()
        moved_bytes = self.first.wait()
        self.second.wait()
        return moved_bytes

    def wait_quietly(self) -> None:
        """Wait until both are over, and leave a failure unobserved."""
        self.first.wait_quietly()
        self.second.wait_quietly()


def start_all(starts: Iterable[Callable[[], Transfer]]) -> Transfer | JoinedTransfer:
    """Start several transfers, as one if they are more than one.

    Args:
        starts: each starts a transfer and returns it; at least one.

    Raises:
        Exception: what one of `starts` raised. Those that it had started are over, their failures ignored: nobody was
            told of them.
    """
    started: list[Transfer] = []
    try:
        for start in starts:
            started.append(start())
    except BaseException:
        end_all(started)  # All of it: their memory will have another owner.
        raise
    return started[0] if len(started) == 1 else JoinedTransfer(started)
