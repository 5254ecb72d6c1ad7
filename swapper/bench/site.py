"""A site of measurements: a directory, a file that was written in full, and the memory that is moved."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from swapper.bench.witness import Operation
from swapper.config import AioConfig
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle, Checksums, File, Slab, Transfer
from swapper.sizes import PAGE_BYTES

__all__ = ["EngineSettings", "Lane", "Site"]


@dataclass(frozen=True)
class EngineSettings:
    """The arguments of a handle; the names are those of `AsyncIOHandle`."""

    backend: str = "auto"
    block_bytes: int = 4 << 20
    queue_depth: int = 32
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True

    @classmethod
    def of(cls, aio: AioConfig) -> EngineSettings:
        """The settings of an `aio` section."""
        threads = aio.intra_op_parallelism
        return cls(aio.backend, aio.block_size, aio.queue_depth, threads, aio.single_submit, aio.overlap_events)

    def open(self, stack: contextlib.ExitStack, *, gds: bool = False) -> AsyncIOHandle:
        """A handle that `stack` closes. Errors as from `AsyncIOHandle`."""
        make = GDSHandle if gds else AsyncIOHandle
        return stack.enter_context(make(**asdict(self)))


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


class Site:
    """One directory. The file is made here, and full of random bytes.

    Args:
        directory: empty.
        length_bytes: of the file and the tensor; a multiple of 4096.
        device: "cpu", where the memory is a slab like those of a pool, or an accelerator.

    Raises:
        SwapIOError: there is not so much memory, or the file cannot be written.
    """

    def __init__(self, directory: Path, length_bytes: int, device: str) -> None:
        assert length_bytes % PAGE_BYTES == 0
        self.directory = directory
        self.path = directory / "data"
        self._slab = Slab(length_bytes) if device == "cpu" else None
        if self._slab is not None:
            self.tensor = torch.frombuffer(self._slab, dtype=torch.uint8)
        else:
            self.tensor = torch.empty(length_bytes, dtype=torch.uint8, device=device)
        # Whole words are made faster; random, because a drive may compress.
        self.tensor.view(torch.int64).random_()
        with AsyncIOHandle() as handle, handle.open(self.path, "rw", exclusive=True) as file:
            file.preallocate(length_bytes)
            handle.write(file, self.tensor).wait()
            file.sync()

    def lane(
        self,
        stack: contextlib.ExitStack,
        handle: AsyncIOHandle,
        *,
        tensor: torch.Tensor | None = None,
        register: bool = True,
    ) -> Lane:
        """The file opened on `handle` until `stack` closes it.

        Args:
            stack: that the handle is on, too.
            handle: it registers the memory, too, unless `register` is False.
            tensor: other memory than the site's.
            register: whether the site's memory is registered with the kernel, or for GPUDirect Storage.
        """
        file = stack.enter_context(handle.open(self.path, "rw"))
        if register and tensor is None:
            if self._slab is not None:
                handle.register(self._slab)
            elif isinstance(handle, GDSHandle):
                handle.pin(self.tensor)
        return Lane(handle, file, self.tensor if tensor is None else tensor)
