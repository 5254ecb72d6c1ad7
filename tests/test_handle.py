"""One conformance suite that every backend of this machine passes, and what is particular to some."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_at

from swapper.errors import SwapError, SwapIOError
from swapper.handle import AsyncIOHandle, FaultPlan, Slab, Transfer, probe

BLOCK = 64 << 10
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 13)
AVAILABLE = [found.backend for found in probe() if found.available]
# Without registered memory "uring+fixed" is "uring": where both are to be had, one of them is enough.
CONFORMING = [backend for backend in AVAILABLE if backend != "uring" or "uring+fixed" not in AVAILABLE]
SLAB = Slab(2 << 20)

# No thread of these tests shall be able to hang the run.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=CONFORMING)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def handle(backend: str) -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=4) as handle:
        assert handle.register(SLAB) == (backend == "uring+fixed")
        yield handle


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def in_slab(place: int, length: int, misalignment: int) -> torch.Tensor:
    """Zeros in half `place` of registered memory, whose address is `misalignment` beyond a multiple of 4096."""
    start = place * SLAB.length_bytes // 2 + misalignment
    return torch.frombuffer(SLAB, dtype=torch.uint8)[start : start + length].zero_()


def slow_handle(backend: str, delay_us: int = 300_000, **options: object) -> AsyncIOHandle:
    plan = FaultPlan(seed=1, delay_us=delay_us)
    return AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=4, faults=plan, **options)  # type: ignore[arg-type]


def wait_all(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


# --- Data arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize("size", SIZES)
def test_written_bytes_are_read_back(handle: AsyncIOHandle, tmp_path: Path, size: int, direct: bool) -> None:
    path = tmp_path / "file"
    for offset, misalignment in ((0, 0), (4096, 64), (1, 1), (5000, 0), (5000, 904)):
        source, target = (
            in_slab(0, size, misalignment).copy_(random_bytes(size, offset)),
            in_slab(1, size, misalignment),
        )
        with handle.open(path, "rw", truncate=True, direct=direct) as file:
            assert handle.write(file, source, offset).wait() == size
            assert file.size_bytes() == (offset + size if size else 0)
            assert handle.read(file, target, offset).wait() == size
        assert torch.equal(source, target)
        assert path.read_bytes()[offset:] == source.numpy().tobytes()
        assert path.read_bytes()[:offset].count(0) == (offset if size else 0)


def test_unaligned_neighbours_written_together_do_not_disturb_each_other(handle: AsyncIOHandle, tmp_path: Path) -> None:
    rng = random.Random(0)
    for round_number in range(8):
        cuts = sorted({0, *(rng.randrange(6 * BLOCK) for _ in range(12)), 6 * BLOCK})
        data = random_bytes(6 * BLOCK, round_number)
        pieces = list(itertools.pairwise(cuts))
        rng.shuffle(pieces)
        with handle.open(tmp_path / "file", "rw") as file:
            wait_all([handle.write(file, data[start:stop], start) for start, stop in pieces])
            back = torch.zeros_like(data)
            wait_all([handle.read(file, back[start:stop], start) for start, stop in pieces])
        assert torch.equal(back, data)
        assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_any_dtype_and_shape(handle: AsyncIOHandle, tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.randn(33, 65).mul(3).to(dtype)
    target = torch.zeros_like(source)
    with handle.open(tmp_path / "file", "rw") as file:
        assert handle.write(file, source).wait() == source.nbytes
        handle.read(file, target).wait()
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    "options",
    [{"threads": 3}, {"single_submit": True}, {"overlap_events": False}, {"queue_depth": 1}, {"block_bytes": 4096}],
    ids=str,
)
def test_every_option_moves_the_same_bytes(backend: str, tmp_path: Path, options: dict[str, int]) -> None:
    source = random_bytes((2 << 20) + 77)
    target = torch.zeros_like(source)
    with (
        AsyncIOHandle(**{"backend": backend, "block_bytes": BLOCK, "queue_depth": 4, **options}) as handle,  # type: ignore[arg-type]
        handle.open(tmp_path / "file", "rw") as file,
    ):
        handle.write(file, source).wait()
        handle.read(file, target).wait()
    assert torch.equal(source, target)


def test_many_threads_share_one_handle(backend: str, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=8, threads=2) as handle:

        def work(worker: int) -> None:
            try:
                with handle.open(tmp_path / str(worker), "rw") as file:
                    for turn in range(10):
                        source = random_bytes(100_000 + 777 * turn, worker * 100 + turn)
                        target = torch.zeros_like(source)
                        handle.write(file, source, turn * 13).wait()
                        handle.read(file, target, turn * 13).wait()
                        assert torch.equal(source, target)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.in_flight == 0
    assert not failures


def test_closing_a_file_does_not_disturb_its_transfers(backend: str, tmp_path: Path) -> None:
    source, target = random_bytes(4 * BLOCK), torch.zeros(4 * BLOCK, dtype=torch.uint8)
    with slow_handle(backend, 20_000) as handle:
        file = handle.open(tmp_path / "file", "rw")
        written = handle.write(file, source)
        file.close()
        file.close()
        written.wait()
        with pytest.raises(ValueError, match="closed"):
            handle.read(file, target)
        with pytest.raises(ValueError, match="closed"):
            file.size_bytes()
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes()


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


def test_missing_file(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with pytest.raises(SwapIOError) as raised:
        handle.open(tmp_path / "missing")
    assert (raised.value.errno, raised.value.operation, raised.value.path) == (
        errno.ENOENT,
        "open",
        str(tmp_path / "missing"),
    )
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_directory(handle: AsyncIOHandle, tmp_path: Path, mode: str) -> None:
    with pytest.raises(SwapIOError) as raised:
        handle.open(tmp_path, mode)
    assert raised.value.errno == errno.EISDIR


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


# --- Mistakes and failures ------------------------------------------------------------------------------------------


def test_tensors_that_cannot_be_moved_are_refused(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        with pytest.raises(ValueError, match="contiguous"):
            handle.write(file, torch.zeros(4, 4).t())
        with pytest.raises(ValueError, match="CPU"):
            handle.write(file, torch.zeros(4, device="meta"))
        for numel in (1000, 0):
            shrunk = torch.zeros(2000)[1:]
            shrunk.untyped_storage().resize_(numel)
            with pytest.raises(ValueError, match="memory"):
                handle.write(file, shrunk)
        with pytest.raises(ValueError, match="dense"):
            handle.write(file, torch.eye(3).to_sparse())
        with pytest.raises(ValueError, match="contiguous"):
            handle.write(file, torch.zeros(3, dtype=torch.complex64).conj())
        for offset in (-1, 1 << 63, (1 << 63) - 3):
            with pytest.raises(ValueError, match="offset_bytes"):
                handle.write(file, torch.zeros(4), offset)


@pytest.mark.parametrize(
    "wrong",
    [{"backend": "spdk"}, {"block_bytes": 5000}, {"block_bytes": 0}, {"queue_depth": 0}, {"threads": 0}],
    ids=str,
)
def test_wrong_options_name_the_field(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AsyncIOHandle(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "cached"])
@pytest.mark.parametrize(("size", "offset"), [(4096, 8192), (8192, 4096), (5000, 4097), (1, 5000), (3 * BLOCK, 0)])
def test_read_past_the_end_fails(handle: AsyncIOHandle, tmp_path: Path, size: int, offset: int, direct: bool) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with handle.open(tmp_path / "file", direct=direct) as file:
        transfer = handle.read(file, torch.zeros(size, dtype=torch.uint8), offset)
        for _ in range(2):
            with pytest.raises(SwapIOError) as raised:
                transfer.wait()
            error = raised.value
            assert (error.errno, error.operation, error.path) == (errno.ENODATA, "read", str(tmp_path / "file"))
            assert (error.offset_bytes, error.length_bytes) == (offset, size)
        assert transfer.done()
        # What is there can still be read, up to an end that is not aligned.
        assert handle.read(file, torch.zeros(5000, dtype=torch.uint8)).wait() == 5000
    assert handle.unobserved_failures == 0


def test_writing_a_file_that_is_open_for_reading_fails(handle: AsyncIOHandle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    with handle.open(tmp_path / "file") as file, pytest.raises(SwapIOError) as raised:
        handle.write(file, torch.zeros(4096, dtype=torch.uint8)).wait()
    assert raised.value.errno == errno.EBADF


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    for command in (["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a small file system: {error}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "mount"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "swapper", str(mount)]).returncode:
        pytest.skip("needs root to mount")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["small_tmpfs", "small_file_system"])
def test_full_drive_is_an_error_not_success(handle: AsyncIOHandle, request: pytest.FixtureRequest, kind: str) -> None:
    mount: Path = request.getfixturevalue(kind)
    with handle.open(mount / "file", "rw") as file:
        transfer = handle.write(file, torch.zeros(32 << 20, dtype=torch.uint8))
        with pytest.raises(SwapIOError) as raised:
            transfer.wait()
        assert raised.value.errno == errno.ENOSPC
        with pytest.raises(SwapIOError) as raised:
            file.preallocate(64 << 20)
        assert raised.value.errno == errno.ENOSPC
        # The handle is as good as before.
        file.truncate(0)
        assert handle.write(file, random_bytes(5000)).wait() == 5000


# --- Faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "faults",
    [
        {"short": 0.5},
        {"eintr": 0.3, "eagain": 0.2},
        {"delay_us": 2000, "reorder": True},
        {"short": 0.4, "eintr": 0.1, "eagain": 0.1, "delay_us": 300, "reorder": True},
    ],
    ids=lambda faults: "+".join(faults),
)
def test_harmless_faults_leave_the_right_bytes(
    backend: str, tmp_path: Path, faults: dict[str, float], seed: int
) -> None:
    rng = random.Random(seed)
    plan = FaultPlan(seed=seed, **faults)  # type: ignore[arg-type]
    with (
        AsyncIOHandle(backend=backend, block_bytes=16384, queue_depth=4, threads=1 + seed % 2, faults=plan) as handle,
        handle.open(tmp_path / "file", "rw", direct=seed % 3 != 2) as file,
    ):
        for _ in range(3):
            size, offset = rng.randrange(1, 200_000), rng.randrange(10_000)
            misalignment = rng.choice((0, 64, 3))
            source = in_slab(0, size, misalignment).copy_(random_bytes(size, seed))
            target = in_slab(1, size, misalignment)
            assert handle.write(file, source, offset).wait() == size
            assert handle.read(file, target, offset).wait() == size
            assert torch.equal(source, target)
            assert (tmp_path / "file").read_bytes()[offset : offset + size] == source.numpy().tobytes()
    assert plan.reads > 0 and plan.writes > 0


@pytest.mark.parametrize("seed", range(4))
def test_every_failure_is_reported_and_every_success_is_true(backend: str, tmp_path: Path, seed: int) -> None:
    plan = FaultPlan(seed=seed, eio=0.03, enospc=0.03, short=0.2, delay_us=200, reorder=True)
    outcomes = set()
    with AsyncIOHandle(backend=backend, block_bytes=16384, queue_depth=4, faults=plan) as handle:
        with handle.open(tmp_path / "file", "rw") as file:
            for turn in range(20):
                source, target = random_bytes(100_000, turn), torch.zeros(100_000, dtype=torch.uint8)
                try:
                    handle.write(file, source).wait()
                    handle.read(file, target).wait()
                except SwapIOError as error:
                    outcomes.add(error.errno)
                else:
                    outcomes.add(0)
                    assert torch.equal(source, target)
        assert handle.in_flight == 0
        assert handle.unobserved_failures == 0
    assert outcomes <= {0, errno.EIO, errno.ENOSPC} and len(outcomes) > 1


def test_endless_eagain_is_given_up(backend: str, tmp_path: Path) -> None:
    with (
        AsyncIOHandle(backend=backend, faults=FaultPlan(eintr=1.0)) as handle,
        handle.open(tmp_path / "f", "w") as file,
    ):
        with pytest.raises(SwapIOError) as raised:
            handle.write(file, random_bytes(10)).wait()
        assert raised.value.errno == errno.EINTR


def test_nth_request_fails_and_the_next_does_not(backend: str, tmp_path: Path) -> None:
    plan = FaultPlan(fail_write_at=3, fail_errno=errno.ENOSPC)
    source = random_bytes(BLOCK)
    with (
        AsyncIOHandle(backend=backend, block_bytes=BLOCK, faults=plan) as handle,
        handle.open(tmp_path / "file", "rw") as file,
    ):
        for n in range(1, 5):
            transfer = handle.write(file, source)
            if n == 3:
                with pytest.raises(SwapIOError) as raised:
                    transfer.wait()
                assert raised.value.errno == errno.ENOSPC
            else:
                transfer.wait()
        assert (plan.writes, plan.reads) == (4, 0)
        plan.fail_errno, plan.fail_read_at = errno.EIO, 1
        with pytest.raises(SwapIOError):
            handle.read(file, source).wait()
        handle.read(file, source).wait()


def test_failed_transfer_has_nothing_in_flight(backend: str, tmp_path: Path) -> None:
    """The first part fails at once, the others come late: the failure may only be seen after them."""
    plan = FaultPlan(fail_read_at=1, delay_us=20_000)
    source = random_bytes(8 * BLOCK)
    (tmp_path / "file").write_bytes(source.numpy().tobytes())
    with (
        AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=8, faults=plan) as handle,
        handle.open(tmp_path / "file") as file,
    ):
        target = torch.zeros_like(source)
        with pytest.raises(SwapIOError):
            handle.read(file, target).wait()
        target.zero_()
        time.sleep(0.05)
        assert not target.any()


def test_failure_that_nobody_saw_is_raised_by_close(backend: str, tmp_path: Path) -> None:
    handle = AsyncIOHandle(backend=backend, faults=FaultPlan(eio=1.0))
    with handle.open(tmp_path / "file", "rw") as file:
        for _ in range(3):
            handle.write(file, random_bytes(100))
    while handle.in_flight:
        time.sleep(0.001)
    assert handle.unobserved_failures == 3
    with pytest.raises(SwapIOError, match="2 more transfers failed") as raised:
        handle.close()
    assert raised.value.errno == errno.EIO
    handle.close()


def test_failure_during_another_error_does_not_hide_it(backend: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError), AsyncIOHandle(backend=backend, faults=FaultPlan(eio=1.0)) as handle:
        handle.write(handle.open(tmp_path / "file", "w"), random_bytes(100))
        raise KeyError


@pytest.mark.unsanitized("its shadow memory does not fit under RLIMIT_AS")
def test_no_memory_for_unaligned_data_fails_only_that_transfer(tmp_path: Path) -> None:
    program = f"""
