"""Second names of records: what has one never changes, what lost it is used again, and nothing is torn on the way."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isolation import in_forked_child
from safetensors import safe_open
from small_drives import keys, mode_of, mounted, random_bytes
from training import adamw, assert_same_state, make_model, run

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.files.output_file import OutputFile
from swapper.io import checksums
from swapper.io.handle import AsyncIOHandle, FaultPlan, File, exchange
from swapper.sizes import PAGE_BYTES
from swapper.storage import record_files
from swapper.storage import recycled_files as spares
from swapper.storage.buffers import BufferPool
from swapper.storage.mounts import NvmePathError, file_systems
from swapper.storage.speed import DriveSpeed
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)

MiB = 1 << 20
PAGE = 4096
KEY, OTHER, THIRD = keys(3)
LENGTH = 3 * 64 * 1024 + PAGE


class Drives:
    """A store on some directories, and what moves its records."""

    def __init__(self, paths: list[Path], *, verify: bool = False, pool_bytes: int = 8 * MiB) -> None:
        self.plans = [FaultPlan() for _ in paths]
        self.handles = [AsyncIOHandle(block_bytes=64 << 10, faults=plan) for plan in self.plans]
        self.pool = BufferPool(pool_bytes, *self.handles)
        self.store = TensorStore(paths, "run", 0, self.handles, verify=verify)
        self.planned: dict[RecordKey, int] = {}

    def plan(self, *wanted: RecordKey, length: int = LENGTH) -> None:
        self.store.plan(dict.fromkeys(wanted, length), summed=True)
        self.planned.update(dict.fromkeys(wanted, length))

    def write(self, seed: int, key: RecordKey = KEY, length: int | None = None) -> None:
        length = length or self.planned[key]
        with self.pool.acquire(length) as lease:
            lease.tensor.copy_(random_bytes(length, seed))
            self.store.write(key, lease, length).wait()

    def read(self, key: RecordKey = KEY) -> bytes:
        length = self.store.stored_bytes(key)
        with self.pool.acquire(-(-length // PAGE) * PAGE) as lease:
            lease.tensor.fill_(7)
            assert self.store.read(key, lease).wait() == length
            return to_bytes(lease.tensor[:length])

    def file(self, key: RecordKey = KEY) -> Path:
        (part,) = self.store._records[key].parts
        return Path(part.file.path)

    def close(self) -> None:
        self.store.close()
        self.pool.close()
        for handle in self.handles:
            handle.close()


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def content(seed: int, length: int = LENGTH) -> bytes:
    return to_bytes(random_bytes(length, seed))


def publish(store: TensorStore, key: RecordKey, path: Path, length: int) -> bool:
    """Publish one record. Returns whether it was possible."""
    return key in store.publish_all({key: (path, length)})


def crc_of(data: bytes) -> int:
    return checksums.checksum(torch.tensor(bytearray(data), dtype=torch.uint8))


@pytest.fixture(params=[False, True], ids=["plain", "verify"])
def drives(request: pytest.FixtureRequest, nvme_path: Path, leaves_nothing: None) -> Iterator[Drives]:
    made = Drives([nvme_path], verify=request.param)
    yield made
    made.close()


@pytest.fixture
def two_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drives]:
    """Records of more than 64 KiB are on both."""
    monkeypatch.setattr("swapper.storage.store.STRIPE_BYTES", 64 << 10)
    monkeypatch.setattr("swapper.storage.store.measure_speeds", lambda *_: [DriveSpeed(1, 1)] * 2)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    made = Drives(paths)
    yield made
    made.close()


# --- Checksums --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=5000), max_size=6))
def test_checksums_of_parts_are_joined(parts: list[bytes]) -> None:
    assert checksums.join_checksums((crc_of(part), len(part)) for part in parts) == crc_of(b"".join(parts))


@pytest.mark.parametrize("length", [PAGE, 64 << 10, (64 << 10) + PAGE, LENGTH])
def test_the_checksum_of_a_record_is_known_without_reading_it(drives: Drives, length: int) -> None:
    drives.plan(KEY)
    assert drives.store.checksum(KEY) == 0
    for written in (LENGTH, length):
        drives.write(1, length=written)
        reads = drives.plans[0].reads
        assert drives.store.checksum(KEY) == crc_of(content(1, written))
        assert drives.plans[0].reads == reads


def test_the_checksum_of_a_record_on_two_drives(two_drives: Drives) -> None:
    two_drives.plan(KEY)
    for length in (LENGTH, PAGE, 2 * 64 * 1024):
        two_drives.write(2, length=length)
        assert two_drives.store.checksum(KEY) == crc_of(content(2, length))
    assert len(two_drives.store._records[KEY].parts) == 2


def test_a_record_that_is_not_summed_has_no_checksum(nvme_path: Path, leaves_nothing: None) -> None:
    drives = Drives([nvme_path])
    drives.store.plan({KEY: LENGTH})
    drives.planned[KEY] = LENGTH
    drives.write(0)
    with pytest.raises(ValueError, match=KEY.file_name):
        drives.store.checksum(KEY)
    drives.close()


# --- Publishing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 77, PAGE - 1])
def test_a_published_record_is_a_file_of_its_own(drives: Drives, tmp_path: Path, cut: int) -> None:
    drives.plan(KEY)
    drives.write(1)
    public = tmp_path / "public"
    former = os.umask(0o027)
    try:
        assert publish(drives.store, KEY, public, LENGTH - cut)
    finally:
        os.umask(former)
    assert public.read_bytes() == content(1)[: LENGTH - cut] == drives.read()
    assert mode_of(public) == 0o640
    assert drives.store.stored_bytes(KEY) == LENGTH - cut
    assert drives.store.checksum(KEY) == crc_of(public.read_bytes())
    with pytest.raises(ValueError, match="length"):
        publish(drives.store, KEY, tmp_path / "shorter", LENGTH - cut - 1)
    assert publish(drives.store, KEY, tmp_path / "again", LENGTH - cut)  # Nothing was written in between.
    for seed in (2, 3):
        drives.write(seed)
        assert drives.read() == content(seed)
        assert drives.store.checksum(KEY) == crc_of(content(seed))
        assert mode_of(drives.file()) == 0o600
    assert sorted(os.listdir(drives.store.directories[0])) == sorted([drives.file().name, "lock"])
    drives.store.close()
    assert public.read_bytes() == (tmp_path / "again").read_bytes() == content(1)[: LENGTH - cut]


def test_many_are_published_at_once(drives: Drives, tmp_path: Path) -> None:
    drives.plan(*keys(20), length=PAGE)
    for key in keys(20):
        drives.write(key.number, key)
    files = {key: (tmp_path / str(key.number), PAGE - key.number) for key in keys(20)}
    assert drives.store.publish_all(files) == set(files)
    for key, (path, length) in files.items():
        assert path.read_bytes() == content(key.number, PAGE)[:length]
    assert drives.store.publish_all({}) == set()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_where_there_are_no_second_names_nothing_changes(
    drives: Drives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    drives.plan(KEY, OTHER)
    drives.write(1)
    drives.write(2, OTHER)

    def refuse(source: str, path: Path) -> None:
        if source == str(drives.file()):
            raise OSError(number, "refused")
        real(source, path)

    real = os.link
    monkeypatch.setattr(record_files.os, "link", refuse)
    before = os.stat(drives.file())
    files = {KEY: (tmp_path / "public", LENGTH - 1), OTHER: (tmp_path / "other", LENGTH - 1)}
    assert drives.store.publish_all(files) == {OTHER}
    assert not (tmp_path / "public").exists() and (tmp_path / "other").exists()
    after = os.stat(drives.file())
    assert (after.st_size, after.st_mode, after.st_nlink) == (before.st_size, before.st_mode, 1)
    drives.write(3)
    assert os.stat(drives.file()).st_ino == before.st_ino


@pytest.mark.root
def test_another_file_system_is_no_place_to_publish(drives: Drives, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    drives.plan(KEY)
    drives.write(1)
    with mounted(elsewhere, "-t", "tmpfs", "tmpfs"):
        assert not publish(drives.store, KEY, elsewhere / "public", LENGTH)
        assert not list(elsewhere.iterdir())


def test_a_record_on_two_drives_is_not_published(two_drives: Drives, tmp_path: Path) -> None:
    two_drives.plan(KEY)
    two_drives.write(1)
    assert not publish(two_drives.store, KEY, tmp_path / "public", LENGTH)
    assert not (tmp_path / "public").exists()
    two_drives.write(2, length=PAGE)  # All of it is on one.
    assert publish(two_drives.store, KEY, tmp_path / "public", PAGE)
    two_drives.write(3)
    assert two_drives.read() == content(3)
    assert (tmp_path / "public").read_bytes() == content(2, PAGE)


def test_a_name_that_is_taken_or_nowhere_is_an_error(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY, OTHER)
    drives.write(1)
    drives.write(2, OTHER)
    taken = tmp_path / "taken"
    taken.write_bytes(b"mine")
    for path, number in ((taken, errno.EEXIST), (tmp_path / "no" / "where", errno.ENOENT)):
        with pytest.raises(SwapIOError) as caught:
            drives.store.publish_all({OTHER: (tmp_path / "other", LENGTH), KEY: (path, LENGTH)})
        assert (caught.value.errno, caught.value.path) == (number, str(path))
        assert not (tmp_path / "other").exists()
    assert taken.read_bytes() == b"mine"
    assert (drives.read(), drives.read(OTHER)) == (content(1), content(2))


@pytest.mark.parametrize("length", [0, LENGTH - PAGE, LENGTH + 1, -1])
def test_a_length_that_is_not_the_records_is_refused(drives: Drives, tmp_path: Path, length: int) -> None:
    drives.plan(KEY)
    drives.write(1)
    with pytest.raises(ValueError, match=str(length)):
        publish(drives.store, KEY, tmp_path / "public", length)
    assert not (tmp_path / "public").exists()


def test_a_sync_that_fails_publishes_nothing_and_is_not_forgotten(
    drives: Drives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives.plan(*keys(6))
    for key in keys(6):
        drives.write(key.number, key)
    failing = str(drives.file(THIRD))
    real = File.sync

    def sync(file: File) -> None:
        if file.path == failing:
            raise SwapIOError(errno.EIO, "sync", file.path)
        real(file)

    monkeypatch.setattr(File, "sync", sync)
    with pytest.raises(SwapIOError) as caught:
        drives.store.publish_all({key: (tmp_path / f"{key.number}", LENGTH) for key in keys(6)})
    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path / "2"))
    assert not list(tmp_path.glob("[0-9]"))
    with pytest.raises(SwapIOError, match="sync"):
        drives.read(THIRD)
    assert drives.read(OTHER) == content(1)
    drives.write(9, THIRD)
    assert drives.read(THIRD) == content(9)


@pytest.mark.root
def test_what_the_drive_has_no_room_for_is_not_published(thin_drive: Path) -> None:
    length = 40 * MiB
    with (
        AsyncIOHandle(backend="buffered") as handle,
        BufferPool(length, handle) as pool,
    ):
        store = TensorStore([thin_drive], "run", 0, [handle])
        store.plan({KEY: length})
        with pool.acquire(length) as lease:
            lease.tensor.fill_(7)
            store.write(KEY, lease, length).wait()
            with pytest.raises(SwapIOError) as caught:
                publish(store, KEY, thin_drive / "public", length)
            assert caught.value.errno in (errno.EIO, errno.ENOSPC)
            assert not (thin_drive / "public").exists()
            for _ in range(2):
                with pytest.raises(SwapIOError):
                    store.read(KEY, lease)
        store.close()


def test_damage_is_not_published_under_a_checksum_of_its_own(nvme_path: Path, tmp_path: Path) -> None:
    drives = Drives([nvme_path], verify=True)
    drives.plan(KEY)
    drives.write(1)
    with open(drives.file(), "r+b") as file:
        file.seek(LENGTH - 100)
        byte = file.read(1)[0]
        file.seek(LENGTH - 100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SwapIOError) as caught:
        publish(drives.store, KEY, tmp_path / "public", LENGTH - 1)
    assert caught.value.errno == errno.EBADMSG
    assert not (tmp_path / "public").exists()
    drives.close()


def test_damage_to_a_published_record_is_found_by_verify(nvme_path: Path, tmp_path: Path) -> None:
    drives = Drives([nvme_path], verify=True)
    drives.plan(KEY)
    drives.write(1)
    assert publish(drives.store, KEY, tmp_path / "public", LENGTH - 5)
    with open(tmp_path / "public", "r+b") as file:
        file.seek(LENGTH - 6)
        byte = file.read(1)[0]
        file.seek(LENGTH - 6)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(SwapIOError) as caught:
        drives.read()
    assert caught.value.errno == errno.EBADMSG
    drives.close()


# --- What was published never changes ---------------------------------------------------------------------------------


def test_a_file_that_lost_its_second_name_is_written_again(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    publish(drives.store, KEY, tmp_path / "public", LENGTH - 9)
    before = os.stat(drives.file())
    (tmp_path / "public").unlink()
    drives.write(2)
    after = os.stat(drives.file())
    assert before.st_ino == after.st_ino and stat.S_IMODE(after.st_mode) == 0o600
    assert drives.read() == content(2)
    assert drives.store.first_writes == 1


def test_a_file_that_cannot_be_opened_again_is_not_read_but_replaced(
    drives: Drives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> File:
        raise SwapIOError(errno.EMFILE, "open", "file")

    drives.plan(KEY)
    drives.write(1)
    publish(drives.store, KEY, tmp_path / "public", LENGTH)
    (tmp_path / "public").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(drives.handles[0], "open", refuse)
        with pytest.raises(SwapIOError, match="open"):
            drives.write(2)
    with pytest.raises(SwapIOError, match="interrupted"):
        drives.read()
    drives.write(3)
    assert drives.read() == content(3)


@pytest.mark.parametrize("strikes", [1, 2])
def test_ctrl_c_between_two_fresh_files_is_not_taken_for_a_record(
    two_drives: Drives, monkeypatch: pytest.MonkeyPatch, strikes: int
) -> None:
    left = [strikes]

    def remove(file: File) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(file)

    real = record_files.remove
    two_drives.plan(KEY)
    two_drives.write(1)
    with two_drives.store.pin(KEY) as pinned:
        with monkeypatch.context() as patch:
            patch.setattr("swapper.storage.store.remove", remove)
            with pytest.raises(KeyboardInterrupt):
                two_drives.write(2)
        with pytest.raises(SwapIOError, match="interrupted"):
            two_drives.read()
        two_drives.write(3)
        assert two_drives.read() == content(3)
        assert pinned_bytes(pinned) == content(1)


def test_a_reader_of_a_file_that_lost_its_second_name_sees_no_change(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    publish(drives.store, KEY, tmp_path / "public", LENGTH)
    with open(tmp_path / "public", "rb", buffering=0) as reader:
        (tmp_path / "public").unlink()
        drives.write(2)
        assert reader.read() == content(1)
    assert drives.read() == content(2)


def test_a_file_of_which_only_the_public_name_is_left_is_not_written(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    publish(drives.store, KEY, tmp_path / "public", LENGTH)
    drives.file().unlink()
    drives.write(2)
    assert (tmp_path / "public").read_bytes() == content(1)
    assert drives.read() == content(2)


def test_a_name_that_somebody_else_gave_keeps_the_content_too(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    os.link(drives.file(), tmp_path / "theirs")
    drives.write(2)
    assert (tmp_path / "theirs").read_bytes()[:LENGTH] == content(1)


def test_a_write_that_fails_leaves_what_was_published(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    publish(drives.store, KEY, tmp_path / "public", LENGTH)
    drives.plans[0].fail_write_at = 1
    with pytest.raises(SwapIOError):
        drives.write(2)
    assert (tmp_path / "public").read_bytes() == content(1)
    drives.write(3)
    assert drives.read() == content(3)


@pytest.mark.root
def test_no_room_for_a_second_file_tears_nothing(small_drive: Path) -> None:
    length = 6 * MiB
    drives = Drives([small_drive], pool_bytes=length)
    drives.plan(KEY, length=length)
    drives.write(1)
    with pytest.raises(NvmePathError, match="kept as they are") as refused:
        drives.store.check_room_for_copies([KEY] * 10)
    assert refused.value.errno == errno.ENOSPC
    public = small_drive / "public"
    assert publish(drives.store, KEY, public, length)
    filler = small_drive / "filler"
    with open(filler, "wb") as file:
        free = os.statvfs(small_drive).f_bavail * os.statvfs(small_drive).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - 4 * MiB)
    with pytest.raises(NvmePathError, match="6 MiB"):
        drives.store.check_room_for_copies([KEY])
    for _ in range(2):
        with pytest.raises(SwapIOError) as caught:
            drives.write(2)
        assert (caught.value.errno, caught.value.operation) == (errno.ENOSPC, "preallocate")
        assert drives.read() == content(1, length)
        assert sorted(os.listdir(drives.store.directories[0])) == [KEY.file_name, "lock"]
    filler.unlink()
    drives.store.check_room_for_copies([KEY])
    drives.write(3)
    assert drives.read() == content(3, length)
    assert public.read_bytes() == content(1, length)
    public.unlink()
    drives.close()


def test_no_room_on_one_of_two_drives_tears_nothing(two_drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    two_drives.plan(KEY)
    two_drives.write(1)
    real = File.preallocate

    def preallocate(file: File, length_bytes: int) -> bool:
        if "/b/" in file.path:
            raise SwapIOError(errno.ENOSPC, "preallocate", file.path)
        return real(file, length_bytes)

    with two_drives.store.pin(KEY):
        with monkeypatch.context() as patch:
            patch.setattr(File, "preallocate", preallocate)
            with pytest.raises(SwapIOError, match="preallocate"):
                two_drives.write(2)
        assert two_drives.read() == content(1)
        for directory in two_drives.store.directories:
            assert sorted(os.listdir(directory)) == [KEY.file_name, "lock", "pin-000000"]
        two_drives.write(2)
    assert two_drives.read() == content(2)


# --- Pins -------------------------------------------------------------------------------------------------------------


def pinned_bytes(pinned: record_files.Pinned) -> bytes:
    found = b""
    for handle, file, length in pinned.parts:
        memory = torch.zeros(length, dtype=torch.uint8)
        handle.read(file, memory).wait()
        found += to_bytes(memory)
    assert len(found) == pinned.length_bytes
    return found


def test_a_pin_keeps_the_content(drives: Drives) -> None:
    drives.plan(KEY)
    drives.write(1, length=LENGTH - PAGE)
    pinned, again = drives.store.pin(KEY), drives.store.pin(KEY)
    inode = os.stat(drives.file()).st_ino
    drives.write(2)
    assert os.stat(drives.file()).st_ino != inode
    later = drives.store.pin(KEY)
    drives.write(3)
    assert drives.read() == content(3)
    assert pinned_bytes(pinned) == pinned_bytes(again) == content(1, LENGTH - PAGE)
    assert pinned_bytes(later) == content(2)
    for one in (pinned, again, later):
        one.close()
        one.close()
    inode = os.stat(drives.file()).st_ino
    drives.write(4)
    assert os.stat(drives.file()).st_ino == inode


def test_a_pin_that_was_closed_counts_no_more(drives: Drives) -> None:
    drives.plan(KEY)
    drives.write(1)
    inode = os.stat(drives.file()).st_ino
    with drives.store.pin(KEY):
        closer = drives.store.pin(KEY)
        thread = threading.Thread(target=closer.close)
        thread.start()
        thread.join()
    drives.store.pin(KEY)  # Collected at once.
    drives.write(2)
    assert os.stat(drives.file()).st_ino == inode


def test_a_pin_outlives_the_record_and_the_store(drives: Drives) -> None:
    drives.plan(KEY, OTHER)
    drives.write(1)
    drives.write(2, OTHER)
    first, second = drives.store.pin(KEY), drives.store.pin(OTHER)
    drives.store.forget(KEY)
    drives.store.close()
    assert (pinned_bytes(first), pinned_bytes(second)) == (content(1), content(2))
    first.close()
    second.close()


def test_a_pin_of_a_record_whose_file_was_removed(drives: Drives) -> None:
    drives.plan(KEY)
    drives.write(1)
    drives.file().unlink()
    with drives.store.pin(KEY) as pinned:
        drives.write(2)
        assert pinned_bytes(pinned) == content(1)


def test_a_pin_of_a_record_on_two_drives(two_drives: Drives) -> None:
    two_drives.plan(KEY)
    two_drives.write(1)
    with two_drives.store.pin(KEY) as pinned:
        two_drives.write(2)
        assert len(pinned.parts) == 2
        assert pinned_bytes(pinned) == content(1)


# --- Spares -----------------------------------------------------------------------------------------------------------


def publish_and_move_on(drives: Drives, path: Path, key: RecordKey = KEY) -> None:
    """Leave a file at `path` that is the record's no more."""
    drives.write(1, key)
    assert publish(drives.store, key, path, drives.store.stored_bytes(key))
    drives.write(2, key)


