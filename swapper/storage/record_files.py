"""The files of a record, their second names, and pins, which keep what is in them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from swapper.errors import SwapIOError, renewed, system_errors
from swapper.io.handle import AsyncIOHandle, Checksums, File, Transfer
from swapper.io.transfer import end_all
from swapper.process.finalizers import finalizer
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.layout import Share
from swapper.storage.recycled_files import is_unread

__all__ = ["Pinned", "PinnedShare", "RecordFiles", "ShareFile", "link", "remove", "umask", "used"]

log = logging.getLogger(__name__)

_SUMMED_BYTES = 8 << 20
"""Bytes that are read at once of a file whose checksums are wanted."""

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(slots=True)
class ShareFile:
    """The file of a record's share on one drive: the share is all of the file, from its start."""

    share: Share
    file: File
    checksums: Checksums | None
    reserved: bool = True
    """Its space on the drive is there already."""
    files: int = 1
    """Number of files so far, this one included."""
    written_bytes: int = 0
    """Of the file, from its start, that were ever written."""
    published: bool = False
    """The file was given a second name, and cut."""
    pins: set[int] = field(default_factory=set)
    """Of this file; each keeps its content as it is."""
    lost: SwapIOError | None = None
    """The kernel could not write what it had taken, which it says once."""
    unsummed: bool = False
    """It was written past the host, so that `checksums` do not hold for it: see `sum_anew`."""

    def sum_anew(self, handle: AsyncIOHandle, length_bytes: int) -> None:
        """If it is `unsummed`, note checksums of what the file has in its first `length_bytes`, which is read for that.

        Raises:
            SwapIOError: it could not be read.
        """
        if not self.unsummed:
            return
        assert self.checksums is not None
        step_bytes = round_up(_SUMMED_BYTES, self.checksums.block_bytes)
        memory = torch.empty(2, min(step_bytes, length_bytes), dtype=torch.uint8, device="cpu")
        reads: deque[Transfer] = deque()
        try:
            for start in range(0, length_bytes + step_bytes, step_bytes):
                if start < length_bytes:  # The next one, while the one before is summed.
                    reads.append(handle.read(self.file, memory[start // step_bytes % 2, : length_bytes - start], start))
                if start:
                    moved_bytes = reads[0].wait()
                    before = memory[(start // step_bytes - 1) % 2]
                    self.checksums.record(start - step_bytes, ctypes.string_at(before.data_ptr(), moved_bytes))
                    reads.popleft()
        finally:
            end_all(reads)
        self.unsummed = False

    def check_written(self) -> None:
        """Raise if what was written was lost on its way from the page cache to the drive.

        What bypasses the page cache is on the drive when its transfer is over. What does not may still be lost, and
        reading it would then give zeros or old bytes, as if nothing had happened.
        """
        if (
            self.lost is None
            and not self.file.closed
            and (not self.file.direct or self.file.alignment_bytes > PAGE_BYTES or self.file.wrote_buffered)
        ):
            try:
                self.file.check_written()
            except SwapIOError as error:
                self.lost = renewed(error)  # Without the frames that it has passed, which know who owns this.
        if self.lost is not None:
            raise renewed(self.lost)

    def reclaim(self, handle: AsyncIOHandle) -> bool:
        """Open a published file, which has only our name left, anew. Tell if nobody else has it open.

        Raises:
            SwapIOError: it cannot be opened again, and is closed.
        """
        self.file.close()
        unread = is_unread(Path(self.file.path))
        self.file = handle.open(self.file.path, "rw", create=False, by_name=True)
        return unread

    def make_as_before(self) -> None:
        """Have a published file that nobody else has be as it was before."""
        with self.file.descriptor() as descriptor:
            os.fchmod(descriptor, 0o600)
        self.reserved = self.file.preallocate(self.share.length_bytes)
        self.published = False

    def pin(
        self, handle: AsyncIOHandle, directory: Path, token: int, length_bytes: int, stack: contextlib.ExitStack
    ) -> PinnedShare:
        """Keep the file as it is until `stack` is closed.

        Args:
            directory: the run's, for a second name of the file: its own may go before.
            token: of this pin alone.

        Raises:
            SwapIOError: there are no descriptors left.
        """
        stack.callback(self.pins.discard, token)
        self.pins.add(token)
        name = directory / f"pin-{token:06d}"
        stack.callback(_unlink, name, os.getpid())  # Before it is made: Ctrl-C may strike anywhere.
        file = _reopen(handle, self.file, name)
        stack.callback(_close_unnamed, file)
        return PinnedShare(handle, file, length_bytes)

    def unreserved_bytes(self) -> int:
        """Bytes that it will still take of the drive's free space."""
        if self.reserved:
            return 0
        try:
            with self.file.descriptor() as descriptor:
                return max(0, self.share.length_bytes - os.fstat(descriptor).st_blocks * 512)
        except ValueError:  # It is closed, perhaps just now: a write in another thread goes to a fresh file.
            return 0


@dataclass(slots=True)
class RecordFiles:
    """The files of one record, one on each drive that has a share of it."""

    parts: list[ShareFile]
    capacity_bytes: int
    stored_bytes: int = 0
    torn: bool = False
    """A write was cut off before all parts of it were started: what the files hold was never one record."""


class PinnedShare(NamedTuple):
    """The share of a pinned record on one drive.

    Attributes:
        handle: of its drive.
        file: open for reading.
        length_bytes: how much of it, from its start.
    """

    handle: AsyncIOHandle
    file: File
    length_bytes: int


def _reopen(handle: AsyncIOHandle, file: File, name: Path) -> File:
    """Open a file once more, for reading, under a second name, which is its own.

    Where that cannot be, as the file has no name any more or the file system no second ones, it stays open instead.
    """
    with file.descriptor() as descriptor:
        same_file = f"/proc/self/fd/{descriptor}"
        try:
            # With a directory, or Python would take link(2), which links the symbolic link in /proc itself.
            os.link(same_file, name, src_dir_fd=descriptor, follow_symlinks=True)
        except OSError:
            return handle.open(same_file, "r")
        return handle.open(name, "r", by_name=True)


def _unlink(path: Path | str, pid: int) -> None:
    if os.getpid() != pid:
        return  # A forked child: it is the parent's.
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        # As when the drive went read-only. Others are still to be removed; `close` of the store tries this one again.
        log.warning("could not remove %s: %s", path, str(error))


def _close_unnamed(file: File) -> None:
    """Close a file that is about to lose its name."""
    if not file.closed:
        # Reads that nobody wants any more may be in flight. Without descriptors for them they fail, and say so.
        with contextlib.suppress(SwapIOError):
            file.leave_name()
    file.close()


class Pinned:
    """The content of a record when it was pinned. Outlives the record and the store, but not the handles.

    A context manager that closes it; thread-safe.

    Attributes:
        parts: in order; together they are the record.
    """

    def __init__(self, parts: tuple[PinnedShare, ...], stack: contextlib.ExitStack) -> None:
        self.parts = parts
        self._finalizer = finalizer(self, stack.close)

    @property
    def length_bytes(self) -> int:
        """Of the record."""
        return sum(part.length_bytes for part in self.parts)

    def leave_names(self) -> None:
        """Have the files stay open, as their names go. One that cannot be opened fails when it is read."""
        for part in self.parts:
            with contextlib.suppress(SwapIOError, ValueError):  # It is closed.
                part.file.fileno()

    def close(self) -> None:
        """Let go of the content: the record's file may be written again. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def used(record: RecordFiles) -> Iterator[tuple[ShareFile, int]]:
    """The parts that hold something of what is stored, each with how many bytes."""
    for part in record.parts:
        part_bytes = min(part.share.stop_bytes, record.stored_bytes) - part.share.start_bytes
        if part_bytes > 0:
            yield part, part_bytes


def remove(file: File) -> None:
    """Close a file of ours and take its name."""
    _close_unnamed(file)
    _unlink(file.path, os.getpid())


def link(file: File, path: Path) -> bool:
    """Give a file a second name. False where the file system cannot."""
    try:
        os.link(file.path, path)
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    return True


def umask() -> int:
    """Mode bits that new files of this process do not get. The system call would change them for all threads.

    Raises:
        SwapIOError: there are no descriptors left.
    """
    path = Path("/proc/self/status")
    with system_errors("read", path):
        found = re.search(r"^Umask:\s*([0-7]+)$", path.read_text(), re.MULTILINE)
    return 0o077 if found is None else int(found[1], 8)
