"""The number of threads that torch computes with, where autograd runs hooks in a thread of its own.

torch keeps the number for each thread, and a thread takes the number of `torch.set_num_threads` when it computes for
the first time. The thread that autograd has for a device lives from the first backward pass on, so that it has the
number of that time, whatever the program sets later. The bits of some steps on the CPU depend on it.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["is_of_autograd", "program_thread_count"]


def is_of_autograd() -> bool:
    """Return True if the caller's thread was not made in Python: in a hook of a backward pass, it is autograd's."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def program_thread_count() -> int:
    """The number of the last `torch.set_num_threads`, or torch's own: that of a thread that begins now."""
    found: list[int] = []
    ask = threading.Thread(
        target=lambda: found.append(torch.get_num_threads()), name="swapper-thread-count", daemon=False
    )
    ask.start()
    ask.join()
    return found[0]
