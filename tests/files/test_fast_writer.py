"""`FastWriter`: a file object for `torch.save` that never looks complete when it is not."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapper
from swapper import FastWriter
from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan

SAVED = {"a": torch.randn(300_000), "b": [torch.arange(5), "text"]}


def assert_saved(path: Path) -> None:
    for loaded in (torch.load(path), swapper.load(path)):
        assert torch.equal(loaded["a"], SAVED["a"]) and loaded["b"][1] == "text"


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "x.pt"
    assert {entry.name for entry in tmp_path.iterdir()} <= {"x.pt"}


@pytest.fixture
def old(path: Path) -> Iterator[Path]:
    """A file that must be as it was."""
    path.write_bytes(b"the file before")
    yield path
    gc.collect()
    assert path.read_bytes() == b"the file before"


def failing(nth: int = 1, number: int = errno.EIO) -> AsyncIOHandle:
    return AsyncIOHandle(block_bytes=1 << 18, faults=FaultPlan(fail_write_at=nth, fail_errno=number))


def test_one_line_is_changed(path: Path) -> None:
    torch.save(SAVED, FastWriter(path))
    assert_saved(path)


def test_the_file_is_there_when_torch_save_returns_and_not_before(path: Path) -> None:
    writer = FastWriter(path)
    writer.write(b"")
    assert not path.exists() and writer.writable() and writer.tell() == 0
    torch.save(SAVED, writer)
    assert path.exists() and writer.closed and not writer.writable()
    writer.close()
    writer.flush()
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"more")
    with pytest.raises(ValueError, match="closed"):
        writer.tell()
    assert_saved(path)


def test_in_a_block_it_appears_at_the_end(path: Path) -> None:
    with FastWriter(path) as writer:
        torch.save(SAVED, writer)
        assert not path.exists() and "closed" not in repr(writer)
        writer.write(b"")
    assert "closed" in repr(writer)
    assert_saved(path)


def test_several_objects_in_one_file(path: Path) -> None:
    with FastWriter(path) as writer:
        pickle.dump([1, 2], writer)
        first = writer.tell()
        torch.save(SAVED["a"], writer)
    data = path.read_bytes()
    assert pickle.loads(data[:first]) == [1, 2]
    assert len(data) > first + 1_200_000


def test_the_old_format_is_complete_when_closed(path: Path) -> None:
    writer = FastWriter(path)
    torch.save(SAVED, writer, _use_new_zipfile_serialization=False)
    assert not path.exists(), "only the end of a ZIP file says by itself that it is one"
    writer.close()
    assert_saved(path)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 18, (1 << 20) + 3, 5_000_001])
def test_bytes_of_any_length(path: Path, size: int) -> None:
    data = os.urandom(size)
    with FastWriter(path, pool_bytes=1 << 18) as writer:
        for start in range(0, size, 70_001):
            part = data[start : start + 70_001]
            assert writer.write(memoryview(part)) == len(part)
    assert path.read_bytes() == data


def test_views_of_other_types_are_counted_in_bytes(path: Path) -> None:
    with FastWriter(path) as writer:
        assert writer.write(memoryview(bytes(range(64))).cast("Q")) == 64
        assert writer.tell() == 64
    assert path.read_bytes() == bytes(range(64))


def test_what_cannot_be_pickled_leaves_nothing(old: Path, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save({"a": torch.ones(10), "f": lambda: 0}, FastWriter(old))
    writer = FastWriter(old)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save(lambda: 0, writer)
    with pytest.raises(SwapError, match="not published"):
        writer.close()
    assert writer.closed
    gc.collect()
    assert not [w for w in recwarn if w.category is ResourceWarning], "the exception has said it already"


def test_an_exception_in_a_block_leaves_nothing(old: Path) -> None:
    with pytest.raises(KeyError), FastWriter(old) as writer:
        torch.save(SAVED, writer)
        raise KeyError("after it")
    writer = FastWriter(old)
    with pytest.raises(SwapError, match="not published"), writer, contextlib.suppress(Exception):
        torch.save(lambda: 0, writer)


def test_close_while_an_exception_is_on_its_way_leaves_nothing(old: Path) -> None:
    writer = FastWriter(old)
    with pytest.raises(KeyError):
        try:
            writer.write(b"a part of it")
            raise KeyError
        finally:
            writer.close()
    assert writer.closed


def test_saving_while_another_exception_is_handled(path: Path) -> None:
    """As in a program that saves when it is interrupted."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        torch.save(SAVED, FastWriter(path))
    assert_saved(path)


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_failing_drive_is_raised_by_torch_save(old: Path, nth: int, number: int) -> None:
    with failing(nth, number) as handle:
        with pytest.raises(SwapIOError) as caught:
            torch.save(SAVED, FastWriter(old, pool_bytes=1 << 18, handle=handle))
        assert caught.value.errno == number and caught.value.path == str(old)


def test_a_failing_drive_is_raised_by_close_and_by_the_block(old: Path) -> None:
    with failing() as handle:
        writer = FastWriter(old, pool_bytes=1 << 18, handle=handle)
        for _ in range(8):
            assert writer.write(bytes(1 << 18)) == 1 << 18
        with pytest.raises(SwapIOError):
            writer.close()
        assert writer.closed
        writer.close()
    with failing() as handle, pytest.raises(SwapIOError), FastWriter(old, handle=handle) as writer:
        writer.write(b"x")


def test_ctrl_c_within_a_write_is_raised_by_torch_save(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapper.files.output_file import OutputFile

    real, calls = OutputFile.append, 0

    def append(self: OutputFile, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise KeyboardInterrupt
        return real(self, data)

    monkeypatch.setattr(OutputFile, "append", append)
    with pytest.raises(KeyboardInterrupt):
        torch.save(SAVED, FastWriter(old))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_dropped_is_discarded_loudly(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = FastWriter(old)
    writer.write(b"a part of it")
    with caplog.at_level(logging.ERROR), pytest.warns(ResourceWarning, match="never closed"):
        del writer
        gc.collect()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(old) in caplog.text


def test_discard(old: Path) -> None:
    writer = FastWriter(old)
    writer.write(b"a part of it")
    writer.discard()
    writer.discard()
    writer.close()
    assert writer.closed


def test_a_forked_child_has_no_part_in_it(path: Path) -> None:
    writer = FastWriter(path)
    writer.write(b"from the parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.write(b"from the child")
            try:
                writer.close()
            except SwapError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert path.read_bytes() == b"from the parent"


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(SwapIOError, match="does not exist"):
        FastWriter(tmp_path / "nowhere" / "x")
    with pytest.raises(ValueError, match="pool_bytes"):
        FastWriter(tmp_path / "x", pool_bytes=0)
    assert not list(tmp_path.iterdir())


def test_what_has_no_bytes_is_refused_at_once_as_by_a_file(path: Path) -> None:
    """`flush` and `close` raise what the drive does; these are the mistakes of the caller."""
    with FastWriter(path) as writer:
        for wrong in ("text", None, 5, [1]):
            with pytest.raises(TypeError, match="bytes-like object is required"):
                writer.write(wrong)
        writer.write(b"right")
    assert path.read_bytes() == b"right"
