"""Tensors in safetensors files: reads headers, and one tensor at a time through the engine.

[Note: why an own reader] The format is 8 bytes with the header's length, little-endian, the header in JSON, and the
tensors, at offsets that it gives (https://github.com/huggingface/safetensors, "Format"). The package of that name maps
a file into memory: then a failing drive or a file that is cut off meanwhile is a SIGBUS, where this says which tensor
could not be read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from swapper.errors import SwapError, SwapIOError, show, system_errors
from swapper.io.handle import AsyncIOHandle, File
from swapper.sizes import PAGE_BYTES, round_up
from swapper.tensors.dtypes import DTYPES
from swapper.tensors.evicted_views import Source
from swapper.tensors.strides import contiguous_stride

__all__ = [
    "FromFile",
    "StoredTensor",
    "TensorReader",
    "parse_json",
    "read_header",
    "read_metadata",
    "read_small",
]

_LONGEST_HEADER_BYTES = 100_000_000
"""As in the reference implementation."""

_OPEN_FILES = 16

_TOO_MANY_BYTES = 1 << 63
_MOST_DIMENSIONS = 64
"""The limits of PyTorch for a tensor that it can have and copy."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: of the file.
        name: in the file.
        dtype, shape: of the tensor.
        start_bytes, stop_bytes: location of its elements in the file, in the order of indices.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start_bytes: int
    stop_bytes: int

    @property
    def length_bytes(self) -> int:
        """Of its elements."""
        return self.stop_bytes - self.start_bytes

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Rows `start` to `stop` of its first dimension."""
        first, row_bytes = self.start_bytes, self.length_bytes // max(self.shape[0], 1)
        shape = torch.Size((stop - start, *self.shape[1:]))
        return replace(self, shape=shape, start_bytes=first + start * row_bytes, stop_bytes=first + stop * row_bytes)


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in the order of its header.

    The header is checked: PyTorch can have the shape of each tensor, and the tensors are the file, without holes and
    without bytes behind the last, as the reference implementation demands.

    Raises:
        SwapIOError: the file cannot be read, or is shorter than its header says.
        SwapError: it is no such file; the message says what is wrong.
    """
    table, length, size_bytes = _table_of(path)
    found = [_entry(path, name, entry, 8 + length) for name, entry in table.items() if name != "__metadata__"]
    end, before = 8 + length, "the header"
    for tensor in sorted(found, key=lambda t: (t.start_bytes, t.stop_bytes)):
        if tensor.start_bytes < end:
            raise _malformed(path, f"tensors {before} and {show(tensor.name)} overlap")
        if tensor.stop_bytes > size_bytes:
            detail = f"tensor {show(tensor.name)} ends beyond the file's {size_bytes} bytes; copy or download it again"
            raise SwapIOError(errno.ENODATA, "read", path, tensor.start_bytes, tensor.length_bytes, detail)
        if tensor.start_bytes > end:
            raise _malformed(path, f"{tensor.start_bytes - end} bytes before tensor {show(tensor.name)} are of none")
        end, before = tensor.stop_bytes, show(tensor.name)
    if end != size_bytes:
        raise _malformed(path, f"{size_bytes - end} bytes behind its last tensor are of none")
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that a safetensors file has beside its tensors, by name; none in most.

    Raises:
        SwapError, SwapIOError: as `read_header`.
    """
    found = _table_of(path)[0].get("__metadata__") or {}
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise _malformed(path, "its metadata are no texts by name")
    return found


def _table_of(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a file as it is, its length, and that of the file."""
    with _opened(path) as (file, size_bytes):
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or length > min(size_bytes - 8, _LONGEST_HEADER_BYTES):
            raise _malformed(path, f"it has {size_bytes} bytes, and its header would have {length}")
        text = file.read(length)
    try:
        table = parse_json(text)
    except ValueError as error:
        raise _malformed(path, f"its header is no valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _malformed(path, "its header is no table")
    return table, length, size_bytes


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open an ordinary file. Others are refused: a read of them could wait for ever, or never end."""
    try:
        # O_NONBLOCK: `open` would wait for the writer of a pipe.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _malformed(path, "it is no ordinary file")
            yield file, status.st_size
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "read", path) from error
    except ValueError as error:  # A null character in the name.
        raise SwapIOError(errno.EINVAL, "open", str(path).replace("\0", "\\0"), detail=str(error)) from error


def read_small(path: Path) -> bytes:
    """The bytes of an ordinary file that is not too long for a header.

    Raises:
        SwapError: it is longer, or no ordinary file.
        SwapIOError: it cannot be read.
    """
    with _opened(path) as (file, size_bytes):
        if size_bytes > _LONGEST_HEADER_BYTES:
            raise SwapError(f"{path} has {size_bytes} bytes: too many for an index of safetensors files")
        return file.read(size_bytes)  # Not more: Python allocates as much as it is asked for.


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8 from an unknown source.

    Raises:
        ValueError: it is not JSON. Also for what Python would take: a name that comes twice, NaN and infinities, and
            names that are no Unicode.
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name comes twice")
    for name in table:
        try:
            name.encode()
        except UnicodeEncodeError:  # Half of a pair of surrogates; whatever prints or encodes it would fail.
            raise ValueError(f"the name {show(name)} is no Unicode text") from None
    return table


def _entry(path: Path, name: str, entry: object, payload_bytes: int) -> StoredTensor:
    """The tensor that an entry of a header describes; `payload_bytes` is the offset of the first tensor."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]} if all(
            type(number) is int for number in (*shape, start, stop)
        ) and all(0 <= size < _TOO_MANY_BYTES for size in shape):
            if dtype not in DTYPES:
                raise _malformed(path, f"tensor {show(name)} is of dtype {show(dtype)}, which PyTorch does not have")
            if len(shape) > _MOST_DIMENSIONS:
                raise _malformed(path, f"tensor {show(name)} has {len(shape)} dimensions")
            itemsize = DTYPES[dtype].itemsize
            # PyTorch multiplies all sizes for the strides, those of a tensor without elements too.
            if math.prod(max(size, 1) for size in shape) * itemsize >= _TOO_MANY_BYTES:
                raise _malformed(path, f"tensor {show(name)} has the impossible shape {show(shape)}")
            length = math.prod(shape) * itemsize
            if start < 0 or stop - start != length:
                at = f"is at bytes {show(start)} to {show(stop)}"
                raise _malformed(path, f"tensor {show(name)} {at}, but needs {length}")
            location = payload_bytes + start, payload_bytes + stop
            return StoredTensor(path, name, DTYPES[dtype], torch.Size(shape), *location)
    raise _malformed(path, f"what it says of tensor {show(name)} is not dtype, shape and data_offsets")


