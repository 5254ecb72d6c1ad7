"""The state of an optimizer in a checkpoint, loaded into whatever cut it has now.

What was saved is the records themselves, each a file of segments, and in the index what was kept in memory of them. The
cut need not be the same: another `bucket_bytes` or number of threads gives other segments, and an optimizer that is not
swapped has whole tensors. Where the cut is the same, records pass whole.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.boxed_state import BoxedState
from swapper.checkpoint.index import SavedHole, SavedOptimizer, SavedParameter, SavedSegment, SavedWhole
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.state_reader import check_groups
from swapper.checkpoint.state_writer import described_parameter, kind_of, memory_stride, names_of_parameters, swapper_of
from swapper.checkpoint.streams import TensorStream
from swapper.errors import ConfigError, SwapError
from swapper.io.checksums import checksum
from swapper.io.host_memory import bytes_of
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.segments import MASTER, Bucket, Segment
from swapper.optimizer.state_dicts import StateRecords, as_plain_state, refuse_stray_state, steps_on_device
from swapper.storage.buffers import Lease
from swapper.tensors.sharded import Sharding, box_of, is_sharded, local_of, sharded_like
from swapper.tensors.strides import contiguous_stride, is_dense, same_order

__all__ = ["loading", "optimizer_differences", "ready_to_load_state"]

_refusals: weakref.WeakKeyDictionary[Optimizer, contextlib.ExitStack] = weakref.WeakKeyDictionary()
"""The hooks that keep optimizers that are not swapped from stepping."""


@contextlib.contextmanager
def loading(optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter], directory: Path) -> Iterator[None]:
    """While a checkpoint is loaded into it and into `parameters`. If that fails, no step can be made before a load."""
    swapper = swapper_of(optimizer)
    if swapper is not None:
        loaded = set(map(id, parameters))
        with swapper.loading([p for p in parameters_of(optimizer) if id(p) in loaded]):
            yield
        return
    try:
        yield
    except BaseException:
        if optimizer not in _refusals:
            _refuse_steps(optimizer, directory)
        raise
    _allow_steps(optimizer)


def _refuse_steps(optimizer: Optimizer, directory: Path) -> None:
    def refuse(*_: object) -> None:
        raise SwapError(
            f"step is refused: loading {directory} failed, and parameters and optimizer state no longer belong "
            "together; load both from a checkpoint"
        )

    stack = _refusals[optimizer] = contextlib.ExitStack()
    stack.callback(optimizer.register_step_pre_hook(refuse).remove)
    stack.callback(optimizer.register_load_state_dict_post_hook(_allow_steps).remove)


def _allow_steps(optimizer: Optimizer) -> None:
    if optimizer in _refusals:
        _refusals.pop(optimizer).close()


def ready_to_load_state(optimizer: Optimizer, checkpoint: Checkpoint, number: int) -> Callable[[], None]:
    """Prepare to make the state in `checkpoint` that of `optimizer`, which was found to match, and options of groups.

    What the checkpoint says of itself is compared here; nothing is changed, and little is read.

    Args:
        number: of the optimizer in the checkpoint.

    Returns:
        To be called when the parameters are loaded. Raises SwapError or SwapIOError if a file is damaged or cannot be
        read. No step can be made then before a load succeeds.

    Raises:
        ConfigError: it has master weights, or state that belongs to no parameter, and `optimizer` cannot.
        SwapError, SwapIOError: as above; or some of it is in an annex that this process does not reach.
    """
    loader = _StateLoader(optimizer, checkpoint, number)
    checkpoint.require(loader.state.files())
    swapper = swapper_of(optimizer)
    if swapper is not None:
        swapper.check_open()
    if loader.state.with_master and (swapper is None or not swapper.has_masters):
        raise ConfigError(
            "offload_optimizer.master_weights: the checkpoint has master weights, but they are off here; set it to true"
        )
    state_dict = loader.state.parts.state_dict({}, range(len(loader.state.wholes)))
    if swapper is not None:
        refuse_stray_state(state_dict["state"], ())
    return functools.partial(loader.load, state_dict)


def _bits_now(
    parameters: Sequence[torch.nn.Parameter],
    strides: Sequence[list[int]],
    position: int,
    ranges: Sequence[tuple[int, int]],
) -> Iterator[torch.Tensor]:
    """The values that a parameter has now. See `Bits`."""
    values, stride = local_of(parameters[position]).detach().cpu(), strides[position]
    if not same_order(values.shape, stride, memory_stride(values)) or not is_dense(values):
        values = torch.empty_strided(values.shape, tuple(stride), dtype=values.dtype, device="cpu").copy_(values)
    flat = values.as_strided((values.numel(),), (1,))
    return (flat[start:stop] for start, stop in ranges)


class _StateLoader:
    """Loads the state of one optimizer."""

    def __init__(self, optimizer: Optimizer, checkpoint: Checkpoint, number: int) -> None:
        self._parameters = list(parameters_of(optimizer))
        boxes = [box_of(p) for p in self._parameters]
        strides: list[list[int]] = [[] for _ in boxes]
        # Not a method of this: the reader would be a cycle with it, which keeps optimizer and parameters.
        bits = functools.partial(_bits_now, self._parameters, strides)
        self.state = BoxedState(checkpoint, number, boxes, bits)
        self._saved = self.state.saved.parameters
        for position in range(len(boxes)):
            if (part := self.state.part_of.get(position)) is not None:
                strides[position] = self._saved[part].stride
        self._optimizer = optimizer
        self._checkpoint = checkpoint
        self._position_of = {id(p): position for position, p in enumerate(self._parameters)}
        self._bucket_at = {
            (first.parameter, first.start): bucket
            for bucket in self.state.saved.buckets
            if bucket.segments and isinstance(first := bucket.segments[0], SavedSegment)
        }

    def load(self, state_dict: dict[str, Any]) -> None:
        """Replace what `state_dict` has, which is all but the state of parameters, and that."""
        optimizer, swapper = self._optimizer, swapper_of(self._optimizer)
        optimizer.load_state_dict(state_dict)
        with_state = [(position, p) for position, p in enumerate(self._parameters) if self.state.has_state(position)]
        if swapper is not None:
            swapper.restore([p for _, p in with_state], self._fill)
            return
        stepped = steps_on_device(optimizer)
        optimizer.state.update({p: self._plain_state(position, p, p in stepped) for position, p in with_state})

    def _plain_state(self, position: int, p: torch.nn.Parameter, on_device: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        split = self.state.split(position) if is_sharded(p) else ()
        for key, given in self.state.state(position).items():
            value = _whole(given) if isinstance(given, TensorStream) else given
            if not isinstance(value, torch.Tensor):
                state[key] = copy.deepcopy(value)
                continue
            plain = as_plain_state(key, self._laid(position, value), p, False, on_device=on_device)
            plain = plain.clone() if plain is given else plain
            state[key] = sharded_like(plain, p) if key in split else plain
        return state

    def _fill(self, records: StateRecords, optimizer: Optimizer) -> None:
        known = ((records.plan.of(p), position) for position, p in enumerate(self._parameters))
        wanted = {of for of, position in known if of is not None and self.state.has_state(position)}
        records.bucket_records.steps = self.state.saved.encoded_steps
        records.replace(optimizer, wanted, self._entries, True, self._take_whole)
        for of in wanted:
            if of.collective:
                split = self.state.split(self._position_of[id(of.parameter)]) - {MASTER}
                of.shardings = dict.fromkeys(split, Sharding.of(of.parameter))
        for position, p in enumerate(self._parameters):
            part = self.state.part_of.get(position)
            edited = part is not None and self.state.parts.edited.get(part, False)
            segments = records.plan.segments_of(p) if edited else ()
            if edited and len(segments) > 1 and segments[0].checksum is not None:
                # Others of its segments may have been taken as they are, with masters that go with other bits: the
                # next step is to make all of them anew. See [Note: edited parameters].
                segments[0].checksum ^= 0xFFFFFFFF

    def _entries(self, segment: Segment) -> dict[str, Any]:
        """The state of the parameter of `segment` in its class's own format; what can be cut is cut to this slice.

        Slices are 1-D and in the order of the parameter's memory, also that of the master.
        """
        p, position = segment.local, self._position_of[id(segment.parameter)]
        state = self.state.state(position)
        for key, value in state.items():
            if isinstance(value, TensorStream):
                cut = not segment.whole and value.shape == p.shape
                if cut and same_order(p.shape, value.stride, memory_stride(p)):
                    state[key] = value.read(segment.start, segment.stop)
                    continue
                state[key] = value = _whole(value)
            if isinstance(value, torch.Tensor):
                state[key] = self._laid(position, value)
        return state

    def _laid(self, position: int, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the state as it is to lie in memory: as its parameter does, if it did so when it was saved.

        Fused kernels, which walk through memory, take it that it does. What a class has in another order it has in it
        again.
        """
        local, part = local_of(self._parameters[position]), self.state.part_of.get(position)
        if value.shape != local.shape or not is_dense(local) or same_order(local.shape, value.stride(), local.stride()):
            return value
        if part is not None and not same_order(local.shape, value.stride(), self._saved[part].stride):
            return value
        return torch.empty_strided(local.shape, local.stride(), dtype=value.dtype, device="cpu").copy_(value)

    def _part(self, segment: Segment) -> int:
        """The position in the checkpoint of the part that this rank has of the parameter; -1 if there is none."""
        position = self._position_of.get(id(segment.parameter), -1) if not segment.is_hole else -1
        part = self.state.part_of.get(position) if position >= 0 else None
        return -1 if part is None else part

    # --- Records that pass whole -------------------------------------------------------------------------------------

    def _take_whole(self, bucket: Bucket, lease: Lease) -> int:
        """Read a record as it is, if `bucket` is cut as in the checkpoint. Returns its length; 0 if it is not."""
        saved = self._bucket_at.get((self._part(bucket.segments[0]), bucket.segments[0].start))
        if saved is None or saved.file is None or len(bucket.segments) != len(saved.segments):
            return 0
        if not all(map(self._is_same, bucket.segments, saved.segments)):
            return 0
        known = self._checkpoint.file(saved.file)
        if known.length_bytes > bucket.length_bytes:
            return 0
        data = lease.tensor[: known.length_bytes]
        file = self._checkpoint.reader.open(self._checkpoint.path(saved.file))
        # Over before the lease is put back, or the cache could write or reuse it under the transfer.
        self._checkpoint.reader.handle.read(file, data, 0).wait()
        self._checkpoint.check(saved.file, checksum(data), known.crc32c)
        tie_bytes = sum((segment.tie_bits + 7) // 8 for segment in saved.segments)
        if data.numel() != _record_bytes(bucket, lease, tie_bytes):
            return 0
        for segment, described in zip(bucket.segments, saved.segments, strict=True):
            assert isinstance(described, SavedSegment)
            self._describe(segment, described)
        return data.numel()

    def _is_same(self, segment: Segment, saved: SavedSegment | SavedHole) -> bool:
        """True if all that a record has of `segment` lies as `saved` says."""
        if isinstance(saved, SavedHole):  # It would come along.
            return False
        position = self._part(segment)
        cut = (position, segment.start, segment.stop, segment.whole)
        if cut != (saved.parameter, saved.start, saved.stop, saved.whole):
            return False
        if position < 0 or (segment.master != saved.master and self.state.parts.has_state(position)):
            return False
        p = segment.local
        if not same_order(p.shape, self._saved[position].stride, memory_stride(p)):
            return False
        if not segment.locations.keys() >= {*saved.present}:
            return False
        specs = {key: segment.locations[key].spec for key in saved.present}
        encodings = self.state.parts.encodings_of(saved)
        if any(spec.encoding != encodings.get(key, "exact") for key, spec in specs.items()):
            return False
        return all(
            same_order(spec.shape, saved.strides.get(key, contiguous_stride(spec.shape)), spec.stride)
            for key, spec in specs.items()
        )

    def _describe(self, segment: Segment, saved: SavedSegment) -> None:
        """Let `segment` know what is kept in memory of a record that it has now."""
        position = saved.parameter
        if not self.state.parts.has_state(position):
            return
        small = self.state.parts.small_of_segment(saved)
        segment.kept_master = small.pop(MASTER, None)
        segment.keys = list(self._saved[position].keys)
        segment.present = set(saved.present)
        segment.small = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in small.items()
            if key in segment.keys
        }
        segment.checksum, segment.tie_bits = saved.parameter_crc32c, saved.tie_bits


