"""Files of every format, damaged in every way: the error names the file, or the values are the same; nothing else."""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import SmallTraining, whole
from sampling import ALL, SEED
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from twins import bits
from weight_files import write_weights

import swapper
from swapper.checkpoint.plain_import import import_checkpoint
from swapper.dcp import SwapStorageReader, SwapStorageWriter
from swapper.errors import SwapError

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized.*"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

DAMAGES = 1000 if ALL else 120


class Case(NamedTuple):
    """A file of a format.

    Attributes:
        file: that is damaged.
        load: returns everything that was saved.
        older: the same file of other values, of which nothing else is told; None if that is another whole file.
        checked_bytes: so many have a checksum, or a structure that shows damage; -1 for all.
        named: in errors; "" for the file. Weights that do not fit are those of a directory.
    """

    file: Path
    load: Callable[[], Any]
    older: bytes | None = None
    checked_bytes: int = -1
    named: str = ""


def content(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=generator)
    return {
        **{f"w{k}": torch.randn(112, generator=generator) for k in range(3)},  # Of one length, at multiples of 2048.
        "nested": {"step": 1000 + seed, "weight": weight, "columns": weight.t(), "options": [0.5, ("text", None)]},
        "zeros": torch.zeros(300),
        "bf16": torch.randn(9, generator=generator).bfloat16(),
    }


def of_torch(path: Path, save: Callable[[Any, Path], object], **options: Any) -> Case:
    save(content(0), path / "saved.pt")
    return Case(path / "saved.pt", lambda: swapper.load(path / "saved.pt", pool_bytes=1 << 18, **options))


def fast_writer(value: Any, path: Path) -> None:
    torch.save(value, swapper.FastWriter(path))


def of_dcp(path: Path, pattern: str) -> Case:
    for seed in (0, 1):
        dcp.save(content(seed), storage_writer=SwapStorageWriter(path / str(seed)))

    def load() -> Any:
        found = content(2)
        dcp.load(found, storage_reader=SwapStorageReader(path / "0", pool_bytes=1 << 18))
        return found

    file, other = (next((path / str(seed)).glob(pattern)) for seed in (0, 1))
    return Case(file, load, other.read_bytes() if pattern == ".metadata" else None)


def of_checkpoint(path: Path, pattern: str) -> Case:
    saving = SmallTraining(None).steps(2)
    saving.save(path / "saved").wait()
    saving.steps(1).save(path / "older").wait()
    file = next((path / "saved").glob(pattern))
    loading = SmallTraining(None)

    def load() -> Any:
        loading.load(path / "saved")
        return loading.turn, loading.everything(), whole(path / "saved")

    return Case(file, load, (path / "older" / file.name).read_bytes())


def of_import(path: Path) -> Case:
    torch.save({"model": {"weight": torch.randn(3, 2)}, "epoch": 1234}, path / "plain.pt")

    def load() -> Any:
        shutil.rmtree(path / "made", ignore_errors=True)
        import_checkpoint(path / "plain.pt", path / "made")
        model = nn.Linear(2, 3, bias=False)
        return swapper.load_checkpoint(path / "made", model), dict(model.state_dict())

    return Case(path / "plain.pt", load)


def of_weights(path: Path, *, packed: bool) -> Case:
    model = nn.Linear(256, 256, dtype=torch.bfloat16) if packed else nn.Linear(8, 8)
    directory = path / "weights"
    directory.mkdir()
    write_weights(directory / "model.safetensors", dict(model.state_dict()))
    if packed:
        swapper.pack_weights(directory, path / "packed")
        directory = path / "packed"
    file = next(directory.glob("*.safetensors"))

    def load() -> Any:
        loaded = nn.Linear(model.in_features, model.out_features, dtype=model.weight.dtype)
        swapper.load_safetensors(loaded, directory)
        return dict(loaded.state_dict())

    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    return Case(file, load, checked_bytes=8 + header_bytes, named=str(directory))


CASES: dict[str, Callable[[Path], Case]] = {
    "save": lambda path: of_torch(path, swapper.save),
    "torch's": lambda path: of_torch(path, torch.save, weights_only=False),
    "FastWriter": lambda path: of_torch(path, fast_writer, map_location=lambda storage, _: storage),
    "dcp .metadata": lambda path: of_dcp(path, ".metadata"),
    "dcp .distcp": lambda path: of_dcp(path, "*.distcp"),
    "checkpoint index": lambda path: of_checkpoint(path, "index.json"),
    "checkpoint values": lambda path: of_checkpoint(path, "values.safetensors"),
    "checkpoint model": lambda path: of_checkpoint(path, "model-*.safetensors"),
    "checkpoint state": lambda path: of_checkpoint(path, "optimizer-*.safetensors"),
    "import": of_import,
    "weights": lambda path: of_weights(path, packed=False),
    "packed weights": lambda path: of_weights(path, packed=True),
}


def damages(data: bytes, checked_bytes: int, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Bits, lengths, sectors and pages: so that about half are of bits, most of those where there is no payload."""
    length = len(data)
    end = length if checked_bytes < 0 else checked_bytes
    for _ in range(DAMAGES // 2):
        at, bit = chance.randrange(end), chance.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for cut in {0, 1, 4, length - 1, *(chance.randrange(length) for _ in range(DAMAGES // 8))}:
        yield f"{cut} bytes are left", data[:cut]
    for more in (bytes(1), bytes(4096), b"x", data):
        yield f"{len(more)} bytes are appended", data + more
    for size in (512, 4096):
        starts = [start for start in range(0, length, size) if start < end]
        for start in chance.sample(starts, min(len(starts), DAMAGES // 16)):
            rest = data[start + size :]
            yield f"{size} bytes at {start} are zeros", data[:start] + bytes(min(size, length - start)) + rest
            other = chance.randrange(0, length, size)
            if size <= abs(other - start) and max(start, other) + size <= length:
                first, second = sorted((start, other))
                pieces = data[:first], data[second:][:size], data[first + size : second], data[first:][:size]
                yield f"{size} bytes at {start} and {other} changed places", b"".join((*pieces, data[second + size :]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(6)
def test_damage_is_an_error_that_names_the_file_or_of_no_consequence(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    data, saved = case.file.read_bytes(), bits(case.load())
    refused = 0
    for what, damaged in damages(data, case.checked_bytes, random.Random(zlib.crc32(name.encode()) + SEED)):
        if damaged == data:
            continue
        case.file.unlink()
        case.file.write_bytes(damaged)
        try:
            loaded = bits(case.load())
        except (SwapError, CheckpointException) as error:
            assert (case.named or case.file.name) in f"{error} {getattr(error, 'filename', '')}", what
            refused += 1
        else:
            assert loaded == saved, what
    assert refused >= DAMAGES // 8
    if case.older is not None:  # Beside what is of the newer one.
        case.file.write_bytes(case.older)
        with pytest.raises((SwapError, CheckpointException), match=str(case.file.parent)):
            case.load()
    case.file.write_bytes(data)
    assert bits(case.load()) == saved
