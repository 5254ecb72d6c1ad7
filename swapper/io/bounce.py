"""Moves device tensors through a ring of page-locked memory on the host, so that none is ever copied there in whole.

[Note: stages] A transfer is cut into chunks, and each chunk goes through two stages:

    write    device to ring, on a stream of our own    then    ring to file, by the native engine
    read     file to ring, by the native engine        then    ring to device, on that stream
    direct   what the caller's stream had to do        then    device to file or back, by an engine that can

One helper thread starts a stage as soon as the one before is over, so that some chunks are at the drive while others
are copied. The native engine knows neither Python nor devices. The thread lives while there is work: at the exit of the
interpreter it is joined by it, which completes what is in flight.

[Note: order] The caller's stream may still have to compute what is written, or to use what is overwritten. An event
at its end, recorded at the call, comes before the first copy, and before the first direct stage. A transfer is over
when its last stage is: the stream has been waited for, not only been told.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io.devices import Copies, Event, check_devices, copies_of, failures, is_reached, note_failure, on_device
from swapper.io.transfer import Moving
from swapper.sizes import round_up

__all__ = ["Bounce", "Direct", "Job"]

RING_CHUNKS = 4
"""Chunks of full length that the ring holds: three at the drive while one is copied."""
CHUNK_BYTES_MIN = 4 << 20
CHUNK_BYTES_MAX = 64 << 20

_WAIT_S = 0.002
_POLL_S = 0.0002

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Direct:
    """The part of a transfer that needs no bounce memory.

    Attributes:
        start_bytes: where in the tensor it starts.
        stop_bytes: where it stops.
        start: starts it.
        refused: whether this failure means that it must go through bounce memory after all.
    """

    start_bytes: int
    stop_bytes: int
    start: Callable[[], Moving]
    refused: Callable[[SwapIOError], bool]


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """One transfer of device memory.

    Attributes:
        key: the ledger's.
        operation: "read" or "write".
        path: of the file.
        offset_bytes: where in the file.
        storage: holds the memory; kept until the transfer is over.
        start_bytes: where in the storage.
        length_bytes: how much; more than 0.
        unit_bytes: chunks start at multiples of this in the file; at most `Bounce.chunk_bytes`.
        copies, device: of the storage.
        start: starts a native transfer of host memory: address, length and offset in the file.
        direct: the part of it that needs no bounce memory.
        over: called on the helper thread, once, when it is over.
        ready: reached when the caller's stream has done what it had to do at the call. See [Note: order].
        error: the first failure.
    """

    key: int
    operation: str
    path: str
    offset_bytes: int
    storage: torch.UntypedStorage | None
    start_bytes: int
    length_bytes: int
    unit_bytes: int
    copies: Copies
    start: Callable[[int, int, int], Moving]
    direct: Direct | None
    over: Callable[..., None]
    ready: Event = field(init=False)
    device: torch.device = field(init=False)
    error: SwapIOError | None = None
    begun_s: float = field(default_factory=time.perf_counter)
    ended_s: float = 0.0
    # The helper thread's: whether its copies follow `ready`; parts that are not cut into chunks; chunks in flight.
    ordered: bool = False
    uncut: int = 0
    chunks: int = 0
    _tensor: torch.Tensor | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        assert self.storage is not None
        self.device = self.storage.device
        self.ready = self.copies.reached()

    def is_ready(self) -> bool:
        """Tell if `ready` is reached. Raises what the device reports."""
        with on_device(self.device):
            return self.ready.query()

    def done(self) -> bool:
        """See `Transfer.done`."""
        return self._over.is_set()

    def failed(self) -> bool:
        """Tell if it is over and failed."""
        return self.done() and self.error is not None

    def times_s(self) -> tuple[float, float]:
        """See `swapper.handle.Transfer.times_s`; it begins when it is made."""
        if not self.done():
            raise SwapError("the transfer is still in flight")
        return self.begun_s, self.ended_s

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over; see `swapper.handle.Transfer.wait`."""
        if timeout is not None and not timeout == timeout:
            raise ValueError("timeout is NaN")
        if not self._over.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            raise TimeoutError("the transfer is still in flight")
        if self.error is not None:
            raise copy.copy(self.error)
        return self.length_bytes

    def bytes_of(self, start: int, stop: int) -> torch.Tensor:
        """A part of the memory. On the helper thread: modes of the caller's, such as inference, do not apply."""
        if self._tensor is None:
            assert self.storage is not None
            empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
            self._tensor = empty.set_(self.storage, self.start_bytes, (self.length_bytes,), (1,))
        return self._tensor[start:stop]

    def finish(self) -> None:
        """It is over: let go of the memory, tell everyone."""
        self.ended_s = time.perf_counter()
        self.storage = self._tensor = self.direct = None
        self.over(self, failed=self.error is not None)
        self._over.set()


