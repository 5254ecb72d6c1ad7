"""cuFile, by a library of ours that has its calls over memory of the host: see mock_cufile.cpp and host_device.py."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import host_device
import pytest
import torch
from conformance import AVAILABLE, Conformance, Subject
from host_device import HostCopies
from isolation import forks_at_work
from launcher import run_program
from mock_cufile import COMPILER, Mock, settled

from swapper.errors import SwapError, SwapIOError
from swapper.io import devices, gds
from swapper.io.gds import GDSHandle, probe_cufile
from swapper.io.handle import AsyncIOHandle, Checksums, FaultPlan, Transfer

BLOCK = 16 << 10
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 13, 40 * BLOCK + 5)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library"),
]


def make_handle(**options: object) -> GDSHandle:
    return GDSHandle(**{"block_bytes": BLOCK, "queue_depth": 4, **options})  # type: ignore[arg-type]


@pytest.fixture
def handle(mock: Mock) -> Iterator[GDSHandle]:
    with make_handle() as handle:
        assert handle.gds_available and handle.gds_reason == ""
        yield handle


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def test_an_idle_handle_keeps_no_file(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    """Else the space of one that was deleted would not be free."""
    with handle.open(tmp_path / "file", "rw") as file:
        assert handle.write(file, random_bytes(3 * BLOCK), 0).wait() == 3 * BLOCK
    settled(mock)


def test_cufile_knows_only_some_files_at_once(
    mock: Mock, handle: GDSHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the descriptors of those, and they must not grow with the number of files. What is in flight goes on."""
    most, count = 8, 60
    monkeypatch.setattr(gds, "_most_registered", lambda: most)
    rng = random.Random(0)
    contents = [random_bytes(BLOCK, seed) for seed in range(count)]
    files = [handle.open(tmp_path / str(number), "rw", by_name=True) for number in range(count)]
    wait_all([handle.write(file, content) for file, content in zip(files, contents, strict=True)])
    assert mock["writes"] == mock["registered"] == count
    settled(mock, most)
    read = 0
    for _ in range(4):
        order = rng.choices(range(count), k=count)
        targets = {number: torch.zeros(BLOCK, dtype=torch.uint8) for number in order}
        wait_all([handle.read(files[number], target) for number, target in targets.items()])
        assert all(torch.equal(target, contents[number]) for number, target in targets.items())
        read += len(targets)
        assert mock["reads"] == read
        settled(mock, most)
    assert mock["open_handles"] == mock.left_open + most
    registered = mock["registered"]
    for number in order[-1:] * 3:
        handle.read(files[number], targets[number]).wait()
    assert mock["registered"] - registered <= 1, "one that is used again stays"
    for file in files:
        file.close()
    settled(mock)


