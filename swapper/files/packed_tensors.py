"""Tensors of safetensors files that are packed, by `swapper.pack_weights`: which they are, and how they are made.

[Note: packed tensors] A bf16 tensor is cut into parts of some rows of its first dimension, so that each can be packed
and unpacked by itself: a part has at most 8 MiB, or one row, and of experts that are fused (3-D) it is one. In the
file each part is a U8 tensor, `NAME.packed.0` and so on, whose bytes are as `csrc/bf16_packing.h` has them; so any
reader of safetensors can read the file, though it will not find the name. The file's metadata have under
`swapper.packed` a JSON table of the tensors: dtype, shape, and rows of a part.

For whoever loads a model a packed tensor is a `Step`, as one that is cast or dequantised: the operator is `Unpacking`.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swapper.errors import SwapError, SwapIOError, show
from swapper.files.tensor_files import StoredTensor, parse_json, read_header, read_metadata
from swapper.files.unread import InPlaceOperator, Recipe, Step
from swapper.io.bf16_packing import packed_bytes_most, unpack_bf16

__all__ = [
    "ENCODING",
    "METADATA_KEY",
    "PackedTensor",
    "Unpacking",
    "names_in_file",
    "part_name",
    "read_tensors",
    "recipe_of",
    "unpack_part",
]

METADATA_KEY = "swapper.packed"
ENCODING = "bf16-planes-1"
"""In the metadata; another number is another format."""


@dataclass(frozen=True)
class PackedTensor:
    """A bf16 tensor that a file has packed. As a `StoredTensor` it has path, name, dtype and shape.

    Attributes:
        path, name, dtype, shape: of the tensor as it was.
        rows: of its first dimension in each part; the last may have less.
        parts: in order; uint8.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: torch.Size
    rows: int
    parts: tuple[StoredTensor, ...]

    @property
    def length_bytes(self) -> int:
        """Bytes of its parts in the file."""
        return sum(part.length_bytes for part in self.parts)


@dataclass(frozen=True, eq=False)
class Unpacking(InPlaceOperator):
    """The operator that makes a tensor of its parts.

    Attributes:
        shape: of the tensor.
        rows: in each part, as of a `PackedTensor`.
        parts: what is unpacked, for errors.
    """

    shape: torch.Size
    rows: int
    parts: tuple[StoredTensor, ...]

    def __call__(self, *packed: torch.Tensor) -> torch.Tensor:
        """Make the tensor."""
        made = torch.empty(self.shape, dtype=torch.bfloat16, device="cpu")
        self.write(made, packed)
        return made

    def write(self, into: torch.Tensor, packed: Sequence[torch.Tensor]) -> None:
        """Write the tensor to `into`, of its shape, of which strides and dtype may be others."""
        for part, given, place in zip(self.parts, packed, torch.split(into, self.rows), strict=True):
            if place.is_contiguous() and place.dtype is torch.bfloat16:
                unpack_part(part, given, place)
            else:
                plain = torch.empty(place.shape, dtype=torch.bfloat16, device="cpu")
                unpack_part(part, given, plain)
                place.copy_(plain)

    def of_rows(self, start: int, stop: int) -> Unpacking:
        """The operator of some rows, of parts that have one each."""
        assert self.rows == 1
        return Unpacking(torch.Size((stop - start, *self.shape[1:])), 1, self.parts[start:stop])


def unpack_part(part: StoredTensor, packed: torch.Tensor, into: torch.Tensor) -> None:
    """Unpack what was read of `part` into contiguous bf16 memory, which may have it: see `unpack_bf16`.

    Raises:
        SwapIOError: it is damaged (EBADMSG); nothing was written.
    """
    try:
        unpack_bf16(packed, into)
    except ValueError as error:
        detail = f"{part.name} cannot be unpacked: {error}; copy the file again, or pack the model again"
        raise SwapIOError(errno.EBADMSG, "read", part.path, part.start_bytes, part.length_bytes, detail) from error


def recipe_of(tensor: StoredTensor | PackedTensor) -> Recipe:
    """Return the recipe by which a tensor of a file is made of bytes of the file."""
    if isinstance(tensor, StoredTensor):
        return tensor
    operator = Unpacking(tensor.shape, tensor.rows, tensor.parts)
    return Step(operator, tensor.parts, {}, tensor.shape, tensor.dtype)


def part_name(name: str, index: int) -> str:
    """The name in the file of a part of a tensor."""
    return f"{name}.packed.{index}"


def names_in_file(tensor: StoredTensor | PackedTensor) -> list[str]:
    """The names that a tensor, or its parts, have in the file."""
    return [tensor.name] if isinstance(tensor, StoredTensor) else [part.name for part in tensor.parts]


def read_tensors(path: Path) -> list[StoredTensor | PackedTensor]:
    """The tensors of a safetensors file, those that are packed under the names that they had.

    Raises:
        SwapError, SwapIOError: as `read_header`; or what the file says of packed tensors does not fit what it has.
    """
    header = read_header(path)
    metadata = read_metadata(path)
    if METADATA_KEY not in metadata:
        return list(header)
    try:
        table = parse_json(metadata[METADATA_KEY].encode())
    except ValueError as error:
        raise _wrong(path, f"its table is no valid JSON ({error})") from error
    match table:
        case {"encoding": str(encoding), "tensors": dict(tensors)}:
            pass
        case _:
            raise _wrong(path, "its table has no encoding and tensors")
    if encoding != ENCODING:
        raise SwapError(
            f"{path} has tensors packed as {show(encoding)}, and this version of swapper knows {ENCODING}; use a newer "
            "one, or pack the model with this one"
        )
    by_name = {tensor.name: tensor for tensor in header}
    packed = {name: _packed(path, name, entry, by_name) for name, entry in tensors.items()}
    owner = {part.name: tensor for tensor in packed.values() for part in tensor.parts}
    found: dict[str, StoredTensor | PackedTensor] = {}
    for stored in header:  # In the order of the file.
        tensor = owner.get(stored.name, stored)
        if found.setdefault(tensor.name, tensor) is not tensor:
            raise _wrong(path, f"tensor {show(tensor.name)} is there packed and as it is")
    return list(found.values())


def _packed(path: Path, name: str, entry: Any, header: dict[str, StoredTensor]) -> PackedTensor:
    match entry:
        case {"dtype": "BF16", "shape": [*sizes], "rows": int(rows)} if (
            0 < len(sizes) <= 64
            and type(rows) is int
            and rows > 0
            and all(type(size) is int and 0 < size < 1 << 40 for size in sizes)
        ):
            shape = torch.Size(sizes)
        case _:
            raise _wrong(path, f"what it says of {show(name)} is not dtype, shape and rows")
    parts: list[StoredTensor] = []
    for index in range(-(-shape[0] // rows)):
        part = header.get(part_name(name, index))
        if part is None:
            raise _wrong(path, f"{show(name)} has no part {index}")
        numel = math.prod(sizes[1:]) * min(rows, sizes[0] - index * rows)
        # A value takes a byte at least.
        fits = numel <= part.length_bytes and part.length_bytes <= packed_bytes_most(numel)
        if part.dtype is not torch.uint8 or not fits:
            raise _wrong(path, f"{show(part.name)} is no part of a tensor of shape {show(list(shape))}")
        parts.append(part)
    return PackedTensor(path, name, torch.bfloat16, shape, rows, tuple(parts))


def _wrong(path: Path, why: str) -> SwapError:
    return SwapError(f"{path} is no file of packed weights, though it says so: {why}; copy it again, or pack it again")
