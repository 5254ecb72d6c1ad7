"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes

__all__ = ["return_free_memory"]

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def return_free_memory() -> None:
    """Let glibc give freed memory back to the system; elsewhere nothing.

    When a class makes its state, small tensors that stay are allocated between large ones that do not. The holes are
    too small for the next bucket's, so without this the first step would grow the heap by about the size of the state;
    and after a step, gradients would come to lie in the holes that its scratch left. Milliseconds for a heap of 1 GB.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
