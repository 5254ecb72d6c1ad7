"""Records that are spans of files: any bytes come to multiples of 64 in a buffer, and nothing is written."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_drives import random_bytes

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.buffers import BufferPool
from swapper.storage.spans import Extent, SourceFile, SpanStore, plan_spans
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)

KEY = RecordKey(0, "param", 0)
PAGE = 4096


@pytest.fixture
def handle() -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(block_bytes=16 << 10) as handle:
        yield handle


@pytest.fixture
def changes(nvme_path: Path, leaves_nothing: None, handle: AsyncIOHandle) -> Iterator[TensorStore]:
    made = TensorStore([nvme_path], "run", 0, [handle])
    yield made
    made.close()


@pytest.fixture
def pool(handle: AsyncIOHandle) -> Iterator[BufferPool]:
    with BufferPool(4 << 20, handle) as pool:
        yield pool


def a_file(path: Path, length: int, seed: int = 0) -> torch.Tensor:
    content = random_bytes(length, seed)
    path.write_bytes(content.numpy().tobytes())
    return content


def cut(chance: random.Random, length: int, path: Path) -> Iterator[Extent]:
    """Tensors one after another in a file of `length`, with and without gaps."""
    at = chance.randrange(300)
    while True:
        stop = at + chance.choice([1, 64, 64 * chance.randint(1, 300), chance.randint(1, 20_000)])
        if stop > length:
            return
        yield Extent(path, at, stop)
        at = stop + chance.choice([0, 0, 0, 1, 64, chance.randrange(2 * PAGE), chance.randrange(8 * PAGE)])


@pytest.mark.parametrize("aligned", [0, 1, 4, 512])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sampled(40)
def test_any_bytes_of_any_files(
    seed: int,
    aligned: int,
    tmp_path: Path,
    handle: AsyncIOHandle,
    pool: BufferPool,
    changes: TensorStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`aligned`: what the drive wants of addresses, or says that it wants; 0 for what this one really wants."""
    chance = random.Random(seed)
    contents: dict[Path, torch.Tensor] = {}
    extents: list[Extent] = []
    for i in range(chance.randint(1, 3)):
        length = chance.choice([chance.randint(300, 200_000), 4 * PAGE])
        path = tmp_path / str(i)
        contents[path] = a_file(path, length, i)
        extents += cut(chance, length, path)
    extents = chance.sample(extents, chance.randint(1, min(len(extents), 20)))
    tensors, left = [], list(extents)
    while left:  # Some are assembled of several, which may or may not follow one another.
        tensors.append([left.pop() for _ in range(min(len(left), chance.choice([1, 1, 1, 2, 5])))])
        if chance.random() < 0.5:
            tensors[-1].sort()
    residues = [chance.choice([0, 0, chance.randrange(64)]) for _ in tensors]
    plan = plan_spans(tensors, residues)
    assert [offset % 64 for offset in plan.offsets_bytes] == residues
    assert plan.length_bytes % PAGE == 0
    files = {path: SourceFile(path, handle) for path in contents}
    for file in files.values() if aligned else ():
        monkeypatch.setattr(file, "_memory_alignment_bytes", aligned)
    store = SpanStore({KEY: plan.spans}, files, changes)
    with pool.acquire(plan.length_bytes) as lease:
        lease.tensor.fill_(7)
        moved_bytes = store.read(KEY, lease).wait()
        for _ in range(2):
            store.finish_read(KEY, lease)
        for pieces, offset in zip(tensors, plan.offsets_bytes, strict=True):
            expected = torch.cat([contents[each.path][each.start_bytes : each.stop_bytes] for each in pieces])
            assert torch.equal(lease.tensor[offset : offset + len(expected)], expected)
    wanted_bytes = sum(extent.stop_bytes - extent.start_bytes for extent in extents)
    assert moved_bytes == store.stored_bytes(KEY)
    assert moved_bytes <= wanted_bytes + 2 * PAGE * len(extents)
    assert plan.length_bytes <= wanted_bytes + 3 * PAGE * len(extents)
    for file in files.values():
        file.close()


def test_what_follows_in_a_file_is_one_span(tmp_path: Path) -> None:
    sizes = [64 * 1000, 64 * 50, 64 * 3000, 64]
    at = 1000
    extents = []
    for size in sizes:
        extents.append(Extent(tmp_path, at, at + size))
        at += size
    (span,) = plan_spans([[extent] for extent in extents]).spans
    assert (span.offset_bytes, span.at_bytes) == (0, -1000 % 64)
    assert plan_spans([[extent] for extent in reversed(extents)]).spans == (span,)
    assert len(plan_spans([[extents[0]], [extents[2]], [extents[3]]]).spans) == 1, (
        "3,200 bytes of another are read through"
    )
    assert len(plan_spans([[extents[0]], [extents[3]]]).spans) == 2
    shifted = extents[2]._replace(start_bytes=extents[2].start_bytes + 16)
    assert len(plan_spans([[extents[0]], [extents[1]], [shifted]]).spans) == 2, "of another residue"