def test_the_file_of_a_removed_checkpoint_is_written_again(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    publish_and_move_on(drives, tmp_path / "old")
    inode = os.stat(tmp_path / "old").st_ino
    assert drives.store.adopt(tmp_path / "old")
    assert not (tmp_path / "old").exists()
    (spare,) = drives.store.directories[0].glob("spare*")
    assert mode_of(spare) == 0o600
    assert publish(drives.store, KEY, tmp_path / "new", LENGTH)
    counted = drives.store.first_writes
    drives.write(3)
    assert os.stat(drives.file()).st_ino == inode
    assert drives.store.first_writes == counted
    assert drives.read() == content(3)
    assert drives.store.checksum(KEY) == crc_of(content(3))
    assert (tmp_path / "new").read_bytes() == content(2)
    assert not list(drives.store.directories[0].glob("spare*"))


def test_once_checkpoints_are_removed_no_write_is_a_first_write(drives: Drives, tmp_path: Path) -> None:
    sizes = {key: LENGTH + key.number * 5 * PAGE for key in keys(4)}
    for key, size in sizes.items():
        drives.plan(key, length=size)
    counts = []
    for turn in range(6):
        for key in sizes:
            drives.write(turn, key)
        counts.append(drives.store.first_writes)
        directory = tmp_path / f"step-{turn}"
        directory.mkdir()
        files = {key: (directory / key.file_name, size) for key, size in sizes.items()}
        assert drives.store.publish_all(files) == set(sizes)
        if turn >= 2:
            assert all(drives.store.adopt(path) for path in (tmp_path / f"step-{turn - 2}").iterdir())
    assert counts == [4, 8, 12, 12, 12, 12]
    for turn in (4, 5):
        for key, size in sizes.items():
            assert (tmp_path / f"step-{turn}" / key.file_name).read_bytes() == content(turn, size)


def test_a_spare_of_another_length_is_made_to_fit(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.plan(OTHER, length=PAGE)
    drives.plan(THIRD, length=2 * LENGTH)
    for key in (KEY, OTHER, THIRD):
        publish_and_move_on(drives, tmp_path / str(key.number), key)
    for number in (0, 2):  # Neither of the length of OTHER.
        assert drives.store.adopt(tmp_path / str(number))
    for key in (OTHER, THIRD, KEY):
        assert publish(drives.store, key, tmp_path / f"new-{key.number}", drives.planned[key])
        drives.write(3, key)
        assert drives.read(key) == content(3, drives.planned[key])
        assert os.stat(drives.file(key)).st_size == drives.planned[key]


def test_what_is_no_spare_stays_as_it_is(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    linked, empty, large = tmp_path / "linked", tmp_path / "empty", tmp_path / "large"
    assert publish(drives.store, KEY, linked, LENGTH)  # It is the record's file, too.
    empty.touch()
    large.write_bytes(b"x" * (LENGTH + 1))
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(large)
    os.mkfifo(tmp_path / "fifo")
    for name in ("linked", "empty", "large", "directory", "link", "fifo", "missing"):
        assert not drives.store.adopt(tmp_path / name), name
    assert linked.read_bytes() == content(1)
    assert sorted(os.listdir(drives.store.directories[0])) == [KEY.file_name, "lock"]


def test_there_are_no_more_spares_than_records(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    for number in range(2):
        publish_and_move_on(drives, tmp_path / str(number))
    assert drives.store.adopt(tmp_path / "0")
    assert not drives.store.adopt(tmp_path / "1")
    assert (tmp_path / "1").read_bytes() == content(1)


@pytest.mark.root
def test_a_file_of_somebody_elses_file_system_is_no_spare(drives: Drives, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    drives.plan(KEY)
    with mounted(elsewhere, "-t", "tmpfs", "tmpfs"):
        (elsewhere / "file").write_bytes(b"x" * PAGE)
        assert not drives.store.adopt(elsewhere / "file")
        assert (elsewhere / "file").read_bytes() == b"x" * PAGE


def test_what_somebody_reads_is_no_spare(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    publish_and_move_on(drives, tmp_path / "old")
    with open(tmp_path / "old", "rb"):
        assert not drives.store.adopt(tmp_path / "old")
    assert drives.store.adopt(tmp_path / "old")


def test_who_opens_a_file_while_it_is_adopted_gets_it_whole(
    drives: Drives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives.plan(KEY)
    publish_and_move_on(drives, tmp_path / "old")
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "old").read_bytes()))
    real = os.rename

    def rename(source: Path, place: Path) -> None:
        if not reader.ident:
            reader.start()
            while any(waits := [not spares._nobody_waits(descriptor) for descriptor in leased]) is False:
                assert waits
        real(source, place)

    leased: list[int] = []
    monkeypatch.setattr(spares.os, "rename", rename)
    monkeypatch.setattr(spares.os, "fstat", lambda descriptor: leased.append(descriptor) or os_fstat(descriptor))
    assert not drives.store.adopt(tmp_path / "old")
    reader.join()
    assert found == [content(1)]
    assert (tmp_path / "old").read_bytes() == content(1)


os_fstat = os.fstat


def test_a_spare_that_somebody_opened_after_all_is_not_written(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    publish_and_move_on(drives, tmp_path / "old")
    assert drives.store.adopt(tmp_path / "old")
    (spare,) = drives.store.directories[0].glob("spare*")
    with open(spare, "rb", buffering=0) as reader:
        publish(drives.store, KEY, tmp_path / "new", LENGTH)
        drives.write(3)
        assert reader.read() == content(1)
    assert drives.read() == content(3)
    assert not spare.exists()


@pytest.mark.root
def test_spares_make_way_for_records_that_do_not_fit_beside_them(small_drive: Path) -> None:
    drives = Drives([small_drive], pool_bytes=10 * MiB)
    sizes = dict.fromkeys(keys(4), MiB)
    drives.plan(*sizes, length=MiB)
    for key in sizes:
        publish_and_move_on(drives, small_drive / str(key.number), key)
    for key in sizes:
        assert drives.store.adopt(small_drive / str(key.number))
    (file_system,) = file_systems(drives.store.directories)
    large = (file_system.free_bytes + 2 * MiB) // PAGE * PAGE
    drives.plan(RecordKey(1, "optim", 0), length=large)
    assert not list(drives.store.directories[0].glob("spare*"))
    assert all(drives.read(key) == content(2, MiB) for key in sizes)
    drives.close()
    assert not [path for path in small_drive.iterdir() if path.name != "lost+found"]


def test_a_signal_of_a_lease_ends_nobody(drives: Drives, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL
    with spares._leased(path) as descriptor:
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        assert not spares._nobody_waits(descriptor)
    assert spares.is_unread(path)


# --- Forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_publishes_nothing(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY, OTHER)
    drives.write(1)
    publish_and_move_on(drives, tmp_path / "old", OTHER)
    assert publish(drives.store, KEY, tmp_path / "public", LENGTH)
    pinned = drives.store.pin(KEY)
    with drives.pool.acquire(LENGTH) as lease:

        def child() -> None:
            for use in (
                lambda: publish(drives.store, KEY, tmp_path / "again", LENGTH),
                lambda: drives.store.pin(KEY),
                lambda: drives.store.write(KEY, lease, LENGTH),
                lambda: drives.store.plan({THIRD: PAGE}),
            ):
                with pytest.raises(SwapError):
                    use()
            assert not drives.store.adopt(tmp_path / "old")
            pinned.close()

        before = sorted(os.listdir(drives.store.directories[0]))
        in_forked_child(child)
    assert sorted(os.listdir(drives.store.directories[0])) == before
    assert pinned_bytes(pinned) == content(1)
    pinned.close()


# --- Exchange of two directories --------------------------------------------------------------------------------------


def test_two_directories_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "b") == ["a"]


def test_an_exchange_that_is_not_possible_says_so(tmp_path: Path) -> None:
    (tmp_path / "a" / "inside").mkdir(parents=True)
    with pytest.raises(SwapIOError, match="save under another name") as caught:
        exchange(tmp_path / "a", tmp_path / "a" / "inside")
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(SwapIOError) as caught:
        exchange(tmp_path / "a", tmp_path / "missing")
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(tmp_path / "a"))
    assert os.listdir(tmp_path / "a") == ["inside"]


# --- Files beside records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("summed", [False, True])
def test_rows_of_bytes_and_files_are_appended(tmp_path: Path, summed: bool) -> None:
    source = tmp_path / "source"
    source.write_bytes(content(1, MiB))
    row = random_bytes(300_001, seed=2)
    parts = [b"head", to_bytes(row), content(1, MiB)[:900_000], b"", content(1, MiB)]
    with (
        AsyncIOHandle(block_bytes=64 << 10) as handle,
        handle.open(source) as file,
        OutputFile(tmp_path / "made", pool_bytes=512 << 10, summed=summed) as made,
    ):
        crc = checksums.checksum if summed else checksums.crc32
        assert made.append(b"head") == crc(torch.frombuffer(bytearray(b"head"), dtype=torch.uint8))
        assert made.append(row) == crc(row)
        assert made.append_file(handle, file, 900_000) == crc_of(parts[2])
        assert made.append_file(handle, file, 0) == 0
        assert made.append_file(handle, file, MiB) == crc_of(parts[4])
        assert made.tell() == sum(map(len, parts))
        made.commit()
    assert (tmp_path / "made").read_bytes() == b"".join(parts)
    assert made.checksum == (crc_of(b"".join(parts)) if summed else 0)


@pytest.mark.parametrize("data", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.uint8), random_bytes(8)[::2]])
def test_what_is_no_row_of_bytes_is_refused(tmp_path: Path, data: torch.Tensor) -> None:
    with OutputFile(tmp_path / "made") as made, pytest.raises(ValueError, match="row of bytes"):
        made.append(data)


def test_a_pinned_record_is_copied_while_it_is_written(drives: Drives, tmp_path: Path) -> None:
    drives.plan(KEY)
    drives.write(1)
    crc = drives.store.checksum(KEY)
    with drives.store.pin(KEY) as pinned, OutputFile(tmp_path / "copy") as copy:
        drives.write(2)
        parts = [(copy.append_file(*part[:2], part.length_bytes), part.length_bytes) for part in pinned.parts]
        assert checksums.join_checksums(parts) == crc
        copy.commit()
    assert (tmp_path / "copy").read_bytes() == content(1)


@pytest.mark.parametrize("failure", ["short", "read"])
def test_a_file_that_cannot_be_read_is_not_appended(tmp_path: Path, failure: str) -> None:
    (tmp_path / "source").write_bytes(bytes(MiB))
    plan = FaultPlan(fail_read_at=3 if failure == "read" else 0)
    with (
        AsyncIOHandle(block_bytes=64 << 10, faults=plan) as handle,
        handle.open(tmp_path / "source") as file,
        OutputFile(tmp_path / "made") as made,
    ):
        with pytest.raises(SwapIOError) as caught:
            made.append_file(handle, file, MiB + (failure == "short"))
        assert caught.value.path == str(tmp_path / "source")
        assert caught.value.errno == (errno.EIO if failure == "read" else errno.ENODATA)
        made.discard()
    assert not (tmp_path / "made").exists()


# --- A run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["none", "crc32c"])
def test_the_published_state_of_a_run_is_one_of_its_steps(nvme_path: Path, tmp_path: Path, verify: str) -> None:
    def train(steps: int, publish_at: Callable[[TensorStore], None] | None) -> tuple[torch.nn.Module, object]:
        model = make_model()
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="4MiB",
            bucket_bytes="64KiB",
            verify=verify,
            offload_optimizer={"device": "nvme"},
        )
        optimizer = swapper.wrap_optimizer(adamw(model), config)
        for step in range(steps):
            run(model, optimizer, range(step, step + 1))
            if publish_at is not None:
                swapper.of(optimizer).flush()
                store = swapper.of(optimizer).store
                assert store is not None
                publish_at(store)
        assert swapper.of(optimizer).stats().first_writes > 0
        return model, swapper.unwrap_optimizer(optimizer)

    published: list[dict[Path, int]] = []

    def publish(store: TensorStore) -> None:
        directory = tmp_path / str(len(published))
        directory.mkdir()
        files = {key: (directory / key.file_name, store.stored_bytes(key)) for key in store._records}
        assert store.publish_all(files) == set(files)
        published.append({path: store.checksum(key) for key, (path, _) in files.items()})

    model, optimizer = train(4, publish)
    plain_model, plain_optimizer = train(4, None)
    assert all(map(torch.equal, model.state_dict().values(), plain_model.state_dict().values()))
    assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())  # type: ignore[attr-defined]
    for files in published:
        assert len(files) > 1
        for path, crc in files.items():
            assert crc_of(path.read_bytes()) == crc
            with safe_open(path, framework="pt") as opened:
                assert any(key.endswith("exp_avg") for key in opened.keys())  # noqa: SIM118