def test_a_file_that_is_used_again_while_a_transfer_holds_its_registration_takes_it_back(
    mock: Mock, handle: GDSHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was forgotten meanwhile, and cuFile refuses to register a descriptor that it knows."""
    most = 8
    monkeypatch.setattr(gds, "_most_registered", lambda: most)
    content = random_bytes(BLOCK)
    targets = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(most + 3)]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(handle.open(tmp_path / str(number), "rw")) for number in range(most + 1)]
        wait_all([handle.write(file, content) for file in files])
        settled(mock, most)
        mock["hold"] = 1
        try:
            transfers = [handle.read(files[0], targets[0])]
            while mock["at_once"] == 0:
                time.sleep(0.001)
            assert files[0].registration is not None
            transfers += [handle.read(file, target) for file, target in zip(files[1:], targets[1:], strict=False)]
            assert files[0].registration is None and files[1].registration is not None
            before = mock["registered"]
            transfers += [handle.read(files[number], targets[most + 1 + number]) for number in (0, 1)]
            assert mock["registered"] == before and mock["open_handles"] == most + 1
        finally:
            mock["hold"] = 0
        wait_all(transfers)
        assert mock["reads"] == len(targets) and all(torch.equal(target, content) for target in targets)
        assert not caplog.records
        settled(mock, most)


def test_a_file_that_is_registered_already_is_tried_again(
    mock: Mock, handle: GDSHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That passes, unlike what else cuFile says of a file."""
    content = random_bytes(BLOCK)
    with handle.open(tmp_path / "file", "rw") as file:
        mock["register_error"] = 5028
        handle.write(file, content).wait()
        assert mock["writes"] == 0 and "cuFile error 5028" in caplog.text
        mock["register_error"] = 0
        target = torch.zeros_like(content)
        handle.read(file, target).wait()
        assert mock["reads"] == 1 and torch.equal(target, content)


# --- Data arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True], ids=["", "pinned"])
@pytest.mark.parametrize("size", SIZES)
def test_written_bytes_are_read_back(mock: Mock, handle: GDSHandle, tmp_path: Path, size: int, pinned: bool) -> None:
    path = tmp_path / "file"
    for offset, misalignment in ((0, 0), (4096, 64), (1, 1), (5000, 0), (5000, 904), ((5 << 30) + 77, 3)):
        memory = torch.zeros(2 * size + 2048, dtype=torch.uint8)
        source = memory[misalignment : misalignment + size].copy_(random_bytes(size, offset % 1000))
        target = memory[size + 1024 : 2 * size + 1024]
        if pinned:
            assert handle.pin(memory)
        whole_pages = max(0, (offset + size) // 4096 - -(-offset // 4096)) * 4096
        HostCopies.copied_bytes = 0
        with handle.open(path, "rw", truncate=True) as file:
            assert handle.write(file, source, offset).wait() == size
            assert file.size_bytes() == (offset + size if size else 0)
            assert handle.read(file, target, offset).wait() == size
        assert torch.equal(source, target)
        assert memory[size + 1024 + size :].count_nonzero() == 0
        with path.open("rb") as plain:
            plain.seek(offset)
            assert plain.read() == source.numpy().tobytes()
        assert HostCopies.copied_bytes == 2 * (size - whole_pages)  # See [Note: edges] in gds.py.
        assert (mock["reads"] > 0) == (mock["writes"] > 0) == (whole_pages > 0)
        assert (mock["in_registered_memory"] > 0) == (pinned and whole_pages > 0)
        mock["reads"] = mock["writes"] = mock["in_registered_memory"] = 0
        if pinned:
            assert handle.unpin(memory)
    assert mock["unaligned"] == 0


def test_neighbours_written_together_do_not_disturb_each_other(handle: GDSHandle, tmp_path: Path) -> None:
    rng = random.Random(0)
    for round_number in range(6):
        cuts = sorted({0, *(rng.randrange(30 * BLOCK) for _ in range(20)), 30 * BLOCK})
        data = random_bytes(30 * BLOCK, round_number)
        pieces = list(itertools.pairwise(cuts))
        rng.shuffle(pieces)
        with handle.open(tmp_path / "file", "rw") as file:
            wait_all([handle.write(file, data[start:stop], start) for start, stop in pieces])
            back = torch.zeros_like(data)
            wait_all([handle.read(file, back[start:stop], start) for start, stop in pieces])
        assert torch.equal(back, data)
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_several_threads_call_cufile(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        mock["hold"] = 1
        try:
            transfer = handle.write(file, random_bytes(16 * BLOCK))
            deadline = time.monotonic() + 240
            while mock["at_once_max"] < 4 and time.monotonic() < deadline:
                time.sleep(0.001)
        finally:
            mock["hold"] = 0
        transfer.wait()
    assert mock["at_once_max"] == 4


@pytest.mark.parametrize(
    "options",
    [{"threads": 3}, {"single_submit": True}, {"overlap_events": False}, {"queue_depth": 1}, {"block_bytes": 4096}],
    ids=str,
)
def test_every_option_moves_the_same_bytes(mock: Mock, tmp_path: Path, options: dict[str, int]) -> None:
    source = random_bytes((1 << 20) + 77)
    target = torch.zeros_like(source)
    with make_handle(**options) as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source, 5).wait()
        handle.read(file, target, 5).wait()
    assert torch.equal(source, target)
    assert mock["reads"] > 0


def test_many_threads_share_one_handle(mock: Mock, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with make_handle(threads=2) as handle:

        def work(worker: int) -> None:
            try:
                with handle.open(tmp_path / str(worker), "rw") as file:
                    for turn in range(8):
                        source = random_bytes(100_000 + 7777 * turn, worker * 100 + turn)
                        target = torch.zeros_like(source)
                        assert handle.pin(target)
                        handle.write(file, source, turn * 13).wait()
                        handle.read(file, target, turn * 13).wait()
                        assert torch.equal(source, target)
                        assert handle.unpin(target)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.in_flight == 0
    assert not failures


def test_order_on_the_device(handle: GDSHandle, tmp_path: Path) -> None:
    source = torch.zeros(6 * BLOCK + 5, dtype=torch.uint8)
    used = torch.zeros_like(source)
    HostCopies.current.push(lambda: time.sleep(0.05))
    HostCopies.current.push(lambda: source.fill_(7))
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source, 3).wait()
        assert (tmp_path / "file").read_bytes()[3:] == b"\7" * source.numel()
        source.fill_(1)
        HostCopies.current.push(lambda: time.sleep(0.05))
        HostCopies.current.push(lambda: used.copy_(source))
        handle.read(file, source, 3).wait()
    assert used.eq(1).all() and source.eq(7).all()


def test_transfers_with_checksums_go_through_the_host(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    source = random_bytes(3 * BLOCK)
    sums = Checksums(source.numel(), BLOCK)
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source, checksums=sums).wait()
        handle.read(file, torch.zeros_like(source), checksums=sums).wait()
    assert (mock["reads"], mock["writes"]) == (0, 0)


# --- Failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 1000, 4096, 5000, BLOCK - 1])
def test_short_transfers_are_completed(mock: Mock, handle: GDSHandle, tmp_path: Path, most: int) -> None:
    mock["short"] = most
    source = random_bytes(4096 + (3 * BLOCK if most > 1 else 0))
    target = torch.zeros_like(source)
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source).wait()
        handle.read(file, target).wait()
    assert torch.equal(source, target)
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(
    ("result", "number", "expected", "text"),
    [
        (-1, errno.EIO, errno.EIO, ""),
        (-1, errno.ENOSPC, errno.ENOSPC, ""),
        (-1, 0, errno.EIO, ""),
        (-errno.EDQUOT, 0, errno.EDQUOT, ""),
        (-5030, 0, errno.EIO, "cuFile error 5030: internal error"),
        (-5011, 0, errno.EIO, "cuFile error 5011: the CUDA driver"),
        (-5999, 0, errno.EIO, "cuFile error 5999"),
    ],
)
def test_failures_of_cufile(
    mock: Mock, tmp_path: Path, operation: str, result: int, number: int, expected: int, text: str
) -> None:
    memory = random_bytes(10 * BLOCK)
    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, memory).wait()
        mock["result"], mock["errno"], mock["fail_at"] = result if result != -1 else 0, number, 4
        if result == -1 and number == 0:
            mock["result"] = -1
        with pytest.raises(SwapIOError) as raised:
            (handle.read if operation == "read" else handle.write)(file, memory).wait()
        error = raised.value
        assert (error.errno, error.operation, error.path) == (expected, operation, str(tmp_path / "file"))
        assert (error.offset_bytes, error.length_bytes) == (0, 10 * BLOCK)
        assert text in error.detail
        mock["result"] = mock["errno"] = 0
        assert handle.read(file, memory).wait() == 10 * BLOCK
        assert handle.unobserved_failures == 0


