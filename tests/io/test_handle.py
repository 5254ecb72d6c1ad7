"""What the conformance suite does not ask of every handle: files, life times, the ladder, registered memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conformance import AVAILABLE, BLOCK, CONFORMING, SLAB, raises_io, random_bytes
from interrupts import interrupted_at
from isolation import alone
from launcher import run_program
from locked_memory import needs_locked_memory
from resident import resident_bytes
from still_drive import still

from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan, Slab, probe

# No thread of these tests shall be able to hang the run.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=CONFORMING)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def handle(backend: str) -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=4) as handle:
        assert handle.register(SLAB) == (backend == "uring+fixed")
        yield handle


def slow_handle(backend: str, plan: FaultPlan) -> AsyncIOHandle:
    return AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=4, faults=plan)


# --- Files ----------------------------------------------------------------------------------------------------------


def test_file_operations(handle: AsyncIOHandle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with handle.open(path, "w") as file:
        assert path.stat().st_mode & 0o777 == 0o600
        assert file.preallocate(10_000) is True
        assert file.size_bytes() == 10_000
        file.truncate(5_000)
        assert path.stat().st_size == 5_000
        file.sync()
        assert os.fstat(file.fileno()).st_ino == path.stat().st_ino
        assert not os.get_inheritable(file.fileno())
        assert file.path == str(path)
        if file.direct:
            assert file.alignment_bytes >= 4096 and file.direct_reason == ""
        else:
            assert file.alignment_bytes == 1 and file.direct_reason
    with pytest.raises(SwapIOError) as raised:
        handle.open(path, "w", exclusive=True)
    assert raised.value.errno == errno.EEXIST
    with handle.open(path, "w", truncate=True) as file:
        assert file.size_bytes() == 0


def test_file_system_without_direct_io_falls_back_with_a_reason(tmp_path: Path) -> None:
    with AsyncIOHandle() as handle, handle.open("/proc/self/status") as file:
        assert not file.direct
        assert "O_DIRECT" in file.direct_reason
        target = torch.zeros(5, dtype=torch.uint8)
        handle.read(file, target).wait()
        assert bytes(target.tolist()) == b"Name:"


def test_name_that_is_not_utf8(handle: AsyncIOHandle, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff"
    for path in (name, os.fsdecode(name)):
        with handle.open(path, "w") as file:
            assert file.path == os.fsdecode(name)
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff"]
    with pytest.raises(SwapIOError) as raised:
        handle.open(name + b"/missing")
    assert raised.value.path == os.fsdecode(name + b"/missing")


def test_null_character_in_a_name(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null"):
        handle.open(tmp_path / "file\0.tail", "w")
    assert not list(tmp_path.iterdir())


def test_wrong_mode(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mode"):
        handle.open(tmp_path / "file", "w+")


@pytest.mark.parametrize(
    "wrong",
    [{"backend": "spdk"}, {"block_bytes": 5000}, {"block_bytes": 0}, {"queue_depth": 0}, {"threads": 0}],
    ids=str,
)
def test_wrong_options_name_the_field(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AsyncIOHandle(**wrong)  # type: ignore[arg-type]


def break_ring(path: Path) -> int:
    """Replace the descriptor of a ring behind the handle's back. Returns how many transfers were taken after that."""

    def rings() -> set[str]:
        links = {
            fd: os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if fd.isdigit() and os.path.lexists(f"/proc/self/fd/{fd}")
        }
        return {fd for fd, link in links.items() if "io_uring" in link}

    before = rings()
    handle = AsyncIOHandle(backend="uring", block_bytes=BLOCK, queue_depth=2)
    (ring,) = rings() - before
    with handle.open(path, "rw") as file, open(os.devnull) as null:
        handle.write(file, random_bytes(10)).wait()
        os.dup2(null.fileno(), int(ring), inheritable=False)
        transfers = []
        while len(transfers) < 10:
            try:
                transfers.append(handle.write(file, random_bytes(4 * BLOCK)))
            except SwapIOError:
                break
        for transfer in transfers:
            with pytest.raises(SwapIOError):
                transfer.wait(240)
        with pytest.raises(SwapIOError, match="io_uring_enter"):
            handle.write(file, random_bytes(10))
    with pytest.raises(SwapIOError, match="io_uring_enter"):
        handle.register(SLAB)
    handle.close()
    return len(transfers)


@pytest.mark.skipif("uring" not in AVAILABLE, reason="io_uring is not available")
def test_broken_backend_fails_its_transfers_and_later_ones(tmp_path: Path) -> None:
    """A thread that comes late to wait on the ring finds out before any transfer is taken: then once more."""
    assert any(break_ring(tmp_path / "file") for _ in range(50))


# --- Life times -----------------------------------------------------------------------------------------------------


