"""Short runs on a device that any wait that is missing changes: each raises, or fails an assert, if one is.

The first argument of each is the device's type, the second an empty directory for records.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parameter_scenarios
import pytest
import torch
from accelerators import keep_busy
from parameter_scenarios import PARAMETER_SCENARIOS
from torch import nn

import swapper
from swapper.errors import SwapIOError
from swapper.io.bounce import Bounce
from swapper.io.devices import Copy, DeviceCopies
from swapper.io.handle import AsyncIOHandle
from swapper.optimizer.device_slots import SLOTS
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache

CHUNK = 4 << 20
STEPS = 3


def make_model(device: str) -> nn.Sequential:
    torch.manual_seed(parameter_scenarios.values_seed)
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)


def loss_of(model: nn.Module, device: str, seed: int) -> torch.Tensor:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).to(device)
    return (model(x) - x).square().mean()


def expected(device: str, micro_batches: int, clip: bool, step_device: str) -> list[torch.Tensor]:
    """Parameters after the steps of the plain optimizer, made on copies on the host where `step_device` is "cpu"."""
    model = make_model(device)
    parameters = list(model.parameters())
    place = device if step_device == "device" else "cpu"
    copies = [nn.Parameter(p.detach().to(place, copy=True)) for p in parameters]
    optimizer = torch.optim.AdamW(copies, lr=1e-2)
    for step in range(STEPS):
        for batch in range(micro_batches):
            loss_of(model, device, step * micro_batches + batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 0.05)
        for p, copy in zip(parameters, copies, strict=True):
            assert p.grad is not None
            copy.grad, p.grad = p.grad.to(place), None
        optimizer.step()
        with torch.no_grad():
            for p, copy in zip(parameters, copies, strict=True):
                p.copy_(copy)
    return [p.detach().cpu() for p in parameters]


def train(
    device: str,
    path: Path,
    gradients: str = "none",
    micro_batches: int = 1,
    clip: bool = False,
    in_backward: bool = False,
    step_device: str = "cpu",
) -> None:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="16MiB",
        bucket_bytes="256KiB",
        gradient_accumulation_steps=micro_batches,
        offload_optimizer={"device": "nvme", "step_in_backward": in_backward, "step_device": step_device},
        offload_gradient={"device": gradients},
    )
    swapper.wrap_optimizer(optimizer, config)
    for step in range(STEPS):
        for batch in range(micro_batches):
            loss_of(model, device, step * micro_batches + batch).backward()
        if in_backward:  # What is read now is whole.
            between = [p.detach().clone() for p in model.parameters()]
        if clip:
            swapper.of(optimizer).clip_grad_norm_(0.05)
        optimizer.step()
        if in_backward:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), between, strict=True))
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    found = [p.detach().cpu() for p in model.parameters()]
    swapper.of(optimizer).close()
    assert all(
        torch.equal(p, q) for p, q in zip(found, expected(device, micro_batches, clip, step_device), strict=True)
    )


def clipped_on_another_stream(device: str, path: Path) -> None:
    """Gradients are clipped on another stream than that of backward and step; each waits only for what it uses.

    What swapper has made on one and used on the other is not given to others before that is over.
    """
    module: Any = torch.get_device_module(torch.device(device))
    first, other = module.current_stream(), module.Stream()
    results = []

    def use_memory(stream: Any) -> None:
        """Have memory that was freed, and work in it that waits for no other stream."""
        stream.synchronize()
        with module.stream(stream):
            for _ in range(5):
                torch.full((1,), 1e30, device=device)
        stream.synchronize()

    for swap in (False, True):
        model = make_model(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if swap:
            config = swapper.OffloadConfig(
                nvme_path=path,
                pool_bytes="16MiB",
                bucket_bytes="256KiB",
                offload_optimizer={"device": "nvme", "step_device": "device"},
                offload_gradient={"device": "nvme"},
            )
            swapper.wrap_optimizer(optimizer, config)
        for step in range(STEPS):
            loss_of(model, device, step).backward()
            other.wait_stream(first)
            with module.stream(other):
                clip = swapper.of(optimizer).clip_grad_norm_ if swap else clip_of(model)
                clip(0.05)
            use_memory(first)
            first.wait_stream(other)
            optimizer.step()
            optimizer.zero_grad()
            use_memory(other)
        torch.accelerator.synchronize()
        results.append([p.detach().cpu() for p in model.parameters()])
        if swap:
            swapper.of(optimizer).close()
    assert all(map(torch.equal, *results))


def stepped_in_backward_on_two_streams(device: str, path: Path) -> None:
    """Gradients of one bucket are computed on two streams, of which neither waits for the other in backward."""
    module: Any = torch.get_device_module(torch.device(device))
    first, other = module.current_stream(), module.Stream()
    results, used_on_both = [], []
    for swap in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if swap:
            config = swapper.OffloadConfig(
                nvme_path=path,
                pool_bytes="16MiB",
                bucket_bytes="4MiB",
                offload_optimizer={"device": "nvme", "step_device": "device", "step_in_backward": True},
            )
            swapper.wrap_optimizer(optimizer, config)
        for step in range(STEPS):
            x = torch.full((8, 300), step + 1.0, device=device)
            other.wait_stream(first)
            here = model[0](x)
            with module.stream(other):
                there = model[2](model[1](x).tanh())
            first.wait_stream(other)
            used_on_both += [x, there]
            (here * there).sum().backward()
            if step % 2:  # What it does now must not be too early; else not too late.
                other.synchronize()
            optimizer.step()
            other.wait_stream(first)  # It has memory of gradients.
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        results.append([p.detach().cpu() for p in model.parameters()])
        if swap:
            swapper.of(optimizer).close()
    assert all(map(torch.equal, *results))


def clip_of(model: nn.Module) -> Callable[[float], torch.Tensor]:
    return functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))


def files(device: str, path: Path) -> None:
    """Device tensors to and from a file, through memory of the host."""
    with AsyncIOHandle() as handle, handle.open(path / "file", "rw") as file:
        source = torch.zeros(5 * CHUNK, dtype=torch.uint8, device=device)
        source.fill_(5)
        handle.write(file, source).wait()
        assert set((path / "file").read_bytes()) == {5}
        source.fill_(1)
        used, target = source.clone(), torch.zeros_like(source)
        handle.read(file, target).wait()
        handle.read(file, source).wait()
        assert bool((target == 5).all()) and bool((source == 5).all()) and bool((used == 1).all())


def files_whose_thread_ends(device: str, path: Path) -> None:
    """The thread that moves device memory ends with a copy to the device on its way: that is over for who is told."""
    copy, threads = Bounce._copy, []

    def end_in_it(self: Bounce, chunk: Any) -> None:
        copy(self, chunk)
        threads.append(threading.current_thread())
        raise SystemExit

    target = torch.full((CHUNK,), 5, dtype=torch.uint8, device=device)
    with AsyncIOHandle() as handle, handle.open(path / "file", "rw") as file, pytest.MonkeyPatch.context() as patch:
        handle.write(file, target).wait()
        patch.setattr(Bounce, "_copy", end_in_it)
        patch.setattr(threading, "excepthook", lambda arguments: None)
        with pytest.raises(SwapIOError, match="the thread that moves device memory ended"):
            handle.read(file, target).wait()
        threads[0].join()
        target.fill_(1)
        torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert bool((target == 1).all())


def temporaries(device: str, path: Path, what: str) -> None:
    """Gradients, or parameters, that are not in memory order: copies of them are made for the step."""
    results = []
    for swap in (False, True):
        torch.manual_seed(parameter_scenarios.values_seed)
        base, gradient = torch.randn(300, 600), torch.randn(300, 300)
        base, gradient = (base.to(device), gradient.to(device)) if swap else (base, gradient)
        p = nn.Parameter(base[:, :300] if what == "parameter" else base[:, :300].clone())
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        if swap:
            config = swapper.OffloadConfig(
                nvme_path=path,
                pool_bytes="16MiB",
                bucket_bytes="256KiB",
                offload_optimizer={"device": "nvme", "step_device": "cpu"},
            )
            swapper.wrap_optimizer(optimizer, config)
        p.grad = gradient.t() if what == "gradient" else gradient
        optimizer.step()
        results.append(p.detach().cpu())
        if swap:
            swapper.of(optimizer).close()
    assert torch.equal(*results)


@contextlib.contextmanager
def full_drive() -> Iterator[None]:
    """The second record that is put is not written."""
    put, calls = RecordCache.put, itertools.count(1)

    def failing(self: RecordCache, *args: Any) -> None:
        if next(calls) == 2:
            raise SwapIOError(errno.ENOSPC, "write", "it fails")
        put(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordCache, "put", failing)
        yield


@contextlib.contextmanager
def cut_off_copy(to_host: bool) -> Iterator[None]:
    """Ctrl-C comes when the second copy in that direction was started, before its caller knows of it."""
    copy, calls = DeviceCopies.copy, itertools.count(1)

    def cut_off(self: DeviceCopies, destination: torch.Tensor, source: torch.Tensor) -> Copy | None:
        started = copy(self, destination, source)
        if (destination.device.type == "cpu") == to_host and next(calls) == 2:
            raise KeyboardInterrupt
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceCopies, "copy", cut_off)
        yield


def failed_step(
    device: str,
    path: Path,
    step_device: str,
    cut_off: Callable[[], contextlib.AbstractContextManager[None]],
    closes: bool = False,
) -> None:
    """A step ends in the middle: what is restored after it is not overwritten, nor what has its memory then.

    Args:
        closes: nobody has it then: the pool goes.
    """
    torch.manual_seed(parameter_scenarios.values_seed)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]).to(device)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="16MiB",
        bucket_bytes="256KiB",
        offload_optimizer={"device": "nvme", "step_device": step_device},
    )
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    swapper.of(optimizer).flush()
    length_bytes = swapper.of(optimizer)._stepper.plan.slot_bytes if step_device == "device" else 4096
    before = [torch.full((length_bytes,), 7, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    keep_busy(device, 500)
    read = torch.stack(before)  # When others have the memory.
    before.clear()
    with cut_off():
        try:
            optimizer.step()
        except (SwapIOError, KeyboardInterrupt):
            pass
        else:
            raise AssertionError("it did not fail")
    if closes:
        swapper.of(optimizer).close()
        assert bool((read == 7).all())
        return
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    pool = swapper.of(optimizer)._pool
    leases = []
    while (lease := pool.try_acquire(64 << 10)) is not None:
        lease.tensor.fill_(7)
        leases.append(lease)
    torch.accelerator.synchronize()
    assert bool((read == 7).all()) and all(bool((p == 7.0).all()) for p in model.parameters())
    assert all(bool((lease.tensor == 7).all()) for lease in leases)
    for lease in leases:
        lease.release()
    swapper.of(optimizer).close()


def after_backward(device: str, path: Path, gradients: str, flush: bool) -> None:
    """Gradients are still on their way when everything is written, or given up."""
    model = make_model(device)
    config = swapper.OffloadConfig(
        nvme_path=path,
        pool_bytes="16MiB",
        bucket_bytes="256KiB",
        offload_optimizer={"device": "nvme", "step_device": "cpu"},
        offload_gradient={"device": gradients},
    )
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), config)
    loss_of(model, device, 0).backward()
    if flush:
        swapper.of(optimizer).flush()
        found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        plain = make_model(device)
        loss_of(plain, device, 0).backward()
        assert all(torch.equal(p.grad.cpu(), q) for p, q in zip(plain.parameters(), found, strict=True))  # type: ignore[union-attr]
    swapper.of(optimizer).close()


def pool_in_use(device: str, path: Path, closes: bool) -> None:
    """A pool grows, or is closed, while copies from it go on."""
    copies = DeviceCopies(torch.device(device))
    with BufferPool(1 << 20, device=torch.device(device), ready_bytes=64 << 10) as pool:
        with pool.acquire(64 << 10) as lease:
            there = torch.zeros(64 << 10, dtype=torch.uint8, device=device)
            keep_busy(device, 5000)
            copies.begin()
            lease.transfer = copies.copy(there, lease.tensor.fill_(7))
            if not closes:
                pool.acquire(64 << 10).release()
        pool.close()
    assert bool((there == 7).all())


def keys_and_values(device: str, path: Path, two_streams: bool) -> None:
    """An `OffloadedCache` in a pool of a few records, used on one stream after the other, or on one."""
    transformers = pytest.importorskip("transformers")
    module: Any = torch.get_device_module(torch.device(device))
    numbers = torch.Generator().manual_seed(parameter_scenarios.values_seed)
    counts = [90, 1, 1, 40, 1]
    new = [[torch.randn(2, 2, 2, count, 16, generator=numbers).to(device) for _ in range(2)] for count in counts]
    torch.accelerator.synchronize()
    streams = [module.current_stream(), module.Stream() if two_streams else module.current_stream()]
    config = swapper.OffloadConfig(nvme_path=path, pool_bytes="64KiB", bucket_bytes="16KiB")
    plain, found, expected = transformers.DynamicCache(), [], []
    with torch.no_grad(), swapper.OffloadedCache(config) as cache:
        for i, tokens in enumerate(new):
            with module.stream(streams[i % 2]):
                keep_busy(device, 200)
                for layer in range(2):
                    found += cache.update(*tokens[layer], layer)
        torch.accelerator.synchronize()
        for tokens in new:
            for layer in range(2):
                expected += plain.update(*tokens[layer], layer)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    "step": train,
    "step on the device": functools.partial(train, step_device="device"),
    "step on the device with gradients": functools.partial(
        train, step_device="device", gradients="nvme", micro_batches=2
    ),
    "step in backward": functools.partial(train, in_backward=True),
    "step in backward on two streams": stepped_in_backward_on_two_streams,
    "gradients on the drive": functools.partial(train, gradients="nvme", micro_batches=2, clip=True),
    "gradients clipped on another stream": clipped_on_another_stream,
    "gradients in the pool": functools.partial(train, gradients="cpu", micro_batches=2),
    "gradients flushed": functools.partial(after_backward, gradients="nvme", flush=True),
    "gradients given up": functools.partial(after_backward, gradients="cpu", flush=False),
    "files": files,
    "files whose thread ends": files_whose_thread_ends,
    "temporary gradient": functools.partial(temporaries, what="gradient"),
    "temporary parameter": functools.partial(temporaries, what="parameter"),
    "failed step": functools.partial(failed_step, step_device="cpu", cut_off=full_drive),
    "failed step on the device": functools.partial(failed_step, step_device="device", cut_off=full_drive),
    "step on the device that is cut off in a copy down": functools.partial(
        failed_step, step_device="device", cut_off=functools.partial(cut_off_copy, to_host=True)
    ),
    "step on the device that is cut off in a copy up": functools.partial(
        failed_step, step_device="device", cut_off=functools.partial(cut_off_copy, to_host=False), closes=True
    ),
    "pool that grows": functools.partial(pool_in_use, closes=False),
    "pool that is closed": functools.partial(pool_in_use, closes=True),
    "keys and values": functools.partial(keys_and_values, two_streams=False),
    "keys and values on two streams": functools.partial(keys_and_values, two_streams=True),
    **PARAMETER_SCENARIOS,
}
