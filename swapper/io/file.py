"""Open files."""

from __future__ import annotations

import os
from typing import NamedTuple

from swapper.io import _native

__all__ = ["File", "FileStatus", "exchange", "keep_open"]


def keep_open(path: str | os.PathLike[str]) -> None:
    """Have the files at `path` and beneath, of those that were opened `by_name`, stay open until they are closed.

    To be called before another file or directory takes that name, or it is removed: whoever reads them goes on.

    Raises:
        SwapIOError: one cannot be opened, as when there are no descriptors left. Nothing has changed.
    """
    _native.keep_open(os.fsencode(os.path.realpath(path)))


def exchange(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> None:
    """Let two names, of files or directories, change places in one step: no other process finds one of them missing.

    It survives a loss of power once the directories that hold the names are synced.

    Args:
        first: both exist, on one file system.

    Raises:
        SwapIOError: EINVAL or ENOSYS where the file system or the kernel cannot do it.
    """
    _native.exchange(os.fsencode(first), os.fsencode(second))


class FileStatus(NamedTuple):
    """Of an open file.

    Attributes:
        st_dev, st_ino: which file it is.
        st_nlink: how many names it has.
        st_size: its length in bytes.
        st_mtime_ns: when it was changed.
    """

    st_dev: int
    st_ino: int
    st_nlink: int
    st_size: int
    st_mtime_ns: int


class File:
    """An open file, from `AsyncIOHandle.open`. Closed by `close`, as a context manager, or when it is collected.

    A transfer keeps what it needs of its file, so closing never disturbs one in flight. The methods block, release the
    GIL and raise `SwapIOError`; after `close` they raise `ValueError`. One that was opened `by_name` has no descriptors
    while it is not used and others are, and gets them again when it is.

    Attributes:
        path: as given.
        alignment_bytes: transfers whose offset and length are multiples of this go direct in whole; 1 where the file is
            not direct. Never less than a page. Unaligned ones are right too, only slower.
        memory_alignment_bytes: tensors whose address is a multiple of this are used in place, others are copied in
            blocks on the way.
    """

    __slots__ = (
        "__weakref__",
        "_direct",
        "_direct_reason",
        "_native",
        "alignment_bytes",
        "memory_alignment_bytes",
        "path",
        "registration",
    )

    def __init__(self, path: str, native: _native.File) -> None:
        self.path = path
        self._direct, self._direct_reason = native.direct, native.direct_reason
        self.alignment_bytes = native.alignment_bytes
        self.memory_alignment_bytes = native.memory_alignment_bytes
        self._native: _native.File | None = native
        self.registration: _native.RegisteredFile | str | None = None  # With cuFile, or why not: see `gds`.

    def __repr__(self) -> str:
        return f"File({self.path!r}, direct={self.direct}{', closed' if self.closed else ''})"

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._native is None

    @property
    def direct(self) -> bool:
        """True if transfers bypass the page cache (O_DIRECT), all but their unaligned head and tail.

        Turns False when the file system has refused a direct transfer, which then went through the page cache.
        """
        self._look()
        return self._direct

    @property
    def direct_reason(self) -> str:
        """The reason why `direct` is False; "" where it is True."""
        self._look()
        return self._direct_reason

    @property
    def wrote_buffered(self) -> bool:
        """True if something was written through the page cache, so that `check_written` may find that it is lost."""
        return self.native().wrote_buffered

    def _look(self) -> None:
        native = self._native
        if native is not None:
            self._direct, self._direct_reason = native.direct, native.direct_reason

    def native(self) -> _native.File:
        """The file of the native core, for a transfer."""
        if self._native is None:
            raise ValueError(f"the file is closed: {self.path}")
        return self._native

    def fileno(self) -> int:
        """The descriptor without O_DIRECT. Valid until `close`: the file stays open from now on."""
        return self.native().fileno()

    def descriptor(self) -> _native.OpenDescriptor:
        """As a context manager, give the descriptor without O_DIRECT, which is valid within it."""
        return self.native().descriptor()

    def status(self) -> FileStatus:
        """Return what the system says of the file now. A file that is closed is not opened for it."""
        return FileStatus(*self.native().status())

    def leave_name(self) -> None:
        """Let transfers in flight go on without the file's name, which is about to be removed."""
        self.native().leave_name()

    def size_bytes(self) -> int:
        """The file's length now."""
        return self.native().size_bytes()

    def preallocate(self, length_bytes: int) -> bool:
        """Reserve space for `length_bytes`, so that later writes are fast and cannot find the drive full.

        The file becomes that long if it is shorter; what was not written reads as zeros.

        Returns:
            False where the file system cannot do it: nothing was changed.
        """
        return self.native().preallocate(length_bytes)

    def truncate(self, length_bytes: int) -> None:
        """Make the file exactly that long. No transfer beyond it may be in flight."""
        self.native().truncate(length_bytes)

    def check_written(self) -> None:
        """Raise if the kernel could not write what earlier writes left in the page cache, and has dropped it.

        Only where transfers do not bypass the page cache can that be: a write is then done before the drive has it.
        Forces nothing to be written. Each failure is raised once.
        """
        self.native().check_written()

    def sync(self) -> None:
        """Return once all completed writes survive a loss of power (fdatasync). A failure is not recoverable."""
        self.native().sync()

    def close(self) -> None:
        """Give the descriptors back, once no transfer needs them. Idempotent."""
        self._look()
        self._native = self.registration = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
