"""Records of parameters in memory: the views of the values in the pool, and the uses that are not over.

[Note: when a buffer may go] A record's buffer is given up only when no tensor but ours shares its memory: each
parameter's values have a storage of their own while they are in the pool. Its use count says whether a view of them is
left anywhere, and the reference count of its Python object whether somebody has the storage itself. And its bytes are
compared, by checksum, with what is stored: what user code changed in place, even behind autograd's back, is written
first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import torch

from swapper.errors import SwapError
from swapper.io.checksums import checksum
from swapper.metrics import Metrics
from swapper.parameter.records import ParameterLocation, ParameterRecord
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import format_bytes
from swapper.storage.access_order import Order, Use
from swapper.storage.budget import PoolBudget
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted
from swapper.storage.cache import RecordCache
from swapper.storage.cache_policies import CyclicPolicy
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.spans import RecordStore
from swapper.storage.store import RecordKey
from swapper.tensors.collectives import is_distributed
from swapper.tensors.grad_modes import outside_of_inference
from swapper.tensors.other_tensors import is_shared

if TYPE_CHECKING:
    from swapper.parameter.device_tier import DeviceTier

__all__ = [
    "BY_ADDRESS",
    "DEVICE_TYPES",
    "Held",
    "ParameterCache",
    "ParameterPolicy",
    "finalize",
    "in_file",
    "refuse_room",
]

BY_ADDRESS: dict[tuple[torch.device, int], tuple[weakref.ref[ParameterCache], Held, int]] = {}
"""By the address at which values in memory begin: whose they are, in which record, and the position of the parameter.

