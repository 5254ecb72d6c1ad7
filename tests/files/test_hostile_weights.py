"""Files and indices that somebody made to do harm load exactly, or are a `SwapError` that names the file.

Nothing else happens: no other exception, no waiting, and no file outside of the directory is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import values_of

import swapper
from swapper.files.tensor_files import read_header
from swapper.io.handle import AsyncIOHandle
from swapper.tensors.dtypes import DTYPES

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ROUNDS = 250

_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_audit)  # It can never be removed, so it does nothing while no test wants it.


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.BatchNorm1d(4), "c": nn.Embedding(5, 2).bfloat16()})


def parts_of(state: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, Any], bytes]]:
    """A valid header, and what follows it, for each file."""
    names = {code: name for name, code in DTYPES.items()}
    parts: dict[str, tuple[dict[str, Any], bytes]] = {}
    for file, some in ((FIRST, list(state)[::2]), (SECOND, list(state)[1::2])):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        payload = b""
        for name in some:
            data = state[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            header[name] = {
                "dtype": names[state[name].dtype],
                "shape": list(state[name].shape),
                "data_offsets": [len(payload), len(payload) + len(data)],
            }
            payload += data
        parts[file] = (header, payload)
    return parts


def file_of(header: object, payload: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + payload


class Place:
    """A directory with valid weights in two files and an index, beside one with others."""

    def __init__(self, base: Path) -> None:
        self.directory = base / "weights"
        self.outside = base / "outside"
        self.directory.mkdir()
        self.outside.mkdir()
        torch.manual_seed(2)
        model = make_model()
        self.state = {name: torch.rand_like(t.float()).to(t.dtype) for name, t in model.state_dict().items()}
        self.parts = parts_of(self.state)
        self.index: dict[str, Any] = {
            "metadata": {"total_size": 1},
            "weight_map": {name: file for file, (header, _) in self.parts.items() for name in header if name[0] != "_"},
        }
        for file, part in self.parts.items():
            (self.outside / file).write_bytes(file_of(*part))
        self.restore()

    def restore(self) -> None:
        for entry in self.directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                entry.rmdir()
            else:
                entry.unlink()
        for file, part in self.parts.items():
            (self.directory / file).write_bytes(file_of(*part))
        (self.directory / INDEX).write_text(json.dumps(self.index))

    def loads_exactly_or_is_refused(self, path: Path | None = None) -> bool:
        """The property. Returns whether it was loaded."""
        model = make_model()
        with within_the_directory(self.directory), answers_soon():
            try:
                swapper.load_safetensors(model, path or self.directory)
            except swapper.SwapError as error:
                text = str(error)
                text.encode()  # It can be printed.
                assert str(self.directory) in text, text
                assert len(text) < 20_000
                return False
        reference = make_model()
        reference.load_state_dict(naive(self.directory))
        assert values_of(model) == values_of(reference)
        return True


@contextlib.contextmanager
def within_the_directory(directory: Path) -> Iterator[None]:
    global _opened
    _opened = []
    with pytest.MonkeyPatch.context() as patch:
        open_natively = AsyncIOHandle.open

        def noting(self: AsyncIOHandle, path: Any, *args: Any, **kwargs: Any) -> Any:
            assert _opened is not None
            _opened.append(os.fspath(path))
            return open_natively(self, path, *args, **kwargs)

        patch.setattr(AsyncIOHandle, "open", noting)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield
            # What Python itself or torch opens for a traceback or a thread is no matter.
            for path in _opened:
                if path.endswith((".safetensors", ".json", "secret")) or "outside" in path:
                    assert os.path.normpath(path).startswith(f"{directory}{os.sep}"), path
        finally:
            _opened = None


@contextlib.contextmanager
def answers_soon() -> Iterator[None]:
    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def naive(directory: Path) -> dict[str, torch.Tensor]:
    """What is in the files, by the shortest way."""
    found: dict[str, torch.Tensor] = {}
    places = json.loads((directory / INDEX).read_bytes())["weight_map"]
    for name, file in places.items():
        content = (directory / file).read_bytes()
        length = int.from_bytes(content[:8], "little")
        entry = json.loads(content[8 : 8 + length])[name]
        start, stop = entry["data_offsets"]
        data = bytearray(content[8 + length + start : 8 + length + stop])
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        found[name] = flat.clone().view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return found


HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 7, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**4000, 1.0, 1e300,
    float("nan"), float("inf"), "", "F32", "I64", "BF16", "C64", "BOOL", "F8_E4M3", "F7", "../outside/" + FIRST,
    "/etc/passwd", "/proc/self/environ", ".", "..", "a\0b", "\ud800", "x" * 5000, FIRST, SECOND, INDEX, [], [0], [[]],
    [0, 1 << 62, 1 << 62], [1] * 70, [2] * 70, [True, 4], [0, 48], [48, 0], [-4, 44], [1 << 62, (1 << 62) + 48], {},
    {"a": {}},
]  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """`value`, a tree of JSON, with one place of it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        copy = dict(value)
        match rng.randrange(8):
            case 0:
                del copy[key]
            case 1:
                copy[rng.choice(["", "\ud800", "a\0b", "__metadata__", "a.weight", "b.extra", "x" * 3000])] = copy[key]
            case _:
                copy[key] = mutated(copy[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.7:
        items = list(value)
        at = rng.randrange(len(items))
        items[at] = mutated(items[at], rng)
        return items if rng.random() < 0.8 else [*items, rng.choice(HOSTILE)]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-4, -1, 1, 4, 8])
    return rng.choice(HOSTILE)