@dataclass(eq=False, slots=True)
class _Chunk:
    job: Job
    start: int
    stop: int
    direct: bool = False
    span: _Span | None = None
    event: Event | None = None
    native: Moving | None = None
    failures: int = field(default_factory=failures)  # of devices, when it began

    def is_ready(self) -> bool:
        if self.native is not None:
            return self.native.done()
        assert self.event is not None
        return is_reached(self.event, self.job.device)


def _await_device(job: Job, wait: Callable[[], object]) -> None:
    """Call `wait`, which waits for the device of `job`. A failure is noted, for `check_devices`."""
    try:
        with on_device(job.device):
            wait()
    except Exception as error:
        note_failure(error)


@dataclass(eq=False, slots=True)
class _Span:
    """A piece of the ring."""

    start: int
    end: int
    free: bool = False


class _Ring:
    """Page-locked memory, given out in order; it comes back in order too, when the pieces before have."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._length = memory.numel()
        # Positions that only grow; the offset in memory is the remainder.
        self._head = self._tail = 0
        self._spans: deque[_Span] = deque()

    def take(self, length_bytes: int) -> _Span | None:
        """A piece that starts at a page, in one piece. None if there is no room now."""
        start = round_up(self._head, mmap.PAGESIZE)
        if start % self._length + length_bytes > self._length:
            start += self._length - start % self._length
        if start + length_bytes - self._tail > self._length:
            return None
        self._head = start + length_bytes
        span = _Span(start, self._head)
        self._spans.append(span)
        return span

    def give_back(self, span: _Span) -> None:
        span.free = True
        while self._spans and self._spans[0].free:
            self._tail = self._spans.popleft().end
        if not self._spans:
            self._head = self._tail = 0

    def view(self, span: _Span, skip: int, length_bytes: int) -> torch.Tensor:
        start = span.start % self._length + skip
        return self.memory[start : start + length_bytes]


class Bounce:
    """Carries out jobs, in the order of their start but side by side. Thread-safe.

    The page-locked memory, four chunks, is allocated at the first job that needs it and kept until `close`.

    Args:
        allocate: makes memory of the host: a tensor of so many bytes of uint8, at the start of a page.
        block_bytes: what the native engine moves in one request. A chunk is that long, but 4 to 64 MiB.

    Attributes:
        chunk_bytes: the most that is moved in one piece.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], block_bytes: int) -> None:
        self._allocate = allocate
        chunk_bytes = min(max(block_bytes, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)
        self.chunk_bytes = round_up(chunk_bytes, mmap.PAGESIZE)
        self._copies: dict[torch.device, Copies] = {}
        # Re-entrant: the finalizer of the handle may run at any allocation, also on the helper thread.
        self._lock = threading.RLock()
        self._waiting: deque[Job] = deque()
        self._jobs: dict[int, Job] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._later: Callable[[], None] | None = None
        # The helper thread's own.
        self._uncut: deque[_Chunk] = deque()
        self._flight: list[_Chunk] = []
        self._ring: _Ring | None = None
        self._unlock: Callable[[], None] | None = None
        self._locked_for: type[Copies] | None = None  # type of devices that the ring is page-locked for

    def copies(self, device: torch.device) -> Copies:
        """The copies from and to `device`, made at the first use."""
        with self._lock:
            found = self._copies.get(device)
            if found is None:
                found = self._copies[device] = copies_of(device)
            return found

    def start(self, job: Job) -> Job:
        """Take on a job, and return it. No Ctrl-C may be raised meanwhile.

        Raises:
            SwapError: closed.
            SwapIOError: there is no thread to be had.
        """
        with self._lock:
            if self._closed:
                raise SwapError("the I/O handle is closed")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="swapper-bounce", daemon=False)
                try:
                    thread.start()  # It waits for the lock, and then finds the job.
                except RuntimeError as error:
                    raise SwapIOError(errno.EAGAIN, "start helper thread", detail=str(error)) from None
                self._thread = thread
            self._waiting.append(job)
            self._jobs[job.key] = job
        return job

    def wait_quietly(self) -> None:
        """Wait for the jobs that are in flight now, well or not."""
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            with contextlib.suppress(SwapIOError):
                job.wait()

    def close(self, later: Callable[[], None]) -> bool:
        """Complete what is in flight, refuse further jobs, free the memory. Idempotent.

        Args:
            later: called when that is done, if it cannot be now, because this is the helper thread itself: the garbage
                collector may run a finalizer on any thread.

        Returns:
            Whether it is done now.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
            if thread is threading.current_thread():
                self._later = later
                return False
        if thread is not None:
            thread.join()
        with self._lock:
            unlock, self._unlock = self._unlock, None
            ring, self._ring = self._ring, None
        try:
            if unlock is not None:
                unlock()
        finally:
            del ring  # Only now: memory that is unmapped cannot be unlocked.
        return True

    # --- The helper thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._has_work():
                if not self._step():
                    self._sleep()
        except BaseException as error:  # No memory, or a bug: whoever waits shall not wait for ever.
            self._give_up(error)
            raise
        later, self._later = self._later, None
        if later is not None:
            later()

    def _has_work(self) -> bool:
        with self._lock:
            while self._waiting:
                job = self._waiting.popleft()
                self._cut(job)
            if self._uncut or self._flight:
                return True
            self._thread = None
            return False

    def _cut(self, job: Job) -> None:
        """Note what is to be done. The part that goes direct is the longest, so it comes first."""
        start = stop = 0
        if job.direct is not None:
            start, stop = job.direct.start_bytes, job.direct.stop_bytes
            self._uncut.append(_Chunk(job, start, stop, direct=True))
            job.uncut += 1
        for piece in (_Chunk(job, 0, start), _Chunk(job, stop, job.length_bytes)):
            if piece.start < piece.stop:
                self._uncut.append(piece)
                job.uncut += 1

    def _step(self) -> bool:
        """Start every stage that can be started. False if there was none."""
        moved = False
        for chunk in list(self._flight):
            while chunk.is_ready():
                moved = True
                if self._advance(chunk):
                    self._flight.remove(chunk)
                    self._over(chunk)
                    break
        while self._uncut and self._begin():
            moved = True
        return moved

    def _sleep(self) -> None:
        """Wait until something is likely to be ready."""
        for chunk in self._flight:
            try:
                if chunk.event is not None and chunk.job.is_ready():  # A copy on its way: that is not long.
                    _await_device(chunk.job, chunk.event.synchronize)
                    return
            except Exception as error:
                note_failure(error)
        native = next((chunk.native for chunk in self._flight if chunk.native is not None), None)
        if native is None:
            time.sleep(_POLL_S)
            return
        with contextlib.suppress(SwapError, TimeoutError):
            native.wait(_WAIT_S)  # Not for long: new jobs may come.

    def _begin(self) -> bool:
        """Begin the next chunk. False if there is no room in the ring."""
        piece = self._uncut[0]
        job = piece.job
        if job.error is not None:
            self._uncut.popleft()
            job.uncut -= 1
            self._finish_if_over(job)
            return True
        if piece.direct:
            chunk = self._uncut.popleft()
            job.uncut -= 1
            chunk.event = job.ready
        else:
            try:
                ring = self._ring_for(job.copies)
            except Exception as error:
                self._fail(job, piece, error)
                return True
            offset = job.offset_bytes + piece.start
            skip = offset % mmap.PAGESIZE  # As misaligned in memory as in the file: the drive takes it as it is.
            longest = self.chunk_bytes // job.unit_bytes * job.unit_bytes - offset % job.unit_bytes
            length = min(piece.stop - piece.start, longest)
            span = ring.take(skip + length)
            if span is None:
                return False
            chunk = _Chunk(job, piece.start, piece.start + length, span=span)
            piece.start += length
            if piece.start == piece.stop:
                self._uncut.popleft()
                job.uncut -= 1
        job.chunks += 1
        self._flight.append(chunk)
        if not chunk.direct:
            try:
                if job.operation == "write":
                    self._copy(chunk)
                else:
                    self._transfer(chunk)
            except Exception as error:
                self._fail(job, chunk, error)
                self._flight.remove(chunk)
                self._over(chunk)
        return True

    def _advance(self, chunk: _Chunk) -> bool:
        """The stage that `chunk` was in is over: start the next. Returns whether there is none."""
        job = chunk.job
        bounced_read = job.operation == "read" and not chunk.direct
        try:
            if chunk.native is not None:
                chunk.native.wait()
                if not bounced_read or job.error is not None:
                    return True
                self._copy(chunk)
            else:
                assert chunk.event is not None
                _await_device(job, chunk.event.synchronize)
                check_devices(chunk.failures)
                if bounced_read or job.error is not None:
                    return True
                self._transfer(chunk)
        except SwapIOError as error:
            if chunk.direct and job.direct is not None and job.direct.refused(error):
                self._uncut.appendleft(_Chunk(job, chunk.start, chunk.stop))
                job.uncut += 1
            else:
                self._fail(job, chunk, error)
            return True
        except Exception as error:
            self._fail(job, chunk, error)
            return True
        return False

    def _copy(self, chunk: _Chunk) -> None:
        job = chunk.job
        if not job.ordered:
            job.copies.follow(job.ready)
            job.ordered = True
        there = job.bytes_of(chunk.start, chunk.stop)
        here = self._here(chunk)
        destination, source = (here, there) if job.operation == "write" else (there, here)
        chunk.native, chunk.event = None, job.copies.start(destination, source)

    def _transfer(self, chunk: _Chunk) -> None:
        job = chunk.job
        if chunk.direct:
            assert job.direct is not None
            chunk.native = job.direct.start()
        else:
            here = self._here(chunk)
            chunk.native = job.start(here.data_ptr(), here.numel(), job.offset_bytes + chunk.start)
        chunk.event = None

    def _here(self, chunk: _Chunk) -> torch.Tensor:
        assert self._ring is not None and chunk.span is not None
        skip = (chunk.job.offset_bytes + chunk.start) % mmap.PAGESIZE
        return self._ring.view(chunk.span, skip, chunk.stop - chunk.start)

    def _over(self, chunk: _Chunk) -> None:
        if chunk.span is not None:
            assert self._ring is not None
            self._ring.give_back(chunk.span)
        chunk.job.chunks -= 1
        self._finish_if_over(chunk.job)

    def _finish_if_over(self, job: Job) -> None:
        if job.chunks == 0 and job.uncut == 0:
            with self._lock:
                self._jobs.pop(job.key, None)
            job.finish()

    def _fail(self, job: Job, chunk: _Chunk, error: Exception) -> None:
        """Note the first failure. What else of the job is in flight goes on to its end, and is waited for."""
        if chunk.event is not None or not isinstance(error, SwapIOError):
            _await_device(job, job.copies.wait)  # The ring, or the tensor, may still be in use by a copy.
        if job.error is not None:
            return
        whole = chunk.stop - chunk.start == job.length_bytes
        where = f"it was the part of {chunk.stop - chunk.start} bytes at byte {job.offset_bytes + chunk.start}"
        if isinstance(error, SwapIOError):
            number, detail = error.errno or errno.EIO, error.detail
            if number == errno.EBADMSG:  # The block that does not match its checksum: it says more than the transfer.
                job.error = error
                return
        else:
            number, detail = errno.EIO, f"moving bytes between the device and the host: {error}"
        if not whole and "it was the part" not in detail:
            detail = f"{detail}; {where}".removeprefix("; ")
        job.error = SwapIOError(number, job.operation, job.path, job.offset_bytes, job.length_bytes, detail)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self._closed = True
            jobs, self._jobs = list(self._jobs.values()), {}
            self._waiting.clear()
            for chunk in self._flight:
                _await_device(chunk.job, chunk.job.copies.wait)
                if chunk.native is not None:
                    with contextlib.suppress(Exception):
                        chunk.native.wait()
            for job in jobs:
                detail = f"the thread that moves device memory ended: {error!r}"
                job.error = SwapIOError(errno.EIO, job.operation, job.path, job.offset_bytes, job.length_bytes, detail)
                job.finish()
            self._thread = None

    def _ring_for(self, copies: Copies) -> _Ring:
        if self._ring is None:
            memory = self._allocate(RING_CHUNKS * self.chunk_bytes)
            address = memory.data_ptr()
            try:
                copies.page_lock(address, memory.numel())
                self._unlock = functools.partial(copies.page_unlock, address)
                self._locked_for = type(copies)
            except Exception as error:
                log.warning("copies from and to the device will be slow: %s", str(error))
            self._ring = _Ring(memory)
        if type(copies) is not self._locked_for:
            copies.non_blocking = False  # See [Note: page-locking].
        return self._ring
