"""The conformance suite on every backend of this machine, and what needs time or gigabytes."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from address_range import WINDOW_BYTES, AddressRange
from conformance import BLOCK, SUBJECTS, Conformance, Subject, fails, random_bytes, wait_all
from isolation import alone
from still_drive import still

from swapper.errors import SwapError
from swapper.io.handle import FaultPlan, Slab

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    subject: Subject = request.param
    return subject


@pytest.mark.sampled(8)
class TestConformance(Conformance):
    @pytest.mark.long
    def test_many_handles_at_once(self, subject: Subject, tmp_path: Path) -> None:
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(subject.handle(queue_depth=2)) for _ in range(64)]
            file = stack.enter_context(subject.open(handles[0], tmp_path / "file"))
            size = 5000
            data = random_bytes(64 * size)
            source, target = subject.place(data.clone()), subject.place(torch.zeros_like(data))
            pieces = [slice(i * size, (i + 1) * size) for i in range(64)]
            wait_all([handle.write(file, source[at], at.start) for handle, at in zip(handles, pieces, strict=True)])
            handles.reverse()
            wait_all([handle.read(file, target[at], at.start) for handle, at in zip(handles, pieces, strict=True)])
            assert torch.equal(subject.content(target), data)


@pytest.mark.parametrize("offset", [1, 4095, 4096, BLOCK + 100])
def test_only_the_edges_of_an_unaligned_transfer_are_cut_off(subject: Subject, tmp_path: Path, offset: int) -> None:
    """The rest goes in whole blocks: directly, where the file is direct."""
    plan = FaultPlan()
    length = 5 * BLOCK + 10_000
    with subject.handle(faults=plan) as handle, subject.open(handle, tmp_path / "file") as file:
        page = file.alignment_bytes
        assert (page >= 4096) == subject.direct
        head = min(-offset % page, length)
        tail = (length - head) % page
        blocks = -(-(length - head - tail) // BLOCK)
        handle.write(file, subject.place(random_bytes(length)), offset).wait()
        assert plan.writes == (head > 0) + blocks + (tail > 0)


def read_into_what_is_read_only(subject: Subject, directory: str, misalignment: int) -> None:
    for name, length in (("file", 3 * BLOCK), ("mapped", 4 * BLOCK)):
        (Path(directory) / name).write_bytes(bytes(length))
    with open(Path(directory) / "mapped", "rb") as mapped, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that it cannot be written to.
        memory = mmap.mmap(mapped.fileno(), 0, access=mmap.ACCESS_READ)
        target = torch.frombuffer(memory, dtype=torch.uint8, offset=misalignment, count=3 * BLOCK)
    good = torch.ones(3 * BLOCK, dtype=torch.uint8)
    with subject.handle() as handle, subject.open(handle, Path(directory) / "file", "r") as file:
        fails(handle.read(file, target), errno.EFAULT)
        assert handle.read(file, good).wait() == good.numel()
    assert not good.any()


@pytest.mark.parametrize("misalignment", [0, 1, 4095])
def test_a_read_into_a_read_only_mapping_fails(subject: Subject, tmp_path: Path, misalignment: int) -> None:
    """Unaligned memory is copied to by a thread of ours, which a mere store would end, with the process."""
    alone(read_into_what_is_read_only, subject, str(tmp_path), misalignment)


# --- Ends, with transfers in flight ---------------------------------------------------------------------------------


def slow(delay_us: int, seed: int = 1) -> FaultPlan:
    """Completions come up to that late."""
    return FaultPlan(seed=seed, delay_us=delay_us)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("length", [0, 1, BLOCK, 2 * BLOCK + 100])
def test_file_cut_short_while_a_read_is_queued_fails(subject: Subject, tmp_path: Path, length: int) -> None:
    data = random_bytes(16 * BLOCK)
    (tmp_path / "file").write_bytes(data.numpy().tobytes())
    plan = FaultPlan()
    with (
        subject.handle(queue_depth=1, faults=plan) as handle,
        subject.open(handle, tmp_path / "file") as file,
    ):
        with still(plan):
            transfer = handle.read(file, subject.place(torch.zeros_like(data)))
            queued = handle.read(file, subject.place(torch.zeros_like(data)))
            os.truncate(tmp_path / "file", length)
        fails(transfer, errno.ENODATA)
        fails(queued, errno.ENODATA)
        # Longer again: what was cut off reads as zeros, and that is what the file holds.
        os.truncate(tmp_path / "file", data.numel())
        target = subject.place(torch.full_like(data, 0x5C))
        handle.read(file, target).wait()
        assert torch.equal(subject.content(target)[:length], data[:length])
        assert not subject.content(target)[length:].any()


def test_close_while_others_wait_lets_them_finish(subject: Subject, tmp_path: Path) -> None:
    data = random_bytes(BLOCK)
    handle = subject.handle(threads=2, faults=slow(20_000))
    outcomes: list[int] = []
    refused: list[str] = []
    with subject.open(handle, tmp_path / "file") as file:

        def work(worker: int) -> None:
            try:
                while True:
                    outcomes.append(handle.write(file, subject.place(data), worker * BLOCK).wait())
            except SwapError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        while len(outcomes) < 6:
            time.sleep(0.001)
        closers = [threading.Thread(target=handle.close) for _ in range(3)]
        for thread in closers:
            thread.start()
        for thread in closers + threads:
            thread.join()
    assert refused == ["the I/O handle is closed"] * 6
    assert set(outcomes) == {BLOCK}
    handle.close()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes() * 6


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_leaves_the_parent_alone(subject: Subject, tmp_path: Path) -> None:
    data = random_bytes(8 * BLOCK)
    slab = Slab(4 << 20)
    (tmp_path / "read").write_bytes(data.numpy().tobytes())
    with (
        subject.handle(queue_depth=1, faults=slow(20_000)) as handle,
        subject.open(handle, tmp_path / "file") as file,
        subject.open(handle, tmp_path / "read", "r") as other,
    ):
        handle.register(slab)
        target = torch.frombuffer(slab, dtype=torch.uint8)[: data.numel()]
        transfers = [handle.write(file, subject.place(data)), handle.read(other, subject.place(target))]
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # A child that hangs shall not outlive the run.
            status = 1
            try:
                uses: list[Callable[[], object]] = [
                    transfers[0].wait,
                    transfers[0].wait_quietly,
                    lambda: handle.write(file, data),
                    lambda: handle.read(file, data),
                    lambda: subject.open(handle, tmp_path / "file"),
                    lambda: handle.register(slab),
                    lambda: handle.unregister(slab),
                    lambda: handle.in_flight,
                ]
                refused = 0
                for use in uses:
                    try:
                        use()
                    except SwapError:
                        refused += 1
                transfers[0].done()
                handle.close()
                # A handle of its own is as good as any.
                mine = data[:5000].clone()  # So small that torch makes no threads, which do not survive a fork.
                with subject.handle() as new, subject.open(new, tmp_path / "child") as own:
                    new.write(own, mine).wait()
                    new.read(own, mine.zero_()).wait()
                right = torch.equal(mine, data[:5000])
                del transfers, handle, slab
                gc.collect()
                status = 0 if refused == len(uses) and right else 2
            finally:
                os._exit(status)
        # The child is over, or not, while the parent's transfers go on.
        wait_all(transfers)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(subject.content(target), data)
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


# --- More than 2 GiB, more than 4 GiB -------------------------------------------------------------------------------

EDGES = [0, 1 << 31, 1 << 32]
FAR = 5 << 30  # beyond both limits


@pytest.fixture
def large_file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "large"
    (tmp_path / "large").unlink(missing_ok=True)


@pytest.fixture
def sparse_file(subject: Subject, large_file: Path) -> Iterator[Path]:
    """An empty file of which holes are read fast. The page cache of a file system on a drive keeps pages of zeros."""
    if subject.direct:
        yield large_file
        return
    memory = os.memfd_create("sparse_file")
    yield Path(f"/proc/self/fd/{memory}")
    os.close(memory)


@pytest.fixture
def address_range(length: int) -> Iterator[AddressRange]:
    memory = AddressRange(length, [*EDGES, length])
    yield memory
    memory.close()


@pytest.mark.parametrize("offset", [(1 << 31) - 5, 1 << 31, (1 << 32) - 5, 1 << 32, FAR + 1, (1 << 43) - BLOCK])
def test_transfers_beyond_2_and_4_gib(subject: Subject, large_file: Path, offset: int) -> None:
    data = random_bytes(2 * BLOCK + 13, offset)
    with subject.handle() as handle, subject.open(handle, large_file) as file:
        target = subject.place(torch.zeros_like(data))
        assert handle.write(file, subject.place(data.clone()), offset).wait() == data.numel()
        assert file.size_bytes() == offset + data.numel()
        assert handle.read(file, target, offset).wait() == data.numel()
        assert torch.equal(subject.content(target), data)
        fails(handle.read(file, target, offset + 1), errno.ENODATA)
        # Whoever lost the upper bits has written here.
        head = subject.place(torch.ones(4096, dtype=torch.uint8))
        for low in {offset % (1 << 31), offset % (1 << 32)} - {offset}:
            handle.read(file, head, low // 4096 * 4096).wait()
            assert not subject.content(head).any()


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [(1 << 31) + BLOCK + 13, (1 << 32) + BLOCK + 13], ids=["2gib", "4gib"])
def test_single_read_of_more_than_2_and_4_gib(
    subject: Subject, sparse_file: Path, address_range: AddressRange, length: int
) -> None:
    """From a sparse file, which has bytes at the edges only."""
    edges = [edge for edge in [*EDGES, length] if edge <= length]
    content = {}
    with sparse_file.open("wb") as file:
        file.truncate(FAR + length)
        for edge in edges:
            start, stop = max(edge - 5000, 0), min(edge + 5000, length)
            content[start] = random_bytes(stop - start, edge)
            os.pwrite(file.fileno(), content[start].numpy().tobytes(), FAR + start)
    for window in [*address_range.real, address_range.shared]:
        address_range.window(window).fill_(0x5C)
    with subject.handle(block_bytes=1 << 24) as handle, subject.open(handle, sparse_file, "r") as opened:
        assert handle.read(opened, address_range.tensor, FAR).wait() == length
    for start, expected in content.items():
        assert torch.equal(address_range.tensor[start : start + expected.numel()], expected)
        address_range.tensor[start : start + expected.numel()].zero_()
    for window in [*address_range.real, address_range.shared]:
        assert not address_range.window(window).any()


# Four gigabytes in the page cache take seconds and memory: once is enough.
@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [(1 << 32) + BLOCK + 13], ids=["4gib"])
@pytest.mark.parametrize(
    "subject", [s for s in SUBJECTS if s.direct or s.backend == "buffered"], ids=str, indirect=True
)
def test_single_write_of_more_than_4_gib(
    subject: Subject, large_file: Path, address_range: AddressRange, length: int
) -> None:
    for seed, window in enumerate([*address_range.real, address_range.shared]):
        memory = address_range.window(window)
        memory.copy_(random_bytes(memory.numel(), seed))
    offset = 4096
    with subject.handle(block_bytes=1 << 24) as handle, subject.open(handle, large_file) as file:
        assert handle.write(file, address_range.tensor, offset).wait() == length
        assert file.size_bytes() == offset + length
    with large_file.open("rb") as written:
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for window in range(-(-length // WINDOW_BYTES)):
            memory = address_range.window(window)
            numel = memory.numel() if window in address_range.real else 4096
            there = os.pread(written.fileno(), numel, offset + window * WINDOW_BYTES)
            assert there == memory[:numel].numpy().tobytes(), f"window {window}"
        assert os.pread(written.fileno(), 4096, 0) == bytes(4096)


@pytest.mark.parametrize("length", [(1 << 32) + BLOCK + 13], ids=["4gib"])
@pytest.mark.parametrize("subject", [s for s in SUBJECTS if not s.direct], ids=str, indirect=True)
def test_single_write_of_more_than_4_gib_through_the_page_cache_is_counted(
    subject: Subject, address_range: AddressRange, length: int
) -> None:
    with (
        subject.handle(block_bytes=1 << 24, faults=(plan := FaultPlan())) as handle,
        subject.open(handle, Path("/dev/null"), "w") as file,
    ):
        assert handle.write(file, address_range.tensor, 4096).wait() == length
        assert plan.writes == -(-length // (1 << 24))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [(1 << 30) + 13], ids=["1gib"])
def test_requests_of_the_largest_size(
    subject: Subject, sparse_file: Path, address_range: AddressRange, length: int
) -> None:
    with sparse_file.open("wb") as file:
        file.truncate(length)
        os.pwrite(file.fileno(), b"x" * 20, length - 20)
    address_range.tensor[-100:].fill_(0x5C)
    with (
        subject.handle(block_bytes=1 << 30, queue_depth=1) as handle,
        subject.open(handle, sparse_file, "r") as opened,
    ):
        assert handle.read(opened, address_range.tensor).wait() == length
    assert bytes(address_range.tensor[-100:].tolist()) == bytes(80) + b"x" * 20
