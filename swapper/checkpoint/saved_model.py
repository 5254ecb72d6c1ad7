"""A model in a checkpoint: its state dict in safetensors files, with the names that every other tool expects."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from swapper.checkpoint.index import INDEX, SavedTensor, crc32c_of
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.values import decode, encode
from swapper.checkpoint.writer import NewCheckpoint
from swapper.errors import SwapError
from swapper.files.tensor_files import FromFile, StoredTensor
from swapper.io.checksums import checksum, join_checksums
from swapper.parameter.cache import Held
from swapper.parameter.swapper import ParameterSwapper
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import stored_dtype
from swapper.tensors.evicted import EvictedParameter
from swapper.tensors.evicted_gradients import GradientEvictedParameter
from swapper.tensors.evicted_views import EvictedView
from swapper.tensors.homes import gathered
from swapper.tensors.unfilled import refuse_unfilled

__all__ = ["differences", "plain_model", "ready_to_load", "save_model", "save_state_dict", "stored_state_dict"]

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


def save_model(model: torch.nn.Module, new: NewCheckpoint, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put the state dict of `model` into `new`: records by a second name, else written.

    Args:
        values: takes the tensors within what is no tensor, as the extra state of modules.

    Returns:
        The fields of `SavedModel`.
    """
    memory, tied, others = _sorted_out(_state_dict(model), values)
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[RecordKey, tuple[str, int, int]] = {}
    for held in _linkable(model, memory):
        tensors.update(_describe_record(held, files))
    if files:
        new.add_records(vars(model)["swapper"].store, files)
    for name in tensors:
        del memory[name]
    tensors.update(_write_memory(memory, new))
    _write_for_others(model, new, tensors)
    return {"tensors": tensors, "tied": tied, "values": others}


def _state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict, with the parameters themselves unless the model's own `state_dict` has no such argument."""
    try:
        inspect.signature(model.state_dict).bind(keep_vars=True)
    except TypeError:
        return model.state_dict()
    return model.state_dict(keep_vars=True)


