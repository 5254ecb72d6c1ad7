"""Where runs keep their files: the checks of a path, and the directory of each run.

Run directory: `<nvme_path>/swapper-<run>-<rank>/`, mode 0700, files 0600. It is made under a temporary name, its
lock file locked, then renamed, so that a directory with that name always has an owner or is a dead run's leftover.
This module is the only owner of the names of directories, of the lock and of clean-up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swapper.errors import ConfigError, SwapIOError
from swapper.layout import format_bytes

__all__ = [
    "FileSystem",
    "NvmePathError",
    "check_nvme_path",
    "check_nvme_paths",
    "file_systems",
    "make_run_directory",
    "remove_run_directory",
    "remove_stale_runs",
]

log = logging.getLogger(__name__)

_PREFIX = "swapper-"
_TEMPORARY_PREFIX = ".swapper-new-"
_LOCK = "lock"
_GRACE_S = 600.0
"""A temporary directory without a lock younger than this may be one that another process is just making."""
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
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
    if kind in _MEMORY_FILE_SYSTEMS:
        if os.environ.get("SWAPPER_ALLOW_TMPFS") != "1":
            raise ConfigError(
                f"nvme_path: {path} is on {kind}, which is memory: swapping there saves nothing. Name a directory on a "
                "drive, use device: cpu, or set the environment variable SWAPPER_ALLOW_TMPFS=1 if you mean it"
            )
    elif kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
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


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`, from /proc/self/mountinfo (proc(5)); "" if unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, tail = line.partition(" - ")
        if fields.split()[2] == wanted:
            return tail.split()[0]
    return ""


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
    """Remove the directory of a run and let go of its lock, the only item of `lock`. Failures are logged."""
    try:
        _remove_directory(directory)
    except FileNotFoundError:
        pass  # Somebody else removed it.
    except OSError as error:
        log.error("could not remove %s, remove it by hand: %s", directory, error)
    if lock:
        os.close(lock.pop())


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


def remove_stale_runs(nvme_path: Path) -> None:
    """Remove what killed runs left in `nvme_path`, and log the bytes freed.

    Removed is a directory whose lock is free and was taken in this boot, or on this host in an earlier one. Any other
    is left alone and named: on a network file system it may be another host's live run.
    """
    for directory in sorted(nvme_path.glob(f"{_PREFIX}*-*")) + sorted(nvme_path.glob(f"{_TEMPORARY_PREFIX}*")):
        try:
            if directory.is_dir() and not directory.is_symlink():
                _remove_if_stale(directory)
        except FileNotFoundError:
            continue  # Another process cleans up too.
        except OSError as error:
            log.warning("could not clean up %s: %s", directory, error)


def _remove_if_stale(directory: Path) -> None:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        if directory.name.startswith(_TEMPORARY_PREFIX) and time.time() - directory.stat().st_mtime > _GRACE_S:
            shutil.rmtree(directory)
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # A live run.
        if os.fstat(lock).st_nlink == 0:
            return  # Another process removed it meanwhile, so whatever has this name now is a new run.
        text = os.pread(lock, 4096, 0)
        if not text and directory.name.startswith(_TEMPORARY_PREFIX):
            # Locked by nobody and empty: its maker is between open and flock, or died there.
            if time.time() - directory.stat().st_mtime > _GRACE_S:
                shutil.rmtree(directory)
            return
        owner = _parse_owner(text)
        if owner is None or not (owner.get("boot_id") == _boot_id() or owner.get("host") == socket.gethostname()):
            log.warning(
                "%s belongs to a run on host %s and is left alone; if that run is dead, removing it "
                "by hand (in a later version: `swapper clean`) frees its space",
                directory,
                "unknown" if owner is None else owner.get("host"),
            )
            return
        freed = sum(file.lstat().st_blocks * 512 for file in directory.iterdir())
        _remove_directory(directory)
        log.warning(
            "removed %s, left by a run that ended without cleaning up: %s freed", directory, format_bytes(freed)
        )
    finally:
        os.close(lock)


def _parse_owner(text: bytes) -> dict[str, object] | None:
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) else None
