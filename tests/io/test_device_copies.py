"""Copies that come late, as those of an accelerator do: nothing is used before them, freed under them, or overwritten.

Parameters are the CPU's and are treated as those of a device; its copies are made when somebody waits for them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulate, writes_start_with_calls
from host_device import LateCopies
from interrupts import interrupted_at
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from training import OPTIMIZERS, same_bits

import swapper
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.gradient.swapper import GradientSwapper
from swapper.io import devices, handle
from swapper.io.bounce import Bounce
from swapper.io.devices import Copy, DeviceCopies
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.metrics import Metrics
from swapper.optimizer.operands import Scratch
from swapper.optimizer.segments import Segment
from swapper.session import Shared
from swapper.storage.buffers import BufferPool
from swapper.storage.cache import RecordCache
from swapper.storage.growing_pool import GrowingPool
from swapper.storage.store import RecordKey, TensorStore
from swapper.tensors.evicted_gradients import raw_gradient, set_raw_gradient

pytestmark = pytest.mark.timeout(240)

MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU is an accelerator, but not for files: the buffers of a pool are still memory of the host."""
    monkeypatch.setattr(handle, "is_accelerator", lambda device: False)
    monkeypatch.setitem(devices.DEVICES, "cpu", LateCopies)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)  # Which memory of the host has not.
    writes_start_with_calls(monkeypatch)
    LateCopies.reset()
    yield
    gc.collect()
    assert not LateCopies.locked, "memory is still page-locked"


def make_config(path: Path, **settings: Any) -> swapper.OffloadConfig:
    kinds: dict[str, Any] = {"pool_bytes": "16MiB", "bucket_bytes": "256KiB", "offload_optimizer": {"device": "nvme"}}
    return swapper.OffloadConfig(nvme_path=path, **{**kinds, **settings})


def make_model(layers: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)]).to(dtype)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    (model(x) - x).square().mean().backward()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(same_bits(p, q) for p, q in zip(mine, theirs, strict=True))


# --- Whole runs -----------------------------------------------------------------------------------------------------

