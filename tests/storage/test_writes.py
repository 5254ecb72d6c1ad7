"""Writes that start without a call, when a device has copied the record: by a thread that gets in nobody's way."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import os
import random
import signal
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerators import writes_start_with_calls
from interrupts import interrupted_at
from isolation import alone, forks_at_work
from launcher import run_program
from still_drive import still

from swapper.config import OffloadConfig
from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.metrics import Metrics
from swapper.session import Shared
from swapper.storage import writes
from swapper.storage.buffers import BufferPool, Lease
from swapper.storage.cache import RecordCache
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import FailedTransfer

pytestmark = pytest.mark.timeout(240)

SIZE = 64 << 10


class Copy:
    """A copy by a device: `end` ends it, by writing `value` to all of the buffer."""

    def __init__(self, lease: Lease, value: int, error: SwapIOError | None = None) -> None:
        self.tensor = lease.tensor
        self.value = value
        self.error = error
        self.over = threading.Event()
        self.waited = threading.Event()

    def end(self) -> None:
        self.tensor.fill_(self.value)
        del self.tensor
        self.over.set()

    def done(self) -> bool:
        return self.over.is_set()

    def wait_quietly(self) -> None:
        self.waited.set()
        self.over.wait()

    def wait(self, timeout: float | None = None) -> int:
        self.wait_quietly()
        if self.error is not None:
            raise self.error
        return 0


def key(number: int) -> RecordKey:
    return RecordKey(0, "grad", number)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swapper-writes"]


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does. The test's timeout ends it."""
    while not condition():
        time.sleep(0.0005)


@contextlib.contextmanager
def cache_of(
    path: Path, buffers: int = 4, records: int = 4, plan: FaultPlan | None = None, **faults: Any
) -> Iterator[RecordCache]:
    with (
        AsyncIOHandle(faults=plan or FaultPlan(**{"seed": 0, **faults})) as handle,
        BufferPool(buffers * SIZE, handle) as pool,
        contextlib.closing(TensorStore([path], "run", 0, [handle])) as store,
    ):
        store.plan({key(number): SIZE for number in range(records)})
        yield RecordCache(pool, store, Metrics())
        until(lambda: not threads())


def put(
    cache: RecordCache,
    number: int,
    value: int,
    length: int | Callable[[], int] = SIZE,
    error: SwapIOError | None = None,
) -> Copy:
    """Let a device copy a record of `value`s, which is written when it has."""
    lease, _ = cache.take(key(number), SIZE)
    lease.transfer = copy = Copy(lease, value, error)
    cache.put(key(number), length)
    return copy


def read(cache: RecordCache, number: int) -> int:
    lease, there = cache.take(key(number), SIZE)
    assert there
    (value,) = lease.tensor.unique().tolist()
    cache.release(key(number))
    return int(value)


def is_in_file(path: Path, number: int, value: int) -> bool:
    (found,) = path.glob(f"swapper-*/{key(number).file_name}")
    return set(found.read_bytes()) == {value}


