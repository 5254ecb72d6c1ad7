"""A checkpoint that is being written: a directory of safetensors files.

index.json                     what is inside; written last. See `Index`.
model-00000.safetensors ...    parameter records, with the names of the model's state dict
model-memory.safetensors       parameters and buffers that live in memory
model.safetensors.index.json   which file has which of them, as Hugging Face writes it
optimizer-0-00000.safetensors  records of the first optimizer's state
optimizer-0-memory.safetensors its state that lives in memory
values.safetensors             small tensors: of the state, and of what the user added

Of a checkpoint that ranks save together each has files of its own ("model-r1-memory.safetensors") in that directory.
With annexes the files of "model" and "optimizer" are there, and what is for tools of others is left out. See [Note:
annexes] of `annexes`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from swapper.checkpoint.annexes import NewAnnex, OldAnnex, Outcome, remove_annexes, report_left
from swapper.checkpoint.directories import check_replaceable, remove_leftovers
from swapper.checkpoint.index import INDEX, Index, SavedFile, crc32c_of, values_file
from swapper.checkpoint.values import encode
from swapper.errors import SwapError, SwapIOError, path_given, system_errors
from swapper.files.output_file import OutputFile
from swapper.io.checksums import checksum, join_checksums
from swapper.io.handle import AsyncIOHandle
from swapper.io.host_memory import bytes_of
from swapper.process.warnings import warn_once
from swapper.progress import progress_bar
from swapper.storage.atomic import NewDirectory, all_at_once, sync_path
from swapper.storage.layout import Entry, plan_whole_tensors
from swapper.storage.record_files import Pinned
from swapper.storage.runs import run_directory_of
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.dtypes import NAMES

__all__ = ["NewCheckpoint", "RecordFile", "checksum_of"]

log = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 1 << 20
"""A file of less is written by plain means: an engine and its buffers take longer to make."""


class RecordFile(NamedTuple):
    """The file that a record is going to be: its name, its exact length, and the CRC-32C of its bytes."""

    name: str
    length_bytes: int
    crc32c: int


class NewCheckpoint:
    """A checkpoint that is being written. Either `finish` or `discard` ends it.

    Args:
        directory: that it is going to be. Directories above it are made.
        over_files: a file or link of that name may be replaced.
        rank: of this process, if several write one checkpoint.
        path: where rank 0 has it until it is finished, if this is another rank, which only adds files.
        annex: the directory below which this process has an annex of it; None if it has none.

    Attributes:
        path: the directory in which it is written.
        files: that this process has written, or is going to.
        annex: what is being written there, if there is one.
        is_apart: rank 0 is on another host; False unless the maker says so.
        outcome: what became of it, known after `publish`.
        old_annexes: annexes of what killed saves have left beside the checkpoint, which was removed now; those that
            other ranks are to remove.

    Raises:
        SwapError: there is something by that name that is no checkpoint, or has files besides one.
        SwapIOError: nothing can be written there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        over_files: bool = False,
        rank: int | None = None,
        path: Path | None = None,
        annex: str | os.PathLike[str] | None = None,
    ) -> None:
        name = path_given("directory", directory)
        with system_errors("find", name):
            self.directory = Path(os.path.abspath(name))
        if (run := run_directory_of(self.directory)) is not None:
            raise SwapError(f"{directory} is in {run}, which is deleted with its run; name another directory")
        self._check_replaceable = partial(check_replaceable, self.directory, over_files=over_files)
        self.files: dict[str, SavedFile] = {}
        self._values: dict[str, torch.Tensor] = {}
        self._records: dict[TensorStore, dict[RecordKey, RecordFile]] = {}
        self._copies: list[Callable[[], None]] = []
        self._syncs: list[Callable[[], None]] = []
        self._pins = contextlib.ExitStack()
        self._tag = "" if rank is None else f"r{rank}"
        self._number = rank or 0
        self.outcome = Outcome.UNKNOWN
        self.is_apart = False
        self._new: NewDirectory | None = None
        self.annex: NewAnnex | None = None
        self.old_annexes: list[OldAnnex] = []
        if path is not None:
            self.path = path
            self.annex = None if annex is None else NewAnnex(annex, self.directory)
            return
        self._check_replaceable()
        parent = self.directory.parent
        with system_errors("create", parent):
            parent.mkdir(parents=True, exist_ok=True)
        # Before the annexes are swept: what a leftover names needs no doubt.
        remove_leftovers(parent, self.old_annexes)
        self.old_annexes = remove_annexes(self.old_annexes)
        if rank is None:
            report_left(self.old_annexes)
        self.annex = None if annex is None else NewAnnex(annex, self.directory)
        try:
            self._new = NewDirectory(self.directory)
        except BaseException:
            self.discard()
            raise
        self.path = self._new.path
        self._new.at_close(self._pins.close)

    @property
    def bulk_path(self) -> Path:
        """The directory in which records, and other tensors of model and state, are written."""
        return self.path if self.annex is None else self.annex.path

    def name_of(self, kind: str, which: str) -> str:
        """The name of a file, such as "model-memory.safetensors"."""
        return f"{kind}-{self._tag}{'-' if self._tag else ''}{which}.safetensors"

    @property
    def has_copies_to_make(self) -> bool:
        """True if `finish` copies records, which takes long."""
        return bool(self._copies)

    def encode(self, value: object, what: str, prefix: str) -> Any:
        """The value that the index has for `value`; tensors within it are written by `write_values`.

        Args:
            value: see `values.encode`.
            what: what an error calls it.
            prefix: begins the names of its tensors.

        Raises:
            SwapError: something in it cannot be saved.
        """
        return encode(value, what, self._values, self._tagged(prefix))

    def _tagged(self, prefix: str) -> str:
        return f"{self._tag}/{prefix}" if self._tag else prefix

    def summed(self, encoded: Any, prefix: str) -> bytes:
        """A digest of a value that was encoded, the same on each rank that gave the same."""
        start = self._tagged(prefix)
        text = json.dumps(encoded, allow_nan=False).replace(f'"{start}', f'"{prefix}')
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for name, tensor in self._values.items():
            if name.startswith(start):
                digest.update(repr((name.removeprefix(start), tensor.dtype, tensor.shape)).encode())
                for piece in pieces_of(tensor):
                    digest.update(checksum(piece.cpu()).to_bytes(4, "little"))
        return digest.digest()

    def drop_values(self, prefix: str) -> None:
        """Do not write the tensors of a value that was encoded."""
        for name in [name for name in self._values if name.startswith(self._tagged(prefix))]:
            del self._values[name]

    def write_values(self) -> None:
        """Write the tensors of all values that were encoded."""
        if self._values or not self._tag:
            self._write_tensors(self.path / values_file(self._tagged("")), self._values, None)

    def write_small(self, name: str, data: bytes) -> None:
        """Write a file that is not large beside the index."""
        self._write(self.path / name, data)
        self._add_file(RecordFile(name, len(data), crc32c_of(data)), None)

    def _write(self, path: Path, data: bytes) -> None:
        with system_errors("write", path):
            path.write_bytes(data)
        self._syncs.append(partial(sync_path, path))

    def _add_file(self, file: RecordFile, annex: int | None) -> None:
        assert file.name not in self.files, file.name
        self.files[file.name] = SavedFile(length_bytes=file.length_bytes, crc32c=file.crc32c, annex=annex)

    @property
    def _bulk(self) -> int | None:
        """The number of the annex that has what is large."""
        return None if self.annex is None else self._number

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Write a safetensors file of model or state. Holds one buffer pool and pieces of a tensor at a time.

        Args:
            name: of the file.
            tensors: by name, on any device. Complex numbers become pairs, dtypes that the format lacks bytes.

        Returns:
            The CRC-32C of each tensor's bytes.
        """
        return self._write_tensors(self.bulk_path / name, tensors, self._bulk)

    def _write_tensors(self, path: Path, tensors: Mapping[str, torch.Tensor], annex: int | None) -> dict[str, int]:
        layout = plan_whole_tensors([Entry(key, *_as_stored(tensor)) for key, tensor in tensors.items()])
        header = layout.header(0)
        length_bytes = layout.exact_bytes()
        crcs = {}
        if length_bytes < _SMALL_BYTES:
            whole = bytearray(header)
            for key, tensor in tensors.items():
                start = len(whole)
                for piece in pieces_of(tensor):
                    whole += bytes_of(piece.cpu())
                crcs[key] = crc32c_of(whole[start:])
            self._write(path, bytes(whole))
            self._add_file(RecordFile(path.name, len(whole), crc32c_of(whole)), annex)
            return crcs
        with (
            OutputFile(path, length_bytes=length_bytes, summed=True) as output,
            progress_bar("saving", length_bytes) as done,
        ):
            output.append(header)
            for key, tensor in tensors.items():
                parts = []
                for piece in pieces_of(tensor):
                    parts.append((output.append(piece), piece.numel()))
                    done(piece.numel())
                crcs[key] = join_checksums(parts)
            output.commit()
        self._add_file(RecordFile(path.name, length_bytes, output.checksum), annex)
        return crcs

    def write_record(self, name: str, data: torch.Tensor) -> None:
        """Write and sync the bytes of a record that is in memory.

        Args:
            data: uint8, 1-D, on the CPU.
        """
        with OutputFile(self.bulk_path / name, length_bytes=data.numel(), summed=True) as output:
            output.append(data)
            output.commit()
        self._add_file(RecordFile(name, data.numel(), output.checksum), self._bulk)

    def add_records(self, store: TensorStore, records: Mapping[RecordKey, RecordFile]) -> None:
        """Have the files of records here when `publish_records` is called.

        Args:
            store: where the records are; no transfer of them is in flight.
            records: the file that each is going to be.
        """
        self._records.setdefault(store, {}).update(records)

    def publish_records(self) -> None:
        """Put the files of all records here: by second names, or copied later, as they are now, where that cannot be.

        Raises:
            SwapIOError: the drive failed, or has no room for the files that training goes on in.
        """
        for store, records in self._records.items():  # All of a store at once: their sum must have room.
            store.check_room_for_copies(records)
        for store, records in self._records.items():
            paths = {key: (self.bulk_path / file.name, file.length_bytes) for key, file in records.items()}
            linked = store.publish_all(paths, synced=False)
            if len(linked) < len(records):
                warn_once(
                    log,
                    f"records on {store.directories[0].parent} cannot be linked to {self.bulk_path.parent}: they are "
                    "copied in the background instead; a checkpoint on the same drive would cost no copy",
                )
            for key, file in records.items():
                if key in linked:
                    self._syncs.append(partial(store.sync, key, self.bulk_path / file.name))
                else:
                    # Pinned now, copied by `finish`: training goes on in another file in between.
                    pinned = store.pin(key)
                    self._pins.callback(pinned.close)
                    self._copies.append(partial(self._copy, pinned, file))
                self._add_file(file, self._bulk)
        if self._copies:  # `finish` may be in the background, when the records are in other files, or gone.
            self._sync()

    def _copy(self, pinned: Pinned, new: RecordFile) -> None:
        path = self.bulk_path / new.name
        with AsyncIOHandle() as handle, OutputFile(path, length_bytes=new.length_bytes, summed=True) as output:
            for part in pinned.parts:
                with part.file.descriptor() as opened, handle.open(f"/proc/self/fd/{opened}") as file:
                    output.append_file(handle, file, min(part.length_bytes, new.length_bytes - output.tell()))
            if output.checksum != new.crc32c:
                raise SwapIOError(errno.EIO, "read", path, detail="a record is not as it was written")
            output.commit()

    def finish(self, index: Index, check: Callable[[Path], None] = lambda _: None) -> Path | None:
        """Copy what could not be linked, and let the checkpoint appear under its name.

        Args:
            index: its `files` are filled in here, and its `annexes` if this process has one.
            check: raises if what is in this directory, which nobody sees yet, could not be loaded.

        Returns:
            The name of the directory or file that had the name, if there was any; it is the caller's to remove.

        Raises:
            SwapIOError: the drive failed or the directory is gone. What was there under the name is whole.
        """
        try:
            self.seal(index, check)
            if self.annex is not None:
                self.annex.complete()
            return self.publish()
        finally:
            self.discard()

    def seal(self, index: Index, check: Callable[[Path], None] = lambda _: None) -> None:
        """Write the index: the first half of `finish`."""
        self._make_copies()
        index.files |= self.files
        if self.annex is not None and not index.annexes:
            index.annexes = [self.annex.saved]
        self._write(self.path / INDEX, index.text())
        check(self.path)
        if self.annex is not None:  # Its files are synced before it is complete.
            self._sync()

    def publish(self) -> Path | None:
        """Let the checkpoint appear under its name: the second half of `finish`, once all annexes are complete."""
        outcome = Outcome.UNKNOWN
        try:
            assert self._new is not None
            replaced = self._new.publish(self._check_replaceable, self._syncs)
            outcome = Outcome.PUBLISHED
            return replaced
        except BaseException:
            # What is in its place has no name, and is not going to have one.
            if self._new is not None and self._new.is_in_place():
                outcome = Outcome.WITHDRAWN
            raise
        finally:
            self.outcome = outcome
            if self.annex is not None:
                self.annex.conclude(outcome)

    def complete(self) -> None:
        """Copy what could not be linked, and sync the files that this process has written.

        Raises:
            SwapIOError: the drive failed or the directory is gone.
        """
        self._make_copies()
        self._sync()

    def _make_copies(self) -> None:
        for copy in self._copies:
            copy()
        self._copies.clear()

    def _sync(self) -> None:
        all_at_once(self._syncs)
        self._syncs.clear()

    def discard(self) -> None:
        """Leave nothing behind, but what was published. Idempotent."""
        self._copies.clear()
        self._syncs.clear()
        self._pins.close()
        if self.annex is not None:
            self.annex.close()
        if self._new is not None:
            self._new.close()


def _as_stored(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape that a safetensors file has for `tensor`."""
    shape = tuple(tensor.shape)
    if tensor.dtype not in NAMES:
        return "U8", (*shape, tensor.dtype.itemsize)
    return NAMES[tensor.dtype], (*shape, 2) if tensor.dtype.is_complex else shape


def checksum_of(tensor: torch.Tensor) -> int:
    """The CRC-32C of the bytes of `tensor` in the order of its indices."""
    return join_checksums((checksum(piece.cpu()), piece.numel()) for piece in pieces_of(tensor))


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of `tensor` in the order of its indices, in 1-D pieces."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)  # Cut anywhere.
    rows = max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes) if tensor.dim() else 1
    for start in range(0, len(tensor), rows) if tensor.dim() else [0]:
        part = tensor[start : start + rows] if tensor.dim() else tensor
        part = part.contiguous()  # As is one element with any stride, of which there is no view of bytes.
        yield part.as_strided((part.numel(),), (1,)).view(torch.uint8)
