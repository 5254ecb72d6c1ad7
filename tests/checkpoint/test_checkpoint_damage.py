"""Checkpoints that are damaged, forged or of something else: refused by name, and training goes on with a good one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SmallTraining as Training

import swapper
from swapper.checkpoint.index import INDEX
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.io import checksums

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with files of all kinds."""
    path = tmp_path_factory.mktemp("good")
    training = Training(path, masters=True).steps(2)
    training.save(path / "saved").wait()
    training.steps(1).save(path / "later").wait()
    return path / "saved"


@pytest.fixture
def saved(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "saved"))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """What everything here is loaded into, in vain."""
    return Training(tmp_path_factory.mktemp("training"), masters=True).steps(1)


def crc(data: bytes) -> int:
    return checksums.checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def seal(directory: Path, index: dict[str, Any]) -> None:
    """Write the index, with checksums that are right."""
    index = {key: value for key, value in index.items() if key != "crc32c"}
    rest = json.dumps(index, separators=(",", ":")).encode()[1:]
    (directory / INDEX).write_bytes(b'{"crc32c":"%08x",' % crc(rest) + rest)


def refused(training: Training, directory: Path, *, named: str = "", kind: type[SwapError] = SwapError) -> SwapError:
    with pytest.raises(kind) as caught:
        training.load(directory)
    error = caught.value
    assert type(error) in (SwapError, SwapIOError, ConfigError)
    assert named in f"{error} {getattr(error, 'filename', '')}", error
    return error


