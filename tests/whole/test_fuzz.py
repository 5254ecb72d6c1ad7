"""Random transfers, files, memory, options and faults, against a plain reference in memory.

A success is exact to the byte and touches nothing else, in the file or in memory. A failure is a `SwapIOError` that the
faults asked for explain, comes after the last touch of the memory, and leaves old or new bytes.

Runs for SWAPPER_FUZZ_SECONDS (10; `make test-all` gives it 60). Every run has another seed, printed when it fails:
SWAPPER_FUZZ_SEED=n begins with the cases of that seed. Threads and drives keep their own time, so a failure that
depends on it may need more than one run to come again.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, Checksums, FaultPlan, File, Slab, Transfer, probe

T = TypeVar("T")

SECONDS = float(os.environ.get("SWAPPER_FUZZ_SECONDS") or 10)
SEED = int(os.environ.get("SWAPPER_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
CASES_PER_SEED = 50
BACKENDS = [found.backend for found in probe() if found.available]

PAGE = 4096
ARENA_BYTES = 1 << 20
GUARD_BYTES = 64
MARKED_ERRNO = errno.EDQUOT
"""Of the n-th request that is to fail: nothing else fails with it."""

WAIT_S = 300
"""More than a drive takes that others keep busy: a journal that discards what they removed stops for a minute."""

# Shrinking takes minutes at most; no case may hang for longer than its waits.
pytestmark = pytest.mark.timeout(SECONDS + 540 + WAIT_S)


# --- Cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Of the handle, the file and the memory."""

    backend: str
    block_bytes: int
    queue_depth: int
    threads: int
    single_submit: bool
    overlap_events: bool
    direct: bool
    memory: str
    size_bytes: int
    closes_in_flight: bool


@dataclass(frozen=True)
class Step:
    """One thing that the user does. "give" is a write from a tensor that is then let go.

    `offset_bytes` is the new length of "truncate" and "preallocate".
    """

    action: str
    offset_bytes: int
    length_bytes: int
    misalignment: int


def edges(pages_max: int) -> st.SearchStrategy[int]:
    """Byte counts: pages, and what is just beside them."""
    pages = st.builds(
        lambda pages, beside: max(0, pages * PAGE + beside),
        st.integers(0, pages_max),
        st.sampled_from((0, 0, 1, -1, 13, 511, 512, -512)),
    )
    return pages | st.integers(0, pages_max * PAGE)


def several(steps: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """1 to 30, any number as likely as the others; plain lists are short."""
    return st.integers(1, 30).flatmap(lambda count: st.lists(steps, min_size=count, max_size=count))


TRANSFERS = ("read", "write", "give")
RATES = st.sampled_from((0.0, 0.0, 0.02, 0.3))
FAULTS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 32),
        "short": RATES,
        "eio": RATES,
        "enospc": RATES,
        "eintr": RATES,
        "eagain": st.sampled_from((0.0, 0.0, 0.02)),
        "delay_us": st.sampled_from((0, 0, 50, 500)),
        "reorder": st.booleans(),
        "fail_read_at": st.integers(0, 12),
        "fail_write_at": st.integers(0, 12),
    }
)
OPTIONS = st.builds(
    Options,
    backend=st.sampled_from(BACKENDS),
    block_bytes=st.sampled_from((1, 2, 4, 16)).map(lambda pages: pages * PAGE),
    queue_depth=st.sampled_from((1, 2, 3, 8, 32)),
    threads=st.integers(1, 3),
    single_submit=st.booleans(),
    overlap_events=st.booleans(),
    direct=st.booleans(),
    memory=st.sampled_from(("registered", "slab", "tensor", "exact")),
    size_bytes=edges(32),
    closes_in_flight=st.booleans(),
)
STEP = st.builds(
    Step,
    action=st.sampled_from(
        ("read",) * 6 + ("write",) * 5 + ("give",) + ("poll", "settle", "truncate", "preallocate", "reopen", "register")
    ),
    offset_bytes=edges(40),
    length_bytes=edges(24),
    misalignment=st.sampled_from((0, 0, 0, 1, 3, 64, 512, 904, 4095)),
)


# --- The reference ----------------------------------------------------------------------------------------------------


NOISE = random.Random(0).randbytes(2 * ARENA_BYTES)


