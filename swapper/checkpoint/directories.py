"""The directories of checkpoints: which may be replaced, and their removal. See [Note: publishing] of `atomic`."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from swapper.checkpoint.annexes import Adopt, OldAnnex, annexes_of, remove_annexes, remove_files, report_left
from swapper.checkpoint.index import INDEX, glance, look_at
from swapper.errors import SwapError, SwapIOError, system_errors
from swapper.io.handle import keep_open
from swapper.storage.atomic import sweep_directories, temporary_path

__all__ = [
    *("check_replaceable", "remove_checkpoint", "remove_leftovers", "remove_replaced", "set_aside", "set_aside_old"),
    "siblings",
]

log = logging.getLogger(__name__)


def check_replaceable(directory: Path, *, over_files: bool = False) -> None:
    """Refuse to replace what is no checkpoint, or holds something that is not the checkpoint's.

    Args:
        over_files: a regular file, or a symbolic link, may be replaced.

    Raises:
        SwapError: see above.
    """
    if not os.path.lexists(directory):
        return
    if over_files and (directory.is_symlink() or directory.is_file()):
        return
    if directory.is_symlink() or not directory.is_dir():
        raise SwapError(f"{directory} exists and is no directory; save the checkpoint under another name")
    with system_errors("read", directory):
        names = set(os.listdir(directory))
        found = look_at(directory)
    if not names:
        return
    if found is None:
        raise SwapError(f"{directory} exists and is no whole checkpoint; save under another name, or remove it first")
    if others := sorted(names - found.files_in(None) - {INDEX}):
        raise SwapError(
            f"{directory} would be replaced, and has files that are not the checkpoint's: {', '.join(others[:5])}; "
            "move them elsewhere, or save under another name"
        )


def remove_leftovers(parent: Path, annexes: list[OldAnnex] | None = None) -> None:
    """Remove what saves that were killed have left in `parent`. Never raises for what cannot be removed.

    Args:
        annexes: gets the annexes of what is removed, which the caller removes. Without it what has annexes is left, for
            a save that all ranks make.
    """

    def leaves(path: Path) -> bool:
        try:
            found = annexes_of(path)
        except OSError:
            return True
        if annexes is not None:
            annexes.extend(found)
        return bool(found) and annexes is None

    sweep_directories(parent, lambda path: glance(path) is not None, leaves)


def remove_checkpoint(directory: Path, adopt: Adopt) -> None:
    """Remove a checkpoint of ours. It is never seen in part. Never raises for what cannot be removed."""
    if (path := set_aside(directory)) is not None:
        remove_replaced(path, adopt)


def set_aside(directory: Path) -> Path | None:
    """Give a checkpoint of ours a temporary name, for `remove_replaced`. None if that cannot be, which is logged."""
    path = temporary_path(directory)
    try:
        keep_open(directory)  # Weights that are read in place may be there.
        os.rename(directory, path)
    except OSError as error:
        log.warning("could not remove the checkpoint %s: %s", directory, str(error))
        return None
    return path


def siblings(directory: Path, run: str) -> list[tuple[int, Path]]:
    """The checkpoints of a training beside `directory`, itself among them, in the order in which they were made."""
    found = []
    try:
        beside = list(directory.parent.iterdir())
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "list", directory.parent) from error
    for path in beside:
        whose = None if path.name.startswith(".") else glance(path, len(beside))
        if whose is not None and whose.run == run:
            found.append((whose.sequence, path))
    return sorted(found)


def set_aside_old(directory: Path, run: str, keep_last: int | None, replaced: Path | None) -> list[Path]:
    """Give the checkpoints beyond `keep_last` temporary names. Never raises for what cannot be.

    Returns:
        What is to be removed, the checkpoint that was replaced too.
    """
    found = [] if replaced is None else [replaced]
    try:
        too_many = siblings(directory, run)[:-keep_last] if keep_last else []
    except SwapIOError as error:
        log.warning("old checkpoints are left alone: %s", str(error))
        return found
    for _, path in too_many:
        try:
            check_replaceable(path)
        except SwapError as error:
            log.warning("an old checkpoint is left alone: %s", str(error))
            continue
        if (aside := set_aside(path)) is not None:
            found.append(aside)
    return found


def remove_replaced(path: Path, adopt: Adopt = lambda _: False, *, annexes_too: bool = True) -> None:
    """As `remove_checkpoint`, of what has a temporary name: a checkpoint, or a file or link that one has replaced.

    Args:
        annexes_too: those of its annexes that this process reaches. False if they are removed already.
    """
    try:
        if annexes_too:  # First: if that ends in the middle, what names the others is there for the next save.
            report_left(remove_annexes(annexes_of(path), adopt))
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            remove_files(path, adopt, last=INDEX)
    except OSError as error:
        log.warning("could not remove all of the checkpoint %s: %s", path, str(error))
