"""Storage for `torch.distributed.checkpoint`: each rank writes and reads its part through the engine.

The directory is that of torch's `FileSystemWriter`: files `__RANK_*.distcp` of tensors, each as `torch.save` writes it,
and `.metadata`. Either reads what the other wrote. As with torch's, `.metadata` is a pickle: load only what you trust.

[Note: the previous checkpoint] A save into a directory that has a checkpoint writes new files beside those of the old
one. `.metadata` is replaced last, atomically, and then the old files go. So a save that fails leaves the old one whole.
No two saves give a file the same name: of a copy that was cut off, the files that are still those of an older
checkpoint are not taken for the new ones.

[Note: the checksum of .metadata] A wrong bit in it may be the offset of another tensor of the same shape. So a
line with its CRC-32 follows the pickle, where `pickle.load` has ended, and torch's reader too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import pickle
import secrets
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swapper.errors import SwapIOError, is_memory_shortage
from swapper.files.archive import ZIP_START, check_payloads
from swapper.files.fastsave import Prepared
from swapper.files.file_buffers import POOL_BYTES
from swapper.files.input_file import InputFile
from swapper.files.output_file import OutputFile
from swapper.io.handle import AsyncIOHandle

__all__ = ["SwapStorageReader", "SwapStorageWriter"]

_ALIGNMENT_BYTES = 64
_CHECKSUM = b"\nswapper crc32 "
"""Between the pickle of `.metadata` and its checksum."""
_T = TypeVar("_T")


class SwapStorageWriter(FileSystemWriter):
    """`FileSystemWriter` of torch, through the engine: for `dcp.save` and `dcp.async_save`.

    Each rank writes one file, which appears when it is complete and synced; `.metadata` comes last. A tensor that is a
    dense part of a larger one is written from where it is, on whatever device; others are copied, one at a time.

    Args:
        path: directory of the checkpoint; made if it is not there.
        overwrite: replace a checkpoint that is there. It is whole until the new one is, and is removed then.
        cache_staged_state_dict: as for `FileSystemWriter`, for `async_save`.
        pool_bytes: page-locked memory to write from, at least 256 KiB.
        handle: engine to write with, left open; None for one of its own in each save.

    Raises:
        SwapIOError: from `dcp.save`, wrapped by it: the drive is full or has failed, or the directory is gone.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        pool_bytes: int = POOL_BYTES,
        handle: AsyncIOHandle | None = None,
    ) -> None:
        super().__init__(path, overwrite=overwrite, cache_staged_state_dict=cache_staged_state_dict)
        self._pool_bytes = pool_bytes
        self._handle = handle
        self._replaced: tuple[int, int] | None = None  # the checkpoint that was there when a save began

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note which checkpoint is there, if any: see [Note: the previous checkpoint]."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._replaced = _version_of(_metadata_path(Path(self.path), None))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        results: list[WriteResult] = []
        if plan.items:
            path = self._new_file(cast(Any, plan.storage_data).prefix)
            with OutputFile(path, pool_bytes=self._pool_bytes, handle=self._handle) as output:
                # Objects first, as torch does.
                for item in sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO):
                    results.append(self._write(output, item, planner, path.name))
                output.commit()
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, which completes the checkpoint. Remove the files of the previous one.

        Raises:
            SwapIOError: another save into the directory has been completed since this one began (ESTALE).
        """
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        metadata.storage_data = {result.index: result.storage_data for each in results for result in each}
        metadata.storage_meta = self.storage_meta()
        rank = None if getattr(self, "use_collectives", True) else getattr(self, "rank", None)
        directory = Path(self.path)
        path, data = _metadata_path(directory, rank), _with_checksum(pickle.dumps(metadata))
        if rank is None and _version_of(path) != self._replaced:
            detail = (
                "another save into this directory was completed meanwhile, and has removed files of this one: wait for "
                "a save before the next into the same directory"
            )
            raise SwapIOError(errno.ESTALE, "write", path, detail=detail)
        with OutputFile(path, length_bytes=len(data), handle=self._handle) as output:
            output.append(data)
            output.commit()
        if rank is None:
            kept = {info.relative_path for info in metadata.storage_data.values()}
            for path in directory.glob(f"__*_*{filesystem.DEFAULT_SUFFIX}"):
                if path.name not in kept:
                    with contextlib.suppress(OSError):
                        path.unlink()

    def prepared(self, tensor: torch.Tensor) -> Prepared:
        """The file of a tensor whose storage holds nothing else."""
        return Prepared(tensor)

    def _write(self, output: OutputFile, item: WriteItem, planner: SavePlanner, file_name: str) -> WriteResult:
        output.append(b"\0" * (-output.tell() % _ALIGNMENT_BYTES))
        start = output.tell()
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            output.append(data.getbuffer())
        else:
            self.prepared(_alone(data)).write(output)
        length = output.tell() - start
        return WriteResult(item.index, length, filesystem._StorageInfo(file_name, start, length))

    def _new_file(self, prefix: str) -> Path:
        """A path that no other save has: see [Note: the previous checkpoint]."""
        return Path(self.path) / f"{prefix}0-{secrets.token_hex(4)}{filesystem.DEFAULT_SUFFIX}"


def _done(result: _T) -> Future[_T]:
    future: Future[_T] = Future()
    future.set_result(result)
    return future


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage that holds nothing else: the same memory if that is dense, or a copy."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.clone()
    start = int(tensor.storage_offset()) * tensor.element_size()
    part = cast(torch.UntypedStorage, storage[start : start + tensor.nbytes])
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(part, 0, tensor.size(), tensor.stride())


class SwapStorageReader(FileSystemReader):
    """`FileSystemReader` of torch, through the engine: for `dcp.load`.

    Each tensor is compared with its checksum, copied to its target, and freed before the next is read. Objects are
    compared with theirs before they are unpickled.

    Args:
        path: directory of the checkpoint, of this module's writer or torch's.
        pool_bytes: page-locked memory to read into, at least 256 KiB.
        handle: engine to read with, left open; None for one of its own for each file.

    Raises:
        SwapIOError: from `dcp.load`, wrapped by it: a file cannot be read, is truncated, is damaged or has what cannot
            be unpickled (EBADMSG), or is not in the directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pool_bytes: int = POOL_BYTES,
        handle: AsyncIOHandle | None = None,
    ) -> None:
        super().__init__(path)
        self._pool_bytes = pool_bytes
        self._handle = handle

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`, compare it with its checksum, and check that the parts of each tensor are the whole of it.

        Raises:
            SwapIOError: they are not, or it is damaged, or cannot be unpickled (EBADMSG).
        """
        rank = kwargs.get("rank")
        path = _metadata_path(Path(self.path), rank)
        try:
            _check(path.read_bytes())
            metadata: Metadata = super().read_metadata(*args, **kwargs)
            incomplete = _incomplete(metadata) if rank is None else None  # Other ranks have the other parts.
        except OSError:
            raise
        except Exception as error:
            raise SwapIOError(errno.EBADMSG, "read", path, detail=f"no metadata of a checkpoint: {error}") from error
        if incomplete is not None:
            detail = f"the parts of {incomplete!r} are not the whole of it: the file is damaged"
            raise SwapIOError(errno.EBADMSG, "read", path, detail=detail)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of this rank."""
        files: defaultdict[str, list[tuple[Any, ReadItem]]] = defaultdict(list)
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            if getattr(stored, "transform_descriptors", None):
                return super().read_data(plan, planner)  # Written with extensions of torch: compressed, say.
            files[stored.relative_path].append((stored, item))
        for name, items in files.items():
            with InputFile(self._inside(name), pool_bytes=self._pool_bytes, handle=self._handle) as file:
                for stored, item in sorted(items, key=lambda each: each[0].offset):
                    file.restrict(stored.offset, stored.length)
                    _read(file, item, planner)
        return _done(None)

    def _inside(self, name: str) -> Path:
        if name in ("", ".", "..") or os.path.basename(name) != name:
            raise SwapIOError(errno.EINVAL, "read", self.path, detail=f"the file {name!r} is not in the directory")
        return Path(self.path) / name


def _metadata_path(directory: Path, rank: int | None) -> Path:
    return directory / (".metadata" if rank is None else f"__{rank}.metadata")


def _version_of(path: Path) -> tuple[int, int] | None:
    """Something that is another after the file was replaced; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _with_checksum(data: bytes) -> bytes:
    """A pickle, and behind it its checksum: see [Note: the checksum of .metadata]."""
    return data + _CHECKSUM + b"%08x\n" % zlib.crc32(data)


def _check(data: bytes) -> None:
    """Refuse what is not as `_with_checksum` made it. A pickle without a checksum, as torch writes it, is not refused.

    Raises:
        ValueError: it is damaged.
    """
    content, mark, _ = data.rpartition(_CHECKSUM)
    if data != _with_checksum(content) if mark else not data.endswith(pickle.STOP):
        raise ValueError("it does not match its checksum, or is cut off: the file was damaged")


def _incomplete(metadata: Metadata) -> str | None:
    """The name of a tensor whose parts have not as many elements as it has: torch would leave the rest as it was."""
    for name, value in metadata.state_dict_metadata.items():
        if not isinstance(value, TensorStorageMetadata):
            continue
        if sum(math.prod(chunk.sizes) for chunk in value.chunks) != math.prod(value.size):
            return name
    return None


def _read(file: InputFile, item: ReadItem, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        data = file.used_by(lambda: file.read(file.length_bytes))
        with _named(file, item):
            if data.startswith(ZIP_START):
                check_payloads(data)
            planner.load_bytes(item, io.BytesIO(data))
        return
    file.check(item.storage_index.fqn)
    with _named(file, item):
        tensor = file.used_by(lambda: torch.load(cast(Any, file), "cpu", weights_only=True, mmap=False))
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        raise ValueError(f"{item.storage_index.fqn}: {tuple(tensor.size())} is stored, {tuple(target.size())} wanted")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


@contextlib.contextmanager
def _named(file: InputFile, item: ReadItem) -> Iterator[None]:
    """Let what fails within be an error that names the file: torch's do not."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if is_memory_shortage(error):
            raise
        detail = f"{item.storage_index.fqn!r} cannot be loaded: {type(error).__name__}: {error}"
        raise SwapIOError(errno.EBADMSG, "read", file.path, file.base_bytes, file.length_bytes, detail) from error
