"""A model in a checkpoint: its state dict in safetensors files, with the names that every other tool expects."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from swapper.checkpoint.index import INDEX, SavedModel, SavedTensor, crc32c_of
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.streams import model_box, model_stream
from swapper.checkpoint.values import decode
from swapper.checkpoint.writer import NewCheckpoint, RecordFile
from swapper.errors import SwapError, SwapIOError, show
from swapper.files.tensor_files import FromFile
from swapper.io.checksums import checksum, join_checksums
from swapper.parameter.cache import Held
from swapper.parameter.candidates import modules_with_tensors
from swapper.parameter.records import ParameterLocation
from swapper.parameter.swapper import ParameterSwapper
from swapper.process.warnings import warn_once
from swapper.storage.agreement import rank_count, rank_of_process
from swapper.storage.store import RecordKey
from swapper.tensors.dtypes import dtype_name
from swapper.tensors.evicted import EvictedParameter, EvictedTensor
from swapper.tensors.evicted_gradients import GradientEvictedParameter
from swapper.tensors.evicted_views import EvictedView, as_in_state_dict
from swapper.tensors.homes import gathered
from swapper.tensors.inner import has_own_class, inner_tensors, is_wrapper, made_of
from swapper.tensors.sharded import Box, box_of, is_sharded, local_of, sharded_like
from swapper.tensors.unfilled import refuse_unfilled

__all__ = [
    "check_can_be_saved",
    "check_model",
    "differences",
    "encoded_metadata",
    "encoded_value",
    "flat_state_dict",
    "linkable_records",
    "model_values",
    "plain_model",
    "ready_to_load_model",
    "record_file",
    "save_tensors",
    "stored_state_dict",
    "with_metadata",
    "write_for_others",
]

log = logging.getLogger(__name__)
_T = TypeVar("_T")

WEIGHTS_INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 16 << 20
"""Longer tensors are loaded in pieces."""

_KINDS = (
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Buffer),
    *(EvictedParameter, EvictedTensor, EvictedView, GradientEvictedParameter),
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


def encoded_value(value: object, name: str, new: NewCheckpoint) -> Any:
    """Return the index's form of a value of the state dict that is no tensor.

    Raises:
        SwapError: it cannot be saved.
    """
    return new.encode(value, f"the state dict's {name!r}", f"model.{name}.")


def encoded_metadata(state: Mapping[str, Any], new: NewCheckpoint) -> Any:
    """Return the index's form of the `_metadata` of a state dict: the versions of modules. None without any.

    Raises:
        SwapError: it cannot be saved.
    """
    if (metadata := getattr(state, "_metadata", None)) is None:
        return None
    if not _is_metadata(metadata):
        raise SwapError(f"the state dict's _metadata has no mapping for each module, as torch has: {show(metadata)}")
    kept = {key: {k: v for k, v in each.items() if k != "assign_to_params_buffers"} for key, each in metadata.items()}
    return new.encode(kept, "the state dict's _metadata", "model._metadata.")


def _is_metadata(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())


def with_metadata(state: Mapping[str, Any], checkpoint: Checkpoint) -> OrderedDict[str, Any]:
    """`state` as a state dict of torch: modules that find no version there take it for one of an older version.

    Raises:
        SwapError: the index is damaged.
    """
    whole = OrderedDict(state)
    if (encoded := checkpoint.index.model.metadata) is not None:
        metadata = decode(encoded, "the state dict's _metadata", checkpoint.small_tensor)
        if not _is_metadata(metadata):
            raise SwapError(f"{checkpoint.directory / INDEX} is damaged: the versions of modules are {show(metadata)}")
        vars(whole)["_metadata"] = metadata
    return whole


def save_tensors(
    state: Mapping[str, Any],
    new: NewCheckpoint,
    model: torch.nn.Module | None,
    parts: Mapping[str, torch.Tensor] | None = None,
) -> SavedModel:
    """Put tensors and other values of a state dict into `new`: records by a second name, else written.

    Args:
        state: of a model, by name. One object is one tensor.
        model: links its records; None if all of it is in memory.
        parts: of other tensors, by their names in the files. None if there are no others.

    Raises:
        SwapError: something cannot be saved.
        SwapIOError: the drive failed or is full.
    """
    saved = SavedModel(tensors={}, tied={}, values={}, metadata=encoded_metadata(state, new))
    memory: dict[str, torch.Tensor] = {}
    first_names: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            saved.values[name] = encoded_value(value, name, new)
        elif (first := first_names.setdefault(id(value), name)) != name:
            saved.tied[name] = first
        else:
            check_can_be_saved(name, value)
            memory[name] = value
    files: dict[RecordKey, RecordFile] = {}
    for held in linkable_records(model, memory):
        files[held.key] = record_file(held, new, saved.tensors)
    if files:
        new.add_records(vars(model)["swapper"].store, files)
    for name in saved.tensors:
        del memory[name]
    memory |= parts or {}
    if memory:  # Evicted ones come one by one.
        file = new.name_of("model", "memory")
        for name, crc in new.write_tensors(file, memory).items():
            saved.tensors[name] = _described(file, memory[name], crc)
    if parts is None:  # Else tools of others could not put them together.
        write_for_others(model, new, saved.tensors)
    return saved


def flat_state_dict(model: torch.nn.Module) -> OrderedDict[str, Any]:
    """The state dict, with the parameters themselves unless the model's own `state_dict` has no such argument.

    Of a tensor that is made of others it has those, and a text that says how.
    """
    try:
        inspect.signature(model.state_dict).bind(keep_vars=True)
    except TypeError:
        state = model.state_dict()
    else:
        state = model.state_dict(keep_vars=True)
    flat: OrderedDict[str, Any] = OrderedDict()
    if hasattr(state, "_metadata"):
        vars(flat)["_metadata"] = state._metadata
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or not (text := made_of(value)):
            flat.setdefault(name, value)
            continue
        flat[name if is_wrapper(value) else f"{name}.quant_state"] = text
        flat.update((inner.name, inner.tensor) for inner in inner_tensors(name, value))
    return flat


def _inside(model: torch.nn.Module) -> set[int]:
    """The `id` of the tensors inside parameters and buffers of `model`, and beside those of bitsandbytes."""
    found: set[int] = set()
    for prefix, module in modules_with_tensors(model):
        for name, whole in (*module._parameters.items(), *module._buffers.items()):
            if whole is not None:
                inner = inner_tensors(prefix + name, whole, module)
                found.update(id(each.tensor) for each in inner if each.tensor is not whole)
    return found


def check_can_be_saved(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that is more than its values, or has none.

    Raises:
        SwapError: it is one; named, with what to do.
    """
    refuse_unfilled(value)
    known = type(value) in _KINDS or has_own_class(value)
    if not known or (type(value) is torch.nn.Parameter and type(value.data) is not torch.Tensor):
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


