"""`swapper report`: will it be fast here, and what is to be changed."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.text import Text

from swapper.bench.drive import Directory, Drive, look_at_directory
from swapper.bench.machine import (
    Accelerator,
    Limits,
    Machine,
    SlabProbe,
    accelerators,
    has_nvidia_driver,
    limits,
    machine,
    probe_slab,
    swapper_version,
)
from swapper.cli.arguments import AsJson, directories_or_default
from swapper.cli.output import fail_if, make_console, print_json, printable
from swapper.errors import SwapIOError
from swapper.io.gds import CuFileProbe, GDSHandle, probe_cufile
from swapper.io.handle import Probe, probe
from swapper.optimizer.encoding_choice import codec_s
from swapper.optimizer.native_probe import NativeProbe, instruction_set, probe_native_steps
from swapper.sizes import format_bytes
from swapper.storage.mounts import MEMORY_FILE_SYSTEMS, is_network_file_system

__all__ = ["Finding", "Mark", "Report", "findings", "make_report", "report"]

_REQUEST_BYTES = 1 << 20
"""The default of `block_size`: what one request to the kernel moves."""
_FEW_AIO_REQUESTS = 1024
_GPU = torch.device("cuda")
_ANOTHER_DIRECTORY = "name a directory on a local solid-state drive with --nvme-path"


# --- The report -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """All that was looked at."""

    version: str
    machine: Machine
    backends: tuple[Probe, ...]
    limits: Limits
    slab: SlabProbe
    accelerators: list[Accelerator]
    accelerators_reason: str
    nvidia_driver: bool
    cufile: CuFileProbe
    directories: list[Directory]
    native_steps: tuple[NativeProbe, ...] = ()
    packing_bps: float = 0.0
    """Bytes of state per second that one core packs and unpacks."""

    @property
    def auto(self) -> str:
        """The backend that `backend: auto` takes."""
        return next(found.backend for found in self.backends if found.available)


def make_report(directories: list[Path]) -> Report:
    """Look at this machine and at `directories`. Takes 64 MiB of memory for a moment."""
    devices, reason = accelerators()
    cufile = probe_cufile()
    looked_at = [look_at_directory(path) for path in directories]
    return Report(
        version=swapper_version(),
        machine=machine(),
        backends=probe(),
        limits=limits(),
        slab=probe_slab(),
        accelerators=devices,
        accelerators_reason=reason,
        nvidia_driver=has_nvidia_driver(),
        cufile=cufile,
        directories=[_try_gds(directory) for directory in looked_at] if devices and cufile.available else looked_at,
        native_steps=probe_native_steps(),
        packing_bps=4 / codec_s(),
    )


def _try_gds(directory: Directory) -> Directory:
    """Try to move bytes between a GPU and a file in `directory`, and note what became of it."""
    if directory.error:
        return directory
    with GDSHandle() as handle:
        try:
            reason = handle.why_not_direct(Path(directory.path), _GPU)
        except SwapIOError as error:
            reason = str(error)
    return replace(directory, gds=not reason, gds_reason=reason)


# --- Its lines ---------------------------------------------------------------------------------------------------


class Mark(enum.Enum):
    """The verdict of a line."""

    FINE = "ok"
    WORSE = "!"
    """Worse than it could be; the line ends with what to change."""
    UNKNOWN = "?"
    NEUTRAL = "-"
    """A fact, or something that is not needed here."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. `change` is there if, and only if, `mark` is `WORSE`."""

    name: str
    mark: Mark
    value: str
    change: str = ""
    section: str = ""


def findings(found: Report) -> Iterator[Finding]:
    """The lines of the report, in order."""
    sections: list[tuple[str, Iterator[Finding]]] = [
        ("Machine", _of_machine(found)),
        ("I/O backends", _of_backends(found)),
        ("Memory of the pool", _of_memory(found)),
        ("Limits", _of_limits(found)),
        ("Steps on the CPU", _of_native_steps(found)),
        ("GPUs", _of_gpus(found)),
        *((directory.path, _of_directory(directory)) for directory in found.directories),
    ]
    for section, lines in sections:
        for line in lines:
            yield replace(line, section=section)


