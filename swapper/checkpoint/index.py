"""The entries of a checkpoint's `index.json`: everything but the bytes of tensors. See `Index`."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import re
import stat
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from swapper.io.checksums import checksum

__all__ = [
    "INDEX",
    "START",
    "Index",
    "SavedAnnex",
    "SavedBucket",
    "SavedFile",
    "SavedHole",
    "SavedModel",
    "SavedOptimizer",
    "SavedParameter",
    "SavedSegment",
    "SavedShards",
    "SavedTensor",
    "SavedWhole",
    "crc32c_of",
    "glance",
    "look_at",
    "made_by",
    "open_index",
    "read_index",
    "values_file",
    "with_checksum",
]

INDEX = "index.json"
VALUES = "values.safetensors"
START = b'{"crc32c":"00000000",'
_OF_RANK = re.compile("(r[0-9]+)/")
_INDEX_BYTES_MAX = 1 << 30
_GLANCES_MAX = 4


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Crc = Annotated[int, Field(ge=0, lt=1 << 32)]


class SavedFile(_Entry):
    """A file of the directory: its length, and the CRC-32C of all its bytes. `annex`: the number of that it is in."""

    length_bytes: Count
    crc32c: Crc
    annex: Count | None = None


class SavedAnnex(_Entry):
    """A directory of the checkpoint's files that is elsewhere: on which host, and at which path there.

    `token` is in the directory too, so that another one at the path is told. See [Note: annexes] of `annexes`.
    """

    host: str
    path: str
    token: str


class SavedTensor(_Entry):
    """A tensor of the model, under its name in a file.

    `dtype` is torch's name of it, `shape` the model's; the file has complex numbers as pairs, and what safetensors does
    not know as bytes. `crc32c` is that of its bytes in the file.
    """

    file: str
    dtype: str
    shape: list[Count]
    crc32c: Crc


class SavedShards(_Entry):
    """A tensor of the model of which ranks had parts: its shape, and the offsets of each by its name in `tensors`."""

    shape: list[Count]
    parts: dict[str, list[Count]]


class SavedModel(_Entry):
    """The model's state dict: tensors, names that are one tensor with another, and encoded values that are none.

    `sharded` has those that are in parts. `own` has, by name and rank, where a rank has another tensor than rank 0, and
    `own_values` the encoded values that it has otherwise. `copies` are where tensors are too, on other hosts.
    `metadata` is what torch keeps beside a state dict: the versions of modules; encoded, or None.
    """

    tensors: dict[str, SavedTensor]
    tied: dict[str, str]
    values: dict[str, Any]
    sharded: dict[str, SavedShards] = {}
    own: dict[str, dict[str, str]] = {}
    own_values: dict[str, dict[str, Any]] = {}
    copies: dict[str, list[SavedTensor]] = {}
    metadata: Any = None

    def wholes(self) -> dict[str, tuple[str, list[int]]]:
        """The dtype and shape of each tensor as the model has it, by name."""
        others = {part for shards in self.sharded.values() for part in shards.parts}
        others.update(own for each in self.own.values() for own in each.values())
        found = {name: (saved.dtype, saved.shape) for name, saved in self.tensors.items() if name not in others}
        for name, shards in self.sharded.items():
            first = self.tensors.get(next(iter(shards.parts), ""))
            found[name] = ("" if first is None else first.dtype, shards.shape)
        return found


class SavedSegment(_Entry):
    """A slice of a parameter whose state is in one file.

    `parameter` is its position among those of the optimizer, `start` and `stop` count its elements in the order of
    memory; `whole`: its tensors have their own shapes, else they are slices. Its tensors are "{number}.{key}" in the
    file, for each key in `present`. `strides` are those of tensors that do not lie in the order of their indices.
    `master`, `parameter_crc32c` (of the parameter's bits that the master goes with) and `tie_bits`: see [Note: split
    masters] of `master_codec`. `small` is encoded state that is a slice and small. `encodings` are those of the
    parameter, if the rank that has written this has others; else None.
    """

    parameter: Count
    start: Count
    stop: Count
    whole: bool
    master: Literal["", "split", "stored"] = ""
    present: list[str] = []
    strides: dict[str, list[Count]] = {}
    parameter_crc32c: Crc | None = None
    tie_bits: Count = 0
    small: Any = None
    encodings: dict[str, Literal["bf16", "int8", "packed"]] | None = None

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return self.stop - self.start


class SavedHole(_Entry):
    """A segment of a parameter that the optimizer did not have any more. Its tensors in the file belong to nobody.

    `tie_bits` are those of its master, which come before those of the segments behind it.
    """

    hole: Literal[True]
    tie_bits: Count = 0


class SavedBucket(_Entry):
    """Segments whose state is in one file; `file` is None if all of it is in the index."""

    file: str | None
    segments: list[SavedSegment | SavedHole]


class SavedParameter(_Entry):
    """A parameter of an optimizer: its name in the model ("" if the model does not have it), and how it lies in memory.

    Of a checkpoint that was made of other files not all is known: where `dtype` is "", `name` may be "" for a parameter
    that the model has, and where `shape` is None, it has no state.
    `keys` are those of its state, in order; empty if it has none. `dtypes` has torch's names for those of them that are
    in files, `encodings` how those of them are stored that are not as the class has them, `small` is the encoded state
    that never moves. Of a part of a parameter `offsets` say where it begins. A key in int8 has scales beside it, by
    `scales_name`, and one that is packed a table, by `blocks_name`.
    """

    name: str
    shape: list[Count] | None
    stride: list[Count]
    dtype: str
    keys: list[str]
    dtypes: dict[str, str]
    small: Any
    offsets: list[Count] = []
    encodings: dict[str, Literal["bf16", "int8", "packed"]] = {}


class SavedWhole(_Entry):
    """A parameter of an optimizer of which ranks had parts.

    `parts` are their positions. Tensors of the state by the names in `split` are in parts too; of others each part has
    all.
    """

    name: str
    shape: list[Count] | None
    stride: list[Count]
    dtype: str
    parts: list[Count]
    split: list[str]


class SavedOptimizer(_Entry):
    """An optimizer: its class, the encoded options of its groups, the positions of each group's parameters, its state.

    If ranks had parts of its parameters `sharded` has those that the groups refer to, and `parameters` are their parts.
    `encoding` names what state may be stored in, and `encoded_steps` counts the steps that its random bits have come
    to: see [Note: encoded state] of `encodings`. `rest` is what its class, or a hook, adds to its `state_dict()`.
    """

    kind: str
    encoding: Literal[
        "exact", "bf16", "int8", "packed", "bf16, int8", "bf16, packed", "int8, packed", "bf16, int8, packed"
    ]
    options: Any
    groups: list[list[Count]]
    parameters: list[SavedParameter]
    buckets: list[SavedBucket]
    sharded: list[SavedWhole] = []
    encoded_steps: Count = 0
    rest: Any = None

    def wholes(self) -> list[SavedWhole]:
        """The parameters that the groups refer to. Where none is in parts, `split` does not say anything."""
        return self.sharded or [
            SavedWhole(name=p.name, shape=p.shape, stride=p.stride, dtype=p.dtype, parts=[position], split=[])
            for position, p in enumerate(self.parameters)
        ]


class Index(_Entry):
    """All of a checkpoint but its bytes. `crc32c` is that of the text behind it, in hexadecimal.

    `run` is the training that it belongs to, through all its restarts; `sequence` counts its checkpoints; `step` the
    optimizer's steps (None if it does not count them); `saved_at` is a UTC time. `ranks` is how many processes have
    saved it together (0: one, that had whole tensors), `own_extra` the `extra` of each rank that is not that of rank 0.
    `annexes` are those of the ranks, by number, if it has any.
    """

    crc32c: str
    format: Literal["swapper checkpoint"]
    version: Literal[1]
    swapper: str
    torch: str
    saved_at: str
    run: str
    sequence: Count
    step: Count | None
    files: dict[str, SavedFile]
    model: SavedModel
    optimizers: list[SavedOptimizer]
    extra: Any
    ranks: Count = 0
    own_extra: dict[str, Any] = {}
    annexes: list[SavedAnnex] = []

    def text(self) -> bytes:
        """The content of `index.json`. Not what pydantic writes: its serializer allows values of less depth."""
        fields = self.model_dump(exclude={"crc32c", "extra", "own_extra"}, exclude_defaults=True)
        fields |= {"own_extra": self.own_extra} if self.own_extra else {}
        text = json.dumps({**fields, "extra": self.extra}, separators=(",", ":"), allow_nan=False)
        return with_checksum(text.encode())


def made_by() -> dict[str, Any]:
    """The fields of a new `Index` that tell when and by what it was written, and those that its writer fills in."""
    return {
        "crc32c": "",
        "format": "swapper checkpoint",
        "version": 1,
        "swapper": _version(),
        "torch": str(torch.__version__),
        "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "files": {},
    }


@functools.cache
def _version() -> str:
    """Swapper's, read once: from then on the package may be gone or be another one."""
    try:
        return importlib.metadata.version("tensor-swapper")
    except (importlib.metadata.PackageNotFoundError, OSError):  # Used from a source tree.
        return "unknown"


