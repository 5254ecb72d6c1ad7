"""`DevicePool`: a pool in the memory of an accelerator, for records that never pass through the host's.

[Note: direct] `GDSHandle` moves the buffers of this pool between the drive and the device by cuFile, which maps the
memory once. Nothing else differs from a pool of the host, and a cache of records does not know which it has. A copy
between a buffer and other memory of the device, on a side stream, is the transfer of the buffer's lease as ever. The
drive begins when the stream that called for it is so far; or, of a buffer that nothing on the device uses any more, at
once: see `Lease.apart`. Who wants bytes of a buffer on the host copies them there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from swapper.io.devices import copies_of, on_streams
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle, Slab
from swapper.sizes import round_up
from swapper.storage.buffers import BufferPool

__all__ = ["DevicePool", "PoolMemory"]

_ALIGNMENT_BYTES = 64 << 10
"""Pages of a GPU, as cuFile maps them."""


class DeviceMemory:
    """Memory of an accelerator, as a `Slab` is of the host. All of it is there from the start."""

    locked = True

    def __init__(self, length_bytes: int, device: torch.device) -> None:
        self._length_bytes = length_bytes
        whole = torch.empty(length_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        start = round_up(whole.data_ptr(), _ALIGNMENT_BYTES) - whole.data_ptr()
        self.tensor = whole[start : start + length_bytes]
        self.address = self.tensor.data_ptr()
        self.ready_bytes = 0

    def extend(self, ready_bytes: int) -> None:
        self.ready_bytes = self._length_bytes

    def shrink(self, ready_bytes: int) -> None:
        pass


PoolMemory = Slab | DeviceMemory


class DevicePool(BufferPool):
    """A `BufferPool` in the memory of an accelerator. See [Note: direct].

    Args:
        pool_bytes: rounded up to 4096; allocated at once, by torch.
        handles: they move its buffers.
        device: where it is.

    Its pages cannot be gathered ([Note: pools in pieces]): a lease has one piece.

    Raises:
        ValueError: `pool_bytes` is not positive.
        torch.OutOfMemoryError: the device has not so much memory.
    """

    _cannot_gather = "pages of an accelerator cannot be moved"

    def __init__(self, pool_bytes: int, *handles: GDSHandle, device: torch.device) -> None:
        super().__init__(pool_bytes, *handles, device=device)
        copies_of(device).wait_all()  # What was in that memory before may still be in use.

    def lock_for(self, device: torch.device) -> None:
        """Do nothing: the device needs no help with its own memory."""

    def trim(self) -> None:
        """Do nothing: the memory stays as long as the pool."""

    def _reserve(self, device: torch.device | None) -> tuple[PoolMemory, torch.Tensor]:
        assert device is not None
        self._idle = torch.get_device_module(device).Stream(device)  # Nothing is ever queued there.
        memory = DeviceMemory(self.capacity_bytes, device)
        return memory, memory.tensor

    def _own_view(self, start_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[start_bytes : start_bytes + numel * dtype.itemsize].view(dtype)

    def _apart(self) -> AbstractContextManager[None]:
        return on_streams([self._idle])

    @staticmethod
    def _announce(handle: AsyncIOHandle, memory: PoolMemory) -> None:
        assert isinstance(handle, GDSHandle) and isinstance(memory, DeviceMemory)
        handle.pin(memory.tensor)

    @staticmethod
    def _withdraw(handle: AsyncIOHandle, memory: PoolMemory) -> None:
        assert isinstance(handle, GDSHandle) and isinstance(memory, DeviceMemory)
        if not handle.closed:
            handle.unpin(memory.tensor)
