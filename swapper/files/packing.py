"""`swapper.pack_weights` and `unpack_weights`: a copy of a model's directory whose bf16 weights take fewer bytes.

[Note: what is packed] bf16 tensors of 64 KiB or more, of models that are not quantised, if they take less than 15/16 of
their bytes then. An embedding is left as it is: rows of it are read alone, which a part of many would not allow. One
that has no head of its own shape beside it is the head, too (tied), of which a token needs all; so it is packed.

A file is written from start to end, a part at a time, so memory is bounded by the longest part. How long the header
will be is known when all parts are: it has room before them for the longest that it could be, and ends in spaces, as
the format allows. What is a multiple of 64 long comes first, each at such a multiple, so that tensors that are read
together are one span.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from swapper.errors import SwapError, path_given, system_errors
from swapper.files.packed_tensors import (
    ENCODING,
    METADATA_KEY,
    PackedTensor,
    part_name,
    unpack_part,
)
from swapper.files.tensor_files import StoredTensor, TensorReader, parse_json, read_metadata, read_small
from swapper.files.weights import PACKED_INDEX, find_weights, newest_snapshot
from swapper.io.bf16_packing import pack_bf16, packed_bytes_most
from swapper.io.host_memory import bytes_of
from swapper.progress import progress_bar
from swapper.sizes import ALIGNMENT_BYTES, PAGE_BYTES, round_up
from swapper.storage.atomic import NewDirectory, remove_tree, sweep_directories, sync_path
from swapper.tensors.dtypes import DTYPES

__all__ = ["WeightSizes", "pack_weights", "unpack_weights"]

LEAST_BYTES = 64 << 10
"""Of a tensor that is packed, and of a part that an expert is: shorter ones are read once and stay."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PART_BYTES = 8 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ENDING = ".safetensors"
_PACKED_ENDING = ".packed.safetensors"
_WEIGHTS = re.compile(
    r".*(\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|npz)|\.index(\.\w+)?\.json)", re.IGNORECASE
)
"""Files that are not copied: the weights, and other forms of them."""

_EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class WeightSizes:
    """The result of `swapper.pack_weights` or `swapper.unpack_weights`.

    Attributes:
        path: of the directory that was made.
        from_bytes, to_bytes: of all tensors before and after.
        changed: number of tensors that were packed, or unpacked.
        left: number of the others.
    """

    path: Path
    from_bytes: int
    to_bytes: int
    changed: int
    left: int


