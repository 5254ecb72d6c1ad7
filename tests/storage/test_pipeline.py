"""The pipeline, on real files: content under any order of calls, failures, and who gives way when the pool is short."""

from __future__ import annotations

import contextlib
import errno
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interrupts import interrupted_at

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.metrics import Metrics, Timeline
from swapper.storage import pipeline as pipeline_module
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted
from swapper.storage.pipeline import Pipeline, Place
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(60)

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
    """A handle, a pool, a store, and pipelines on them."""

    faults: FaultPlan
    handle: AsyncIOHandle
    pool: BufferPool
    store: TensorStore
    records: int
    metrics: Metrics = field(default_factory=Metrics)

    def pipeline(self, owner: int = 0) -> Pipeline:
        self.store.plan({key(i, owner): SIZE for i in range(self.records)})
        return Pipeline(self.pool, self.store, self.metrics)


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
    assert pool.used_bytes == 0 or handle.in_flight, "a buffer was lost"
    store.close()
    pool.close()
    handle.close()  # Raises what failed and nobody was told.


def write(pipeline: Pipeline, number: int, value: int, owner: int = 0) -> None:
    lease, _ = pipeline.take(key(number, owner), SIZE)
    fill(lease, value)
    pipeline.put(key(number, owner), SIZE)


def read(pipeline: Pipeline, number: int, owner: int = 0) -> int:
    lease, holds = pipeline.take(key(number, owner), SIZE)
    assert holds
    value = value_of(lease)
    pipeline.give_back(key(number, owner))
    return value


def check_books(pipeline: Pipeline) -> None:
    """What `HeldRecords` keeps count of is what a walk over all records finds."""
    books = pipeline._held
    by_place = {place: books.of_place(place) for place in Place}
    held = [record for records in by_place.values() for record in records]
    assert len(held) == len({record.key for record in held}) == len(books)
    for place, records in by_place.items():
        assert all(record.place is place and books.get(record.key) is record for record in records)
        assert books.bytes_of(place) == sum(record.lease.length_bytes for record in records)
        assert books.first(place) is (records[0] if records else None)
        assert books.last(place) is (records[-1] if records else None)
    assert books.length_bytes == sum(record.lease.length_bytes for record in held)
    writes = list(books.writes())
    assert set(map(id, writes)) == {id(record) for record in held if record.writing}
    assert all(record.lease.transfer is not None for record in writes)
    assert all(record.writing for record in by_place[Place.LEAVING])
    assert not any(record.writing for record in by_place[Place.LIVE] + by_place[Place.FAILED])
    assert not any(record.lease.released for record in held)


def end(pipeline: Pipeline, records: int = 4, owner: int = 0) -> None:
    for i in range(records):
        pipeline.forget(key(i, owner))


# --- One record -------------------------------------------------------------------------------------------------------