def linkable_records(model: torch.nn.Module | None, state: Mapping[str, torch.Tensor]) -> Iterator[Held]:
    """The records whose tensors are those of the state dict, under the same names."""
    swapper = None if model is None else vars(model).get("swapper")
    if isinstance(swapper, ParameterSwapper):
        for held in swapper.flushed_records():
            if all(_is_linkable(location, state) for location in held.plan.locations):
                yield held


def _is_linkable(location: ParameterLocation, state: Mapping[str, torch.Tensor]) -> bool:
    """True if the state dict has the tensor, of the shape that it had when its record was laid out."""
    return state.get(location.name) is location.parameter and location.laid_out in (None, location.shape)


def record_file(held: Held, new: NewCheckpoint, tensors: dict[str, SavedTensor]) -> RecordFile:
    """The file of a record; its tensors are put into `tensors`, by their names in it."""
    name = new.name_of("model", f"{held.number:05d}")
    layout = held.plan.layout
    header = layout.header(0)
    parts = [(crc32c_of(header), len(header))]
    for entry, location, crc in zip(layout.entries, held.plan.locations, held.checksums, strict=True):
        if not location.parameter.is_contiguous():  # The file has its elements in another order than memory.
            crc = checksum(location.parameter.detach().contiguous().cpu())
        tensors[entry.name] = _described(name, location.parameter, crc)
        parts.append((crc, location.length_bytes))
    return RecordFile(name, layout.exact_bytes(), join_checksums(parts))


def write_for_others(model: torch.nn.Module | None, new: NewCheckpoint, tensors: Mapping[str, SavedTensor]) -> None:
    """Write what tools of others look for: which file has which tensor, and the model's config if it can print one.

    Not of a checkpoint with annexes, whose files they would not find.
    """
    if new.annex is not None:
        return
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
    wholes = saved.wholes()
    state = flat_state_dict(model)
    names = [*wholes, *saved.tied, *saved.values]
    known = set(names)
    found = [f"the checkpoint lacks {name}" for name in state if name not in known]
    found += [f"the model does not have {name}" for name in names if name not in state]
    registered = _registered(model) | _inside(model)
    source_of: dict[int, str] = {}
    own = _own_tensors(checkpoint)
    texts = model_values(checkpoint, own=True) if any(isinstance(value, str) for value in state.values()) else {}
    for name, value in state.items():
        if isinstance(value, str) and name in known and texts.get(name) != value:
            found.append(f"{name} is {value} in the model and {texts.get(name, 'a tensor')} in the checkpoint")
        if name not in known or id(value) not in registered:
            continue
        source = saved.tied.get(name, name)
        if source not in wholes:
            found.append(f"{name} is a tensor in the model and none in the checkpoint")
            continue
        if (first := source_of.setdefault(id(value), source)) != source:
            found.append(f"{first} and {source} are one tensor in the model and two in the checkpoint")
        dtype, shape = wholes[source]
        if (piece := own.get(source, source)) != source:
            dtype, shape = saved.tensors[piece].dtype, saved.tensors[piece].shape
        for what, here, was in (
            ("shape", list(value.shape), shape),
            ("dtype", dtype_name(value.dtype), dtype),
        ):
            if here != was:
                found.append(f"{name} has {what} {here} in the model and {was} in the checkpoint")
    return found


