"""State between a record and a state dict: the formats that `state_dict()` and `load_state_dict()` speak."""

from __future__ import annotations

import contextlib
import copy
import functools
import mmap
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from swapper.errors import ConfigError, SwapIOError
from swapper.optimizer.device_records import checksums_to_host
from swapper.optimizer.encodings import STEPS, steps_in
from swapper.optimizer.loaded_state import as_loaded, kept_dtype, loaded_dtype
from swapper.optimizer.plan import OptimizerPlan
from swapper.optimizer.records import BucketRecords, Masters, OpenBucket, Prefetcher
from swapper.optimizer.segments import MASTER, Bucket, OptimizerParameter, Segment, as_shaped, is_edited
from swapper.optimizer.snapshots import Snapshot, SummedRange, summed_range
from swapper.optimizer.twin import OWN_ATTRIBUTES
from swapper.progress import progress
from swapper.sizes import ALIGNMENT_BYTES, round_up
from swapper.storage.buffers import Lease
from swapper.storage.malloc_trim import return_free_memory
from swapper.storage.store import TensorStore
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode
from swapper.tensors.sharded import is_sharded, local_of, local_value, sharded_like

__all__ = [
    "SHOW_PROGRESS_BYTES",
    "Allocate",
    "GivenState",
    "StateRecords",
    "allocate_in_memory",
    "as_plain_state",
    "as_plain_states",
    "is_shared",
    "refuse_stray_state",
    "state_by_position",
    "steps_on_device",
]

SHOW_PROGRESS_BYTES = 1 << 30
"""State that is so long is shown on its way."""

