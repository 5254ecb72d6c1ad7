"""Weights from safetensors files into a model that is larger than memory: one tensor at a time."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch.nn.modules.module import _IncompatibleKeys

from swapper.errors import ConfigError, SwapError, SwapIOError, path_given, show, system_errors
from swapper.files.packed_tensors import PackedTensor, names_in_file, read_tensors, recipe_of
from swapper.files.tensor_files import FromFile, StoredTensor, TensorReader, parse_json, read_small
from swapper.files.unread import evaluate
from swapper.progress import progress_bar
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.unfilled import is_unfilled

__all__ = ["PACKED_INDEX", "find_by_index", "find_weights", "load_weights", "misfit", "newest_snapshot"]

log = logging.getLogger(__name__)

PACKED_INDEX = "model.safetensors.index.packed.json"
"""The index of packed weights. transformers looks for a name as this where it is told of a variant, and not by itself:
without one it says that there are no weights, and never takes packed ones for what they are not."""

_INDEX = ".safetensors.index.json"
_WHOLE = "model.safetensors"
"""Of this and an index beside it transformers takes this."""

_LONGEST_PATH = 4096


def find_weights(path: str | os.PathLike[str]) -> list[StoredTensor | PackedTensor]:
    """The tensors that `path` names: a safetensors file, an index of several, or a directory with either.

    In a directory that `swapper.pack_weights` has made they are those that were packed. Of `model.safetensors` and an
    index beside it that is the file, as for transformers. A model's directory in Hugging Face's cache (`models--NAME`)
    has them in that of its newest snapshot.

    Raises:
        SwapIOError, SwapError: there are none, or one of the files is broken.
    """
    path = newest_snapshot(Path(path_given("weights", path)))
    with system_errors("open", path):
        is_directory = path.is_dir()
        indices = sorted(path.glob(f"*{_INDEX}")) if is_directory else []
        if is_directory and not indices:
            indices = sorted(path.glob(PACKED_INDEX))
        files = sorted(path.glob("*.safetensors")) if is_directory else []
    if is_directory:
        if whole := [file for file in files if file.name == _WHOLE]:
            return read_tensors(whole[0]) if indices else _tensors_of(files)
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise SwapError(f"{path} has several sets of weights: {names}; name one of them")
        if indices:
            return find_by_index(indices[0])
        if not files:
            raise SwapIOError(errno.ENOENT, "open", path, detail="there are no .safetensors files in this directory")
        return _tensors_of(files)
    return find_by_index(path) if path.name.endswith(".json") else read_tensors(path)


def newest_snapshot(path: Path) -> Path:
    """The directory of the snapshot that `path`, as Hugging Face's cache has it, calls `main`; else `path`."""
    name = path / "refs" / "main"
    with system_errors("open", name):
        if not (path / "snapshots").is_dir() or not name.is_file():
            return path
        commit = name.read_text("utf-8", "replace").strip()
    if not commit or commit in (".", "..") or "/" in commit or "\0" in commit:
        raise SwapError(f"{name} does not name a snapshot; name the directory with the weights")
    return path / "snapshots" / commit


def find_by_index(path: Path) -> list[StoredTensor | PackedTensor]:
    """The tensors that an index of safetensors files names.

    Raises:
        SwapIOError, SwapError: it is broken, or one of the files is, or lacks a tensor that is said to be in it.
    """
    text = read_small(path)
    try:
        index = parse_json(text)
    except ValueError as error:
        raise SwapError(f"{path} is not an index of safetensors files: it is no valid JSON ({error})") from error
    match index:
        case {"weight_map": dict(file_of)} if all(isinstance(file, str) for file in file_of.values()):
            pass
        case _:
            raise SwapError(f'{path} is not an index of safetensors files: it has no "weight_map" from names to files')
    files = sorted({*file_of.values()})
    for file in files:
        _check_is_below(path, file)
    tensors: dict[str, dict[str, StoredTensor | PackedTensor]] = {}
    for file in files:
        found = read_tensors(path.parent / file)
        tensors[file] = {name: tensor for tensor in found for name in names_in_file(tensor)}
    for name, file in file_of.items():
        if name not in tensors[file]:
            raise SwapError(
                f"{path} says that tensor {show(name)} is in {file}, but it is not; copy or download them again"
            )
    return list(dict.fromkeys(tensors[file][name] for name, file in file_of.items()))


