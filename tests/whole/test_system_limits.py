"""What the system refuses for real: full drives, limits of the process, forbidden system calls, drives that fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import seccomp
import torch
from conformance import AVAILABLE, BLOCK, SUBJECTS, Subject, fails, raises_io, random_bytes
from isolation import alone, drop_capability_to_lock_memory
from locked_memory import needs_locked_memory
from torch import nn

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, Slab, probe

pytestmark = pytest.mark.timeout(240)

needs_filter = pytest.mark.skipif(not seccomp.supported(), reason="system call numbers of this machine are not known")
needs_uring = pytest.mark.skipif("uring" not in AVAILABLE, reason="io_uring is not available")
needs_registration = pytest.mark.skipif("uring+fixed" not in AVAILABLE, reason="io_uring cannot register memory here")
needs_aio = pytest.mark.skipif("aio" not in AVAILABLE, reason="kernel AIO is not available")


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    subject: Subject = request.param
    return subject


def limit(which: int, soft: int) -> None:
    """Never the hard limit: what was lowered could not be raised again."""
    hard = resource.getrlimit(which)[1]
    if resource.RLIM_INFINITY != hard < soft:
        pytest.skip(f"the hard limit is {hard}")
    resource.setrlimit(which, (soft, hard))


def everything_works(handle: AsyncIOHandle, directory: Path) -> None:
    """Transfers, aligned and not, in a slab and outside."""
    slab = Slab(2 << 20)
    handle.register(slab)
    for direct in (True, False):
        with handle.open(directory / f"works-{os.getpid()}", "rw", truncate=True, direct=direct) as file:
            memory = torch.frombuffer(slab, dtype=torch.uint8)
            for start, length, offset in ((0, 2 << 20, 0), (64, 300_000, 4096), (3, 5001, 77)):
                data = random_bytes(length, start)
                part = memory[start : start + length].copy_(data)
                handle.write(file, part, offset).wait()
                handle.read(file, part.zero_(), offset).wait()
                assert torch.equal(part, data)
                handle.read(file, target := torch.zeros_like(data), offset).wait()
                assert torch.equal(target, data)
    os.unlink(directory / f"works-{os.getpid()}")


def steps_of_an_optimizer_are_the_same(directory: Path) -> str:
    """A swapped optimizer ends in the bits of a plain one. Returns the backend that it found."""
    torch.set_num_threads(1)
    results = []
    backend = ""
    for swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if swapped:
            config = swapper.OffloadConfig(
                nvme_path=directory,
                pool_bytes="8MiB",
                bucket_bytes="512KiB",
                offload_optimizer={"device": "nvme"},
            )
            swapper.wrap_optimizer(optimizer, config)
            store = swapper.of(optimizer).store
            assert store is not None
            (drive,) = store._drives
            backend = drive.handle.backend
        for seed in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 256, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            optimizer.step()
        if swapped:
            swapper.of(optimizer).close()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(plain, swapped) for plain, swapped in zip(*results, strict=True))
    return backend


# --- Full drives and limits of a file -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def small_drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    directory = tmp_path_factory.mktemp("small_drive")
    mount, image = directory / "mount", directory / "image"
    mount.mkdir()
    if request.param == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", "size=8m", "swapper", str(mount)]]
    else:
        with image.open("wb") as file:
            file.truncate(8 << 20)
        commands = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a small file system: {error}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.root
def test_full_drive_is_an_error_and_room_makes_it_good(subject: Subject, small_drive: Path) -> None:
    data = random_bytes(16 << 20)
    with subject.handle(block_bytes=1 << 20, queue_depth=8) as handle:
        for offset in (0, 777):
            with subject.open(handle, small_drive / "file", truncate=True) as file:
                fails(handle.write(file, data, offset), errno.ENOSPC)
                with raises_io(errno.ENOSPC, "preallocate", file.path, 0, 64 << 20):
                    file.preallocate(64 << 20)
                # There is room again: the handle is as good as before, and so is the file.
                file.truncate(0)
                kept = data[: 4 << 20]
                assert handle.write(file, kept, offset).wait() == kept.numel()
                file.sync()
                assert handle.read(file, back := torch.zeros_like(kept), offset).wait() == kept.numel()
                assert torch.equal(back, kept)
                file.truncate(0)  # What keeps the file alive shall not keep the room.
            (small_drive / "file").unlink()


@pytest.mark.root
def test_drive_that_fills_up_spares_the_transfers_that_fit(subject: Subject, small_drive: Path) -> None:
    """Many at once, of which some find room: each tells the truth for itself."""
    data = random_bytes(1 << 20)
    with subject.handle(queue_depth=8) as handle, subject.open(handle, small_drive / "file", truncate=True) as file:
        transfers = [handle.write(file, data, i << 20) for i in range(16)]
        outcomes = []
        for transfer in transfers:
            try:
                transfer.wait()
                outcomes.append(True)
            except SwapIOError:
                fails(transfer, errno.ENOSPC)
                outcomes.append(False)
        assert True in outcomes and False in outcomes
        for number, good in enumerate(outcomes):
            if good:
                handle.read(file, back := torch.zeros_like(data), number << 20).wait()
                assert torch.equal(back, data)
        file.truncate(0)
    (small_drive / "file").unlink()


def beyond_the_file_size_limit(subject: Subject, directory: Path, length: int) -> None:
    # As a program that does not ignore it, which Python does: it would end the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    limit(resource.RLIMIT_FSIZE, length)
    data = random_bytes(4 * BLOCK)
    with subject.handle() as handle, subject.open(handle, directory / "file") as file:
        for start in (0, 5):
            fails(handle.write(file, data, start), errno.EFBIG)
        fails(handle.write(file, data[:4096], 8 * BLOCK), errno.EFBIG)
        fails(handle.write(file, data[:4096], length // 4096 * 4096 + 4096), errno.EFBIG)
        assert file.size_bytes() <= length
        assert handle.write(file, data[:length]).wait() == length
        assert handle.read(file, back := torch.zeros(length, dtype=torch.uint8)).wait() == length
        assert torch.equal(back, data[:length])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with raises_io(errno.EFBIG, "preallocate", file.path, 0, 8 * BLOCK):
            file.preallocate(8 * BLOCK)
        with raises_io(errno.EFBIG, "truncate", file.path, -1, 8 * BLOCK):
            file.truncate(8 * BLOCK)
        limit(resource.RLIMIT_FSIZE, 16 * BLOCK)
        assert handle.write(file, data).wait() == data.numel()


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 100, 100_001])
def test_file_size_limit_is_an_error_and_no_signal(subject: Subject, tmp_path: Path, length: int) -> None:
    alone(beyond_the_file_size_limit, subject, tmp_path, length)


# --- Memory ---------------------------------------------------------------------------------------------------------


def with_64_kib_of_locked_memory(directory: Path) -> None:
    drop_capability_to_lock_memory()
    limit(resource.RLIMIT_MEMLOCK, 64 << 10)
    slab = Slab(8 << 20)
    assert not slab.locked
    assert "RLIMIT_MEMLOCK is 65536 bytes" in slab.lock_reason
    for found in probe():
        if not found.available:
            continue
        with AsyncIOHandle(backend=found.backend) as handle:
            if found.backend == "uring+fixed":
                with contextlib.suppress(SwapError):
                    if handle.register(slab):
                        pytest.skip("this kernel does not charge registered memory")
                with pytest.raises(SwapError, match="RLIMIT_MEMLOCK"):
                    handle.register(slab)
                continue  # It insists on registration.
            everything_works(handle, directory)
            if found.backend == "uring":
                assert handle.backend == "uring"
                assert "RLIMIT_MEMLOCK" in handle.refusals[-1].reason
    with AsyncIOHandle() as handle:
        everything_works(handle, directory)
        assert handle.backend != "uring+fixed"
    assert steps_of_an_optimizer_are_the_same(directory) == "uring"


@needs_registration
@needs_locked_memory
@pytest.mark.unsanitized("it turns mlock into nothing")
def test_64_kib_of_locked_memory_cost_speed_only(tmp_path: Path) -> None:
    alone(with_64_kib_of_locked_memory, tmp_path)


def with_locked_memory_for_one_thread(directory: Path) -> None:
    drop_capability_to_lock_memory()
    # io_uring charges the user, not the process. Nobody else has this one.
    if os.geteuid() == 0:
        os.setresuid(1_000_000 + os.getpid(), -1, -1)
    limit(resource.RLIMIT_MEMLOCK, 8 << 20)
    slab, before = Slab(4 << 20), Slab(64 << 10)  # The smaller one is charged a huge page, if it has one.
    with AsyncIOHandle(backend="uring", threads=3) as three, AsyncIOHandle(backend="uring", threads=1) as one:
        assert three.backend == one.backend == "uring+fixed"
        assert three.register(before), three.refusals
        if three.register(slab):
            pytest.skip("this kernel does not charge registered memory")
        assert three.backend == "uring" and "RLIMIT_MEMLOCK" in three.refusals[-1].reason
        # None of the threads kept it, and what was registered before still works.
        for memory in (slab, before):
            part = torch.frombuffer(memory, dtype=torch.uint8)
            data = random_bytes(part.numel())
            with three.open(directory / "file", "rw") as file:
                three.write(file, part.copy_(data)).wait()
                three.read(file, part.zero_()).wait()
            assert torch.equal(part, data)
        three.unregister(before)
        assert one.register(slab), one.refusals
        everything_works(one, directory)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory of another user's, too. Not in pytest's: each run that starts shuts the way to it again."""
    with tempfile.TemporaryDirectory(prefix="swapper-test-") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@needs_registration
