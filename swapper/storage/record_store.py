"""`RecordStore`: what the cache of records needs of a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Protocol

from swapper.storage.store import RecordKey
from swapper.storage.transfers import RecordTransfer

if TYPE_CHECKING:
    from swapper.storage.buffers import Lease

__all__ = ["RecordStore"]


class RecordStore(Protocol):
    """Keeps records: a `TensorStore`, in files of the run, or a `SpanStore`, in files of others.

    See `TensorStore` for the contracts.
    """

    def plan(self, sizes_bytes: dict[RecordKey, int]) -> None:
        """Have room for records, of at most so many bytes each."""

    def stored_bytes(self, key: RecordKey) -> int:
        """Return the bytes that a read of the record moves; 0 if nothing is stored of it."""

    def read(self, key: RecordKey, lease: Lease) -> RecordTransfer:
        """Start reading the record into `lease`. Returns at once."""

    def finish_read(self, key: RecordKey, lease: Lease) -> None:
        """Make ready what a read, which is over, has brought; raise if it is not what was stored."""

    def write(self, key: RecordKey, lease: Lease, length_bytes: int) -> RecordTransfer:
        """Start writing the first `length_bytes` of `lease` as the record. Returns at once."""

    def check_written(self, key: RecordKey | None = None) -> None:
        """Raise if the record, or any with None, is not what was stored."""

    def discard(self, key: RecordKey) -> None:
        """Forget what is stored of the record."""

    def forget(self, key: RecordKey) -> None:
        """Delete the record."""

    def scratch_file(self, length_bytes: int) -> AbstractContextManager[IO[bytes]]:
        """A file on a drive that loses its name when this is left."""
