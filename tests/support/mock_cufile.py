"""The library that stands for cuFile."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import host_device
import pytest
import torch
from host_device import HostCopies

from swapper.io import bounce, devices, gds
from swapper.io.handle import AsyncIOHandle
from swapper.process.warnings import warn_once

CHUNK = 64 << 10

WITHOUT_CUFILE: dict[str, tuple[dict[str, object], str]] = {
    "off": ({"aio": {"gds": "off"}}, "aio.gds is off"),
    "driver": ({}, "cuFileDriverOpen"),
    "file": ({}, "cuFile error 5007"),
    "verified": ({"verify": "crc32c"}, "takes checksums of records on the host"),
}
"""Why records pass through the pool: settings of a config, and a part of what is logged. See `Mock.refuse`."""

_FAILED = pytest.StashKey[bool]()

COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


class Mock:
    """The mock's switches and counters."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.mock_get.restype = ctypes.c_long
        self.left_open = 0
        """By a test before, which failed: its traceback keeps them."""

    def reset(self) -> None:
        self._library.mock_reset()
        self.left_open = self["open_handles"]

    def refuse(self, why: str) -> None:
        """Have the driver or files refused, if that is `why`."""
        self["open_error" if why == "driver" else "register_error"] = {"driver": 5033, "file": 5007}.get(why, 0)

    def __setitem__(self, name: str, value: int) -> None:
        self._library.mock_set(name.encode(), ctypes.c_long(value))

    def __getitem__(self, name: str) -> int:
        return int(self._library.mock_get(name.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note that a test has failed: what its traceback keeps alive is in use."""
    if call.when == "call" and call.excinfo is not None:
        item.stash[_FAILED] = True
    return (yield)


@functools.cache
def built() -> str:
    """The path of the library, which is built once in a process."""
    assert COMPILER is not None
    source = Path(host_device.__file__).with_name("mock_cufile.cpp")
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    library = Path(directory) / "libmock_cufile.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wno-return-type-c-linkage", "-shared", "-fPIC", "-pthread"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
    return str(library)


@pytest.fixture(scope="session")
def mock_path() -> str:
    return built()


@pytest.fixture
def mock(
    mock_path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Mock]:
    probe = os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR)
    os.close(probe)
    with AsyncIOHandle() as handle, handle.open(tmp_path / "probe") as file:
        if not file.direct:
            pytest.skip(f"needs a file system with O_DIRECT: {file.direct_reason}")
    monkeypatch.setenv(gds.LIBRARY_VARIABLE, mock_path)
    monkeypatch.setitem(devices.DEVICES, "cpu", HostCopies)
    monkeypatch.setattr(bounce, "CHUNK_BYTES_MIN", CHUNK)
    warn_once.cache_clear()
    monkeypatch.setattr(gds, "_NVIDIA_FS", tmp_path / "no-nvidia-fs")
    HostCopies.reset()
    mock = Mock(mock_path)
    mock.reset()
    yield mock
    if request.node.stash.get(_FAILED, False):
        return  # It would wait in vain.
    settled(mock)
    assert mock["open_buffers"] == 0
    assert not HostCopies.locked
    mock.reset()


@pytest.fixture
def direct(
    device: str | torch.device,
    mock_path: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[Mock]:
    """The mock in its direct mode, for memory of the simulated device: see `accelerators`."""
    if not str(device).startswith("sim"):
        pytest.skip("the mock moves bytes of the simulated device")
    with AsyncIOHandle() as handle, handle.open(tmp_path / "probe", "rw") as file:
        if not file.direct:
            pytest.skip(f"needs a file system with O_DIRECT: {file.direct_reason}")
    mock = open_patched(mock_path, monkeypatch)
    yield mock
    if request.node.stash.get(_FAILED, False):
        return  # It would wait in vain.
    settled(mock)
    assert mock["open_buffers"] == 0
    mock.reset()


def open_patched(mock_path: str, patch: pytest.MonkeyPatch) -> Mock:
    """The mock in its direct mode, as long as `patch` holds."""
    from accelerators import simulated  # Not before pytest has taken it for a plugin.

    patch.setenv(gds.LIBRARY_VARIABLE, mock_path)
    patch.setattr(gds, "_NVIDIA_FS", Path(mock_path).with_name("no-nvidia-fs"))
    warn_once.cache_clear()
    mock = Mock(mock_path)
    mock.reset()
    mock["device_start"], mock["device_length"], mock["device_distance"] = simulated().dma_window()
    return mock


def open_direct(mock_path: str) -> Mock:
    """Have the mock in its direct mode in this process, a rank of its own: see `device_ranks`."""
    from accelerators import simulated

    os.environ[gds.LIBRARY_VARIABLE] = mock_path
    gds._NVIDIA_FS = Path(mock_path).with_name("no-nvidia-fs")
    mock = Mock(mock_path)
    mock.reset()
    mock["device_start"], mock["device_length"], mock["device_distance"] = simulated().dma_window()
    return mock


def settled(mock: Mock, most: int = 0) -> None:
    """No more than `most` files stay known. The I/O threads drop what they hold of a transfer just after it is over."""
    gc.collect()
    deadline = time.monotonic() + 240
    while mock["open_handles"] > mock.left_open + most and time.monotonic() < deadline:
        time.sleep(0.001)
    assert mock["open_handles"] <= mock.left_open + most and mock["registered"] <= mock["deregistered"] + most


def check_that_the_reason_is_logged_once(
    direct: Mock, why: str, reason: str, run: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> str:
    """`run`, twice, which is to move records through the pool and to compare them. Returns what was logged."""
    importlib.import_module("swapper.check")._say_once.cache_clear()
    direct.refuse(why)
    with caplog.at_level(logging.INFO, "swapper"):
        for _ in range(2):
            run()
    (message,) = [record.getMessage() for record in caplog.records if "through the pool" in record.getMessage()]
    assert reason in message
    for name in ("bytes_read", "bytes_written"):
        assert direct[name] in (0, 64 << 10)  # What was tried.
    direct["open_error"] = 0
    return message