KINDS = list(itertools.product(["nvme", "cpu"], ["none", "nvme", "cpu"], [1, 2], [False, True]))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("state", "gradients", "micro_batches", "in_backward"), KINDS)
def test_same_bits_with_copies_that_come_late(
    nvme_path: Path,
    leaves_nothing: None,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    gradients: str,
    micro_batches: int,
    in_backward: bool,
) -> None:
    for name, dtype in (("AdamW", torch.float32), ("SGD", torch.bfloat16)):
        results = []
        for swap in (False, True):
            model = make_model(dtype=dtype)
            optimizer = OPTIMIZERS[name](list(model.parameters()))
            if swap:
                settings = make_config(
                    nvme_path,
                    gradient_accumulation_steps=micro_batches,
                    offload_optimizer={"device": state, "step_in_backward": in_backward},
                    offload_gradient={"device": gradients},
                )
                swapper.wrap_optimizer(optimizer, settings)
            seen = []
            for step in range(3):
                for part in range(micro_batches):
                    backward(model, 10 * step + part)
                if not in_backward and step == 1:
                    parameters = list(model.parameters())
                    seen += [
                        swapper.of(optimizer).clip_grad_norm_(0.01)
                        if swap
                        else torch.nn.utils.clip_grad_norm_(parameters, 0.01)
                    ]
                    seen += [p.grad.clone() for p in parameters if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
                seen += values(model)
            results.append(seen)
            if swap:
                swapper.of(optimizer).close()
        assert equal(*results), name


@pytest.mark.parametrize("what", ["gradient", "parameter"])
def test_temporaries_are_copied_when_they_are_made(nvme_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Elements that are not in memory order are put together by the current stream, which is late itself."""
    slice_of = Segment.slice_of

    def late(self: Segment, tensor: torch.Tensor) -> torch.Tensor:
        result = slice_of(self, tensor)
        if result.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            whole = result.clone()
            result.fill_(float("nan"))
            LateCopies.late.push(lambda: result.copy_(whole))
        return result

    results = []
    for swap in (False, True):
        torch.manual_seed(0)
        base, gradient = torch.randn(200, 400), torch.randn(200, 200)
        p = nn.Parameter(base[:, :200] if what == "parameter" else base[:, :200].clone())
        p.grad = gradient.t() if what == "gradient" else gradient
        other = nn.Parameter(torch.randn(200, 200))
        other.grad = torch.randn(200, 200)
        before = p.detach().clone()
        optimizer = torch.optim.SGD([other, p], lr=0.1, momentum=0.9)
        with monkeypatch.context() as patch:
            if swap:
                swapper.wrap_optimizer(optimizer, make_config(nvme_path))
                patch.setattr(Segment, "slice_of", late)
            optimizer.step()
        assert not torch.equal(p, before)
        results.append([p.detach().clone(), other.detach().clone()])
        if swap:
            swapper.of(optimizer).close()
    assert equal(*results)


# --- A step that fails ------------------------------------------------------------------------------------------------


class Fails(torch.optim.AdamW):
    calls, at = 0, 0

    def step(self, closure: Any = None) -> Any:
        Fails.calls += 1
        if Fails.calls == Fails.at:
            raise RuntimeError("it fails")
        return super().step(closure)


def failing(function: Callable[..., Any], at: int, *, after: bool = False) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            if after:
                function(*args, **kwargs)
            raise SwapIOError(28, "write", "it fails")
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def failure(kind: str, at: int) -> Iterator[None]:
    """What fails in a step, at the which time."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises((RuntimeError, SwapIOError), match=r"it fails|memory"):
        Fails.calls, Fails.at = 0, at if kind == "class" else 0
        if kind == "put":
            patch.setattr(RecordCache, "put", failing(RecordCache.put, at))
        if kind == "fetch":
            patch.setattr(Segment, "slice_of", failing(Segment.slice_of, at))
        if kind == "copy":
            LateCopies.fail_in = at
        if kind == "started":  # As Ctrl-C may, when a copy was started and is not in its lease yet.
            patch.setattr(DeviceCopies, "copy", failing(DeviceCopies.copy, at, after=True))
        yield


FAILURES = list(itertools.product(["class", "put", "fetch", "copy", "started"], [1, 2, 5]))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("state", ["nvme", "cpu"])
@pytest.mark.parametrize(("kind", "at"), FAILURES)
def test_what_comes_after_a_step_that_failed_is_not_overwritten(
    nvme_path: Path, state: str, kind: str, at: int
) -> None:
    model = make_model(layers=8)
    optimizer = Fails(model.parameters())
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, offload_optimizer={"device": state}))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with failure(kind, at):
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    pool = swapper.of(optimizer)._pool
    leases = []
    capacity_bytes = pool.capacity_bytes
    while (lease := pool.try_acquire(64 << 10)) is not None and pool.capacity_bytes == capacity_bytes:
        lease.tensor.fill_(7)
        leases.append(lease)
    LateCopies.synchronize()
    assert all(bool((p == 7.0).all()) for p in model.parameters())
    assert leases and all(bool((lease.tensor == 7).all()) for lease in leases)
    for lease in leases:
        lease.release()
    swapper.of(optimizer).close()


def pools_of(pool: BufferPool | GrowingPool) -> list[BufferPool]:
    return [pool] if isinstance(pool, BufferPool) else pool._pools


