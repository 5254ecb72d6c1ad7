"""A model in a checkpoint: its state dict in safetensors files, with the names that every other tool expects."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from swapper.checkpoint.index import INDEX, SavedModel, SavedTensor, crc32c_of, dtype_name
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.values import decode
from swapper.checkpoint.writer import NewCheckpoint, RecordFile
from swapper.errors import SwapError
from swapper.files.tensor_files import FromFile, StoredTensor
from swapper.io.checksums import checksum, join_checksums
from swapper.parameter.cache import Held
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.store import RecordKey
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.evicted_gradients import GradientEvictedParameter
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.homes import gathered
from swapper.tensors.unfilled import refuse_unfilled

__all__ = [
    "check_model",
    "differences",
    "model_values",
    "plain_model",
    "ready_to_load_model",
    "save_model",
    "save_state_dict",
    "stored_state_dict",
]

WEIGHTS_INDEX = "model.safetensors.index.json"
_MEMORY = "model-memory.safetensors"
_PIECE_BYTES = 16 << 20
"""Longer tensors are loaded in pieces."""

_KINDS = (
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Buffer),
    *(EvictedParameter, EvictedView, GradientEvictedParameter),
)
"""Classes whose values are all there is to them."""


def plain_model(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module within what `DistributedDataParallel` and `torch.compile` put around it."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            model = inner
        else:
            return model


# --- Saving ----------------------------------------------------------------------------------------------------------


def save_model(model: torch.nn.Module, new: NewCheckpoint) -> SavedModel:
    """Put the state dict of `model` into `new`: records by a second name, else written."""
    return _save(_state_dict(model), new, model)


def save_state_dict(state: Mapping[str, Any], new: NewCheckpoint) -> SavedModel:
    """Put a state dict whose tensors are in memory into `new`. One object is one tensor."""
    return _save(state, new, None)


def _save(state: Mapping[str, Any], new: NewCheckpoint, model: torch.nn.Module | None) -> SavedModel:
    saved = SavedModel(tensors={}, tied={}, values={})
    memory: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            saved.values[name] = new.encode(value, f"the state dict's {name!r}", f"model.{name}.")
        elif (first := first_names.setdefault(id(value), name)) != name:
            saved.tied[name] = first
        else:
            _check_can_be_saved(name, value)
            memory[name] = value
    files: dict[RecordKey, RecordFile] = {}
    for held in _linkable(model, memory):
        files[held.key] = _record_file(held, saved.tensors)
    if files:
        new.add_records(vars(model)["swapper"].store, files)
    for name in saved.tensors:
        del memory[name]
    if memory:
        for name, crc in new.write_tensors(_MEMORY, memory).items():
            saved.tensors[name] = _described(_MEMORY, memory[name], crc)
    _write_for_others(model, new, saved.tensors)
    return saved


def _state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict, with the parameters themselves unless the model's own `state_dict` has no such argument."""
    try:
        inspect.signature(model.state_dict).bind(keep_vars=True)
    except TypeError:
        return model.state_dict()
    return model.state_dict(keep_vars=True)


def _check_can_be_saved(name: str, value: torch.Tensor) -> None:
    refuse_unfilled(value)
    if type(value) not in _KINDS or (type(value) is torch.nn.Parameter and type(value.data) is not torch.Tensor):
        raise SwapError(
            f"{name} is a {type(value).__name__}, of which more than values would have to be saved; save it with "
            "torch.distributed.checkpoint and swapper.dcp instead"
        )
    if value.layout is not torch.strided or value.is_quantized:
        raise SwapError(
            f"{name} is sparse or quantised, which a checkpoint cannot hold; save the model with swapper.save"
        )
    if value.device.type == "meta":
        raise SwapError(f"{name} is on the meta device and has no values to save")


def _described(file: str, value: torch.Tensor, crc32c: int) -> SavedTensor:
    return SavedTensor(file=file, dtype=dtype_name(value.dtype), shape=list(value.shape), crc32c=crc32c)