def test_nothing_is_stored_at_first(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        assert pipeline.stage(key(0), SIZE), "nothing to do is as good as done"
        lease, holds = pipeline.take(key(0), SIZE)
        assert not holds
        assert lease.length_bytes == SIZE
        pipeline.give_back(key(0))
        assert pipeline.take(key(0), SIZE)[1] is False, "what was never put is not there"
        pipeline.give_back(key(0))
        assert w.faults.reads == w.faults.writes == 0
        assert w.pool.used_bytes == 0


def test_what_was_put_is_read_back(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        write(pipeline, 0, 5)
        pipeline.drain()
        assert w.pool.used_bytes == 0
        assert pipeline.stage(key(0), SIZE)
        assert w.pool.used_bytes == SIZE
        assert read(pipeline, 0) == 5
        assert w.pool.used_bytes == 0, "given back at once"
        assert (w.metrics.reads, w.metrics.writes) == (1, 1)
        assert w.metrics.bytes_read == w.metrics.bytes_written == SIZE


def test_a_record_may_be_shorter_than_its_buffer(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        lease, _ = pipeline.take(key(0), SIZE)
        fill(lease, 3, 8192)
        pipeline.put(key(0), 8192)
        pipeline.drain()
        assert w.metrics.bytes_written == 8192
        lease, _ = pipeline.take(key(0), SIZE)
        assert value_of(lease, 8192) == 3
        assert w.metrics.bytes_read == 8192
        pipeline.give_back(key(0))


def test_put_returns_at_once_and_drain_waits(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        pipeline = w.pipeline()
        lease, _ = pipeline.take(key(0), SIZE)
        fill(lease, 1)
        start = time.monotonic()
        pipeline.put(key(0), SIZE)
        assert time.monotonic() - start < 0.05
        assert w.handle.in_flight == 1
        pipeline.drain()
        assert w.handle.in_flight == 0
        assert w.metrics.wait_write_s > 0


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "taken"])
def test_a_record_wanted_again_while_it_is_written_is_not_read(nvme_path: Path, staged: bool) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        pipeline = w.pipeline()
        write(pipeline, 0, 5)
        assert w.handle.in_flight == 1
        if staged:
            assert pipeline.stage(key(0), SIZE)
        assert read(pipeline, 0) == 5
        assert w.faults.reads == 0
        pipeline.drain()
        # And it is on disk too.
        assert read(pipeline, 0) == 5
        assert w.faults.reads > 0


def test_a_buffer_is_not_changed_before_it_is_written(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=SLOW_US) as w:
        pipeline = w.pipeline()
        for value in range(3):
            write(pipeline, 0, value)  # waits for the write before it
            assert w.handle.in_flight == 1
        pipeline.drain()
        assert read(pipeline, 0) == 2


def test_a_second_take_is_a_bug_that_is_caught(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        lease, _ = pipeline.take(key(0), SIZE)
        with pytest.raises(AssertionError, match="in use already"):
            pipeline.take(key(0), SIZE)
        assert pipeline.stage(key(0), SIZE)
        assert not lease.released
        fill(lease, 1)
        pipeline.put(key(0), SIZE)
        with pytest.raises(AssertionError, match="not in use"):
            pipeline.put(key(0), SIZE)
        pipeline.drain()


def test_discard_forgets_and_forget_deletes(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        pipeline = w.pipeline()
        for i in range(3):
            write(pipeline, i, i)
        pipeline.discard(key(0))  # while it is written
        pipeline.forget(key(1))
        pipeline.forget(key(1))
        assert pipeline.take(key(0), SIZE)[1] is False
        pipeline.give_back(key(0))
        assert read(pipeline, 2) == 2
        names = {path.name for path in w.store.directories[0].iterdir()}
        assert names == {"lock", key(0).file_name, key(2).file_name, key(3).file_name}
        pipeline.drain()


def test_drop_staged_gives_back_what_was_only_read_ahead(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        pipeline = w.pipeline()
        for i in range(3):
            write(pipeline, i, i)
        pipeline.drain()
        assert pipeline.stage(key(0), SIZE)
        assert pipeline.stage(key(1), SIZE)
        lease, _ = pipeline.take(key(2), SIZE)
        assert not pipeline.stage(key(3), SIZE) or w.store.stored_bytes(key(3)) == 0
        assert pipeline.drop_staged()
        assert not pipeline.drop_staged()
        assert value_of(lease) == 2
        assert read(pipeline, 0) == 0
        pipeline.give_back(key(2))


def test_a_full_pool_stages_nothing_and_loses_nothing(nvme_path: Path) -> None:
    with world(nvme_path, buffers=2) as w:
        pipeline = w.pipeline()
        for i in range(4):
            write(pipeline, i, i)
        pipeline.drain()
        assert [pipeline.stage(key(i), SIZE) for i in range(4)] == [True, True, False, False]
        assert [read(pipeline, i) for i in range(4)] == [0, 1, 2, 3]
        assert w.pool.peak_used_bytes <= 2 * SIZE


def test_what_is_kept_is_written_through_and_never_read(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(0)])
        for value in range(3):
            write(pipeline, 0, value)
            pipeline.drain()
            assert w.pool.used_bytes == SIZE
            assert read(pipeline, 0) == value
        assert w.faults.reads == 0
        assert w.metrics.bytes_written == 3 * SIZE
        pipeline.keep([])
        assert w.pool.used_bytes == 0, "what is not resident any more leaves"
        assert read(pipeline, 0) == 2
        assert w.faults.reads > 0


def test_a_record_that_is_to_be_kept_and_was_never_put_holds_nothing(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(0)])
        pipeline.take(key(0), SIZE)
        pipeline.give_back(key(0))
        assert pipeline.take(key(0), SIZE)[1] is False
        pipeline.give_back(key(0))


def test_recover_gives_back_what_was_taken_and_lets_writes_go_on(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=20_000) as w:
        pipeline = w.pipeline()
        for i in range(2):
            write(pipeline, i, i)
        pipeline.drain()
        pipeline.stage(key(0), SIZE)
        write(pipeline, 2, 22)
        lease, _ = pipeline.take(key(1), SIZE)
        lease.tensor.zero_()
        pipeline.recover()
        assert read(pipeline, 1) == 1, "what was changed and not put is as before"
        assert read(pipeline, 2) == 22
        assert read(pipeline, 0) == 0
        pipeline.drain()


def test_everything_is_counted(nvme_path: Path) -> None:
    with world(nvme_path, buffers=1) as w, Timeline() as timeline:
        pipeline = w.pipeline()
        for i in range(4):
            write(pipeline, i, i)
        for i in range(4):
            assert read(pipeline, i) == i
        assert (w.metrics.writes, w.metrics.reads) == (4, 4)
        pipeline.stage(key(0), SIZE)
        while w.handle.in_flight:
            time.sleep(0.001)
        hits = w.metrics.hits
        assert read(pipeline, 0) == 0
        assert w.metrics.hits == hits + 1
        assert {event.name for event in timeline.events()} >= {"swapper.wait_write", "swapper.wait_read"}


# --- Without a store --------------------------------------------------------------------------------------------------


def test_without_a_store_records_stay_in_the_pool() -> None:
    with BufferPool(4 * SIZE) as pool:
        pipeline = Pipeline(pool, None, Metrics())
        for i in range(4):
            write(pipeline, i, i)
        assert pool.used_bytes == 4 * SIZE
        pipeline.drain()
        pipeline.drop_staged()
        for i in range(4):
            assert pipeline.stage(key(i), SIZE)
            assert read(pipeline, i) == i
        with pytest.raises(PoolExhausted):
            pipeline.take(key(4), SIZE)
        assert read(pipeline, 3) == 3, "nothing gives way where there is no other copy"
        pipeline.discard(key(0))
        assert pool.used_bytes == 3 * SIZE
        for i in range(4):
            pipeline.forget(key(i))
        assert pool.used_bytes == 0


def test_without_a_store_what_was_never_put_is_not_kept() -> None:
    with BufferPool(SIZE) as pool:
        pipeline = Pipeline(pool, None, Metrics())
        assert pipeline.take(key(0), SIZE)[1] is False
        pipeline.give_back(key(0))
        assert pipeline.take(key(0), SIZE)[1] is False
        pipeline.recover()
        assert pool.used_bytes == 0


def test_without_a_store_an_interrupted_step_does_not_lose_the_only_copy() -> None:
    with BufferPool(2 * SIZE) as pool:
        pipeline = Pipeline(pool, None, Metrics())
        write(pipeline, 0, 5)
        pipeline.take(key(0), SIZE)
        pipeline.recover()
        assert read(pipeline, 0) == 5
        pipeline.forget(key(0))


# --- Failures ---------------------------------------------------------------------------------------------------------


def is_the_write_of(error: SwapIOError, number: int) -> bool:
    return error.errno == errno.EIO and error.operation == "write" and error.path.endswith(key(number).file_name)


def every_call(pipeline: Pipeline) -> list[Callable[[], object]]:
    return [
        lambda: pipeline.stage(key(1), SIZE),
        lambda: pipeline.take(key(1), SIZE),
        lambda: pipeline.take(key(0), SIZE),
        lambda: pipeline.stage(key(0), SIZE),
        pipeline.drain,
        pipeline.drain,
    ]


@pytest.mark.parametrize("resident", [False, True], ids=["leaving", "kept"])
@pytest.mark.parametrize("wanted_again", [False, True], ids=["", "wanted again"])
def test_a_failed_write_is_raised_by_every_call_until_it_is_discarded(
    nvme_path: Path, resident: bool, wanted_again: bool
) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(0)] if resident else [])
        for i in range(2):
            write(pipeline, i, i)
        pipeline.drain()
        lease, _ = pipeline.take(key(0), SIZE)
        fill(lease, 7)
        w.faults.fail_write_at = 2
        # The call that starts it may see it already.
        with contextlib.suppress(SwapIOError):
            pipeline.put(key(0), SIZE)
        if wanted_again:
            with contextlib.suppress(SwapIOError):
                pipeline.stage(key(0), SIZE)
        while w.handle.in_flight:
            time.sleep(0.001)
        for turn in range(2):
            for call in every_call(pipeline):
                with pytest.raises(SwapIOError) as caught:
                    call()
                assert is_the_write_of(caught.value, 0)
            pipeline.recover()  # never raises
            pipeline.drop_staged()
            assert w.pool.used_bytes <= SIZE, turn
        pipeline.discard(key(0))
        assert pipeline.take(key(0), SIZE)[1] is False, "neither the old nor the new record is there"
        pipeline.give_back(key(0))
        assert read(pipeline, 1) == 1
        pipeline.drain()
        write(pipeline, 0, 9)
        pipeline.drain()
        assert read(pipeline, 0) == 9
        pipeline.keep([])


def test_drain_waits_for_all_and_raises_the_first(nvme_path: Path) -> None:
    with world(nvme_path, buffers=4, block_bytes=SIZE, delay_us=50_000) as w:
        pipeline = w.pipeline()
        w.faults.fail_write_at = 2
        for i in range(4):
            with contextlib.suppress(SwapIOError):
                lease, _ = pipeline.take(key(i), SIZE)
                fill(lease, i)
                pipeline.put(key(i), SIZE)
        with pytest.raises(SwapIOError) as caught:
            pipeline.drain()
        assert is_the_write_of(caught.value, 1)
        assert w.handle.in_flight == 0
        assert w.pool.used_bytes <= 2 * SIZE
        pipeline.recover()
        pipeline.forget(key(1))
        assert read(pipeline, 0) == 0
        pipeline.drain()
        assert w.pool.used_bytes == 0


def test_two_failed_writes_are_raised_one_after_the_other(nvme_path: Path) -> None:
    with world(nvme_path, buffers=4) as w:
        pipeline = w.pipeline()
        leases = [pipeline.take(key(i), SIZE)[0] for i in range(2)]
        for i, lease in enumerate(leases):
            fill(lease, i)
            w.faults.fail_write_at = 1
            with contextlib.suppress(SwapIOError):
                pipeline.put(key(i), SIZE)
            while w.handle.in_flight:
                time.sleep(0.001)
        for i in range(2):
            with pytest.raises(SwapIOError) as caught:
                pipeline.drain()
            assert is_the_write_of(caught.value, i)
            pipeline.discard(key(i))
        pipeline.drain()


def test_forgetting_everything_ends_a_failure(nvme_path: Path) -> None:
    # As `close` does it: the failure is told by `drain`, and not a second time by the handle.
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        w.faults.fail_write_at = 1
        with contextlib.suppress(SwapIOError):
            write(pipeline, 0, 1)
        with pytest.raises(SwapIOError):
            pipeline.drain()
        end(pipeline)
        assert w.pool.used_bytes == 0
        assert w.handle.unobserved_failures == 0


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "taken"])
def test_a_failed_read_is_raised_and_may_be_tried_again(nvme_path: Path, staged: bool) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        write(pipeline, 0, 5)
        pipeline.drain()
        w.faults.fail_read_at = 1
        if staged:
            assert pipeline.stage(key(0), SIZE)
        with pytest.raises(SwapIOError) as caught:
            pipeline.take(key(0), SIZE)
        assert (caught.value.errno, caught.value.operation) == (errno.EIO, "read")
        assert caught.value.path.endswith(key(0).file_name)
        assert w.pool.used_bytes == 0
        pipeline.drain()
        assert read(pipeline, 0) == 5


