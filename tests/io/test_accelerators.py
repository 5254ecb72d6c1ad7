"""Copies and streams of an accelerator, which is simulated: whatever is not waited for is not done. See sim_device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerators import keep_busy, simulate, simulated
from torch import nn
from training import same_bits

import swapper
from swapper.io import devices
from swapper.io.devices import DeviceCopies, copies_of, free_bytes, is_accelerator
from swapper.io.handle import AsyncIOHandle
from swapper.tensors.evicted_gradients import raw_gradient

pytestmark = pytest.mark.timeout(240)

NUMEL = 10_000


@pytest.fixture(autouse=True, params=["blocking", "locking"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the type of the device is one that torch can page-lock memory for. Freed memory is poisoned at once."""
    sim_device = simulate("sim-lazy", monkeypatch)
    sim_device.configure("lazy", poison_now=True)
    sim_device.violations()  # of a test that failed
    if request.param == "blocking":
        monkeypatch.delitem(devices.DEVICES, "sim")
    devices._warn_that_copies_block.cache_clear()
    yield request.param == "locking"
    assert sim_device.violations() == []


@pytest.fixture
def sim() -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture
def host(locks: bool) -> Iterator[torch.Tensor]:
    """Memory of the host, page-locked if that is possible."""
    memory = torch.zeros(NUMEL)
    copies = copies_of(torch.device("sim", 0))
    copies.page_lock(memory.data_ptr(), memory.nbytes)
    yield memory
    copies.page_unlock(memory.data_ptr())


