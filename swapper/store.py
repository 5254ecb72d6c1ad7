"""Records on disk: files in the directories of the run. This module is the only owner of their names."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from swapper.errors import SwapError, SwapIOError
from swapper.handle import AsyncIOHandle, Checksums, File, Transfer
from swapper.layout import PAGE_BYTES, Share, format_bytes, round_up, share_out
from swapper.runs import (
    FileSystem,
    NvmePathError,
    check_nvme_paths,
    file_systems,
    make_run_directory,
    remove_run_directory,
    remove_stale_runs,
)
from swapper.speed import measure_speeds
from swapper.transfers import AnyTransfer, start_all

if TYPE_CHECKING:
    from swapper.buffers import Lease

__all__ = ["RecordKey", "TensorStore"]

log = logging.getLogger(__name__)

STRIPE_BYTES = 1 << 20
"""The least that a drive gets of a record, so that its bandwidth counts and not its latency."""

_CHECKED_BYTES = 64 << 10


class RecordKey(NamedTuple):
    """Names a record: whose it is (a number in this run), of which kind, and which one."""

    owner: int
    kind: str
    number: int

    @property
    def file_name(self) -> str:
        """The name of the record's files, in the run directories."""
        return f"{self.owner:03d}-{self.kind}-{self.number:06d}.safetensors"


@dataclass(slots=True)
class _Drive:
    directory: Path
    lock: list[int]
    handle: AsyncIOHandle
    bps: int = 1
    held_bytes: int = 0
    """Of planned records."""


@dataclass(slots=True)
class _Part:
    """What of a record is on one drive: a file, from its start."""

    share: Share
    file: File
    checksums: Checksums | None
    reserved: bool = True
    """Its space on the drive is there already."""
    lost: SwapIOError | None = None
    """The kernel could not write what it had taken, which it says once."""

    def check_written(self) -> None:
        """Raise if what was written was lost on its way from the page cache to the drive.

        What bypasses the page cache is on the drive when its transfer is over. What does not may still be lost, and
        reading it would then give zeros or old bytes, as if nothing had happened.
        """
        if self.lost is None and (not self.file.direct or self.file.alignment_bytes > PAGE_BYTES):
            try:
                self.file.check_written()
            except SwapIOError as error:
                self.lost = error
        if self.lost is not None:
            number = self.lost.errno
            assert number is not None
            raise SwapIOError(number, self.lost.operation, self.lost.path, detail=self.lost.detail)

    def unreserved_bytes(self) -> int:
        """What it will still take of the drive's free space."""
        if self.reserved:
            return 0
        return max(0, self.share.length_bytes - os.fstat(self.file.fileno()).st_blocks * 512)


@dataclass(slots=True)
class _Record:
    parts: list[_Part]
    capacity_bytes: int
    stored_bytes: int = 0
    torn: bool = False
    """A write was cut off before all parts of it were started: what the files hold was never one record."""