def test_a_step_without_room_for_fresh_files_fails_and_the_run_recovers(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_model = make_model()
    plain_optimizer = adamw(plain_model)
    run(plain_model, plain_optimizer, range(2))
    model = make_model()
    config = swapper.OffloadConfig(
        nvme_path=nvme_path, pool_bytes="4MiB", bucket_bytes="64KiB", offload_optimizer={"device": "nvme"}
    )
    optimizer = swapper.wrap_optimizer(adamw(model), config)
    run(model, optimizer, range(2))
    swapper.of(optimizer).flush()
    store = swapper.of(optimizer).store
    assert store is not None
    assert store.publish_all({key: (tmp_path / key.file_name, store.stored_bytes(key)) for key in store._records})
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}

    def preallocate(file: File, length_bytes: int) -> bool:
        raise SwapIOError(errno.ENOSPC, "preallocate", file.path, length_bytes=length_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(File, "preallocate", preallocate)
        with pytest.raises(SwapIOError, match="preallocate"):
            run(model, optimizer, range(2, 3))
    model.zero_grad()
    optimizer.load_state_dict(plain_optimizer.state_dict())
    model.load_state_dict(plain_model.state_dict())
    run(model, optimizer, range(2, 4))
    run(plain_model, plain_optimizer, range(2, 4))
    assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())
    assert all(map(torch.equal, model.state_dict().values(), plain_model.state_dict().values()))
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    swapper.of(optimizer).close()


