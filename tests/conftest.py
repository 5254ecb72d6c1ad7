"""What every test has: a place for files, the environment restored, and what to skip without root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

# Threads that spin while they wait take the cores from the engine and from tests beside this one; no bits depend on it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swapper.io import _native

# Support modules that define fixtures and hooks, and those whose asserts shall say what differs.
# `accelerators` imports `sampling`, so it comes after it.
pytest_plugins = [
    "small_drives",
    "frozen",
    "lost_memory",
    "measuring",
    "mock_cufile",
    "packed_state",
    "sampling",
    "snapshots",
    "turns",
    "accelerators",
]
pytest.register_assert_rewrite(
    "checkpoints", "command", "configs", "deepnvme_programs", "gradient_twins", "isolation", "training", "twins"
)


# By `make sanitize`: AddressSanitizer's run-time is then in this process, and never otherwise.
RUNTIME = ctypes.CDLL(None)
SANITIZED = hasattr(RUNTIME, "__asan_init")


# From sched.h and sys/mount.h.
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def have_own_mounts() -> None:
    """What tests mount is seen by this process and its children only, and ends with them, also where they are killed:
    else it would be left in the temporary directory, and every later run fail when it removes that."""
    if os.geteuid() == 0 and RUNTIME.unshare(CLONE_NEWNS) == 0:
        assert RUNTIME.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0, "mounts would be seen outside"


def pytest_configure() -> None:
    have_own_mounts()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has it ignored in what it runs in the background. Tests raise it, here and in processes of their own.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if SANITIZED and b"__asan_init" not in Path(_native.__file__).read_bytes():
        raise pytest.UsageError(f"{_native.__file__} was built without AddressSanitizer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest tests first: a worker that begins one when the others are done leaves a core idle.
    items.sort(key=lambda item: "whole" not in item.path.parts)
    for item in items:
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if (mark := item.get_closest_marker("unsanitized")) and SANITIZED:
            item.add_marker(pytest.mark.skip(reason=f"not under AddressSanitizer: {mark.args[0]}"))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Say by what a worker ended: a thread whose stack overflows, say, ends it without a word of its own."""
    worker = report.node.gateway._io.popen
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(60)
    report.longrepr += f"; it ended with {worker.returncode}, a signal's number below 0"


class Constants:
    """Constants of modules, which tests change for a time, and libraries that they use."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}  # Of each module: looked for once, since there are 10,000 tests.

    def now(self) -> dict[tuple[str, str], Any]:
        return {
            (module, name): value
            for module in list(sys.modules)
            if module[:8] == "swapper."
            for name in self._names_in(module)
            if (value := getattr(sys.modules[module], name, None)) is not None
        }

    def _names_in(self, module: str) -> list[str]:
        if module not in self._names:
            contents = vars(sys.modules[module])
            self._names[module] = [n for n, value in contents.items() if n.isupper() and type(value) in (int, float)]
        return self._names[module]


CONSTANTS = Constants()


@pytest.fixture(autouse=True)
def _constants_are_restored() -> Iterator[None]:
    """A test's `monkeypatch` may be older than a fixture that sets the same, and then puts back what that has set."""
    dtype, before = torch.get_default_dtype(), CONSTANTS.now()
    yield
    torch.set_default_dtype(dtype)
    after = CONSTANTS.now()
    for (module, name), value in before.items():
        if after.get((module, name), value) != value:
            setattr(sys.modules[module], name, value)


@pytest.fixture(scope="session", autouse=True)
def _tmpfs_is_allowed() -> Iterator[None]:
    """The directory for temporary files is in memory on many machines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWAPPER_ALLOW_TMPFS", "1")
        yield


@pytest.fixture(autouse=True)
def _threads_are_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def nvme_path(tmp_path: Path) -> Path:
    """An empty directory for records."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def leaves_nothing(nvme_path: Path) -> Iterator[None]:
    """After the test, `nvme_path` is empty. Ask for it before what makes files there, so that it looks last."""
    yield
    assert not list(nvme_path.iterdir()), "files were left behind"
