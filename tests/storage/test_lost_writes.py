"""What was written and then lost, and what was started and then cut off: never taken for data, never left running."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from still_drive import still

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, Checksums, FaultPlan, File
from swapper.metrics import Metrics
from swapper.storage import mounts
from swapper.storage import store as store_module
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.mounts import NvmePathError
from swapper.storage.speed import DriveSpeed
from swapper.storage.store import RecordKey, TensorStore

KEY = RecordKey(0, "optim", 0)
MIB = 1 << 20

pytestmark = pytest.mark.timeout(240)


def push_out(file: File) -> None:
    """What the kernel does in the course of time, and when memory is short."""
    subprocess.run(["sync", "-f", file.path], capture_output=True)
    descriptor = os.open(file.path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


@pytest.mark.root
@pytest.mark.parametrize("way", ["buffered", "direct refused"])
def test_what_the_page_cache_lost_is_an_error_at_every_read(thin_drive: Path, way: str) -> None:
    faults = FaultPlan(einval=1.0) if way == "direct refused" else None
    with contextlib.ExitStack() as stack:
        handle = AsyncIOHandle(backend="buffered" if faults is None else "auto", faults=faults)
        pool = stack.enter_context(BufferPool(64 * MIB, stack.enter_context(handle)))
        store = stack.enter_context(contextlib.closing(TensorStore([thin_drive], "run", 0, [handle])))
        store.plan({KEY: 40 * MIB})
        cache = RecordCache(pool, store, Metrics())
        lease, _ = cache.take(KEY, 40 * MIB)
        lease.tensor.fill_(7)
        cache.put(KEY, 40 * MIB)
        cache.flush()
        (part,) = store._records[KEY].parts
        push_out(part.file)
        for attempt in (cache.flush, lambda: cache.take(KEY, 40 * MIB), cache.flush):
            with pytest.raises(SwapIOError, match="page cache") as caught:
                attempt()
            assert caught.value.errno in (errno.EIO, errno.ENOSPC)
            assert caught.value.path == part.file.path
        cache.discard(KEY)
        cache.flush()


def test_a_record_that_was_lost_and_is_written_again_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [SwapIOError(errno.ENOSPC, "write", "file", detail="page cache")]

    def check_written(file: File) -> None:
        if lost:
            raise lost.pop()

    with (
        AsyncIOHandle(backend="buffered") as handle,
        BufferPool(MIB, handle) as pool,
        contextlib.closing(TensorStore([tmp_path], "run", 0, [handle])) as store,
        pool.acquire(4096) as lease,
    ):
        store.plan({KEY: 4096})
        store.write(KEY, lease, 4096).wait()
        monkeypatch.setattr(File, "check_written", check_written)
        for _ in range(2):  # The kernel says it once.
            with pytest.raises(SwapIOError, match="page cache"):
                store.read(KEY, lease)
        store.write(KEY, lease, 4096).wait()
        store.read(KEY, lease).wait()
        lost.append(SwapIOError(errno.EIO, "write", "file"))
        store.write(KEY, lease, 4096).wait()  # What was lost before it is not wanted any more.
        store.read(KEY, lease).wait()


@pytest.mark.long
def test_ctrl_c_while_a_start_that_failed_is_cleaned_up_leaves_nothing_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "measure_speeds", lambda directories, handles: [DriveSpeed(1e9, 1e9)] * 2)
    plans = [FaultPlan(), FaultPlan()]
    handles = [AsyncIOHandle(block_bytes=MIB, faults=plan, queue_depth=1) for plan in plans]
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    with BufferPool(16 * MIB, *handles) as pool:
        store = TensorStore(paths, "run", 0, handles)
        store.plan({KEY: 8 * MIB})
        cache = RecordCache(pool, store, Metrics())
        lease, _ = cache.take(KEY, 8 * MIB)
        lease.tensor.fill_(7)
        cache.put(KEY, 8 * MIB)
        del lease
        cache.flush()
        started, refusing = (part.share.drive for part in store._records[KEY].parts)

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # One that does not go on waiting has raised it then.
            plans[started].bytes_per_second = 0

        timer = threading.Timer(0.1, interrupt)

        def refuse(*_: object, **__: object) -> None:
            timer.start()
            raise SwapIOError(errno.EIO, "read")

        monkeypatch.setattr(handles[refusing], "read", refuse)
        with still(plans[started]):
            with pytest.raises(KeyboardInterrupt):
                cache.stage(KEY, 8 * MIB)
            assert handles[started].in_flight == 0, "it would go on writing into memory that has another owner"
        timer.join()
        cache.recover()
        store.close()
    for handle in handles:
        handle.close()


@pytest.mark.root
def test_space_that_could_not_be_reserved_is_not_promised_twice(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    for command in (["mkfs.ext2", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot make a file system without fallocate: {error}")
    try:
        with AsyncIOHandle() as handle, contextlib.closing(TensorStore([mount], "run", 0, [handle])) as store:
            store.plan({KEY: 40 * MIB})
            if store._records[KEY].parts[0].reserved:
                pytest.skip("this file system reserves")
            with pytest.raises(NvmePathError, match="are free"):
                store.plan({RecordKey(0, "optim", 1): 30 * MIB})
            store.plan({RecordKey(0, "optim", 2): 8 * MIB})
            (whole,) = mounts.file_systems(store.directories)
            assert whole.free_bytes > 40 * MIB, "nothing was written yet"
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_checksums_of_a_block_that_is_read_in_part_blame_nobody(tmp_path: Path) -> None:
    with AsyncIOHandle() as handle, handle.open(tmp_path / "file", "rw") as file:
        checksums = Checksums(128 << 10, 64 << 10)
        handle.write(file, torch.zeros(128 << 10, dtype=torch.uint8), checksums=checksums).wait()
        with pytest.raises(SwapIOError, match="cannot be checked"):
            handle.read(file, torch.zeros(1000, dtype=torch.uint8), checksums=checksums).wait()
