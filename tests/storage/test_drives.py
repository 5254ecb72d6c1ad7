"""Several drives: how records are shared among them; and whatever fails on one of them is said and harms no bit."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isolation import in_forked_child
from small_drives import keys, killed_run, mounted, random_bytes
from snapshots import STEPS, Snapshot
from still_drive import still, still_at_write
from training import adamw, assert_same_state, backward, make_model, run, same_bits

import swapper
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.process.warnings import warn_once
from swapper.session import close_all
from swapper.storage import runs as runs_module
from swapper.storage import speed as speed_module
from swapper.storage.buffers import BufferPool
from swapper.storage.layout import share_out
from swapper.storage.mounts import NvmePathError, check_nvme_paths
from swapper.storage.speed import DriveSpeed, measure_speed
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import JoinedTransfer, start_all

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.unsanitized("several drives are several handles, one of which test_store has; and speeds are measured"),
]

MiB = 1 << 20
PAGE = 4096
KEY = RecordKey(0, "optim", 0)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[list[Path]]:
    """Two directories, empty again after the test."""
    made = [tmp_path / "a", tmp_path / "b"]
    for path in made:
        path.mkdir()
    yield made
    gc.collect()
    for path in made:
        assert not list(path.iterdir()), "files were left behind"


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let drives have these speeds, instead of measuring them."""

    def patch(*bps: int) -> None:
        monkeypatch.setattr(
            "swapper.storage.store.measure_speeds",
            lambda paths, _: [DriveSpeed(rate, rate) for rate in bps[: len(paths)]],
        )

    return patch


