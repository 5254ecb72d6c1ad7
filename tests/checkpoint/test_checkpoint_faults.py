"""Whatever fails while a checkpoint is saved or loaded: an error that says so, and what was there before is whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SmallTraining, annexes_in, whole
from interrupts import interrupted_at
from isolation import alone
from sampling import ALL, places

from swapper.checkpoint import index
from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, File
from swapper.storage import atomic


class CallFails:
    """Lets the n-th call of what asks the system fail, from 0; in any thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -2
        self.failed = ""
        self.spared: int | None = None
        """The thread whose calls do not count."""
        self._lock = threading.RLock()  # A finalizer may call, too, while it is held.
        for name in ("rename", "link", "fsync", "open", "mkdir", "unlink", "rmdir", "listdir", "fchmod", "pread"):
            self._let_fail(patch, os, name)
        self._let_fail(patch, fcntl, "flock")
        self._let_fail(patch, io, "open")
        self._let_fail(patch, atomic, "exchange")
        self._let_fail(patch, index, "open", open)
        self._let_fail(patch, AsyncIOHandle, "__init__", error=SwapIOError(errno.EAGAIN, "set up", "engine"))
        self._let_fail(patch, AsyncIOHandle, "open", error=SwapIOError(errno.EMFILE, "open", "a file"))
        self._let_fail(patch, File, "truncate", error=SwapIOError(errno.EIO, "truncate", "a file"))
        self._let_fail(patch, File, "preallocate", error=SwapIOError(errno.ENOSPC, "preallocate", "a file"))
        self._let_fail(patch, threading.Thread, "start", error=RuntimeError("can't start new thread"))

    def _let_fail(
        self, patch: pytest.MonkeyPatch, where: Any, name: str, real: Any = None, error: BaseException | None = None
    ) -> None:
        real = real or getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.left -= threading.get_ident() != self.spared
                fails = self.left == -1 and not self.failed
                self.failed = self.failed or (
                    f"{name} of {[a for a in args if isinstance(a, str | Path)]}" if fails else ""
                )
            if fails:
                raise error or OSError(errno.EIO, "injected")
            return real(*args, **kwargs)

        patch.setattr(where, name, call, raising=False)

    @contextlib.contextmanager
    def at(self, n: int) -> Iterator[None]:
        self.failed, self.left, self.spared = "", n, None
        try:
            yield
        finally:
            self.left = -2


def held_by_process() -> tuple[int, int]:
    """How many descriptors and threads there are, but for those that the kernel adds for a while."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # It has ended since.
            names.append(task.read_text())
    return len(os.listdir("/proc/self/fd")), sum(not name.startswith("iou-") for name in names)


def at_most(held: tuple[int, int], where: str) -> None:
    """No more than before, once what is ending has ended."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        now = held_by_process()
        if now[0] <= held[0] and now[1] <= held[1]:
            return
        gc.collect()
        time.sleep(0.01)
    files = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    raise AssertionError(f"{files}; {now} descriptors and threads are left, and there were {held}: {where}")


def places_of(where: str, here: Path, elsewhere: Path) -> tuple[Path, Path | None]:
    """Where checkpoints go, and their annexes."""
    if where == "linked":
        return here / "saves", None
    return elsewhere / "saves", {"annex": here / "drive", "copied annex": elsewhere / "drive"}.get(where)


def nothing_but(checkpoint: Path, annex: Path | None, said: str, where: str) -> None:
    """No annex is there but those of the checkpoint, and those that the log, `said`, has named as left."""
    if annex is not None:
        for name in {*os.listdir(annex)} - annexes_in(checkpoint):
            assert name in said, where
            shutil.rmtree(annex / name)


def any_call_fails(where: str, here: Path, elsewhere: Path) -> None:
    parent, annex = places_of(where, here, elsewhere)
    said = io.StringIO()
    logging.getLogger("swapper").addHandler(logging.StreamHandler(said))
    training = SmallTraining(here).steps(2)
    training.save(parent / "saved", annex).wait()
    training.save(parent / "saved", annex).wait()
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        fails = CallFails(patch)
        held = held_by_process()
        raised = 0
        every = 1 if where in ("linked", "annex") else 3
        for n in places(every, sample=3 * every):
            before = (parent / "saved" / "index.json").read_bytes()
            error: BaseException | None = None
            with fails.at(n):
                try:
                    handle = training.save(parent / "saved", annex)
                    fails.spared = threading.get_ident()
                    training.steps()
                    handle.wait()
                except SwapError as caught:
                    error = caught
            if not fails.failed:
                break
            if error is not None:
                raised += 1
                assert isinstance(error, SwapIOError) and error.filename, fails.failed
                assert (parent / "saved" / "index.json").read_bytes() == before, fails.failed
                assert whole(parent / "saved"), fails.failed
            del error
            training.save(parent / "saved", annex).wait()
            assert os.listdir(parent) == ["saved"], fails.failed
            nothing_but(parent / "saved", annex, said.getvalue(), fails.failed)
            at_most(held, fails.failed)
    assert raised > (20 if ALL else 5)
    assert training.everything() == SmallTraining(None).steps(training.turn).everything()
    assert SmallTraining(None).load(parent / "saved").everything() == training.load(parent / "saved").everything()


