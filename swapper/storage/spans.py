"""`SpanStore`: records that are spans of files of somebody else, which are read and never written.

[Note: spans] The tensors of a record that follow one another in a file are one span: the pages that hold them, so that
they can be read past the page cache. A tensor begins at any byte there, and must lie at a multiple of 64 in the buffer.
So a span has tensors of one residue mod 64 only, and its first page comes to that much before such a multiple:

    file      | page 7 ....[t1, at 7 * 4096 + 296][t2].. | page 8 ...        residue 296 % 64 = 40
    buffer  24 bytes | page 7 .... [t1, at 24 + 296 = 5 * 64][t2]            shift (-40) % 64 = 24

Nothing is copied for it where the drive takes such addresses (`File.memory_alignment_bytes`, 4 with most NVMe drives).
Where it does not, the pages are read to the multiple of 4096 before, and moved by the shift when they have arrived.
(The engine could read into blocks of its own and copy those: of a drive's 2.8 GB/s that left 0.9.)

[Note: assembled tensors] A tensor may be made of several of a file, one after another in memory, as experts that a
checkpoint has one by one and a model has fused. Its pieces are spans in that order, with what is around them in their
pages. When they have arrived each is moved down to the end of the one before: in this order no move overwrites what is
still to be moved, and no copy needs room of its own.

[Note: files of others] A file is the one that was opened first. While it is open it stays that when another takes its
name; of many files some are closed while they are not used, and opened again by their names, and another file is then
an error (`by_name` of `AsyncIOHandle.open`). One that is
changed in place shows it by its length or its time of change (mtime), which are compared, on the open file, before and
after every read. It takes two microseconds. What is not seen: a change that somebody hides by setting the time back,
and one within a tick of the clock of the file system (4 ms at most) before the file was opened.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from swapper.errors import ConfigError, SwapIOError, system_errors
from swapper.io.file import FileStatus
from swapper.io.handle import AsyncIOHandle, File, Transfer
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import RecordTransfer, start_all

if TYPE_CHECKING:
    import torch

    from swapper.storage.buffers import Lease

__all__ = ["Extent", "RecordStore", "SourceFile", "Span", "SpanPlan", "SpanStore", "plan_spans"]

_GAP_BYTES = 2 * PAGE_BYTES
"""Read through between two tensors: two spans would cost as much for the pages that are cut."""


class Extent(NamedTuple):
    """The bytes of a tensor in a file."""

    path: Path
    start_bytes: int
    stop_bytes: int


class Move(NamedTuple):
    """Bytes that are moved within a buffer when they have arrived."""

    from_bytes: int
    to_bytes: int
    length_bytes: int


class Span(NamedTuple):
    """Pages of a file that are read at once.

    Attributes:
        path: of the file.
        offset_bytes, length_bytes: of the pages in the file; multiples of 4096. The file may end before.
        at_bytes: where they begin in the buffer.
        move: of a piece of a tensor, to its place. See [Note: assembled tensors].
        arrange: called with the buffer when all spans of the record are in place, before `convert`: each changes some
            of it in place, all at once or, after an exception, not at all. Once each, however often others fail; the
            last first.
        convert: called with the buffer when all spans of the record are in place.
    """

    path: Path
    offset_bytes: int
    length_bytes: int
    at_bytes: int
    move: Move | None = None
    arrange: tuple[Callable[[torch.Tensor], None], ...] = ()
    convert: Callable[[torch.Tensor], None] | None = None


class SpanPlan(NamedTuple):
    """The spans of a record.

    Attributes:
        spans: all of them, in the order in which what they have is moved.
        offsets_bytes: where each tensor comes to in the buffer.
        length_bytes: of a buffer for them; a multiple of 4096.
    """

    spans: tuple[Span, ...]
    offsets_bytes: tuple[int, ...]
    length_bytes: int


def plan_spans(tensors: Sequence[Sequence[Extent]], residues_bytes: Sequence[int] | None = None) -> SpanPlan:
    """Lay out a buffer for tensors of files. See [Note: spans].

    Args:
        tensors: in any order; the extents of each in the order of its memory, often one. None overlaps another.
        residues_bytes: what each tensor's offset is beyond a multiple of 64; None: nothing.
    """
    residues = residues_bytes or [0] * len(tensors)
    spans: list[Span] = []
    offsets = [0] * len(tensors)
    whole = [i for i, extents in enumerate(tensors) if len(extents) == 1]
    cursor = stop = shift = 0
    for i in sorted(whole, key=lambda i: tensors[i][0]):
        extent = tensors[i][0]
        wanted = (residues[i] - extent.start_bytes) % ALIGNMENT_BYTES
        joins = (
            bool(spans)
            and spans[-1].path == extent.path
            and shift == wanted
            and extent.start_bytes - stop <= _GAP_BYTES
        )
        if not joins:
            shift = wanted
            spans.append(_span_at(extent, cursor + shift))
        stop = extent.stop_bytes
        span = spans[-1]
        spans[-1] = span = span._replace(length_bytes=round_up(stop, PAGE_BYTES) - span.offset_bytes)
        offsets[i] = span.at_bytes + extent.start_bytes - span.offset_bytes
        cursor = round_up(span.at_bytes + span.length_bytes, PAGE_BYTES)
    for i in sorted(set(range(len(tensors))).difference(whole)):
        pieces = _joined(tensors[i])
        span = _span_at(pieces[0], cursor + (residues[i] - pieces[0].start_bytes) % ALIGNMENT_BYTES)
        place = offsets[i] = span.at_bytes + pieces[0].start_bytes - span.offset_bytes
        for piece in pieces:
            span = _span_at(piece, cursor if piece is not pieces[0] else span.at_bytes)
            length = piece.stop_bytes - piece.start_bytes
            found = span.at_bytes + piece.start_bytes - span.offset_bytes
            spans.append(span._replace(move=Move(found, place, length)) if found != place else span)
            place += length
            cursor = round_up(span.at_bytes + span.length_bytes, PAGE_BYTES)
    return SpanPlan(tuple(spans), tuple(offsets), cursor)


def _span_at(extent: Extent, at_bytes: int) -> Span:
    """The pages of `extent`, with the first of them at `at_bytes` in the buffer."""
    first = extent.start_bytes // PAGE_BYTES * PAGE_BYTES
    return Span(extent.path, first, round_up(extent.stop_bytes, PAGE_BYTES) - first, at_bytes)


def _joined(extents: Sequence[Extent]) -> list[Extent]:
    """`extents` with those that follow one another in a file made one."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].path == extent.path and joined[-1].stop_bytes == extent.start_bytes:
            joined[-1] = joined[-1]._replace(stop_bytes=extent.stop_bytes)
        elif extent.stop_bytes > extent.start_bytes or not joined:
            joined.append(extent)
    return joined


