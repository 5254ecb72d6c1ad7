"""`HeldOnDevice`: a record of a model on an accelerator; and `DeviceUses`: what streams do with its values there.

[Note: changes behind autograd's back] Before a record leaves the device its values are compared with those that came
up, by sums (`device_sums`): nothing but a few bytes is downloaded for it. A record of which nothing is left in use is
summed early if memory is short, before work on the next is queued, so that the result is there when the memory is
needed. Whoever uses the record again makes that void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from swapper.io.devices import Copy, DeviceCopies, current_streams, on_streams
from swapper.parameter.cache import Held, in_file
from swapper.parameter.device_sums import Check, DeviceSums
from swapper.process.interrupts import interrupts_deferred
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache

__all__ = ["DeviceUses", "HeldOnDevice"]


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


class DeviceUses:
    """Lets streams that use values of records wait for the copies of them, and finds out what has changed.

    Args:
        device: that the values are on.
        up, down: copy them there and back.

    Attributes:
        sums: of values on the device.

    Not thread-safe: called under the lock of the cache.
    """

    def __init__(self, device: torch.device, up: DeviceCopies, down: DeviceCopies) -> None:
        self.sums = DeviceSums(device, 0)
        self._device = device
        self._up = up
        self._down = down
        self._used: dict[HeldOnDevice, None] = {}  # since they were last summed

    def begin(self, held: HeldOnDevice) -> None:
        """The values of `held`, which may be still to come, are about to be used."""
        with interrupts_deferred():
            held.used, held.check, held.leaving = True, None, False
            self._used[held] = None

    def follow(self, held: HeldOnDevice) -> None:
        """Let the current stream wait for the copies, and note that it uses the values.

        Whoever changes the values and changes them back comes after the copy down, which would else be of between.
        """
        self._up.join(held.up)
        if held.down is not None:
            self._down.join(held.down)
        (stream,) = current_streams([self._device])
        held.used_on.add(stream)

    def follow_all(self, held: HeldOnDevice) -> None:
        """As `follow`, and for all that other streams have queued, which may change the values."""
        (stream,) = current_streams([self._device])
        for other in held.used_on - {stream}:
            stream.wait_stream(other)
        self.follow(held)

    def sum_again(self, held: HeldOnDevice) -> None:
        """Have the sums of the values as they are now, which the current stream follows, in `held.sums`."""
        sums = self.sums.of(held.on_device) if held.check is None else held.check.sums
        assert held.sums is not None
        held.sums.copy_(sums)
        for stream in current_streams([self._device]):
            sums.record_stream(stream)  # Perhaps not the one that has made them.

    def end_sent(self, held: HeldOnDevice) -> None:
        """The values are on their way down. They may be used on, if there are views of them."""
        held.check, held.used = None, held.in_use
        if held.used:
            self._used[held] = None
            self._down.join(held.down)  # As in `follow`.

    def forget(self, held: HeldOnDevice) -> None:
        """The values are freed. Deferred interrupts are the caller's."""
        held.check, held.used = None, False
        self._used.pop(held, None)

    def release(self, held: HeldOnDevice) -> None:
        """Have the memory of values, of which there are no views, for what comes up. See [Note: whose memory]."""
        if held.used and (held.check is None or not held.check.done()):
            for stream in held.used_on:
                with interrupts_deferred(), on_streams([stream]):
                    self._up.begin()
        held.used_on.clear()

    def sum_early(self) -> None:
        """Start comparing the values of records that nothing uses any more."""
        for held in list(self._used):
            if held.on_device and not held.in_use and not held.stays:  # Not one whose coming was cut off.
                self.checked(held)

    def checked(self, held: HeldOnDevice) -> Check:
        """Compare the values with those that came up. They are not in use. Waits for nothing."""
        if held.check is None:
            assert held.sums is not None
            self.follow_all(held)
            held.check = Check(self.sums.of(held.on_device), held.sums, self._up)
            self._used.pop(held, None)
        return held.check

    def have_changed(self, held: HeldOnDevice) -> bool:
        """Tell if the values on the device are newer than the pool's copy; waits for `checked` if that is to tell.

        Raises:
            SwapIOError: the device failed.
        """
        return held.changed_on_device or (held.used and bool(self.checked(held).differing()))

    def check_unchanged(self, held: Held) -> None:
        """Wait until it is known that the values of a `fixed` record on the device are those that came up.

        Raises:
            SwapError: they are not; it names the parameters.
            SwapIOError: the device failed.
        """
        assert isinstance(held, HeldOnDevice)
        if not held.on_device or not held.used:
            return
        changed = self.checked(held).differing()
        if held.in_use:  # It may be changed after this, without another call of `begin`.
            held.check = None
            self._used[held] = None
        held.refuse_changes(changed)
