"""The conformance suite over a backend that fails on purpose, and what must be true when it fails for good."""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path

import pytest
import torch
from conformance import BLOCK, SUBJECTS, Conformance, Subject, fails, in_slab, random_bytes, wait_all
from still_drive import still

from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan, Transfer

pytestmark = pytest.mark.timeout(240)

HARMLESS: dict[str, float] = {
    "short": 0.3,
    "eintr": 0.1,
    "eagain": 0.1,
    "einval": 0.05,
    "full": 0.1,
    "delay_us": 100,
    "reorder": True,
}
FAULTS: dict[str, dict[str, float]] = {
    "short": {"short": 0.5},
    "eintr": {"eintr": 0.3},
    "eagain": {"eagain": 0.2},
    "einval": {"einval": 0.3},
    "full": {"full": 0.3},
    "delay": {"delay_us": 1000},
    "reorder": {"reorder": True},
    "eio": {"eio": 0.08},
    "enospc": {"enospc": 0.15},
    "harmless": HARMLESS,
    "all": {**HARMLESS, "eio": 0.03, "enospc": 0.03},
}
HARMFUL = ("eio", "enospc", "all")


def plan_of(faults: dict[str, float], seed: int) -> FaultPlan:
    return FaultPlan(seed=seed, **faults)  # type: ignore[arg-type]


@pytest.fixture(params=SUBJECTS, ids=str)
def subject(request: pytest.FixtureRequest) -> Subject:
    subject: Subject = request.param
    return subject


# The policy of giving up takes seconds, and no backend has a part in it.
once = pytest.mark.parametrize("subject", SUBJECTS[:1], ids=str, indirect=True)


@pytest.mark.sampled(4)
class TestConformanceUnderFaults(Conformance):
    """Each test with a seed of its own."""

    @pytest.fixture(params=["short", "harmless"])
    def faults(self, request: pytest.FixtureRequest) -> FaultPlan:
        return plan_of(FAULTS[request.param], seed=sum(map(ord, request.node.name)))


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", FAULTS)
def test_every_failure_is_reported_and_every_success_is_true(
    subject: Subject, tmp_path: Path, mix: str, seed: int
) -> None:
    """Random transfers, several at a time, against a plain copy in memory.

    What a failed write left is not known, but it is the old bytes or the new ones: the caller's memory is overwritten
    as soon as the failure is known, and what it holds then may not arrive.
    """
    rng = random.Random(seed)
    length = 8 * BLOCK
    old = torch.zeros(length, dtype=torch.uint8)
    new = old.clone()  # Differs from `old` where a write failed.
    (tmp_path / "file").write_bytes(old.numpy().tobytes())
    outcomes = {0: 0, errno.EIO: 0, errno.ENOSPC: 0}

    def outcome(transfer: Transfer) -> int:
        try:
            assert transfer.wait() == transfer.length_bytes
        except SwapIOError as error:
            assert error.errno is not None
            fails(transfer, error.errno)
            outcomes[error.errno] += 1
            return error.errno
        outcomes[0] += 1
        return 0

    with (
        subject.handle(block_bytes=16384, threads=1 + seed % 2, faults=plan_of(FAULTS[mix], seed)) as handle,
        subject.open(handle, tmp_path / "file") as file,
    ):
        for turn in range(24):
            cuts = sorted(rng.sample(range(length + 1), 6))
            writing = turn % 2 == 0
            batch: list[tuple[Transfer, torch.Tensor, slice]] = []
            for start, stop in zip(cuts[::2], cuts[1::2], strict=True):
                memory = random_bytes(stop - start, turn * 100 + start)
                at = slice(start, stop)
                if writing:
                    new[at] = memory
                    batch.append((handle.write(file, subject.place(memory), start), memory, at))
                else:
                    batch.append((handle.read(file, subject.place(memory), start), memory, at))
            for transfer, memory, at in batch:
                if not outcome(transfer):
                    if writing:
                        old[at] = new[at]
                    else:
                        content = subject.content(memory)
                        assert bool(((content == old[at]) | (content == new[at])).all())
                else:
                    memory.fill_(0x5C)
            if not writing:
                time.sleep(0.001)
                for transfer, memory, _ in batch:
                    assert transfer.done()
                    if outcome(transfer):
                        assert bool((memory == 0x5C).all()), "a transfer that had failed went on"
            else:
                content = torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)
                assert bool(((content == old) | (content == new)).all())
                # From here on it is known what the file holds.
                old, new = content.clone(), content.clone()
        assert handle.in_flight == 0
        assert handle.unobserved_failures == 0
    assert outcomes[0] > 0
    assert (outcomes[errno.EIO] + outcomes[errno.ENOSPC] > 0) == (mix in HARMFUL)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP], ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["read", "write"])
