"""`DeviceTier`: the device memory of the parameters of a model on an accelerator, in front of the pool.

[Note: two tiers] Of a model on an accelerator the pool is the way between the drive and the device:

    drive  <--- RecordCache --->  pool  <--- DeviceTier --->  device: one tensor for each parameter

A parameter is attached to its tensor on the device, and what autograd saves of it is a location that is found there.
A record is brought when a module, an operation or backward needs it: it is read into the pool, copied up, and the
current stream waits for the copy. The host waits for the drive, if it was not read ahead, and for device memory. What
will be used next is copied up ahead, as far as `limit_bytes` goes. Belady's rule says what goes: the record that is
needed last.

[Note: which copy is the newest] The one on the device, while it is there: it may have been changed in any way. Then the
one in the pool, if there is one, and then the file. `HeldOnDevice.changed_on_device` says that the first is known to be
newer than the second, `changed` that the second is newer than the third. A step on the CPU steps the pool's copy: what
the device has is brought down before it, if it has changed, and dropped, or replaced if it is in use.

[Note: whose memory] Values are allocated on the stream of copies up, where free memory is reused in the order of the
copies: so a copy up waits for nothing that other streams have to do. Before values are freed that stream waits for
their last use: the sums that they were compared by, or else all that the streams which have used them have to do by
then; or the copy down, for which they stay. Of values that others have views of, and at the end, these streams are
recorded instead. Sums and copies down wait for all streams that have used the values. Sums that are made with a copy
up are in memory of the current stream, so such a copy waits for it. The pool's buffer is kept by the copy, its lease's
transfer. The cache's thread writes, or `poll`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch

from swapper.errors import SwapIOError
from swapper.io.devices import Copy, DeviceCopies, memory_advice, refuse_in_graph
from swapper.parameter.cache import DEVICE_TYPES, Held, refuse_room
from swapper.parameter.direct_records import DirectRecords
from swapper.parameter.held_on_device import DeviceUses, HeldOnDevice
from swapper.parameter.records import DeviceRoom, device_bytes_of, sums_bytes_of
from swapper.process.interrupts import interrupts_deferred
from swapper.sizes import format_bytes
from swapper.storage.access_order import AccessOrder, Order, Use
from swapper.storage.buffers import Lease, PoolExhausted
from swapper.storage.cache import RecordCache
from swapper.storage.cached_records import RecordState
from swapper.storage.spans import RecordStore
from swapper.storage.transfers import BothTransfers
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode

if TYPE_CHECKING:
    from swapper.parameter.cache import ParameterCache

__all__ = ["DeviceTier"]

_ADVICE = (
    "parameters take up to offload_param.device_bytes of the accelerator's memory; lower that, as far as swapper.check "
    "says that they need it, or offload_param.device_resident_bytes, which is a part of it"
)
_FEW = 3
"""Records that are looked at for one that the device has done with: about as many as fit by default."""


class DeviceTier:
    """Brings records from the pool to the device, ahead where it can, and lets them go.

    Args:
        owner: brings records into the pool.
        cache: of the pool.
        records: by number, each a `HeldOnDevice`; none is on the device. May grow.
        order: in which the pool's records are used; with `room.staging`, those that come without the pool.
        on_device: in which those on the device are.
        room: what records may have on the device.
        store: of the records, if there is one.

    Attributes:
        device, limit_bytes: as in `room`.
        direct: brings records without the pool, and writes them; None if nothing does.
        caches: those that records are in, the pool's first.
        uses: of the values on the device.
        used_bytes: of the device memory that records take now.

    Not thread-safe: called under the lock of the cache.
    """

    def __init__(
        self,
        owner: ParameterCache,
        cache: RecordCache,
        records: Sequence[Held],
        order: Order,
        on_device: Order,
        room: DeviceRoom,
        store: RecordStore | None,
    ) -> None:
        self.device = device = room.device
        DEVICE_TYPES.add(device.type)
        self.limit_bytes, self.used_bytes = room.limit_bytes, 0
        self.direct: DirectRecords | None = None
        if room.staging is not None and store is not None:
            self.direct = DirectRecords(device, room.staging, store, owner.metrics, records, order, owner)
        self.caches = [cache] if self.direct is None else [cache, self.direct.cache]
        self._cache = cache
        self._records = cast("Sequence[HeldOnDevice]", records)
        self._pool_order = order
        self._order = on_device
        self._up = DeviceCopies(device)
        self._down = DeviceCopies(device)
        self.uses = DeviceUses(device, self._up, self._down)
        self._going_down: dict[HeldOnDevice, None] = {}  # in the order in which the copies were started
        self._moving: HeldOnDevice | None = None  # has `moving` set, perhaps by a call that was cut off
        self._last_copies: tuple[Copy | None, Copy | None] = None, None  # up, of records that nobody may change
        self._owner_ref = weakref.ref(owner)

    @property
    def _owner(self) -> ParameterCache:
        owner = self._owner_ref()
        assert owner is not None  # It has called this.
        return owner

    def expect(self, uses: Iterable[Use], start: int) -> None:
        """Expect `uses` of the device, of which those before `start` are over, until others are seen."""
        self._order = AccessOrder(uses, start)

    # --- Uses on the device ----------------------------------------------------------------------------------------

    @memory_advice(_ADVICE)
    def bring(self, held: Held, phase: str) -> None:
        """Have the values of `held`, of which there is a hold, on the device for what the current stream does next.

        Raises:
            SwapIOError: the drive or the device failed.
            PoolExhausted: there is no room for them.
            SwapError: a CUDA graph is being captured.
        """
        assert isinstance(held, HeldOnDevice)
        refuse_in_graph(self.device)
        for order in (self._order, self._pool_order):
            order.note(Use(phase, held.number))
        self.poll()
        self.uses.begin(held)
        if self._lacks(device_bytes_of(held.plan)):  # Else the room for the next one would wait for this one's work.
            self.uses.sum_early()
        self._owner.metrics.hits += bool(held.on_device)
        if not held.on_device:
            self._make_room(device_bytes_of(held.plan))
            self._lift(held)
        self.uses.follow(held)
        self._look_ahead()

    def release(self, held: Held) -> None:
        """A use of `held` is over. What is known to have changed goes down, unless it is `late`."""
        assert isinstance(held, HeldOnDevice)
        if held.late:
            return
        if held.changed_on_device and held.on_device and not held.holds:
            self._send_down(held)
        elif held.stepped and not held.on_host and held.opened:
            held.write(self._cache)

    def forget(self, held: Held) -> None:
        """Let go of the values on the device: nobody wants them any more, but who has views of them."""
        assert isinstance(held, HeldOnDevice)
        self._move(None)
        with interrupts_deferred():
            held.down = None  # It may go on, of whatever comes there: who forgets the record in the pool waits for it.
            self._going_down.pop(held, None)
        if held.on_device:
            self._free(held)

    def poll(self) -> None:
        """Start the writes of records that have come down, and free those that were waiting for it.

        Raises:
            SwapIOError: a copy failed; or a write could not be started.
        """
        for held in list(self._going_down):
            if held.down is not None and not held.down.done():
                return
            self._land(held)

    def wait(self) -> None:
        """Wait for what the current stream has to do, and for copies up before it. Errors as for `Copy.wait`."""
        if (reached := self._up.reached()) is not None:
            reached.wait()

    def rest(self) -> None:
        """Give the device memory back of all that nothing uses, and whose changes have come down."""
        while (victim := self._first_idle(range(len(self._records)))) is not None:
            self._evict(victim)

    def _fetch(self, held: HeldOnDevice, *, anew: bool = False) -> Lease:
        """Have the record in the pool, and open. With `anew` its content is undefined, but for the header."""
        self._move(held)
        if self.direct is not None:
            self.direct.leave(held)
        if held.fixed and self._cache.records.get(held.key) is None:
            self._finish_former_copy()
        self._cache.require(held.key, held.length_bytes, anew=anew)
        if not anew and self.direct is None:
            self._owner.read_ahead()
        lease = self._cache.fetch(held.key)
        if anew:
            self._cache.wait(held.key)
            header = b"" if held.plan.spans else held.plan.layout.header(0)  # Files of others have none there.
            if header:
                lease.tensor[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if not held.opened:
            held.open(lease, self._owner, arrived=not anew)
        return lease

    def _finish_former_copy(self) -> None:
        """Wait for the last copy up but one, so that its buffer can go: else one would that is to stay in the pool."""
        if (copy := self._last_copies[0]) is not None:
            copy.wait()

    def _move(self, held: HeldOnDevice | None) -> None:
        """Let the buffer of `held` stay until this is called again, and that of no other."""
        former, self._moving = self._moving, held
        if former is not None:
            former.moving = False
        if held is not None:
            held.moving = True

    def _lift(self, held: HeldOnDevice) -> None:
        """Start copying a record to its tensors on the device. There is room. After an exception it is not there."""
        direct = None if self.direct is None or self._cache.records.get(held.key) is not None else self.direct
        lease = self._fetch(held) if direct is None else direct.fetch(held, self._cache)
        length_bytes = device_bytes_of(held.plan)
        with outside_of_inference():  # They outlive that mode.
            with interrupts_deferred(), self._up.allocating():  # See [Note: whose memory].
                values = [torch.empty(each.numel, dtype=each.dtype, device=self.device) for each in held.plan.locations]
            if held.sums is None:
                held.sums = torch.empty(len(values), dtype=torch.int64, device=self.device)
        self.uses.sums.fit(max(each.length_bytes for each in held.plan.locations))
        if not held.summed:
            self._up.begin()
        with interrupts_deferred():
            held.up = self._copy_up(held, values, lease, direct)
            if held.fixed:
                self._last_copies = self._last_copies[1], held.up
            held.on_device = values
            held.register(self._owner)
            self.used_bytes += length_bytes
            self._order.hold(held.number, fixed=held.stays)
            if self.direct is not None:
                self.direct.release(held)
        self._move(None)

    def _copy_up(
        self, held: HeldOnDevice, values: list[torch.Tensor], lease: Lease, direct: DirectRecords | None = None
    ) -> Copy | None:
        pairs = held.pairs(values, None if direct is None else lease)

        def work() -> None:
            for there, here in pairs:
                there.copy_(here, non_blocking=self._up.non_blocking)
            if not held.summed:
                assert held.sums is not None
                held.sums.copy_(self.uses.sums.of(values))

        sums = () if held.summed or held.sums is None else (held.sums,)
        with modes_kept():
            set_grad_mode(False)
            copy = self._up.run(work, *sums)  # The model may be gone before, and their memory is the current stream's.
        held.summed = True
        if copy is not None:
            record, former = (self._cache if direct is None else direct.cache).records.get(held.key), lease.transfer
            assert record is not None
            if record.writing and former is not None:  # The write is still to be seen; earlier copies up are not.
                lease.transfer = BothTransfers(former.first if isinstance(former, BothTransfers) else former, copy)
            else:
                lease.transfer = copy
        return copy

    def _look_ahead(self) -> None:
        """Start copying up what will be used next, as far as there is room, and it is in the pool."""
        while (number := self._order.missing()) is not None:
            held = self._records[number]
            if held.gone or held.on_device:
                self._order.hold(number, fixed=held.gone or held.stays)
                continue
            record = next(filter(None, (cache.records.get(held.key) for cache in self.caches)), None)
            if record is None or record.state not in (RecordState.KEPT, RecordState.ARRIVING):
                return
            if record.state is RecordState.ARRIVING and record.lease.transfer and not record.lease.transfer.done():
                return
            while self._lacks(device_bytes_of(held.plan)):
                if not self._spare():
                    return
            try:
                self._lift(held)
            except (SwapIOError, torch.OutOfMemoryError):  # Who needs it tries again, and is told.
                return

    # --- Room ------------------------------------------------------------------------------------------------------

    @property
    def _beside_bytes(self) -> int:
        """Device memory that sums take."""
        return self.uses.sums.length_bytes + sum(sums_bytes_of(held.plan) for held in self._records)

    def _lacks(self, length_bytes: int) -> bool:
        return self.used_bytes + length_bytes > self.limit_bytes

    def _make_room(self, length_bytes: int) -> None:
        """Have room for `length_bytes`.

        Raises:
            PoolExhausted: what is in use leaves too little.
        """
        while self._lacks(length_bytes):
            if (victim := self._victim()) is not None:
                self._evict(victim)
            elif (leaving := next((held for held in self._going_down if held.leaving), None)) is not None:
                self._land(leaving)
            elif (victim := self._first_idle(range(len(self._records)))) is not None:  # One that stays.
                self._evict(victim)
            else:
                self._refuse(length_bytes)

    def _idle(self, numbers: Iterable[int]) -> Iterator[HeldOnDevice]:
        """Yield those of the records that are on the device, and that nothing uses."""
        for held in map(self._records.__getitem__, numbers):
            if held.on_device and not held.leaving and not held.in_use:
                yield held

    def _first_idle(self, numbers: Iterable[int]) -> HeldOnDevice | None:
        """The first of them."""
        return next(self._idle(numbers), None)

    def _victim(self) -> HeldOnDevice | None:
        """The idle record that is needed last; of records that nobody may change, rather one that was used before it.

        In a round the one that is needed last is the one used last, and its values go when the device has used them: a
        host that waits for that has nothing queued meanwhile, and the next record comes up while nothing is computed.
        """
        victim: HeldOnDevice | None = None
        for held in itertools.islice(self._idle(self._order.last_needed()), _FEW):
            victim = held
            if not held.fixed or not held.used or self.uses.checked(held).done():
                break
        return victim

    def _spare(self) -> bool:
        """Let a record go that is worth less than what is missing, without a wait. False if there is none."""
        worth = self._order.worth()
        for number in self._order.last_needed():
            if self._order.distance(number) <= worth:
                return False
            held = self._records[number]
            if not held.on_device or held.leaving or held.in_use or held.changed_on_device:
                continue
            if held.used and not self.uses.checked(held).done():
                return False
            self._evict(held)
            return not held.leaving
        return False

    def check_room_for(self, records: Iterable[Held]) -> None:
        """Refuse records that do not fit the device together.

        Raises:
            PoolExhausted: with the sum.
        """
        needed_bytes = sum(device_bytes_of(held.plan) for held in records)
        if needed_bytes > self.limit_bytes:
            raise PoolExhausted(
                f"the records of the parameters to be gathered are {format_bytes(needed_bytes)} together on "
                f"{self.device}, where parameters have {format_bytes(self.limit_bytes)}; gather fewer at a time, "
                f"or set offload_param.device_bytes to at least {needed_bytes + self._beside_bytes}"
            )

    def _refuse(self, length_bytes: int) -> NoReturn:
        refuse_room(
            [(held, device_bytes_of(held.plan)) for held in self._records],
            length_bytes,
            self.used_bytes,
            sum(bool(held.values) for held in self._records),
            self.limit_bytes,
            "offload_param.device_bytes",
            lambda room_bytes: room_bytes + self._beside_bytes,
            self.device,
        )

    def _evict(self, held: HeldOnDevice) -> None:
        """Let a record go that nothing uses: at once if it is unchanged, else when it has come down."""
        if held.fixed:
            self.uses.check_unchanged(held)
        # Without `summed` a step on the CPU is changing the pool's copy, which is the newest.
        elif held.summed and self.uses.have_changed(held):
            self._send_down(held)
        if held.down is not None:
            held.leaving = True
        else:
            self._free(held)

    def _free(self, held: HeldOnDevice) -> None:
        """Free the values on the device. The copy down is over, if there was one. See [Note: whose memory]."""
        if not held.has_views():
            self.uses.release(held)
        with interrupts_deferred():
            held.forget()
            held.up, held.leaving = None, False
            self.uses.forget(held)
            self.used_bytes -= device_bytes_of(held.plan)
            self._order.drop(held.number)
            if all(cache.records.get(held.key) is None for cache in self.caches):
                self._pool_order.drop(held.number)

    # --- Down ------------------------------------------------------------------------------------------------------

    def _send_down(self, held: HeldOnDevice) -> None:
        """Start copying the values to the pool, whose copy is then the newest; or past it to where they are written.

        Raises:
            SwapIOError: the drive failed, or the device.
            PoolExhausted: the pool has no buffer.
        """
        if held.down is not None:
            self._land(held)
        held.changed_on_device = True  # Until it is on its way: the buffer has nothing of it yet.
        # A buffer there is as long as the file; one of others has other room for the record.
        direct = None if held.plan.spans or self._cache.records.get(held.key) is not None else self.direct
        lease = self._fetch(held, anew=True) if direct is None else direct.room_for(held)
        self.uses.follow_all(held)
        self.uses.sum_again(held)
        self._down.begin()
        pairs = held.pairs(held.on_device, None if direct is None else lease)

        def work() -> None:
            for there, here in pairs:
                here.copy_(there, non_blocking=self._down.non_blocking)

        with interrupts_deferred(), modes_kept():
            set_grad_mode(False)
            held.down = lease.transfer = self._down.run(work)
            held.changed, held.changed_on_device = direct is None, False
            if direct is not None:
                direct.write(held, lease)
                direct.release(held)
            elif not held.kept:
                self._cache.write(held.key, functools.partial(held.complete, lease))
            self.uses.end_sent(held)
            self._going_down[held] = None
        self._move(None)

    def _land(self, held: HeldOnDevice) -> None:
        """Wait until the values have come down, and are being written. Frees the device's if they were leaving."""
        if held.down is not None:
            held.down.wait()
        if held.kept:
            held.changed = False
        for cache in self.caches:
            cache.start_write(held.key)  # Nothing happens if the cache was faster.
        with interrupts_deferred():
            held.down = None
            self._going_down.pop(held, None)
        if held.leaving:
            self._free(held)

    @memory_advice(_ADVICE)
    def bring_down(self, held: Held) -> None:
        """Have the newest values of `held` in the pool or in its file. Waits for the device, not for the drive.

        Raises:
            SwapIOError: a write could not be started, or the device failed.
        """
        assert isinstance(held, HeldOnDevice)
        self._move(None)
        if held.on_host and not held.summed:  # A step is changing the pool's copy, which is the newest.
            return
        if held.fixed:
            self.uses.check_unchanged(held)
            return
        if held.on_device and (held.in_use or self.uses.have_changed(held)):
            self._send_down(held)
        if held in self._going_down:
            self._land(held)
        if self.direct is not None:
            self.direct.write_newer(held)

    # --- Uses of the pool's buffer ---------------------------------------------------------------------------------

    def use_on_host(self, records: Sequence[Held], use: object, phase: str) -> None:
        """Have the values of `records` in the pool, in `opened`, to be changed there until `release_on_host`.

        What the device has of them goes, or is replaced when the use is over.

        Raises:
            SwapIOError, PoolExhausted: as for `bring`.
        """
        for held in records:  # All of them before the first is brought, which could evict another.
            assert isinstance(held, HeldOnDevice)
            held.on_host.add(use)
        for held in records:
            assert isinstance(held, HeldOnDevice)
            self._bring_to_host(held, phase, changing=True)

    def _bring_to_host(self, held: HeldOnDevice, phase: str, *, changing: bool) -> None:
        self._pool_order.note(Use(phase, held.number))
        self.poll()
        self.bring_down(held)
        if changing and held.on_device and not held.in_use:
            self._free(held)
        self._fetch(held)
        self._cache.wait(held.key)
        if changing:  # A copy up that goes on is to values that were freed.
            held.changed, held.summed, held.stepped = True, False, True
        self._move(None)

    @memory_advice(_ADVICE)
    def release_on_host(self, held: Held, use: object) -> None:
        """End a use of the pool's buffer. What was changed is written, and goes up to values that are in use.

        Raises:
            SwapIOError: the write could not be started; it will be, before the values go.
        """
        assert isinstance(held, HeldOnDevice)
        held.on_host.discard(use)
        if held.on_host or not held.changed or not held.opened:
            return
        if held.on_device and not held.summed:
            record = self._cache.records.get(held.key)
            assert record is not None
            self._up.begin()
            held.up = self._copy_up(held, held.on_device, record.lease)
            self.uses.follow(held)
        if not held.late:
            held.write(self._cache)

    @contextlib.contextmanager
    def reading(self, held: Held) -> Iterator[None]:
        """Within it the values of `held` are in the pool, in `opened`, to be read."""
        assert isinstance(held, HeldOnDevice)
        use = object()
        held.on_host.add(use)
        try:
            self._bring_to_host(held, "evaluation", changing=False)
            yield
        finally:
            self.release_on_host(held, use)
