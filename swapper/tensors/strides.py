"""Strides of tensors: which are dense, which are the same, which a contiguous tensor has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    *("contiguous_stride", "has_ordinary_class", "is_dense", "is_dense_stride", "is_plain"),
    *("same_layout", "same_order", "spanned_bytes"),
]


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the data of `tensor` is an ordinary tensor, and not of a class of somebody's."""
    with torch._C.DisableTorchFunctionSubclass():
        return type(tensor.data) is torch.Tensor


def has_ordinary_class(tensor: torch.Tensor) -> bool:
    """True if `tensor` is no more than its values, to whoever looks at its class."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one block of memory without holes and overlaps, in any order of dimensions."""
    return is_dense_stride(tensor.shape, tensor.stride())


def is_dense_stride(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """As `is_dense`, of a tensor of this shape and stride, whose lengths may differ: then it is not dense."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected and 0 not in shape:
            return False
        expected *= size
    return True


def spanned_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of `tensor` to the end of its last one, with gaps; 0 if it has none."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if elements of two tensors of one shape lie in the same order."""
    return same_order(a.shape, a.stride(), b.stride())


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """As `same_layout`, of tensors with these strides. Strides of dimensions of one say nothing."""
    return len(one) == len(other) and all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of a shape, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
