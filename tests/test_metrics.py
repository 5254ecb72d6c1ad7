"""The timeline: what is on it, and that its times are those of the events and not of those who looked."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from still_drive import still
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import close, offloaded, swapper_of

from swapper.errors import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan, File, Transfer
from swapper.metrics import Metrics, Timeline, TimelineEvent
from swapper.storage.transfers import JoinedTransfer

RECORD = (0, "param", 3)


def watch(transfer: Transfer) -> float:
    """Wait by looking; when it was first seen to be over."""
    while not transfer.done():
        time.sleep(0.001)
    return time.perf_counter()


@pytest.fixture
def file(nvme_path: Path) -> File:
    with AsyncIOHandle() as handle:
        return handle.open(nvme_path / "file", "rw", create=True)


def test_a_transfer_ends_when_it_is_over_and_not_when_it_is_waited_for(file: File) -> None:
    with AsyncIOHandle() as handle:
        before_s = time.perf_counter()
        transfer = handle.write(file, torch.zeros(1 << 20, dtype=torch.uint8))
        seen_s = watch(transfer)
        time.sleep(0.02)
        transfer.wait()
        begun_s, ended_s = transfer.times_s()
        assert before_s <= begun_s <= ended_s <= seen_s
        assert transfer.times_s() == (begun_s, ended_s)


def test_a_transfer_in_flight_has_no_times(file: File) -> None:
    plan = FaultPlan()
    with AsyncIOHandle(faults=plan) as handle:
        with still(plan):
            transfer = handle.write(file, torch.zeros(4096, dtype=torch.uint8))
            with pytest.raises(SwapError, match="in flight"):
                transfer.times_s()
        transfer.wait()
        transfer.times_s()


@pytest.mark.parametrize("length", [0, 4096])
def test_an_empty_and_a_failed_transfer_have_times(file: File, length: int) -> None:
    with AsyncIOHandle(faults=FaultPlan(fail_write_at=1)) as handle:
        before_s = time.perf_counter()
        transfer = handle.write(file, torch.zeros(length, dtype=torch.uint8))
        seen_s = watch(transfer)
        begun_s, ended_s = transfer.times_s()
        assert before_s <= begun_s <= ended_s <= seen_s
        if length:
            with pytest.raises(SwapIOError):
                transfer.wait()


def test_joined_transfers_last_from_the_first_to_the_last(file: File) -> None:
    with AsyncIOHandle() as handle:
        parts = []
        for i in range(3):
            parts.append(handle.write(file, torch.zeros(4096, dtype=torch.uint8), i * 4096))
            watch(parts[-1])
        first, *_, last = parts
        assert JoinedTransfer(parts).times_s() == (first.times_s()[0], last.times_s()[1])


def test_only_what_happens_while_it_is_entered_is_on_a_timeline(file: File) -> None:
    metrics = Metrics()

    def work(handle: AsyncIOHandle) -> None:
        with metrics.span("swapper.wait_read", "wait_read_s"):
            transfer = handle.write(file, torch.zeros(8192, dtype=torch.uint8))
            metrics.count_write(RECORD, 8192, transfer)
            transfer.wait()
        metrics.begin_use(RECORD)
        metrics.end_use(RECORD)

    with AsyncIOHandle() as handle:
        work(handle)
        with Timeline() as timeline:
            with timeline.span("forward"):
                work(handle)
            metrics.end_use((0, "param", 4))  # was in use before
        work(handle)
    names = ["forward", "swapper.wait_read", "write", "use"]
    assert [event.name for event in timeline.events()] == names
    forward, wait, write, use = timeline.events()
    assert (write.record, write.length_bytes, use.record) == (RECORD, 8192, RECORD)
    assert forward.start_s <= wait.start_s <= write.start_s <= write.stop_s <= wait.stop_s <= use.start_s
    assert use.stop_s <= forward.stop_s
    assert metrics.writes == 3, "counted whether there is a timeline or not"


def test_what_is_in_use_when_a_timeline_is_left_was_used_until_then() -> None:
    metrics = Metrics()
    with Timeline() as timeline:
        metrics.begin_use(RECORD)
        assert timeline.events() == []
    assert [(event.name, event.record) for event in timeline.events()] == [("use", RECORD)]
    metrics.end_use(RECORD)
    assert len(timeline.events()) == 1


def test_a_second_timeline_is_refused_and_the_first_goes_on() -> None:
    with Timeline() as timeline:
        with pytest.raises(SwapError, match="already"), Timeline():
            pass
        with Metrics().span("swapper.wait_read"):
            pass
    assert [event.name for event in timeline.events()] == ["swapper.wait_read"]


class Patient(nn.Module):
    """Computes, and is not over before `settle` says so."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.settle = settle

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        self.settle()
        return y


def test_the_next_record_is_read_while_the_current_one_is_used(nvme_path: Path) -> None:
    """In both directions. A use ends when nothing is in flight: what is read in time has then begun, by the drive.

    On a loaded machine a buffer may be given back too late for one read. So there are rounds until one has none.
    """
    timeline = Timeline()

    def settle() -> None:
        while sum(event.name in ("read", "write") for event in timeline.events()) < metrics.reads + metrics.writes:
            time.sleep(0.0005)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*(Patient(settle) for _ in range(10)))
        return model, torch.optim.SGD(model.parameters())

    model, optimizer = offloaded(nvme_path, make, spare_bytes=2 * (64 * 64 * 4 + 4096), optimizer_device="none")
    swapper = swapper_of(model)
    swapper.flush()
    metrics = swapper.metrics = Metrics()
    with timeline:
        for number in range(200):
            start_s = time.perf_counter()
            x = torch.randn(4, 64)
            for layer in model.children():
                x = checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()
            late = read_late([event for event in timeline.events() if event.start_s >= start_s])
            if number > 0 and not late:  # The order is learnt in the first.
                break
    close(model, optimizer)
    assert not late, "in no round every record was read ahead"


def read_late(events: list[TimelineEvent]) -> list[tuple[int, str, int] | None]:
    """The records of a round that were not being read when the use before theirs was over."""
    uses = [event for event in events if event.name == "use"]
    reads = [event for event in events if event.name == "read"]
    order = [event.record[2] for event in uses if event.record is not None]
    assert order == [*range(10), *reversed(range(10))]
    assert len(reads) >= 10, "the pool holds 4 records of 10"
    late = []
    for current, following in itertools.pairwise(uses):
        read = last_read_before(following, reads)
        if read is not None and current.record != following.record and read.start_s >= current.stop_s:
            late.append(following.record)
    return late


def last_read_before(use: TimelineEvent, reads: list[TimelineEvent]) -> TimelineEvent | None:
    """The read that brought what `use` needed; None if it was there when the timeline began."""
    mine = [read for read in reads if read.record == use.record and read.start_s <= use.start_s]
    return mine[-1] if mine else None
