"""Page-locked memory for tensors."""

from __future__ import annotations

import errno
import operator
import os
import weakref
from typing import Any

import torch

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, Slab

__all__ = ["address_of", "free", "is_pinned", "lock_memory", "pin_handle"]

_MAX_REGISTERED = 64
"""Locked tensors of one handle that are registered with the kernel, which takes the list of all of them anew for each.
Transfers in the others cost more CPU."""


class _Locked:
    """Memory of one `new_cpu_locked_tensor`, while it is locked."""

    __slots__ = ("_finalizer", "_handle", "_pid", "_slab")

    def __init__(self, slab: Slab, handle: AsyncIOHandle | None, exporter: memoryview) -> None:
        self._slab = slab
        self._handle = None if handle is None else weakref.ref(handle)
        self._pid = os.getpid()
        # The storage of all tensors that view the memory holds the exporter, and nothing else does.
        self._finalizer = weakref.finalize(exporter, self._unlock)
        self._finalizer.atexit = False

    def holds(self, address: int) -> bool:
        start = self._slab.address
        return start <= address < start + self._slab.length_bytes and self.in_this_process()

    def belongs_to(self, handle: AsyncIOHandle) -> bool:
        return self._handle is not None and self._handle() is handle

    def in_this_process(self) -> bool:
        return os.getpid() == self._pid

    def release(self) -> bool:
        """Returns False if another thread was faster."""
        if not self._finalizer.alive:
            return False
        self._finalizer()
        return True

    def _unlock(self) -> None:
        if _locked.get(self._slab.address) is self:  # In a forked child others may have the address.
            del _locked[self._slab.address]
        handle = None if self._handle is None else self._handle()
        if self.in_this_process():
            if handle is not None and not handle.closed:
                handle.unregister(self._slab)
            self._slab.unlock()


_locked: dict[int, _Locked] = {}
"""By address, of all handles: a tensor of one is pinned for another, and may be freed by it."""


def lock_memory(handle: AsyncIOHandle | None, num_elem: int, example: torch.Tensor) -> torch.Tensor:
    """Page-locked memory, registered with the kernel for the transfers of `handle`."""
    numel, dtype = operator.index(num_elem), example.dtype
    if numel < 0:
        raise ValueError(f"num_elem: {numel} is negative")
    slab = Slab(max(numel * dtype.itemsize, 1))
    if not slab.locked:
        raise SwapIOError(errno.ENOMEM, "lock memory", length_bytes=slab.length_bytes, detail=slab.lock_reason)
    if handle is not None and sum(locked.belongs_to(handle) for locked in tuple(_locked.values())) < _MAX_REGISTERED:
        handle.register(slab)
    memory: Any = slab  # supports the buffer protocol, which has no type before Python 3.12
    exporter = memoryview(memory)
    storage = torch.frombuffer(exporter, dtype=torch.uint8).untyped_storage()
    _locked[slab.address] = _Locked(slab, handle, exporter)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (numel,), (1,))


def free(address: int) -> bool:
    """Unlock memory by its address. Returns False if it is not locked, or by another process."""
    locked = _locked.get(address)
    return locked is not None and locked.in_this_process() and locked.release()


def is_pinned(buffer: torch.Tensor) -> bool:
    """Tell if a tensor lies in locked memory, or was pinned by torch."""
    address = address_of(buffer)
    return any(locked.holds(address) for locked in tuple(_locked.values())) or buffer.is_pinned()


def address_of(tensor: torch.Tensor) -> int:
    """Of its first element, also if it has none, unlike `data_ptr()`; 0 if it is not in memory of the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage().data_ptr()) + int(tensor.storage_offset()) * tensor.element_size()


class pin_handle:
    """DeepNVMe's handle for page-locked memory alone. It has no engine, and nothing to close.

    What it allocates is pinned for every `aio_handle`, and each may free it; and the other way round. It is registered
    with the kernel for no handle, so transfers in it cost a little more CPU.
    """

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """As of `aio_handle`, with the last name spelled so."""
        return lock_memory(None, num_elem, example_tensor)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """As of `aio_handle`."""
        return free(address_of(locked_tensor))

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """As `free_cpu_locked_tensor`, by the address of the first byte: also when the tensor has other memory now."""
        return free(operator.index(address))

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """As of `aio_handle`."""
        return is_pinned(buffer)
