"""Checkpoints to ordinary files for plain PyTorch, and back: streamed, so that no tensor need fit into memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from swapper.checkpoint.directories import MARK, remove_leftovers, remove_tree, sync_path
from swapper.checkpoint.plain_import import Imported, import_checkpoint
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.streams import StreamedState, TensorStream, contiguous_stride, model_stream
from swapper.checkpoint.values import decode, encode
from swapper.errors import SwapError, SwapIOError
from swapper.files import archive
from swapper.files.archive import Record
from swapper.files.dcp import SwapStorageWriter
from swapper.files.fastsave import Prepared
from swapper.files.whole_file import OutputFile
from swapper.io.handle import exchange
from swapper.optimizer.segments import MASTER
from swapper.progress import progress_bar
from swapper.sizes import SMALL_BYTES
from swapper.tensors.dtypes import DTYPES
from swapper.tensors.tensor_refs import OPTIMIZER_STATES, is_lightnings, resolve, without_model

__all__ = ["Exported", "Format", "Imported", "export_checkpoint", "import_checkpoint"]

Format = Literal["torch", "safetensors", "dcp", "lightning"]

SHARD_BYTES = 5_000_000_000
"""A model of more is written as several safetensors files, of at most this much if no tensor is longer."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?|optimizer(-\d+)?|extra)\.(safetensors|json)|model\.safetensors\.index\.json|config\.json"
    r"|\.metadata|__\d+_\d+\.distcp"
)
"""Files that exports have."""


@dataclass(frozen=True)
class Exported:
    """What `export_checkpoint` has written.

    Attributes:
        path: of the file or directory.
        length_bytes: of all its files.
        notes: what whoever loads it should know, each a sentence.
    """

    path: Path
    length_bytes: int
    notes: list[str] = field(default_factory=list)


def export_checkpoint(
    directory: str | os.PathLike[str],
    to: Format,
    out: str | os.PathLike[str],
    *,
    model_only: bool = False,
    drop_masters: bool = False,
    force: bool = False,
) -> Exported:
    """Write a checkpoint as ordinary files, which plain PyTorch reads. Holds a piece of a tensor, and small ones.

    - "torch": one file for `torch.load(out)`, with `model`, `optimizer` (a list if there are several) and `extra`. The
      state dicts are what `load_state_dict` of the model and of the optimizer's class take.
    - "lightning": one file as Lightning's stock strategies write it, of a checkpoint that `SwapStrategy` has made.
    - "safetensors": a directory with `model.safetensors`, or several and an index; `optimizer.safetensors`, whose
      names are those of parameter and state ("0.weight.exp_avg"), with `optimizer.json` for the rest of the state and
      the options; `extra.json` and `extra.safetensors`. With several optimizers `optimizer-0`, `optimizer-1`, ...
    - "dcp": a directory for `torch.distributed.checkpoint.load`, with `model` and `optimizer` as `get_state_dict` gives
      them, by the names of parameters, and `extra`.

    Every file is compared with its checksums on the way. What is written appears under its name when it is complete and
    synced. Tensors within `extra` are held in memory.

    Args:
        directory: the checkpoint.
        to: the format.
        out: the file or directory.
        model_only: leave out optimizers and `extra`.
        drop_masters: leave out master weights, which plain classes do not use; else they are `master_param` in the
            state.
        force: replace `out`: a file, or a directory with nothing but files that an export has.

    Raises:
        SwapError: something exists at `out`; the checkpoint is damaged; or something cannot be had in this format.
        SwapIOError: a file cannot be read, or the drive is full.
    """
    if to not in get_args(Format):
        raise SwapError(f"to: {to!r} is none of {', '.join(get_args(Format))}")
    target = Path(os.path.abspath(out))
    _check_free(target, Path(os.path.abspath(directory)), to, force)
    remove_leftovers(target.parent)
    with Checkpoint(directory) as checkpoint, contextlib.ExitStack() as stack:
        job = _Job(checkpoint, model_only, drop_masters)
        job.done = stack.enter_context(progress_bar("exporting", job.length_bytes()))
        if to in _FILES:
            _FILES[to](job, target)
        else:
            fill = _to_safetensors if to == "safetensors" else _to_dcp
            with _new_directory(target) as path:
                fill(job, path)
    files = [target] if to in _FILES else list(target.iterdir())
    notes = list(job.notes)
    if to in _FILES and (needs := torch.serialization.get_unsafe_globals_in_checkpoint(target)):
        notes.append(
            f"torch.load needs weights_only=False, or torch.serialization.add_safe_globals, for what extra has: "
            f"{', '.join(sorted(needs))}"
        )
    return Exported(target, sum(path.stat().st_size for path in files), notes)


