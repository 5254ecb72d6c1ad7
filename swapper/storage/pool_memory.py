"""The memory of a pool: a `Slab` of the host's, or `DeviceMemory`."""

from __future__ import annotations

import torch

from swapper.io.handle import Slab
from swapper.sizes import round_up

__all__ = ["DeviceMemory", "PoolMemory"]

_ALIGNMENT_BYTES = 64 << 10
"""Pages of a GPU, as cuFile maps them."""


class DeviceMemory:
    """Memory of an accelerator, as a `Slab` is of the host. All of it is there from the start."""

    locked = True

    def __init__(self, length_bytes: int, device: torch.device) -> None:
        self._length_bytes = length_bytes
        whole = torch.empty(length_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        start = round_up(whole.data_ptr(), _ALIGNMENT_BYTES) - whole.data_ptr()
        self.tensor = whole[start : start + length_bytes]
        self.address = self.tensor.data_ptr()
        self.ready_bytes = 0

    def extend(self, ready_bytes: int) -> None:  # noqa: D102
        self.ready_bytes = self._length_bytes

    def shrink(self, ready_bytes: int) -> None:  # noqa: D102
        pass


PoolMemory = Slab | DeviceMemory
