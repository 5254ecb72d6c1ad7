"""`swapper report`: on this machine as it is, and on machines made of files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import alone, drop_capability_to_lock_memory
from launcher import run_program
from mock_cufile import COMPILER, Mock
from typer.testing import CliRunner, Result

from swapper.bench import drive, machine
from swapper.bench.drive import Directory, Drive
from swapper.bench.machine import Accelerator, Limits, Machine, SlabProbe
from swapper.cli import app
from swapper.cli import report as report_module
from swapper.cli.report import Finding, Mark, Report, findings
from swapper.errors import SwapIOError
from swapper.io.gds import CuFileProbe, probe_cufile
from swapper.io.handle import BACKENDS, AsyncIOHandle, File, Probe, probe
from swapper.storage.mounts import Mount

pytestmark = pytest.mark.timeout(240)

MiB, GiB = 1 << 20, 1 << 30


def swapper(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    return result


def as_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    data = json.loads(swapper("report", *arguments, "--json", code=code).stdout)
    assert isinstance(data, dict)
    return data


# --- This machine -----------------------------------------------------------------------------------------------------

KEYS = {
    "": "version machine backends limits slab accelerators accelerators_reason cuda cuda_reason nvidia_driver "
    "cufile directories native_steps packing_bps changes",
    "machine": "kernel architecture cpu cpus cpus_usable memory_bytes memory_available_bytes container cgroup_version "
    "memory_limit_bytes python torch torch_threads omp_wait_policy",
    "limits": "memlock_bytes memlock_hard_bytes may_lock_any aio_max_nr aio_nr io_uring_disabled seccomp",
    "slab": "length_bytes allocated reason locked lock_reason registered register_reason huge_bytes "
    "transparent_hugepage",
    "cufile": "available reason library version driver_open nvidia_fs compatibility_mode compatibility_reason",
}
DIRECTORY_KEYS = (
    "path error change file_system mount_point source direct direct_reason alignment_bytes memory_alignment_bytes "
    "preallocated preallocate_reason free_bytes total_bytes stale_bytes drives gds gds_reason"
)
DRIVE_KEYS = "name kind model rotating scheduler schedulers max_request_bytes max_hardware_request_bytes members"


def test_json_has_the_documented_keys(nvme_path: Path) -> None:
    data = as_json("--nvme-path", nvme_path)
    for name, keys in KEYS.items():
        assert set(data[name] if name else data) == set(keys.split())
    assert [set(backend) for backend in data["backends"]] == [{"backend", "available", "reason", "auto"}] * 5
    [directory] = data["directories"]
    assert set(directory) == set(DIRECTORY_KEYS.split())
    assert all(set(found) == set(DRIVE_KEYS.split()) for found in directory["drives"])
    assert all(set(change) == {"section", "name", "value", "change"} for change in data["changes"])


def test_optimizers_are_stepped_natively_or_a_reason_is_given(nvme_path: Path) -> None:
    data = as_json("--nvme-path", nvme_path)
    native = {each["optimizer"]: each["native"] for each in data["native_steps"]}
    assert native["AdamW(fused=True)"] and native["SGD(momentum)"] and not native["Rprop"]
    assert all(each["native"] == (not each["reason"]) for each in data["native_steps"])


def test_the_documentation_names_every_key() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
    for keys in [*KEYS.values(), DIRECTORY_KEYS, DRIVE_KEYS]:
        missing = [key for key in keys.split() if f"`{key}`" not in text]
        assert not missing


def test_what_is_reported_is_what_the_engine_says(nvme_path: Path) -> None:
    data = as_json("--nvme-path", nvme_path)
    assert [(found["backend"], found["available"], found["reason"]) for found in data["backends"]] == list(probe())
    with AsyncIOHandle() as handle, handle.open(nvme_path / "file", "rw") as file:
        assert [found["backend"] for found in data["backends"] if found["auto"]] == [handle.backend]
        [directory] = data["directories"]
        assert (directory["direct"], directory["direct_reason"]) == (file.direct, file.direct_reason)
        assert directory["alignment_bytes"] == file.alignment_bytes
        assert directory["memory_alignment_bytes"] == file.memory_alignment_bytes
        assert directory["preallocated"] == file.preallocate(4096)
    assert data["cufile"] == probe_cufile()._asdict()
    assert directory["error"] == ""
    assert directory["total_bytes"] > directory["free_bytes"] > 0
    assert data["machine"]["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert data["machine"]["cpus_usable"] == len(os.sched_getaffinity(0))


def test_every_section_is_shown_and_nothing_is_left_behind(nvme_path: Path) -> None:
    other = nvme_path / "other"
    other.mkdir()
    text = swapper("report", "--nvme-path", nvme_path, "--nvme-path", other, other).stdout
    lines = text.splitlines()
    sections = ["Machine", "I/O backends", "Memory of the pool", "Limits", "GPUs", str(nvme_path), str(other)]
    assert [line for line in lines if line in sections] == sections
    for backend in BACKENDS:
        assert any(line.split()[1:2] == [backend] for line in lines)
    assert "What to change" in lines or "Nothing to change" in lines
    assert [path.name for path in nvme_path.rglob("*")] == ["other"]


@pytest.mark.long
def test_a_subprocess_prints_the_same_without_colours(nvme_path: Path) -> None:
    done = run_program(
        [sys.executable, "-m", "swapper", "report", str(nvme_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "30", "TERM": "xterm-256color"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert any("O_DIRECT" in line and len(line) > 30 for line in done.stdout.splitlines()), "nothing is wrapped"


@pytest.mark.long
def test_the_default_directory(nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".swapper").mkdir()
    assert [found["path"] for found in as_json()["directories"]] == [str(tmp_path)]
    monkeypatch.setenv("SWAPPER_NVME_PATH", str(nvme_path))
    assert [found["path"] for found in as_json()["directories"]] == [str(nvme_path)]


def test_a_directory_that_cannot_be_used_is_said_with_the_fix(nvme_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = tmp_path / "is missing"
    result = swapper("report", missing, tmp_path / "file", nvme_path, code=1)
    assert f"No such file or directory -> mkdir -p '{missing}'" in result.stdout
    assert "Not a directory" in result.stdout
    assert "preallocation" in result.stdout, "the others are reported"
    assert [line.split(" cannot be used")[0] for line in result.stderr.splitlines()] == [
        f"swapper report: {missing}",
        f"swapper report: {tmp_path / 'file'}",
    ]
    data = as_json(missing, code=1)
    assert data["directories"][0]["direct"] is None
    assert "mkdir" in data["changes"][-1]["change"]


@pytest.mark.root
def test_a_read_only_directory_is_said(nvme_path: Path) -> None:
    done = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(nvme_path), str(nvme_path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        [directory] = as_json(nvme_path, code=1)["directories"]
    finally:
        subprocess.run(["umount", str(nvme_path)], check=True)
    assert "Read-only file system" in directory["error"]
    assert directory["file_system"]
    assert directory["free_bytes"] > 0


def test_left_over_runs_are_counted(nvme_path: Path) -> None:
    directory = nvme_path / "swapper-dead-0"
    directory.mkdir()
    (directory / "lock").write_text(
        json.dumps({"boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip()})
    )
    (directory / "record").write_bytes(b"x" * MiB)
    data = as_json(nvme_path)
    assert data["directories"][0]["stale_bytes"] >= MiB
    assert f"swapper clean {nvme_path}" in [change["change"] for change in data["changes"]]


def test_memory_is_no_drive() -> None:
    if not os.path.isdir("/dev/shm") or drive.mount_of(Path("/dev/shm")).kind != "tmpfs":  # type: ignore[union-attr]
        pytest.skip("no tmpfs at /dev/shm")
    assert any("memory" in change["change"] for change in as_json("/dev/shm")["changes"])


def under_a_locked_memory_limit(nvme_path: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    drop_capability_to_lock_memory()
    return as_json(nvme_path)


@pytest.mark.long
@pytest.mark.unsanitized("it turns mlock into nothing")
def test_a_locked_memory_limit_is_met_for_real(nvme_path: Path) -> None:
    data = alone(under_a_locked_memory_limit, nvme_path)
    assert (data["limits"]["memlock_bytes"], data["limits"]["memlock_hard_bytes"]) == (65536, 65536)
    assert data["limits"]["may_lock_any"] is False
    assert data["slab"]["locked"] is False
    assert "RLIMIT_MEMLOCK is 65536 bytes" in data["slab"]["lock_reason"]
    assert {"locked", "RLIMIT_MEMLOCK"} <= {change["name"] for change in data["changes"]}
    assert all("memlock" in change["change"] for change in data["changes"] if change["name"] == "locked")
    if any(found["auto"] and found["backend"] == "uring+fixed" for found in data["backends"]):
        assert data["slab"]["registered"] is False
        assert "registering" in data["slab"]["register_reason"]


# --- Machines made of files -------------------------------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that tells nothing; fill in `proc`, `sys` and `root`."""
    for name in ("proc", "sys", "root"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(machine, name.upper(), tmp_path / name)
    for variable in ("KUBERNETES_SERVICE_HOST", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.long
def test_what_a_machine_does_not_tell_is_unknown(empty: Path, nvme_path: Path) -> None:
    data = as_json(nvme_path)
    unknown = {
        "machine": "cpu memory_bytes memory_available_bytes container cgroup_version memory_limit_bytes",
        "limits": "may_lock_any aio_max_nr aio_nr io_uring_disabled seccomp",
        "slab": "huge_bytes transparent_hugepage",
    }
    for name, keys in unknown.items():
        assert {key: data[name][key] for key in keys.split()} == dict.fromkeys(keys.split())
    assert data["directories"][0]["drives"] == []
    lines = swapper("report", nvme_path).stdout.splitlines()
    marked = {line.split()[1] for line in lines if line.startswith("  ? ")}
    assert {"aio-max-nr", "io_uring_disabled", "seccomp", "huge", "drive"} <= marked
    assert all("unknown" in line for line in lines if line.startswith("  ? "))


@pytest.mark.long
@pytest.mark.parametrize(
    "text", ["", "garbage", "-", "MemTotal: lots kB\nSeccomp: 9\nCapEff: zz\nab-cd rw\n[\n1:2\n::"]
)
def test_nonsense_in_the_kernels_files_is_unknown_too(empty: Path, nvme_path: Path, text: str) -> None:
    names = "meminfo cpuinfo self/status self/smaps self/cgroup self/mountinfo sys/fs/aio-max-nr sys/fs/aio-nr"
    put(empty / "proc", dict.fromkeys([*names.split(), "sys/kernel/io_uring_disabled"], text))
    number = os.stat(nvme_path).st_dev
    block = f"dev/block/{os.major(number)}:{os.minor(number)}"
    queue = dict.fromkeys([f"{block}/queue/{name}" for name in ("scheduler", "rotational", "max_sectors_kb")], text)
    put(empty / "sys", {**queue, "kernel/mm/transparent_hugepage/enabled": text})
    data = as_json(nvme_path)
    assert data["machine"]["memory_bytes"] is None
    assert data["limits"]["aio_max_nr"] is None
    assert data["limits"]["may_lock_any"] is None
    assert swapper("report", nvme_path).stdout


def test_limits_are_read(empty: Path) -> None:
    put(
        empty / "proc",
        {
            "self/status": "Name:\tx\nCapEff:\t0000000000004000\nSeccomp:\t2\nSeccomp_filters:\t1",
            "sys/fs/aio-max-nr": "65536",
            "sys/fs/aio-nr": "65000",
            "sys/kernel/io_uring_disabled": "2",
            "meminfo": "MemTotal:       24684096 kB\nMemAvailable:    4684096 kB",
            "cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: Other",
        },
    )
    found = machine.limits()
    assert (found.may_lock_any, found.seccomp, found.io_uring_disabled) == (True, "filter", 2)
    assert (found.aio_max_nr, found.aio_nr) == (65536, 65000)
    about = machine.machine()
    assert (about.memory_bytes, about.memory_available_bytes) == (24684096 << 10, 4684096 << 10)
    assert about.cpu == "Some CPU @ 2 GHz"


def test_huge_pages_are_those_of_the_slab(empty: Path) -> None:
    put(
        empty / "proc",
        {
            "self/smaps": "10000-20000 rw-p 0 00:00 0\nSize: 1 kB\nAnonHugePages:      10 kB\n"
            "7f0000000000-7f0004000000 rw-p 0 00:00 0\nSize: 65536 kB\nAnonHugePages:     2048 kB\n"
            "7f0005000000-7f0006000000 rw-p 0 00:00 0\nAnonHugePages:      30 kB"
        },
    )
    assert machine._huge_bytes(0x7F0000200000) == 2 * MiB
    assert machine._huge_bytes(0x7F0004000000) is None


MOUNTS_V1 = """\
30 20 0:10 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
31 20 0:11 /docker/abc {root}/memory rw - cgroup cgroup rw,memory
32 20 0:12 / {root}/unified rw - cgroup2 cgroup2 rw"""
MOUNTS_V2 = "40 20 0:13 / {root} rw - cgroup2 cgroup2 rw,nsdelegate"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        ("0::/", MOUNTS_V2, {}, (2, None)),
        ("0::/", MOUNTS_V2, {"memory.max": "max"}, (2, None)),
        ("0::/", MOUNTS_V2, {"memory.max": "1073741824"}, (2, GiB)),
        (
            "0::/a.slice/b.service",
            MOUNTS_V2,
            {"a.slice/memory.max": "2147483648", "a.slice/b.service/memory.max": "max"},
            (2, 2 * GiB),
        ),
        (
            "0::/a/b",
            MOUNTS_V2,
            {"a/memory.max": "2147483648", "a/b/memory.max": "1073741824"},
            (2, GiB),
        ),
        (
            "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/",
            MOUNTS_V1,
            {"memory/memory.limit_in_bytes": "536870912", "unified/memory.max": "1"},
            (1, 512 * MiB),
        ),
        (
            "4:cpuset,memory:/docker/abc/sub",
            MOUNTS_V1,
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/sub/memory.limit_in_bytes": "4096"},
            (1, 4096),
        ),
        ("4:memory:/elsewhere", MOUNTS_V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, (1, None)),
        ("4:memory:/docker/abc", MOUNTS_V1, {}, (None, None)),
        ("0::/a", "", {}, (None, None)),
    ],
)
def test_the_memory_limit_of_either_version_of_cgroups(
    empty: Path, cgroup: str, mounts: str, files: dict[str, str], expected: tuple[int | None, int | None]
) -> None:
    root = empty / "cgroup"
    root.mkdir()
    put(root, files)
    put(empty / "proc", {"self/cgroup": cgroup, "self/mountinfo": mounts.format(root=root)})
    found = machine.machine()
    assert (found.cgroup_version, found.memory_limit_bytes) == expected