_TRIM_BYTES = 32 << 20
"""After so much state was put together in memory, what it left in the heap is given back."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]
"""Makes a 1-D tensor on the CPU, of so many elements and that dtype, of undefined content."""


@dataclass
class GivenState:
    """The state of parameters that `state_dict()` has given, as it was then: a hook may change it.

    Attributes:
        of_one: it is to give that of the parameter with the fewest elements alone.
        entries: by the number of the parameter.
        ids: `id` of each dictionary of entries.
    """

    of_one: bool
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    ids: set[int] = field(default_factory=set)


class StateRecords:
    """The records of one optimizer's state, read and written as state dicts have it.

    `store` has their files; it is None if they stay in the pool.
    """

    def __init__(self, plan: OptimizerPlan, bucket_records: BucketRecords, store: TensorStore | None) -> None:
        self.plan = plan
        self.bucket_records = bucket_records
        self.store = store
        self._noted_steps = 0
        self._giving: tuple[int, GivenState] | None = None  # by the thread
        self._snapshot: Snapshot | None = None  # the last

    def gather(
        self, parameters: Sequence[torch.nn.Parameter], allocate: Allocate, snapshot: Snapshot | None = None
    ) -> dict[int, dict[str, Any]]:
        """The state of `parameters`, by `id`, in the class's own format.

        Args:
            allocate: makes the tensors that take what is in records.
            snapshot: is told what is handed out.

        Raises:
            SwapIOError: the drive failed. The state is as it was.
        """
        summed = snapshot is not None
        states = {
            of: _Gathered(allocate, summed) for of in map(self.plan.of, parameters) if of is not None and of.has_state
        }
        reached = {bucket.key.number: bucket for of in states for bucket in of.buckets}
        buckets = [reached[number] for number in sorted(reached)]  # In the order of the plan.
        checksums_to_host(states)
        show = len(buckets) > 1 and self.plan.stored_bytes >= SHOW_PROGRESS_BYTES
        try:
            with modes_kept():
                set_grad_mode(False)
                prefetcher = Prefetcher(self.bucket_records, [(bucket, []) for bucket in buckets])
                for i, bucket in enumerate(progress(buckets, "reading optimizer state", show)):
                    prefetcher.look(i)
                    opened = self.bucket_records.take(bucket)
                    # A bucket may have thousands of parameters, whose state is asked for one by one.
                    for segment in next(iter(states)).segments if len(states) == len(buckets) == 1 else bucket.segments:
                        if segment.of in states:
                            states[segment.of].add(opened, segment)
                    self.bucket_records.release(opened)
        except BaseException:
            self.bucket_records.recover()
            raise
        for of, state in states.items():
            if state.edited:
                self.bucket_records.count_reset()
            elif snapshot is not None:  # Masters that were edited are not those of the record.
                snapshot.add(of, state.entries, state.parts)
        return {id(of.parameter): _as_seen(state.entries, of) for of, state in states.items()}

    def allocator(self, parameters: Sequence[torch.nn.Parameter]) -> Allocate:
        """Allocates in one mapped file without a name, so that a state dict costs disk and not memory."""
        mapping = self._scratch(parameters)
        return allocate_in_memory if mapping is None else _allocate_in(mapping)

    def _scratch(self, parameters: Sequence[torch.nn.Parameter]) -> mmap.mmap | None:
        if self.store is None:
            return None
        total = 0
        wanted = {self.plan.of(p) for p in parameters}
        for bucket in self.plan.buckets:
            for segment in bucket.segments:
                if segment.of in wanted:
                    total += sum(spec.nbytes + ALIGNMENT_BYTES for spec in segment.stored_specs)
                    total += 4 * segment.numel + ALIGNMENT_BYTES if segment.master else 0
        return self.store.scratch(total) if total else None

    def stored_bytes(self) -> int:
        """Length of all records now."""
        buckets = [bucket for bucket in self.plan.buckets if any(segment.has_state for segment in bucket.segments)]
        return sum(
            bucket.used_bytes() if self.store is None or bucket.packing is None else self.store.stored_bytes(bucket.key)
            for bucket in buckets
        )

    @contextlib.contextmanager
    def giving(self, given: GivenState) -> Iterator[None]:
        """Within it `state_dict()`, called by this thread, notes in `given` what it has."""
        self._giving = threading.get_ident(), given
        try:
            yield
        finally:
            self._giving = None

    def put_into(self, state_dict: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Put the state of `parameters`, those of all groups in order, into `state_dict`. Errors as of `gather`."""
        given = self._giving[1] if self._giving is not None and self._giving[0] == threading.get_ident() else None
        wanted = parameters
        if given is not None and given.of_one:
            with_state = [p for p in parameters if (of := self.plan.of(p)) is not None and of.has_state]
            wanted = sorted(with_state, key=torch.Tensor.numel)[:1]
        self._snapshot = None
        mapping = self._scratch(wanted)
        snapshot = None if mapping is None else Snapshot(mapping, self.bucket_records.changes)
        allocate = allocate_in_memory if mapping is None else _allocate_in(mapping)
        gathered = self.gather(wanted, allocate, snapshot)
        self._snapshot = snapshot
        state_dict["state"] = found = {i: gathered[id(p)] for i, p in enumerate(parameters) if id(p) in gathered}
        if given is not None:
            given.entries.update({i: dict(entries) for i, entries in found.items()})
            given.ids.update(map(id, found.values()))
        if self.plan.counts_steps:
            state_dict[STEPS] = self.bucket_records.steps

    def note_steps(self, state_dict: Mapping[str, Any]) -> None:
        """Note how many steps were made when `state_dict`, which is being loaded, was saved."""
        self._noted_steps = steps_in(state_dict)

    def is_there(self, optimizer: Optimizer, given: Mapping[OptimizerParameter, Mapping[str, Any]]) -> bool:
        """True if a load of `given`, as torch's own `load_state_dict`, would leave all state as it is.

        See [Note: loads of what is there] in `snapshots`. Reads what `given` has if it seems so.

        Args:
            optimizer: for the options of groups.
            given: what `checked` has returned.
        """
        if self._snapshot is None or not type(optimizer).__setstate__.__module__.startswith("torch.optim"):
            return False
        if self.plan.counts_steps and self._noted_steps != self.bucket_records.steps:
            return False
        with_state = [of for of in self.plan.planned() if of.has_state]
        try:
            for cache in self.bucket_records.caches:
                cache.check()
        except SwapIOError:  # Of the lost record there is no copy but the one that is given.
            return False
        with modes_kept():
            set_grad_mode(False)
            group_of = functools.partial(_group_of, optimizer)
            return self._snapshot.is_what_is_there(self.bucket_records.changes, with_state, given, group_of)

    def take_noted_steps(self) -> None:
        """From here on random bits are those of the run that was noted. See [Note: encoded state] in `encodings`."""
        self.bucket_records.steps = self._noted_steps

    def rounding_of(self, parameter: torch.nn.Parameter) -> tuple[int, int, int]:
        """Return what a gradient's rounding depends on: steps made, the parameter's number, index of its first.

        See [Note: rounded gradients] in `gradient.rounding`.
        """
        known = self.plan.of(parameter)
        assert known is not None
        return self.bucket_records.steps, known.number, known.first_index

    def reset(self) -> None:
        """As if no step had been made."""
        self.bucket_records.steps = 0
        self.forget()

    def forget(self) -> None:
        """Have no state."""
        for bucket in self.plan.buckets:
            self.bucket_records.discard(bucket)
            for segment in bucket.segments:
                segment.forget()

    def checked(
        self, state: Sequence[tuple[torch.nn.Parameter, Mapping[str, Any]]]
    ) -> dict[OptimizerParameter, dict[str, Any]]:
        """The state of each parameter, all of them planned, if it can be loaded. Errors as for `_check_loadable`."""
        found: dict[OptimizerParameter, dict[str, Any]] = {}
        for p, entries in state:
            of = self.plan.of(p)
            assert of is not None
            found[of] = _as_kept(entries, of)
            _check_loadable(p, of.segments, found[of])
        return found

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
        if not as_it_is and not type(optimizer).__setstate__.__module__.startswith("torch.optim"):
            entries_of, as_it_is = _set_by_the_class(optimizer, entries_of), True
        self.forget()
        show = self.plan.stored_bytes >= SHOW_PROGRESS_BYTES
        passed_bytes = 0
        with outside_of_inference():  # What stays in memory is stepped outside of that mode.
            set_grad_mode(False)
            for bucket in progress(self.plan.buckets, "writing optimizer state", show):
                chosen = [segment for segment in bucket.segments if segment.of in wanted]
                if not chosen:
                    continue
                opened = self.bucket_records.take(bucket)
                if opened.lease is not None and (length_bytes := take_whole(bucket, opened.lease)):
                    self.bucket_records.put_whole(opened, length_bytes)
                    continue
                _write(opened, chosen, entries_of, optimizer, as_it_is)
                passed_bytes += bucket.length_bytes
                if passed_bytes >= _TRIM_BYTES:
                    passed_bytes = 0
                    return_free_memory()
                self.bucket_records.put(opened)

    def replace_one(self, optimizer: Optimizer, parameter: torch.nn.Parameter, entries: dict[str, Any]) -> None:
        """Replace the state of one parameter by `entries`, which keep their dtypes; without any, forget it.

        Args:
            optimizer: for the options of groups.
            entries: in the class's own format.
        """
        of = self.plan.of(parameter)
        assert of is not None
        for bucket in of.buckets:
            here = of.segments if len(of.buckets) == 1 else bucket.segments  # A bucket may have thousands.
            mine = [segment for segment in here if segment.of is of]
            self.bucket_records.wait_written(bucket)
            if not entries and not any(segment.tie_bits for segment in mine):
                for segment in mine:
                    segment.forget()
                if not any(segment.has_state for segment in bucket.segments):
                    self.bucket_records.discard(bucket)
                continue
            opened = self.bucket_records.take(bucket)
            opened.forget(mine)
            if entries:
                _write(opened, mine, lambda segment: entries, optimizer, True)
            self.bucket_records.put(opened)