def test_failure_of_any_one_request_fails_its_transfer_once(
    subject: Subject, tmp_path: Path, operation: str, number: int
) -> None:
    plan = FaultPlan(fail_errno=number)
    data = random_bytes(4 * BLOCK + 100)
    (tmp_path / "file").write_bytes(bytes(4096) + data.numpy().tobytes())
    with (
        subject.handle(faults=plan) as handle,
        subject.open(handle, tmp_path / "file") as file,
    ):
        for n in range(1, 20):
            before = plan.reads + plan.writes
            memory = subject.place(data.clone())
            start = handle.read if operation == "read" else handle.write
            plan.fail_read_at, plan.fail_write_at = (n, 0) if operation == "read" else (0, n)
            transfer = start(file, memory, 4096)
            while not transfer.done():
                time.sleep(0)
            if plan.reads + plan.writes - before < n:
                transfer.wait()
                break
            fails(transfer, number)
            plan.fail_read_at = plan.fail_write_at = 0
            assert start(file, memory, 4096).wait() == data.numel()
            assert torch.equal(subject.content(memory), data)
        assert n > 5
    assert (tmp_path / "file").read_bytes()[4096:] == data.numpy().tobytes()


def test_failure_tells_which_part_of_a_large_transfer_it_was(subject: Subject, tmp_path: Path) -> None:
    with (
        subject.handle(faults=FaultPlan(fail_write_at=3), queue_depth=1) as handle,
        subject.open(handle, tmp_path / "file") as file,
    ):
        transfer = handle.write(file, subject.place(random_bytes(8 * BLOCK)), BLOCK)
        fails(transfer, errno.EIO)
        with pytest.raises(SwapIOError, match=rf"the part of {BLOCK} bytes at byte {3 * BLOCK}"):
            transfer.wait()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EBUSY, errno.ENOMEM], ids=errno.errorcode.get)
def test_want_in_the_kernel_is_waited_out(subject: Subject, tmp_path: Path, number: int) -> None:
    plan = FaultPlan(fail_write_at=1, fail_errno=number)
    with subject.handle(faults=plan) as handle, subject.open(handle, tmp_path / "file") as file:
        assert handle.write(file, subject.place(random_bytes(100))).wait() == 100
    assert plan.writes == 2


@pytest.mark.long
@once
@pytest.mark.parametrize("fault", ["eintr", "eagain"])
def test_endless_retries_are_given_up_and_the_handle_stays_good(subject: Subject, tmp_path: Path, fault: str) -> None:
    """Soon, however many there are: they wait side by side."""
    with (
        subject.handle(faults=FaultPlan(**{fault: 1.0}), queue_depth=32) as handle,
        subject.open(handle, tmp_path / "file", "w") as file,
    ):
        transfers = [handle.write(file, in_slab(0, 4096, 0), i * 4096) for i in range(32)]
        for transfer in transfers:
            fails(transfer, getattr(errno, fault.upper()))
        with pytest.raises(SwapIOError, match="given up after 200 tries"):
            transfers[0].wait()
        assert handle.write(file, torch.zeros(0)).wait() == 0