import errno, resource, torch
from pathlib import Path
from swapper.errors import SwapIOError
from swapper.handle import AsyncIOHandle
memory = torch.zeros(1 << 16, dtype=torch.uint8)
start = -memory.data_ptr() % 4096
aligned, unaligned = memory[start : start + 8192], memory[start + 1 : start + 8193]
for backend in {CONFORMING!r}:
    handle = AsyncIOHandle(backend=backend, block_bytes=1 << 30, queue_depth=1)
    file = handle.open({str(tmp_path / "file")!r}, "rw")
    handle.write(file, aligned).wait()
    if file.direct:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
        for transfer in [handle.write(file, unaligned) for _ in range(3)]:
            try:
                transfer.wait(10)
            except SwapIOError as error:
                assert (error.errno, error.operation, error.path) == (errno.ENOMEM, "write", file.path), error
            else:
                raise AssertionError
        handle.write(file, aligned).wait(10)
        resource.setrlimit(resource.RLIMIT_AS, before)
    handle.write(file, unaligned).wait(10)
    handle.close()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("uring" not in AVAILABLE, reason="io_uring is not available")
def test_broken_backend_fails_its_transfers_and_later_ones(tmp_path: Path) -> None:
    """The ring's descriptor is replaced behind the handle's back."""

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
    with handle.open(tmp_path / "file", "rw") as file, open(os.devnull) as null:
        handle.write(file, random_bytes(10)).wait()
        os.dup2(null.fileno(), int(ring), inheritable=False)
        transfers = []
        while len(transfers) < 10:
            try:
                transfers.append(handle.write(file, random_bytes(4 * BLOCK)))
            except SwapIOError:
                break
        assert transfers
        for transfer in transfers:
            with pytest.raises(SwapIOError):
                transfer.wait(10)
        with pytest.raises(SwapIOError, match="io_uring_enter"):
            handle.write(file, random_bytes(10))
    with pytest.raises(SwapIOError, match="io_uring_enter"):
        handle.register(SLAB)
    handle.close()


