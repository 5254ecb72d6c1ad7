"""Gigabytes of addresses over megabytes of memory."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

WINDOW_BYTES = 8 << 20
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(address: int | None, length_bytes: int, protection: int, flags: int, fd: int, offset_bytes: int) -> int:
    mapped = _libc.mmap(address, length_bytes, protection, flags, fd, offset_bytes)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(mapped)


class AddressRange:
    """`length_bytes` of addresses. The windows around each of `edges` have memory of their own, all others share one.

    Args:
        length_bytes: of the range.
        edges: offsets in it; the window before and the one after each are real.
    """

    def __init__(self, length_bytes: int, edges: list[int]) -> None:
        windows = -(-length_bytes // WINDOW_BYTES)
        real = {at // WINDOW_BYTES for edge in edges for at in (max(edge - 1, 0), min(edge, length_bytes - 1))}
        self.real = sorted(real)
        self.shared = next(window for window in range(windows) if window not in real)
        self._mapped = windows * WINDOW_BYTES
        memory = os.memfd_create("address_range")
        try:
            os.ftruncate(memory, (len(real) + 1) * WINDOW_BYTES)
            anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._address = _map(None, self._mapped, mmap.PROT_READ, anywhere, -1, 0)
            for window in range(windows):
                place = self.real.index(window) + 1 if window in real else 0
                _map(
                    self._address + window * WINDOW_BYTES,
                    WINDOW_BYTES,
                    mmap.PROT_READ | mmap.PROT_WRITE,
                    mmap.MAP_SHARED | _MAP_FIXED,
                    memory,
                    place * WINDOW_BYTES,
                )
        finally:
            os.close(memory)
        buffer = (ctypes.c_uint8 * length_bytes).from_address(self._address)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)

    def window(self, number: int) -> torch.Tensor:
        """The memory of one window; the last may be cut."""
        return self.tensor[number * WINDOW_BYTES : (number + 1) * WINDOW_BYTES]

    def close(self) -> None:
        """Give the addresses back. Nothing may use them afterwards."""
        del self.tensor
        _libc.munmap(self._address, self._mapped)
