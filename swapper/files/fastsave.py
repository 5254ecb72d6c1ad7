"""`torch.save` and `torch.load` at the speed of the drive: the same files, moved by the I/O engine.

[Note: parts] torch decides what an object consists of: the pickle is made with `Pickler` and a `persistent_id` like
torch's own, and loading is `torch.load` itself, which is given a file object. The bytes between are ours: payloads pass
through page-locked buffers (`file_buffers`), with their checksums computed on the way.

[Note: one at a time] `torch.save` asks every tensor for its storage first and writes them all later. So a state dict
whose parameters are on disk has to give it copies, in mapped files. A pickler with `_EvictedStorages` gets names
instead, and stages each one's bytes when its turn comes.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import struct
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import torch
from torch.serialization import default_restore_location, location_tag, normalize_storage_type

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.files import archive
from swapper.files.archive import ArchiveEntry
from swapper.files.file_buffers import POOL_BYTES
from swapper.files.input_file import InputFile
from swapper.files.output_file import OutputFile
from swapper.files.saving import SaveHandle
from swapper.io.devices import current_streams, has_accelerator, is_accelerator, on_streams
from swapper.io.handle import AsyncIOHandle
from swapper.tensors.evicted_views import EvictedView, PartOfView, Source, ViewOfParameter
from swapper.tensors.homes import gathered, home_of

__all__ = ["Prepared", "load", "save"]

_ARCHIVE = "archive"
_DEFERRED_BYTES_MIN = 1 << 20
_OF_TORCHS_READER = ("PytorchStreamReader", "inline_container.cc", 'hasRecord("version")')
"""In what torch's reader of ZIP files raises: it knows no file, and says what is between payloads alone."""
_NO_STORAGES = frozenset([str, int, float, bool, bytes, tuple, list, dict, set, type, type(None), types.FunctionType])

MapLocation = Callable[[torch.UntypedStorage, str], Any] | torch.device | str | dict[str, str] | None


@overload
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    background: Literal[False] = False,
    pool_bytes: int = POOL_BYTES,
    handle: AsyncIOHandle | None = None,
) -> None: ...


@overload
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    background: Literal[True],
    pool_bytes: int = POOL_BYTES,
    handle: AsyncIOHandle | None = None,
) -> SaveHandle: ...


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    background: bool = False,
    pool_bytes: int = POOL_BYTES,
    handle: AsyncIOHandle | None = None,
) -> SaveHandle | None:
    """Save an object as `torch.save` does, in the same format, as fast as the drive writes.

    `torch.load` reads the file, also with `mmap=True`. It appears under its name only when it is complete and synced to
    the drive; until then, and if anything fails, what was there is whole and nothing else is left. Holds `pool_bytes`
    and the pickle, and no copy of a tensor, on whatever device it is. The state dict of a model whose parameters are on
    disk is read one tensor at a time.

    With `background=True` it returns when the object is pickled and the file is open; the tensors' bytes are written
    meanwhile. Until the handle's `wait()` returns, or `done()`: the values of the tensors must not change (no step, no
    operation in place), or the file has some old and some new values. Other parts of the object may change. Tensors may
    be dropped. The interpreter waits for it at exit; a forked child has no part in it. Of a model whose parameters are
    on disk, a copy is made before it returns, in a file without a name on the model's own drive: it may be trained on,
    as long as nobody else asks for an address of the same parameters, as `torch.save` does.

    Args:
        obj: whatever `torch.save` takes.
        path: of the file. One that exists is replaced and keeps its mode; a symbolic link is followed.
        pickle_module: as for `torch.save`.
        pickle_protocol: as for `torch.save`.
        background: return before the tensors are written.
        pool_bytes: page-locked memory to write from, at least 256 KiB.
        handle: engine to write with, left open; None for one of its own.

    Returns:
        With `background`, a handle to wait for. Else None.

    Raises:
        ConfigError: `pool_bytes` is too small, or `path` is no path.
        SwapIOError: the drive is full or has failed, the directory is not there, or `path` is not a regular file.
        Exception: what pickling raises.
    """
    prepared = Prepared(obj, pickle_module, pickle_protocol, stage_later=not background)
    streams = current_streams(prepared.devices) if background else []
    output = OutputFile(path, length_bytes=prepared.length_bytes, pool_bytes=pool_bytes, handle=handle)

    def write() -> None:
        with output, on_streams(streams):  # In a thread: they may still have to compute what is saved.
            prepared.write(output)
            output.commit()

    if not background:
        write()
        return None
    try:
        return SaveHandle(output.path, write)
    except BaseException:
        output.discard()
        raise


