"""`swapper.save` and `swapper.load`: torch's files, both ways, whatever happens."""

from __future__ import annotations

import collections
import contextlib
import cProfile
import errno
import fcntl
import functools
import gc
import io
import itertools
import logging
import os
import pickle
import pstats
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import isolation
import pytest
import torch
from archives import without_id
from interrupts import interrupted_at, places_of
from launcher import run_program
from repository import BENCHMARKS
from sampling import ALL, SEED
from still_drive import still
from torch import Tensor, nn

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.files import archive, fastsave, file_buffers
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage import atomic

SMALL_POOL = 1 << 20

Load = Callable[..., Any]
Save = Callable[[object, Path], object]


def save_with_fast_writer(obj: object, path: Path) -> None:
    torch.save(obj, swapper.FastWriter(path, pool_bytes=SMALL_POOL))


def save_small_pool(obj: object, path: Path) -> None:
    swapper.save(obj, path, pool_bytes=SMALL_POOL)


def load_small_pool(path: Path, **arguments: Any) -> Any:
    return swapper.load(path, pool_bytes=SMALL_POOL, **arguments)


SAVES: dict[str, Save] = {
    "torch.save": torch.save,
    "swapper.save": swapper.save,
    "small pool": save_small_pool,
    "FastWriter": save_with_fast_writer,
}
LOADS: dict[str, Load] = {
    "torch.load": torch.load,
    "mmap": lambda path, **arguments: torch.load(path, mmap=True, **arguments),
    "swapper.load": swapper.load,
    "small pool": load_small_pool,
}


def bits(tensor: Tensor) -> bytes:
    plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same(one: Any, other: Any) -> None:
    """Equal in every respect, to the bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.layout, one.requires_grad) == (
            other.dtype,
            other.shape,
            other.layout,
            other.requires_grad,
        )
        if one.layout is torch.sparse_coo:
            assert one.is_coalesced() == other.is_coalesced()
            assert_same(one._indices(), other._indices())
            assert_same(one._values(), other._values())
        elif one.layout is torch.sparse_csr:
            for part in ("crow_indices", "col_indices", "values"):
                assert_same(getattr(one, part)(), getattr(other, part)())
        else:
            assert one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
            assert one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
            assert bits(one) == bits(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def of_dtype(dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return torch.arange(1001) % 3 == 0
    return torch.randint(0, 256, (1001 * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def objects() -> dict[str, Any]:
    base = torch.randn(40, 50)
    torch.manual_seed(0)
    return {
        "tensor": torch.randn(5),
        "dtypes": {str(dtype): of_dtype(dtype) for dtype in DTYPES},
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), torch.tensor(7)],
        "views": [base, base[3:5], base.t(), base[::2, 1::3], base[0, 0], torch.zeros(1).expand(4, 5)],
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "lazy bits": [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag],
        "parameters": collections.OrderedDict(a=nn.Parameter(torch.randn(9)), b=torch.randn(3, requires_grad=True)),
        "sparse": [torch.eye(5).to_sparse(), torch.eye(5).to_sparse().coalesce()],
        "large": [torch.randn(700_001), torch.randn(1 << 20), torch.randint(0, 9, (3,)), torch.randn(2_000_003)],
        "small": [torch.randint(0, 256, (length,), dtype=torch.uint8) for length in range(0, 5000, 7)],
        "nested": {"step": 5, "lr": 1e-3, "names": ["x", ("y", None, True)], 3: {"deep": [torch.ones(2)]}},
        "state_dict": nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)).state_dict(),
        "size and dtype": [torch.Size([2, 3]), torch.float16, torch.device("cpu")],
        "nothing": None,
    }


OBJECTS = objects()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", OBJECTS)
def test_what_one_saves_the_other_loads_to_the_bit(tmp_path: Path, name: str, save: str, load: str) -> None:
    path = tmp_path / "saved.pt"
    SAVES[save](OBJECTS[name], path)
    assert_same(LOADS[load](path), OBJECTS[name])
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved.pt"]


@pytest.mark.parametrize("load", LOADS)
def test_tied_storages_stay_tied(tmp_path: Path, load: str) -> None:
    weight = torch.randn(100, 10)
    swapper.save({"a": weight, "b": weight, "row": weight[5]}, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 2 * weight.nbytes
    loaded = LOADS[load](tmp_path / "x", weights_only=False)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["row"].data_ptr() == loaded["a"][5].data_ptr()


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor.*", "ignore:.*TypedStorage is deprecated.*")
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantised_tensors_and_objects_of_any_class(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.randn(50), 0.1, 3, torch.qint8)
    for save, load in itertools.product(SAVES.values(), (torch.load, swapper.load, load_small_pool)):
        save({"q": quantised, "c": Custom(torch.randn(4)), "m": nn.Linear(2, 3)}, tmp_path / "x")
        loaded = load(tmp_path / "x", weights_only=False)
        assert (
            torch.equal(loaded["q"].int_repr(), quantised.int_repr()) and loaded["q"].q_scale() == quantised.q_scale()
        )
        assert loaded["c"].value.shape == (4,) and loaded["m"].weight.shape == (3, 2)


class Renaming:
    """A pickle module of the user's."""

    Pickler = pickle.Pickler
    Unpickler = pickle.Unpickler
    load, dump = staticmethod(pickle.load), staticmethod(pickle.dump)
    __name__ = "renaming"


