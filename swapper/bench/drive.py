"""Looks at a directory: its file system, by a file made there, and its drives, as the kernel describes them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from swapper.bench import machine
from swapper.bench.machine import read_int, read_text
from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle
from swapper.storage.mounts import Mount, mount_of
from swapper.storage.runs import RunState, find_runs

__all__ = ["Directory", "Drive", "look_at_directory"]

_PROBE_BYTES = 1 << 20
_VIRTUAL_MAKERS = ("QEMU", "VMware", "VBOX", "Virtual", "Msft", "Xen")
_KINDS_BY_NAME = {
    r"z?ram\d+": "memory",
    r"loop\d+": "loop",
    r"(nbd|rbd)\d+": "network",
    r"mmcblk\d+": "MMC",
    r"x?vd.*": "virtual",
}
_KINDS_BY_PATH = {
    r"/usb\d+/": "USB",
    r"/ata\d+/": "SATA",
    r"/end_device-": "SAS",
    r"/virtio\d+/": "virtual",
}


@dataclass(frozen=True)
class Drive:
    """A block device, as /sys/block describes it. What it does not say is None.

    Attributes:
        name: as in /dev.
        kind: "NVMe", "SATA", "virtual", "raid0", ...
        rotating: as the kernel says, which believes of many virtual drives that they rotate.
        scheduler: the one in use; `schedulers` are those to choose from.
        max_request_bytes: the kernel cuts longer requests; it can be set up to `max_hardware_request_bytes`.
        members: what a RAID or a mapped device is made of.
    """

    name: str
    kind: str
    model: str | None
    rotating: bool | None
    scheduler: str | None
    schedulers: list[str]
    max_request_bytes: int | None
    max_hardware_request_bytes: int | None
    members: list[Drive]


@dataclass
class Directory:
    """A directory, as a run that keeps its files there finds it. What could not be found out is None.

    Attributes:
        error: why no file could be made there, written and read; "" if one could. If not, `direct` and what
            follows from a file are None.
        change: what to do about `error`.
        direct: whether transfers bypass the page cache (O_DIRECT); `direct_reason` says why not.
        alignment_bytes, memory_alignment_bytes: what transfers need for that.
        preallocated: whether space can be reserved; `preallocate_reason` says why not.
        stale_bytes: what runs that were killed left here.
        drives: what holds it.
        gds: whether cuFile moves bytes between files here and a GPU; `gds_reason` says why not. None: not tried.
    """

    path: str
    error: str = ""
    change: str = ""
    file_system: str | None = None
    mount_point: str | None = None
    source: str | None = None
    direct: bool | None = None
    direct_reason: str = ""
    alignment_bytes: int | None = None
    memory_alignment_bytes: int | None = None
    preallocated: bool | None = None
    preallocate_reason: str = ""
    free_bytes: int | None = None
    total_bytes: int | None = None
    stale_bytes: int | None = None
    drives: list[Drive] = field(default_factory=list)
    gds: bool | None = None
    gds_reason: str = ""


def look_at_directory(path: Path) -> Directory:
    """Make a file in `path`, write to it, read it and remove it; look at the rest."""
    found = Directory(str(path))
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        _probe_file(path, found)
    except (SwapError, OSError) as failure:
        found.error, found.change = _explained(path, failure)
    with contextlib.suppress(OSError):
        mount, space = mount_of(path), os.statvfs(path)
        found.free_bytes, found.total_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        if mount is not None:
            found.file_system, found.mount_point, found.source = mount.kind, mount.mount_point, mount.source
            found.drives = _drives(mount)
    with contextlib.suppress(SwapIOError):
        found.stale_bytes = sum(run.size_bytes or 0 for run in find_runs(path) if run.state is RunState.STALE)
    return found


def _explained(path: Path, failure: Exception) -> tuple[str, str]:
    number = failure.errno if isinstance(failure, OSError) else None
    reason = str(failure) if number is None or isinstance(failure, SwapIOError) else os.strerror(number)
    if number == errno.ENOENT and not os.path.lexists(path):
        return reason, f"mkdir -p {shlex.quote(str(path))}"
    if number in (errno.EACCES, errno.EPERM):
        below = shlex.quote(str(path / "swap"))
        return reason, f"name a directory that you may write to; this makes one: sudo install -d -o $USER {below}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return reason, "free some space, or name another directory"
    return reason, "name another directory"


def _probe_file(path: Path, found: Directory) -> None:
    """Note in `found` what a file in `path` can do, once it was written and read."""
    descriptor, name = tempfile.mkstemp(prefix=".swapper-report-", dir=path)
    try:
        with AsyncIOHandle(queue_depth=8) as handle, handle.open(name, "rw") as file:
            # One page, on the way that transfers go: some file systems open a file for O_DIRECT, then refuse to use it.
            page = torch.arange(4096, device="cpu").to(torch.uint8)
            back = torch.zeros_like(page)
            handle.write(file, page).wait()
            handle.read(file, back).wait()
            if not torch.equal(page, back):
                raise SwapError("what was written is not what was read: do not trust this drive")
            try:
                found.preallocated = file.preallocate(_PROBE_BYTES)
                found.preallocate_reason = "" if found.preallocated else "the file system cannot"
            except SwapIOError as error:  # As on a full drive.
                found.preallocate_reason = str(error)
            found.direct, found.direct_reason = file.direct, file.direct_reason
            found.alignment_bytes, found.memory_alignment_bytes = file.alignment_bytes, file.memory_alignment_bytes
    finally:
        os.close(descriptor)
        os.unlink(name)


# --- Block devices -------------------------------------------------------------------------------------------------


def _drives(mount: Mount) -> list[Drive]:
    """The drive of a mount, if it has one."""
    device = mount.device
    if device.startswith("0:") and mount.source.startswith("/dev/"):  # btrfs: the number is not of any device.
        try:
            number = os.stat(mount.source).st_rdev
        except OSError:
            return []
        device = f"{os.major(number)}:{os.minor(number)}"
    try:
        block = (machine.SYS / "dev/block" / device).resolve(strict=True)
    except OSError:
        return []
    return [_drive(block)]


def _drive(block: Path) -> Drive:
    if (block / "partition").exists():
        block = block.parent
    schedulers = (read_text(block / "queue/scheduler") or "").split()
    rotating = read_int(block / "queue/rotational")
    return Drive(
        name=block.name,
        kind=_kind(block),
        model=_model(block),
        rotating=None if rotating is None else rotating == 1,
        scheduler=next((word.strip("[]") for word in schedulers if word.startswith("[")), None),
        schedulers=[word.strip("[]") for word in schedulers],
        max_request_bytes=_kibibytes(block / "queue/max_sectors_kb"),
        max_hardware_request_bytes=_kibibytes(block / "queue/max_hw_sectors_kb"),
        members=[_drive(member) for member in sorted(member.resolve() for member in (block / "slaves").glob("*"))],
    )


def _kibibytes(path: Path) -> int | None:
    count = read_int(path)
    return None if count is None else count << 10


def _model(block: Path) -> str | None:
    if backing := read_text(block / "loop/backing_file"):
        return backing
    if name := read_text(block / "dm/name"):
        return name
    words = [read_text(block / "device" / name) or "" for name in ("vendor", "model")]
    # The vendor is a number where it is of PCI, and "ATA" for all of SATA.
    return " ".join(word for word in words if word and word != "ATA" and not word.startswith("0x")) or None


def _kind(block: Path) -> str:
    name, path = block.name, str(block)
    if name.startswith("nvme"):
        transport = read_text(block / "device/transport") or "pcie"
        return "NVMe" if transport == "pcie" else f"NVMe over {transport}"
    if name.startswith("md"):
        return read_text(block / "md/level") or "RAID"
    if name.startswith("dm-"):
        maker = (read_text(block / "dm/uuid") or "").partition("-")[0]
        return {"LVM": "LVM", "CRYPT": "encrypted"}.get(maker, "mapped")
    for pattern, kind in _KINDS_BY_NAME.items():
        if re.fullmatch(pattern, name):
            return kind
    if any(maker in (_model(block) or "") for maker in _VIRTUAL_MAKERS):
        return "virtual"
    for pattern, kind in _KINDS_BY_PATH.items():
        if re.search(pattern, path):
            return kind
    return "SCSI" if name.startswith("sd") else "other"
