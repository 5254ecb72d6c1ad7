"""The C library's heap: memory that was freed, and that it keeps."""

from __future__ import annotations

import ctypes

__all__ = ["return_free_memory"]

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_free_memory() -> None:
    """Let glibc give freed memory back to the system; elsewhere nothing.

    Small tensors that stay, allocated between large ones that do not, split the heap: a hole that a large one leaves
    is a little too small for the next one with its alignment. So the first step, when a class makes its state, and a
    backward, whose gradients leave one after another, would each grow the heap by about the size of all of them.
    Milliseconds for a heap of 1 GB.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