def test_pickle_module_and_protocol_are_used(tmp_path: Path) -> None:
    swapper.save({"a": torch.ones(3)}, tmp_path / "x", pickle_module=Renaming, pickle_protocol=4)
    loaded = swapper.load(tmp_path / "x", weights_only=False, pickle_module=Renaming)
    assert torch.equal(loaded["a"], torch.ones(3))
    with open(tmp_path / "x", "rb") as file:
        assert b"\x80\x04" in file.read(200)


def test_weights_only_is_as_safe_as_torchs(tmp_path: Path) -> None:
    swapper.save({"c": Custom(torch.ones(2))}, tmp_path / "x")
    messages = []
    for load in (torch.load, swapper.load):
        with pytest.raises(pickle.UnpicklingError) as caught:
            load(tmp_path / "x")
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "Custom" in messages[0]
    with pytest.raises(RuntimeError, match="explicit pickle_module"):
        swapper.load(tmp_path / "x", pickle_module=pickle)


def test_what_torch_refuses_to_save_is_refused(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    for save in (torch.save, swapper.save):
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            save([tensor, tensor.view(torch.int32)], tmp_path / "x")
        with pytest.raises((AttributeError, pickle.PicklingError)):
            save(lambda: 0, tmp_path / "y")


def test_an_object_that_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        swapper.save({"a": torch.ones(3), "f": lambda: 0}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", OBJECTS)
def test_the_file_is_torchs_byte_for_byte(tmp_path: Path, name: str) -> None:
    buffer = io.BytesIO()
    torch.save(OBJECTS[name], buffer)
    swapper.save(OBJECTS[name], tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    if torch.__version__ >= "2.13":  # Older ones have their small records in another order.
        assert without_id(data) == without_id(buffer.getvalue())
    swapper.save(OBJECTS[name], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == data


def test_a_torch_without_settings_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.6 has none."""
    monkeypatch.delattr(torch.utils, "serialization", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.serialization", None)
    swapper.save({"a": torch.arange(100_000)}, tmp_path / "x")
    monkeypatch.undo()
    assert torch.equal(torch.load(tmp_path / "x")["a"], torch.arange(100_000))


class Stream:
    """What is written, without the storages: their lengths."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes | int]] = []
        self.position = 0

    def write(self, data: memoryview) -> int:
        self.append(data)
        return len(data)

    def append(self, data: Any, crc: int = 0) -> int:
        is_storage = isinstance(data, torch.UntypedStorage)
        length = data.nbytes() if is_storage else len(data)
        # Both in one form: torch writes in more pieces.
        if length > 1 << 16:
            self.parts.append((self.position, length))
        elif length:
            content = bytes(data.tolist() if is_storage else data)
            if self.parts and isinstance(self.parts[-1][1], bytes):
                start, before = self.parts.pop()
                self.parts.append((start, before + content))
            else:
                self.parts.append((self.position, content))
        self.position += length
        return 0

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("lengths", [[(1 << 32) - 1], [(4 << 30) - 5, 3, 0], [5 << 30, 0, 1000, 5 << 30, 7]], ids=str)
def test_the_layout_beyond_4_gib_is_torchs(lengths: list[int]) -> None:
    # Memory that nobody touches. torch is told to compute no checksums, so that it does not either.
    tensors = [torch.empty(length, dtype=torch.uint8) for length in lengths]
    for tensor in tensors:
        if tensor.numel() < 1 << 16:
            tensor.zero_()
    theirs, ours = Stream(), Stream()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, theirs)  # type: ignore[arg-type]
    finally:
        torch.serialization.set_crc32_options(before)
    prepared = fastsave.Prepared(tensors)
    prepared.write(ours)  # type: ignore[arg-type]
    assert ours.position == prepared.length_bytes
    if torch.__version__ < "2.13":
        return
    assert len(ours.parts) == len(theirs.parts)
    for (at, one), (other_at, other) in zip(ours.parts, theirs.parts, strict=True):
        assert at == other_at
        if isinstance(one, bytes) and isinstance(other, bytes) and b"serialization_id" in one:
            place = one.index(b"Z" * 10, one.index(b"serialization_id"))
            while one[place : place + 1] == b"Z":
                place += 1
            one, other = (part[:place] + part[place + 40 :] for part in (one, other))
        assert one == other


def test_a_file_with_a_large_hole_is_mapped(tmp_path: Path) -> None:
    """More than 4 GiB, of which the file system stores a few KB."""
    tensors = [torch.empty(5 << 30, dtype=torch.uint8), torch.arange(1000)]
    stream = Stream()
    prepared = fastsave.Prepared(tensors)
    prepared.write(stream)  # type: ignore[arg-type]
    with open(tmp_path / "x", "wb") as file:
        for offset, part in stream.parts:
            if isinstance(part, bytes):
                file.seek(offset)
                file.write(part)
    with open(tmp_path / "x", "rb") as file:
        read = lambda offset, length: os.pread(file.fileno(), length, offset)  # noqa: E731
        entries = archive.read_directory(read, prepared.length_bytes)
    assert [e.length_bytes for e in entries if "/data/" in e.name] == [5 << 30, 8000]
    large, small = torch.load(tmp_path / "x", mmap=True)
    assert large.nbytes == 5 << 30 and torch.equal(small, tensors[1])
    assert large[1 << 31] == 0


def test_more_records_than_16_bits_count() -> None:
    buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(buffer)
    for i in range(66_000):
        writer.write_record(f"data/{i}", b"x", 1)
    writer.write_end_of_file()
    data = buffer.getvalue()
    entries = archive.read_directory(lambda at, n: data[at : at + n], len(data))
    assert [entry.name for entry in entries[:66_000]] == [f"archive/data/{i}" for i in range(66_000)]
    assert all(entry.crc32 == zlib.crc32(b"x") for entry in entries[:66_000])
    end = archive.directory(entries, data.index(b"PK\1\2"))
    assert data.endswith(end) and data.index(b"PK\1\2") + len(end) == len(data)


def test_records_in_another_order_than_the_pickle(tmp_path: Path) -> None:
    """As older versions wrote them."""
    tensors = [torch.randn(n) for n in (300_000, 10, 500_000, 0, 700_000, 123)]
    data, storages = fastsave._pickled(tensors, pickle, 2, stage_later=False)
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "x"))
    writer.write_record("data.pkl", data, len(data))
    for key in reversed(range(len(storages))):
        writer.write_record(f"data/{key}", storages[key], storages[key].nbytes())
    writer.write_end_of_file()
    for load in (torch.load, swapper.load, load_small_pool):
        assert_same(load(tmp_path / "x"), tensors)


def test_what_is_no_zip_file_goes_to_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert torch.equal(swapper.load(tmp_path / "old")["a"], torch.ones(3))
    (tmp_path / "text").write_text("not a checkpoint at all")
    for load in (torch.load, swapper.load):
        with pytest.raises(pickle.UnpicklingError):
            load(tmp_path / "text")
    with pytest.raises(SwapIOError, match="does not exist"):
        swapper.load(tmp_path / "nowhere")
    with pytest.raises(SwapIOError, match="directory"):
        swapper.load(tmp_path)


@pytest.mark.parametrize("length", range(5))
def test_a_file_cut_off_in_its_first_bytes_is_named(tmp_path: Path, length: int) -> None:
    swapper.save({"a": torch.ones(3)}, tmp_path / "x")
    os.truncate(tmp_path / "x", length)
    with pytest.raises(SwapIOError, match="it was truncated") as caught:
        swapper.load(tmp_path / "x")
    assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(tmp_path / "x"))