def _check_free(target: Path, directory: Path, to: Format, force: bool) -> None:
    if target == directory or directory in target.parents:
        raise SwapError(f"{target} is in the checkpoint itself; export to another place")
    if not os.path.lexists(target):
        if not target.parent.is_dir():
            raise SwapIOError(errno.ENOENT, "create", target, detail=f"there is no directory {target.parent}")
        return
    is_directory = target.is_dir() and not target.is_symlink()
    if is_directory and to not in _FILES:
        names = os.listdir(target)
        if names and not force:
            raise SwapError(f"{target} exists and is not empty; give another name, or replace it by force (--force)")
        if others := sorted(name for name in names if not _OURS.fullmatch(name)):
            raise SwapError(
                f"{target} has files that no export has, which would be lost: {', '.join(others[:5])}; give another "
                "name"
            )
    elif to not in _FILES:
        raise SwapError(f"{target} exists and is no directory; give another name")
    elif is_directory:
        raise SwapError(f"{target} is a directory; give the name of a file")
    elif not force:
        raise SwapError(f"{target} exists; give another name, or replace it by force (--force)")


@contextlib.contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory that gets the name `target` at the end of the block; by an exception nothing is left of it.

    As a checkpoint that is being written: locked, so that what is left of a killed process is removed later.
    """
    path = target.parent / f".{target.name}.tmp-{secrets.token_hex(6)}"
    with contextlib.ExitStack() as stack:
        stack.callback(remove_tree, path)
        try:
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            (path / MARK).touch()
            yield path
            (path / MARK).unlink()
            sync_path(path)
            if target.exists():
                exchange(path, target)  # What was there is removed under the other name.
                (path / MARK).touch()
            else:
                os.rename(path, target)
            sync_path(target.parent)
        except SwapError:
            raise
        except OSError as error:
            raise SwapIOError(error.errno or errno.EIO, "write", target) from error


class _Job:
    """What is exported.

    Attributes:
        done: called with the bytes of each piece.
        notes: what whoever loads it should know.
    """

    def __init__(self, checkpoint: Checkpoint, model_only: bool, drop_masters: bool) -> None:
        self.checkpoint = checkpoint
        self.index = checkpoint.index
        self.model_only = model_only
        self.drop_masters = drop_masters
        self.done: Callable[[int], object] = lambda _: None
        self.notes: list[str] = []
        self.states = [] if model_only else [StreamedState(checkpoint, n) for n in range(len(self.index.optimizers))]

    def length_bytes(self) -> int:
        """About how much will be written."""
        total = sum(model_stream(self.checkpoint, name).length_bytes for name in self.index.model.tensors)
        for number in range(len(self.states)):
            for place in range(len(self.index.optimizers[number].parameters)):
                values = self.state_of(number, place).values()
                total += sum(value.length_bytes for value in values if isinstance(value, TensorStream))
        return total

    def model_values(self) -> dict[str, Any]:
        """What of the model's state dict is no tensor."""
        values = self.index.model.values.items()
        return {
            name: decode(value, f"the state dict's {name!r}", self.checkpoint.small_tensor) for name, value in values
        }

    def state_of(self, number: int, place: int) -> dict[str, Any]:
        """The state of a parameter; `TensorStream`s and small values."""
        state = self.states[number]
        found = state.tensors(place)
        if self.drop_masters and state.has_masters:
            found.pop(MASTER, None)
        return found

    def options(self, number: int) -> list[dict[str, Any]]:
        """The groups of an optimizer, without their parameters."""
        saved = self.index.optimizers[number].options
        options: list[dict[str, Any]] = decode(saved, f"optimizer {number}, options", self.checkpoint.small_tensor)
        return options

    def extra(self, *names: str) -> Any:
        """What the user added; of what Lightning did only `names`, if there are any."""
        data = self.index.extra
        if names and is_lightnings(data):
            data = {name: data[name] for name in names if name in data}
        return decode(data, "extra", self.checkpoint.small_tensor)

    def pieces(self, stream: TensorStream) -> Iterator[torch.Tensor]:
        """Those of `stream`, counted."""
        for piece in stream.pieces():
            yield piece
            self.done(piece.numel())