def _registered(model: torch.nn.Module) -> set[int]:
    """The `id` of all that is loaded in place. The rest is extra state, which may change its kind and shape."""
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def model_values(checkpoint: Checkpoint, *, own: bool = False) -> dict[str, Any]:
    """The values of the model's state dict that are no tensors, decoded.

    Args:
        own: those of this rank, where it had others than rank 0.
    """
    saved = checkpoint.index.model
    values = saved.values | _of_this_rank(checkpoint, saved.own_values) if own else saved.values
    return {name: _decoded(value, name, checkpoint) for name, value in values.items()}


def _decoded(value: Any, name: str, checkpoint: Checkpoint) -> Any:
    return decode(value, f"the state dict's {name!r}", checkpoint.small_tensor)


def stored_state_dict(checkpoint: Checkpoint) -> OrderedDict[str, Any]:
    """The tensors of the model in `checkpoint`, by all their names. Each is read, and checked, whenever it is used.

    When `checkpoint` is closed they are read from whatever has its name then, and checked.
    """
    saved = checkpoint.index.model
    views: dict[str, Any] = {
        name: EvictedView(_joined(checkpoint, name) if name in saved.sharded else _checked(checkpoint, name))
        for name in saved.wholes()
    }
    return with_metadata(views | {name: views[first] for name, first in saved.tied.items()}, checkpoint)


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse what an index says of the model, if it would be refused when it is loaded."""
    saved = checkpoint.index.model
    for name, tensor in saved.tensors.items():
        if checkpoint.reaches(tensor.file):
            checkpoint.model_tensor(name)
    for name in saved.sharded:
        model_stream(checkpoint, name)
    model_values(checkpoint)
    with_metadata({}, checkpoint)
    for name, values in saved.own_values.items():
        for value in values.values():
            _decoded(value, name, checkpoint)
    if lost := [name for name, source in saved.tied.items() if source not in saved.wholes()]:
        raise SwapError(f"{checkpoint.directory / INDEX} is damaged: {lost[0]!r} is one tensor with none that is there")


def ready_to_load_model(model: torch.nn.Module, checkpoint: Checkpoint) -> Callable[[], None]:
    """Prepare to make the tensors in `checkpoint` those of `model`, which was found to match. Nothing is changed.

    Returns:
        Loads them, and holds a piece of a tensor at a time. Raises SwapError or SwapIOError if a file is damaged or
        cannot be read. Part of the model may be loaded then.

    Raises:
        SwapError, SwapIOError: files are not what the index says.
    """
    check_model(checkpoint)
    checkpoint.require(_needed_files(model, checkpoint))
    return partial(_load, model, checkpoint, model_values(checkpoint, own=True))


def _needed_files(model: torch.nn.Module, checkpoint: Checkpoint) -> Iterator[str]:
    """The files that `_load` reads."""
    saved, own = checkpoint.index.model, _own_tensors(checkpoint)
    wholes = saved.wholes()
    for name, value in flat_state_dict(model).items():
        source = saved.tied.get(name, name)
        if not isinstance(value, torch.Tensor) or source not in wholes:
            continue
        if source not in saved.sharded:
            yield saved.tensors[own.get(source, source)].file
            continue
        box = box_of(value)
        for part, offsets in saved.sharded[source].parts.items():
            if Box(tuple(offsets), tuple(saved.tensors[part].shape)).overlaps(box):
                yield saved.tensors[part].file


def _load(model: torch.nn.Module, checkpoint: Checkpoint, others: Mapping[str, Any]) -> None:
    saved = checkpoint.index.model
    own = _own_tensors(checkpoint)
    registered, inside = _registered(model), _inside(model)
    filled: set[int] = set()  # By `id`: what is one tensor in the checkpoint may be two here, and the other way round.
    state: dict[str, Any] = {}
    for name, value in flat_state_dict(model).items():
        if name in others and name not in own:
            if not isinstance(value, str):  # Else a tensor that is made of those that follow.
                state[name] = others[name]
            continue
        source = saved.tied.get(name, name)
        in_parts = source in saved.sharded or is_sharded(value)
        piece = source if in_parts else own.get(source, source)
        if id(value) not in registered and id(value) not in inside:  # Whoever is given it may keep it.
            state[name] = _local_values(value, checkpoint, piece) if in_parts else _checked(checkpoint, piece).real()
        elif in_parts or id(value) in inside or checkpoint.model_tensor(piece).length_bytes > _PIECE_BYTES:
            if id(value) not in filled:
                _fill(value, checkpoint, piece)
                filled.add(id(value))
            if id(value) not in inside:  # Modules do not know those by this name.
                # To itself, so that hooks of modules run, and no more happens.
                state[name] = value if in_parts else as_in_state_dict(value)
        else:
            state[name] = EvictedView(_checked(checkpoint, piece))
    reader = checkpoint.reader
    reader.failure = None
    noted = _NotedFailure()
    try:
        with noted:
            model.load_state_dict(with_metadata(state, checkpoint), strict=not inside)
    except RuntimeError as error:
        if (failure := reader.failure or noted.failure) is not None:
            raise failure from None
        raise SwapError(f"{checkpoint.directory} could not be loaded: {error}") from error


class _NotedFailure(TorchFunctionMode):
    """Notes the failure of a drive or of an accelerator, of which torch's `load_state_dict` keeps the text alone."""

    failure: SwapIOError | torch.OutOfMemoryError | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (SwapIOError, torch.OutOfMemoryError) as error:
            self.failure = error
            raise


