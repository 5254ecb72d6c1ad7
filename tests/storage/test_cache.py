"""The cache, on real files: content under any order of calls, failures, and who gives way when the pool is short."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
import torch
from accelerators import writes_start_with_calls
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupts import interrupted_at
from sampling import ALL
from still_drive import go_on_when_waited_for, still

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.metrics import Metrics, Timeline
from swapper.storage import cache as cache_module
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted
from swapper.storage.cache import RecordCache, RecordState
from swapper.storage.cache_policies import KeptPolicy
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)

SIZE = 64 << 10
SLOW_US = 200_000


def key(number: int, owner: int = 0) -> RecordKey:
    return RecordKey(owner, "optim", number)


def fill(lease: Lease, value: int, length_bytes: int = SIZE) -> None:
    # Every 64-bit word differs, and tells which write it came from.
    words = lease.tensor[:length_bytes].view(torch.int64)
    torch.arange(value * 10_000_000, value * 10_000_000 + len(words), out=words)


def value_of(lease: Lease, length_bytes: int = SIZE) -> int:
    words = lease.tensor[:length_bytes].view(torch.int64)
    value = int(words[0]) // 10_000_000
    assert torch.equal(words, torch.arange(value * 10_000_000, value * 10_000_000 + len(words))), "torn content"
    return value


@dataclass
class World:
    """A handle, a pool, a store, and caches on them."""

    faults: FaultPlan
    handle: AsyncIOHandle
    pool: BufferPool
    store: TensorStore
    records: int
    metrics: Metrics = field(default_factory=Metrics)

    def cache(self, owner: int = 0) -> RecordCache:
        self.store.plan({key(i, owner): SIZE for i in range(self.records)})
        return RecordCache(self.pool, self.store, self.metrics)


@contextlib.contextmanager
def world(
    path: Path, buffers: int = 3, records: int = 4, block_bytes: int = 16 << 10, **faults: float
) -> Iterator[World]:
    plan = FaultPlan(**{"seed": 7, **faults})  # type: ignore[arg-type]
    handle = AsyncIOHandle(block_bytes=block_bytes, queue_depth=8, faults=plan)
    store = TensorStore([path], "run", 0, [handle])
    pool = BufferPool(buffers * SIZE, handle)
    yield World(plan, handle, pool, store, records)
    gc.collect()
    assert handle.in_flight or pool.used_bytes == 0, "a buffer was lost"  # Asked in this order: what was may be over.
    store.close()
    pool.close()
    handle.close()  # Raises what failed and nobody was told.


def write(cache: RecordCache, number: int, value: int, owner: int = 0) -> None:
    lease, _ = cache.take(key(number, owner), SIZE)
    fill(lease, value)
    cache.put(key(number, owner), SIZE)


def read(cache: RecordCache, number: int, owner: int = 0) -> int:
    lease, holds = cache.take(key(number, owner), SIZE)
    assert holds
    value = value_of(lease)
    cache.release(key(number, owner))
    return value


def check_books(cache: RecordCache) -> None:
    """What `CachedRecords` keeps count of is what a walk over all records finds."""
    books = cache.records
    by_state = {state: books.of_state(state) for state in RecordState}
    held = [record for records in by_state.values() for record in records]
    assert len(held) == len({record.key for record in held}) == len(books)
    for state, records in by_state.items():
        assert all(record.state is state and books.get(record.key) is record for record in records)
        assert books.bytes_of(state) == sum(record.lease.length_bytes for record in records)
        assert books.first(state) is (records[0] if records else None)
        assert books.last(state) is (records[-1] if records else None)
    assert books.length_bytes == sum(record.lease.length_bytes for record in held)
    writes = list(books.writes())
    assert set(map(id, writes)) == {id(record) for record in held if record.writing}
    assert all(record.lease.transfer is not None for record in writes)
    assert all(record.writing for record in by_state[RecordState.LEAVING])
    assert not any(record.writing for record in by_state[RecordState.LIVE] + by_state[RecordState.FAILED])
    assert not any(record.lease.released for record in held)


def end(cache: RecordCache, records: int = 4, owner: int = 0) -> None:
    for i in range(records):
        cache.forget(key(i, owner))


# --- One record -------------------------------------------------------------------------------------------------------


def test_nothing_is_stored_at_first(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        assert cache.stage(key(0), SIZE), "nothing to do is as good as done"
        lease, holds = cache.take(key(0), SIZE)
        assert not holds
        assert lease.length_bytes == SIZE
        cache.release(key(0))
        assert cache.take(key(0), SIZE)[1] is False, "what was never put is not there"
        cache.release(key(0))
        assert w.faults.reads == w.faults.writes == 0
        assert w.pool.used_bytes == 0


def test_what_was_put_is_read_back(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        write(cache, 0, 5)
        cache.flush()
        assert w.pool.used_bytes == 0
        assert cache.stage(key(0), SIZE)
        assert w.pool.used_bytes == SIZE
        assert read(cache, 0) == 5
        assert w.pool.used_bytes == 0, "given back at once"
        assert (w.metrics.reads, w.metrics.writes) == (1, 1)
        assert w.metrics.bytes_read == w.metrics.bytes_written == SIZE


def test_a_record_may_be_shorter_than_its_buffer(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        lease, _ = cache.take(key(0), SIZE)
        fill(lease, 3, 8192)
        cache.put(key(0), 8192)
        cache.flush()
        assert w.metrics.bytes_written == 8192
        lease, _ = cache.take(key(0), SIZE)
        assert value_of(lease, 8192) == 3
        assert w.metrics.bytes_read == 8192
        cache.release(key(0))


def test_put_returns_at_once_and_flush_waits(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        cache = w.cache()
        lease, _ = cache.take(key(0), SIZE)
        fill(lease, 1)
        with still(w.faults):
            cache.put(key(0), SIZE)
            assert w.handle.in_flight == 1
        cache.flush()
        assert w.handle.in_flight == 0
        assert w.metrics.wait_write_s > 0


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "taken"])
def test_a_record_wanted_again_while_it_is_written_is_not_read(
    nvme_path: Path, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        with still(w.faults):
            write(cache, 0, 5)
            assert w.handle.in_flight == 1
            if staged:
                assert cache.stage(key(0), SIZE)
            go_on_when_waited_for(monkeypatch, w.faults)
            assert read(cache, 0) == 5
        assert w.faults.reads == 0
        cache.flush()
        # And it is on disk too.
        assert read(cache, 0) == 5
        assert w.faults.reads > 0


def test_a_buffer_is_not_changed_before_it_is_written(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        cache = w.cache()
        for value in range(3):
            lease, _ = cache.take(key(0), SIZE)  # waits for the write before it
            assert w.handle.in_flight == 0
            fill(lease, value)
            with still(w.faults):
                cache.put(key(0), SIZE)
                assert w.handle.in_flight == 1
        cache.flush()
        assert read(cache, 0) == 2


def test_a_second_take_is_a_bug_that_is_caught(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        lease, _ = cache.take(key(0), SIZE)
        with pytest.raises(AssertionError, match="in use already"):
            cache.take(key(0), SIZE)
        assert cache.stage(key(0), SIZE)
        assert not lease.released
        fill(lease, 1)
        cache.put(key(0), SIZE)
        with pytest.raises(AssertionError, match="not in use"):
            cache.put(key(0), SIZE)
        cache.flush()


def test_discard_forgets_and_forget_deletes(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        cache = w.cache()
        for i in range(3):
            write(cache, i, i)
        cache.discard(key(0))  # while it is written
        cache.forget(key(1))
        cache.forget(key(1))
        assert cache.take(key(0), SIZE)[1] is False
        cache.release(key(0))
        assert read(cache, 2) == 2
        names = {path.name for path in w.store.directories[0].iterdir()}
        assert names == {"lock", key(0).file_name, key(2).file_name, key(3).file_name}
        cache.flush()


def test_dropping_what_was_prefetched_gives_its_buffers_back(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        cache = w.cache()
        for i in range(3):
            write(cache, i, i)
        cache.flush()
        assert cache.stage(key(0), SIZE)
        assert cache.stage(key(1), SIZE)
        lease, _ = cache.take(key(2), SIZE)
        assert not cache.stage(key(3), SIZE) or w.store.stored_bytes(key(3)) == 0
        assert cache.drop_prefetched()
        assert not cache.drop_prefetched()
        assert value_of(lease) == 2
        assert read(cache, 0) == 0
        cache.release(key(2))


def test_a_full_pool_stages_nothing_and_loses_nothing(nvme_path: Path) -> None:
    with world(nvme_path, buffers=2) as w:
        cache = w.cache()
        for i in range(4):
            write(cache, i, i)
        cache.flush()
        assert [cache.stage(key(i), SIZE) for i in range(4)] == [True, True, False, False]
        assert [read(cache, i) for i in range(4)] == [0, 1, 2, 3]
        assert w.pool.peak_used_bytes <= 2 * SIZE


def test_what_is_kept_is_written_through_and_never_read(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        cache.keep([key(0)])
        for value in range(3):
            write(cache, 0, value)
            cache.flush()
            assert w.pool.used_bytes == SIZE
            assert read(cache, 0) == value
        assert w.faults.reads == 0
        assert w.metrics.bytes_written == 3 * SIZE
        cache.keep([])
        assert w.pool.used_bytes == 0, "what is not resident any more leaves"
        assert read(cache, 0) == 2
        assert w.faults.reads > 0


def test_a_record_that_is_to_be_kept_and_was_never_put_holds_nothing(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        cache.keep([key(0)])
        cache.take(key(0), SIZE)
        cache.release(key(0))
        assert cache.take(key(0), SIZE)[1] is False
        cache.release(key(0))


def test_recover_gives_back_what_was_taken_and_lets_writes_go_on(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        cache = w.cache()
        for i in range(2):
            write(cache, i, i)
        cache.flush()
        cache.stage(key(0), SIZE)
        write(cache, 2, 22)
        lease, _ = cache.take(key(1), SIZE)
        lease.tensor.zero_()
        cache.recover()
        assert read(cache, 1) == 1, "what was changed and not put is as before"
        assert read(cache, 2) == 22
        assert read(cache, 0) == 0
        cache.flush()


def test_everything_is_counted(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(nvme_path, buffers=1) as w, Timeline() as timeline:
        cache = w.cache()
        go_on_when_waited_for(monkeypatch, w.faults)
        with still(w.faults):
            for i in range(4):
                write(cache, i, i)
        cache.flush()
        with still(w.faults):
            for i in range(4):
                assert read(cache, i) == i
        assert (w.metrics.writes, w.metrics.reads) == (4, 4)
        cache.stage(key(0), SIZE)
        while w.handle.in_flight:
            time.sleep(0.001)
        hits = w.metrics.hits
        assert read(cache, 0) == 0
        assert w.metrics.hits == hits + 1
        assert {event.name for event in timeline.events()} >= {"swapper.wait_write", "swapper.wait_read"}


# --- Without a store --------------------------------------------------------------------------------------------------


def test_without_a_store_records_stay_in_the_pool() -> None:
    with BufferPool(4 * SIZE) as pool:
        cache = RecordCache(pool, None, Metrics())
        for i in range(4):
            write(cache, i, i)
        assert pool.used_bytes == 4 * SIZE
        cache.flush()
        cache.drop_prefetched()
        for i in range(4):
            assert cache.stage(key(i), SIZE)
            assert read(cache, i) == i
        with pytest.raises(PoolExhausted):
            cache.take(key(4), SIZE)
        assert read(cache, 3) == 3, "nothing gives way where there is no other copy"
        cache.discard(key(0))
        assert pool.used_bytes == 3 * SIZE
        for i in range(4):
            cache.forget(key(i))
        assert pool.used_bytes == 0


def test_without_a_store_what_was_never_put_is_not_kept() -> None:
    with BufferPool(SIZE) as pool:
        cache = RecordCache(pool, None, Metrics())
        assert cache.take(key(0), SIZE)[1] is False
        cache.release(key(0))
        assert cache.take(key(0), SIZE)[1] is False
        cache.recover()
        assert pool.used_bytes == 0


def test_without_a_store_an_interrupted_step_does_not_lose_the_only_copy() -> None:
    with BufferPool(2 * SIZE) as pool:
        cache = RecordCache(pool, None, Metrics())
        write(cache, 0, 5)
        cache.take(key(0), SIZE)
        cache.recover()
        assert read(cache, 0) == 5
        cache.forget(key(0))


# --- Failures ---------------------------------------------------------------------------------------------------------


def is_the_write_of(error: SwapIOError, number: int) -> bool:
    return error.errno == errno.EIO and error.operation == "write" and error.path.endswith(key(number).file_name)


def every_call(cache: RecordCache) -> list[Callable[[], object]]:
    return [
        lambda: cache.stage(key(1), SIZE),
        lambda: cache.take(key(1), SIZE),
        lambda: cache.take(key(0), SIZE),
        lambda: cache.stage(key(0), SIZE),
        cache.flush,
        cache.flush,
    ]


@pytest.mark.parametrize("resident", [False, True], ids=["leaving", "kept"])
@pytest.mark.parametrize("wanted_again", [False, True], ids=["", "wanted again"])
def test_a_failed_write_is_raised_by_every_call_until_it_is_discarded(
    nvme_path: Path, resident: bool, wanted_again: bool
) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        cache.keep([key(0)] if resident else [])
        for i in range(2):
            write(cache, i, i)
        cache.flush()
        lease, _ = cache.take(key(0), SIZE)
        fill(lease, 7)
        w.faults.fail_write_at = 2
        # The call that starts it may see it already.
        with contextlib.suppress(SwapIOError):
            cache.put(key(0), SIZE)
        if wanted_again:
            with contextlib.suppress(SwapIOError):
                cache.stage(key(0), SIZE)
        while w.handle.in_flight:
            time.sleep(0.001)
        for turn in range(2):
            for call in every_call(cache):
                with pytest.raises(SwapIOError) as caught:
                    call()
                assert is_the_write_of(caught.value, 0)
            cache.recover()  # never raises
            cache.drop_prefetched()
            assert w.pool.used_bytes <= SIZE, turn
        cache.discard(key(0))
        assert cache.take(key(0), SIZE)[1] is False, "neither the old nor the new record is there"
        cache.release(key(0))
        assert read(cache, 1) == 1
        cache.flush()
        write(cache, 0, 9)
        cache.flush()
        assert read(cache, 0) == 9
        cache.keep([])


def test_flush_waits_for_all_and_raises_the_first(nvme_path: Path) -> None:
    with world(nvme_path, buffers=4, block_bytes=SIZE, delay_us=50_000) as w:
        cache = w.cache()
        w.faults.fail_write_at = 2
        for i in range(4):
            with contextlib.suppress(SwapIOError):
                lease, _ = cache.take(key(i), SIZE)
                fill(lease, i)
                cache.put(key(i), SIZE)
        with pytest.raises(SwapIOError) as caught:
            cache.flush()
        assert is_the_write_of(caught.value, 1)
        assert w.handle.in_flight == 0
        assert w.pool.used_bytes <= 2 * SIZE
        cache.recover()
        cache.forget(key(1))
        assert read(cache, 0) == 0
        cache.flush()
        assert w.pool.used_bytes == 0


def test_two_failed_writes_are_raised_one_after_the_other(nvme_path: Path) -> None:
    with world(nvme_path, buffers=4) as w:
        cache = w.cache()
        leases = [cache.take(key(i), SIZE)[0] for i in range(2)]
        for i, lease in enumerate(leases):
            fill(lease, i)
            w.faults.fail_write_at = 1
            with contextlib.suppress(SwapIOError):
                cache.put(key(i), SIZE)
            while w.handle.in_flight:
                time.sleep(0.001)
        for i in range(2):
            with pytest.raises(SwapIOError) as caught:
                cache.flush()
            assert is_the_write_of(caught.value, i)
            cache.discard(key(i))
        cache.flush()


def test_forgetting_everything_ends_a_failure(nvme_path: Path) -> None:
    # As `close` does it: the failure is told by `flush`, and not a second time by the handle.
    with world(nvme_path) as w:
        cache = w.cache()
        w.faults.fail_write_at = 1
        with contextlib.suppress(SwapIOError):
            write(cache, 0, 1)
        with pytest.raises(SwapIOError):
            cache.flush()
        end(cache)
        assert w.pool.used_bytes == 0
        assert w.handle.unobserved_failures == 0


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "taken"])
def test_a_failed_read_is_raised_and_may_be_tried_again(nvme_path: Path, staged: bool) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        write(cache, 0, 5)
        cache.flush()
        w.faults.fail_read_at = 1
        if staged:
            assert cache.stage(key(0), SIZE)
        with pytest.raises(SwapIOError) as caught:
            cache.take(key(0), SIZE)
        assert (caught.value.errno, caught.value.operation) == (errno.EIO, "read")
        assert caught.value.path.endswith(key(0).file_name)
        assert w.pool.used_bytes == 0
        cache.flush()
        assert read(cache, 0) == 5


@pytest.mark.parametrize("when", ["finished", "in flight"])
def test_after_a_failed_read_what_was_read_ahead_is_read_again(nvme_path: Path, when: str) -> None:
    with world(nvme_path, delay_us=0 if when == "finished" else 50_000) as w:
        cache = w.cache()
        for number in range(3):
            write(cache, number, number + 1)
        cache.flush()
        files = [w.store.directories[0] / key(number).file_name for number in range(3)]
        contents = [file.read_bytes() for file in files]
        for file in files:
            os.truncate(file, SIZE // 2)
        for number in range(3):
            assert cache.stage(key(number), SIZE)
        while when == "finished" and w.handle.in_flight:
            time.sleep(0.001)
        with pytest.raises(SwapIOError):
            cache.take(key(0), SIZE)
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        assert [read(cache, number) for number in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("when", ["finished", "in flight"])
def test_a_failed_read_that_nobody_wanted_is_no_failure(nvme_path: Path, when: str) -> None:
    with world(nvme_path, delay_us=0 if when == "finished" else 50_000) as w:
        cache = w.cache()
        write(cache, 0, 5)
        cache.flush()
        w.faults.fail_read_at = 1
        assert cache.stage(key(0), SIZE)
        while when == "finished" and w.handle.in_flight:
            time.sleep(0.001)
        assert cache.drop_prefetched()
        cache.flush()
        assert w.handle.unobserved_failures == 0
        assert w.pool.used_bytes == 0


def test_a_file_that_was_cut_short_is_an_error(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        cache = w.cache()
        write(cache, 0, 5)
        cache.flush()
        with open(w.store.directories[0] / key(0).file_name, "r+b") as file:
            file.truncate(SIZE // 2)
        with pytest.raises(SwapIOError) as caught:
            cache.take(key(0), SIZE)
        assert caught.value.errno == errno.ENODATA


# --- A pool that is short ---------------------------------------------------------------------------------------------


def test_a_pool_that_others_hold_is_said(nvme_path: Path) -> None:
    with world(nvme_path, buffers=2) as w, w.pool.acquire(2 * SIZE):
        cache = w.cache()
        with pytest.raises(PoolExhausted, match=f"set pool_bytes to at least {3 * SIZE}$"):
            cache.take(key(0), SIZE)


def test_read_ahead_of_another_cache_gives_way(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        one, two = w.cache(1), w.cache(2)
        for i in range(3):
            write(one, i, i, owner=1)
        one.flush()
        assert all(one.stage(key(i, 1), SIZE) for i in range(3))
        assert not two.stage(key(0, 2), SIZE) or w.store.stored_bytes(key(0, 2)) == 0
        write(two, 0, 77, owner=2)
        assert [read(one, i, owner=1) for i in range(3)] == [0, 1, 2]
        assert read(two, 0, owner=2) == 77
        one.flush()
        two.flush()


@pytest.mark.long
@pytest.mark.parametrize("wanted_again", [False, True], ids=["leaving", "wanted again"])
def test_what_another_cache_is_writing_is_waited_for(nvme_path: Path, wanted_again: bool) -> None:
    # Two optimizers on one pool: the second steps while the first still writes.
    with world(nvme_path, delay_us=SLOW_US) as w:
        one, two = w.cache(1), w.cache(2)
        for i in range(3):
            write(one, i, i, owner=1)
        if wanted_again:
            assert all(one.stage(key(i, 1), SIZE) for i in range(3))
        assert w.pool.used_bytes == 3 * SIZE
        write(two, 0, 77, owner=2)
        assert [read(one, i, owner=1) for i in range(3)] == [0, 1, 2]
        assert read(two, 0, owner=2) == 77
        one.flush()
        two.flush()


def test_a_lease_from_the_pool_waits_for_writes_too(nvme_path: Path) -> None:
    # A step takes its scratch from the pool itself, while the step before is still being written.
    with world(nvme_path, delay_us=SLOW_US) as w:
        cache = w.cache()
        for i in range(3):
            write(cache, i, i)
        with w.pool.acquire(2 * SIZE):
            pass
        assert [read(cache, i) for i in range(3)] == [0, 1, 2]
        cache.flush()


def test_a_failed_write_of_another_cache_is_its_own(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(nvme_path) as w:
        one, two = w.cache(1), w.cache(2)
        w.faults.fail_write_at = 1
        with still(w.faults):  # Else the next `take` may raise it.
            for i in range(3):
                write(one, i, i, owner=1)
            go_on_when_waited_for(monkeypatch, w.faults)
            write(two, 0, 77, owner=2)
        two.flush()
        with pytest.raises(SwapIOError) as caught:
            one.flush()
        assert caught.value.path.endswith(key(0, 1).file_name)
        one.forget(key(0, 1))
        one.flush()


@pytest.mark.long
@pytest.mark.parametrize("resident", [False, True], ids=["", "resident"])
def test_what_is_wanted_again_while_it_is_written_gives_way(nvme_path: Path, resident: bool) -> None:
    # Staged are records that this time nobody takes: their parameters have no gradient.
    with world(nvme_path, delay_us=SLOW_US) as w:
        cache = w.cache()
        cache.keep([key(2)] if resident else [])
        for i in range(3):
            write(cache, i, i)
        assert all(cache.stage(key(i), SIZE) for i in range(3))
        leases = [cache.take(key(3), SIZE)[0]]
        fill(leases[0], 33)
        cache.put(key(3), SIZE)
        assert [read(cache, i) for i in range(4)] == [0, 1, 2, 33]
        cache.flush()
        cache.keep([])


class Rewriting(KeptPolicy):
    """Keeps what could not be written, to write it again."""

    rewrites = True


def test_flush_waits_for_the_writes_after_one_that_failed(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        w.store.plan({key(i): SIZE for i in range(3)})
        cache = RecordCache(w.pool, w.store, w.metrics, Rewriting())
        w.faults.fail_write_at = 1
        with still(w.faults):  # Else the next `take` may raise it.
            for i in range(3):
                write(cache, i, i)
        transfers = [record.lease.transfer for record in cache.records]
        with pytest.raises(SwapIOError):
            cache.flush()
        assert all(transfer is None or transfer.done() for transfer in transfers)
        cache.flush()
        for i in range(3):
            cache.discard(key(i))


def test_reading_ahead_joins_pieces_only_while_few_are_on_their_way(nvme_path: Path) -> None:
    with world(nvme_path, buffers=24, records=24) as w:
        cache = w.cache()
        cache.keep([key(i) for i in range(1, 24, 2)])
        leases = [cache.take(key(i), SIZE)[0] for i in range(24)]
        for i, lease in enumerate(leases):
            fill(lease, i)
            cache.put(key(i), SIZE)
        w.store.plan({key(99): 2 * SIZE})
        lease, _ = cache.take(key(99), 2 * SIZE)
        fill(lease, 99, 2 * SIZE)
        cache.put(key(99), 2 * SIZE)
        del leases, lease
        cache.flush()
        assert w.pool.used_bytes == 12 * SIZE  # a kept record between any two free pieces
        for i in range(0, 16, 2):
            assert cache.stage(key(i), SIZE)
        assert not cache.stage(key(99), 2 * SIZE)
        assert w.pool.used_bytes == 20 * SIZE
        assert [read(cache, i) for i in range(24)] == list(range(24))
        assert cache.stage(key(99), 2 * SIZE)
        assert w.pool.used_bytes == 14 * SIZE
        lease, _ = cache.take(key(99), 2 * SIZE)
        assert value_of(lease, 2 * SIZE) == 99
        cache.release(key(99))
        cache.keep([])
        cache.flush()


@pytest.mark.parametrize("joins", [True, False])
def test_kept_records_that_split_the_pool_give_way_only_where_pieces_cannot_be_joined(
    joins: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Free are three buffers' worth, but in pieces: a kept record lies between any two.
    if not joins:
        monkeypatch.setattr(BufferPool, "_cannot_gather", "for this test")
    with world(nvme_path, buffers=6, records=6) as w:
        cache = w.cache()
        cache.keep([key(1), key(3), key(5)])
        leases = [cache.take(key(i), SIZE)[0] for i in range(6)]
        for i, lease in enumerate(leases):
            fill(lease, i)
            cache.put(key(i), SIZE)
        del leases
        cache.flush()
        assert w.pool.used_bytes == 3 * SIZE
        w.store.plan({key(9): 2 * SIZE})
        lease, _ = cache.take(key(9), 2 * SIZE)
        assert (w.pool.used_bytes == 5 * SIZE) == joins
        fill(lease, 99, 2 * SIZE)
        cache.put(key(9), 2 * SIZE)
        assert [read(cache, i) for i in range(6)] == list(range(6))
        lease, _ = cache.take(key(9), 2 * SIZE)
        assert value_of(lease, 2 * SIZE) == 99
        cache.release(key(9))
        cache.keep([])
        cache.flush()


def test_a_cache_that_is_collected_is_not_asked(nvme_path: Path) -> None:
    with world(nvme_path, buffers=1) as w:
        one, two = w.cache(1), w.cache(2)
        write(one, 0, 1, owner=1)
        one.flush()
        assert one.stage(key(0, 1), SIZE)
        del one
        gc.collect()
        write(two, 0, 2, owner=2)
        two.flush()
        assert read(two, 0, owner=2) == 2


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_staging_from_other_threads_while_one_takes(nvme_path: Path) -> None:
    records, turns = 12, 12
    failures: list[BaseException] = []
    over = threading.Event()
    with world(nvme_path, buffers=4, records=records, delay_us=500, reorder=True) as w:
        cache = w.cache()
        other = w.cache(1)
        for i in range(records):
            write(cache, i, i)

        def stage(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while not over.is_set():
                    cache.stage(key(rng.randrange(records)), SIZE)
                    if rng.random() < 0.05:
                        cache.drop_prefetched()
                    if rng.random() < 0.05:
                        w.pool.used_bytes  # noqa: B018
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=stage, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(turns):
                for i in range(records):
                    # One buffer may be on its way to another thread that stages, so ask until it comes.
                    lease, holds = take_patiently(cache, key(i))
                    assert holds
                    assert value_of(lease) == turn * 100 + i
                    fill(lease, (turn + 1) * 100 + i)
                    cache.put(key(i), SIZE)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failures
        cache.flush()
        assert [read(cache, i) for i in range(records)] == [turns * 100 + i for i in range(records)]
        end(other, records, 1)


def take_patiently(cache: RecordCache, wanted: RecordKey) -> tuple[Lease, bool]:
    stop = time.monotonic() + 240
    while True:
        try:
            return cache.take(wanted, SIZE)
        except PoolExhausted:
            assert time.monotonic() < stop
            time.sleep(0.001)


def test_caches_of_two_threads_share_a_pool(nvme_path: Path) -> None:
    # Each may find the other busy, and then says so; what it never does is to mix up buffers or to hang.
    failures: list[BaseException] = []
    with world(nvme_path, buffers=4, records=5, delay_us=300, reorder=True) as w:
        caches = [w.cache(owner) for owner in range(3)]

        def work(owner: int) -> None:
            cache = caches[owner]
            try:
                for turn in range(30):
                    for i in range(5):
                        wanted = key(i, owner)
                        stop = time.monotonic() + 240
                        while True:
                            try:
                                cache.stage(key((i + 1) % 5, owner), SIZE)
                                lease, holds = cache.take(wanted, SIZE)
                                break
                            except PoolExhausted:
                                assert time.monotonic() < stop
                                time.sleep(0.001)
                        assert holds == (turn > 0)
                        assert not holds or value_of(lease) == owner * 10_000 + (turn - 1) * 10 + i
                        fill(lease, owner * 10_000 + turn * 10 + i)
                        cache.put(wanted, SIZE)
                cache.flush()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(owner,)) for owner in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


# --- Any order of calls -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("resident", [0, 2], ids=["", "two kept"])
def test_content_is_right_in_any_order_of_calls(nvme_path: Path, seed: int, resident: int) -> None:
    """Two caches on one small pool, a drive that is slow and answers in any order; compared with two dicts."""
    rng = random.Random(seed)
    records = 6
    faults = {"delay_us": 2000, "reorder": True, "short": 0.2, "eagain": 0.1, "eintr": 0.1, "seed": seed}
    with world(nvme_path, buffers=3 + resident, records=records, **faults) as w:
        caches = [w.cache(owner) for owner in range(2)]
        caches[0].keep(key(i, 0) for i in range(resident))
        expected: list[dict[int, int]] = [{}, {}]
        for turn in range(400):
            owner = rng.randrange(2)
            cache, number = caches[owner], rng.randrange(records)
            wanted = key(number, owner)
            action = rng.choice(["stage"] * 4 + ["write"] * 4 + ["read"] * 4 + ["drop", "drain", "discard", "recover"])
            if action == "stage":
                cache.stage(wanted, SIZE)
            elif action == "write":
                write(cache, number, turn, owner)
                expected[owner][number] = turn
            elif action == "read":
                lease, holds = cache.take(wanted, SIZE)
                assert holds == (number in expected[owner])
                assert not holds or value_of(lease) == expected[owner][number]
                cache.release(wanted)
            elif action == "drop":
                cache.drop_prefetched()
            elif action == "drain":
                cache.flush()
            elif action == "discard":
                cache.discard(wanted)
                expected[owner].pop(number, None)
            else:
                lease, _ = cache.take(wanted, SIZE)
                lease.tensor.fill_(255)
                cache.recover()
            check_books(cache)
        for owner, cache in enumerate(caches):
            cache.keep([])
            cache.flush()
            for number, value in expected[owner].items():
                assert read(cache, number, owner) == value


class CacheMachine(RuleBasedStateMachine):
    """Random calls, failing writes among them; the model is a dict, and which records had a failed write."""

    path: Path

    @initialize(buffers=st.integers(1, 4), delay_us=st.sampled_from([0, 1000]), resident=st.integers(0, 1))
    def start(self, buffers: int, delay_us: int, resident: int) -> None:
        self.faults = FaultPlan(seed=1, delay_us=delay_us, reorder=bool(delay_us))
        self.handle = AsyncIOHandle(backend="threads", block_bytes=SIZE, queue_depth=4, faults=self.faults)
        self.store = TensorStore([self.path], f"run{id(self)}", 0, [self.handle])
        self.pool = BufferPool((buffers + resident) * SIZE, self.handle)
        self.cache = RecordCache(self.pool, self.store, Metrics())
        self.store.plan({key(i): SIZE for i in range(4)})
        self.cache.keep([key(i) for i in range(resident)])
        self.expected: dict[int, int] = {}
        self.failed: set[int] = set()
        self.clock = 0

    def attempt(self, call: Callable[[], object]) -> bool:
        """Whether `call` went through; it may raise only if a write has failed."""
        try:
            call()
            return True
        except SwapIOError as error:
            assert self.failed, "raised without a failure, or after it was discarded"
            assert any(is_the_write_of(error, number) for number in self.failed)
            return False

    def settle(self) -> None:
        while self.handle.in_flight:
            time.sleep(0.0001)

    @rule(number=st.integers(0, 3))
    def stage(self, number: int) -> None:
        self.attempt(lambda: self.cache.stage(key(number), SIZE))

    @rule(number=st.integers(0, 3), fails=st.booleans())
    def write(self, number: int, fails: bool) -> None:
        taken: list[Lease] = []
        if not self.attempt(lambda: taken.append(self.cache.take(key(number), SIZE)[0])):
            return
        assert number not in self.failed
        self.clock += 1
        fill(taken[0], self.clock)
        if fails:
            self.settle()  # The next request is then this write's.
            self.failed.add(number)
            self.faults.fail_write_at = 1
        self.expected[number] = self.clock
        self.attempt(lambda: self.cache.put(key(number), SIZE))
        while fails and self.faults.fail_write_at:
            time.sleep(0.0001)

    @rule(number=st.integers(0, 3))
    def read(self, number: int) -> None:
        taken: list[tuple[Lease, bool]] = []
        if not self.attempt(lambda: taken.append(self.cache.take(key(number), SIZE))):
            return
        assert number not in self.failed, "a record whose write failed was handed out"
        lease, holds = taken[0]
        assert holds == (number in self.expected)
        assert not holds or value_of(lease) == self.expected[number]
        self.cache.release(key(number))

    @rule(number=st.integers(0, 3))
    def failed_read(self, number: int) -> None:
        self.settle()
        self.faults.fail_read_at = 1
        try:
            self.cache.take(key(number), SIZE)
            self.cache.release(key(number))
        except SwapIOError as error:
            assert self.failed or error.operation == "read"
        self.faults.fail_read_at = 0

    @rule()
    def drop(self) -> None:
        self.cache.drop_prefetched()

    @rule()
    def flush(self) -> None:
        assert self.attempt(self.cache.flush) == (not self.failed)

    @rule()
    def recover(self) -> None:
        self.cache.recover()

    @rule(number=st.integers(0, 3))
    def discard(self, number: int) -> None:
        self.cache.discard(key(number))
        self.expected.pop(number, None)
        self.failed.discard(number)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_lost(self) -> None:
        assert not self.cache.records.of_state(RecordState.LIVE)
        check_books(self.cache)
        assert self.pool.used_bytes <= self.pool.capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        with contextlib.suppress(SwapIOError):
            self.cache.flush()
        for i in range(4):
            self.cache.forget(key(i))
        assert self.pool.used_bytes == 0
        self.store.close()
        self.pool.close()
        self.handle.close()  # Every failure was told.


def test_failures_in_any_order_of_calls(nvme_path: Path) -> None:
    class Machine(CacheMachine):
        path = nvme_path

    Machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase("runTest").runTest()
    assert not list(nvme_path.iterdir())


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def interrupted_at_line(number: int, work: Callable[[], None]) -> bool:
    """Run `work`, with SIGINT before the `number`-th line of the cache that it executes. Whether it came so far."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != cache_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    former = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)