Of all swappers, because of several that are in use at once only the hooks of one decide what autograd saves.
"""


DEVICE_TYPES = {"cpu"}
"""Types of devices that values in `BY_ADDRESS` are on."""


@dataclass(eq=False, slots=True)
class Held:
    """A record, and what is in memory of it. The `Contents` of its policy."""

    plan: ParameterRecord
    key: RecordKey
    opened: list[torch.Tensor] = field(default_factory=list)
    """The values of each parameter in the pool, 1-D, in storages of their own. Empty while the record is not open."""
    checksums: list[int] = field(default_factory=list)
    """Of each parameter as last written."""
    step_checksums: dict[int, int] = field(default_factory=dict)
    """Checksums of parameters as a step has left them, by position, while no code of the user's has run since."""
    holds: set[object] = field(default_factory=set)
    """The uses of it that are not over. While there are any, it stays."""
    attached: dict[int, set[object]] = field(default_factory=dict)
    """The parameters that see their values, by their position in the record, and the uses for which they do."""
    changed: bool = False
    """Known to be newer than what is stored."""
    resident: bool = False
    """Stays in the pool once it is there. What changes is written all the same."""
    gone: bool = False
    """Its values are nowhere: it was given up."""
    late: int = 0
    """Count of steps that are about to change it again: until then it is written only if its memory is needed."""
    fixed: bool = False
    """It is in files of somebody else, and nobody may change it."""

    @property
    def values(self) -> list[torch.Tensor]:
        """The values that parameters and saved tensors are views of, 1-D, each in a storage of its own; or empty."""
        return self.opened

    @property
    def number(self) -> int:
        """Place among the records of its cache."""
        return self.key.number

    @property
    def length_bytes(self) -> int:
        """Of a buffer for it."""
        return self.plan.length_bytes

    @property
    def pinned(self) -> bool:
        """True while a use of it is not over."""
        return bool(self.holds or self.attached)

    def viewed(self) -> bool:
        """Return True if tensors that we do not know of share the buffer's memory."""
        return self.has_views()

    def has_views(self) -> bool:
        """Return True if tensors that we do not know of share `values`. See [Note: when a buffer may go]."""
        # Ours are `values`, and the tensors that are attached.
        return any(is_shared(values, ours=1 + self._attached_to(index)) for index, values in enumerate(self.values))

    def _attached_to(self, position: int) -> int:
        return len(self.plan.locations[position].tensors) if position in self.attached else 0

    def open(self, lease: Lease, cache: ParameterCache, *, arrived: bool) -> None:
        """Make the views of the buffer; if the record has `arrived`, copy the values that the file has elsewhere."""
        opened = []
        for location in self.plan.locations:
            with outside_of_inference():  # They outlive that mode.
                values = lease.own_view(location.offset_bytes, location.numel, location.dtype)
            if arrived and location.offset_bytes != location.file_offset_bytes:
                location.view(values).copy_(in_file(lease, location).view(location.shape))
            opened.append(values)
        if arrived:
            self.note_arrival(opened)
        # Until here nobody has seen the values, and all of it can be done again.
        with interrupts_deferred():  # `evicted` takes back the addresses of `opened`, and no others.
            self.opened = opened
            if self.values is opened:
                self.register(cache)

    def note_arrival(self, opened: list[torch.Tensor]) -> None:
        """Take note of what is stored, if that is not known: of files of somebody else, when they come first."""
        if not self.checksums:
            self.checksums = [checksum(values) for values in opened]

    def register(self, cache: ParameterCache) -> None:
        """Let the hooks of saved tensors find `values`."""
        for index, values in enumerate(self.values):
            BY_ADDRESS[values.device, values.data_ptr()] = (weakref.ref(cache), self, index)

    def unregister(self) -> None:
        """Undo `register`. Idempotent."""
        for values in self.values:
            BY_ADDRESS.pop((values.device, values.data_ptr()), None)

    def note_change(self) -> None:
        """The values are about to be changed."""
        self.changed = True

    def is_newer(self) -> bool:
        """Return True if the values in memory differ from what is stored. See [Note: when a buffer may go]."""
        return self.changed or [checksum(values) for values in self.opened] != self.checksums

    def pack(self, lease: Lease) -> list[int]:
        """Copy the values that the file has elsewhere to there. Returns the checksum of each parameter's."""
        for location, values in zip(self.plan.locations, self.opened, strict=True):
            if location.offset_bytes != location.file_offset_bytes:
                in_file(lease, location).view(location.shape).copy_(location.view(values))
        known = self.step_checksums
        return [known[i] if i in known else checksum(values) for i, values in enumerate(self.opened)]

    def write(self, cache: RecordCache) -> None:
        """Start writing the record, which is open. Waits for an earlier write.

        Raises:
            SwapError: it is `fixed`, and was changed.
            SwapIOError: that write failed; or there is no room for a fresh file.
        """
        if self.fixed:
            self.check_unchanged()
            self.changed = False
            return
        cache.wait(self.key)
        record = cache.records.get(self.key)
        assert record is not None
        checksums = self.pack(record.lease)
        cache.write(self.key, self.plan.file_bytes)
        self.checksums, self.changed = checksums, False

    def check_unchanged(self) -> None:
        """Raise SwapError if values differ from what is stored. It is in memory."""
        both = zip(self.plan.locations, self.opened, self.checksums, strict=True)
        self.refuse_changes(
            [position for position, (_, values, before) in enumerate(both) if checksum(values) != before]
        )

    def refuse_changes(self, positions: Sequence[int]) -> None:
        """Raise SwapError that the values of the parameters at these positions were changed, if there are any."""
        if positions:
            names = ", ".join(self.plan.locations[position].name for position in positions)
            raise SwapError(
                f"the values of {names} were changed, and they come from files that stay as they are; set "
                "offload_param.copy_on_write to have what changes written to the run directory, or undo the change"
            )

    def write_newer(self, cache: RecordCache) -> None:
        """Start writing the record, which is KEPT, if it is newer than what is stored."""
        if self.opened and self.is_newer():
            self.write(cache)

    def write_failed(self) -> None:
        """The values are still in memory, and will be written again."""
        self.changed = True

    def evicted(self) -> None:
        """The buffer is given up."""
        self.unregister()
        self.opened = []

    def forget(self) -> None:
        """Let go of what is in memory beside the pool's buffer."""


class ParameterPolicy(CyclicPolicy):
    """Says why there is no room.

    Attributes:
        budget: the sum by which records have their room in the pool; None if others have none of it.
    """

    budget: PoolBudget | None = None

    def pool_bytes_for(self, room_bytes: int, capacity_bytes: int, limit_bytes: int) -> str:
        """Say what the pool, of `capacity_bytes` now, must have for `room_bytes` of records, not `limit_bytes`."""
        if self.budget is not None:
            return f"{self.budget.pool_bytes_for(room_bytes)}{self.budget.of_buckets}"
        return str(capacity_bytes - limit_bytes + room_bytes)

    def refuse(self, cache: RecordCache, length_bytes: int) -> None:
        """Raise the sum."""
        assert cache.limit_bytes is not None
        now_bytes = cache.pool.capacity_bytes, cache.limit_bytes
        refuse_room(
            [(held, held.length_bytes) for held in self._contents if isinstance(held, Held)],
            length_bytes,
            cache.records.length_bytes,
            len(cache.records),
            cache.limit_bytes,
            "pool_bytes",
            lambda room_bytes: self.pool_bytes_for(room_bytes, *now_bytes),
        )