def noise_bytes(noise: random.Random, length_bytes: int) -> bytes:
    """Bytes to know a place by: hardly ever the same at two places."""
    start = noise.randrange(ARENA_BYTES)
    return NOISE[start : start + length_bytes]


def view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())


@dataclass
class Pending:
    """A transfer in flight. `data` is what is written, or what a read has to bring; None where it has to fail."""

    step: Step
    transfer: Transfer
    memory: torch.Tensor | None  # None once it was let go
    place: int
    data: bytes | None
    extends: bool
    failure_seen: bool = False

    @property
    def writes(self) -> bool:
        return self.step.action != "read"

    @property
    def end_bytes(self) -> int:
        return self.step.offset_bytes + self.step.length_bytes


class Arena:
    """Memory for transfers and all that is around them; and what it should hold."""

    def __init__(self, kind: str, slab: Slab, noise: random.Random) -> None:
        self._exact = kind == "exact"
        self._noise = noise
        self._all: list[torch.Tensor] = []
        self._expected: list[bytearray] = []
        self._next = 0
        if not self._exact:
            self._add(
                torch.frombuffer(slab, dtype=torch.uint8)
                if kind in ("registered", "slab")
                else torch.empty(ARENA_BYTES, dtype=torch.uint8)
            )

    def _add(self, tensor: torch.Tensor) -> None:
        self._all.append(tensor)
        self._expected.append(bytearray(noise_bytes(self._noise, tensor.numel())))
        view(tensor)[:] = self._expected[-1]

    def place(self, length_bytes: int, misalignment: int) -> tuple[torch.Tensor, int] | None:
        """Memory that nobody else has, and a number to call it by. None if there is no room until `reset`."""
        if self._exact:  # Ends where its allocation ends: a sanitizer sees the first byte too far.
            self._add(torch.empty(misalignment + length_bytes, dtype=torch.uint8))
            return self._all[-1][misalignment:], len(self._all) - 1
        start = self._next + -(self._all[0].data_ptr() + self._next) % PAGE + misalignment
        if start + length_bytes > ARENA_BYTES:
            return None
        self._next = start + length_bytes + GUARD_BYTES
        return self._all[0][start : start + length_bytes], start

    def put(self, memory: torch.Tensor, place: int, data: bytes) -> None:
        """Write `data`, and expect it to stay."""
        view(memory)[:] = data
        self.expect(memory, place, data)

    def expect(self, memory: torch.Tensor, place: int, data: bytes) -> None:
        expected = self._expected[place] if self._exact else self._expected[0]
        start = len(expected) - memory.numel() if self._exact else place
        expected[start : start + memory.numel()] = data

    def check(self) -> None:
        for tensor, expected in zip(self._all, self._expected, strict=True):
            assert bytes(view(tensor)) == expected, "memory of no transfer, or of a write, was changed"

    def reset(self) -> None:
        """No memory is in use any more."""
        self._next = 0
        if self._exact:
            self._all.clear()
            self._expected.clear()