def _record_bytes(bucket: Bucket, lease: Lease, tie_bytes: int) -> int:
    """Length of the record that a buffer begins with, by its header; 0 if that is not the header of such a bucket."""
    if bucket.packing is not None:
        return bucket.packing.length_bytes(lease.tensor, tie_bytes)
    header = bucket.layout.header(tie_bytes)
    return bucket.layout.used_bytes(tie_bytes) if bytes_of(lease.tensor[: len(header)]) == header else 0


def _whole(stream: TensorStream) -> torch.Tensor:
    return stream.read(0, stream.numel).as_strided(stream.shape, stream.stride)


# --- Whether an optimizer is that of a checkpoint --------------------------------------------------------------------


def optimizer_differences(model: torch.nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint) -> list[str]:
    """Each difference between the optimizers and those of the checkpoint, in words."""
    saved = checkpoint.index.optimizers
    if len(saved) != len(optimizers):
        return [f"there are {len(optimizers)} optimizers, and {len(saved)} in the checkpoint"]
    names = names_of_parameters(model)
    found = []
    for number, (optimizer, there) in enumerate(zip(optimizers, saved, strict=True)):
        which = f"optimizer {number}" if len(saved) > 1 else "the optimizer"
        check_groups(checkpoint, there, which)
        found += _differences(optimizer, there, names, which)
    return found