class TensorStore:
    """The records of one process, on one drive or spread over several.

    On each drive the run has a directory of its own, and a record has one file in each directory that holds a part of
    it, all with the same name. The parts are in proportion to the drives' speed, which is measured here if there are
    several: see `layout.share_out`.

    Args:
        nvme_paths: an existing directory on each drive. Their order has no meaning.
        run: names the run; the same for all ranks.
        rank: this process's rank.
        handles: one for each path does its transfers, so that no drive waits for another. Must outlive the store.
        verify: keep a checksum of every block that is written, in memory, and check what is read against it.

    Raises:
        NvmePathError: a path is missing, no directory, or not writable; or its drive failed to show its speed.
        ConfigError: a path is in memory (tmpfs), or two are not two places.
    """

    def __init__(
        self,
        nvme_paths: Sequence[Path],
        run: str,
        rank: int,
        handles: Sequence[AsyncIOHandle],
        *,
        verify: bool = False,
    ) -> None:
        nvme_paths = [Path(os.path.abspath(path)) for path in nvme_paths]  # The program may change its directory.
        check_nvme_paths(nvme_paths)
        self._verify = verify
        self._pid = os.getpid()
        # Below a block a share is not even a request.
        self._unit_bytes = max(STRIPE_BYTES, *(handle.block_bytes for handle in handles))
        self._drives: list[_Drive] = []
        self._records: dict[RecordKey, _Record] = {}
        self._finalizer = weakref.finalize(self, _close, self._drives, self._records, self._pid)
        try:
            for path, handle in zip(nvme_paths, handles, strict=True):
                remove_stale_runs(path)
                directory, lock = make_run_directory(path, run, rank)
                self._drives.append(_Drive(directory, [lock], handle))
            if len(self._drives) > 1:
                for drive, speed in zip(self._drives, measure_speeds(self.directories, handles), strict=True):
                    drive.bps = speed.bps
        except BaseException:  # Ctrl-C too.
            self.close()
            raise

    @property
    def directories(self) -> list[Path]:
        """The run's directory on each drive."""
        return [drive.directory for drive in self._drives]

    def file_systems(self) -> list[FileSystem]:
        """What the drives have room for now; `members` are places in `directories`.

        Raises:
            SwapIOError: a run directory is gone.
        """
        return file_systems(self.directories)

    def plan(self, sizes_bytes: dict[RecordKey, int]) -> None:
        """Create preallocated files for each record.

        Args:
            sizes_bytes: the longest each record can be; rounded up to 4096.

        Raises:
            NvmePathError: a drive has too little free space; the message shows the sums. Nothing was created.
            SwapIOError: a file could not be created. Those created before it were removed again.
        """
        sizes = {key: round_up(size, PAGE_BYTES) for key, size in sizes_bytes.items()}
        speeds = [drive.bps for drive in self._drives]
        held = [drive.held_bytes for drive in self._drives]
        plans: dict[RecordKey, tuple[Share, ...]] = {}
        for key, size in sizes.items():
            plans[key] = share_out(size, held, speeds, self._unit_bytes)
            for share in plans[key]:
                held[share.drive] += share.length_bytes
        needed = [after - drive.held_bytes for after, drive in zip(held, self._drives, strict=True)]
        for part in (part for record in self._records.values() for part in record.parts):
            needed[part.share.drive] += part.unreserved_bytes()
        self._check_free_space(len(sizes), needed)
        made: list[RecordKey] = []
        try:
            for key, shares in plans.items():
                assert key not in self._records, key
                record = self._records[key] = _Record([], sizes[key])
                made.append(key)
                for share in shares:
                    self._add_part(key, record, share)
        except BaseException:
            for key in made:
                self.forget(key)
            raise

    def _check_free_space(self, records: int, needed_bytes: Sequence[int]) -> None:
        sums = []
        short: int | None = None
        for file_system in self.file_systems():
            needed = sum(needed_bytes[i] for i in file_system.members)
            names = " and ".join(str(self._drives[i].directory.parent) for i in file_system.members)
            sums.append(f"{format_bytes(needed)}, {format_bytes(file_system.free_bytes)} are free in {names}")
            if needed > file_system.free_bytes and short is None:
                short = file_system.members[0]
        if short is not None:
            path = self._drives[short].directory.parent
            raise NvmePathError(errno.ENOSPC, "preallocate", path, f"{records} records need {'; '.join(sums)}")

    def _add_part(self, key: RecordKey, record: _Record, share: Share) -> None:
        drive = self._drives[share.drive]
        file = drive.handle.open(drive.directory / key.file_name, "rw", create=True)
        checksums = None
        if self._verify:
            # The smaller a block, the closer a failure is named; 8 bytes of memory each.
            checksums = Checksums(share.length_bytes, math.gcd(drive.handle.block_bytes, _CHECKED_BYTES))
        part = _Part(share, file, checksums)
        record.parts.append(part)
        drive.held_bytes += share.length_bytes
        part.reserved = file.preallocate(share.length_bytes)

    def stored_bytes(self, key: RecordKey) -> int:
        """Length of the record as last written; 0 before the first write.

        Raises:
            KeyError: `key` was not planned.
        """
        return self._records[key].stored_bytes

    def read(self, key: RecordKey, lease: Lease) -> AnyTransfer:
        """Start reading the record into the start of `lease`. Returns at once.

        Raises:
            KeyError: `key` was not planned.
            ValueError: the lease is shorter than the record.
            SwapIOError: from `wait()`, if a drive fails or a file was cut short, or, with `verify`, is not as it was
                written. At once, if an exception had struck while its last write was being started.
        """
        record = self._records[key]
        if record.stored_bytes > lease.length_bytes:
            raise ValueError(f"a record of {record.stored_bytes} bytes does not fit a lease of {lease.length_bytes}")
        if record.torn:
            detail = "its last write was interrupted before all of it was started"
            raise SwapIOError(errno.EIO, "read", record.parts[0].file.path, 0, record.stored_bytes, detail)
        self.check_written(key)
        return start_all(self._moves("read", record, lease, record.stored_bytes))

    def write(self, key: RecordKey, lease: Lease, length_bytes: int) -> AnyTransfer:
        """Start writing the first `length_bytes` of `lease` as the stored copy of `key`. Returns at once.

        The previous stored copy is undefined until the transfer completes.

        Args:
            key: a planned record.
            lease: stays leased until the transfer completes.
            length_bytes: a multiple of 4096, at most the record's planned length.

        Raises:
            KeyError: `key` was not planned.
            ValueError: `length_bytes` is larger than the record or the lease.
            SwapIOError: from `wait()`, if a drive fails. Short writes are completed, not raised.
        """
        record = self._records[key]
        if not 0 < length_bytes <= min(record.capacity_bytes, lease.length_bytes) or length_bytes % PAGE_BYTES:
            raise ValueError(f"{length_bytes} bytes do not fit the record of {record.capacity_bytes} bytes")
        for part in record.parts:
            with contextlib.suppress(SwapIOError):  # What was lost is not wanted any more.
                part.check_written()
            part.lost = None
        record.torn = True
        transfer = start_all(self._moves("write", record, lease, length_bytes))
        record.stored_bytes = length_bytes
        record.torn = False
        return transfer

    def check_written(self, key: RecordKey | None = None) -> None:
        """Raise if what was written was lost after its transfer was over, as it can be where there is no O_DIRECT.

        Args:
            key: a planned record; None means all.

        Raises:
            SwapIOError: the same at every call, until the record is written again or discarded.
        """
        for record in self._records.values() if key is None else (self._records[key],):
            for part in record.parts if record.stored_bytes else ():
                part.check_written()

    def _moves(
        self, operation: str, record: _Record, lease: Lease, length_bytes: int
    ) -> Iterator[Callable[[], Transfer]]:
        """What starts the transfer of each part of the record's first `length_bytes`."""
        for share, file, checksums in ((part.share, part.file, part.checksums) for part in record.parts):
            if share.start_bytes < length_bytes or not share.start_bytes:
                handle = self._drives[share.drive].handle
                start = handle.read if operation == "read" else handle.write
                tensor = lease.tensor[share.start_bytes : min(share.stop_bytes, length_bytes)]
                yield functools.partial(start, file, tensor, 0, checksums=checksums)

    def discard(self, key: RecordKey) -> None:
        """Forget what is stored, keep the files for the next write. No transfer of it may be in flight."""
        if key in self._records:
            self._records[key].stored_bytes = 0
            self._records[key].torn = False
            for part in self._records[key].parts:
                part.lost = None

    def forget(self, key: RecordKey) -> None:
        """Delete the record and its files, if planned. No write of it may be in flight.

        Raises:
            SwapError: in a forked child: the files are the parent's.
        """
        if os.getpid() != self._pid:
            raise SwapError("this store was made before a fork: its files belong to the parent")
        record = self._records.pop(key, None)
        if record is None:
            return
        for share, file in ((part.share, part.file) for part in record.parts):
            file.close()
            drive = self._drives[share.drive]
            drive.held_bytes -= share.length_bytes
            try:
                (drive.directory / key.file_name).unlink(missing_ok=True)
            except OSError as error:
                # As when the drive went read-only. Others are still to be forgotten; `close` tries this one again.
                log.warning("could not remove %s: %s", file.path, error)

    def scratch(self, length_bytes: int) -> mmap.mmap:
        """A mapped file of `length_bytes` that has no name and goes when the last view of it dies.

        Its pages are the page cache's, so holding it costs disk and not memory. It is on the drive with the most room.

        Args:
            length_bytes: at least 1.

        Raises:
            NvmePathError: no drive has enough free space for it, or a run directory is gone.
        """
        with self.scratch_file(length_bytes) as file:
            return mmap.mmap(file.fileno(), length_bytes)

    @contextlib.contextmanager
    def scratch_file(self, length_bytes: int) -> Iterator[IO[bytes]]:
        """A file of `length_bytes` on the drive with the most room, which loses its name when this is left.

        Raises:
            NvmePathError: as for `scratch`.
        """
        directory = self._drives[0].directory
        with contextlib.ExitStack() as stack:
            try:
                roomiest = max(self.file_systems(), key=lambda file_system: file_system.free_bytes)
                directory = self._drives[roomiest.members[0]].directory
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=directory))
                # Without this, a full drive would be a SIGBUS at the first touch of the mapping, not an error here.
                os.posix_fallocate(file.fileno(), 0, length_bytes)
            except OSError as error:
                raise NvmePathError(
                    error.errno or errno.EIO,
                    "preallocate",
                    directory,
                    f"a scratch file of {format_bytes(length_bytes)} is needed here",
                ) from error
            yield file

    def close(self) -> None:
        """Remove the run directories and give their locks back. No transfer may be in flight. Idempotent."""
        if self._finalizer.alive:
            _close(self._drives, self._records, self._pid)
            self._finalizer.detach()  # Only now: after Ctrl-C in the line above it is still there to try again.


def _close(drives: list[_Drive], records: dict[RecordKey, _Record], pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child: the files are its parent's.
    for file in (part.file for record in records.values() for part in record.parts):
        try:
            file.close()
        except SwapError:
            log.exception("closing %s", file.path)
    records.clear()
    for drive in drives:
        remove_run_directory(drive.directory, drive.lock)
