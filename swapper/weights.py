"""Weights from safetensors files into a model that is larger than memory: one tensor at a time."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.nn.modules.module import _IncompatibleKeys

from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.evicted import EvictedView
from swapper.handle import AsyncIOHandle
from swapper.progress import ProgressBar
from swapper.tensor_files import FromFile, StoredTensor, TensorReader, read_header

__all__ = ["find_weights", "load_weights"]

_INDEX = ".safetensors.index.json"


def find_weights(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """The tensors that `path` names: a safetensors file, an index of several, or a directory with either.

    Raises:
        SwapIOError, SwapError: there are none, or one of the files is broken.
    """
    path = Path(path)
    if path.is_dir():
        indices = sorted(path.glob(f"*{_INDEX}"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise SwapError(f"{path} has several sets of weights: {names}; name one of them")
        if indices:
            return _find_by_index(indices[0])
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise SwapIOError(errno.ENOENT, "open", path, detail="there are no .safetensors files in this directory")
        return _without_duplicates([tensor for file in files for tensor in read_header(file)])
    return _find_by_index(path) if path.name.endswith(".json") else read_header(path)


def _find_by_index(path: Path) -> list[StoredTensor]:
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise SwapIOError(error.errno or errno.EIO, "read", path) from error
    except ValueError as error:
        raise SwapError(f"{path} is not an index of safetensors files: it is no valid JSON ({error})") from error
    match index:
        case {"weight_map": dict(places)} if all(isinstance(name, str) for name in places.values()):
            pass
        case _:
            raise SwapError(f'{path} is not an index of safetensors files: it has no "weight_map" from names to files')
    tensors = {
        file: {tensor.name: tensor for tensor in read_header(path.parent / file)} for file in sorted({*places.values()})
    }
    for name, file in places.items():
        if name not in tensors[file]:
            raise SwapError(
                f"{path} says that tensor {name!r} is in {file}, but it is not; copy or download them again"
            )
    return [tensors[file][name] for name, file in places.items()]


def _without_duplicates(tensors: list[StoredTensor]) -> list[StoredTensor]:
    seen: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if (other := seen.setdefault(tensor.name, tensor)) is not tensor:
            raise SwapError(f"tensor {tensor.name!r} is in {other.path} and in {tensor.path}; name one file")
    return tensors


@contextmanager
def _reading(tensors: Sequence[StoredTensor]) -> Iterator[TensorReader]:
    total = sum(tensor.stop_bytes - tensor.start_bytes for tensor in tensors)
    with ProgressBar(
        total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, delay=1,
        disable=not sys.stderr.isatty(),
    ) as progress:  # fmt: skip
        reader = TensorReader(AsyncIOHandle(), progress.update)
        try:
            yield reader
        finally:
            reader.close()


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool) -> _IncompatibleKeys:
    """See `swapper.load_safetensors`."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta" and not torch.nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"model: {name} is on the meta device and has no memory to load into; call "
                "swapper.materialize(model, config, initialiser) first"
            )
    tensors = find_weights(path)
    with _reading(tensors) as reader:
        state = {tensor.name: EvictedView(FromFile(reader, tensor)) for tensor in tensors}
        try:
            missing, unexpected = model.load_state_dict(state, strict=False)
        except RuntimeError as error:
            if reader.failure is not None:
                raise reader.failure from None
            fix = "; build the model with the shapes that the file has" if "size mismatch" in str(error) else ""
            raise SwapError(f"{path} could not be loaded: {error}{fix}") from error
    missing = _without_tied(model, missing, state)
    if strict and (missing or unexpected):
        lacks = f"it lacks {', '.join(missing)}" if missing else ""
        has = f"the model does not have {', '.join(unexpected)}" if unexpected else ""
        raise SwapError(
            f"{path} does not fit the model: {' and '.join(filter(None, (lacks, has)))}; load weights of this model, "
            "or pass strict=False to load what fits"
        )
    return _IncompatibleKeys(missing, unexpected)


def _without_tied(model: torch.nn.Module, missing: Sequence[str], state: dict[str, EvictedView]) -> list[str]:
    """Those of `missing` whose parameter was not loaded by another name either."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameters[name]) for name in state if name in parameters}
    return [name for name in missing if name not in parameters or id(parameters[name]) not in loaded]