def test_a_type_that_memory_cannot_be_locked_for_is_said_once(
    locks: bool, sim: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert is_accelerator(sim) and DeviceCopies(sim).non_blocking == locks
    said = [record for record in caplog.records if "copies from and to sim devices block" in record.message]
    assert [record.levelno for record in said] == ([] if locks else [logging.WARNING])


def test_free_memory_is_no_more_than_torch_may_take(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_per_process_memory_fraction` lets several processes have a GPU: what others may take is not free."""
    module = torch.get_device_module(sim)
    kept = torch.zeros(1 << 20, device=sim)
    used, total = module.memory_allocated(sim), module.mem_get_info(sim)[1]
    monkeypatch.setattr(module, "memory_reserved", lambda device: used + 4096, raising=False)
    monkeypatch.setattr(module, "mem_get_info", lambda device: (total - used - 4096, total))
    assert used >= kept.nbytes and free_bytes(sim) == total - used

    def allow(fraction: float) -> None:
        monkeypatch.setattr(module, "get_per_process_memory_fraction", lambda device: fraction, raising=False)

    for fraction, expected in ((1.0, total - used), (0.25, total // 4 - used), (0.0, 0)):
        allow(fraction)
        assert free_bytes(sim) == expected

    def refuse(device: torch.device) -> float:
        raise RuntimeError("this allocator does not tell")

    monkeypatch.setattr(module, "get_per_process_memory_fraction", refuse)
    assert free_bytes(sim) == total - used


def test_copies_down_see_what_was_computed_before_they_began(
    sim: torch.device, host: torch.Tensor, locks: bool
) -> None:
    copies = DeviceCopies(sim)
    values = torch.arange(float(NUMEL)).to(sim)
    computed = values * 2
    copies.begin()
    copy = copies.copy(host, computed)
    del computed  # Its memory is nobody else's yet.
    torch.full_like(values, -1.0)
    assert copy is not None and (locks or bool(host.eq(2 * torch.arange(float(NUMEL))).all()))
    assert copy.wait() == 0
    assert torch.equal(host, 2 * torch.arange(float(NUMEL)))


def test_the_current_stream_waits_for_one_copy_or_for_all(sim: torch.device, host: torch.Tensor) -> None:
    copies = DeviceCopies(sim)
    targets = [torch.zeros(NUMEL, device=sim) for _ in range(2)]
    copies.begin()
    host.fill_(3)
    first = copies.copy(targets[0], host)
    copies.copy(targets[1], host)
    copies.join(first)
    doubled = targets[0] * 2
    copies.join()
    doubled += targets[1]
    assert bool(doubled.cpu().eq(9).all())


def test_copies_in_both_directions_follow_each_other(sim: torch.device, host: torch.Tensor) -> None:
    """A slot that is emptied is filled again only then, and only when the stream has done what it did with it."""
    up, down = DeviceCopies(sim), DeviceCopies(sim)
    slot = torch.full((NUMEL,), 5.0, device=sim)
    slot += 1
    down.begin()
    left = down.copy(host, slot)
    fresh = torch.full((NUMEL,), 7.0)
    copies = copies_of(sim)
    copies.page_lock(fresh.data_ptr(), fresh.nbytes)
    up.follow(left)
    arrived = up.copy(slot, fresh)
    up.join(arrived)
    used = slot * 2
    reached = up.reached()
    assert reached is not None
    reached.wait()
    assert bool(host.eq(6).all()) and bool(used.cpu().eq(14).all())
    copies.page_unlock(fresh.data_ptr())


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_gradients_and_state_have_the_bits_of_a_step_on_the_host(
    nvme_path: Path, sim: torch.device, where: str
) -> None:
    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(3)]).to(sim)
        parameters = list(model.parameters())
        on_host = [nn.Parameter(p.detach().cpu()) for p in parameters]
        optimizer = torch.optim.AdamW(parameters if swap else on_host, lr=1e-2)
        if swap:
            settings = swapper.OffloadConfig(
                nvme_path=nvme_path,
                pool_bytes="8MiB",
                bucket_bytes="64KiB",
                gradient_accumulation_steps=2,
                offload_optimizer={"device": "nvme"},
                offload_gradient={"device": where},
            )
            swapper.wrap_optimizer(optimizer, settings)
        for step in range(3):
            for part in range(2):
                x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2 * step + part)).to(sim)
                (model(x) - x).square().mean().backward()
            if not swap:
                for p, copy in zip(parameters, on_host, strict=True):
                    assert p.grad is not None
                    copy.grad = p.grad.cpu()
            optimizer.step()
            with torch.no_grad():
                for p, copy in zip(parameters, on_host, strict=True) if not swap else ():
                    p.copy_(copy)
            model.zero_grad()
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in parameters])
        if swap:
            swapper.of(optimizer).close()
    assert all(same_bits(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("background", [False, True])
def test_what_a_stream_has_yet_to_compute_is_saved(tmp_path: Path, sim: torch.device, background: bool) -> None:
    simulated().configure("lazy")  # Freed memory is not waited for.
    stream = torch.Stream(sim)
    with torch.get_device_module(sim).stream(stream):
        values = torch.arange(300_000.0).to(sim) * 3
        if background:
            swapper.save({"values": values}, tmp_path / "x", background=True).wait()
        else:
            swapper.save({"values": values}, tmp_path / "x")
    loaded = swapper.load(tmp_path / "x")["values"]
    assert loaded.device == sim and torch.equal(loaded.cpu(), torch.arange(300_000.0) * 3)
    assert torch.equal(swapper.load(tmp_path / "x", "cpu")["values"], torch.arange(300_000.0) * 3)


def test_tensors_of_the_device_go_to_files_and_back(tmp_path: Path, sim: torch.device) -> None:
    source = torch.arange(3 << 20, dtype=torch.int32).to(sim)
    source *= 3
    target = torch.zeros_like(source)
    with AsyncIOHandle() as handle, handle.open(tmp_path / "file", "rw") as file:
        handle.write(file, source, 5).wait()
        handle.read(file, target, 5).wait()
    assert torch.equal(source.cpu(), target.cpu())


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_no_pass_of_a_window_waits_for_the_device(nvme_path: Path, sim: torch.device, locks: bool, where: str) -> None:
    """The host is done with forward and backward before the device has begun with them; blocking copies are no test."""
    model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(3)]).to(sim)
    settings = swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="8MiB",
        bucket_bytes="64KiB",
        gradient_accumulation_steps=2,
        offload_optimizer={"device": "nvme"},
        offload_gradient={"device": where},
    )
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), settings)
    simulated().configure("lazy")  # Freed memory is not waited for.
    module = torch.get_device_module(sim)
    x = torch.ones(2, 96).to(sim)
    for _ in range(3):
        module.synchronize()
        busy = module.Event()
        keep_busy("sim", 1000)
        busy.record(module.current_stream())
        for _ in range(2):
            model(x).square().sum().backward()
        assert busy.query() != locks
        assert all(raw_gradient(p) is None for p in model.parameters() if p.nbytes >= 16 << 10)
        optimizer.step()
        optimizer.zero_grad()
    swapper.of(optimizer).close()
