"""Transfers in flight: what their callers see of them, and the ledger that keeps their memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io import _native
from swapper.process.interrupts import interrupts_deferred

__all__ = ["Ledger", "Moving", "Transfer", "end_all"]


class Moving(Protocol):
    """A transfer of the native core, or one of device memory."""

    @property
    def key(self) -> int:
        """The ledger's."""

    def done(self) -> bool:
        """See `Transfer.done`."""

    def failed(self) -> bool:
        """Tell if it is over and failed."""

    def times_s(self) -> tuple[float, float]:
        """See `Transfer.times_s`."""

    def wait(self, timeout: float | None = None) -> int:
        """See `Transfer.wait`."""


class Ledger:
    """The transfers in flight on one engine, and those that failed unseen.

    Apart from the handle, so that transfers need not hold it. The I/O threads never touch Python: they keep a list of
    finished transfers, which the next `start` takes, and `sweep`.

    Attributes:
        in_flight: by key, the storage of each transfer. The storage, not the tensor: `tensor.data = ...` would
            otherwise free the memory under the transfer.
        failed: by key, failures that nobody has waited for.
        drain: completes what is in flight elsewhere, before the engine is closed; False if that cannot be now, and
            then its argument is called when it is done.
    """

    __slots__ = ("_lock", "drain", "engine", "failed", "in_flight", "pid")

    def __init__(self, engine: _native.Engine) -> None:
        self.engine = engine
        self.pid = os.getpid()
        self.in_flight: dict[int, torch.UntypedStorage] = {}
        self.failed: dict[int, Moving] = {}
        self.drain: Callable[[Callable[[], None]], bool] = lambda later: True
        # So that nobody sees a finished transfer in neither table. Re-entrant: the finalizer of the handle may run at
        # any allocation.
        self._lock = threading.RLock()

    def start(
        self,
        key: int,
        tensor: torch.Tensor,
        begin: Callable[[], Moving],
        operation: str,
        path: str,
        offset_bytes: int,
    ) -> Transfer:
        """Begin a transfer of the memory of `tensor`, which is kept until it is over."""
        transfer: Transfer | None = None
        try:
            with interrupts_deferred():
                self._sweep()
                self.in_flight[key] = tensor.untyped_storage()  # First: it may be over when `begin` returns.
                transfer = Transfer(self, begin(), operation, path, offset_bytes, tensor.nbytes)
        except BaseException:
            if transfer is None:
                self.in_flight.pop(key, None)
            else:  # Ctrl-C: nobody will know of it, so it ends here, before its memory has another owner.
                end_all([transfer])
            raise
        return transfer

    def sweep(self) -> None:
        """Let go of the memory of finished transfers and note those that failed."""
        # Transfers that were taken from the engine are nowhere else: Ctrl-C comes when they are in the tables.
        with interrupts_deferred():
            self._sweep()

    def _sweep(self) -> None:
        with self._lock:
            while finished := self.engine.take_finished():
                for transfer in finished:
                    self.over(transfer, failed=transfer.failed())

    def over(self, transfer: Moving, *, failed: bool) -> None:
        """The same for one transfer that is over. Called by any thread. May be cut off, and done again."""
        with self._lock:
            if transfer.key in self.in_flight:
                if failed:
                    self.failed[transfer.key] = transfer
                del self.in_flight[transfer.key]


class Transfer:
    """One asynchronous read or write, in flight from the moment it is made.

    May be dropped: it goes on, its memory stays, and a failure is raised by `AsyncIOHandle.close`. May be waited for
    from any thread, any number of times, also after the handle is closed.

    Attributes:
        operation: "read" or "write".
        path: of the file.
        offset_bytes: where in the file.
        length_bytes: how much.
    """

    __slots__ = ("__weakref__", "_ledger", "_moving", "length_bytes", "offset_bytes", "operation", "path")

    def __init__(
        self,
        ledger: Ledger,
        moving: Moving,
        operation: str,
        path: str,
        offset_bytes: int,
        length_bytes: int,
    ) -> None:
        self.operation = operation
        self.path = path
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self._ledger = ledger
        self._moving = moving

    def __repr__(self) -> str:
        state = "failed" if self._moving.failed() else "done" if self._moving.done() else "in flight"
        return f"Transfer({self.operation} {self.length_bytes} bytes at {self.offset_bytes} of {self.path!r}, {state})"

    def done(self) -> bool:
        """Tell if it is over, well or not. Never blocks or raises."""
        return self._moving.done()

    def times_s(self) -> tuple[float, float]:
        """Real times of its begin and end, whenever somebody looked.

        Returns:
            Seconds by the clock of `time.perf_counter()`: when its first bytes were given to the system, and when its
            last were done or it had failed.

        Raises:
            SwapError: it is still in flight.
        """
        return self._moving.times_s()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over.

        Ctrl-C interrupts the wait, not the transfer.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            Bytes moved: always `length_bytes`. The same at every call.

        Raises:
            SwapIOError: it failed; ENODATA where the file ended before the bytes asked for. The same at every call.
                Nothing of it is in flight any more; which bytes were moved is not known.
            TimeoutError: it is still in flight.
            SwapError: in a forked child.
        """
        self._check_process()
        try:
            moved = self._moving.wait(timeout)
        except SwapIOError:
            self._ledger.over(self._moving, failed=False)
            self._ledger.failed.pop(self._moving.key, None)
            raise
        self._ledger.over(self._moving, failed=False)
        return moved

    def wait_quietly(self, timeout: float | None = None) -> None:
        """Wait until it is over, well or not. A failure stays unobserved: `wait` or `AsyncIOHandle.close` raises it.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: it is still in flight.
            SwapError: in a forked child.
        """
        self._check_process()
        with contextlib.suppress(SwapIOError):
            self._moving.wait(timeout)
        self._ledger.over(self._moving, failed=self._moving.failed())

    def _check_process(self) -> None:
        if os.getpid() != self._ledger.pid:
            raise SwapError("this transfer was started before a fork: it can be waited for in the parent only")


def end_all(transfers: Iterable[Transfer | Moving]) -> None:
    """Wait until all are over, whatever strikes meanwhile; nobody else knows of them, so their failures are ignored.

    Raises:
        BaseException: what struck, such as Ctrl-C, when all are over.
    """
    struck: BaseException | None = None
    for transfer in transfers:
        over = False
        while not over:
            try:
                with contextlib.suppress(SwapIOError):
                    transfer.wait()
                over = transfer.done()
            except BaseException as error:
                struck = error
                over = transfer.done()
    if struck is not None:
        raise struck
