"""Checkpoints to ordinary files for plain PyTorch: streamed, so that no tensor need fit into memory."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from swapper.checkpoint.additions import rest_of
from swapper.checkpoint.boxed_state import BoxedState
from swapper.checkpoint.directories import remove_leftovers
from swapper.checkpoint.index import SavedSegment
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.saved_model import model_values, with_metadata
from swapper.checkpoint.streams import TensorStream, model_stream, stream_of
from swapper.checkpoint.values import decode, encode
from swapper.errors import SwapError, SwapIOError, system_errors
from swapper.files.dcp import SwapStorageWriter
from swapper.files.fastsave import Prepared
from swapper.files.output_file import OutputFile
from swapper.optimizer.encodings import STEPS
from swapper.optimizer.segments import MASTER
from swapper.progress import progress_bar
from swapper.sizes import SMALL_BYTES
from swapper.storage.atomic import NewDirectory, remove_tree
from swapper.tensors.dtypes import DTYPES
from swapper.tensors.tensor_refs import OPTIMIZER_STATES, is_lightnings, resolve, without_model

__all__ = ["Exported", "export_checkpoint"]

Format = Literal["torch", "safetensors", "dcp", "lightning"]

SHARD_BYTES = 5_000_000_000
"""A model of more is written as several safetensors files, of at most this much if no tensor is longer."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?|optimizer(-\d+)?|extra)\.(safetensors|json)|model\.safetensors\.index\.json|config\.json"
    r"|\.metadata|__\d+_\d+(-[0-9a-f]{8})?\.distcp"
)
"""Files that exports have."""


@dataclass(frozen=True)
class Exported:
    """The result of `export_checkpoint`.

    Attributes:
        path: of the file or directory.
        length_bytes: of all its files.
        notes: sentences for whoever loads it.
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
    annexes: Sequence[Path] = (),
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
        annexes: where annexes of the checkpoint are now, as of `load_checkpoint`.

    Raises:
        SwapError: something exists at `out`; the checkpoint is damaged; or something cannot be had in this format.
        SwapIOError: a file cannot be read, or is in an annex that this process does not reach; or the drive is full.
    """
    if to not in get_args(Format):
        raise SwapError(f"to: {to!r} is none of {', '.join(get_args(Format))}")
    target = Path(os.path.abspath(out))
    _check_free(target, Path(os.path.abspath(directory)), to, force)
    remove_leftovers(target.parent)
    with Checkpoint(directory, annexes=annexes) as checkpoint, contextlib.ExitStack() as stack:
        checkpoint.require(_needed_files(checkpoint, model_only))
        job = _Export(checkpoint, model_only, drop_masters)
        job.done = stack.enter_context(progress_bar("exporting", job.length_bytes()))
        if to in _FILES:
            _FILES[to](job, target)
        else:
            with system_errors("write", target), NewDirectory(target) as new:
                (_to_safetensors if to == "safetensors" else _to_dcp)(job, new.path)
                replaced = new.publish()
            if replaced is not None:
                with contextlib.suppress(OSError):  # The next export or save sweeps the rest.
                    remove_tree(replaced)
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


def _needed_files(checkpoint: Checkpoint, model_only: bool) -> set[str]:
    model = {tensor.file for tensor in checkpoint.index.model.tensors.values()}
    buckets = [bucket for each in checkpoint.index.optimizers for bucket in each.buckets if not model_only]
    used = {each.file for each in buckets if any(isinstance(segment, SavedSegment) for segment in each.segments)}
    return model | {file for file in used if file is not None}


