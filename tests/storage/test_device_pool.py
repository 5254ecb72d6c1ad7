"""Records that go between the drive and a device by cuFile, without the pool of the host.

cuFile is a mock, and the device is made of host memory: see mock_cufile.py.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from host_device import HostCopies
from mock_cufile import COMPILER, Mock
from torch.multiprocessing.reductions import StorageWeakRef

from swapper.errors import SwapIOError
from swapper.io.gds import GDSHandle
from swapper.io.handle import FaultPlan
from swapper.metrics import Metrics
from swapper.storage.cache import RecordCache
from swapper.storage.device_pool import DevicePool
from swapper.storage.store import RecordKey, TensorStore

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library"),
]

SIZE = 96 << 10
COUNT = 8
DEVICE = torch.device("cpu")


def key(number: int) -> RecordKey:
    return RecordKey(0, "param", number)


@contextlib.contextmanager
def records(
    *paths: Path, faults: FaultPlan | None = None, verify: bool = False, count: int = 4
) -> Iterator[tuple[RecordCache, DevicePool, TensorStore]]:
    with contextlib.ExitStack() as stack:
        handles = [
            stack.enter_context(GDSHandle(block_bytes=16 << 10, queue_depth=4, faults=faults or FaultPlan()))
            for _ in paths
        ]
        pool = stack.enter_context(DevicePool(count * SIZE, *handles, device=DEVICE))
        store = TensorStore(paths, "run", 0, handles, verify=verify)
        stack.callback(store.close)
        store.plan({key(number): SIZE for number in range(COUNT)})
        yield RecordCache(pool, store, Metrics()), pool, store


def content(number: int, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + version)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)


def put(cache: RecordCache, number: int, version: int) -> None:
    lease, _ = cache.take(key(number), SIZE)
    lease.tensor.copy_(content(number, version))
    cache.put(key(number), SIZE)


def is_version(cache: RecordCache, number: int, version: int) -> bool:
    lease, there = cache.take(key(number), SIZE)
    same = there and torch.equal(lease.tensor, content(number, version))
    cache.release(key(number))
    return same


@pytest.mark.parametrize("drives", [1, 2])
def test_records_never_pass_through_the_host(mock: Mock, nvme_path: Path, drives: int) -> None:
    """Any order of writes, reads and prefetches, with a pool that has room for half of them."""
    paths = [nvme_path / str(drive) for drive in range(drives)]
    for path in paths:
        path.mkdir()
    rng = random.Random(drives)
    with records(*paths) as (cache, pool, _):
        mock["reads"] = mock["writes"] = mock["in_registered_memory"] = 0  # The speed of several drives was measured.
        versions = dict.fromkeys(range(COUNT), 0)
        for number in versions:
            put(cache, number, 0)
        for _ in range(60):
            number = rng.randrange(COUNT)
            cache.stage(key(rng.randrange(COUNT)), SIZE)
            if rng.random() < 0.5:
                assert is_version(cache, number, versions[number])
            else:
                versions[number] += 1
                put(cache, number, versions[number])
        cache.flush()
        assert all(is_version(cache, number, version) for number, version in versions.items())
        assert pool.used_bytes == 0
        assert HostCopies.copied_bytes == 0
        assert mock["in_registered_memory"] == mock["reads"] + mock["writes"] > 0


def test_what_is_written_is_what_the_stream_computes_first(mock: Mock, nvme_path: Path) -> None:
    with records(nvme_path) as (cache, _, _):
        lease, _ = cache.take(key(0), SIZE)
        lease.tensor.fill_(1)
        HostCopies.delay_s = 0.05
        late = HostCopies(DEVICE)
        HostCopies.current = late.stream
        late.start(lease.tensor, content(0, 1))  # The caller's stream has yet to do it.
        cache.put(key(0), SIZE)
        assert is_version(cache, 0, 1)


@pytest.mark.parametrize("operation", ["write", "read"])
def test_an_error_of_cufile_is_raised_until_the_record_is_given_up(mock: Mock, nvme_path: Path, operation: str) -> None:
    with records(nvme_path) as (cache, pool, _):
        for number in range(3):
            put(cache, number, 0)
        cache.flush()
        cache.discard(key(3))  # Nothing is read before it is written.
        mock["delay_us"] = 20_000  # The write is not over before `put` is.
        mock["errno"], mock["fail_at"] = (
            errno.ENOSPC if operation == "write" else errno.EIO,
            2,
        )
        if operation == "write":
            put(cache, 3, 1)
            for _ in range(2):
                with pytest.raises(SwapIOError) as raised:
                    cache.flush()
                assert raised.value.errno == errno.ENOSPC
            cache.discard(key(3))
        else:
            with pytest.raises(SwapIOError) as raised:
                cache.take(key(1), SIZE)
            assert raised.value.errno == errno.EIO
            assert is_version(cache, 1, 0)  # The next call reads it again.
        assert is_version(cache, 0, 0) and is_version(cache, 2, 0)
        cache.flush()
        assert pool.used_bytes == 0


def test_what_cufile_refuses_in_the_middle_goes_through_the_host(
    mock: Mock, nvme_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with records(nvme_path) as (cache, _, _):
        put(cache, 0, 0)
        cache.flush()
        mock["result"] = -5008  # Every call from now on.
        put(cache, 1, 0)
        cache.flush()
        assert is_version(cache, 1, 0) and is_version(cache, 0, 0)
        mock["result"] = 0
        assert HostCopies.copied_bytes == 3 * SIZE
        assert is_version(cache, 1, 0)
    assert len([record for record in caplog.records if "memory of the host" in record.message]) == 1


def test_with_checksums_records_go_through_the_host_and_are_checked(mock: Mock, nvme_path: Path) -> None:
    with records(nvme_path, verify=True) as (cache, _, store):
        put(cache, 0, 0)
        cache.flush()
        path = next(store.directories[0].glob("*param*0*"))
        with path.open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)
            file.seek(5000)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(SwapIOError) as raised:
            cache.take(key(0), SIZE)
        assert raised.value.errno == errno.EBADMSG
        assert (mock["reads"], mock["writes"]) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_any_faults_end_in_an_error_or_in_the_right_bytes(mock: Mock, nvme_path: Path, seed: int) -> None:
    faults = FaultPlan(seed=seed, short=0.2, eio=0.02, eintr=0.1, delay_us=300, reorder=True)
    rng = random.Random(seed)
    failed = 0
    with records(nvme_path, faults=faults) as (cache, pool, _):
        versions: dict[int, int] = {}
        for turn in range(80):
            number = rng.randrange(COUNT)
            try:
                if number in versions and rng.random() < 0.5:
                    assert is_version(cache, number, versions[number])
                else:
                    put(cache, number, turn)
                    versions[number] = turn
            except SwapIOError as error:
                assert error.errno == errno.EIO
                failed += 1
                cache.recover()
                for each in range(COUNT):  # Whose write it was is not known: all are given up.
                    cache.discard(key(each))
                versions.clear()
        with contextlib.suppress(SwapIOError):
            cache.flush()
        for each in range(COUNT):
            cache.discard(key(each))
        assert pool.used_bytes == 0
    assert failed


@pytest.mark.parametrize("how", ["close", "collected"])
def test_the_memory_is_unmapped_before_it_is_freed(mock: Mock, nvme_path: Path, how: str) -> None:
    mock["delay_us"] = 20_000
    with (
        GDSHandle(block_bytes=16 << 10) as handle,
        handle.open(nvme_path / "file", "rw") as file,
    ):
        pool = DevicePool(4 * SIZE, handle, device=DEVICE)
        assert mock["open_buffers"] == 1
        memory = StorageWeakRef(pool._memory.untyped_storage())
        lease = pool.acquire(SIZE)
        lease.tensor.copy_(content(0, 0))
        transfer = lease.transfer = handle.write(file, lease.tensor)
        lease.release()
        if how == "close":
            pool.close()
            assert transfer.done() and mock["open_buffers"] == 0
        del pool, lease
        gc.collect()
        assert transfer.done() and mock["open_buffers"] == 0
        del transfer
        gc.collect()
        assert memory.expired()
        assert (nvme_path / "file").read_bytes() == content(0, 0).numpy().tobytes()


def test_views_are_those_of_a_pool_of_the_host(mock: Mock) -> None:
    with GDSHandle() as handle, DevicePool(2 * SIZE, handle, device=DEVICE) as pool:
        first, second = pool.acquire(4096), pool.acquire(4096)
        assert first.address % (64 << 10) == 0 and second.address == first.address + 4096
        second.tensor.copy_(torch.arange(4096, dtype=torch.uint8))
        words = second.view(8, 3, torch.int32)
        assert words.data_ptr() == second.address + 8 and words[0] == 0x0B0A0908
        assert second.strided_view(0, 4, torch.int16, (2, 2), (1, 2))[1, 0] == 0x0302
        assert second.pool_has(words) and not second.pool_has(torch.zeros(3))
        assert torch.equal(second.own_view(4, 2, torch.uint8), torch.tensor([4, 5], dtype=torch.uint8))
        pool.trim()
        pool.lock_for(DEVICE)
        assert not HostCopies.locked
        second.release()
        first.release()