@pytest.mark.long
@pytest.mark.parametrize("where", ["linked", "copied", "annex", "copied annex"])
def test_any_call_fails(where: str, tmp_path: Path, elsewhere: Path) -> None:
    """In a process of its own: it counts what the process has, and lets calls of any of its threads fail."""
    alone(any_call_fails, where, tmp_path, elsewhere, timeout_s=540)


EVERY = {
    "checkpoint/checkpoint.py": 11,
    "checkpoint/writer.py": 97,
    "checkpoint/directories.py": 97,
    "storage/atomic.py": 97,
    "checkpoint/saved_model.py": 201,
    "checkpoint/state_writer.py": 201,
    "storage/store.py": 151,
}
EVERY_OF_ANNEXES = {
    "checkpoint/annexes.py": 43,
    "checkpoint/writer.py": 97,
    "checkpoint/directories.py": 97,
    "storage/atomic.py": 97,
}


@pytest.mark.long
@pytest.mark.parametrize("where", ["linked", "copied", "annex"])
def test_ctrl_c_at_any_place(where: str, tmp_path: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    parent, annex = places_of(where, tmp_path, elsewhere)
    training = SmallTraining(tmp_path).steps(2)
    training.save(parent / "saved", annex).wait()
    gc.collect()
    held = held_by_process()
    for file_name, every in EVERY.items() if annex is None else EVERY_OF_ANNEXES.items():
        for n in places(every, sample=3 * every):
            if not interrupted_at(n, lambda: training.save(parent / "saved", annex).wait(), file_name):
                break
            assert whole(parent / "saved"), (file_name, n)
            training.steps().save(parent / "saved", annex).wait()
            assert os.listdir(parent) == ["saved"], (file_name, n)
            nothing_but(parent / "saved", annex, caplog.text, f"{file_name}, {n}")
            at_most(held, f"{file_name}, {n}")
        assert n, file_name
    assert training.everything() == SmallTraining(None).steps(training.turn).everything()


@pytest.mark.long
def test_ctrl_c_while_it_is_loaded(tmp_path: Path) -> None:
    SmallTraining(None).steps(2).save(tmp_path / "saved")
    expected = SmallTraining(None).steps(3).everything()
    training = SmallTraining(tmp_path).steps(1)
    held = held_by_process()
    for file_name, every in {
        "checkpoint/checkpoint.py": 7,
        "checkpoint/reader.py": 41,
        "checkpoint/directories.py": 41,
        "checkpoint/saved_model.py": 37,
        "checkpoint/state_loader.py": 97,
        "checkpoint/state_reader.py": 97,
    }.items():
        for n in places(every, sample=3 * every):
            if not interrupted_at(n, lambda: training.load(tmp_path / "saved"), file_name):
                break
            with contextlib.suppress(SwapError):  # Unless nothing was changed yet, or all of it.
                training.steps(1)
            training.optimizer.zero_grad()
            assert training.load(tmp_path / "saved").steps(1).everything() == expected, (file_name, n)
            at_most(held, f"{file_name}, {n}")
        assert n, file_name


@pytest.mark.long
@pytest.mark.parametrize("swapped", [True, False])
def test_ctrl_c_while_it_is_loaded_is_not_forgotten(swapped: bool, tmp_path: Path) -> None:
    """From the first tensor that was changed to the last, no step is made."""
    SmallTraining(None).steps(2).save(tmp_path / "saved")
    training = SmallTraining(tmp_path if swapped else None).steps(1)
    outcomes = []
    for n in range(0, 10_000, 29):
        training.optimizer.zero_grad()
        training.load(tmp_path / "saved").steps(1)
        if not interrupted_at(n, lambda: training.load(tmp_path / "saved"), "checkpoint/saved_model.py"):
            break
        training.model.loss(0).backward()
        try:
            training.optimizer.step()
        except SwapError:
            outcomes.append("refused")
        else:
            outcomes.append("stepped")
    assert outcomes.count("refused") > 2
    assert outcomes == sorted(outcomes, reverse=True), "none steps once something was changed"