@pytest.mark.parametrize(
    ("where", "file", "text", "expected"),
    [
        ("root", ".dockerenv", "", "docker"),
        ("root", "run/.containerenv", "", "podman"),
        ("root", "run/systemd/container", "systemd-nspawn", "systemd-nspawn"),
        ("proc", "self/cgroup", "0::/kubepods/pod1/abc", "kubernetes"),
        ("proc", "self/cgroup", "4:memory:/docker/abc", "docker"),
        ("proc", "self/cgroup", "0::/user.slice", None),
    ],
)
def test_containers_are_noticed(empty: Path, where: str, file: str, text: str, expected: str | None) -> None:
    put(empty / where, {file: text})
    assert machine.machine().container == expected


def test_kubernetes_is_noticed(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    put(empty / "root", {".dockerenv": ""})
    assert machine.machine().container == "kubernetes"


def block(
    sys: Path, device: str, place: str, files: dict[str, str] | None = None, *, partition: str = "", **queue: str
) -> Path:
    """A block device below /sys: a partition of it if `partition` is named."""
    at = sys / "devices" / place
    at.mkdir(parents=True)
    put(at, {f"queue/{name}": text for name, text in queue.items()})
    put(at, files or {})
    if partition:
        put(at / partition, {"partition": "1"})
    (sys / "dev/block").mkdir(parents=True, exist_ok=True)
    (sys / "dev/block" / device).symlink_to(at / partition)
    return at


def drives_of(device: str, source: str = "/dev/x") -> list[Drive]:
    return drive._drives(Mount("1", device, "/", "/mnt", "ext4", source, "rw"))


def changes_of(found: Drive) -> list[str]:
    return list(report_module._drive_changes(found))


def test_a_partition_of_an_nvme_drive(empty: Path) -> None:
    block(
        empty / "sys",
        "259:2",
        "pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1",
        {"device/model": "Samsung SSD 990 PRO 2TB   ", "device/transport": "pcie"},
        partition="nvme0n1p1",
        rotational="0",
        scheduler="[none] mq-deadline kyber bfq",
        max_sectors_kb="1280",
        max_hw_sectors_kb="2048",
    )
    [found] = drives_of("259:2")
    schedulers = ["none", "mq-deadline", "kyber", "bfq"]
    model = "Samsung SSD 990 PRO 2TB"
    assert found == Drive("nvme0n1", "NVMe", model, False, "none", schedulers, 1280 << 10, 2048 << 10, [])
    assert not changes_of(found)


def test_a_raid_names_its_members(empty: Path) -> None:
    array = block(empty / "sys", "9:0", "virtual/block/md0", {"md/level": "raid0"}, rotational="0")
    (array / "slaves").mkdir()
    for i in (0, 1):
        member = block(
            empty / "sys",
            f"259:{i}",
            f"pci/nvme/nvme{i}/nvme{i}n1",
            {"device/model": f"Drive {i}"},
            partition=f"nvme{i}n1p1",
            scheduler="none [mq-deadline]",
        )
        (array / "slaves" / f"nvme{i}n1p1").symlink_to(member / f"nvme{i}n1p1")
    [found] = drives_of("9:0")
    assert (found.name, found.kind) == ("md0", "raid0")
    assert [(member.name, member.kind, member.model) for member in found.members] == [
        ("nvme0n1", "NVMe", "Drive 0"),
        ("nvme1n1", "NVMe", "Drive 1"),
    ]
    lines = list(report_module._of_drive(found, "drive"))
    assert [line.name for line in lines] == ["drive", "drive member", "drive member"]
    assert [line.change for line in lines[1:]] == [
        f"echo none | sudo tee /sys/block/nvme{i}n1/queue/scheduler" for i in (0, 1)
    ]


@pytest.mark.parametrize(
    ("place", "files", "kind", "model"),
    [
        ("pci/nvme-subsystem/nvme-subsys0/nvme0n1", {"device/model": "X"}, "NVMe", "X"),
        ("virtual/nvme-fabrics/ctl/nvme1/nvme1n1", {"device/transport": "tcp"}, "NVMe over tcp", None),
        (
            "pci0/ata1/host0/target/0:0:0:0/block/sda",
            {"device/vendor": "ATA     ", "device/model": "CT500"},
            "SATA",
            "CT500",
        ),
        (
            "pci0/usb2/2-1/host0/block/sdb",
            {"device/vendor": "SanDisk", "device/model": "Ultra"},
            "USB",
            "SanDisk Ultra",
        ),
        ("pci0/host0/port-0:0/end_device-0:0/block/sdc", {}, "SAS", None),
        (
            "pci0/host0/block/sdd",
            {"device/vendor": "VMware", "device/model": "Virtual disk"},
            "virtual",
            "VMware Virtual disk",
        ),
        ("pci0/virtio1/block/vda", {"device/vendor": "0x1af4"}, "virtual", None),
        ("pci0/virtio2/host0/block/sde", {"device/vendor": "Google"}, "virtual", "Google"),
        ("pci0/host0/block/sdf", {}, "SCSI", None),
        ("vbd-768/block/xvda", {}, "virtual", None),
        ("virtual/block/md127", {"md/level": "raid5"}, "raid5", None),
        ("virtual/block/dm-0", {"dm/name": "vg-swap", "dm/uuid": "LVM-abc"}, "LVM", "vg-swap"),
        ("virtual/block/dm-1", {"dm/name": "luks", "dm/uuid": "CRYPT-LUKS2-abc"}, "encrypted", "luks"),
        ("virtual/block/dm-2", {"dm/uuid": "mpath-1"}, "mapped", None),
        ("virtual/block/loop3", {"loop/backing_file": "/images/a.img"}, "loop", "/images/a.img"),
        ("virtual/block/zram0", {}, "memory", None),
        ("virtual/block/nbd0", {}, "network", None),
        ("mmc0/block/mmcblk0", {}, "MMC", None),
        ("strange/block/foo0", {}, "other", None),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) and "/" in value else "",
)
def test_kinds_of_drives(empty: Path, place: str, files: dict[str, str], kind: str, model: str | None) -> None:
    block(empty / "sys", "8:0", place, files)
    [found] = drives_of("8:0")
    assert (found.name, found.kind, found.model) == (place.rpartition("/")[2], kind, model)
    assert (found.rotating, found.scheduler, found.schedulers, found.max_request_bytes) == (None, None, [], None)


def a_drive(kind: str = "NVMe", **more: Any) -> Drive:
    known: dict[str, Any] = {
        "name": "x0",
        "model": "M",
        "rotating": False,
        "scheduler": "none",
        "schedulers": ["none", "mq-deadline", "bfq"],
        "max_request_bytes": 4 * MiB,
        "max_hardware_request_bytes": 4 * MiB,
        "members": [],
    }
    return Drive(kind=kind, **{**known, **more})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (a_drive(), []),
        (a_drive(scheduler="mq-deadline"), ["echo none | sudo tee /sys/block/x0/queue/scheduler"]),
        (a_drive("SATA", scheduler="mq-deadline"), []),
        (a_drive("SATA", scheduler="bfq"), ["echo none"]),
        (a_drive(scheduler="mq-deadline", schedulers=["mq-deadline"]), []),
        (a_drive("SATA", rotating=True, scheduler="mq-deadline"), ["rotates"]),
        (a_drive("virtual", rotating=True, scheduler="mq-deadline"), []),
        (a_drive(max_request_bytes=128 << 10), ["echo 1024 | sudo tee /sys/block/x0/queue/max_sectors_kb"]),
        (a_drive(max_request_bytes=128 << 10, max_hardware_request_bytes=128 << 10), []),
        (a_drive(max_request_bytes=128 << 10, max_hardware_request_bytes=512 << 10), ["echo 512 |"]),
        (a_drive(max_request_bytes=None, max_hardware_request_bytes=None), []),
        (a_drive("raid5"), ["parity"]),
        (a_drive("raid0"), []),
        (a_drive("encrypted", rotating=True), ["not encrypted"]),
        (a_drive("loop"), ["disk image"]),
        (a_drive("NVMe over tcp"), ["NVMe over tcp"]),
        (a_drive(model="Amazon Elastic Block Store"), ["network volume"]),
        (a_drive(model="Amazon EC2 NVMe Instance Storage"), []),
    ],
)
def test_what_is_advised_about_a_drive(found: Drive, words: list[str]) -> None:
    changes = changes_of(found)
    assert len(changes) == len(words)
    assert all(word in change for word, change in zip(words, changes, strict=True))