def check_recovers(training: Training, good: Path) -> None:
    """A good checkpoint can be loaded after whatever was refused, and training goes on to the bit."""
    training.load(good)
    before = training.everything()
    training.steps(1)
    training.load(good)
    assert training.everything() == before
    training.steps(1)
    after = training.everything()
    training.load(good.parent / "later")
    assert training.everything() == after


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.long
def test_every_file_is_checked(good: Path, saved: Path, training: Training) -> None:
    others = {"model.safetensors.index.json"}  # Not read: for tools of others.
    for name in names(saved):
        path = saved / name
        data = path.read_bytes()
        path.unlink()
        refused(training, saved, named=name, kind=SwapIOError)
        path.mkdir()
        refused(training, saved, named=name)
        path.rmdir()
        os.mkfifo(path)
        refused(training, saved, named=name)
        path.unlink()
        path.symlink_to(good / name)
        if name != INDEX:
            assert "leads out" in str(refused(training, saved, named=name))
        path.unlink()
        path.symlink_to(path)
        refused(training, saved, named=name, kind=SwapIOError)
        path.unlink()
        for cut in (0, 1, 8, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            refused(training, saved, named=name)
        path.write_bytes(data + b"\0")
        refused(training, saved, named=name)
        later = (good.parent / "later" / name).read_bytes()
        if later != data and name != INDEX:
            path.write_bytes(later)
            refused(training, saved, named=name)
        if name not in others:
            for at in {0, 7, 9, 100, 4000, 4096, len(data) // 2, len(data) - 2, len(data) - 1}:
                if at < len(data):
                    path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
                    refused(training, saved, named=name)
        path.write_bytes(data)
    (saved / INDEX).write_bytes((good.parent / "later" / INDEX).read_bytes())
    refused(training, saved)
    check_recovers(training, good)


WRONG = [None, -1, 0, "x", [], {}, 1 << 62, 1 << 63, "../x"]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in an index; of what comes many times, to the first."""
    found = [path] if path and path != ("crc32c",) else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(items)[: 40 if isinstance(data, dict) else 1]:
        found += places(value, (*path, key))
    return found


def put(index: Any, path: tuple[Any, ...], value: Any) -> Any:
    *way, last = path
    target = index
    for key in way:
        target = target[key]
    before = target[last]
    target[last] = value
    return before


@pytest.mark.long
def test_no_value_in_the_index_does_more_than_be_refused(good: Path, saved: Path, training: Training) -> None:
    """Whatever is there instead of any value, with a checksum that is right, it is refused, or makes no difference."""
    index = json.loads((saved / INDEX).read_bytes())
    refusals = 0
    for path in places(index):
        if path[-1] == "version" and "metadata" in path:
            continue  # Of a module, whose own business it is.
        # The class's own business, and the user's: they are given what was saved.
        is_value = not {"options", "small", "extra"}.isdisjoint(path)
        for value in WRONG:
            before = put(index, path, value)
            if before != value:
                seal(saved, index)
                try:
                    swapper.load_checkpoint(saved, training.model, training.optimizer)
                    if not is_value:
                        training.steps(1)
                except SwapError as error:
                    assert type(error) in (SwapError, SwapIOError, ConfigError)
                    refusals += 1
                except Exception as error:
                    raise AssertionError(f"{value!r} instead of {before!r} at {path}") from error
            put(index, path, before)
    assert refusals > 300
    check_recovers(training, good)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A safetensors file with another header, and the same bytes behind it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def set_each(key: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for name in header.keys() - {"__metadata__"}:
            header[name][key] = value(header[name][key])

    return change


HEADERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "empty": lambda header: header.clear(),
    "deep": lambda header: header.update(x=[[[[{}]]]]),
    "dtype": set_each("dtype", lambda _: "F16"),
    "long dtype": set_each("dtype", lambda _: "F64"),
    "flat": set_each("shape", lambda shape: [7, *shape]),
    "huge": set_each("shape", lambda shape: [2**62, 2**62]),
    "nothing by much": set_each("shape", lambda shape: [0, 2**70]),
    "no numbers": set_each("shape", lambda shape: [str(n) for n in shape]),
    "moved": set_each("data_offsets", lambda place: [n + 2 for n in place]),
    "backwards": set_each("data_offsets", lambda place: place[::-1]),
    "all the same": set_each("data_offsets", lambda place: [0, place[1] - place[0]]),
    "beyond": set_each("data_offsets", lambda place: [n + 2**40 for n in place]),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_headers_that_lie_with_right_checksums(
    change: Callable[[dict[str, Any]], None], good: Path, saved: Path, training: Training
) -> None:
    index = json.loads((saved / INDEX).read_bytes())
    for name in [name for name in names(saved) if name.endswith(".safetensors")]:
        before = (saved / name).read_bytes()
        data = rewritten(saved / name, change)
        (saved / name).write_bytes(data)
        former = put(index, ("files", name), {"length_bytes": len(data), "crc32c": crc(data)})
        seal(saved, index)
        untouched = training.everything()
        refused(training, saved)
        assert training.everything() == untouched, "it was refused before anything was changed"
        (saved / name).write_bytes(before)
        put(index, ("files", name), former)


def test_headers_that_are_no_json(saved: Path, training: Training) -> None:
    index = json.loads((saved / INDEX).read_bytes())
    name = "model-00000.safetensors"
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{", b'{"a":1,"a":1}', b"1" * 5000, b"null"):
        data = len(text).to_bytes(8, "little") + text
        (saved / name).write_bytes(data)
        put(index, ("files", name), {"length_bytes": len(data), "crc32c": crc(data)})
        seal(saved, index)
        refused(training, saved, named=name)


def test_an_index_that_is_no_index(good: Path, saved: Path, training: Training) -> None:
    path = saved / INDEX
    data = path.read_bytes()
    for text in (b"", b"{", b"[]", b"null", b'{"a":1}', b'{"a":' * 5000, b"[" * 100_000, b"\xff" * 100):
        path.write_bytes(text)
        refused(training, saved, named=INDEX)
        path.write_bytes(b'{"crc32c":"%08x",' % crc(text) + text)
        refused(training, saved, named=INDEX)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    refused(training, saved, named=INDEX)  # Without reading so many zeros.
    path.write_bytes(data)
    check_recovers(training, good)