@pytest.fixture
def fine_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split small records too."""
    monkeypatch.setattr("swapper.storage.store.STRIPE_BYTES", PAGE)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[FaultPlan]]:
    """Give the handles that wrapping makes a fault plan each, in the order of `nvme_path`."""

    def patch(*settings: dict[str, Any]) -> list[FaultPlan]:
        made = [FaultPlan(**one) for one in settings]
        left = itertools.cycle(made)
        monkeypatch.setattr("swapper.session.AsyncIOHandle", lambda **kw: AsyncIOHandle(faults=next(left), **kw))
        return made

    return patch


class Drives:
    """A store on several directories, with a handle, a fault plan each, and a pool."""

    def __init__(self, paths: list[Path], **faults: Any) -> None:
        self.plans = [FaultPlan(seed=i, **faults) for i in range(len(paths))]
        self.handles = [AsyncIOHandle(block_bytes=PAGE, queue_depth=8, faults=plan) for plan in self.plans]
        self.store = TensorStore(paths, "run", 0, self.handles)
        self.pool = BufferPool(4 * MiB, *self.handles)

    def __enter__(self) -> Drives:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.store.close()
        self.pool.close()
        close_all(self.handles)

    def files(self, key: RecordKey = KEY) -> list[Path]:
        return [directory / key.file_name for directory in self.store.directories]


# --- The rule ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 10**10), min_size=1, max_size=6),
    st.lists(st.integers(0, 80), min_size=1, max_size=40),
    st.sampled_from([1, 4, 7]),
)
def test_shares_make_up_the_record_and_their_totals_are_in_proportion(
    speeds: list[int], lengths: list[int], unit: int
) -> None:
    held = [0] * len(speeds)
    for length in lengths:
        shares = share_out(length, held, speeds, unit)
        assert shares == share_out(length, held, speeds, unit)
        assert [share.start_bytes for share in shares] == [0, *(share.stop_bytes for share in shares[:-1])]
        assert shares[-1].stop_bytes == length
        assert len({share.drive for share in shares}) == len(shares)
        assert all(share.length_bytes > 0 and share.length_bytes % unit == 0 for share in shares[:-1])
        if length <= unit:
            assert len(shares) == 1
        for share in shares:
            held[share.drive] += share.length_bytes
        for drive, speed in zip(held, speeds, strict=True):
            exact = sum(held) * speed / sum(speeds)
            assert -(len(speeds) - 1) * unit <= drive - exact <= unit


def test_a_short_record_goes_to_the_drive_that_lacks_most() -> None:
    (share,) = share_out(10, [300, 90, 100], [3, 1, 1], 16)
    assert share == (1, 0, 10)
    (share,) = share_out(10, [300, 90, 80], [3, 1, 1], 16)
    assert share == (2, 0, 10)


def test_a_long_record_is_split_over_all_drives() -> None:
    shares = share_out(1000, [0, 0, 0], [2, 1, 1], 10)
    assert sorted((share.drive, share.length_bytes) for share in shares) == [(0, 500), (1, 250), (2, 250)]
    assert share_out(1000, [0], [7], 10) == ((0, 0, 1000),)


def test_what_one_record_rounds_away_the_next_makes_up_for() -> None:
    held = [0, 0]
    got = []
    for _ in range(3):
        shares = share_out(5, held, [3, 1], 1)
        got.append(tuple(sum(share.length_bytes for share in shares if share.drive == drive) for drive in (0, 1)))
        held = [held[0] + got[-1][0], held[1] + got[-1][1]]
    assert got == [(4, 1), (4, 1), (3, 2)]


# --- The paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["same", "dots", "link", "inside", "inside by a link", "around"])
def test_two_paths_that_are_not_two_places_are_refused(paths: list[Path], tmp_path: Path, case: str) -> None:
    first = paths[0]
    (tmp_path / "link").symlink_to(first)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "inner").mkdir()
    (tmp_path / "deep").symlink_to(tmp_path / "outer" / "inner")
    outer = tmp_path / "outer"
    pair = {
        "same": [first, first],
        "dots": [first, first / ".." / "a"],
        "link": [first, tmp_path / "link"],
        "inside": [outer, outer / "inner"],
        "inside by a link": [outer, tmp_path / "deep"],
        "around": [outer / "inner", outer],
    }[case]
    words = r"nvme_path: .* is inside .*" if outer in pair else r"nvme_path: .* are the same directory; name each"
    with pytest.raises(ConfigError, match=words):
        check_nvme_paths(pair)
    optimizer = adamw(make_model())
    config = {"offload_optimizer": {"device": "nvme"}}
    if case != "same":  # That the config refuses itself.
        config["nvme_path"] = pair  # type: ignore[assignment]
        for use in (swapper.wrap_optimizer, functools.partial(swapper.check, make_model())):
            with pytest.raises(ConfigError, match=words):
                use(optimizer, config)  # type: ignore[operator]
    assert not list(outer.glob("*swapper*")) + list((outer / "inner").iterdir())


def test_directories_beside_each_other_on_one_file_system_are_warned_about_once(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        check_nvme_paths(paths)
    said = [record.message for record in caplog.records if "one file system" in record.message]
    assert len(said) == 1
    assert str(paths[0]) in said[0] and str(paths[1]) in said[0]


def test_what_is_wrong_with_any_of_the_paths_leaves_nothing_on_the_others(paths: list[Path], tmp_path: Path) -> None:
    handles = [AsyncIOHandle(), AsyncIOHandle(), AsyncIOHandle()]
    with pytest.raises(NvmePathError, match="mkdir -p"):
        TensorStore([*paths, tmp_path / "missing"], "run", 0, handles)
    taken = tmp_path / "c"
    taken.mkdir()
    holder = TensorStore([taken], "run", 0, handles[:1])
    with pytest.raises(NvmePathError, match="another run has this name"):
        TensorStore([*paths, taken], "run", 0, handles)
    assert not list(paths[0].iterdir()) + list(paths[1].iterdir())
    assert holder.directories[0].is_dir()
    holder.close()
    close_all(handles)


# --- Records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(1, 1), (3, 1), (1, 5)])
@pytest.mark.usefixtures("fine_stripes")
def test_records_are_read_as_they_were_written(
    paths: list[Path], speeds: Callable[..., None], rates: tuple[int, int]
) -> None:
    speeds(*rates)
    sizes = [PAGE * n for n in (1, 2, 3, 7, 64, 100, 1, 1, 1, 31)]
    with Drives(paths, short=0.3, eintr=0.1, reorder=True) as drives:
        store = drives.store
        store.plan(dict(zip(keys(10), sizes, strict=True)))
        for i, (key, size) in enumerate(zip(keys(10), sizes, strict=True)):
            with drives.pool.acquire(size) as lease:
                lease.tensor.copy_(random_bytes(size, i))
                assert store.write(key, lease, size).wait() == size
        on_disk = []
        for i, (key, size) in enumerate(zip(keys(10), sizes, strict=True)):
            with drives.pool.acquire(size) as lease:
                lease.tensor.zero_()
                assert store.read(key, lease).wait() == size
                assert torch.equal(lease.tensor, random_bytes(size, i))
            found = [file.read_bytes() for file in drives.files(key) if file.exists()]
            assert found, "one file on each drive that has a part"
            whole = bytes(random_bytes(size, i).numpy())
            assert whole in (b"".join(found), b"".join(reversed(found))), "contiguous parts"
            on_disk.append([file.stat().st_size if file.exists() else 0 for file in drives.files(key)])
        assert all(0 in one for one, size in zip(on_disk, sizes, strict=True) if size == PAGE)
        totals = [sum(one[drive] for one in on_disk) for drive in (0, 1)]
        assert abs(totals[0] - sum(sizes) * rates[0] / sum(rates)) <= PAGE


@pytest.mark.usefixtures("fine_stripes")
def test_a_record_may_be_written_shorter_than_planned(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    with Drives(paths) as drives, drives.pool.acquire(16 * PAGE) as lease:
        drives.store.plan({KEY: 16 * PAGE})
        for length in (16 * PAGE, 9 * PAGE, 8 * PAGE, PAGE):
            content = random_bytes(length, length)
            lease.tensor[:length].copy_(content)
            assert drives.store.write(KEY, lease, length).wait() == length
            assert drives.store.stored_bytes(KEY) == length
            lease.tensor.zero_()
            transfer = drives.store.read(KEY, lease)
            assert isinstance(transfer, JoinedTransfer) == (length > 8 * PAGE)
            assert transfer.wait() == length
            assert torch.equal(lease.tensor[:length], content)
            assert not lease.tensor[length:].any()


@pytest.mark.usefixtures("fine_stripes")
def test_one_drive_gives_plain_transfers(tmp_path: Path) -> None:
    path = tmp_path / "only"
    path.mkdir()
    with Drives([path]) as drives, drives.pool.acquire(MiB) as lease:
        drives.store.plan({KEY: MiB})
        assert drives.plans[0].writes == 0, "one drive is not measured"
        assert type(drives.store.write(KEY, lease, MiB)).__name__ == "Transfer"
        drives.handles[0].close()


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.usefixtures("fine_stripes")
def test_a_failure_on_one_drive_names_its_file_when_all_is_over(
    paths: list[Path], speeds: Callable[..., None], drive: int, operation: str
) -> None:
    speeds(1, 1)
    with Drives(paths, delay_us=20_000) as drives, drives.pool.acquire(MiB) as lease:
        drives.store.plan({KEY: MiB})
        drives.store.write(KEY, lease, MiB).wait()
        setattr(drives.plans[drive], f"fail_{operation}_at", 3)
        transfer = getattr(drives.store, operation)(KEY, lease, *([MiB] if operation == "write" else []))
        for _ in range(2):
            with pytest.raises(SwapIOError) as caught:
                transfer.wait()
            assert caught.value.errno == errno.EIO
            assert caught.value.path == str(drives.files()[drive])
            assert caught.value.operation == operation
            assert not any(handle.in_flight for handle in drives.handles), "drained"
        assert transfer.done()


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.usefixtures("fine_stripes")
def test_a_file_cut_short_on_one_drive_is_not_read_as_zeros(
    paths: list[Path], speeds: Callable[..., None], drive: int
) -> None:
    speeds(1, 1)
    with Drives(paths) as drives, drives.pool.acquire(MiB) as lease:
        drives.store.plan({KEY: MiB})
        drives.store.write(KEY, lease, MiB).wait()
        os.truncate(drives.files()[drive], MiB // 4)
        with pytest.raises(SwapIOError) as caught:
            drives.store.read(KEY, lease).wait()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.path == str(drives.files()[drive])


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.usefixtures("fine_stripes")
def test_a_write_whose_start_is_interrupted_leaves_no_record_of_two_halves(
    paths: list[Path], speeds: Callable[..., None], monkeypatch: pytest.MonkeyPatch, drive: int
) -> None:
    speeds(1, 1)
    with Drives(paths, delay_us=20_000) as drives, drives.pool.acquire(MiB) as lease:
        drives.store.plan({KEY: MiB})
        drives.store.write(KEY, lease, MiB).wait()
        before = [plan.writes for plan in drives.plans]

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(drives.handles[drive], "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                drives.store.write(KEY, lease, MiB)
        assert not any(handle.in_flight for handle in drives.handles), "what was started is over: nobody waits for it"
        written = [plan.writes - one for plan, one in zip(drives.plans, before, strict=True)]
        assert written[drive] == 0
        with pytest.raises(SwapIOError, match="interrupted"):
            drives.store.read(KEY, lease)
        drives.store.discard(KEY)
        drives.store.write(KEY, lease, MiB).wait()
        assert drives.store.read(KEY, lease).wait() == MiB


@pytest.mark.usefixtures("fine_stripes")
def test_forgetting_removes_every_part_and_makes_room_for_others(
    paths: list[Path], speeds: Callable[..., None]
) -> None:
    speeds(3, 1)
    with Drives(paths) as drives:
        for _ in range(3):
            drives.store.plan(dict.fromkeys(keys(3), 8 * PAGE))
            held = [sum(file.stat().st_size for file in d.glob("*.safetensors")) for d in drives.store.directories]
            assert held == [18 * PAGE, 6 * PAGE], "as at the first time"
            for key in keys(3):
                drives.store.forget(key)
            assert [os.listdir(directory) for directory in drives.store.directories] == [["lock"], ["lock"]]


@pytest.mark.usefixtures("fine_stripes")
def test_what_is_planned_later_counts_what_is_there_and_not_what_is_forgotten(
    paths: list[Path], speeds: Callable[..., None]
) -> None:
    speeds(3, 1)
    with Drives(paths) as drives:

        def count() -> list[int]:
            return [len(list(directory.glob("*.safetensors"))) for directory in drives.store.directories]

        for key in keys(8):
            drives.store.plan({key: PAGE})
        assert count() == [6, 2]
        on_second = [key for key in keys(8) if drives.files(key)[1].exists()]
        for key in on_second:
            drives.store.forget(key)
        assert count() == [6, 0]
        drives.store.plan(dict.fromkeys(on_second, PAGE))
        assert count() == [6, 2]


@pytest.mark.usefixtures("fine_stripes")
def test_a_failure_in_the_middle_of_planning_leaves_no_part_on_any_drive(
    paths: list[Path], speeds: Callable[..., None]
) -> None:
    speeds(1, 1)
    with Drives(paths) as drives:
        (drives.store.directories[1] / keys(3)[2].file_name).mkdir()
        with pytest.raises(SwapIOError) as caught:
            drives.store.plan(dict.fromkeys(keys(3), MiB))
        assert caught.value.errno == errno.EISDIR
        for directory in drives.store.directories:
            assert not [path for path in directory.glob("*.safetensors") if path.is_file()]


def test_every_drive_has_a_locked_directory_of_the_same_name(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    with Drives(paths) as drives:
        assert drives.store.directories == [path / "swapper-run-0" for path in paths]
        drives.store.plan(dict.fromkeys(keys(3), MiB))
        for path in paths:
            runs_module.remove_stale_runs(path)
        assert all(directory.is_dir() for directory in drives.store.directories), "not taken for leftovers"


def test_leftovers_of_a_killed_run_are_removed_on_every_drive(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    leftovers = [killed_run(path) for path in paths]
    with Drives(paths):
        assert not any(directory.exists() for directory in leftovers)


def test_a_store_that_is_collected_cleans_every_drive(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    handles = [AsyncIOHandle(), AsyncIOHandle()]
    store = TensorStore(paths, "run", 0, handles)
    store.plan(dict.fromkeys(keys(5), 2 * MiB))
    del store
    gc.collect()
    assert not list(paths[0].iterdir()) + list(paths[1].iterdir())


@pytest.mark.long
@pytest.mark.usefixtures("fine_stripes")
def test_a_forked_child_can_do_no_harm(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    with Drives(paths, delay_us=100_000) as drives, drives.pool.acquire(MiB) as lease:
        drives.store.plan({KEY: MiB})
        transfer = drives.store.write(KEY, lease, MiB)

        def child() -> None:
            for use in (
                transfer.wait,
                transfer.wait_quietly,
                lambda: drives.store.forget(KEY),
                lambda: drives.store.read(KEY, lease),
            ):
                with pytest.raises(SwapError, match="fork"):
                    use()
            drives.store.close()
            close_all(drives.handles)

        in_forked_child(child)
        assert transfer.wait() == MiB
        assert drives.store.read(KEY, lease).wait() == MiB
        assert all(file.exists() for file in drives.files())


# --- Waiting for several ----------------------------------------------------------------------------------------------


@pytest.fixture
def slow(paths: list[Path]) -> Iterator[list[tuple[FaultPlan, Callable[[], Any]]]]:
    """Two handles with their fault plans, and what starts a write of 40 KiB on each that takes 0.2 s."""
    found = []
    handles = []
    files = []
    tensor = torch.zeros(10 * PAGE, dtype=torch.uint8)
    for path in paths:
        plan = FaultPlan(bytes_per_second=50 * PAGE)
        handle = AsyncIOHandle(block_bytes=PAGE, faults=plan)
        file = handle.open(path / "file", "rw", create=True)
        found.append((plan, functools.partial(handle.write, file, tensor)))
        handles.append(handle)
        files.append(file)
    yield found
    for path, file, handle in zip(paths, files, handles, strict=True):
        file.close()
        handle.close()
        (path / "file").unlink()


@pytest.mark.long
def test_a_joined_transfer_is_done_when_all_parts_are(slow: list[tuple[FaultPlan, Callable[[], Any]]]) -> None:
    (first, start_first), (second, start_second) = slow
    first.bytes_per_second = 0
    with still(second):
        transfer = start_all([start_first, start_second])
        assert isinstance(transfer, JoinedTransfer)
        transfer.parts[0].wait()
        assert not transfer.done()
        assert "in flight" in repr(transfer) and "done" in repr(transfer)
    transfer.wait_quietly()
    assert transfer.done()
    assert transfer.wait() == transfer.wait() == 20 * PAGE


def test_failures_of_several_parts_are_all_in_the_error(slow: list[tuple[FaultPlan, Callable[[], Any]]]) -> None:
    starts = []
    for plan, start in slow:
        plan.fail_write_at = 2
        starts.append(start)
    transfer = start_all(starts)
    with pytest.raises(SwapIOError) as caught:
        transfer.wait()
    assert isinstance(transfer, JoinedTransfer)
    assert caught.value.path == transfer.parts[0].path
    assert transfer.parts[1].path in str(caught.value)
    for start in starts:
        assert start.func.__self__.unobserved_failures == 0  # type: ignore[attr-defined]


def test_a_failure_that_nobody_waited_for_is_raised_by_the_close_of_its_handle(paths: list[Path]) -> None:
    handles = [AsyncIOHandle(faults=FaultPlan(fail_write_at=i)) for i in (0, 1)]
    with handles[0].open(paths[0] / "file", "w") as one, handles[1].open(paths[1] / "file", "w") as two:
        tensor = torch.zeros(PAGE, dtype=torch.uint8)
        transfer = start_all([lambda: handles[0].write(one, tensor), lambda: handles[1].write(two, tensor)])
        transfer.wait_quietly()
        del transfer
    handles[0].close()
    with pytest.raises(SwapIOError, match="nobody had waited") as caught:
        handles[1].close()
    assert caught.value.path == str(paths[1] / "file")
    for path in paths:
        (path / "file").unlink()


def test_all_handles_are_closed_whatever_one_raises(paths: list[Path]) -> None:
    handles = [AsyncIOHandle(faults=FaultPlan(fail_write_at=1)) for _ in paths]
    for handle, path in zip(handles, paths, strict=True):
        with handle.open(path / "file", "w") as file:
            handle.write(file, torch.zeros(PAGE, dtype=torch.uint8)).wait_quietly()
        (path / "file").unlink()
    with pytest.raises(SwapIOError) as caught:
        close_all(handles)
    assert caught.value.path == str(paths[0] / "file"), "the first"
    assert all(handle.closed for handle in handles)
    close_all(handles)


class Registering:
    """Stands for a handle, where a pool only registers its memory."""

    closed = False

    def __init__(self) -> None:
        self.slabs: list[object] = []

    def register(self, slab: object) -> None:
        self.slabs.append(slab)

    def unregister(self, slab: object) -> None:
        self.slabs.remove(slab)


def test_the_pool_is_registered_with_every_handle_until_it_is_closed() -> None:
    handles = [Registering(), Registering(), Registering()]
    pool = BufferPool(MiB, *handles)  # type: ignore[arg-type]
    assert [len(handle.slabs) for handle in handles] == [1, 1, 1]
    handles[1].closed = True
    pool.close()
    assert [len(handle.slabs) for handle in handles] == [0, 1, 0]


# --- Speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "threads", "buffered"])
def test_measuring_leaves_no_file_and_says_what_it_found(
    paths: list[Path], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state = torch.get_rng_state()
    handles = [AsyncIOHandle(backend=backend) for _ in paths]
    with TensorStoreOf(paths, handles) as store:
        assert [os.listdir(directory) for directory in store.directories] == [["lock"], ["lock"]]
    lines = [record.message for record in caplog.records if "MB/s" in record.message]
    assert len(lines) == 2
    for line, path in zip(lines, paths, strict=True):
        assert str(path) in line and "% of the bytes" in line
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"


class TensorStoreOf:
    def __init__(self, paths: list[Path], handles: list[AsyncIOHandle]) -> None:
        self.handles = handles
        self.store = TensorStore(paths, "run", 0, handles)

    def __enter__(self) -> TensorStore:
        return self.store

    def __exit__(self, *exc_info: object) -> None:
        self.store.close()
        close_all(self.handles)


@pytest.mark.long
def test_a_slow_drive_is_measured_with_less_and_warned_about(
    paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(TRIES):
        caplog.clear()
        plans = [FaultPlan(), FaultPlan(bytes_per_second=2 * MiB)]
        handles = [AsyncIOHandle(faults=plan) for plan in plans]
        with TensorStoreOf(paths, handles) as store:
            assert 3 <= plans[1].writes + plans[1].reads <= 12, "one or two requests of 1 MiB, three times"
            store.plan(dict.fromkeys(keys(8), 4 * MiB))
            held = [sum(file.stat().st_size for file in d.glob("*.safetensors")) for d in store.directories]
        if held[0] > 4 * held[1]:
            break
    else:
        pytest.fail("a drive of 2 MiB/s gets a fifth of the bytes")
    (warning,) = [record for record in caplog.records if "far slower" in record.message]
    assert warning.levelno == logging.WARNING
    assert str(paths[1]) in warning.message and "% of the bytes" in warning.message


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("drive", [0, 1])
def test_a_drive_that_fails_while_it_is_measured_is_refused(
    paths: list[Path], operation: str, drive: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_module, "_FIRST_PASS_S", 60.0)  # All 32 requests, however busy the machine is.
    for n in (1, 5, 30):
        handles = [AsyncIOHandle(), AsyncIOHandle()]
        handles[drive].close()
        handles[drive] = AsyncIOHandle(faults=FaultPlan(**{f"fail_{operation}_at": n}))  # type: ignore[arg-type]
        with pytest.raises(NvmePathError) as caught:
            TensorStore(paths, "run", 0, handles)
        assert caught.value.errno == errno.EIO
        assert caught.value.path == str(paths[drive] / "swapper-run-0")
        assert f"{operation} of" in str(caught.value) and "nvme_path" in str(caught.value)
        assert not list(paths[0].iterdir()) + list(paths[1].iterdir())
        close_all(handles)  # Raises what nobody was told.


def test_a_drive_on_which_everything_fails_leaves_nothing_for_close_to_raise(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_module, "_FIRST_PASS_S", 60.0)
    plan = FaultPlan()
    handle = AsyncIOHandle(faults=plan)
    real = handle.read
    failures = 0

    def failing(*args: Any) -> Any:
        nonlocal failures
        plan.fail_read_at = 1
        transfer = real(*args)
        while plan.fail_read_at:
            time.sleep(0.0001)
        failures += 1
        return transfer

    monkeypatch.setattr(handle, "read", failing)
    with pytest.raises(NvmePathError):
        speed_module.measure_speeds([paths[0]], [handle])
    assert failures > 10
    assert handle.unobserved_failures == 0
    handle.close()


@pytest.mark.long
def test_an_interrupt_while_a_drive_is_measured_leaves_nothing(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [AsyncIOHandle(faults=FaultPlan(bytes_per_second=MiB)) for _ in paths]
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            TensorStore(paths, "run", 0, handles)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not list(paths[0].iterdir()) + list(paths[1].iterdir())
    close_all(handles)


@pytest.mark.root
def test_a_drive_that_is_nearly_full_can_be_measured(paths: list[Path]) -> None:
    with mounted(paths[0], "-t", "tmpfs", "-o", "size=5m", "tmpfs"), AsyncIOHandle() as handle:
        assert measure_speed(paths[0], handle).bps > 0
        (paths[0] / "fill").write_bytes(b"x" * int(4.5 * MiB))
        with pytest.raises(NvmePathError) as caught:
            speed_module.measure_speeds([paths[0]], [handle])
        assert caught.value.errno == errno.ENOSPC
        assert [path.name for path in paths[0].iterdir()] == ["fill"]


# --- Space ------------------------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.usefixtures("fine_stripes")
def test_every_drive_must_have_room_for_its_part(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(3, 1)
    with (
        mounted(paths[0], "-t", "tmpfs", "-o", "size=16m", "tmpfs"),
        mounted(paths[1], "-t", "tmpfs", "-o", "size=2m", "tmpfs"),
        Drives(paths) as drives,
    ):
        with pytest.raises(NvmePathError) as caught:
            drives.store.plan(dict.fromkeys(keys(3), 4 * MiB))
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.path == str(paths[1]), "the one that is too small"
        message = str(caught.value)
        assert "3 records need 9 MiB, 16 MiB are free" in message.replace("15.99", "16").replace("15.98", "16")
        assert "; 3 MiB, 1." in message and f"are free in {paths[0]}; " in message
        assert [os.listdir(directory) for directory in drives.store.directories] == [["lock"], ["lock"]]
        drives.store.plan({KEY: 7 * MiB})


@pytest.mark.root
@pytest.mark.usefixtures("fine_stripes")
def test_directories_on_one_file_system_share_its_room(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(1, 1)
    with mounted(paths[0], "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        both = [paths[0] / "x", paths[0] / "y"]
        for path in both:
            path.mkdir()
        with Drives(both) as drives:
            with pytest.raises(NvmePathError, match=r"need 12 MiB, 7.99\d MiB are free in .*/x and .*/y"):
                drives.store.plan(dict.fromkeys(keys(3), 4 * MiB))
            report = swapper.check(make_model(), adamw(make_model()), config_of(both))
            assert 7.9 * MiB < report.disk_free_bytes <= 8 * MiB


@pytest.mark.root
def test_scratch_is_on_the_drive_with_the_most_room(paths: list[Path], speeds: Callable[..., None]) -> None:
    speeds(9, 1)
    with (
        mounted(paths[0], "-t", "tmpfs", "-o", "size=4m", "tmpfs"),
        mounted(paths[1], "-t", "tmpfs", "-o", "size=16m", "tmpfs"),
        Drives(paths) as drives,
    ):
        assert len(drives.store.scratch(8 * MiB)) == 8 * MiB
        with pytest.raises(NvmePathError) as caught:
            drives.store.scratch(20 * MiB)
        assert caught.value.path.startswith(str(paths[1]))


# --- Training ---------------------------------------------------------------------------------------------------------


def config_of(paths: list[Path], **settings: Any) -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        **{
            "nvme_path": paths,
            "pool_bytes": "4MiB",
            "bucket_bytes": "64KiB",
            "aio": {"block_size": PAGE},
            "offload_optimizer": {"device": "nvme"},
            **settings,
        }
    )


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.usefixtures("fine_stripes")
def test_training_ends_in_the_same_bits_on_any_number_of_drives(
    paths: list[Path],
    tmp_path: Path,
    speeds: Callable[..., None],
    plans: Callable[..., list[FaultPlan]],
    plain: list[Snapshot],
    count: int,
) -> None:
    speeds(5, 2, 1)
    (tmp_path / "c").mkdir()
    wanted = [*paths, tmp_path / "c"][:count]
    made = plans(*({"seed": i, "short": 0.2, "eagain": 0.1, "delay_us": 500, "reorder": True} for i in range(count)))
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), config_of(wanted, verify="crc32c" if count > 1 else "none"))
    run(model, optimizer, range(STEPS))
    swapper.of(optimizer).flush()  # What is still being written is not read: the state dict then reads everything.
    assert_same_state(plain[STEPS].optimizer, optimizer.state_dict())
    assert all(plan.writes > 20 and plan.reads > 0 for plan in made), "every drive is used"
    assert all(same_bits(p, plain[STEPS].model[name]) for name, p in model.named_parameters())
    optimizer.load_state_dict(plain[1].optimizer)
    model.load_state_dict(plain[1].model)
    run(model, optimizer, range(1, 3))
    assert all(same_bits(p, plain[3].model[name]) for name, p in model.named_parameters())
    swapper.unwrap_optimizer(optimizer)
    assert_same_state(plain[3].optimizer, optimizer.state_dict())
    assert not list((tmp_path / "c").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.usefixtures("fine_stripes")
def test_a_failure_anywhere_on_either_drive_never_gives_wrong_bits(
    paths: list[Path],
    speeds: Callable[..., None],
    plans: Callable[..., list[FaultPlan]],
    plain: list[Snapshot],
    operation: str,
) -> None:
    speeds(2, 1)
    failures = 0
    for n, drive in itertools.product(range(1, 160, 23), (0, 1)):
        made = plans({"seed": n, "delay_us": 300}, {"seed": n + 1, "delay_us": 300})
        model = make_model()
        optimizer = swapper.wrap_optimizer(adamw(model), config_of(paths))
        setattr(made[drive], f"fail_{operation}_at", n)
        done = 0
        while done < STEPS:
            try:
                run(model, optimizer, range(done, done + 1))
                swapper.of(optimizer).flush()
                done += 1
            except SwapIOError as error:
                failures += 1
                assert error.errno == errno.EIO and error.operation == operation
                assert error.path.startswith(str(paths[drive]))
                model.zero_grad()
                done = max(done - 1, 0)
                optimizer.load_state_dict(plain[done].optimizer)
                model.load_state_dict(plain[done].model)
        assert all(same_bits(p, plain[STEPS].model[name]) for name, p in model.named_parameters())
        assert_same_state(plain[STEPS].optimizer, optimizer.state_dict())
        swapper.of(optimizer).close()
    assert failures >= 8


@pytest.mark.usefixtures("fine_stripes")
def test_a_late_failure_on_the_second_drive_is_raised_by_close_and_everything_is_closed(
    paths: list[Path], speeds: Callable[..., None], plans: Callable[..., list[FaultPlan]]
) -> None:
    speeds(1, 1)
    threads = threads_of_engines()
    _, plan = plans({}, {})
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), config_of(paths))
    run(model, optimizer, range(1))
    swapper.of(optimizer).flush()
    backward(model, 1)
    plan.fail_write_at = plan.writes  # As many as the step before: the last.
    store = swapper.of(optimizer).store
    assert store is not None
    with still_at_write(swapper.of(optimizer).stats().writes, store, plan):
        optimizer.step()
    with pytest.raises(SwapIOError) as caught:
        swapper.of(optimizer).close()
    assert caught.value.path.startswith(str(paths[1]))
    assert not list(paths[0].iterdir()) + list(paths[1].iterdir())
    until_engines_are(threads)


def threads_of_engines() -> int:
    gc.collect()  # Those of tests before this one have ended then.
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum("swapper-io" in name for name in names)


def until_engines_are(threads: int) -> None:
    """A thread that was joined may still be listed for a moment, also one of an earlier test in `threads`."""
    deadline_s = time.monotonic() + 240
    while (now := threads_of_engines()) > threads:
        assert time.monotonic() < deadline_s, f"{now} threads, and there were {threads}"
        time.sleep(0.01)


@pytest.mark.long
def test_check_shows_every_drive(
    paths: list[Path], plans: Callable[..., list[FaultPlan]], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    threads = threads_of_engines()
    for _ in range(TRIES):
        plans({"bytes_per_second": 24 * MiB}, {"bytes_per_second": 8 * MiB})
        capsys.readouterr()
        report = swapper.check(model, adamw(model), config_of(paths, aio={}))
        until_engines_are(threads)
        assert [drive.path for drive in report.drives] == paths
        first, second = report.drives
        if 1.5 < first.bytes_per_second / second.bytes_per_second < 6:
            break
    else:
        pytest.fail("drives of 24 and of 8 MiB/s")
    assert abs(first.disk_bytes + second.disk_bytes - report.disk_bytes) <= 2
    assert first.disk_bytes * second.bytes_per_second == pytest.approx(
        second.disk_bytes * first.bytes_per_second, rel=0.01
    )
    assert report.disk_free_bytes <= first.disk_free_bytes, "they share one file system"
    printed = capsys.readouterr().out
    for drive in report.drives:
        assert f"  {drive.path}  " in printed
    assert "TOO LITTLE" not in printed
    one = swapper.check(model, adamw(model), config_of(paths[:1]))
    assert one.drives == ()
    assert "files on the drive  " in capsys.readouterr().out


@pytest.mark.root
def test_check_says_how_much_all_drives_can_take_when_one_is_full_first(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["swapper.check"], "drive_speeds", lambda _: [DriveSpeed(3, 3), DriveSpeed(1, 1)])
    with mounted(paths[1], "-t", "tmpfs", "-o", "size=256k", "tmpfs"):
        report = swapper.check(make_model(), adamw(make_model()), config_of(paths))
        assert report.disk_free_bytes == 4 * report.drives[1].disk_free_bytes == MiB
        assert report.disk_bytes < report.disk_free_bytes
        (paths[1] / "file").write_bytes(b"x" * (128 << 10))
        capsys.readouterr()
        report = swapper.check(make_model(), adamw(make_model()), config_of(paths))
        assert report.disk_bytes > report.disk_free_bytes
        assert "TOO LITTLE" in capsys.readouterr().out


# --- A capped handle --------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("backend", ["auto", "threads"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_cap_holds_over_all_threads_and_both_directions(tmp_path: Path, backend: str, threads: int) -> None:
    plan = FaultPlan(bytes_per_second=16 * MiB, short=0.2)
    tensor = torch.zeros(2 * MiB, dtype=torch.uint8)
    with (
        AsyncIOHandle(backend=backend, threads=threads, block_bytes=256 << 10, faults=plan) as handle,
        handle.open(tmp_path / "a", "rw", create=True) as file,
    ):
        handle.write(file, tensor).wait()
        start_s = time.perf_counter()
        transfers = [handle.read(file, tensor.clone()), handle.write(file, tensor)]
        for transfer in transfers:
            transfer.wait()
        assert time.perf_counter() - start_s > 0.95 * 4 / 16, "4 MiB at 16 MiB/s, however fast the drive"
        assert plan.bytes_per_second == 16 * MiB
        plan.bytes_per_second = 0
        handle.write(file, tensor).wait()


# --- Bandwidths add up ------------------------------------------------------------------------------------------------

TRIES = 40
"""A busy machine makes a try slower and none faster: one that is fast enough proves it."""


def seconds_of_steps(paths: list[Path], steps: int = 2) -> float:
    """What steps take whose state is 16 MB: so much moves that the caps of these tests decide, and nothing else."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2000, 1000)
    config = config_of(paths, pool_bytes="24MiB", bucket_bytes="4MiB", aio={})
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()  # Makes the state.
    swapper.of(optimizer).flush()
    start_s = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
        swapper.of(optimizer).flush()
    elapsed_s = time.perf_counter() - start_s
    swapper.of(optimizer).close()
    return elapsed_s