def save_state_dict(state: Mapping[str, Any], new: NewCheckpoint, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put a state dict whose tensors are in memory into `new`: as `save_model`. One object is one tensor."""
    memory, tied, others = _sorted_out(state, values)
    tensors = _write_memory(memory, new)
    _write_for_others(None, new, tensors)
    return {"tensors": tensors, "tied": tied, "values": others}


def _sorted_out(
    state: Mapping[str, Any], values: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    """The tensors, the names that are one with another, and the encoded values that are none."""
    memory: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    others: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            others[name] = encode(value, f"the state dict's {name!r}", values, f"model.{name}.")
        elif (first := first_names.setdefault(id(value), name)) != name:
            tied[name] = first
        else:
            _check_can_be_saved(name, value)
            memory[name] = value
    return memory, tied, others


def _write_memory(memory: Mapping[str, torch.Tensor], new: NewCheckpoint) -> dict[str, dict[str, Any]]:
    crcs = new.write_tensors(_MEMORY, memory) if memory else {}
    return {name: _described(_MEMORY, memory[name], crc) for name, crc in crcs.items()}


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


def _described(file: str, value: torch.Tensor, crc32c: int) -> dict[str, Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    return {"file": file, "dtype": dtype, "shape": list(value.shape), "crc32c": crc32c}


def _linkable(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[Held]:
    """The records whose tensors are those of the state dict, under the same names."""
    swapper = vars(model).get("swapper")
    if not isinstance(swapper, ParameterSwapper):
        return
    for held in swapper.settled_records():
        if all(state.get(place.name) is place.parameter for place in held.plan.places):
            yield held


def _describe_record(held: Held, files: dict[RecordKey, tuple[str, int, int]]) -> dict[str, dict[str, Any]]:
    """What the index says of a record's tensors; its file is put into `files`, for `NewCheckpoint.add_records`."""
    name = f"model-{held.number:05d}.safetensors"
    crcs = []
    for place, crc in zip(held.plan.places, held.checksums, strict=True):
        if not place.parameter.is_contiguous():  # The file has its elements in another order than memory.
            crc = checksum(place.parameter.detach().contiguous())
        crcs.append(crc)
    layout = held.plan.layout
    header = layout.header(0)
    parts = [(crc32c_of(header), len(header))]
    parts += [(crc, place.length_bytes) for crc, place in zip(crcs, held.plan.places, strict=True)]
    files[held.key] = name, layout.exact_bytes(), join_checksums(parts)
    return {
        place.name: _described(name, place.parameter, crc) for place, crc in zip(held.plan.places, crcs, strict=True)
    }


def _write_for_others(model: torch.nn.Module | None, new: NewCheckpoint, tensors: Mapping[str, Any]) -> None:
    """What tools of others look for: which file has which tensor, and the model's config if it can print one."""
    total = sum(math.prod(t["shape"]) * getattr(torch, t["dtype"]).itemsize for t in tensors.values())
    weight_map = {name: described["file"] for name, described in tensors.items()}
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
    names = saved.tensors.keys() | saved.tied.keys() | saved.values.keys()
    found = [f"the checkpoint lacks {name}" for name in state if name not in names]
    found += [
        f"the model does not have {name}" for name in [*saved.tensors, *saved.tied, *saved.values] if name not in state
    ]
    registered = _registered(model)
    source_of: dict[int, str] = {}
    for name, value in state.items():
        if name not in names or id(value) not in registered:
            continue
        source = saved.tied.get(name, name)
        if source not in saved.tensors:
            found.append(f"{name} is a tensor in the model and none in the checkpoint")
            continue
        if (first := source_of.setdefault(id(value), source)) != source:
            found.append(f"{first} and {source} are one tensor in the model and two in the checkpoint")
        there = saved.tensors[source]
        here = _described("", value, 0)
        for what in ("shape", "dtype"):
            if here[what] != (was := getattr(there, what)):
                found.append(f"{name} has {what} {here[what]} in the model and {was} in the checkpoint")
    return found


def _registered(model: torch.nn.Module) -> set[int]:
    """The `id` of what is loaded into its place. All else is extra state, which may change its kind and shape."""
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def stored_state_dict(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tensors of the model in `checkpoint`, by all their names. Each is read, and checked, whenever it is used.

    When `checkpoint` is closed they are read from whatever has its name then, and checked.
    """
    saved = checkpoint.index.model
    views = {
        name: EvictedView(_Checked(checkpoint, _stored(checkpoint, name, described), described))
        for name, described in saved.tensors.items()
    }
    for name, first in saved.tied.items():
        views[name] = views[first]
    return dict(views)


def ready_to_load(model: torch.nn.Module, checkpoint: Checkpoint) -> Callable[[], None]:
    """What makes the tensors in `checkpoint` those of `model`, which was found to match.

    Returns:
        It holds a piece of a tensor at a time. Raises SwapError or SwapIOError if a file is damaged or cannot be read.
        Part of the model may be loaded then.

    Raises:
        SwapError, SwapIOError: files are not what the index says. Nothing was changed.
    """
    saved = checkpoint.index.model
    stored = {name: _stored(checkpoint, name, described) for name, described in saved.tensors.items()}
    others = {
        name: decode(value, f"the state dict's {name!r}", checkpoint.small_tensor)
        for name, value in saved.values.items()
    }
    return partial(_load, model, checkpoint, stored, others)


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse what an index says of the model, if it would be refused when it is loaded.

    Raises:
        SwapError, SwapIOError: see above.
    """
    saved = checkpoint.index.model
    for name, described in saved.tensors.items():
        _stored(checkpoint, name, described)
    for name, value in saved.values.items():
        decode(value, f"the state dict's {name!r}", checkpoint.small_tensor)
    if lost := [name for name, source in saved.tied.items() if source not in saved.tensors]:
        raise SwapError(f"{checkpoint.directory / INDEX} is damaged: {lost[0]!r} is one tensor with none that is there")


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
        described, there = saved.tensors[source], stored[source]
        if id(value) not in registered:
            state[name] = _Checked(checkpoint, there, described).real()  # Whoever is given it may keep it.
        elif there.stop_bytes - there.start_bytes > _PIECE_BYTES and value.dim():
            if source == name:
                _fill(value, there, described, checkpoint)
            state[name] = value  # Given to itself, so that hooks of modules run, and nothing else happens.
        else:
            state[name] = EvictedView(_Checked(checkpoint, there, described))
    reader = checkpoint.reader
    reader.failure = None
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        if reader.failure is not None:
            raise reader.failure from None
        raise SwapError(f"{checkpoint.directory} could not be loaded: {error}") from error


def _stored(checkpoint: Checkpoint, name: str, described: SavedTensor) -> StoredTensor:
    """Where a tensor is, with the dtype and shape that the model knows."""
    stored = checkpoint.tensor(described.file, name)
    dtype = getattr(torch, described.dtype, None)
    shape = torch.Size(described.shape)
    length_bytes = stored.stop_bytes - stored.start_bytes
    if (
        not isinstance(dtype, torch.dtype)
        or stored.dtype != stored_dtype(dtype)
        or length_bytes != math.prod(shape) * dtype.itemsize
    ):
        raise SwapError(f"{stored.path}: tensor {name!r} is not what the index says; the checkpoint is damaged")
    return StoredTensor(stored.path, name, dtype, shape, stored.start_bytes, stored.stop_bytes)


class _Checked(FromFile):
    """The values of a tensor in a checkpoint, which are compared with their checksum."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredTensor, described: SavedTensor) -> None:
        super().__init__(checkpoint.reader, stored)
        self._checkpoint, self._described, self._name = checkpoint, described, stored.name

    def real(self) -> torch.Tensor:
        """Read it, anew each time."""
        checkpoint = self._checkpoint
        try:
            values = super().real()
            checkpoint.check(self._described.file, checksum(values), self._described.crc32c, self._name)
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
def _fill(value: torch.Tensor, stored: StoredTensor, described: SavedTensor, checkpoint: Checkpoint) -> None:
    """Read a long tensor into its place, some rows at a time."""
    row_bytes = stored.dtype.itemsize * (stored.shape.numel() // stored.shape[0])
    rows = max(1, _PIECE_BYTES // row_bytes)
    parts = []
    with gathered([value]) if isinstance(value, torch.nn.Parameter) else torch.no_grad():
        target = value.detach()
        for row in range(0, stored.shape[0], rows):
            part = target[row : row + rows]
            start = stored.start_bytes + row * row_bytes
            length = part.shape[0] * row_bytes
            piece = StoredTensor(stored.path, stored.name, stored.dtype, part.shape, start, start + length)
            data = checkpoint.reader.read(piece)
            parts.append((checksum(data), length))
            part.copy_(data)
    checkpoint.check(described.file, join_checksums(parts), described.crc32c, stored.name)