def test_a_record_that_is_written_is_read_from_where_it_was_written(
    tmp_path: Path, handle: AsyncIOHandle, pool: BufferPool, changes: TensorStore
) -> None:
    path = tmp_path / "file"
    content = a_file(path, 100_000)
    plan = plan_spans([[Extent(path, 40, 90_040)]])
    store = SpanStore({KEY: plan.spans}, {path: SourceFile(path, handle)}, changes)
    store.plan({KEY: plan.length_bytes})
    assert [each.name for each in changes.directories[0].iterdir()] == ["lock"]
    with pool.acquire(plan.length_bytes) as lease:
        store.read(KEY, lease).wait()
        store.finish_read(KEY, lease)
        lease.tensor[plan.offsets_bytes[0]] ^= 1
        written = lease.tensor.clone()
        store.write(KEY, lease, plan.length_bytes).wait()
        lease.tensor.zero_()
        os.truncate(path, 10)
        store.read(KEY, lease).wait()
        store.finish_read(KEY, lease)
        assert torch.equal(lease.tensor, written)
    assert path.read_bytes() == content[:10].numpy().tobytes()
    store.forget(KEY)
    assert store.stored_bytes(KEY) == 0
    assert [each.name for each in changes.directories[0].iterdir()] == ["lock"]


def test_what_was_read_and_dropped_moves_nothing_that_was_written_since(
    tmp_path: Path, handle: AsyncIOHandle, pool: BufferPool, changes: TensorStore
) -> None:
    """As when a device has newer values than the file that was read ahead."""
    path = tmp_path / "file"
    a_file(path, 100_000)
    plan = plan_spans([[Extent(path, 40_000, 60_000), Extent(path, 40, 20_040)]])  # Its second piece is moved.
    store = SpanStore({KEY: plan.spans}, {path: SourceFile(path, handle)}, changes)
    store.plan({KEY: plan.length_bytes})
    with pool.acquire(plan.length_bytes) as lease:
        store.read(KEY, lease).wait()
        written = random_bytes(plan.length_bytes, 1)
        lease.tensor.copy_(written)
        store.write(KEY, lease, plan.length_bytes).wait()
        store.finish_read(KEY, lease)
        assert torch.equal(lease.tensor, written)
    store.forget(KEY)


@pytest.mark.parametrize("others_first", [False, True])
def test_what_is_arranged_in_place_is_arranged_once(
    others_first: bool, tmp_path: Path, handle: AsyncIOHandle, pool: BufferPool, changes: TensorStore
) -> None:
    """However often it was asked for, and what else was to be done failed, of the same kind or not; after each read."""
    path = tmp_path / "file"
    content = a_file(path, 100_000)
    plan = plan_spans([[Extent(path, 40, 90_040)]])
    at, failures = plan.offsets_bytes[0], [MemoryError(), OSError(), None, None]

    def arrange(buffer: torch.Tensor) -> None:
        if isinstance(failure := failures.pop(0), MemoryError):  # Nothing was changed.
            raise failure
        failures.insert(0, failure)
        buffer[at : at + 45_000] += 1

    def arrange_others(buffer: torch.Tensor) -> None:
        buffer[at + 45_000 : at + 90_000] += 1

    def convert(buffer: torch.Tensor) -> None:
        if (failure := failures.pop(0)) is not None:
            raise failure

    both = (arrange_others, arrange) if others_first else (arrange, arrange_others)
    spans = (plan.spans[0]._replace(arrange=both, convert=convert),)
    store = SpanStore({KEY: spans}, {path: SourceFile(path, handle)}, changes)
    with pool.acquire(plan.length_bytes) as lease:
        store.read(KEY, lease).wait()
        for kind in (MemoryError, OSError):
            with pytest.raises(kind):
                store.finish_read(KEY, lease)
        for _ in range(2):
            store.finish_read(KEY, lease)
        assert torch.equal(lease.tensor[at : at + 90_000], content[40:90_040] + 1)
        store.read(KEY, lease).wait()
        store.read(KEY, lease).wait()
        failures.append(None)
        store.finish_read(KEY, lease)
        assert torch.equal(lease.tensor[at : at + 90_000], content[40:90_040] + 1)


def test_a_change_while_it_is_read_is_found_when_it_has_arrived(
    tmp_path: Path, pool: BufferPool, changes: TensorStore
) -> None:
    path = tmp_path / "file"
    a_file(path, 100_000)
    os.utime(path, ns=(0, 10**18))
    plan = plan_spans([[Extent(path, 0, 100_000)]])
    with AsyncIOHandle(faults=FaultPlan(delay_us=20_000)) as slow, pool.acquire(plan.length_bytes) as lease:
        store = SpanStore({KEY: plan.spans}, {path: SourceFile(path, slow)}, changes)
        transfer = store.read(KEY, lease)
        with path.open("r+b") as file:  # Not `a_file`: that one empties it first, and the read may then end early.
            file.write(random_bytes(100_000, 1).numpy().tobytes())
        transfer.wait()
        for key in (KEY, None):
            with pytest.raises(SwapIOError, match="it was changed since") as caught:
                store.check_written(key)
            assert (caught.value.errno, caught.value.path) == (errno.ESTALE, str(path))
        with pytest.raises(SwapIOError, match="it was changed since"):
            store.read(KEY, lease)


def test_a_file_is_known_by_its_name_where_that_is_asked(tmp_path: Path, handle: AsyncIOHandle) -> None:
    path = tmp_path / "file"
    a_file(path, 5000)
    with pytest.raises(SwapIOError):
        SourceFile(tmp_path / "none", handle)
    file = SourceFile(path, handle)
    file.check(named=True)
    a_file(tmp_path / "other", 5000)
    os.replace(tmp_path / "other", path)
    file.check()
    with pytest.raises(SwapIOError, match="it was changed since"):
        file.check(named=True)
    file.close()