def test_transfer_tells_what_it_is(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, torch.zeros(10), 7)
        assert (transfer.operation, transfer.path) == ("write", str(tmp_path / "file"))
        assert (transfer.offset_bytes, transfer.length_bytes) == (7, 40)
        assert [transfer.wait(), transfer.wait(1.0)] == [40, 40]
        assert "done" in repr(transfer)


def test_closing_a_file_does_not_disturb_its_transfers(backend: str, tmp_path: Path) -> None:
    source, target = random_bytes(4 * BLOCK), torch.zeros(4 * BLOCK, dtype=torch.uint8)
    plan = FaultPlan()
    with slow_handle(backend, plan) as handle:
        file = handle.open(tmp_path / "file", "rw")
        with still(plan):
            written = handle.write(file, source)
            file.close()
            file.close()
        written.wait()
        with pytest.raises(ValueError, match="closed"):
            handle.read(file, target)
        with pytest.raises(ValueError, match="closed"):
            file.size_bytes()
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes()


def test_wait_times_out_and_the_transfer_goes_on(backend: str, tmp_path: Path) -> None:
    plan = FaultPlan()
    with slow_handle(backend, plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            transfer = handle.write(file, random_bytes(16 * BLOCK))
            for timeout in (0, 0.01, -1.0):
                with pytest.raises(TimeoutError):
                    transfer.wait(timeout)
            assert not transfer.done()
        assert transfer.wait(240.0) == 16 * BLOCK


def test_dropped_transfer_keeps_its_memory_until_it_is_over(backend: str, tmp_path: Path) -> None:
    source = random_bytes(4 * BLOCK)
    expected = source.numpy().tobytes()
    plan = FaultPlan()
    with slow_handle(backend, plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            handle.write(file, source)
            alive = weakref.ref(source)
            storage = handle._ledger.in_flight.copy()
            del source
            gc.collect()
            assert alive() is None and len(storage) == 1
            del storage
            [torch.full((4 * BLOCK,), 7, dtype=torch.uint8) for _ in range(20)]
        while handle.in_flight:
            time.sleep(0.002)
    assert (tmp_path / "file").read_bytes() == expected


def test_rebinding_tensor_data_does_not_free_memory_in_flight(backend: str, tmp_path: Path) -> None:
    source = random_bytes(4 * BLOCK)
    expected = source.numpy().tobytes()
    plan = FaultPlan()
    with slow_handle(backend, plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            transfer = handle.write(file, source)
            source.data = torch.zeros(1, dtype=torch.uint8)
        transfer.wait()
    assert (tmp_path / "file").read_bytes() == expected


def test_interpreter_exit_completes_what_is_in_flight(tmp_path: Path) -> None:
    program = f"""
import torch
from swapper.io.handle import AsyncIOHandle, FaultPlan
handles = []
for backend in {CONFORMING!r}:
    handle = AsyncIOHandle(backend=backend, block_bytes={BLOCK}, faults=FaultPlan(delay_us=50000))
    handle.write(handle.open({str(tmp_path)!r} + "/" + backend, "w"), torch.ones({8 * BLOCK}, dtype=torch.uint8))
    handles.append(handle)
"""
    run_program([sys.executable, "-W", "error", "-c", program], check=True, timeout=240)
    for backend in CONFORMING:
        assert (tmp_path / backend).read_bytes() == b"\1" * (8 * BLOCK)


@pytest.mark.long
@pytest.mark.unsanitized("UBSan takes the end of a daemon thread, which pybind11 catches, for a null reference")
def test_daemon_threads_at_interpreter_exit_do_not_abort(tmp_path: Path) -> None:
    """Python ends them where they ask for the interpreter's lock, in the middle of our code."""
    program = f"""
import threading, time
from swapper.io.handle import AsyncIOHandle
file = AsyncIOHandle().open({str(tmp_path / "file")!r}, "w")
def work():
    while True:
        file.size_bytes()
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    for _ in range(2):
        done = run_program([sys.executable, "-W", "error", "-c", program], timeout=240, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("leave", ["sys.exit(7)", "os._exit(7)"])
def test_forked_child_exits_in_order(tmp_path: Path, leave: str) -> None:
    program = f"""
import os, sys, torch
from swapper.io.handle import AsyncIOHandle, FaultPlan, Slab
handles, transfers = [], []
for backend in {CONFORMING!r}:
    handle = AsyncIOHandle(backend=backend, block_bytes={BLOCK}, queue_depth=2, faults=FaultPlan(delay_us=20000))
    memory = torch.frombuffer(slab := Slab({8 * BLOCK}), dtype=torch.uint8).fill_(1)
    handle.register(slab)
    handles.append(handle)
    transfers.append(handle.write(handle.open({str(tmp_path)!r} + "/" + backend, "w"), memory))
del memory, slab
child = os.fork()
if child == 0:
    {leave}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert [transfer.wait() for transfer in transfers] == [{8 * BLOCK}] * len(transfers)
"""
    command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c", program]
    done = run_program(command, timeout=240, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for backend in CONFORMING:
        assert (tmp_path / backend).read_bytes() == b"\1" * (8 * BLOCK)


def test_ctrl_c_interrupts_the_wait_and_not_the_transfer(backend: str, tmp_path: Path) -> None:
    plan = FaultPlan()
    with slow_handle(backend, plan) as handle, handle.open(tmp_path / "file", "rw") as file:
        with still(plan):
            transfer = handle.write(file, random_bytes(16 * BLOCK))
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                transfer.wait()
            assert not transfer.done()
            timer.join()
        assert transfer.wait() == 16 * BLOCK


def test_ctrl_c_while_a_transfer_starts_leaves_nothing_in_flight(tmp_path: Path) -> None:
    plan = FaultPlan(delay_us=2000)
    source = torch.empty(8 * 4096, dtype=torch.uint8)
    with (
        AsyncIOHandle(block_bytes=4096, queue_depth=1, faults=plan) as handle,
        handle.open(tmp_path / "file", "rw") as file,
    ):

        def start() -> None:
            handle.write(file, source)

        outcomes = set()
        for n in itertools.count():
            source.fill_(1)
            file.truncate(0)
            interrupted = interrupted_at(n, start, "io/host_handle.py", "io/transfer.py")
            if not interrupted:
                break
            assert handle.in_flight == 0, n
            source.fill_(2)  # What is in flight, known or not, would write this.
            handle.write(file, source[:1], 1 << 20).wait()
            outcomes.add((tmp_path / "file").read_bytes()[: source.nbytes])
        assert outcomes == {b"\0" * source.nbytes, b"\1" * source.nbytes}


def test_ctrl_c_while_finished_transfers_are_taken_loses_none(tmp_path: Path) -> None:
    for n in itertools.count():
        handle = AsyncIOHandle(faults=FaultPlan(eio=1.0))
        with handle.open(tmp_path / "file", "rw") as file:
            started = [handle.write(file, random_bytes(10)) for _ in range(2)]
        while not all(transfer.done() for transfer in started):
            time.sleep(0.0005)
        interrupted = interrupted_at(n, lambda handle=handle: handle.in_flight, "io/host_handle.py", "io/transfer.py")  # type: ignore[misc]
        assert (handle.in_flight, handle.unobserved_failures) == (0, 2), n
        with pytest.raises(SwapIOError, match="1 more transfers failed"):
            handle.close()
        if not interrupted:
            break
    assert n > 5


def test_ctrl_c_during_close_loses_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told by the next `close`, or it is behind the KeyboardInterrupt, or the finalizer logs it."""
    told = set()
    for n in itertools.count():
        handle = AsyncIOHandle(faults=FaultPlan(eio=1.0))
        with handle.open(tmp_path / "file", "w") as file:
            handle.write(file, random_bytes(10))
        behind: list[BaseException | None] = []

        def close(handle: AsyncIOHandle = handle, behind: list[BaseException | None] = behind) -> None:
            try:
                handle.close()
            except KeyboardInterrupt as interrupt:
                behind.append(interrupt.__context__)
                raise
            except SwapIOError as error:
                behind.append(error)  # noqa: B023

        interrupted = interrupted_at(n, close, "io/host_handle.py", "io/transfer.py")
        if any(isinstance(error, SwapIOError) for error in behind):
            told.add("at once")
        elif n % 2:
            with raises_io(errno.EIO, "write", tmp_path / "file", 0, 10):
                handle.close()
            told.add("later")
        else:
            caplog.clear()
            behind.clear()
            del handle, close
            gc.collect()
            assert "nobody waited for it" in caplog.text, n
            told.add("logged")
        if not interrupted:
            break
    assert told == {"at once", "later", "logged"}


def engine_ns() -> int:
    """Time that the threads of all engines have had of a processor."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            if "swapper-io" in (task / "comm").read_text():
                found += int((task / "schedstat").read_text().split()[0])
    assert found > 0
    return found


def test_idle_handle_uses_no_processor_time(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, random_bytes(1000)).wait()
    before_ns = engine_ns()
    time.sleep(0.3)
    assert engine_ns() - before_ns < 100_000_000


# --- The ladder and registered memory -------------------------------------------------------------------------------


def test_auto_takes_the_first_rung_and_keeps_the_refusals() -> None:
    with AsyncIOHandle() as handle:
        assert handle.backend == AVAILABLE[0]
        assert [refusal.backend for refusal in handle.refusals] == [p.backend for p in probe()[: len(handle.refusals)]]
        assert all(refusal.reason for refusal in handle.refusals)
    assert probe() is probe()
    assert AVAILABLE[-2:] == ["threads", "buffered"]


@pytest.mark.skipif("aio" not in AVAILABLE, reason="kernel AIO is not available")
def test_named_backend_that_is_not_to_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = tuple(
        p._replace(available=False, reason="forbidden") if p.backend in ("uring+fixed", "uring") else p for p in probe()
    )
    monkeypatch.setattr("swapper.io.host_handle.probe", lambda: refused)
    with pytest.raises(SwapError, match=r"'uring' is not available here.*forbidden"):
        AsyncIOHandle(backend="uring")
    with AsyncIOHandle() as handle:
        assert handle.backend == "aio"
        assert [refusal.reason for refusal in handle.refusals] == ["forbidden", "forbidden"]


@pytest.mark.skipif("uring+fixed" not in AVAILABLE, reason="io_uring cannot register memory here")
@needs_locked_memory
def test_registered_memory_moves_the_same_bytes(tmp_path: Path) -> None:
    slabs = [Slab(length) for length in (3 << 20, (4 << 20) + 4096)]
    with AsyncIOHandle(backend="uring+fixed", block_bytes=1 << 20, threads=2) as handle:
        with handle.open(tmp_path / "file", "rw") as file:
            for turn in range(3):
                for slab in slabs:
                    if turn < 2:
                        assert handle.register(slab) if turn == 0 else True
                    memory = torch.frombuffer(slab, dtype=torch.uint8)
                    source = random_bytes(memory.numel(), turn)
                    memory.copy_(source)
                    handle.write(file, memory).wait()
                    memory.zero_()
                    # Unaligned in memory and file.
                    handle.read(file, memory[1:-1], 1).wait()
                    assert torch.equal(memory[1:-1], source[1:-1])
                    memory.zero_()
                    handle.read(file, memory).wait()
                    assert torch.equal(memory, source)
                handle.unregister(slabs[turn % 2])
                handle.unregister(slabs[turn % 2])
        assert handle.backend == "uring+fixed"


def test_slab_memory_outlives_the_slab_object() -> None:
    slab = Slab(3 << 20)
    assert slab.address % (2 << 20) == 0 and slab.length_bytes == 3 << 20
    assert slab.locked == (slab.lock_reason == "")
    memory = torch.frombuffer(slab, dtype=torch.uint8)
    assert memory.data_ptr() == slab.address
    del slab
    gc.collect()
    memory.fill_(5)
    assert int(memory.sum()) == 5 * (3 << 20)


def test_slab_that_does_not_fit_is_an_error() -> None:
    for length in (0, 1 << 46):
        with pytest.raises(SwapIOError, match="pinned"):
            Slab(length)


def test_slab_is_resident_and_goes_away() -> None:
    slab = Slab(64 << 20)
    start = slab.address
    assert resident_bytes(start, 64 << 20) >= 64 << 20
    ctypes.memset(slab.address, 1, slab.length_bytes)
    del slab
    gc.collect()
    assert resident_bytes(start, 64 << 20) < 8 << 20, "other memory may have come to some of its addresses"


@pytest.mark.unsanitized("it turns mlock into nothing")
def test_small_slab_takes_no_more_than_its_pages() -> None:
    """Programs make many; with RLIMIT_MEMLOCK at 64 KiB even one huge page could not be locked."""

    def locked_bytes() -> int:
        gc.collect()  # What tests before this one have left is not to go while it counts.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmLck"))

    before, page = locked_bytes(), os.sysconf("SC_PAGESIZE")
    slab = Slab(page + 1)
    if not slab.locked:
        pytest.skip("this process may not lock two pages")
    assert slab.address % page == 0 and locked_bytes() - before == 2 * page
    memory = torch.frombuffer(slab, dtype=torch.uint8).fill_(5)
    for _ in range(2):
        slab.unlock()
        assert not slab.locked and slab.lock_reason and locked_bytes() == before
    assert int(memory.sum()) == 5 * (page + 1)


def test_descriptors_used_up_are_an_error_and_not_a_slow_file(tmp_path: Path) -> None:
    alone(without_descriptors, tmp_path)  # Where nothing of other tests gives one back meanwhile.


def without_descriptors(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with AsyncIOHandle() as handle:
        handle.open(tmp_path / "file", "w").close()
        lowest = os.dup(0)
        os.close(lowest)
        for left in range(2):  # A file that is direct takes two.
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
            try:
                file = handle.open(tmp_path / "file")
            except SwapIOError as error:
                assert error.errno == errno.EMFILE
            else:
                assert left == 1 and "EINVAL" not in file.direct_reason and "many" not in file.direct_reason
                file.close()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
