"""The C library's heap: memory that was freed, and that it keeps."""

from __future__ import annotations

import ctypes

__all__ = ["FreedMemory", "return_free_memory"]

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_free_memory() -> None:
    """Let glibc give freed memory back to the system; elsewhere nothing.

    Small tensors that stay, allocated between large ones that do not, split the heap: a hole that a large one leaves
    is a little too small for the next one with its alignment. So the first step, when a class makes its state, a
    backward, whose gradients leave one after another, and a step, whose intermediate results do, would each grow the
    heap by about the size of all of them. Milliseconds for a heap of 1 GB.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


class FreedMemory:
    """Memory that is freed piece by piece: the heap lets go of it each time that it is `limit_bytes`."""

    def __init__(self, limit_bytes: int = 32 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._freed_bytes = 0

    def add(self, freed_bytes: int) -> None:
        """Count what was freed, or is about to be."""
        self._freed_bytes += freed_bytes
        if self._freed_bytes >= self._limit_bytes:
            self._freed_bytes = 0
            return_free_memory()
