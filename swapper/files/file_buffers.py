"""`FileBuffers`: the few page-locked buffers through which one whole file is written or read.

[Note: copies] Both directions copy once, between the buffers and the memory of others. That is faster than transfers
from and to ordinary memory: on pages of 4 KiB that nobody registered a drive has half its bandwidth, or less.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import SupportsIndex

import torch

from swapper.errors import ConfigError, show
from swapper.io.handle import AsyncIOHandle
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.buffers import BufferPool, Lease

__all__ = ["POOL_BYTES", "FileBuffers", "close_unattended", "memory_of", "on_host"]

POOL_BYTES = 32 << 20
"""Page-locked memory of one file, unless another size is asked for."""

_HOSTS = ("cpu",)
"""Types of devices whose memory the processor reads and writes."""

_BUFFERS_MIN, _BUFFERS_MAX = 4, 16
_BUFFER_BYTES = 2 << 20
"""Length of each, if that gives a count between the two. Many short ones keep a drive busier than a few long ones."""
_POOL_BYTES_MIN = _BUFFERS_MIN * 64 * 1024


class FileBuffers:
    """The engine and the page-locked buffers of one file.

    Args:
        stack: its `close` releases everything.
        pool_bytes: at least 256 KiB; all buffers together.
        length_bytes: of the file, or None if it is not known: a short file needs less.
        handle: the engine; its owner closes it. None for one of our own.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        pool_bytes: int,
        length_bytes: int | None,
        handle: AsyncIOHandle | None,
    ) -> None:
        if not isinstance(pool_bytes, SupportsIndex) or pool_bytes < _POOL_BYTES_MIN:
            raise ConfigError(f"pool_bytes: {show(pool_bytes)} is no number of bytes of at least {_POOL_BYTES_MIN}")
        count = min(max(_BUFFERS_MIN, pool_bytes // _BUFFER_BYTES), _BUFFERS_MAX)
        self.buffer_bytes = pool_bytes // count // PAGE_BYTES * PAGE_BYTES
        if length_bytes is not None:
            self.buffer_bytes = min(self.buffer_bytes, round_up(max(1, length_bytes), PAGE_BYTES))
            count = min(count, max(1, -(-length_bytes // self.buffer_bytes)))
        self.free: deque[Lease] = deque()
        self.handle = handle or stack.enter_context(AsyncIOHandle(block_bytes=min(4 << 20, self.buffer_bytes)))
        self._pool = stack.enter_context(BufferPool(count * self.buffer_bytes, self.handle))
        stack.callback(self.free.clear)
        self.free.extend(self._pool.acquire(self.buffer_bytes) for _ in range(count))

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a buffer and memory of a device, which the buffers are page-locked for from then on.

        Raises:
            SwapError: the device refused to lock them.
        """
        for tensor in (destination, source):
            self._pool.lock_for(tensor.device)
        destination.copy_(source)


def memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage: 1-D, uint8, on its device."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def on_host(memory: memoryview | torch.Tensor) -> bool:
    """True if the processor reads and writes this memory."""
    return isinstance(memory, memoryview) or memory.device.type in _HOSTS


def close_unattended(stack: contextlib.ExitStack, pid: int) -> None:
    """Finalizer of a file that nobody closed. In a forked child it does nothing: the file is the parent's."""
    if os.getpid() == pid:
        stack.close()