@pytest.mark.long
@pytest.mark.parametrize("resident", [False, True], ids=["", "one kept"])
def test_an_interrupt_at_any_line_mixes_up_no_buffers(nvme_path: Path, resident: bool) -> None:
    with world(nvme_path, buffers=3, delay_us=100) as w:
        cache = w.cache()
        cache.keep([key(0)] if resident else [])
        line = 0
        while line < 5000:
            line += 2
            for i in range(4):
                write(cache, i, line * 10 + i)
            started: set[int] = set()

            def work(line: int = line, started: set[int] = started) -> None:
                for i in range(4):
                    for ahead in range(i, 4):
                        cache.stage(key(ahead), SIZE)
                    lease, holds = cache.take(key(i), SIZE)
                    assert holds
                    assert value_of(lease) == line * 10 + i
                    started.add(i)
                    fill(lease, line * 10 + 5 + i)
                    cache.put(key(i), SIZE)
                cache.flush()

            came = interrupted_at_line(line, work)
            check_books(cache)
            cache.recover()
            cache.flush()
            for i in range(4):
                assert read(cache, i) in {line * 10 + i, line * 10 + 5 + i if i in started else -1}
            while w.handle.in_flight:  # What was read ahead and given back goes on, in its buffer.
                time.sleep(0.0005)
            assert w.pool.used_bytes <= SIZE * resident, f"a buffer was lost at line {line}"
            if not came:
                break
        assert 50 < line < 5000, line
        cache.keep([])


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "stride"), [("storage/cache.py", 5), ("storage/cached_records.py", 1)], ids=["cache", "books"]
)
def test_ctrl_c_anywhere_leaves_the_books_right(nvme_path: Path, place: str, stride: int) -> None:
    with world(nvme_path, buffers=3) as w:
        cache = w.cache()
        cache.keep([key(3)])
        for n in range(0, 5000, stride):
            for i in range(4):
                write(cache, i, i)

            def work() -> None:
                for i in range(4):
                    for ahead in range(i, 4):
                        cache.stage(key(ahead), SIZE)
                    cache.take(key(i), SIZE)
                    cache.put(key(i), SIZE) if i % 2 else cache.release(key(i))
                cache.drop_prefetched()
                w.pool.reclaim()
                cache.flush()

            interrupted = interrupted_at(n, work, place)
            check_books(cache)
            cache.recover()
            cache.flush()
            check_books(cache)
            assert [read(cache, i) for i in range(4)] == [0, 1, 2, 3]
            while w.handle.in_flight:
                time.sleep(0.0005)
            assert w.pool.used_bytes <= SIZE
            if not interrupted:
                break
        assert n > 10
        assert not interrupted
        cache.keep([])


