"""`ParameterCache`: which records of parameters are in the pool, and the views of what is there.

[Note: when a buffer may go] A record's buffer is given up only when no tensor but ours shares its memory: each
parameter's values have a storage of their own while they are in the pool, and its use count says whether a view of
them is left anywhere. And its bytes are compared, by checksum, with what is stored: what user code changed in place,
even behind autograd's back, is written first.

[Note: pools in pieces] A record that is in use cannot be moved, and one in the middle of a short pool may leave no
piece that is long enough for the next, though their sum is what the pool must hold. So in pools of a few records a
buffer is chosen from the end of the pool where less is in use, and what lies in between goes first. A record that is in
memory and lies badly is let go, and read again to a better place, before it is used.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from swapper.errors import SwapError, SwapIOError
from swapper.io.checksums import checksum
from swapper.metrics import Metrics
from swapper.parameter.access_order import Order, Use
from swapper.parameter.records import ParameterPlace, ParameterRecord
from swapper.sizes import format_bytes
from swapper.storage.buffers import BufferPool, Lease, PoolExhausted
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.transfers import AnyTransfer
from swapper.tensors.grad_modes import outside_of_inference

__all__ = ["BY_ADDRESS", "Held", "ParameterCache", "State", "finalize"]

log = logging.getLogger(__name__)

BY_ADDRESS: dict[int, tuple[weakref.ref[ParameterCache], Held, int]] = {}
"""Where values in buffers begin: whose they are, in which record, and which of its parameters.