@pytest.mark.parametrize("when", ["finished", "in flight"])
def test_a_failed_read_that_nobody_wanted_is_no_failure(nvme_path: Path, when: str) -> None:
    with world(nvme_path, delay_us=0 if when == "finished" else 50_000) as w:
        pipeline = w.pipeline()
        write(pipeline, 0, 5)
        pipeline.drain()
        w.faults.fail_read_at = 1
        assert pipeline.stage(key(0), SIZE)
        while when == "finished" and w.handle.in_flight:
            time.sleep(0.001)
        assert pipeline.drop_staged()
        pipeline.drain()
        assert w.handle.unobserved_failures == 0
        assert w.pool.used_bytes == 0


def test_a_file_that_was_cut_short_is_an_error(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        pipeline = w.pipeline()
        write(pipeline, 0, 5)
        pipeline.drain()
        with open(w.store.directories[0] / key(0).file_name, "r+b") as file:
            file.truncate(SIZE // 2)
        with pytest.raises(SwapIOError) as caught:
            pipeline.take(key(0), SIZE)
        assert caught.value.errno == errno.ENODATA


# --- A pool that is short ---------------------------------------------------------------------------------------------


def test_a_pool_that_others_hold_is_said(nvme_path: Path) -> None:
    with world(nvme_path, buffers=2) as w, w.pool.acquire(2 * SIZE):
        pipeline = w.pipeline()
        with pytest.raises(PoolExhausted, match="raise `pool_bytes`"):
            pipeline.take(key(0), SIZE)


def test_read_ahead_of_another_pipeline_gives_way(nvme_path: Path) -> None:
    with world(nvme_path) as w:
        one, two = w.pipeline(1), w.pipeline(2)
        for i in range(3):
            write(one, i, i, owner=1)
        one.drain()
        assert all(one.stage(key(i, 1), SIZE) for i in range(3))
        assert not two.stage(key(0, 2), SIZE) or w.store.stored_bytes(key(0, 2)) == 0
        write(two, 0, 77, owner=2)
        assert [read(one, i, owner=1) for i in range(3)] == [0, 1, 2]
        assert read(two, 0, owner=2) == 77
        one.drain()
        two.drain()


@pytest.mark.parametrize("wanted_again", [False, True], ids=["leaving", "wanted again"])
def test_what_another_pipeline_is_writing_is_waited_for(nvme_path: Path, wanted_again: bool) -> None:
    # Two optimizers on one pool: the second steps while the first still writes.
    with world(nvme_path, delay_us=SLOW_US) as w:
        one, two = w.pipeline(1), w.pipeline(2)
        for i in range(3):
            write(one, i, i, owner=1)
        if wanted_again:
            assert all(one.stage(key(i, 1), SIZE) for i in range(3))
        assert w.pool.used_bytes == 3 * SIZE
        write(two, 0, 77, owner=2)
        assert [read(one, i, owner=1) for i in range(3)] == [0, 1, 2]
        assert read(two, 0, owner=2) == 77
        one.drain()
        two.drain()


def test_a_lease_from_the_pool_waits_for_writes_too(nvme_path: Path) -> None:
    # A step takes its scratch from the pool itself, while the step before is still being written.
    with world(nvme_path, delay_us=SLOW_US) as w:
        pipeline = w.pipeline()
        for i in range(3):
            write(pipeline, i, i)
        with w.pool.acquire(2 * SIZE):
            pass
        assert [read(pipeline, i) for i in range(3)] == [0, 1, 2]
        pipeline.drain()


def test_a_failed_write_of_another_pipeline_is_its_own(nvme_path: Path) -> None:
    with world(nvme_path, delay_us=50_000) as w:
        one, two = w.pipeline(1), w.pipeline(2)
        w.faults.fail_write_at = 1
        for i in range(3):
            write(one, i, i, owner=1)
        write(two, 0, 77, owner=2)
        two.drain()
        with pytest.raises(SwapIOError) as caught:
            one.drain()
        assert caught.value.path.endswith(key(0, 1).file_name)
        one.forget(key(0, 1))
        one.drain()


@pytest.mark.parametrize("resident", [False, True], ids=["", "resident"])
def test_what_is_wanted_again_while_it_is_written_gives_way(nvme_path: Path, resident: bool) -> None:
    # Staged are records that this time nobody takes: their parameters have no gradient.
    with world(nvme_path, delay_us=SLOW_US) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(2)] if resident else [])
        for i in range(3):
            write(pipeline, i, i)
        assert all(pipeline.stage(key(i), SIZE) for i in range(3))
        leases = [pipeline.take(key(3), SIZE)[0]]
        fill(leases[0], 33)
        pipeline.put(key(3), SIZE)
        assert [read(pipeline, i) for i in range(4)] == [0, 1, 2, 33]
        pipeline.drain()
        pipeline.keep([])


