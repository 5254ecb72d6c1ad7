"""Where runs keep their files: the checks of a path, and the directory of each run.

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
import re
import secrets
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swapper.errors import ConfigError, SwapIOError
from swapper.sizes import format_bytes

__all__ = [
    "MEMORY_FILE_SYSTEMS",
    "FileSystem",
    "Mount",
    "NvmePathError",
    "Removal",
    "RunDirectory",
    "RunState",
    "check_nvme_path",
    "check_nvme_paths",
    "file_systems",
    "find_runs",
    "is_network_file_system",
    "make_run_directory",
    "mount_of",
    "mounts",
    "remove_run",
    "remove_run_directory",
    "remove_stale_runs",
]

log = logging.getLogger(__name__)

_PREFIX = "swapper-"
_TEMPORARY_PREFIX = ".swapper-new-"
_LOCK = "lock"
_GRACE_S = 600.0
"""A temporary directory without a lock younger than this may be one that another process is just making."""
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems whose files are memory."""
_NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "lustre",
    "ceph",
    "glusterfs",
    "beegfs",
    "afs",
    "fuse.sshfs",
}
_warned: set[str] = set()


class NvmePathError(ConfigError, SwapIOError):
    """`nvme_path` cannot be used: a setting to change, with the errno and path that say why."""

    def __init__(self, number: int, operation: str, path: str | os.PathLike[str], detail: str) -> None:
        SwapIOError.__init__(self, number, operation, path, detail=f"nvme_path: {detail}")
        # In the order of bases `ValueError` comes before `OSError`, and does not know what its arguments mean.
        OSError.__init__(self, number, self._message(number), self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.errno, self.operation, self.path, self.detail.removeprefix("nvme_path: ")))


# --- The path ------------------------------------------------------------------------------------------------------


def check_nvme_path(path: Path) -> None:
    """Refuse a path that cannot work, and log once what will be slow.

    Raises:
        NvmePathError: missing, not a directory, or not writable.
        ConfigError: in memory, unless the environment variable SWAPPER_ALLOW_TMPFS is 1.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise NvmePathError(errno.ENOENT, "open", path, f"make the directory first: mkdir -p {path}") from error
    except OSError as error:
        raise NvmePathError(error.errno or errno.EIO, "open", path, "name a directory") from error
    if not stat.S_ISDIR(mode):
        raise NvmePathError(errno.ENOTDIR, "open", path, "name a directory")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        number = error.errno or errno.EIO
        raise NvmePathError(number, "create a file in", path, "name a directory that this user may write to") from error
    kind = _file_system(path)
    if kind in MEMORY_FILE_SYSTEMS:
        if os.environ.get("SWAPPER_ALLOW_TMPFS") != "1":
            raise ConfigError(
                f"nvme_path: {path} is on {kind}, which is memory: swapping there saves nothing. Name a directory on a "
                "drive, use device: cpu, or set the environment variable SWAPPER_ALLOW_TMPFS=1 if you mean it"
            )
    elif is_network_file_system(kind):
        _warn_once(
            f"nvme_path: {path} is on a network file system ({kind}); expect it to be slow, prefer a local drive"
        )
    elif kind == "overlay":
        _warn_once(
            f"nvme_path: {path} is on a container's overlay file system; mount a volume from a local drive instead"
        )
    elif _is_rotating(path):
        _warn_once(
            f"nvme_path: the kernel says that the drive of {path} rotates; a solid-state drive is many times faster"
        )


def check_nvme_paths(paths: Sequence[Path]) -> None:
    """`check_nvme_path` for each of them; and refuse two that are not two places.

    Raises:
        NvmePathError: as for `check_nvme_path`.
        ConfigError: as for `check_nvme_path`; or two are one directory, or one is inside the other.
    """
    for path in paths:
        check_nvme_path(path)
    for i, path in enumerate(paths):
        for other in paths[:i]:
            if os.path.samefile(path, other):
                raise ConfigError(f"nvme_path: {other} and {path} are the same directory; name each drive once")
            for inner, outer in ((path, other), (other, path)):
                if any(os.path.samefile(parent, outer) for parent in inner.resolve().parents):
                    raise ConfigError(f"nvme_path: {inner} is inside {outer}; name directories beside each other")
    for file_system in file_systems(paths):
        if len(file_system.members) > 1:
            names = " and ".join(str(paths[i]) for i in file_system.members)
            _warn_once(f"nvme_path: {names} are on one file system; together they are no faster than one of them")


@dataclass(frozen=True)
class FileSystem:
    """A file system that holds one or several of some directories.

    Attributes:
        members: the places of its directories in the list that was given.
        free_bytes: what this user may still write to it.
    """

    members: tuple[int, ...]
    free_bytes: int


def file_systems(directories: Sequence[Path]) -> list[FileSystem]:
    """The file systems of the directories, with their free space now, which those that share one share too.

    Raises:
        SwapIOError: a directory is gone.
    """
    members: dict[int, list[int]] = {}
    free_bytes: dict[int, int] = {}
    for i, directory in enumerate(directories):
        try:
            device, status = os.stat(directory).st_dev, os.statvfs(directory)
        except OSError as error:
            raise SwapIOError(error.errno or errno.EIO, "look for free space in", directory) from error
        members.setdefault(device, []).append(i)
        free_bytes[device] = status.f_bavail * status.f_frsize
    return [FileSystem(tuple(found), free_bytes[device]) for device, found in members.items()]


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)


def is_network_file_system(kind: str) -> bool:
    """Whether files of this type of file system are on another machine, or go through a program (fuse)."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse")