# --- Life times -----------------------------------------------------------------------------------------------------


def test_transfer_tells_what_it_is(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, torch.zeros(10), 7)
        assert (transfer.operation, transfer.path) == ("write", str(tmp_path / "file"))
        assert (transfer.offset_bytes, transfer.length_bytes) == (7, 40)
        assert [transfer.wait(), transfer.wait(1.0)] == [40, 40]
        assert "done" in repr(transfer)


def test_wait_times_out_and_the_transfer_goes_on(backend: str, tmp_path: Path) -> None:
    with slow_handle(backend) as handle, handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, random_bytes(16 * BLOCK))
        for timeout in (0, 0.01, -1.0):
            with pytest.raises(TimeoutError):
                transfer.wait(timeout)
        assert not transfer.done()
        assert transfer.wait(30.0) == 16 * BLOCK


def test_dropped_transfer_keeps_its_memory_until_it_is_over(backend: str, tmp_path: Path) -> None:
    source = random_bytes(4 * BLOCK)
    expected = source.numpy().tobytes()
    with slow_handle(backend, 50_000) as handle, handle.open(tmp_path / "file", "rw") as file:
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
    with slow_handle(backend, 50_000) as handle, handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, source)
        source.data = torch.zeros(1, dtype=torch.uint8)
        transfer.wait()
    assert (tmp_path / "file").read_bytes() == expected