def twisted(content: bytes, rng: random.Random) -> bytes:
    """`content` with bytes changed, cut off or put in."""
    data = bytearray(content)
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            at = rng.randrange(len(data))
            data[at:at] = rng.choice(
                [b"[" * 100_000, b"{", b'"', b"\xff", b"\0", b",", b"NaN", b'"a":1,', b"\xef\xbb\xbf"]
            )
        case _:
            data[:8] = struct.pack(
                "<Q", rng.choice([0, 1, 2, len(data), 10**8, 10**8 + 1, 1 << 62, 1 << 63, (1 << 64) - 1])
            )
    return bytes(data)


@pytest.mark.long
@pytest.mark.parametrize("what", ["header", "bytes of a file", "index", "bytes of the index"])
def test_mutations_load_exactly_or_are_refused(what: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    rng = random.Random(what)
    loaded = 0
    for _ in range(ROUNDS):
        place.restore()
        file = rng.choice([FIRST, SECOND])
        header, payload = place.parts[file]
        if what == "header":
            for _ in range(rng.choice([1, 1, 1, 2])):
                header = mutated(header, rng)
            (place.directory / file).write_bytes(file_of(header, payload))
        elif what == "bytes of a file":
            (place.directory / file).write_bytes(twisted(file_of(header, payload), rng))
        elif what == "index":
            (place.directory / INDEX).write_text(json.dumps(mutated(place.index, rng)))
        else:
            (place.directory / INDEX).write_bytes(twisted(json.dumps(place.index).encode(), rng))
        loaded += place.loads_exactly_or_is_refused()
    assert 0 < loaded < ROUNDS, "the mutations are neither all harmless nor all fatal"
    place.restore()
    assert place.loads_exactly_or_is_refused()


HEADERS: dict[str, bytes] = {
    "nested": b"[" * 100_000,
    "nested tables": b'{"a":' * 100_000,
    "nested in the metadata": b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a null character": b'{"a\\u0000":1}',
    "half a surrogate pair": json.dumps({"\udc00": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode(),
    "utf-16": '{"__metadata__":{}}'.encode("utf-16"),
    "latin-1": '{"é":1}'.encode("latin-1"),
    "no number": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}',
    "infinity": b'{"__metadata__":{"a":-Infinity}}',
    "a long number": b'{"a":' + b"9" * 10_000 + b"}",
    "a dtype of many characters": json.dumps(
        {"a": {"dtype": "F" * 10**6, "shape": [], "data_offsets": [0, 0]}}
    ).encode(),
    "no elements, and too many": json.dumps(
        {"a": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}
    ).encode(),
    "too many dimensions": json.dumps({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}}).encode(),
    "very many dimensions": json.dumps(
        {"a": {"dtype": "F32", "shape": [1 << 62] * 10**5, "data_offsets": [0, 4]}}
    ).encode(),
    "a boolean for a size": b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
    "booleans for offsets": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[false,true]}}',
    "a fraction for a size": b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("why", HEADERS)
