"""Page-locked memory for transfers: addresses reserved once, leased out in pieces, given back by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io.devices import Copies, copies_of, is_accelerator, starting_copies
from swapper.io.gathered_pages import GatheredPages
from swapper.io.handle import AsyncIOHandle, Slab
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.free_pieces import AddressRange, FreePieces
from swapper.storage.transfers import AnyTransfer
from swapper.tensors.grad_modes import outside_of_inference

if TYPE_CHECKING:
    from swapper.storage.device_pool import PoolMemory

__all__ = ["BufferPool", "Lease", "PoolExhausted"]

_LOOKS = 32
"""Buffers that one call looks at, the oldest first, of those that were given back with a transfer in flight."""


class PoolExhausted(SwapError):
    """The free bytes of the pool are too few, and nothing in it can be reclaimed."""


class _Extent(weakref.ref["Lease"]):
    """A part of the pool. A weak reference to its lease, so that it is told when that dies.

    [Note: giving back] Memory comes back by one call of C code: `deque.append`, from `Lease.release` or as the callback
    of this reference. So it works at any moment and in any thread, and neither Ctrl-C nor a finalizer that the garbage
    collector runs can come in between. They do so only after calls and in loops, never between two assignments: on that
    relies what the pool then does with it, which can be cut off and done again.
    """

    parts: Sequence[AddressRange] = ()
    pages: GatheredPages | None = None
    """The memory, where it is not that of the one part."""
    transfer: AnyTransfer | None = None

    def is_over(self) -> bool:
        """Return True if nothing is in flight in it."""
        return self.transfer is None or self.transfer.done()


class Lease:
    """A piece of the pool that is held, and the transfer that uses it. From `BufferPool.acquire`.

    A context manager. Gives itself back when it is collected, though only a transfer that is in `transfer` is then
    waited for. Its content is undefined at first. One owner at a time: not thread-safe.

    Attributes:
        length_bytes: as asked for.
        address: of its first byte.
    """

    __slots__ = ("__weakref__", "_extent", "_pool", "_tensor", "_typed", "address", "length_bytes")

    def __init__(self, pool: BufferPool, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._pool: BufferPool | None = pool
        self._extent = _Extent(self, pool._given_back.append)  # See [Note: giving back].
        self._tensor = pool._memory[:0]  # Until `try_acquire` knows which.
        # One view of all of it for each dtype. They go in `release`, and nobody else gets them: what is made of them is
        # as short-lived as what `tensor` gives, and a lease that was given back refuses to make more.
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self.address = 0

    def __repr__(self) -> str:
        return f"Lease({self.length_bytes} bytes at {self.offset_bytes}{', released' if self.released else ''})"

    @property
    def offset_bytes(self) -> int:
        """Offset in the pool of its first byte; of one in several pieces, where that is when it is given back."""
        return self._extent.parts[0].start

    @property
    def released(self) -> bool:
        """True once it was given back."""
        return self._pool is None

    @property
    def transfer(self) -> AnyTransfer | None:
        """The transfer in flight in this buffer, set by its owner; None if nothing is.

        When the lease is given back the memory goes to nobody else before this is over.
        """
        return self._extent.transfer

    @transfer.setter
    def transfer(self, transfer: AnyTransfer | None) -> None:
        self._extent.transfer = transfer

    @property
    def tensor(self) -> torch.Tensor:
        """All of it: uint8, of shape `(length_bytes,)`. A view; must not be used after the release.

        Raises:
            SwapError: it was given back, or this is a forked child, where the memory does not exist.
        """
        if self._pool is None:
            raise SwapError("this lease was given back: its memory may have another owner")
        self._pool._check_process()
        return self._tensor

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` that start at `offset_bytes`, of shape `(numel,)`. Errors as for `tensor`.

        Args:
            offset_bytes: a multiple of the element's size.
            numel: so many that they end within the lease.
            dtype: any.

        Raises:
            ValueError: misaligned, or beyond the lease.
        """
        return self.strided_view(offset_bytes, numel, dtype, (numel,), (1,))

    def strided_view(
        self, offset_bytes: int, numel: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """As `view`, with a shape and strides in which `numel` elements fill one block of memory."""
        itemsize = dtype.itemsize
        if offset_bytes % itemsize or numel < 0 or not 0 <= offset_bytes <= self.length_bytes - numel * itemsize:
            raise ValueError(
                f"{numel} elements of {dtype} at byte {offset_bytes} do not fit a lease of {self.length_bytes} bytes"
            )
        whole = self.tensor
        typed = self._typed.get(dtype)
        if typed is None:
            with outside_of_inference():  # There a view of another dtype is a tensor of that mode, unlike a slice.
                typed = self._typed[dtype] = whole[: self.length_bytes // itemsize * itemsize].view(dtype)
        return typed.as_strided(shape, stride, typed.storage_offset() + offset_bytes // itemsize)

    def pool_has(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor`, which is strided, may be in the memory of the lease's pool. An empty one may."""
        pool = self._pool
        if pool is None:
            raise SwapError("this lease was given back: its memory may have another owner")
        return tensor.numel() == 0 or pool._has(tensor.data_ptr())

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Within it a transfer of the buffer comes after nothing that streams of its device still have to do."""
        assert self._pool is not None
        return self._pool._apart()

    def own_view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `view`, with a storage of its own: how many tensors share it says whether any use is left."""
        self.view(offset_bytes, numel, dtype)
        assert self._pool is not None
        if (pages := self._extent.pages) is not None:
            return torch.frombuffer(pages.memory, dtype=dtype, count=numel, offset=offset_bytes)
        return self._pool._own_view(self.offset_bytes + offset_bytes, numel, dtype)

    def release(self) -> None:
        """Give the memory back, at once or when `transfer` is over. Idempotent; never waits."""
        pool, self._pool = self._pool, None
        if pool is not None:
            del self._tensor, self._typed
            pool._given_back.append(self._extent)

    def abandon(self) -> None:
        """Never give the memory back: tensors that are not ours use it, for as long as they like."""
        pool = self._pool
        if pool is not None:
            pool._abandoned.append(self)
            pool.abandoned_bytes += self.length_bytes
            self._pool = None  # Else the two would refer to each other.
            del self._tensor, self._typed

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class BufferPool:
    """At most `pool_bytes` of page-locked memory, in one piece. Thread-safe; a context manager that closes.

    [Note: ready memory] The addresses are reserved here, once. What is ready of them is in memory, page-locked, and
    registered with the engines and the GPU; it is always the first part. Leases take the lowest addresses that fit, and
    one that reaches beyond what is ready makes more ready: half as much again at least, so that it rarely happens.
    `trim` gives back what lies beyond the last lease. So a lease never sees that the pool was smaller, and `pool_bytes`
    is the limit whatever is ready.

    The memory lives until the pool is closed or collected, and the last lease, and the last tensor that views it, is
    gone. In a forked child it does not exist: every use raises `SwapError`.

    Args:
        pool_bytes: rounded up to 4096.
        handles: each registers the memory with the kernel where its backend can.
        device: of tensors that are copied to and from it; see `lock_for`.
        ready_bytes: how much to make ready now; None: all of it.

    Raises:
        ValueError: `pool_bytes` is not positive.
        SwapIOError: there is not so much memory.
        SwapError: the device refused to lock it, or a handle insists on registration and cannot have it.
    """

    def __init__(
        self,
        pool_bytes: int,
        *handles: AsyncIOHandle,
        device: torch.device | None = None,
        ready_bytes: int | None = None,
    ) -> None:
        if pool_bytes <= 0:
            raise ValueError(f"pool_bytes: {pool_bytes} is not positive")
        self.capacity_bytes = round_up(pool_bytes, PAGE_BYTES)
        self.peak_used_bytes = 0
        self._pid = os.getpid()
        self._handles = handles
        with outside_of_inference():  # They outlive that mode.
            self._slab, self._memory = self._reserve(device)
        self._free = FreePieces(self.capacity_bytes)
        # Not for `close`, which a finalizer may call at any allocation, in a thread that holds it.
        self._lock = threading.Lock()
        self._given_back: deque[_Extent] = deque()  # to be freed, or to be put with those that are busy
        self._busy: deque[_Extent] = deque()  # given back with a transfer in flight
        self._gathered: tuple[GatheredPages, ...] = ()  # while there are any, no memory may be registered
        self.abandoned_bytes = 0
        self._abandoned: list[Lease] = []
        self._reclaimers, self._reclaimers_max = list[Callable[[], Callable[[], bool] | None]](), 8
        self._closed = False
        self._devices: dict[str, Copies] = {}  # types of devices that the memory is to be locked for
        self._locks: dict[str, Copies] = {}  # those that it is locked for, and what unlocks it
        withdraw = [functools.partial(self._withdraw, handle, self._slab) for handle in handles]
        self._finalizer = finalizer(
            self, _unregister, self._slab, withdraw, self._locks, (self._given_back, self._busy), self._pid
        )
        self.make_ready(self.capacity_bytes if ready_bytes is None else ready_bytes)
        if device is not None:
            self.lock_for(device)

    def __repr__(self) -> str:
        return f"BufferPool({self._used_bytes()} of {self.capacity_bytes} bytes used)"

    @property
    def locked(self) -> bool:
        """True if the system cannot swap the memory out (mlock)."""
        return self._slab.locked

    def lock_for(self, device: torch.device) -> None:
        """Let `device`, and all others of its type, copy to and from the memory on their own, from now until `close`.

        Nothing happens for the CPU, and where it is so already.

        Raises:
            SwapError: the device refused.
        """
        self._check_process()
        with self._lock:
            if is_accelerator(device) and device.type not in self._devices:
                copies = copies_of(device)
                self._lock_for_devices({device.type: copies})
                self._devices[device.type] = copies

    @property
    def ready_bytes(self) -> int:
        """Length of the first part of the pool that is in memory now. See [Note: ready memory]."""
        return self._slab.ready_bytes

    def make_ready(self, ready_bytes: int) -> None:
        """Have the first `ready_bytes` in memory, or all, if that is less: leases will need them.

        Raises:
            SwapIOError: there is not so much memory.
            SwapError: closed, or a forked child; or as from the constructor.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise SwapError("the buffer pool is closed")
            self._make_ready(min(round_up(ready_bytes, PAGE_BYTES), self.capacity_bytes))

    def trim(self) -> None:
        """Give the memory beyond the last lease back to the system until leases need it again.

        Does nothing while a lease has several pieces: see [Note: pools in pieces].
        """
        self._check_process()
        with self._lock:
            if self._closed:
                return
            self._collect()
            if self._gathered or (stop := self._free.last_taken(self.capacity_bytes)) >= self._slab.ready_bytes:
                return
            for handle in self._handles:
                self._withdraw(handle, self._slab)
            with self._resizing():
                self._slab.shrink(stop)

    @property
    def used_bytes(self) -> int:
        """Bytes leased out, or given back with a transfer still in flight."""
        self._check_process()
        with self._lock:
            self._collect()
            return self._used_bytes()

    def add_reclaimer(self, callback: Callable[[], bool]) -> None:
        """Ask `callback` to give leases back when the pool is short.

        It is called by `acquire`, on its thread, without the pool's lock. Held weakly: a bound method as long as its
        object lives.

        Args:
            callback: returns whether it gave anything back; asked again until it returns False.
        """
        self._reclaimers.append((weakref.WeakMethod if isinstance(callback, MethodType) else weakref.ref)(callback))
        if len(self._reclaimers) > self._reclaimers_max:  # Caches come and go, and a pool need never be short.
            self._reclaimers_max = 2 * sum(1 for _ in self._living_reclaimers()) + 8

    def try_acquire(self, length_bytes: int, *, high: bool = False, above: int = 0, joins: bool = True) -> Lease | None:
        """Lease memory if some is free now, or was given back and its transfer is over. Asks no reclaimer.

        Never waits for a buffer. Where more memory is made ready, engines that register it complete what is in flight.
        Where a device is to copy from and to the pool only `acquire` joins, last: nobody locked such pages for that.

        Args:
            length_bytes: at least 1; rounded up to 4096 in the pool.
            high: as near to the end of the pool as it can be, else to its beginning.
            above: nor before this byte, a multiple of 4096, unless pieces are joined.
            joins: make it of several pieces if none is long enough.

        Raises:
            ValueError: not positive.
            SwapError: closed, or a forked child.
            SwapIOError: there is not so much memory as the pool may have.
        """
        return self._try_acquire(length_bytes, high, above, joins=joins and not self._devices)

    def _try_acquire(self, length_bytes: int, high: bool, above_bytes: int, *, joins: bool) -> Lease | None:
        self._check_process()
        if length_bytes <= 0:
            raise ValueError(f"length_bytes: {length_bytes} is not positive")
        extent_bytes = round_up(length_bytes, PAGE_BYTES)
        with self._lock:
            if self._closed:
                raise SwapError("the buffer pool is closed")
            self._collect()
            lease = Lease(self, length_bytes)
            if self._free.take(lease._extent, extent_bytes, high=high, above=above_bytes):
                ready_bytes, stop = self._slab.ready_bytes, lease._extent.parts[0].stop
                if stop > ready_bytes:
                    self._make_ready(min(max(stop, ready_bytes * 3 // 2), self.capacity_bytes))
            elif not joins or not self._gather(lease._extent, extent_bytes):
                return None
            self.peak_used_bytes = max(self.peak_used_bytes, self._used_bytes())
        if (pages := lease._extent.pages) is not None:
            with outside_of_inference():  # The lease outlives that mode, and is written to after it.
                lease._tensor = torch.frombuffer(pages.memory, dtype=torch.uint8)[:length_bytes]
            lease.address = pages.address
        else:
            start = lease.offset_bytes
            lease._tensor = self._memory[start : start + length_bytes]
            lease.address = self._slab.address + start
        return lease

    def _gather(self, extent: _Extent, extent_bytes: int) -> bool:
        """Let `extent` have several pieces: see [Note: pools in pieces]. False if all are too short. Under the lock."""
        if self._cannot_gather or self._free.total_bytes < extent_bytes:
            return False
        self._make_ready(self.capacity_bytes)
        address = self._slab.address
        with interrupts_deferred():
            self._free.take_apart(extent, extent_bytes)
            parts = [(address + part.start, part.stop - part.start) for part in extent.parts]
            try:
                extent.pages = GatheredPages(parts, locked=self.locked)
            except SwapIOError as error:
                for part in extent.parts:
                    self._free.put(part)
                self._cannot_gather = str(error)
                return False
            self._gathered = (*self._gathered, extent.pages)
        return True

    def acquire(self, length_bytes: int, *, high: bool = False) -> Lease:
        """Lease memory: free memory first, then what transfers in flight will free, then what reclaimers drop.

        Waits for transfers only. Errors as for `try_acquire`, and:

        Raises:
            PoolExhausted: what is held by leases leaves too little; the message has the sum.
        """
        lease = self.try_acquire(length_bytes, high=high)
        # What was dropped while it was being read is waited for before more is dropped: that would be read again.
        while lease is None and (self._wait_for_one() or self.reclaim()):
            lease = self.try_acquire(length_bytes, high=high)
        if lease is None:
            lease = self._try_acquire(length_bytes, high, 0, joins=True)  # Another thread may have given back since.
        if lease is None:
            used = base = self.used_bytes
            free, why = self.capacity_bytes - used, ""
            if free >= length_bytes:
                why, base = f", in pieces: {self._cannot_gather}", self.capacity_bytes
            raise PoolExhausted(
                f"no room for {length_bytes} bytes in the buffer pool: of {self.capacity_bytes} bytes {used} are "
                f"leased and {free} free{why}; set pool_bytes to at least {base + length_bytes}"
            )
        return lease

    def close(self) -> None:
        """Wait for transfers of returned leases, unregister the memory, refuse further leases. Idempotent.

        Leases that are still held stay usable; the memory beyond the last of them is given back to the system. Does
        nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._finalizer()
        # Whoever holds the lock may be this thread, cut off by the finalizer that called this. Then the memory stays
        # until the pool is collected.
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
                self._slab.shrink(self._free.last_taken(self.capacity_bytes))
            finally:
                self._lock.release()

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _make_ready(self, ready_bytes: int) -> None:
        """Under the lock. Ctrl-C in between leaves memory that is not registered, where transfers cost more."""
        if ready_bytes > self._slab.ready_bytes:
            with self._resizing():
                self._slab.extend(ready_bytes)

    @contextlib.contextmanager
    def _resizing(self) -> Iterator[None]:
        with starting_copies() if self._devices else contextlib.nullcontext():  # None after the wait.
            self._unlock_for_devices()
            try:
                yield
            finally:
                self._register()

    def _unlock_for_devices(self) -> None:
        # All is locked anew when the size changes: a copy must not go across two ranges that were locked by themselves.
        while self._locks:
            name, copies = next(iter(self._locks.items()))
            copies.wait_all()
            copies.page_unlock(self._slab.address)
            del self._locks[name]  # Not before: a device that failed raises, and has the memory locked still.

    def _register(self) -> None:
        self._lock_for_devices(self._devices)
        if self._slab.ready_bytes:
            for handle in self._handles:
                self._announce(handle, self._slab)

    def _lock_for_devices(self, devices: Mapping[str, Copies]) -> None:
        for name, copies in devices.items():
            if name not in self._locks and self._slab.ready_bytes and not self._gathered:
                copies.page_lock(self._slab.address, self._slab.ready_bytes)
                self._locks[name] = copies

    # --- The memory itself, which another kind of pool has elsewhere ---

    def _reserve(self, device: torch.device | None) -> tuple[PoolMemory, torch.Tensor]:
        """Reserve the addresses of the pool, of which nothing is ready. Also as a tensor: uint8, 1-D."""
        slab = Slab(self.capacity_bytes, 0)
        return slab, torch.frombuffer(slab, dtype=torch.uint8)

    def _own_view(self, start_bytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(self._slab, Slab)
        return torch.frombuffer(self._slab, dtype=dtype, count=numel, offset=start_bytes)

    _cannot_gather = ""
    """The reason why pieces cannot be joined; "" if they can."""

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def _announce(handle: AsyncIOHandle, memory: PoolMemory) -> None:
        """Tell an engine of the memory that is ready."""
        assert isinstance(memory, Slab)
        handle.register(memory)

    @staticmethod
    def _withdraw(handle: AsyncIOHandle, memory: PoolMemory) -> None:
        """Undo `_announce`, if the engine is still open."""
        assert isinstance(memory, Slab)
        if not handle.closed:
            handle.unregister(memory)

    def _collect(self) -> None:
        """Free what was given back and is at rest. Under the lock.

        Whatever was given back is looked at once; and if it was busy then, again when it is among the oldest. An extent
        that is in both lists after Ctrl-C, or twice in one because its lease was released and then collected, is freed
        once: `put` does nothing the second time.
        """
        while self._given_back:
            extent = self._given_back[0]
            if extent.is_over():
                self._take_back(extent)
            else:
                self._busy.append(extent)
            self._given_back.popleft()
        position = 0
        while position < min(len(self._busy), _LOOKS):
            extent = self._busy[position]
            if extent.is_over():
                self._take_back(extent)
                del self._busy[position]
            else:
                position += 1

    def _take_back(self, extent: _Extent) -> None:
        if (pages := extent.pages) is not None:
            with interrupts_deferred():
                pages.put_back()
                self._gathered = tuple(each for each in self._gathered if each is not pages)
                extent.pages = None
        for part in extent.parts:
            self._free.put(part)
        if pages is not None and not self._gathered and not self._closed:
            self._register()  # An engine that had other memory to register meanwhile has let go of this.

    def _has(self, address: int) -> bool:
        """Return True if the byte at `address` is in the pool."""
        if 0 <= address - self._slab.address < self.capacity_bytes:
            return True
        return any(0 <= address - pages.address < pages.length_bytes for pages in self._gathered)

    def _used_bytes(self) -> int:
        return self.capacity_bytes - self._free.total_bytes

    def reclaim(self) -> bool:
        """Ask the reclaimers for one buffer. False if none of them has any to give."""
        return any(callback() for callback in self._living_reclaimers())

    def _living_reclaimers(self) -> Iterator[Callable[[], bool]]:
        for reference in list(self._reclaimers):
            if (callback := reference()) is not None:
                yield callback
                continue
            with contextlib.suppress(ValueError):  # Another thread was faster.
                self._reclaimers.remove(reference)

    def _wait_for_one(self) -> bool:
        """Wait for the transfer in what was given back first. False if there is none."""
        with self._lock:
            self._collect()
            transfer = self._busy[0].transfer if self._busy else None
        if transfer is None:
            return False
        # Waits without observing: a failure belongs to whoever waits for the transfer, or to the handle's `close`.
        transfer.wait_quietly()
        with self._lock:
            self._collect()
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError("this buffer pool was made before a fork: its memory exists in the parent only")


def _unregister(
    slab: PoolMemory,
    withdraw: Iterable[Callable[[], None]],
    locks: dict[str, Copies],
    given_back: tuple[deque[_Extent], ...],
    pid: int,
) -> None:
    """Wait for what uses the memory, then take it from the kernel and the devices. The memory goes after that."""
    if os.getpid() != pid:
        return
    with contextlib.ExitStack() as steps:  # The last that was added comes first; each is made, whatever others raise.
        for copies in locks.values():
            steps.callback(copies.page_unlock, slab.address)
        for step in withdraw:
            steps.callback(step)
        for extent in [extent for extents in given_back for extent in list(extents)]:
            if extent.transfer is not None:
                steps.callback(extent.transfer.wait_quietly)