def _linkable(model: torch.nn.Module | None, state: Mapping[str, torch.Tensor]) -> Iterator[Held]:
    """The records whose tensors are those of the state dict, under the same names."""
    swapper = None if model is None else vars(model).get("swapper")
    if isinstance(swapper, ParameterSwapper):
        for held in swapper.settled_records():
            if all(state.get(location.name) is location.parameter for location in held.plan.locations):
                yield held


def _record_file(held: Held, tensors: dict[str, SavedTensor]) -> RecordFile:
    """The file of a record; its tensors are put into `tensors`."""
    name = f"model-{held.number:05d}.safetensors"
    layout = held.plan.layout
    header = layout.header(0)
    parts = [(crc32c_of(header), len(header))]
    for location, crc in zip(held.plan.locations, held.checksums, strict=True):
        if not location.parameter.is_contiguous():  # The file has its elements in another order than memory.
            crc = checksum(location.parameter.detach().contiguous().cpu())
        tensors[location.name] = _described(name, location.parameter, crc)
        parts.append((crc, location.length_bytes))
    return RecordFile(name, layout.exact_bytes(), join_checksums(parts))


def _write_for_others(model: torch.nn.Module | None, new: NewCheckpoint, tensors: Mapping[str, SavedTensor]) -> None:
    """Write what tools of others look for: which file has which tensor, and the model's config if it can print one."""
    total = sum(math.prod(saved.shape) * getattr(torch, saved.dtype).itemsize for saved in tensors.values())
    weight_map = {name: saved.file for name, saved in tensors.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    new.write_small(WEIGHTS_INDEX, json.dumps(index, indent=1).encode())
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if callable(to_json) and isinstance(text := to_json(), str):
        new.write_small("config.json", text.encode())


# --- Loading ---------------------------------------------------------------------------------------------------------


def differences(model: torch.nn.Module, checkpoint: Checkpoint) -> list[str]:
    """Each tensor in which the state dict of `model` is not what the checkpoint has, in words."""
    saved = checkpoint.index.model
    state = _state_dict(model)
    names = [*saved.tensors, *saved.tied, *saved.values]
    known = set(names)
    found = [f"the checkpoint lacks {name}" for name in state if name not in known]
    found += [f"the model does not have {name}" for name in names if name not in state]
    registered = _registered(model)
    source_of: dict[int, str] = {}
    for name, value in state.items():
        if name not in known or id(value) not in registered:
            continue
        source = saved.tied.get(name, name)
        if source not in saved.tensors:
            found.append(f"{name} is a tensor in the model and none in the checkpoint")
            continue
        if (first := source_of.setdefault(id(value), source)) != source:
            found.append(f"{first} and {source} are one tensor in the model and two in the checkpoint")
        there = saved.tensors[source]
        for what, here, was in (
            ("shape", list(value.shape), there.shape),
            ("dtype", dtype_name(value.dtype), there.dtype),
        ):
            if here != was:
                found.append(f"{name} has {what} {here} in the model and {was} in the checkpoint")
    return found


def _registered(model: torch.nn.Module) -> set[int]:
    """The `id` of all that is loaded in place. The rest is extra state, which may change its kind and shape."""
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def model_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The values of the model's state dict that are no tensors, decoded."""
    return {
        name: decode(value, f"the state dict's {name!r}", checkpoint.small_tensor)
        for name, value in checkpoint.index.model.values.items()
    }


def stored_state_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tensors of the model in `checkpoint`, by all their names. Each is read, and checked, whenever it is used.

    When `checkpoint` is closed they are read from whatever has its name then, and checked.
    """
    saved = checkpoint.index.model
    views: dict[str, Any] = {
        name: EvictedView(_Checked(checkpoint, checkpoint.model_tensor(name), tensor))
        for name, tensor in saved.tensors.items()
    }
    return views | {name: views[first] for name, first in saved.tied.items()}


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse what an index says of the model, if it would be refused when it is loaded."""
    saved = checkpoint.index.model
    for name in saved.tensors:
        checkpoint.model_tensor(name)
    model_values(checkpoint)
    if lost := [name for name, source in saved.tied.items() if source not in saved.tensors]:
        raise SwapError(f"{checkpoint.directory / INDEX} is damaged: {lost[0]!r} is one tensor with none that is there")


def ready_to_load_model(model: torch.nn.Module, checkpoint: Checkpoint) -> Callable[[], None]:
    """Prepare to make the tensors in `checkpoint` those of `model`, which was found to match. Nothing is changed.

    Returns:
        Loads them, and holds a piece of a tensor at a time. Raises SwapError or SwapIOError if a file is damaged or
        cannot be read. Part of the model may be loaded then.

    Raises:
        SwapError, SwapIOError: files are not what the index says.
    """
    stored = {name: checkpoint.model_tensor(name) for name in checkpoint.index.model.tensors}
    return partial(_load, model, checkpoint, stored, model_values(checkpoint))


def _load(
    model: torch.nn.Module, checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], others: Mapping[str, Any]
) -> None:
    saved = checkpoint.index.model
    registered = _registered(model)
    state: dict[str, Any] = {}
    for name, value in _state_dict(model).items():
        if name in others:
            state[name] = others[name]
            continue
        source = saved.tied.get(name, name)
        there = stored[source]
        values = _Checked(checkpoint, there, saved.tensors[source])
        if id(value) not in registered:
            state[name] = values.real()  # Whoever is given it may keep it.
        elif there.stop_bytes - there.start_bytes > _PIECE_BYTES and value.dim():
            if source == name:
                _fill(value, there, saved.tensors[source], checkpoint)
            state[name] = value  # Given to itself, so that hooks of modules run, and nothing else happens.
        else:
            state[name] = EvictedView(values)
    reader = checkpoint.reader
    reader.failure = None
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        if reader.failure is not None:
            raise reader.failure from None
        raise SwapError(f"{checkpoint.directory} could not be loaded: {error}") from error


