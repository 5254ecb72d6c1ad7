"""A checkpoint that is read: its index and every byte of its files are checked before they are used."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError

from swapper.checkpoint.annexes import AnnexPaths
from swapper.checkpoint.doubles import choose_copies, drop_doubles
from swapper.checkpoint.index import INDEX, START, Index, SavedFile, open_index, read_index, values_file, with_checksum
from swapper.errors import SwapError, SwapIOError
from swapper.files.tensor_files import StoredTensor, TensorReader, read_header
from swapper.io.checksums import checksum, join_checksums
from swapper.storage.atomic import is_being_written
from swapper.tensors.dtypes import stored_dtype

__all__ = ["Checkpoint"]

_PIECE_BYTES = 8 << 20


class Checkpoint:
    """A checkpoint that is there. A context manager.

    Nothing is trusted: names that leave the directory, files that are missing or have another length, and headers that
    do not fit the index are refused here, bytes that are not as they were written when they are read.

    Args:
        directory: of the checkpoint.
        check_files: look at once whether all of them are there that this process reaches; else `check_file` does.
        annexes: directories that have its annexes now, or are annexes; before the paths at which they were saved.
        unfinished: it is being written, and so are its annexes.

    Raises:
        SwapError: it is no checkpoint, or a damaged one; the message names the file.
        SwapIOError: it cannot be read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        check_files: bool = True,
        annexes: Sequence[Path] = (),
        unfinished: bool = False,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        path = self.directory / INDEX
        try:
            with open_index(path) as opened:
                data = read_index(opened)
        except FileNotFoundError:
            detail = "a checkpoint is a directory with this file, as swapper.save_checkpoint writes it"
            if is_being_written(self.directory):
                detail = "it is being saved, and appears when its files are copied: `wait()` for what the save gave"
            raise SwapIOError(errno.ENOENT, "open", path, detail=detail) from None
        except OSError as error:
            raise SwapIOError(error.errno or errno.EIO, "read", path) from error
        except ValueError as error:
            raise SwapError(f"{path} is not the index of a checkpoint: {error}") from None
        if with_checksum(b"{" + data[len(START) :]) != data:
            raise SwapError(f"{path} is damaged: it is not as it was written; use another checkpoint")
        try:
            self.index = Index.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            entry = ".".join(str(part) for part in first["loc"])
            raise SwapError(
                f"{path} is not the index of a checkpoint that this version of swapper can read: "
                f"{entry + ': ' if entry else ''}{first['msg']}"
            ) from None
        self._tables: dict[str, dict[str, StoredTensor]] = {}
        self._verified: set[str] = set()
        self.annexes = AnnexPaths(self.directory, self.index.annexes, annexes, unfinished=unfinished)
        if self.index.annexes:
            choose_copies(self.index.model, self.reaches)
            for optimizer in self.index.optimizers:
                drop_doubles(optimizer, self.reaches)
        for name in self.index.files if check_files else ():
            if self.reaches(name):
                self.check_file(name)
        self.reader = TensorReader()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self.reader.close()

    def reaches(self, name: str) -> bool:
        """True unless the file is in an annex that this process does not reach."""
        annex = self.file(name).annex
        return annex is None or self.annexes.path(annex) is not None

    def require(self, names: Iterable[str]) -> None:
        """Refuse to go on if one of some files is in an annex that this process does not reach.

        Raises:
            SwapIOError: it names the annexes, and what to do.
        """
        self.annexes.refuse(annex for name in names if (annex := self.file(name).annex) is not None)

    def path(self, name: str) -> Path:
        """The path of a file, beside the index or in an annex.

        Raises:
            SwapIOError: as from `require`.
        """
        annex = self.file(name).annex
        if annex is None:
            return self.directory / name
        self.annexes.refuse([annex])
        found = self.annexes.path(annex)
        assert found is not None
        return found / name

    def check_file(self, name: str) -> None:
        """Refuse a file that is missing, not in its directory, or not as long as it was."""
        file = self.index.files[name]
        path = self.path(name)
        if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise SwapError(f"{self.directory / INDEX} names a file outside of the checkpoint: {name!r}")
        try:
            status = path.stat()
            if path.resolve().parent != path.parent.resolve():
                raise SwapError(f"{path} is a link that leads out of the checkpoint")
            if not stat.S_ISREG(status.st_mode):
                raise SwapError(f"{path} is not a regular file, as those of a checkpoint are")
            length_bytes = status.st_size
        except OSError as error:
            raise SwapIOError(error.errno or errno.EIO, "open", path, detail="the checkpoint lacks a file") from error
        if length_bytes != file.length_bytes:
            raise SwapError(
                f"{path} has {length_bytes} bytes, and {file.length_bytes} when the checkpoint was saved: it was cut "
                "off, or is from another one"
            )

    def file(self, name: str) -> SavedFile:
        """The length and checksum of a file, from the index."""
        if name not in self.index.files:
            raise SwapError(f"{self.directory / INDEX} refers to {name!r}, which is not among its files")
        return self.index.files[name]

    def table(self, name: str) -> dict[str, StoredTensor]:
        """The tensors of a file of the checkpoint.

        Raises:
            SwapError: it is not one, or its header is damaged.
        """
        if name not in self._tables:
            self.file(name)
            self._tables[name] = {tensor.name: tensor for tensor in read_header(self.path(name))}
        return self._tables[name]

    def tensor(self, file: str, name: str) -> StoredTensor:
        """A tensor of a file of the checkpoint."""
        try:
            return self.table(file)[name]
        except KeyError:
            raise SwapError(f"{self.path(file)} lacks tensor {name!r}, which the index names") from None

    def verify(self, name: str, done: Callable[[int], object] = lambda _: None) -> None:
        """Read all of a file and compare it with its checksum, once.

        Args:
            done: called with the bytes of each piece that was read.

        Raises:
            SwapError: it is damaged.
            SwapIOError: it cannot be read.
        """
        if name in self._verified:
            return
        expected, path = self.file(name), self.path(name)
        parts = []
        for start in range(0, expected.length_bytes, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, expected.length_bytes)
            data = self.reader.read_bytes(path, start, stop)
            parts.append((checksum(data), stop - start))
            done(stop - start)
        self.check(name, join_checksums(parts), expected.crc32c)
        self._verified.add(name)

    def check(self, name: str, found: int, expected: int, tensor: str = "") -> None:
        """Refuse a file, or one tensor of it, whose CRC-32C is `found`."""
        if found != expected:
            what = f"tensor {tensor!r} of " if tensor else ""
            raise SwapError(
                f"{what}{self.path(name)} is damaged: its CRC-32C is {found:08x}, and was {expected:08x} when "
                "it was saved; use another checkpoint"
            )

    def model_spec(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and shape of a tensor of the model, from the index alone.

        Raises:
            SwapError: it is none that torch has.
        """
        saved = self.index.model.tensors[name]
        dtype = getattr(torch, saved.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise SwapError(f"{self.directory / INDEX} is damaged: tensor {name!r} has dtype {saved.dtype!r}")
        return dtype, torch.Size(saved.shape)

    def model_tensor(self, name: str) -> StoredTensor:
        """A tensor of the model, with the dtype and shape that the model knows.

        Args:
            name: in the state dict; not one that is tied to another.

        Raises:
            SwapError: its file and the index do not fit together.
        """
        stored = self.tensor(self.index.model.tensors[name].file, name)
        dtype, shape = self.model_spec(name)
        if stored.dtype != stored_dtype(dtype) or stored.length_bytes != math.prod(shape) * dtype.itemsize:
            raise SwapError(f"{stored.path}: tensor {name!r} is not what the index says; the checkpoint is damaged")
        return replace(stored, dtype=dtype, shape=shape)

    def elements(self, stored: StoredTensor, start: int, stop: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read elements `start` to `stop` of a tensor, in the order of its file: 1-D, in memory of their own.

        Args:
            dtype: of the elements, if the file has them as another one.
        """
        dtype = stored.dtype if dtype is None else dtype
        start_bytes, stop_bytes = (stored.start_bytes + at * dtype.itemsize for at in (start, stop))
        if stop_bytes > stored.stop_bytes:
            raise SwapError(f"{stored.path}: tensor {stored.name!r} is shorter than the index says")
        shape = torch.Size([stop - start])
        return self.reader.read(StoredTensor(stored.path, stored.name, dtype, shape, start_bytes, stop_bytes))

    def small_tensor(self, name: str) -> torch.Tensor:
        """A tensor of the file of values, or of that of a rank."""
        file = values_file(name)
        self.verify(file)
        return self.reader.read(self.tensor(file, name))