@pytest.mark.long
@pytest.mark.alone
def test_a_second_directory_adds_its_bandwidth(paths: list[Path], plans: Callable[..., list[FaultPlan]]) -> None:
    cap = {"bytes_per_second": 30_000_000}
    plans(cap)
    one_s = seconds_of_steps(paths[:1])
    assert one_s > 2 * 32e6 / 30e6, "the cap decides"
    for _ in range(TRIES):
        plans(cap, cap)
        if one_s / seconds_of_steps(paths) > 1.5:
            return
    pytest.fail("it is not about twice as fast")


@pytest.mark.long
@pytest.mark.alone
def test_shares_follow_measured_speed(
    paths: list[Path], plans: Callable[..., list[FaultPlan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed_module, "_FIRST_PASS_S", 0.5)  # A busy machine then disturbs less.
    for _ in range(TRIES):
        first, second = plans({"bytes_per_second": 45_000_000}, {"bytes_per_second": 15_000_000})
        model = torch.nn.Linear(2000, 1000)
        optimizer = swapper.wrap_optimizer(
            torch.optim.AdamW(model.parameters()), config_of(paths, pool_bytes="24MiB", bucket_bytes="4MiB", aio={})
        )
        first.bytes_per_second = second.bytes_per_second = 0
        held = [sum(file.stat().st_size for file in path.glob("*/*.safetensors")) for path in paths]
        swapper.of(optimizer).close()
        assert sum(held) > 16e6
        if 2 < held[0] / held[1] < 4.5:
            return
    pytest.fail("about 3:1, in units of 1 MiB")