def test_map_location(tmp_path: Path) -> None:
    swapper.save({"a": torch.ones(3)}, tmp_path / "x")
    assert swapper.load(tmp_path / "x", "meta")["a"].is_meta
    assert swapper.load(tmp_path / "x", torch.device("cpu"))["a"].sum() == 3
    assert swapper.load(tmp_path / "x", {"cpu": "cpu"})["a"].sum() == 3
    seen = []

    def where(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append((storage.nbytes(), location, torch.empty(0).set_(storage).sum().item()))
        return storage

    assert swapper.load(tmp_path / "x", where)["a"].sum() == 3
    assert seen == [(12, "cpu", 3.0)]


# ---- devices


@pytest.fixture
def host_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the host is taken for that of a GPU: it is only reached by `copy_`."""
    monkeypatch.setattr(file_buffers, "_HOSTS", ())
    monkeypatch.setattr(fastsave, "is_accelerator", lambda device: device.type == "cpu")
    monkeypatch.setattr("swapper.files.fastsave.has_accelerator", lambda: True)


DEVICE_OBJECTS = ["large", "dtypes", "views", "empty", "sparse"]


@pytest.mark.usefixtures("host_is_a_device")
@pytest.mark.parametrize("name", DEVICE_OBJECTS)
def test_device_tensors_go_through_the_buffers(tmp_path: Path, name: str) -> None:
    save_small_pool(OBJECTS[name], tmp_path / "x")
    assert_same(torch.load(tmp_path / "x"), OBJECTS[name])
    for location in (None, "cpu", {"cpu": "cpu"}, torch.device("cpu")):
        assert_same(load_small_pool(tmp_path / "x", map_location=location), OBJECTS[name])


@pytest.mark.usefixtures("host_is_a_device")
def test_a_damaged_device_tensor_is_refused(tmp_path: Path) -> None:
    swapper.save({"a": torch.zeros(1_000_000)}, tmp_path / "x")
    flip(tmp_path / "x", 2_000_000)
    with pytest.raises(SwapIOError, match="damaged"):
        swapper.load(tmp_path / "x")


class Wrapper(Tensor):
    """A tensor subclass without memory of its own, as DTensor is."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(function))


@pytest.mark.usefixtures("host_is_a_device")
def test_tensor_subclasses_that_ask_for_the_location_are_loaded(tmp_path: Path) -> None:
    large = torch.randn(1_000_000)
    swapper.save([large, Wrapper(torch.arange(3))], tmp_path / "x")
    with torch.serialization.safe_globals([Wrapper]):
        loaded = swapper.load(tmp_path / "x", "cpu")
    assert torch.equal(loaded[0], large)
    assert type(loaded[1]) is Wrapper and torch.equal(loaded[1].inner, torch.arange(3))


def test_large_storages_wait_for_their_device_and_come_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.files.fastsave.has_accelerator", lambda: True)
    swapper.save(OBJECTS["large"], tmp_path / "x")
    assert_same(swapper.load(tmp_path / "x"), OBJECTS["large"])
    with pytest.raises(RuntimeError, match="CUDA"):
        swapper.load(tmp_path / "x", {"cpu": "cuda:7"})


def test_loading_initialises_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that fork after it could not use the device. Up to torch 2.6 these counted devices by initialising."""
    for name in ("is_available", "device_count"):
        monkeypatch.setattr(torch.accelerator, name, lambda: pytest.fail("initialises the device"))
    swapper.save({"a": torch.ones(3)}, tmp_path / "x")
    assert torch.equal(swapper.load(tmp_path / "x")["a"], torch.ones(3))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5_000_000, device="cuda"), "b": torch.arange(10, device="cuda"), "c": torch.ones(3)}
    swapper.save(tensors, tmp_path / "x")
    handle = swapper.save(tensors, tmp_path / "y", background=True)
    handle.wait()
    for path in (tmp_path / "x", tmp_path / "y"):
        for loaded in (torch.load(path), swapper.load(path)):
            assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
            assert loaded["a"].is_cuda and not loaded["c"].is_cuda
        assert not swapper.load(path, "cpu")["a"].is_cuda


# ---- files


def test_a_new_file_has_the_umasks_mode_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    swapper.save(1, tmp_path / "x")
    torch.save(1, tmp_path / "y")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode
    (tmp_path / "x").chmod(0o640)
    swapper.save(2, tmp_path / "x")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640 and swapper.load(tmp_path / "x") == 2


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for value in (1, 2):
        swapper.save(value, tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and swapper.load(tmp_path / "file") == value


def test_names_that_need_care(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "ünïcode", "a" * 250, "spaces and\nnewline"):
        for value in (1, 2):
            swapper.save(value, name)
            assert swapper.load(name) == value
        os.unlink(name)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_replaced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("directory", "fifo", "nowhere/x", "directory/"):
        with pytest.raises(SwapIOError) as caught:
            swapper.save(1, f"{tmp_path}/{name}")
        assert name.split("/")[0] in str(caught.value)
    with pytest.raises(ValueError, match="pool_bytes"):
        swapper.save(1, tmp_path / "x", pool_bytes=1000)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "fifo"]


def refuse_unnamed_files() -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, *rest, **more)

    os.open = refuse


@pytest.fixture
def no_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS."""
    monkeypatch.setattr(os, "open", os.open)
    refuse_unnamed_files()


@pytest.mark.usefixtures("no_unnamed_files")
def test_a_file_system_without_unnamed_files(tmp_path: Path) -> None:
    for value in (1, 2):
        swapper.save(value, tmp_path / "x")
        assert swapper.load(tmp_path / "x") == value
    with AsyncIOHandle(faults=FaultPlan(fail_write_at=1)) as handle, pytest.raises(SwapIOError):
        swapper.save(torch.ones(10), tmp_path / "x", handle=handle)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"] and swapper.load(tmp_path / "x") == 2


def save_slowly_without_unnamed_files(directory: str) -> None:
    refuse_unnamed_files()
    with slow() as handle:
        swapper.save(torch.zeros(100_000_000), f"{directory}/x", handle=handle)


def test_what_a_killed_process_left_goes_at_the_next_save(tmp_path: Path) -> None:
    foreign = {f".swapper-00000000-{'0' * 16}.tmp", ".swapper-1.tmp", f"x{atomic.temporary_file_name()}"}
    for name in foreign:
        (tmp_path / name).touch()
    directory = atomic.temporary_file_name()
    (tmp_path / directory).mkdir()
    foreign.add(directory)
    process = isolation._context.Process(target=save_slowly_without_unnamed_files, args=(str(tmp_path),))
    process.start()
    left: set[str] = set()
    while not left:
        time.sleep(0.01)
        left = {entry.name for entry in tmp_path.iterdir()} - foreign
    time.sleep(0.2)
    swapper.save(1, tmp_path / "y")
    assert {entry.name for entry in tmp_path.iterdir()} == {*foreign, *left, "y"}, "it is still being written"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert {entry.name for entry in tmp_path.iterdir()} == {*foreign, *left, "y"}
    swapper.save(2, tmp_path / "y")
    assert {entry.name for entry in tmp_path.iterdir()} == {*foreign, "y"}


@pytest.mark.usefixtures("no_unnamed_files")
@pytest.mark.parametrize("removed", [False, True], ids=["locked", "removed"])
def test_a_file_that_is_taken_for_a_leftover_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    real, seen = atomic.claim, []

    def claim(descriptor: int, name: str | None, directory: int) -> bool:
        if not seen:
            assert name is not None
            with open(tmp_path / name, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if removed:
                    os.unlink(tmp_path / name)
                    fcntl.flock(file, fcntl.LOCK_UN)
                seen.append(real(descriptor, name, directory))
                if not removed:
                    os.unlink(tmp_path / name)
            return seen[0]
        return real(descriptor, name, directory)

    monkeypatch.setattr(atomic, "claim", claim)
    swapper.save(1, tmp_path / "x")
    assert seen == [False]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"] and swapper.load(tmp_path / "x") == 1


def test_a_file_between_its_two_names_is_not_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapper.save(1, tmp_path / "x")
    real, during = os.rename, []

    def rename(source: str, target: str, **where: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        swapper.save(3, tmp_path / "y")
        during.append(source in os.listdir(tmp_path))
        real(source, target, **where)

    monkeypatch.setattr(os, "rename", rename)
    swapper.save(2, tmp_path / "x")
    assert during == [True] and swapper.load(tmp_path / "x") == 2 and swapper.load(tmp_path / "y") == 3


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- faults

TENSORS = [torch.randn(300_000) for _ in range(4)]
OLD = {"old": torch.arange(100_000)}


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A file that must be as it was, and nothing beside it."""
    path = tmp_path / "checkpoint.pt"
    torch.save(OLD, path)
    data = path.read_bytes()
    before = descriptors()
    yield path
    assert path.read_bytes() == data
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert descriptors() <= before


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("background", [False, True])
def test_a_failing_drive_leaves_the_old_file(old: Path, nth: int, number: int, background: bool) -> None:
    with AsyncIOHandle(block_bytes=1 << 18, faults=FaultPlan(fail_write_at=nth, fail_errno=number)) as handle:
        if background:
            saving = swapper.save(TENSORS, old, handle=handle, pool_bytes=SMALL_POOL, background=True)
            for _ in range(2):
                with pytest.raises(SwapIOError) as caught:
                    saving.wait()
            assert saving.done()
        else:
            with pytest.raises(SwapIOError) as caught:
                swapper.save(TENSORS, old, handle=handle, pool_bytes=SMALL_POOL)
        assert caught.value.errno == number and caught.value.path == str(old)
        assert handle.unobserved_failures == 0


@pytest.mark.parametrize("nth", [1, 3])
def test_a_drive_that_fails_while_loading(old: Path, nth: int) -> None:
    swapper.save(TENSORS, old.parent.parent / "large.pt")
    with AsyncIOHandle(block_bytes=1 << 18, faults=FaultPlan(fail_read_at=nth)) as handle:
        with pytest.raises(SwapIOError) as caught:
            swapper.load(old.parent.parent / "large.pt", handle=handle, pool_bytes=SMALL_POOL)
        assert caught.value.errno == errno.EIO and "large.pt" in str(caught.value)
        assert handle.unobserved_failures == 0


def test_a_short_transfer_is_completed(tmp_path: Path) -> None:
    plan = FaultPlan(seed=1, short=0.5, eintr=0.1, eagain=0.1, reorder=True)
    with AsyncIOHandle(block_bytes=1 << 16, faults=plan) as handle:
        swapper.save(TENSORS, tmp_path / "x", handle=handle, pool_bytes=SMALL_POOL)
        assert_same(swapper.load(tmp_path / "x", handle=handle, pool_bytes=SMALL_POOL), TENSORS)
    assert_same(torch.load(tmp_path / "x"), TENSORS)


def test_a_full_drive_is_found_before_anything_is_written(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapper.io.handle import File

    def full(self: File, length_bytes: int) -> bool:
        raise SwapIOError(errno.ENOSPC, "preallocate", self.path, 0, length_bytes)

    monkeypatch.setattr(File, "preallocate", full)
    with pytest.raises(SwapIOError, match="full") as caught:
        swapper.save(TENSORS, old)
    assert caught.value.path == str(old)


def slow(bytes_per_second: int = 20_000_000) -> AsyncIOHandle:
    return AsyncIOHandle(block_bytes=1 << 16, queue_depth=2, faults=FaultPlan(bytes_per_second=bytes_per_second))


def test_the_directory_is_removed_while_saving(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    before = descriptors()
    plan = FaultPlan()
    with AsyncIOHandle(faults=plan) as handle:
        with still(plan):
            saving = swapper.save(TENSORS, directory / "x", background=True, handle=handle)
            shutil.rmtree(directory)
        with pytest.raises(SwapIOError) as caught:
            saving.wait()
    assert caught.value.errno == errno.ENOENT and "gone/x" in str(caught.value)
    assert not directory.exists()
    assert descriptors() <= before


def test_the_directory_is_renamed_while_saving(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    plan = FaultPlan()
    with AsyncIOHandle(faults=plan) as handle:
        with still(plan):
            saving = swapper.save(TENSORS, tmp_path / "before" / "x", background=True, handle=handle)
            (tmp_path / "before").rename(tmp_path / "after")
        saving.wait()
    assert_same(swapper.load(tmp_path / "after" / "x"), TENSORS)


@pytest.mark.long
@pytest.mark.unsanitized("it is traced opcode by opcode, which takes minutes there")
@pytest.mark.parametrize("module", ["storage/atomic.py", "files/output_file.py", "files/fastsave.py"])
def test_ctrl_c_anywhere_in_a_save_leaves_the_old_file_or_the_new(tmp_path: Path, module: str) -> None:
    path = tmp_path / "x"
    new = [torch.arange(100_000), torch.ones(3)]
    before, struck = descriptors(), 0
    with AsyncIOHandle() as handle:
        save = functools.partial(swapper.save, new, path, pool_bytes=1 << 18, handle=handle)
        for place in places_of(save, module, sample=None if ALL else 15):
            torch.save(OLD, path)
            struck += interrupted_at(place, save, module)
            gc.collect()
            found = torch.load(path)
            assert_same(found, OLD if isinstance(found, dict) else new)
            left = [entry.name for entry in tmp_path.iterdir()]
            assert left == ["x"], f"interrupted at {place}: {left}"
        assert struck >= (20 if ALL else 10)
        assert handle.unobserved_failures == 0
    assert descriptors() <= before + 1


@pytest.mark.unsanitized("it is traced opcode by opcode, which takes minutes there")
def test_ctrl_c_anywhere_in_a_load_is_raised(tmp_path: Path) -> None:
    tensors = [torch.arange(100_000), torch.ones(3)]
    swapper.save(tensors, tmp_path / "x")
    before, struck = descriptors(), 0
    loaded: list[Any] = []
    with AsyncIOHandle() as handle:
        load = lambda: loaded.append(swapper.load(tmp_path / "x", pool_bytes=1 << 18, handle=handle))  # noqa: E731
        for place in places_of(load, "files/input_file.py", sample=None if ALL else 30):
            loaded.clear()
            cut = interrupted_at(place, load, "files/input_file.py")
            assert cut != bool(loaded), place
            struck += cut
        assert struck >= (40 if ALL else 20)
        loaded.clear()
        load()
        assert_same(loaded[0], tensors)
    assert descriptors() <= before + 1


# ---- corrupt files


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("save", SAVES)
def test_a_flipped_bit_in_a_payload_is_refused(tmp_path: Path, save: str) -> None:
    path = tmp_path / "x"
    SAVES[save]({"a": torch.zeros(1_000_000), "b": torch.ones(3)}, path)
    entries = archive.read_directory(lambda at, n: path.read_bytes()[at : at + n], path.stat().st_size)
    whole = path.read_bytes()
    for entry in entries:
        if entry.name.endswith(("serialization_id", "version", "byteorder", ".storage_alignment")):
            continue  # torch does not look at what they hold, or refuses it itself
        start = entry.offset_bytes + archive.header_bytes(whole[entry.offset_bytes :])
        flip(path, start + entry.length_bytes // 2)
        with pytest.raises(SwapIOError, match="damaged") as caught:
            swapper.load(path)
        assert caught.value.errno == errno.EBADMSG and caught.value.path == str(path)
        path.write_bytes(whole)
    assert swapper.load(path)["b"].sum() == 3


def test_a_flipped_bit_in_one_of_many_small_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    swapper.save([torch.full((40,), float(k)) for k in range(300)], path)
    whole = path.read_bytes()
    entries = archive.read_directory(lambda at, n: whole[at : at + n], len(whole))
    entry = next(entry for entry in entries if entry.name.endswith("data/200"))
    flip(path, entry.offset_bytes + archive.header_bytes(whole[entry.offset_bytes :]) + 100)
    with pytest.raises(SwapIOError, match=r"data/200.*damaged"):
        swapper.load(path)


def calls_for_more_tensors(action: Callable[[dict[str, Tensor]], object]) -> int:
    counts = []
    for number in (100, 100, 400):  # The first imports what it needs.
        profile = cProfile.Profile()
        state = {f"layer.{i}.weight": torch.ones(16) for i in range(number)}
        profile.runcall(action, state)
        counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    return int(counts[2] - counts[1])


def test_many_small_tensors_take_about_as_many_calls_as_torchs(tmp_path: Path) -> None:
    """10,000 small tensors are bound by calls alone: three times as many as torch's were twice the time."""
    path = tmp_path / "x"

    def saving(save: Save) -> int:
        return calls_for_more_tensors(lambda state: save(state, path))

    def loading(load: Load) -> int:
        both = calls_for_more_tensors(lambda state: (torch.save(state, path), load(path)))
        return both - saving(torch.save)

    assert saving(swapper.save) <= 1.5 * saving(torch.save)
    assert loading(swapper.load) <= 1.35 * loading(torch.load)


def test_a_damaged_pickle_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swapper.save({"c": Custom(torch.ones(2))}, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data.replace(b"Custom", b"Cuttom"))
    with pytest.raises(SwapIOError, match="damaged"):
        swapper.load(tmp_path / "x", weights_only=False)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    swapper.save({"a": torch.randn(100_000)}, path)
    whole = path.read_bytes()
    for length in (*range(4, len(whole), 40_001), len(whole) - 200, len(whole) - 23, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(SwapIOError) as caught:
            swapper.load(path)
        assert caught.value.errno == errno.EBADMSG and str(path) in str(caught.value)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.long
def test_no_damage_ends_in_another_object_or_in_an_error_without_a_name(tmp_path: Path, weights_only: bool) -> None:
    """Bits, sectors and appended bytes: refused by the file's name, or of no consequence."""
    path = tmp_path / "x"
    saved = {"a": torch.randn(50), "b": [torch.arange(5), "text"]}
    swapper.save(saved, path)
    whole = path.read_bytes()
    bits: Iterable[int] = range(8 * len(whole))
    bits = bits if ALL else random.Random(SEED).sample(bits, 600)
    damaged = [whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :] for bit in bits]
    for start in range(0, len(whole), 512):
        damaged += [whole[:start] + fill * 512 + whole[start + 512 :] for fill in (b"\0", b"\xff")]
    damaged += [bytes(len(whole)), whole + bytes(4096)]
    refused = 0
    with AsyncIOHandle() as handle:
        for data in damaged:
            path.write_bytes(data)
            try:
                loaded = swapper.load(path, weights_only=weights_only, handle=handle)
            except SwapIOError as error:
                assert error.errno == errno.EBADMSG and error.filename == str(path)
                refused += 1
            else:
                assert_same(loaded, saved)
    assert refused > 50


@pytest.mark.parametrize(("field", "bit"), [(10, 3), (38, 4)], ids=["compressed", "a folder"])
def test_a_wrong_bit_that_makes_a_record_something_else_is_refused(tmp_path: Path, field: int, bit: int) -> None:
    """Of such a record torch reads nothing, and takes memory that nobody has written for the tensor."""
    path = tmp_path / "x"
    swapper.save({"a": torch.randn(50), "b": [torch.arange(5), "text"]}, path)
    whole = path.read_bytes()
    for entry in archive.read_directory(lambda at, n: whole[at : at + n], len(whole)):
        at = whole.rindex(entry.name.encode()) - 46 + field
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(SwapIOError, match=f"damaged where it has the record '{entry.name}'"):
            swapper.load(path)


def test_a_file_that_was_compressed_is_loaded(tmp_path: Path) -> None:
    saved = {"a": torch.zeros(5000), "b": [torch.arange(5), "text"]}
    torch.save(saved, tmp_path / "x")
    with (
        zipfile.ZipFile(tmp_path / "x") as plain,
        zipfile.ZipFile(tmp_path / "y", "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        compressed.writestr("x/", b"")
        for entry in plain.infolist():
            compressed.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "y").stat().st_size < 5000
    for load in (torch.load, swapper.load):
        assert_same(load(tmp_path / "y"), saved)


def test_a_file_without_checksums_is_loaded(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(OBJECTS["large"], tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    assert_same(swapper.load(tmp_path / "x"), OBJECTS["large"])


# ---- background


def test_background_save_returns_before_the_tensors_are_written(tmp_path: Path) -> None:
    options, plan = {"lr": 0.1}, FaultPlan()
    saved = {"tensors": TENSORS, "options": options}
    with AsyncIOHandle(faults=plan) as handle:
        with still(plan):
            saving = swapper.save(saved, tmp_path / "x", background=True, handle=handle)
            assert not saving.done() and not (tmp_path / "x").exists()
            assert "in progress" in repr(saving)
            with pytest.raises(TimeoutError):
                saving.wait(timeout=0.01)
            options["lr"] = 0.2  # Pickled already.
        saving.wait()
        assert saving.done() and "done" in repr(saving)
        saving.wait()
    assert_same(swapper.load(tmp_path / "x"), {"tensors": TENSORS, "options": {"lr": 0.1}})


def use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def test_tensors_may_be_dropped_and_are_let_go_of(tmp_path: Path) -> None:
    tensor = torch.randn(500_000)
    expected = tensor.clone()
    storage = tensor.untyped_storage()
    with slow() as handle:
        saving = swapper.save(tensor, tmp_path / "x", background=True, handle=handle)
        del tensor
        saving.wait()
        deadline_s = time.monotonic() + 240
        while use_count(storage) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert use_count(storage) == 1, "the handle still holds what was saved"
    assert torch.equal(swapper.load(tmp_path / "x"), expected)


def test_a_tensor_that_is_resized_meanwhile_is_an_error(tmp_path: Path) -> None:
    first, second = torch.randn(2_000_000), torch.randn(1000)
    plan = FaultPlan()
    with AsyncIOHandle(faults=plan) as handle:
        with still(plan):
            both = [first, second]
            saving = swapper.save(both, tmp_path / "x", background=True, handle=handle, pool_bytes=SMALL_POOL)
            second.resize_(2000)
        with pytest.raises(SwapError, match="resized"):
            saving.wait()
    assert not list(tmp_path.iterdir())


def test_a_failure_that_nobody_waits_for_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncIOHandle(faults=FaultPlan(fail_write_at=1)) as handle, caplog.at_level(logging.ERROR):
        saving = swapper.save(TENSORS, tmp_path / "early", background=True, handle=handle)
        while not saving.done():
            time.sleep(0.005)
        assert not caplog.records
        del saving
        gc.collect()
        assert [("early" in r.getMessage(), r.levelname) for r in caplog.records] == [(True, "ERROR")]
    caplog.clear()
    plan = FaultPlan(fail_write_at=1, delay_us=100_000)
    with AsyncIOHandle(faults=plan) as handle, caplog.at_level(logging.ERROR):
        swapper.save(TENSORS, tmp_path / "late", background=True, handle=handle)
        gc.collect()
        deadline_s = time.monotonic() + 240
        while not caplog.records and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ["late" in r.getMessage() for r in caplog.records] == [True]


def test_the_interpreter_waits_at_exit(tmp_path: Path) -> None:
    program = f"""
import torch, swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
handle = AsyncIOHandle(faults=FaultPlan(bytes_per_second=20_000_000))
swapper.save(torch.arange(500_000), {str(tmp_path / "x")!r}, background=True, handle=handle)
"""
    run_program([sys.executable, "-c", program], check=True)
    assert torch.equal(torch.load(tmp_path / "x"), torch.arange(500_000))


def test_in_a_forked_child_waiting_is_an_error(tmp_path: Path) -> None:
    with slow() as handle:
        saving = swapper.save(TENSORS, tmp_path / "x", background=True, handle=handle)
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    saving.wait()
                except SwapError:
                    code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        saving.wait()
    assert_same(swapper.load(tmp_path / "x"), TENSORS)


# ---- memory and crashes


@pytest.mark.long
@pytest.mark.unsanitized("its memory counts as the process's")
def test_memory_is_that_of_the_pool(tmp_path: Path) -> None:
    program = f"""
import sys, time, torch, swapper
sys.path.insert(0, {str(BENCHMARKS)!r})
from peak import Peak
path = {str(tmp_path / "x")!r}
swapper.load((swapper.save(torch.ones(3), path), path)[1])
tensors = [torch.ones(60_000_000), torch.ones(3), torch.ones(40_000_000)]
def grown(function):
    with Peak() as before:
        time.sleep(0.05)
    with Peak() as peak:
        result = function()
    return peak.bytes - before.bytes, result
writing, _ = grown(lambda: swapper.save(tensors, path))
del tensors
reading, tensors = grown(lambda: swapper.load(path))
assert tensors[2].sum() == 40_000_000
print(writing, reading)
"""
    output = run_program([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    writing, reading = map(int, output.split())
    assert writing <= file_buffers.POOL_BYTES + 100e6
    assert reading <= 400e6 + file_buffers.POOL_BYTES + 100e6


def save_for_ever(directory: str) -> None:
    for i in itertools.count():
        swapper.save([torch.full((200_000,), i), i], f"{directory}/x", pool_bytes=1 << 18)


@pytest.mark.long
@pytest.mark.parametrize("existing", [False, True], ids=["new name", "replacing"])
def test_a_kill_at_any_instant_leaves_a_whole_file(tmp_path: Path, existing: bool) -> None:
    chance = random.Random(existing)
    kills = 15
    seen = 0
    for _ in range(kills):
        if not existing:
            (tmp_path / "x").unlink(missing_ok=True)
        process = isolation._context.Process(target=save_for_ever, args=(str(tmp_path),))
        process.start()
        if existing:
            while not (tmp_path / "x").exists():
                time.sleep(0.001)
        time.sleep(chance.random() * 0.15)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (tmp_path / "x").exists():
            seen += 1
            tensor, i = torch.load(tmp_path / "x")
            assert tensor.numel() == 200_000 and bool((tensor == i).all())
        for entry in tmp_path.iterdir():
            # Between link(2) and rename(2) there are microseconds with a second name; it is a whole file then.
            if entry.name != "x":
                assert entry.name.startswith(".swapper-") and torch.load(entry)[0].numel() == 200_000
    assert seen == kills or not existing
    swapper.save(OLD, tmp_path / "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