Of all swappers, because of several that are in use at once only the hooks of one decide what autograd saves.
"""


_ROOMY = 5
"""A pool of so many of the longest record has a piece for another, wherever two that are in use lie."""


class State(enum.Enum):
    """Where the values of a record are."""

    STORED = enum.auto()
    """On the drive. No buffer."""
    ARRIVING = enum.auto()
    """Being read into its buffer."""
    HERE = enum.auto()
    """In its buffer, as stored or newer; perhaps being written from there."""
    GONE = enum.auto()
    """Nowhere: it was given up."""


@dataclass(eq=False, slots=True)
class Held:
    """A record, and what is in memory of it."""

    plan: ParameterRecord
    key: RecordKey
    state: State = State.STORED
    lease: Lease | None = None
    values: list[torch.Tensor] = field(default_factory=list)
    """HERE: the values of each parameter, 1-D, in storages of their own."""
    checksums: list[int] = field(default_factory=list)
    """Of each parameter as last written."""
    holds: set[object] = field(default_factory=set)
    """The uses of it that are not over. While there are any, it stays."""
    attached: dict[int, set[object]] = field(default_factory=dict)
    """The parameters that see their values, by their place in the record, and the uses for which they do."""
    changed: bool = False
    """Known to be newer than what is stored."""
    resident: bool = False
    """Stays in the pool once it is there. What changes is written all the same."""

    @property
    def number(self) -> int:
        """Place in the order of registration."""
        return self.plan.number

    def foreign_uses(self) -> bool:
        """Whether tensors that we do not know of share the memory. See [Note: when a buffer may go]."""
        # Ours are `values`, the Python object of the storage, and the parameter if it is attached.
        return any(
            torch._C._storage_Use_Count(values.untyped_storage()._cdata) > 2 + (index in self.attached)
            for index, values in enumerate(self.values)
        )


class ParameterCache:
    """Brings records into the pool, ahead where it can, and lets them go when others are needed sooner.

    Args:
        records: all STORED.
        order: in which they are used.
        budget_bytes: the most of the pool that they may hold.
        pool, store: where buffers come from and records go.
    """

    def __init__(
        self, records: list[Held], order: Order, budget_bytes: int, pool: BufferPool, store: TensorStore
    ) -> None:
        self.metrics = Metrics()
        self._pool = pool
        self._store = store
        self._budget_bytes = budget_bytes
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._all = records
        self._longest_bytes = max((held.plan.length_bytes for held in records), default=0)
        self._held_bytes = 0
        self._dropped: list[AnyTransfer] = []
        self._closed = False
        self._order = order
        pool.add_reclaimer(self._reclaim)

    def _bring(self, held: Held, phase: str) -> None:
        """Have `held`, of which there is a hold, HERE. Starts to read what will be used after it."""
        self._order.note(Use(phase, held.number))
        if held.state is not State.HERE and held.lease is not None and held.lease.transfer is None:
            self._release(held)  # Ctrl-C struck before it was read, or when it had arrived and was not open yet.
        if held.lease is not None and self._splits_pool(held, held.lease) and self._may_move(held):
            self._evict(held)
        if held.state is State.STORED:
            self._make_room(held)
            self._read(held)
        self._read_ahead()
        if held.state is State.ARRIVING:
            assert held.lease is not None
            assert held.lease.transfer is not None
            if held.lease.transfer.done():
                self.metrics.hits += 1
            try:
                with self.metrics.span("swapper.wait_read", "wait_read_s"):
                    held.lease.transfer.wait()
            except SwapIOError:
                self._release(held)
                raise
            held.lease.transfer = None
            self._open(held)
        elif held.lease is not None:
            self.metrics.hits += 1

    def _read(self, held: Held) -> None:
        assert held.lease is not None
        try:
            held.lease.transfer = self._store.read(held.key, held.lease)
        except BaseException:
            self._release(held)
            raise
        held.state = State.ARRIVING
        self.metrics.count_read(held.key, held.plan.file_bytes, held.lease.transfer)

    def _open(self, held: Held) -> None:
        """Make the views of a buffer whose bytes are there."""
        lease = held.lease
        assert lease is not None
        held.values = []
        for index, place in enumerate(held.plan.places):
            with outside_of_inference():  # They outlive that mode.
                values = lease.own_view(place.offset_bytes, place.numel, place.dtype)
            held.values.append(values)
            BY_ADDRESS[values.data_ptr()] = (weakref.ref(self), held, index)
        if held.state is State.ARRIVING:
            for place, values in zip(held.plan.places, held.values, strict=True):
                if place.offset_bytes != place.file_offset_bytes:
                    stored = _in_file(lease, place)
                    values.as_strided(place.shape, place.stride).copy_(stored.view(place.shape))
        held.state = State.HERE

    def _is_newer(self, held: Held) -> bool:
        """Whether the values differ from what is stored. See [Note: when a buffer may go]."""
        return held.changed or [checksum(values) for values in held.values] != held.checksums

    def _write(self, held: Held) -> None:
        """Start writing a record that is HERE."""
        self._settle_write(held)
        lease = held.lease
        assert lease is not None
        for place, values in zip(held.plan.places, held.values, strict=True):
            if place.offset_bytes != place.file_offset_bytes:
                _in_file(lease, place).view(place.shape).copy_(values.as_strided(place.shape, place.stride))
        checksums = [checksum(values) for values in held.values]
        lease.transfer = self._store.write(held.key, lease, held.plan.file_bytes)
        held.checksums, held.changed = checksums, False
        self.metrics.count_write(held.key, held.plan.file_bytes, lease.transfer)

    def _settle_write(self, held: Held) -> None:
        """Wait for the write of a record that is HERE, if one is in flight.

        Raises:
            SwapIOError: it failed. The values are still in memory, and will be written again.
        """
        if held.state is not State.HERE or held.lease is None or held.lease.transfer is None:
            return
        try:
            with self.metrics.span("swapper.wait_write", "wait_write_s"):
                held.lease.transfer.wait()
        except SwapIOError:
            held.changed = True
            raise
        finally:
            if held.lease.transfer.done():
                held.lease.transfer = None

    def _read_ahead(self) -> None:
        """Start reading what will be used next, as far as the budget goes."""
        while (number := self._order.missing()) is not None:
            held = self._all[number]
            if held.state is State.GONE or held.lease is not None:  # Or Ctrl-C struck.
                self._order.hold(number, fixed=held.resident or held.state is State.GONE)
                continue
            while self._held_bytes + held.plan.length_bytes > self._budget_bytes:
                victim = self._victim(idle_only=True, beyond=self._order.worth())
                if victim is None:
                    return
                self._evict(victim)
            lease = self._pool.try_acquire(held.plan.length_bytes, high=self._is_low_end_used(held))
            if lease is None:
                return
            if self._splits_pool(held, lease):
                lease.release()
                return
            self._take_lease(held, lease)
            self._read(held)

    def _take_lease(self, held: Held, lease: Lease) -> None:
        self._order.hold(held.number, fixed=held.resident)
        held.lease = lease
        self._held_bytes += lease.length_bytes

    def _make_room(self, held: Held) -> None:
        """Get a buffer for a record that is STORED."""
        length = held.plan.length_bytes
        self._longest_bytes = max(self._longest_bytes, length)
        while True:
            lease = None
            if self._held_bytes + length <= self._budget_bytes:
                lease = self._pool.try_acquire(length, high=self._is_low_end_used(held))
                if lease is not None and not self._splits_pool(held, lease):
                    break
            victim = self._victim(idle_only=True) or self._victim(idle_only=False)
            if victim is not None:
                if lease is not None:
                    lease.release()
                self._evict(victim)
                continue
            if lease is not None:
                break
            if self._held_bytes + length <= self._budget_bytes:
                with self.metrics.span("swapper.wait_pool"):
                    lease = self._pool.acquire(length)
                break
            kept = [other for other in self._all if other.state is State.HERE]
            raise PoolExhausted(
                f"no room for {format_bytes(length)} of parameters: {format_bytes(self._held_bytes)} of "
                f"{format_bytes(self._budget_bytes)} are held by {len(kept)} records that are in use at once or of "
                f"which user code keeps views; raise pool_bytes, or do not keep views of parameters{_about_ddp()}"
            )
        self._take_lease(held, lease)

    def _may_move(self, held: Held) -> bool:
        """Whether nobody has its values yet, but who asks for them now."""
        return len(held.holds) == 1 and not held.attached and not held.resident and not held.foreign_uses()

    def _is_roomy(self) -> bool:
        return self._pool.capacity_bytes >= _ROOMY * self._longest_bytes

    def _in_use(self, held: Held) -> list[tuple[int, int]]:
        """Where in the pool the records are that are in use, beside `held`, if the pool is so short that it matters."""
        if self._is_roomy():
            return []
        there = [other for other in self._all if other.lease is not None and other is not held]
        leases = [other.lease for other in there if other.lease and (other.holds or other.foreign_uses())]
        return [(lease.offset_bytes, lease.offset_bytes + lease.length_bytes) for lease in leases]

    def _is_low_end_used(self, held: Held) -> bool:
        """Whether most of what is in use is in the lower half of the pool. See [Note: pools in pieces]."""
        middle = self._pool.capacity_bytes // 2
        return sum(stop - start if stop <= middle else start - stop for start, stop in self._in_use(held)) > 0

    def _splits_pool(self, held: Held, lease: Lease) -> bool:
        """Whether a record that is used at that place leaves no piece for the next. See [Note: pools in pieces]."""
        if self._is_roomy():
            return False
        capacity_bytes = self._pool.capacity_bytes
        start, stop = lease.offset_bytes, lease.offset_bytes + lease.length_bytes
        others = (other for other in self._all if other is not held and not other.holds)
        needed = max((other.plan.length_bytes for other in others), default=0)
        if max(start, capacity_bytes - stop) < needed:  # Even when no other is in use any more.
            return True
        used = sorted([*self._in_use(held), (start, stop)])
        if sum(stop - start for start, stop in used) + needed > self._budget_bytes:
            return False  # There is no room for it now, wherever they lie.
        edges = [0, *(edge for span in used for edge in span), capacity_bytes]
        return max(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)) < needed

    def _victim(self, *, idle_only: bool, beyond: int = -1) -> Held | None:
        """The record that is needed last among those that may go, if it is needed after `beyond` other uses."""
        for number in self._order.last_needed():
            if beyond >= 0 and self._order.distance(number) <= beyond:
                return None
            held = self._all[number]
            if held.lease is None or held.holds or held.attached:
                continue
            if held.state is State.HERE:
                transfer = held.lease.transfer
                if idle_only and transfer is not None and not transfer.done():
                    continue
                if held.foreign_uses():
                    continue
            return held
        return None

    def _evict(self, held: Held) -> None:
        """Give up the buffer of a record that nobody uses; what is newer in it is written first."""
        if held.state is State.HERE:
            self._settle_write(held)
            if self._is_newer(held):
                self._write(held)
                self._settle_write(held)
        self._release(held)

    def _release(self, held: Held) -> None:
        lease = held.lease
        assert lease is not None
        if held.state is State.ARRIVING and lease.transfer is not None:
            self._dropped.append(lease.transfer)
        for transfer in [transfer for transfer in self._dropped if transfer.done()]:
            self._dropped.remove(transfer)
            with contextlib.suppress(SwapIOError):  # Nobody wanted what it read.
                transfer.wait()
        for values in held.values:
            BY_ADDRESS.pop(values.data_ptr(), None)
        held.values = []
        self._held_bytes -= lease.length_bytes
        held.lease, held.state = None, State.STORED
        lease.release()
        self._order.drop(held.number)

    def _reclaim(self) -> bool:
        """Give a buffer back to a pool that is short."""
        if self._closed or not self._lock.acquire(blocking=False):
            return False
        try:
            victim = self._victim(idle_only=True) or self._victim(idle_only=False)
            if victim is None:
                return False
            self._evict(victim)
            return True
        finally:
            self._lock.release()

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

    def saved(self, held: Held, index: int, version: int) -> torch.Tensor:
        """The values of a parameter that autograd saved, 1-D; there as long as a view of them is.

        Raises:
            RuntimeError: the parameter has another version now, as autograd raises it.
        """
        place = held.plan.places[index]
        if place.parameter._version != version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {place.name} is at version {place.parameter._version}; expected version {version} instead"
            )
        self._check_open()
        hold = object()
        with self._lock:
            try:
                held.holds.add(hold)
                self._bring(held, "backward")
                return held.values[index]
            finally:
                held.holds.discard(hold)


def finalize(
    records: list[Held], dropped: list[AnyTransfer], store: TensorStore, release: Callable[[], None], pid: int
) -> None:
    """Wait for what is in flight, delete the files and give the memory back."""
    if os.getpid() != pid:
        return
    for held in records:
        if held.lease is None:
            continue
        if held.lease.transfer is not None:
            try:
                held.lease.transfer.wait()
            except SwapIOError as error:
                # Without a traceback: this may run in the middle of anything, where formatting one is not safe.
                if held.state is State.HERE:
                    log.warning("a write of parameters had failed, and the model is gone: %r", error)
            held.lease.transfer = None
        if held.foreign_uses():
            held.lease.abandon()
        else:
            held.lease.release()
        for values in held.values:
            BY_ADDRESS.pop(values.data_ptr(), None)
        held.values = []
        held.lease = None
    for transfer in dropped:
        with contextlib.suppress(SwapIOError):
            transfer.wait()
    dropped.clear()
    for held in records:
        store.forget(held.key)
    release()


def _in_file(lease: Lease, place: ParameterPlace) -> torch.Tensor:
    """The values of a parameter where the file has them, in the order of indices, 1-D."""
    data = lease.tensor[place.file_offset_bytes : place.file_offset_bytes + place.length_bytes]
    if place.file_offset_bytes % place.dtype.itemsize == 0:
        return data.view(place.dtype)
    raise AssertionError("tensors of smaller items come after those of larger ones")


def _about_ddp() -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ""
    return (
        " (DistributedDataParallel keeps views of all while it synchronizes them: make it before swapper.offload, or "
        "with init_sync=False where all ranks start with the same values)"
    )