@pytest.mark.parametrize("state", ["nvme", "cpu"])
def test_scratch_is_not_the_pools_while_copies_are_in_flight(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Even if waiting for them fails, as with Ctrl-C: everything else is given back, and it when they are over."""
    model = make_model(layers=8)
    optimizer = Fails(model.parameters())
    swapper.wrap_optimizer(optimizer, make_config(nvme_path, offload_optimizer={"device": state}))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    pool = swapper.of(optimizer)._pool

    def interrupted(self: DeviceCopies) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DeviceCopies, "wait", interrupted)
        Fails.calls, Fails.at = 0, 3
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert not swapper.of(optimizer)._stepper._scratches
    assert sum(not extent.is_over() for each in pools_of(pool) for extent in (*each._given_back, *each._busy)) == 1
    leases = []
    capacity_bytes = pool.capacity_bytes
    while (lease := pool.try_acquire(64 << 10)) is not None and pool.capacity_bytes == capacity_bytes:
        lease.tensor.fill_(7)
        leases.append(lease)
    LateCopies.synchronize()
    assert all(bool((lease.tensor == 7).all()) for lease in leases)
    for lease in leases:
        lease.release()
    swapper.of(optimizer).close()


def test_scratch_is_dropped_without_waiting(nvme_path: Path) -> None:
    """So that the next forward is not kept from being started. The pool has it when the copies are done."""
    with BufferPool(MIB) as pool:
        copies = DeviceCopies(CPU)
        lease = pool.acquire(MIB)
        scratch = Scratch(lease)
        target = torch.zeros(1000)
        piece = scratch.take(1000, torch.float32).fill_(3)
        scratch.note(copies.copy(target, piece))
        lease.release()
        assert LateCopies.waits == 0 and pool.used_bytes == MIB and pool.try_acquire(MIB) is None
        pool.acquire(MIB).tensor.fill_(9)  # Waits for the copy.
        assert LateCopies.waits == 1 and bool(target.eq(3).all())
    LateCopies.reset()
    model = make_model()
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), make_config(nvme_path))
    backward(model)
    before = values(model)
    LateCopies.joins_late = True
    optimizer.step()
    last = list(model.parameters())[-1]
    assert torch.equal(last, before[-1]), "the last bucket's copies were waited for"
    assert swapper.of(optimizer)._pool.used_bytes > 0
    LateCopies.synchronize()
    swapper.of(optimizer).flush()
    assert not torch.equal(last, before[-1])
    assert swapper.of(optimizer)._pool.used_bytes == 0
    swapper.of(optimizer).close()


# --- Steps in backward ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_parameter_that_is_read_after_backward_is_whole(nvme_path: Path, fails: bool) -> None:
    """Also after a backward that failed when some parameters were stepped."""

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if fails:
                raise ValueError("boom")
            return gradient

    model = make_model()
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()),
        make_config(nvme_path, offload_optimizer={"device": "nvme", "step_in_backward": True}),
    )
    x = torch.randn(4, 128)
    out = model[1:](Boom.apply(model[0](x)))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="boom") if fails else contextlib.nullcontext():
        out.square().sum().backward()
    between = values(model)
    LateCopies.synchronize()
    assert equal(values(model), between)
    assert not torch.equal(between[-2], values(make_model())[-2])
    swapper.of(optimizer).close()


# --- Gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_leave_the_device_without_a_wait(nvme_path: Path, where: str, micro_batches: int) -> None:
    """A backward is not held up by copies, nor is the next one, which adds to them."""
    model = make_model(layers=8)
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()),
        make_config(
            nvme_path, gradient_accumulation_steps=micro_batches, offload_gradient={"device": where}, pool_bytes="32MiB"
        ),
    )
    LateCopies.joins_late = True
    backward(model)
    assert LateCopies.waits == 0
    assert all(raw_gradient(p) is None for p in model.parameters() if p.nbytes >= 16 << 10)
    gradients = swapper.of(optimizer).gradients
    assert gradients is not None and gradients.metrics.writes == 0, "written before it was copied"
    if micro_batches > 1:
        backward(model, 1)
        assert LateCopies.waits == 0 and gradients.metrics.writes == 0
    LateCopies.synchronize()
    gradients.check()  # Whoever comes next has the drive write them.
    assert (gradients.metrics.writes > 0) == (where == "nvme")
    LateCopies.joins_late = False
    optimizer.step()
    swapper.of(optimizer).close()


@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_copied_when_they_are_computed(nvme_path: Path, where: str, micro_batches: int) -> None:
    """The current stream, which computes them, is late itself."""

    def late(p: torch.Tensor) -> None:
        assert isinstance(p, nn.Parameter)
        fresh = raw_gradient(p)
        assert fresh is not None
        computed, gradient = fresh.clone(), fresh.detach()
        gradient.fill_(float("nan"))
        LateCopies.late.push(lambda: gradient.copy_(computed))
        addresses.add(gradient.data_ptr())

    def swapper_norm(optimizer: Optimizer, p: nn.Parameter) -> torch.Tensor:
        gradients = swapper.of(optimizer).gradients
        assert isinstance(gradients, GradientSwapper)
        norm = gradients._gradients[id(p)].norm
        assert norm is not None
        return norm.value

    addresses: set[int] = set()
    results = []
    for swap in (False, True):
        model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(4)])
        model.load_state_dict({name: p for name, p in make_model().state_dict().items() if p.dim() == 2})
        if swap:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(late)  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(model.parameters())
        if swap:
            settings = make_config(
                nvme_path, gradient_accumulation_steps=micro_batches, offload_gradient={"device": where}
            )
            swapper.wrap_optimizer(optimizer, settings)
        for step in range(2):
            for part in range(micro_batches):
                LateCopies.kept.clear()
                backward(model, 10 * step + part)
                if swap:
                    assert addresses and addresses <= set(LateCopies.kept)
                addresses.clear()
            if swap and step == 0:  # Later ones are not taken, as nobody clips.
                assert {swapper_norm(optimizer, p).data_ptr() for p in model.parameters()} <= set(LateCopies.kept)
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model))
        if swap:
            swapper.of(optimizer).close()
    assert equal(*results)


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_what_was_put_off_is_done_to_gradients_that_were_copied(nvme_path: Path, where: str) -> None:
    """Clipping between two passes, when the copies of the first are still to be made."""
    results = []
    for swap in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        if swap:
            settings = make_config(nvme_path, gradient_accumulation_steps=2, offload_gradient={"device": where})
            swapper.wrap_optimizer(optimizer, settings)
        LateCopies.joins_late = True
        backward(model)
        if swap:
            swapper.of(optimizer).clip_grad_value_(1e-3)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        backward(model, 1)
        LateCopies.joins_late = False
        optimizer.step()
        results.append(values(model))
        if swap:
            swapper.of(optimizer).close()
    assert equal(*results)


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_memory_of_gradients_in_flight_is_bounded(nvme_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr("swapper.gradient.copies._COPYING_BYTES", 2 * 128 * 128 * 4)
    model = make_model(layers=8)
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()), make_config(nvme_path, offload_gradient={"device": where})
    )
    LateCopies.joins_late = True
    backward(model)
    assert LateCopies.waits == 6
    gradients = swapper.of(optimizer).gradients
    assert gradients is not None
    swapper.of(optimizer).close()


@pytest.mark.parametrize("where", ["nvme", "cpu"])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("kind", ["put", "copy", "started"])
def test_an_arrival_that_is_cut_off_overwrites_nothing(nvme_path: Path, where: str, kind: str, second: bool) -> None:
    """The first of a window stays whole in memory; with a later one the gradient is lost, which is said."""
    model = make_model(layers=8)
    settings = make_config(nvme_path, gradient_accumulation_steps=2, offload_gradient={"device": where})
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW(model.parameters()), settings)
    plain = make_model(layers=8)
    if second:
        backward(model)
        LateCopies.synchronize()
    backward(plain)
    if kind == "started" and second:
        kind = "put"
    with failure(kind, 2):
        backward(model, 1 if second else 0)
    pool = swapper.of(optimizer)._pool
    leases = []
    while (lease := pool.try_acquire(64 << 10)) is not None:
        lease.tensor.fill_(7)
        leases.append(lease)
    LateCopies.synchronize()
    assert all(bool((lease.tensor == 7).all()) for lease in leases)
    for lease in leases:
        lease.release()
    if second:
        with pytest.raises(SwapError, match="was lost"):
            optimizer.step()
    else:
        there = [
            (p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if p.grad is not None
        ]
        assert len(there) >= 2 and all(q is not None and same_bits(p, q) for p, q in there)
    optimizer.zero_grad()
    backward(model)
    backward(model, 1)
    optimizer.step()
    swapper.of(optimizer).close()


@pytest.mark.parametrize("where", ["nvme", "cpu"])
def test_norms_are_taken_after_the_copies(nvme_path: Path, where: str) -> None:
    """Also of what arrived in a backward that failed, at the end of which nothing is called."""

    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("boom")

    norms = []
    for swap in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, offload_gradient={"device": where}))
        with pytest.raises(ValueError, match="boom"):
            model[1:](Boom.apply(model[0](torch.ones(4, 128)))).square().sum().backward()  # type: ignore[no-untyped-call]
        parameters = list(model.parameters())
        norms.append(
            swapper.of(optimizer).clip_grad_norm_(0.1) if swap else torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        )
        if swap:
            swapper.of(optimizer).close()
    assert same_bits(norms[0], norms[1])


def test_who_still_has_a_gradient_may_change_it_after_backward(nvme_path: Path) -> None:
    model = make_model()
    held: list[torch.Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: held.append(p.grad.detach()))  # type: ignore[no-untyped-call]
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()), make_config(nvme_path, offload_gradient={"device": "nvme"})
    )
    backward(model)
    expected = [gradient.clone() for gradient in reversed(held)]
    for gradient in held:
        gradient.fill_(float("nan"))
    large = [p.grad for p in model.parameters() if p.nbytes >= 16 << 10 and p.grad is not None]
    assert large and equal(large, [gradient for gradient in expected if gradient.dim() == 2])
    swapper.of(optimizer).close()


def test_who_still_has_a_gradient_may_change_it_when_it_was_taken_outside_of_backward(nvme_path: Path) -> None:
    model = make_model()
    optimizer = swapper.wrap_optimizer(
        torch.optim.AdamW(model.parameters()),
        make_config(nvme_path, gradient_accumulation_steps=2, offload_gradient={"device": "nvme"}),
    )
    backward(model)
    p = model[0].weight
    left = torch.ones_like(p)
    set_raw_gradient(p, left)  # As an arrival that was cut off before it began leaves it.
    gradients = swapper.of(optimizer).gradients
    assert gradients is not None
    gradients.check()
    assert raw_gradient(p) is None
    left.fill_(float("nan"))
    plain = make_model()
    backward(plain)
    assert plain[0].weight.grad is not None and p.grad is not None
    assert same_bits(p.grad.clone(), plain[0].weight.grad + 1)
    swapper.of(optimizer).close()


# --- Records that a device copies to ----------------------------------------------------------------------------------

SIZE = 64 << 10
KEY = RecordKey(0, "grad", 0)


@contextlib.contextmanager
def records(path: Path, stored: bool = True) -> Iterator[tuple[RecordCache, BufferPool, Metrics]]:
    metrics = Metrics()
    faults = FaultPlan(seed=0, delay_us=20_000)
    with AsyncIOHandle(faults=faults) as handle, BufferPool(4 * SIZE, handle) as pool:
        store = TensorStore([path], "run", 0, [handle]) if stored else None
        if store is not None:
            store.plan({RecordKey(0, "grad", number): SIZE for number in range(8)})
        yield RecordCache(pool, store, metrics), pool, metrics
        if store is not None:
            store.close()


def put(cache: RecordCache, copies: DeviceCopies, number: int, value: int) -> None:
    key = RecordKey(0, "grad", number)
    lease, _ = cache.take(key, SIZE)
    source = torch.full((SIZE,), value, dtype=torch.uint8)
    lease.transfer = copies.copy(lease.tensor, source)
    cache.put(key, SIZE)


def value_of(cache: RecordCache, number: int) -> int:
    key = RecordKey(0, "grad", number)
    lease, there = cache.take(key, SIZE)
    assert there and bool(lease.tensor.eq(lease.tensor[0]).all())
    value = int(lease.tensor[0])
    cache.release(key)
    return value


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("how", ["take", "stage", "drain", "later"])
def test_a_record_is_written_when_it_was_copied(nvme_path: Path, how: str, stored: bool) -> None:
    with records(nvme_path, stored) as (cache, pool, metrics):
        copies = DeviceCopies(CPU)
        for number in range(3):
            put(cache, copies, number, number + 1)
        cache.check()
        assert metrics.writes == 0 and LateCopies.waits == 0
        if how == "stage":
            assert all(cache.stage(RecordKey(0, "grad", number), SIZE) for number in range(3))
            assert cache.drop_prefetched() is False
        if how == "drain":
            cache.flush()
            assert pool.used_bytes == 0 or not stored
        if how == "later":
            LateCopies.synchronize()
            cache.check()
        if how in ("drain", "later"):
            assert metrics.writes == (3 if stored else 0)
        for _ in range(2):
            assert [value_of(cache, number) for number in (1, 0, 2)] == [2, 1, 3]
        assert metrics.writes == (3 if stored else 0)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("how", ["take", "flush", "wait", "check"])
def test_a_record_is_finished_once_between_its_copy_and_its_use(nvme_path: Path, how: str, stored: bool) -> None:
    with records(nvme_path, stored) as (cache, _, metrics):
        lease, _ = cache.take(KEY, SIZE)
        lease.transfer = DeviceCopies(CPU).copy(lease.tensor, torch.full((SIZE,), 5, dtype=torch.uint8))
        finished = []

        def finish() -> int:
            assert bool(lease.tensor.eq(5).all()), "it is not copied yet"
            lease.tensor.fill_(6)
            finished.append(metrics.writes)
            return SIZE // 2

        cache.put(KEY, finish)
        cache.check()
        assert finished == []
        if how == "check":
            LateCopies.synchronize()
            cache.check()
        elif how in ("flush", "wait"):
            cache.flush() if how == "flush" else cache.wait(KEY)
        assert value_of(cache, 0) == 6
        cache.flush()
        assert finished == [0] and metrics.bytes_written == (SIZE // 2 if stored else 0)


@pytest.mark.parametrize("stored", [True, False])
def test_a_record_that_cannot_be_finished_has_failed_until_it_is_discarded(nvme_path: Path, stored: bool) -> None:
    def finish() -> int:
        raise SwapIOError(errno.EIO, "read", detail="it is damaged")

    with records(nvme_path, stored) as (cache, pool, metrics):
        lease, _ = cache.take(KEY, SIZE)
        lease.transfer = DeviceCopies(CPU).copy(lease.tensor, torch.full((SIZE,), 5, dtype=torch.uint8))
        cache.put(KEY, finish)
        LateCopies.synchronize()
        for call in (cache.check, cache.flush, lambda: cache.take(KEY, SIZE), cache.check):
            with pytest.raises(SwapIOError, match="it is damaged"):
                call()
        cache.discard(KEY)
        cache.flush()
        assert metrics.writes == 0 and pool.used_bytes == 0


def test_a_pool_that_is_short_waits_for_copies(nvme_path: Path) -> None:
    with records(nvme_path) as (cache, pool, _):
        copies = DeviceCopies(CPU)
        for number in range(8):
            put(cache, copies, number, number + 1)
        leases = [pool.acquire(SIZE) for _ in range(4)]  # Another's: what is leaving gives way.
        for lease in leases:
            lease.tensor.fill_(99)
            lease.release()
        assert [value_of(cache, number) for number in range(8)] == list(range(1, 9))


def test_a_copy_that_ends_between_two_looks_is_no_write(nvme_path: Path) -> None:
    class EndsNow(Copy):
        looks = 0

        def done(self) -> bool:
            EndsNow.looks += 1
            return EndsNow.looks > 1

    with records(nvme_path) as (cache, _, metrics):
        lease, _ = cache.take(KEY, SIZE)
        lease.tensor.fill_(5)
        lease.transfer = EndsNow(LateCopies.late.record(), CPU)
        cache.put(KEY, SIZE)
        cache.check()
        assert metrics.writes == 1 and value_of(cache, 0) == 5


@pytest.mark.parametrize("stored", [True, False])
def test_a_record_that_is_discarded_is_not_written(nvme_path: Path, stored: bool) -> None:
    with records(nvme_path, stored) as (cache, pool, metrics):
        put(cache, DeviceCopies(CPU), 0, 5)
        cache.discard(KEY)
        LateCopies.synchronize()
        cache.flush()
        assert metrics.writes == 0 and pool.used_bytes == 0
        lease, there = cache.take(KEY, SIZE)
        assert not there
        cache.release(KEY)
        lease.release()


@pytest.mark.parametrize("stored", [True, False])
def test_a_copy_that_failed_is_raised_by_every_call(nvme_path: Path, stored: bool) -> None:
    with records(nvme_path, stored) as (cache, pool, metrics):
        put(cache, DeviceCopies(CPU), 0, 5)
        LateCopies.broken = True
        for call in (cache.check, cache.flush, lambda: cache.take(KEY, SIZE), cache.check):
            with pytest.raises(SwapIOError, match="illegal memory access"):
                call()
        assert cache._reclaim() is False
        cache.discard(KEY)
        with pytest.raises(SwapIOError, match="illegal memory access"):  # What else it has done is not sure either.
            cache.check()
        assert metrics.writes == 0 and pool.used_bytes == 0


def test_a_write_that_cannot_be_started_is_tried_again(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with records(nvme_path) as (cache, _, metrics):
        copies = DeviceCopies(CPU)
        put(cache, copies, 0, 5)
        put(cache, copies, 1, 6)
        LateCopies.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(TensorStore, "write", failing(TensorStore.write, 1))
            with pytest.raises(SwapIOError, match="it fails"):
                cache.check()
        assert metrics.writes == 1
        assert [value_of(cache, number) for number in range(2)] == [5, 6]


def test_what_is_taken_and_not_put_is_the_pools_after_the_copy(nvme_path: Path) -> None:
    with records(nvme_path) as (cache, pool, _):
        lease, _ = cache.take(KEY, SIZE)
        lease.transfer = DeviceCopies(CPU).copy(lease.tensor, torch.ones(SIZE, dtype=torch.uint8))
        cache.recover()
        assert pool.used_bytes == SIZE
        LateCopies.synchronize()
        assert pool.used_bytes == 0


# --- The copies themselves --------------------------------------------------------------------------------------------


def test_a_copy_keeps_its_tensors_and_is_ordered() -> None:
    copies = DeviceCopies(CPU)
    copies.join()
    copies.wait()  # There are none.
    target, source = torch.zeros(5), torch.arange(5.0)
    LateCopies.late.push(lambda: source.mul_(2))
    copies.begin()
    copy = copies.copy(target, source)
    assert copy is not None and not copy.done()
    assert LateCopies.kept == [target.data_ptr(), source.data_ptr()]
    assert torch.equal(target, torch.zeros(5))
    copies.join()
    assert torch.equal(target, 2 * torch.arange(5.0)) and copy.done() and copy.wait() == 0


def test_work_that_cannot_be_marked_is_waited_for() -> None:
    copies, target = DeviceCopies(CPU), torch.zeros(5)
    LateCopies.fail_in = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        copies.copy(target, torch.ones(5))
    assert bool(target.eq(1).all())


def test_a_device_that_failed_says_so() -> None:
    copy = DeviceCopies(CPU).copy(torch.zeros(5), torch.ones(5))
    assert isinstance(copy, Copy)
    LateCopies.broken = True
    assert copy.done()
    copy.wait_quietly()
    with pytest.raises(SwapIOError, match="between the device and the host: CUDA error: an illegal memory access"):
        copy.wait()


@pytest.mark.parametrize("met_by", ["done", "wait_quietly", "wait"])
def test_a_device_that_says_once_that_it_failed_is_not_waited_for_without_an_error_again(
    met_by: str, nvme_path: Path
) -> None:
    """It says so to somebody who waits for something else, and perhaps nobody asks that one."""

    class Once:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    copies = DeviceCopies(CPU)
    other = copies.copy(torch.zeros(5), torch.ones(5))
    assert other is not None
    with contextlib.suppress(SwapIOError):
        getattr(Copy(Once(), CPU), met_by)()
    assert other.event.query() is False
    with records(nvme_path) as (cache, _, _):
        later = DeviceCopies(CPU).copy(torch.zeros(5), torch.ones(5))
        assert later is not None
        for call in (other.wait, copies.wait, later.wait, cache.check, cache.flush):
            with pytest.raises(SwapIOError, match="illegal memory access"):
                call()


def test_an_allocator_that_may_know_nothing_of_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record_stream` is what keeps memory for copies, and does nothing there."""
    for backend in ("native", "cudaMallocAsync"):
        monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda name=backend: name, raising=False)
        DeviceCopies(torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "pluggable", raising=False)
    with pytest.raises(ConfigError, match="pluggable allocator"):
        DeviceCopies(torch.device("cuda"))


