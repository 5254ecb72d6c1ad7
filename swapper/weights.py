"""Weights from safetensors files into a model that is larger than memory: one tensor at a time.

[Note: why an own reader] The format is 8 bytes with the header's length, little-endian, the header in JSON, and the
tensors, at offsets that it gives (https://github.com/huggingface/safetensors, "Format"). The package of that name maps
a file into memory: then a failing drive or a file that is cut off meanwhile is a SIGBUS, where this says which tensor
could not be read.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import _IncompatibleKeys
from tqdm import tqdm

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.evicted import EvictedView, Home
from swapper.handle import AsyncIOHandle, File
from swapper.layout import PAGE_BYTES, round_up

__all__ = ["StoredTensor", "find_weights", "load_weights", "read_header"]

_INDEX = ".safetensors.index.json"
_LONGEST_HEADER_BYTES = 100_000_000
"""As in the reference implementation."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: of the file.
        name: in the file.
        dtype, shape: of the tensor.
        start_bytes, stop_bytes: where in the file its elements are, in the order of indices.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start_bytes: int
    stop_bytes: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in the order of its header.

    Raises:
        SwapIOError: the file cannot be read, or is shorter than its header says.
        SwapError: it is no such file; the message says what is wrong.
    """
    try:
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or length > min(size_bytes - 8, _LONGEST_HEADER_BYTES):
                raise _malformed(path, f"it has {size_bytes} bytes, and its header would have {length}")
            text = file.read(length)
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "read", path) from error
    try:
        table = json.loads(text, object_pairs_hook=_without_repetition)
    except ValueError as error:
        raise _malformed(path, f"its header is no valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _malformed(path, "its header is no table")
    found = [_entry(path, name, entry, 8 + length) for name, entry in table.items() if name != "__metadata__"]
    for one, other in zip(ordered := sorted(found, key=lambda t: t.start_bytes), ordered[1:], strict=False):
        if other.start_bytes < one.stop_bytes:
            raise _malformed(path, f"tensors {one.name!r} and {other.name!r} overlap")
    for tensor in found:
        if tensor.stop_bytes > size_bytes:
            length = tensor.stop_bytes - tensor.start_bytes
            detail = f"tensor {tensor.name!r} ends beyond the file's {size_bytes} bytes; copy or download it again"
            raise SwapIOError(errno.ENODATA, "read", path, tensor.start_bytes, length, detail)
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name comes twice")
    return table


def _entry(path: Path, name: str, entry: object, payload_bytes: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            if dtype not in _DTYPES:
                raise _malformed(path, f"tensor {name!r} is of dtype {dtype!r}, which PyTorch does not have")
            length = math.prod(shape) * _DTYPES[dtype].itemsize
            if start >= 0 and stop - start == length:
                return StoredTensor(
                    path, name, _DTYPES[dtype], torch.Size(shape), payload_bytes + start, payload_bytes + stop
                )
            raise _malformed(path, f"tensor {name!r} is at bytes {start} to {stop}, but needs {length}")
    raise _malformed(path, f"what it says of tensor {name!r} is not dtype, shape and data_offsets")


def _malformed(path: Path, why: str) -> SwapError:
    return SwapError(f"{path} is not a whole safetensors file: {why}; copy or download it again")


def find_weights(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """The tensors that `path` names: a safetensors file, an index of several, or a directory with either.

    Raises:
        SwapIOError, SwapError: there are none, or one of the files is broken.
    """
    path = Path(path)
    if path.is_dir():
        indices = sorted(path.glob(f"*{_INDEX}"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise SwapError(f"{path} has several sets of weights: {names}; name one of them")
        if indices:
            return _find_by_index(indices[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise SwapIOError(errno.ENOENT, "open", path, detail="there are no .safetensors files in this directory")
        return _without_duplicates([tensor for file in files for tensor in read_header(file)])
    return _find_by_index(path) if path.name.endswith(".json") else read_header(path)


def _find_by_index(path: Path) -> list[StoredTensor]:
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "read", path) from error
    except ValueError as error:
        raise SwapError(f"{path} is not an index of safetensors files: it is no valid JSON ({error})") from error
    match index:
        case {"weight_map": dict(places)} if all(isinstance(name, str) for name in places.values()):
            pass
        case _:
            raise SwapError(f'{path} is not an index of safetensors files: it has no "weight_map" from names to files')
    tensors = {
        file: {tensor.name: tensor for tensor in read_header(path.parent / file)} for file in sorted({*places.values()})
    }
    for name, file in places.items():
        if name not in tensors[file]:
            raise SwapError(
                f"{path} says that tensor {name!r} is in {file}, but it is not; copy or download them again"
            )
    return [tensors[file][name] for name, file in places.items()]


def _without_duplicates(tensors: list[StoredTensor]) -> list[StoredTensor]:
    seen: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if (other := seen.setdefault(tensor.name, tensor)) is not tensor:
            raise SwapError(f"tensor {tensor.name!r} is in {other.path} and in {tensor.path}; name one file")
    return tensors


@dataclass
class _Reader:
    """Reads tensors of files, one at a time."""

    handle: AsyncIOHandle
    done: Callable[[int], object]
    files: dict[Path, File] = field(default_factory=dict)
    failure: BaseException | None = None
    """The first error, which torch would make a sentence of."""

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor, in memory of its own."""
        if tensor.stop_bytes == tensor.start_bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        try:
            if tensor.path not in self.files:
                self.files[tensor.path] = self.handle.open(tensor.path)
            # From page to page, into memory that starts at one: so it goes past the page cache where it can.
            start = tensor.start_bytes // PAGE_BYTES * PAGE_BYTES
            stop = min(round_up(tensor.stop_bytes, PAGE_BYTES), tensor.path.stat().st_size)
            stop = max(stop, tensor.stop_bytes)  # Of a file that was cut off meanwhile the read says so.
            # Not from the heap, where what is allocated later and stays would make holes of what this leaves.
            buffer = torch.frombuffer(mmap.mmap(-1, stop - start), dtype=torch.uint8)
            self.handle.read(self.files[tensor.path], buffer, start).wait()
        except (SwapError, OSError) as error:
            self.failure = self.failure or error
            raise
        data = buffer[tensor.start_bytes - start : tensor.stop_bytes - start]
        if data.storage_offset() % tensor.dtype.itemsize:
            data = data.clone()
        self.done(data.numel())
        return data.view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Close all files."""
        for file in self.files.values():
            file.close()
        self.handle.close()


class _FromFile:
    """The values of a tensor in a file. See `swapper.evicted.Source`."""

    def __init__(self, reader: _Reader, stored: StoredTensor) -> None:
        self.shape, self.dtype = stored.shape, stored.dtype
        self.stride = torch.empty(stored.shape, device="meta").stride()
        self._reader = reader
        self._stored = stored

    def homes(self) -> Sequence[Home]:
        """None: it is read."""
        return ()

    def real(self) -> torch.Tensor:
        """Read it, anew each time."""
        return self._reader.read(self._stored)

    def lasting(self) -> torch.Tensor:
        """The same."""
        return self.real()


@contextmanager
def _reading(tensors: Sequence[StoredTensor]) -> Iterator[_Reader]:
    total = sum(tensor.stop_bytes - tensor.start_bytes for tensor in tensors)
    with tqdm(
        total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, delay=1,
        disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        reader = _Reader(AsyncIOHandle(), progress.update)
        try:
            yield reader
        finally:
            reader.close()


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool) -> _IncompatibleKeys:
    """See `swapper.load_safetensors`."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta" and not torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"model: {name} is on the meta device and has no memory to load into; call "
                "swapper.materialize(model, config, initialiser) first"
            )
    tensors = find_weights(path)
    with _reading(tensors) as reader:
        state = {tensor.name: EvictedView(_FromFile(reader, tensor)) for tensor in tensors}
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            if reader.failure is not None:
                raise reader.failure from None
            fix = "; build the model with the shapes that the file has" if "size mismatch" in str(error) else ""
            raise SwapError(f"{path} could not be loaded: {error}{fix}") from error
    missing = _without_tied(model, missing, state)
    if strict and (missing or unexpected):
        lacks = f"it lacks {', '.join(missing)}" if missing else ""
        has = f"the model does not have {', '.join(unexpected)}" if unexpected else ""
        raise SwapError(
            f"{path} does not fit the model: {' and '.join(filter(None, (lacks, has)))}; load weights of this model, "
            "or pass strict=False to load what fits"
        )
    return _IncompatibleKeys(missing, unexpected)


def _without_tied(model: torch.nn.Module, missing: Sequence[str], state: dict[str, EvictedView]) -> list[str]:
    """Those of `missing` whose parameter was not loaded by another name either."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in state if name in parameters}
    return [name for name in missing if name not in parameters or id(parameters[name]) not in loaded]