def test_the_drive_of_a_file_system_without_a_device_number(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block(empty / "sys", "259:5", "pci/nvme/nvme0/nvme0n1", {"device/model": "X"})

    class Status:
        st_rdev = os.makedev(259, 5)

    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **kwargs: Status if path == "/dev/nvme0n1" else real(path, **kwargs))
    assert [found.name for found in drives_of("0:44", "/dev/nvme0n1")] == ["nvme0n1"]
    assert drives_of("0:44", "/dev/missing") == []
    assert drives_of("0:44", "host:/export") == []
    assert drives_of("7:7") == []


# --- What a file in a directory tells -----------------------------------------------------------------------------


def test_a_drive_that_refuses_a_transfer_is_found_out(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: AsyncIOHandle, file: File, tensor: object) -> None:
        raise SwapIOError(errno.EINVAL, "write", file.path)

    monkeypatch.setattr(AsyncIOHandle, "write", refuse)
    found = drive.look_at_directory(nvme_path)
    assert "write failed: Invalid argument" in found.error
    assert (found.direct, found.preallocated) == (None, None)
    assert not list(nvme_path.iterdir())


def test_a_drive_that_forgets_is_found_out(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AsyncIOHandle.read

    def wrong(handle: AsyncIOHandle, file: File, tensor: Any) -> Any:
        os.pwrite(file.fileno(), b"x", 100)
        os.fdatasync(file.fileno())
        return real(handle, file, tensor)

    monkeypatch.setattr(AsyncIOHandle, "read", wrong)
    assert "not what was read" in drive.look_at_directory(nvme_path).error


@pytest.mark.parametrize(
    ("answer", "words"), [(False, "cannot"), (SwapIOError(errno.ENOSPC, "preallocate", "/x"), "No space left")]
)
def test_preallocation_that_does_not_work_is_said(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | SwapIOError, words: str
) -> None:
    def preallocate(file: File, length_bytes: int) -> bool:
        if isinstance(answer, SwapIOError):
            raise answer
        return answer

    monkeypatch.setattr(File, "preallocate", preallocate)
    found = drive.look_at_directory(nvme_path)
    assert found.error == ""
    assert not found.preallocated
    assert words in found.preallocate_reason
    [line] = [line for line in report_module._of_directory(found) if line.name == "preallocation"]
    assert (line.mark, bool(line.change)) == (Mark.WORSE, True)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.root
def test_a_directory_that_is_not_ours_to_write_is_said(nvme_path: Path) -> None:
    with as_nobody():
        found = drive.look_at_directory(nvme_path)
    assert found.error == "Permission denied"
    assert "install -d" in found.change


# --- What it means ----------------------------------------------------------------------------------------------------

GOOD = Report(
    version="1",
    machine=Machine(
        "Linux 6.8",
        "x86_64",
        "CPU",
        8,
        8,
        64 * GiB,
        60 * GiB,
        None,
        2,
        None,
        "3.12",
        "2.6",
        8,
        omp_wait_policy="passive",
    ),
    backends=tuple(Probe(backend, True, "") for backend in BACKENDS),
    limits=Limits(None, None, False, 65536, 0, 0, "none"),
    slab=SlabProbe(64 * MiB, True, "", True, "", True, "", 64 * MiB, "madvise"),
    accelerators=[],
    accelerators_reason="none was found",
    nvidia_driver=False,
    cufile=CuFileProbe(False, "there is no CUDA device", "", "", False, "", None, ""),
    directories=[
        Directory(
            "/mnt", "", "", "ext4", "/mnt", "/dev/nvme0n1", True, "", 4096, 512, True, "", GiB, 2 * GiB, 0, [a_drive()]
        )
    ],
)


def lines_of(found: Report) -> dict[str, Finding]:
    lines = list(findings(found))
    for line in lines:
        assert bool(line.change) == (line.mark is Mark.WORSE), line
        assert line.value, line
    named = {f"{line.section}: {line.name}": line for line in lines}
    assert len(named) == len(lines)
    return named


def changed(**parts: dict[str, Any] | object) -> Report:
    """`GOOD` with some fields of some parts changed."""
    return dataclasses.replace(
        GOOD,
        **{
            name: dataclasses.replace(getattr(GOOD, name), **value) if isinstance(value, dict) else value
            for name, value in parts.items()
        },
    )


def refused(*names: str, reason: str = "Operation not permitted") -> tuple[Probe, ...]:
    return tuple(Probe(name, name not in names, reason if name in names else "") for name in BACKENDS)


def directory(**parts: Any) -> list[Directory]:
    return [dataclasses.replace(GOOD.directories[0], **parts)]


def test_nothing_is_advised_where_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [line for line in lines_of(GOOD).values() if line.change]
    monkeypatch.setattr(report_module, "make_report", lambda directories: GOOD)
    assert swapper("report").stdout.endswith("\nNothing to change\n")
    assert as_json()["changes"] == []


GPU = [Accelerator("cuda", "H100", 80 * GiB)]
FINITE = {"memlock_bytes": 8 * MiB, "memlock_hard_bytes": 8 * MiB}
CUFILE = CuFileProbe(True, "", "libcufile.so.0", "1.15", True, "2.20", False, "")
NO_DRIVER = CuFileProbe(False, "the driver cannot be opened", "libcufile.so.0", "1.15", False, "", None, "")
COPYING = CuFileProbe(False, "it would copy", "libcufile.so.0", "1.15", True, "", True, "nvidia-fs is not loaded")
ON_DEMAND = COPYING._replace(available=True, reason="")
NO_URING = refused("uring+fixed", "uring")


@pytest.mark.parametrize(
    ("found", "name", "words"),
    [
        (changed(machine={"torch_threads": 9}), "Machine: torch", "OMP_NUM_THREADS=8"),
        (changed(machine={"omp_wait_policy": None}), "Machine: OMP_WAIT_POLICY", "=PASSIVE"),
        (changed(limits={**FINITE}), "Limits: RLIMIT_MEMLOCK", "limits.conf"),
        (changed(limits={**FINITE, "memlock_hard_bytes": None}), "Limits: RLIMIT_MEMLOCK", "ulimit -l unlimited"),
        (changed(limits={**FINITE}, machine={"container": "docker"}), "Limits: RLIMIT_MEMLOCK", "--ulimit memlock=-1"),
        (changed(limits={"aio_nr": 65000}), "Limits: aio-max-nr", "sudo sysctl fs.aio-max-nr=1048576"),
        (changed(slab={"locked": False, "lock_reason": "mlock"}), "Memory of the pool: locked", "ulimit -l"),
        (changed(slab={"registered": False, "register_reason": "x"}), "Memory of the pool: registered", "ulimit -l"),
        (changed(slab={"allocated": False, "reason": "no memory"}), "Memory of the pool: slab", "free some memory"),
        (
            changed(slab={"transparent_hugepage": "never", "huge_bytes": 0}),
            "Memory of the pool: huge pages",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        (changed(slab={"huge_bytes": 2 * MiB}), "Memory of the pool: huge pages", "compact_memory"),
        (changed(backends=refused("uring+fixed")), "I/O backends: uring+fixed", "ulimit -l"),
        (
            changed(backends=NO_URING, limits={"io_uring_disabled": 2}),
            "I/O backends: uring",
            "sudo sysctl kernel.io_uring_disabled=0",
        ),
        (
            changed(backends=NO_URING, limits={"seccomp": "filter"}, machine={"container": "docker"}),
            "I/O backends: uring",
            "--security-opt seccomp=",
        ),
        (changed(backends=NO_URING, limits={"seccomp": "filter"}), "I/O backends: uring", "SystemCallFilter"),
        (
            changed(backends=refused("uring+fixed", "uring", reason="RLIMIT_MEMLOCK: raise")),
            "I/O backends: uring",
            "ulimit -l",
        ),
        (changed(backends=NO_URING), "I/O backends: uring", "5.10"),
        (
            changed(backends=refused("uring+fixed", "uring", "aio", reason="fs.aio-max-nr is used up")),
            "I/O backends: aio",
            "sysctl fs.aio-max-nr",
        ),
        (changed(backends=refused("uring+fixed", "uring", "aio")), "I/O backends: aio", "io_setup"),
        (changed(nvidia_driver=True), "GPUs: devices", "torch with CUDA"),
        (changed(accelerators=GPU), "GPUs: cuFile", "pip install nvidia-cufile"),
        (changed(accelerators=GPU, cufile=NO_DRIVER), "GPUs: cuFile", "gdscheck -p"),
        (changed(accelerators=GPU, cufile=COPYING), "GPUs: cuFile", "modprobe nvidia-fs"),
        (
            changed(accelerators=GPU, cufile=COPYING._replace(available=True, reason="")),
            "GPUs: cuFile",
            "modprobe nvidia-fs",
        ),
        (changed(directories=directory(error="x", change="do y")), "/mnt: usable", "do y"),
        (changed(directories=directory(file_system="tmpfs")), "/mnt: file system", "memory"),
        (changed(directories=directory(file_system="nfs4")), "/mnt: file system", "network"),
        (changed(directories=directory(file_system="overlay")), "/mnt: file system", "-v /mnt/nvme:/mnt"),
        (changed(directories=directory(direct=False, direct_reason="EINVAL")), "/mnt: O_DIRECT", "ext4 or XFS"),
        (
            changed(directories=directory(direct=False, direct_reason="x", file_system="btrfs")),
            "/mnt: O_DIRECT",
            "chattr +C /mnt",
        ),
        (changed(directories=directory(preallocated=False, preallocate_reason="x")), "/mnt: preallocation", "ext4"),
        (changed(directories=directory(free_bytes=0)), "/mnt: free", "free some space"),
        (changed(directories=directory(stale_bytes=5)), "/mnt: left over", "swapper clean /mnt"),
        (changed(directories=directory(drives=[a_drive("raid6")])), "/mnt: drive", "parity"),
    ],
)
def test_what_is_worse_than_it_could_be_ends_with_what_to_change(found: Report, name: str, words: str) -> None:
    line = lines_of(found)[name]
    assert line.mark is Mark.WORSE
    assert words in line.change


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (changed(backends=refused("aio")), "I/O backends: aio"),  # Something better is there.
        (changed(backends=NO_URING, slab={"registered": False}), "Memory of the pool: registered"),
        (changed(limits={**FINITE, "may_lock_any": True}), "Limits: RLIMIT_MEMLOCK"),
        (changed(limits={**FINITE, "memlock_bytes": 64 * GiB}), "Limits: RLIMIT_MEMLOCK"),
        (changed(machine={"omp_wait_policy": None}, accelerators=GPU), "Machine: OMP_WAIT_POLICY"),
        (changed(accelerators=GPU, cufile=CUFILE), "GPUs: cuFile"),
        (changed(accelerators=[Accelerator("xpu", "B580", 12 * GiB)]), "GPUs: cuFile"),
        (changed(accelerators=GPU, cufile=CUFILE._replace(compatibility_mode=None, nvidia_fs="")), "GPUs: cuFile"),
        (changed(cufile=NO_DRIVER), "GPUs: cuFile"),
    ],
)
def test_what_does_no_harm_is_not_advised_about(found: Report, name: str) -> None:
    assert lines_of(found)[name].mark is not Mark.WORSE