def test_on_the_cpu_copies_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(devices.DEVICES, "cpu")
    copies, target = DeviceCopies(CPU), torch.zeros(5)
    copies.begin()
    assert copies.copy(target, torch.arange(5.0)) is None
    assert torch.equal(target, torch.arange(5.0))
    copies.join()
    copies.wait()


@pytest.mark.parametrize("what", ["copy", "model"])
def test_ctrl_c_leaves_a_thread_on_its_own_stream(monkeypatch: pytest.MonkeyPatch, nvme_path: Path, what: str) -> None:
    """What torch.cuda selects a stream with is Python code, which leaves it selected if Ctrl-C strikes at its end."""
    sim_device = simulate("sim-random", monkeypatch)
    own = torch.accelerator.current_stream()
    copies, source = DeviceCopies(torch.device("sim", 0)), torch.ones(100, device="sim")
    target = torch.zeros(100).pin_memory()
    call: Callable[[], object] = lambda: copies.copy(target, source)  # noqa: E731
    if what == "model":
        layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))).to("sim")
        config = {"nvme_path": nvme_path, "pool_bytes": "4MiB", "offload_param": {"device": "nvme"}}
        model, _ = swapper.offload(layers, config=swapper.OffloadConfig(**config))
        call = lambda: model(torch.ones(2, 128, device="sim"))  # noqa: E731
    for n in itertools.count():
        struck = interrupted_at(n, call, "io/devices.py", "/sim_device.py")
        assert torch.accelerator.current_stream() == own, f"Ctrl-C at place {n}"
        if not struck:
            break
    assert n > 10
    torch.accelerator.synchronize()
    assert sim_device.violations() == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_a_gpu_are_ordered_by_begin_and_join() -> None:
    copies = DeviceCopies(torch.device("cuda"))
    host = torch.zeros(1 << 22, pin_memory=True)
    for turn in range(20):
        source = torch.full((1 << 22,), float(turn), device="cuda")
        copies.begin()
        copy = copies.copy(host, source)
        del source  # Its memory is not given to anybody before.
        torch.full((1 << 22,), -1.0, device="cuda")
        assert copy is not None
        copy.wait()
        assert torch.equal(host, torch.full_like(host, float(turn)))
        target = torch.empty(1 << 22, device="cuda")
        copies.begin()
        copies.copy(target, host)
        copies.join()
        assert torch.equal(target.cpu(), host)


