"""Packs bf16 values that are only read, to the bit: see [Note: packed bf16] in `csrc/bf16_packing.h`.

Tensors are contiguous, on the CPU. Each call uses up to `torch.get_num_threads()` threads and releases the GIL; what is
written does not depend on their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swapper.io import _native

__all__ = ["pack_bf16", "packed_bytes_most", "unpack_bf16"]


def packed_bytes_most(numel: int) -> int:
    """The most bytes that so many values can take: those that they have, a head of 32, and 16 for each 4096."""
    return _native.packed_bf16_bytes_most(numel)


def pack_bf16(values: Tensor, packed: Tensor) -> int:
    """Pack bf16 values.

    Args:
        values: bfloat16, of any shape.
        packed: uint8, of `packed_bytes_most` bytes or more; written. Apart from `values`.

    Returns:
        How many of its first bytes are what is packed: a multiple of 64.
    """
    assert values.dtype is torch.bfloat16 and values.is_contiguous() and values.is_cpu
    assert packed.dtype is torch.uint8 and packed.is_contiguous() and packed.is_cpu
    assert packed.numel() >= packed_bytes_most(values.numel())
    threads = torch.get_num_threads()
    return _native.pack_bf16(values.data_ptr(), values.numel(), packed.data_ptr(), threads)


def unpack_bf16(packed: Tensor, values: Tensor) -> None:
    """Write what is packed to `values`.

    Args:
        packed: uint8: all of what was packed, and no more.
        values: bfloat16, of as many elements; written. May be memory that has `packed`, if that ends no earlier.

    Raises:
        ValueError: it is not what packing has made of so many values; nothing was written.
    """
    assert values.dtype is torch.bfloat16 and values.is_contiguous() and values.is_cpu
    assert packed.dtype is torch.uint8 and packed.is_contiguous() and packed.is_cpu
    addresses = packed.data_ptr(), packed.numel(), values.data_ptr()
    _native.unpack_bf16(*addresses, values.numel(), torch.get_num_threads())
