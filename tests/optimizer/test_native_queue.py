"""Native steps of several buckets at once, while the next ones are opened: the same bits, and nothing is let go of."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import swapper
from swapper.io import _native
from swapper.optimizer import native_queue, records, step_program
from swapper.optimizer.operands import Scratch, ScratchFull
from swapper.storage.buffers import BufferPool
from swapper.storage.cached_records import RecordState

SHAPES = [(300, 41), (64,), (3,), (5000,), (37, 129), (), (70001,), (0,), (260, 64), (1 << 15,)]


def wrapped(optimizer: Optimizer, native: str, **sections: Any) -> Optimizer:
    offload = {"device": "cpu", "master_weights": True, "native_step": native, **sections.pop("offload_optimizer", {})}
    config = swapper.OffloadConfig(
        **{"pool_bytes": "16MiB", "bucket_bytes": "64KiB", "offload_optimizer": offload, **sections}
    )
    return swapper.wrap_optimizer(optimizer, config)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each run that has begun, how many segments it steps."""
    counts = []

    def counted(steps: Sequence[Any], threads: int) -> step_program.NativeRun:
        counts.append(len(steps))
        return step_program.NativeRun(steps, threads)

    monkeypatch.setattr(native_queue, "NativeRun", counted)
    return counts


def ends_of(
    make: Callable[[list[nn.Parameter]], Optimizer], dtype: torch.dtype, native: str, **sections: Any
) -> tuple[list[torch.Tensor], dict[int, dict[str, Any]]]:
    """Parameters and state after six steps; one parameter is edited, one has no gradient in one of them."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = wrapped(make(parameters), native, **sections)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for i, p in enumerate(parameters):
            gradient = torch.randn(p.shape, generator=generator).to(dtype)
            p.grad = None if (i, step) == (4, 3) else gradient
        if step == 4:
            parameters[6].data[60000] = 1.0  # Not in the first of its segments.
        optimizer.step()
    assert swapper.of(optimizer).stats().masters_reset == 1
    state = copy.deepcopy(optimizer.state_dict()["state"])
    swapper.of(optimizer).close()
    return [p.detach().clone() for p in parameters], state


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def in_groups(parameters: list[nn.Parameter]) -> Optimizer:
    """Of two programs, and one that steps by itself, as a class with a tensor for its learning rate."""
    groups = [{"params": parameters[i::3], "weight_decay": 0.1 * i} for i in range(3)]
    groups[1]["amsgrad"] = True
    return torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize("together", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("make", [adamw, sgd, in_groups])
def test_what_is_stepped_together_has_the_bits_of_the_class(
    make: Callable[[list[nn.Parameter]], Optimizer],
    dtype: torch.dtype,
    together: int,
    begun: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_queue, "_NUMEL_TOGETHER", together)
    mine, my_state = ends_of(make, dtype, "on")
    if dtype is torch.bfloat16 and (_native.has_vendor_sqrt() or make is sgd):  # Half gradients are widened in scratch.
        assert begun
        assert max(begun) > 1 or together == 1
    begun.clear()
    others, other_state = ends_of(make, dtype, "off")
    assert not begun
    torch.testing.assert_close(mine, others, rtol=0, atol=0)
    torch.testing.assert_close(my_state, other_state, rtol=0, atol=0)


@pytest.mark.parametrize("encoding", ["exact", "bf16", "int8"])
@pytest.mark.parametrize(("resident_bytes", "pool_bytes"), [("0", "1536KiB"), ("1MiB", "1536KiB"), ("0", "16MiB")])
def test_records_that_come_from_a_drive(
    encoding: str,
    resident_bytes: str,
    pool_bytes: str,
    nvme_path: Path,
    begun: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not at hand is waited for when all that is queued is done: a pool of the least size is enough.

    And not more is held, whatever the pool has room for: another optimizer may step, in another thread.
    """
    take, held = records.BucketRecords.take_at_hand, []

    def taking(self: records.BucketRecords, bucket: Any) -> records.OpenBucket | None:
        opened = take(self, bucket)
        held.append(self.cache.records.bytes_of(RecordState.LIVE))
        return opened

    monkeypatch.setattr(records.BucketRecords, "take_at_hand", taking)
    monkeypatch.setattr(native_queue, "_NUMEL_TOGETHER", 20_000)
    sections: dict[str, Any] = {
        "nvme_path": str(nvme_path),
        "offload_optimizer": {"device": "nvme", "encoding": encoding, "resident_bytes": resident_bytes},
        "pool_bytes": pool_bytes,
    }
    mine, my_state = ends_of(sgd, torch.bfloat16, "on", **sections)
    assert begun
    assert 0 < max(held) <= 2 * (64 << 10)
    others, other_state = ends_of(sgd, torch.bfloat16, "off", **sections)
    torch.testing.assert_close(mine, others, rtol=0, atol=0)
    torch.testing.assert_close(my_state, other_state, rtol=0, atol=0)