def _judge(name: str, value: str, change: str = "") -> Finding:
    return Finding(name, Mark.WORSE if change else Mark.FINE, value, change)


def _neutral(name: str, value: object) -> Finding:
    return Finding(name, Mark.UNKNOWN if value is None else Mark.NEUTRAL, _text(value))


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)


def _bytes(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


def _of_machine(found: Report) -> Iterator[Finding]:
    about = found.machine
    yield _neutral("system", f"{about.kernel} {about.architecture}")
    yield _neutral("CPU", f"{about.cpus_usable} of {_text(about.cpus)} cores usable: {_text(about.cpu)}")
    yield _neutral("memory", f"{_bytes(about.memory_bytes)}, {_bytes(about.memory_available_bytes)} available")
    if about.cgroup_version is None:
        limit = "memory limit unknown"
    elif about.memory_limit_bytes is None:
        limit = "no memory limit"
    else:
        limit = f"memory limit {format_bytes(about.memory_limit_bytes)}, the pool must fit it"
    yield _neutral("container", f"{about.container or 'none'}; {limit}")
    yield _neutral("Python", about.python)
    change = ""
    if about.torch_threads > about.cpus_usable:
        change = f"export OMP_NUM_THREADS={about.cpus_usable} before Python starts: more threads than cores"
    yield _judge("torch", f"{about.torch}, {about.torch_threads} threads", change)
    change = ""
    if (about.omp_wait_policy or "").upper() != "PASSIVE" and not found.accelerators:
        change = "export OMP_WAIT_POLICY=PASSIVE before Python starts: idle threads else take the I/O threads' cores"
    yield _judge("OMP_WAIT_POLICY", about.omp_wait_policy or "not set", change)


def _of_backends(found: Report) -> Iterator[Finding]:
    better = True
    for backend in found.backends:
        if backend.backend == found.auto:
            better = False
            yield _judge(backend.backend, "available; `backend: auto` takes it")
        elif backend.available:
            yield _neutral(backend.backend, "available")
        elif better:
            yield _judge(backend.backend, f"no: {backend.reason}", _backend_change(backend, found))
        else:
            yield _neutral(backend.backend, f"no, and not needed: {backend.reason}")


def _backend_change(refused: Probe, found: Report) -> str:
    uring = next((backend for backend in found.backends if backend.backend == "uring"), refused)
    if refused.backend == "uring+fixed" and uring.available:
        return _memlock_change(found)
    if refused.backend.startswith("uring"):
        if found.limits.io_uring_disabled:
            return "sudo sysctl kernel.io_uring_disabled=0"
        if found.limits.seccomp == "filter":
            calls = "io_uring_setup, io_uring_enter and io_uring_register"
            if found.machine.container is None:
                return f"allow {calls} in the seccomp filter of this process (of a systemd service: SystemCallFilter=)"
            return f"start the container with --security-opt seccomp=FILE, a profile that allows {calls}"
        if "RLIMIT_MEMLOCK" in refused.reason:
            return _memlock_change(found)
        return "run a kernel of Linux 5.10 or newer that has io_uring"
    if "aio-max-nr" in refused.reason:
        return "sudo sysctl fs.aio-max-nr=1048576"
    return "allow io_setup, io_submit, io_getevents and io_destroy, or run a kernel that has CONFIG_AIO"


def _memlock_change(found: Report) -> str:
    if found.limits.memlock_hard_bytes is None:
        return "ulimit -l unlimited, in the shell that starts the run"
    if found.machine.container is not None:
        return "start the container with --ulimit memlock=-1"
    return "add the line '* - memlock unlimited' to /etc/security/limits.conf and log in anew"


def _of_memory(found: Report) -> Iterator[Finding]:
    slab, memlock = found.slab, _memlock_change(found)
    length = format_bytes(slab.length_bytes)
    if not slab.allocated:
        yield _judge("slab", f"no {length}: {slab.reason}", "free some memory, or raise its limit")
        return
    if slab.locked:
        yield _judge("locked", f"{length} are page-locked")
    else:
        yield _judge("locked", f"{length} are not: {slab.lock_reason}", memlock)
    if slab.registered:
        yield _judge("registered", f"{length} are registered with io_uring")
    elif found.auto == "uring+fixed":
        yield _judge("registered", f"{length} are not: {slab.register_reason}", memlock)
    else:
        yield _neutral("registered", f"no: {found.auto} registers none, see the backends above")
    yield _huge_pages(slab)


def _huge_pages(slab: SlabProbe) -> Finding:
    name, setting, huge = "huge pages", slab.transparent_hugepage, slab.huge_bytes
    if setting is None and huge is None:
        return _neutral(name, None)
    value = f"{_bytes(huge)} of {format_bytes(slab.length_bytes)} (transparent_hugepage: {_text(setting)})"
    if huge is None:
        return Finding(name, Mark.UNKNOWN, value)
    change = ""
    if setting == "never":
        change = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    elif huge < slab.length_bytes:
        change = "echo 1 | sudo tee /proc/sys/vm/compact_memory: memory is fragmented, or nearly used up"
    return _judge(name, value, change)


def _of_limits(found: Report) -> Iterator[Finding]:
    about, change = found.limits, ""
    if about.may_lock_any:
        memlock = "none for this process (CAP_IPC_LOCK)"
    elif about.memlock_bytes is None:
        memlock = "unlimited"
    elif found.machine.memory_bytes is not None and about.memlock_bytes >= found.machine.memory_bytes:
        memlock = f"{format_bytes(about.memlock_bytes)}, more than there is"
    else:
        memlock, change = f"{format_bytes(about.memlock_bytes)}; a larger pool is not locked", _memlock_change(found)
    yield _judge("RLIMIT_MEMLOCK", memlock, change)
    if about.aio_max_nr is None or about.aio_nr is None:
        yield _neutral("aio-max-nr", None)
    else:
        few = about.aio_max_nr - about.aio_nr < _FEW_AIO_REQUESTS
        change = f"sudo sysctl fs.aio-max-nr={max(1 << 20, 2 * about.aio_max_nr)}" if few else ""
        yield _judge("aio-max-nr", f"{about.aio_nr} of {about.aio_max_nr} used", change)
    # What follows from these two is said where a backend is refused.
    meaning = {0: "0 (allowed)", 1: "1 (for the privileged alone)", 2: "2 (forbidden)"}
    disabled = about.io_uring_disabled
    yield _neutral("io_uring_disabled", disabled if disabled is None else meaning.get(disabled, disabled))
    yield _neutral("seccomp", about.seccomp)


def _of_native_steps(found: Report) -> Iterator[Finding]:
    native = [each.optimizer for each in found.native_steps if each.native]
    if native:
        value = f"by {instruction_set()}: {', '.join(native)}"
        yield _judge("native", value)
    others = [f"{each.optimizer} ({each.reason})" for each in found.native_steps if not each.native]
    if others:
        yield _neutral("by the class", ", ".join(others))
    if found.packing_bps:
        speed = f"packs and unpacks {found.packing_bps / 1e9:.1f} GB/s of state on one core"
        yield _neutral("packing", f"{speed}; encoding: exact packs where the drive is slower")


def _of_gpus(found: Report) -> Iterator[Finding]:
    for i, device in enumerate(found.accelerators):
        yield _judge(f"{device.type}:{i}", f"{device.name}, {format_bytes(device.memory_bytes)}")
    cufile = found.cufile
    if not found.accelerators:
        value = f"none: {found.accelerators_reason}"
        change = "install a torch with CUDA, of a version that the GPU's driver supports"
        yield _judge("devices", value, change) if found.nvidia_driver else _neutral("devices", value)
    if not any(device.type == "cuda" for device in found.accelerators):
        yield _neutral("cuFile", "not needed without a CUDA device")
        return
    if cufile.available:
        value = f"cuFile {cufile.version or 'of unknown version'}, {cufile.library}"
        if cufile.compatibility_mode is None:
            value += "; whether it passes by host memory cannot be told"
    else:
        value = f"no: {cufile.reason}; GPU tensors go through host memory"
    yield _judge("cuFile", value, _cufile_change(cufile))


def _cufile_change(about: CuFileProbe) -> str:
    if not about.library:
        return "pip install nvidia-cufile, or install the system's package of GPUDirect Storage"
    if about.compatibility_mode:
        return (
            "install GPUDirect Storage and run sudo modprobe nvidia-fs; "
            "in /etc/cufile.json force_compat_mode must not be true"
        )
    if about.available:
        return ""
    return "install GPUDirect Storage of the version of the GPU's driver; gdscheck -p says more"


def _of_directory(directory: Directory) -> Iterator[Finding]:
    path, kind = shlex.quote(directory.path), directory.file_system
    if directory.error:
        yield _judge("usable", f"no: {directory.error}", directory.change)
    if kind is None:
        yield _neutral("file system", None)
    else:
        value = f"{kind} at {_text(directory.mount_point)}, from {_text(directory.source)}"
        yield _judge("file system", value, _file_system_change(kind, path))
    if directory.direct:
        value = f"yes, at offsets that are multiples of {directory.alignment_bytes}, "
        value += f"in memory at multiples of {directory.memory_alignment_bytes}"
        yield _judge("O_DIRECT", value)
    elif directory.direct is not None:
        yield _judge("O_DIRECT", f"no: {directory.direct_reason}", _direct_change(directory, path))
    if directory.gds:
        yield _judge("GPUDirect", "cuFile writes and reads files here")
    elif directory.gds is not None:
        yield _judge("GPUDirect", f"no: {directory.gds_reason}", "see gdscheck -p: it names file systems and drives")
    if directory.preallocated:
        yield _judge("preallocation", "works")
    elif directory.preallocated is not None or directory.preallocate_reason:
        change = "name a directory on ext4 or XFS, with free space"
        yield _judge("preallocation", f"no: {directory.preallocate_reason}", change)
    if directory.free_bytes is None:
        yield _neutral("free", None)
    else:
        value = f"{format_bytes(directory.free_bytes)} of {_bytes(directory.total_bytes)}"
        yield _judge("free", value, "" if directory.free_bytes else "free some space")
    if directory.stale_bytes:
        value = f"{format_bytes(directory.stale_bytes)} in directories of killed runs"
        yield _judge("left over", value, f"swapper clean {path}")
    if not directory.drives and kind is not None:
        yield _neutral("drive", None)
    for drive in directory.drives:
        yield from _of_drive(drive, "drive")


def _file_system_change(kind: str, path: str) -> str:
    if kind in MEMORY_FILE_SYSTEMS:
        return f"{_ANOTHER_DIRECTORY}: this is memory, and a run refuses it"
    if is_network_file_system(kind):
        return f"{_ANOTHER_DIRECTORY}: this is a network file system"
    if kind == "overlay":
        return f"mount a volume of a local drive into the container, at {path} (docker run -v /mnt/nvme:{path})"
    return ""


def _direct_change(directory: Directory, path: str) -> str:
    if directory.file_system == "btrfs":
        return f"chattr +C {path}, so that new files there are not copied on write"
    if directory.file_system == "zfs":
        return "use OpenZFS 2.3 or newer with direct=standard, or name a directory on ext4 or XFS"
    return "name a directory on ext4 or XFS: transfers here go through the page cache"


def _of_drive(drive: Drive, name: str) -> Iterator[Finding]:
    words = [
        f"{drive.name}: {drive.kind}",
        *(["rotating"] if drive.rotating and drive.kind != "virtual" else []),
        drive.model or "model unknown",
        f"scheduler {_text(drive.scheduler)}",
        f"requests of up to {_bytes(drive.max_request_bytes)}",
    ]
    yield _judge(name, ", ".join(words), "; ".join(_drive_changes(drive)))
    for member in drive.members:
        yield from _of_drive(member, f"{name} member")


def _drive_changes(drive: Drive) -> Iterator[str]:
    queue = f"/sys/block/{drive.name}/queue"
    if drive.kind in ("network", "USB", "memory", "loop", "MMC") or drive.kind.startswith("NVMe over"):
        yield f"{_ANOTHER_DIRECTORY}: this is {'a disk image' if drive.kind == 'loop' else drive.kind}"
    elif any(name in (drive.model or "") for name in ("Elastic Block Store", "PersistentDisk")):
        yield f"{_ANOTHER_DIRECTORY}: this is a network volume"
    elif drive.rotating and drive.kind not in ("virtual", "encrypted", "LVM", "mapped"):
        yield f"{_ANOTHER_DIRECTORY}: this one rotates"
    if drive.kind in ("raid4", "raid5", "raid6"):
        yield "use single drives or RAID 0: every write here also reads, and writes parity"
    if drive.kind == "encrypted":
        yield "use a partition that is not encrypted, if you may: every byte costs CPU here"
    wanted = "none" if drive.kind == "NVMe" or drive.scheduler == "bfq" else drive.scheduler
    if drive.scheduler != wanted and wanted in drive.schedulers and not drive.rotating:
        yield f"echo {wanted} | sudo tee {queue}/scheduler"
    now, most = drive.max_request_bytes, drive.max_hardware_request_bytes
    if now is not None and most is not None and now < min(_REQUEST_BYTES, most):
        yield f"echo {min(_REQUEST_BYTES, most) >> 10} | sudo tee {queue}/max_sectors_kb"


# --- The command ---------------------------------------------------------------------------------------------------

_STYLES = {Mark.FINE: "green", Mark.WORSE: "bold yellow", Mark.UNKNOWN: "magenta", Mark.NEUTRAL: "dim"}


def report(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="More directories, as with --nvme-path.")
    ] = None,
    nvme_path: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Where runs will keep their files; may be repeated. Default: $SWAPPER_NVME_PATH, else '.'.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Will it be fast on this machine, and what to change.

    Everything is tried for real: a file is made in each directory and removed, 64 MiB of memory are locked and
    registered. Lines that are worse than they could be are marked "!" and end with what to change. Nothing is changed.

    \b
    Examples:
        swapper report
        swapper report --nvme-path /mnt/nvme0 --nvme-path /mnt/nvme1
    """
    found = make_report(directories_or_default([*(nvme_path or []), *(directories or [])]))
    lines = list(findings(found))
    if as_json:
        print_json(_as_json(found, lines))
    else:
        _print(found, lines)
    unusable = [directory for directory in found.directories if directory.error]
    fail_if([f"report: {directory.path} cannot be used: {directory.error}" for directory in unusable])


def _as_json(found: Report, lines: list[Finding]) -> dict[str, object]:
    backends = [{**backend._asdict(), "auto": backend.backend == found.auto} for backend in found.backends]
    keys = ("section", "name", "value", "change")
    changes = [{key: getattr(line, key) for key in keys} for line in lines if line.mark is Mark.WORSE]
    # `cuda` was there before `accelerators`, and programs read it.
    cuda = [
        {"name": each.name, "memory_bytes": each.memory_bytes} for each in found.accelerators if each.type == "cuda"
    ]
    reason = "" if cuda else found.accelerators_reason or "the accelerators are of another type"
    more = {"backends": backends, "cuda": cuda, "cuda_reason": reason, "cufile": found.cufile._asdict()}
    return {**asdict(found), **more, "changes": changes}


def _print(found: Report, lines: list[Finding]) -> None:
    console = make_console()
    console.print(f"swapper {found.version}")
    section, width = "", max(len(line.name) for line in lines)
    for line in lines:
        if line.section != section:
            section = line.section
            console.print()
            console.print(Text(printable(section), style="bold"))
        text = Text("  ").append(f"{line.mark.value:<2}", style=_STYLES[line.mark])
        text.append(f"  {line.name:<{width}}  {printable(line.value)}")
        if line.change:
            text.append(f" -> {printable(line.change)}", style="bold")
        console.print(text)
    console.print()
    changes: dict[str, list[str]] = {}  # what to change: where it was said
    for line in lines:
        if line.change:
            changes.setdefault(line.change, []).append(f"{line.section}: {line.name}")
    if not changes:
        console.print(Text("Nothing to change", style="bold green"))
        return
    console.print(Text("What to change", style="bold"))
    for i, (change, named) in enumerate(changes.items(), 1):
        console.print(f"  {i}. {printable(change)}  ({printable(', '.join(named))})")