def test_a_hostile_header(why: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    path = place.directory / FIRST
    path.write_bytes(file_of(HEADERS[why], bytes(64)))
    assert not place.loads_exactly_or_is_refused()
    assert not place.loads_exactly_or_is_refused(path)
    with answers_soon(), pytest.raises(swapper.SwapError, match="is not a whole safetensors file"):
        if why == "a null character":  # A name like any other; its entry is none.
            path.write_bytes(file_of(b'{"a\\u0000":1}', b""))
        read_header(path)


def test_tensors_without_elements_beside_others_and_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = {
        "last": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        "first": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [0, 0]},
        "none either": {"dtype": "F32", "shape": [0], "data_offsets": [12, 12]},
    }
    path.write_bytes(file_of(entries, bytes(12)))
    assert [tensor.name for tensor in read_header(path)] == list(entries)


NAMES = {
    "above": f"../outside/{FIRST}",
    "above, from below": f"below/../../outside/{FIRST}",
    "absolute": "",
    "here": ".",
    "nothing": "",
    "null": "a\0b",
    "half a surrogate pair": "\ud800.safetensors",
    "with slashes": f"//{FIRST}",
    "of a directory": "below/",
}


@pytest.mark.parametrize("why", NAMES)
def test_a_file_name_that_leads_out_of_the_directory(why: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    (place.directory / "below").mkdir()
    name = NAMES[why] if why != "absolute" else str(place.outside / FIRST)
    places = {key: name if file == FIRST else file for key, file in place.index["weight_map"].items()}
    (place.directory / INDEX).write_text(json.dumps({"weight_map": places}))
    for path in (place.directory, place.directory / INDEX):
        model = make_model()
        before = values_of(model)
        with within_the_directory(place.directory), pytest.raises(swapper.SwapError, match=INDEX) as caught:
            swapper.load_safetensors(model, path)
        assert "the file name" in str(caught.value)
        assert values_of(model) == before


def test_the_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """As in Hugging Face's: the files of a snapshot are links to blobs, which are named by their content."""
    place = Place(tmp_path)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshots" / "4f1c"
    snapshot.mkdir(parents=True)
    for number, name in enumerate((FIRST, SECOND, INDEX)):
        (place.directory / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    for path in (snapshot, snapshot / INDEX):
        model = make_model()
        swapper.load_safetensors(model, path)
        reference = make_model()
        reference.load_state_dict(place.state)
        assert values_of(model) == values_of(reference)


def test_files_in_a_directory_below(tmp_path: Path) -> None:
    place = Place(tmp_path)
    below = place.directory / "parts"
    below.mkdir()
    for file in (FIRST, SECOND):
        (place.directory / file).rename(below / file)
    places = {name: f"parts/{file}" for name, file in place.index["weight_map"].items()}
    (place.directory / INDEX).write_text(json.dumps({"weight_map": places}))
    assert place.loads_exactly_or_is_refused()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nothing(path: Path) -> None:
    """There is none."""


@pytest.mark.parametrize("make", [pipe, endless, loop, huge, nothing, Path.mkdir, Path.touch])
@pytest.mark.parametrize("name", [FIRST, INDEX])
def test_what_is_no_ordinary_file(name: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    place = Place(tmp_path)
    path = place.directory / name
    path.unlink()
    make(path)
    if make is pipe:  # One that somebody writes to, and one that nobody does.
        writer = os.open(path, os.O_RDWR)
        assert not place.loads_exactly_or_is_refused(path)
        os.close(writer)
    if not (make is nothing and name == INDEX):  # Without an index the files are all that there are.
        assert not place.loads_exactly_or_is_refused()
    assert not place.loads_exactly_or_is_refused(path)


def test_a_path_with_a_null_character(tmp_path: Path) -> None:
    for name in ("a\0b.safetensors", "a\0b.json", "a\0b"):
        with pytest.raises(swapper.SwapError, match=r"a\\\\?0b|a.0b"):
            swapper.load_safetensors(make_model(), tmp_path / name)


def test_complex_numbers_are_not_put_into_real_parameters(tmp_path: Path) -> None:
    place = Place(tmp_path)
    name = next(name for name in place.parts[FIRST][0] if name.endswith("weight"))
    state = place.state | {name: torch.zeros_like(place.state[name], dtype=torch.complex64)}
    (place.directory / FIRST).write_bytes(file_of(*parts_of(state)[FIRST]))
    model = make_model()
    before = values_of(model)
    for path in (place.directory, place.directory / FIRST):
        for strict in (True, False):
            with pytest.raises(swapper.SwapError, match=rf"{FIRST} has complex numbers for {name}, which is real"):
                swapper.load_safetensors(model, path, strict=strict)
    assert values_of(model) == before
