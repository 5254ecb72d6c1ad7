"""Stores float32 in a byte for each element and 4 for each block of 256, and reads it again.

It is rounded at random, but the same each time it is asked for. See [Note: blocks of 256] in `csrc/int8_codec.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swapper.io import _native
from swapper.io.bf16_codec import RoundingKey
from swapper.io.host_memory import require_row

__all__ = ["BLOCK_NUMEL", "blocks_of", "decode_int8", "encode_int8"]

BLOCK_NUMEL = 256
"""Elements that share a scale."""


def blocks_of(numel: int) -> int:
    """The number of scales for so many elements."""
    return -(-numel // BLOCK_NUMEL)


def encode_int8(values: Tensor, codes: Tensor, scales: Tensor, first: int, key: RoundingKey) -> None:
    """Write `values` to `codes` and `scales`, rounded up or down at random, so that the mean is the value.

    Zeros, infinities and NaNs stay what they are, and no positive value becomes zero where a block has no sign. What
    was decoded stays as it is. Uses up to `torch.get_num_threads()` threads and releases the GIL; what is written
    depends neither on their number nor on how blocks are cut into calls.

    Args:
        values: float32. Like the others: on the CPU, contiguous, one-dimensional, of any alignment.
        codes: uint8, as many elements; written. Without a byte in common with the others, as `scales`.
        scales: float32, `blocks_of` so many elements; written.
        first: index of the first element, a multiple of `BLOCK_NUMEL`.
        key: of the random bits.

    Raises:
        ValueError: a tensor, or `first`, is not as described.
    """
    _require(values, codes, scales)
    if first < 0 or first % BLOCK_NUMEL:
        raise ValueError(f"first is {first}; it must be a multiple of {BLOCK_NUMEL}, where a block begins")
    numbers = values.numel(), first, *key.numbers
    addresses = values.data_ptr(), codes.data_ptr(), scales.data_ptr()
    _native.encode_int8(*addresses, *numbers, torch.get_num_threads())


def decode_int8(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write what `codes` and `scales` stand for, from the first of a block on, to `values`, float32: exact.

    Tensors and errors are as of `encode_int8`.
    """
    _require(values, codes, scales)
    addresses = codes.data_ptr(), scales.data_ptr(), values.data_ptr()
    _native.decode_int8(*addresses, values.numel(), torch.get_num_threads())


def _require(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    numel = values.numel()
    require_row("values", values, torch.float32, numel)
    require_row("codes", codes, torch.uint8, numel)
    require_row("scales", scales, torch.float32, blocks_of(numel))
