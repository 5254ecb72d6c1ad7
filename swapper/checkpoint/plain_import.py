"""Files of plain runs, as `torch.save` writes them, to checkpoints."""

from __future__ import annotations

import copy
import errno
import inspect
import os
import pickle
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.additions import rest_of
from swapper.checkpoint.checkpoint import refuse_unloadable
from swapper.checkpoint.directories import remove_replaced
from swapper.checkpoint.index import Index, SavedOptimizer, SavedParameter, made_by
from swapper.checkpoint.saved_model import save_tensors
from swapper.checkpoint.state_writer import StateDict, StateWriter, described_parameter, memory_stride
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapError, SwapIOError, system_errors
from swapper.files.archive import LOCAL_HEADER_BYTES, ZIP_START, BadArchive, header_bytes, read_directory
from swapper.optimizer.encodings import steps_in
from swapper.optimizer.segments import MASTER
from swapper.progress import progress_bar
from swapper.tensors.strides import contiguous_stride, is_dense

__all__ = ["Imported", "import_checkpoint"]

_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizers", "optim")
_PIECE_BYTES = 8 << 20
_ADDED_OPTIONS = {
    "params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "name",
}  # fmt: skip
"""Keys of groups that no class has as an option: of schedulers and of users."""


@dataclass(frozen=True)
class Imported:
    """The result of `import_checkpoint`.

    Attributes:
        path: the checkpoint.
        model_key, optimizer_key: where in the file state dicts were; None if it is a state dict, or there are none.
        optimizers: the class of each.
        extra_keys: keys of the file that became `extra`.
        notes: sentences about what was guessed.
    """

    path: Path
    model_key: str | None
    optimizer_key: str | None
    optimizers: list[str]
    extra_keys: list[str]
    notes: list[str] = field(default_factory=list)


def import_checkpoint(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    optimizer: str | Sequence[str] | None = None,
    model_key: str | None = None,
    optimizer_key: str | None = None,
    drop: Iterable[str] = (),
    force: bool = False,
) -> Imported:
    """Make a checkpoint, for `load_checkpoint`, of a file that `torch.save` has written. The file is mapped, not read.

    Args:
        file: a dictionary with a model's state dict under "model", "model_state_dict" or "state_dict", and an
            optimizer's, or a list of them, under "optimizer", "optimizer_state_dict" or "optimizer_states" (Lightning);
            or a model's state dict itself. Loaded with `weights_only=True`.
        directory: the checkpoint to make.
        optimizer: the optimizer's class ("torch.optim.AdamW", or module and name as Python prints them), or one for
            each. None finds it among those of `torch.optim`, if the options in the file are those of exactly one.
        model_key, optimizer_key: where in the file they are, if elsewhere.
        drop: keys of the file to leave out. Those that remain become what `load_checkpoint` returns, `extra`; if
            that is "extra" alone, what is there does.
        force: replace a checkpoint that is there.

    Raises:
        SwapError: the file has no such state dicts, the class cannot be told, something in it cannot be saved, or
            `directory` exists. The message says what to do.
        SwapIOError: the file cannot be read, or the drive is full.
    """
    target = Path(os.path.abspath(directory))
    if os.path.lexists(target) and not force and (not target.is_dir() or os.listdir(target)):
        raise SwapError(f"{target} exists; give another name, or replace a checkpoint by force (--force)")
    found = _load(file)
    if not isinstance(found, Mapping):
        raise SwapError(f"{os.fspath(file)} has a {type(found).__name__}, and no dictionary with a state dict")
    rest: dict[Any, Any] = copy.copy(found) if isinstance(found, dict) else dict(found)  # with versions of modules
    for key in drop:
        _item(rest, key, "drop", os.fspath(file))
        del rest[key]
    model_key, state_dict = _take_model(rest, model_key, os.fspath(file))
    optimizer_key, states = _take_optimizers(rest, optimizer_key, os.fspath(file))
    notes: list[str] = []
    kinds = _kinds(states, optimizer, notes)
    extra: Any = dict(rest) if model_key is not None and rest else None
    extra_keys = [] if extra is None else [str(key) for key in extra]
    if extra_keys == ["extra"]:
        extra = rest["extra"]  # As `export_checkpoint` has it.
    new = NewCheckpoint(target)
    try:
        index = _write(state_dict, states, kinds, extra, new, notes)
        replaced = new.finish(index, refuse_unloadable)
    finally:
        new.discard()
    if replaced is not None:
        remove_replaced(replaced)
    return Imported(target, model_key, optimizer_key, kinds, extra_keys, notes)