class ParameterCache:
    """Brings records into the pool, ahead where it can, and opens them.

    Args:
        records: by number; none is in memory. May grow.
        order: in which they are used.
        budget_bytes: the most of the pool that they may hold.
        pool: where buffers come from.
        store: where records go; None keeps them in the pool, for a model on an accelerator.
        policy: what stays and what goes first; None: what is needed last in `order`.
        metrics: counts what moves; None: those of its own.
        lock: as for `RecordCache`.
    """

    def __init__(
        self,
        records: list[Held],
        order: Order,
        budget_bytes: int,
        pool: BufferPool | GrowingPool,
        store: RecordStore | None,
        policy: ParameterPolicy | None = None,
        metrics: Metrics | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self._pool = pool
        self._store = store
        self._policy = policy or ParameterPolicy(order, records)
        kept = None if store is None else self._policy
        self._cache = RecordCache(pool, store, self.metrics, kept, owner=self, lock=lock)
        self._cache.limit_bytes = None if store is None else budget_bytes
        self._budget_bytes = budget_bytes
        self._pid = os.getpid()
        self._lock = self._cache.lock
        self._all = records
        self._closed = False
        self._order = order
        self._tier: DeviceTier | None = None  # of a model on an accelerator

    @property
    def _caches(self) -> list[RecordCache]:
        """The caches that records are in."""
        return [self._cache] if self._tier is None else self._tier.caches

    @property
    def _here(self) -> list[Held]:
        """All records that may have values in memory."""
        return self._all

    def _check_device_room(self, records: Sequence[Held]) -> None:
        """Refuse `records` that do not fit an accelerator together. Raises PoolExhausted."""
        tiers = {tier: None for held in records if (tier := self._tier_of(held)) is not None}
        for tier in tiers:
            tier.check_room_for(held for held in records if self._tier_of(held) is tier)

    def _tier_of(self, held: Held) -> DeviceTier | None:
        """The tier that brings `held` to an accelerator."""
        return self._tier

    def _bring(self, held: Held, phase: str) -> None:
        """Have `held`, of which there is a hold, in memory and open. Starts to read what will be used after it."""
        if self._tier is not None:
            self._tier.bring(held, phase)
            return
        self._order.note(Use(phase, held.number))
        self._cache.require(held.key, held.length_bytes)
        self.read_ahead()
        lease = self._cache.fetch(held.key)
        if not held.opened:
            held.open(lease, self, arrived=True)

    def _write_back(self, held: Held) -> None:
        """Start writing a record that is known to have changed, if no use of it is left. See `Held.late`."""
        if (tier := self._tier_of(held)) is not None:
            tier.release(held)
        elif held.changed and not held.holds and held.values and not held.late:
            held.write(self._cache)

    @contextlib.contextmanager
    def _written_late(self, records: Sequence[Held]) -> Iterator[None]:
        """Within it `records` that change are written only if their memory is needed, and else at the end of it.

        Raises:
            SwapIOError: on leaving: a write could not be started; it will be, before the values go.
        """
        counted: Sequence[Held] = ()
        try:
            with self._lock, interrupts_deferred():
                for held in records:
                    held.late += 1
                counted = records
            yield
        finally:
            with self._lock, contextlib.ExitStack() as all_of_them:
                with interrupts_deferred():
                    for held in counted:
                        held.late -= 1
                for held in records if not self._closed else ():
                    all_of_them.callback(self._write_back, held)

    def read_ahead(self) -> None:
        """Start reading what will be used next, as far as the budget goes."""
        while (number := self._order.missing()) is not None:
            held = self._all[number]
            in_pool = self._cache.records.get(held.key) is not None
            if held.gone or held.values or in_pool:  # Values that are not in the pool are on the device.
                self._order.hold(number, fixed=held.gone or held.resident or not in_pool)
            elif not self._cache.stage(held.key, held.length_bytes) or self._cache.records.get(held.key) is None:
                return  # There is no room; or nothing is stored of it, as it is still being taken over.

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise SwapError(
                "a model whose parameters are swapped was used in a forked process; its files and buffers "
                "belong to the parent. Make the model in the process that uses it"
            )
        if self._closed:
            raise SwapError(
                "the swapper of this model was closed, and the values of its parameters are gone; make the model anew, "
                "and close it with model.swapper.close(keep_values=True)"
            )

    def saved(self, held: Held, index: int, version: int, given: int) -> torch.Tensor:
        """The values of a parameter that autograd saved, 1-D: there as long as somebody has the tensor or a view of it.

        Raises:
            RuntimeError: the parameter has another version now, as autograd raises it.
            SwapError: it was given other data meanwhile. Autograd would use the former ones where it saved a view.
        """
        location = held.plan.locations[index]
        if location.parameter._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {location.name} is at version {location.parameter._version}; expected version {version} "
                "instead"
            )
        if location.given != given:
            raise SwapError(
                f"{location.name} was given other data (`p.data = ...`) between a forward and its backward, which "
                "needs the former ones; do that after backward, or before forward"
            )
        return self._values_of(held, index, "backward")

    def _values_of(self, held: Held, position: int, phase: str) -> torch.Tensor:
        """Bring a record, and give the values of a parameter as `saved` does."""
        self._check_open()
        hold = object()
        with self._lock:
            try:
                held.holds.add(hold)
                self._bring(held, phase)
                # A tensor that is not ours, while there is a hold: without the lock another thread may evict the rest.
                return held.values[position].view(-1)
            finally:
                held.holds.discard(hold)