def test_kept_records_that_split_the_pool_give_way(nvme_path: Path) -> None:
    # Free are three buffers' worth, but in pieces: a kept record lies between any two.
    with world(nvme_path, buffers=6, records=6) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(1), key(3), key(5)])
        leases = [pipeline.take(key(i), SIZE)[0] for i in range(6)]
        for i, lease in enumerate(leases):
            fill(lease, i)
            pipeline.put(key(i), SIZE)
        del leases
        pipeline.drain()
        assert w.pool.used_bytes == 3 * SIZE
        w.store.plan({key(9): 2 * SIZE})
        lease, _ = pipeline.take(key(9), 2 * SIZE)
        fill(lease, 99, 2 * SIZE)
        pipeline.put(key(9), 2 * SIZE)
        assert [read(pipeline, i) for i in range(6)] == list(range(6))
        lease, _ = pipeline.take(key(9), 2 * SIZE)
        assert value_of(lease, 2 * SIZE) == 99
        pipeline.give_back(key(9))
        pipeline.keep([])
        pipeline.drain()


def test_a_pipeline_that_is_collected_is_not_asked(nvme_path: Path) -> None:
    with world(nvme_path, buffers=1) as w:
        one, two = w.pipeline(1), w.pipeline(2)
        write(one, 0, 1, owner=1)
        one.drain()
        assert one.stage(key(0, 1), SIZE)
        del one
        gc.collect()
        write(two, 0, 2, owner=2)
        two.drain()
        assert read(two, 0, owner=2) == 2