def pack_weights(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> WeightSizes:
    """Make a copy of a model's directory whose bf16 weights take about 10.5 to 11 bits each, to the bit.

    `swapper.offload` with `weights=dst`, `swapper.from_pretrained(dst, ...)` and `swapper.load_safetensors` take it in
    the place of `src`, with the same bits; less is read. Other programs do not: transformers says that it has no
    weights. What would not shrink, other dtypes, small tensors, weights of a quantised model, and embeddings that are
    no head too, are copied as they are, and so are all other files (config, tokenizer), but for other forms of weights.
    A bar shows how far it is.

    Args:
        src: as `weights` of `swapper.offload`: a directory, an index, a file, or a model's entry in Hugging Face's
            cache.
        dst: a directory that does not exist; the one above it does. It appears when all of it is written and synced.

    Returns:
        The bytes before and after.

    Raises:
        SwapError: `dst` exists, or `src` is packed already, or is broken; the message names the file.
        SwapIOError: a file cannot be read, or written.
    """
    tensors = find_weights(src)
    for tensor in tensors:
        if isinstance(tensor, PackedTensor):
            raise SwapError(f"{src} has packed weights already ({tensor.name} in {tensor.path}); use it as it is")
    plain = [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]
    root = _root_of(src)
    chosen = set() if _is_quantised(root) else _chosen(plain)
    return _convert(root, plain, dst, chosen, packs=True)


def unpack_weights(src: str | os.PathLike[str], dst: str | os.PathLike[str]) -> WeightSizes:
    """Make a directory of plain safetensors files of one that `swapper.pack_weights` has made: the inverse.

    Args:
        src, dst: as for `pack_weights`.

    Returns:
        The bytes before and after.

    Raises:
        SwapError: `dst` exists, or `src` is not packed, or is broken.
        SwapIOError: a file cannot be read, or is damaged, or one cannot be written.
    """
    tensors = find_weights(src)
    if not any(METADATA_KEY in read_metadata(path) for path in dict.fromkeys(each.path for each in tensors)):
        raise SwapError(f"{src} has no packed weights; use it as it is")
    return _convert(_root_of(src), tensors, dst, set(), packs=False)


def _root_of(src: str | os.PathLike[str]) -> Path:
    path = newest_snapshot(Path(path_given("src", src)))
    return path if path.is_dir() else path.parent


def _is_quantised(root: Path) -> bool:
    config = root / "config.json"
    if not config.is_file():
        return False
    try:
        found = parse_json(read_small(config))
    except ValueError as error:
        raise SwapError(f"{config} is no valid JSON ({error}); copy or download it again") from error
    return "quantization_config" in json.dumps(found)


def _chosen(tensors: Sequence[StoredTensor]) -> set[StoredTensor]:
    """Return the tensors that are packed if they shrink. See [Note: what is packed]."""
    others = {tensor.shape for tensor in tensors if not _EMBEDDING.fullmatch(tensor.name)}
    taken = {tensor.name.rpartition(".packed.")[0] for tensor in tensors}  # Their parts would have names of others.
    return {
        tensor
        for tensor in tensors
        if tensor.dtype is torch.bfloat16
        and tensor.length_bytes >= LEAST_BYTES
        and tensor.name not in taken
        and not (_EMBEDDING.fullmatch(tensor.name) and len(tensor.shape) == 2 and tensor.shape in others)
    }


def _convert(
    root: Path,
    tensors: Sequence[StoredTensor | PackedTensor],
    dst: str | os.PathLike[str],
    chosen: set[StoredTensor],
    *,
    packs: bool,
) -> WeightSizes:
    """Write the new directory, with those in `chosen` packed if they shrink, and what was packed unpacked."""
    target = Path(os.path.abspath(path_given("dst", dst)))
    _check_free(target)
    sweep_directories(target.parent, lambda path: False)
    files: dict[Path, list[StoredTensor | PackedTensor]] = {}
    for tensor in tensors:
        files.setdefault(tensor.path, []).append(tensor)
    total_bytes = sum(tensor.length_bytes for tensor in tensors)
    changed = to_bytes = 0
    weight_map: dict[str, str] = {}
    bar = progress_bar("packing weights" if packs else "unpacking weights", total_bytes)
    with bar as done, closing(TensorReader(done)) as reader, NewDirectory(target) as new:
        written = _copy_others(root, new.path)
        for path, here in files.items():
            name = _renamed(path, root, packs=packs)
            made = new.path / name
            with system_errors("write", made):
                made.parent.mkdir(parents=True, exist_ok=True)
                with open(made, "xb") as file:
                    names, length_bytes, count = _write_file(file, path, here, chosen, reader)
            written.append(made)
            changed += count
            to_bytes += length_bytes
            weight_map |= dict.fromkeys(names, name)
        if packs or list(weight_map.values()).count(_SINGLE) < len(weight_map):
            index = new.path / (PACKED_INDEX if packs else _INDEX)
            with system_errors("write", index):
                index.write_text(json.dumps({"metadata": {"total_size": to_bytes}, "weight_map": weight_map}, indent=2))
            written.append(index)
        syncs = [partial(sync_path, each) for each in written]
        syncs += [partial(sync_path, each) for each in {each.parent for each in written}.difference({new.path})]
        replaced = new.publish(lambda: _check_free(target), syncs)
    if replaced is not None:  # Somebody has made it in the last microseconds.
        remove_tree(replaced)
    return WeightSizes(target, total_bytes, to_bytes, changed, len(tensors) - changed)


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise SwapError(f"{target} exists; name a directory that does not, or remove it")


def _renamed(path: Path, root: Path, *, packs: bool) -> str:
    """The name of a file in the new directory."""
    name = os.fspath(path.relative_to(root)) if path.is_relative_to(root) else path.name
    if packs:
        return name.removesuffix(_ENDING) + _PACKED_ENDING
    return name.removesuffix(_PACKED_ENDING).removesuffix(_ENDING) + _ENDING


def _copy_others(root: Path, to: Path) -> list[Path]:
    """Copy what is no weights, with links followed. Returns the copies.

    Raises:
        SwapIOError: a file cannot be read, or a link leads nowhere.
    """
    copies = []
    at = Path(os.path.realpath(root))
    seen = {os.fspath(each) for each in (at, *at.parents)}
    for directory, names, files in os.walk(root, followlinks=True):
        inside = {name: os.path.realpath(os.path.join(directory, name)) for name in names if not name.startswith(".")}
        names[:] = sorted(name for name, real in inside.items() if real not in seen)  # A link may lead back.
        seen.update(inside.values())
        for name in sorted(files):
            source = Path(directory, name)
            if name.startswith(".") or _WEIGHTS.fullmatch(name) or not (source.is_file() or source.is_symlink()):
                continue
            copy = to / source.relative_to(root)
            with system_errors("copy", source):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
            copies.append(copy)
    return copies


def _write_file(
    file: IO[bytes],
    source: Path,
    tensors: Sequence[StoredTensor | PackedTensor],
    chosen: set[StoredTensor],
    reader: TensorReader,
) -> tuple[list[str], int, int]:
    """Write the tensors of one file of weights to another.

    Returns:
        Names in it, bytes of its tensors, and how many were changed.
    """
    metadata = {key: text for key, text in read_metadata(source).items() if key != METADATA_KEY}
    metadata.setdefault("format", "pt")
    room = round_up(8 + _longest_header(metadata, tensors), PAGE_BYTES) - 8
    file.seek(8 + room)
    table: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
    changed = 0
    for tensor in sorted(tensors, key=_place_of):
        start = file.tell()
        if isinstance(tensor, StoredTensor) and tensor in chosen:
            rows = _rows_of_part(tensor)
            entries: dict[str, Any] = {}
            for i, first in enumerate(range(0, tensor.shape[0], rows)):
                values = reader.read(tensor.rows(first, min(first + rows, tensor.shape[0])))
                most = packed_bytes_most(values.numel())
                scratch = scratch if scratch.numel() >= most else torch.empty(most, dtype=torch.uint8, device="cpu")
                length = pack_bf16(values, scratch)
                entries[part_name(tensor.name, i)] = _entry("U8", [length], file.tell() - 8 - room)
                file.write(bytes_of(scratch[:length]))
            if file.tell() - start < tensor.length_bytes * 15 // 16:
                table |= entries
                packed[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "rows": rows}
                changed += 1
                continue
            file.seek(start)
            file.truncate()
        changed += isinstance(tensor, PackedTensor)
        table[tensor.name] = _entry(_NAMES[tensor.dtype], list(tensor.shape), start - 8 - room)
        for values in _pieces_of(tensor, reader):
            file.write(bytes_of(values.reshape(-1)))
    length_bytes = file.tell() - 8 - room
    if packed:
        metadata[METADATA_KEY] = json.dumps({"encoding": ENCODING, "tensors": packed})
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    assert len(header) <= room
    file.seek(0)
    file.write(room.to_bytes(8, "little") + header.ljust(room))
    return list(table), length_bytes, changed


def _entry(dtype: str, shape: list[int], start: int) -> dict[str, Any]:
    length = DTYPES[dtype].itemsize * torch.Size(shape).numel()
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + length]}