def test_interrupted_calls_are_repeated(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    mock["errno"], mock["fail_at"] = errno.EINTR, 2
    source, target = random_bytes(BLOCK), torch.zeros(BLOCK, dtype=torch.uint8)
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source).wait()
        handle.read(file, target).wait()
    assert torch.equal(source, target)
    assert (mock["writes"], mock["reads"]) == (1, 2)


@pytest.mark.parametrize("code", [5008, 5009, 5013, 5015, 5036])
def test_what_cufile_cannot_move_goes_through_the_host(
    mock: Mock, handle: GDSHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    mock["result"] = -code
    source, target = random_bytes(10 * BLOCK + 7), torch.zeros(10 * BLOCK + 7, dtype=torch.uint8)
    with handle.open(tmp_path / "file", "rw") as file:
        for _ in range(2):
            handle.write(file, source, 100).wait()
            handle.read(file, target, 100).wait()
        assert torch.equal(source, target)
        assert mock["reads"] > 0 and mock["writes"] > 0
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and f"cuFile error {code}" in record.getMessage()
        # A part that fails while another is refused is a failure all the same.
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(SwapIOError) as raised:
            handle.read(file, target, 100).wait()
        assert raised.value.errno == errno.ENODATA


def test_failed_transfer_has_nothing_in_flight(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (20 * BLOCK + 10))
    memory = torch.full((20 * BLOCK + 10,), 2, dtype=torch.uint8)
    mock["delay_us"], mock["errno"], mock["fail_at"] = 20_000, errno.EIO, 3
    with handle.open(path, "rw") as file:
        with pytest.raises(SwapIOError):
            handle.read(file, memory).wait()
        memory.fill_(3)
        time.sleep(0.1)
        assert memory.eq(3).all()


@pytest.mark.parametrize("seed", range(4))
def test_faults_of_the_plan_reach_cufile_transfers(mock: Mock, tmp_path: Path, seed: int) -> None:
    plan = FaultPlan(seed=seed, eio=0.02, short=0.3, eintr=0.1, eagain=0.1, delay_us=200, reorder=True)
    outcomes = set()
    with make_handle(faults=plan) as handle:
        with handle.open(tmp_path / "file", "rw") as file:
            for turn in range(20):
                source, target = random_bytes(20 * BLOCK, turn), torch.zeros(20 * BLOCK, dtype=torch.uint8)
                try:
                    handle.write(file, source, 9).wait()
                    handle.read(file, target, 9).wait()
                except SwapIOError as error:
                    outcomes.add(error.errno)
                else:
                    outcomes.add(0)
                    assert torch.equal(source, target)
        assert (handle.in_flight, handle.unobserved_failures) == (0, 0)
    # How many requests there are depends on the order of completions, so that some seed may let no turn through.
    assert errno.EIO in outcomes and outcomes <= {0, errno.EIO}


@pytest.mark.parametrize(("size", "offset"), [(4096, 8192), (8192, 4096), (4096, 4096), (40 * BLOCK, 0)])
def test_read_past_the_end_fails(handle: GDSHandle, tmp_path: Path, size: int, offset: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with handle.open(tmp_path / "file") as file:
        with pytest.raises(SwapIOError) as raised:
            handle.read(file, torch.zeros(size, dtype=torch.uint8), offset).wait()
        assert (raised.value.errno, raised.value.offset_bytes) == (errno.ENODATA, offset)
        target = torch.zeros(5000, dtype=torch.uint8)
        assert handle.read(file, target).wait() == 5000
        assert target.eq(ord("x")).all()


def test_memory_that_two_handles_pin_is_mapped_once(mock: Mock, tmp_path: Path) -> None:
    memory = random_bytes(4 * BLOCK)
    with make_handle() as other:
        with make_handle() as handle:
            assert handle.pin(memory) and other.pin(memory) and mock["open_buffers"] == 1
        assert mock["open_buffers"] == 1
        with other.open(tmp_path / "file", "rw") as file:
            other.write(file, memory).wait()
        assert mock["in_registered_memory"] == 4
        assert other.unpin(memory)
        settled(mock)
        assert mock["open_buffers"] == 0
        assert other.pin(memory) and mock["open_buffers"] == 1


# --- Whether it works at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["", "register_error", "write", "read"])
def test_a_trial_says_why_a_drive_and_a_device_cannot_do_without_the_host(
    mock: Mock, handle: GDSHandle, tmp_path: Path, fails: str
) -> None:
    if fails == "register_error":
        mock["register_error"] = 5008
    elif fails:
        mock["result"], mock["fail_at"] = -5008, 1 if fails == "write" else 5
    why = handle.why_not_direct(tmp_path, torch.device("cpu"))
    assert ("not supported on this file" in why) if fails else (why == "")
    assert not list(tmp_path.glob("gds-*"))
    assert HostCopies.copied_bytes == 0
    mock["result"] = mock["register_error"] = 0
    assert handle.why_not_direct(tmp_path, torch.device("cpu")) == ""


def test_a_trial_that_the_drive_fails_is_no_answer(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    mock["errno"], mock["fail_at"] = errno.EIO, 2
    with pytest.raises(SwapIOError):
        handle.why_not_direct(tmp_path, torch.device("cpu"))
    assert not list(tmp_path.glob("gds-*"))


def test_a_trial_without_cufile_says_why_there_is_none(mock: Mock, tmp_path: Path) -> None:
    mock["open_error"] = 5001
    with make_handle() as handle:
        assert handle.why_not_direct(tmp_path, torch.device("cpu")) == handle.gds_reason != ""


# --- Where there is no GPUDirect Storage ----------------------------------------------------------------------------


def round_trip(handle: GDSHandle, path: Path, **options: bool) -> None:
    source, target = random_bytes(10 * BLOCK + 7), torch.zeros(10 * BLOCK + 7, dtype=torch.uint8)
    with handle.open(path, "rw", **options) as file:
        handle.write(file, source, 3).wait()
        handle.read(file, target, 3).wait()
    assert torch.equal(source, target)


@pytest.mark.parametrize("case", ["library", "not cuFile", "driver", "cuda driver", "forced", "nvidia-fs"])
def test_falls_back_with_one_line_in_the_log(
    mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    if case == "library":
        monkeypatch.setenv(gds.LIBRARY_VARIABLE, str(tmp_path / "nothing.so"))
    elif case == "not cuFile":
        monkeypatch.setenv(gds.LIBRARY_VARIABLE, "libm.so.6")
    elif case.endswith("driver"):
        mock["open_error"] = 5011 if case == "cuda driver" else 5001
    elif case == "forced":
        mock["force_compat"] = 1
    else:
        mock["p2pdma"] = 0
    expected = {
        "library": "nothing.so",
        "not cuFile": "libm.so.6 has no cuFileDriverOpen",
        "driver": "cuFileDriverOpen: cuFile error 5001",
        "cuda driver": "CUDA error 999",
        "forced": "compatibility mode, because its configuration",
        "nvidia-fs": "compatibility mode, because the kernel module nvidia-fs is not loaded",
    }[case]
    for _ in range(2):
        with make_handle() as handle:
            assert not handle.gds_available
            assert expected in handle.gds_reason
            round_trip(handle, tmp_path / "file")
            assert handle.pin(random_bytes(4096)) is False
            assert handle.unpin(random_bytes(4096)) is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and expected in record.getMessage()
    found = probe_cufile()
    assert not found.available and expected in found.reason
    assert found.driver_open == (case in ("forced", "nvidia-fs"))
    assert (mock["reads"], mock["writes"], mock["registered"]) == (0, 0, 0)


def test_a_driver_that_others_have_opened_will_do(mock: Mock, tmp_path: Path) -> None:
    mock["open_error"] = 5026
    with make_handle() as handle:
        assert handle.gds_available
        round_trip(handle, tmp_path / "file")
    assert mock["writes"] > 0


def test_compatibility_mode_on_demand_is_said(
    mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(gds.COMPATIBILITY_VARIABLE, "1")
    mock["p2pdma"] = 0
    with make_handle() as handle:
        assert handle.gds_available
        round_trip(handle, tmp_path / "file")
    assert "compatibility mode, because the kernel module" in caplog.text
    assert mock["writes"] > 0
    found = probe_cufile()
    assert found.available and found.compatibility_mode is True and "nvidia-fs" in found.compatibility_reason


def test_probe_tells_what_there_is(mock: Mock, mock_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_cufile()
    assert (found.available, found.reason, found.library, found.version) == (True, "", mock_path, "1.15")
    assert (found.driver_open, found.nvidia_fs, found.compatibility_mode) == (True, "", None)
    (tmp_path / "nvidia-fs").mkdir()
    (tmp_path / "nvidia-fs" / "version").write_text("version: 2.25\n")
    monkeypatch.setattr(gds, "_NVIDIA_FS", tmp_path / "nvidia-fs")
    mock["p2pdma"] = 0
    found = probe_cufile()
    assert (found.available, found.nvidia_fs, found.compatibility_mode) == (True, "2.25", False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_device_the_library_is_not_even_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gds.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(gds._native, "load_cufile", None)
    assert probe_cufile().reason == "there is no CUDA device"


def test_library_of_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("cufile", "cu12", "cu13"):
        (tmp_path / "nvidia" / place / "lib").mkdir(parents=True)
        (tmp_path / "nvidia" / place / "lib" / "libcufile.so.0").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    places = [Path(name).parent.parent.name for name in gds._library_names()[:-2] if str(tmp_path) in name]
    assert places == ["cu13", "cu12", "cufile"]
    assert gds._library_names()[-2:] == ["libcufile.so.0", "libcufile.so"]


def test_refused_file_goes_through_the_host(mock: Mock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mock["register_error"] = 5008
    with make_handle() as handle:
        for _ in range(2):
            round_trip(handle, tmp_path / "file")
        assert handle.gds_available
    assert (mock["reads"], mock["writes"]) == (0, 0)
    (record,) = caplog.records
    assert "cuFile error 5008: GPUDirect Storage is not supported on this file" in record.getMessage()


def test_file_without_direct_io_goes_through_the_host(
    mock: Mock, handle: GDSHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    round_trip(handle, tmp_path / "file", direct=False)
    assert (mock["registered"], mock["writes"]) == (0, 0)
    assert "O_DIRECT" in caplog.text


def test_host_memory_goes_the_ordinary_way(mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(devices.DEVICES, "cpu")
    with make_handle() as handle:
        round_trip(handle, tmp_path / "file")
        with pytest.raises(ValueError, match="CUDA"):
            handle.pin(random_bytes(10))
    assert (mock["reads"], mock["writes"], HostCopies.copies) == (0, 0, 0)


# --- Registration and life times ------------------------------------------------------------------------------------


def test_a_file_is_registered_once_and_until_it_is_closed(mock: Mock, handle: GDSHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        assert mock["registered"] == 0
        for _ in range(3):
            handle.write(file, random_bytes(BLOCK)).wait()
        assert (mock["registered"], mock["open_handles"]) == (1, 1)
    settled(mock)
    del file
    file = handle.open(tmp_path / "file", "rw")
    mock["delay_us"] = 50_000
    transfer = handle.write(file, random_bytes(4 * BLOCK))
    file.close()
    transfer.wait()
    del transfer
    settled(mock)
    assert (mock["registered"], mock["deregistered"]) == (2, 2)


def test_pinned_memory_is_registered_until_it_is_unpinned(
    mock: Mock, handle: GDSHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = random_bytes(8 * BLOCK)
    with handle.open(tmp_path / "file", "rw") as file:
        assert handle.pin(memory) and handle.pin(memory)
        assert mock["open_buffers"] == 1
        handle.write(file, memory[4096:]).wait()
        assert mock["in_registered_memory"] == 8
        handle.write(file, torch.cat([memory, memory])).wait()
        assert mock["in_registered_memory"] == 8
        assert not handle.unpin(memory[:10])
        mock["delay_us"] = 20_000
        handle.write(file, memory)
        assert handle.unpin(memory)  # The mock aborts where it is in use.
        mock["delay_us"] = 0
        assert mock["open_buffers"] == 0 and not handle.unpin(memory)
        mock["buffer_error"] = 5036
        assert not handle.pin(memory) and not handle.pin(memory)
        assert len(caplog.records) == 1 and "5036" in caplog.text
        mock["buffer_error"] = 0
        assert not handle.pin(torch.zeros(0))
        with pytest.raises(ValueError, match="contiguous"):
            handle.pin(torch.zeros(4, 4).t())
        assert handle.pin(memory)
        address = memory.data_ptr()
        memory.data = torch.zeros(1, dtype=torch.uint8)
        (pin,) = handle._pins.values()
        assert pin.storage.data_ptr() == address and pin.storage.nbytes() == 8 * BLOCK
        del pin
    handle.close()
    assert mock["open_buffers"] == 0
    with pytest.raises(SwapError, match="closed"):
        handle.pin(memory)


def test_close_completes_what_is_in_flight(mock: Mock, tmp_path: Path) -> None:
    mock["delay_us"] = 5000
    source = random_bytes(3 * BLOCK + 100)
    handle = make_handle()
    with handle.open(tmp_path / "file", "rw") as file:
        transfers = [handle.write(file, source, i * source.numel()) for i in range(10)]
    assert handle.pin(source)
    handle.close()
    handle.close()
    assert all(transfer.done() for transfer in transfers)
    wait_all(transfers)
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes() * 10
    assert mock["open_buffers"] == 0


def test_collected_handle_completes_what_is_in_flight(mock: Mock, tmp_path: Path) -> None:
    mock["delay_us"] = 10_000
    source = random_bytes(8 * BLOCK)
    handle = make_handle()
    assert handle.pin(source)
    transfer = handle.write(handle.open(tmp_path / "file", "w"), source)
    del handle
    gc.collect()
    assert transfer.done() and transfer.wait() == 8 * BLOCK


def test_failure_that_nobody_saw_is_raised_by_close(mock: Mock, tmp_path: Path) -> None:
    mock["errno"] = errno.EIO
    handle = make_handle()
    handle.pin(source := random_bytes(BLOCK))
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source)
    with pytest.raises(SwapIOError, match="nobody had waited"):
        handle.close()
    assert mock["open_buffers"] == 0
    handle.close()


def test_interpreter_exit_completes_what_is_in_flight(mock: Mock, mock_path: str, tmp_path: Path) -> None:
    program = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(host_device.__file__).parent)!r})
import torch
from conformance import AVAILABLE, Conformance, Subject
from host_device import HostCopies
from swapper.io import devices
from swapper.io.gds import GDSHandle
devices.DEVICES["cpu"] = HostCopies
mock = ctypes.CDLL({mock_path!r})
mock.mock_reset()
mock.mock_set(b"delay_us", 20000)
handle = GDSHandle(block_bytes=65536)
assert handle.gds_available
memory = torch.ones({(4 << 20) + 5}, dtype=torch.uint8)
handle.pin(memory)
handle.write(handle.open({str(tmp_path / "file")!r}, "w"), memory)
"""
    run_program([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)
    assert (tmp_path / "file").read_bytes() == b"\1" * ((4 << 20) + 5)


@forks_at_work
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_calls_nothing_of_cufile(mock: Mock, tmp_path: Path) -> None:
    source, target = random_bytes(8 * BLOCK), torch.zeros(8 * BLOCK, dtype=torch.uint8)
    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        assert handle.pin(source)
        handle.write(file, source).wait()
        mock["delay_us"] = 20_000
        transfer = handle.write(file, source)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                refused = 0
                uses = (transfer.wait, lambda: handle.write(file, source), lambda: handle.pin(target))
                for use in uses:
                    try:
                        use()
                    except SwapError:
                        refused += 1
                handle.close()
                file.close()
                del transfer, handle, file
                gc.collect()
                other = make_handle()
                fine = not other.gds_available and "forked" in other.gds_reason
                status = 0 if refused == 3 and fine else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transfer.wait() == 8 * BLOCK
        handle.read(file, target).wait()
        assert torch.equal(source, target)
        assert mock["open_buffers"] == 1 and mock["open_handles"] == 1
        del transfer


@dataclass(frozen=True)
class CuFile(Subject):
    """Device tensors by cuFile."""

    def handle(self, **options: object) -> AsyncIOHandle:
        return make_handle(**options)


class TestConformance(Conformance):
    """A handle for GPUs does for their tensors what the others do for the host's."""

    @pytest.fixture
    def subject(self, mock: Mock) -> Subject:
        return CuFile(AVAILABLE[0], True)  # What it has for the rest of a transfer.