@pytest.mark.long
@once
def test_kernel_without_room_is_given_up_with_the_reason(subject: Subject, tmp_path: Path) -> None:
    with (
        subject.handle(faults=FaultPlan(full=1.0)) as handle,
        subject.open(handle, tmp_path / "file", "w") as file,
    ):
        transfer = handle.write(file, subject.place(random_bytes(3 * BLOCK)))
        fails(transfer, errno.EAGAIN)
        with pytest.raises(SwapIOError, match="submit"):
            handle.write(file, subject.place(random_bytes(10)))


@pytest.mark.long
@once
def test_kernel_without_room_now_and_then_never_adds_up_to_a_failure(subject: Subject, tmp_path: Path) -> None:
    """250 times in all is more than is borne in a row."""
    with (
        subject.handle(faults=FaultPlan(full=0.5, seed=1), queue_depth=1) as handle,
        subject.open(handle, tmp_path / "file", "w") as file,
    ):
        for _ in range(5):
            wait_all([handle.write(file, subject.place(random_bytes(1)), i) for i in range(50)])


# --- File systems that refuse direct transfers ----------------------------------------------------------------------


def direct_handle(plan: FaultPlan, backend: str) -> AsyncIOHandle:
    return AsyncIOHandle(backend=backend, block_bytes=BLOCK, queue_depth=4, faults=plan)


DIRECT = [subject.backend for subject in SUBJECTS if subject.direct]


@pytest.mark.parametrize("misalignment", [0, 1])
@pytest.mark.parametrize("backend", DIRECT)
def test_refused_direct_transfers_go_through_the_page_cache(tmp_path: Path, backend: str, misalignment: int) -> None:
    plan = FaultPlan(einval=1.0)
    data = random_bytes(4 * BLOCK + 13)
    source = torch.empty(data.numel() + 4096 + 64, dtype=torch.uint8)
    start = -source.data_ptr() % 4096 + misalignment
    source = source[start : start + data.numel()].copy_(data)
    with direct_handle(plan, backend) as handle, handle.open(tmp_path / "file", "rw") as file:
        if not file.direct:
            pytest.skip(f"no O_DIRECT here: {file.direct_reason}")
        assert handle.write(file, source).wait() == data.numel()
        assert not file.direct and "a direct transfer was refused" in file.direct_reason
        requests = plan.writes
        assert handle.write(file, source).wait() == data.numel()
        assert plan.writes - requests == 5, "it was tried again with a descriptor that does not work"
        assert handle.read(file, source.zero_()).wait() == data.numel()
        assert torch.equal(source, data)
    assert not file.direct and "direct=False" in repr(file)
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


@pytest.mark.parametrize("backend", DIRECT)
def test_request_that_is_refused_either_way_fails_and_the_file_stays_direct(tmp_path: Path, backend: str) -> None:
    (tmp_path / "file").write_bytes(bytes(BLOCK))
    with direct_handle(FaultPlan(), backend) as handle, handle.open(tmp_path / "file") as file:
        if not file.direct:
            pytest.skip(f"no O_DIRECT here: {file.direct_reason}")
        # Offsets beyond what any file can have.
        transfer = handle.read(file, torch.zeros(4096, dtype=torch.uint8), (1 << 63) - 8192)
        with pytest.raises(SwapIOError) as raised:
            transfer.wait()
        assert raised.value.errno in (errno.EINVAL, errno.ENODATA, errno.EOVERFLOW)
        assert file.direct and not file.direct_reason


# --- Failures that nobody waits for ---------------------------------------------------------------------------------


