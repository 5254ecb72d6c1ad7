"""Looks at this machine, and tries what it allows. What cannot be found out is None, never an error."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from swapper.errors import SwapError
from swapper.io.devices import current_accelerator
from swapper.io.handle import AsyncIOHandle, Slab
from swapper.storage.mounts import mounts

__all__ = [
    "Accelerator",
    "Limits",
    "Machine",
    "SlabProbe",
    "accelerators",
    "has_nvidia_driver",
    "limits",
    "machine",
    "probe_slab",
    "read_int",
    "read_text",
    "swapper_version",
]

ROOT = Path("/")
PROC = Path("/proc")
SYS = Path("/sys")

SLAB_BYTES = 64 << 20
"""Length of the slab that is tried: the default of `bucket_bytes`."""

_CAP_IPC_LOCK = 14
_SECCOMP = {"0": "none", "1": "strict", "2": "filter"}
_CONTAINER_CGROUPS = {
    "kubepods": "kubernetes",
    "docker": "docker",
    "libpod": "podman",
    "lxc": "lxc",
    "containerd": "containerd",
}


def read_text(path: Path) -> str | None:
    """A small file of the kernel's, stripped; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """A number in a file of the kernel's; None if there is none."""
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def swapper_version() -> str:
    """As installed; "unknown" if it is not."""
    try:
        return importlib.metadata.version("tensor-swapper")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# --- The machine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Hardware and software.

    Attributes:
        container: "docker", "kubernetes", ...; None if no sign of one was found.
        memory_limit_bytes: of the cgroup; None if there is none, or `cgroup_version` is None.
        cgroup_version: of the one that limits memory.
        omp_wait_policy: the environment variable OMP_WAIT_POLICY.
    """

    kernel: str
    architecture: str
    cpu: str | None
    cpus: int | None
    cpus_usable: int
    memory_bytes: int | None
    memory_available_bytes: int | None
    container: str | None
    cgroup_version: int | None
    memory_limit_bytes: int | None
    python: str
    torch: str
    torch_threads: int
    omp_wait_policy: str | None


