"""Programs as they are written for DeepNVMe, and what must not go wrong quietly in them.

The programs are written from the description of the interface; only the line that imports is ours.
"""

from __future__ import annotations

import errno
import functools
import gc
import inspect
import itertools
import logging
import os
import random
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepnvme_programs import DEVICES, NEEDS_LOCK, contents, full_errno, locked_bytes, run, settle
from interrupts import interrupted_at
from small_drives import random_bytes
from still_drive import still

from swapper import deepnvme
from swapper.deepnvme import (
    AsyncIOBuilder,
    GDSBuilder,
    UtilsBuilder,
    aio_handle,
    cast_to_byte_tensor,
    gds_handle,
    operations,
)
from swapper.errors import SwapError, SwapIOError
from swapper.io.gds import probe_cufile
from swapper.io.handle import FaultPlan

pytestmark = pytest.mark.timeout(240)


BLOCK = 1024
"""As programs have it that were tried with DeepNVMe: less than a page."""


IO_BYTES = 4 * BLOCK


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., aio_handle]:
    """Makes an `aio_handle` in which things go wrong."""

    def make(faults: FaultPlan, block_size: int = 4096, **options: Any) -> aio_handle:
        with monkeypatch.context() as patch:
            made = staticmethod(functools.partial(aio_handle._handle_type, faults=faults))
            patch.setattr(aio_handle, "_handle_type", made)
            return aio_handle(block_size, **options)

    return make


# --- The interface --------------------------------------------------------------------------------------------------

TRANSFER = {"buffer": ..., "filename": ..., "file_offset": 0}
VALIDATED = {"buffer": ..., "filename": ..., "validate": ..., "file_offset": 0}
ONE_OR_OTHER = {"buffer": ..., "filename": ..., "validate": ..., "async_": None, "file_offset": 0}
INTERFACE = {
    "__init__": {
        "block_size": 1048576,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": False,
        "intra_op_parallelism": 1,
    },
    "read": VALIDATED,
    "write": VALIDATED,
    "pread": ONE_OR_OTHER,
    "pwrite": ONE_OR_OTHER,
    "sync_pread": TRANSFER,
    "sync_pwrite": TRANSFER,
    "async_pread": TRANSFER,
    "async_pwrite": {"buffer": ..., "filename": None, "file_offset": 0},  # `fd` in place of `filename` has no place
    "wait": {},
    "new_cpu_locked_tensor": {"num_elem": ..., "example_tenosr": ...},
    "free_cpu_locked_tensor": {"tensor": ...},
    "is_pinned": {"buffer": ...},
    "get_block_size": {},
    "get_queue_depth": {},
    "get_single_submit": {},
    "get_overlap_events": {},
    "get_intra_op_parallelism": {},
    "get_alignment": {},
}
DEVICE_INTERFACE = {
    "new_pinned_device_tensor": {"num_elem": ..., "example_tenosr": ...},
    "free_pinned_device_tensor": {"tensor": ...},
    "pin_device_tensor": {"tensor": ...},
    "unpin_device_tensor": {"tensor": ...},
}


def test_names_order_and_defaults_of_arguments(make: type[aio_handle]) -> None:
    wanted: dict[str, dict[str, object]] = INTERFACE | (DEVICE_INTERFACE if make is gds_handle else {})
    for method, arguments in wanted.items():
        found = {
            name: ... if parameter.default is parameter.empty else parameter.default
            for name, parameter in inspect.signature(getattr(make, method)).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name != "self"
        }
        assert list(found.items()) == list(arguments.items()), method


def test_defaults(make: type[aio_handle]) -> None:
    h = make()
    assert (h.get_block_size(), h.get_queue_depth(), h.get_intra_op_parallelism()) == (1 << 20, 128, 1)
    assert h.get_single_submit() is False and h.get_overlap_events() is False


@pytest.mark.parametrize("single_submit", [True, False])
@pytest.mark.parametrize("overlap_events", [True, False])
def test_options_are_passed_on_and_given_back(
    make: type[aio_handle], single_submit: bool, overlap_events: bool
) -> None:
    h = make(BLOCK, 2, single_submit, overlap_events, 3)
    assert (h.get_block_size(), h.get_queue_depth(), h.get_intra_op_parallelism()) == (BLOCK, 2, 3)
    assert (h.get_single_submit(), h.get_overlap_events()) == (single_submit, overlap_events)
    below = h._handle
    assert (below.block_bytes, below.queue_depth, below.threads) == (4096, 2, 3)
    assert (below.single_submit, below.overlap_events) == (single_submit, overlap_events)
    # That of files that DeepNVMe wrote: a program pads to it, and reads what it padded.
    assert h.get_alignment() == (512 if make is gds_handle else 3 * 512)


def test_options_beyond_what_there_is_are_the_nearest() -> None:
    h = aio_handle(3 << 30, 65536, False, False, 1)
    assert (h.get_block_size(), h.get_queue_depth()) == (3 << 30, 65536)
    assert (h._handle.block_bytes, h._handle.queue_depth) == (1 << 30, 4096)
    assert aio_handle(4097)._handle.block_bytes == 8192


@pytest.mark.parametrize("name", ["block_size", "queue_depth", "intra_op_parallelism"])
def test_options_that_make_no_sense_are_refused_by_name(make: type[aio_handle], name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ValueError, match=name):
            make(**{name: value})
    with pytest.raises(TypeError):
        make(**{name: 1.5})


def test_builders() -> None:
    assert AsyncIOBuilder().is_compatible() and AsyncIOBuilder().is_compatible(verbose=True)
    loaded = AsyncIOBuilder().load()
    assert loaded.aio_handle is aio_handle
    assert loaded.aio_read is deepnvme.aio_read and loaded.deepspeed_memcpy is deepnvme.deepspeed_memcpy
    assert GDSBuilder().load(verbose=False).gds_handle is gds_handle
    assert UtilsBuilder().load().cast_to_byte_tensor is cast_to_byte_tensor
    assert (AsyncIOBuilder.NAME, GDSBuilder.NAME, UtilsBuilder.NAME) == ("async_io", "gds", "utils")


