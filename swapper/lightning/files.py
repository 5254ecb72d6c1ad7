"""`SwapCheckpointIO`: Lightning's ordinary checkpoint files, as fast as the drive writes."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swapper.checkpoint.checkpoint import is_checkpoint
from swapper.checkpoint.directories import check_replaceable, remove_checkpoint, sync_path
from swapper.errors import SwapError, system_errors
from swapper.files.fastsave import SaveHandle, load, save
from swapper.io.handle import exchange
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.tensor_refs import replaced

if TYPE_CHECKING:
    from lightning.pytorch.plugins import TorchCheckpointIO
else:
    TorchCheckpointIO = object

__all__ = ["FilesOfTorch"]


def _on_cpu(storage: Any, location: str) -> Any:
    return storage


class FilesOfTorch(TorchCheckpointIO):
    """The part of `SwapCheckpointIO` that is not Lightning's."""

    def __init__(self, *, background: bool = False) -> None:
        super().__init__()
        self._background = background
        self._saving: SaveHandle | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the file. It appears when it is complete and synced."""
        self._settle()
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, str(path), storage_options)
            return
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if os.path.islink(path) or is_checkpoint(path):
            _save_over(checkpoint, Path(os.path.abspath(path)))
        elif self._background:
            self._saving = save(_snapshot(checkpoint), path, background=True)
        else:
            save(checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = _on_cpu, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file, with its checksums compared."""
        self._settle()
        if is_checkpoint(path):
            raise SwapError(f"{os.fspath(path)} is a directory that SwapStrategy saved; load it with that strategy")
        if "://" in os.fspath(path) or not os.path.exists(path):
            return super().load_checkpoint(str(path), map_location, weights_only)
        found: dict[str, Any] = load(path, map_location, weights_only)  # type: ignore[arg-type]  # None is torch's default
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a directory."""
        self._settle()
        super().remove_checkpoint(str(path))

    def teardown(self) -> None:
        """Wait for what is written in the background.

        Raises:
            SwapIOError: it failed.
        """
        self._settle()

    def _settle(self) -> None:
        handle, self._saving = self._saving, None
        if handle is not None:
            handle.wait()


def _save_over(checkpoint: dict[str, Any], path: Path) -> None:
    """Save a file in the place of a link, which is not followed, or of a directory of ours, in one step."""
    check_replaceable(path, over_files=True)
    written = path.parent / f".{path.name}.tmp-{secrets.token_hex(6)}"  # As a checkpoint that is left over.
    try:
        save(checkpoint, written)
        with system_errors("publish", path):
            exchange(written, path)
    except BaseException:
        with contextlib.suppress(OSError):
            written.unlink()
        raise
    sync_path(path.parent)
    remove_checkpoint(written, lambda _: False)


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
