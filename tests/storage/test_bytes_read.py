"""The bytes that the cache reads of records that are used in an order which repeats itself: few, and always as many."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.metrics import Metrics
from swapper.storage.access_order import AccessOrder, Use
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.cache_policies import CyclicPolicy
from swapper.storage.store import RecordKey, TensorStore

UNIT = 4 << 10
ROUNDS = 8
LEARNT = 2
"""Rounds after which the order is known, and what is held at the end of one is what was held at the end of the last."""


@dataclass
class Part:
    """A record of a model, as `CyclicPolicy` sees it. Its values never change."""

    key: RecordKey
    length_bytes: int
    pinned: bool = False
    resident: bool = False
    late: int = 0

    def viewed(self) -> bool:
        return False

    def write_newer(self, cache: RecordCache) -> None:
        """There is nothing newer."""

    def write_failed(self) -> None:
        raise AssertionError(self.key)

    def evicted(self) -> None:
        assert not self.pinned


def uses_of_a_round(records: int) -> list[Use]:
    """A step of training: of an embedding backward needs no values."""
    numbers = range(records)
    phases = ("forward", numbers), ("backward", numbers[:0:-1]), ("step", numbers)
    return [Use(phase, number) for phase, those in phases for number in those]


def read_on_demand(lengths_bytes: list[int], limit_bytes: int) -> int:
    """Bytes that a round reads, when it is known, if each record is read when it is used, and the last needed goes."""
    uses = uses_of_a_round(len(lengths_bytes)) * ROUNDS
    held: set[int] = set()
    read_bytes = 0

    def due(number: int, now: int) -> int:
        return next((at for at in range(now + 1, len(uses)) if uses[at].number == number), len(uses))

    for now, use in enumerate(uses):
        if now == len(uses) // ROUNDS * LEARNT:
            read_bytes = 0
        if now == len(uses) // ROUNDS * (ROUNDS - 2):  # Nothing is known of what comes after the end.
            return read_bytes // (ROUNDS - 2 - LEARNT)
        if use.number not in held:
            while sum(lengths_bytes[each] for each in held) + lengths_bytes[use.number] > limit_bytes:
                held.remove(max(held, key=lambda each: due(each, now)))
            held.add(use.number)
            read_bytes += lengths_bytes[use.number]
    raise AssertionError


class Program:
    """A model that is trained, in a pool that is so long that a buffer is found wherever the others lie."""

    def __init__(self, path: Path, handle: AsyncIOHandle, lengths_bytes: list[int], limit_bytes: int) -> None:
        self.parts = [Part(RecordKey(0, "param", i), length) for i, length in enumerate(lengths_bytes)]
        self.pool = BufferPool(6 * limit_bytes, handle)
        self.store = TensorStore([path], "run", 0, [handle])
        self.store.plan({part.key: part.length_bytes for part in self.parts})
        for part in self.parts:
            with self.pool.acquire(part.length_bytes) as lease:
                lease.tensor.fill_(part.key.number)
                self.store.write(part.key, lease, part.length_bytes).wait()
        self.order = AccessOrder()
        self.metrics = Metrics()
        self.cache = RecordCache(self.pool, self.store, self.metrics, CyclicPolicy(self.order, self.parts))
        self.cache.limit_bytes = limit_bytes

    def use(self, use: Use, *, late: bool) -> None:
        part = self.parts[use.number]
        self.order.note(use)
        part.pinned = True
        self.cache.require(part.key, part.length_bytes)
        while (missing := self.order.missing()) is not None:
            wanted = self.parts[missing]
            if not self.cache.stage(wanted.key, wanted.length_bytes):
                break
            if not late:
                self.cache.fetch(wanted.key)
        assert int(self.cache.fetch(part.key).tensor[part.length_bytes - 1]) == use.number
        part.pinned = False

    def round_bytes(self, *, late: bool) -> int:
        before = self.metrics.bytes_read
        for use in uses_of_a_round(len(self.parts)):
            self.use(use, late=late)
        return self.metrics.bytes_read - before

    def close(self) -> None:
        self.cache.close()
        self.store.close()
        self.pool.close()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_every_round_reads_as_few_bytes_as_the_last(nvme_path: Path, late: bool) -> None:
    ratios = []
    for seed in range(6):
        rng = random.Random(seed)
        longest = rng.randint(8, 20) * UNIT
        lengths = [longest, *(rng.randint(2, 4) * UNIT for _ in range(rng.randint(8, 24))), longest]
        limit_bytes = max(2 * longest + 4 * UNIT, sum(lengths) * rng.randint(60, 85) // 100)
        plan = FaultPlan(seed=seed, delay_us=500 if late else 0)
        with AsyncIOHandle(backend="threads", faults=plan) as handle:
            program = Program(nvme_path, handle, lengths, limit_bytes)
            try:
                rounds = [program.round_bytes(late=late) for _ in range(ROUNDS)][LEARNT:]
            finally:
                program.close()
        assert len(set(rounds)) == 1, f"seed {seed}: it depends on chance: {rounds}"
        ratios.append(rounds[0] / read_on_demand(lengths, limit_bytes))
    # What is read ahead takes the place of what would be needed again, but of little.
    assert statistics.mean(ratios) < 1.1, ratios


def test_what_stays_for_good_is_not_waited_for() -> None:
    order = AccessOrder()
    for _ in range(3):
        for number in range(6):
            order.note(Use("forward", number))
    order.note(Use("forward", 0))
    order.hold(0, fixed=True)
    for number in (1, 2):
        order.hold(number)
    assert order.missing() == 3
    assert order.worth() == order.distance(3)


def test_what_is_used_now_is_waited_for() -> None:
    order = AccessOrder()
    for _ in range(3):
        for number in range(6):
            order.note(Use("forward", number))
    order.note(Use("forward", 0))
    for number in range(3):
        order.hold(number)
    assert order.missing() == 3
    assert order.worth() == order.distance(0), "of all that is held it is needed last"