def test_registration_that_a_later_thread_cannot_have_is_undone(open_path: Path) -> None:
    alone(with_locked_memory_for_one_thread, open_path)


def without_memory_for_unaligned_data(directory: Path) -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    aligned, unaligned = memory[start : start + 8192], memory[start + 1 : start + 8193]
    for backend in AVAILABLE:
        with AsyncIOHandle(backend=backend, block_bytes=1 << 30, queue_depth=1) as handle:
            file = handle.open(directory / "file", "rw")
            handle.write(file, aligned).wait()
            if file.direct:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                before = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), before[1]))
                for transfer in [handle.write(file, unaligned) for _ in range(3)]:
                    fails(transfer, errno.ENOMEM)
                handle.write(file, aligned).wait(240)
                resource.setrlimit(resource.RLIMIT_AS, before)
            handle.write(file, unaligned).wait(240)


@pytest.mark.unsanitized("its shadow memory does not fit under RLIMIT_AS")
def test_no_memory_for_unaligned_data_fails_only_that_transfer(tmp_path: Path) -> None:
    alone(without_memory_for_unaligned_data, tmp_path)


# --- Descriptors and threads ----------------------------------------------------------------------------------------


def lowest_free_descriptor() -> int:
    """With none in use beyond it."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while (free := os.dup(0)) <= highest:
        pass
    os.close(free)
    return free


def with_few_descriptors(subject: Subject, directory: Path) -> None:
    data = random_bytes(BLOCK)
    (directory / "file").write_bytes(bytes(BLOCK))
    with subject.handle() as handle, subject.open(handle, directory / "file") as file:
        free = lowest_free_descriptor()
        # With room for one more a file would only get its buffered descriptor.
        for room in (0, 1):
            limit(resource.RLIMIT_NOFILE, free + room)
            if room == 0 or file.direct:
                with raises_io(errno.EMFILE, "open", directory / "file"):
                    subject.open(handle, directory / "file")
            assert handle.write(file, data).wait() == BLOCK
            if room:
                assert os.dup(0) == free, "a descriptor was left open"
                os.close(free)
        limit(resource.RLIMIT_NOFILE, free + 2)
        with subject.open(handle, directory / "file") as again:
            assert again.direct == file.direct


def test_too_many_open_files_is_an_error_and_not_a_slow_file(subject: Subject, tmp_path: Path) -> None:
    alone(with_few_descriptors, subject, tmp_path)


def without_descriptors_for_a_ring(directory: Path) -> None:
    free = lowest_free_descriptor()
    limit(resource.RLIMIT_NOFILE, free)
    handle = AsyncIOHandle()
    limit(resource.RLIMIT_NOFILE, free + 100)
    with handle:
        assert handle.backend == "threads"
        assert [refusal.backend for refusal in handle.refusals] == ["uring+fixed", "uring", "aio"]
        assert all("Too many open files" in refusal.reason for refusal in handle.refusals)
        everything_works(handle, directory)


def test_no_descriptor_for_a_ring_falls_to_threads_with_the_reason(tmp_path: Path) -> None:
    alone(without_descriptors_for_a_ring, tmp_path)


def with_few_threads(backend: str, directory: Path) -> None:
    probe()
    with AsyncIOHandle(backend=backend) as handle:
        everything_works(handle, directory)
    if os.geteuid() == 0:
        uid = 1_000_000 + os.getpid()  # Nobody else has it: the limit counts all threads of a user.
        os.setresuid(uid, uid, uid)
    running = len(os.listdir("/proc/self/task"))
    limit(resource.RLIMIT_NPROC, running + 5)
    with pytest.raises(SwapError, match=r"start I/O thread.*temporarily unavailable"):
        AsyncIOHandle(backend=backend, threads=40)
    deadline = time.monotonic() + 240  # A thread that was joined may still be listed.
    while len(os.listdir("/proc/self/task")) > running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= running
    # Some threads are enough for a handle that asks for one.
    with AsyncIOHandle(backend=backend, threads=1) as handle:
        everything_works(handle, directory)
        # The kernel's own helpers of io_uring count as well.
        limit(resource.RLIMIT_NPROC, 1)
        everything_works(handle, directory)
    limit(resource.RLIMIT_NPROC, running + 500)
    with AsyncIOHandle(backend=backend, threads=40) as handle:
        everything_works(handle, directory)


@pytest.mark.root  # A user of its own: others of this user would be counted.
@pytest.mark.parametrize("backend", [backend for backend in AVAILABLE if backend != "uring+fixed"])
def test_too_many_threads_is_an_error_that_leaves_none(open_path: Path, backend: str) -> None:
    alone(with_few_threads, backend, open_path)


# --- Forbidden system calls -----------------------------------------------------------------------------------------


def with_uring_forbidden(directory: Path, number: int) -> None:
    seccomp.refuse({"io_uring_setup": number, "io_uring_enter": number, "io_uring_register": number})
    with AsyncIOHandle() as handle:
        assert handle.backend == "aio"
        assert [refusal.backend for refusal in handle.refusals] == ["uring+fixed", "uring"]
        for refusal in handle.refusals:
            assert "io_uring_setup" in refusal.reason and os.strerror(number) in refusal.reason
            assert "container" in refusal.reason
        everything_works(handle, directory)
    for backend in ("uring", "uring+fixed"):
        with pytest.raises(SwapError, match=f"'{backend.replace('+', '.')}' is not available here: .*io_uring_setup"):
            AsyncIOHandle(backend=backend)
    assert steps_of_an_optimizer_are_the_same(directory) == "aio"


@needs_filter
@needs_aio
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
def test_forbidden_io_uring_falls_to_aio_with_the_reason(tmp_path: Path, number: int) -> None:
    alone(with_uring_forbidden, tmp_path, number)


def with_uring_and_aio_forbidden(directory: Path, aio_number: int) -> None:
    seccomp.refuse({"io_uring_setup": errno.EPERM, "io_setup": aio_number})
    with AsyncIOHandle() as handle:
        assert handle.backend == "threads"
        assert [refusal.backend for refusal in handle.refusals] == ["uring+fixed", "uring", "aio"]
        reason = handle.refusals[-1].reason
        assert "io_setup" in reason and os.strerror(aio_number) in reason
        assert ("fs.aio-max-nr is used up" in reason) == (aio_number == errno.EAGAIN)
        everything_works(handle, directory)
    assert steps_of_an_optimizer_are_the_same(directory) == "threads"


@needs_filter
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EAGAIN], ids=errno.errorcode.get)
def test_forbidden_io_uring_and_aio_fall_to_threads_with_the_reason(tmp_path: Path, number: int) -> None:
    alone(with_uring_and_aio_forbidden, tmp_path, number)


def with_entering_forbidden(directory: Path) -> None:
    seccomp.refuse({"io_uring_enter": errno.EPERM})
    with AsyncIOHandle() as handle:
        assert handle.backend not in ("uring", "uring+fixed")
        assert all("io_uring_enter" in refusal.reason for refusal in handle.refusals[:2])
        everything_works(handle, directory)


@needs_filter
@needs_uring
def test_ring_that_may_be_made_and_not_entered_is_refused(tmp_path: Path) -> None:
    alone(with_entering_forbidden, tmp_path)


def with_entering_refused_later(directory: Path, number: int) -> None:
    handle = AsyncIOHandle(backend="uring", block_bytes=BLOCK, queue_depth=8)
    everything_works(handle, directory)
    with handle.open(directory / "file", "rw") as file:
        seccomp.refuse({"io_uring_enter": number})
        transfers = []
        with contextlib.suppress(SwapIOError):  # The thread may have ended already.
            for _ in range(10):
                transfers.append(handle.write(file, torch.ones(3 * BLOCK, dtype=torch.uint8)))
        assert transfers
        for transfer in transfers:
            with raises_io(number, "write", file.path, 0, 3 * BLOCK):
                transfer.wait(240)
        with pytest.raises(SwapIOError, match="given up after 200 tries" if number == errno.EAGAIN else "I/O thread"):
            transfers[0].wait()
        if number != errno.EAGAIN:
            with pytest.raises(SwapIOError, match="io_uring_enter"):
                handle.write(file, torch.ones(1))
    handle.close()


@pytest.mark.long
@needs_filter
@needs_uring
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EPERM], ids=errno.errorcode.get)
def test_ring_that_can_no_longer_be_entered_fails_with_the_reason(tmp_path: Path, number: int) -> None:
    alone(with_entering_refused_later, tmp_path, number)


def with_idle_ring_refused(directory: Path) -> None:
    """Nothing to submit, and waiting is refused: this ends too, with the reason."""
    handle = AsyncIOHandle(backend="uring")
    seccomp.refuse({"io_uring_enter": errno.EAGAIN})
    slab = Slab(1 << 20)
    handle.register(slab)  # Wakes the thread.
    deadline = time.monotonic() + 240
    with handle.open(directory / "file", "rw") as file:
        while time.monotonic() < deadline:
            time.sleep(0.2)
            try:
                with contextlib.suppress(TimeoutError):
                    handle.write(file, torch.zeros(0)).wait(0)
            except SwapIOError as error:
                assert (error.errno, error.operation) == (errno.EAGAIN, "io_uring_enter")
                break
        else:
            raise AssertionError("it went on for ever")
    handle.close()


@pytest.mark.long
@needs_filter
@needs_uring
def test_idle_ring_that_can_no_longer_wait_gives_up(tmp_path: Path) -> None:
    alone(with_idle_ring_refused, tmp_path)


def with_all_aio_contexts_taken(directory: Path) -> None:
    # Made ready first and held for an instant: the limit is the machine's, and others may want one too. Whatever
    # becomes of this process, its contexts go with it.
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp.refuse({"io_uring_setup": errno.EPERM})
    setup, destroy = ((206, 207) if os.uname().machine == "x86_64" else (0, 1))[:2]
    taken = []
    count = 1 << 30
    while count > 0:
        context = ctypes.c_ulong()
        if libc.syscall(setup, ctypes.c_uint(count), ctypes.byref(context)) == 0:
            taken.append(context)
        else:
            count //= 2
    try:
        handle = AsyncIOHandle()
    finally:
        for context in taken:
            libc.syscall(destroy, context)
    with handle:
        assert taken and handle.backend == "threads"
        assert "io_setup" in handle.refusals[-1].reason and "fs.aio-max-nr is used up" in handle.refusals[-1].reason
        everything_works(handle, directory)


@needs_filter
@needs_aio
def test_used_up_aio_contexts_fall_to_threads_with_the_reason(tmp_path: Path) -> None:
    alone(with_all_aio_contexts_taken, tmp_path)


# --- Drives that fail -----------------------------------------------------------------------------------------------


@pytest.fixture
def loop_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A block device of 16 MiB and the file below it, which is on a tmpfs of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make a loop device")
    mount = tmp_path / "mount"
    mount.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "swapper", mount], check=True, capture_output=True)
            stack.callback(subprocess.run, ["umount", "-l", mount], check=True)
            with (mount / "image").open("wb") as file:
                file.truncate(16 << 20)
            made = subprocess.run(["losetup", "-f", "--show", mount / "image"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a loop device: {error}")
        device = Path(made.stdout.decode().strip())
        stack.callback(subprocess.run, ["losetup", "-d", device], check=True)
        yield device, mount / "image"


@pytest.mark.root
def test_drive_that_cannot_be_read_is_an_error(subject: Subject, loop_device: tuple[Path, Path]) -> None:
    device, image = loop_device
    good, bad = random_bytes(1 << 20), 2 << 20
    with image.open("r+b") as below:
        below.write(good.numpy().tobytes())
    os.truncate(image, bad)
    with subject.handle() as handle, subject.open(handle, device) as file:
        assert handle.read(file, back := torch.zeros_like(good)).wait() == good.numel()
        assert torch.equal(back, good)
        for offset, length in ((bad, BLOCK), (bad - 2 * BLOCK, 6 * BLOCK), (bad + 100, 3 * BLOCK), (bad + 1, 1)):
            fails(handle.read(file, torch.zeros(length, dtype=torch.uint8), offset), errno.EIO)
        assert handle.read(file, back.zero_()).wait() == good.numel()
        assert torch.equal(back, good)


@pytest.mark.root
def test_drive_that_cannot_be_written_is_an_error(subject: Subject, loop_device: tuple[Path, Path]) -> None:
    device, _ = loop_device
    data = random_bytes(12 << 20)
    with subject.handle(block_bytes=1 << 20) as handle, subject.open(handle, device) as file:
        transfer = handle.write(file, data)
        if subject.direct:
            fails(transfer, errno.ENOSPC)
        else:
            # The page cache promises nothing before `sync`, and then says so.
            assert transfer.wait() == data.numel()
            with pytest.raises(SwapIOError) as raised:
                file.sync()
            assert (raised.value.errno, raised.value.operation) in ((errno.EIO, "sync"), (errno.ENOSPC, "sync"))


# --- Signals --------------------------------------------------------------------------------------------------------


def stopped_and_interrupted(subject: Subject, directory: Path) -> None:
    """Transfers are right whenever the process is stopped, goes on, or gets Ctrl-C."""
    interrupted = 0
    interruptible = False

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal interruptible
        if interruptible:
            interruptible = False  # Else another may strike before it is caught.
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    data = random_bytes(5 * BLOCK + 13)
    with subject.handle() as handle, subject.open(handle, directory / "file") as file:
        helper = os.fork()
        if helper == 0:
            for turn in range(120):
                for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGINT):
                    os.kill(os.getppid(), number)
                    time.sleep(0.0003 * (1 + turn % 5))
            os._exit(0)
        while os.waitpid(helper, os.WNOHANG)[0] != helper:
            memory = data.clone()
            try:
                interruptible = True
                handle.write(file, memory).wait()
                handle.read(file, memory.zero_()).wait()
                interruptible = False
            except KeyboardInterrupt:
                interrupted += 1
                # What was interrupted goes on: the bytes in the file are those in memory, and both may be zeros.
                while handle.in_flight:
                    time.sleep(0.0005)
            else:
                assert torch.equal(memory, data)
        handle.write(file, data).wait()
        handle.read(file, memory.zero_()).wait()
        assert torch.equal(memory, data)
        assert handle.unobserved_failures == 0
    assert interrupted > 0


@pytest.mark.long
def test_signals_disturb_no_transfer(subject: Subject, tmp_path: Path) -> None:
    alone(stopped_and_interrupted, subject, tmp_path)
