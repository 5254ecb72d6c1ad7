"""Storage for `torch.distributed.checkpoint`: `SwapStorageWriter`, `SwapStorageReader`. See docs/saving.md."""

from swapper.files.dcp import SwapStorageReader, SwapStorageWriter

__all__ = ["SwapStorageReader", "SwapStorageWriter"]
