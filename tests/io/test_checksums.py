"""Checksums of blocks: what a drive gives back that was not written is an error, wherever it is in the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, Checksums, FaultPlan, File, Slab, probe

BLOCK = 64 << 10
LENGTHS = (1, 4095, 4096, BLOCK - 1, BLOCK, BLOCK + 4096, 3 * BLOCK + 13)
AVAILABLE = [found.backend for found in probe() if found.available]
SLAB = Slab(2 << 20)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=AVAILABLE)
def handle(request: pytest.FixtureRequest) -> Iterator[AsyncIOHandle]:
    with AsyncIOHandle(backend=request.param, block_bytes=BLOCK, queue_depth=4, threads=2) as handle:
        handle.register(SLAB)
        yield handle


@pytest.fixture
def file(handle: AsyncIOHandle, tmp_path: Path) -> Iterator[File]:
    with handle.open(tmp_path / "file", "rw") as file:
        yield file


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def written(handle: AsyncIOHandle, file: File, length: int, block: int = BLOCK) -> tuple[torch.Tensor, Checksums]:
    data, checksums = random_bytes(length), Checksums(length, block)
    handle.write(file, data, checksums=checksums).wait()
    return data, checksums


def flip(file: File, position: int) -> None:
    with open(file.path, "r+b") as plain:
        plain.seek(position)
        byte = plain.read(1)[0]
        plain.seek(position)
        plain.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("misalignment", [0, 64, 1], ids=["page", "cache-line", "odd"])
def test_what_was_written_is_accepted(handle: AsyncIOHandle, file: File, length: int, misalignment: int) -> None:
    place = torch.frombuffer(SLAB, dtype=torch.uint8)[misalignment : misalignment + length]
    place.copy_(data := random_bytes(length))
    checksums = Checksums(length, 4096)
    handle.write(file, place, checksums=checksums).wait()
    place.zero_()
    assert handle.read(file, place, checksums=checksums).wait() == length
    assert torch.equal(place, data)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block", [4096, BLOCK])
def test_a_flipped_bit_is_found_where_it_is(handle: AsyncIOHandle, file: File, length: int, block: int) -> None:
    data, checksums = written(handle, file, length, block)
    for position in {0, length // 2, length - 1}:
        flip(file, position)
        with pytest.raises(SwapIOError, match="checksum of this block") as caught:
            handle.read(file, torch.empty(length, dtype=torch.uint8), checksums=checksums).wait()
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.path == file.path
        assert caught.value.offset_bytes == position // block * block
        assert caught.value.length_bytes == min(block, length - position // block * block)
        flip(file, position)
    target = torch.empty(length, dtype=torch.uint8)
    handle.read(file, target, checksums=checksums).wait()
    assert torch.equal(target, data)


def test_an_old_block_that_comes_back_is_found(handle: AsyncIOHandle, file: File) -> None:
    old, checksums = written(handle, file, 4 * BLOCK)
    handle.write(file, random_bytes(4 * BLOCK, seed=1), checksums=checksums).wait()
    handle.write(file, old[2 * BLOCK : 3 * BLOCK], 2 * BLOCK).wait()  # as a drive that lost one write
    with pytest.raises(SwapIOError) as caught:
        handle.read(file, torch.empty(4 * BLOCK, dtype=torch.uint8), checksums=checksums).wait()
    assert caught.value.offset_bytes == 2 * BLOCK


def test_blocks_are_checked_one_by_one_too(handle: AsyncIOHandle, file: File) -> None:
    _, checksums = written(handle, file, 4 * BLOCK)
    flip(file, 3 * BLOCK)
    target = torch.empty(BLOCK, dtype=torch.uint8)
    for block in range(3):
        handle.read(file, target, block * BLOCK, checksums=checksums).wait()
    with pytest.raises(SwapIOError):
        handle.read(file, target, 3 * BLOCK, checksums=checksums).wait()


def test_what_was_never_written_or_only_in_part_is_not_trusted(handle: AsyncIOHandle, file: File) -> None:
    file.preallocate(4 * BLOCK)
    checksums = Checksums(4 * BLOCK, BLOCK)
    target = torch.empty(2 * BLOCK, dtype=torch.uint8)
    with pytest.raises(SwapIOError):
        handle.read(file, target, checksums=checksums).wait()
    handle.write(file, random_bytes(BLOCK + 4096), checksums=checksums).wait()
    with pytest.raises(SwapIOError) as caught:
        handle.read(file, target, checksums=checksums).wait()
    assert caught.value.offset_bytes == BLOCK


def test_without_checksums_nothing_is_checked(handle: AsyncIOHandle, file: File) -> None:
    written(handle, file, BLOCK)
    flip(file, 0)
    assert handle.read(file, torch.empty(BLOCK, dtype=torch.uint8)).wait() == BLOCK


@pytest.mark.parametrize("seed", range(10))
def test_faults_do_not_disturb_them(tmp_path: Path, seed: int) -> None:
    plan = FaultPlan(seed=seed, short=0.3, eintr=0.1, eagain=0.1, reorder=True)
    data, checksums = random_bytes(9 * BLOCK + 77, seed), Checksums(9 * BLOCK + 77, 4096)
    with AsyncIOHandle(block_bytes=BLOCK, queue_depth=3, threads=2, faults=plan) as handle:
        file = handle.open(tmp_path / "file", "rw")
        handle.write(file, data, checksums=checksums).wait()
        target = torch.empty_like(data)
        handle.read(file, target, checksums=checksums).wait()
    assert torch.equal(target, data)


def test_checksums_that_do_not_fit_are_refused(handle: AsyncIOHandle, file: File) -> None:
    data = random_bytes(2 * BLOCK)
    with pytest.raises(ValueError, match="do not divide"):
        handle.write(file, data, checksums=Checksums(2 * BLOCK, 3 * 4096))
    with pytest.raises(ValueError, match="not the start of a block"):
        handle.write(file, data, 4096, checksums=Checksums(4 * BLOCK, BLOCK))
    with pytest.raises(ValueError, match="beyond"):
        handle.write(file, data, checksums=Checksums(2 * BLOCK - 1, BLOCK))
    for block in (0, 4095, -1):
        with pytest.raises((ValueError, TypeError)):
            Checksums(BLOCK, block)
    assert handle.in_flight == 0
    assert file.size_bytes() == 0