def test_close_completes_what_is_in_flight(backend: str, tmp_path: Path) -> None:
    source = random_bytes(BLOCK)
    handle = slow_handle(backend, 20_000, threads=2)
    with handle.open(tmp_path / "file", "rw") as file:
        transfers = [handle.write(file, source, i * BLOCK) for i in range(20)]
    handle.close()
    assert all(transfer.done() for transfer in transfers)
    wait_all(transfers)
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes() * 20
    with pytest.raises(SwapError, match="closed"):
        handle.write(file_again := AsyncIOHandle(backend=backend).open(tmp_path / "file", "rw"), source)
    file_again.close()


def test_collected_handle_completes_what_is_in_flight(backend: str, tmp_path: Path) -> None:
    handle = slow_handle(backend, 20_000)
    transfer = handle.write(handle.open(tmp_path / "file", "w"), random_bytes(8 * BLOCK))
    del handle
    gc.collect()
    assert transfer.done()
    assert transfer.wait() == 8 * BLOCK


def test_interpreter_exit_completes_what_is_in_flight(tmp_path: Path) -> None:
    program = f"""
import torch
from swapper.handle import AsyncIOHandle, FaultPlan
handles = []
for backend in {CONFORMING!r}:
    handle = AsyncIOHandle(backend=backend, block_bytes={BLOCK}, faults=FaultPlan(delay_us=50000))
    handle.write(handle.open({str(tmp_path)!r} + "/" + backend, "w"), torch.ones({8 * BLOCK}, dtype=torch.uint8))
    handles.append(handle)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
    for backend in CONFORMING:
        assert (tmp_path / backend).read_bytes() == b"\1" * (8 * BLOCK)


def test_ctrl_c_interrupts_the_wait_and_not_the_transfer(backend: str, tmp_path: Path) -> None:
    with slow_handle(backend) as handle, handle.open(tmp_path / "file", "rw") as file:
        transfer = handle.write(file, random_bytes(16 * BLOCK))
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()
        assert time.monotonic() - begin < 0.3 or transfer.done()
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
            interrupted = interrupted_at(n, start, "handle.py")
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
        interrupted = interrupted_at(n, lambda handle=handle: handle.in_flight, "handle.py")  # type: ignore[misc]
        assert (handle.in_flight, handle.unobserved_failures) == (0, 2), n
        with pytest.raises(SwapIOError, match="1 more transfers failed"):
            handle.close()
        if not interrupted:
            break
    assert n > 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_leaves_the_parent_alone(backend: str, tmp_path: Path) -> None:
    source, target = random_bytes(8 * BLOCK), torch.zeros(8 * BLOCK, dtype=torch.uint8)
    slab = Slab(4 << 20)
    with slow_handle(backend, 30_000) as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.register(slab)
        transfer = handle.write(file, source)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                uses = (
                    transfer.wait,
                    lambda: handle.write(file, source),
                    lambda: handle.open(tmp_path / "file"),
                    lambda: handle.register(slab),
                )
                refused = 0
                for use in uses:
                    try:
                        use()
                    except SwapError:
                        refused += 1
                transfer.done()
                handle.close()
                del transfer, handle, slab
                gc.collect()
                status = 0 if refused == len(uses) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transfer.wait() == 8 * BLOCK
        handle.read(file, target).wait()
        assert torch.equal(source, target)


def test_idle_handle_uses_no_processor_time(handle: AsyncIOHandle, tmp_path: Path) -> None:
    with handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, random_bytes(1000)).wait()
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


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
    monkeypatch.setattr("swapper.handle.probe", lambda: refused)
    with pytest.raises(SwapError, match=r"'uring' is not available here.*forbidden"):
        AsyncIOHandle(backend="uring")
    with AsyncIOHandle() as handle:
        assert handle.backend == "aio"
        assert [refusal.reason for refusal in handle.refusals] == ["forbidden", "forbidden"]


@pytest.mark.skipif("uring+fixed" not in AVAILABLE, reason="io_uring cannot register memory here")
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


@pytest.mark.unsanitized("it turns mlock into nothing")
@pytest.mark.skipif("uring+fixed" not in AVAILABLE, reason="io_uring cannot register memory here")
def test_refused_registration_falls_to_plain_io_uring_with_the_reason(tmp_path: Path) -> None:
    """In a process without CAP_IPC_LOCK and with a small RLIMIT_MEMLOCK."""
    program = f"""
