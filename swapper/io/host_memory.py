"""The host's memory: its addresses, for native code, and its bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swapper.io import _native

__all__ = ["address_of", "bytes_of", "require_on_host", "require_row"]


def require_on_host(name: str, tensor: Tensor) -> None:
    """Raise ValueError, which calls the tensor `name`, unless it is on the CPU and contiguous."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; it must be on the CPU")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def require_row(name: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    """Raise ValueError unless `tensor` is on the CPU, contiguous, of `dtype` and of shape `(numel,)`."""
    require_on_host(name, tensor)
    if tensor.dtype is not dtype or tensor.dim() != 1 or tensor.numel() != numel:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {dtype} of one dimension with "
            f"{numel} elements"
        )


def address_of(name: str, memory: Tensor | memoryview, *, writable: bool) -> tuple[int, int]:
    """Address of `memory` and its length in bytes.

    Raises:
        ValueError: `memory` is a tensor that is not on the CPU or not contiguous.
        BufferError: `memory` is a memoryview that is not contiguous, or read-only although it must be `writable`.
    """
    if isinstance(memory, Tensor):
        require_on_host(name, memory)
        return memory.data_ptr(), memory.nbytes
    return _native.address_of(memory, writable)


def bytes_of(tensor: Tensor) -> bytes:
    """A copy of the bytes of `tensor`, without numpy, which torch does not require.

    Raises:
        ValueError: it is not on the CPU, or not contiguous.
    """
    require_on_host("tensor", tensor)
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
