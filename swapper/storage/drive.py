"""A drive of a store: the run's directory there, its engine, and the files in it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from swapper.errors import SwapIOError
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle, Checksums
from swapper.sizes import PAGE_BYTES, round_up
from swapper.storage.layout import Share
from swapper.storage.record_files import ShareFile
from swapper.storage.recycled_files import RecycledFiles

__all__ = ["Drive"]


@dataclass(slots=True)
class Drive:
    """One of the drives of a store.

    Attributes:
        directory: the run's.
        lock: the descriptor that holds the lock of the directory; empty once it is given back.
        handle: does the transfers.
        direct: does those of memory of a device; None where there are none.
        recycled: files that new ones are made of.
        held_bytes: of planned records.
        bps: speed in bytes per second, or 1 of a drive that is alone.
    """

    directory: Path
    lock: list[int]
    handle: AsyncIOHandle
    direct: GDSHandle | None = None
    recycled: RecycledFiles = field(init=False)
    held_bytes: int = 0
    bps: int = 1
    _holding: threading.RLock = field(default_factory=threading.RLock)  # Re-entrant: a finalizer forgets records.

    def __post_init__(self) -> None:
        self.recycled = RecycledFiles(self.directory)

    def hold(self, change_bytes: int) -> None:
        """Change `held_bytes` by so much. From any thread: several plan and forget records at once."""
        with self._holding:
            self.held_bytes += change_bytes

    def new_share_file(self, name: str, share: Share, checksums: Checksums | None, wanted_bytes: int) -> ShareFile:
        """Make a file for a share of a record: of a recycled one if there is one.

        Args:
            name: must not exist.
            share: its length is reserved.
            checksums: of the file's blocks.
            wanted_bytes: how much of the file is to be written first.

        Raises:
            SwapIOError: it was not made.
        """
        path, length_bytes = self.directory / name, share.length_bytes
        self.recycled.take(wanted_bytes, path)
        try:
            file = self.handle.open(path, "rw", create=True, by_name=True)
            try:
                with file.descriptor() as descriptor:
                    status = os.fstat(descriptor)
                if status.st_size > length_bytes:
                    file.truncate(length_bytes)
                written_bytes = min(round_up(status.st_size, PAGE_BYTES), status.st_blocks * 512)
                try:
                    reserved = file.preallocate(length_bytes)
                except SwapIOError as error:
                    if error.errno != errno.ENOSPC or not self.recycled.total_bytes:
                        raise
                    self.recycled.drop()  # Those that are left may be too small, and have the space that is missing.
                    reserved = file.preallocate(length_bytes)
                return ShareFile(share, file, checksums, reserved, written_bytes=written_bytes)
            except BaseException:
                file.close()
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
