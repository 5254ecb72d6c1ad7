"""What a device has computed reaches the drive without another call: state, gradients and parameters.

The other tests of devices have no thread that starts writes: see `accelerators.simulate`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerators import SimCopies, simulate
from device_scenarios import SCENARIOS
from torch import nn
from training import same_bits

import swapper
from swapper.errors import SwapIOError
from swapper.io.handle import AsyncIOHandle
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.storage.buffers import Lease
from swapper.storage.store import RecordKey, TensorStore

pytestmark = pytest.mark.timeout(240)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "swapper-writes"]


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does. The test's timeout ends it."""
    while not condition():
        time.sleep(0.0005)


@contextlib.contextmanager
def simulated_threads(settings: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sim_device = simulate(settings, monkeypatch, threads=True)
    sim_device.violations()
    yield sim_device
    gc.collect()
    until(lambda: not threads())
    assert sim_device.violations() == []


class Watch:
    """The writes that were started, and what they wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[RecordKey, Any]] = []
        self.room: int | None = None  # for so many writes; None: for all
        self.refused = 0
        write = TensorStore.write

        def watched(store: TensorStore, key: RecordKey, *args: Any) -> Any:
            if self.room == 0:
                self.refused += 1
                raise SwapIOError(errno.ENOSPC, "preallocate", detail="the drive is full")
            transfer = write(store, key, *args)
            self.room = None if self.room is None else self.room - 1
            self.started.append((key, transfer))
            return transfer

        monkeypatch.setattr(TensorStore, "write", watched)

    def count(self, kind: str) -> int:
        return sum(key.kind == kind for key, _ in self.started)

    def over(self) -> bool:
        return all(transfer.done() for _, transfer in self.started)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers).to("sim")


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).to("sim")
    (model(x) - x).square().mean().backward()


def offloaded(path: Path, model: nn.Module, kinds: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="16MiB",
        bucket_bytes="128KiB",
        offload_optimizer={"device": "nvme", "step_device": "device"},
        offload_gradient={"device": "nvme" if "grad" in kinds else "none"},
        offload_param={"device": "nvme" if "param" in kinds else "none"},
    )
    swapper.offload(model, optimizer, settings)
    return optimizer


def flush(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    swapper.of(optimizer).flush()
    if "swapper" in vars(model):
        model.swapper.flush()  # type: ignore[operator, union-attr]


def close(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    swapper.of(optimizer).close()
    if "swapper" in vars(model):
        model.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("settings", ["sim-eager", "sim-lazy", "sim-random"])
@pytest.mark.parametrize("kinds", ["optim", "optim grad", "optim grad param"])
def test_the_last_bytes_of_a_step_reach_the_drive(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str, settings: str
) -> None:
    with simulated_threads(settings, monkeypatch):
        model = make_model()
        optimizer = offloaded(nvme_path, model, kinds)
        watch = Watch(monkeypatch)
        expected: dict[str, int] = {}
        for step in range(4):
            counts = {kind: watch.count(kind) for kind in kinds.split()}
            backward(model, step)
            if step > 1 and "grad" in kinds:
                until(lambda: watch.count("grad") == counts["grad"] + expected["grad"])  # noqa: B023
            optimizer.step()
            if step > 1:
                for kind in counts:
                    until(lambda: watch.count(kind) == counts[kind] + expected[kind])  # noqa: B023
                until(watch.over)
                files = {file.name: file.read_bytes() for file in sorted(nvme_path.glob("swapper-*/*.safetensors"))}
                started = len(watch.started)
            flush(model, optimizer)
            if step > 1:
                assert len(watch.started) == started, "something was not written without a call"
                for file in nvme_path.glob("swapper-*/*.safetensors"):
                    assert file.read_bytes() == files[file.name], file.name
            expected = {kind: watch.count(kind) - counts[kind] for kind in counts}
            assert all(expected.values())
            optimizer.zero_grad()
        close(model, optimizer)


def use_the_second(nvme_path: Path, model: nn.Module) -> torch.Tensor:
    """Train a model on the second device with everything on the drive, then write and read memory of it: returned."""
    optimizer = offloaded(nvme_path, model, "optim grad param")
    for step in range(3):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step)).to("sim:1")
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        until(lambda: not threads())
    flush(model, optimizer)
    close(model, optimizer)
    with AsyncIOHandle() as handle, handle.open(nvme_path / "file", "rw") as file:
        memory = torch.full((1 << 20,), 5, dtype=torch.uint8, device="sim:1")
        handle.write(file, memory).wait()
        handle.read(file, memory).wait()
    return memory


def test_threads_wait_for_the_second_device_with_that_current(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin with the first, where to wait for another makes a context that takes memory."""
    waited: set[tuple[str, int]] = set()

    class Watched(torch.Event):
        def synchronize(self) -> None:
            waited.add((threading.current_thread().name, torch.accelerator.current_device_index()))
            super().synchronize()

    with simulated_threads("sim-lazy", monkeypatch):
        monkeypatch.setattr(SimCopies, "_event", lambda self: Watched())
        model = make_model().to("sim:1")
        use_the_second(nvme_path, model)
        assert torch.accelerator.current_device_index() == 0
        assert {name for name, _ in waited} >= {"swapper-writes", "swapper-bounce"}
        assert {device for _, device in waited} == {1}


def test_threads_make_no_context_on_the_first_device(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that trains on another would take half a GB of it. To ask for an event is enough for that."""
    with simulated_threads("sim-random", monkeypatch) as sim_device:
        model = make_model().to("sim:1")
        sim_device.forget_contexts()
        memory = use_the_second(nvme_path, model)
        swapper.save({"memory": memory}, tmp_path / "saved", background=True).wait()
        assert torch.accelerator.current_device_index() == 0
        assert sim_device.contexts() == [1]


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random", "sim-poison"])
def test_bits_are_those_of_the_plain_run(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, edited: bool
) -> None:
    with simulated_threads(settings, monkeypatch):
        models = []
        for kinds in ("", "optim grad param"):
            model = make_model()
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if kinds:
                optimizer = offloaded(nvme_path, model, kinds)
            for step in range(6):
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
                if step == 3 and edited:
                    with torch.no_grad():
                        model[2].weight.mul_(0.5)
            models.append(on_host(model))
            if kinds:
                close(model, optimizer)
        assert all(map(same_bits, *models))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("settings", ["sim-random", "sim-poison"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_pass_with_threads(
    name: str, settings: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated_threads(settings, monkeypatch):
        SCENARIOS[name]("sim", nvme_path)


@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random"])
@pytest.mark.parametrize("kinds", ["optim", "optim grad param"])
def test_a_drive_that_is_full_is_met_by_a_call(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str, settings: str
) -> None:
    """From any write of a step on, up to the last, and after a load everything goes on to the same bits."""
    with simulated_threads(settings, monkeypatch):
        plain, model = make_model(), make_model()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = offloaded(nvme_path, model, kinds)
        watch = Watch(monkeypatch)

        def step(net: nn.Module, of: torch.optim.Optimizer, seed: int) -> None:
            backward(net, seed)  # type: ignore[arg-type]
            of.step()

        for seed in range(2):
            before = len(watch.started)
            step(model, optimizer, seed)
            flush(model, optimizer)
            optimizer.zero_grad()
            step(plain, reference, seed)
            reference.zero_grad()
        count = len(watch.started) - before
        kept, state = copy.deepcopy(plain.state_dict()), copy.deepcopy(reference.state_dict())
        step(plain, reference, 2)
        for room in sorted({0, 1, count // 2, count - 2, count - 1}):
            watch.room, watch.refused = room, 0
            with pytest.raises(SwapIOError, match="the drive is full"):
                step(model, optimizer, 2)
                until(lambda: watch.refused)
                until(lambda: not threads())
                flush(model, optimizer)
            watch.room = None
            optimizer.zero_grad()
            model.load_state_dict(kept)
            optimizer.load_state_dict(state)
            step(model, optimizer, 2)
            flush(model, optimizer)
            optimizer.zero_grad()
            assert all(map(same_bits, on_host(model), on_host(plain))), room
        close(model, optimizer)


def on_host(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("settings", ["sim-lazy", "sim-random"])
def test_a_record_that_could_not_be_completed_once_is_completed_by_the_next_call(
    settings: str, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is short: the values are in the pool, and nothing of them is lost."""
    complete, calls = HeldOnDevice.complete, 0

    def failing(held: HeldOnDevice, lease: Lease) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError("once")
        return complete(held, lease)

    with simulated_threads(settings, monkeypatch):
        model = make_model()
        optimizer = offloaded(nvme_path, model, "optim grad param")
        expected = [p.detach().cpu() + 1 for p in model.parameters()]
        monkeypatch.setattr(HeldOnDevice, "complete", failing)
        for _ in range(2):  # The first fails, unless the thread was there before.
            with contextlib.suppress(SwapIOError):
                for p, values in zip(model.parameters(), expected, strict=True):
                    p.data.copy_(values)
                flush(model, optimizer)
        assert calls > 1
        assert all(same_bits(p.cpu(), q) for p, q in zip(model.parameters(), expected, strict=True))
        close(model, optimizer)
