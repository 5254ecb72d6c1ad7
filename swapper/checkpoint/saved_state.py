"""The state of an optimizer in a checkpoint, read into whatever cut it has now.

What was saved is the records themselves, each a file of segments, and in the index what was
kept in memory of them. To read it back, the cut need not be the same: another `bucket_bytes` or number of threads gives
other segments, and an optimizer that is not swapped has whole tensors. Where the cut is the same, records pass whole.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.checkpoint.index import INDEX, SavedBucket, SavedHole, SavedOptimizer, SavedParameter, SavedSegment
from swapper.checkpoint.reader import Checkpoint
from swapper.checkpoint.state_writer import contiguous_stride, memory_stride, swapper_of
from swapper.checkpoint.values import decode
from swapper.errors import ConfigError, SwapError
from swapper.files.tensor_files import StoredTensor
from swapper.io.checksums import checksum
from swapper.optimizer.master_codec import join_master
from swapper.optimizer.plan import parameters_of
from swapper.optimizer.segments import MASTER, Bucket, OptimizerParameter, Segment
from swapper.optimizer.state_dicts import StateRecords, as_plain_state
from swapper.sizes import SMALL_BYTES
from swapper.storage.buffers import Lease
from swapper.tensors.dtypes import PLAIN_DTYPES, stored_dtype
from swapper.tensors.strides import is_dense

__all__ = [
    "SavedPiece",
    "SavedState",
    "check_optimizers",
    "hollow",
    "loading",
    "ready_to_load",
]


_refusals: weakref.WeakKeyDictionary[Optimizer, contextlib.ExitStack] = weakref.WeakKeyDictionary()
"""What keeps optimizers that are not swapped from stepping."""


@contextlib.contextmanager
def loading(optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter], directory: Path) -> Iterator[None]:
    """While a checkpoint is loaded into it and into `parameters`. If that fails, no step can be made before a load."""
    swapper = swapper_of(optimizer)
    if swapper is not None:
        with swapper.loading([p for p in parameters_of(optimizer) if any(p is other for other in parameters)]):
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


def ready_to_load(
    optimizer: Optimizer, saved: SavedOptimizer, checkpoint: Checkpoint, number: int
) -> Callable[[], None]:
    """What makes the state in `checkpoint` that of `optimizer`, which was found to match, and options of groups too.

    What it says of itself is compared here; nothing is changed, and little is read.

    Returns:
        To be called when the parameters are loaded. Raises SwapError or SwapIOError if a file is damaged or cannot be
        read. No step can be made then before a load succeeds.

    Raises:
        ConfigError: it has master weights, and `optimizer` cannot.
        SwapError, SwapIOError: as above.
    """
    parameters = list(parameters_of(optimizer))
    state = SavedState(checkpoint, saved, parameters, number)
    state.check()
    swapper = swapper_of(optimizer)
    if state.has_masters and (swapper is None or not swapper.has_masters):
        raise ConfigError(
            "offload_optimizer.master_weights: the checkpoint has master weights, but they are off here; set it to true"
        )
    options = _decoded_options(saved, checkpoint, number)
    groups = [{**group, "params": places} for group, places in zip(options, saved.groups, strict=True)]
    return functools.partial(_load, optimizer, parameters, groups, state)


def _load(
    optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter], groups: list[dict[str, Any]], state: SavedState
) -> None:
    swapper = swapper_of(optimizer)
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    if swapper is not None:
        swapper.restore([p for i, p in enumerate(parameters) if state.has_state(i)], state.fill)
        return
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    for place, p in enumerate(parameters):
        if state.has_state(place):
            whole = Segment(OptimizerParameter(p), 0, p.numel(), True, "", (), {})
            loaded[p] = {key: _as_made_for(p, key, value) for key, value in state.entries(whole).items()}
    optimizer.state.update(loaded)


def _as_made_for(p: torch.nn.Parameter, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape == p.shape and is_dense(p) and value.stride() != p.stride():
        value = torch.empty_strided(p.shape, p.stride(), dtype=value.dtype).copy_(value)
    plain = as_plain_state(key, value, p, False)
    return plain.clone() if plain is value and value.numel() <= SMALL_BYTES else plain


class SavedState:
    """The state of one optimizer, in the files of a checkpoint.

    Args:
        checkpoint: it stays open as long as this is used.
        saved: what the index says.
        parameters: of the optimizer, in order; they have the values that the checkpoint has of them.
        number: of the optimizer in the checkpoint.
    """

    def __init__(
        self, checkpoint: Checkpoint, saved: SavedOptimizer, parameters: Sequence[torch.nn.Parameter], number: int
    ) -> None:
        self._checkpoint = checkpoint
        self._saved = saved
        self._what = f"optimizer {number}"
        self._parameters = parameters
        self._place_of = {id(p): i for i, p in enumerate(parameters)}
        self._shapes = [tuple(p.shape) for p in parameters]
        self._pieces: dict[int, list[SavedPiece]] = {}
        self._bucket_at: dict[tuple[int, int], SavedBucket] = {}
        self._small: tuple[int, dict[str, Any]] | None = None
        self._master: tuple[SavedPiece, torch.Tensor] | None = None
        self._edited: dict[int, bool] = {}
        for bucket in saved.buckets:
            tie_bytes = 0
            for i, segment in enumerate(bucket.segments):
                if isinstance(segment, SavedHole):
                    tie_bytes += (segment.tie_bits + 7) // 8
                    continue
                if (
                    segment.parameter >= len(parameters)
                    or not segment.start <= segment.stop <= parameters[segment.parameter].numel()
                ):
                    raise self._incomplete(segment.parameter)
                self._pieces.setdefault(segment.parameter, []).append(SavedPiece(bucket.file, i, segment, tie_bytes))
                tie_bytes += (segment.tie_bits + 7) // 8
            if bucket.segments and isinstance(first := bucket.segments[0], SavedSegment):
                self._bucket_at[first.parameter, first.start] = bucket
        self._with_master = {
            place
            for place, pieces in self._pieces.items()
            if any(piece.segment.parameter_crc32c is not None for piece in pieces)
        }
        # Of what has no state only those pieces are here whose buckets have others with some.
        self._pieces = {place: pieces for place, pieces in self._pieces.items() if self.has_state(place)}
        for place, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.segment.start)
            edges = [0, *(piece.segment.stop for piece in pieces)]
            if [piece.segment.start for piece in pieces] != edges[:-1] or edges[-1] != parameters[place].numel():
                raise self._incomplete(place)

    def check(self) -> None:
        """Refuse what does not fit together, as far as it can be seen without reading more than headers.

        Raises:
            SwapError: see above.
        """
        for place, saved in enumerate(self._saved.parameters):
            pieces = self._pieces.get(place, [])
            if not pieces and saved.keys:
                raise self._incomplete(place)
            if len(set(saved.keys)) != len(saved.keys) or (len(pieces) > 1 and any(p.segment.whole for p in pieces)):
                raise self._incomplete(place)
            if self.has_state(place) and not _is_dense_stride(self._shapes[place], saved.stride):
                raise self._incomplete(place)
            small = self._small_of(place)
            for piece in pieces:
                self._check_piece(place, piece, saved.keys, small)

    def _check_piece(self, place: int, piece: SavedPiece, keys: Sequence[str], small: Mapping[str, Any]) -> None:
        segment = piece.segment
        slices = self._decoded(segment.small, place)
        numel = segment.stop - segment.start
        if {*segment.present, *small, *slices} - {MASTER} != set(keys):
            raise self._incomplete(place)
        if any(not isinstance(value, torch.Tensor) or value.shape != (numel,) for value in slices.values()):
            raise self._incomplete(place)
        for key in segment.present:
            dtype = self._dtype(place, key)
            stored = self._stored_shape(piece, key, dtype)
            if segment.whole and not _is_dense_stride(stored, segment.strides.get(key, contiguous_stride(stored))):
                raise self._incomplete(place)
            if not segment.whole and stored != (numel,):
                raise self._incomplete(place)
        has_master, moves = segment.parameter_crc32c is not None, MASTER not in slices
        if not has_master and not moves:
            raise self._incomplete(place)
        if segment.tie_bits > (numel if has_master and moves else 0):
            raise self._incomplete(place)
        if has_master:
            split = self._saved.parameters[place].dtype == "bfloat16"
            if segment.master != ("split" if split else "stored"):
                raise self._incomplete(place)
            low = torch.int16 if split else torch.float32
            if moves and self._stored_shape(piece, MASTER, low) != (numel,):
                raise self._incomplete(place)

    def _stored_shape(self, piece: SavedPiece, key: str, dtype: torch.dtype) -> tuple[int, ...]:
        """The shape of a tensor that is in a file; it is refused if it is of another dtype."""
        if piece.file is None:
            raise self._incomplete(piece.segment.parameter)
        stored = self._checkpoint.tensor(piece.file, f"{piece.number}.{key}")
        if stored.dtype != stored_dtype(dtype) or (dtype.is_complex and stored.shape[-1:] != (2,)):
            raise self._incomplete(piece.segment.parameter)
        return tuple(stored.shape[:-1] if dtype.is_complex else stored.shape)

    @property
    def has_masters(self) -> bool:
        """Whether there are master weights."""
        return bool(self._with_master)

    def fill(self, records: StateRecords, optimizer: Optimizer) -> None:
        """Replace all state of `optimizer`, which is in `records`."""
        known = ((records.plan.of(p), place) for place, p in enumerate(self._parameters))
        wanted = {of for of, place in known if of is not None and self.has_state(place)}
        records.replace(optimizer, wanted, self.entries, True, self._take_whole)
        for place, edited in self._edited.items():
            segments = records.plan.segments_of(self._parameters[place])
            if edited and len(segments) > 1 and segments[0].checksum is not None:
                # Others of its segments may have been taken as they are, with masters that go with other bits: the
                # next step is to make all of them anew. See [Note: edited parameters].
                segments[0].checksum ^= 0xFFFFFFFF

    def has_state(self, place: int) -> bool:
        """Whether there is state of a parameter."""
        return bool(self._saved.parameters[place].keys) or place in self._with_master

    def entries(self, segment: Segment) -> dict[str, Any]:
        """The state of the parameter of `segment` in its class's own format; of what can be cut only this slice.

        Slices are 1-D and in the order of the parameter's memory, also that of the master.
        """
        place = self._place_of[id(segment.parameter)]
        saved = self._saved.parameters[place]
        small = self._small_of(place)
        found: dict[str, Any] = {}
        for key in saved.keys:
            found[key] = small[key] if key in small else self._moved(place, key, segment)
        if place in self._with_master:
            found[MASTER] = self._sliced(place, MASTER, segment)
        return found

    def _read_slices(self, place: int, key: str, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Elements of a tensor that goes along with the parameter, in the order in which they were counted."""
        p = self._parameters[place]
        out = torch.empty(stop - start, dtype=dtype)
        pieces = self._pieces[place]
        first = max(0, bisect.bisect_right(pieces, start, key=lambda piece: piece.segment.start) - 1)
        for piece in itertools.takewhile(lambda piece: piece.segment.start < stop, pieces[first:]):
            begin, end = max(start, piece.segment.start), min(stop, piece.segment.stop)
            if begin < end:
                out[begin - start : end - start] = self._slice_of_piece(piece, key, p, begin, end, dtype)
        return out

    def _small_of(self, place: int) -> dict[str, Any]:
        if self._small is None or self._small[0] != place:
            self._small = place, self._decoded(self._saved.parameters[place].small, place)
        return self._small[1]

    def _decoded(self, data: Any, place: int) -> dict[str, Any]:
        decoded = {} if data is None else decode(data, self._name(place), self._checkpoint.small_tensor)
        if not isinstance(decoded, dict):
            raise self._incomplete(place)
        return decoded

    def _name(self, place: int) -> str:
        return f"{self._what}, state of parameter {self._saved.parameters[place].name or place}"

    def _incomplete(self, place: int) -> SwapError:
        return SwapError(
            f"{self._checkpoint.directory} is no whole checkpoint: what its index says of {self._what}, parameter "
            f"{place}, does not fit together; use another checkpoint"
        )

    def _moved(self, place: int, key: str, segment: Segment) -> torch.Tensor:
        """One tensor of the state that is in files: for `segment` if it can be cut."""
        first = self._pieces[place][0]
        if not first.segment.whole:
            return self._sliced(place, key, segment)
        p = segment.parameter
        stored = self._stored(first, key)
        dtype = self._dtype(place, key)
        shape = stored.shape[:-1] if dtype.is_complex else stored.shape
        stride = first.segment.strides.get(key, contiguous_stride(shape))
        if not segment.whole and shape == p.shape and _same_order(shape, stride, memory_stride(p)):
            return self._read(stored, dtype, segment.start, segment.stop)
        flat = self._read(stored, dtype, 0, shape.numel())
        if not _is_dense_stride(shape, stride):
            raise self._incomplete(place)
        return flat.as_strided(shape, stride)

    def _sliced(self, place: int, key: str, segment: Segment) -> torch.Tensor:
        """A tensor that goes along with the parameter, element by element, put together of the slices it was saved in.

        Of the slice that `segment` is; or of the whole parameter, in its shape, if `segment` is that, or if the order
        of elements in memory has changed.
        """
        p, saved = segment.parameter, self._saved.parameters[place]
        whole = segment.whole or not _same_order(p.shape, saved.stride, memory_stride(p))
        start, stop = (0, p.numel()) if whole else (segment.start, segment.stop)
        dtype = torch.float32 if key == MASTER else self._dtype(place, key)
        out = self._read_slices(place, key, dtype, start, stop)
        if not whole:
            return out
        if not _is_dense_stride(p.shape, saved.stride):
            raise self._incomplete(place)
        return out.as_strided(p.shape, saved.stride)

    def _slice_of_piece(
        self, piece: SavedPiece, key: str, p: torch.nn.Parameter, begin: int, end: int, dtype: torch.dtype
    ) -> torch.Tensor:
        segment = piece.segment
        if key == MASTER:
            return self._master_slice(piece, p, begin, end)
        if key in segment.present:
            return self._read(self._stored(piece, key), dtype, begin - segment.start, end - segment.start)
        small = self._decoded(segment.small, segment.parameter)
        if key not in small or small[key].shape != (segment.stop - segment.start,):
            raise self._incomplete(segment.parameter)
        values: torch.Tensor = small[key]
        return values[begin - segment.start : end - segment.start]

    def _master_slice(self, piece: SavedPiece, p: torch.nn.Parameter, begin: int, end: int) -> torch.Tensor:
        """The master of elements `begin` to `end`, which are in `piece`."""
        return self._master_of(piece, p)[begin - piece.segment.start : end - piece.segment.start]

    def _bits_of(self, p: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of `p`, in the order in which the checkpoint counts them."""
        return _bits(p, self._saved.parameters[self._place_of[id(p)]].stride)[start:stop]

    def _is_edited(self, place: int) -> bool:
        """Whether the parameter is not what its masters were rounded to. See [Note: edited parameters]."""
        if place not in self._edited:
            bits = self._bits_of(self._parameters[place], 0, self._parameters[place].numel())
            self._edited[place] = any(
                checksum(bits[piece.segment.start : piece.segment.stop]) != piece.segment.parameter_crc32c
                for piece in self._pieces[place]
            )
        return self._edited[place]

    def _master_of(self, piece: SavedPiece, p: torch.nn.Parameter) -> torch.Tensor:
        """The master of a slice, decoded: fp32, 1-D."""
        if self._master is not None and self._master[0] is piece:
            return self._master[1]
        segment = piece.segment
        bits = self._bits_of(p, segment.start, segment.stop)
        kept = self._decoded(segment.small, segment.parameter).get(MASTER)
        if self._is_edited(segment.parameter):
            master = bits.float()
        elif kept is not None:
            master = kept
        elif segment.master == "split":
            ties = self._checkpoint.table(piece.file or "").get("ties")
            tie_bytes = (segment.tie_bits + 7) // 8
            packed = torch.empty(0, dtype=torch.uint8)
            if tie_bytes and ties is not None:
                packed = self._read(ties, torch.uint8, piece.ties_at_bytes, piece.ties_at_bytes + tie_bytes)
            master = torch.empty(bits.numel(), dtype=torch.float32)
            low = self._read(self._stored(piece, MASTER), torch.int16, 0, bits.numel())
            try:
                join_master(bits, low, packed, segment.tie_bits, master)
            except ValueError as error:
                raise self._incomplete(segment.parameter) from error
        else:
            master = self._read(self._stored(piece, MASTER), torch.float32, 0, bits.numel())
        if master.dtype != torch.float32 or master.shape != bits.shape:
            raise self._incomplete(segment.parameter)
        self._master = piece, master
        return master

    def _dtype(self, place: int, key: str) -> torch.dtype:
        name = self._saved.parameters[place].dtypes.get(key)
        dtype = getattr(torch, name or "", None)
        if dtype in PLAIN_DTYPES:
            assert isinstance(dtype, torch.dtype)
            return dtype
        small = [self._decoded(piece.segment.small, place).get(key) for piece in self._pieces[place][:1]]
        if small and isinstance(small[0], torch.Tensor):
            return small[0].dtype
        raise self._incomplete(place)

    def _stored(self, piece: SavedPiece, key: str) -> StoredTensor:
        if piece.file is None:
            raise self._incomplete(piece.segment.parameter)
        self._checkpoint.verify(piece.file)
        return self._checkpoint.tensor(piece.file, f"{piece.number}.{key}")

    def _read(self, stored: StoredTensor, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor, in the order of its file, 1-D."""
        begin = stored.start_bytes + start * dtype.itemsize
        end = stored.start_bytes + stop * dtype.itemsize
        if end > stored.stop_bytes:
            raise SwapError(f"{stored.path}: tensor {stored.name!r} is shorter than the index says")
        if begin == end:
            return torch.empty(0, dtype=dtype)
        data = self._checkpoint.reader.read_bytes(stored.path, begin, end)
        return (data if data.data_ptr() % dtype.itemsize == 0 else data.clone()).view(dtype)

    def _take_whole(self, bucket: Bucket, lease: Lease) -> int:
        """Have a record as it is, if `bucket` is cut as in the checkpoint. Returns its length; 0 if it is not."""
        places = [self._place_of.get(id(s.parameter), -1) if s.is_live else -1 for s in bucket.segments]
        saved = self._bucket_at.get((places[0], bucket.segments[0].start))
        if saved is None or saved.file is None or not self._is_cut_like(bucket, places, saved):
            return 0
        length_bytes = self._checkpoint.file(saved.file).length_bytes
        if length_bytes > bucket.length_bytes:
            return 0
        file = self._checkpoint.reader.open(self._checkpoint.directory / saved.file)
        self._checkpoint.reader.handle.read(file, lease.tensor[:length_bytes], 0).wait()
        found = checksum(lease.tensor[:length_bytes])
        self._checkpoint.check(saved.file, found, self._checkpoint.file(saved.file).crc32c)
        tie_bytes = sum((segment.tie_bits + 7) // 8 for segment in saved.segments)
        header = bucket.layout.header(tie_bytes)
        if bytes(lease.tensor[: len(header)].numpy()) != header or length_bytes != bucket.layout.used_bytes(tie_bytes):
            return 0
        for segment, described in zip(bucket.segments, saved.segments, strict=True):
            assert isinstance(described, SavedSegment)
            self._describe(segment, described)
        return length_bytes

    def _is_cut_like(self, bucket: Bucket, places: Sequence[int], saved: SavedBucket) -> bool:
        def same(segment: Segment, place: int, other: SavedSegment | SavedHole) -> bool:
            if place < 0 or isinstance(other, SavedHole):  # A hole would come along.
                return False
            p = self._saved.parameters[place]
            return (
                (place, segment.start, segment.stop, segment.whole)
                == (other.parameter, other.start, other.stop, other.whole)
                and (segment.master == other.master or not self.has_state(place))
                and _same_order(segment.parameter.shape, p.stride, memory_stride(segment.parameter))
                and all(
                    key in segment.slots
                    and _same_order(
                        slot.shape if segment.whole else (segment.numel,),
                        other.strides.get(key, contiguous_stride(slot.shape)),
                        slot.stride,
                    )
                    for key in other.present
                    for slot in [segment.slots[key]]
                )
            )

        return len(bucket.segments) == len(saved.segments) and all(map(same, bucket.segments, places, saved.segments))

    def _describe(self, segment: Segment, saved: SavedSegment) -> None:
        """Let `segment` know what is kept in memory of a record that it has now."""
        if not self.has_state(saved.parameter):
            return
        small = {**self._small_of(saved.parameter), **self._decoded(saved.small, saved.parameter)}
        segment.kept_master = small.pop(MASTER, None)
        segment.keys = list(self._saved.parameters[saved.parameter].keys)
        segment.present = set(saved.present)
        segment.small = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in small.items()
            if key in segment.keys
        }
        segment.checksum, segment.tie_bits = saved.parameter_crc32c, saved.tie_bits


@dataclass(frozen=True, eq=False)
class SavedPiece:
    """A slice of a parameter's state in the checkpoint.

    Attributes:
        file: where its tensors are; None if all of it is in the index.
        number: its place in the file.
        ties_at_bytes: where its ties begin among those of the file.
    """

    file: str | None
    number: int
    segment: SavedSegment
    ties_at_bytes: int


def check_optimizers(checkpoint: Checkpoint) -> None:
    """Refuse what an index says of optimizers, if it would be refused when it is loaded.

    Raises:
        SwapError, SwapIOError: see above.
    """
    for number, saved in enumerate(checkpoint.index.optimizers):
        if [place for places in saved.groups for place in places] != list(range(len(saved.parameters))):
            raise SwapError(
                f"{checkpoint.directory / INDEX} is damaged: the groups of optimizer {number} are not its parameters"
            )
        SavedState(checkpoint, saved, [hollow(p, checkpoint) for p in saved.parameters], number).check()
        _decoded_options(saved, checkpoint, number)


def _decoded_options(saved: SavedOptimizer, checkpoint: Checkpoint, number: int) -> list[dict[str, Any]]:
    options = decode(saved.options, f"optimizer {number}, options", checkpoint.small_tensor)
    if not isinstance(options, list) or len(options) != len(saved.groups) or not all(type(o) is dict for o in options):
        raise SwapError(
            f"{checkpoint.directory / INDEX} is damaged: the options of optimizer {number} are not its groups'"
        )
    return options


def hollow(saved: SavedParameter, checkpoint: Checkpoint) -> torch.nn.Parameter:
    """A parameter without memory, that lies as `saved` did.

    Raises:
        SwapError: it is none.
    """
    dtype = getattr(torch, saved.dtype or "float32", None)
    shape = saved.shape if saved.shape is not None else [0]
    stride = saved.stride if saved.shape is not None else [1]
    if not isinstance(dtype, torch.dtype) or len(shape) != len(stride):
        raise SwapError(f"{checkpoint.directory}: the index is damaged: parameter {saved.name!r} is not one")
    return torch.nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), requires_grad=False)


def _same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides, of dense tensors, put elements into the same order."""
    return len(one) == len(other) and all(a == b for size, a, b in zip(shape, one, other, strict=True) if size > 1)


def _is_dense_stride(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of so many elements in memory order can be looked at in this way."""
    sizes = [max(1, size) for size in shape]
    if len(shape) != len(stride) or any(
        n > 1 and step > math.prod(sizes) for n, step in zip(sizes, stride, strict=True)
    ):
        return False
    return is_dense(torch.empty_strided(tuple(shape), tuple(stride), device="meta"))


def _bits(p: torch.nn.Parameter, stride: Sequence[int]) -> torch.Tensor:
    """The elements of `p` in the order of `stride`, 1-D, on the CPU."""
    values = p.detach().cpu()
    if not _same_order(p.shape, stride, memory_stride(values)) or not is_dense(values):
        values = torch.empty_strided(p.shape, tuple(stride), dtype=p.dtype).copy_(values)
    return values.as_strided((values.numel(),), (1,))