def machine() -> Machine:
    """Look at the machine."""
    memory = _fields(read_text(PROC / "meminfo"))
    cgroup_version, memory_limit_bytes = _memory_limit()
    return Machine(
        kernel=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=_fields(read_text(PROC / "cpuinfo")).get("model name"),
        cpus=os.cpu_count(),
        cpus_usable=len(os.sched_getaffinity(0)),
        memory_bytes=_kilobytes(memory.get("MemTotal")),
        memory_available_bytes=_kilobytes(memory.get("MemAvailable")),
        container=_container(),
        cgroup_version=cgroup_version,
        memory_limit_bytes=memory_limit_bytes,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torch_threads=torch.get_num_threads(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
    )


def _fields(text: str | None) -> dict[str, str]:
    """Lines as in "MemTotal:  24684096 kB"; of equal names the first."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _kilobytes(value: str | None) -> int | None:
    number = (value or "").removesuffix("kB").strip()
    return int(number) << 10 if number.isdecimal() else None


def _container() -> str | None:
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (ROOT / ".dockerenv").exists():
        return "docker"
    if (ROOT / "run/.containerenv").exists():
        return "podman"
    if named := read_text(ROOT / "run/systemd/container"):
        return named
    cgroups = read_text(PROC / "self/cgroup") or ""
    return next((name for sign, name in _CONTAINER_CGROUPS.items() if sign in cgroups), None)


def _memory_limit() -> tuple[int | None, int | None]:
    """Version of the cgroup that holds the memory controller, and the lowest limit on the way up from this process."""
    paths = {}  # controller, or "" for version 2: path
    for line in (read_text(PROC / "self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    version, file, path = 2, "memory.max", paths.get("", "")
    if "memory" in paths:
        version, file, path = 1, "memory.limit_in_bytes", paths["memory"]
    kind = "cgroup" if version == 1 else "cgroup2"
    for mount in mounts(PROC / "self/mountinfo"):
        if mount.kind != kind or (version == 1 and "memory" not in mount.options.split(",")):
            continue
        top = Path(mount.mount_point)
        # In a container the path may be the host's, of which the mount shows a part.
        below = path.removeprefix(mount.root) if path.startswith(mount.root) else ""
        at = top / below.strip("/")
        way_up = [at, *(parent for parent in at.parents if parent.is_relative_to(top))]
        texts = [text for directory in way_up if (text := read_text(directory / file)) is not None]
        # The root of version 2 has no such file, and no limit.
        if texts or (version == 2 and at == top):
            # Version 1 says "no limit" with the largest number there is.
            limits = [int(text) for text in texts if text.isdecimal() and int(text) < 1 << 60]
            return version, min(limits, default=None)
    return None, None


# --- What it allows ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The kernel's limits for this process.

    Attributes:
        memlock_bytes, memlock_hard_bytes: RLIMIT_MEMLOCK; None is unlimited.
        may_lock_any: CAP_IPC_LOCK, for which that limit does not count.
        io_uring_disabled: 0 for nobody, 1 for the unprivileged, 2 for all.
        seccomp: "none", "strict" or "filter".
    """

    memlock_bytes: int | None
    memlock_hard_bytes: int | None
    may_lock_any: bool | None
    aio_max_nr: int | None
    aio_nr: int | None
    io_uring_disabled: int | None
    seccomp: str | None


def limits() -> Limits:
    """Look at what is allowed."""
    soft, hard = (None if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    status = _fields(read_text(PROC / "self/status"))
    capabilities = status.get("CapEff", "")
    is_number = re.fullmatch("[0-9a-f]+", capabilities) is not None
    return Limits(
        memlock_bytes=soft,
        memlock_hard_bytes=hard,
        may_lock_any=bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1) if is_number else None,
        aio_max_nr=read_int(PROC / "sys/fs/aio-max-nr"),
        aio_nr=read_int(PROC / "sys/fs/aio-nr"),
        io_uring_disabled=read_int(PROC / "sys/kernel/io_uring_disabled"),
        seccomp=_SECCOMP.get(status.get("Seccomp", "")),
    )


@dataclass(frozen=True)
class SlabProbe:
    """The result of trying a slab like those that a pool is made of.

    Attributes:
        allocated: there was so much memory.
        locked: it is page-locked (mlock).
        registered: io_uring took it.
        reason, lock_reason, register_reason: why not; "" where it did.
        huge_bytes: how much of it is huge pages.
        transparent_hugepage: the kernel's setting: "always", "madvise" or "never".
    """

    length_bytes: int
    allocated: bool
    reason: str
    locked: bool
    lock_reason: str
    registered: bool
    register_reason: str
    huge_bytes: int | None
    transparent_hugepage: str | None


def probe_slab() -> SlabProbe:
    """Allocate a slab, lock it, register it, and see what pages it got. It is gone when this returns."""
    setting = re.search(r"\[(\w+)\]", read_text(SYS / "kernel/mm/transparent_hugepage/enabled") or "")
    hugepage = setting[1] if setting else None
    try:
        slab = Slab(SLAB_BYTES)
    except (SwapError, OSError) as error:
        reason = str(error)
        return SlabProbe(SLAB_BYTES, False, reason, False, reason, False, reason, None, hugepage)
    register_reason = ""
    try:
        with AsyncIOHandle(queue_depth=8) as handle:
            if not handle.register(slab):
                reasons = {refusal.backend: refusal.reason for refusal in handle.refusals}
                register_reason = reasons.get("uring+fixed", "unknown")
    except (SwapError, OSError) as error:
        register_reason = str(error)
    locks, registers = (slab.locked, slab.lock_reason), (not register_reason, register_reason)
    return SlabProbe(SLAB_BYTES, True, "", *locks, *registers, _huge_bytes(slab.address), hugepage)


def _huge_bytes(address: int) -> int | None:
    """Huge pages in the mapping at `address`, proc_pid_smaps(5)."""
    inside = False
    for line in (read_text(PROC / "self/smaps") or "").splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= address < int(area[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return _kilobytes(line.partition(":")[2].strip())
    return None


# --- GPUs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accelerator:
    """A device that torch can use. `type` is torch's word for its kind, as in "cuda"."""

    type: str
    name: str
    memory_bytes: int


def accelerators() -> tuple[list[Accelerator], str]:
    """The accelerators that torch can use, and why there are none; "" if there are."""
    kind = current_accelerator()
    if kind is None:
        return [], "this torch is built for the CPU alone"
    module = torch.get_device_module(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            devices = [module.get_device_properties(i) for i in range(module.device_count())]
        except (RuntimeError, AssertionError, AttributeError) as error:  # A backend may not tell of its devices.
            return [], str(error)
    if devices:
        return [Accelerator(kind, device.name, device.total_memory) for device in devices], ""
    return [], "; ".join(str(warning.message) for warning in caught) or f"no {kind} device was found"


def has_nvidia_driver() -> bool:
    """True if there is a GPU driver, with or without a torch that uses it."""
    return (PROC / "driver/nvidia").exists()
