"""Every wait of `DeviceSlots` is removed once, and is missed: bits differ, or the simulated device saw what went wrong.

See [Note: three slots] in `optimizer/device_slots.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulate
from torch import nn

import swapper
from swapper.io.devices import Copy, DeviceCopies
from swapper.optimizer.device_slots import SLOTS, DeviceSlots, Slot
from swapper.storage.buffers import BufferPool, Lease


class Nothing:
    """A transfer that is over."""

    done = staticmethod(lambda: True)
    wait = staticmethod(lambda timeout=None: 0)
    wait_quietly = staticmethod(lambda: None)


def without(name: str) -> Callable[..., None]:
    """`DeviceSlots` whose stream up or down lacks one of the calls that order it."""

    def change(patch: pytest.MonkeyPatch, which: str) -> None:
        make = DeviceSlots.__init__

        def made(self: DeviceSlots, device: torch.device) -> None:
            make(self, device)
            setattr(getattr(self, which), name, lambda *args: None)

        patch.setattr(DeviceSlots, "__init__", made)

    return change


def empty_without_transfer(self: DeviceSlots, slot: Slot, lease: Lease, length_bytes: int) -> None:
    self._down.begin()
    slot.left = self._down.copy(lease.tensor[:length_bytes], slot.memory[:length_bytes])
    lease.transfer = Nothing()


def empty_without_leaving(self: DeviceSlots, slot: Slot, lease: Lease, length_bytes: int) -> None:
    self._down.begin()
    lease.transfer = self._down.copy(lease.tensor[:length_bytes], slot.memory[:length_bytes])


def upload_that_is_over(self: DeviceSlots, slot: Slot, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return UPLOAD(self, slot, source)[0], Nothing()


UPLOAD = DeviceSlots.upload


def patched(name: str, replacement: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(DeviceSlots, name, replacement)


def keep_nothing(self: DeviceCopies, work: Callable[[], object], *tensors: torch.Tensor) -> Copy | None:
    return RUN(self, work)


RUN = DeviceCopies.run

REMOVED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "uploads follow what was in the slot": lambda patch: without("follow")(patch, "_up"),
    "the class waits for the upload": patched("join", lambda self, slot: None),
    "the download waits for the class": lambda patch: without("begin")(patch, "_down"),
    "the write waits for the download": patched("empty", empty_without_transfer),
    "the slot is left when it was downloaded": patched("empty", empty_without_leaving),
    "a gradient's buffer is kept for its upload": patched("upload", upload_that_is_over),
    "the slots are kept until the downloads are over": lambda patch: patch.setattr(DeviceCopies, "run", keep_nothing),
}


def train(path: Path | None, kind: str) -> list[torch.Tensor]:
    """A few steps; in the end what the parameters are."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(20_000, device="sim")) for _ in range(7)]
    model = nn.ParameterList(parameters)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.1)
    if kind == "no state":
        optimizer = torch.optim.SGD(parameters, lr=0.1)
    with contextlib.ExitStack() as stack:
        if path is not None:
            settings = swapper.OffloadConfig(
                nvme_path=path,
                pool_bytes="2MiB",
                bucket_bytes="64KiB" if kind == "no state" else "256KiB",
                offload_optimizer={"device": "cpu" if kind == "kept" else "nvme", "step_device": "device"},
                offload_gradient={"device": "none" if kind in ("kept", "state") else "nvme"},
            )
            swapper.wrap_optimizer(optimizer, settings)
            stack.callback(swapper.of(optimizer).close)
        for step in range(4):
            for i, p in enumerate(parameters):
                (p - torch.full_like(p, float(step + i))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model]


KINDS = ("state", "gradients", "no state", "kept")