def _check_is_below(path: Path, file: str) -> None:
    """Refuse a file name in the index `path` that leads out of its directory, or is none. Links are followed.

    They were made on this machine: Hugging Face's cache links from its snapshots to its blobs.
    """
    try:
        file.encode()
    except UnicodeEncodeError:
        why = "is no Unicode text"
    else:
        parts = file.split("/")
        if len(file) < _LONGEST_PATH and not any(part in ("", ".", "..") or "\0" in part for part in parts):
            return
        why = "is not the name of a file in its directory"
    raise SwapError(f"{path} is not an index of safetensors files: the file name {show(file)} in it {why}")


def _tensors_of(files: Sequence[Path]) -> list[StoredTensor | PackedTensor]:
    """The tensors of several files. Refuses a name that is in two."""
    seen: dict[str, StoredTensor | PackedTensor] = {}
    for tensor in (tensor for file in files for tensor in read_tensors(file)):
        if (other := seen.setdefault(tensor.name, tensor)) is not tensor:
            raise SwapError(f"tensor {tensor.name!r} is in {other.path} and in {tensor.path}; name one file")
    return list(seen.values())


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool) -> _IncompatibleKeys:
    """See `swapper.load_safetensors`."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta" and not torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"model: {name} is on the meta device and has no memory to load into; call "
                "swapper.materialize(model, config, initialiser) first"
            )
    tensors = find_weights(path)
    _refuse_complex(model, tensors)
    total_bytes = sum(tensor.length_bytes for tensor in tensors)
    with progress_bar("loading weights", total_bytes) as done, closing(TensorReader(done)) as reader:
        state = {
            tensor.name: EvictedView(
                FromFile(reader, tensor.shape, tensor.dtype, partial(evaluate, recipe_of(tensor), reader.read))
            )
            for tensor in tensors
        }
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            if reader.failure is not None:
                raise reader.failure from None
            fix = "; build the model with the shapes that the file has" if "size mismatch" in str(error) else ""
            raise SwapError(f"{path} could not be loaded: {error}{fix}") from error
    missing = _without_tied(model, missing, state)
    unfilled = [name for name, buffer in model.named_buffers() if is_unfilled(buffer) and name not in missing]
    if unfilled:
        text = (
            f"{path} does not have {', '.join(unfilled)}, which are not persistent, and nothing has filled them since "
            "swapper.materialize gave them memory"
        )
        if strict and not missing and not unexpected:
            raise SwapError(
                f"{text}; fill them in the initialiser, or before this call, or pass strict=False if the model fills "
                "them itself before it uses them"
            )
        log.warning("%s; using them before they are filled raises", text)
    if strict and (missing or unexpected):
        raise SwapError(
            f"{misfit(path, missing, unexpected)}; load weights of this model, or pass strict=False to load what fits"
        )
    return _IncompatibleKeys(missing, unexpected)


def misfit(path: object, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """The text of an error for weights at `path` that lack tensors of the model, or have unexpected ones."""
    lacks = f"it lacks {', '.join(missing)}" if missing else ""
    has = f"the model does not have {', '.join(unexpected)}" if unexpected else ""
    return f"{path} does not fit the model: {' and '.join(filter(None, (lacks, has)))}"


def _refuse_complex(model: torch.nn.Module, tensors: Sequence[StoredTensor | PackedTensor]) -> None:
    """Refuse complex numbers for real parameters and buffers before any is loaded: torch drops half and warns once."""
    own = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    for tensor in tensors:
        if tensor.dtype.is_complex and tensor.name in own and not own[tensor.name].dtype.is_complex:
            raise SwapError(
                f"{tensor.path} has complex numbers for {tensor.name}, which is real in the model "
                f"({own[tensor.name].dtype}); load weights of this model"
            )


def _without_tied(model: torch.nn.Module, missing: Sequence[str], state: dict[str, EvictedView]) -> list[str]:
    """The names in `missing` without those whose parameter was loaded by another name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in state if name in parameters}
    return [name for name in missing if name not in parameters or id(parameters[name]) not in loaded]