# --- Threads ----------------------------------------------------------------------------------------------------------


def test_staging_from_other_threads_while_one_takes(nvme_path: Path) -> None:
    records, turns = 12, 12
    failures: list[BaseException] = []
    over = threading.Event()
    with world(nvme_path, buffers=4, records=records, delay_us=500, reorder=True) as w:
        pipeline = w.pipeline()
        other = w.pipeline(1)
        for i in range(records):
            write(pipeline, i, i)

        def stage(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while not over.is_set():
                    pipeline.stage(key(rng.randrange(records)), SIZE)
                    if rng.random() < 0.05:
                        pipeline.drop_staged()
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
                    lease, holds = take_patiently(pipeline, key(i))
                    assert holds
                    assert value_of(lease) == turn * 100 + i
                    fill(lease, (turn + 1) * 100 + i)
                    pipeline.put(key(i), SIZE)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failures
        pipeline.drain()
        assert [read(pipeline, i) for i in range(records)] == [turns * 100 + i for i in range(records)]
        end(other, records, 1)


def take_patiently(pipeline: Pipeline, wanted: RecordKey) -> tuple[Lease, bool]:
    stop = time.monotonic() + 20
    while True:
        try:
            return pipeline.take(wanted, SIZE)
        except PoolExhausted:
            assert time.monotonic() < stop
            time.sleep(0.001)


def test_pipelines_of_two_threads_share_a_pool(nvme_path: Path) -> None:
    # Each may find the other busy, and then says so; what it never does is to mix up buffers or to hang.
    failures: list[BaseException] = []
    with world(nvme_path, buffers=4, records=5, delay_us=300, reorder=True) as w:
        pipelines = [w.pipeline(owner) for owner in range(3)]

        def work(owner: int) -> None:
            pipeline = pipelines[owner]
            try:
                for turn in range(30):
                    for i in range(5):
                        wanted = key(i, owner)
                        stop = time.monotonic() + 20
                        while True:
                            try:
                                pipeline.stage(key((i + 1) % 5, owner), SIZE)
                                lease, holds = pipeline.take(wanted, SIZE)
                                break
                            except PoolExhausted:
                                assert time.monotonic() < stop
                                time.sleep(0.001)
                        assert holds == (turn > 0)
                        assert not holds or value_of(lease) == owner * 10_000 + (turn - 1) * 10 + i
                        fill(lease, owner * 10_000 + turn * 10 + i)
                        pipeline.put(wanted, SIZE)
                pipeline.drain()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(owner,)) for owner in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


