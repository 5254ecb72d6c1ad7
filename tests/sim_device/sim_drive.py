"""`SimulatedDrive`: a drive of a set bandwidth by the clock of the simulated device, which keeps time.

Transfers are made on a real drive at once, so that the bytes are right; when they are over is told by the clock: one
after another, in the order in which they were started, reads and writes alike.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swapper.io.file import File
from swapper.io.handle import AsyncIOHandle, Checksums, Transfer
from swapper.io.transfer import Moving

__all__ = ["SimulatedDrive"]

_DEVICE = 1
"""Its stream is one of the second device, which nobody else uses: to wait for the first is not to wait for it."""


class SimulatedDrive(AsyncIOHandle):
    """An engine whose transfers take a set time. All of them are on one drive.

    Attributes:
        bps: bytes per second. To be set before the first.
        read_bytes, written_bytes: of all transfers so far.
    """

    bps: ClassVar[float] = 5e9
    read_bytes: ClassVar[int] = 0
    written_bytes: ClassVar[int] = 0
    _stream: ClassVar[torch.Stream | None] = None

    def _start_checked(
        self, operation: str, file: File, tensor: torch.Tensor, offset_bytes: int, checksums: Checksums | None
    ) -> Transfer:
        transfer = super()._start_checked(operation, file, tensor, offset_bytes, checksums)
        transfer.wait_quietly()
        mine = SimulatedDrive
        if mine._stream is None:
            mine._stream = torch.Stream(f"sim:{_DEVICE}")
        if operation == "read":
            mine.read_bytes += tensor.nbytes
        else:
            mine.written_bytes += tensor.nbytes
        with mine._stream:
            torch.ops.sim.drive(_DEVICE, tensor.nbytes / mine.bps * 1e6)
            over = torch.Event(f"sim:{_DEVICE}")
            over.record()
        transfer._moving = _Timed(transfer._moving, over)
        return transfer


class _Timed:
    """What `Transfer` asks of what moves: made already, and over when the clock says so."""

    def __init__(self, made: Moving, over: torch.Event) -> None:
        self._made = made
        self._over = over

    @property
    def key(self) -> int:
        return self._made.key

    def done(self) -> bool:
        return self._over.query()

    def failed(self) -> bool:
        return self._made.failed()

    def times_s(self) -> tuple[float, float]:
        return self._made.times_s()

    def wait(self, timeout: float | None = None) -> int:
        self._over.synchronize()
        return self._made.wait(timeout)