def _differences(optimizer: Optimizer, saved: SavedOptimizer, names: Mapping[int, str], which: str) -> list[str]:
    found = []
    if kind_of(optimizer) != saved.kind:
        found.append(f"{which} is a {kind_of(optimizer)}, and a {saved.kind} in the checkpoint")
    groups = [
        [described_parameter(names.get(id(p), ""), p.shape, p.stride(), p.dtype) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    wholes = saved.wholes()
    were = [[wholes[position] for position in positions] for positions in saved.groups]
    if len(groups) != len(were):
        return [*found, f"{which} has {len(groups)} parameter groups, and {len(were)} in the checkpoint"]
    group_was = {each.name: g for g, group in enumerate(were) for each in group if each.name}
    for g, (group, was) in enumerate(zip(groups, were, strict=True)):
        if len(group) != len(was):
            found.append(f"group {g} of {which} has {len(group)} parameters, and {len(was)} in the checkpoint")
        for i, (one, other) in enumerate(zip(group, was, strict=False)):
            name = one.name
            if _agree(one, other):
                continue
            if name != other.name and group_was.get(name, g) != g:
                found.append(f"{name} is in group {g} of {which}, and in group {group_was[name]} in the checkpoint")
            else:
                found.append(
                    f"parameter {i} of group {g} of {which} is {_words(one)}, and {_words(other)} in the checkpoint"
                )
    return found


def _agree(one: SavedParameter, other: SavedWhole) -> bool:
    """True if nothing that the checkpoint knows contradicts `one`."""
    if other.dtype:
        return (one.name, one.shape, one.dtype) == (other.name, other.shape, other.dtype)
    return other.name in ("", one.name) and other.shape in (None, one.shape)


def _words(p: SavedParameter | SavedWhole) -> str:
    if not p.dtype:
        return f"{p.name or 'one without a name'} ({'of unknown shape' if p.shape is None else p.shape})"
    return f"{p.name or 'one that the model does not have'} ({p.dtype}, {p.shape or []})"
