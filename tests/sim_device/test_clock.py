"""The clock of the simulated device, in the mode "timed". Times are those of the model: nothing here is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerators import simulated

BYTES = 1 << 20
CALLS_S = 100e-6
"""More than the calls of any test take: 1 us each."""


@pytest.fixture(autouse=True)
def sim() -> Iterator[Any]:
    """The module `sim_device`: a copy of `BYTES` takes 10 ms up and 20 ms down, a kernel on as many 1 ms."""
    module = simulated()
    torch.accelerator.synchronize()
    module.violations()
    module.keep_time(
        module.Speeds(
            call_us=1,
            kernel_us=0,
            memory_bps=BYTES * 1000,
            operations_per_s=1e9,
            up_bps=BYTES * 100,
            down_bps=BYTES * 50,
        )
    )
    yield module
    module.configure("eager")
    assert module.violations() == []


@pytest.fixture
def took(sim: Any) -> Callable[[], Any]:
    """Waits for the device, and gives the times since the test began."""
    start = sim.times()

    def since() -> Any:
        torch.accelerator.synchronize()
        return sim.times().since(start)

    return since


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=CALLS_S)


def up(stream: torch.Stream, length: int = BYTES) -> None:
    with stream:
        torch.empty(length, dtype=torch.uint8, device="sim").copy_(pinned(length), non_blocking=True)


def down(stream: torch.Stream) -> None:
    with stream:
        pinned(BYTES).copy_(torch.empty(BYTES, dtype=torch.uint8, device="sim"), non_blocking=True)


def pinned(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, pin_memory=True)


def streams(count: int = 2) -> list[torch.Stream]:
    return [torch.Stream("sim") for _ in range(count)]


def test_the_host_does_not_wait_for_what_it_starts(sim: Any, took: Callable[[], Any]) -> None:
    (stream,) = streams(1)
    before = sim.times()
    up(stream)
    assert sim.times().since(before).now_s == near(0)
    assert took().now_s == near(0.010)
    assert sim.times().waited_s == near(0.010)


def test_copies_in_one_direction_share_it(took: Callable[[], Any]) -> None:
    for stream in streams():
        up(stream)
    times = took()
    assert (times.now_s, times.up_s, times.down_s) == (near(0.020), near(0.020), 0)


def test_copies_in_both_directions_overlap_with_each_other_and_with_kernels(took: Callable[[], Any]) -> None:
    one, other, third = streams(3)
    up(one)
    down(other)
    with third:
        torch.empty(15 * BYTES, dtype=torch.uint8, device="sim").fill_(1)
    times = took()
    assert (times.now_s, times.up_s, times.down_s, times.kernels_s) == (
        near(0.020),
        near(0.010),
        near(0.020),
        near(0.015),
    )


def test_work_of_one_stream_is_done_in_its_order(took: Callable[[], Any]) -> None:
    (stream,) = streams(1)
    up(stream)
    down(stream)
    assert took().now_s == near(0.030)


def test_kernels_of_all_streams_share_the_device(took: Callable[[], Any]) -> None:
    for stream in streams():
        with stream:
            torch.empty(5 * BYTES, dtype=torch.uint8, device="sim").fill_(1)
    assert took().now_s == near(0.010)


def test_a_stream_waits_for_an_event_and_the_host_does_not(sim: Any, took: Callable[[], Any]) -> None:
    one, other = streams()
    up(one)
    event = torch.Event("sim")
    event.record(one)
    before = sim.times()
    other.wait_event(event)
    down(other)
    assert sim.times().since(before).now_s == near(0)
    assert took().now_s == near(0.030)


def test_what_could_begin_first_does(took: Callable[[], Any]) -> None:
    """A copy that waits for another stream does not hold up one that was started after it."""
    one, other, third = streams(3)
    down(one)
    event = torch.Event("sim")
    event.record(one)
    other.wait_event(event)
    up(other)
    up(third)
    assert took().now_s == near(0.030)  # The last would end at 40 ms if it came behind.


def test_an_event_is_reached_at_its_time(sim: Any, took: Callable[[], Any]) -> None:
    one, other = streams()
    up(one)
    event, last = torch.Event("sim"), torch.Event("sim")
    event.record(one)
    down(other)
    last.record(other)
    assert not event.query()
    event.synchronize()
    assert sim.times().waited_s == near(0.010)
    assert event.query() and not last.query()
    polls = 0
    while not last.query():  # Asking takes time, too.
        polls += 1
    assert polls > 1000
    assert took().now_s == near(0.020)


def test_products_of_matrices_take_their_operations(took: Callable[[], Any]) -> None:
    rows, inner, columns = 20, 100, 50
    one, other = torch.ones(rows, inner, device="sim"), torch.ones(inner, columns, device="sim")
    before = took().now_s
    product = one @ other
    assert took().now_s - before == near(2 * rows * inner * columns / 1e9)
    assert product.sum().item() == rows * inner * columns
    before = took().now_s
    torch.addmm(product, one, other)
    assert took().now_s - before == near(2 * rows * inner * columns / 1e9)


def test_a_clock_is_the_same_each_time(sim: Any) -> None:
    def run() -> Any:
        start = sim.times()
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to("sim")
        for _ in range(3):
            model(torch.randn(4, 64).to("sim")).sum().backward()
        for stream in streams():
            up(stream)
        torch.accelerator.synchronize()
        return sim.times().since(start).now_s

    run()  # Memory comes from elsewhere the first time.
    assert run() == pytest.approx(run(), abs=1e-9)


def test_speeds_must_be_positive(sim: Any) -> None:
    with pytest.raises(ValueError, match="positive"):
        sim.keep_time(sim.Speeds(up_bps=0))


# --- The drive ------------------------------------------------------------------------------------------------------


@pytest.fixture
def drive(sim: Any, nvme_path: Any) -> Iterator[Any]:
    """An engine, and a file of it that is open. A transfer of `BYTES` takes 40 ms."""
    from sim_drive import SimulatedDrive  # It imports the simulated device, which may not be there.

    SimulatedDrive.bps = BYTES * 25
    with SimulatedDrive() as handle, handle.open(nvme_path / "file", "rw") as file:
        yield handle, file


def test_transfers_of_a_drive_come_one_after_another(drive: Any, took: Callable[[], Any]) -> None:
    handle, file = drive
    written, read = torch.ones(BYTES, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
    first, second = handle.write(file, written), handle.read(file, read)
    up(*streams(1))
    assert not first.done() and not second.done()
    assert second.wait() == BYTES and first.done()
    times = took()
    assert (times.now_s, times.drive_s, times.up_s) == (near(0.080), near(0.080), near(0.010))
    assert bool((read == 1).all())


def test_the_device_does_not_wait_for_the_drive(drive: Any, took: Callable[[], Any]) -> None:
    handle, file = drive
    transfer = handle.write(file, torch.ones(BYTES, dtype=torch.uint8))
    assert took().now_s == near(0)
    assert not transfer.done()
    transfer.wait()
    assert took().now_s == near(0.040)
