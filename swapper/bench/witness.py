"""Judges if what was timed moved to or from a drive, or only to or from the page cache.

[Note: proof] One timed run is believed only if all of this holds:

    counters    every block device that holds the files counted at least the bytes moved (/sys/dev/block/*/stat), and
                so did what it is made of: members of a RAID, the drive below a loop device.
    account     for a read, the kernel charged at least the bytes moved to the process that moved them (getrusage(2)).
                The counters alone would also be satisfied by another job on the same drive.
    residency   for a write, it was synced while the clock ran, or no page of the file is in the page cache after it.

A file system without a device that can be seen (overlay in a container, network) has no counters. A read then needs
the account, or that no page of the file was in the page cache before. Where that says nothing either (memory as a
drive, ZFS, whose cache nobody can look into), no run is believed.

What a drive, its controller or the host of a virtual machine caches is beyond this, and part of the drive.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swapper.bench.machine import read_text
from swapper.storage.mounts import MEMORY_FILE_SYSTEMS, mount_of

__all__ = ["Operation", "Proof", "Witness", "resident_bytes"]

Operation = Literal["read", "write"]

_SECTOR_BYTES = 512
"""Of the counters, whatever the device's own is."""
_ENOUGH = 0.99
"""Part of the bytes moved that must be counted: so much may have been in the page cache."""
_BUSY = 0.2
"""Part of the bytes moved that others may move meanwhile before it is worth a word."""
_BUSY_BYTES = 8 << 20
"""The same for short runs, where the file system's own journal is a large part."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_bytes(path: Path) -> int:
    """Bytes of a file of ours that are in the page cache, mincore(2).

    Raises:
        OSError: it cannot be opened or mapped.
    """
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length == 0:
            return 0
        # Not Python's `mmap`, whose address is given out for writable mappings only.
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    try:
        pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        if _libc.mincore(address, length, pages) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        _libc.munmap(address, length)
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


@dataclass(frozen=True)
class Proof:
    """The evidence for and against one timed run.

    Attributes:
        reason: why it is not believed; "" if it is.
        other_bytes: what others moved on the same drives meanwhile, as far as it is worth a word, else 0.
    """

    reason: str
    other_bytes: int = 0


@dataclass
class _Holder:
    """The block devices of one file system: one, or those that it is spread over."""

    blocks: list[Path]
    drives: list[Path]
    """The drives below; the same as `blocks` where those are drives themselves."""
    files: int = 0

    @property
    def name(self) -> str:
        return " + ".join(block.name for block in self.blocks)

    def counted(self) -> tuple[Counter[Operation], Counter[Operation]]:
        """Bytes since the machine started, of the block devices and of the drives."""
        blocks, drives = (sum(map(_counted, some), Counter[Operation]()) for some in (self.blocks, self.drives))
        return blocks, drives


class Witness:
    """Looks at the drives below some files before and after each timed run.

    Args:
        directories: where the files are, one file in each; the same one may come twice.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self._holders: dict[tuple[Path, ...], _Holder] = {}
        self._unseen: set[str] = set()  # types of file systems without a device that can be seen
        self._refusals: dict[str, None] = {}  # reasons against every run, each once
        self._before: list[tuple[Counter[Operation], Counter[Operation]]] = []
        self._resident: int | None = None
        for directory in directories:
            self._look_below(directory)

    def describe(self) -> str:
        """The parts of the proof, in one line."""
        if self._refusals:
            return f"none: {next(iter(self._refusals))}"
        parts = [f"the counters of {holder.name}" for holder in self._holders.values()]
        parts += ["the kernel's account of the process", "the file's pages in the page cache"]
        unseen = f" ({', '.join(sorted(self._unseen))} shows no device)" if self._unseen else ""
        return ", ".join(parts[:-1]) + " and " + parts[-1] + unseen

    def begin(self, operation: Operation, files: Sequence[Path]) -> None:
        """Look before a run that reads or writes `files`."""
        self._resident = _total_resident(files) if operation == "read" else None
        self._before = [holder.counted() for holder in self._holders.values()]

    def judge(
        self, operation: Operation, files: Sequence[Path], length_bytes: int, account_bytes: int, synced: bool
    ) -> Proof:
        """Look after it.

        Args:
            operation: as in `begin`, `files` too.
            files: what was moved, in the order of the directories given.
            length_bytes: moved of each file.
            account_bytes: read or written, as the kernel charged it to the process that did it.
            synced: for a write, whether it was synced while the clock ran.
        """
        if self._refusals:
            return Proof(next(iter(self._refusals)))
        looks = [holder.counted() for holder in self._holders.values()]  # First: others go on.
        moved_bytes = length_bytes * len(files)
        reason = ""
        if operation == "read":
            accounted = account_bytes >= _ENOUGH * moved_bytes
            cold = self._resident is not None and self._resident <= (1 - _ENOUGH) * moved_bytes
            if not accounted and (self._holders or not cold):
                reason = (
                    f"the kernel counted {_part(account_bytes, moved_bytes)} as read from a drive by the process: "
                    "the rest came from the page cache"
                )
        elif not synced and (_total_resident(files) or 0) > (1 - _ENOUGH) * moved_bytes:
            reason = "what was written is in the page cache, and was not synced while the clock ran"
        other_bytes = 0
        for holder, before, after in zip(self._holders.values(), self._before, looks, strict=True):
            wanted_bytes = length_bytes * holder.files
            counted, below = after[0] - before[0], after[1] - before[1]
            for count, name in ((counted[operation], holder.name), (below[operation], f"the drives of {holder.name}")):
                if not reason and count < _ENOUGH * wanted_bytes:
                    verb = "read" if operation == "read" else "written"
                    reason = f"{name} counted {_part(count, wanted_bytes)} as {verb}"
            others = counted.total() - wanted_bytes
            if others > max(_BUSY * wanted_bytes, _BUSY_BYTES):
                other_bytes += others
        return Proof(reason, other_bytes)

    def _look_below(self, directory: Path) -> None:
        mount = mount_of(directory)
        kind = mount.kind if mount is not None else "unknown"
        if kind in MEMORY_FILE_SYSTEMS or kind == "hugetlbfs":
            self._refuse(f"{directory} is on {kind}, which is memory and no drive")
        if kind == "zfs":
            self._refuse(f"{directory} is on zfs, which has a cache of its own that cannot be looked into")
        blocks = _blocks(directory)
        if not blocks:
            self._unseen.add(kind)
            return
        holder = self._holders.get(tuple(blocks))
        if holder is None:
            drives = {drive for block in blocks for drive in self._drives(block)}
            holder = self._holders[tuple(blocks)] = _Holder(blocks, sorted(drives))
        holder.files += 1

    def _drives(self, block: Path) -> Iterator[Path]:
        """The drives that `block` is made of, or `block` itself; notes why they cannot be believed."""
        disk = block.parent if (block / "partition").exists() else block
        if re.fullmatch(r"(zram|ram|nullb)\d+", disk.name):
            self._refuse(f"{disk.name} is memory and no drive")
        if backing := read_text(disk / "loop/backing_file"):
            if read_text(disk / "loop/dio") != "1":
                self._refuse(
                    f"{disk.name} is a file that goes through the page cache ({backing}): set it up with "
                    "`losetup --direct-io=on`"
                )
            parts = _blocks(Path(backing).parent) if Path(backing).exists() else []
            if not parts:
                self._refuse(f"{disk.name} is a file of which no drive can be found ({backing})")
        else:
            parts = [member.resolve() for member in (disk / "slaves").glob("*")]
        if not parts:
            yield block
        for part in parts:
            yield from self._drives(part)

    def _refuse(self, reason: str) -> None:
        self._refusals.setdefault(reason)


