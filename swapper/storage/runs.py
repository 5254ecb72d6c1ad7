"""Run directories: where the records of a process are, and what killed runs left behind.

Run directory: `<nvme_path>/swapper-<run>-<rank>/`, mode 0700, files 0600. It is made under a temporary name, its
lock file locked, then renamed, so that a directory with that name always has an owner or is a dead run's leftover.
This module is the only owner of the names of directories, of the lock and of clean-up.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import logging
import os
import pwd
import secrets
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from swapper.errors import SwapIOError, system_errors
from swapper.sizes import format_bytes
from swapper.storage.mounts import NvmePathError

__all__ = [
    "Removal",
    "RunDirectory",
    "RunState",
    "boot_id",
    "find_runs",
    "make_run_directory",
    "remove_run",
    "remove_run_directory",
    "remove_stale_runs",
    "run_directory_of",
]

log = logging.getLogger(__name__)

_PREFIX = "swapper-"
_TEMPORARY_PREFIX = ".swapper-new-"
_LOCK = "lock"
_LOCK_BYTES_MAX = 4096
_GRACE_S = 600.0
"""A temporary directory without a lock younger than this may be one that another process is just making."""


@dataclass(frozen=True)
class _Owner:
    """The content of a lock file; None for what is missing or of another type."""

    boot_id: str | None = None
    host: str | None = None
    pid: int | None = None
    run: str | None = None
    rank: int | None = None

    @classmethod
    def parse(cls, text: bytes) -> _Owner | None:
        try:
            owner = json.loads(text)
        except (ValueError, RecursionError):  # The latter of "[[[[...".
            return None
        if not isinstance(owner, dict):
            return None
        types = {"boot_id": str, "host": str, "pid": int, "run": str, "rank": int}
        return cls(**{name: owner[name] for name, kind in types.items() if isinstance(owner.get(name), kind)})


def boot_id() -> str:
    """Return the id of this boot of the host; "" if the system does not give it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def make_run_directory(nvme_path: Path, run: str, rank: int) -> tuple[Path, int]:
    """Make and lock the directory of a run. Returns it, and the descriptor that holds the lock.

    Raises:
        NvmePathError: it cannot be made, or another run has this name.
    """
    directory = nvme_path / f"{_PREFIX}{run}-{rank}"
    temporary = nvme_path / f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    lock = -1
    try:
        temporary.mkdir(mode=0o700)
        lock = os.open(temporary / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Waits only where another process just looks whether this is a leftover; it will let go at once.
        fcntl.flock(lock, fcntl.LOCK_EX)
        owner = _Owner(boot_id(), socket.gethostname(), os.getpid(), run, rank)
        os.write(lock, json.dumps(asdict(owner)).encode())
        if directory.exists():
            raise FileExistsError(errno.EEXIST, "another run has this name", str(directory))
        temporary.rename(directory)
    except BaseException as error:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            number = error.errno or errno.EIO
            taken = number in (errno.EEXIST, errno.ENOTEMPTY)
            detail = "another run has this name" if taken else "nothing was left behind"
            raise NvmePathError(number, "make the run directory", directory, detail) from error
        raise
    return directory, lock


def remove_run_directory(directory: Path, lock: list[int]) -> None:
    """Remove the directory of a run and let go of its lock, the only item of `lock`. Failures are logged.

    Those of other ranks of the run that were killed go with it: some launchers end a run by killing all but one.
    """
    try:
        _remove_directory(directory)
    except FileNotFoundError:
        pass  # Somebody else removed it.
    except OSError as error:
        log.error(
            "could not remove %s: %s; `swapper clean %s` removes it once that is mended",
            directory,
            str(error),
            shlex.quote(str(directory.parent)),
        )
    if lock:
        os.close(lock.pop())
    run = directory.name.rpartition("-")[0]
    with contextlib.suppress(SwapIOError):  # Nobody can list the directory any more.
        for other in _candidates(directory.parent):
            if other.name.rpartition("-")[0] == run and other != directory:
                _remove_if_stale(other)


def _remove_directory(directory: Path) -> None:
    """Remove a run directory, its lock file last: if this is killed in the middle, the next start removes the rest."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in os.listdir(descriptor):
            if name != _LOCK:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(directory)


# --- What other runs left ------------------------------------------------------------------------------------------


class RunState(enum.Enum):
    """Tells if anybody still uses a run directory."""

    ALIVE = "alive"
    """Its lock is held."""
    STALE = "stale"
    """Its lock is free and was taken in this boot, or on this host in an earlier one: nobody will come back."""
    NEW = "new"
    """A temporary directory so young that another process may be just making it."""
    UNKNOWN = "unknown"
    """Anything else. On a network file system it may be another host's live run."""


@dataclass(frozen=True)
class RunDirectory:
    """A run directory as it was found. What could not be read is None.

    Attributes:
        path: absolute.
        temporary: not yet renamed to its final name by its maker.
        state: whether anybody uses it.
        reason: how that is known, for people.
        run, rank, host, pid: as its lock file says.
        program: what runs under that pid, where it is of this host and may be looked at.
        uid, user: owner of the directory; `user` is None where the uid has no name.
        started_unix_s: when its lock was made, else when the directory last changed.
        size_bytes: blocks on the drive.
        files: how many, the lock among them.
    """

    path: Path
    temporary: bool
    state: RunState
    reason: str
    run: str | None
    rank: int | None
    host: str | None
    pid: int | None
    program: str | None
    uid: int
    user: str | None
    started_unix_s: float
    size_bytes: int | None
    files: int | None


@dataclass(frozen=True)
class Removal:
    """Result of the removal of a directory.

    Attributes:
        removed: whether this call removed it.
        freed_bytes: blocks on the drive that this freed.
        state: as found; None if it was gone already.
        reason: why it was left alone, or what made it stale.
    """

    removed: bool
    freed_bytes: int
    state: RunState | None
    reason: str


@dataclass(frozen=True)
class _Verdict:
    state: RunState
    reason: str
    owner: _Owner = _Owner()


def find_runs(nvme_path: Path) -> list[RunDirectory]:
    """The run directories in `nvme_path`, in order of their names; or `nvme_path` alone if it is one itself.

    Looks at each lock for a moment and changes nothing. What only looks like a run directory is left out.

    Raises:
        SwapIOError: `nvme_path` cannot be listed.
    """
    nvme_path = Path(os.path.abspath(nvme_path))
    found = []
    for directory in [nvme_path] if _is_named_like_a_run(nvme_path) else _candidates(nvme_path):
        with contextlib.suppress(FileNotFoundError):  # Somebody removed it meanwhile.
            try:
                # A shared lock, so that several can look at once.
                with _judged(directory, exclusive=False) as verdict:
                    pass
            except FileNotFoundError:
                raise
            except OSError as error:
                verdict = _Verdict(RunState.UNKNOWN, f"its lock cannot be looked at: {error.strerror}")
            if verdict is not None:
                found.append(_described(directory, verdict))
    return found


def remove_run(directory: Path, *, force: bool = False) -> Removal:
    """Remove a run directory if it is stale, which is judged anew with its lock held.

    Args:
        directory: from `find_runs`, or as the user names it.
        force: also remove one whose state is `UNKNOWN`: the user says that its run is dead.

    Raises:
        SwapIOError: it cannot be looked at or removed.
    """
    directory = Path(os.path.abspath(directory))
    try:
        if not _is_named_like_a_run(directory):
            os.lstat(directory)
            return Removal(False, 0, None, "it is no run directory")
        with _judged(directory, exclusive=True) as verdict:
            if verdict is None:
                return Removal(False, 0, None, "it is no run directory")
            if verdict.state is not RunState.STALE and not (force and verdict.state is RunState.UNKNOWN):
                return Removal(False, 0, verdict.state, verdict.reason)
            freed_bytes, _ = _usage(directory)
            _remove_directory(directory)
            return Removal(True, freed_bytes, verdict.state, verdict.reason)
    except FileNotFoundError:
        return Removal(False, 0, None, "it is gone")
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "remove the run directory", directory) from error


