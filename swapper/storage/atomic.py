"""Files and directories that appear under their names whole, or not at all.

[Note: publishing] Everything is written beside its place: a file without a name (O_TMPFILE), or under a temporary one
where the file system lacks that; a directory as `.NAME.tmp-ID`. Its writer holds an exclusive flock(2) on it. When it
is complete it is synced and gets its name in one step: by link(2), by a rename, or by an exchange with what had the
name. Then the directory above is synced. So whoever opens the name finds something whole, whatever was killed when.

A writer that is killed may leave a temporary name behind. The next writer in that directory finds its lock free and
removes it. Names of temporary files say on which host they were made: on a network file system locks of other hosts
need not be seen, and their files are left alone.

    with NewFile("state.json") as new:
        os.write(new.descriptor, data)
        new.publish()

    sweep_directories(target.parent, is_whole)
    with NewDirectory(target) as new:
        (new.path / "a").write_bytes(data)
        replaced = new.publish(syncs=[partial(sync_path, new.path / "a")])
    if replaced is not None:
        remove_tree(replaced)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from swapper.errors import SwapIOError, system_errors
from swapper.io.handle import exchange, keep_open
from swapper.process.finalizers import finalizer
from swapper.process.interrupts import interrupts_deferred

__all__ = [
    "MARK",
    "MarkedDirectory",
    "NewDirectory",
    "NewFile",
    "all_at_once",
    "claim",
    "is_being_written",
    "locked_directory",
    "put_in_place",
    "remove_tree",
    "sweep_directories",
    "sweep_files",
    "sync_path",
    "temporary_file_name",
    "temporary_path",
]

log = logging.getLogger(__name__)

MARK = ".swapper-unfinished"
"""A file in each directory that is unfinished, or is being removed."""

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
_SYNC_THREADS = 4
"""Files that are synced at once."""


class _New:
    """Something that is being written."""

    def __init__(self) -> None:
        self._removals = contextlib.ExitStack()
        self._descriptors = contextlib.ExitStack()
        # For Ctrl-C after this was made and before the caller has it; and for callers that forget it.
        self._finalizer = finalizer(self, _close_unattended, self._removals, self._descriptors, os.getpid())

    def close(self) -> None:
        """Remove what was not published, and let go of the lock. Idempotent."""
        _close(self._removals, self._descriptors)
        self._finalizer.detach()  # Only now: after Ctrl-C in the line above it is still there to try again.

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _close(removals: contextlib.ExitStack, descriptors: contextlib.ExitStack) -> None:
    try:
        removals.close()
    finally:  # The locks last: they tell a sweep that somebody else removes it.
        with interrupts_deferred():
            descriptors.close()


def _close_unattended(removals: contextlib.ExitStack, descriptors: contextlib.ExitStack, pid: int) -> None:
    if os.getpid() == pid:  # In a forked child it is the parent's.
        _close(removals, descriptors)


def _opened(stack: contextlib.ExitStack, path: str | Path, flags: int, directory: int | None = None) -> int:
    """A descriptor that `stack` closes."""
    with interrupts_deferred():
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666, dir_fd=directory)
        stack.callback(os.close, descriptor)
    return descriptor


# --- Files -------------------------------------------------------------------------------------------------------


class NewFile(_New):
    """A file that gets a name, or replaces the file of that name, in one step. See [Note: publishing].

    A context manager that closes it.

    Args:
        path: a symbolic link is followed. What exists there keeps its mode, and is whole until `publish`.

    Attributes:
        path: with links followed.
        descriptor: open for reading and writing until `close`; of an empty file.

    Raises:
        SwapIOError: there is no such directory, it cannot be written, or what exists at `path` is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = os.path.realpath(os.fsdecode(path))
        directory, self._name = os.path.split(self.path)
        self._temporaries: list[str] = []
        try:
            with system_errors("open", self.path):
                _check_regular(self.path)
                self._directory = _opened(self._descriptors, directory, os.O_RDONLY | os.O_DIRECTORY)
                self._removals.callback(_unlink_all, self._temporaries, self._directory)
                sweep_files(self._directory)
                self.descriptor = self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NewFile:
        return self

    def _open(self) -> int:
        try:
            descriptor = _opened(self._descriptors, ".", os.O_RDWR | os.O_TMPFILE, self._directory)
            claim(descriptor, None, self._directory)  # Before it has a name.
            return descriptor
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        while True:
            # Known before it exists, so that it is removed whatever strikes.
            self._temporaries[:] = [temporary_file_name()]
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            descriptor = _opened(self._descriptors, self._temporaries[0], flags, self._directory)
            if claim(descriptor, self._temporaries[0], self._directory):
                return descriptor

    def publish(self) -> None:
        """Sync the file and give it its name. It survives a loss of power when this returns.

        Raises:
            SwapIOError: the drive has failed, or the directory is gone. What had the name is whole.
        """
        with system_errors("sync", self.path):
            os.fdatasync(self.descriptor)
        with system_errors("publish", self.path):
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(self.descriptor, stat.S_IMODE(os.stat(self._name, dir_fd=self._directory).st_mode))
            if not self._temporaries:
                try:
                    self._link(self._name)
                except FileExistsError:
                    self._temporaries.append(temporary_file_name())
                    self._link(self._temporaries[0])
            if self._temporaries:
                keep_open(self.path)  # Weights that are read in place may be what it replaces.
                os.rename(self._temporaries[0], self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
                self._temporaries.clear()
            os.fsync(self._directory)

    def _link(self, name: str) -> None:
        # With a directory, or Python would take link(2), which links the symbolic link in /proc itself.
        source = f"/proc/self/fd/{self.descriptor}"
        os.link(source, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=True)


def _check_regular(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = errno.EISDIR if os.path.isdir(path) else errno.EINVAL
            raise SwapIOError(kind, "open", path, detail="only a regular file can be replaced")
    if not os.path.basename(path):
        raise SwapIOError(errno.EISDIR, "open", path)


def _unlink_all(names: list[str], directory: int) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _host_prefix() -> str:
    return f".swapper-{hashlib.blake2s(os.fsencode(socket.gethostname()), digest_size=4).hexdigest()}-"


def temporary_file_name() -> str:
    """A name that no file has, by which `sweep_files` of this host knows it."""
    return f"{_host_prefix()}{secrets.token_hex(8)}.tmp"


def claim(descriptor: int, name: str | None, directory: int) -> bool:
    """Lock a file that is going to be written, until its descriptor is closed.

    Args:
        descriptor: of the file, opened for writing.
        name: of the file; None if it has none yet.
        directory: descriptor of that which it is in.

    Returns:
        False if another process has just taken it for a leftover: it is gone, or will be.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # There are no locks on this file system: nobody gets one, and nothing is removed.
    try:
        return name is None or os.path.samestat(os.stat(name, dir_fd=directory), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sweep_files(directory: int) -> None:
    """Remove the temporary files of dead processes of this host. What cannot be looked at or removed is left.

    Args:
        directory: descriptor of the directory.
    """
    pattern = re.compile(re.escape(_host_prefix()) + r"[0-9a-f]{16}\.tmp")
    with contextlib.suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(directory)):
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                # For writing: on NFS an exclusive lock needs that.
                file = _opened(stack, name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, directory)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(file).st_mode):
                    os.unlink(name, dir_fd=directory)


# --- Directories -------------------------------------------------------------------------------------------------

_TEMPORARY_PATH = re.compile(r"\..+\.tmp-[0-9a-f]{12}")


class MarkedDirectory(_New):
    """A directory that has its name from the start, with `MARK` in it, and locked, until it is complete.

    Args:
        free_path: gives a path that nothing has, another one at each call; absolute, the directory above it exists.

    Attributes:
        path: of the directory, which is empty but for `MARK`. `close` removes it, unless `keep` was called.

    Raises:
        SwapIOError: it cannot be made.
    """

    def __init__(self, free_path: Callable[[], Path]) -> None:
        super().__init__()
        self._unfinished: list[Path] = []
        self._removals.callback(_remove_trees, self._unfinished)
        try:
            while True:
                self.path = free_path()
                self._unfinished.append(self.path)  # Before it exists, so that it is removed whatever strikes.
                with system_errors("create", self.path):
                    self.path.mkdir()
                    if _locked(self.path, self._descriptors):  # Else a sweep has found it between the two lines.
                        (self.path / MARK).touch()
                        self._status = os.stat(self.path)
                        return
        except BaseException:
            self.close()
            raise

    def at_close(self, action: Callable[[], object]) -> None:
        """Have `action` called by `close`, before the directory is removed."""
        self._removals.callback(action)

    def keep(self) -> None:
        """Have it stay when it is closed."""
        self._unfinished.clear()

    def is_in_place(self) -> bool:
        """True if the directory is known to be where it was made."""
        try:
            return os.path.samestat(os.stat(self.path), self._status)
        except OSError:
            return False


class NewDirectory(MarkedDirectory):
    """A directory that gets a name, or replaces what has that name, in one step. See [Note: publishing].

    A context manager that closes it.

    Args:
        target: absolute; the directory above it exists.

    Attributes:
        path: where it is until `publish`: empty but for `MARK`, and locked.

    Raises:
        SwapIOError: it cannot be made.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        super().__init__(partial(temporary_path, target))

    def __enter__(self) -> NewDirectory:
        return self

    def publish(
        self, check: Callable[[], object] = lambda: None, syncs: Sequence[Callable[[], object]] = ()
    ) -> Path | None:
        """Sync the directory and give it its name.

        Args:
            check: called just before; raises if what has the name is not to be replaced.
            syncs: called before, several at once; they sync the files.

        Returns:
            The new path of what had the name, which the caller removes; None if nothing had it.

        Raises:
            SwapIOError: the drive has failed, or the directory is gone. What had the name is whole and still has it.
        """
        with system_errors("publish", self._target):
            (self.path / MARK).unlink()
        # All at once: one commit of the file system's journal then serves many.
        all_at_once([*syncs, partial(sync_path, self.path)])
        with system_errors("publish", self._target):
            check()
            replaced = put_in_place(self.path, self._target)
        self.keep()
        return self.path if replaced else None


def temporary_path(target: Path) -> Path:
    """A path beside `target` that nothing has, by which `sweep_directories` knows it."""
    return target.parent / f".{target.name}.tmp-{secrets.token_hex(6)}"


def is_being_written(target: Path) -> bool:
    """True while a writer that lives has a directory for `target` that is not complete yet. Never raises."""
    try:
        names = [name for name in os.listdir(target.parent) if _TEMPORARY_PATH.fullmatch(name)]
        for path in (target.parent / name for name in names if name.rpartition(".tmp-")[0] == f".{target.name}"):
            with contextlib.ExitStack() as stack:
                if path.is_dir() and not _locked(path, stack) and path.exists():
                    return True
    except OSError:
        pass
    return False


def put_in_place(path: Path, target: Path) -> bool:
    """Give a file or directory that is synced the name `target`, and sync that.

    Returns:
        Whether something had that name, and now has `path`.

    Raises:
        OSError: nothing has changed.
    """
    replaces = os.path.lexists(target)
    if replaces:
        keep_open(target)  # Weights that are read in place may be there.
    move = exchange if replaces else os.rename
    move(path, target)
    try:
        sync_path(target.parent)
    except BaseException:
        # Nobody knows which of the two a loss of power would leave: it is to be the one that was there.
        move(target, path)
        raise
    return replaces


def sync_path(path: Path) -> None:
    """Have a file, or the names in a directory, survive a loss of power."""
    with system_errors("sync", path), contextlib.ExitStack() as stack:
        os.fsync(_opened(stack, path, os.O_RDONLY))


def sweep_directories(
    parent: Path, is_whole: Callable[[Path], bool], leaves: Callable[[Path], bool] = lambda _: False
) -> None:
    """Remove what dead writers of directories left in `parent`. Never raises for what cannot be removed.

    Args:
        is_whole: whether a path is a published directory of the caller's kind. Only such a one, one with `MARK` and an
            empty one are removed; of files and links those whose name was given to such a one.
        leaves: called just before a directory is removed; True leaves it.
    """
    try:
        names = [name for name in os.listdir(parent) if _TEMPORARY_PATH.fullmatch(name)]
    except OSError:
        return
    for path in (parent / name for name in names):
        try:
            with contextlib.ExitStack() as stack:
                if path.is_symlink() or path.is_file():
                    if is_whole(parent / path.name[1 : path.name.rindex(".tmp-")]):
                        path.unlink(missing_ok=True)
                elif path.is_dir() and _locked(path, stack):
                    inside = os.listdir(path)
                    if (not inside or MARK in inside or is_whole(path)) and not leaves(path):
                        remove_tree(path)
                        log.info("removed %s: what a save that was killed had left", path)
        except OSError as error:
            log.warning("could not remove %s: %s", path, str(error))


def remove_tree(path: Path, adopt: Callable[[Path], bool] = lambda _: False, *, last: str = MARK) -> None:
    """Remove a directory that has a temporary path. If that ends in the middle, the next sweep removes the rest.

    Args:
        adopt: moves a file elsewhere if it is of use, and says whether it did.
        last: name of the file by which a directory is recognised that could not be marked, as on a full drive.

    Raises:
        OSError: something cannot be removed.
    """
    with contextlib.suppress(OSError):  # As when the drive is full.
        (path / MARK).touch()
    for name in sorted(os.listdir(path), key=lambda name: (name in (last, MARK), name == MARK)):
        inside = path / name
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        elif not adopt(inside):
            inside.unlink()
    try:
        path.rmdir()
    except OSError:  # Another process of the same save has put a file there in the meantime: a sweep is to know it.
        with contextlib.suppress(OSError):
            (path / MARK).touch()
        raise


def _remove_trees(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            remove_tree(path)


@contextlib.contextmanager
def locked_directory(directory: Path) -> Iterator[bool]:
    """Lock a directory for a while. False if another process has the lock, or the directory is gone.

    Raises:
        OSError: it is no directory, or cannot be looked at.
    """
    with contextlib.ExitStack() as stack:
        yield _locked(directory, stack)


def _locked(directory: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a directory until `stack` is closed. False if another process has the lock, or the directory is gone."""
    try:
        descriptor = _opened(stack, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    # A forked child may have the descriptor, too: closing it here would leave the lock.
    stack.callback(_unlock, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


# --- Threads -----------------------------------------------------------------------------------------------------


def all_at_once(actions: Sequence[Callable[[], object]]) -> None:
    """Call each, some at the same time. All are over when this returns, or raises what the first that failed did.

    Without more threads, as there are none when the interpreter ends, it is one after the other.
    """
    left = list(reversed(actions))
    failures: list[BaseException] = []

    def work() -> None:
        with contextlib.suppress(IndexError):
            while not failures:
                action = left.pop()
                try:
                    action()
                except BaseException as error:
                    failures.append(error)

    threads = [threading.Thread(target=work, name="swapper-sync") for _ in actions[1:_SYNC_THREADS]]
    try:
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
        work()
    finally:
        left.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]
