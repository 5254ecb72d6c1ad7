"""The memory of a pool: a `Slab` of the host's, or `DeviceMemory`."""

from __future__ import annotations

from typing import Protocol

import torch

from swapper.sizes import round_up

__all__ = ["DeviceMemory", "PoolMemory"]

_ALIGNMENT_BYTES = 64 << 10
"""Pages of a GPU, as cuFile maps them."""


class PoolMemory(Protocol):
    """The memory of a pool: a range of addresses, of which the first part is ready."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def ready_bytes(self) -> int:
        """Length of the part that is ready."""

    @property
    def locked(self) -> bool:
        """True if the system cannot swap it out."""

    @property
    def lock_reason(self) -> str:
        """The reason why it is not locked; "" if it is."""

    def extend(self, ready_bytes: int) -> None:
        """Have more of it ready."""

    def shrink(self, ready_bytes: int) -> None:
        """Have less of it ready."""


class DeviceMemory:
    """`PoolMemory` of an accelerator. All of it is there from the start."""

    locked = True
    lock_reason = ""

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