# --- Page-locked memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_the_ring_is_unlocked_before_it_is_unmapped(refused: bool) -> None:
    """Also if unlocking fails, which is raised."""
    rings: list[StorageWeakRef] = []

    def allocate(length_bytes: int) -> torch.Tensor:
        memory = torch.zeros(length_bytes, dtype=torch.uint8)
        rings.append(StorageWeakRef(memory.untyped_storage()))
        return memory

    def unlocked(address: int) -> None:
        assert not rings[0].expired()
        if refused:
            raise RuntimeError("refused")

    LateCopies.when_unlocked = unlocked
    mover = Bounce(allocate, 1)
    mover._ring_for(LateCopies(CPU))
    assert LateCopies.locked
    with pytest.raises(RuntimeError, match="refused") if refused else contextlib.nullcontext():
        mover.close(lambda: None)
    assert rings[0].expired() and mover.close(lambda: None)
    LateCopies.locked.clear()


@pytest.mark.parametrize("how", ["close", "collected"])
def test_a_pool_is_unlocked_when_its_copies_are_over_and_before_it_is_unmapped(how: str) -> None:
    pool = BufferPool(MIB, device=CPU)
    memory = StorageWeakRef(pool._memory.untyped_storage())
    assert list(LateCopies.locked) == [pool._slab.address]
    target = torch.zeros(MIB, dtype=torch.uint8)
    lease = pool.acquire(MIB)
    lease.tensor.fill_(5)
    source = lease.tensor.numpy().copy()
    lease.transfer = DeviceCopies(CPU).copy(target, torch.from_numpy(source))
    lease.release()
    seen = []
    LateCopies.when_unlocked = lambda _: seen.append((bool(target.eq(5).all()), memory.expired()))
    if how == "close":
        pool.close()
    del pool, lease
    assert seen == [(True, how == "collected")] or seen == [(True, False)]
    assert not LateCopies.locked


