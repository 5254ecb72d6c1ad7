"""`FreshMemory`: memory that a reader is about to fill, whose pages the kernel brings before it is touched.

[Note: fresh pages] Memory that was just allocated has no pages. The kernel brings and zeroes each when it is touched:
3 GB/s a core on pages of 4 KiB, less than a drive reads. On huge pages it is 20 GB/s. Where a hypervisor has taken free
memory back, though, a huge page comes at 0.5 GB/s, while small pages are mostly of memory that was in use a moment ago.
Nothing tells a process which of the two it will be, and it changes within one tensor. So each 2 MiB is timed, the kind
that was faster last is used, and the other is tried again at growing intervals.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from swapper.io import _native
from swapper.io.host_memory import address_of

__all__ = ["FreshMemory"]

_HUGE_BYTES = 2 << 20
_SMALL_BYTES = 8 << 20
"""Small pages are brought so many at once, by threads that have to be woken for it."""
_RETRY_BYTES_MIN, _RETRY_BYTES_MAX = 8 << 20, 1 << 30
_THREADS_MAX = 4
"""More bring no more: the kernel's locks and the memory are the limit."""


@dataclass
class _Pace:
    """The last time that 2 MiB of either kind of page took in this process. Threads may race on it: it only chooses."""

    huge_s: float = 0.0
    small_s: float = 0.0
    small_left_bytes: int = 0
    retry_bytes: int = _RETRY_BYTES_MIN

    @property
    def huge_is_faster(self) -> bool:
        """True if both kinds were tried, and huge pages were the faster ones."""
        return 0 < self.huge_s <= self.small_s

    def huge(self) -> bool:
        """True if the next 2 MiB shall be a huge page."""
        if not self.huge_s or not self.small_s:
            return not self.huge_s  # Each is tried once.
        return self.huge_is_faster or self.small_left_bytes <= 0

    def took(self, huge: bool, length_bytes: int, seconds: float) -> None:
        """Note what so many bytes took."""
        seconds *= _HUGE_BYTES / length_bytes
        if not huge:
            # One that waited for a processor says little: it must not make a slow huge page the better one.
            self.small_s = min(seconds, 1.25 * self.small_s) if self.small_s else seconds
            self.small_left_bytes -= length_bytes
            return
        self.huge_s = seconds
        if seconds <= self.small_s:
            self.retry_bytes = _RETRY_BYTES_MIN
        else:
            self.small_left_bytes = self.retry_bytes
            self.retry_bytes = min(2 * self.retry_bytes, _RETRY_BYTES_MAX)


_pace = _Pace()


class FreshMemory:
    """Brings the pages of memory from its start on. A hint: its content stays, and nothing fails.

    Args:
        memory: on the CPU, contiguous, writable.

    Raises:
        ValueError: `memory` is a tensor that is not on the CPU or not contiguous.
        BufferError: `memory` is a memoryview that is not contiguous, or read-only.
    """

    def __init__(self, memory: Tensor | memoryview) -> None:
        self._next, length_bytes = address_of("memory", memory, writable=True)
        self._start = self._next
        self._stop = self._next + length_bytes
        self._threads = min(torch.get_num_threads(), _THREADS_MAX)

    def bring(self, until_bytes: int) -> None:
        """Bring at least the first `until_bytes`."""
        while self._next < min(self._start + until_bytes, self._stop):
            self.bring_more()

    def bring_more(self) -> bool:
        """Bring some of what is next. False if there is nothing left."""
        start, stop = self._next, min(self._next // _HUGE_BYTES * _HUGE_BYTES + _HUGE_BYTES, self._stop)
        if start >= stop:
            return False
        fits = stop - start == _HUGE_BYTES  # Where no huge page does, it says nothing of either kind.
        # The edges are as what is between them: else each tensor cuts the process's mapping in three, of which the
        # kernel allows only so many.
        huge = _pace.huge() if fits else _pace.huge_is_faster
        if fits and not huge:
            stop = min(start + _SMALL_BYTES, self._stop)
        self._next = stop
        before_s = time.perf_counter()
        if huge:
            _native.prefault_huge(start, stop - start)
        else:
            _native.prefault(start, stop - start, self._threads)
        if fits:
            _pace.took(huge, stop - start, time.perf_counter() - before_s)
        return True
