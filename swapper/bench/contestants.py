"""The contestants that run in this process: transfers of ours on each backend, files of `torch.save` and others."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from swapper.bench.measure import Contestant, drop_from_cache
from swapper.bench.site import Lane
from swapper.bench.witness import Operation
from swapper.io.devices import synchronize
from swapper.io.handle import AsyncIOHandle, File
from swapper.storage.atomic import sync_path

__all__ = ["Load", "NewFile", "Save", "Transfers", "ordinary_memory", "torch_load", "torch_save"]


def ordinary_memory(length_bytes: int) -> torch.Tensor:
    """A tensor as most programs have it: page-aligned, on pages of 4 KiB (all resident), registered with nothing."""
    memory = mmap.mmap(-1, length_bytes)
    with contextlib.suppress(OSError):  # A kernel without huge pages has none to refuse.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.fill_(1)


class Transfers(Contestant):
    """Transfers on one or several lanes, all started before the first is waited for.

    Args:
        name, operation: as for `Contestant`.
        lanes: one for each directory, with tensors of one length.
        piece_bytes: length of one transfer; 0 for the whole tensor.
    """

    def __init__(self, name: str, operation: Operation, lanes: Sequence[Lane], piece_bytes: int = 0) -> None:
        length_bytes = lanes[0].tensor.numel()
        super().__init__(name, operation, [Path(lane.file.path) for lane in lanes], length_bytes)
        self._lanes = lanes
        piece_bytes = piece_bytes or length_bytes
        self._pieces = [
            (lane, lane.tensor[offset : offset + piece_bytes], offset)
            for offset in range(0, length_bytes, piece_bytes)
            for lane in lanes
        ]

    def move(self) -> bool:
        """Start all, wait for all, and sync files that go through the page cache."""
        transfers = [lane.start(self.operation, piece, offset) for lane, piece, offset in self._pieces]
        for transfer in transfers:
            transfer.wait()
        for device in {lane.tensor.device for lane in self._lanes}:
            synchronize(device)
        cached = [lane.file for lane in self._lanes if not lane.file.direct]
        if self.operation == "write":
            for file in cached:
                file.sync()
        return bool(cached)


class NewFile(Contestant):
    """The first write of a new file; making it, and reserving its space if wanted, is in the time.

    Args:
        synced: sync it too; a file that is not direct always is.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        handle: AsyncIOHandle,
        tensor: torch.Tensor,
        *,
        preallocate: bool,
        synced: bool = False,
    ) -> None:
        super().__init__(name, "write", [directory / f"new-{preallocate}"], tensor.numel())
        self._handle = handle
        self._tensor = tensor
        self._preallocate = preallocate
        self._synced = synced
        self._file: File | None = None

    def move(self) -> bool:
        """Make and write the file."""
        self._file = self._handle.open(self.files[0], "rw", exclusive=True)
        if self._preallocate:
            self._file.preallocate(self.length_bytes)
        self._handle.write(self._file, self._tensor).wait()
        synced = self._synced or not self._file.direct
        if synced:
            self._file.sync()
        return synced

    def finish(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        _remove(self.files[0])


def torch_save(data: object, path: Path) -> None:
    """`torch.save` and an fsync: without it, the bytes would be in memory only."""
    with open(path, "wb") as file:
        try:
            torch.save(data, file)
        except RuntimeError as error:
            # Ctrl-C within it: torch ends its file all the same, and raises that it is not whole.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path) -> Any:
    """`torch.load`, of tensors and containers."""
    return torch.load(path, weights_only=True)


class Save(Contestant):
    """Tensors saved into a file.

    Args:
        name: as for `Contestant`.
        directory: of the file.
        data: a tensor or a state dict.
        save: saves and syncs `data`.
        new: into a new file each time.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        data: torch.Tensor | dict[str, torch.Tensor],
        save: Callable[[Any, Path], object],
        *,
        new: bool = False,
    ) -> None:
        super().__init__(name, "write", [directory / ("new.pt" if new else "tensor.pt")], _total_bytes(data))
        self._data = data
        self._save = save
        self._new = new

    def move(self) -> bool:
        """Save and sync."""
        self._save(self._data, self.files[0])
        return True

    def finish(self) -> None:
        """Remove the file if the next one is to be new."""
        if self._new:
            _remove(self.files[0])


class Load(Contestant):
    """A file of `torch.save` loaded, after it was dropped from the page cache.

    Args:
        name, directory, data: as for `Save`.
        load: loads a file to the device of `data`.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        data: torch.Tensor | dict[str, torch.Tensor],
        load: Callable[[Path], Any],
    ) -> None:
        super().__init__(name, "read", [directory / "tensor.pt"], _total_bytes(data))
        self._data = data
        self._load = load
        self._loaded: Any = None

    def prepare(self) -> None:
        """Save it if nobody has."""
        if not self.files[0].exists():
            torch.save(self._data, self.files[0])
        drop_from_cache(self.files[0])

    def move(self) -> bool:
        """Load it."""
        loaded = self._loaded = self._load(self.files[0])
        if isinstance(loaded, torch.Tensor):
            synchronize(loaded.device)
        assert _total_bytes(loaded) == self.length_bytes
        return False

    def finish(self) -> None:
        """Free what was loaded: to give memory back is no part of a load."""
        self._loaded = None


def _total_bytes(data: torch.Tensor | dict[str, torch.Tensor]) -> int:
    return data.nbytes if isinstance(data, torch.Tensor) else sum(tensor.nbytes for tensor in data.values())


def _remove(path: Path) -> None:
    """Remove a file, and have the file system note it now instead of in the next run."""
    path.unlink(missing_ok=True)
    sync_path(path.parent)
