"""Stores float32 as bfloat16 and reads it again. It is rounded at random, but the same each time it is asked for.

See [Note: stochastic rounding] in `csrc/bf16_codec.h`.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from swapper.io import _native
from swapper.io.host_memory import require_row

__all__ = ["RoundingKey", "decode_bf16", "encode_bf16"]

SEED = 0
"""Of the random bits of all state and gradients. They differ by step, parameter, name and element."""

_MASK = (1 << 32) - 1


class RoundingKey(NamedTuple):
    """The key of the random bits, which else depend only on the index of the element.

    Attributes:
        name: of the tensor in the state, or of a gradient's pass.
        step: of the optimizer; only its lowest 32 bits count.
        parameter: its number; the same.
        seed: 32 bits.
    """

    name: str
    step: int
    parameter: int
    seed: int = SEED

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """As the native core takes them: seed, number of the name, step, parameter; 32 bits each."""
        return self.seed & _MASK, zlib.crc32(self.name.encode()), self.step & _MASK, self.parameter & _MASK


def encode_bf16(values: Tensor, stored: Tensor, first: int, key: RoundingKey) -> None:
    """Write `values` to `stored`, rounded up or down at random, so that the mean is the value.

    What bfloat16 can hold stays as it is. Uses up to `torch.get_num_threads()` threads and releases the GIL; what is
    written depends neither on their number nor on how elements are cut into calls.

    Args:
        values: float32. Like `stored`: on the CPU, contiguous, one-dimensional, of any alignment.
        stored: bfloat16, as many elements; written; without a byte in common with `values`.
        first: index of the first element, 0 or more.
        key: of the random bits.

    Raises:
        ValueError: a tensor is not as described.
    """
    _require(values, stored)
    numbers = values.numel(), first, *key.numbers
    _native.encode_bf16(values.data_ptr(), stored.data_ptr(), *numbers, torch.get_num_threads())


def decode_bf16(stored: Tensor, values: Tensor) -> None:
    """Write `stored`, bfloat16, to `values`, float32: exact. Tensors and errors as of `encode_bf16`."""
    _require(values, stored)
    _native.decode_bf16(stored.data_ptr(), values.data_ptr(), values.numel(), torch.get_num_threads())


def _require(values: Tensor, stored: Tensor) -> None:
    require_row("values", values, torch.float32, values.numel())
    require_row("stored", stored, torch.bfloat16, values.numel())