class Mount(NamedTuple):
    """One line of the table of mounts, proc_pid_mountinfo(5)."""

    mount_id: str
    device: str
    """"major:minor" of the files on it."""
    root: str
    """What of the file system is mounted: "/" but for bind mounts and cgroups."""
    mount_point: str
    kind: str
    """Type of the file system: "ext4", "nfs4", ..."""
    source: str
    """The device or server: "/dev/nvme0n1p1", "host:/export", "tmpfs"."""
    options: str
    """Of the file system, not of the mount: "rw,memory"."""


def mounts(table: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """The mounts that this process sees; none if the table cannot be read."""
    found = []
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        # 27 1 254:0 / /mnt/x rw,relatime shared:1 - ext4 /dev/vda rw
        fields, _, tail = line.partition(" - ")
        words, more = fields.split(" "), tail.split(" ")
        if len(words) >= 5 and len(more) >= 3:
            words = [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), word) for word in [*words[:5], *more]]
            found.append(Mount(words[0], *words[2:8]))
    return found


def mount_of(path: Path) -> Mount | None:
    """The mount that holds `path`; None if unknown.

    Raises:
        OSError: `path` cannot be looked at.
    """
    mount_id = ""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        device = os.fstat(descriptor).st_dev
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines():
                if line.startswith("mnt_id:"):
                    mount_id = line.split()[1]
    finally:
        os.close(descriptor)
    # The device alone would do, but for file systems whose files have another one than the table shows (btrfs).
    by_id = [mount for mount in mounts() if mount.mount_id == mount_id]
    by_device = [mount for mount in mounts() if mount.device == f"{os.major(device)}:{os.minor(device)}"]
    return next(iter(by_id + by_device), None)


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`; "" if unknown."""
    mount = mount_of(path)
    return "" if mount is None else mount.kind


def _is_rotating(path: Path) -> bool:
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for candidate in (block, block.resolve().parent):
        flag = candidate / "queue" / "rotational"
        try:
            # A virtual disk says "rotational" whatever is below it.
            return flag.read_text().strip() == "1" and not block.resolve().name.startswith("vd")
        except OSError:
            continue
    return False


# --- Run directories -----------------------------------------------------------------------------------------------


def _boot_id() -> str:
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
        owner = {"boot_id": _boot_id(), "host": socket.gethostname(), "pid": os.getpid(), "run": run, "rank": rank}
        os.write(lock, json.dumps(owner).encode())
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
            error,
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
    """Whether anybody still uses a run directory."""

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
    """What became of a directory that was to be removed.

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
    owner: dict[str, object]
    """What the lock file says; empty if nothing."""


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
                with _judged(directory, os.O_RDONLY, fcntl.LOCK_SH) as verdict:
                    pass
            except FileNotFoundError:
                raise
            except OSError as error:
                verdict = _Verdict(RunState.UNKNOWN, f"its lock cannot be looked at: {error.strerror}", {})
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
        with _judged(directory, os.O_RDWR, fcntl.LOCK_EX) as verdict:
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
        log.warning("could not clean up: %s", error)
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
        log.warning("could not clean up %s: %s", directory, error)
        return None
    if removal.removed:
        freed = format_bytes(removal.freed_bytes)
        log.warning("removed %s, left by a run that ended without cleaning up: %s freed", directory, freed)
    return removal


def _is_named_like_a_run(path: Path) -> bool:
    name = path.name
    named = name.startswith(_TEMPORARY_PREFIX) or (name.startswith(_PREFIX) and "-" in name.removeprefix(_PREFIX))
    return named and os.path.isdir(path) and not os.path.islink(path)


def _candidates(nvme_path: Path) -> list[Path]:
    try:
        os.stat(os.path.join(nvme_path, "."))  # To read names is one permission, to follow them another.
        names = sorted(os.listdir(nvme_path))
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "list the directory", nvme_path) from error
    return [nvme_path / name for name in names if _is_named_like_a_run(nvme_path / name)]


@contextlib.contextmanager
def _judged(directory: Path, flags: int, operation: int) -> Iterator[_Verdict | None]:
    """The state of a directory; None if it is no run directory. If its lock is free it is held in the block.

    Raises:
        FileNotFoundError: the directory is gone.
        OSError: it cannot be told.
    """
    lock = -1
    try:
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
        yield _verdict(directory, lock, operation) if ours else None
    finally:
        if lock >= 0:
            os.close(lock)


def _verdict(directory: Path, lock: int, operation: int) -> _Verdict | None:
    temporary = directory.name.startswith(_TEMPORARY_PREFIX)
    owner: dict[str, object] | None = None
    text = b""
    if lock >= 0:
        try:
            fcntl.flock(lock, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _parse_owner(os.pread(lock, 4096, 0))
            return _Verdict(RunState.ALIVE, "its lock is held", owner or {})
        if os.fstat(lock).st_nlink == 0:
            # Another process removed it meanwhile, so whatever has this name now is a new run.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        text = os.pread(lock, 4096, 0)
    if temporary and not text:
        # Without a lock, or with one that is free and empty: its maker is between two steps, or died there.
        if time.time() - directory.stat().st_mtime > _GRACE_S:
            return _Verdict(RunState.STALE, "its maker died before it was done", {})
        return _Verdict(RunState.NEW, "it is being made, or its maker died in the last ten minutes", {})
    if lock < 0:
        return None
    owner = _parse_owner(text)
    if owner is None:
        return _Verdict(RunState.UNKNOWN, "its lock file does not say whose it is", {})
    boot_id = _boot_id()
    if boot_id and owner.get("boot_id") == boot_id:
        return _Verdict(RunState.STALE, "its lock is free", owner)
    if owner.get("host") == socket.gethostname():
        return _Verdict(RunState.STALE, "its lock is free, and this host was booted since", owner)
    return _Verdict(RunState.UNKNOWN, f"it belongs to a run on host {owner.get('host') or 'unknown'}", owner)


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
    run, rank, host, pid = owner.get("run"), owner.get("rank"), owner.get("host"), owner.get("pid")
    here = host == socket.gethostname() and owner.get("boot_id") == _boot_id()
    return RunDirectory(
        path=directory,
        temporary=directory.name.startswith(_TEMPORARY_PREFIX),
        state=verdict.state,
        reason=verdict.reason,
        run=run if isinstance(run, str) else None,
        rank=rank if isinstance(rank, int) else None,
        host=host if isinstance(host, str) else None,
        pid=pid if isinstance(pid, int) else None,
        program=_program(pid) if here and isinstance(pid, int) and verdict.state is RunState.ALIVE else None,
        uid=status.st_uid,
        user=user,
        started_unix_s=started,
        size_bytes=size_bytes,
        files=files,
    )


def _usage(directory: Path) -> tuple[int, int]:
    """Bytes of blocks on the drive, and how many files. Files that vanish meanwhile do not count."""
    size_bytes = files = 0
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
            files += 1
    return size_bytes, files


def _program(pid: int) -> str | None:
    """What a process runs, as in "python train.py"; None if it is gone or may not be looked at."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    shown = [os.path.basename(words[0]), *words[1:3]][: 3 if words[1:2] == ["-m"] else 2]
    return " ".join(word for word in shown if word) or None


def _parse_owner(text: bytes) -> dict[str, object] | None:
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):  # The latter of "[[[[...".
        return None
    return owner if isinstance(owner, dict) else None
