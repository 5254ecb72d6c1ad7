"""The directories of checkpoints: put in place in one step; which may be replaced, which are left over; their removal.

[Note: whole or not there] Everything is written and synced in a sibling directory `.NAME.tmp-ID`, which is then renamed
to NAME, or exchanged with it where it exists. So whoever opens NAME finds a whole checkpoint, whatever was killed when.
The sibling is locked (flock) while somebody writes it: one that is not is left over, and removed by the next save or
load beside it. After an exchange it is the old checkpoint that has that name, and goes the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from swapper.checkpoint.index import INDEX, glance, look_at
from swapper.errors import SwapError, system_errors
from swapper.finalizers import finalizer
from swapper.interrupts import interrupts_deferred
from swapper.io.handle import exchange
from swapper.storage.store import all_at_once

__all__ = [
    "NewDirectory",
    "check_replaceable",
    "remove_checkpoint",
    "remove_leftovers",
    "remove_replaced",
    "sync_path",
]

log = logging.getLogger(__name__)

_MARK = ".swapper-unfinished"
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{12}")
_RECORD = re.compile(r".+-[0-9]{5}\.safetensors")


class NewDirectory:
    """A directory that is going to have a name, in one step. See [Note: whole or not there].

    Attributes:
        path: where it is until then. Locked, and gone after `close` unless `publish` has succeeded.

    Raises:
        SwapIOError: it cannot be made.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._unfinished: list[Path] = []
        self._stack = contextlib.ExitStack()
        # Ctrl-C may strike when this was made and its maker does not have it yet.
        finalizer(self, _close_unattended, self._stack, os.getpid())
        try:
            while not self._made():
                pass  # What removes leftovers has found it before it was locked.
        except BaseException:
            self.close()
            raise

    def _made(self) -> bool:
        self.path = _temporary_name(self._target)
        with system_errors("create", self.path):
            with interrupts_deferred():
                self.path.mkdir()
                self._unfinished.append(self.path)
            if not _locked(self.path, self._stack):
                return False
            # Called before the lock is given back, by which others know that somebody cares for it.
            self._stack.callback(_remove_trees, self._unfinished)
            (self.path / _MARK).touch()
            return True

    def at_close(self, action: Callable[[], object]) -> None:
        """Have `action` called by `close`, before the directory is removed."""
        self._stack.callback(action)

    def publish(self, check: Callable[[], None], syncs: Sequence[Callable[[], object]] = ()) -> Path | None:
        """Sync the directory and give it its name.

        Args:
            check: raises if something has the name that is not to be replaced.
            syncs: called before; they sync the files.

        Returns:
            The name of the directory or file that had the name; it is the caller's to remove. None if there was none.

        Raises:
            SwapIOError: the drive failed, or the directory is gone. What was there under the name is whole.
        """
        with system_errors("publish", self._target):
            (self.path / _MARK).unlink()
        # All at once: one commit of the file system's journal then serves many.
        all_at_once([*syncs, partial(sync_path, self.path)])
        with system_errors("publish", self._target):
            check()
            replaces = os.path.lexists(self._target)
            change = exchange if replaces else os.rename
            change(self.path, self._target)
            try:
                sync_path(self._target.parent)
            except BaseException:
                # Nobody knows which of the two a loss of power would leave: it is to be the one that was there.
                change(self._target, self.path)
                raise
        self._unfinished.clear()
        return self.path if replaces else None

    def close(self) -> None:
        """Leave nothing behind, but what was published. Idempotent."""
        self._stack.close()


def _close_unattended(stack: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:  # The directory is the parent's.
        stack.close()


def _remove_trees(paths: Sequence[Path]) -> None:
    for path in paths:
        _remove_tree(path)


def _temporary_name(directory: Path) -> Path:
    """A name beside `directory` that nobody looks at, and by which `remove_leftovers` knows what is left there."""
    return directory.parent / f".{directory.name}.tmp-{secrets.token_hex(6)}"


def sync_path(path: Path) -> None:
    """Have a file, or the names in a directory, survive a loss of power."""
    with system_errors("sync", path), contextlib.ExitStack() as stack:
        os.fsync(_opened(path, os.O_RDONLY, stack))


def _opened(path: Path, flags: int, stack: contextlib.ExitStack) -> int:
    """A descriptor that `stack` closes."""
    with interrupts_deferred():
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
    return descriptor


def _locked(directory: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a directory until `stack` is closed. False if another process has the lock, or the directory is gone."""
    try:
        descriptor = _opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, stack)
    except FileNotFoundError:
        return False
    # A forked child may have the descriptor, too: closing it here would leave the lock.
    stack.callback(_unlock, descriptor)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_nlink > 0
    return False


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


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


def remove_leftovers(parent: Path) -> None:
    """Remove what saves that were killed have left in `parent`. Never raises for what cannot be removed."""
    try:
        names = [name for name in os.listdir(parent) if _TEMPORARY.fullmatch(name)]
    except OSError:
        return
    for path in (parent / name for name in names):
        try:
            with contextlib.ExitStack() as stack:
                if path.is_symlink() or path.is_file():
                    # A file that had a checkpoint's name is removed only if the checkpoint is there.
                    if glance(parent / path.name[1 : path.name.rindex(".tmp-")]) is not None:
                        path.unlink(missing_ok=True)
                    continue
                if not path.is_dir() or not _locked(path, stack):
                    continue
                inside = os.listdir(path)
                if not inside or _MARK in inside or glance(path) is not None:
                    _remove_tree(path)
                    log.info("removed %s: what a save that was killed had left", path)
        except OSError as error:
            log.warning("could not remove %s: %s", path, error)


def remove_replaced(path: Path) -> None:
    """Remove a directory that another one has replaced, whatever is in it. Never raises for what cannot be removed."""
    with contextlib.suppress(OSError):
        (path / _MARK).touch()  # By which it is known, should this end in the middle.
    _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Remove an unfinished checkpoint. If that ends in the middle, what is left is still known as one."""
    with contextlib.suppress(OSError):
        for name in _marks_last(path):
            inside = path / name
            (os.unlink if inside.is_symlink() or not inside.is_dir() else shutil.rmtree)(inside)
        os.rmdir(path)


def _marks_last(directory: Path) -> list[str]:
    """The names in a directory; last those by which `remove_leftovers` knows it."""
    return sorted(os.listdir(directory), key=lambda name: name in (_MARK, INDEX))


def remove_checkpoint(directory: Path, adopt: Callable[[Path], bool] = lambda _: False) -> None:
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
        if not _TEMPORARY.fullmatch(path.name):
            path = _temporary_name(directory)
            os.rename(directory, path)
        for name in _marks_last(path):
            if not _RECORD.fullmatch(name) or not adopt(path / name):
                os.unlink(path / name)
        os.rmdir(path)
    except OSError as error:
        log.warning("could not remove all of the checkpoint %s: %s", directory, error)
