"""State between a record and a state dict: the formats that `state_dict()` and `load_state_dict()` speak."""

from __future__ import annotations

import copy
import mmap
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.segments import MASTER, Bucket, OptimizerParameter, Segment, is_edited
from swapper.optimizer.stepper import ReadAhead, Stepper, progress
from swapper.sizes import ALIGNMENT_BYTES, round_up
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache
from swapper.storage.malloc_trim import return_free_memory
from swapper.storage.store import TensorStore
from swapper.tensors.grad_modes import modes_kept, set_grad_mode
from swapper.tensors.strides import is_dense

__all__ = [
    "SHOW_PROGRESS_BYTES",
    "StateRecords",
    "allocate_in",
    "allocate_in_memory",
    "as_plain_state",
    "check_loadable",
    "read_segment",
    "write_segment",
]


SHOW_PROGRESS_BYTES = 1 << 30
"""State that is so long is shown on its way."""


_TRIM_BYTES = 32 << 20
"""After so much state was put together in memory, what it left in the heap is given back."""


class StateRecords:
    """The records of one optimizer's state, read and written as state dicts have it.

    Args:
        plan: the buckets.
        stepper: reads ahead, and counts.
        cache: brings records in and out.
        store: where they are; None if they stay in the pool.
    """

    def __init__(self, plan: OptimizerPlan, stepper: Stepper, cache: RecordCache, store: TensorStore | None) -> None:
        self.plan = plan
        self.stepper = stepper
        self.cache = cache
        self.store = store

    def gather(
        self, parameters: Sequence[torch.nn.Parameter], allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> dict[int, dict[str, Any]]:
        """The state of `parameters`, by `id`, in the class's own format; what moves is copied to what `allocate` gives.

        Args:
            allocate: makes a 1-D tensor on the CPU, of so many elements and that dtype.
        """
        known = filter(None, map(self.plan.of, parameters))
        wanted = {of for of in known if of.has_state}
        gathered: dict[int, dict[str, Any]] = {}
        flats: dict[tuple[int, str], torch.Tensor] = {}

        def flat(p: torch.nn.Parameter, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
            if (id(p), key) not in flats:
                flats[id(p), key] = allocate(numel, dtype)
            return flats[id(p), key]

        edited: dict[OptimizerParameter, bool] = {}
        found = {bucket for of in wanted for bucket in of.buckets}
        buckets = [
            (bucket, [segment for segment in bucket.segments if segment.of in wanted])
            for bucket in self.plan.buckets
            if bucket in found
        ]
        show = self.plan.stored_bytes >= SHOW_PROGRESS_BYTES
        try:
            with modes_kept():
                set_grad_mode(False)
                ahead = ReadAhead(self.stepper, [(bucket, []) for bucket, _ in buckets])
                for i, (bucket, chosen) in enumerate(progress(buckets, "reading optimizer state", show)):
                    ahead.look(i)
                    lease = self.stepper.take(bucket)
                    tie_offsets = bucket.tie_offsets()
                    for segment in chosen:
                        of = segment.of
                        if segment.master and of not in edited:
                            edited[of] = is_edited(of.segments)
                            if edited[of]:
                                self.stepper.count_reset()
                        entries = gathered.setdefault(id(of.parameter), {})
                        offset = tie_offsets.get(segment, 0)
                        read_segment(bucket, segment, lease, entries, flat, edited.get(of, False), offset)
                    if lease is not None:
                        self.cache.release(bucket.key)
        except BaseException:
            self.cache.recover()
            raise
        return gathered

    def allocator(self, parameters: Sequence[torch.nn.Parameter]) -> Callable[[int, torch.dtype], torch.Tensor]:
        """Allocates in one mapped file without a name, so that a state dict costs disk and not memory."""
        if self.store is None:
            return allocate_in_memory
        total = 0
        wanted = {self.plan.of(p) for p in parameters}
        for bucket in self.plan.buckets:
            for segment in bucket.segments:
                if segment.of in wanted:
                    total += sum(slot.nbytes + ALIGNMENT_BYTES for slot in segment.slots.values())
                    total += 4 * segment.numel + ALIGNMENT_BYTES if segment.master else 0
        if not total:
            return allocate_in_memory
        return allocate_in(self.store.scratch(total))

    def forget(self) -> None:
        """As if no step had been made."""
        for bucket in self.plan.buckets:
            if bucket.length_bytes:
                self.cache.discard(bucket.key)
            for segment in bucket.segments:
                segment.forget()

    def replace(
        self,
        optimizer: Optimizer,
        wanted: Container[OptimizerParameter],
        entries_of: Callable[[Segment], dict[str, Any]],
        as_it_is: bool,
        take_whole: Callable[[Bucket, Lease], int] = lambda bucket, lease: 0,
    ) -> None:
        """Replace all state.

        Args:
            optimizer: for the options of groups.
            wanted: the parameters that get state.
            entries_of: the state of a segment's parameter in the class's own format, tensors whole or cut to the
                segment.
            as_it_is: keep dtypes; else cast as torch's own `load_state_dict` does.
            take_whole: fills a buffer with a bucket's record, tells its segments what they keep of it in memory, and
                returns its length; 0 if it cannot.
        """
        show = self.plan.stored_bytes >= SHOW_PROGRESS_BYTES
        self.forget()
        passed_bytes = 0
        for bucket in progress(self.plan.buckets, "writing optimizer state", show):
            chosen = [segment for segment in bucket.segments if segment.of in wanted]
            if not chosen:
                continue
            lease = self.stepper.take(bucket)
            if lease is not None and (length_bytes := take_whole(bucket, lease)):
                self.cache.put(bucket.key, length_bytes)
                continue
            masters: dict[Segment, tuple[torch.Tensor, torch.Tensor]] = {}
            for segment in chosen:
                number = segment.of.group
                group = optimizer.defaults if number is None else optimizer.param_groups[number]
                for key in write_segment(bucket, segment, lease, entries_of(segment), group, as_it_is, masters):
                    self.stepper.say_unplanned(key)
            if masters:  # At once: encoding one walks the ties of all.
                bucket.encode(masters, lease)
            passed_bytes += bucket.length_bytes
            if passed_bytes >= _TRIM_BYTES:
                passed_bytes = 0
                return_free_memory()
            if lease is not None:
                self.cache.put(bucket.key, bucket.finish(lease))

    def replace_one(self, optimizer: Optimizer, parameter: torch.nn.Parameter, entries: dict[str, Any]) -> None:
        """Replace the state of one parameter by `entries`, which keep their dtypes; without any, forget it.

        Args:
            optimizer: for the options of groups.
            entries: in the class's own format.
        """
        of = self.plan.of(parameter)
        assert of is not None
        group = optimizer.defaults if of.group is None else optimizer.param_groups[of.group]
        for bucket in of.buckets:
            mine = [segment for segment in bucket.segments if segment.of is of]
            if not entries and not any(segment.tie_bits for segment in mine):
                for segment in mine:
                    segment.forget()
                if bucket.length_bytes and not any(segment.has_state for segment in bucket.segments):
                    self.cache.discard(bucket.key)
                continue
            lease = self.stepper.take(bucket)
            bucket.forget(mine, lease)
            masters: dict[Segment, tuple[torch.Tensor, torch.Tensor]] = {}
            for segment in mine if entries else ():
                for key in write_segment(bucket, segment, lease, entries, group, True, masters):
                    self.stepper.say_unplanned(key)
            if masters:
                bucket.encode(masters, lease)
            if lease is not None:
                self.cache.put(bucket.key, bucket.finish(lease))


def read_segment(
    bucket: Bucket,
    segment: Segment,
    lease: Lease | None,
    entries: dict[str, Any],
    flat: Callable[[torch.nn.Parameter, str, int, torch.dtype], torch.Tensor],
    edited: bool,
    tie_offset_bytes: int,
) -> None:
    """Copy the state of `segment` into `entries`, which collects that of its parameter in the class's own format.

    Args:
        lease: the record; None if nothing of it moves.
        flat: gives the 1-D tensor for a parameter's whole `key`: the same for each of its segments.
        edited: the parameter was changed since its master was encoded, so that the master is `float(parameter)`.
        tie_offset_bytes: see `Bucket.decode_master`.
    """
    p = segment.parameter
    for key, value in bucket.state_of(segment, lease).items():
        slice_of_parameter = not segment.whole and isinstance(value, torch.Tensor) and value.shape == (segment.numel,)
        if slice_of_parameter:
            target = flat(p, key, p.numel(), value.dtype)
            target[segment.start : segment.stop].copy_(value)
            entries[key] = target.as_strided(p.shape, p.stride()) if is_dense(p) else target.view(p.shape)
        elif key in segment.present:
            target = flat(p, key, value.numel(), value.dtype).as_strided(value.shape, value.stride())
            entries[key] = target.copy_(value)
        elif key not in entries:
            entries[key] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    if edited or segment.checksum is not None:
        master = flat(p, MASTER, p.numel(), torch.float32)
        bits = segment.slice_of(p.detach()).cpu().contiguous()
        entries[MASTER] = master.as_strided(p.shape, p.stride()) if is_dense(p) else master.view(p.shape)
        out = master[segment.start : segment.stop]
        if edited:
            out.copy_(bits)
        else:
            bucket.decode_master(segment, bits, lease, out, tie_offset_bytes)


def write_segment(
    bucket: Bucket,
    segment: Segment,
    lease: Lease | None,
    entries: dict[str, Any],
    group: dict[str, Any],
    as_it_is: bool,
    masters: dict[Segment, tuple[torch.Tensor, torch.Tensor]],
) -> list[str]:
    """Make `entries`, the state of a parameter in the class's own format, the state of `segment`.

    Args:
        entries: its tensors that go along with the parameter are of its shape, or the 1-D slice that the segment is.
        lease: the record; None if nothing of it moves.
        group: the parameter's.
        as_it_is: keep dtypes; else cast as torch's own `load_state_dict` does.
        masters: gets the segment's master, for `Bucket.encode`.

    Returns:
        Keys of large state that was not planned for and stays in memory.
    """
    p = segment.parameter
    state: dict[str, Any] = {}
    for key, value in entries.items():
        if key == MASTER:
            continue
        if not isinstance(value, torch.Tensor):
            state[key] = copy.deepcopy(value) if as_it_is else _as_loaded(key, value, segment, group)
            continue
        value = value.detach()
        if not segment.whole and value.shape == p.shape:
            value = segment.slice_of(value)
        dtype = (_kept_dtype if as_it_is else _loaded_dtype)(key, value, segment, group)
        if key in segment.slots and value.shape == segment.slots[key].shape and dtype == segment.slots[key].dtype:
            assert lease is not None
            state[key] = segment.slots[key].view(lease).copy_(value)
        else:
            state[key] = value.to(device="cpu", dtype=dtype, copy=True)
    unplanned = bucket.close(segment, state, lease)
    if segment.master and MASTER in entries:
        master = entries[MASTER].detach()
        master = segment.slice_of(master) if master.shape == p.shape else master
        master = master.to(device="cpu", dtype=torch.float32).contiguous()
        # Encoded against the parameter that it rounds to, since the model may be loaded after the optimizer.
        masters[segment] = master, torch.empty(segment.numel, dtype=p.dtype)
    return unplanned


def check_loadable(p: torch.nn.Parameter, segments: Sequence[Segment], entries: dict[str, Any]) -> None:
    """Refuse state that is not that of `p`, before anything is written.

    Raises:
        ConfigError: it has master weights, which are off.
        ValueError: a tensor has another shape than planned, or has no dense values that could be copied.
    """
    first = segments[0]
    if MASTER in entries and not first.master:
        raise ConfigError(
            "offload_optimizer.master_weights: the state to load has master weights, but they are off here; "
            "set it to true"
        )
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        expected = tuple(p.shape)
        if key != MASTER:
            if key not in first.slots:
                continue
            if first.whole:
                expected = first.slots[key].shape
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} is "
                f"{'on the meta device' if value.is_meta else 'sparse'}, and only dense values can be loaded; no state "
                "was loaded"
            )
        if tuple(value.shape) != expected:
            raise ValueError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} should have shape {expected} and has "
                f"{tuple(value.shape)}; no state was loaded"
            )