def _own_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """The names in the files of those tensors of which this rank had others than rank 0."""
    return _of_this_rank(checkpoint, checkpoint.index.model.own)


def _of_this_rank(checkpoint: Checkpoint, own: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Return the values in which this rank differed from rank 0, if there are as many ranks."""
    if not own:
        return {}
    if rank_count() == checkpoint.index.ranks:
        rank = str(rank_of_process())
        return {name: each[rank] for name, each in own.items() if rank in each}
    warn_once(
        log,
        f"{checkpoint.directory} was saved by {checkpoint.index.ranks} ranks, and {next(iter(own))} was not the same "
        f"on them (so were {len(own)} in all): it is taken from rank 0 on each of {rank_count()} ranks",
    )
    return {}


def _local_values(value: Any, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The part of a tensor of the model that `value` is of it, in memory of its own; a DTensor if that is one."""
    local = torch.empty_like(local_of(value), requires_grad=False)
    found = sharded_like(local, value)
    _fill(found, checkpoint, name)
    return found


@torch.no_grad()
def _fill(value: torch.Tensor, checkpoint: Checkpoint, name: str) -> None:
    """Read the part of a tensor of the model that this rank has of it, some rows at a time."""
    box, saved = box_of(value), checkpoint.index.model
    if not box.numel:
        return
    parts = saved.sharded[name].parts if name in saved.sharded else {name: [0] * len(box.sizes)}
    same = [part for part, at in parts.items() if box == Box(tuple(at), tuple(saved.tensors[part].shape))]
    # A part passes as it was saved, and is compared with its own checksum.
    read = partial(checkpoint.elements, checkpoint.model_tensor(same[0])) if same else model_box(checkpoint, name, box)
    sums = []
    with gathered([value]):
        target = local_of(value).detach()
        row_numel = max(1, math.prod(box.sizes[1:]))
        rows = max(1, _PIECE_BYTES // (row_numel * target.element_size()))
        for row in range(0, box.sizes[0] if box.sizes else 1, rows):
            part = target[row : row + rows] if box.sizes else target
            data = read(row * row_numel, row * row_numel + part.numel())
            if same:
                sums.append((checksum(data), data.nbytes))
            part.copy_(data.view(part.shape))
    if same:
        checkpoint.check(saved.tensors[same[0]].file, join_checksums(sums), saved.tensors[same[0]].crc32c, same[0])


def _joined(checkpoint: Checkpoint, name: str) -> FromFile:
    """The values of a tensor that is in parts, which are compared with the checksums of their files."""
    stream = model_stream(checkpoint, name)
    shape = torch.Size(stream.shape)
    return FromFile(checkpoint.reader, shape, stream.dtype, lambda: stream.read(0, stream.numel).view(shape))


def _checked(checkpoint: Checkpoint, name: str) -> FromFile:
    """The values of a tensor in a checkpoint, which are compared with their checksum."""
    stored, saved = checkpoint.model_tensor(name), checkpoint.index.model.tensors[name]

    def read() -> torch.Tensor:
        try:
            values = checkpoint.reader.read(stored)
            checkpoint.check(saved.file, checksum(values), saved.crc32c, stored.name)
        except SwapError as error:
            if checkpoint.reader.closed:
                raise SwapError(
                    f"tensor {stored.name!r} of {checkpoint.directory} is read when it is used, and the checkpoint is "
                    "not the one any more that it was: clone what is to be kept while it is loaded"
                ) from error
            raise
        return values

    return FromFile(checkpoint.reader, stored.shape, stored.dtype, read)