def test_gds_is_compatible_where_cufile_is(caplog: pytest.LogCaptureFixture) -> None:
    found = probe_cufile()
    assert GDSBuilder().is_compatible() == found.available and not caplog.records
    assert GDSBuilder().is_compatible(verbose=True) == found.available
    assert found.available == (not caplog.records) and found.reason in caplog.text


def test_the_fourth_argument_is_async_however_it_comes(tmp_path: Path) -> None:
    h, t, path = aio_handle(), random_bytes(IO_BYTES), str(tmp_path / "file")
    assert h.pwrite(t, path, False, False) == 1
    assert h.pwrite(t, path, False, False, IO_BYTES) == 1
    assert h.pwrite(t, path, False, True) == 0 and h.wait() == 1
    assert h.pwrite(buffer=t, filename=path, validate=False, **{"async": True}) == 0 and h.wait() == 1
    assert h.pread(t, path, False, **{"async": False}) == 1
    assert h.pread(t, path, False, file_offset=0, **{"async": True}) == 0 and h.wait() == 1
    assert h.pread(t, path, False, async_=True) == 0 and h.wait() == 1
    for call in (h.pread, h.pwrite):
        with pytest.raises(TypeError, match="missing"):
            call(t, path, False)
        with pytest.raises(TypeError, match="twice"):
            call(t, path, False, True, **{"async": True})
        with pytest.raises(TypeError, match="offset"):
            call(t, path, False, True, offset=3)
    with pytest.raises(SwapError, match="wait"):
        h.wait()


# --- Programs -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(32)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pinned", [pytest.param(True, marks=NEEDS_LOCK), False], ids=["locked", "pageable"])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("parallel", [1, 2])
@pytest.mark.parametrize("single_submit, overlap_events", list(itertools.product([True, False], repeat=2)))
def test_program_that_stores_and_loads(
    make: type[aio_handle],
    tmp_path: Path,
    device: str,
    pinned: bool,
    asynchronous: bool,
    parallel: int,
    single_submit: bool,
    overlap_events: bool,
) -> None:
    h = make(BLOCK, 2, single_submit, overlap_events, parallel)
    # Lengths that DeepNVMe can do, and such that it fails at or gets wrong.
    for size in (IO_BYTES, 0, 1, 511, 4097, 10 * BLOCK + 13, (1 << 20) + 5):
        path = str(tmp_path / str(size))
        source = random_bytes(size, size).to(device)
        target = torch.zeros_like(source)
        if pinned and device == "cpu":
            locked = [h.new_cpu_locked_tensor(size, source) for _ in range(2)]
            assert all(h.is_pinned(t) for t in locked)
            locked[0].copy_(source)
            source, target = locked
        if asynchronous:
            assert h.async_pwrite(source, path) == 0
            assert h.wait() == 1
            assert h.async_pread(target, path) == 0
            assert h.wait() == 1
        else:
            assert h.sync_pwrite(source, path) == 1
            assert h.sync_pread(target, path) == 1
        assert os.path.getsize(path) == size
        assert Path(path).read_bytes() == contents(source) == contents(target)
        if pinned and device == "cpu":
            assert h.free_cpu_locked_tensor(source) and h.free_cpu_locked_tensor(target)


@NEEDS_LOCK
@pytest.mark.parametrize("count", [2, 3, 17])
def test_program_that_queues_and_waits_once(make: type[aio_handle], tmp_path: Path, count: int) -> None:
    h = make(BLOCK, 2, True, True, 2)
    sources = [random_bytes(IO_BYTES, i) for i in range(count)]
    for i, source in enumerate(sources):
        assert h.async_pwrite(source, str(tmp_path / str(i)), 0) == 0
    assert h.wait() == count
    targets = [h.new_cpu_locked_tensor(IO_BYTES, torch.empty(0, dtype=torch.uint8)) for _ in range(count)]
    for i, target in enumerate(targets):
        assert h.async_pread(target, str(tmp_path / str(i)), 0) == 0
    assert h.wait() == count
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
        assert h.free_cpu_locked_tensor(target)


