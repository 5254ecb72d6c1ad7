"""A device made of host memory, for tests of what moves device tensors: its copies come late, as a GPU's do."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import torch

from swapper.errors import SwapError


class HostEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        if self._reached.is_set() and self.error is not None:
            error = self.error
            self.error = None if HostCopies.tells_once else error
            raise error
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        self.query()

    def reach(self) -> None:
        self._reached.set()


class HostStream:
    """Does what is pushed, in order, later, on a thread of its own, which ends when the stream is gone."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._work,), daemon=True).start()
        weakref.finalize(self, self._work.put, None).atexit = False

    def push(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> HostEvent:
        event = HostEvent()
        self.push(event.reach)
        return event


def _run(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (each := work.get()) is not None:
        each()
        del each  # It may be of the stream.


class HostCopies:
    """`swapper.io.devices.Copies` of a device whose memory is the host's."""

    current: ClassVar[HostStream]
    """What the tests take for the caller's stream."""
    delay_s: ClassVar[float] = 0.0
    fail_at: ClassVar[int] = 0
    """The n-th copy from now on, counted from 1, fails: its event cannot be recorded."""
    fail_late_at: ClassVar[int] = 0
    """The n-th copy from now on fails after its start, which its event tells."""
    tells_once: ClassVar[bool] = False
    """An event tells of a failure once."""
    copies: ClassVar[int] = 0
    copied_bytes: ClassVar[int] = 0
    locked: ClassVar[dict[int, int]] = {}
    refuse_lock: ClassVar[bool] = False
    non_blocking = True

    @classmethod
    def reset(cls) -> None:
        cls.current = HostStream()
        cls.delay_s, cls.fail_at, cls.fail_late_at, cls.copies, cls.copied_bytes = 0.0, 0, 0, 0, 0
        cls.locked, cls.refuse_lock, cls.tells_once = {}, False, False

    def __init__(self, device: torch.device) -> None:
        self.stream = HostStream()

    def reached(self) -> HostEvent:
        return HostCopies.current.record()

    def follow(self, event: HostEvent) -> None:
        self.stream.push(event.synchronize)

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> HostEvent:
        cls = HostCopies
        cls.copies += 1
        cls.copied_bytes += source.numel()
        assert destination.dtype == source.dtype == torch.uint8 and destination.shape == source.shape

        def work() -> None:
            time.sleep(cls.delay_s)
            destination.copy_(source)

        self.stream.push(work)
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        if cls.fail_at:
            cls.fail_at -= 1
            if not cls.fail_at:
                raise error
        event = self.stream.record()
        if cls.fail_late_at:
            cls.fail_late_at -= 1
            if not cls.fail_late_at:
                event.error = error
        return event

    def wait(self) -> None:
        self.stream.record().synchronize()

    wait_all = wait

    def page_lock(self, address: int, length_bytes: int) -> None:
        assert address not in HostCopies.locked
        if HostCopies.refuse_lock:
            raise RuntimeError("cudaHostRegister failed")
        HostCopies.locked[address] = length_bytes

    def page_unlock(self, address: int) -> None:
        del HostCopies.locked[address]


HostCopies.reset()


class LateStream:
    """Does what is pushed, in order, but not before somebody waits for it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._pushed = self._done = 0

    def push(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._pushed += 1

    def record(self) -> LateEvent:
        return LateEvent(self, self._pushed)

    def reached(self, position: int) -> bool:
        return self._done >= position

    def run_to(self, position: int) -> None:
        while self._done < position:
            self._done += 1
            with torch.no_grad():
                self._work.popleft()()

    def run(self) -> None:
        self.run_to(self._pushed)


class LateEvent:
    def __init__(self, stream: LateStream, position: int) -> None:
        self._stream, self._position = stream, position

    def query(self) -> bool:
        LateCopies.check()
        return self._stream.reached(self._position)

    def synchronize(self) -> None:
        LateCopies.check()
        if not self.query():
            LateCopies.waits += 1
            self._stream.run_to(self._position)


class LateCopies:
    """`swapper.io.devices.Copies` of a device whose memory is the host's. A wait that is missing is a wrong result.

    Its current stream does at once what torch does on the CPU, and `late` what a test pushes.
    """

    late: ClassVar[LateStream]
    """What the current stream has yet to do, after what was done at once."""
    streams: ClassVar[list[LateStream]]
    waits: ClassVar[int] = 0
    """How often the host has waited for what was not done yet."""
    joins_late: ClassVar[bool] = False
    """The current stream waits in `late`, not at once: for tests that compute nothing after a join."""
    broken: ClassVar[bool] = False
    """Everything fails, as after an illegal memory access."""
    fail_in: ClassVar[int] = 0
    """The n-th work from now on, counted from 1, is started and cannot be marked."""
    kept: ClassVar[list[int]] = []
    """Addresses of the tensors that were kept."""
    locked: ClassVar[dict[int, int]] = {}
    refuse_lock: ClassVar[bool] = False
    when_unlocked: ClassVar[Callable[[int], object] | None] = None
    non_blocking = True

    @classmethod
    def reset(cls) -> None:
        cls.late, cls.streams = LateStream(), []
        cls.waits, cls.joins_late, cls.broken, cls.fail_in = 0, False, False, 0
        cls.kept, cls.locked, cls.refuse_lock, cls.when_unlocked = [], {}, False, None

    @classmethod
    def check(cls) -> None:
        if cls.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @classmethod
    def synchronize(cls) -> None:
        """Let all streams do all that they have to do."""
        cls.late.run()
        for stream in cls.streams:
            stream.run()

    def __init__(self, device: torch.device) -> None:
        self.stream = LateStream()
        LateCopies.streams.append(self.stream)

    def reached(self) -> LateEvent:
        return LateCopies.late.record()

    def follow(self, event: LateEvent) -> None:
        self.stream.push(lambda: event._stream.run_to(event._position))

    def join(self, event: LateEvent) -> None:
        if LateCopies.joins_late:
            LateCopies.late.push(lambda: event._stream.run_to(event._position))
        else:
            event._stream.run_to(event._position)

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> LateEvent:
        return self.run(lambda: destination.copy_(source))

    def run(self, work: Callable[[], object]) -> LateEvent:
        cls = LateCopies
        cls.check()
        self.stream.push(work)
        if cls.fail_in:
            cls.fail_in -= 1
            if not cls.fail_in:
                raise RuntimeError("CUDA error: out of memory")
        return self.stream.record()

    def keep(self, tensor: torch.Tensor) -> None:
        LateCopies.kept.append(tensor.data_ptr())

    def wait(self) -> None:
        LateCopies.check()
        self.stream.run()

    def wait_all(self) -> None:
        LateCopies.synchronize()

    def page_lock(self, address: int, length_bytes: int) -> None:
        if LateCopies.refuse_lock:
            raise SwapError("cudaHostRegister failed: CUDA error 2")
        assert address not in LateCopies.locked
        LateCopies.locked[address] = length_bytes

    def page_unlock(self, address: int) -> None:
        if LateCopies.when_unlocked is not None:
            LateCopies.when_unlocked(address)
        del LateCopies.locked[address]


LateCopies.reset()