class World:
    """A handle and a file under test, beside a reference that does the same."""

    def __init__(self, path: Path, slab: Slab, options: Options, faults: dict[str, float], seed: int) -> None:
        self.path, self.slab, self.options = path, slab, options
        self.noise = random.Random(seed)
        self.content = noise_bytes(self.noise, options.size_bytes)
        path.write_bytes(self.content)
        self.faults = faults
        self.plan = FaultPlan(fail_errno=MARKED_ERRNO, **faults) if faults else None  # type: ignore[arg-type]
        self.marked_seen = {"read": 0, "write": 0}
        self.reads_past_end = False
        self.pending: list[Pending] = []
        self.handle = AsyncIOHandle(
            backend=options.backend,
            block_bytes=options.block_bytes,
            queue_depth=options.queue_depth,
            threads=options.threads,
            single_submit=options.single_submit,
            overlap_events=options.overlap_events,
            faults=self.plan,
        )
        self.registered = False
        if options.memory == "registered":
            self.register()
        self.file = self.open()
        self.descriptor = os.open(path, os.O_RDONLY)
        self.arena = Arena(options.memory, slab, self.noise)

    def open(self) -> File:
        return self.handle.open(self.path, "rw", direct=self.options.direct)

    def register(self) -> None:
        if self.registered:
            self.handle.unregister(self.slab)
            self.registered = False
        else:
            self.registered = self.handle.register(self.slab)

    def run(self, steps: list[Step]) -> None:
        for step in steps:
            if step.action in TRANSFERS:
                self.start(step)
            elif step.action == "poll":
                self.poll(step.offset_bytes)
            elif step.action == "reopen":
                self.file.close()
                self.file = self.open()
            elif step.action == "register":
                self.register()
            else:
                self.settle()
                if step.action == "truncate":
                    self.file.truncate(step.offset_bytes)
                    self.content = self.content[: step.offset_bytes].ljust(step.offset_bytes, b"\0")
                elif step.action == "preallocate" and self.file.preallocate(step.offset_bytes):
                    self.content = self.content.ljust(step.offset_bytes, b"\0")
        if self.options.closes_in_flight:
            self.close()
            self.settle()
        else:
            self.settle()
            self.close()

    def poll(self, n: int) -> None:
        if not self.pending:
            return
        pending = self.pending[n % len(self.pending)]
        try:
            pending.transfer.wait(0)
        except TimeoutError:
            pass
        except SwapIOError:
            pending.failure_seen = True

    def close(self) -> None:
        raised = False
        try:
            self.handle.close()
        except SwapIOError:
            raised = True
        assert all(pending.transfer.done() for pending in self.pending), "closed with transfers in flight"
        unseen = [p for p in self.pending if p.transfer._moving.failed() and not p.failure_seen]
        assert raised == bool(unseen), "close() raises what nobody has seen, and nothing else"

    def give(self, step: Step, data: bytes) -> Transfer:
        """Write from memory that others may have at once, if nothing holds it."""
        length_bytes = step.misalignment + step.length_bytes
        tensor = torch.empty(length_bytes, dtype=torch.uint8)
        view(tensor[step.misalignment :])[:] = data
        transfer = self.handle.write(self.file, tensor[step.misalignment :], step.offset_bytes)
        del tensor
        torch.zeros(length_bytes, dtype=torch.uint8)
        return transfer

    def start(self, step: Step) -> None:
        writes, end = step.action != "read", step.offset_bytes + step.length_bytes
        extends = step.length_bytes > 0 and end > len(self.content)
        data: bytes | None
        if any(
            (writes or other.writes)
            and ((step.offset_bytes < other.end_bytes and other.step.offset_bytes < end) or (extends and other.extends))
            for other in self.pending
        ):
            self.settle()  # The order of the two is not promised, so neither is what comes of them.
            extends = step.length_bytes > 0 and end > len(self.content)
        if step.action == "give":
            data = noise_bytes(self.noise, step.length_bytes)
            self.pending.append(Pending(step, self.give(step, data), None, 0, data, extends))
            return
        placed = self.arena.place(step.length_bytes, step.misalignment)
        if placed is None:
            self.settle()
            placed = self.arena.place(step.length_bytes, step.misalignment)
            assert placed is not None
        memory, place = placed
        self.arena.put(memory, place, noise_bytes(self.noise, step.length_bytes))
        if writes:
            data = bytes(view(memory))
            transfer = self.handle.write(self.file, memory, step.offset_bytes)
        else:
            data = None if extends else self.content[step.offset_bytes : end]
            self.reads_past_end = self.reads_past_end or extends
            transfer = self.handle.read(self.file, memory, step.offset_bytes)
        self.pending.append(Pending(step, transfer, memory, place, data, extends))

    def settle(self) -> None:
        """Wait for all transfers and compare everything."""
        unknown: list[Pending] = []  # writes that failed
        content = bytearray(self.content)
        for pending in self.pending:
            try:
                assert pending.transfer.wait(WAIT_S) == pending.step.length_bytes
            except SwapIOError as error:
                self.explain(error, pending)
                # What failed is over too: this stays.
                if pending.memory is not None:
                    self.arena.put(pending.memory, pending.place, noise_bytes(self.noise, pending.step.length_bytes))
                if pending.writes:
                    unknown.append(pending)
                continue
            assert pending.data is not None, f"{pending.step} is beyond the end at {len(self.content)}"
            if not pending.writes:
                assert pending.memory is not None
                assert bytes(view(pending.memory)) == pending.data, f"wrong bytes were read: {pending.step}"
                self.arena.expect(pending.memory, pending.place, pending.data)
            elif pending.data:
                content.extend(bytes(max(0, pending.end_bytes - len(content))))
                content[pending.step.offset_bytes : pending.end_bytes] = pending.data
        self.arena.check()

        actual = os.pread(self.descriptor, os.fstat(self.descriptor).st_size + 1, 0)
        size_max = max([len(content), *(pending.end_bytes for pending in unknown)])
        assert len(content) <= len(actual) <= size_max, "the file has another length"
        content.extend(bytes(len(actual) - len(content)))
        for pending in unknown:
            assert pending.data is not None
            for at in range(pending.step.offset_bytes, min(pending.end_bytes, len(actual))):
                if content[at] != actual[at]:
                    new = pending.data[at - pending.step.offset_bytes]
                    assert new == actual[at], f"byte {at} of {pending.step} is neither old nor new"
                    content[at] = new
        assert actual == content, "the file has other bytes"
        self.content = actual
        self.pending.clear()
        self.arena.reset()
        self.check_marked()

    def check_marked(self) -> None:
        """The request that was to fail, once it came, has failed one transfer."""
        if self.plan is None:
            return
        for operation, left in (("read", self.plan.fail_read_at), ("write", self.plan.fail_write_at)):
            fired = self.faults[f"fail_{operation}_at"] > 0 and left == 0
            assert self.marked_seen[operation] <= fired
            # Of a transfer that fails in several places only the first failure is told.
            if not self.faults["eio"] and not self.faults["enospc"] and not self.reads_past_end:
                assert self.marked_seen[operation] == fired, f"a {operation} request failed, and no transfer did"

    def explain(self, error: SwapIOError, pending: Pending) -> None:
        """`error` has to be one that was asked for."""
        step = pending.step
        operation = "write" if pending.writes else "read"
        assert (error.operation, error.path) == (operation, str(self.path))
        assert (error.offset_bytes, error.length_bytes) == (step.offset_bytes, step.length_bytes)
        asked_for = step.length_bytes > 0 and (
            (error.errno == errno.EIO and self.faults.get("eio", 0) > 0)
            or (error.errno == errno.ENOSPC and self.faults.get("enospc", 0) > 0 and pending.writes)
            or (error.errno == errno.ENODATA and pending.data is None)
            or (error.errno == MARKED_ERRNO and self.plan is not None)
        )
        assert asked_for, f"nothing explains {error!r} of {step}"
        self.marked_seen[operation] += error.errno == MARKED_ERRNO

    def release(self) -> None:
        """After a success or in the middle of a failure."""
        with contextlib.suppress(SwapIOError):
            self.handle.close()
        self.file.close()
        os.close(self.descriptor)