def test_parameters_of_different_buckets_that_share_memory_are_stepped_one_after_the_other(begun: list[int]) -> None:
    ends = []
    for native in ("on", "off", None):
        torch.manual_seed(0)
        memory = torch.randn(1 << 16)
        parameters = [nn.Parameter(memory[: 1 << 15]), nn.Parameter(torch.randn(1 << 17)), nn.Parameter(memory[9000:])]
        optimizer: Optimizer = torch.optim.AdamW(parameters, lr=0.1)
        if native is not None:
            optimizer = wrapped(optimizer, native, offload_optimizer={"master_weights": False})
        for _ in range(4):
            for p in parameters:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        ends.append([p.detach().clone() for p in parameters])
        if native is not None:
            swapper.of(optimizer).close()
    assert not begun
    torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=0)
    torch.testing.assert_close(ends[1], ends[2], rtol=0, atol=0)


def test_buffers_that_are_stepped_are_nobody_elses_when_the_step_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is waited for before its records are given back, and the user is told what to load."""
    events = []

    class Run(step_program.NativeRun):
        def wait(self) -> list[tuple[int, int]]:
            found = super().wait()
            events.append("wait")
            return found

    p = nn.Parameter(torch.randn(1 << 17).bfloat16())
    optimizer = wrapped(sgd([p]), "on")
    p.grad = torch.ones_like(p)
    optimizer.step()
    values, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(native_queue, "_NUMEL_TOGETHER", 1)
    monkeypatch.setattr(native_queue, "NativeRun", Run)
    take, release = records.BucketRecords.take_at_hand, records.BucketRecords.release_live
    taken: list[records.OpenBucket | None] = []

    def taking(self: records.BucketRecords, bucket: Any) -> records.OpenBucket | None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(take(self, bucket))
        return taken[-1]

    def releasing(self: records.BucketRecords) -> None:
        events.append("release")
        release(self)

    with monkeypatch.context() as patched:
        patched.setattr(records.BucketRecords, "take_at_hand", taking)
        patched.setattr(records.BucketRecords, "recover", releasing)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert len(taken) == 2
    assert events[-2:] == ["wait", "release"]
    with pytest.raises(swapper.errors.SwapError, match="failed after 1 of"):
        optimizer.step()
    with torch.no_grad():
        p.copy_(values)
    optimizer.load_state_dict(state)
    optimizer.step()
    plain = nn.Parameter(values.clone())
    reference = wrapped(sgd([plain]), "off")
    reference.load_state_dict(state)
    plain.grad = p.grad
    reference.step()
    torch.testing.assert_close(p, plain, rtol=0, atol=0)
    for each in (optimizer, reference):
        swapper.of(each).close()


def test_what_runs_keeps_its_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient with other strides the core reads a copy, which only the queue has: it stays until that is over."""
    alive = []

    class Run(step_program.NativeRun):
        def __init__(self, steps: Sequence[Any], threads: int) -> None:
            self.copies = [weakref.ref(segment.gradient) for _, segment in steps]
            super().__init__(steps, threads)

        def wait(self) -> list[tuple[int, int]]:
            found = super().wait()
            alive.append(all(each() is not None for each in self.copies))
            return found

    parameters = [nn.Parameter(torch.randn(96, 80).bfloat16()) for _ in range(9)]
    optimizer = wrapped(sgd(parameters), "on")
    for p in parameters:
        p.grad = torch.randn(80, 96).bfloat16().t()
    optimizer.step()
    monkeypatch.setattr(native_queue, "_NUMEL_TOGETHER", 1)
    monkeypatch.setattr(native_queue, "NativeRun", Run)
    take, taken = records.BucketRecords.take_at_hand, []

    def taking(self: records.BucketRecords, bucket: Any) -> records.OpenBucket | None:
        taken.append(bucket)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return take(self, bucket)

    monkeypatch.setattr(records.BucketRecords, "take_at_hand", taking)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert alive[:2] == [True, True]
    swapper.of(optimizer).close()


class Nothing:
    def do(self, _: object) -> None:
        """Do it."""


def test_what_was_taken_for_a_bucket_that_is_not_queued_is_given_back() -> None:
    with BufferPool(1 << 20) as pool, pool.acquire(4096) as lease:
        nothing = Nothing()
        queue, whole = native_queue.NativeQueue(nothing.do, nothing.do), Scratch(lease)
        first = queue.scratch(whole).take_bytes(2048)
        with pytest.raises(ScratchFull):
            queue.scratch(whole).take_bytes(64)
        queue.flush()
        assert queue.scratch(whole).take_bytes(64) == first


def test_the_halves_of_scratch_end_where_the_other_begins() -> None:
    with BufferPool(1 << 20) as pool:
        lease = pool.acquire(8192 + 64)
        first, second = Scratch(lease).halves()
        addresses = [first.take_bytes(4000), first.take_bytes(64), second.take_bytes(4000), second.take_bytes(100)]
        assert [address - addresses[0] for address in addresses] == [0, 4032, 4096, 8128]
        for half in (first, second):
            with pytest.raises(ScratchFull):
                half.take(9, torch.float64)
        first.reset()
        assert first.take_bytes(4096) == addresses[0]
        lease.release()