def _longest_header(metadata: Mapping[str, str], tensors: Sequence[StoredTensor | PackedTensor]) -> int:
    """The most bytes that the header can take, whatever is packed, wherever it lies."""
    far = 10**17
    table: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for tensor in tensors:
        shape = list(tensor.shape)
        table[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [far, far]}
        if isinstance(tensor, StoredTensor) and tensor.dtype is torch.bfloat16 and tensor.length_bytes >= LEAST_BYTES:
            rows = _rows_of_part(tensor)
            packed[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "rows": rows}
            for i in range(-(-tensor.shape[0] // rows)):
                table[part_name(tensor.name, i)] = {"dtype": "U8", "shape": [far], "data_offsets": [far, far]}
    said = {**metadata, METADATA_KEY: json.dumps({"encoding": ENCODING, "tensors": packed})}
    return len(json.dumps({"__metadata__": said, **table}).encode())


def _rows_of_part(tensor: StoredTensor) -> int:
    """Rows of the first dimension in each part. See [Note: packed tensors]."""
    row_bytes = tensor.length_bytes // tensor.shape[0]
    if len(tensor.shape) > 2 and row_bytes >= LEAST_BYTES:
        return 1
    return min(max(_PART_BYTES // row_bytes, 1), tensor.shape[0])


def _pieces_of(tensor: StoredTensor | PackedTensor, reader: TensorReader) -> Iterator[torch.Tensor]:
    """All values of a tensor, some at a time."""
    if isinstance(tensor, StoredTensor):
        for start in range(tensor.start_bytes, tensor.stop_bytes, _PART_BYTES):
            stop = min(start + _PART_BYTES, tensor.stop_bytes)
            shape = torch.Size((stop - start,))
            yield reader.read(replace(tensor, dtype=torch.uint8, shape=shape, start_bytes=start, stop_bytes=stop))
        return
    for i, part in enumerate(tensor.parts):
        rows = min(tensor.rows, tensor.shape[0] - i * tensor.rows)
        values = torch.empty((rows, *tensor.shape[1:]), dtype=torch.bfloat16, device="cpu")
        unpack_part(part, reader.read(part), values)
        yield values


def _place_of(tensor: StoredTensor | PackedTensor) -> tuple[bool, int]:
    """The key of the order in a new file: see [Note: what is packed]."""
    start_bytes = tensor.start_bytes if isinstance(tensor, StoredTensor) else tensor.parts[0].start_bytes
    return tensor.shape.numel() * tensor.dtype.itemsize % ALIGNMENT_BYTES != 0, start_bytes