def test_a_finalizer_may_recycle_in_the_middle_of_recycling(tmp_path: Path) -> None:
    """The garbage collector runs it at any allocation: of an optimizer that is dropped and writes what it has."""
    recycled = spares.RecycledFiles(tmp_path)
    for number in range(8):
        (tmp_path / f"file-{number}").write_bytes(bytes(PAGE_BYTES))
        assert recycled.adopt(tmp_path / f"file-{number}", PAGE_BYTES)
    taken: list[Path] = []

    def take(name: str) -> None:
        if recycled.take(PAGE_BYTES, tmp_path / name):
            taken.append(tmp_path / name)

    def finalizer(phase: str, _: object) -> None:
        if phase == "start" and len(nested) < 4 and repr(recycled._lock).startswith("<locked"):
            nested.append(1)
            take(f"nested-{len(nested)}")

    nested: list[int] = []
    thresholds = gc.get_threshold()

    def run() -> None:
        gc.callbacks.append(finalizer)
        gc.set_threshold(1)
        try:
            for number in range(4):
                take(f"outer-{number}")
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(finalizer)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(240)
    assert not running.is_alive()
    assert len(nested) == 4 and len(taken) == len(set(taken)) == 8 and recycled.total_bytes == 0
    assert all(path.stat().st_size == PAGE_BYTES for path in taken)