class _Gathered:
    """The state of one parameter, put together of its segments in the class's own format."""

    def __init__(self, allocate: Allocate, summed: bool) -> None:
        self.entries: dict[str, Any] = {}
        self.parts: dict[str, list[SummedRange]] = {}  # of those in `_flats`, if they are summed
        self.edited = False
        self._summed = summed
        self._allocate = allocate
        self._flats: dict[str, torch.Tensor] = {}  # the 1-D tensors behind `entries`
        self._is_begun = False

    def add(self, opened: OpenBucket, segment: Segment) -> None:
        """Copy the state of `segment` into `entries`."""
        if not self._is_begun:
            self._is_begun = True
            self.edited = bool(segment.master) and is_edited(segment.of.segments, segment.local.detach())
        p = segment.local
        for key, value in opened.state_of(segment).items():
            if key in segment.encoded and key in segment.present:
                flat = self._flat(key, p.numel(), torch.float32)
                opened.decode_state(segment, key, flat[segment.start : segment.stop])
                self._sum(key, segment.start, segment.stop)
                whole = segment.whole
                self.entries[key] = flat.as_strided(value.shape, value.stride()) if whole else as_shaped(flat, p)
            elif not segment.whole and isinstance(value, torch.Tensor) and value.shape == (segment.numel,):
                # Small state is in no record, so `allocator` has no room for it; tiny buckets cut its parameter too.
                flat = self._flat(key, p.numel(), value.dtype, key in segment.present)
                flat[segment.start : segment.stop].copy_(value)
                self._sum(key, segment.start, segment.stop)
                self.entries[key] = as_shaped(flat, p)
            elif key in segment.present:
                flat = self._flat(key, value.numel(), value.dtype)
                self.entries[key] = flat.as_strided(value.shape, value.stride()).copy_(value)
                self._sum(key, 0, value.numel())
            elif key not in self.entries:
                self.entries[key] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        if self.edited or segment.checksum is not None:
            flat = self._flat(MASTER, p.numel(), torch.float32)
            self.entries[MASTER] = as_shaped(flat, p)
            bits, out = segment.slice_of(p.detach()).cpu().contiguous(), flat[segment.start : segment.stop]
            if self.edited:
                out.copy_(bits)
            else:
                opened.decode_master(segment, bits, out)
            self._sum(MASTER, segment.start, segment.stop)

    def _sum(self, key: str, start: int, stop: int) -> None:
        """Take the checksums of elements that were just written, while the processor's cache has them."""
        if self._summed and start < stop:
            self.parts.setdefault(key, []).append(summed_range(self._flats[key], start, stop))

    def _flat(self, key: str, numel: int, dtype: torch.dtype, stored: bool = True) -> torch.Tensor:
        if key not in self._flats:
            self._flats[key] = (self._allocate if stored else allocate_in_memory)(numel, dtype)
        return self._flats[key]


