"""`verify: crc32c`: whatever changed on the drive is said, with file and offset, and never used."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from snapshots import STEPS, Snapshot
from training import MasterWeights, adamw, assert_same, assert_same_state, make_model, run, same_bits

import swapper
from swapper.io.handle import AsyncIOHandle
from swapper.storage.buffers import BufferPool
from swapper.storage.speed import DriveSpeed
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)

PAGE = 4096
"""A block of the checksums too, as the requests here are that small."""


@pytest.fixture(params=[1, 2], ids=["one drive", "two drives"])
def paths(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Directories to swap to, empty again after the test. Small records are spread evenly over them."""
    monkeypatch.setattr("swapper.storage.store.STRIPE_BYTES", PAGE)
    even = lambda paths, _: [DriveSpeed(1e9, 1e9) for _ in paths]  # noqa: E731
    monkeypatch.setattr("swapper.storage.store.measure_speeds", even)
    made = [tmp_path / name for name in "ab"[: request.param]]
    for path in made:
        path.mkdir()
    yield made
    for path in made:
        assert not list(path.iterdir()), "files were left behind"


class StoredPart(NamedTuple):
    """A file of a record, and how much of it is stored."""

    file: Path
    length_bytes: int


class Training:
    """Some steps of a run that verifies, all of it written out. A context manager that closes."""

    def __init__(self, paths: list[Path], steps: int = 2, verify: str = "crc32c", **settings: Any) -> None:
        self.model = make_model()
        config = swapper.OffloadConfig(
            nvme_path=paths,
            pool_bytes="4MiB",
            bucket_bytes="64KiB",
            verify=verify,
            aio={"block_size": PAGE},
            offload_optimizer={"device": "nvme", **settings},
        )
        self.optimizer = swapper.wrap_optimizer(adamw(self.model), config)
        self.swapper = swapper.of(self.optimizer)
        run(self.model, self.optimizer, range(steps))
        self.swapper.flush()
        assert self.swapper.store is not None
        self.store = self.swapper.store

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.swapper.close()

    def places(self) -> list[StoredPart]:
        found = []
        for record in self.store._records.values():
            for part in record.parts:
                length = min(part.share.stop_bytes, record.stored_bytes) - part.share.start_bytes
                if length > 0:
                    found.append(StoredPart(Path(part.file.path), length))
        return found

    def go_back(self, snapshot: Snapshot) -> None:
        self.model.zero_grad()
        self.optimizer.load_state_dict(snapshot.optimizer)
        self.model.load_state_dict(snapshot.model)
        self.swapper.flush()

    def ends_in(self, snapshot: Snapshot, steps: range) -> None:
        run(self.model, self.optimizer, steps)
        assert all(same_bits(p, snapshot.model[name]) for name, p in self.model.named_parameters())
        assert_same_state(snapshot.optimizer, self.optimizer.state_dict())


def flip(file: Path, at: int, bit: int = 0) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


@contextlib.contextmanager
def said(file: Path, at: int) -> Iterator[None]:
    """The block must raise what names the block of `file` that holds the byte `at`."""
    with pytest.raises(swapper.SwapIOError, match="checksum") as caught:
        yield
    error = caught.value
    assert error.errno == errno.EBADMSG
    assert error.operation == "read"
    assert error.path == str(file)
    assert error.offset_bytes == at // PAGE * PAGE
    assert error.length_bytes == PAGE