@NEEDS_LOCK
@pytest.mark.parametrize("partitions", [[1, 1, 1], [1, 1, 2], [1, 2, 1], [2, 1, 1]], ids=str)
@pytest.mark.parametrize("by", ["name", "descriptor"])
def test_program_that_writes_and_reads_parts_of_a_file(
    make: type[aio_handle], tmp_path: Path, partitions: list[int], by: str
) -> None:
    h = make(BLOCK, 2, True, True, 2)
    path = str(tmp_path / "file")
    data = h.new_cpu_locked_tensor(sum(partitions) * BLOCK, torch.empty(0, dtype=torch.uint8))
    data.copy_(random_bytes(data.numel()))
    offset = 0
    for partition in partitions:
        part = torch.narrow(data, 0, offset, partition * BLOCK)
        if by == "name":
            assert h.async_pwrite(buffer=part, filename=path, file_offset=offset) == 0
            assert h.wait() == 1
        else:
            fd = os.open(path, flags=os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
            assert h.async_pwrite(buffer=part, fd=fd, file_offset=offset) == 0
            assert h.wait() == 1
            os.close(fd)
        offset += partition * BLOCK
        assert Path(path).read_bytes() == contents(data[:offset])
    back = h.new_cpu_locked_tensor(data.numel(), data)
    offset = 0
    for partition in partitions:
        part = torch.narrow(back, 0, 0, partition * BLOCK)
        assert h.sync_pread(part, path, offset) == 1
        assert torch.equal(part, data[offset : offset + partition * BLOCK])
        offset += partition * BLOCK


@NEEDS_LOCK
def test_program_that_swaps_tensors_out_and_in(make: type[aio_handle], tmp_path: Path) -> None:
    """As optimizer states are swapped: padded to the alignment, in slices of a few locked buffers, in rounds."""
    h = make(block_size=1 << 16, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=2)
    numels = [1000, 4096, 333, 12345, 1]
    states = {i: torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i, numel in enumerate(numels)}
    expected = {i: state.clone() for i, state in states.items()}

    def aligned(numel: int) -> int:
        unit = h.get_alignment() // 4
        return (numel + unit - 1) // unit * unit

    buffers = [h.new_cpu_locked_tensor(aligned(max(numels)), torch.zeros(1)).zero_() for _ in range(2)]
    assert all(h.is_pinned(buffer) for buffer in buffers)

    def swap_out(ids: list[int]) -> None:
        parts = [buffers[n].narrow(0, 0, aligned(states[i].numel())) for n, i in enumerate(ids)]
        for part, i in zip(parts, ids, strict=True):
            part.narrow(0, 0, states[i].numel()).copy_(states[i])
            assert h.async_pwrite(part, str(tmp_path / f"{i}.swp"), 0) == 0
        assert h.wait() == len(parts)

    def swap_in(ids: list[int]) -> list[torch.Tensor]:
        parts = [buffers[n].narrow(0, 0, aligned(states[i].numel())) for n, i in enumerate(ids)]
        for part, i in zip(parts, ids, strict=True):
            assert h.async_pread(part, str(tmp_path / f"{i}.swp"), 0) == 0
        assert h.wait() == len(parts)
        return [part.narrow(0, 0, states[i].numel()) for part, i in zip(parts, ids, strict=True)]

    for ids in itertools.batched(states, 2) if sys.version_info >= (3, 12) else [(0, 1), (2, 3), (4,)]:
        swap_out(list(ids))
    for _ in range(3):
        for ids in ([0, 1], [2, 3], [4]):
            for i, part in zip(ids, swap_in(ids), strict=True):
                part.mul_(1.5).add_(i)
                expected[i].mul_(1.5).add_(i)
                states[i] = part.clone()
            swap_out(ids)
    for i in states:
        assert torch.equal(swap_in([i])[0], expected[i])
        assert (tmp_path / f"{i}.swp").stat().st_size == 4 * aligned(states[i].numel())
    assert all(h.free_cpu_locked_tensor(buffer) for buffer in buffers)


@NEEDS_LOCK
def test_program_that_writes_a_stream_through_two_buffers(make: type[aio_handle], tmp_path: Path) -> None:
    """As checkpoints are written: one half fills while the other drains by descriptor; the tail by a file of Python."""
    h = make(intra_op_parallelism=1)
    memory = h.new_cpu_locked_tensor(2 * IO_BYTES, torch.empty(0, dtype=torch.uint8))
    halves = memory.split(IO_BYTES)
    path = str(tmp_path / "checkpoint")
    tensors = [random_bytes(n, n) for n in (100, 9000, 1, 20000, 512, 0, 777)]
    stream = torch.cat(UtilsBuilder().load().cast_to_byte_tensor(tensors))
    fd = os.open(path, flags=os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
    offset, draining = 0, False
    for turn in itertools.count():
        piece = stream[offset : offset + IO_BYTES]
        half = halves[turn % 2]
        half[: piece.numel()].copy_(piece)
        if draining:
            assert h.wait() == 1
            draining = False
        if piece.numel() < IO_BYTES:
            break
        assert h.async_pwrite(half, fd, offset) == 0
        draining = True
        offset += IO_BYTES
    whole = piece.numel() // h.get_alignment() * h.get_alignment()
    assert h.async_pwrite(half[:whole], fd, offset) == 0
    assert h.wait() == 1
    os.close(fd)
    with open(path, "ab") as file:
        file.write(contents(half[whole : piece.numel()]))
    assert Path(path).read_bytes() == contents(stream)


def test_functions_without_a_handle(tmp_path: Path) -> None:
    op, path = AsyncIOBuilder().load(), str(tmp_path / "file")
    source, target = random_bytes(50_000), torch.zeros(50_000, dtype=torch.uint8)
    assert op.aio_write(source, path, BLOCK, 2, True, False, True) == 0
    assert op.aio_read(target, path, BLOCK, 2, False, True, True) == 0
    assert torch.equal(source, target)
    a, b = torch.zeros(3, 5), torch.randn(15)
    assert op.deepspeed_memcpy(a, b) == 0 and torch.equal(a.reshape(-1), b)
    transposed = torch.zeros(5, 3).t()
    assert op.deepspeed_memcpy(transposed, a) == 0 and torch.equal(transposed, a)
    for wrong in (torch.randn(14), torch.randn(15).double(), torch.empty(15, device="meta")):
        with pytest.raises(ValueError, match="dtype and size"):
            op.deepspeed_memcpy(a, wrong)
    with pytest.raises(SwapIOError) as caught:
        op.aio_read(target, str(tmp_path / "none"), BLOCK, 2, False, True, True)
    assert caught.value.errno == errno.ENOENT


# --- What programs rely on ------------------------------------------------------------------------------------------


def test_a_write_makes_the_file_for_its_owner_and_leaves_other_bytes_alone(
    make: type[aio_handle], tmp_path: Path
) -> None:
    h, path = make(), tmp_path / "file"
    before = random_bytes(20_000, 1)
    assert h.sync_pwrite(before, str(path)) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    patch = random_bytes(5000, 2)
    assert h.sync_pwrite(patch, str(path), 3000) == 1
    expected = before.clone()
    expected[3000:8000] = patch
    assert path.read_bytes() == contents(expected)
    assert h.sync_pwrite(patch, str(path), 30_000) == 1  # beyond the end: zeros between
    assert path.read_bytes() == contents(expected) + bytes(10_000) + contents(patch)


def test_names_of_files_are_str_bytes_or_paths(tmp_path: Path) -> None:
    h, t = aio_handle(), random_bytes(10)
    for name in (str(tmp_path / "1"), os.fsencode(tmp_path / "2"), tmp_path / "3"):
        assert h.sync_pwrite(t, name) == 1
        assert Path(os.fsdecode(name)).read_bytes() == contents(t)
    for method in (h.sync_pread, h.sync_pwrite, h.async_pread):
        with pytest.raises(TypeError):
            method(t, 1)  # type: ignore[operator]


def test_a_blocking_call_waits_for_what_is_pending_and_counts_it(make: type[aio_handle], tmp_path: Path) -> None:
    """As in DeepNVMe, where a program may use what was pending after it, without a `wait()`."""
    h = make()
    sources = [random_bytes(1 << 20, i) for i in range(3)]
    targets = [torch.zeros_like(source) for source in sources]
    for i in range(2):
        h.async_pwrite(sources[i], str(tmp_path / str(i)))
    assert h.sync_pwrite(sources[2], str(tmp_path / "2")) == 3
    for i in range(2):
        h.async_pread(targets[i], str(tmp_path / str(i)))
    assert h.pread(targets[2], str(tmp_path / "2"), False, False) == 3
    assert all(map(torch.equal, sources, targets))
    with pytest.raises(SwapError, match="pending"):
        h.wait()


def test_read_and_write_return_0_and_leave_the_rest_pending(make: type[aio_handle], tmp_path: Path) -> None:
    h, t = make(), random_bytes(5000)
    target = torch.zeros_like(t)
    h.async_pwrite(t, str(tmp_path / "other"))
    assert h.write(t, str(tmp_path / "file"), False) == 0
    assert h.write(t, str(tmp_path / "file"), True, 5000) == 0
    assert h.read(target, str(tmp_path / "file"), True, file_offset=5000) == 0
    assert torch.equal(t, target)
    assert h.wait() == 1


def test_part_of_a_longer_file_can_be_read(make: type[aio_handle], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(contents(random_bytes(9000)))
    for read in (lambda t: make().read(t, path, True), lambda t: make().sync_pread(t, path)):
        t = torch.zeros(100, dtype=torch.uint8)
        read(t)
        assert contents(t) == path.read_bytes()[:100]


def test_a_descriptor_is_the_callers(tmp_path: Path) -> None:
    h, t, path = aio_handle(), random_bytes(10_000), tmp_path / "file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"x" * 30_000)
    assert h.async_pwrite(t, fd, 5000) == 0  # where it says, though the descriptor appends
    os.close(fd)
    assert h.wait() == 1
    assert path.read_bytes() == b"x" * 5000 + contents(t) + b"x" * 15_000
    fd = os.open(path, os.O_WRONLY)
    path.unlink()
    assert h.async_pwrite(t, fd=fd) == 0 and h.wait() == 1  # a file without a name
    with pytest.raises(TypeError):
        h.async_pwrite(t, str(path), fd=fd)
    with pytest.raises(TypeError):
        h.async_pwrite(t)
    os.close(fd)
    with pytest.raises(SwapIOError) as caught:
        h.async_pwrite(t, fd)
    assert caught.value.errno == errno.EBADF
    path.write_bytes(b"abc")
    with path.open("rb") as file, pytest.raises(SwapIOError, match="for reading only") as caught:
        h.async_pwrite(t, file.fileno())
    assert caught.value.path == str(path) and path.read_bytes() == b"abc"


def test_buffers_are_kept_while_they_are_in_flight(faulty: Callable[..., aio_handle], tmp_path: Path) -> None:
    h = faulty(FaultPlan(seed=1, delay_us=50_000), 1 << 20)
    for i in range(8):
        assert h.async_pwrite(random_bytes(1 << 20, i), str(tmp_path / str(i))) == 0
    junk = [torch.full((1 << 20,), 7, dtype=torch.uint8) for _ in range(8)]
    assert h.wait() == 8
    del junk
    for i in range(8):
        assert (tmp_path / str(i)).read_bytes() == contents(random_bytes(1 << 20, i))


@NEEDS_LOCK
@pytest.mark.unsanitized("it turns mlock into nothing")
def test_buffers_are_let_go_when_their_operation_is_over(tmp_path: Path) -> None:
    h = aio_handle()
    before = locked_bytes()
    t = h.new_cpu_locked_tensor(1 << 20, torch.empty(0))
    assert locked_bytes() - before == 4 << 20
    h.async_pwrite(t, str(tmp_path / "file"))
    del t
    settle(h)
    gc.collect()
    assert locked_bytes() == before
    assert h.wait() == 1


def test_handles_side_by_side(tmp_path: Path) -> None:
    handles = [aio_handle(), aio_handle(), gds_handle()]
    for i, h in enumerate(handles):
        for k in range(i + 1):
            h.async_pwrite(random_bytes(9000, k), str(tmp_path / f"{i}-{k}"))
    assert [h.wait() for h in handles] == [1, 2, 3]
    del handles[0]
    assert handles[0].sync_pwrite(random_bytes(1), str(tmp_path / "more")) == 1


def test_threads_that_block_on_one_handle(tmp_path: Path) -> None:
    h = aio_handle(BLOCK, 4, intra_op_parallelism=2)
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            target = torch.zeros(50_000, dtype=torch.uint8)
            for turn in range(15):
                source = random_bytes(50_000, worker * 100 + turn)
                assert h.sync_pwrite(source, str(tmp_path / str(worker)), turn) == 1
                assert h.sync_pread(target, str(tmp_path / str(worker)), turn) == 1
                assert torch.equal(source, target)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_start_and_two_that_wait(faulty: Callable[..., aio_handle], tmp_path: Path) -> None:
    h = faulty(FaultPlan(seed=1, delay_us=20_000))
    started = threading.Barrier(4 + 2)
    counts = []

    def start(worker: int) -> None:
        for i in range(10):
            h.async_pwrite(random_bytes(5000, i), str(tmp_path / f"{worker}-{i}"))
        started.wait()

    def wait() -> None:
        started.wait()
        try:
            counts.append(h.wait())
        except SwapError:
            counts.append(0)  # the other one was done before
        # Whoever is told, both are told when all is over.
        assert not h._handle.in_flight

    threads = [threading.Thread(target=start, args=(worker,)) for worker in range(4)]
    threads += [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 40 and len(counts) == 2


# --- Order: operations that overlap ---------------------------------------------------------------------------------

BIG = 64 * 4096
"""Of an operation that takes 64 requests, each of which is late; the one after it would overtake it."""


@pytest.fixture
def late(faulty: Callable[..., aio_handle]) -> aio_handle:
    return faulty(FaultPlan(seed=3, delay_us=30_000, reorder=True), overlap_events=True)


def test_a_later_write_wins(late: aio_handle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    late.async_pwrite(torch.zeros(BIG, dtype=torch.uint8), str(path))
    late.async_pwrite(torch.ones(100, dtype=torch.uint8), str(path), BIG - 200)
    assert late.wait() == 2
    assert path.read_bytes()[-200:] == b"\1" * 100 + b"\0" * 100


def test_a_read_sees_the_write_before_it(late: aio_handle, tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other name"
    source, target = random_bytes(BIG), torch.zeros(100, dtype=torch.uint8)
    path.touch()
    other.hardlink_to(path)
    late.async_pwrite(source, str(path))
    late.async_pread(target, str(other), BIG - 100)  # the file is not even that long before
    assert late.wait() == 2
    assert torch.equal(target, source[-100:])


def test_a_read_sees_a_file_as_long_as_the_write_before_it_makes_it(
    faulty: Callable[..., aio_handle], tmp_path: Path
) -> None:
    h, target = faulty(FaultPlan(seed=1, eagain=0.9)), torch.ones(100, dtype=torch.uint8)
    h.async_pwrite(random_bytes(4096), str(tmp_path / "file"), 4096)
    h.async_pread(target, str(tmp_path / "file"))  # of the hole in front
    assert h.wait() == 2
    assert not target.any()


def test_a_write_comes_after_the_read_before_it(late: aio_handle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(contents(random_bytes(BIG)))
    target = torch.zeros(BIG, dtype=torch.uint8)
    late.async_pread(target, str(path))
    late.async_pwrite(torch.zeros(100, dtype=torch.uint8), str(path), BIG - 100)
    assert late.wait() == 2
    assert torch.equal(target, random_bytes(BIG))


def test_a_file_is_copied_through_one_buffer(late: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "from").write_bytes(contents(random_bytes(BIG)))
    buffer = torch.zeros(BIG, dtype=torch.uint8)
    late.async_pread(buffer, str(tmp_path / "from"))
    late.async_pwrite(buffer[BIG - 4096 :], str(tmp_path / "to"))
    assert late.wait() == 2
    assert (tmp_path / "to").read_bytes() == (tmp_path / "from").read_bytes()[-4096:]


def test_a_buffer_is_used_again(late: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "from").write_bytes(b"\7" * BIG)
    buffer = random_bytes(BIG)
    late.async_pwrite(buffer, str(tmp_path / "to"))
    late.async_pread(buffer, str(tmp_path / "from"))
    assert late.wait() == 2
    assert (tmp_path / "to").read_bytes() == contents(random_bytes(BIG))
    assert bool((buffer == 7).all())


def test_what_does_not_overlap_is_side_by_side(faulty: Callable[..., aio_handle], tmp_path: Path) -> None:
    plan = FaultPlan()
    h = faulty(plan, overlap_events=True)
    (tmp_path / "file").write_bytes(bytes(BIG))
    buffer = random_bytes(2 * BIG)
    with still(plan):
        h.async_pwrite(buffer[:BIG], str(tmp_path / "a"))
        h.async_pwrite(buffer[BIG:], str(tmp_path / "a"), BIG)
        h.async_pwrite(buffer[:BIG], str(tmp_path / "b"))  # the same memory, but only read
        h.async_pread(torch.zeros(BIG, dtype=torch.uint8), str(tmp_path / "file"))
        h.async_pread(torch.zeros(BIG, dtype=torch.uint8), str(tmp_path / "file"))
        assert h._handle.in_flight == 5
    assert h.wait() == 5


@NEEDS_LOCK
@pytest.mark.parametrize("seed", range(6))
def test_random_programs_do_what_they_say(faulty: Callable[..., aio_handle], tmp_path: Path, seed: int) -> None:
    """Against bytes in memory, where each operation is done at once, in order; drive and kernel misbehave meanwhile."""
    rng = random.Random(seed)
    plan = FaultPlan(seed=seed, short=0.3, eintr=0.05, eagain=0.05, delay_us=300, reorder=True)
    h = faulty(plan, queue_depth=8, overlap_events=seed % 2 == 0, intra_op_parallelism=1 + seed % 3)
    files: dict[str, bytearray] = {}
    memory = [h.new_cpu_locked_tensor(200_000, torch.empty(0, dtype=torch.uint8)), random_bytes(150_001, seed)[1:]]
    model = [bytearray(contents(t)) for t in memory]
    pending = 0

    def check() -> None:
        assert [bytes(m) for m in model] == [contents(t) for t in memory]
        assert files == {name: bytearray((tmp_path / name).read_bytes()) for name in files}

    for _ in range(150):
        name, which = rng.choice("abc"), rng.randrange(2)
        length = rng.choice([0, 1, 4096, 8192, rng.randrange(100), rng.randrange(60_000)])
        start = rng.randrange(memory[which].numel() - length)
        offset = rng.choice([0, 512, 4096, rng.randrange(50_000)])
        part = memory[which][start : start + length]
        asynchronous, validate = rng.random() < 0.7, rng.random() < 0.2
        action = rng.choice(["write", "write", "read", "wait"])
        if action == "wait":
            if pending:
                assert h.wait() == pending
            else:
                with pytest.raises(SwapError, match="pending"):
                    h.wait()
            pending = 0
            check()
            continue
        file = files.get(name)
        if action == "read" and (file is None or offset + length > len(file)):
            with pytest.raises(SwapIOError) as caught:
                h.pread(part, tmp_path / name, validate, asynchronous, offset)
            assert caught.value.errno == (errno.ENOENT if file is None else errno.ENODATA)
            continue
        if action == "read":
            assert file is not None
            done = h.pread(part, tmp_path / name, validate, asynchronous, offset)
            model[which][start : start + length] = file[offset : offset + length]
        else:
            done = h.pwrite(part, tmp_path / name, validate, asynchronous, offset)
            file = files.setdefault(name, bytearray())
            if length:
                file.extend(bytes(max(0, offset - len(file))))
                file[offset : offset + length] = model[which][start : start + length]
        assert done == (0 if asynchronous else pending + 1)
        pending = pending + 1 if asynchronous else 0
        if not asynchronous:
            check()
    if pending:
        assert h.wait() == pending
    check()


# --- What fails is raised -------------------------------------------------------------------------------------------


def transfers(h: aio_handle) -> dict[str, Callable[..., int]]:
    return {
        "read": lambda t, path, offset=0: h.read(t, path, False, offset),
        "sync_pread": h.sync_pread,
        "async_pread": h.async_pread,
        "pread": lambda t, path, offset=0: h.pread(t, path, False, True, offset),
        "write": lambda t, path, offset=0: h.write(t, path, False, offset),
        "sync_pwrite": h.sync_pwrite,
        "async_pwrite": h.async_pwrite,
        "pwrite": lambda t, path, offset=0: h.pwrite(t, path, False, True, offset),
    }


METHODS = ["read", "sync_pread", "async_pread", "pread", "write", "sync_pwrite", "async_pwrite", "pwrite"]


def test_waiting_for_nothing_is_an_error(make: type[aio_handle], tmp_path: Path) -> None:
    h = make()
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()
    h.async_pwrite(random_bytes(1), str(tmp_path / "file"))
    assert h.wait() == 1
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_wrong_with_a_path_is_raised_by_the_call(make: type[aio_handle], tmp_path: Path, method: str) -> None:
    h, t = make(), torch.zeros(100, dtype=torch.uint8)
    call = transfers(h)[method]
    (tmp_path / "short").write_bytes(b"x" * 99)
    wrong = {tmp_path: errno.EISDIR, tmp_path / "none" / "file": errno.ENOENT, tmp_path / "short" / "x": errno.ENOTDIR}
    if "read" in method:
        wrong |= {tmp_path / "none": errno.ENOENT}
    for path, number in wrong.items():
        with pytest.raises(SwapIOError) as caught:
            call(t, str(path))
        assert (caught.value.errno, caught.value.path) == (number, str(path))
    if "read" in method:
        for offset, length in ((0, 100), (50, 50), (99, 1), (1 << 40, 1)):
            with pytest.raises(SwapIOError, match="has 99 bytes") as caught:
                call(t[:length], str(tmp_path / "short"), offset)
            error = caught.value
            assert (error.errno, error.operation, error.path) == (errno.ENODATA, "read", str(tmp_path / "short"))
            assert (error.offset_bytes, error.length_bytes) == (offset, length)
        assert not t.any()
    with pytest.raises(ValueError, match="null character"):
        call(t, "a\0b")
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_wrong_with_a_buffer_is_raised_before_a_file_is_made(tmp_path: Path, method: str) -> None:
    call = transfers(aio_handle())[method]
    path = tmp_path / "file"
    square = torch.zeros(4, 4)
    for buffer, message in (
        (square.t(), "contiguous"),
        (square[:, 1:], "contiguous"),
        (torch.zeros(1).expand(5), "contiguous"),
        (torch.zeros(3, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(3).to_sparse(), "dense"),
    ):
        with pytest.raises(ValueError, match=message):
            call(buffer, str(path))
    for nothing in (None, b"abc", [1.0], 3):
        with pytest.raises(TypeError, match="tensor"):
            call(nothing, str(path))
    if "write" in method:
        with pytest.raises(ValueError, match="negative"):
            call(square, str(path), -1)
        with pytest.raises(TypeError):
            call(square, str(path), 1.5)
    assert not path.exists()


def test_what_could_not_be_started_is_not_pending(make: type[aio_handle], tmp_path: Path) -> None:
    h, t = make(), torch.zeros(100)
    t.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="memory"):
        h.async_pwrite(t, str(tmp_path / "file"))
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_full_drive_is_raised(make: type[aio_handle], asynchronous: bool) -> None:
    h, t = make(), random_bytes(10_000)
    with pytest.raises(SwapIOError) as caught:
        h.pwrite(t, "/dev/full", False, asynchronous)
        h.wait()
    error = caught.value
    assert (error.errno, error.operation, error.path) == (full_errno(h), "write", "/dev/full")
    assert (error.offset_bytes, error.length_bytes) == (0, 10_000)
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()


def test_a_failure_is_raised_once_when_all_are_over(make: type[aio_handle], tmp_path: Path) -> None:
    h = make()
    h.async_pwrite(random_bytes(1 << 20, 1), str(tmp_path / "1"))
    h.async_pwrite(random_bytes(10_000), "/dev/full", 512)
    h.async_pwrite(random_bytes(20_000), "/dev/full")
    h.async_pwrite(random_bytes(1 << 20, 2), str(tmp_path / "2"))
    with pytest.raises(SwapIOError, match="1 more operations failed") as caught:
        h.wait()
    assert (caught.value.offset_bytes, caught.value.length_bytes) == (512, 10_000)
    assert h._handle.in_flight == 0 and h._handle.unobserved_failures == 0
    for i in (1, 2):
        assert (tmp_path / str(i)).read_bytes() == contents(random_bytes(1 << 20, i))
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()
    h.async_pwrite(random_bytes(10), str(tmp_path / "3"))
    assert h.wait() == 1


def test_a_blocking_call_raises_what_was_pending_and_failed(tmp_path: Path) -> None:
    h = aio_handle()
    h.async_pwrite(random_bytes(10), "/dev/full")
    with pytest.raises(SwapIOError, match="full"):
        h.sync_pwrite(random_bytes(10), str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == contents(random_bytes(10))
    assert h.sync_pwrite(random_bytes(10), str(tmp_path / "file")) == 1
    h.async_pwrite(random_bytes(10), "/dev/full")
    assert h.write(random_bytes(10), str(tmp_path / "file"), False) == 0  # does not wait for it
    with pytest.raises(SwapIOError, match="full"):
        h.wait()


def test_a_file_cut_short_meanwhile_is_raised(faulty: Callable[..., aio_handle], tmp_path: Path) -> None:
    plan, path = FaultPlan(), tmp_path / "file"
    h = faulty(plan, queue_depth=1)
    path.write_bytes(bytes(16 * 4096))
    with still(plan):
        h.async_pread(torch.ones(16 * 4096, dtype=torch.uint8), str(path))
        os.truncate(path, 4096)
    with pytest.raises(SwapIOError) as caught:
        h.wait()
    assert (caught.value.errno, caught.value.operation, caught.value.path) == (errno.ENODATA, "read", str(path))


def test_a_failed_write_by_descriptor_names_the_file() -> None:
    h = aio_handle()
    with open("/dev/full", "wb") as file:
        h.async_pwrite(random_bytes(10), file.fileno())
        with pytest.raises(SwapIOError) as caught:
            h.wait()
    assert (caught.value.path, caught.value.filename) == ("/dev/full", "/dev/full")


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_refusal_by_the_drive_is_raised(
    faulty: Callable[..., aio_handle], tmp_path: Path, number: int, asynchronous: bool
) -> None:
    h = faulty(FaultPlan(fail_read_at=2, fail_write_at=3, fail_errno=number))
    t, path = random_bytes(10 * 4096), str(tmp_path / "file")
    for call, operation in ((h.pwrite, "write"), (h.pread, "read")):
        with pytest.raises(SwapIOError) as caught:
            call(t, path, False, asynchronous)
            h.wait()
        assert (caught.value.errno, caught.value.operation, caught.value.path) == (number, operation, path)
        assert call(t, path, False, False) == 1


def test_many_pending_operations_do_not_run_out_of_descriptors(tmp_path: Path) -> None:
    run(f"""
import resource, torch
from swapper.deepnvme import aio_handle
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
h = aio_handle()
tensors = [torch.full((5000 + i,), i, dtype=torch.uint8) for i in range(200)]
paths = [f"{tmp_path}/{{i}}" for i in range(200)]
for t, path in zip(tensors, paths):
    assert h.async_pwrite(t, path) == 0
assert h.wait() == 200
for i, path in enumerate(paths):
    assert open(path, "rb").read() == bytes([i]) * (5000 + i)
# What failed is not forgotten when its descriptor is wanted.
h.async_pwrite(tensors[0], "/dev/full")
for t, path in zip(tensors, paths):
    h.async_pread(t.zero_(), path)
try:
    h.wait()
except OSError as error:
    assert error.filename == "/dev/full"
else:
    raise AssertionError
assert all(bool((t == i).all()) for i, t in enumerate(tensors))
""")


@NEEDS_LOCK
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_it(make: type[aio_handle], tmp_path: Path) -> None:
    h, t = make(), random_bytes(1 << 20)
    locked = h.new_cpu_locked_tensor(10, torch.zeros(0))
    assert h.async_pwrite(t, str(tmp_path / "file")) == 0
    child = os.fork()
    if child == 0:
        status = 1
        try:
            uses: list[Callable[[], object]] = [
                h.wait,
                lambda: h.sync_pwrite(t, str(tmp_path / "other")),
                lambda: h.async_pread(t, str(tmp_path / "file")),
                lambda: h.new_cpu_locked_tensor(1, t),
            ]
            refused = 0
            for use in uses:
                try:
                    use()
                except SwapError:
                    refused += 1
            assert refused == len(uses) and not (tmp_path / "other").exists()
            assert not h.is_pinned(locked) and not h.free_cpu_locked_tensor(locked)
            del locked, h
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert h.wait() == 1 and h.is_pinned(locked)
    assert (tmp_path / "file").read_bytes() == contents(t)


def test_exit_with_operations_pending_completes_them_and_logs_failures(tmp_path: Path) -> None:
    logged = run(f"""
import logging, torch
from swapper.deepnvme import aio_handle
logging.basicConfig()
h = aio_handle(overlap_events=True)
t = torch.full((32 << 20,), 9, dtype=torch.uint8)
h.async_pwrite(torch.zeros(10), "/dev/full")
h.async_pwrite(torch.zeros(10), "/dev/full", 4096)  # no overlap: neither waits for the other
h.async_pwrite(t, {str(tmp_path / "file")!r})
""")
    assert logged.count("/dev/full") == 2 and "nobody waited for it" in logged
    assert (tmp_path / "file").read_bytes() == b"\x09" * (32 << 20)


def test_a_failure_that_made_way_for_another_operation_is_logged_if_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h = aio_handle()
    h.async_pwrite(torch.zeros(10), "/dev/full")
    h.async_pwrite(torch.zeros(20), "/dev/full")  # overlaps: waits for the first, whose failure is kept
    del h
    gc.collect()
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all("/dev/full" in record.getMessage() for record in caplog.records)


# --- validate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4096, 1000, 4 << 20])
def test_validation_passes_what_is_right(
    make: type[aio_handle], tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_VALIDATE_BYTES", chunk)
    h, path = make(), str(tmp_path / "file")
    for size in (0, 1, 4096, 10_000):
        t = random_bytes(size, size)
        assert h.pwrite(t, path, True, True, 300) == 0 and h.wait() == 1
        assert h.pwrite(t, path, True, False, 700) == 1
        if size:
            assert h.pread(t, path, True, True, 300) == 0 and h.wait() == 1
        assert h.pread(torch.randn(size // 4), path, True, False, 0) == 1
        assert h.write(t, path, True) == h.read(t, path, True) == 0


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("at", [0, 4095, 9999])
def test_validation_finds_a_flipped_bit(
    tmp_path: Path, operation: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_VALIDATE_BYTES", 4096)
    h, path, t = aio_handle(), tmp_path / "file", random_bytes(10_000)
    path.write_bytes(bytes(300) + contents(t))
    (h.pread if operation == "read" else h.pwrite)(t, str(path), True, True, 300)
    settle(h)
    with path.open("r+b") as file:
        file.seek(300 + at)
        byte = file.read(1)[0]
        file.seek(300 + at)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(SwapIOError, match="other bytes than the tensor") as caught:
        h.wait()
    error = caught.value
    assert (error.errno, error.operation, error.path) == (errno.EBADMSG, f"validate {operation}", str(path))
    assert (error.offset_bytes, error.length_bytes) == (300 + at, 10_000)
    with pytest.raises(SwapError, match="without a pending operation"):
        h.wait()


def test_validation_that_cannot_read_is_a_failure(tmp_path: Path) -> None:
    h, path, t = aio_handle(), tmp_path / "file", random_bytes(10_000)
    h.pwrite(t, str(path), True, True)
    settle(h)
    os.truncate(path, 9999)
    with pytest.raises(SwapIOError) as caught:
        h.wait()
    assert (caught.value.errno, caught.value.operation) == (errno.ENODATA, "validate write")
    h.pwrite(t, str(path), True, True)
    settle(h)
    path.unlink()
    with pytest.raises(SwapIOError) as caught:
        h.wait()
    assert (caught.value.errno, caught.value.operation) == (errno.ENOENT, "validate write")


def test_validation_is_done_before_the_next_operation_changes_the_bytes(tmp_path: Path) -> None:
    h, path = aio_handle(), str(tmp_path / "file")
    first, second = random_bytes(10_000, 1), random_bytes(10_000, 2)
    h.pwrite(first, path, True, True)
    settle(h)
    h.pwrite(second, path, True, True)  # would not be what `first` wants to find
    settle(h)
    h.pread(second, path, True, True)
    assert h.wait() == 3
    h.pwrite(first, path, True, True)
    settle(h)
    h.async_pread(first, tmp_path / "file", 0)
    assert h.wait() == 2


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["async_pwrite", "sync_pwrite", "write"])
def test_ctrl_c_in_a_call_leaves_a_handle_that_knows_what_is_in_flight(tmp_path: Path, method: str) -> None:
    h, path, source = aio_handle(), tmp_path / "file", torch.empty(100, dtype=torch.uint8)
    call = transfers(h)[method]
    outcomes = set()
    gc.collect()  # Else the end of another test's handle may be where it is struck.
    for n in itertools.count():
        path.write_bytes(bytes(100))
        source.fill_(1)
        interrupted = interrupted_at(n, lambda: call(source, str(path)), "deepnvme/")
        if method == "async_pwrite" and not interrupted:
            assert h.wait() == 1
        else:
            # In flight and known, or not at all.
            try:
                assert h.wait() == 1
            except SwapError as error:
                assert "without a pending" in str(error)
        assert h._handle.in_flight == 0 and not h._operations._pending
        source.fill_(2)
        outcomes.add(path.read_bytes())
        assert h.sync_pwrite(source, str(path)) == 1 and path.read_bytes() == b"\2" * 100
        if not interrupted:
            break
    assert n > 20 and outcomes == {bytes(100), b"\1" * 100}


@pytest.mark.filterwarnings("ignore:.*FileIO.*:pytest.PytestUnraisableExceptionWarning")  # between `open` and `with`
def test_ctrl_c_in_wait_loses_no_failure(tmp_path: Path) -> None:
    for n in itertools.count():
        h = aio_handle()
        h.async_pwrite(torch.zeros(10), "/dev/full")
        h.pwrite(torch.zeros(10), tmp_path / "file", True, True)
        raised: list[BaseException | None] = []

        def wait(h: aio_handle = h, raised: list[BaseException | None] = raised) -> None:
            try:
                h.wait()
            except BaseException as error:
                while not isinstance(error, SwapIOError | None):
                    error = error.__context__  # type: ignore[assignment]
                raised.append(error)
                raise

        try:
            interrupted = interrupted_at(n, wait, "deepnvme/")
        except SwapIOError:
            break
        assert interrupted
        if h._operations._pending:
            with pytest.raises(SwapIOError, match="full"):
                h.wait()
        else:
            assert isinstance(raised[0], SwapIOError), n  # the failure was on its way
        assert not h._operations._pending and h._handle.unobserved_failures == 0
    assert n > 20