class _Export:
    """A checkpoint as the state dicts of plain PyTorch, whose long tensors stand for streams.

    They look as they will, but their memory is never touched: the bytes are streamed when they are written.

    Attributes:
        states: of the optimizers that are exported.
        streams: of each long tensor, by its address.
        done: called with the bytes of each piece.
        notes: for whoever loads the result.
    """

    def __init__(self, checkpoint: Checkpoint, model_only: bool, drop_masters: bool) -> None:
        self.checkpoint = checkpoint
        self.index = checkpoint.index
        self.model_only = model_only
        self.streams: dict[int, TensorStream] = {}
        self.done: Callable[[int], object] = lambda _: None
        self.notes: list[str] = []
        self.states = [] if model_only else [BoxedState(checkpoint, n) for n in range(len(self.index.optimizers))]
        self._drop_masters = drop_masters
        names = sorted({*self.index.model.own, *self.index.model.own_values})
        names += ["extra"] if self.index.own_extra and not model_only else []
        if names:
            self.notes.append(
                f"of what was not the same on the {self.index.ranks} ranks that saved it this has what rank 0 had: "
                f"{', '.join(names)}"
            )

    def length_bytes(self) -> int:
        """About how much will be written."""
        total = sum(model_stream(self.checkpoint, name).length_bytes for name in self.index.model.wholes())
        for number, state in enumerate(self.states):
            for position in range(len(state.wholes)):
                values = self.state_of(number, position).values()
                total += sum(value.length_bytes for value in values if isinstance(value, TensorStream))
        return total

    def state_of(self, number: int, position: int) -> dict[str, Any]:
        """The state of a parameter; `TensorStream`s and small values."""
        found = self.states[number].state(position)
        if self._drop_masters and self.states[number].with_master:
            found.pop(MASTER, None)
        return found

    def extra(self, *names: str) -> Any:
        """The `extra` of the checkpoint, decoded; of one that Lightning made only `names`, if any are given."""
        data = self.index.extra
        if names and is_lightnings(data):
            data = {name: data[name] for name in names if name in data}
        return decode(data, "extra", self.checkpoint.small_tensor)

    def pieces(self, stream: TensorStream) -> Iterator[torch.Tensor]:
        """The pieces of `stream`, counted by `done`."""
        for piece in stream.pieces():
            yield piece
            self.done(piece.numel())

    def _tensor(self, value: Any) -> Any:
        """A tensor that stands for a stream; if it is small, the tensor itself. Other values are as they are."""
        if not isinstance(value, TensorStream):
            return value
        if value.length_bytes < SMALL_BYTES:
            flat = torch.empty(value.numel, dtype=value.dtype, device="cpu")
            if data := [*self.pieces(value)]:
                flat.view(torch.uint8).copy_(torch.cat(data))
        else:
            # Read-only: nothing of it is there, and no system counts it as memory that may be needed.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, value.length_bytes, flags=flags, prot=mmap.PROT_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")
                flat = torch.frombuffer(memory, dtype=torch.uint8).view(value.dtype)
            self.streams[flat.data_ptr()] = value
        return flat.as_strided(value.shape, value.stride)

    def model(self) -> OrderedDict[str, Any]:
        """The model's state dict."""
        saved = self.index.model
        state = OrderedDict((name, self._tensor(model_stream(self.checkpoint, name))) for name in saved.wholes())
        state.update({name: state[first] for name, first in saved.tied.items()})
        state.update(model_values(self.checkpoint))
        return with_metadata(state, self.checkpoint)

    def optimizer(self, number: int, names: Sequence[Any] | None = None) -> dict[str, Any]:
        """An optimizer's state dict, as its class has it; by `names` instead of the parameters' numbers."""
        state = self.states[number]
        names = names or range(len(state.wholes))
        found: dict[Any, Any] = {}
        for position, name in enumerate(names):
            if entries := self.state_of(number, position):
                found[name] = {key: self._tensor(value) for key, value in entries.items()}
        steps = {STEPS: state.saved.encoded_steps} if state.saved.encoded_steps else {}
        return {**state.parts.state_dict(found, names), **steps}

    def optimizers_by_name(self) -> dict[str, Any]:
        """One state dict of all optimizers, as `torch.distributed.checkpoint.state_dict.get_state_dict` gives it."""
        whole: dict[str, Any] = {"state": {}, "param_groups": []}
        for number, state in enumerate(self.states):
            names = [parameter.name for parameter in state.wholes]
            if "" in names or len({*names, *whole["state"]}) < len(names) + len(whole["state"]):
                raise SwapError(
                    f"optimizer {number} has parameters without a name of their own in the model, and "
                    "torch.distributed.checkpoint keeps state by names; export to torch, or the model alone"
                )
            found = self.optimizer(number, names)
            if rest := rest_of(found, names):
                also = ", ".join(map(repr, rest.get("state", rest)))
                raise SwapError(
                    f"the state dict of optimizer {number} also has {also}, which torch.distributed.checkpoint leaves "
                    "out; export to torch, or the model alone"
                )
            whole["state"] |= found["state"]
            whole["param_groups"] += found["param_groups"]
        return whole


# --- torch.save and torch.distributed.checkpoint ---------------------------------------------------------------------


class _Streamed(Prepared):
    """An object as `torch.save` writes it, with the bytes of tensors that stand for streams streamed."""

    def __init__(self, obj: object, job: _Export) -> None:
        super().__init__(obj)
        self._job = job

    def pieces(self, content: Any) -> Iterator[Any]:
        """As of `Prepared`; of a tensor that stands for a stream those of the stream."""
        is_storage = isinstance(content, torch.UntypedStorage) and content.nbytes()
        stream = self._job.streams.get(content.data_ptr()) if is_storage else None
        return super().pieces(content) if stream is None else self._job.pieces(stream)