def _load(file: str | os.PathLike[str]) -> Any:
    path = os.fspath(file)
    _check(path)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "read", path) from error
    except pickle.UnpicklingError as error:
        # torch's advice is to trust the file, or to list the classes: what was saved is of no use here either way.
        needs = _unsafe_names(path)
        if needs:
            raise SwapError(
                f"{path} has objects of {', '.join(needs)}, which would have to be unpickled, and could not be saved: "
                "save it again without them, from the program that knows them"
            ) from error
        raise SwapError(f"{path} is no file of torch.save, or is damaged: {_first_line(error)}") from error
    except (RuntimeError, ValueError, EOFError, KeyError) as error:
        raise SwapError(
            f"{path} cannot be mapped: {_first_line(error)}; if it is of an old version of torch, load it and save it "
            "again with torch.save"
        ) from error


def _check(path: str) -> None:
    """Compare a file with its checksums, which torch does not do with a file that it maps.

    What is no ZIP file is left to torch to refuse.
    """
    with system_errors("read", path), open(path, "rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size

        def read(start: int, length: int) -> bytes:
            return os.pread(file.fileno(), length, start)

        try:
            entries = read_directory(read, size_bytes)
        except BadArchive as error:
            if read(0, len(ZIP_START)) == ZIP_START:  # Of which torch may take less, or more, than there was.
                raise SwapError(f"{path} cannot be imported: {error}") from error
            return
        with progress_bar("checking", size_bytes) as done:
            for entry in entries:
                try:
                    start = entry.offset_bytes + header_bytes(read(entry.offset_bytes, LOCAL_HEADER_BYTES))
                except BadArchive as error:
                    raise SwapError(f"{path} cannot be imported: {error}") from error
                crc = 0
                for at in range(start, start + entry.length_bytes, _PIECE_BYTES):
                    piece = read(at, min(_PIECE_BYTES, start + entry.length_bytes - at))
                    crc = zlib.crc32(piece, crc)
                    done(len(piece))
                if entry.crc32 not in (None, crc):
                    raise SwapError(f"{path} is damaged: its record {entry.name!r} does not match its checksum")


def _unsafe_names(path: str) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        return []


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _listed(keys: Iterable[object]) -> str:
    names = [repr(key) for key in keys]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# --- What is in the file ---------------------------------------------------------------------------------------------


def _is_state_dict(value: object) -> bool:
    """True if it may be a model's: names, and at least one tensor."""
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(item, torch.Tensor) for item in value.values())
    )


def _is_optimizer(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in value["param_groups"])
        and all(
            isinstance(value["state"].get(each, {}), Mapping)
            for group in value["param_groups"]
            for each in group["params"]
        )
    )


def _take_model(rest: dict[Any, Any], key: str | None, path: str) -> tuple[str | None, Mapping[str, Any]]:
    """Take the model's state dict out of `rest`. The key is None if that is it."""
    if key is not None:
        if not _is_state_dict(_item(rest, key, "model_key", path)):
            raise SwapError(f"model_key: {key!r} of {path} is no state dict of a model")
        return key, rest.pop(key)
    candidates = [name for name in _MODEL_KEYS if name in rest and _is_state_dict(rest[name])]
    if len(candidates) > 1:
        raise SwapError(
            f"{path} has state dicts under {_listed(candidates)}; say which is the model's by model_key (--model-key)"
        )
    if candidates:
        return candidates[0], rest.pop(candidates[0])
    if _is_state_dict(rest) and all(
        isinstance(value, torch.Tensor) or name.endswith("_extra_state") for name, value in rest.items()
    ):
        return None, rest
    raise SwapError(
        f"{path} has no state dict of a model under {_listed(_MODEL_KEYS)}; say where by model_key (--model-key); "
        f"it has {_listed(rest)}"
    )