def _write(
    opened: OpenBucket,
    segments: Sequence[Segment],
    entries_of: Callable[[Segment], dict[str, Any]],
    optimizer: Optimizer,
    as_it_is: bool,
) -> None:
    """Make `entries_of` each of `segments` its state. Arguments as for `StateRecords.replace`."""
    masters: Masters = {}
    for segment in segments:
        group = _group_of(optimizer, segment.of)
        p, entries = segment.local, entries_of(segment)
        state: dict[str, Any] = {}
        for key, value in entries.items():
            if key == MASTER:
                continue
            if not isinstance(value, torch.Tensor):
                state[key] = copy.deepcopy(value) if as_it_is else as_loaded(key, value, segment, group)
                continue
            value = value.detach()
            if not segment.whole and value.shape == p.shape:
                value = segment.slice_of(value)
            dtype = kept_dtype(key, value, segment) if as_it_is else loaded_dtype(key, value, segment, group)
            location = segment.locations.get(key)
            fits = location is not None and value.shape == location.spec.shape and dtype == location.spec.dtype
            if fits and key not in segment.encoded:  # Those are encoded when they are kept.
                state[key] = opened.store(segment, key, value)
            else:
                state[key] = value.to(device="cpu", dtype=dtype, copy=not fits)
        opened.keep(segment, state)
        if segment.master and MASTER in entries:
            master = entries[MASTER].detach()
            master = segment.slice_of(master) if master.shape == p.shape else master
            master = master.to(device="cpu", dtype=torch.float32).contiguous()
            # Encoded against the parameter that it rounds to, since the model may be loaded after the optimizer.
            masters[segment] = master, torch.empty(segment.numel, dtype=p.dtype, device="cpu")
    opened.encode(masters)