# --- torch.save and torch.distributed.checkpoint ---------------------------------------------------------------------


class _Hollow:
    """Tensors that look as they will, but whose memory is never touched: the bytes are streamed when they are written.

    Attributes:
        streams: of each, by its address.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        self.streams: dict[int, TensorStream] = {}

    def tensor(self, stream: TensorStream) -> torch.Tensor:
        """A tensor that stands for `stream`; if it is small, the tensor itself."""
        if stream.length_bytes < SMALL_BYTES:
            flat = torch.empty(stream.numel, dtype=stream.dtype)
            data = [*self._job.pieces(stream)]
            if data:
                flat.view(torch.uint8).copy_(torch.cat(data))
        else:
            # Read-only: nothing of it is there, and no system counts it as memory that may be needed.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, stream.length_bytes, flags=flags, prot=mmap.PROT_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                flat = torch.frombuffer(memory, dtype=torch.uint8).view(stream.dtype)
            self.streams[flat.data_ptr()] = stream
        return flat.as_strided(stream.shape, stream.stride)

    def model(self) -> OrderedDict[str, Any]:
        """The model's state dict."""
        saved = self._job.index.model
        state: OrderedDict[str, Any] = OrderedDict()
        for name in saved.tensors:
            state[name] = self.tensor(model_stream(self._job.checkpoint, name))
        state.update({name: state[first] for name, first in saved.tied.items()})
        state.update(self._job.model_values())
        return state

    def state_of(self, number: int, place: int) -> dict[str, Any]:
        """The state of a parameter."""
        return {
            key: self.tensor(value) if isinstance(value, TensorStream) else value
            for key, value in self._job.state_of(number, place).items()
        }

    def optimizer(self, number: int) -> dict[str, Any]:
        """An optimizer's state dict, as its class has it."""
        saved = self._job.index.optimizers[number]
        found = {place: self.state_of(number, place) for place in range(len(saved.parameters))}
        groups = zip(self._job.options(number), saved.groups, strict=True)
        return {
            "state": {place: state for place, state in found.items() if state},
            "param_groups": [{**options, "params": places} for options, places in groups],
        }

    def optimizers_by_name(self) -> dict[str, Any]:
        """One state dict of all optimizers, as `torch.distributed.checkpoint.state_dict.get_state_dict` gives it."""
        state: dict[str, Any] = {}
        groups = []
        for number, saved in enumerate(self._job.index.optimizers):
            names = [parameter.name for parameter in saved.parameters]
            if "" in names or len({*names, *state}) < len(names) + len(state):
                raise SwapError(
                    f"optimizer {number} has parameters without a name of their own in the model, and "
                    "torch.distributed.checkpoint keeps state by names; export to torch, or the model alone"
                )
            found = {name: self.state_of(number, place) for place, name in enumerate(names)}
            state |= {name: each for name, each in found.items() if each}
            for options, places in zip(self._job.options(number), saved.groups, strict=True):
                groups.append({**options, "params": [names[place] for place in places]})
        return {"state": state, "param_groups": groups}


