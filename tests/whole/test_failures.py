"""Whatever fails, wherever: an error that says so, and never wrong bits."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_drives import mounted
from snapshots import STEPS, Snapshot, Training, make_config
from still_drive import still_at_write
from torch import nn
from training import MasterWeights, adamw, assert_same, assert_same_state, backward, make_model, run, same_bits

import swapper
from swapper.io.handle import AsyncIOHandle, FaultPlan
from swapper.optimizer.conversion import GuardedState

Inject = Callable[..., FaultPlan]
pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    def patch(**faults: object) -> FaultPlan:
        plan = FaultPlan(**faults)  # type: ignore[arg-type]
        monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
        return plan

    return patch


# --- What is no failure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{}, {"resident_bytes": "400KiB"}], ids=["all-moves", "some-resident"])
def test_delays_short_transfers_retries_and_other_orders_change_no_bit(
    nvme_path: Path, inject: Inject, plain: list[Snapshot], seed: int, settings: dict[str, object]
) -> None:
    inject(seed=seed, short=0.3, eintr=0.1, eagain=0.1, delay_us=2000, reorder=True)
    with Training(nvme_path, 0, **settings) as training:
        for step in range(STEPS):
            training.ends_in(plain[step + 1], range(step, step + 1))


@pytest.mark.parametrize("seed", range(3))
def test_the_same_with_master_weights(nvme_path: Path, inject: Inject, seed: int) -> None:
    inject(seed=seed, short=0.3, eintr=0.1, eagain=0.1, delay_us=2000, reorder=True)
    reference, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    run(reference, MasterWeights(list(reference.parameters()), lambda p: torch.optim.AdamW(p, lr=1e-2)))
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path, master_weights=True))
    run(model, optimizer)
    assert_same(reference, model)
    swapper.of(optimizer).close()


# --- In the middle of a run ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("slow", [0, 3000], ids=["fast", "slow"])
def test_a_failure_anywhere_never_gives_wrong_bits(
    nvme_path: Path, inject: Inject, plain: list[Snapshot], operation: str, slow: int
) -> None:
    """Go back to the last checkpoint after each failure, and do the rest of the run: it ends in the same bits."""
    failures, places = 0, range(1, 30, 4 if slow else 2)
    for n in places:
        number = errno.ENOSPC if n % 4 == 3 and operation == "write" else errno.EIO
        plan = inject(fail_errno=number, delay_us=slow, seed=n)
        with Training(nvme_path, 0) as training:
            setattr(plan, f"fail_{operation}_at", n)
            done = 0
            while done < STEPS:
                try:
                    run(training.model, training.optimizer, range(done, done + 1))
                    done += 1
                    if operation == "read":  # What is still being written is not.
                        training.swapper.flush()
                except swapper.SwapIOError as error:
                    failures += 1
                    assert error.errno == number and error.operation == operation
                    assert error.path.startswith(str(nvme_path)) and error.length_bytes > 0 <= error.offset_bytes
                    assert error.step == done
                    assert error.buckets_stepped is not None
                    training.model.zero_grad()
                    done = max(done - 2, 0)
                    training.load(plain[done])
            try:
                training.equals(plain[STEPS])
            except swapper.SwapIOError:  # A write of the last step.
                failures += 1
                training.load(plain[STEPS])
                training.equals(plain[STEPS])
    assert failures == len(places)


@pytest.mark.long
def test_a_read_failure_in_the_middle_of_a_step(nvme_path: Path, inject: Inject, plain: list[Snapshot]) -> None:
    plan = inject()
    with Training(nvme_path, 2) as training:
        buckets = sum(1 for bucket in training.swapper._plan.buckets if bucket.length_bytes)
        assert buckets >= 4
    seen = set()
    for n, model_first in itertools.product(range(1, buckets + 1), (False, True)):
        plan = inject()
        with Training(nvme_path, 2) as training:
            plan.fail_read_at = n
            backward(training.model, 2)
            with pytest.raises(swapper.SwapIOError) as caught:
                training.optimizer.step()
            error = caught.value
            assert (error.step, error.errno, error.operation) == (2, errno.EIO, "read")
            assert error.buckets_stepped is not None
            seen.add(error.buckets_stepped)
            if n == 1:
                assert error.buckets_stepped == 0
                training.optimizer.step()  # Nothing had been stepped, so nothing was lost.
                training.optimizer.zero_grad()
                training.equals(plain[3])
                continue
            assert error.buckets_stepped > 0
            training.refuses()
            parts = [
                lambda: training.optimizer.load_state_dict(plain[2].optimizer),
                lambda: training.model.load_state_dict(plain[2].model),
            ]
            if model_first:
                parts.reverse()
            parts[0]()
            training.refuses()
            parts[1]()
            training.optimizer.zero_grad()
            training.ends_in(plain[STEPS], range(2, STEPS))
    assert len(seen) >= buckets - 1


@pytest.mark.parametrize("in_group", [False, True])
def test_a_parameter_that_is_gone_is_not_asked_to_be_loaded(nvme_path: Path, inject: Inject, in_group: bool) -> None:
    """Another took its place in the model, but its bucket is still there, or it is in its group, without a gradient."""
    plan = inject()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))

    def step() -> list[torch.Tensor]:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    step()
    former = model[1].bias
    params = optimizer.param_groups[0]["params"]
    number = next(i for i, p in enumerate(params) if p is former)
    model[1].bias = nn.Parameter(torch.full_like(former, 0.5))
    if in_group:
        optimizer.add_param_group({"params": [model[1].bias]})
    else:
        params[number] = model[1].bias
    step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = plan.reads
    expected = step()
    swapper.of(optimizer).flush()
    plan.fail_read_at = plan.reads - before  # The last one of a step: all else is stepped.
    with pytest.raises(OSError, match="read of"):
        step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    assert all(same_bits(p, q) for p, q in zip(step(), expected, strict=True))
    assert former.shape == (128,)  # It was alive all the while.
    swapper.of(optimizer).close()


def use_step(training: Training) -> None:
    backward(training.model, 3)
    training.optimizer.step()


USES: dict[str, Callable[[Training], object]] = {
    "step": use_step,
    "state_dict": lambda training: training.optimizer.state_dict(),
    "flush": lambda training: training.swapper.flush(),
    "close": lambda training: training.swapper.close(),
    "unwrap": lambda training: swapper.unwrap_optimizer(training.optimizer),
    "state": lambda training: [training.swapper.state(p) for p in training.model.parameters()],
}


@pytest.mark.parametrize("use", USES)
def test_a_write_that_fails_later_is_raised_by_the_next_call(
    nvme_path: Path, inject: Inject, plain: list[Snapshot], use: str
) -> None:
    plan = inject()
    with Training(nvme_path, 2) as training:
        before, records = plan.writes, training.swapper.stats().writes
        run(training.model, training.optimizer, range(2, 3))
        training.swapper.flush()
        writes, records = plan.writes - before, training.swapper.stats().writes - records
    plan = inject(fail_errno=errno.ENOSPC)
    with Training(nvme_path, 2) as training:
        plan.fail_write_at = writes
        assert training.swapper.store is not None
        with still_at_write(records, training.swapper.store, plan):
            run(training.model, training.optimizer, range(2, 3))
        assert training.swapper.stats().steps == 3
        with pytest.raises(swapper.SwapIOError) as caught:
            USES[use](training)
        assert caught.value.errno == errno.ENOSPC and caught.value.operation == "write"
        assert "nvme_path" in str(caught.value)
        if use == "close":
            assert not list(nvme_path.iterdir())
            training.swapper.close()
            with pytest.raises(swapper.SwapError, match="closed"):
                training.optimizer.step()
            return
        if use != "step":
            with pytest.raises(swapper.SwapIOError):  # It stays lost.
                USES[use](training)
        training.optimizer.zero_grad()
        training.load(plain[3])
        training.ends_in(plain[STEPS], range(3, STEPS))


def test_a_late_failure_of_a_dying_optimizer_is_logged(
    nvme_path: Path, inject: Inject, caplog: pytest.LogCaptureFixture
) -> None:
    plan = inject()
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))
    run(model, optimizer, range(1))
    swapped = swapper.of(optimizer)
    swapped.flush()
    plan.fail_write_at = plan.writes  # The last of the next step.
    assert swapped.store is not None
    with still_at_write(swapped.stats().writes, swapped.store, plan):
        run(model, optimizer, range(1, 2))
    del optimizer
    assert any(record.levelname == "ERROR" for record in caplog.records)
    assert swapped.stats().late_failures == 1
    assert not list(nvme_path.iterdir())


def test_a_failed_optimizer_can_die(nvme_path: Path, inject: Inject) -> None:
    """The failure that is remembered must not keep the optimizer, its pool and its files."""
    plan = inject()
    model = make_model()
    optimizer = swapper.wrap_optimizer(adamw(model), make_config(nvme_path))
    run(model, optimizer, range(2))
    swapper.of(optimizer).flush()
    plan.fail_read_at = 3
    backward(model, 2)
    try:
        optimizer.step()
    except swapper.SwapIOError:
        pass
    else:
        pytest.fail("no failure")
    with pytest.raises(swapper.SwapError, match="refused"):
        optimizer.step()
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    assert not list(nvme_path.iterdir())


# --- State in and out ------------------------------------------------------------------------------------------------


def test_a_read_failure_in_state_dict_leaves_training_alone(
    nvme_path: Path, inject: Inject, plain: list[Snapshot]
) -> None:
    plan = inject()
    with Training(nvme_path, 2) as training:
        for n in itertools.count(1):
            training.swapper.flush()
            plan.fail_read_at = n
            try:
                state = training.optimizer.state_dict()
            except swapper.SwapIOError as error:
                assert error.errno == errno.EIO and error.operation == "read"
                continue
            break
        assert n > 4
        plan.fail_read_at = 0
        assert_same_state(plain[2].optimizer, state)
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_a_write_failure_in_load_state_dict(nvme_path: Path, inject: Inject, plain: list[Snapshot]) -> None:
    plan = inject()
    failures = 0
    for n, slow in itertools.product(range(1, 6), (0, 5000)):
        plan = inject(delay_us=slow)
        with Training(nvme_path, 1) as training:
            plan.fail_write_at = n
            training.model.load_state_dict(plain[3].model)
            try:
                training.optimizer.load_state_dict(plain[3].optimizer)
                training.swapper.flush()
            except swapper.SwapIOError as error:
                failures += 1
                assert error.errno == errno.EIO
                for use in (training.optimizer.step, training.optimizer.state_dict, training.swapper.unwrap):
                    backward(training.model, 3)
                    with pytest.raises(swapper.SwapError):
                        use()
                training.optimizer.zero_grad()
            plan.fail_write_at = 0
            training.load(plain[3])
            training.ends_in(plain[STEPS], range(3, STEPS))
    assert failures >= 8


def test_a_load_that_fails_does_not_excuse_the_parameters(
    nvme_path: Path, inject: Inject, plain: list[Snapshot]
) -> None:
    plan = inject()
    with Training(nvme_path, 2) as training:
        plan.fail_read_at = 3
        backward(training.model, 2)
        with pytest.raises(swapper.SwapIOError):
            training.optimizer.step()
        training.swapper.flush()  # Writes of the step that failed must not meet the fault meant for the load.
        plan.fail_write_at = 1
        with pytest.raises(swapper.SwapIOError):
            training.optimizer.load_state_dict(plain[2].optimizer)
            training.swapper.flush()
        training.refuses()
        training.optimizer.load_state_dict(plain[2].optimizer)
        training.refuses()
        training.model.load_state_dict(plain[2].model)
        training.optimizer.zero_grad()
        training.ends_in(plain[STEPS], range(2, STEPS))


@pytest.mark.parametrize("slow", [0, 5000], ids=["fast", "slow"])
def test_a_write_failure_while_wrapping_leaves_the_optimizer_plain(
    nvme_path: Path, inject: Inject, plain: list[Snapshot], slow: int
) -> None:
    model = make_model()
    optimizer = adamw(model)
    run(model, optimizer, range(2))
    before = {p: dict(entries) for p, entries in optimizer.state.items()}
    attributes = set(vars(optimizer))
    config = make_config(nvme_path)
    for n in itertools.count(1):
        plan = inject(delay_us=slow, fail_errno=errno.ENOSPC)
        plan.fail_write_at = n
        try:
            swapper.wrap_optimizer(optimizer, config)
        except swapper.SwapIOError as error:
            assert error.errno == errno.ENOSPC
        else:
            break
        assert set(vars(optimizer)) == attributes and type(optimizer) is torch.optim.AdamW
        assert optimizer.state.keys() == before.keys()
        assert all(optimizer.state[p][key] is value for p in before for key, value in before[p].items())
        assert not list(nvme_path.iterdir())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        if n == 2:
            assert_same_state(plain[2].optimizer, optimizer.state_dict())
            other = copy.deepcopy((model, optimizer))
            run(*other, range(2, STEPS))
            assert all(same_bits(p, plain[STEPS].model[name]) for name, p in other[0].named_parameters())
    assert n > 4
    plan.fail_write_at = 0
    run(model, optimizer, range(2, STEPS))
    assert all(same_bits(p, plain[STEPS].model[name]) for name, p in model.named_parameters())
    swapper.of(optimizer).close()


def test_a_read_failure_while_unwrapping_leaves_it_wrapped(
    nvme_path: Path, inject: Inject, plain: list[Snapshot]
) -> None:
    plan = inject()
    with Training(nvme_path, 2) as training:
        for n in range(1, 5):
            training.swapper.flush()
            plan.fail_read_at = n
            with pytest.raises(swapper.SwapIOError):
                swapper.unwrap_optimizer(training.optimizer)
            assert swapper.of(training.optimizer) is training.swapper
            assert isinstance(training.optimizer.state, GuardedState)
        training.ends_in(plain[3], range(2, 3))
        swapper.unwrap_optimizer(training.optimizer)
        assert not list(nvme_path.iterdir())
        training.ends_in(plain[STEPS], range(3, STEPS))


def test_a_state_dict_with_names_of_its_own(nvme_path: Path, plain: list[Snapshot]) -> None:
    """torch maps state to parameters by position in the saved groups, whatever they are called there."""
    saved = copy.deepcopy(plain[2].optimizer)
    saved["param_groups"][0]["params"] = [f"p{i}" for i in saved["param_groups"][0]["params"]]
    saved["state"] = {f"p{i}": entries for i, entries in saved["state"].items()}
    with Training(nvme_path, 1) as training:
        training.load(Snapshot(plain[2].model, saved))
        training.ends_in(plain[STEPS], range(2, STEPS))


# --- Somebody else at the files --------------------------------------------------------------------------------------


def record_files(nvme_path: Path) -> list[Path]:
    return sorted(nvme_path.glob("*/*.safetensors"))


@pytest.mark.parametrize("which", [0, 2, -1])
@pytest.mark.parametrize("length", [0, 4096, 5000])
def test_a_truncated_record_is_an_error(nvme_path: Path, plain: list[Snapshot], which: int, length: int) -> None:
    with Training(nvme_path, 2) as training:
        os.truncate(record_files(nvme_path)[which], length)
        with pytest.raises(swapper.SwapIOError) as caught:
            training.optimizer.state_dict()
        assert caught.value.errno == errno.ENODATA
        assert caught.value.path == str(record_files(nvme_path)[which])
        backward(training.model, 2)
        with pytest.raises(swapper.SwapIOError, match="truncated") as caught:
            training.optimizer.step()
        assert caught.value.errno == errno.ENODATA
        training.optimizer.zero_grad()
        training.load(plain[2])
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_removed_files_change_nothing(nvme_path: Path, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        for file in record_files(nvme_path):
            file.unlink()
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_a_removed_run_directory(nvme_path: Path, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        (directory,) = nvme_path.iterdir()
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
        run(training.model, training.optimizer, range(2, STEPS))
        assert all(same_bits(p, plain[STEPS].model[name]) for name, p in training.model.named_parameters())
        with pytest.raises(swapper.SwapIOError, match="removed while in use") as caught:
            training.optimizer.state_dict()
        assert caught.value.errno == errno.ENOENT
        swapper.unwrap_optimizer(training.optimizer)  # In memory it can still be saved.
        assert_same_state(plain[STEPS].optimizer, training.optimizer.state_dict())


@pytest.mark.root
def test_a_drive_too_full_for_a_state_dict(nvme_path: Path, plain: list[Snapshot]) -> None:
    with mounted(nvme_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs"), Training(nvme_path, 2) as training:
        for step in range(2, STEPS):
            with pytest.raises(swapper.SwapIOError, match=r"scratch file of .* is needed") as caught:
                training.optimizer.state_dict()
            assert caught.value.errno == errno.ENOSPC
            run(training.model, training.optimizer, range(step, step + 1))
        swapper.unwrap_optimizer(training.optimizer)
        training.equals(plain[STEPS])


# --- The user's own code ---------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Fragile(torch.optim.AdamW):
    fuse = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        Fragile.fuse -= 1
        if Fragile.fuse == 0:
            raise Boom
        return result


@pytest.mark.parametrize("number", [1, 3, 4])
def test_the_class_raises_in_a_bucket(nvme_path: Path, plain: list[Snapshot], number: int) -> None:
    with Training(nvme_path, 2, lambda model: Fragile(model.parameters(), lr=1e-2)) as training:
        count = len(training.swapper._plan.buckets)
        Fragile.fuse = min(number, count)
        backward(training.model, 2)
        with pytest.raises(Boom):
            training.optimizer.step()
        training.refuses()
        training.optimizer.zero_grad()
        training.model.load_state_dict(plain[2].model)
        training.refuses()
        training.optimizer.load_state_dict(plain[2].optimizer)
        training.ends_in(plain[STEPS], range(2, STEPS))


def boom(*_: object) -> Any:
    raise Boom


def test_a_closure_or_a_hook_that_raises_poisons_nothing(nvme_path: Path, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        optimizer = training.optimizer

        def closure() -> Any:
            optimizer.zero_grad()
            backward(training.model, 2)
            raise Boom

        with pytest.raises(Boom):
            optimizer.step(closure)
        with pytest.raises(Boom):
            optimizer.step(boom)
        optimizer.zero_grad()
        training.equals(plain[2])
        with optimizer.register_step_pre_hook(boom):
            backward(training.model, 2)
            with pytest.raises(Boom):
                optimizer.step()
            optimizer.zero_grad()
        training.equals(plain[2])
        with optimizer.register_step_post_hook(boom), pytest.raises(Boom):
            run(training.model, optimizer, range(2, 3))  # The step itself was made.
        optimizer.zero_grad()
        training.equals(plain[3])
        with optimizer.register_state_dict_pre_hook(boom), pytest.raises(Boom):
            optimizer.state_dict()
        with optimizer.register_state_dict_post_hook(boom), pytest.raises(Boom):
            optimizer.state_dict()
        with optimizer.register_load_state_dict_pre_hook(boom), pytest.raises(Boom):
            optimizer.load_state_dict(plain[1].optimizer)
        training.equals(plain[3])
        training.ends_in(plain[STEPS], range(3, STEPS))


def test_a_backward_that_raises_poisons_nothing(nvme_path: Path, plain: list[Snapshot]) -> None:
    with Training(nvme_path, 2) as training:
        for _ in range(3):
            handle = training.model[0].weight.register_hook(boom)
            with pytest.raises(Boom):
                backward(training.model, 2)  # Read-ahead has begun by then.
            handle.remove()
            training.optimizer.zero_grad()
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_no_room_for_a_group_that_is_added(nvme_path: Path, plain: list[Snapshot]) -> None:
    """A group that cannot be swapped is refused at the next step; without it training goes on."""
    with Training(nvme_path, 2) as training:
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.eye(4).to_sparse())]})
        for _ in range(2):
            backward(training.model, 2)
            with pytest.raises(swapper.ConfigError, match="sparse"):
                training.optimizer.step()
            training.optimizer.zero_grad()
        training.optimizer.param_groups.pop()
        training.ends_in(plain[STEPS], range(2, STEPS))


def test_threads_end(nvme_path: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    with Training(nvme_path, 1):
        pass
    before, python = threads(), threading.active_count()
    with Training(nvme_path, 1):
        pass
    deadline_s = time.monotonic() + 240  # A thread that was joined may still be listed for a moment.
    while threads() > before or threading.active_count() > python:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
