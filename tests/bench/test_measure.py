"""No figure without a proof that the drive moved the bytes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from measuring import SIZE, Scripted, figure_of

from swapper.bench import witness
from swapper.bench.contestants import NewFile, Transfers
from swapper.bench.fio import Fio, FioProgram, find_fio
from swapper.bench.measure import ContestantFailed, Figure, Timing, alternate, drop_from_cache
from swapper.bench.site import EngineSettings, Site
from swapper.bench.witness import Operation, Proof, Witness, resident_bytes

pytestmark = pytest.mark.timeout(240)


# --- The proof -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["read", "write"])
def test_direct_transfers_are_believed(site: Site, operation: Operation) -> None:
    with contextlib.ExitStack() as stack:
        lane = site.lane(stack, EngineSettings(block_bytes=1 << 20).open(stack))
        assert lane.file.direct
        figure = figure_of(Transfers("ours", operation, [lane]), rounds=3)
    assert not figure.refusal
    assert len(figure.timings) == 3
    assert all(timing.account_bytes >= SIZE for timing in figure.timings)


def test_a_read_from_the_page_cache_is_refused(data: Path) -> None:
    figure = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False, warm=True))
    assert "the rest came from the page cache" in figure.refusal
    assert figure.as_json()["bandwidth_bps"] is None
    assert figure.as_json()["runs"] == []
    with pytest.raises(AssertionError, match="page cache"):
        _ = figure.bandwidth_bps


def test_a_read_of_which_half_was_cached_is_refused(data: Path) -> None:
    def read() -> bool:
        data.read_bytes()
        return False

    contestant = Scripted(data, "read", read)
    contestant.prepare()
    with open(data, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond
        file.read(SIZE // 2)
    contestant.prepare = lambda: None  # type: ignore[method-assign]
    assert "came from the page cache" in figure_of(contestant).refusal


def test_a_buffered_read_of_a_dropped_file_is_believed(data: Path) -> None:
    figure = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False))
    assert not figure.refusal


@pytest.mark.parametrize("synced", [True, False])
def test_a_buffered_write_is_believed_only_if_it_was_synced(data: Path, synced: bool) -> None:
    def write() -> bool:
        with open(data, "r+b") as file:
            file.write(bytes(SIZE))
            file.flush()
            if synced:
                os.fsync(file.fileno())
        return synced

    refusal = figure_of(Scripted(data, "write", write)).refusal
    assert bool(refusal) != synced
    if not synced:
        assert "not synced" in refusal


@pytest.mark.alone
def test_a_write_that_claims_to_be_synced_is_caught_by_the_counters(data: Path) -> None:
    def write() -> bool:
        with open(data, "r+b") as file:
            file.write(bytes(SIZE))
        return True

    # What others write meanwhile, or had written before, counts too. They do not each time.
    assert any("counted" in figure_of(Scripted(data, "write", write)).refusal for _ in range(40))


def test_one_run_without_proof_spoils_the_figure_and_ends_it(data: Path) -> None:
    reads = itertools.count()

    def read() -> bool:
        if next(reads) == 1:
            data.read_bytes()  # Now it is warm; what follows is charged once only.
        else:
            data.read_bytes()
        return False

    contestant = Scripted(data, "read", read)
    prepare = contestant.prepare
    contestant.prepare = lambda: None if contestant.finished == 1 else prepare()  # type: ignore[method-assign]
    figure = figure_of(contestant, rounds=4)
    assert figure.refusal
    assert len(figure.timings) == 2
    assert [bool(proof.reason) for proof in figure.proofs] == [False, True]


def test_counters_that_stand_still_are_no_proof(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vdx").mkdir()
    (tmp_path / "vdx" / "stat").write_text("1 0 2000 0 1 0 3000 0 0 0 0\n")
    monkeypatch.setattr(witness, "_block", lambda number: tmp_path / "vdx")
    refusal = figure_of(Scripted(data, "read", lambda: bool(data.read_bytes()) and False)).refusal
    assert refusal == f"vdx counted 0.0 of {SIZE / 1e6:.1f} MB as read"


def test_counters_are_in_sectors_of_512_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = tmp_path / "vdx"
    block.mkdir()
    monkeypatch.setattr(witness, "_block", lambda number: block)
    seen = Witness([tmp_path])
    (block / "stat").write_text("1 0 1000 0 1 0 5000 0 0 0 0\n")
    seen.begin("write", [])
    for sectors, proven in ((1, False), (SIZE // 512 - 1000, False), (SIZE // 512, True)):
        (block / "stat").write_text(f"1 0 1000 0 1 0 {5000 + sectors} 0 0 0 0\n")
        proof = seen.judge("write", [tmp_path / "none"], SIZE, 0, True)
        assert (proof.reason == "") == proven


def test_what_others_move_on_the_drive_is_told(data: Path, drive: Path) -> None:
    other = drive / "other"
    other.write_bytes(os.urandom(4 * SIZE))
    drop_from_cache(other)

    def read() -> bool:
        data.read_bytes()
        other.read_bytes()
        return False

    figure = figure_of(Scripted(data, "read", read))
    assert not figure.refusal
    told = re.search(r"others moved up to ([0-9.]+) GB on the drive in 1 of 1 runs", figure.flag)
    assert told is not None, figure.flag
    assert float(told[1]) >= 0.03  # more where another program really is there


def test_without_a_device_an_account_or_a_cold_cache_is_needed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "_blocks", lambda directory: [])
    seen = Witness([data.parent])
    assert "shows no device" in seen.describe()

    def judge(account_bytes: int) -> Proof:
        seen.begin("read", [data])
        return seen.judge("read", [data], SIZE, account_bytes, False)

    assert judge(0).reason == "", "nothing of it was in the page cache"
    data.read_bytes()
    assert judge(0).reason
    assert judge(SIZE).reason == "", "the kernel charged it"


def test_memory_is_no_drive(memory: Path) -> None:
    assert "which is memory and no drive" in Witness([memory]).describe()
    path = memory / "data"
    path.write_bytes(bytes(SIZE))
    refusal = figure_of(Scripted(path, "read", lambda: bool(path.read_bytes()) and False)).refusal
    assert "which is memory" in refusal


def loop_device(*arguments: object) -> str:
    return subprocess.run(["losetup", *map(str, arguments)], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.root
@pytest.mark.parametrize("direct", ["off", "on"])
def test_a_loop_device_is_believed_only_if_it_passes_by_the_page_cache(drive: Path, direct: str) -> None:
    if shutil.which("losetup") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("losetup and mkfs.ext4 are not here")
    image, mounted = drive / "image", drive / "mounted"
    mounted.mkdir()
    image.write_bytes(bytes(64 << 20))
    try:
        device = loop_device("--find", "--show", f"--direct-io={direct}", image)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop devices: {error.stderr.strip()}")
    try:
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        subprocess.run(["mount", device, mounted], check=True)
        try:
            (mounted / "site").mkdir()
            site = Site(mounted / "site", SIZE, "cpu")
            with contextlib.ExitStack() as stack:
                lane = site.lane(stack, EngineSettings(block_bytes=1 << 20).open(stack))
                figure = figure_of(Transfers("ours", "read", [lane]))
            del site
            if direct == "on":
                assert not figure.refusal
            else:
                assert "losetup --direct-io=on" in figure.refusal
        finally:
            subprocess.run(["umount", mounted], check=True)
    finally:
        loop_device("--detach", device)


def test_resident_bytes_are_those_in_the_page_cache(drive: Path) -> None:
    path = drive / "file"
    path.write_bytes(bytes(SIZE + 1))
    assert resident_bytes(path) == SIZE + 4096
    drop_from_cache(path)
    assert resident_bytes(path) == 0
    path.write_bytes(b"")
    assert resident_bytes(path) == 0


# --- Measuring -----------------------------------------------------------------------------------------------------


def test_contestants_alternate_in_changing_order_and_finish_each_time(data: Path) -> None:
    ran: list[str] = []

    def reader(name: str) -> Callable[[], bool]:
        def read() -> bool:
            ran.append(name)
            data.read_bytes()
            return False

        return read

    contestants = [Scripted(data, "read", reader(name), name=name) for name in "abcd"]
    figures = alternate(contestants, 5)
    rounds = ["".join(ran[i : i + 4]) for i in range(0, 20, 4)]
    assert [sorted(each) for each in rounds] == [list("abcd")] * 5
    assert len(set(rounds)) > 1
    assert [figure.name for figure in figures] == list("abcd")
    assert [contestant.finished for contestant in contestants] == [5] * 4


def test_a_contestant_that_fails_is_not_run_again_and_others_go_on(data: Path) -> None:
    def fail() -> bool:
        raise ContestantFailed("it has no engine")

    bad = Scripted(data, "read", fail)
    good = Scripted(data, "read", lambda: bool(data.read_bytes()) and False)
    figures = alternate([bad, good], 3)
    assert figures[0].refusal == "it has no engine"
    assert bad.finished == 1
    assert len(figures[1].timings) == 3


def test_an_error_of_ours_ends_everything_after_finishing(data: Path) -> None:
    def fail() -> bool:
        raise OSError("broken")

    bad = Scripted(data, "read", fail)
    with pytest.raises(OSError, match="broken"):
        alternate([bad], 3)
    assert bad.finished == 1


def test_figures_are_medians_with_their_range() -> None:
    figure = Figure("x", "read", 2 * 10**9, ("d",))
    for seconds, cpu_s in ((1.0, 0.2), (4.0, 0.6), (2.0, 0.4)):
        figure.timings.append(Timing(seconds, cpu_s, 0))
        figure.proofs.append(Proof(""))
    assert (figure.bandwidth_bps.median, figure.bandwidth_bps.min, figure.bandwidth_bps.max) == (1e9, 0.5e9, 2e9)
    assert figure.cpu_s_per_gb.median == pytest.approx(0.2)


@pytest.mark.parametrize("preallocate", [True, False])
def test_a_first_write_makes_a_new_file_each_time_and_removes_it(site: Site, preallocate: bool) -> None:
    with contextlib.ExitStack() as stack:
        handle = EngineSettings(block_bytes=1 << 20).open(stack)
        contestant = NewFile("new", site.directory, handle, site.tensor, preallocate=preallocate)
        figure = figure_of(contestant, rounds=3)
    assert not figure.refusal
    assert len(figure.timings) == 3
    assert [path.name for path in site.directory.iterdir()] == ["data"]


# --- fio -----------------------------------------------------------------------------------------------------------


def make_fio(path: Path, engine: str = "libaio", operation: Operation = "read", files: Sequence[Path] = ()) -> Fio:
    program = find_fio()
    assert program is not None
    settings = EngineSettings(block_bytes=1 << 20, queue_depth=4, threads=2)
    return Fio(program, engine, operation, files or [path], SIZE, settings)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_what_fio_printed_is_understood(fake_fio: Callable[..., Any], data: Path, operation: Operation) -> None:
    calls = fake_fio()
    figure = figure_of(make_fio(data, operation=operation))
    assert not figure.refusal
    assert figure.timings[0].seconds == 0.25
    assert figure.timings[0].cpu_s == pytest.approx(0.05 * 0.2)
    (words,) = calls()
    assert {"--direct=1", "--thread", "--bs=1048576", "--iodepth=8", "--ioengine=libaio"} <= set(words)
    assert "--rw=write" in words if operation == "write" else {"--rw=rw", "--rwmixread=100"} <= set(words)


def test_a_fio_that_only_claims_to_have_read_is_refused(fake_fio: Callable[..., Any], data: Path) -> None:
    fake_fio(honest=False)
    assert "page cache" in figure_of(make_fio(data)).refusal


@pytest.mark.parametrize(
    ("how", "refusal"),
    [
        ({"after": "result = {}"}, "cannot be understood"),
        ({"after": "result['jobs'][0]['error'] = 28"}, "No space left on device"),
        ({"after": "job[operation]['io_bytes'] -= 1"}, f"moved {SIZE - 1} bytes instead of {SIZE}"),
        ({"after": "job[operation]['runtime'] = 0"}, "less than a millisecond"),
        ({"before": "sys.exit('fio: engine libaio not loadable')"}, "status 1: fio: engine libaio not loadable"),
    ],
    ids=["no-jobs", "error", "short", "no-time", "exit-status"],
)
def test_a_fio_that_failed_has_no_figure(
    fake_fio: Callable[..., Any], data: Path, how: dict[str, str], refusal: str
) -> None:
    fake_fio(**how)
    assert refusal in figure_of(make_fio(data)).refusal


def test_fio_runs_without_registered_buffers_where_they_are_refused(fake_fio: Callable[..., Any], data: Path) -> None:
    calls = fake_fio(before="if 'fixedbufs' in options: sys.exit('mlock')")
    assert not figure_of(make_fio(data, engine="io_uring"), rounds=2).refusal
    assert ["--fixedbufs=1" in words for words in calls()] == [True, False, False]


def test_several_files_are_one_job_of_fio(fake_fio: Callable[..., Any], drive: Path) -> None:
    names = [drive / "a", drive / "b:c"]
    (words,) = [make_fio(drive, files=names).command() for _ in (fake_fio(),)]
    assert f"--filename={drive}/a:{drive}/b\\:c" in words
    assert f"--size={2 * SIZE}" in words
    assert "--iodepth=16" in words


def test_fio_that_cannot_be_started_has_no_figure(data: Path, tmp_path: Path) -> None:
    program = FioProgram(str(tmp_path / "gone"), "fio-0")
    fio = Fio(program, "libaio", "read", [data], SIZE, EngineSettings(block_bytes=1 << 20, queue_depth=4))
    assert "cannot be started" in figure_of(fio).refusal


def test_the_fio_that_is_installed_reads_and_writes(site: Site) -> None:
    if find_fio() is None:
        pytest.skip("fio is not installed")
    contestants = [make_fio(site.path, operation=operation) for operation in ("read", "write")]
    for figure in alternate(contestants, 2):
        # Too short for its clock on a fast drive is fair; anything else is not.
        assert not figure.refusal or "less than a millisecond" in figure.refusal
