"""`GatheredPages`: pages of one mapping that lie apart, at addresses side by side, without a copy.

[Note: gathered pages] mremap(2) with MREMAP_DONTUNMAP (Linux 5.7) moves pages to other addresses, and leaves the
addresses where they were mapped and empty. The memory is the same: no byte is copied or allocated, and a registration
of the pages with io_uring or a device, which holds the pages and not their addresses, is right again when they are put
back. Until then nobody may touch the addresses that they came from, nor register them: that would fill them with other
pages, which transfers would then read and write. An engine registers all of its memory anew when a part of it comes or
goes, so pages lose all permissions before they are moved, and get them back where they are then: registration of what
they left is refused (EFAULT). Nothing finds the new addresses registered, so the kernel maps the pages at each
transfer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

from swapper.errors import SwapIOError

__all__ = ["GatheredPages"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = _libc.mlock.argtypes = _libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_READ_WRITE = 1 | 2
_FAILED = ctypes.c_void_p(-1).value

_Part = tuple[int, int, int]
"""Address now, address after the next move, length."""


class GatheredPages:
    """Pages at addresses side by side, until `put_back`. See [Note: gathered pages]. Not thread-safe.

    The addresses are given back when the last of this and of all tensors made of `memory` is gone; so are the pages, if
    they were not put back.

    Args:
        parts: address and length in bytes of each, whole pages of the system's; private anonymous memory that nobody
            uses. The order is that of the bytes in `memory`.
        locked: the memory is locked (mlock), and shall be so here.

    Attributes:
        address: of the first byte.
        length_bytes: of all parts.

    Raises:
        SwapIOError: the system cannot do it (EINVAL: Linux before 5.7, or larger pages). All is as it was.
    """

    def __init__(self, parts: Sequence[tuple[int, int]], *, locked: bool) -> None:
        self.length_bytes = sum(length for _, length in parts)
        found = _libc.mmap(None, self.length_bytes, 0, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if found == _FAILED:
            raise SwapIOError(ctypes.get_errno(), "reserve addresses", length_bytes=self.length_bytes)
        self.address: int = found
        weakref.finalize(self, _unmap, found, self.length_bytes, os.getpid()).atexit = False
        self._locked = locked
        self._parts: list[_Part] = []
        work, here = [], found
        for there, length in parts:
            work.append((there, here, length))
            here += length
        try:
            _move(work, self._parts, locked, leaves_nothing=True)
        except SwapIOError:
            self.put_back()
            raise

    @property
    def memory(self) -> Any:
        """All bytes, as an object with the buffer protocol that keeps them."""
        memory: Any = (ctypes.c_ubyte * self.length_bytes).from_address(self.address)
        memory.pages = self
        return memory

    def put_back(self) -> None:
        """Move the pages to where they were. Idempotent. Whoever still looks at `memory` finds it empty.

        Raises:
            SwapIOError: the system refused; what was not put back is, by the next call.
        """
        _move(self._parts, [], self._locked)


def _move(work: list[_Part], done: list[_Part], locked: bool, *, leaves_nothing: bool = False) -> None:
    """Move each part of `work` from the first to the second address. It is then in `done`, the other way round.

    With `leaves_nothing` the first addresses have no permissions until they are moved to again.
    """
    while work:
        source, target, length = work[-1]
        # What is locked is counted once more each time it is moved with MREMAP_DONTUNMAP. So it is unlocked meanwhile.
        # That it can be locked again is as sure as it was, and what is not locked serves as well.
        _libc.munlock(source, length)
        if leaves_nothing:
            _libc.mprotect(source, length, 0)
        moved = _libc.mremap(source, length, length, _MAYMOVE_FIXED_DONTUNMAP, target) == target
        number = ctypes.get_errno()
        if leaves_nothing:
            _libc.mprotect(target if moved else source, length, _READ_WRITE)
        if locked:
            _libc.mlock(target if moved else source, length)
        if moved:
            work.pop()
            done.append((target, source, length))
        elif number == errno.EFAULT and length > mmap.PAGESIZE:  # More than one mapping: earlier moves split it.
            half = length // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            work[-1:] = [(source, target, half), (source + half, target + half, length - half)]
        else:
            raise SwapIOError(number, "move pages (mremap)", length_bytes=length)


def _unmap(address: int, length_bytes: int, pid: int) -> None:
    # In a child the addresses are not ours: something else may have been mapped there since.
    if os.getpid() == pid:
        _libc.munmap(address, length_bytes)