def test_failed_transfer_has_nothing_in_flight(subject: Subject, tmp_path: Path) -> None:
    """The first part fails at once, the others come late: the failure may only be seen after them."""
    plan = FaultPlan(fail_read_at=1, delay_us=20_000)
    source = random_bytes(8 * BLOCK)
    (tmp_path / "file").write_bytes(source.numpy().tobytes())
    with (
        subject.handle(queue_depth=8, faults=plan) as handle,
        subject.open(handle, tmp_path / "file", "r") as file,
    ):
        target = subject.place(torch.zeros_like(source))
        fails(handle.read(file, target), errno.EIO)
        target.zero_()
        time.sleep(0.05)
        assert not target.any()


def test_failure_that_nobody_saw_is_raised_by_close(subject: Subject, tmp_path: Path) -> None:
    handle = subject.handle(faults=FaultPlan(eio=1.0))
    with subject.open(handle, tmp_path / "file") as file:
        for _ in range(3):
            handle.write(file, subject.place(random_bytes(100)))
    while handle.in_flight:
        time.sleep(0.001)
    assert handle.unobserved_failures == 3
    with pytest.raises(SwapIOError, match="2 more transfers failed") as raised:
        handle.close()
    assert raised.value.errno == errno.EIO
    handle.close()


def test_failure_during_another_error_does_not_hide_it(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(KeyError), subject.handle(faults=FaultPlan(eio=1.0)) as handle:
        handle.write(subject.open(handle, tmp_path / "file", "w"), subject.place(random_bytes(100)))
        raise KeyError


def test_a_drive_that_stands_still_ends_nothing_until_it_goes_on(subject: Subject, tmp_path: Path) -> None:
    """Also what fails is not told: what other tests have in flight does not depend on how late they are."""
    plan = FaultPlan(fail_write_at=1)
    with subject.handle(faults=plan) as handle, subject.open(handle, tmp_path / "file") as file:
        with still(plan):
            failing = handle.write(file, subject.place(random_bytes(100)))
            while not plan.writes:
                time.sleep(0)
            other = handle.write(file, subject.place(random_bytes(100)), BLOCK)
            time.sleep(0.02)
            assert not failing.done() and not other.done()
        fails(failing, errno.EIO)
        assert other.wait() == 100
        plan.bytes_per_second = 1 << 30
        assert handle.write(file, subject.place(random_bytes(100))).wait() == 100, "what was held takes no time now"


@once
def test_the_end_of_a_transfer_does_not_wait_for_a_full_queue_of_later_ones(subject: Subject, tmp_path: Path) -> None:
    """Beside the last parts of one at most half a queue of others is in flight; the others go on when it is over."""
    plan = FaultPlan()
    with AsyncIOHandle(backend=subject.backend, block_bytes=BLOCK, queue_depth=8, faults=plan) as handle:
        contents = random_bytes(64 * BLOCK)
        (tmp_path / "file").write_bytes(contents.numpy().tobytes())
        with handle.open(tmp_path / "file") as file:

            def read_beside(first_blocks: int) -> bool:
                """Read so many blocks, and others after them; True if the others were held back until then."""
                target = torch.zeros_like(contents)
                plan.bytes_per_second, before = 500 * BLOCK, plan.reads
                first = handle.read(file, target[: first_blocks * BLOCK])
                others = [
                    handle.read(file, target[at * BLOCK : (at + 5) * BLOCK], at * BLOCK)
                    for at in range(first_blocks, 64 - 5, 5)
                ]
                held_back = True
                while True:
                    seen = plan.reads - before
                    if first.done():
                        break
                    held_back &= seen <= first_blocks + 4 or first.done()  # It may be over since it was asked.
                plan.bytes_per_second = 0
                wait_all([first, *others])
                end = (first_blocks + 5 * len(others)) * BLOCK
                assert torch.equal(target[:end], contents[:end])
                return held_back

            for first_blocks in (1, 7, 8, 9, 13):
                # Where the drive is busy, and done with later parts first, others take their places: then again.
                assert any(read_beside(first_blocks) for _ in range(10))
