"""`RecordWrites`: starts the writes of one cache's records; of those that a device still copies, when it has.

[Note: writes without a call] A device may finish copying a record when the thread that trains is elsewhere: in a
forward, or waiting for data. So that the drive does not wait for it, a thread of our own waits for the copies of a
cache, one after another, and starts the writes. It only comes first: while `CachedRecord.finish` is set, any call that
needs the record, or its buffer, does the same itself.

    one owner   `starting` is held while a write is started, or withdrawn. `finish` is None when it is released
    an error    the record keeps it, as `FailedTransfer`, or keeps `finish` if the write could not be started: the next
                call of the cache meets it, just as if there were no thread
    the end     the thread lives while there are copies to wait for. Python waits for it before it ends a program
    finalizers  may take `starting` in the middle of anything, also where a lock is held that a write needs. So the
                thread keeps the cache's owner alive while it holds `starting`: no finalizer of it can be waiting then.
                If nobody else has the owner any more, it ends in the thread: who needs its memory waits for that with
                `wait_for_ends`
    a fork      waits until no thread of any cache has `_not_forking`: with it a thread may have locks of the store, of
                an engine. With it a thread waits for no `starting`, nor for it with a `starting`. So who forks, who
                may be cut off in the middle of a call and have some, is waited for by nobody whom it waits for
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from _thread import interrupt_main
from collections import deque
from collections.abc import Callable

from swapper.errors import SwapIOError
from swapper.metrics import Metrics
from swapper.process.interrupts import interrupts_deferred
from swapper.storage.cached_records import CachedRecord, CachedRecords
from swapper.storage.spans import RecordStore
from swapper.storage.store import RecordKey
from swapper.storage.transfers import AnyTransfer, FailedTransfer

__all__ = ["RecordWrites", "wait_for_ends"]

log = logging.getLogger(__name__)


class RecordWrites:
    """Starts the writes of `records`. See [Note: writes without a call].

    Args:
        store: where records go; None: nothing is written, and records are only completed.
        metrics: counts writes.
        records: of a cache, under whose lock all methods are called.
        owner: what has a finalizer that ends the cache; None if nothing has.
        repeats: what completes a record may be called again after it failed.
    """

    def __init__(
        self,
        store: RecordStore | None,
        metrics: Metrics,
        records: CachedRecords,
        owner: weakref.ref[object] | None,
        *,
        repeats: bool,
    ) -> None:
        self.starting = threading.RLock()  # Re-entrant: a finalizer may run at any allocation.
        self._keeping = threading.Lock()  # held by the thread while it may be the last that has the owner
        self._store = store
        self._metrics = metrics
        self._records = records
        self._owner = owner
        self._repeats = repeats
        self._copying: deque[tuple[RecordKey, AnyTransfer]] = deque()
        self._has_thread = False
        _living[id(self)] = self

    def start(self, record: CachedRecord, length_bytes: int) -> None:
        """Start writing the first bytes of the buffer of `record`. Nothing else is in flight in it.

        Raises:
            SwapIOError: it could not be started; nothing has changed.
        """
        assert self._store is not None
        with self.starting:
            with interrupts_deferred():
                record.lease.transfer = transfer = self._store.write(record.key, record.lease, length_bytes)
                record.finish = None
            self._metrics.count_write(record.key, length_bytes, transfer)

    def start_when_copied(self, record: CachedRecord, finish: Callable[[], int]) -> None:
        """Have `record` written when its lease's transfer, a copy, is over. To be called with interrupts deferred.

        Args:
            finish: is called then, in any thread; completes the record and gives its length in bytes. Once, but with
                `repeats` again after it failed.
        """
        assert record.lease.transfer is not None
        with self.starting:
            record.finish = finish
            if self._store is not None:
                self._watch(record.key, record.lease.transfer)

    def finish(self, record: CachedRecord) -> None:
        """If `record` is to be written when it is copied, wait for the copy, complete it, and start writing it.

        Raises:
            SwapIOError: the copy failed, or `finish`, and the lease's transfer is a `FailedTransfer` from now on; or
                the write could not be started, or what may be repeated failed: the next call tries again.
        """
        transfer = record.lease.transfer
        if record.finish is not None and transfer is not None:
            transfer.wait_quietly()
        with self.starting:
            if record.finish is not None:
                self._finish(record)

    def withdraw(self, record: CachedRecord) -> bool:
        """Do not write `record` when it is copied. False if its write was started, or nothing is to be written."""
        with self.starting:
            pending, record.finish = record.finish, None
            return pending is not None

    def _finish(self, record: CachedRecord) -> None:
        assert record.finish is not None and record.lease.transfer is not None
        try:
            record.lease.transfer.wait()
            with interrupts_deferred():  # It may change the record, so that it must not be called again.
                length_bytes = record.finish()
                record.finish = lambda: length_bytes  # If the write cannot be started, the next call tries that alone.
        except SwapIOError as error:
            record.lease.transfer = FailedTransfer(error)
            raise
        except Exception as error:  # A bug, or no memory: half of it may be done.
            failed = SwapIOError(errno.EIO, "write", detail=f"completing a record that a device copied: {error!r}")
            if not self._repeats:
                record.lease.transfer = FailedTransfer(failed)
            raise failed from error
        if self._store is None:
            record.finish = None
        else:
            # It was waited for. What streams do by now has no part in it.
            with interrupts_deferred(), record.lease.apart():
                self.start(record, length_bytes)

    # --- The thread ------------------------------------------------------------------------------------------------

    def _watch(self, key: RecordKey, copy: AnyTransfer) -> None:
        self._copying.append((key, copy))
        if not self._has_thread:
            thread = threading.Thread(
                target=_start_writes, args=(weakref.ref(self),), name="swapper-writes", daemon=False
            )
            try:
                thread.start()  # It waits for `starting`, and then finds the copy.
            except RuntimeError as error:  # No threads are left, or the interpreter ends: calls do it.
                self._copying.clear()
                log.debug("writes start with the next call: %s", str(error))
            else:
                self._has_thread = True

    def _next_copy(self) -> tuple[RecordKey, AnyTransfer] | None:
        """The next copy that the thread is to wait for. None ends it."""
        with self.starting:
            if self._copying:
                return self._copying.popleft()
            self._has_thread = False
            return None

    def _start_copied(self, key: RecordKey, copy: AnyTransfer) -> None:
        """In the thread: `copy` is over. Start the write, if nobody has."""
        with self._keeping:
            owner = None if self._owner is None else self._owner()
            if owner is None and self._owner is not None:
                return
            while not self._try_to_start(key, copy):
                with self.starting:  # Whoever has it starts the write perhaps, and lets it go soon.
                    pass
            with _not_forking:
                del owner  # Its finalizer may run here.

    def _try_to_start(self, key: RecordKey, copy: AnyTransfer) -> bool:
        """Return False if somebody else has `starting`."""
        with _not_forking:
            if not self.starting.acquire(blocking=False):
                return False
            try:
                record = self._records.get(key)
                if record is not None and record.finish is not None and record.lease.transfer is copy:
                    with contextlib.suppress(Exception):  # The next call meets it again: see the note.
                        self._finish(record)
            finally:
                self.starting.release()
        return True


def _start_writes(reference: weakref.ref[RecordWrites]) -> None:
    """The thread. While it waits for a device it keeps nobody alive."""
    while (writes := reference()) is not None and (found := writes._next_copy()) is not None:
        del writes
        key, copy = found
        with contextlib.suppress(Exception):  # What failed is met by whoever waits for it.
            copy.wait_quietly()
        if (writes := reference()) is not None:
            writes._start_copied(key, copy)
        del writes, found, copy


_living: weakref.WeakValueDictionary[int, RecordWrites] = weakref.WeakValueDictionary()
_not_forking = threading.RLock()  # See the note.
_forks: dict[int, list[interrupts_deferred]] = {}  # those that are under way, by thread: several may fork at once


def wait_for_ends() -> None:
    """Wait until what others have dropped while a thread was starting a write of it has ended."""
    for reference in _living.valuerefs():
        if (writes := reference()) is not None:
            with writes._keeping:
                pass


def _before_fork() -> None:
    # What raises here is printed, and the fork is made all the same. So Ctrl-C is put off until it is.
    section = interrupts_deferred()
    section.__enter__()
    _not_forking.acquire()
    _forks.setdefault(threading.get_ident(), []).append(section)


def _after_fork() -> list[int]:
    """Return the numbers of signals that came. Nothing happens if they came before anything else did."""
    sections = _forks.get(threading.get_ident())
    if not sections:
        return []
    section = sections.pop()
    _not_forking.release()
    return section.end()


def _after_fork_in_parent() -> None:
    # The interpreter looks for them after calls. None follows here, so that they are raised in the caller of the fork.
    [*map(interrupt_main, _after_fork())]  # type: ignore[arg-type]


def _after_fork_in_child() -> None:
    _living.clear()  # The threads are the parent's, with what they hold.
    _after_fork()
    _forks.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
