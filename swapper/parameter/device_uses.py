"""`DeviceUses`: what streams do with the values of records on a device, and if they have changed them.

[Note: changes behind autograd's back] Before a record leaves the device its values are compared with those that came
up, by sums (`device_sums`): nothing but a few bytes is downloaded for it. A record of which nothing is left in use is
summed early if memory is short, before work on the next is queued, so that the result is there when the memory is
needed. Whoever uses the record again makes that void.
"""

from __future__ import annotations

import torch

from swapper.io.devices import DeviceCopies, current_streams, on_streams
from swapper.parameter.cache import Held
from swapper.parameter.device_sums import Check, DeviceSums
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.process.interrupts import interrupts_deferred

__all__ = ["DeviceUses"]


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
        return held.changed_on_device or (held.used and self.checked(held).differs())

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