def _to_torch(job: _Export, target: Path) -> None:
    whole: dict[str, Any] = {"model": job.model()}
    if not job.model_only:
        optimizers = [job.optimizer(number) for number in range(len(job.states))]
        if optimizers:
            whole["optimizer"] = optimizers[0] if len(optimizers) == 1 else optimizers
        extra = job.extra()
        whole["extra"] = resolve(extra, whole["model"]) if is_lightnings(extra) else extra
    _write_file(whole, job, target)


def _to_lightning(job: _Export, target: Path) -> None:
    extra = job.extra(*(("state_dict", "pytorch-lightning_version") if job.model_only else ()))
    if not is_lightnings(extra):
        raise SwapError(f"{job.checkpoint.directory} was not saved by Lightning; export it to torch")
    whole = resolve(extra, job.model())
    if job.states:
        whole[OPTIMIZER_STATES] = [job.optimizer(number) for number in range(len(job.states))]
    _write_file(whole, job, target)


def _write_file(whole: object, job: _Export, target: Path) -> None:
    prepared = _Streamed(whole, job)
    with OutputFile(target, length_bytes=prepared.length_bytes) as output:
        prepared.write(output)
        output.commit()


_FILES: dict[str, Callable[[_Export, Path], None]] = {"torch": _to_torch, "lightning": _to_lightning}


class _Writer(SwapStorageWriter):
    """Writes tensors that stand for streams."""

    def __init__(self, path: Path, job: _Export) -> None:
        super().__init__(path)
        self._job = job

    def prepared(self, tensor: torch.Tensor) -> Prepared:
        """See `SwapStorageWriter`."""
        return _Streamed(tensor, self._job)


def _to_dcp(job: _Export, path: Path) -> None:
    whole: dict[str, Any] = {"model": job.model()}
    if not job.model_only:
        if job.states:
            whole["optimizer"] = job.optimizers_by_name()
        if (extra := job.extra()) is not None:
            whole["extra"] = resolve(without_model(extra), whole["model"]) if is_lightnings(extra) else extra
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # It is not needed.
            save(whole, storage_writer=_Writer(path, job), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()), (error,))[0]
        raise cause if isinstance(cause, SwapError) else SwapError(f"{path} could not be written: {cause}") from error


# --- safetensors -----------------------------------------------------------------------------------------------------


def _to_safetensors(job: _Export, path: Path) -> None:
    _write_model(job, path)
    if job.model_only:
        return
    for number in range(len(job.states)):
        name = "optimizer" if len(job.states) == 1 else f"optimizer-{number}"
        _write_optimizer(job, number, path, name)
    # Not decoded: whoever reads it needs the classes of enums, and not we.
    names = {name: stream_of(job.checkpoint.small_tensor(name)) for name in _names_of_tensors(job.index.extra)}
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


def _write_model(job: _Export, path: Path) -> None:
    saved = job.index.model
    if saved.values:
        raise SwapError(
            f"{next(iter(saved.values))} of the model's state dict is no tensor, which safetensors cannot hold; export "
            "to torch instead"
        )
    streams = {name: model_stream(job.checkpoint, name) for name in saved.wholes()}
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
        _write_small(path / "config.json", job.checkpoint.path("config.json").read_bytes())


def _write_optimizer(job: _Export, number: int, path: Path, file: str) -> None:
    state = job.states[number]
    saved = state.saved
    names = [parameter.name or f"parameter-{position}" for position, parameter in enumerate(state.wholes)]
    tensors: dict[str, TensorStream] = {}
    rest: dict[str, dict[str, Any]] = {}
    more: dict[str, torch.Tensor] = {}
    for position, name in enumerate(names):
        for key, value in job.state_of(number, position).items():
            if isinstance(value, (TensorStream, torch.Tensor)):
                if f"{name}.{key}" in tensors:
                    raise SwapError(f"optimizer {number}: two tensors of its state would be named {name}.{key}")
                stream = value if isinstance(value, TensorStream) else stream_of(value)
                tensors[f"{name}.{key}"] = stream.contiguous()
            else:
                rest.setdefault(name, {})[key] = encode(value, f"state {key!r} of {name}", more, f"{name}.{key}.")
    state_dict = state.parts.state_dict({}, names)
    groups = [
        encode(each, f"optimizer {number}, options", more, "param_groups.") for each in state_dict["param_groups"]
    ]
    added = rest_of(state_dict, names)
    added = {"rest": encode(added, f"optimizer {number}, state_dict", more, "rest.")} if added else {}
    tensors |= {name: stream_of(tensor) for name, tensor in more.items()}
    _write_tensors(job, path / f"{file}.safetensors", tensors, {"format": "pt"})
    _write_json(path / f"{file}.json", {"class": saved.kind, "param_groups": groups, "state": rest, **added})


def _write_tensors(job: _Export, path: Path, tensors: Mapping[str, TensorStream], metadata: Mapping[str, str]) -> None:
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
