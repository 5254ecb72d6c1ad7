"""Addresses of the host's memory, for native code."""

from __future__ import annotations

import torch
from torch import Tensor

from swapper.io import _native

__all__ = ["address_of", "require_on_host"]


def require_on_host(name: str, tensor: Tensor) -> None:
    """Raise ValueError, which calls the tensor `name`, unless it is on the CPU and contiguous."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; it must be on the CPU")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


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