def _take_optimizers(rest: dict[Any, Any], key: str | None, path: str) -> tuple[str | None, list[Mapping[str, Any]]]:
    """Take the optimizers' state dicts out of `rest`."""
    if key is not None:
        found = {key: _optimizers_in(_item(rest, key, "optimizer_key", path))}
        if not found[key]:
            raise SwapError(f"optimizer_key: {key!r} of {path} is no state dict of an optimizer, nor a list of them")
    else:
        found = {name: states for name in _OPTIMIZER_KEYS if (states := _optimizers_in(rest.get(name)))}
    if len(found) > 1:
        raise SwapError(f"{path} has optimizers under {_listed(found)}; say which by optimizer_key (--optimizer-key)")
    if not found:
        return None, []
    ((key, states),) = found.items()
    del rest[key]
    return key, states


def _item(rest: Mapping[Any, Any], key: str, option: str, path: str) -> Any:
    if key not in rest:
        raise SwapError(f"{option}: {path} has no {key!r}; it has {_listed(rest)}")
    return rest[key]


def _optimizers_in(value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping) and _is_optimizer(value):
        return [value]
    if isinstance(value, (list, tuple)) and value and all(map(_is_optimizer, value)):
        return list(value)
    return []


# --- The class of an optimizer ---------------------------------------------------------------------------------------


def _kinds(states: Sequence[Mapping[str, Any]], given: str | Sequence[str] | None, notes: list[str]) -> list[str]:
    names = [given] if isinstance(given, str) else list(given or ())
    if names and len(names) != len(states):
        if len(names) > 1 or not states:
            raise SwapError(f"optimizer: {len(names)} classes are given, and the file has {len(states)} optimizers")
        names *= len(states)
    if names:
        return [_kind_named(name) for name in names]
    return [_kind_that_fits(state, notes) for state in states]


def _kind_named(name: str) -> str:
    """The class as an index has it: `torch.optim.AdamW` is defined in a module of that one."""
    module, _, last = name.rpartition(".")
    if module in ("", "torch.optim"):
        found = getattr(torch.optim, last, None)
        if not (inspect.isclass(found) and issubclass(found, Optimizer)):
            raise SwapError(f"optimizer: {name!r} is no class of torch.optim; of others give module and name")
        return f"{found.__module__}.{found.__qualname__}"
    return name


def _kind_that_fits(state: Mapping[str, Any], notes: list[str]) -> str:
    fitting = []
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer:
            try:
                defaults = kind([torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))]).defaults  # type: ignore[call-arg]
            except (TypeError, ValueError):
                continue
            if all(_fits(defaults, group) for group in state["param_groups"]):
                fitting.append(name)
    if len(fitting) != 1:
        keys = sorted({str(key) for group in state["param_groups"] for key in group} - {"params"})
        fits = f"those of {' and '.join(fitting)}" if fitting else "those of no class of torch.optim"
        raise SwapError(
            f"the optimizer's class is not in the file, and its options ({', '.join(keys)}) are {fits}; say which it "
            "is by optimizer (--optimizer)"
        )
    notes.append(f"the optimizer is taken for a torch.optim.{fitting[0]}, the only class there with its options")
    return _kind_named(fitting[0])