class _EvictedStorage:
    """Stands for the storage of an evicted parameter."""

    def __init__(self, view: ViewOfParameter) -> None:
        self._view = view
        self._length_bytes = view.shape.numel() * view.dtype.itemsize

    def nbytes(self) -> int:
        """As of any storage."""
        return self._length_bytes

    @contextmanager
    def present(self) -> Iterator[torch.Tensor]:
        """Yield the bytes, a 1-D tensor. They stay in memory until the end of the `with` block.

        Raises:
            SwapError: the parameter was given data of another shape, dtype or order in memory.
            SwapIOError: they could not be read.
        """
        view = self._view
        with gathered([view.parameter]), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = view.real()
            if values.stride() != view.stride:
                raise SwapError("a parameter was given data of another order in memory while it was saved")
            flat = values.as_strided((self._length_bytes // values.itemsize,), (1,), values.storage_offset())
            yield flat.view(torch.uint8)


@dataclasses.dataclass(frozen=True)
class _StoragePart:
    """Stands in a pickle for the typed storage of an evicted tensor.

    Attributes:
        storage: the storage.
        like: one of the same type and length, whose bytes are undefined.
    """

    storage: _EvictedStorage
    like: torch.TypedStorage | torch.UntypedStorage


class _EvictedStorages:
    """The evicted storages of one pickle. Tensors that share a parameter share one."""

    def __init__(self) -> None:
        self._of: dict[int, _EvictedStorage] = {}

    def reduce(self, item: object, protocol: int) -> tuple[Any, ...] | None:
        """The result of `item.__reduce_ex__(protocol)`, with a `_StoragePart` for the storage.

        Returns:
            None if `item` is no tensor of a state dict whose parameter is evicted, or is nothing but its view.
        """
        found = self._hollow(item.source) if isinstance(item, EvictedView) else None
        if found is None:
            return None
        storage, tensor = found
        # torch's own, so that it is to the bit as without swapping.
        rebuild, (like, *rest) = tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return rebuild, (_StoragePart(storage, like), *rest)

    def _hollow(self, source: Source) -> tuple[_EvictedStorage, torch.Tensor] | None:
        """The storage of `source`, and a tensor that differs from its own in values only. Its memory is not touched."""
        if isinstance(source, PartOfView):
            found = self._hollow(source.whole)
            return found and (found[0], source.of(found[1]))
        if not isinstance(source, ViewOfParameter) or home_of(source.parameter) is None:
            return None
        storage = self._of.setdefault(id(source.parameter), _EvictedStorage(source))
        memory = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
        return storage, torch.empty(0, dtype=source.dtype, device="cpu").set_(memory, 0, source.shape, source.stride)


_AnyStorage = torch.UntypedStorage | _EvictedStorage


class _StorageTable:
    """The storages of one pickle by their keys "0", "1", ..., and a `persistent_id` that is torch's."""

    def __init__(self) -> None:
        self.storages: list[_AnyStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, part: object) -> tuple[object, ...] | None:
        evicted = part.storage if isinstance(part, _StoragePart) else None
        if isinstance(part, _StoragePart):
            part = part.like
        if isinstance(part, torch.storage.TypedStorage):
            storage, dtype = part._untyped_storage, part.dtype
            kind = getattr(torch, part._pickle_storage_type())  # type: ignore[no-untyped-call]
            numel = part._size()  # type: ignore[no-untyped-call]
        elif isinstance(part, torch.UntypedStorage):
            storage, dtype = part, torch.uint8
            kind = normalize_storage_type(type(part))  # type: ignore[no-untyped-call]
            numel = part.nbytes()
        else:
            return None
        if evicted is None:
            address = storage.data_ptr() if storage.device.type != "meta" else 0
            if address and self._dtypes.setdefault(address, dtype) != dtype:
                raise RuntimeError(
                    "Cannot save multiple tensors or storages that view the same data as different types"
                )
        identity = storage._cdata if evicted is None else id(evicted)
        if identity not in self._keys:
            self._keys[identity] = str(len(self._keys))
            self.storages.append(storage if evicted is None else evicted)
        return ("storage", kind, self._keys[identity], location_tag(storage), numel)


def _pickled(obj: object, pickle_module: Any, protocol: int, stage_later: bool) -> tuple[bytes, list[_AnyStorage]]:
    """The pickle of `obj`, as `torch.save` makes it, and the storages that it names, by their keys "0", "1", ...

    Args:
        obj, pickle_module, protocol: as for `torch.save`.
        stage_later: name the storages of evicted parameters, see [Note: one at a time], instead of asking for them.

    Raises:
        RuntimeError: tensors of different dtypes view the same memory, as from `torch.save`.
        Exception: what pickling raises.
    """
    table, evicted = _StorageTable(), _EvictedStorages()

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def persistent_id(self, part: object) -> tuple[object, ...] | None:
            # Called for each object, of which most are strings, numbers and tuples.
            return None if type(part) in _NO_STORAGES else table.persistent_id(part)

        def reducer_override(self, part: object) -> Any:
            found = evicted.reduce(part, protocol) if stage_later else None
            if found is not None:
                return found
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(part)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=protocol).dump(obj)
    return buffer.getvalue(), table.storages


class Prepared:
    """A pickled object, and the offset of each record of its file. The bytes of tensors stay where they are.

    Args:
        obj, pickle_module, pickle_protocol: as for `torch.save`.
        stage_later: stage evicted parameters when they are written, in the thread that writes; else their values are
            copied to mapped files now.

    Attributes:
        length_bytes: of the whole file.

    Raises:
        Exception: what pickling raises.
    """

    def __init__(
        self, obj: object, pickle_module: Any = pickle, pickle_protocol: int = 2, *, stage_later: bool = True
    ) -> None:
        data, self._storages = _pickled(obj, pickle_module, pickle_protocol, stage_later)
        alignment_bytes = _storage_alignment_bytes()
        # In torch's order: the first must be the pickle, and storages follow one another.
        contents: dict[str, bytes | _AnyStorage] = {
            "data.pkl": data,
            ".format_version": b"1",
            ".storage_alignment": str(alignment_bytes).encode(),
            "byteorder": sys.byteorder.encode(),
            **{f"data/{key}": storage for key, storage in enumerate(self._storages)},
            "version": b"3\n",
            ".data/serialization_id": b"0" * 40,
        }
        self._records: list[tuple[ArchiveEntry, bytes, bytes | _AnyStorage]] = []
        offset = 0
        for name, content in contents.items():
            record = ArchiveEntry(f"{_ARCHIVE}/{name}", offset, _length_bytes(content))
            header = archive.local_header(record, alignment_bytes)
            self._records.append((record, header, content))
            offset += len(header) + record.length_bytes + len(archive.descriptor(record))
        self._directory_offset_bytes = offset
        self.length_bytes = offset + len(archive.directory([record for record, *_ in self._records], offset))

    @property
    def devices(self) -> set[torch.device]:
        """The accelerators that its tensors are on."""
        storages = [storage for storage in self._storages if isinstance(storage, torch.UntypedStorage)]
        return {storage.device for storage in storages if is_accelerator(storage.device)}

    def write(self, output: OutputFile) -> None:
        """Write all of it, at the end of what `output` has.

        Raises:
            SwapIOError: the drive has failed, or one that has evicted parameters.
            SwapError: a tensor was resized meanwhile.
        """
        done: list[ArchiveEntry] = []
        between = b""  # What is behind a payload goes with the header of the next: a call less for each tensor.
        for record, header, content in self._records:
            if record is self._records[-1][0]:
                # torch makes its `serialization_id` of names and checksums too, and only shows it: 40 digits that
                # differ where the content does.
                crcs = struct.pack(f"<{len(done)}I", *(each.crc32 for each in done))
                content = f"{len(done):020d}{zlib.crc32(crcs):020d}".encode()
            if _length_bytes(content) != record.length_bytes:
                raise SwapError(f"a tensor of {record.length_bytes} bytes was resized while it was saved")
            output.append(between + header)
            crc = 0
            for piece in self.pieces(content):
                crc = output.append(piece, crc)
                del piece  # It shares a buffer of the pool, which can only be evicted when nobody else has it.
            done.append(dataclasses.replace(record, crc32=crc))
            between = archive.descriptor(done[-1])
        output.append(between + archive.directory(done, self._directory_offset_bytes))

    def pieces(self, content: bytes | _AnyStorage) -> Iterator[bytes | torch.UntypedStorage | torch.Tensor]:
        """Yield the bytes of a record in pieces, each until the next is asked for."""
        if isinstance(content, _EvictedStorage):
            with content.present() as memory:
                yield memory
        else:
            yield content


def _length_bytes(content: bytes | _AnyStorage) -> int:
    return len(content) if isinstance(content, bytes) else content.nbytes()


def _storage_alignment_bytes() -> int:
    """As set in torch; older versions know 64 only, and 2.6 has no settings."""
    try:
        from torch.utils.serialization import config
    except ImportError:
        return 64
    return int(getattr(getattr(config, "save", None), "storage_alignment", 64))


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    weights_only: bool = True,
    *,
    pickle_module: Any = None,
    pool_bytes: int = POOL_BYTES,
    handle: AsyncIOHandle | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a file of `torch.save` or `save`, as `torch.load` does, as fast as the drive reads.

    This calls `torch.load`, which reads through the engine: it refuses the same files, and `weights_only` is as safe.
    Besides, each record is compared with its checksum where the file has one, the pickle before it is used. Holds
    `pool_bytes` beyond the result. Tensors for a GPU are read into it directly; where `map_location` is a function, or
    `weights_only` is False, each passes through host memory first.

    Args:
        path: of the file. One that is no ZIP file (older formats, safetensors) is given to `torch.load` as it is.
        map_location: as for `torch.load`.
        weights_only: as for `torch.load`.
        pickle_module: as for `torch.load`.
        pool_bytes: page-locked memory to read into, at least 256 KiB.
        handle: engine to read with, left open; None for one of its own.
        **pickle_load_args: as for `torch.load`, but `mmap` must not be true.

    Raises:
        ConfigError: `pool_bytes` is too small, or `path` is no path.
        SwapIOError: the file cannot be read, is truncated or damaged (EBADMSG).
        Exception: what `torch.load` raises.
    """
    if pickle_load_args.pop("mmap", None):
        raise ConfigError("mmap: swapper.load reads into memory; call torch.load(path, mmap=True) to map the file")

    def load_from(file: Any, location: Any) -> Any:
        return torch.load(file, location, pickle_module, weights_only=weights_only, mmap=False, **pickle_load_args)

    direct = weights_only and has_accelerator() and not callable(map_location)
    with InputFile(path, pool_bytes=pool_bytes, handle=handle) as file:
        start = file.read_at(0, 4)
        if archive.ZIP_START.startswith(start):  # Also of one that is shorter, or empty, as a crash leaves it.
            file.check()
            with _named(file):
                if direct:
                    found = _load_to_devices(file, map_location, load_from)
                    if found is not None:
                        return found[0]
                return file.used_by(lambda: load_from(file, map_location))
        if not any(start) or _ends_as_archive(file):  # Before a byte of it is taken for a pickle of older formats.
            raise _damaged(file, "it does not begin as a file of torch.save does: it was damaged, or never written")
    return load_from(path, map_location)


@contextmanager
def _named(file: InputFile) -> Iterator[None]:
    """Let an error of torch's reader of ZIP files be one that names the file."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SwapError) or not any(text in str(error) for text in _OF_TORCHS_READER):
            raise
        raise _damaged(file, f"it is damaged, or no file of torch.save: {error}") from error


def _ends_as_archive(file: InputFile) -> bool:
    try:
        archive.read_directory(file.read_at, file.length_bytes)
    except archive.BadArchive:
        return False
    return True


def _damaged(file: InputFile, detail: str) -> SwapIOError:
    return SwapIOError(errno.EBADMSG, "read", file.path, detail=detail)


def _load_to_devices(file: InputFile, map_location: Any, load_from: Callable[[Any, Any], Any]) -> tuple[Any] | None:
    """Load with storages read straight to their devices. None if that cannot be done for this file."""
    if file.record("byteorder") not in (None, sys.byteorder.encode()):
        return None  # torch swaps the bytes before it asks for the device.
    file.defer_from_bytes = _DEFERRED_BYTES_MIN
    try:
        return (file.used_by(lambda: load_from(file, _ToDevices(file, map_location))),)
    except RuntimeError as error:
        # Tensor subclasses without memory of their own, such as DTensor, ask for `map_location`, and take no function.
        # Nothing has happened yet: with `weights_only` unpickling has no effects.
        if isinstance(error, SwapError) or "map_location" not in str(error):
            raise
        return None
    finally:
        file.defer_from_bytes = 0
        file.deferred = None
        file.seek(0)


class _ToDevices:
    """A `map_location` for `torch.load`: it is given storages whose bytes have not been read, and reads them."""

    def __init__(self, file: InputFile, map_location: torch.device | str | dict[str, str] | None) -> None:
        self._file = file
        self._map_location = map_location
        self._devices: dict[str, torch.device] = {}

    def __call__(self, storage: torch.UntypedStorage, location: str) -> Any:
        if isinstance(self._map_location, dict):
            location = self._map_location.get(location, location)
        elif self._map_location is not None:
            location = str(self._map_location)
        deferred, self._file.deferred = self._file.deferred, None
        if deferred is not None:
            offset_bytes, length_bytes = deferred
            assert storage.nbytes() == length_bytes
            if location not in self._devices:
                # Asked of torch, with a storage that costs nothing, so that its errors are its own.
                self._devices[location] = _restored(_storage(0, torch.device("cpu")), location).device
            device = self._devices[location]
            if is_accelerator(device):
                storage = _storage(length_bytes, device)
                self._file.fill(storage, offset_bytes)
                return storage
            self._file.fill(storage, offset_bytes)
        return _restored(storage, location)


def _storage(length_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(length_bytes, device=device)  # type: ignore[no-untyped-call]


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return default_restore_location(storage, location)  # type: ignore[no-any-return, no-untyped-call]
