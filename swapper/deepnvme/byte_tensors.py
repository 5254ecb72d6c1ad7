"""The memory of tensors as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

__all__ = ["cast_from_byte_tensor", "cast_to_byte_tensor"]


@overload
def cast_to_byte_tensor(src_tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def cast_to_byte_tensor(src_tensor: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...
def cast_to_byte_tensor(src_tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """The memory of a tensor as uint8 of shape `(nbytes,)`, without a copy. It keeps the memory alive.

    Args:
        src_tensor: contiguous, any dtype and device; or several, each cast.

    Raises:
        TypeError: no tensor.
        ValueError: not contiguous, not dense, or conjugated or negated only on paper (`resolve_conj`, `resolve_neg`).
    """
    if not isinstance(src_tensor, torch.Tensor):
        if not isinstance(src_tensor, Sequence) or not all(isinstance(each, torch.Tensor) for each in src_tensor):
            raise TypeError(f"a tensor or a list of tensors is needed, not {type(src_tensor).__name__}")
        return [cast_to_byte_tensor(each) for each in src_tensor]
    if src_tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, not {src_tensor.layout}")
    if src_tensor.is_conj() or src_tensor.is_neg():
        resolve = "resolve_conj" if src_tensor.is_conj() else "resolve_neg"
        raise ValueError(f"a tensor is needed whose memory has its values, not a view that changes them: `{resolve}()`")
    if not src_tensor.is_contiguous():
        raise ValueError(
            f"a contiguous tensor is needed, not one of shape {tuple(src_tensor.shape)} and strides "
            f"{src_tensor.stride()}: call `contiguous()`"
        )
    return src_tensor.reshape(-1).view(torch.uint8)


def cast_from_byte_tensor(byte_tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `cast_to_byte_tensor`: the same memory as a tensor of `dtype`, flat, without a copy.

    Args:
        byte_tensor: uint8, contiguous, of shape `(n * dtype.itemsize,)`, starting at a multiple of `dtype.itemsize` in
            its storage.
        dtype: of the result, which has shape `(n,)`.

    Raises:
        TypeError: not a uint8 tensor.
        ValueError: another shape, not contiguous, or misaligned.
    """
    if not isinstance(byte_tensor, torch.Tensor) or byte_tensor.dtype != torch.uint8:
        what = byte_tensor.dtype if isinstance(byte_tensor, torch.Tensor) else type(byte_tensor).__name__
        raise TypeError(f"a tensor of torch.uint8 is needed, not {what}")
    if byte_tensor.dim() != 1 or not byte_tensor.is_contiguous():
        raise ValueError(f"a flat, contiguous tensor is needed, not one of shape {tuple(byte_tensor.shape)}")
    if byte_tensor.numel() % dtype.itemsize or byte_tensor.storage_offset() % dtype.itemsize:
        raise ValueError(
            f"{byte_tensor.numel()} bytes at byte {byte_tensor.storage_offset()} of their storage are not elements of "
            f"{dtype}, which take {dtype.itemsize} bytes each"
        )
    return byte_tensor.view(dtype)
