"""Records of buckets: brought into memory, read and written as state, and put back to the drive."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from swapper.errors import SwapIOError
from swapper.io.bf16_codec import RoundingKey
from swapper.io.checksums import checksum
from swapper.metrics import Metrics
from swapper.optimizer.master_codec import join_master, split_master, ties_bytes_max
from swapper.optimizer.segments import MASTER, Bucket, Memory, Segment
from swapper.optimizer.state_codec import EncodedState, decode_state, encode_state
from swapper.sizes import SMALL_BYTES
from swapper.storage.buffers import Lease
from swapper.storage.cache import RecordCache
from swapper.tensors.strides import is_dense

if TYPE_CHECKING:
    from swapper.optimizer.direct_state import DirectState
    from swapper.optimizer.step_protocols import SwappedGradients

__all__ = ["BucketRecords", "Encoded", "Masters", "OpenBucket", "Prefetcher", "Work"]

log = logging.getLogger(__name__)

Masters = dict[Segment, tuple[torch.Tensor, torch.Tensor]]
"""Of each segment its new master (fp32, 1-D), and the tensor that gets the rounded bits (1-D)."""

Encoded = dict[Segment, tuple[int, int, int, torch.Tensor]]
"""Of each segment whose split master is encoded already: its count of ties, the checksum of its bits, the address of
its ties, and the bits."""

Work = tuple[Bucket, list[Segment]]
"""A bucket, and those of its segments that have a gradient."""

_AHEAD = 64
"""Buckets that are looked at for what to read next."""


_NUMBERS = (int, float, complex, str, bytes, type(None), torch.Tensor)


def _tensor_bytes_in(value: Any, depth: int = 4) -> int:
    """Bytes of the tensors in an object, which are never swapped."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if not depth or isinstance(value, (type, torch.nn.Module)):
        return 0
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    attributes = getattr(value, "__dict__", {}).values()
    return sum(_tensor_bytes_in(each, depth - 1) for each in (*inside, *attributes))