# --- The tests --------------------------------------------------------------------------------------------------------


def fuzz(case: Callable[[], None], seconds: float) -> int:
    """Run `case`, a hypothesis test, with one seed after the other. Returns how many seeds it took."""
    end = time.monotonic() + seconds
    for turn in itertools.count():
        if turn > 0 and time.monotonic() > end:
            return turn
        try:
            hypothesis.seed(SEED + turn)(case)()
        except BaseException:
            print(f"To run it again: SWAPPER_FUZZ_SEED={SEED + turn}")
            raise
    raise AssertionError


plain = hypothesis.settings(
    max_examples=CASES_PER_SEED,
    deadline=None,
    derandomize=False,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
)


@pytest.mark.long
def test_random_transfers_are_exact_or_fail_as_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slab = Slab(ARENA_BYTES)
    cases = transfers = 0

    @plain
    @hypothesis.given(OPTIONS, st.just({}) | FAULTS, several(STEP), st.integers(0, 1 << 32))
    def case(options: Options, faults: dict[str, float], steps: list[Step], seed: int) -> None:
        nonlocal cases, transfers
        world = World(tmp_path / "file", slab, options, faults, seed)
        try:
            world.run(steps)
        finally:
            world.release()
        cases += 1
        transfers += sum(step.action in TRANSFERS for step in steps)

    seeds = fuzz(case, SECONDS * 0.8)
    with capsys.disabled():
        print(f"\n{cases} cases of {transfers} transfers, SWAPPER_FUZZ_SEED={SEED} to {SEED + seeds - 1}")
    assert transfers > 0


@dataclass(frozen=True)
class BlockStep:
    """`action` is "write", "read" or "flip"; places and lengths are blocks of the checksums, `tail_bytes` less."""

    action: str
    block: int
    blocks: int
    tail_bytes: int
    misalignment: int


