"""`HeldOnDevice`: a record of a model on an accelerator, and what is on the device and in the pool of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper.io.devices import Copy
from swapper.parameter.cache import Held, in_file
from swapper.parameter.device_sums import Check
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache

__all__ = ["HeldOnDevice"]


@dataclass(eq=False, slots=True)
class HeldOnDevice(Held):
    """A record of a model on an accelerator. What the policy of the pool asks is about the pool's buffer."""

    on_device: list[torch.Tensor] = field(default_factory=list)
    """The values of each parameter on the device, 1-D, in storages of their own; empty while they are not there."""
    on_host: set[object] = field(default_factory=set)
    """The uses of the pool's buffer that are not over."""
    used_on: set[Any] = field(default_factory=set)
    """The streams that have used `on_device`, and that copies up do not follow yet."""
    up: Copy | None = None
    """The last copy to `on_device`."""
    down: Copy | None = None
    """A copy from it, until the record is written."""
    used: bool = False
    """`on_device` may have been changed since it came up, or since `check`."""
    changed_on_device: bool = False
    """`on_device` is known to be newer than the pool's copy. See [Note: which copy is the newest]."""
    leaving: bool = False
    """`on_device` goes when `down` is over."""
    sums: torch.Tensor | None = None
    """Of the values as they came up, on the device."""
    summed: bool = False
    """`sums` are of the values that the pool, or the file, has."""
    kept: bool = False
    """There is no file: the pool keeps the record."""
    stays: bool = False
    """`on_device` stays, once it is there, unless nothing else can go."""
    moving: bool = False
    """The buffer is needed by the call that is being made."""
    stepped: bool = False
    """The buffer was changed by a step on the CPU, and its write was not started since."""
    check: Check | None = None
    """Says if `on_device` differs from what came up. None if it was used since."""

    @property
    def values(self) -> list[torch.Tensor]:
        """The values on the device."""
        return self.on_device

    @property
    def in_use(self) -> bool:
        """True if the values on the device must stay where they are."""
        return bool(self.holds or self.attached) or self.has_views()

    def note_change(self) -> None:
        """The values on the device are about to be changed."""
        self.changed_on_device = True

    def pairs(self, values: Sequence[torch.Tensor], staged: Lease | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`values` of each parameter, and where they are in the pool; or in `staged`, a buffer as the file has it."""
        if staged is None:
            return [*zip(values, self.opened, strict=True)]
        return [
            (location.view(each), in_file(staged, location).view(location.shape))
            for location, each in zip(self.plan.locations, values, strict=True)
        ]

    # --- Of the pool's buffer ---

    def note_arrival(self, opened: list[torch.Tensor]) -> None:
        """Do nothing: `sums` are made when the values come up."""

    @property
    def pinned(self) -> bool:
        """True while the buffer is used."""
        return bool(self.on_host) or self.moving

    def viewed(self) -> bool:
        """False: nobody is given views of the buffer that outlive its use."""
        return False

    def is_newer(self) -> bool:
        """Return True if the buffer is newer than the file."""
        return self.changed

    def write(self, cache: RecordCache) -> None:
        """As for a record on the host, when the copy down is over. Nothing is written of one that is kept."""
        self.stepped = False
        if self.kept:
            self.changed = False
            return
        record = cache.records.get(self.key)
        assert record is not None
        if not record.writing and record.lease.transfer is not None:
            record.lease.transfer.wait()
            record.lease.transfer = None
        super(HeldOnDevice, self).write(cache)

    def complete(self, lease: Lease) -> int:
        """As `RecordCache.write` wants it: have `lease` as the file is to be. Returns its bytes. In any thread."""
        self.checksums = self.pack(lease)
        self.changed = False
        return self.plan.file_bytes

    def evicted(self) -> None:
        """The buffer is given up."""
        self.opened = []

    def forget(self) -> None:
        """Let go of the values on the device. Their memory is nobody's before `used_on` have come so far."""
        self.unregister()
        for values in self.on_device:
            for stream in self.used_on:
                values.record_stream(stream)
        self.on_device, self.used_on = [], set()