def _malformed(path: Path, why: str) -> SwapError:
    return SwapError(f"{path} is not a whole safetensors file: {why}; copy or download it again")


@dataclass
class TensorReader:
    """Reads tensors of files, one at a time. After `close` each read opens its file anew.

    Attributes:
        done: called with the number of bytes of each tensor.
        handle: reads; closed by `close`.
        failure: the first error. torch replaces an error in `load_state_dict` by a sentence of its own.
    """

    done: Callable[[int], object] = lambda _: None
    handle: AsyncIOHandle = field(default_factory=AsyncIOHandle)
    files: dict[Path, File] = field(default_factory=dict)
    failure: BaseException | None = None
    closed: bool = False

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor, in memory of its own."""
        if not tensor.length_bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        data = self.read_bytes(tensor.path, tensor.start_bytes, tensor.stop_bytes)
        if data.data_ptr() % tensor.dtype.itemsize:
            data = data.clone()
        self.done(data.numel())
        return data.view(tensor.dtype).view(tensor.shape)

    def read_bytes(self, path: Path, start_bytes: int, stop_bytes: int) -> torch.Tensor:
        """Bytes of a file, at least one: 1-D, in memory of their own, and at the start of their storage.

        The latter because the tensor may end up with the user: `torch.set_rng_state` misreads one that starts later,
        and `torch.save` writes storages in whole.
        """
        if self.closed:
            with contextlib.closing(TensorReader(self.done)) as again:
                return again.read_bytes(path, start_bytes, stop_bytes)
        try:
            with system_errors("open", path):
                file = self.open(path)
            # From page to page, into memory that starts at one: so it goes past the page cache where it can.
            start = start_bytes // PAGE_BYTES * PAGE_BYTES
            with system_errors("read", path):
                size_bytes = path.stat().st_size
            stop = min(round_up(stop_bytes, PAGE_BYTES), size_bytes)
            stop = max(stop, stop_bytes)  # The read reports a file that was cut off meanwhile.
            # Not from the heap, where later allocations that stay would fragment what this frees. Private: a forked
            # child that changes it must not change it here.
            with system_errors("allocate memory to read", path):
                memory = mmap.mmap(-1, stop - start, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.handle.read(file, torch.frombuffer(memory, dtype=torch.uint8), start).wait()
        except SwapError as error:
            self.failure = self.failure or error
            raise
        return torch.frombuffer(memory, dtype=torch.uint8, offset=start_bytes - start, count=stop_bytes - start_bytes)

    def open(self, path: Path) -> File:
        """The file, open for reading until some others were opened: a process may have only so many at once."""
        if path not in self.files:
            while len(self.files) >= _OPEN_FILES:
                self.files.pop(next(iter(self.files))).close()
            self.files[path] = self.handle.open(path)
        return self.files[path]

    def close(self) -> None:
        """Close all files. Idempotent."""
        self.closed = True
        for file in self.files.values():
            file.close()
        self.handle.close()


class FromFile(Source):
    """The values of a tensor in a file, read anew each time, until somebody has written to them.

    Args:
        reader: takes note of the first error.
        shape, dtype: of the tensor.
        read: gives it, contiguous and in memory of its own.
    """

    def __init__(
        self, reader: TensorReader, shape: torch.Size, dtype: torch.dtype, read: Callable[[], torch.Tensor]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.stride = contiguous_stride(shape)
        self._reader = reader
        self._read = read

    def real(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        if self.own is not None:
            return self.own
        try:
            return self._read()
        except SwapError as error:
            self._reader.failure = self._reader.failure or error
            raise