# --- Any order of calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("resident", [0, 2], ids=["", "two kept"])
def test_content_is_right_in_any_order_of_calls(nvme_path: Path, seed: int, resident: int) -> None:
    """Two pipelines on one small pool, a drive that is slow and answers in any order; compared with two dicts."""
    rng = random.Random(seed)
    records = 6
    faults = {"delay_us": 2000, "reorder": True, "short": 0.2, "eagain": 0.1, "eintr": 0.1, "seed": seed}
    with world(nvme_path, buffers=3 + resident, records=records, **faults) as w:
        pipelines = [w.pipeline(owner) for owner in range(2)]
        pipelines[0].keep(key(i, 0) for i in range(resident))
        expected: list[dict[int, int]] = [{}, {}]
        for turn in range(400):
            owner = rng.randrange(2)
            pipeline, number = pipelines[owner], rng.randrange(records)
            wanted = key(number, owner)
            action = rng.choice(["stage"] * 4 + ["write"] * 4 + ["read"] * 4 + ["drop", "drain", "discard", "recover"])
            if action == "stage":
                pipeline.stage(wanted, SIZE)
            elif action == "write":
                write(pipeline, number, turn, owner)
                expected[owner][number] = turn
            elif action == "read":
                lease, holds = pipeline.take(wanted, SIZE)
                assert holds == (number in expected[owner])
                assert not holds or value_of(lease) == expected[owner][number]
                pipeline.give_back(wanted)
            elif action == "drop":
                pipeline.drop_staged()
            elif action == "drain":
                pipeline.drain()
            elif action == "discard":
                pipeline.discard(wanted)
                expected[owner].pop(number, None)
            else:
                lease, _ = pipeline.take(wanted, SIZE)
                lease.tensor.fill_(255)
                pipeline.recover()
            check_books(pipeline)
        for owner, pipeline in enumerate(pipelines):
            pipeline.keep([])
            pipeline.drain()
            for number, value in expected[owner].items():
                assert read(pipeline, number, owner) == value


