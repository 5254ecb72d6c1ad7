"""Checksums of the bytes of tensors: CRC-32C of records, CRC-32 of the parts of a ZIP file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swapper.io import _native
from swapper.io.host_memory import address_of, require_on_host

__all__ = ["checksum", "checksums", "copy_crc32", "crc32", "join_checksums"]


def checksum(tensor: Tensor, seed: int = 0) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of the bytes of `tensor`, 0 <= result < 2**32.

    The checksum of the nine bytes "123456789" is 0xE3069283, of no bytes 0. It finds damage, not
    malice. Uses up to `torch.get_num_threads()` threads and releases the GIL.

    Args:
        tensor: on the CPU and contiguous; any dtype, shape and alignment.
        seed: the checksum of what came before; 0 if nothing did.

    Raises:
        ValueError: `tensor` is not as described.
    """
    require_on_host("tensor", tensor)
    return _native.crc32c(tensor.data_ptr(), tensor.nbytes, seed, torch.get_num_threads())


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """The `checksum` of each of `tensors`, by one call of the native core.

    Raises:
        ValueError: a tensor is not as described there.
    """
    for tensor in tensors:
        require_on_host("tensor", tensor)
    return _native.crc32c_each([(each.data_ptr(), each.nbytes) for each in tensors], torch.get_num_threads())


def join_checksums(parts: Iterable[tuple[int, int]]) -> int:
    """The `checksum` of bytes of which only those of their parts are known.

    Args:
        parts: the checksum and the length in bytes of each, in order; none are no bytes.
    """
    joined = 0
    for crc, length_bytes in parts:
        joined = _native.crc32c_join(joined, crc, length_bytes)
    return joined


def crc32(tensor: Tensor, seed: int = 0) -> int:
    """CRC-32 (ZIP, gzip; RFC 1952) of the bytes of `tensor`: as `zlib.crc32`, some times faster. Releases the GIL.

    Args:
        tensor: on the CPU and contiguous; any dtype, shape and alignment.
        seed: the checksum of what came before; 0 if nothing did.

    Raises:
        ValueError: `tensor` is not as described.
    """
    require_on_host("tensor", tensor)
    return _native.crc32(tensor.data_ptr(), tensor.nbytes, seed)


def copy_crc32(destination: Tensor | memoryview, source: Tensor | memoryview, seed: int = 0) -> int:
    """Copy the bytes of `source` and return their `crc32`, on one way through memory. Releases the GIL.

    Autograd does not notice the write.

    Args:
        destination: as many bytes as `source` has, none in common with it; written. Faster at multiples of 16 bytes.
        source: both contiguous, of any shape and alignment; a tensor on the CPU.
        seed: the checksum of what came before; 0 if nothing did.

    Raises:
        ValueError: a tensor is not as described.
        BufferError: a memoryview is not, or `destination` is read-only.
    """
    to, to_bytes = address_of("destination", destination, writable=True)
    begin, length_bytes = address_of("source", source, writable=False)
    if to_bytes != length_bytes:
        raise ValueError(f"destination has {to_bytes} bytes; source has {length_bytes}")
    if to < begin + length_bytes and begin < to + length_bytes:
        raise ValueError("destination and source overlap in memory")
    return _native.copy_crc32(to, begin, length_bytes, seed)
