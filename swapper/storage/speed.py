"""Measures the speed of drives: each of several gets its part of the bytes, and state is packed for a slow one."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.io.handle import AsyncIOHandle, File, Slab, Transfer
from swapper.io.transfer import end_all
from swapper.sizes import round_up
from swapper.storage.mounts import NvmePathError, file_systems

__all__ = ["DriveSpeed", "measure_speed", "measure_speeds"]

log = logging.getLogger(__name__)

_MEASURED_BYTES = 32 << 20
_IN_FLIGHT_BYTES = 16 << 20
_FIRST_PASS_S = 0.25
_FAR_SLOWER = 4


@dataclass(frozen=True)
class DriveSpeed:
    """Bytes per second of one drive."""

    write_bps: float
    read_bps: float

    @property
    def bps(self) -> int:
        """Bytes per second when as much is read as is written, one after the other, which is what a step does."""
        return max(1, round(2 / (1 / self.write_bps + 1 / self.read_bps)))


def measure_speeds(directories: Sequence[Path], handles: Sequence[AsyncIOHandle]) -> list[DriveSpeed]:
    """`measure_speed` of each drive, one after the other. Logs them; one that is far slower than another is a warning.

    Raises:
        NvmePathError: a drive failed, or has no room for the file; the message names the directory.
    """
    speeds = []
    for directory, handle in zip(directories, handles, strict=True):
        try:
            speeds.append(measure_speed(directory, handle))
        except OSError as error:
            number = error.errno or errno.EIO
            detail = f"a test file there could not be written and read: {error}"
            raise NvmePathError(number, "measure the speed of", directory, detail) from error
    total, fastest = sum(speed.bps for speed in speeds), max(speed.bps for speed in speeds)
    for directory, speed in zip(directories, speeds, strict=True):
        share = f", and gets {100 * speed.bps / total:.3g} % of the bytes" if len(speeds) > 1 else ""
        slow = speed.bps * _FAR_SLOWER < fastest
        log.log(
            logging.WARNING if slow else logging.INFO,
            "nvme_path: %s writes %.0f MB/s and reads %.0f MB/s%s%s",
            directory,
            speed.write_bps / 1e6,
            speed.read_bps / 1e6,
            share,
            "; it is far slower than another, and may not be worth its place" if slow else "",
        )
    return speeds


def measure_speed(directory: Path, handle: AsyncIOHandle) -> DriveSpeed:
    """Write and read a temporary file in `directory`, at most 32 MiB long, as `handle` does it.

    What is timed is overwriting, as in a step. A fast drive takes tens of milliseconds. A slow one moves less: as much
    as it first writes in a quarter of a second, three times; at least one request. The file has no name while this
    runs, so that nothing can leave it behind. Where there is no O_DIRECT the page cache is emptied of it in between.

    Raises:
        SwapIOError: the drive failed, or is full.
    """
    block_bytes = min(max(1 << 20, handle.block_bytes), _IN_FLIGHT_BYTES)
    (file_system,) = file_systems([directory])
    # On a drive that is nearly full, less; then what it is to hold will be refused with the sum.
    length_bytes = max(block_bytes, min(_MEASURED_BYTES, file_system.free_bytes // 2) // block_bytes * block_bytes)
    memory = torch.frombuffer(Slab(round_up(_IN_FLIGHT_BYTES, block_bytes)), dtype=torch.uint8)
    # Random, so that nothing on the way can make less of them; from a generator of its own.
    memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
    path = directory / f".swapper-speed-{secrets.token_hex(8)}"
    file = handle.open(path, "rw", create=True, exclusive=True)
    with file:
        path.unlink()
        file.preallocate(length_bytes)
        # One request after another: how much there is time for. New blocks are slower to write than old ones.
        one = memory[:block_bytes]
        start_s, written_bytes = time.monotonic(), 0
        while written_bytes < length_bytes and (not written_bytes or time.monotonic() < start_s + _FIRST_PASS_S):
            handle.write(file, one, written_bytes).wait()
            written_bytes += block_bytes
        write_s = _timed_pass(handle, file, memory, "write", block_bytes, written_bytes)
        read_s = _timed_pass(handle, file, memory, "read", block_bytes, written_bytes)
    return DriveSpeed(written_bytes / write_s, written_bytes / read_s)


def _timed_pass(
    handle: AsyncIOHandle, file: File, memory: torch.Tensor, operation: str, block_bytes: int, length_bytes: int
) -> float:
    """Seconds to move the first `length_bytes` of the file, with as much in flight as `memory` holds."""
    start = handle.write if operation == "write" else handle.read
    in_flight: deque[Transfer] = deque()
    start_s = time.perf_counter()
    try:
        for offset in range(0, length_bytes, block_bytes):
            start_in_memory = offset % len(memory)
            if len(in_flight) == len(memory) // block_bytes:
                in_flight.popleft().wait()
            in_flight.append(start(file, memory[start_in_memory : start_in_memory + block_bytes], offset))
        while in_flight:
            in_flight.popleft().wait()
    finally:
        end_all(in_flight)  # One failed: the others are nobody's any more.
    if not file.direct:
        file.sync()
    stop_s = time.perf_counter()
    if not file.direct:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return stop_s - start_s
