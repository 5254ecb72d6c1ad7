"""Transfers between files and device memory by cuFile (GPUDirect Storage), without a copy on the host."""

from __future__ import annotations

import torch

from swapper.handle import AsyncIOHandle

__all__ = ["GDSHandle"]


class GDSHandle(AsyncIOHandle):
    """An `AsyncIOHandle` that moves device tensors by cuFile where it can. Arguments and errors as there."""

    @property
    def gds_available(self) -> bool:
        """Whether device tensors go by cuFile."""
        return False

    @property
    def gds_reason(self) -> str:
        """Why `gds_available` is False; "" where it is True."""
        return "not there yet"

    def pin(self, tensor: torch.Tensor) -> bool:
        """Register the memory of a device tensor with cuFile. Returns False where there is no GPUDirect Storage."""
        return False

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Undo `pin`. Returns False if it was not pinned."""
        return False
