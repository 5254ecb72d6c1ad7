"""Records on disk: files in the directories of the run. This module is the only owner of their names."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from swapper.errors import SwapError, SwapIOError, renewed
from swapper.io.checksums import join_checksums
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle, Checksums, Transfer
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import PAGE_BYTES, format_bytes, round_up
from swapper.storage.atomic import all_at_once
from swapper.storage.drive import Drive
from swapper.storage.layout import Share, share_out
from swapper.storage.mounts import NvmePathError, check_nvme_paths, file_systems
from swapper.storage.record_files import Pinned, RecordFiles, ShareFile, link, remove, umask, used
from swapper.storage.runs import make_run_directory, remove_run_directory, remove_stale_runs
from swapper.storage.speed import measure_speeds
from swapper.storage.transfers import RecordTransfer, start_all

if TYPE_CHECKING:
    from swapper.storage.buffers import Lease

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


class TensorStore:
    """The records of one process, on one drive or spread over several.

    On each drive the run has a directory of its own, and a record has one file in each directory that holds a part of
    it, all with the same name. The parts are in proportion to the drives' speed, which is measured here if there are
    several: see `layout.share_out`.

    Args:
        nvme_paths: an existing directory on each drive. Their order has no meaning. None: it can have no records.
        run: names the run; the same for all ranks.
        rank: this process's rank.
        handles: one for each path does its transfers, so that no drive waits for another. Must outlive the store.
        verify: keep a checksum of every block that is written, in memory, and check what is read against it.
        before_measuring: called before speeds are measured, if they are, as to wait for other ranks.

    Attributes:
        first_writes: writes some bytes of which went to places on a drive that had never been written.

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
        before_measuring: Callable[[], None] = lambda: None,
    ) -> None:
        nvme_paths = [Path(os.path.abspath(path)) for path in nvme_paths]  # The program may change its directory.
        check_nvme_paths(nvme_paths)
        self._verify, self._pid = verify, os.getpid()
        # Below a block a share is not even a request.
        self._unit_bytes = max([STRIPE_BYTES, *(handle.block_bytes for handle in handles)])
        self._drives: list[Drive] = []
        self._records: dict[RecordKey, RecordFiles] = {}
        self._unreserved: dict[RecordKey, None] = {}  # records whose files may still take free space
        self._tokens = itertools.count()
        self._counting = threading.Lock()  # Caches start writes in threads of their own.
        self.first_writes = 0
        self._pinned: WeakSet[Pinned] = WeakSet()
        self._finalizer = finalizer(self, _close, self._drives, self._records, self._pinned, self._pid)
        try:
            for path, handle in zip(nvme_paths, handles, strict=True):
                remove_stale_runs(path)
                with interrupts_deferred():
                    directory, lock = make_run_directory(path, run, rank)
                    self._drives.append(Drive(directory, [lock], handle))
            if len(self._drives) > 1:
                before_measuring()
                for drive, speed in zip(self._drives, measure_speeds(self.directories, handles), strict=True):
                    drive.bps = speed.bps
        except BaseException:  # Ctrl-C too.
            self.close()
            raise

    @property
    def directories(self) -> list[Path]:
        """The run's directory on each drive."""
        return [drive.directory for drive in self._drives]

    def use_for_devices(self, handles: Sequence[GDSHandle]) -> None:
        """Let `handles`, one for each drive, move leases of device memory. They must outlive the store."""
        for drive, handle in zip(self._drives, handles, strict=True):
            drive.direct = handle

    def plan(self, sizes_bytes: dict[RecordKey, int], *, summed: bool = False) -> None:
        """Create preallocated files for each record.

        Args:
            sizes_bytes: the longest each record can be; rounded up to 4096.
            summed: note a checksum of what is written of them, for `checksum`.

        Raises:
            NvmePathError: a drive has too little free space; the message shows the sums. Nothing was created.
            SwapIOError: a file could not be created. Those created before it were removed again.
            SwapError: in a forked child.
        """
        self._check_process()
        sizes = {key: round_up(size, PAGE_BYTES) for key, size in sizes_bytes.items()}
        speeds = [drive.bps for drive in self._drives]
        held = [drive.held_bytes for drive in self._drives]
        needed = [0] * len(held)
        plans: dict[RecordKey, tuple[Share, ...]] = {}
        for key, size in sizes.items():
            plans[key] = share_out(size, held, speeds, self._unit_bytes)
            for share in plans[key]:
                held[share.drive] += share.length_bytes
                needed[share.drive] += share.length_bytes
        for key in list(self._unreserved):
            other = self._records.get(key)  # None: another thread, or a finalizer, has forgotten it meanwhile.
            left_bytes = [(part.share.drive, part.unreserved_bytes()) for part in other.parts] if other else []
            for number, length_bytes in left_bytes:
                needed[number] += length_bytes
            if not any(length_bytes for _, length_bytes in left_bytes):
                self._unreserved.pop(key, None)
        self._check_free_space(f"{len(sizes)} records need", needed)
        made: list[RecordKey] = []
        try:
            for key, shares in plans.items():
                assert key not in self._records, key
                record = self._records[key] = RecordFiles([], sizes[key])
                made.append(key)
                for share in shares:
                    checksums = self._checksums(share) if self._verify or summed else None
                    drive = self._drives[share.drive]
                    record.parts.append(drive.new_share_file(key.file_name, share, checksums, share.length_bytes))
                    drive.hold(share.length_bytes)
                self._note_unreserved(key, record)
        except BaseException:
            for key in made:
                self.forget(key)
            raise

    def check_room_for_copies(self, keys: Iterable[RecordKey]) -> None:
        """Raise if the drives have no room for a second file of each record, as its next write may need.

        Args:
            keys: planned records, those that are about to be published or pinned.

        Raises:
            NvmePathError: the message shows the sums.
        """
        needed, count = [0] * len(self._drives), 0
        for key in keys:
            count += 1
            for part in self._records[key].parts:
                needed[part.share.drive] += part.share.length_bytes
        self._check_free_space(f"{count} records that are kept as they are need as much again:", needed)

    def _check_free_space(self, what: str, needed_bytes: Sequence[int]) -> None:
        sums = []
        short: int | None = None
        for file_system in file_systems(self.directories):
            needed = sum(needed_bytes[i] for i in file_system.members)
            names = " and ".join(str(self._drives[i].directory.parent) for i in file_system.members)
            free = file_system.free_bytes + sum(self._drives[i].recycled.total_bytes for i in file_system.members)
            sums.append(f"{format_bytes(needed)}, {format_bytes(free)} are free in {names}")
            if needed > free and short is None:
                short = file_system.members[0]
        if short is not None:
            path = self._drives[short].directory.parent
            raise NvmePathError(errno.ENOSPC, "preallocate", path, f"{what} {'; '.join(sums)}")

    def _checksums(self, share: Share) -> Checksums:
        # The smaller a block, the closer a failure is named; 8 bytes of memory each.
        largest = _CHECKED_BYTES if self._verify else STRIPE_BYTES
        return Checksums(share.length_bytes, math.gcd(self._drives[share.drive].handle.block_bytes, largest))

    def stored_bytes(self, key: RecordKey) -> int:
        """Length of the record as last written, or as it was cut when published; 0 before. KeyError if not planned."""
        return self._records[key].stored_bytes

    def read(self, key: RecordKey, lease: Lease) -> RecordTransfer:
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
        self._check_whole(record, "read")
        self.check_written(key)
        return start_all(self._moves("read", record, lease, record.stored_bytes))

    def finish_read(self, key: RecordKey, lease: Lease) -> None:
        """As `check_written`, for a read that is over."""
        self.check_written(key)

    def write(self, key: RecordKey, lease: Lease, length_bytes: int) -> RecordTransfer:
        """Start writing the first `length_bytes` of `lease` as the stored copy of `key`. Returns at once.

        The previous stored copy is undefined until the transfer completes, unless it was published or is pinned: then
        it is kept, and a fresh file is written.

        Args:
            key: a planned record.
            lease: stays leased until the transfer completes.
            length_bytes: a multiple of 4096, at most the record's planned length.

        Raises:
            KeyError: `key` was not planned.
            ValueError: `length_bytes` is larger than the record or the lease.
            SwapIOError: from `wait()`, if a drive fails. Short writes are completed, not raised. At once, if there is
                no room for a fresh file: then the stored copy is as it was.
            SwapError: in a forked child.
        """
        self._check_process()
        record = self._records[key]
        if not 0 < length_bytes <= min(record.capacity_bytes, lease.length_bytes) or length_bytes % PAGE_BYTES:
            raise ValueError(f"{length_bytes} bytes do not fit the record of {record.capacity_bytes} bytes")
        self._make_writable(key, record, length_bytes)
        for part in record.parts:
            with contextlib.suppress(SwapIOError):  # What was lost is not wanted any more.
                part.check_written()
            part.lost = None
        record.torn = True
        transfer = start_all(self._moves("write", record, lease, length_bytes))
        record.stored_bytes = length_bytes
        record.torn = False
        first = False
        for part, part_bytes in used(record):
            first |= part_bytes > part.written_bytes
            part.written_bytes = max(part.written_bytes, part_bytes)
        with self._counting:
            self.first_writes += first
        return transfer

    def _make_writable(self, key: RecordKey, record: RecordFiles, length_bytes: int) -> None:
        """Give the record fresh files for those that must stay as they are. After an exception nothing has changed."""
        fresh: dict[int, ShareFile] = {}
        try:
            for i, part in enumerate(record.parts):
                if self._must_stay(record, part):
                    share = part.share
                    name = f"{Path(key.file_name).stem}-{part.files}.safetensors"
                    wanted_bytes = max(0, min(share.stop_bytes, length_bytes) - share.start_bytes)
                    fresh[i] = self._drives[share.drive].new_share_file(name, share, part.checksums, wanted_bytes)
                    fresh[i].files = part.files + 1
        except BaseException:
            for part in fresh.values():
                remove(part.file)
            raise
        record.torn |= bool(fresh)  # Until the write has started, whatever strikes.
        for i, part in fresh.items():
            former, record.parts[i] = record.parts[i], part
            remove(former.file)
        self._note_unreserved(key, record)

    def _note_unreserved(self, key: RecordKey, record: RecordFiles) -> None:
        if not all(part.reserved for part in record.parts):
            self._unreserved[key] = None

    def _must_stay(self, record: RecordFiles, part: ShareFile) -> bool:
        """Tell if somebody else has the part's file. One that was published, and is ours again, is made as it was."""
        if part.file.closed:  # It could not be opened again.
            return True
        status = part.file.status()
        if part.pins or status.st_nlink > 1:
            return True
        if not part.published:
            return False
        try:
            named = os.stat(part.file.path)
            if (named.st_dev, named.st_ino) != (status.st_dev, status.st_ino):
                return True
        except OSError:
            return True  # The name that is left is not ours.
        torn, record.torn = record.torn, True  # If it cannot be opened again, there is nothing to read.
        unread = part.reclaim(self._drives[part.share.drive].handle)
        record.torn = torn
        if unread:
            part.make_as_before()
        return not unread

    # --- Publishing ------------------------------------------------------------------------------------------------

    def checksum(self, key: RecordKey) -> int:
        """CRC-32C of the first `stored_bytes(key)` bytes of the record. No write may be in flight.

        Reads nothing, unless it was written from a device past the host: then all of it, once.

        Raises:
            KeyError: `key` was not planned.
            ValueError: it was not planned as `summed`, without `verify`; or was written with an exception.
        """
        crcs = []
        for part, part_bytes in used(self._records[key]):
            if part.checksums is None:
                raise ValueError(f"no checksums are kept of the record {key.file_name}")
            part.sum_anew(self._drives[part.share.drive].handle, part_bytes)
            crcs.append((part.checksums.joined(part_bytes), part_bytes))
        return join_checksums(crcs)

    def publish_all(self, files: Mapping[RecordKey, tuple[Path, int]], *, synced: bool = True) -> set[RecordKey]:
        """Give records a second name, under which their content will never change, and which survives a loss of power.

        The files are cut to their exact length, and get the mode that a new file of this process has. Reading the
        records goes on; the next write of one goes to a fresh file. What was cut off a pinned record is gone for the
        pin, too. No transfer of these records may be in flight. The directories of the new names are not synced.

        Args:
            files: for each record the new name, and its exact length: at most `stored_bytes`, and in the same 4096
                bytes; as before, if nothing was written since it was published.

        Returns:
            Those for which it was possible. Of the others nothing has changed: their parts are on several drives, the
            new name is on another file system, or the file system has no second names.

        Raises:
            KeyError: a key was not planned.
            ValueError: a length is out of range.
            SwapIOError: what was written is lost, or cannot be synced, or a name is taken or cannot be made; with the
                new name as the path, unless it is about an earlier write. No new name is left.
            SwapError: in a forked child.
        """
        self._check_process()
        for key, (_, length_bytes) in files.items():
            record = self._records[key]
            fits = length_bytes > 0 and round_up(length_bytes, PAGE_BYTES) == round_up(record.stored_bytes, PAGE_BYTES)
            exact = any(part.published for part in record.parts)  # Nobody may cut it again.
            if not fits or length_bytes > record.stored_bytes or (exact and length_bytes != record.stored_bytes):
                raise ValueError(f"{length_bytes} bytes are not the length of a record of {record.stored_bytes} bytes")
            self._check_whole(record, "publish")
            self.check_written(key)
        mode = 0o666 & ~umask()
        linked: dict[RecordKey, Path] = {}
        try:
            for key, (path, length_bytes) in files.items():
                parts = list(used(self._records[key]))
                if len(parts) == 1:
                    part, _ = parts[0]
                    linked[key] = path
                    if not link(part.file, path):
                        del linked[key]
                        continue
                    part.published = True
                    self._cut(self._records[key], part, length_bytes)
                    with part.file.descriptor() as descriptor:
                        os.fchmod(descriptor, mode)
            if synced:
                # All was changed before the first is synced: one commit of the file system's journal then serves many.
                all_at_once([functools.partial(self.sync, key, path) for key, path in linked.items()])
        except BaseException as error:
            if isinstance(error, FileExistsError):
                del linked[key]
            for made in linked.values():
                with contextlib.suppress(OSError):
                    made.unlink()
            if isinstance(error, OSError) and not isinstance(error, SwapIOError):
                raise SwapIOError(error.errno or errno.EIO, "publish", path) from error
            raise
        return set(linked)

    def _cut(self, record: RecordFiles, part: ShareFile, length_bytes: int) -> None:
        if length_bytes < record.stored_bytes and part.checksums is not None:
            # The last block is a shorter one from now on. What is noted of it must not come from damaged bytes.
            start = (length_bytes - 1) // part.checksums.block_bytes * part.checksums.block_bytes
            with part.file.descriptor() as descriptor:
                block = os.pread(descriptor, record.stored_bytes - start, start)
            if len(block) < record.stored_bytes - start or part.checksums.first_difference(start, block) == start:
                detail = "what is there is not what was written"
                raise SwapIOError(errno.EBADMSG, "read", part.file.path, start, len(block), detail)
            part.checksums.record(start, block[: length_bytes - start])
        record.stored_bytes = length_bytes
        part.file.truncate(length_bytes)

    def sync(self, key: RecordKey, path: Path) -> None:
        """Have a record that was published as `path` survive a loss of power. May be called from any thread.

        Raises:
            SwapIOError: with `path`; what was written may be lost.
        """
        ((part, _),) = used(self._records[key])
        try:
            part.file.sync()
        except SwapIOError as error:
            part.lost = error  # The kernel may have dropped what it could not write, and says so only once.
            raise renewed(error, operation="sync", path=path) from error

    def pin(self, key: RecordKey) -> Pinned:
        """Keep what is stored of a record as it is, for whoever reads it later, from any thread.

        The next write of the record goes to a fresh file. No transfer of it may be in flight.

        Raises:
            KeyError: `key` was not planned.
            SwapIOError: what was written is lost, or there are no descriptors left.
            SwapError: in a forked child.
        """
        self._check_process()
        record = self._records[key]
        self._check_whole(record, "pin")
        self.check_written(key)
        token = next(self._tokens)
        with contextlib.ExitStack() as stack:
            parts = []
            for part, part_bytes in used(record):
                drive = self._drives[part.share.drive]
                parts.append(part.pin(drive.handle, drive.directory, token, part_bytes, stack))
            pinned = Pinned(tuple(parts), stack.pop_all())
        self._pinned.add(pinned)
        return pinned

    def adopt(self, path: Path) -> bool:
        """Take a published file whose checkpoint is being removed, so that fresh files need no new blocks.

        Only one that has no other name, that nobody has open, and that is on the file system of one of the drives; and
        no more bytes than the planned records have. May be called from any thread.

        Returns:
            Whether it was taken: then it has lost this name. If not, it is as it was.
        """
        if os.getpid() != self._pid or not self._finalizer.alive:
            return False
        return any(drive.recycled.adopt(path, drive.held_bytes - drive.recycled.total_bytes) for drive in self._drives)

    # ---------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _check_whole(record: RecordFiles, operation: str) -> None:
        if record.torn:
            detail = "its last write was interrupted before all of it was started"
            raise SwapIOError(errno.EIO, operation, record.parts[0].file.path, 0, record.stored_bytes, detail)

    def check_written(self, key: RecordKey | None = None) -> None:
        """Raise if what was written was lost after its transfer was over, as it can be where there is no O_DIRECT.

        Args:
            key: a planned record; None means all.

        Raises:
            SwapIOError: the same at every call, until the record is written again or discarded.
        """
        for record in list(self._records.values()) if key is None else (self._records[key],):
            for part in record.parts if record.stored_bytes else ():
                part.check_written()

    def _moves(
        self, operation: str, record: RecordFiles, lease: Lease, length_bytes: int
    ) -> Iterator[Callable[[], Transfer]]:
        """A call for each part, which starts the transfer of its share of the record's first `length_bytes`."""
        for part in record.parts:
            share, drive = part.share, self._drives[part.share.drive]
            if share.start_bytes < length_bytes or not share.start_bytes:
                handle = drive.direct if drive.direct is not None and not lease.tensor.is_cpu else drive.handle
                start = handle.read if operation == "read" else handle.write
                tensor = lease.tensor[share.start_bytes : min(share.stop_bytes, length_bytes)]
                if operation == "write":
                    part.unsummed = not (lease.tensor.is_cpu or self._verify)
                noted = self._verify or (operation == "write" and not part.unsummed)
                yield functools.partial(start, part.file, tensor, 0, checksums=part.checksums if noted else None)

    def discard(self, key: RecordKey) -> None:
        """Forget what is stored, keep the files for the next write. No transfer of it may be in flight."""
        if (record := self._records.get(key)) is not None:
            record.stored_bytes, record.torn = 0, False
            for part in record.parts:
                part.lost = None

    def forget(self, key: RecordKey) -> None:
        """Delete the record and its files, if planned. No write of it may be in flight.

        Raises:
            SwapError: in a forked child: the files are the parent's.
        """
        self._check_process()
        if (record := self._records.pop(key, None)) is None:
            return
        self._unreserved.pop(key, None)
        for part in record.parts:
            remove(part.file)
            self._drives[part.share.drive].hold(-part.share.length_bytes)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError("this store was made before a fork: its files belong to the parent")

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
                roomiest = max(file_systems(self.directories), key=lambda file_system: file_system.free_bytes)
                directory = self._drives[roomiest.members[0]].directory
                with interrupts_deferred():  # Else it may be dropped open.
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
            try:
                yield file
            finally:
                with interrupts_deferred():  # Likewise.
                    stack.close()

    def close(self) -> None:
        """Remove the run directories and give their locks back. No transfer may be in flight. Idempotent."""
        if self._finalizer.alive:
            _close(self._drives, self._records, self._pinned, self._pid)
            self._finalizer.detach()  # Only now: after Ctrl-C in the line above it is still there to try again.


def _close(drives: list[Drive], records: dict[RecordKey, RecordFiles], all_pinned: WeakSet[Pinned], pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child: the files are its parent's.
    for pinned in list(all_pinned):
        pinned.leave_names()
    for file in (part.file for record in list(records.values()) for part in record.parts):
        try:
            file.close()
        except SwapError as error:
            log.error("closing %s: %s", file.path, repr(error))
    records.clear()
    for drive in drives:
        remove_run_directory(drive.directory, drive.lock)