class CopyOfDevice:
    """Is over when the test says so."""

    over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout: float | None = None) -> int:
        self.over = True
        return 0

    def wait_quietly(self) -> None:
        self.over = True


@pytest.mark.long
def test_ctrl_c_anywhere_loses_no_record_that_a_device_copied_and_finishes_none_twice(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes_start_with_calls(monkeypatch)
    with world(nvme_path, buffers=3) as w:
        cache = w.cache()
        for n in range(0, 5000, 1 if ALL else 3):
            write(cache, 0, 1)
            write(cache, 1, 1)
            cache.flush()
            copy, follows = CopyOfDevice(), False
            cache.discard(key(2))

            def work(copy: CopyOfDevice = copy) -> None:
                nonlocal follows
                for number, last in ((0, False), (1, True)):
                    lease, _ = cache.take(key(number), SIZE)
                    fill(lease, 2)
                    lease.transfer = copy

                    def finish(lease: Lease = lease) -> int:
                        lease.tensor[:SIZE].view(torch.int64).add_(10_000_000)
                        return SIZE

                    cache.put(key(number), finish)
                    if last:
                        copy.over = True
                        cache.check()
                    else:
                        follows = True
                        cache.take(key(number), SIZE, follows=True)
                        cache.put(key(number), finish)
                        follows = False
                cache.require(key(2), SIZE, anew=True)
                cache.evict(key(2))
                cache.flush()

            interrupted = interrupted_at(n, work, "storage/cache.py", "storage/cached_records.py", "storage/writes.py")
            check_books(cache)
            copy.over = True
            taken = (record := cache.records.get(key(0))) is not None and record.state is RecordState.LIVE
            cache.recover()
            cache.flush()
            check_books(cache)
            found = [read(cache, 0), read(cache, 1)]
            assert found[0] in ({1, 3} if not follows or taken else {3}), (n, found)
            assert found[1] in {1, 3}, (n, found)
            if not interrupted:
                break
        assert n > 10
        assert not interrupted
        assert found == [3, 3]