def test_a_pool_is_unlocked_whatever_else_fails(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncIOHandle() as handle:
        pool = BufferPool(MIB, handle, device=CPU)
        monkeypatch.setattr(type(handle), "unregister", failing(type(handle).unregister, 1))
        with pytest.raises(SwapIOError, match="it fails"):
            pool.close()
        assert not LateCopies.locked


@pytest.mark.parametrize("later", ["optimizer", "gradients"])
@pytest.mark.parametrize("first_is_on", ["cpu", "device"])
def test_a_shared_pool_is_locked_for_whoever_needs_it(
    nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, first_is_on: str, later: str
) -> None:
    """The pool of one config object is locked once, by the first optimizer with parameters on a device."""
    kinds: dict[str, Any] = {"offload_gradient": {"device": "cpu"}} if later == "gradients" else {}
    settings = make_config(nvme_path, **kinds)
    optimizers: list[Optimizer] = []
    for on in (first_is_on, "device" if first_is_on == "cpu" else "cpu", "device"):
        with monkeypatch.context() as patch:
            if on == "cpu":
                patch.delitem(devices.DEVICES, "cpu")
            optimizers.append(swapper.wrap_optimizer(torch.optim.AdamW(make_model().parameters()), settings))
            pool = swapper.of(optimizers[0])._pool
            assert all(swapper.of(optimizer)._pool is pool for optimizer in optimizers)
            assert list(LateCopies.locked) == ([] if on == first_is_on == "cpu" else [pool._slab.address])
    for optimizer in reversed(optimizers):
        assert LateCopies.locked
        swapper.of(optimizer).close()
    assert not LateCopies.locked


def test_a_pool_that_cannot_be_locked_later_is_left_as_it_was(
    nvme_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_config(nvme_path)
    with monkeypatch.context() as patch:
        patch.delitem(devices.DEVICES, "cpu")
        first = swapper.wrap_optimizer(torch.optim.AdamW(make_model().parameters()), settings)
    LateCopies.refuse_lock = True
    second = torch.optim.AdamW(make_model().parameters())
    with pytest.raises(SwapError, match="cudaHostRegister failed"):
        swapper.wrap_optimizer(second, settings)
    assert not hasattr(second, "swapper")
    swapper.of(first).close()
    assert Shared.existing(settings) is None
    with pytest.raises(SwapError, match="cudaHostRegister failed"):
        swapper.wrap_optimizer(second, settings)
    assert Shared.existing(settings) is None


def test_each_type_of_device_locks_the_pool_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices of a type at once; another type in addition."""
    others: dict[int, int] = {}

    class Others(LateCopies):
        def page_lock(self, address: int, length_bytes: int) -> None:
            assert address not in others
            others[address] = length_bytes

        def page_unlock(self, address: int) -> None:
            del others[address]

    monkeypatch.setitem(devices.DEVICES, "meta", Others)
    with BufferPool(MIB) as pool:
        for device in ("cpu", "meta", "meta:1", "cpu:0"):
            pool.lock_for(torch.device(device))
        assert len(LateCopies.locked) == len(others) == 1
    assert not LateCopies.locked and not others
