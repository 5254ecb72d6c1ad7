"""Tensors of any element type as the safetensors files of a checkpoint hold them, to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swapper.tensors.dtypes import PAIRS, PLAIN_DTYPES, WORDS

__all__ = ["aligned", "from_stored", "stored_as", "to_stored", "with_stride"]


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Element type and shape in which a tensor is stored."""
    if dtype in PAIRS:
        return PAIRS[dtype], (*shape, 2)
    if dtype in PLAIN_DTYPES:
        return dtype, tuple(shape)
    return torch.uint8, (math.prod(shape) * dtype.itemsize,)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` as integers, for which torch has a copy that keeps all bits. Complex ones as pairs."""
    if tensor.dtype in PAIRS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(WORDS[tensor.dtype.itemsize])


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The form in which a tensor is stored: contiguous, on the CPU; it shares memory where it can."""
    words = _words(tensor.resolve_conj().resolve_neg()).contiguous().cpu()
    dtype, shape = stored_as(tensor.dtype, tensor.shape)
    return words.reshape(-1).view(dtype).reshape(shape)


def from_stored(stored: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of which `stored` is what `to_stored` made."""
    if stored.dtype == dtype:
        return stored
    return aligned(stored, dtype.itemsize).reshape(-1).view(dtype).reshape(tuple(shape))


def aligned(tensor: torch.Tensor, alignment_bytes: int) -> torch.Tensor:
    """`tensor`, or a copy if it does not start at such an address, in its storage and in memory."""
    offset_bytes = tensor.storage_offset() * tensor.itemsize
    return tensor.clone() if (offset_bytes | tensor.data_ptr()) % alignment_bytes else tensor


def with_stride(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with other strides, of a dense tensor."""
    dtype = tensor.dtype
    # torch warns of empty tensors of some element types.
    result = torch.empty_strided(tensor.shape, stride, dtype=WORDS.get(dtype.itemsize, dtype), device="cpu").view(dtype)
    _words(result).copy_(_words(tensor))
    return result