class _Streamed(Prepared):
    """As `torch.save` writes it, with the bytes of hollow tensors streamed."""

    def __init__(self, obj: object, job: _Job, streams: Mapping[int, TensorStream]) -> None:
        super().__init__(obj)
        self._job = job
        self._streams = streams

    def _write_record(self, output: OutputFile, record: Record, header: bytes, content: Any) -> int:
        stream = None
        if isinstance(content, torch.UntypedStorage) and content.nbytes():
            stream = self._streams.get(content.data_ptr())
        if stream is None:
            return super()._write_record(output, record, header, content)
        output.append(header)
        crc = 0
        for piece in self._job.pieces(stream):
            crc = output.append(piece, crc)
        output.append(archive.descriptor(record, crc))
        return crc


def _to_torch(job: _Job, target: Path) -> None:
    hollow = _Hollow(job)
    whole: dict[str, Any] = {"model": hollow.model()}
    if not job.model_only:
        optimizers = [hollow.optimizer(number) for number in range(len(job.states))]
        if optimizers:
            whole["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        extra = job.extra()
        whole["extra"] = resolve(extra, whole["model"]) if is_lightnings(extra) else extra
    _write_file(whole, job, hollow, target)


def _to_lightning(job: _Job, target: Path) -> None:
    extra = job.extra(*(("state_dict", "pytorch-lightning_version") if job.model_only else ()))
    if not is_lightnings(extra):
        raise SwapError(f"{job.checkpoint.directory} was not saved by Lightning; export it to torch")
    hollow = _Hollow(job)
    whole = resolve(extra, hollow.model())
    if job.states:
        whole[OPTIMIZER_STATES] = [hollow.optimizer(number) for number in range(len(job.states))]
    _write_file(whole, job, hollow, target)


def _write_file(whole: object, job: _Job, hollow: _Hollow, target: Path) -> None:
    prepared = _Streamed(whole, job, hollow.streams)
    with OutputFile(target, length_bytes=prepared.length_bytes) as output:
        prepared.write(output)
        output.commit()


_FILES: dict[str, Callable[[_Job, Path], None]] = {"torch": _to_torch, "lightning": _to_lightning}


class _Writer(SwapStorageWriter):
    """Streams hollow tensors."""

    def __init__(self, path: Path, job: _Job, streams: Mapping[int, TensorStream]) -> None:
        super().__init__(path)
        self._job = job
        self._streams = streams

    def prepared(self, tensor: torch.Tensor) -> Prepared:
        """What is written of a tensor."""
        return _Streamed(tensor, self._job, self._streams)


def _to_dcp(job: _Job, path: Path) -> None:
    hollow = _Hollow(job)
    whole: dict[str, Any] = {"model": hollow.model()}
    if not job.model_only:
        if job.states:
            whole["optimizer"] = hollow.optimizers_by_name()
        if (extra := job.extra()) is not None:
            whole["extra"] = resolve(without_model(extra), whole["model"]) if is_lightnings(extra) else extra
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # It is not needed.
            save(whole, storage_writer=_Writer(path, job, hollow.streams), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()), (error,))[0]
        raise cause if isinstance(cause, SwapError) else SwapError(f"{path} could not be written: {cause}") from error


# --- safetensors -----------------------------------------------------------------------------------------------------


def _to_safetensors(job: _Job, path: Path) -> None:
    _write_model(job, path)
    if job.model_only:
        return
    for number in range(len(job.states)):
        name = "optimizer" if len(job.states) == 1 else f"optimizer-{number}"
        _write_optimizer(job, number, path, name)
    # Not decoded: whoever reads it needs the classes of enums, and not we.
    names = {name: _in_memory(job.checkpoint.small_tensor(name)) for name in _names_of_tensors(job.index.extra)}
    if is_lightnings(job.index.extra):
        job.notes.append('extra.json has {"swapper.model": NAME} where Lightning had a tensor of the model')
    _write_json(path / "extra.json", {"extra": job.index.extra})
    if names:
        _write_tensors(job, path / "extra.safetensors", names, {})


