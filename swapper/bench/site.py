"""Where a measurement takes place: a directory, a file that was written in full, and the memory that is moved."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from swapper.bench.contestants import Lane
from swapper.errors import SwapError
from swapper.io.gds import GDSHandle
from swapper.io.handle import AsyncIOHandle, Checksums, File, Slab
from swapper.sizes import PAGE_BYTES

__all__ = ["EngineSettings", "Site", "check_device"]


def check_device(device: str, *, gds: bool) -> None:
    """Refuse a device that is not there.

    Raises:
        BadParameter: GPUDirect Storage was asked for without a GPU.
        SwapError: in words that say what to change.
    """
    if gds and device != "cuda":
        raise typer.BadParameter("--gds moves tensors on a GPU: it needs `bench --device cuda` or `tune --gpu`")
    if device == "cuda" and not torch.cuda.is_available():
        raise SwapError("torch finds no CUDA device here: measure with tensors on the CPU")


@dataclass(frozen=True)
class EngineSettings:
    """What a handle is made with; the names are those of `AsyncIOHandle`."""

    backend: str = "auto"
    block_bytes: int = 4 << 20
    queue_depth: int = 32
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True

    def open(self, stack: contextlib.ExitStack, *, gds: bool = False) -> AsyncIOHandle:
        """A handle that `stack` closes. Errors as from `AsyncIOHandle`."""
        make = GDSHandle if gds else AsyncIOHandle
        return stack.enter_context(
            make(
                backend=self.backend,
                block_bytes=self.block_bytes,
                queue_depth=self.queue_depth,
                threads=self.threads,
                single_submit=self.single_submit,
                overlap_events=self.overlap_events,
            )
        )


class Site:
    """One directory. The file is made here, and full of random bytes.

    Args:
        directory: empty.
        length_bytes: of the file and the tensor; a multiple of 4096.
        device: "cpu", where the memory is a slab like those of a pool, or "cuda".

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
        checksums: Checksums | None = None,
    ) -> Lane:
        """The file opened on `handle` until `stack` closes it.

        Args:
            stack: that the handle is on, too.
            handle: it registers the memory, too, unless `register` is False.
            tensor: other memory than the site's.
            register: whether the site's memory is registered with the kernel, or for GPUDirect Storage.
            checksums: of the file.
        """
        file: File = stack.enter_context(handle.open(self.path, "rw"))
        if register and tensor is None:
            if self._slab is not None:
                handle.register(self._slab)
            elif isinstance(handle, GDSHandle):
                handle.pin(self.tensor)
        return Lane(handle, file, self.tensor if tensor is None else tensor, checksums)
