"""`SwapCheckpointIO`: Lightning's ordinary checkpoint files, as fast as the drive writes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.directories import check_replaceable, remove_replaced
from swapper.errors import SwapError, system_errors
from swapper.files.fastsave import load, save
from swapper.files.saving import PendingSave
from swapper.storage.atomic import put_in_place, temporary_path
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.tensor_refs import replaced

if TYPE_CHECKING:
    from lightning.pytorch.plugins import TorchCheckpointIO
else:
    TorchCheckpointIO = object

__all__ = ["CheckpointFiles"]


def _on_cpu(storage: Any, location: str) -> Any:
    return storage


class CheckpointFiles(TorchCheckpointIO):
    """Ordinary checkpoint files for any strategy, written and read through the engine, and checked when read.

    A file appears under its name when it is complete and synced; what had the name is whole until then.

    Args:
        background: return as soon as the tensors are copied in memory, and write meanwhile. What fails is raised by
            the next save, load or removal, or at the end.
    """

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        self._background = background
        self._saving = PendingSave()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the file. It appears when it is complete and synced."""
        self._saving.wait()
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if os.path.islink(path) or is_checkpoint(path):
            _save_over(checkpoint, Path(os.path.abspath(path)))
        elif self._background:
            self._saving.keep(save(_snapshot(checkpoint), path, background=True))
        else:
            save(checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = _on_cpu, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, with its checksums compared."""
        self._saving.wait()
        if is_checkpoint(path):
            raise SwapError(f"{os.fspath(path)} is a directory that SwapStrategy saved; load it with that strategy")
        if "://" in os.fspath(path) or not os.path.exists(path):
            return super().load_checkpoint(str(path), map_location, weights_only)
        found: dict[str, Any] = load(path, map_location, weights_only)  # type: ignore[arg-type]  # None is torch's default
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a directory."""
        self._saving.wait()
        super().remove_checkpoint(str(path))

    def teardown(self) -> None:
        """Wait for what is written in the background.

        Raises:
            SwapIOError: it failed.
        """
        self._saving.wait()


def _save_over(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a file in the place of a link, which is not followed, or of a directory of ours, in one step."""
    check_replaceable(path, over_files=True)
    written = temporary_path(path)
    try:
        save(checkpoint, written)
        with system_errors("publish", path):
            put_in_place(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise
    remove_replaced(written)


def _snapshot(checkpoint: dict[str, Any]) -> Any:
    """`checkpoint` with copies of all tensors on the CPU; those that are one tensor stay one."""
    copies: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(value: torch.Tensor) -> torch.Tensor:
        key: Any = id(value)
        if type(value) is not EvictedView and value.device.type != "meta" and value.layout is torch.strided:
            bits = value.is_conj(), value.is_neg()
            key = value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), bits
        if key not in copies:
            copies[key] = value, value.detach().to("cpu", copy=True)
        return copies[key][1]

    return replaced(checkpoint, torch.Tensor, copy)