class PipelineMachine(RuleBasedStateMachine):
    """Random calls, failing writes among them; the model is a dict, and which records had a failed write."""

    path: Path

    @initialize(buffers=st.integers(1, 4), delay_us=st.sampled_from([0, 1000]), resident=st.integers(0, 1))
    def start(self, buffers: int, delay_us: int, resident: int) -> None:
        self.faults = FaultPlan(seed=1, delay_us=delay_us, reorder=bool(delay_us))
        self.handle = AsyncIOHandle(backend="threads", block_bytes=SIZE, queue_depth=4, faults=self.faults)
        self.store = TensorStore([self.path], f"run{id(self)}", 0, [self.handle])
        self.pool = BufferPool((buffers + resident) * SIZE, self.handle)
        self.pipeline = Pipeline(self.pool, self.store, Metrics())
        self.store.plan({key(i): SIZE for i in range(4)})
        self.pipeline.keep([key(i) for i in range(resident)])
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
        self.attempt(lambda: self.pipeline.stage(key(number), SIZE))

    @rule(number=st.integers(0, 3), fails=st.booleans())
    def write(self, number: int, fails: bool) -> None:
        taken: list[Lease] = []
        if not self.attempt(lambda: taken.append(self.pipeline.take(key(number), SIZE)[0])):
            return
        assert number not in self.failed
        self.clock += 1
        fill(taken[0], self.clock)
        if fails:
            self.settle()  # The next request is then this write's.
            self.failed.add(number)
            self.faults.fail_write_at = 1
        self.expected[number] = self.clock
        self.attempt(lambda: self.pipeline.put(key(number), SIZE))
        while fails and self.faults.fail_write_at:
            time.sleep(0.0001)

    @rule(number=st.integers(0, 3))
    def read(self, number: int) -> None:
        taken: list[tuple[Lease, bool]] = []
        if not self.attempt(lambda: taken.append(self.pipeline.take(key(number), SIZE))):
            return
        assert number not in self.failed, "a record whose write failed was handed out"
        lease, holds = taken[0]
        assert holds == (number in self.expected)
        assert not holds or value_of(lease) == self.expected[number]
        self.pipeline.give_back(key(number))

    @rule(number=st.integers(0, 3))
    def failed_read(self, number: int) -> None:
        self.settle()
        self.faults.fail_read_at = 1
        try:
            self.pipeline.take(key(number), SIZE)
            self.pipeline.give_back(key(number))
        except SwapIOError as error:
            assert self.failed or error.operation == "read"
        self.faults.fail_read_at = 0

    @rule()
    def drop(self) -> None:
        self.pipeline.drop_staged()

    @rule()
    def drain(self) -> None:
        assert self.attempt(self.pipeline.drain) == (not self.failed)

    @rule()
    def recover(self) -> None:
        self.pipeline.recover()

    @rule(number=st.integers(0, 3))
    def discard(self, number: int) -> None:
        self.pipeline.discard(key(number))
        self.expected.pop(number, None)
        self.failed.discard(number)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_lost(self) -> None:
        assert not self.pipeline._held.of_place(Place.LIVE)
        check_books(self.pipeline)
        assert self.pool.used_bytes <= self.pool.capacity_bytes

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        with contextlib.suppress(SwapIOError):
            self.pipeline.drain()
        for i in range(4):
            self.pipeline.forget(key(i))
        assert self.pool.used_bytes == 0
        self.store.close()
        self.pool.close()
        self.handle.close()  # Every failure was told.