def with_checksum(index: bytes) -> bytes:
    """An index, a JSON object with fields, with a first field that tells whether the others are as they were."""
    rest = index[1:]
    return b'{"crc32c":"%08x",' % crc32c_of(rest) + rest


def crc32c_of(data: bytes | bytearray) -> int:
    """The CRC-32C of some bytes."""
    return checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def values_file(name: str) -> str:
    """The file of small tensors that has the one of this name. Those of rank 1 begin with "r1/"."""
    rank = _OF_RANK.match(name)
    return f"values-{rank[1]}.safetensors" if rank else VALUES


def read_index(file: IO[bytes]) -> bytes:
    """The content of an index. Nothing that cannot be one is read in whole, or waited for.

    Raises:
        ValueError: it is none.
    """
    status = os.fstat(file.fileno())
    start = file.read(len(START)) if stat.S_ISREG(status.st_mode) else b""
    if start[:11] != START[:11] or status.st_size > _INDEX_BYTES_MAX:
        raise ValueError("it does not begin as one does")
    return start + file.read(status.st_size)


def open_index(path: Path) -> IO[bytes]:
    """Open it, without waiting for the writer of a pipe."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


class Glance(BaseModel):
    """The part of an index that says whose a checkpoint is."""

    format: Literal["swapper checkpoint"]
    run: str
    sequence: int
    annexes: list[SavedAnnex] = []


class Look(Glance):
    """A `Glance`, and the files by their names."""

    files: dict[str, Any]

    def files_in(self, annex: int | None) -> frozenset[str]:
        """The names of the files that are in an annex; None: in the checkpoint itself."""
        return frozenset(name for name, file in self.files.items() if _annex_of(file) == annex)


def _annex_of(file: Any) -> Any:
    return file.get("annex") if isinstance(file, dict) else None


_glances: dict[tuple[int, int, int, int], Glance] = {}
"""By device, inode, time and length of the index, which is never changed."""


def glance(directory: Path, among: int = 0) -> Glance | None:
    """Return the run and sequence number of the checkpoint `directory`; None if it is none, or cannot be read.

    Args:
        among: of so many that are looked at again and again, as those beside a checkpoint at each save.
    """
    try:
        found = _look_at(directory, _glances if among else {})
    except OSError:
        return None
    while len(_glances) > _GLANCES_MAX + 2 * among > _GLANCES_MAX:
        del _glances[next(iter(_glances))]
    return found


def look_at(directory: Path) -> Look | None:
    """As `glance`, with the files, but raises OSError if it cannot be read."""
    found = _look_at(directory, {})
    assert found is None or isinstance(found, Look)
    return found


def _look_at(directory: Path, known: dict[tuple[int, int, int, int], Glance]) -> Glance | None:
    try:
        with open_index(directory / INDEX) as file:
            status = os.fstat(file.fileno())
            key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            if key in known:
                return known[key]
            look = Look.model_validate_json(read_index(file))
        known[key] = Glance.model_construct(**{name: getattr(look, name) for name in Glance.model_fields})
        return look
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
