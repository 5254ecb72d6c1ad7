"""Distances of gradients from aligned addresses, as far as bits depend on them.

[Note: alignment] A kernel of a device that adds up the elements of a tensor takes them in another order where its
address is no multiple of what it loads at once: see `is_aligned` in torch's `MultiTensorApply.cuh`, by which norms are
taken for clipping, and `shift` in `Reduce.cuh`. torch aligns what it allocates, but the gradients that FSDP2 has
reduced together, and those that are slices of another, begin at any element. So one that gets memory of its own, or
comes back, is as far from an aligned address as it was; so is one that a class steps on whole, in a slot. Kernels of
the CPU do not look at addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swapper.sizes import ALIGNMENT_BYTES
from swapper.tensors.sharded import is_sharded, local_of

__all__ = ["empty_misaligned", "keep_alone", "misaligned_bytes_of"]


def misaligned_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes from a multiple of 64 to the address of `tensor`; 0 on the CPU."""
    return 0 if tensor.is_cpu else tensor.data_ptr() % ALIGNMENT_BYTES


def empty_misaligned(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, misaligned_bytes: int
) -> torch.Tensor:
    """As `torch.empty_strided`, for a dense tensor, so many bytes after a multiple of 64: whole elements."""
    if not misaligned_bytes:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    skipped = misaligned_bytes // dtype.itemsize
    memory = torch.empty(skipped + torch.Size(shape).numel(), dtype=dtype, device=device)
    return memory.as_strided(shape, stride, skipped).detach()


def keep_alone(gradient: torch.Tensor | None) -> None:
    """Give a DTensor that stays in memory memory of its own, and not a part of what FSDP2 has reduced together."""
    if gradient is None or not is_sharded(gradient):
        return
    local = local_of(gradient)
    if local.untyped_storage().nbytes() < local.nbytes + ALIGNMENT_BYTES:
        return
    stride = torch.empty_like(local, device="meta").stride()
    alone = empty_misaligned(local.shape, stride, local.dtype, local.device, misaligned_bytes_of(local))
    gradient._local_tensor = alone.copy_(local)  # type: ignore[attr-defined]
