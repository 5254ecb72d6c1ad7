"""Accelerators: copies between their memory and the host's, on a stream of their own. All that is known of CUDA there.

[Note: late copies] A copy that was started may run much later. Until then its tensors belong to it:

    memory of the device    is kept from its allocator by `Copies.keep`, though nobody has the tensor any more
    memory of a pool        is kept by its lease: the `Copy` is the lease's transfer
    values of the device    may be used by work of the current stream only after `join`, by the host after `settle`

`begin` is the other direction: copies that follow see what the current stream has to compute first. So a tensor that is
to be copied is made before `begin`, and `begin` comes before the copy.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable
from typing import Protocol

import torch

from swapper.errors import SwapError, SwapIOError

__all__ = ["DEVICES", "Copies", "Copy", "DeviceCopies", "Event", "is_accelerator"]


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Tell if the point is reached."""

    def synchronize(self) -> None:
        """Wait until it is reached."""


class Copies:
    """Copies between one CUDA device and the host, in order, on a stream of their own.

    Another kind of device needs a class with these methods, in `DEVICES`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def reached(self) -> Event:
        """An event after all that the caller's current stream has to do by now."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, event: Event) -> None:
        """Let the copies that come wait for `event`."""
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)

    def join(self, event: Event) -> None:
        """Let what the caller's current stream has to do from now on wait for `event`."""
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Start a copy; the event says when it is done. Neither tensor may be freed before."""
        # The host memory is not torch's, so it takes no part in its tracking of streams.
        return self.run(lambda: destination.copy_(source, non_blocking=True))

    def run(self, work: Callable[[], object]) -> Event:
        """Call `work`, which starts several operations on tensors; the event says when they are done."""
        with torch.cuda.stream(self._stream):
            work()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def keep(self, tensor: torch.Tensor) -> None:
        """Let nobody else have the memory of a device tensor before the copies so far are done."""
        tensor.record_stream(self._stream)

    def settle(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()

    def settle_all(self) -> None:
        """Wait for all that devices of this type have to do, copies from and to the host among it."""
        for number in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(number):  # type: ignore[attr-defined]
                torch.cuda.synchronize(number)

    def page_lock(self, address: int, length_bytes: int) -> None:
        """Let the device copy from and to this memory of the host without help."""
        portable = 1  # For all devices.
        with torch.cuda.device(self._device):  # Not the default one, which would make a context there.
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(cudart.cudaHostRegister(address, length_bytes, portable))
        if status != 0:
            raise SwapError(f"cudaHostRegister of {length_bytes} bytes failed: CUDA error {status}")

    def page_unlock(self, address: int) -> None:
        """Undo `page_lock`."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


DEVICES: dict[str, Callable[[torch.device], Copies]] = {"cuda": Copies}
"""Types of devices that are accelerators, and what copies for them."""


def is_accelerator(device: torch.device) -> bool:
    """Tell if memory of the device is reached by copies only."""
    return device.type in DEVICES


class Copy:
    """Work of a `DeviceCopies` that was started: what a lease has in flight while it is copied from or to."""

    __slots__ = ("_event",)

    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        """Tell if it is over, well or not."""
        try:
            return self._event.query()
        except Exception:  # The device has failed: `wait` says how.
            return True

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over. Returns 0: nothing was read or written.

        Args:
            timeout: None; a device cannot be waited for in part.

        Raises:
            SwapIOError: the device failed.
        """
        assert timeout is None
        try:
            self._event.synchronize()
        except Exception as error:
            raise SwapIOError(errno.EIO, "copy", detail=f"between the device and the host: {error}") from error
        return 0

    def settle(self) -> None:
        """Wait until it is over, and leave a failure unobserved."""
        with contextlib.suppress(SwapIOError):
            self.wait()


class DeviceCopies:
    """Copies between an accelerator and the pool on a stream of their own, so that they overlap its other work.

    On a device that is no accelerator every call does its work at once, and returns None. See [Note: late copies].
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = DEVICES[device.type](device) if is_accelerator(device) else None
        self._last: Event | None = None

    def begin(self) -> None:
        """Let the copies that follow see what the current stream has computed so far."""
        if self._copies is not None:
            self._copies.follow(self._copies.reached())

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Copy | None:
        """Start copying. Until it is done neither tensor may be changed, nor the one on the host freed."""
        return self.run(lambda: destination.copy_(source, non_blocking=True), destination, source)

    def run(self, work: Callable[[], object], *tensors: torch.Tensor) -> Copy | None:
        """Start `work` on `tensors`, where it comes after the copies before it. See `copy`."""
        if self._copies is None:
            work()
            return None
        try:
            self._last = self._copies.run(work)
        except BaseException:
            self._copies.settle()  # Some of it may have been started, and nobody has its event.
            raise
        for tensor in tensors:
            if tensor.device.type == self._device.type:
                self._copies.keep(tensor)
        return Copy(self._last)

    def join(self) -> None:
        """Let the current stream wait for the copies so far."""
        if self._copies is not None and self._last is not None:
            self._copies.join(self._last)

    def settle(self) -> None:
        """Wait for the copies so far."""
        if self._copies is not None and self._last is not None:
            self._copies.settle()
