"""Records on disk: one file each, in the directory of the run. This module is the only owner of their names."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from swapper.errors import SwapError, SwapIOError
from swapper.handle import AsyncIOHandle, File, Transfer
from swapper.layout import PAGE_BYTES, format_bytes, round_up
from swapper.runs import (
    NvmePathError,
    check_nvme_path,
    make_run_directory,
    remove_run_directory,
    remove_stale_runs,
)

if TYPE_CHECKING:
    from swapper.buffers import Lease

__all__ = ["RecordKey", "TensorStore"]

log = logging.getLogger(__name__)


class RecordKey(NamedTuple):
    """Names a record: whose it is (a number in this run), of which kind, and which one."""

    owner: int
    kind: str
    number: int

    @property
    def file_name(self) -> str:
        """The record's file, in the run directory."""
        return f"{self.owner:03d}-{self.kind}-{self.number:06d}.safetensors"


@dataclass(slots=True)
class _Record:
    file: File
    capacity_bytes: int
    stored_bytes: int = 0


class TensorStore:
    """The records of one process, on one drive.

    Args:
        nvme_path: an existing directory on the drive.
        run: names the run; the same for all ranks.
        rank: this process's rank.
        handle: does the transfers. Must outlive the store.

    Raises:
        NvmePathError: the path is missing, no directory, or not writable.
        ConfigError: the path is in memory (tmpfs).
    """

    def __init__(self, nvme_path: Path, run: str, rank: int, handle: AsyncIOHandle) -> None:
        nvme_path = Path(os.path.abspath(nvme_path))  # The program may change its directory.
        check_nvme_path(nvme_path)
        self.handle = handle
        self._pid = os.getpid()
        remove_stale_runs(nvme_path)
        self.directory, lock = make_run_directory(nvme_path, run, rank)
        self._records: dict[RecordKey, _Record] = {}
        self._lock = [lock]
        try:
            self._finalizer = weakref.finalize(self, _close, self.directory, self._lock, self._records, self._pid)
        except BaseException:  # Ctrl-C.
            _close(self.directory, self._lock, self._records, self._pid)
            raise

    def free_bytes(self) -> int:
        """Bytes that this user may still write to the drive.

        Raises:
            SwapIOError: the run directory is gone.
        """
        try:
            status = os.statvfs(self.directory)
        except OSError as error:
            raise SwapIOError(error.errno or errno.EIO, "look for free space in", self.directory) from error
        return status.f_bavail * status.f_frsize

    def plan(self, sizes_bytes: dict[RecordKey, int]) -> None:
        """Create a preallocated file for each record.

        Args:
            sizes_bytes: the longest each record can be; rounded up to 4096.

        Raises:
            NvmePathError: the drive has too little free space; the message shows the sum. Nothing was created.
            SwapIOError: a file could not be created. Those created before it were removed again.
        """
        sizes = {key: round_up(size, PAGE_BYTES) for key, size in sizes_bytes.items()}
        needed, free = sum(sizes.values()), self.free_bytes()
        if needed > free:
            raise NvmePathError(
                errno.ENOSPC,
                "preallocate",
                self.directory.parent,
                f"{len(sizes)} records need {format_bytes(needed)}, {format_bytes(free)} are free",
            )
        made: list[RecordKey] = []
        try:
            for key, size in sizes.items():
                assert key not in self._records, key
                file = self.handle.open(self.directory / key.file_name, "rw", create=True)
                self._records[key] = _Record(file, size)
                made.append(key)
                file.preallocate(size)
        except BaseException:
            for key in made:
                self.forget(key)
            raise

    def stored_bytes(self, key: RecordKey) -> int:
        """Length of the record as last written; 0 before the first write.

        Raises:
            KeyError: `key` was not planned.
        """
        return self._records[key].stored_bytes

    def read(self, key: RecordKey, lease: Lease) -> Transfer:
        """Start reading the record into the start of `lease`. Returns at once.

        Raises:
            KeyError: `key` was not planned.
            ValueError: the lease is shorter than the record.
            SwapIOError: from `wait()`, if the device fails or the file was cut short.
        """
        record = self._records[key]
        if record.stored_bytes > lease.length_bytes:
            raise ValueError(f"a record of {record.stored_bytes} bytes does not fit a lease of {lease.length_bytes}")
        return self.handle.read(record.file, lease.tensor[: record.stored_bytes], 0)

    def write(self, key: RecordKey, lease: Lease, length_bytes: int) -> Transfer:
        """Start writing the first `length_bytes` of `lease` as the stored copy of `key`. Returns at once.

        The previous stored copy is undefined until the transfer completes.

        Args:
            key: a planned record.
            lease: stays leased until the transfer completes.
            length_bytes: a multiple of 4096, at most the record's planned length.

        Raises:
            KeyError: `key` was not planned.
            ValueError: `length_bytes` is larger than the record or the lease.
            SwapIOError: from `wait()`, if the device fails. Short writes are completed, not raised.
        """
        record = self._records[key]
        if not 0 < length_bytes <= min(record.capacity_bytes, lease.length_bytes) or length_bytes % PAGE_BYTES:
            raise ValueError(f"{length_bytes} bytes do not fit the record of {record.capacity_bytes} bytes")
        transfer = self.handle.write(record.file, lease.tensor[:length_bytes], 0)
        record.stored_bytes = length_bytes
        return transfer

    def discard(self, key: RecordKey) -> None:
        """Forget what is stored, keep the file for the next write. No transfer of it may be in flight."""
        if key in self._records:
            self._records[key].stored_bytes = 0

    def forget(self, key: RecordKey) -> None:
        """Delete the record and its file, if planned. No write of it may be in flight.

        Raises:
            SwapError: in a forked child: the file is the parent's.
        """
        if os.getpid() != self._pid:
            raise SwapError("this store was made before a fork: its files belong to the parent")
        record = self._records.pop(key, None)
        if record is None:
            return
        record.file.close()
        try:
            (self.directory / key.file_name).unlink(missing_ok=True)
        except OSError as error:
            # As when the drive went read-only. Others are still to be forgotten; `close` tries this one again.
            log.warning("could not remove %s: %s", record.file.path, error)

    def scratch(self, length_bytes: int) -> mmap.mmap:
        """A mapped file of `length_bytes` that has no name and goes when the last view of it dies.

        Its pages are the page cache's, so holding it costs disk and not memory.

        Args:
            length_bytes: at least 1.

        Raises:
            NvmePathError: the drive has too little free space for it, or the run directory is gone.
        """
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                # Without this, a full drive would be a SIGBUS at the first touch of the mapping, not an error here.
                os.posix_fallocate(file.fileno(), 0, length_bytes)
                return mmap.mmap(file.fileno(), length_bytes)
        except OSError as error:
            raise NvmePathError(
                error.errno or errno.EIO,
                "preallocate",
                self.directory,
                f"a scratch file of {format_bytes(length_bytes)} is needed here",
            ) from error

    def close(self) -> None:
        """Remove the run directory and give the lock back. No transfer may be in flight. Idempotent."""
        if self._finalizer.alive:
            _close(self.directory, self._lock, self._records, self._pid)
            self._finalizer.detach()  # Only now: after Ctrl-C in the line above it is still there to try again.


def _close(directory: Path, lock: list[int], records: dict[RecordKey, _Record], pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child: the files are its parent's.
    for record in records.values():
        try:
            record.file.close()
        except SwapError:
            log.exception("closing %s", record.file.path)
    records.clear()
    remove_run_directory(directory, lock)
