"""A checkpoint on disk: a directory of safetensors files, written beside its name and put there in one step.

    index.json                     what is inside; written last. See `Index`.
    model-00000.safetensors ...    parameter records, with the names of the model's state dict
    model-memory.safetensors       parameters and buffers that live in memory
    model.safetensors.index.json   which file has which of them, as Hugging Face writes it
    optimizer-0-00000.safetensors  records of the first optimizer's state
    optimizer-0-memory.safetensors its state that lives in memory
    values.safetensors             small tensors: of the state, and of what the user added

[Note: whole or not there] Everything is written and synced in a sibling directory `.NAME.tmp-ID`, which is then renamed
to NAME, or exchanged with it where it exists. So whoever opens NAME finds a whole checkpoint, whatever was killed when.
The sibling is locked (flock) while somebody writes it: one that is not is left over, and removed by the next save or
load beside it. After an exchange it is the old checkpoint that has that name, and goes the same way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swapper.checkpoint.directories import (
    MARK,
    check_replaceable,
    descriptors_of,
    locked,
    remove_leftovers,
    remove_tree,
    sync_path,
    unlock,
)
from swapper.checkpoint.index import FORMAT, INDEX, SavedFile, crc32c_of, with_checksum
from swapper.errors import SwapIOError, system_errors
from swapper.files.whole_file import OutputFile
from swapper.finalizers import finalizer
from swapper.io.checksums import join_checksums
from swapper.io.handle import AsyncIOHandle, exchange
from swapper.progress import progress_bar
from swapper.storage.layout import Entry, plan_whole_tensors
from swapper.storage.record_files import Pinned
from swapper.storage.store import RecordKey, TensorStore, all_at_once
from swapper.tensors.dtypes import NAMES

__all__ = ["VALUES", "NewCheckpoint"]

log = logging.getLogger(__name__)

VALUES = "values.safetensors"
_SMALL_BYTES = 1 << 20
"""A file of less is written by plain means: an engine and its buffers take longer to make."""
PIECE_BYTES = 8 << 20


class NewCheckpoint:
    """A checkpoint that is being written. Either `finish` or `discard` ends it.

    Args:
        directory: that it is going to be. Directories above it are made.
        over_files: a file or link of that name may be replaced.

    Raises:
        SwapError: there is something by that name that is no checkpoint, or has files besides one.
        SwapIOError: nothing can be written there.
    """

    def __init__(self, directory: str | os.PathLike[str], *, over_files: bool = False) -> None:
        with system_errors("find", Path(directory)):
            self.directory = Path(os.path.abspath(directory))
        self._over_files = over_files
        self.files: dict[str, SavedFile] = {}
        self._records: dict[TensorStore, dict[RecordKey, tuple[str, int, int]]] = {}
        self._later: list[Callable[[], None]] = []
        self._syncs: list[Callable[[], None]] = []
        self._trees: list[Path] = []
        self._stack = contextlib.ExitStack()
        self._locks = descriptors_of(self._stack)
        self._stack.callback(unlock, self._locks)
        self._stack.callback(_remove_trees, self._trees)
        # Ctrl-C may strike when it was made and its maker does not have it yet.
        finalizer(self, _close_unattended, self._stack, os.getpid())
        check_replaceable(self.directory, over_files=over_files)
        parent = self.directory.parent
        with system_errors("create", parent):
            parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        try:
            self._make(parent)
        except BaseException:
            self.discard()
            raise

    def _make(self, parent: Path) -> None:
        while True:
            self.path = parent / f".{self.directory.name}.tmp-{secrets.token_hex(6)}"
            self._trees.append(self.path)
            with system_errors("create", self.path):
                self.path.mkdir()
                if not locked(self.path, self._locks):
                    continue  # Who removes leftovers was between the two lines above.
                (self.path / MARK).touch()
            return

    def later(self, action: Callable[[], None], release: Callable[[], None]) -> None:
        """Have `action` done by `finish`, in the background; `release` is called after it, and if it will not come."""
        self._stack.callback(release)
        self._later.append(action)

    @property
    def has_more_to_do(self) -> bool:
        """Whether `finish` has bytes to move."""
        return bool(self._later)

    def note(self, name: str, length_bytes: int, crc32c: int) -> None:
        """A file was put here, or will be by what was given to `later`."""
        assert name not in self.files, name
        self.files[name] = SavedFile(length_bytes=length_bytes, crc32c=crc32c)

    def write_small(self, name: str, data: bytes) -> None:
        """Write a file that is not large."""
        self._write(name, data)
        self.note(name, len(data), crc32c_of(data))

    def _write(self, name: str, data: bytes) -> None:
        path = self.path / name
        with system_errors("write", path):
            path.write_bytes(data)
        self._syncs.append(partial(sync_path, path))

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Write a safetensors file. Holds one buffer pool and pieces of a tensor at a time.

        Args:
            name: of the file.
            tensors: by name, on any device. Complex numbers become pairs, dtypes that the format lacks bytes.

        Returns:
            The CRC-32C of each tensor's bytes.
        """
        layout = plan_whole_tensors([Entry(key, *_as_stored(tensor)) for key, tensor in tensors.items()])
        header = layout.header(0)
        length_bytes = layout.exact_bytes()
        crcs = {}
        if length_bytes < _SMALL_BYTES:
            whole = bytearray(header)
            for key, tensor in tensors.items():
                start = len(whole)
                for piece in _pieces(tensor):
                    whole += piece.cpu().numpy().data
                crcs[key] = crc32c_of(whole[start:])
            self.write_small(name, bytes(whole))
            return crcs
        cuda = any(tensor.is_cuda for tensor in tensors.values())
        with (
            OutputFile(self.path / name, length_bytes=length_bytes, cuda=cuda, summed=True) as output,
            progress_bar("saving", length_bytes) as done,
        ):
            output.append(header)
            for key, tensor in tensors.items():
                parts = []
                for piece in _pieces(tensor):
                    parts.append((output.append(piece), piece.numel()))
                    done(piece.numel())
                crcs[key] = join_checksums(parts)
            output.commit()
        self.note(name, length_bytes, output.checksum)
        return crcs

    def add_records(self, store: TensorStore, records: Mapping[RecordKey, tuple[str, int, int]]) -> None:
        """Have the files of records here when `publish_records` is called.

        Args:
            store: where the records are; no transfer of them is in flight.
            records: for each the name of its file here, its length in bytes, and its CRC-32C.
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
            self._publish_records_of(store, records)

    def _publish_records_of(self, store: TensorStore, records: Mapping[RecordKey, tuple[str, int, int]]) -> None:
        paths = {key: (self.path / name, length_bytes) for key, (name, length_bytes, _) in records.items()}
        linked = store.publish_all(paths, synced=False)
        if len(linked) < len(records):
            _say_once(
                f"records on {store.directories[0].parent} cannot be linked to {self.directory.parent}: they are "
                "copied in the background instead; a checkpoint on the same drive would cost no copy"
            )
        for key, (name, length_bytes, crc32c) in records.items():
            if key in linked:
                self._syncs.append(partial(store.sync, key, self.path / name))
            else:
                pinned = store.pin(key)
                self.later(partial(self._copy, pinned, name, length_bytes, crc32c), pinned.close)
            self.note(name, length_bytes, crc32c)

    def _copy(self, pinned: Pinned, name: str, length_bytes: int, crc32c: int) -> None:
        with (
            AsyncIOHandle() as handle,
            OutputFile(self.path / name, length_bytes=length_bytes, summed=True) as output,
        ):
            for part in pinned.parts:
                with handle.open(f"/proc/self/fd/{part.file.fileno()}") as file:
                    output.append_file(handle, file, 0, min(part.length_bytes, length_bytes - output.tell()))
            if output.checksum != crc32c:
                raise SwapIOError(errno.EIO, "read", self.path / name, detail="a record is not as it was written")
            output.commit()

    def write_record(self, name: str, data: torch.Tensor) -> None:
        """Write and sync the bytes of a record that is in memory.

        Args:
            data: uint8, 1-D, on the CPU.
        """
        with OutputFile(self.path / name, length_bytes=data.numel(), summed=True) as output:
            output.append(data)
            output.commit()
        self.note(name, data.numel(), output.checksum)

    def finish(self, index: Mapping[str, Any], check: Callable[[Path], None] = lambda _: None) -> Path | None:
        """Do what was left for later, and let the checkpoint appear under its name.

        Args:
            index: the fields of `Index` but `crc32c`, `format`, `version` and `files`.
            check: raises if what is in this directory, which nobody sees yet, could not be loaded.

        Returns:
            Where that is which had the name before, if there was any; it is the caller's to remove.

        Raises:
            SwapIOError: the drive failed or the directory is gone. What was there under the name is whole.
        """
        try:
            for action in self._later:
                action()
            files = {name: file.model_dump() for name, file in self.files.items()}
            whole = {"format": FORMAT, "version": 1, **index, "files": files}
            self._write(INDEX, with_checksum(json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()))
            check(self.path)
            return self._publish()
        finally:
            self.discard()

    def _publish(self) -> Path | None:
        with system_errors("publish", self.directory):
            (self.path / MARK).unlink()
        # All at once: one commit of the file system's journal then serves many.
        all_at_once([*self._syncs, partial(sync_path, self.path)])
        with system_errors("publish", self.directory):
            check_replaceable(self.directory, over_files=self._over_files)
            replaces = os.path.lexists(self.directory)
            change = exchange if replaces else os.rename
            change(self.path, self.directory)
            try:
                sync_path(self.directory.parent)
            except BaseException:
                # Nobody knows which of the two a loss of power would leave: it is to be the one that was there.
                (exchange if replaces else os.rename)(self.directory, self.path)
                raise
        self._trees.clear()
        return self.path if replaces else None

    def discard(self) -> None:
        """Leave nothing behind, but what was published. Idempotent."""
        self._later.clear()
        self._syncs.clear()
        self._stack.close()


def _close_unattended(stack: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:
        stack.close()


def _remove_trees(paths: list[Path]) -> None:
    for path in paths:
        remove_tree(path)


def _as_stored(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape that a safetensors file has for `tensor`."""
    shape = tuple(tensor.shape)
    if tensor.dtype not in NAMES:
        return "U8", (*shape, tensor.dtype.itemsize)
    return NAMES[tensor.dtype], (*shape, 2) if tensor.dtype.is_complex else shape


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of `tensor` in the order of its indices, in 1-D pieces."""
    tensor = tensor.detach()
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        tensor = tensor.view(-1)  # Cut anywhere.
    rows = max(1, PIECE_BYTES * len(tensor) // tensor.nbytes) if tensor.dim() else 1
    for start in range(0, len(tensor), rows) if tensor.dim() else [0]:
        part = tensor[start : start + rows] if tensor.dim() else tensor
        yield part.contiguous().view(-1).view(torch.uint8)


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