def _names_of_tensors(data: Any) -> Iterator[str]:
    """The names of stored tensors in what `values.encode` gives."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        if key in ("$tensor", "$ndarray"):
            yield value["name"]
        else:
            yield from _names_of_tensors(value)


def _write_model(job: _Job, path: Path) -> None:
    saved = job.index.model
    if saved.values:
        raise SwapError(
            f"{next(iter(saved.values))} of the model's state dict is no tensor, which safetensors cannot hold; export "
            "to torch instead"
        )
    streams = {name: model_stream(job.checkpoint, name) for name in saved.tensors}
    shards: list[dict[str, TensorStream]] = [{}]
    length_bytes = 0
    for name, stream in streams.items():
        if shards[-1] and length_bytes + stream.length_bytes > SHARD_BYTES:
            shards.append({})
            length_bytes = 0
        shards[-1][name] = stream
        length_bytes += stream.length_bytes
    count = len(shards)
    files = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    if count == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(stream.length_bytes for stream in streams.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(path / "model.safetensors.index.json", index)
    for file, shard in zip(files, shards, strict=True):
        # As safetensors' own `save_model` notes what it leaves out.
        tied = {name: first for name, first in saved.tied.items() if first in shard}
        _write_tensors(job, path / file, shard, {"format": "pt", **tied})
    if saved.tied:
        job.notes.append(
            f"of tied tensors one is written: {', '.join(f'{name} is {first}' for name, first in saved.tied.items())}; "
            "safetensors.torch.load_model loads them"
        )
    if "config.json" in job.index.files:
        job.checkpoint.verify("config.json")
        _write_small(path / "config.json", (job.checkpoint.directory / "config.json").read_bytes())


def _write_optimizer(job: _Job, number: int, path: Path, file: str) -> None:
    saved = job.index.optimizers[number]
    names = [parameter.name or f"parameter-{place}" for place, parameter in enumerate(saved.parameters)]
    tensors: dict[str, TensorStream] = {}
    rest: dict[str, dict[str, Any]] = {}
    more: dict[str, torch.Tensor] = {}
    for place, name in enumerate(names):
        for key, value in job.state_of(number, place).items():
            if isinstance(value, (TensorStream, torch.Tensor)):
                if f"{name}.{key}" in tensors:
                    raise SwapError(f"optimizer {number}: two tensors of its state would be named {name}.{key}")
                stream = value if isinstance(value, TensorStream) else _in_memory(value)
                tensors[f"{name}.{key}"] = stream.contiguous()
            else:
                rest.setdefault(name, {})[key] = encode(value, f"state {key!r} of {name}", more, f"{name}.{key}.")
    groups = []
    for options, places in zip(job.options(number), saved.groups, strict=True):
        encoded = encode(options, f"optimizer {number}, options", more, "param_groups.")
        groups.append({**encoded, "params": [names[place] for place in places]})
    tensors |= {name: _in_memory(tensor) for name, tensor in more.items()}
    _write_tensors(job, path / f"{file}.safetensors", tensors, {"format": "pt"})
    _write_json(path / f"{file}.json", {"class": saved.kind, "param_groups": groups, "state": rest})


def _in_memory(tensor: torch.Tensor) -> TensorStream:
    flat = tensor.detach().cpu().contiguous().view(-1)
    shape = tuple(tensor.shape)
    return TensorStream(tensor.dtype, shape, contiguous_stride(shape), lambda start, stop: flat[start:stop])


def _write_tensors(job: _Job, path: Path, tensors: Mapping[str, TensorStream], metadata: Mapping[str, str]) -> None:
    """Write and sync a safetensors file; see https://github.com/huggingface/safetensors, "Format"."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    cursor = 0
    # The longest elements first, so that each tensor starts at a multiple of its own.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, stream in ordered:
        if stream.dtype not in _NAMES:
            raise SwapError(f"{name} is {stream.dtype}, which safetensors cannot hold; export to torch instead")
        offsets = [cursor, cursor + stream.length_bytes]
        table[name] = {"dtype": _NAMES[stream.dtype], "shape": list(stream.shape), "data_offsets": offsets}
        cursor += stream.length_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
    with OutputFile(path, length_bytes=8 + len(text) + cursor) as output:
        output.append(len(text).to_bytes(8, "little") + text)
        for _, stream in ordered:
            for piece in job.pieces(stream):
                output.append(piece)
        output.commit()


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    _write_small(path, json.dumps(data, indent=1, allow_nan=False).encode())


def _write_small(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