class OpenBucket:
    """A bucket whose record is in memory. The state of its segments is read and written here.

    Attributes:
        lease: the record's buffer; None if nothing of the bucket moves.
        memory: where the record is while the class steps on it: the lease, or a copy of it on an accelerator.
        device: of `memory`.
        step: number of the step that what is encoded is of. See [Note: encoded state] in `encodings`.
    """

    def __init__(
        self, bucket: Bucket, lease: Lease | None, note_unplanned: Callable[[str], None], step: int = 0
    ) -> None:
        self.bucket = bucket
        self.lease = lease
        self.memory: Memory | None = lease
        self.device = torch.device("cpu")
        self.step = step
        self._note_unplanned = note_unplanned
        self._ties_at = self._find_ties()
        self._decoded: dict[Segment, dict[str, torch.Tensor]] = {}

    def state_of(self, segment: Segment) -> dict[str, Any]:
        """The state as the class knows it; tensors that move are views of the record.

        Those that are encoded are as `decode` has left them, or without it as they are stored.
        """
        present = segment.present
        return {key: self.stored(segment, key) if key in present else segment.small[key] for key in segment.keys}

    def stored(self, segment: Segment, key: str) -> torch.Tensor:
        """The view of the record that holds one tensor of the state; of an encoded one what `decode` has made of it."""
        if segment.encoded and key in (decoded := self._decoded.get(segment, {})):
            return decoded[key]
        assert self.memory is not None
        return segment.locations[key].view(self.memory)

    def store(self, segment: Segment, key: str, value: torch.Tensor) -> torch.Tensor:
        """Copy one tensor of the state, which is not encoded, to the record, and return the view of it there.

        It lies there in the order of memory that it has, in which the class sees it again: sums over it depend on that.
        """
        assert self.memory is not None
        location = segment.locations[key]
        if segment.whole and value.stride() != location.spec.stride and is_dense(value):
            spec = dataclasses.replace(location.spec, stride=tuple(value.stride()))
            location = segment.locations[key] = dataclasses.replace(location, spec=spec)
            segment.placement = None
        return location.view(self.memory).copy_(value)

    def decode(self, segments: Iterable[Segment], take: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Decode what is encoded of the state of `segments`, to be stepped and encoded again.

        Args:
            take: gives memory for so many elements, which stays until the bucket is put.
        """
        for segment in segments:
            for key in segment.encoded:
                if key in segment.present:
                    spec = segment.locations[key].spec
                    values = take(spec.numel, torch.float32)
                    self.decode_state(segment, key, values)
                    self._decoded.setdefault(segment, {})[key] = values.as_strided(spec.shape, spec.stride)

    def decode_state(self, segment: Segment, key: str, values: torch.Tensor) -> None:
        """Write the first elements of one tensor of the state, which is encoded, to `values`.

        Args:
            values: float32, 1-D, in the order of memory.
        """
        assert self.memory is not None
        decode_state(segment.locations[key], self.memory, values)

    def encoded_state(self, segment: Segment, key: str) -> EncodedState | None:
        """Return the encoded form of one tensor of the state in the record; None of one that is not encoded."""
        if key not in segment.encoded:
            return None
        first, rounding = self._rounding(segment, key)
        return EncodedState.at(segment.locations[key], self.address(), first, rounding)

    def _encode_state(self, segment: Segment, key: str, value: torch.Tensor) -> None:
        assert self.memory is not None
        encode_state(value, segment.locations[key], self.memory, *self._rounding(segment, key))

    def _rounding(self, segment: Segment, key: str) -> tuple[int, RoundingKey]:
        """The index of its first element, and what else its random bits depend on."""
        of = segment.of
        return of.first_index + segment.start, RoundingKey(key, self.step, of.number)

    def keep(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """Keep `state` as that of `segment`: what moves in the record, the rest in memory."""
        segment.keys = list(state)
        segment.present.clear()
        segment.small.clear()
        # Of two that the class has exchanged each is where the other is copied to.
        apart = {key: value.clone() for key, value in state.items() if self._is_elsewhere(segment, key, value)}
        state = {**state, **apart}
        for key, value in state.items():
            location = segment.locations.get(key)
            if isinstance(value, torch.Tensor) and location is not None and location.fits(value, self.device):
                if location.spec.is_rounded:
                    self._encode_state(segment, key, value)
                    segment.present.add(key)
                    continue
                assert self.memory is not None
                # The class steps most state in place: then it is in the record already.
                address = self.memory.address + location.offset_bytes
                if value.data_ptr() != address or value.stride() != location.spec.stride:
                    self.store(segment, key, value)
                segment.present.add(key)
                continue
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                if value.nbytes >= SMALL_BYTES:
                    self._note_unplanned(key)
                if self.memory is not None and self.memory.pool_has(value):
                    value = value.clone()  # The buffer goes to another record.
            elif not isinstance(value, _NUMBERS) and _tensor_bytes_in(value) >= SMALL_BYTES:
                self._note_unplanned(key)
            segment.small[key] = value

    def _is_elsewhere(self, segment: Segment, key: str, value: Any) -> bool:
        """True if `value` is in the record, at a place that is not that of `key`."""
        if self.memory is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        location = segment.locations.get(key)
        if location is None or not location.fits(value, self.device):
            return self.memory.pool_has(value)
        is_there = value.data_ptr() == self.memory.address + location.offset_bytes
        in_place = is_there and value.stride() == location.spec.stride
        return not location.spec.is_rounded and not in_place and self.memory.pool_has(value)

    def forget(self, segments: Sequence[Segment]) -> None:
        """Have `segments` as they were before the first step. The state of the bucket's others stays."""
        ties = self._copy_ties(segments)
        for segment in segments:
            segment.forget()
        self._encode({}, ties)

    # --- Masters ---------------------------------------------------------------------------------------------------

    def decode_master(self, segment: Segment, bits: torch.Tensor, out: torch.Tensor) -> bool:
        """Write the master of `segment` to `out` (fp32, 1-D). `bits` are the parameter's.

        Returns:
            False if there is none, or the parameter is not the one it was encoded with: `out` is `float(bits)` then.
        """
        assert not isinstance(segment.checksum, torch.Tensor), "see `checksums_to_host`"
        if segment.checksum is None or segment.checksum != checksum(bits):
            out.copy_(bits)
            return False
        if segment.is_split:
            ties = self.ties_of(segment)
            join_master(bits, self.stored(segment, MASTER), ties, segment.tie_bits, out)
            return True
        kept = self.whole_master(segment)
        if kept.data_ptr() != out.data_ptr():
            out.copy_(kept)
        return True

    def address(self) -> int:
        """Of the first byte of the record in the host's memory. 0 if nothing of the bucket moves.

        Raises:
            SwapError: the memory is not ours any more, or this is a forked child, where it does not exist.
        """
        return 0 if self.lease is None else self.lease.tensor.data_ptr()

    def ties_offset_bytes(self, segment: Segment) -> int:
        """Offset in the record of the ties of the split master of `segment`; 0 if it has none."""
        return self._ties_at.get(segment, 0)

    def whole_master(self, segment: Segment) -> torch.Tensor:
        """The tensor that keeps the master of `segment` where it is not split: in the record, or in memory."""
        if segment.master_moves:
            return self.stored(segment, MASTER)
        if segment.kept_master is None:
            segment.kept_master = torch.empty(segment.numel, dtype=torch.float32, device=self.device)
        return segment.kept_master

    def ties_of(self, segment: Segment) -> torch.Tensor:
        """The ties of the split master of `segment`: uint8, 1-D."""
        return self._tail(self._ties_at.get(segment, 0), segment.tie_bytes)

    def encode(self, masters: Masters) -> None:
        """Store masters, and round them to the parameters' dtype, to nearest even.

        Those of one record at once: each call walks the ties of all its segments.
        """
        if masters:
            self._encode(masters, self._copy_ties(masters))

    def place_ties(self, encoded: Encoded) -> None:
        """Store the ties of masters whose low halves and bits are written already."""
        if not encoded:
            return
        ties = self._copy_ties(encoded)
        address, cursor = self.address(), self.bucket.layout.tail_offset_bytes
        self._ties_at = {}
        for segment in self.bucket.segments:
            if segment in encoded:
                segment.tie_bits, segment.checksum, source, _ = encoded[segment]
            else:
                source = ties[segment].data_ptr() if segment in ties else 0
            length_bytes = segment.tie_bytes
            if length_bytes and source:
                assert cursor + length_bytes <= self.bucket.length_bytes
                ctypes.memmove(address + cursor, source, length_bytes)
                self._ties_at[segment] = cursor
            cursor += length_bytes
        torch.autograd.graph.increment_version([bits for *_, bits in encoded.values()])

    def _encode(self, masters: Masters, ties: Mapping[Segment, torch.Tensor]) -> None:
        """Write `masters`, and the ties of the other segments, which may move within the tail of the record."""
        if not masters and not self.bucket.is_split:
            return
        cursor = self.bucket.layout.tail_offset_bytes
        for segment in self.bucket.segments:
            if segment in masters:
                master, bits = masters[segment]
                if segment.is_split:
                    room = self._tail(cursor, ties_bytes_max(segment.numel))
                    segment.tie_bits = split_master(master, bits, self.stored(segment, MASTER), room)
                    torch.autograd.graph.increment_version(bits)  # As `copy_` would have done it.
                else:
                    bits.copy_(master)
                    kept = self.whole_master(segment)
                    if kept.data_ptr() != master.data_ptr():
                        kept.copy_(master)
                segment.checksum = checksum(bits)
            elif segment in ties:
                self._tail(cursor, segment.tie_bytes).copy_(ties[segment])
            cursor += segment.tie_bytes
        self._ties_at = self._find_ties()

    def _find_ties(self) -> dict[Segment, int]:
        """Offset in the record of the ties of each segment that has any, in bytes."""
        found: dict[Segment, int] = {}
        cursor = self.bucket.layout.tail_offset_bytes
        for segment in self.bucket.segments if self.bucket.is_split else ():
            if segment.tie_bits:
                found[segment] = cursor
                cursor += segment.tie_bytes
        return found

    def _copy_ties(self, without: Container[Segment]) -> dict[Segment, torch.Tensor]:
        kept = {segment: offset for segment, offset in self._ties_at.items() if segment not in without}
        return {segment: self._tail(offset, segment.tie_bytes).clone() for segment, offset in kept.items()}

    def _tail(self, offset_bytes: int, length_bytes: int) -> torch.Tensor:
        assert self.memory is not None
        return self.memory.view(offset_bytes, length_bytes, torch.uint8)

    def write_header(self) -> int:
        """Write the header of the record as it is now to its buffer. Returns the bytes of all its ties."""
        assert self.lease is not None
        tie_bytes = self.bucket.tie_bytes
        header = self.bucket.layout.header(tie_bytes)
        record = self.lease.tensor
        assert record.nbytes >= len(header)
        if record.is_cpu:  # Many times as fast as a copy of torch's.
            ctypes.memmove(record.data_ptr(), header, len(header))
        else:
            record[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        return tie_bytes


class BucketRecords:
    """The records of one optimizer's buckets, in a cache that holds those that are in memory.

    A bucket of which nothing moves has no record: then there is nothing to stage, to write or to forget.

    Attributes:
        cache: of the pool.
        direct: has records in memory of a device: see [Note: one of two caches] in `direct_state`. None if none are.
        changes: count of what was put or discarded, or could not be read: while it stays the same, so does all state.
        steps: that were made since there was no state. See [Note: encoded state] in `encodings`.
    """

    def __init__(self, cache: RecordCache, metrics: Metrics, direct: DirectState | None = None) -> None:
        self.cache = cache
        self.direct = direct
        self.changes = 0
        self.steps = 0
        self._metrics = metrics
        self._resets: torch.Tensor | None = None
        self._unplanned: set[str] = set()

    @property
    def caches(self) -> list[RecordCache]:
        """The caches that records are in, the pool's first."""
        direct = None if self.direct is None else self.direct.cache
        return [self.cache] if direct is None else [self.cache, direct]

    @property
    def drops(self) -> int:
        """Count of records that were prefetched and dropped."""
        return sum(cache.drops for cache in self.caches)

    def keep(self, buckets: Iterable[Bucket]) -> None:
        """From now on the records of `buckets` stay in the pool once they are there, and no others."""
        keys = frozenset(bucket.key for bucket in buckets)
        self.cache.keep(keys)
        if self.direct is not None:
            self.direct.resident = keys

    def flush(self) -> None:
        """Wait until everything is written. Raises SwapIOError as the caches do, when all was waited for."""
        with ExitStack() as steps:
            for cache in self.caches:
                steps.callback(cache.flush)

    def recover(self) -> None:
        """Give back what was taken and not put, and drop what was prefetched."""
        for cache in self.caches:
            cache.recover()

    def release_live(self) -> None:
        """Give back what was taken and not put."""
        for cache in self.caches:
            cache.release_live()

    def drop_prefetched(self) -> None:
        """Drop what was only prefetched."""
        for cache in self.caches:
            cache.drop_prefetched()

    def stage(self, bucket: Bucket, *, for_step: bool = False) -> bool:
        """Start reading the record: with `for_step` to where a step takes it. False if there is no room for it."""
        if not bucket.length_bytes:
            return True
        if self.direct is not None and for_step and self.direct.takes(bucket):
            return self.direct.stage(bucket)
        # One that is there, and wanted on the host, goes when it is taken.
        return (self.direct is not None and self.direct.has(bucket)) or self.cache.stage(
            bucket.key, bucket.length_bytes
        )

    def take(self, bucket: Bucket, *, for_step: bool = False) -> OpenBucket:
        """Bring the record in and wait for it. Its buffer is the caller's until `put` or `release`.

        With `for_step` what is encoded is of the next step; else of the last that was made.

        Raises:
            SwapIOError: the drive failed.
        """
        return self._open(bucket, *self.take_lease(bucket), for_step)

    def take_at_hand(self, bucket: Bucket) -> OpenBucket | None:
        """As `take`, for a step. None if it would wait for the record, or need a buffer.

        Raises:
            SwapIOError: reading it has failed.
        """
        with self.cache.lock:
            if bucket.length_bytes and not ((record := self.cache.records.get(bucket.key)) and record.is_at_hand):
                return None
            taken = self.take_lease(bucket)
        return self._open(bucket, *taken, True)

    def _open(self, bucket: Bucket, lease: Lease | None, is_filled: bool, for_step: bool) -> OpenBucket:
        if lease is not None and bucket.packing is not None:
            if is_filled:
                self._unpack(bucket, lease)
            else:
                bucket.packing.begin(lease.tensor)
        return OpenBucket(bucket, lease, self.note_unplanned, self.steps + for_step)

    def _unpack(self, bucket: Bucket, lease: Lease) -> None:
        assert bucket.packing is not None
        try:
            bucket.packing.unpack(lease.tensor, bucket.tie_bytes)
        except ValueError as error:
            self.cache.release(bucket.key)
            self.changes += 1
            detail = f"it is not what was packed: {error}"
            raise SwapIOError(errno.EBADMSG, "read", bucket.key.file_name, detail=detail) from error

    def take_lease(self, bucket: Bucket) -> tuple[Lease | None, bool]:
        """As `take`: the buffer, and False if it is new. None if nothing of the bucket moves."""
        self._leave_device(bucket)
        try:
            return self.cache.take(bucket.key, bucket.length_bytes) if bucket.length_bytes else (None, False)
        except Exception:
            self.changes += 1  # What cannot be read is not there: a load is to write it again.
            raise

    def put(self, opened: OpenBucket) -> None:
        """Start writing the record, and give its buffer back. Returns at once."""
        self.changes += 1  # Without a buffer, too: what is small is in no record.
        if opened.lease is None:
            return
        if (packing := opened.bucket.packing) is not None:
            length_bytes = packing.pack(opened.lease.tensor, opened.bucket.tie_bytes)
        else:
            tie_bytes = opened.write_header()
            length_bytes = opened.bucket.layout.used_bytes(tie_bytes)
        self.put_whole(opened, length_bytes)

    def wait_written(self, bucket: Bucket) -> None:
        """If an accelerator still copies the record, or the drive writes it, wait until that is over."""
        if bucket.length_bytes:
            self._leave_device(bucket)
            self.cache.wait(bucket.key)

    def _leave_device(self, bucket: Bucket) -> None:
        if self.direct is not None:
            self.direct.leave(bucket)

    def put_when_copied(self, opened: OpenBucket, finish: Callable[[], int]) -> None:
        """`put` of a record that an accelerator still copies or uses; `finish` completes it and gives its length."""
        self.changes += 1
        if opened.lease is not None:
            direct = self.direct if self.direct is not None and self.direct.has(opened.bucket) else None
            cache = self.cache if direct is None or direct.cache is None else direct.cache
            cache.put(opened.bucket.key, finish)

    def put_whole(self, opened: OpenBucket, length_bytes: int) -> None:
        """`put` of a record that has its header already."""
        self.changes += 1
        self.cache.put(opened.bucket.key, length_bytes)

    def release(self, opened: OpenBucket) -> None:
        """Give the buffer of a record back that was not changed."""
        if opened.lease is not None:
            self.cache.release(opened.bucket.key)

    def discard(self, bucket: Bucket) -> None:
        """Forget what is stored of the record. Its file stays, for what is written next."""
        self.changes += 1
        if bucket.length_bytes:
            for cache in self.caches:
                cache.discard(bucket.key)

    def forget(self, bucket: Bucket) -> None:
        """`discard`, and delete the file."""
        if bucket.length_bytes:
            self.discard(bucket)
            self.cache.forget(bucket.key)

    def count_resets_later(self, resets: torch.Tensor) -> None:
        """`count_reset` so many times, when `wait_for_resets` is called: only an accelerator knows yet.

        Args:
            resets: int64, of shape `()`.
        """
        self._resets = resets if self._resets is None else self._resets + resets

    def wait_for_resets(self) -> None:
        """Have all resets counted. Waits for the accelerator that knows them."""
        resets, self._resets = self._resets, None
        for _ in range(0 if resets is None else int(resets)):
            self.count_reset()

    def count_stepped(self, native: int, by_class: int) -> None:
        """So many segments were stepped by the native core, and by the class."""
        self._metrics.segments_native += native
        self._metrics.segments_by_class += by_class

    def count_reset(self) -> None:
        """The masters of a parameter are made anew because the user has changed it."""
        if self._metrics.masters_reset == 0:
            log.warning(
                "a parameter was changed outside of the optimizer since its last step, so its master weights are made "
                "anew from it (said once; counted in stats().masters_reset)"
            )
        self._metrics.masters_reset += 1

    def note_unplanned(self, key: str) -> None:
        """The class made state `key`, which was not planned."""
        if key not in self._unplanned:
            self._unplanned.add(key)
            log.warning(
                "the optimizer made state %r that a trial step did not show; it stays in memory, beyond pool_bytes", key
            )


class Prefetcher:
    """Stages the buckets of a scan, in order, as far as there is room.

    Goes on where there was no room the last time, so that a bucket is staged once and not at each of the 64 looks that
    come by it. If something that was prefetched has been dropped since, it begins anew at the bucket that is next.

    Args:
        work: of the scan, in order.
        done: buckets that are not needed any more; grows while the scan goes on.
        gradients: of a step: those that are evicted.
        for_step: the records come to where steps take them.
    """

    def __init__(
        self,
        records: BucketRecords,
        work: Sequence[Work],
        done: Container[Bucket] = (),
        gradients: SwappedGradients | None = None,
        *,
        for_step: bool = False,
    ) -> None:
        self._records = records
        self._for_step = for_step
        self._work = work
        self._done = done
        self._gradients = gradients
        self._start = 0
        self._next = 0
        self._drops = self._count_drops()

    def look(self, start: int = 0) -> None:
        """Stage up to `_AHEAD` buckets, from the first on that is not done and not before position `start`."""
        self._start = max(self._start, start)
        while self._start < len(self._work) and self._work[self._start][0] in self._done:
            self._start += 1
        drops = self._count_drops()
        if drops != self._drops:
            self._next, self._drops = self._start, drops
        self._next = max(self._next, self._start)
        stop = min(len(self._work), self._start + _AHEAD)
        while self._next < stop:
            bucket, active = self._work[self._next]
            if bucket not in self._done and not self._stage(bucket, active):
                return
            self._next += 1

    def _stage(self, bucket: Bucket, active: Sequence[Segment]) -> bool:
        # Gradients first: they are short, are asked for before the record, and would else queue behind it.
        if self._gradients is not None:
            for segment in active:
                if not self._gradients.stage(segment.parameter, segment.start):
                    return False
        return self._records.stage(bucket, for_step=self._for_step)

    def _count_drops(self) -> int:
        return self._records.drops + (0 if self._gradients is None else self._gradients.drops)