def _fits(defaults: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    # The one option that tells Adam from AdamW, which else have the same.
    flag = "decoupled_weight_decay"
    return defaults.keys() == group.keys() - (_ADDED_OPTIONS - defaults.keys()) and (
        flag not in defaults or defaults[flag] == group[flag]
    )


# --- The checkpoint --------------------------------------------------------------------------------------------------


def _write(
    state_dict: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    extra: Any,
    new: NewCheckpoint,
    notes: list[str],
) -> Index:
    """Write everything, and return what the index says of it."""
    try:
        encoded = new.encode(extra, "extra", "extra.")
    except SwapError as error:
        raise SwapError(f"{error}; or leave it out by drop (--drop) of its key in the file") from None
    model = _one_object_each(state_dict)
    saved = []
    for number, (state, kind) in enumerate(zip(states, kinds, strict=True)):
        saved.append(_optimizer(state, kind, number, model, new, notes))
    index = Index(
        **made_by(),
        run=secrets.token_hex(8),
        sequence=1,
        step=saved[0][1] if saved else None,
        model=save_tensors(model, new, None),
        optimizers=[each for each, _ in saved],
        extra=encoded,
    )
    new.write_values()
    return index


def _one_object_each(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """`state` with one object for tensors that are the same memory: they were tied."""
    first: dict[object, torch.Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    if hasattr(state, "_metadata"):
        vars(found)["_metadata"] = state._metadata
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value = value.detach()
            if value.layout is torch.strided and value.numel():
                value = first.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), value)
        found[name] = value
    return found


def _optimizer(
    state: Mapping[str, Any],
    kind: str,
    number: int,
    model: Mapping[str, Any],
    new: NewCheckpoint,
    notes: list[str],
) -> tuple[SavedOptimizer, int | None]:
    what = f"optimizer {number}"
    groups = state["param_groups"]
    keys = [each for group in groups for each in group["params"]]
    by_name = bool(keys) and all(isinstance(each, str) for each in keys)
    # What is not of a parameter has a name.
    lost = [each for each in state["state"].keys() - set(keys) if by_name or isinstance(each, int)]
    if len(set(keys)) < len(keys) or lost:
        raise SwapError(f"{what}: its state and the parameters of its groups do not fit together")
    names = _names(groups, keys, by_name)
    known = [model.get(name) for name in names]
    if any(names) and (lost := [name for name, value in zip(names, known, strict=True) if value is None]):
        raise SwapError(f"{what}: the model's state dict has no {lost[0]}, which is a parameter of it")
    if not any(names):
        notes.append(f"{what}: the file does not name the parameters; they are taken to be in your optimizer's order")
    entries = [state["state"].get(each) or {} for each in keys]
    described = [
        _described(name, value, entry, f"{what}, parameter {name or position}", kind)
        for position, (name, value, entry) in enumerate(zip(names, known, entries, strict=True))
    ]
    rounded_to = _rounded_to(model, known, entries, what)
    writer = StateWriter(new, number, kind, StateDict(groups, rest_of(state, keys)), described)
    writer.save_memory(entries, rounded_to)
    writer.saved.encoded_steps = steps_in(state)
    return writer.saved, writer.step


def _names(groups: Sequence[Mapping[str, Any]], keys: Sequence[Any], by_name: bool) -> list[str]:
    """Of the parameters in order; "" where they are not known."""
    if by_name:
        return list(keys)
    if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        return [str(name) for group in groups for name in group.get("param_names") or ()]
    return [""] * len(keys)


def _described(name: str, value: object, entry: Mapping[str, Any], what: str, kind: str) -> SavedParameter:
    """Describe a parameter: by its name, else by the shapes of its state."""
    if isinstance(value, torch.Tensor):
        return described_parameter(name, value.shape, memory_stride(value), value.dtype)
    tensors = [item for item in entry.values() if isinstance(item, torch.Tensor)]
    if not entry:
        return described_parameter("", None, [], None)
    shape = _common_shape([tensor.shape for tensor in tensors])
    if shape is None or kind.endswith(".LBFGS"):
        raise SwapError(
            f"{what}: its shape cannot be told from its state, and the file does not name the parameters; save it "
            "again with an optimizer made of model.named_parameters()"
        )
    like = next((tensor for tensor in tensors if list(tensor.shape) == shape and is_dense(tensor)), None)
    stride = contiguous_stride(tuple(shape)) if like is None else like.stride()
    return described_parameter("", shape, stride, None)


def _common_shape(shapes: Sequence[torch.Size]) -> list[int] | None:
    """The shape that others are broadcast to; None if there is none.

    Factors of a state, rows and columns, have dimensions of one where the parameter has more.
    """
    if not shapes:
        return None
    rank = max(map(len, shapes))
    sizes = [{1, *sizes} - {1} for sizes in zip(*([1] * (rank - len(s)) + list(s) for s in shapes), strict=True)]
    return None if any(len(each) > 1 for each in sizes) else [next(iter(each), 1) for each in sizes]


def _rounded_to(
    model: Mapping[str, Any], known: Sequence[Any], entries: Sequence[Mapping[str, Any]], what: str
) -> torch.dtype | None:
    """The dtype of the parameters whose master weights are in the state; None if there are none."""
    masters = [(value, entry[MASTER]) for value, entry in zip(known, entries, strict=True) if MASTER in entry]
    if not masters:
        return None
    tensors = [value for value, _ in masters if value is not None] or list(model.values())
    low = {
        value.dtype
        for value in tensors
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    }
    if len(low) != 1 or not all(master.dtype is torch.float32 and is_dense(master) for _, master in masters):
        raise SwapError(f"{what}: it has master weights, and it cannot be told of which dtype the parameters are")
    return low.pop()