# --- What changes on the drive ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_bit_in_any_file_is_said_by_the_step_and_never_used(
    paths: list[Path], plain: list[Snapshot], where: str
) -> None:
    with Training(paths) as training:
        count = len(training.places())
        assert count >= 8 * len(paths)
        for number in range(count):
            file, length = training.places()[number]
            at = {"first": 0, "middle": length // 2, "last": length - 1}[where]
            flip(file, at, number % 8)
            before = {name: p.clone() for name, p in training.model.named_parameters()}
            with said(file, at):
                run(training.model, training.optimizer, range(2, 3))
            after = dict(training.model.named_parameters())
            # What was stepped before the failure has the bits of the plain run, everything else its old ones.
            want = plain[3].model
            for name, p in after.items():
                old, new, now = (t.detach().view(torch.int32) for t in (before[name], want[name], p))
                assert bool(((now == old) | (now == new)).all())
            assert any(not same_bits(p, want[name]) for name, p in after.items())
            training.go_back(plain[2])
        training.ends_in(plain[3], range(2, 3))


def test_state_dict_and_unwrap_say_it_too_and_go_on_when_it_is_mended(paths: list[Path], plain: list[Snapshot]) -> None:
    uses: list[Callable[[Training], object]] = [
        lambda training: training.optimizer.state_dict(),
        lambda training: [training.swapper.state(p) for p in training.model.parameters()],
        lambda training: swapper.unwrap_optimizer(training.optimizer),
    ]
    with Training(paths) as training:
        for use in uses:
            file, length = training.places()[-1]
            flip(file, length - 1)
            with said(file, length - 1):
                use(training)
            flip(file, length - 1)
        training.ends_in(plain[STEPS], range(2, STEPS))


@pytest.mark.long
def test_a_stale_block_is_said(paths: list[Path], plain: list[Snapshot]) -> None:
    """As when a drive lost a write that it had acknowledged."""
    with Training(paths) as training:
        for number in range(len(training.places())):
            file, length = training.places()[number]
            at = length // 2 // PAGE * PAGE
            old = file.read_bytes()[at : at + PAGE]
            training.ends_in(plain[3], range(2, 3))
            training.swapper.flush()
            content = file.read_bytes()
            assert content[at : at + PAGE] != old
            with open(file, "r+b") as opened:
                opened.seek(at)
                opened.write(old)
            with said(file, at):
                run(training.model, training.optimizer, range(3, 4))
            training.go_back(plain[2])


def test_two_blocks_that_changed_places_are_said(paths: list[Path]) -> None:
    with Training(paths) as training:
        file, _ = training.places()[0]
        content = bytearray(file.read_bytes())
        content[:PAGE], content[PAGE : 2 * PAGE] = content[PAGE : 2 * PAGE], content[:PAGE]
        file.write_bytes(content)
        with pytest.raises(swapper.SwapIOError, match="checksum") as caught:
            training.optimizer.state_dict()
        assert caught.value.path == str(file)
        assert caught.value.offset_bytes in (0, PAGE)


def test_a_file_cut_short_is_an_error_of_its_own(paths: list[Path]) -> None:
    with Training(paths) as training:
        for file, length in training.places():
            os.truncate(file, length - PAGE)
        with pytest.raises(swapper.SwapIOError) as caught:
            run(training.model, training.optimizer, range(2, 3))
        assert caught.value.errno == errno.ENODATA


def test_what_is_resident_is_not_read_and_checked_once_it_is(paths: list[Path], plain: list[Snapshot]) -> None:
    with Training(paths, resident_bytes="400KiB") as training:
        cache = training.swapper._cache
        names = {key.file_name for key in cache._policy._resident}
        resident = [place for place in training.places() if place.file.name in names]
        assert resident and len(resident) < len(training.places())
        for file, length in resident:
            flip(file, length - 1)
        training.ends_in(plain[3], range(2, 3))  # From memory; and written anew.
        training.swapper.flush()
        file, length = resident[0]
        flip(file, length - 1)
        cache.keep([])
        with said(file, length - 1):
            run(training.model, training.optimizer, range(3, 4))


# --- What must not change ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"resident_bytes": "400KiB"}], ids=["all-moves", "some-resident"])
def test_verifying_changes_no_bit(paths: list[Path], plain: list[Snapshot], settings: dict[str, str]) -> None:
    with Training(paths, 0, **settings) as training:
        training.ends_in(plain[3], range(3))
        training.go_back(plain[1])
        training.ends_in(plain[STEPS], range(1, STEPS))


def test_verifying_changes_no_bit_of_master_weights(paths: list[Path]) -> None:
    """Their records have a tail of variable length, so writes are not always as long."""
    reference, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    run(reference, MasterWeights(list(reference.parameters()), lambda p: torch.optim.AdamW(p, lr=1e-2)))
    config = swapper.OffloadConfig(
        nvme_path=paths,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        verify="crc32c",
        aio={"block_size": PAGE},
        offload_optimizer={"device": "nvme", "master_weights": True},
    )
    optimizer = swapper.wrap_optimizer(adamw(model), config)
    run(model, optimizer)
    assert_same(reference, model)
    swapper.of(optimizer).close()


def test_without_verify_nothing_is_checked(paths: list[Path]) -> None:
    with Training(paths, verify="none") as training:
        file, length = training.places()[0]
        flip(file, length - 1)
        training.optimizer.state_dict()


@pytest.mark.parametrize("block_bytes", [PAGE, 12 << 10, 96 << 10, 1 << 20])
def test_records_of_any_length_are_verified_in_requests_of_any_size(paths: list[Path], block_bytes: int) -> None:
    handles = [AsyncIOHandle(block_bytes=block_bytes) for _ in paths]
    store = TensorStore(paths, "run", 0, handles, verify=True)
    key = RecordKey(0, "optim", 0)
    size = (3 << 20) + PAGE
    with BufferPool(size, *handles) as pool, pool.acquire(size) as lease:
        store.plan({key: size})
        for length in (size, PAGE, size - PAGE, 1 << 20, (1 << 20) + PAGE, size):
            content = torch.randint(0, 256, (length,), dtype=torch.uint8)
            lease.tensor[:length].copy_(content)
            store.write(key, lease, length).wait()
            lease.tensor.zero_()
            assert store.read(key, lease).wait() == length
            assert torch.equal(lease.tensor[:length], content)
        for part in store._records[key].parts:
            for at in (0, part.share.length_bytes // 2, part.share.length_bytes - 1):
                flip(Path(part.file.path), at)
                with pytest.raises(swapper.SwapIOError) as caught:
                    store.read(key, lease).wait()
                assert caught.value.path == part.file.path
                assert caught.value.offset_bytes <= at < caught.value.offset_bytes + caught.value.length_bytes
                flip(Path(part.file.path), at)
        assert store.read(key, lease).wait() == size
    store.close()
    for handle in handles:
        handle.close()