def _group_of(optimizer: Optimizer, of: OptimizerParameter) -> dict[str, Any]:
    """The group of a parameter; the options of a new one if it is in none."""
    return optimizer.defaults if of.group is None else optimizer.param_groups[of.group]


def _set_by_the_class(
    optimizer: Optimizer, entries_of: Callable[[Segment], dict[str, Any]]
) -> Callable[[Segment], dict[str, Any]]:
    """`entries_of` as the class's own `__setstate__` leaves it, which torch's `load_state_dict` calls after its casts.

    A class that keeps state in another dtype than the parameter's takes the cast back there. It is called for one
    parameter at a time, on an object with the attributes of `optimizer`, so that one parameter's state is in memory.
    """
    last: tuple[OptimizerParameter, dict[str, Any]] | None = None

    def found(segment: Segment) -> dict[str, Any]:
        nonlocal last
        of = segment.of
        if last is None or last[0] is not of:
            group, given = _group_of(optimizer, of), entries_of(segment)
            cast = {key: as_loaded(key, value, segment, group) for key, value in given.items() if key != MASTER}
            stand_in = type(optimizer).__new__(type(optimizer))
            vars(stand_in).update({key: value for key, value in vars(optimizer).items() if key not in OWN_ATTRIBUTES})
            stand_in.defaults = dict(optimizer.defaults)
            stepped = of.parameter
            if segment.master or of.sharded:  # The class steps the master, and what this rank has.
                values = given.get(MASTER, of.local).detach()
                stepped = torch.nn.Parameter(values.to("cpu", torch.float32) if segment.master else values)
            state = defaultdict(dict, {stepped: cast})
            stand_in.__setstate__({"state": state, "param_groups": [{**group, "params": [stepped]}]})
            last = of, {**stand_in.state.get(stepped, {}), **({MASTER: given[MASTER]} if MASTER in given else {})}
        return last[1]

    return found


def _as_kept(entries: Mapping[str, Any], of: OptimizerParameter) -> dict[str, Any]:
    """State of a parameter as users have it, as it is kept: of DTensors the local tensors.

    Raises:
        ValueError: a DTensor is not sharded as the parameter is.
    """
    p, what = of.parameter, f"of a parameter of shape {tuple(of.parameter.shape)}"
    others = {key for key, value in entries.items() if of.collective and is_sharded(value) and value.shape != p.shape}
    kept = {
        key: local_of(value) if key in others else local_value(value, p, f"state {key!r} {what}")
        for key, value in entries.items()
    }
    of.note_shardings(entries)
    return kept


def _as_seen(entries: dict[str, Any], of: OptimizerParameter) -> dict[str, Any]:
    """State of a parameter as users have it: DTensors, where it has an element for each of a DTensor."""
    if not of.sharded:
        return entries
    p, shape = of.parameter, of.local.shape
    seen = {}
    for key, value in entries.items():
        if key in of.shardings:
            value = of.shardings[key].around(value)
        elif isinstance(value, torch.Tensor) and value.shape == shape and (key == MASTER or not of.collective):
            value = sharded_like(value, p)
        seen[key] = value
    return seen


def _check_loadable(p: torch.Tensor, segments: Sequence[Segment], entries: Mapping[str, Any]) -> None:
    """Refuse state that is not that of `p`, before anything is written; of a DTensor, its local tensor.

    Raises:
        ConfigError: it has master weights, which are off.
        ValueError: a tensor has another shape than planned, or has no dense values that could be copied.
    """
    first, p = segments[0], local_of(p)
    if MASTER in entries and not first.master:
        raise ConfigError(
            "offload_optimizer.master_weights: the state to load has master weights, but they are off here; "
            "set it to true"
        )
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or (key != MASTER and key not in first.locations):
            continue
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} is "
                f"{'on the meta device' if value.is_meta else 'sparse'}, and only dense values can be loaded; no state "
                "was loaded"
            )
        expected = first.locations[key].spec.shape if key != MASTER and first.whole else tuple(p.shape)
        if tuple(value.shape) != expected:
            raise ValueError(
                f"state {key!r} of a parameter of shape {tuple(p.shape)} should have shape {expected} and has "
                f"{tuple(value.shape)}; no state was loaded"
            )


