"""Device tensors through bounce memory, on a device made of host memory: see host_device.py."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import host_device
import pytest
import torch
from conformance import Conformance, Subject
from host_device import HostCopies
from interrupts import interrupted_at
from launcher import run_program
from still_drive import still

from swapper.errors import SwapError, SwapIOError
from swapper.io import bounce, devices
from swapper.io.handle import AsyncIOHandle, Checksums, FaultPlan, Slab, Transfer, probe

BLOCK = 64 << 10
CHUNK = BLOCK  # As patched below: the ring holds four.
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 13, 11 * CHUNK + 5)
BACKENDS = [next(found.backend for found in probe() if found.available), "buffered"]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def _host_is_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(devices.DEVICES, "cpu", HostCopies)
    monkeypatch.setattr(bounce, "CHUNK_BYTES_MIN", CHUNK)
    HostCopies.reset()
    yield
    assert not HostCopies.locked, "memory is still page-locked"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_handle(backend: str = "auto", **options: object) -> AsyncIOHandle:
    return AsyncIOHandle(**{"backend": backend, "block_bytes": BLOCK // 4, "queue_depth": 8, **options})  # type: ignore[arg-type]


@pytest.fixture
def handle(backend: str) -> Iterator[AsyncIOHandle]:
    with make_handle(backend) as handle:
        yield handle


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def helper_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swapper-bounce"]


# --- Data arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_written_bytes_are_read_back(handle: AsyncIOHandle, tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    HostCopies.delay_s = 0.0005
    for offset, misalignment in ((0, 0), (4096, 64), (1, 1), (5000, 0), (CHUNK - 3, 5), ((5 << 30) + 77, 1)):
        source = torch.zeros(size + 64, dtype=torch.uint8)[misalignment : misalignment + size]
        source.copy_(random_bytes(size, offset % 1000))
        target = torch.zeros(size + 128, dtype=torch.uint8)
        part = target[misalignment : misalignment + size]
        with handle.open(path, "rw", truncate=True) as file:
            assert handle.write(file, source, offset).wait() == size
            assert file.size_bytes() == (offset + size if size else 0)
            assert handle.read(file, part, offset).wait() == size
        assert torch.equal(source, part)
        assert int(target.sum()) == int(part.sum())  # Nothing beside it was touched.
        with path.open("rb") as plain:
            plain.seek(offset)
            assert plain.read() == source.numpy().tobytes()
            plain.seek(0)
            assert plain.read(min(offset, 8192)).count(0) == (min(offset, 8192) if size else 0)
    assert HostCopies.copied_bytes == 2 * 6 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_and_shape(handle: AsyncIOHandle, tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.randn(3, 33, 65).mul(3).to(dtype)[1]
    target = torch.zeros_like(source).requires_grad_(dtype.is_floating_point)
    with handle.open(tmp_path / "file", "rw") as file:
        assert handle.write(file, source).wait() == source.nbytes
        handle.read(file, target).wait()
        handle.write(file, torch.tensor(7), 100_000).wait()
    assert torch.equal(source, target)


def test_tensors_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode(), make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        source, target = random_bytes(3 * CHUNK), torch.zeros(3 * CHUNK, dtype=torch.uint8)
        handle.write(file, source).wait()
        handle.read(file, target).wait()
        assert torch.equal(source, target)


def test_neighbours_written_together_do_not_disturb_each_other(handle: AsyncIOHandle, tmp_path: Path) -> None:
    rng = random.Random(0)
    for round_number in range(6):
        cuts = sorted({0, *(rng.randrange(12 * CHUNK) for _ in range(20)), 12 * CHUNK})
        data = random_bytes(12 * CHUNK, round_number)
        pieces = list(itertools.pairwise(cuts))
        rng.shuffle(pieces)
        with handle.open(tmp_path / "file", "rw") as file:
            wait_all([handle.write(file, data[start:stop], start) for start, stop in pieces])
            back = torch.zeros_like(data)
            wait_all([handle.read(file, back[start:stop], start) for start, stop in pieces])
        assert torch.equal(back, data)
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_memory_of_the_host_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = []

    def allocate(length: int) -> Slab:
        allocated.append(length)
        return Slab(length)

    monkeypatch.setattr("swapper.io.handle.Slab", allocate)
    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        assert not allocated
        data = random_bytes(100 * CHUNK + 1)
        for _ in range(3):
            handle.write(file, data).wait()
        handle.read(file, torch.zeros_like(data)).wait()
        assert allocated == [4 * CHUNK]
        assert list(HostCopies.locked.values()) == [4 * CHUNK]


@pytest.mark.parametrize(
    ("block", "chunk"), [(4096, 4 << 20), (1 << 20, 4 << 20), (8 << 20, 8 << 20), (1 << 30, 64 << 20)]
)
def test_length_of_a_chunk(monkeypatch: pytest.MonkeyPatch, block: int, chunk: int) -> None:
    monkeypatch.setattr(bounce, "CHUNK_BYTES_MIN", 4 << 20)
    assert bounce.Bounce(torch.empty, block).chunk_bytes == chunk


def test_many_threads_share_one_handle(backend: str, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    HostCopies.delay_s = 0.0002
    with make_handle(backend, threads=2) as handle:

        def work(worker: int) -> None:
            try:
                with handle.open(tmp_path / str(worker), "rw") as file:
                    for turn in range(8):
                        source = random_bytes(100_000 + 7777 * turn, worker * 100 + turn)
                        target = torch.zeros_like(source)
                        handle.write(file, source, turn * 13).wait()
                        handle.read(file, target, turn * 13).wait()
                        assert torch.equal(source, target)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.in_flight == 0
    assert not failures


def test_many_small_transfers_in_flight(handle: AsyncIOHandle, tmp_path: Path) -> None:
    data = random_bytes(300 * 1000)
    target = torch.zeros_like(data)
    with handle.open(tmp_path / "file", "rw") as file:
        wait_all([handle.write(file, data[i : i + 1000], i) for i in range(0, data.numel(), 1000)])
        reads = [handle.read(file, target[i : i + 1000], i) for i in range(0, data.numel(), 1000)]
        assert len(helper_threads()) <= 1
        wait_all(reads)
    assert torch.equal(data, target)


def test_checksums_hold_for_device_memory(tmp_path: Path) -> None:
    length = 5 * CHUNK + 77
    source, target = random_bytes(length), torch.zeros(length, dtype=torch.uint8)
    sums = Checksums(length, 8192)
    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source, checksums=sums).wait()
        handle.read(file, target, checksums=sums).wait()
        assert torch.equal(source, target)
        with (tmp_path / "file").open("r+b") as plain:
            plain.seek(3 * CHUNK + 9000)
            byte = plain.read(1)[0]
            plain.seek(-1, os.SEEK_CUR)
            plain.write(bytes([byte ^ 1]))
        with pytest.raises(SwapIOError) as raised:
            handle.read(file, target, checksums=sums).wait()
        assert (raised.value.errno, raised.value.offset_bytes) == (errno.EBADMSG, 3 * CHUNK + 8192)
        for offset, bad in ((4096, sums), (8192, sums), (0, Checksums(length, 12288)), (0, Checksums(10, 8192))):
            with pytest.raises(ValueError, match="checksums"):
                handle.write(file, source, offset, checksums=bad)


# --- Order on the device --------------------------------------------------------------------------------------------


def test_a_write_sees_what_the_current_stream_has_yet_to_compute(handle: AsyncIOHandle, tmp_path: Path) -> None:
    source = torch.zeros(6 * CHUNK, dtype=torch.uint8)
    computed = threading.Event()
    HostCopies.current.push(computed.wait)
    HostCopies.current.push(lambda: source.fill_(7))
    with handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, source)
        try:
            time.sleep(0.3)  # One that does not wait for the stream is over then.
            assert not transfer.done()
        finally:
            computed.set()
        transfer.wait()
    assert (tmp_path / "file").read_bytes() == b"\7" * (6 * CHUNK)


@pytest.mark.long
def test_a_read_leaves_what_the_current_stream_has_yet_to_use(handle: AsyncIOHandle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\7" * (6 * CHUNK))
    target = torch.ones(6 * CHUNK, dtype=torch.uint8)
    used = torch.zeros_like(target)
    HostCopies.current.push(lambda: time.sleep(1))
    HostCopies.current.push(lambda: used.copy_(target))
    with handle.open(tmp_path / "file") as file:
        handle.read(file, target).wait()
    assert used.eq(1).all() and target.eq(7).all()


def test_a_read_is_over_when_the_bytes_are_on_the_device(handle: AsyncIOHandle, tmp_path: Path) -> None:
    HostCopies.delay_s = 0.02
    data = random_bytes(9 * CHUNK)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    with handle.open(tmp_path / "file") as file:
        for length in (10, 9 * CHUNK):
            target = torch.zeros(length, dtype=torch.uint8)
            transfer = handle.read(file, target)
            while not transfer.done():
                time.sleep(0.001)
            assert torch.equal(target, data[:length])


@pytest.mark.long
def test_what_is_at_the_drive_is_not_waited_for_before_the_next_copy(tmp_path: Path) -> None:
    """Chunks of several transfers are under way at the same time, in both directions."""
    plan = FaultPlan()
    data = random_bytes(4 * CHUNK)
    with make_handle(faults=plan) as handle, handle.open(tmp_path / "file", "rw") as file, still(plan):
        transfers = [handle.write(file, data[i * CHUNK : (i + 1) * CHUNK], i * CHUNK) for i in range(4)]
        deadline = time.monotonic() + 240
        while HostCopies.copies < 4 and time.monotonic() < deadline:
            assert not transfers[0].done()
            time.sleep(0.0005)
        assert HostCopies.copies == 4
        plan.bytes_per_second = 0
        wait_all(transfers)


# --- Mistakes and failures ------------------------------------------------------------------------------------------


def test_tensors_that_cannot_be_moved_are_refused(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        with pytest.raises(ValueError, match="contiguous"):
            handle.write(file, torch.zeros(4, 4).t())
        with pytest.raises(ValueError, match="dense"):
            handle.write(file, torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match="CUDA"):
            handle.write(file, torch.zeros(4, device="meta"))
        shrunk = torch.zeros(2000)[1:]
        shrunk.untyped_storage().resize_(1000)
        with pytest.raises(ValueError, match="memory"):
            handle.write(file, shrunk)
        with pytest.raises(ValueError, match="offset_bytes"):
            handle.write(file, torch.zeros(4), -1)
    with pytest.raises(ValueError, match="closed"):
        handle.write(file, torch.zeros(4))
    assert handle.in_flight == 0 and not helper_threads()


@pytest.mark.parametrize(("size", "offset"), [(4096, 8192), (8192, 4096), (1, 5000), (9 * CHUNK, 0)])
def test_read_past_the_end_fails(handle: AsyncIOHandle, tmp_path: Path, size: int, offset: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with handle.open(tmp_path / "file") as file:
        transfer = handle.read(file, torch.zeros(size, dtype=torch.uint8), offset)
        for _ in range(2):
            with pytest.raises(SwapIOError) as raised:
                transfer.wait()
            error = raised.value
            assert (error.errno, error.operation, error.path) == (errno.ENODATA, "read", str(tmp_path / "file"))
            assert (error.offset_bytes, error.length_bytes) == (offset, size)
        assert transfer.done() and "failed" in repr(transfer)
        assert handle.read(file, torch.zeros(5000, dtype=torch.uint8)).wait() == 5000
    assert handle.unobserved_failures == 0


@pytest.mark.parametrize("seed", range(4))
def test_harmless_faults_leave_the_right_bytes(backend: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    plan = FaultPlan(seed=seed, short=0.4, eintr=0.1, eagain=0.1, delay_us=300, reorder=True)
    HostCopies.delay_s = 0.0003
    with (
        make_handle(backend, faults=plan, threads=1 + seed % 2) as handle,
        handle.open(tmp_path / "file", "rw") as file,
    ):
        for turn in range(3):
            size, offset = rng.randrange(1, 8 * CHUNK), rng.randrange(10_000)
            source, target = random_bytes(size, turn), torch.zeros(size, dtype=torch.uint8)
            assert handle.write(file, source, offset).wait() == size
            assert handle.read(file, target, offset).wait() == size
            assert torch.equal(source, target)
            assert (tmp_path / "file").read_bytes()[offset : offset + size] == source.numpy().tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_every_failure_is_reported_and_every_success_is_true(backend: str, tmp_path: Path, seed: int) -> None:
    plan = FaultPlan(seed=seed, eio=0.01, enospc=0.01, short=0.2, delay_us=200, reorder=True)
    outcomes = set()
    with make_handle(backend, faults=plan) as handle:
        with handle.open(tmp_path / "file", "rw") as file:
            for turn in range(20):
                source, target = random_bytes(6 * CHUNK, turn), torch.zeros(6 * CHUNK, dtype=torch.uint8)
                try:
                    handle.write(file, source).wait()
                    handle.read(file, target).wait()
                except SwapIOError as error:
                    outcomes.add(error.errno)
                    assert (error.offset_bytes, error.length_bytes) == (0, 6 * CHUNK)
                    assert "it was the part of" in error.detail
                else:
                    outcomes.add(0)
                    assert torch.equal(source, target)
        assert (handle.in_flight, handle.unobserved_failures) == (0, 0)
    assert outcomes <= {0, errno.EIO, errno.ENOSPC} and len(outcomes) > 1


@pytest.mark.parametrize("operation", ["read", "write"])
def test_failed_transfer_has_nothing_in_flight(backend: str, tmp_path: Path, operation: str) -> None:
    """One request fails at once, the others come late: the failure may only be seen after them."""
    plan = FaultPlan(fail_read_at=3, fail_write_at=3, delay_us=20_000)
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (10 * CHUNK))
    HostCopies.delay_s = 0.005
    memory = torch.full((10 * CHUNK,), 2, dtype=torch.uint8)
    with make_handle(backend, faults=plan) as handle, handle.open(path, "rw") as file:
        start = handle.read if operation == "read" else handle.write
        with pytest.raises(SwapIOError):
            start(file, memory).wait()
        memory.fill_(3)
        now = path.read_bytes()
        time.sleep(0.1)
        assert memory.eq(3).all() and path.read_bytes() == now


@pytest.mark.parametrize("late", [None, "always", "once"])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_failure_of_the_device_is_a_failure_of_the_transfer(tmp_path: Path, operation: str, late: str | None) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (10 * CHUNK))
    memory = torch.zeros(10 * CHUNK, dtype=torch.uint8)
    HostCopies.delay_s = 0.02
    HostCopies.fail_at, HostCopies.fail_late_at = (0, 3) if late else (3, 0)
    HostCopies.tells_once = late == "once"
    with make_handle() as handle, handle.open(path, "rw") as file:
        start = handle.read if operation == "read" else handle.write
        with pytest.raises(SwapIOError, match="illegal memory access") as raised:
            start(file, memory).wait()
        assert (raised.value.errno, raised.value.operation) == (errno.EIO, operation)
        copies = HostCopies.copies
        memory.fill_(3)
        time.sleep(0.1)
        assert HostCopies.copies == copies and memory.eq(3).all()
        assert start(file, memory).wait() == 10 * CHUNK


def test_no_memory_for_the_ring_fails_the_transfer_and_not_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(length: int) -> object:
        raise SwapIOError(errno.ENOMEM, "allocate pinned memory", length_bytes=length)

    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        with monkeypatch.context() as patch:
            patch.setattr("swapper.io.handle.Slab", refuse)
            with pytest.raises(SwapIOError) as raised:
                handle.write(file, random_bytes(10)).wait()
            assert (raised.value.errno, raised.value.operation) == (errno.ENOMEM, "write")
        assert handle.write(file, random_bytes(10)).wait() == 10


def test_memory_that_cannot_be_page_locked_is_used_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    HostCopies.refuse_lock = True
    source, target = random_bytes(3 * CHUNK), torch.zeros(3 * CHUNK, dtype=torch.uint8)
    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source).wait()
        assert not handle._bounce.copies(source.device).non_blocking
        handle.read(file, target).wait()
    assert torch.equal(source, target)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cudaHostRegister failed" in caplog.text


def test_failure_that_nobody_saw_is_raised_by_close(tmp_path: Path) -> None:
    handle = make_handle(faults=FaultPlan(eio=1.0))
    with handle.open(tmp_path / "file", "rw") as file:
        for _ in range(3):
            handle.write(file, random_bytes(100))
    while handle.in_flight:
        time.sleep(0.001)
    assert handle.unobserved_failures == 3
    with pytest.raises(SwapIOError, match="2 more transfers failed"):
        handle.close()
    handle.close()


def test_no_thread_to_be_had_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        handle._bounce.copies(torch.device("cpu"))  # The host's streams are threads too.
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(SwapIOError, match="can't start new thread"):
                handle.write(file, random_bytes(10))
        assert handle.in_flight == 0
        assert handle.write(file, random_bytes(5)).wait() == 5
        assert file.size_bytes() == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_helper_thread_that_dies_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> bool:
        raise MemoryError

    with make_handle() as handle, handle.open(tmp_path / "file", "rw") as file:
        monkeypatch.setattr(bounce.Bounce, "_begin", die)
        transfer = handle.write(file, random_bytes(100))
        with pytest.raises(SwapIOError, match="MemoryError"):
            transfer.wait(240)
        for thread in helper_threads():
            thread.join(240)
        with pytest.raises(SwapError):
            handle.write(file, random_bytes(100))
        assert handle.in_flight == 0


# --- Life times -----------------------------------------------------------------------------------------------------


def test_transfer_is_the_same_kind_of_object(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, torch.zeros(10), 7)
        assert type(transfer) is Transfer
        assert (transfer.operation, transfer.path) == ("write", str(tmp_path / "file"))
        assert (transfer.offset_bytes, transfer.length_bytes) == (7, 40)
        transfer.wait_quietly()
        assert [transfer.wait(), transfer.wait(1.0), transfer.wait(float("inf"))] == [40, 40, 40]
        assert "done" in repr(transfer)
        with pytest.raises(ValueError, match="NaN"):
            transfer.wait(float("nan"))


def test_wait_times_out_and_the_transfer_goes_on(tmp_path: Path) -> None:
    plan = FaultPlan()
    with make_handle(faults=plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            transfer = handle.write(file, random_bytes(4 * CHUNK))
            for timeout in (0, 0.01, -1.0):
                with pytest.raises(TimeoutError):
                    transfer.wait(timeout)
            assert not transfer.done() and handle.in_flight == 1
        assert transfer.wait(240.0) == 4 * CHUNK
        assert handle.in_flight == 0


def test_there_is_a_helper_thread_only_while_there_is_work(tmp_path: Path) -> None:
    plan = FaultPlan()
    with make_handle(faults=plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        assert not helper_threads()
        with still(plan):
            transfer = handle.write(file, random_bytes(CHUNK))
            (thread,) = helper_threads()
            assert not thread.daemon
        transfer.wait()
        thread.join(240)
        assert not helper_threads()


def test_dropped_transfer_keeps_its_memory_until_it_is_over(tmp_path: Path) -> None:
    source = random_bytes(4 * CHUNK)
    expected = source.numpy().tobytes()
    with make_handle(faults=FaultPlan(delay_us=30_000)) as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source)
        source.data = torch.zeros(1, dtype=torch.uint8)
        del source
        gc.collect()
        [torch.full((4 * CHUNK,), 7, dtype=torch.uint8) for _ in range(20)]
        while handle.in_flight:
            time.sleep(0.002)
        assert not handle._ledger.in_flight
    assert (tmp_path / "file").read_bytes() == expected


def test_close_completes_what_is_in_flight(backend: str, tmp_path: Path) -> None:
    source = random_bytes(CHUNK)
    HostCopies.delay_s = 0.002
    handle = make_handle(backend, faults=FaultPlan(delay_us=5_000))
    with handle.open(tmp_path / "file", "rw") as file:
        transfers = [handle.write(file, source, i * CHUNK) for i in range(20)]
    handle.close()
    assert all(transfer.done() for transfer in transfers)
    wait_all(transfers)
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes() * 20
    with (
        AsyncIOHandle() as other,
        other.open(tmp_path / "file", "rw") as file,
        pytest.raises(SwapError, match="closed"),
    ):
        handle.write(file, source)
    assert handle._ledger.in_flight == {} and not helper_threads()


def test_collected_handle_completes_what_is_in_flight(tmp_path: Path) -> None:
    handle = make_handle(faults=FaultPlan(delay_us=20_000))
    transfer = handle.write(handle.open(tmp_path / "file", "w"), random_bytes(8 * CHUNK))
    del handle
    gc.collect()
    assert transfer.done()
    assert transfer.wait() == 8 * CHUNK


def test_handle_collected_on_its_own_helper_thread_is_closed_after_the_work(tmp_path: Path) -> None:
    handle = make_handle(faults=FaultPlan(delay_us=10_000))
    ledger = handle._ledger
    box = [handle]
    del handle

    class Dropping(HostCopies):
        def start(self, destination: torch.Tensor, source: torch.Tensor) -> object:  # type: ignore[override]
            box.clear()
            return super().start(destination, source)

    devices.DEVICES["cpu"] = Dropping
    transfer = box[0].write(box[0].open(tmp_path / "file", "w"), random_bytes(8 * CHUNK))
    assert transfer.wait() == 8 * CHUNK
    for thread in helper_threads():
        thread.join(240)
    assert not box and not HostCopies.locked
    with pytest.raises(SwapError, match="closed"):
        ledger.engine.write(None, 0, 0, 0, 0, None)  # type: ignore[arg-type]


def test_interpreter_exit_completes_what_is_in_flight(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(host_device.__file__).parent)!r})
import torch
from conformance import Conformance, Subject
from host_device import HostCopies
from swapper.io import devices
from swapper.io.handle import AsyncIOHandle, FaultPlan
devices.DEVICES["cpu"] = HostCopies
handle = AsyncIOHandle(faults=FaultPlan(delay_us=50000))
handle.write(handle.open({str(tmp_path / "file")!r}, "w"), torch.ones({40 << 20}, dtype=torch.uint8))
"""
    run_program([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)
    assert (tmp_path / "file").read_bytes() == b"\1" * (40 << 20)


@pytest.mark.long
def test_ctrl_c_interrupts_the_wait_and_not_the_transfer(tmp_path: Path) -> None:
    plan = FaultPlan()
    with make_handle(faults=plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            transfer = handle.write(file, random_bytes(16 * CHUNK))
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                transfer.wait()
            assert not transfer.done()
            timer.join()
        assert transfer.wait() == 16 * CHUNK


@pytest.mark.parametrize("module", ["io/handle.py", "io/transfer.py", "io/bounce.py"])
def test_ctrl_c_while_a_transfer_starts_leaves_nothing_in_flight(tmp_path: Path, module: str) -> None:
    source = torch.empty(3 * CHUNK, dtype=torch.uint8)
    with make_handle(faults=FaultPlan(delay_us=1000)) as handle, handle.open(tmp_path / "file", "rw") as file:
        outcomes = set()
        for n in itertools.count():
            source.fill_(1)
            file.truncate(0)
            interrupted = interrupted_at(n, lambda: handle.write(file, source), module)
            if not interrupted:
                handle._bounce.wait_quietly()
                break
            assert handle.in_flight == 0, n
            source.fill_(2)  # What is in flight, known or not, would write this.
            handle.write(file, source[:1], 1 << 20).wait()
            outcomes.add((tmp_path / "file").read_bytes()[: source.nbytes])
        assert n > 5
        assert outcomes <= {b"\0" * source.nbytes, b"\1" * source.nbytes}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_leaves_the_parent_alone(tmp_path: Path) -> None:
    source, target = random_bytes(8 * CHUNK), torch.zeros(8 * CHUNK, dtype=torch.uint8)
    with make_handle(faults=FaultPlan(delay_us=30_000)) as handle, handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, source)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                refused = 0
                for use in (transfer.wait, transfer.wait_quietly, lambda: handle.write(file, source)):
                    try:
                        use()
                    except SwapError:
                        refused += 1
                transfer.done()
                repr(transfer)
                handle.close()
                del transfer, handle
                gc.collect()
                status = 0 if refused == 3 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transfer.wait() == 8 * CHUNK
        handle.read(file, target).wait()
        assert torch.equal(source, target)


@pytest.mark.parametrize("subject", [Subject(BACKENDS[0], True), Subject("buffered", False)], ids=str)
class TestConformance(Conformance):
    """Handles do for a device's tensors what they do for any."""
