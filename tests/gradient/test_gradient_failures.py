"""Whatever fails while gradients move: an error that says so, and never a wrong gradient."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_twins import (
    Twin,
    adamw,
    assert_same,
    assert_same_gradients,
    batches,
    gradients,
    gradients_of,
    make_config,
    wrapped,
)
from interrupts import interrupted_at
from sampling import places
from still_drive import still
from torch import nn
from training import same_bits

import swapper
from swapper import SwapError, SwapIOError
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.storage.cache import RecordCache
from swapper.storage.store import RecordKey
from swapper.tensors.evicted_gradients import raw_gradient

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultPlan:
    """The faults of every engine that is made after it."""
    plan = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    return plan


FILES = ("gradient/swapper.py", "gradient/evicted.py", "gradient/copies.py", "gradient/rounding.py")
"""Ctrl-C strikes in these."""


def recover(twin: Twin) -> None:
    """After zero_grad all is well."""
    twin.optimizer.zero_grad()
    twin.reference.zero_grad()
    for net in twin.nets:
        net.count = 0
    twin.backward()
    twin.finish()


def backward_of_swapped(twin: Twin) -> torch.Tensor:
    """Of the swapped net alone; gives the input, for the other."""
    x = next(twin.data)
    twin.swapped(x).backward()
    return x


@pytest.mark.parametrize("seed", range(4))
def test_delays_short_transfers_retries_and_other_orders_change_no_bit(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    plan = FaultPlan(seed=seed, short=0.3, eintr=0.1, eagain=0.1, delay_us=1000, reorder=True)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    with Twin(nvme_path, 2, pool_bytes="1536KiB") as twin:
        for _ in range(3):
            twin.backward()
            twin.backward()
            expected = torch.nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1)
            assert torch.equal(twin.swapper.clip_grad_norm_(0.1), expected)
            twin.step()
            assert_same(twin.plain, twin.swapped)
            twin.reference.zero_grad()
            twin.optimizer.zero_grad()
        twin.backward()
        twin.finish()


def count_of_right_ones(twin: Twin) -> int:
    """How many gradients there are; each is that of the plain net, or its use raises what failed."""
    count = 0
    for (name, p), q in zip(twin.plain.named_parameters(), twin.swapped.parameters(), strict=True):
        if q.grad is None:
            continue
        assert p.grad is not None, name
        try:
            assert same_bits(q.grad.clone().contiguous(), p.grad.contiguous()), name
        except SwapIOError:
            continue
        count += 1
    return count


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("at", [1, 3, 9])
def test_a_write_that_fails_is_raised_and_no_gradient_is_wrong(
    nvme_path: Path, faults: FaultPlan, number: int, at: int
) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.step()
        recover(twin)
        twin.swapper.flush()
        twin.optimizer.zero_grad()
        twin.reference.zero_grad()
        x = next(twin.data)
        twin.plain(x).backward()
        faults.fail_errno, faults.fail_write_at = number, at
        with pytest.raises(SwapIOError) as raised:  # In this backward, or by the next call.
            twin.swapped(x).backward()
            twin.swapper.flush()
        assert raised.value.errno == number and "grad" in str(raised.value)
        assert count_of_right_ones(twin) > 0
        assert_same(twin.plain, twin.swapped)
        recover(twin)


def test_a_gradient_whose_write_failed_raises_until_it_is_cleared(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = FaultPlan()
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=faults))
    first, last = (nn.Parameter(torch.ones(8192)) for _ in range(2))
    optimizer = torch.optim.SGD([first, last], lr=0.5)
    with wrapped(optimizer, make_config(nvme_path)) as handle:
        faults.fail_write_at = 1
        with still(faults):  # Where it was started, it is not seen: there the gradient would still be in memory.
            (first * 2).sum().backward()
        with pytest.raises(SwapIOError):
            handle.flush()
        for use in (
            handle.flush,
            optimizer.step,
            lambda: handle.clip_grad_norm_(1.0),
            lambda: (last * 2).sum().backward(),
            lambda: first.grad.sum(),  # type: ignore[union-attr]
            lambda: swapper.unwrap_optimizer(optimizer),
        ):
            with pytest.raises(SwapIOError, match="grad"):
                use()
        assert torch.equal(last.grad, torch.full((8192,), 2.0))  # type: ignore[arg-type]
        first.grad = None
        optimizer.step()
        assert torch.equal(first.detach(), torch.ones(8192)) and torch.equal(last.detach(), torch.zeros(8192))


@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "zeros"])
def test_gradients_are_cleared_though_that_of_another_could_not_be_written(
    nvme_path: Path, faults: FaultPlan, set_to_none: bool
) -> None:
    """Also one that is cleared first, and has arrived in a backward that was cut off before it was taken."""
    first, last = (nn.Parameter(torch.ones(8192)) for _ in range(2))
    fails: list[bool] = []

    def cut_off(_: torch.Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    first.register_post_accumulate_grad_hook(cut_off)
    optimizer = torch.optim.SGD([first, last], lr=0.5)
    with wrapped(optimizer, make_config(nvme_path, gradient_accumulation_steps=2)) as handle:
        (first + last).sum().backward()
        handle.flush()
        faults.fail_write_at = 1
        with pytest.raises(SwapIOError, match="grad"):
            (last * 2).sum().backward()
            handle.flush()
        fails.append(True)
        with pytest.raises(ZeroDivisionError):
            (first * 2).sum().backward()
        fails.clear()
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            (first + last * 2).sum().backward()
        optimizer.step()
        assert torch.equal(first.detach(), torch.zeros(8192)) and torch.equal(last.detach(), torch.full((8192,), -1.0))


def test_a_write_that_fails_unseen_is_raised_by_the_step(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path) as twin:
        x = next(twin.data)
        twin.plain(x).backward()
        faults.fail_write_at = 2
        with pytest.raises(SwapIOError):
            twin.swapped(x).backward()
            twin.optimizer.step()
        assert count_of_right_ones(twin) > 0
        assert_same(twin.plain, twin.swapped)
        recover(twin)


def test_a_sum_that_cannot_be_read_is_lost_until_it_is_cleared(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path, 2) as twin:
        twin.backward()
        twin.swapper.flush()
        faults.fail_read_at = 1
        with pytest.raises(SwapIOError):
            backward_of_swapped(twin)
        lost = [known for known in gradients_of(twin.optimizer)._gradients.values() if known.why]
        assert len(lost) == 1
        p = lost[0].parameter()
        assert p is not None and p.grad is not None and p.grad.shape == p.shape
        for use in (
            lambda: p.grad.sum(),
            twin.optimizer.step,
            lambda: twin.swapper.clip_grad_norm_(1.0),
            lambda: backward_of_swapped(twin),
            lambda: swapper.unwrap_optimizer(twin.optimizer),
        ):
            with pytest.raises(SwapError, match="lost when changing it was cut off"):
                use()
        assert_same(twin.plain, twin.swapped)
        recover(twin)


def test_a_gradient_that_cannot_be_read_for_its_user_is_read_again(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.swapper.flush()
        gradient = twin.swapped.long.weight.grad
        assert gradient is not None
        faults.fail_read_at = 1
        with pytest.raises(SwapIOError):
            gradient.sum()
        assert torch.equal(gradient, twin.plain.long.weight.grad)  # type: ignore[arg-type]
        twin.finish()


def test_a_read_that_fails_in_a_step(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        twin.swapper.flush()
        faults.fail_read_at = 1  # There is no state yet, so it is a gradient's.
        with pytest.raises(SwapIOError, match="grad"):
            twin.optimizer.step()
        assert_same(twin.plain, twin.swapped)
        twin.finish()


# --- Cut off ---------------------------------------------------------------------------------------------------------


class Interruption:
    """Raises Ctrl-C at the n-th call of one of the cache's methods for gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, at: int, *, after: bool) -> None:
        original = getattr(RecordCache, method)
        self.left = at

        def interrupted(cache: RecordCache, key: RecordKey, *args: Any, **options: Any) -> Any:
            if key.kind != "grad":
                return original(cache, key, *args, **options)
            self.left -= 1
            if self.left == 0 and not after:
                raise KeyboardInterrupt
            result = original(cache, key, *args, **options)
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(RecordCache, method, interrupted)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["take", "put"])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_ctrl_c_in_the_first_micro_batch_leaves_each_gradient_whole(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, at: int, after: bool
) -> None:
    with Twin(nvme_path) as twin:
        x = next(twin.data)
        twin.plain(x).backward()
        with monkeypatch.context() as patch:
            Interruption(patch, method, at, after=after)
            with pytest.raises(KeyboardInterrupt):
                twin.swapped(x).backward()
        arrived = 0
        for p, q in zip(twin.plain.parameters(), twin.swapped.parameters(), strict=True):
            if q.grad is not None:
                arrived += 1
                assert p.grad is not None
                assert torch.equal(q.grad.clone(), p.grad)
        assert arrived > 0
        recover(twin)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", ["take", "put"])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_ctrl_c_in_a_later_micro_batch_loses_one_gradient_and_says_so(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, at: int, after: bool
) -> None:
    with Twin(nvme_path, 2) as twin:
        twin.backward()
        with monkeypatch.context() as patch:
            Interruption(patch, method, at, after=after)
            with pytest.raises(KeyboardInterrupt):
                backward_of_swapped(twin)
        lost = [known for known in gradients_of(twin.optimizer)._gradients.values() if known.why]
        assert len(lost) == 1
        with pytest.raises(SwapError, match="KeyboardInterrupt"):
            twin.optimizer.step()
        assert_same(twin.plain, twin.swapped)
        recover(twin)


