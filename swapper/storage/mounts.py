"""Directories for records: their mounts, file systems and free space; the checks of `nvme_path`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from swapper.errors import ConfigError, SwapIOError, system_errors
from swapper.process.interrupts import interrupts_deferred
from swapper.process.warnings import warn_once

__all__ = [
    "MEMORY_FILE_SYSTEMS",
    "FileSystem",
    "Mount",
    "NvmePathError",
    "check_nvme_path",
    "check_nvme_paths",
    "file_systems",
    "is_network_file_system",
    "mount_of",
    "mounts",
]

log = logging.getLogger(__name__)

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems whose files are memory."""
_NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "glusterfs", "beegfs", "afs", "fuse.sshfs")
)


class NvmePathError(ConfigError, SwapIOError):
    """`nvme_path` cannot be used: a setting to change, with the errno and path that say why."""

    def __init__(self, number: int, operation: str, path: str | os.PathLike[str], detail: str) -> None:
        SwapIOError.__init__(self, number, operation, path, detail=f"nvme_path: {detail}")
        # In the order of bases `ValueError` comes before `OSError`, and does not know what its arguments mean.
        OSError.__init__(self, number, self._message(number), self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.errno, self.operation, self.path, self.detail.removeprefix("nvme_path: ")))


def check_nvme_path(path: Path) -> None:
    """Refuse a path that cannot work, and log once what will be slow.

    Raises:
        NvmePathError: missing, not a directory, or not writable.
        ConfigError: in memory, unless the environment variable SWAPPER_ALLOW_TMPFS is 1.
    """
    _check_writable(path)
    kind = _file_system(path)
    if kind in MEMORY_FILE_SYSTEMS:
        if os.environ.get("SWAPPER_ALLOW_TMPFS") != "1":
            raise ConfigError(
                f"nvme_path: {path} is on {kind}, which is memory: swapping there saves nothing. Name a directory on a "
                "drive, use device: cpu, or set the environment variable SWAPPER_ALLOW_TMPFS=1 if you mean it"
            )
    elif is_network_file_system(kind):
        warn_once(
            log, f"nvme_path: {path} is on a network file system ({kind}); expect it to be slow, prefer a local drive"
        )
    elif kind == "overlay":
        warn_once(
            log, f"nvme_path: {path} is on a container's overlay file system; mount a volume from a local drive instead"
        )
    elif _is_rotating(path):
        warn_once(
            log,
            f"nvme_path: the kernel says that the drive of {path} rotates; a solid-state drive is many times faster",
        )


def _check_writable(path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise NvmePathError(errno.ENOENT, "open", path, f"make the directory first: mkdir -p {path}") from error
    except OSError as error:
        raise NvmePathError(error.errno or errno.EIO, "open", path, "name a directory") from error
    if not stat.S_ISDIR(mode):
        raise NvmePathError(errno.ENOTDIR, "open", path, "name a directory")
    try:
        with interrupts_deferred():  # Else it may be dropped open.
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        number = error.errno or errno.EIO
        raise NvmePathError(number, "create a file in", path, "name a directory that this user may write to") from error


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
            warn_once(log, f"nvme_path: {names} are on one file system; together they are no faster than one of them")


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`; "" if unknown."""
    mount = mount_of(path)
    return "" if mount is None else mount.kind


def _is_rotating(path: Path) -> bool:
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for candidate in (block, block.parent):  # Of a partition, its drive has the flag.
        with contextlib.suppress(OSError):
            rotates = (candidate / "queue" / "rotational").read_text().strip() == "1"
            # A virtual disk says "rotational" whatever is below it.
            return rotates and not block.name.startswith("vd")
    return False


@dataclass(frozen=True)
class FileSystem:
    """A file system that holds one or several of some directories.

    Attributes:
        members: indices of its directories in the list that was given.
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
        with system_errors("look for free space in", directory):
            device, status = os.stat(directory).st_dev, os.statvfs(directory)
        members.setdefault(device, []).append(i)
        free_bytes[device] = status.f_bavail * status.f_frsize
    return [FileSystem(tuple(found), free_bytes[device]) for device, found in members.items()]


def is_network_file_system(kind: str) -> bool:
    """Tell if files of this type of file system are on another machine, or go through a program (fuse)."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse")


class Mount(NamedTuple):
    """One line of the table of mounts, proc_pid_mountinfo(5)."""

    mount_id: str
    device: str
    """"major:minor" of the files on it."""
    root: str
    """The mounted directory of the file system: "/" but for bind mounts and cgroups."""
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
