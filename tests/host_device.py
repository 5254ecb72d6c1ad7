"""A device made of host memory, for tests of what moves device tensors: its copies come late, as a GPU's do."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import ClassVar

import torch


class HostEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: Exception | None = None

    def query(self) -> bool:
        if self._reached.is_set() and self.error is not None:
            raise self.error
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        self.query()

    def reach(self) -> None:
        self._reached.set()


class HostStream:
    """Does what is pushed, in order, later, on a thread of its own."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def push(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self) -> HostEvent:
        event = HostEvent()
        self.push(event.reach)
        return event

    def _run(self) -> None:
        while True:
            self._work.get()()


class HostCopies:
    """`swapper.bounce.Copies` of a device whose memory is the host's."""

    current: ClassVar[HostStream]
    """What the tests take for the caller's stream."""
    delay_s: ClassVar[float] = 0.0
    fail_at: ClassVar[int] = 0
    """The n-th copy from now on, counted from 1, fails: its event cannot be recorded."""
    fail_late_at: ClassVar[int] = 0
    """The n-th copy from now on fails after its start, which its event tells."""
    copies: ClassVar[int] = 0
    copied_bytes: ClassVar[int] = 0
    locked: ClassVar[dict[int, int]] = {}
    refuse_lock: ClassVar[bool] = False

    @classmethod
    def reset(cls) -> None:
        cls.current = HostStream()
        cls.delay_s, cls.fail_at, cls.fail_late_at, cls.copies, cls.copied_bytes = 0.0, 0, 0, 0, 0
        cls.locked, cls.refuse_lock = {}, False

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

    def settle(self) -> None:
        self.stream.record().synchronize()

    def page_lock(self, address: int, length_bytes: int) -> None:
        assert address not in HostCopies.locked
        if HostCopies.refuse_lock:
            raise RuntimeError("cudaHostRegister failed")
        HostCopies.locked[address] = length_bytes

    def page_unlock(self, address: int) -> None:
        del HostCopies.locked[address]


HostCopies.reset()