def test_the_summary_says_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed(
        backends=NO_URING,
        limits={"io_uring_disabled": 1},
        directories=[*directory(path="/a b", stale_bytes=1), *directory(path="/c\x1b[31m")],
    )
    monkeypatch.setattr(report_module, "make_report", lambda directories: found)
    text = swapper("report").stdout
    assert text.partition("\nWhat to change\n")[2].splitlines() == [
        "  1. sudo sysctl kernel.io_uring_disabled=0  (I/O backends: uring+fixed, I/O backends: uring)",
        "  2. swapper clean '/a b'  (/a b: left over)",
    ]
    assert "/c\\x1b[31m" in text
    assert [change["name"] for change in as_json()["changes"]] == ["uring+fixed", "uring", "left over"]


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library")
@pytest.mark.parametrize("works", [True, False])
def test_gpudirect_storage_is_tried_in_each_directory(
    mock: Mock, nvme_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    monkeypatch.setattr(report_module, "accelerators", lambda: (GPU, ""))
    monkeypatch.setattr(report_module, "_GPU", torch.device("cpu"))
    if not works:
        mock["register_error"] = 5008
    found = report_module.make_report([nvme_path, nvme_path / "nowhere"])
    assert [directory.gds for directory in found.directories] == [works, None]
    line = lines_of(found)[f"{nvme_path}: GPUDirect"]
    assert (line.change == "") == works
    assert works or "not supported on this file" in line.value
    assert f"{nvme_path / 'nowhere'}: GPUDirect" not in lines_of(found)
    assert not list(nvme_path.iterdir())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus_are_named() -> None:
    devices, reason = machine.accelerators()
    assert devices
    assert reason == ""
    assert all(device.name and device.memory_bytes > GiB for device in devices)