def remove_stale_runs(nvme_path: Path) -> None:
    """Remove what killed runs left in `nvme_path`, and log the bytes freed.

    What is `STALE` is removed. What is `UNKNOWN` is left alone and named.
    """
    try:
        candidates = _candidates(nvme_path)
    except SwapIOError as error:
        log.warning("could not clean up: %s", str(error))
        return
    for directory in candidates:
        removal = _remove_if_stale(directory)
        if removal is not None and removal.state is RunState.UNKNOWN:
            log.warning(
                "%s is left alone: %s; if that run is dead, `swapper clean --force %s` frees its space",
                directory,
                removal.reason,
                shlex.quote(str(directory)),
            )


def _remove_if_stale(directory: Path) -> Removal | None:
    """As `remove_run`, with what became of it in the log; None if that failed."""
    try:
        removal = remove_run(directory)
    except SwapIOError as error:
        log.warning("could not clean up %s: %s", directory, str(error))
        return None
    if removal.removed:
        freed = format_bytes(removal.freed_bytes)
        log.warning("removed %s, left by a run that ended without cleaning up: %s freed", directory, freed)
    return removal


def run_directory_of(path: Path) -> Path | None:
    """The run directory that `path` is, or is in, if it is in one: what is there goes with the run."""
    above = Path(os.path.realpath(path))
    runs = (each for each in (above, *above.parents) if _is_named_like_a_run(each) and (each / _LOCK).exists())
    return next(runs, None)