def lost_now(p: nn.Parameter) -> bool:
    """Whether the gradient says so itself; None is none that is lost."""
    try:
        if p.grad is not None:
            p.grad.sum()
    except SwapError as error:
        assert "lost when changing it was cut off" in str(error)
        return True
    return False


@pytest.mark.long
def test_ctrl_c_at_every_place_of_a_step_in_backward(nvme_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(40_000)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    state = {"device": "nvme", "step_in_backward": True}
    config = make_config(nvme_path, 2, bucket_bytes="96KiB", offload_optimizer=state)

    def backward(factor: float) -> None:
        torch.stack([(p * factor).sum() for p in parameters]).sum().backward()

    with wrapped(optimizer, config):
        for n in places(1, sample=5):
            with torch.no_grad():
                for p in parameters:
                    p.fill_(1.0)
            optimizer.load_state_dict(optimizer.state_dict())
            backward(3.0)
            interrupted = interrupted_at(n, functools.partial(backward, 2.0), *FILES)
            with contextlib.suppress(SwapError):
                optimizer.step()
            # Stepped on was the whole sum, or that of the first backward where the second did not arrive, or nothing.
            for p in parameters:
                assert set(p.tolist()) in (({1.0, -4.0}, {1.0}, {-2.0}, {-4.0}) if interrupted else ({-4.0},))
            swapper.of(optimizer).reset()
            optimizer.zero_grad()
            if not interrupted:
                break
        assert n > 50


OPERATIONS: dict[str, tuple[Callable[[Any, Any], object], set[float]]] = {
    "read": (lambda p, handle: p.grad.sum(), {3.0}),
    "held": (lambda p, handle: setattr(p, "grad", p.grad * 2), {3.0, 6.0}),
    "zero": (lambda p, handle: p.grad.zero_(), {3.0, 0.0}),
    "clear": (lambda p, handle: setattr(p, "grad", None), {3.0}),
    "clip": (lambda p, handle: handle.clip_grad_norm_(1.0, 1.0), {3.0, 0.5}),
}


@pytest.mark.parametrize("encoding", ["exact", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_ctrl_c_at_every_place_of_what_is_done_to_a_gradient(nvme_path: Path, name: str, encoding: str) -> None:
    p = nn.Parameter(torch.ones(32_768))
    optimizer = torch.optim.SGD([p], lr=0.0, momentum=0.9)
    operation, allowed = OPERATIONS[name]
    if name == "clip":
        allowed = {3.0, 3.0 * (1.0 / (3.0 * 32_768 + 1e-6))}
    gradient = {"device": "nvme", "encoding": encoding}
    with wrapped(optimizer, make_config(nvme_path, bucket_bytes="96KiB", offload_gradient=gradient)) as handle:
        for n in places(1, sample=5):
            (p * 3.0).sum().backward()
            interrupted = interrupted_at(n, lambda: operation(p, handle), *FILES)
            if not lost_now(p) and p.grad is not None:
                found = set(p.grad.tolist())
                assert len(found) == 1 and any(abs(found.copy().pop() - value) < 1e-9 for value in allowed), n
            else:
                assert interrupted or name == "clear"
            optimizer.zero_grad()
            assert p.grad is None
            if not interrupted:
                break
        assert n > 5


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["exact", "bf16"])
@pytest.mark.parametrize("earlier", [0.0, 3.0], ids=["the first", "a later micro-batch"])
def test_ctrl_c_at_every_place_leaves_no_wrong_gradient(nvme_path: Path, earlier: float, encoding: str) -> None:
    """All values are whole numbers, which bf16 can hold."""
    parameters = [nn.Parameter(torch.ones(40_000)) for _ in range(2)]  # Each of several parts.
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9)

    def backward(factor: float) -> None:
        torch.stack([(p * factor).sum() for p in parameters]).sum().backward()

    gradient = {"device": "nvme", "encoding": encoding}
    with wrapped(optimizer, make_config(nvme_path, bucket_bytes="96KiB", offload_gradient=gradient)) as handle:
        assert all(len(known.parts) > 1 for known in gradients_of(optimizer)._gradients.values())
        lost = 0
        for n in places(1, sample=5):
            if earlier:
                backward(earlier)
            interrupted = interrupted_at(n, functools.partial(backward, 2.0), *FILES)
            for p in parameters:
                try:
                    values = set() if p.grad is None else set(p.grad.clone().tolist())
                except SwapError as error:
                    assert "KeyboardInterrupt" in str(error) and earlier
                    lost += 1
                    continue
                assert values in (({earlier}, {earlier + 2}) if earlier else (set(), {2.0}))
                assert interrupted or values == {earlier + 2}
            if interrupted and all(isinstance(p.grad, torch.Tensor) and not lost_now(p) for p in parameters):
                before = [set(p.grad.clone().tolist()) for p in parameters]  # type: ignore[union-attr]
                backward(1.0)
                for p, values in zip(parameters, before, strict=True):
                    assert set(p.grad.clone().tolist()) == {value + 1 for value in values}  # type: ignore[union-attr]
            optimizer.zero_grad()
            assert all(p.grad is None and type(p) is nn.Parameter for p in parameters)
            if not interrupted:
                break
        assert n > 100 and (lost > 0) == bool(earlier)
        backward(1.0)
        optimizer.step()
        handle.flush()


def test_an_exception_in_a_backward_leaves_what_plain_pytorch_leaves(nvme_path: Path) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    with Twin(nvme_path, 2) as twin:
        twin.backward()
        hooks = [net.long.bias.register_hook(fail) for net in twin.nets]
        x = next(twin.data)
        for net in twin.nets:
            with pytest.raises(RuntimeError, match="on purpose"):
                net(x).backward()
        for hook in hooks:
            hook.remove()
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.backward()
        twin.finish()


# --- Several processes, of which this is the only one ---


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_where_gradients_are_taken_at_the_end_of_backward(nvme_path: Path) -> None:
    with Twin(nvme_path, 2) as twin:
        for _ in range(2):
            there: list[bool] = []
            hook = twin.swapped.long.weight.register_post_accumulate_grad_hook(
                lambda p, there=there: there.append(raw_gradient(p) is not None)  # type: ignore[arg-type, misc]
            )
            twin.backward()
            hook.remove()
            assert there == [True] and raw_gradient(twin.swapped.long.weight) is None
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.backward()
        held = [net.long.weight.grad for net in twin.nets]
        twin.backward()
        assert held[0] is not None and held[1] is not None and torch.equal(held[1], held[0])
        twin.finish()


@pytest.mark.usefixtures("group")
def test_a_write_that_fails_at_the_end_of_backward(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path, 2) as twin:
        twin.backward()
        twin.swapper.flush()
        faults.fail_write_at = 2
        with pytest.raises(SwapIOError):
            backward_of_swapped(twin)
            twin.swapper.flush()
        assert_same(twin.plain, twin.swapped)
        recover(twin)


@pytest.mark.usefixtures("group")
def test_a_read_that_fails_at_the_start_of_backward(nvme_path: Path, faults: FaultPlan) -> None:
    with Twin(nvme_path, 2) as twin:
        twin.backward()
        twin.swapper.flush()
        faults.fail_read_at = 2
        with pytest.raises(SwapIOError):
            backward_of_swapped(twin)
        twin.swapped.count = twin.plain.count
        assert_same_gradients(twin.swapped, gradients(twin.plain))
        twin.backward()
        twin.finish()


# --- Another process -------------------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], None]) -> str:
    """What `work` raises in a forked child, as text; "" for nothing."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(sender, text.encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with os.fdopen(receiver) as pipe:
        return pipe.read()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A child of a process whose kernels run on several threads has none of those."""
    torch.set_num_threads(1)
    yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_can_neither_read_nor_add_nor_harm(nvme_path: Path) -> None:
    with Twin(nvme_path) as twin:
        twin.backward()
        weight = twin.swapped.long.weight
        assert "forked process" in in_a_child(lambda: weight.grad.sum())  # type: ignore[union-attr, arg-type, return-value]
        assert "forked process" in in_a_child(lambda: twin.swapper.clip_grad_norm_(1.0) and None)
        assert "forked process" in in_a_child(lambda: twin.optimizer.step() and None)

        def forget() -> None:
            twin.swapped.zero_grad()
            assert weight.grad is None

        assert in_a_child(forget) == ""
        assert in_a_child(lambda: gradients_of(twin.optimizer).close()) == ""
        twin.finish()


def test_a_full_drive_is_refused_and_nothing_changed(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapper.storage.store import TensorStore

    def full(store: TensorStore, sizes: dict[RecordKey, int], **how: bool) -> None:
        if any(key.kind == "grad" for key in sizes):
            raise SwapIOError(errno.ENOSPC, "preallocate", nvme_path)
        plan(store, sizes, **how)

    plan = TensorStore.plan
    monkeypatch.setattr(TensorStore, "plan", full)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))
    optimizer = adamw(list(net.parameters()))
    with pytest.raises(SwapIOError):
        swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    assert not hasattr(optimizer, "swapper")
    net(next(batches(torch.float32))).sum().backward()
    assert raw_gradient(net[0].weight) is not None
    optimizer.step()