class SourceFile:
    """A file of somebody else, open for reading. See [Note: files of others].

    Args:
        path: of the file; links are followed.
        handle: reads it. Must outlive this.

    Attributes:
        length_bytes: of the file when it was opened.

    Raises:
        SwapIOError: it cannot be opened.
    """

    def __init__(self, path: Path, handle: AsyncIOHandle) -> None:
        self.handle = handle
        self._file: File = handle.open(path, by_name=True)
        self._memory_alignment_bytes = self._file.memory_alignment_bytes
        status = self._file.status()
        self._identity = _identity(status)
        self.length_bytes = status.st_size

    @property
    def path(self) -> str:
        """As given."""
        return self._file.path

    def check(self, *, named: bool = False) -> None:
        """Raise if the file was changed since it was opened.

        Args:
            named: also if another file has its name now.

        Raises:
            SwapIOError: it was, or is gone (ESTALE).
        """
        with system_errors("read", self.path):
            same = _identity(self._file.status()) == self._identity
            same = same and (not named or _identity(os.stat(self.path)) == self._identity)
        if not same:
            detail = "it was changed since swapper.offload opened it; make the model anew from files that nobody writes"
            raise SwapIOError(errno.ESTALE, "read", self.path, detail=detail)

    def bytes_of(self, span: Span) -> int:
        """The bytes of `span` that the file has."""
        return min(span.length_bytes, self.length_bytes - span.offset_bytes)

    def reading(self, lease: Lease, span: Span) -> Callable[[], Transfer]:
        """Give what starts the transfer of `span`, which is in this file, into `lease`. Then `place` it."""
        at = span.at_bytes - self._moves_by(span)
        tensor = lease.tensor[at : at + self.bytes_of(span)]
        return functools.partial(self.handle.read, self._file, tensor, span.offset_bytes)

    def place(self, lease: Lease, span: Span) -> None:
        """Move `span`, which has arrived, to where it is to be in `lease`. To be called once."""
        if moves_by := self._moves_by(span):
            address = lease.tensor.data_ptr() + span.at_bytes
            ctypes.memmove(address, address - moves_by, self.bytes_of(span))

    def _moves_by(self, span: Span) -> int:
        shift = span.at_bytes % PAGE_BYTES
        return shift if shift % self._memory_alignment_bytes else 0

    def close(self) -> None:
        """Close it, once no transfer needs it. Idempotent."""
        self._file.close()