def test_failures_in_any_order_of_calls(nvme_path: Path) -> None:
    class Machine(PipelineMachine):
        path = nvme_path

    Machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase("runTest").runTest()
    assert not list(nvme_path.iterdir())


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class _Interrupt(Exception):
    """Stands for KeyboardInterrupt, which would end the test run where it is not caught."""


def interrupted_at_line(number: int, work: Callable[[], None]) -> bool:
    """Run `work`, interrupted before the `number`-th line of the pipeline that it executes. Whether it came so far."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != pipeline_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise _Interrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        work()
        return False
    except _Interrupt:
        return True
    finally:
        sys.settrace(former)


@pytest.mark.parametrize("resident", [False, True], ids=["", "one kept"])
def test_an_interrupt_at_any_line_mixes_up_no_buffers(nvme_path: Path, resident: bool) -> None:
    with world(nvme_path, buffers=3, delay_us=100) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(0)] if resident else [])
        line = 0
        while line < 5000:
            line += 2
            for i in range(4):
                write(pipeline, i, line * 10 + i)
            started: set[int] = set()

            def work(line: int = line, started: set[int] = started) -> None:
                for i in range(4):
                    for ahead in range(i, 4):
                        pipeline.stage(key(ahead), SIZE)
                    lease, holds = pipeline.take(key(i), SIZE)
                    assert holds
                    assert value_of(lease) == line * 10 + i
                    started.add(i)
                    fill(lease, line * 10 + 5 + i)
                    pipeline.put(key(i), SIZE)
                pipeline.drain()

            came = interrupted_at_line(line, work)
            check_books(pipeline)
            pipeline.recover()
            pipeline.drain()
            for i in range(4):
                assert read(pipeline, i) in {line * 10 + i, line * 10 + 5 + i if i in started else -1}
            while w.handle.in_flight:  # What was read ahead and given back goes on, in its buffer.
                time.sleep(0.0005)
            assert w.pool.used_bytes <= SIZE * resident, f"a buffer was lost at line {line}"
            if not came:
                break
        assert 50 < line < 5000, line
        pipeline.keep([])


@pytest.mark.parametrize(
    ("place", "stride"), [("storage/pipeline.py", 5), ("storage/held_records.py", 1)], ids=["pipeline", "books"]
)
def test_ctrl_c_anywhere_leaves_the_books_right(nvme_path: Path, place: str, stride: int) -> None:
    with world(nvme_path, buffers=3) as w:
        pipeline = w.pipeline()
        pipeline.keep([key(3)])
        for n in range(0, 5000, stride):
            for i in range(4):
                write(pipeline, i, i)

            def work() -> None:
                for i in range(4):
                    for ahead in range(i, 4):
                        pipeline.stage(key(ahead), SIZE)
                    pipeline.take(key(i), SIZE)
                    pipeline.put(key(i), SIZE) if i % 2 else pipeline.give_back(key(i))
                pipeline.drop_staged()
                w.pool.reclaim()
                pipeline.drain()

            interrupted = interrupted_at(n, work, place)
            check_books(pipeline)
            pipeline.recover()
            pipeline.drain()
            check_books(pipeline)
            assert [read(pipeline, i) for i in range(4)] == [0, 1, 2, 3]
            while w.handle.in_flight:
                time.sleep(0.0005)
            assert w.pool.used_bytes <= SIZE
            if not interrupted:
                break
        assert n > 10
        assert not interrupted
        pipeline.keep([])