def test_the_bytes_reach_the_drive_without_a_call(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        for value in (5, 6):
            copies = [put(cache, number, value + number) for number in range(3)]
            assert cache._metrics.writes == 3 * (value - 5), "nothing is written before it is copied"
            for copy in copies:
                copy.end()
            for number in range(3):
                until(functools.partial(is_in_file, nvme_path, number, value + number))
        assert cache._metrics.writes == 6
        assert cache._metrics.bytes_written == 6 * SIZE


def test_it_is_completed_once_whoever_comes_first(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        completed = []

        def complete() -> int:
            completed.append(threading.current_thread() in threads())
            return SIZE // 2

        put(cache, 0, 5, complete).end()
        until(lambda: completed)
        cache.flush()
        assert completed == [True]
        copy = put(cache, 1, 6, complete)
        until(copy.waited.is_set)
        with cache._writes.starting:  # A call is faster than the thread.
            copy.end()
            assert read(cache, 1) == 6
        cache.flush()
        assert completed == [True, False] and cache._metrics.bytes_written == SIZE


def test_a_copy_that_another_has_followed_starts_nothing(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        first = put(cache, 0, 5)
        until(first.waited.is_set)
        lease, _ = cache.take(key(0), SIZE, follows=True)
        assert lease.transfer is first
        lease.transfer = second = Copy(lease, 6)
        cache.put(key(0), SIZE)
        first.end()
        until(second.waited.is_set)
        assert cache._writes.starting.acquire(blocking=False), "the thread holds up others while it waits"
        cache._writes.starting.release()
        assert cache._metrics.writes == 0
        second.end()
        until(lambda: is_in_file(nvme_path, 0, 6))
        assert cache._metrics.writes == 1


def test_there_is_a_thread_only_while_a_copy_is_in_flight(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        lease, _ = cache.take(key(0), SIZE)
        lease.tensor.zero_()
        cache.put(key(0), SIZE)
        assert not threads(), "the record was not copied by a device"
        copies = [put(cache, number, 5) for number in (1, 2, 3)]
        (thread,) = threads()
        assert not thread.daemon
        for copy in copies:
            assert threads() == [thread]
            copy.end()
        thread.join()
        put(cache, 1, 6).end()
        until(lambda: is_in_file(nvme_path, 1, 6))


def test_without_a_store_there_is_no_thread() -> None:
    with BufferPool(2 * SIZE) as pool:
        cache = RecordCache(pool, None, Metrics())
        copy = put(cache, 0, 5)
        assert not threads()
        copy.end()
        assert read(cache, 0) == 5
        cache.discard(key(0))


def test_who_waits_for_a_device_keeps_nobody_alive(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        copy = put(cache, 0, 5)
        until(copy.waited.is_set)
        mine = RecordCache(cache.pool, cache._store, Metrics())
        lost = put(mine, 1, 6)
        until(lost.waited.is_set)
        reference = weakref.ref(mine._writes)
        mine.pool.used_bytes  # noqa: B018
        lost.end()
        mine.flush()
        del mine
        until(lambda: reference() is None or (gc.collect() >= 0 and reference() is None))  # Its thread may have it yet.
        assert copy.over.is_set() is False
        copy.end()
        until(lambda: is_in_file(nvme_path, 0, 5))


def test_who_needs_what_an_owner_had_waits_for_its_end_in_the_thread(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Owner:
        pass

    with cache_of(nvme_path) as cache:
        assert cache._store is not None
        write, inside, go_on, ended = cache._store.write, threading.Event(), threading.Event(), threading.Event()

        def slow(*args: Any) -> Any:
            inside.set()
            go_on.wait()
            return write(*args)

        def end() -> None:
            time.sleep(0.02)
            ended.set()

        monkeypatch.setattr(cache._store, "write", slow)
        owner = Owner()
        weakref.finalize(owner, end)
        mine = RecordCache(cache.pool, cache._store, Metrics(), owner=owner)
        put(mine, 0, 5).end()
        inside.wait()
        del owner
        assert not ended.is_set()
        threading.Timer(0.02, go_on.set).start()
        Shared.existing(OffloadConfig(nvme_path=nvme_path, pool_bytes="16MiB"))
        assert ended.is_set()
        mine.flush()


@pytest.mark.parametrize("end", ["discard", "close"])
def test_what_is_discarded_or_closed_is_not_written(nvme_path: Path, end: str) -> None:
    with cache_of(nvme_path) as cache:
        copy = put(cache, 0, 5)
        until(copy.waited.is_set)
        ending = threading.Thread(target=lambda: cache.close() if end == "close" else cache.discard(key(0)))
        ending.start()
        until(lambda: (record := cache.records.get(key(0))) is None or record.finish is None)
        copy.end()
        ending.join()
        until(lambda: not threads())
        assert cache._metrics.writes == 0 and cache.pool.used_bytes == 0


# --- Failures --------------------------------------------------------------------------------------------------------


def test_a_write_that_cannot_be_started_is_tried_again_by_the_next_call(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_of(nvme_path) as cache:
        assert cache._store is not None
        write, asked = cache._store.write, []

        def full(*args: Any) -> Any:
            asked.append(threading.current_thread() in threads())
            raise SwapIOError(errno.ENOSPC, "preallocate", detail="the drive is full")

        def complete() -> int:
            completed.append(1)
            return SIZE

        completed: list[int] = []
        monkeypatch.setattr(cache._store, "write", full)
        put(cache, 0, 5, complete).end()
        until(lambda: asked)
        until(lambda: not threads())
        assert asked == [True]
        for call in (cache.check, cache.flush, lambda: cache.stage(key(1), SIZE), lambda: read(cache, 0)):
            with pytest.raises(SwapIOError, match="the drive is full"):
                call()
        monkeypatch.setattr(cache._store, "write", write)
        cache.flush()
        assert is_in_file(nvme_path, 0, 5) and read(cache, 0) == 5
        assert completed == [1]


@pytest.mark.parametrize("what", ["write", "copy", "complete", "complete with a bug"])
def test_what_fails_in_the_thread_is_raised_by_every_call_until_it_is_discarded(nvme_path: Path, what: str) -> None:
    failure = SwapIOError(errno.EIO, "copy", detail="it failed")
    calls = []

    def complete() -> int:
        calls.append(1)
        if what.startswith("complete"):
            raise failure if what == "complete" else RuntimeError("it failed")
        return SIZE

    with cache_of(nvme_path, eio=1.0 if what == "write" else 0.0) as cache:
        put(cache, 0, 5, complete, failure if what == "copy" else None).end()
        until(lambda: not threads())
        if what == "write":
            until(lambda: cache._metrics.writes == 1)
        for call in (cache.flush, cache.check, lambda: cache.take(key(0), SIZE), cache.check, lambda: put(cache, 1, 1)):
            with pytest.raises(SwapIOError, match="Input/output error" if what == "write" else "it failed"):
                call()
        assert len(calls) == (what != "copy"), "it was completed twice"
        cache.recover()
        cache.discard(key(0))
        cache.discard(key(1))
        cache.flush()


def test_where_no_thread_is_to_be_had_the_next_call_starts_the_write(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with cache_of(nvme_path) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            copy = put(cache, 0, 5)
        copy.end()
        assert cache._metrics.writes == 0
        cache.check()
        assert cache._metrics.writes == 1
        put(cache, 1, 6).end()
        until(lambda: is_in_file(nvme_path, 1, 6))
        cache.flush()


# --- Forks, and the end of the process --------------------------------------------------------------------------------


@forks_at_work
def test_a_fork_waits_until_no_write_is_being_started(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the child would have the locks of a thread that it does not have."""
    with cache_of(nvme_path) as cache:
        assert cache._store is not None
        write, inside, go_on, order = cache._store.write, threading.Event(), threading.Event(), []

        def slow(*args: Any) -> Any:
            inside.set()
            go_on.wait()
            order.append("written")
            return write(*args)

        monkeypatch.setattr(cache._store, "write", slow)
        copy = put(cache, 0, 5)
        copy.end()
        inside.wait()
        acquire = cache._writes.starting.acquire(blocking=False)
        assert not acquire
        threading.Timer(0.05, go_on.set).start()
        child = os.fork()
        if child == 0:
            signal.alarm(240)  # A deadlock ends it.
            free = cache._writes.starting.acquire(blocking=False) and order == ["written"]
            os._exit(0 if free else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        until(lambda: is_in_file(nvme_path, 0, 5))
        assert cache._writes.starting.acquire(blocking=False), "the fork has not released it"
        cache._writes.starting.release()


def test_threads_that_fork_at_once_release_what_they_hold_themselves() -> None:
    def fork() -> None:
        for _ in range(4):
            writes._before_fork()
            time.sleep(0.01)
            writes._after_fork_in_parent()

    forking = [threading.Thread(target=fork, daemon=True) for _ in range(3)]
    for thread in forking:
        thread.start()
    for thread in forking:
        thread.join(240)
    assert not any(thread.is_alive() for thread in forking)
    assert writes._not_forking.acquire(blocking=False)
    writes._not_forking.release()


@contextlib.contextmanager
def slow_write(cache: RecordCache, patch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> Iterator[None]:
    """The thread calls `meanwhile` in the middle of starting the write of record 0, in which it is now."""
    assert cache._store is not None
    write, inside = cache._store.write, threading.Event()

    def slow(*args: Any) -> Any:
        inside.set()
        meanwhile()
        return write(*args)

    with patch.context() as within:
        within.setattr(cache._store, "write", slow)
        put(cache, 0, 5).end()
        inside.wait()
        yield


def until_forking() -> None:
    """Wait until a thread is in the hook before a fork."""
    until(lambda: any(_is_in_hook(frame) for frame in sys._current_frames().values()))
    time.sleep(0.02)


def _is_in_hook(frame: Any) -> bool:
    return frame.f_code is writes._before_fork.__code__


def fork(go_on: Callable[[], bool] = lambda: True) -> None:
    """Fork, and end the child when it has called `go_on`."""
    child = os.fork()
    if child == 0:
        signal.alarm(240)  # A deadlock ends it.
        os._exit(0 if go_on() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@forks_at_work
def test_a_fork_waits_for_a_thread_that_ends_another_owner(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector ends it in the middle of starting a write, when others have the locks of those who fork."""
    with cache_of(nvme_path) as cache:
        dropped = RecordCache(cache.pool, cache._store, Metrics())
        monkeypatch.setattr(dropped._writes, "_watch", lambda key, copy: None)
        put(dropped, 1, 6).end()
        mine = RecordCache(cache.pool, cache._store, Metrics())

        def end_others() -> None:
            until_forking()
            dropped.close()

        with slow_write(mine, monkeypatch, end_others):
            forking = threading.Thread(target=fork, daemon=True)
            forking.start()
            forking.join(240)
        assert not forking.is_alive()
        mine.flush()
        assert is_in_file(nvme_path, 0, 5)


@forks_at_work
def test_no_write_is_started_while_another_thread_forks(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache:
        copy = put(cache, 0, 5)
        until(copy.waited.is_set)
        writes._before_fork()
        copy.end()
        time.sleep(0.02)
        assert cache._metrics.writes == 0
        fork(lambda: cache._writes.starting.acquire(blocking=False))
        writes._after_fork_in_parent()
        until(lambda: is_in_file(nvme_path, 0, 5))
        cache.flush()


@forks_at_work
def test_who_forks_in_the_middle_of_a_call_waits_for_nobody_who_waits_for_it(nvme_path: Path) -> None:
    """As the handler of a signal may."""
    with cache_of(nvme_path) as cache:
        copy = put(cache, 0, 5)
        until(copy.waited.is_set)
        with cache._writes.starting:
            copy.end()
            time.sleep(0.02)
            fork()
        until(lambda: is_in_file(nvme_path, 0, 5))


@forks_at_work
def test_ctrl_c_while_a_fork_waits_is_raised_after_it(nvme_path: Path) -> None:
    """In a process without hooks of others, as those of `filelock`, in which it could be raised, and only printed."""
    alone(interrupted_fork, nvme_path)


def interrupted_fork(nvme_path: Path) -> None:
    def interrupt() -> None:
        until_forking()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)

    children, children_end = os.pipe()
    with pytest.MonkeyPatch.context() as patch, cache_of(nvme_path) as cache:
        with slow_write(cache, patch, interrupt):
            parent = os.getpid()
            with pytest.raises(KeyboardInterrupt):
                os.fork()
                if os.getpid() != parent:
                    os.write(children_end, b"%d" % os.getpid())
                    os._exit(0)
            assert os.getpid() == parent
        child = int(os.read(children, 20))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert writes._not_forking.acquire(blocking=False)
        writes._not_forking.release()
        assert not writes._forks[threading.get_ident()]
        cache.flush()
        assert is_in_file(nvme_path, 0, 5) and read(cache, 0) == 5
    os.close(children)
    os.close(children_end)


@pytest.mark.parametrize("hook", ["_before_fork", "_after_fork_in_parent"])
def test_ctrl_c_in_a_hook_of_a_fork_leaves_no_lock(hook: str) -> None:
    """Wherever it strikes. (What raises there is printed by the interpreter, and the fork is made.)"""
    found: list[bool] = []

    def try_it() -> None:
        found.append(writes._not_forking.acquire(blocking=False))
        if found[-1]:
            writes._not_forking.release()

    for n in itertools.count():
        interrupted = False
        for each in ("_before_fork", "_after_fork_in_parent"):
            place = n if each == hook else 1 << 30
            interrupted |= interrupted_at(place, getattr(writes, each), "storage/writes.py")
        assert not writes._forks.get(threading.get_ident())
        other = threading.Thread(target=try_it)
        other.start()
        other.join()
        assert found.pop(), f"Ctrl-C at place {n}"
        if not interrupted:
            break
    assert n > 2


def test_a_child_does_not_wait_for_a_thread_of_its_parent(nvme_path: Path) -> None:
    with cache_of(nvme_path) as cache, cache._writes._keeping:
        child = os.fork()
        if child == 0:
            signal.alarm(240)  # A deadlock ends it.
            writes.wait_for_ends()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.long
def test_a_program_that_ends_waits_for_the_copies(nvme_path: Path) -> None:
    program = """
        import threading
        from pathlib import Path
        import test_writes
        from swapper.storage.writes import RecordWrites
        from swapper.io.handle import AsyncIOHandle
        from swapper.metrics import Metrics
        from swapper.storage.buffers import BufferPool
        from swapper.storage.cache import RecordCache
        from swapper.storage.store import TensorStore

        handle = AsyncIOHandle()
        pool = BufferPool(1 << 20, handle)
        store = TensorStore([Path({path!r})], "run", 0, [handle])
        store.plan({{test_writes.key(0): test_writes.SIZE}})
        cache = RecordCache(pool, store, Metrics())
        copy = test_writes.put(cache, 0, 5)
        start = RecordWrites.start

        def started(self, record, length_bytes):
            start(self, record, length_bytes)
            print("started")

        RecordWrites.start = started
        threading.Timer(0.2, copy.end).start()
    """
    source = textwrap.dedent(program).format(path=str(nvme_path))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = run_program([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    assert not list(nvme_path.glob("*")), "files were left behind"


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_where_a_record_is_discarded_leaves_nothing_that_is_taken_for_written(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    writes_start_with_calls(monkeypatch)
    with cache_of(nvme_path) as cache:
        for n in itertools.count():
            put(cache, 0, 3).end()
            cache.flush()
            put(cache, 0, 5).end()
            interrupted = interrupted_at(n, lambda: cache.discard(key(0)), "storage/cache.py", "storage/writes.py")
            if again:
                cache.discard(key(0))
            cache.pool.acquire(4 * SIZE).release()  # What is in the pool has gone.
            lease, there = cache.take(key(0), SIZE)
            assert not there or set(lease.tensor.tolist()) == {5}, f"Ctrl-C at place {n}"
            assert there in ((False,) if again else (False, True))
            cache.release(key(0))
            if not interrupted:
                break
        assert n > 5


# --- Any order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_beside_the_thread_keeps_the_last_value(nvme_path: Path, seed: int) -> None:
    """A device ends copies while the cache is asked for this and that. Each record is completed once for each copy."""
    choose = random.Random(seed)
    switch_s = sys.getswitchinterval()
    queue: list[Copy] = []
    stop = threading.Event()

    def device() -> None:
        later = random.Random(seed)
        while not stop.is_set() or queue:
            if queue:
                if later.random() < 0.5:
                    time.sleep(later.random() * 0.002)
                queue.pop(0).end()
            else:
                time.sleep(0.0002)

    running = threading.Thread(target=device)
    records = 6
    expected: dict[int, int] = {}
    try:
        sys.setswitchinterval(1e-5)
        with cache_of(nvme_path, buffers=3, records=records, delay_us=choose.choice([0, 300])) as cache:
            running.start()
            for value in range(400):
                number = choose.randrange(records)
                act = choose.random()
                if act < 0.5:
                    lease, there = cache.take(key(number), SIZE, follows=there_now(cache, number) and act < 0.2)
                    former, copy = lease.transfer, Copy(lease, value % 200)
                    lease.transfer = copy
                    queue.append(copy)  # After `former`, if that goes on: copies of a device are in order.
                    del former, there

                    def complete(lease: Lease = lease) -> int:
                        lease.tensor.add_(1)
                        return SIZE

                    cache.put(key(number), complete)
                    expected[number] = value % 200 + 1
                elif act < 0.6:
                    cache.stage(key(number), SIZE)
                elif act < 0.65:
                    cache.drop_prefetched()
                elif act < 0.7:
                    cache.discard(key(number))
                    expected.pop(number, None)
                elif act < 0.75:
                    cache.flush()
                elif act < 0.8:
                    cache.wait(key(number))
                elif act < 0.85:
                    cache.pool.acquire(SIZE).release()  # Another's: what is leaving gives way.
                elif number in expected:
                    assert read(cache, number) == expected[number]
            cache.flush()
            assert {number: read(cache, number) for number in expected} == expected
    finally:
        sys.setswitchinterval(switch_s)
        stop.set()
        running.join()


def there_now(cache: RecordCache, number: int) -> bool:
    return cache.records.get(key(number)) is not None


def test_no_call_waits_for_the_drive_because_of_the_thread(nvme_path: Path) -> None:
    """A write that the thread has started is none that `check` waits for."""
    plan = FaultPlan()
    with cache_of(nvme_path, plan=plan) as cache:
        with still(plan):
            put(cache, 0, 5).end()
            until(lambda: cache._metrics.writes == 1)
            cache.check()
            record = cache.records.get(key(0))
            assert record is not None and record.lease.transfer is not None
            assert not record.lease.transfer.done()
        cache.flush()
        assert is_in_file(nvme_path, 0, 5)


def test_a_failed_transfer_keeps_nothing_of_the_frames_that_its_error_has_passed() -> None:
    """They have parameters, and the pool has the transfer: an owner that is kept for its parameters would never go."""

    class Parameter:
        pass

    def failing() -> FailedTransfer:
        parameter = Parameter()
        references.append(weakref.ref(parameter))
        try:
            raise SwapIOError(errno.EIO, "copy", detail="of a gradient")
        except SwapIOError as error:
            return FailedTransfer(error)

    references: list[weakref.ref[Parameter]] = []
    transfer = failing()
    gc.collect()
    assert references[0]() is None
    with pytest.raises(SwapIOError, match="of a gradient"):
        transfer.wait()