def _identity(status: os.stat_result | FileStatus) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class SpanStore:
    """Records that are spans of files, until they are changed: then they are in another store. See `TensorStore`.

    Args:
        spans: of each record, from `plan_spans`.
        files: by path, all that `spans` name. Closed by who made them, when no transfer is in flight.
        changes: has what is changed, in the layout of the buffer, and scratch files.
    """

    def __init__(
        self, spans: Mapping[RecordKey, Sequence[Span]], files: Mapping[Path, SourceFile], changes: TensorStore
    ) -> None:
        self._spans = dict(spans)
        self._files = files
        self._changes = changes
        self._sizes_bytes: dict[RecordKey, int] = {}
        self._planned: set[RecordKey] = set()  # in `changes`
        self._changed: set[RecordKey] = set()  # those of them that were written
        self._unplaced: set[RecordKey] = set()  # that were read from the files, and perhaps have not arrived
        # Of records that have arrived: what is still to be called, the last first.
        self._unarranged: dict[RecordKey, list[Callable[[torch.Tensor], None]]] = {}
        self._unconverted: set[RecordKey] = set()  # that have arrived, and what is made of them is still to be made

    def plan(self, sizes_bytes: dict[RecordKey, int]) -> None:
        """Take note of what the records would need if they were changed. Creates nothing."""
        self._sizes_bytes.update(sizes_bytes)

    def stored_bytes(self, key: RecordKey) -> int:
        """Return the bytes that a read of the record moves; 0 once it was discarded."""
        if key in self._changed:
            return self._changes.stored_bytes(key)
        return sum(self._files[span.path].bytes_of(span) for span in self._spans.get(key, ()))

    def read(self, key: RecordKey, lease: Lease) -> RecordTransfer:
        """Start reading the record into `lease`. Returns at once.

        Raises:
            SwapIOError: a file was changed since it was opened. From `wait()`, if a drive fails.
        """
        if key in self._changed:
            self._forget_read(key)
            return self._changes.read(key, lease)
        self._check_files(key)
        transfer = start_all(self._files[span.path].reading(lease, span) for span in self._spans[key])
        self._forget_read(key)
        self._unplaced.add(key)
        return transfer

    def finish_read(self, key: RecordKey, lease: Lease) -> None:
        """Have the record where it is to be in `lease`, after its last read is over. Idempotent.

        Raises:
            SwapIOError: a file was changed since it was opened.
        """
        self.check_written(key)
        with interrupts_deferred():
            if key in self._unplaced:
                self._unplaced.discard(key)
                for span in self._spans[key]:
                    self._files[span.path].place(lease, span)
                    if span.move is not None:
                        address = lease.tensor.data_ptr()
                        to, found = address + span.move.to_bytes, address + span.move.from_bytes
                        ctypes.memmove(to, found, span.move.length_bytes)
                    if span.arrange:
                        self._unarranged.setdefault(key, []).extend(span.arrange)
                    if span.convert is not None:
                        self._unconverted.add(key)
            while left := self._unarranged.get(key):
                left[-1](lease.tensor)
                left.pop()  # After an exception those before are not called again.
        if key in self._unconverted:  # Begun again after an exception.
            for span in self._spans[key]:
                if span.convert is not None:
                    span.convert(lease.tensor)
            self._unconverted.discard(key)

    def _forget_read(self, key: RecordKey) -> None:
        self._unplaced.discard(key)
        self._unarranged.pop(key, None)
        self._unconverted.discard(key)

    def write(self, key: RecordKey, lease: Lease, length_bytes: int) -> RecordTransfer:
        """As `TensorStore.write`: from now on the record is there, and not in the files that it came from.

        Raises:
            NvmePathError: the run directory has no room for it.
        """
        if key not in self._planned:
            self._changes.plan({key: self._sizes_bytes[key]})
            self._planned.add(key)
        self._forget_read(key)  # One that was dropped before it had arrived: nothing of it is to be moved any more.
        transfer = self._changes.write(key, lease, length_bytes)
        self._changed.add(key)
        return transfer

    def check_written(self, key: RecordKey | None = None) -> None:
        """Raise if a file of the record, or any with None, was changed since it was opened."""
        if key in self._changed:
            self._changes.check_written(key)
            return
        if key is not None:
            self._check_files(key)
            return
        for file in self._files.values():
            file.check()
        for each in self._changed:
            self._changes.check_written(each)

    def _check_files(self, key: RecordKey) -> None:
        for path in dict.fromkeys(span.path for span in self._spans[key]):
            self._files[path].check()

    def discard(self, key: RecordKey) -> None:
        """Forget what is stored of the record, and where it is in the files."""
        self._changed.discard(key)
        self._forget_read(key)
        self._spans.pop(key, None)
        self._changes.discard(key)

    def forget(self, key: RecordKey) -> None:
        """As `discard`, and delete what the run has of it. The files of others stay as they are."""
        self.discard(key)
        self._planned.discard(key)
        self._changes.forget(key)

    def scratch_file(self, length_bytes: int) -> AbstractContextManager[IO[bytes]]:
        """As `TensorStore.scratch_file`.

        Raises:
            ConfigError: the config names no drive, as nothing was to be written.
        """
        if not self._changes.directories:
            raise ConfigError(
                "nvme_path: null is not enough for the address of a parameter that no module uses now, or for a copy "
                "of the model, which need files; give a directory on the drive, or do it within swapper.gathered"
            )
        return self._changes.scratch_file(length_bytes)


RecordStore = TensorStore | SpanStore
"""Keeps the records of a cache: in files of the run, or in files of others."""