def _kept_dtype(key: Any, value: torch.Tensor, segment: Segment, group: dict[str, Any]) -> torch.dtype:
    """The dtype of state that is taken as it is. With a master, state made for the parameter itself becomes fp32."""
    if not segment.master or key == "step" or value.dtype == segment.dtypes.get(key):
        return value.dtype
    return torch.float32 if value.dtype.is_floating_point else value.dtype


def _loaded_dtype(key: Any, value: torch.Tensor, segment: Segment, group: dict[str, Any]) -> torch.dtype:
    """The dtype that `Optimizer.load_state_dict` gives to state, of the tensor that the class steps on."""
    if key == "step":
        return torch.float32 if group.get("capturable") or group.get("fused") else value.dtype
    dtype = torch.float32 if segment.master else segment.parameter.dtype
    return dtype if dtype.is_floating_point else value.dtype


def _as_loaded(key: Any, value: Any, segment: Segment, group: dict[str, Any]) -> Any:
    """A copy of `value`, with tensors within it in the dtypes that `Optimizer.load_state_dict` gives to them."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=_loaded_dtype(key, value, segment, group), copy=True)
    if isinstance(value, dict):
        return {name: _as_loaded(name, item, segment, group) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        return type(value)(_as_loaded(None, item, segment, group) for item in value)
    return copy.deepcopy(value)


def as_plain_state(key: str, value: torch.Tensor, p: torch.nn.Parameter, cast: bool) -> torch.Tensor:
    """State as the class would have made it for `p` itself: on its device and, after masters, in its dtype."""
    if key == "step" or value.dim() == 0:
        return value
    dtype = p.dtype if cast and value.dtype is torch.float32 else value.dtype
    return value.to(device=p.device, dtype=dtype)


def allocate_in_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of `numel` elements, of undefined content."""
    return torch.empty(numel, dtype=dtype)


def allocate_in(mapping: mmap.mmap) -> Callable[[int, torch.dtype], torch.Tensor]:
    """Hands out aligned 1-D tensors of `mapping`, front to back. They keep it mapped as long as they live."""
    cursor = 0

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal cursor
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=cursor)
        cursor += round_up(numel * dtype.itemsize, ALIGNMENT_BYTES)
        return tensor

    return allocate