BLOCKS = 12
BLOCK_STEP = st.builds(
    BlockStep,
    action=st.sampled_from(("write",) * 3 + ("read",) * 4 + ("flip",)),
    block=st.integers(0, BLOCKS - 1),
    blocks=st.integers(1, BLOCKS),
    tail_bytes=st.sampled_from((0,) * 6 + (1, 13, 4095)),
    misalignment=st.sampled_from((0, 0, 1, 64)),
)


@pytest.mark.long
def test_random_damage_is_found_by_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A read with checksums gives what was written, or names the first block that is not what was written."""
    slab = Slab(ARENA_BYTES)
    cases = reads = damaged = 0

    @plain
    @hypothesis.given(OPTIONS, st.just({}) | FAULTS, st.sampled_from((1, 2)), several(BLOCK_STEP))
    def case(options: Options, faults: dict[str, float], pages: int, steps: list[BlockStep]) -> None:
        nonlocal cases, reads, damaged
        cases += 1
        block_bytes = pages * PAGE
        noise = random.Random(options.size_bytes)
        arena = Arena(options.memory, slab, noise)
        checksums = Checksums(BLOCKS * block_bytes, block_bytes)
        good: dict[int, bytes] = {}  # the blocks as they were written last
        path = tmp_path / "file"
        path.write_bytes(b"")
        harmless = {**faults, **dict.fromkeys(("eio", "enospc", "fail_read_at", "fail_write_at"), 0)} if faults else {}
        with (
            AsyncIOHandle(
                backend=options.backend,
                block_bytes=max(options.block_bytes, block_bytes),
                queue_depth=options.queue_depth,
                threads=options.threads,
                single_submit=options.single_submit,
                overlap_events=options.overlap_events,
                faults=FaultPlan(**harmless) if harmless else None,  # type: ignore[arg-type]
            ) as handle,
            handle.open(path, "rw", direct=options.direct) as file,
        ):
            if options.memory == "registered":
                handle.register(slab)
            for step in (BlockStep("write", 0, BLOCKS, 0, 0), *steps):
                start = step.block * block_bytes
                length = min(step.blocks, BLOCKS - step.block) * block_bytes - step.tail_bytes
                covered = range(step.block, step.block + -(-length // block_bytes))
                if step.action == "flip":
                    at = start + noise.randrange(block_bytes)
                    with path.open("r+b") as damaging:
                        damaging.seek(at)
                        byte = damaging.read(1)[0]
                        damaging.seek(at)
                        damaging.write(bytes((byte ^ 1 << noise.randrange(8),)))
                    continue
                placed = arena.place(length, step.misalignment)
                assert placed is not None
                memory, place = placed
                arena.put(memory, place, noise_bytes(noise, length))
                if step.action == "write":
                    handle.write(file, memory, start, checksums=checksums).wait(WAIT_S)
                    data = bytes(view(memory))
                    for block in covered:
                        good[block] = data[(block - step.block) * block_bytes :][:block_bytes]
                    arena.check()
                else:
                    stored = path.read_bytes()
                    wanted = {block: min(block_bytes, start + length - block * block_bytes) for block in covered}
                    bad = [
                        block
                        for block in covered
                        if len(good.get(block, b"")) != wanted[block]
                        or stored[block * block_bytes :][: wanted[block]] != good[block]
                    ]
                    reads += 1
                    damaged += bool(bad)
                    try:
                        handle.read(file, memory, start, checksums=checksums).wait(WAIT_S)
                    except SwapIOError as error:
                        assert error.errno == errno.EBADMSG and bad, f"nothing explains {error!r}"
                        assert error.offset_bytes // block_bytes in bad and error.offset_bytes % block_bytes == 0
                        assert error.length_bytes == wanted[error.offset_bytes // block_bytes]
                        arena.put(memory, place, noise_bytes(noise, length))
                    else:
                        assert not bad, "damage was not found"
                        assert bytes(view(memory)) == stored[start : start + length]
                        arena.expect(memory, place, bytes(view(memory)))
                    arena.check()
                arena.reset()

    seeds = fuzz(case, SECONDS * 0.2)
    with capsys.disabled():
        print(f"\n{cases} cases of {reads} reads, {damaged} damaged, SWAPPER_FUZZ_SEED={SEED} to {SEED + seeds - 1}")
    assert damaged > 0