def finalize(
    records: list[Held], caches: Sequence[RecordCache], store: RecordStore | None, release: Callable[[], None], pid: int
) -> None:
    """Wait for what is in flight, delete the files and give the memory back."""
    if os.getpid() != pid:
        return
    for cache in caches:
        cache.close()
    for held in records:
        held.forget()
        if store is not None:
            store.forget(held.key)
    release()


_ONE_CALL = (
    "let it use fewer at a time. Where an optimizer's state is not swapped, its step is such a call with foreach=True "
    "or fused=True: make it with foreach=False and fused=False, or give it to swapper.offload with "
    "offload_optimizer.device nvme or cpu"
)
"""The advice for a call that uses more parameters at once than there is room for."""


def refuse_room(
    sizes: Sequence[tuple[Held, int]],
    length_bytes: int,
    held_bytes: int,
    holders: int,
    limit_bytes: int,
    setting: str,
    setting_for: Callable[[int], int | str],
    device: torch.device | None = None,
) -> NoReturn:
    """Raise PoolExhausted: there is no room for parameters.

    Args:
        sizes: all records, with the bytes that each takes.
        length_bytes: of what has no room.
        held_bytes, holders: what others hold, and how many they are.
        limit_bytes: the room.
        setting: the one that bounds it; `setting_for` gives its value for that many bytes of records.
        device: whose memory it is; None of the pool.
    """
    uses: dict[object, list[int]] = {}
    for held, size_bytes in sizes:
        for use in held.holds:
            uses.setdefault(use, []).append(size_bytes)
    most = max(uses.values(), key=sum, default=[])
    if sum(most) > limit_bytes:
        together_bytes = sum(size_bytes for held, size_bytes in sizes if held.holds)
        raise PoolExhausted(
            f"one call uses {len(most)} records of parameters at once, which take {format_bytes(sum(most))} "
            f"{'of the pool' if device is None else f'on {device}'}, where they have {format_bytes(limit_bytes)}; "
            f"{_ONE_CALL}, or set {setting} to at least {setting_for(together_bytes)}"
        )
    missing_bytes = held_bytes + length_bytes - limit_bytes
    if missing_bytes <= 0:  # There is room, in pieces that are too short.
        missing_bytes = length_bytes
    all_bytes = sum(size_bytes for _, size_bytes in sizes)
    raise PoolExhausted(
        f"no room {'' if device is None else f'on {device} '}for {format_bytes(length_bytes)} of parameters: "
        f"{format_bytes(held_bytes)} of {format_bytes(limit_bytes)} are held by {holders} records that are in use at "
        f"once or of which user code keeps views; do not keep views of parameters, or set {setting} to at least "
        f"{setting_for(limit_bytes + missing_bytes)}, plus the length of each further record of which views are kept"
        f"{_about_ddp() if device is None else ''}; the graph of a backward pass with create_graph=True keeps all "
        f"parameters that the pass has used: it needs {setting} of up to {setting_for(all_bytes)}"
    )


def in_file(lease: Lease, location: ParameterLocation) -> torch.Tensor:
    """The values of a parameter where the file has them, in the order of indices, 1-D."""
    data = lease.tensor[location.file_offset_bytes : location.file_offset_bytes + location.length_bytes]
    return data.view(location.dtype)  # It is at a multiple of its items: smaller ones come after larger ones.


def _about_ddp() -> str:
    if not is_distributed():
        return ""
    return (
        " (DistributedDataParallel keeps views of all while it synchronizes them: make it before swapper.offload, or "
        "with init_sync=False where all ranks start with the same values)"
    )