class _Checked(FromFile):
    """The values of a tensor in a checkpoint, which are compared with their checksum."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredTensor, saved: SavedTensor) -> None:
        super().__init__(checkpoint.reader, stored)
        self._checkpoint, self._saved, self._name = checkpoint, saved, stored.name

    def real(self) -> torch.Tensor:
        """Read it, anew each time."""
        checkpoint = self._checkpoint
        try:
            values = super().real()
            checkpoint.check(self._saved.file, checksum(values), self._saved.crc32c, self._name)
        except SwapError as error:
            if checkpoint.reader.closed:
                raise SwapError(
                    f"tensor {self._name!r} of {checkpoint.directory} is read when it is used, and the checkpoint is "
                    "not the one any more that it was: clone what is to be kept while it is loaded"
                ) from error
            checkpoint.reader.failure = checkpoint.reader.failure or error
            raise
        return values


@torch.no_grad()
def _fill(value: torch.Tensor, stored: StoredTensor, saved: SavedTensor, checkpoint: Checkpoint) -> None:
    """Read a long tensor into its memory, some rows at a time."""
    row_numel = stored.shape.numel() // stored.shape[0]
    rows = max(1, _PIECE_BYTES // (row_numel * stored.dtype.itemsize))
    parts = []
    with gathered([value]) if isinstance(value, torch.nn.Parameter) else torch.no_grad():
        target = value.detach()
        for row in range(0, stored.shape[0], rows):
            part = target[row : row + rows]
            data = checkpoint.elements(stored, row * row_numel, (row + part.shape[0]) * row_numel)
            parts.append((checksum(data), data.nbytes))
            part.copy_(data.view(part.shape))
    checkpoint.check(saved.file, join_checksums(parts), saved.crc32c, stored.name)