def _is_named_like_a_run(path: Path) -> bool:
    name = path.name
    named = name.startswith(_TEMPORARY_PREFIX) or (name.startswith(_PREFIX) and "-" in name.removeprefix(_PREFIX))
    return named and os.path.isdir(path) and not os.path.islink(path)


def _candidates(nvme_path: Path) -> list[Path]:
    with system_errors("list the directory", nvme_path):
        os.stat(os.path.join(nvme_path, "."))  # To read names is one permission, to follow them another.
        names = sorted(os.listdir(nvme_path))
    return [nvme_path / name for name in names if _is_named_like_a_run(nvme_path / name)]


@contextlib.contextmanager
def _judged(directory: Path, *, exclusive: bool) -> Iterator[_Verdict | None]:
    """The state of a directory; None if it is no run directory. If its lock is free it is held in the block.

    Raises:
        FileNotFoundError: the directory is gone.
        OSError: it cannot be told.
    """
    lock = -1
    try:
        # On NFS an exclusive lock needs a file that is open for writing.
        flags = os.O_RDWR if exclusive else os.O_RDONLY
        # Whatever it is that has this name: opening it must neither follow it nor wait for it.
        lock = os.open(directory / _LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        ours = stat.S_ISREG(os.fstat(lock).st_mode)
    except FileNotFoundError:
        os.lstat(directory)
        ours = True
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        ours = False  # A link, a directory, a socket.
    try:
        yield _verdict(directory, lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) if ours else None
    finally:
        if lock >= 0:
            os.close(lock)


def _verdict(directory: Path, lock: int, operation: int) -> _Verdict | None:
    temporary = directory.name.startswith(_TEMPORARY_PREFIX)
    text = b""
    if lock >= 0:
        try:
            fcntl.flock(lock, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _Owner.parse(os.pread(lock, _LOCK_BYTES_MAX, 0))
            return _Verdict(RunState.ALIVE, "its lock is held", owner or _Owner())
        if os.fstat(lock).st_nlink == 0:
            # Another process removed it meanwhile, so whatever has this name now is a new run.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        text = os.pread(lock, _LOCK_BYTES_MAX, 0)
    if temporary and not text:
        # Without a lock, or with one that is free and empty: its maker is between two steps, or died there.
        if time.time() - directory.stat().st_mtime > _GRACE_S:
            return _Verdict(RunState.STALE, "its maker died before it was done")
        return _Verdict(RunState.NEW, "it is being made, or its maker died in the last ten minutes")
    if lock < 0:
        return None
    owner = _Owner.parse(text)
    if owner is None:
        return _Verdict(RunState.UNKNOWN, "its lock file does not say whose it is")
    boot = boot_id()
    if boot and owner.boot_id == boot:
        return _Verdict(RunState.STALE, "its lock is free", owner)
    if owner.host == socket.gethostname():
        return _Verdict(RunState.STALE, "its lock is free, and this host was booted since", owner)
    return _Verdict(RunState.UNKNOWN, f"it belongs to a run on host {owner.host or 'unknown'}", owner)


def _described(directory: Path, verdict: _Verdict) -> RunDirectory:
    status = directory.lstat()
    try:
        started = (directory / _LOCK).lstat().st_mtime
    except OSError:
        started = status.st_mtime
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = None
    try:
        size_bytes, files = _usage(directory)
    except FileNotFoundError:
        raise
    except OSError:
        size_bytes, files = None, None
    owner = verdict.owner
    running = verdict.state is RunState.ALIVE and owner.host == socket.gethostname() and owner.boot_id == boot_id()
    return RunDirectory(
        path=directory,
        temporary=directory.name.startswith(_TEMPORARY_PREFIX),
        state=verdict.state,
        reason=verdict.reason,
        run=owner.run,
        rank=owner.rank,
        host=owner.host,
        pid=owner.pid,
        program=_program(owner.pid) if running and owner.pid is not None else None,
        uid=status.st_uid,
        user=user,
        started_unix_s=started,
        size_bytes=size_bytes,
        files=files,
    )


def _usage(directory: Path) -> tuple[int, int]:
    """Bytes of blocks on the drive, and how many files. Files that vanish meanwhile do not count."""
    found: dict[int, int] = {}  # by inode: a file that is pinned has two names
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            found[status.st_ino] = status.st_blocks * 512
    return sum(found.values()), len(found)


def _program(pid: int) -> str | None:
    """The program of a process, as in "python train.py"; None if it is gone or may not be looked at."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    shown = [os.path.basename(words[0]), *words[1:3]][: 3 if words[1:2] == ["-m"] else 2]
    return " ".join(word for word in shown if word) or None