def differences(path: Path, plain: dict[str, list[torch.Tensor]]) -> list[str]:
    """What goes wrong on the simulated device."""
    found = []
    sim_device = pytest.importorskip("sim_device")
    for settings in ("sim-lazy", "sim-random"):
        for kind in KINDS:
            with pytest.MonkeyPatch.context() as patch:
                simulate(settings, patch)
                try:
                    mine = train(path, kind)
                    if not all(map(torch.equal, mine, plain[kind])):
                        found.append(f"{settings}, {kind}: other bits")
                except Exception as error:
                    found.append(f"{settings}, {kind}: {error!r}")
                found += [f"{settings}, {kind}: {text}" for text in sim_device.violations()]
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, list[torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        simulate("sim-eager", patch)
        return {kind: train(None, kind) for kind in KINDS}


@pytest.mark.long
def test_with_all_waits_nothing_goes_wrong(nvme_path: Path, plain: dict[str, list[torch.Tensor]]) -> None:
    assert differences(nvme_path, plain) == []


@pytest.mark.long
@pytest.mark.parametrize("what", REMOVED)
def test_each_wait_is_missed(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, plain: dict[str, list[torch.Tensor]], what: str
) -> None:
    REMOVED[what](monkeypatch)
    assert differences(nvme_path, plain)


@pytest.mark.parametrize("removed", [False, True])
def test_uploads_follow_what_had_the_memory_before(monkeypatch: pytest.MonkeyPatch, removed: bool) -> None:
    """The allocator gives memory out again in the order of the current stream, which has yet to read it."""
    simulate("sim-lazy", monkeypatch)
    with BufferPool(1 << 20, device=torch.device("sim")) as pool, pool.acquire(4096) as lease:
        lease.tensor.fill_(1)
        before = torch.full((4096,), 7, dtype=torch.uint8, device="sim")
        torch.accelerator.synchronize()
        read = before.clone()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, **kwargs: before)
            slots = DeviceSlots(torch.device("sim"))
            if removed:
                patch.setattr(slots._up, "begin", lambda: None)
            slots.hold(4096)
        slot = slots.take(4096)
        assert slot is not None
        slots.fill(slot, lease, 0, 4096)
        slots.wait()
        assert bool((read.cpu() == 7).all()) != removed


@pytest.mark.parametrize("removed", [False, True])
def test_the_class_waits_for_what_was_in_the_slot_of_a_new_record(
    monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Nothing is uploaded then that would have waited for it."""
    simulate("sim-lazy", monkeypatch)
    with BufferPool(1 << 20, device=torch.device("sim")) as pool, pool.acquire(4096) as lease:
        slots = DeviceSlots(torch.device("sim"))
        slots.hold(4096)
        first = slots.take(4096)
        assert first is not None
        first.memory.fill_(7)
        slots.empty(first, lease, 4096)
        slot = next(slot for _ in range(SLOTS) if (slot := slots.take(4096)) is first)
        if not removed:
            slots.join(slot)
        slot.memory.fill_(1)
        torch.accelerator.current_stream().synchronize()
        slots.wait()
        assert bool((lease.tensor == 7).all()) != removed


@pytest.mark.parametrize("removed", [False, True])
def test_a_gradient_stays_in_its_slot_until_the_class_has_used_it(
    monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """In a bucket without a record, of which no download says that."""
    simulate("sim-lazy", monkeypatch)
    with BufferPool(1 << 20, device=torch.device("sim")) as pool, pool.acquire(4096) as lease:
        slots = DeviceSlots(torch.device("sim"))
        slots.hold(4096)
        first = slots.take(0)
        assert first is not None
        lease.tensor.fill_(7)
        gradient, _ = slots.upload(first, lease.tensor)
        slots.wait()
        slots.join(first)
        read = gradient.clone()
        if not removed:
            slots.leave(first)
        slot = next(slot for _ in range(SLOTS) if (slot := slots.take(0)) is first)
        lease.tensor.fill_(1)
        slots.upload(slot, lease.tensor)
        slots.wait()
        assert bool((read.cpu() == 7).all()) != removed