import ctypes, os, resource, torch
from swapper.errors import SwapError
from swapper.handle import AsyncIOHandle, Slab, probe
handle = AsyncIOHandle()
strict = AsyncIOHandle(backend="uring+fixed")
assert handle.backend == "uring+fixed", handle
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
slab = Slab(64 << 20)
assert not slab.locked and "RLIMIT_MEMLOCK" in slab.lock_reason, slab.lock_reason
late = AsyncIOHandle()
if late.register(slab):
    raise SystemExit(77)
assert late.backend == "uring" and "RLIMIT_MEMLOCK" in late.refusals[-1].reason, late.refusals
try:
    AsyncIOHandle(backend="uring+fixed").register(slab)
except SwapError as error:
    assert "RLIMIT_MEMLOCK" in str(error)
else:
    raise AssertionError
memory = torch.frombuffer(slab, dtype=torch.uint8).fill_(3)
file = late.open({str(tmp_path / "dir" / "file")!r}, "rw")
late.write(file, memory).wait()
memory.zero_()
late.read(file, memory).wait()
assert bool((memory == 3).all())
"""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    (tmp_path / "dir").mkdir(mode=0o777)
    (tmp_path / "dir").chmod(0o777)
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], timeout=60, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel does not charge registered memory")
    assert done.returncode == 0, done.stderr


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
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_bytes()
    slab = Slab(64 << 20)
    assert resident_bytes() - before > 60 << 20
    ctypes.memset(slab.address, 1, slab.length_bytes)
    del slab
    gc.collect()
    assert resident_bytes() - before < 8 << 20


@pytest.mark.unsanitized("it turns mlock into nothing")
def test_small_slab_takes_no_more_than_its_pages() -> None:
    """Programs make many; with RLIMIT_MEMLOCK at 64 KiB even one huge page could not be locked."""

    def locked_bytes() -> int:
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
