"""The pool: no two owners of one byte, nothing lost, nothing allocated twice."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import SimCopies, simulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupts import interrupted_at
from resident import resident_bytes
from still_drive import still

from swapper.errors import SwapError, SwapIOError
from swapper.io import devices
from swapper.io.devices import starting_copies
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted

PAGE = 4096
MIB = 1 << 20


@pytest.fixture(params=[None, 0], ids=["ready", "made ready"])
def pool(request: pytest.FixtureRequest) -> Iterator[BufferPool]:
    with BufferPool(MIB, ready_bytes=request.param) as pool:
        yield pool


def span(lease: Lease) -> tuple[int, int]:
    start = lease.tensor.data_ptr()
    return start, start + -(-lease.length_bytes // PAGE) * PAGE


# --- Leases ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(actions=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=60))
def test_leases_never_overlap_and_everything_comes_back(pool: BufferPool, actions: list[tuple[bool, int]]) -> None:
    held: list[Lease] = []
    for acquire, number in actions:
        if acquire:
            lease = pool.try_acquire(1 + number % 300_000)
            if lease is not None:
                held.append(lease)
        elif held:
            held.pop(number % len(held)).release()
        spans = sorted(span(lease) for lease in held)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert all(start % PAGE == 0 for start, _ in spans)
        assert pool.used_bytes == sum(stop - start for start, stop in spans) <= pool.capacity_bytes
    for lease in held:
        lease.release()
    assert pool.used_bytes == 0
    # What was free in pieces is one piece again.
    with pool.acquire(pool.capacity_bytes) as lease:
        assert lease.length_bytes == pool.capacity_bytes


def resident(pool: BufferPool) -> int:
    return resident_bytes(pool._memory.data_ptr(), pool.capacity_bytes)


@pytest.mark.parametrize("backend", ["threads", "uring"])
def test_memory_is_taken_when_it_is_leased_and_given_back_by_trim(backend: str, tmp_path: Path) -> None:
    with (
        AsyncIOHandle(backend=backend) as handle,
        handle.open(tmp_path / "file", "rw") as file,
        BufferPool(64 * MIB, handle, ready_bytes=0) as pool,
    ):
        assert (pool.ready_bytes, resident(pool)) == (0, 0)
        pool.make_ready(3 * MIB)
        assert pool.ready_bytes == 4 * MIB == resident(pool)
        first = pool.acquire(4 * MIB)
        first.tensor.copy_(torch.arange(4 * MIB, dtype=torch.int32).view(torch.uint8)[: 4 * MIB])
        expected = first.tensor.clone()
        first.transfer = handle.write(file, first.tensor)  # In flight while more is made ready.
        second = pool.acquire(16 * MIB)
        assert pool.ready_bytes == 20 * MIB
        assert second.tensor.data_ptr() == first.tensor.data_ptr() + 4 * MIB
        assert first.transfer.wait() == 4 * MIB
        assert handle.read(file, second.tensor[3 * MIB : 7 * MIB]).wait() == 4 * MIB
        assert torch.equal(second.tensor[3 * MIB : 7 * MIB], expected) and torch.equal(first.tensor, expected)
        third = pool.acquire(PAGE)
        assert pool.ready_bytes == 30 * MIB, "half as much again, so that it rarely happens"
        third.release()
        second.release()
        pool.trim()
        assert pool.ready_bytes == 4 * MIB == resident(pool)
        assert handle.read(file, first.tensor).wait() == 4 * MIB and torch.equal(first.tensor, expected)
        first.release()
        pool.trim()
        assert (pool.ready_bytes, resident(pool)) == (0, 0)
        with pool.acquire(64 * MIB) as whole:
            assert handle.read(file, whole.tensor[-4 * MIB :]).wait() == 4 * MIB
            assert torch.equal(whole.tensor[-4 * MIB :], expected)
            assert pool.ready_bytes == 64 * MIB
            with pytest.raises(PoolExhausted, match=f"of {64 * MIB} bytes"):
                pool.acquire(1)


def test_trim_spares_what_is_still_in_flight(tmp_path: Path) -> None:
    with (
        AsyncIOHandle(faults=FaultPlan(delay_us=50_000)) as handle,
        handle.open(tmp_path / "file", "rw") as file,
        BufferPool(8 * MIB, handle, ready_bytes=0) as pool,
    ):
        low, high = pool.acquire(2 * MIB), pool.acquire(4 * MIB)
        high.tensor.fill_(7)
        transfer = high.transfer = handle.write(file, high.tensor)
        high.release()
        low.release()
        pool.trim()
        assert transfer.wait() == 4 * MIB
        pool.trim()
        assert pool.ready_bytes == 0
        with pool.acquire(4 * MIB) as again:
            assert handle.read(file, again.tensor).wait() == 4 * MIB
            assert bool((again.tensor == 7).all())


def test_close_gives_the_memory_back_though_somebody_has_the_pool() -> None:
    pool = BufferPool(8 * MIB)
    held = pool.acquire(MIB)
    held.tensor.fill_(3)
    assert resident(pool) == 8 * MIB
    pool.close()
    assert bool((held.tensor == 3).all()) and resident(pool) == 2 * MIB
    pool.close()


def test_lease_is_a_view_of_the_pool(pool: BufferPool) -> None:
    with pool.acquire(10_001) as lease:
        assert lease.tensor.shape == (10_001,) and lease.tensor.dtype == torch.uint8
        assert lease.tensor.data_ptr() % PAGE == 0
        assert pool.used_bytes == 3 * PAGE
        numbers = lease.view(64, 100, torch.float32)
        numbers.fill_(1.5)
        assert numbers.shape == (100,) and numbers.data_ptr() == lease.tensor.data_ptr() + 64
        assert torch.equal(lease.tensor[64:464].view(torch.float32), numbers)
        assert lease.view(10_001, 0, torch.uint8).numel() == 0
        for offset, numel, dtype in (
            (2, 1, torch.float32),
            (-4, 1, torch.float32),
            (10_000, 1, torch.int16),
            (0, -1, torch.int8),
        ):
            with pytest.raises(ValueError, match="do not fit"):
                lease.view(offset, numel, dtype)
    assert pool.peak_used_bytes == 3 * PAGE


def test_released_lease_is_refused(pool: BufferPool) -> None:
    lease = pool.acquire(100)
    lease.release()
    lease.release()
    assert lease.released and "released" in repr(lease)
    for use in (lambda: lease.tensor, lambda: lease.view(0, 1, torch.uint8)):
        with pytest.raises(SwapError, match="given back"):
            use()
    assert pool.used_bytes == 0


def test_collected_lease_gives_itself_back(pool: BufferPool) -> None:
    leases = [pool.acquire(PAGE) for _ in range(10)]
    leases[0].transfer = None
    assert pool.used_bytes == 10 * PAGE
    del leases
    gc.collect()
    assert pool.used_bytes == 0


def test_lease_is_given_back_when_its_block_raises(pool: BufferPool) -> None:
    with pytest.raises(KeyError), pool.acquire(PAGE):
        raise KeyError
    assert pool.used_bytes == 0


def test_exhausted_pool_shows_the_sum(pool: BufferPool) -> None:
    leases = [pool.acquire(PAGE) for _ in range(MIB // PAGE)]
    assert pool.try_acquire(1) is None
    leases[3].release()
    with pytest.raises(
        PoolExhausted,
        match=rf"8192 bytes.* of {MIB} bytes {MIB - PAGE} are leased and {PAGE} free; .* at least {MIB + PAGE}$",
    ):
        pool.acquire(2 * PAGE)
    with pool.acquire(PAGE):
        pass
    with pytest.raises(PoolExhausted):
        pool.acquire(MIB + 1)


@pytest.mark.parametrize("length", [0, -1])
def test_empty_lease_and_empty_pool_are_refused(pool: BufferPool, length: int) -> None:
    with pytest.raises(ValueError, match="length_bytes"):
        pool.acquire(length)
    with pytest.raises(ValueError, match="pool_bytes"):
        BufferPool(length)


def test_pool_says_whether_it_is_locked(pool: BufferPool) -> None:
    assert pool.locked == (pool._slab.lock_reason == "")
    assert pool.capacity_bytes == MIB
    with BufferPool(5000) as small:
        assert small.capacity_bytes == 8192


def test_ctrl_c_anywhere_loses_no_memory(pool: BufferPool) -> None:
    def use() -> None:
        with pool.acquire(3 * PAGE):
            collected = pool.acquire(PAGE)
            kept = pool.acquire(5 * PAGE)
            del collected
            pool.acquire(2 * PAGE).release()
            kept.release()
            with pytest.raises(PoolExhausted):
                pool.acquire(MIB)

    for n in itertools.count():
        interrupted = interrupted_at(n, use, "storage/buffers.py")
        assert pool.used_bytes == 0, n
        pool.acquire(MIB).release()
        if not interrupted:
            break
    assert n > 100


def test_finalizer_may_close_the_pool_at_any_allocation() -> None:
    class Owner:
        pass

    gc.disable()
    thresholds = gc.get_threshold()
    try:
        for allocations in range(30):
            gc.collect(0)
            pool = BufferPool(MIB)
            lease = pool.acquire(PAGE)
            owner: Any = Owner()
            owner.itself = owner
            weakref.finalize(owner, pool.close)
            del owner
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            with contextlib.suppress(SwapError):
                pool.acquire(PAGE)
            gc.disable()
            lease.release()
            assert pool.used_bytes == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


# --- Reclaiming -----------------------------------------------------------------------------------------------------


class ReadAhead:
    """Holds leases that it can do without."""

    def __init__(self, pool: BufferPool, count: int) -> None:
        self.leases = [pool.acquire(PAGE) for _ in range(count)]

    def drop(self) -> bool:
        if not self.leases:
            return False
        self.leases.pop().release()
        return True


def test_reclaimers_are_asked_only_as_far_as_needed(pool: BufferPool) -> None:
    ahead = ReadAhead(pool, MIB // PAGE)
    pool.add_reclaimer(ahead.drop)
    assert pool.try_acquire(PAGE) is None
    with pool.acquire(3 * PAGE):
        assert len(ahead.leases) == MIB // PAGE - 3


def test_reclaimers_are_held_weakly(pool: BufferPool) -> None:
    ahead = ReadAhead(pool, 1)
    pool.add_reclaimer(ahead.drop)
    del ahead
    gc.collect()
    assert pool.used_bytes == 0
    with pytest.raises(PoolExhausted):
        pool.acquire(2 * MIB)


def test_reclaimers_that_are_gone_are_forgotten_though_the_pool_is_never_short(pool: BufferPool) -> None:
    kept = [ReadAhead(pool, 1) for _ in range(3)]
    for each in kept:
        pool.add_reclaimer(each.drop)
    for _ in range(500):
        gone = ReadAhead(pool, 0)
        pool.add_reclaimer(gone.drop)
    assert len(pool._reclaimers) < 30
    pool.acquire(MIB).release()  # All of it: those that live are asked as ever.
    assert not any(each.leases for each in kept)


def test_reclaimer_may_use_the_pool(pool: BufferPool) -> None:
    lease = pool.acquire(MIB)

    def drop() -> bool:
        assert pool.try_acquire(PAGE) is None
        lease.release()
        return pool.used_bytes == 0

    pool.add_reclaimer(drop)
    pool.acquire(MIB).release()


# --- Transfers ------------------------------------------------------------------------------------------------------


def test_memory_of_a_transfer_in_flight_goes_to_nobody(tmp_path: Path) -> None:
    plan = FaultPlan(delay_us=2000)
    with (
        AsyncIOHandle(block_bytes=PAGE, queue_depth=4, faults=plan) as handle,
        BufferPool(MIB, handle) as pool,
        handle.open(tmp_path / "file", "rw") as file,
    ):
        lease = pool.acquire(MIB)
        lease.tensor.fill_(1)
        with still(plan):
            lease.transfer = transfer = handle.write(file, lease.tensor)
            lease.release()
            assert not transfer.done()
            assert pool.used_bytes == MIB
            assert pool.try_acquire(PAGE) is None
        with pool.acquire(MIB) as other:  # waits
            assert transfer.done()
            other.tensor.fill_(2)
    assert (tmp_path / "file").read_bytes() == b"\1" * MIB


def test_exception_and_collection_leave_the_transfer_its_memory(tmp_path: Path) -> None:
    plan = FaultPlan(delay_us=2000)
    with (
        AsyncIOHandle(block_bytes=PAGE, queue_depth=4, faults=plan) as handle,
        BufferPool(MIB, handle) as pool,
        handle.open(tmp_path / "file", "rw") as file,
    ):

        def fails() -> None:
            lease = pool.acquire(MIB)
            lease.tensor.fill_(1)
            lease.transfer = handle.write(file, lease.tensor)
            raise KeyError

        with still(plan):
            with pytest.raises(KeyError):
                fails()
            gc.collect()
            assert pool.try_acquire(PAGE) is None
        pool.acquire(MIB).tensor.fill_(2)
    assert (tmp_path / "file").read_bytes() == b"\1" * MIB


def test_failed_transfer_frees_its_memory_and_stays_unobserved(tmp_path: Path) -> None:
    handle = AsyncIOHandle(faults=FaultPlan(eio=1.0, delay_us=5000))
    with BufferPool(MIB, handle) as pool, handle.open(tmp_path / "file", "rw") as file:
        lease = pool.acquire(MIB)
        lease.transfer = handle.write(file, lease.tensor)
        lease.release()
        pool.acquire(MIB).release()
        assert handle.unobserved_failures == 1
    with pytest.raises(SwapIOError, match="nobody had waited"):
        handle.close()


@pytest.mark.long
def test_pool_larger_than_one_registered_piece_is_cut_at_its_border(tmp_path: Path) -> None:
    """Pieces are 1 GiB: transfers that cross the border name one piece per request."""
    gib = 1 << 30
    with (
        AsyncIOHandle() as handle,
        BufferPool(gib + 8 * MIB, handle) as pool,
        pool.acquire(gib - 3 * MIB),
        pool.acquire(6 * MIB) as lease,
        handle.open(tmp_path / "file", "rw") as file,
    ):
        for start, stop in ((0, 6 * MIB), (13, 6 * MIB - 5), (4096, 5 * MIB + 100)):
            source = torch.randint(0, 256, (stop - start,), dtype=torch.uint8)
            lease.tensor[start:stop].copy_(source)
            handle.write(file, lease.tensor[start:stop]).wait()
            lease.tensor.zero_()
            handle.read(file, lease.tensor[start:stop]).wait()
            assert torch.equal(lease.tensor[start:stop], source)


def test_threads_share_a_pool(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with AsyncIOHandle(block_bytes=16384, queue_depth=8) as handle, BufferPool(MIB, handle) as pool:

        def work(worker: int) -> None:
            rng = random.Random(worker)
            try:
                with handle.open(tmp_path / str(worker), "rw") as file:
                    for turn in range(40):
                        length = rng.randrange(1, 120_000)
                        with pool.acquire(length) as lease:
                            lease.tensor.fill_(worker * 40 + turn)
                            lease.transfer = written = handle.write(file, lease.tensor)
                        with pool.acquire(length) as lease:
                            written.wait()
                            lease.transfer = handle.read(file, lease.tensor)
                            lease.transfer.wait()
                            assert bool((lease.tensor == worker * 40 + turn).all())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert pool.used_bytes == 0


# --- Life times -----------------------------------------------------------------------------------------------------


def test_closed_pool_leases_nothing_and_keeps_what_is_held(tmp_path: Path) -> None:
    with AsyncIOHandle() as handle:
        pool = BufferPool(MIB, handle)
        lease = pool.acquire(PAGE)
        pool.close()
        pool.close()
        with pytest.raises(SwapError, match="closed"):
            pool.acquire(PAGE)
        with handle.open(tmp_path / "file", "rw") as file:
            handle.write(file, lease.tensor.fill_(3)).wait()
        lease.release()
        assert pool.used_bytes == 0


def test_collected_pool_gives_its_memory_back() -> None:
    with AsyncIOHandle() as handle:
        pool = BufferPool(64 * MIB, handle)
        start = pool._memory.data_ptr()
        assert resident(pool) >= 64 * MIB
        del pool
        gc.collect()
        assert resident_bytes(start, 64 * MIB) < 8 * MIB, "other memory may have come to some of its addresses"


def test_tensors_outlive_the_pool() -> None:
    pool = BufferPool(MIB)
    tensor = pool.acquire(MIB).tensor
    pool.close()
    del pool
    gc.collect()
    assert int(tensor.fill_(1).sum()) == MIB


def test_pool_outlives_its_handle(tmp_path: Path) -> None:
    handle = AsyncIOHandle()
    with BufferPool(MIB, handle) as pool:
        lease = pool.acquire(PAGE)
        lease.transfer = handle.write(handle.open(tmp_path / "file", "rw"), lease.tensor)
        handle.close()
        lease.release()
        assert pool.used_bytes == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_while_copies_are_started_can_start_its_own() -> None:
    begun, over = threading.Event(), threading.Event()

    def start() -> None:
        with starting_copies():
            begun.set()
            over.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # Instead of waiting for ever.
        with starting_copies():
            os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_cannot_use_the_pool(pool: BufferPool) -> None:
    lease = pool.acquire(PAGE)
    lease.tensor.fill_(9)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: pool.acquire(PAGE), lambda: pool.used_bytes, lambda: lease.tensor):
            try:
                use()
            except SwapError:
                refused += 1
        lease.release()
        pool.close()
        del lease, pool
        gc.collect()
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int(lease.tensor.sum()) == 9 * PAGE
    lease.release()
    assert pool.used_bytes == 0


def test_cuda_registration_is_checked_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def __init__(self, status: int) -> None:
            self.status = status
            self.registered: dict[int, int] = {}

        def cudaHostRegister(self, address: int, length_bytes: int, flags: int) -> int:
            self.registered[address] = length_bytes
            return self.status

        def cudaHostUnregister(self, address: int) -> int:
            del self.registered[address]
            return 0

    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with BufferPool(MIB, device=torch.device("cuda")) as pool:
        assert list(runtime.registered.values()) == [MIB]
        pool.close()
    assert not runtime.registered
    runtime.status = 2
    with pytest.raises(SwapError, match="CUDA error 2"):
        BufferPool(MIB, device=torch.device("cuda"))


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_an_error_of_page_locking_is_not_that_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The CUDA runtime keeps what a call returned, and torch's check after the next kernel of the thread raises it."""
    last_error = 0

    class Runtime:
        def cudaHostRegister(self, address: int, length_bytes: int, flags: int) -> int:
            return self.status("cudaHostRegister")

        def cudaHostUnregister(self, address: int) -> int:
            return self.status("cudaHostUnregister")

        def status(self, name: str) -> int:
            nonlocal last_error
            last_error = 712 if name == call else last_error
            return last_error

    def zeros(*_: object, **__: object) -> None:
        nonlocal last_error
        error, last_error = last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    copies = devices.copies_of(torch.device("cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", zeros)
        with contextlib.suppress(SwapError):
            copies.page_lock(4096, 4096)
        copies.page_unlock(4096)
    assert last_error == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pool_for_cuda_is_page_locked_for_the_gpu() -> None:
    with BufferPool(8 * MIB, device=torch.device("cuda")) as pool, pool.acquire(MIB) as lease:
        assert lease.tensor.is_pinned()
        lease.tensor.fill_(7)
        assert int(lease.tensor.to("cuda", non_blocking=True).sum()) == 7 * MIB
    with BufferPool(8 * MIB) as plain, plain.acquire(MIB) as lease:
        assert not lease.tensor.is_pinned()


def test_acquire_is_fast_with_many_leases() -> None:
    with BufferPool(64 * MIB) as pool:
        leases = [pool.acquire(PAGE) for _ in range(8000)]
        for lease in leases[::2]:
            lease.release()
        begin_s = time.thread_time()
        for _ in range(100):
            pool.acquire(2 * PAGE).release()
        assert time.thread_time() - begin_s < 2.0


def test_no_copy_starts_while_a_pool_that_grows_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread starts one when those in flight were waited for, and the memory is about to be unlocked."""
    sim_device = simulate("sim-lazy", monkeypatch)
    sim_device.violations()
    there = torch.zeros(64 << 10, dtype=torch.uint8, device="sim")
    copies = devices.DeviceCopies(there.device)
    wait_all, threads = SimCopies.wait_all, []
    with BufferPool(8 << 20, device=there.device, ready_bytes=1 << 20) as pool, pool.acquire(64 << 10) as lease:
        lease.tensor.fill_(7)

        def copy() -> None:
            lease.transfer = copies.copy(there, lease.tensor)

        def waited(self: SimCopies) -> None:
            wait_all(self)
            threads.append(threading.Thread(target=copy))
            threads[-1].start()
            threads[-1].join(0.2)

        monkeypatch.setattr(SimCopies, "wait_all", waited)
        pool.acquire(4 << 20).release()
        threads[0].join()
        assert lease.transfer is not None
        lease.transfer.wait()
    assert sim_device.violations() == []
    assert bool((there.cpu() == 7).all())


def test_a_pool_is_still_locked_for_a_device_that_failed_before_it_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    sim_device = simulate("sim-lazy", monkeypatch)
    sim_device.violations()

    def fails(self: SimCopies) -> None:
        raise RuntimeError("a kernel failed")

    with BufferPool(8 << 20, device=torch.device("sim", 0), ready_bytes=1 << 20) as pool:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a kernel failed"):
            patch.setattr(SimCopies, "wait_all", fails)
            pool.acquire(4 << 20)
        with pool.acquire(4 << 20) as lease:  # It would be locked a second time.
            assert torch.equal(lease.tensor.fill_(7).to("sim", non_blocking=True).cpu(), lease.tensor)
    assert sim_device.violations() == []
