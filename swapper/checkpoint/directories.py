"""The directories of checkpoints: which may be replaced, which are left over; their locks, sync, and removal."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from swapper.checkpoint.index import INDEX, glance, look_at
from swapper.errors import SwapError, system_errors

__all__ = [
    "MARK",
    "check_replaceable",
    "descriptors_of",
    "locked",
    "open_into",
    "remove_checkpoint",
    "remove_leftovers",
    "remove_tree",
    "sync_path",
    "unlock",
]

log = logging.getLogger(__name__)

MARK = ".swapper-unfinished"
TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{12}")
_RECORD = re.compile(r".+-[0-9]{5}\.safetensors")


def sync_path(path: Path) -> None:
    """Have a file, or the names in a directory, survive a loss of power."""
    with system_errors("sync", path), contextlib.ExitStack() as stack:
        descriptors = descriptors_of(stack)
        open_into(path, os.O_RDONLY, descriptors)
        os.fsync(descriptors[-1] or 0)


def descriptors_of(stack: contextlib.ExitStack) -> list[int | None]:
    """A list for `open_into`; `stack` closes what is in it."""
    descriptors: list[int | None] = [None]  # At the bottom, where it stops.
    # By C code alone, in which no Ctrl-C can be raised: none is closed twice, and none is forgotten.
    stack.callback(deque, map(os.close, iter(descriptors.pop, None)), 0)
    return descriptors


def open_into(path: Path, flags: int, descriptors: list[int | None]) -> None:
    """Open, and put the descriptor at the end of a list, by C code alone again."""
    descriptors.extend(map(os.open, [path], [flags | os.O_CLOEXEC]))


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
    if others := sorted(names - found.files.keys() - {INDEX}):
        raise SwapError(
            f"{directory} would be replaced, and has files that are not the checkpoint's: {', '.join(others[:5])}; "
            "move them elsewhere, or save under another name"
        )


def locked(directory: Path, locks: list[int | None]) -> bool:
    """Put a descriptor that holds the lock of `directory` into `locks`. False if another has it, or it is gone."""
    try:
        open_into(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, locks)
    except FileNotFoundError:
        return False
    with contextlib.suppress(BlockingIOError):
        descriptor = locks[-1]
        assert descriptor is not None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink > 0:
            return True
    return False


def unlock(locks: Sequence[int | None]) -> None:
    """Before the descriptors are closed: a forked child may have them, too."""
    for descriptor in locks:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)


def remove_leftovers(parent: Path) -> None:
    """Remove what saves that were killed have left in `parent`. Never raises for what cannot be removed."""
    try:
        names = [name for name in os.listdir(parent) if TEMPORARY.fullmatch(name)]
    except OSError:
        return
    for path in (parent / name for name in names):
        try:
            with contextlib.ExitStack() as stack:
                if path.is_symlink() or path.is_file():
                    # What had a checkpoint's name, if that is there.
                    if glance(parent / path.name[1 : path.name.rindex(".tmp-")]) is not None:
                        path.unlink(missing_ok=True)
                    continue
                if not path.is_dir() or not locked(path, descriptors_of(stack)):
                    continue
                inside = os.listdir(path)
                if not inside or MARK in inside or glance(path) is not None:
                    remove_tree(path)
                    log.info("removed %s: what a save that was killed had left", path)
        except OSError as error:
            log.warning("could not remove %s: %s", path, error)


def remove_tree(path: Path) -> None:
    """Remove an unfinished checkpoint. If that ends in the middle, what is left is still known as one."""
    with contextlib.suppress(OSError):
        for name in _what_marks_it_last(path):
            inside = path / name
            (os.unlink if inside.is_symlink() or not inside.is_dir() else shutil.rmtree)(inside)
        os.rmdir(path)


def _what_marks_it_last(directory: Path) -> list[str]:
    return sorted(os.listdir(directory), key=lambda name: name in (MARK, INDEX))


def remove_checkpoint(directory: Path, adopt: Callable[[Path], bool]) -> None:
    """Remove a checkpoint of ours. It is never seen in part. Never raises for what cannot be removed.

    Args:
        directory: of the checkpoint; or a file or link that was replaced by one.
        adopt: takes the file of a record, if it is of use.
    """
    path = directory
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        if not TEMPORARY.fullmatch(path.name):
            path = directory.parent / f".{directory.name}.tmp-{secrets.token_hex(6)}"
            os.rename(directory, path)
        for name in _what_marks_it_last(path):
            if not _RECORD.fullmatch(name) or not adopt(path / name):
                os.unlink(path / name)
        os.rmdir(path)
    except OSError as error:
        log.warning("could not remove all of the checkpoint %s: %s", directory, error)
