"""The rest of DeepSpeed's modules: builders, and functions without a handle."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import ClassVar

import torch

from swapper.deepnvme.handles import aio_handle
from swapper.deepnvme.operations import Path
from swapper.io.gds import probe_cufile

__all__ = [
    "AsyncIOBuilder",
    "GDSBuilder",
    "PinMemoryBuilder",
    "UtilsBuilder",
    "aio_read",
    "aio_write",
    "deepspeed_memcpy",
]

log = logging.getLogger(__name__)


def aio_read(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """`aio_handle.read` by a handle of its own. Returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: Path,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """`aio_handle.write` by a handle of its own. Returns 0."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor, /) -> int:
    """Copy `src` to `dest`, without autograd noticing. Returns 0.

    Raises:
        ValueError: they differ in dtype or number of elements, or are not on the CPU.
    """
    if dest.dtype != src.dtype or dest.numel() != src.numel() or {dest.device.type, src.device.type} != {"cpu"}:
        raise ValueError(
            f"two CPU tensors of one dtype and size are needed, not {dest.numel()} of {dest.dtype} on {dest.device} "
            f"and {src.numel()} of {src.dtype} on {src.device}"
        )
    dest.detach().copy_(src.detach().reshape(dest.shape))
    return 0


class AsyncIOBuilder:
    """Stands in for DeepSpeed's class of this name. Nothing is built: the core comes with the package."""

    NAME: ClassVar[str] = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: an `aio_handle` finds a backend everywhere."""
        return True

    def load(self, verbose: bool = True) -> ModuleType:
        """`swapper.deepnvme`, which has what DeepSpeed's module has."""
        return importlib.import_module(__package__)


class GDSBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name. `load` works everywhere: see `gds_handle`."""

    NAME = "gds"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell if a `gds_handle` goes by cuFile here. With `verbose`, a warning in the log says why not."""
        found = probe_cufile()
        if verbose and not found.available:
            log.warning("GPUDirect Storage is not available: %s", found.reason)
        return found.available


class PinMemoryBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name, for the sake of `pin_handle`."""

    NAME = "pin_memory"


class UtilsBuilder(AsyncIOBuilder):
    """Stands in for DeepSpeed's class of this name, for the sake of `cast_to_byte_tensor`."""

    NAME = "utils"
