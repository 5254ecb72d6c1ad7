"""The contestants that run in this process: transfers of ours on each backend, and `torch.save` and `torch.load`."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.bench.measure import Contestant, Timing, drop_from_cache, time_here
from swapper.bench.witness import Operation
from swapper.io.handle import AsyncIOHandle, Checksums, File, Transfer

__all__ = ["Lane", "NewFile", "TorchLoad", "TorchSave", "Transfers", "ordinary_memory"]


def ordinary_memory(length_bytes: int) -> torch.Tensor:
    """A tensor as most programs have it: page-aligned, on pages of 4 KiB (all there), registered with nothing."""
    memory = mmap.mmap(-1, length_bytes)
    with contextlib.suppress(OSError):  # A kernel without huge pages has none to refuse.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.fill_(1)


@dataclass(frozen=True)
class Lane:
    """One directory's part of a run: its file, the memory that is moved, and the handle that moves it."""

    handle: AsyncIOHandle
    file: File
    tensor: torch.Tensor
    checksums: Checksums | None = None

    def start(self, operation: Operation, piece: torch.Tensor, offset_bytes: int) -> Transfer:
        """Start one transfer."""
        start = self.handle.read if operation == "read" else self.handle.write
        return start(self.file, piece, offset_bytes, checksums=self.checksums)


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
        self._pieces = [
            (lane, lane.tensor[offset : offset + (piece_bytes or length_bytes)], offset)
            for offset in range(0, length_bytes, piece_bytes or length_bytes)
            for lane in lanes
        ]

    def run(self) -> Timing:
        """Errors as from a transfer."""
        return time_here(self.operation, self._move)

    def _move(self) -> bool:
        transfers = [lane.start(self.operation, piece, offset) for lane, piece, offset in self._pieces]
        for transfer in transfers:
            transfer.wait()
        if any(lane.tensor.is_cuda for lane in self._lanes):
            torch.cuda.synchronize()
        cached = [lane.file for lane in self._lanes if not lane.file.direct]
        if self.operation == "write":
            for file in cached:
                file.sync()
        return bool(cached)


class NewFile(Contestant):
    """The first write of a new file, with or without reserving its space; that, and making the file, is in the time."""

    def __init__(
        self, name: str, directory: Path, handle: AsyncIOHandle, tensor: torch.Tensor, *, preallocate: bool
    ) -> None:
        super().__init__(name, "write", [directory / f"new-{preallocate}"], tensor.numel())
        self._handle = handle
        self._tensor = tensor
        self._preallocate = preallocate
        self._file: File | None = None

    def run(self) -> Timing:
        """Errors as from a transfer."""
        return time_here("write", self._move)

    def _move(self) -> bool:
        self._file = self._handle.open(self.files[0], "rw", exclusive=True)
        if self._preallocate:
            self._file.preallocate(self.length_bytes)
        self._handle.write(self._file, self._tensor).wait()
        if not self._file.direct:
            self._file.sync()
        return not self._file.direct

    def finish(self) -> None:
        """Remove the file, and have the file system note it now instead of in the next run."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.files[0])
        descriptor = os.open(self.files[0].parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class TorchSave(Contestant):
    """`torch.save` of the tensor and an fsync: without it, the bytes would be in memory only."""

    def __init__(self, directory: Path, tensor: torch.Tensor) -> None:
        super().__init__("torch.save + fsync", "write", [directory / "tensor.pt"], tensor.numel())
        self._tensor = tensor

    def run(self) -> Timing:
        """Errors as from torch."""
        return time_here("write", self._move)

    def _move(self) -> bool:
        with open(self.files[0], "wb") as file:
            try:
                torch.save(self._tensor, file)
            except RuntimeError as error:
                # Ctrl-C within it: torch ends its file all the same, and raises that it is not whole.
                if isinstance(error.__context__, KeyboardInterrupt):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())
        return True


class TorchLoad(Contestant):
    """`torch.load` of what `torch.save` wrote, after it was dropped from the page cache."""

    def __init__(self, directory: Path, tensor: torch.Tensor) -> None:
        super().__init__("torch.load", "read", [directory / "tensor.pt"], tensor.numel())
        self._tensor = tensor

    def prepare(self) -> None:
        """Save it if nobody has."""
        if not self.files[0].exists():
            torch.save(self._tensor, self.files[0])
        drop_from_cache(self.files[0])

    def run(self) -> Timing:
        """Errors as from torch."""
        return time_here("read", self._move)

    def _move(self) -> bool:
        tensor = torch.load(self.files[0], map_location=self._tensor.device, weights_only=True)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        assert tensor.numel() == self.length_bytes
        return False