def _counted(block: Path) -> Counter[Operation]:
    # Fields as in Documentation/block/stat.rst of Linux: the third and the seventh are sectors read and written.
    words = (block / "stat").read_text().split()
    return Counter({"read": int(words[2]) * _SECTOR_BYTES, "write": int(words[6]) * _SECTOR_BYTES})


def _part(counted_bytes: int, moved_bytes: int) -> str:
    return f"{max(counted_bytes, 0) / 1e6:.1f} of {moved_bytes / 1e6:.1f} MB"


def _total_resident(files: Sequence[Path]) -> int | None:
    """Of all files; None if the file system cannot say."""
    try:
        return sum(resident_bytes(path) for path in files)
    except OSError:
        return None


def _blocks(directory: Path) -> list[Path]:
    """The block devices that the file system of `directory` is on, in /sys; none if they cannot be seen."""
    number = os.stat(directory).st_dev
    block = _block(number)
    if block is not None:
        return [block]
    mount = mount_of(directory)
    if mount is None:
        return []
    if mount.kind == "overlay":
        upper = re.search(r"(?:^|,)upperdir=((?:[^,\\]|\\.)*)", mount.options)
        path = Path(re.sub(r"\\(.)", r"\1", upper[1])) if upper else None
        return _blocks(path) if path is not None and path.is_dir() else []
    found: list[Path] = []
    for source in mount.source.split(":"):  # bcachefs names all its devices
        try:
            status = os.stat(source)
        except OSError:
            return []
        block = _block(status.st_rdev) if stat.S_ISBLK(status.st_mode) else None
        if block is None:
            return []
        found.append(block)
    if mount.kind == "btrfs":
        for devices in Path("/sys/fs/btrfs").glob("*/devices"):
            names = [link.resolve() for link in devices.iterdir()]
            if found[0] in names:
                return sorted(names)
    return found


def _block(number: int) -> Path | None:
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return path.resolve() if (path / "stat").exists() else None