def is_shared(optimizer: Optimizer) -> bool:
    """True if any of its parameters is a DTensor, so that all ranks do what this one does."""
    return any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])


def state_by_position(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The state of each parameter that has some, by its position in the groups of a state dict that is loaded.

    Raises:
        ConfigError: there is state of something else.
    """
    groups, state = state_dict["param_groups"], state_dict["state"]
    # By position, as torch maps them: the numbers (or names) in a state dict need not be those of `state_dict()`.
    names = [name for group in groups for name in group["params"]]
    lengths = [[len(group["params"]) for group in each] for each in (groups, optimizer.param_groups)]
    if lengths[0] == lengths[1]:
        refuse_stray_state(state, set(names))
    elif is_shared(optimizer):  # Torch refuses it too, but here all ranks are still there.
        raise ValueError(
            f"loaded state dict has groups of {lengths[0]} parameters, and the optimizer of {lengths[1]}; no state was "
            "loaded"
        )
    return {i: state[name] for i, name in enumerate(names) if name in state}


def refuse_stray_state(state: Mapping[Any, Any], names: Container[Any]) -> None:
    """Raise `ConfigError` for state of other than the parameters `names`. Plain PyTorch keeps it, and never uses it."""
    if others := [name for name, entries in state.items() if name not in names and entries != {}]:
        raise ConfigError(
            f"the state dict that is loaded has state that belongs to no parameter ({others[0]!r}): its groups do not "
            "list it, or name it otherwise; that cannot be swapped. Remove it from state_dict['state'], or correct "
            "'params' of the groups; no state was loaded"
        )


def steps_on_device(optimizer: Optimizer) -> set[torch.nn.Parameter]:
    """Parameters whose class has "step" on their device: those of groups that are fused or capturable."""
    groups = (group for group in optimizer.param_groups if group.get("fused") or group.get("capturable"))
    return {p for group in groups for p in group["params"]}


def as_plain_state(key: str, value: Any, p: torch.nn.Parameter, cast: bool, *, on_device: bool | None = None) -> Any:
    """State as the class would have made it for `p` itself: on its device and, after masters, in its dtype.

    Args:
        on_device: "step" is on the device too; other scalars are then in any case, where `load_state_dict` brings them.
            None leaves scalars where they are.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step" or value.dim() == 0:
        return value.to(p.device) if on_device or (on_device is False and key != "step") else value
    dtype = p.dtype if cast and value.dtype is torch.float32 else value.dtype
    return value.to(device=p.device, dtype=dtype)


def as_plain_states(
    optimizer: Optimizer, gathered: Mapping[torch.nn.Parameter, Mapping[str, Any]], cast: bool
) -> dict[torch.Tensor, Any]:
    """`as_plain_state` of all that is `gathered`, without masters, for an optimizer that is not swapped."""
    stepped = steps_on_device(optimizer)
    return {
        p: {k: as_plain_state(k, v, p, cast, on_device=p in stepped) for k, v in entries.items() if k != MASTER}
        for p, entries in gathered.items()
    }


def allocate_in_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of `numel` elements, of undefined content."""
    return torch.empty(numel, dtype=dtype, device="cpu")


def _allocate_in(mapping: mmap.mmap) -> Allocate:
    """Hands out aligned tensors of `mapping`, front to back. They keep it mapped as long as they live."""
    cursor = 0

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal cursor
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        tensor = torch.frombuffer(mapping, dtype=dtype, count=numel, offset=cursor)
        cursor += round_up(numel * dtype.itemsize, ALIGNMENT_BYTES)
        return tensor

    return allocate
