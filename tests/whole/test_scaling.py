"""What is done for each record, parameter and gradient does not grow with their number.

Nothing is timed. Counted are the lines of swapper's code that run, so that a walk over all records shows as a line for
each of them. Ten times as many of something may take ten times as many lines, and little more.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from line_counts import line_counts

import swapper
from swapper.checkpoint import index
from swapper.checkpoint.index import read_index
from swapper.errors import SwapError
from swapper.parameter import records
from swapper.storage.buffers import BufferPool
from swapper.storage.recycled_files import RecycledFiles

pytestmark = pytest.mark.timeout(240)

FEW, MANY = 100, 600
"""Both more than a look ahead, of 64, goes."""

GROWTH = 1.6
"""How a drive happens to answer decides what is still in memory, and so what is read: hence so much."""

BUCKET = "64KiB"
NUMEL = 5 * 1024
"""fp32 elements of a parameter whose state fills a bucket of that size alone."""


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of swapper's code `work` runs on this thread; a loop counts for each turn."""
    return sum(lines_by_file(work).values())


def lines_by_file(work: Callable[[], object]) -> dict[str, int]:
    """As `lines_of`, of each file of it: a walk in a file of few lines shows among all lines only if it is long."""
    counts: Counter[str] = Counter()
    gc.collect()  # What other tests have left ends in code of ours, too.
    gc.disable()
    try:
        for (file, _), lines in line_counts(work).items():
            counts[file] += lines
    finally:
        gc.enable()
    return dict(counts)


def check_growth(lines: Callable[[int], int], what: str = "") -> None:
    """`lines` gives the lines that so many take."""
    few, many = lines(FEW), lines(MANY)
    found = f"{few / FEW:.1f} lines for each of {FEW}, {many / MANY:.1f} of {MANY}"
    assert many <= GROWTH * few * MANY / FEW, f"{what}: {found}"


def parameters(count: int, numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(numel).to(dtype)) for _ in range(count)]
    for p in made:
        p.grad = torch.randn(numel).to(dtype)
    return made


def swapped(
    made: list[torch.nn.Parameter], path: Path, bucket_bytes: str = BUCKET, room: int = MANY, **settings: Any
) -> torch.optim.Optimizer:
    """An optimizer that has made its state; `room` is of records of 64 KiB in the pool."""
    gradient = {"device": settings.pop("gradient", "none")}
    config = swapper.OffloadConfig(
        nvme_path=path,
        offload_optimizer={"device": "nvme", **settings},
        offload_gradient=gradient,
        bucket_bytes=bucket_bytes,
        pool_bytes=room * (64 << 10) + (8 << 20),
    )
    return swapper.wrap_optimizer(torch.optim.AdamW(made), config)


@pytest.mark.long
@pytest.mark.parametrize(("device", "room"), [("cpu", MANY), ("nvme", 3), ("nvme", MANY)], ids=["cpu", "nvme", "pool"])
def test_a_step_does_the_same_for_each_record(nvme_path: Path, device: str, room: int) -> None:
    def lines(count: int) -> int:
        optimizer = swapped(parameters(count), nvme_path, room=room, device=device)
        assert len(swapper.of(optimizer)._plan.buckets) == count
        optimizer.step()
        optimizer.step()
        found = lines_of(optimizer.step)
        swapper.of(optimizer).close()
        return found

    check_growth(lines)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "masters"])
def test_a_bucket_does_the_same_for_each_parameter(nvme_path: Path, device: str, masters: bool) -> None:
    def lines(count: int) -> int:
        dtype = torch.bfloat16 if masters else torch.float32
        made = parameters(count, 4096, dtype)
        optimizer = swapped(made, nvme_path, "64MiB", 4 << 10, device=device, master_weights=masters)
        assert len(swapper.of(optimizer)._plan.buckets) == 1
        optimizer.step()
        found = lines_of(optimizer.step)
        swapper.of(optimizer).close()
        return found

    check_growth(lines)


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "masters"])
def test_state_comes_and_goes_with_the_same_work_for_each_parameter(nvme_path: Path, masters: bool) -> None:
    lines: dict[str, dict[int, int]] = {"out": {}, "in": {}}
    for count in (FEW, MANY):
        made = parameters(count, 4096, torch.bfloat16 if masters else torch.float32)
        optimizer = swapped(made, nvme_path, "64MiB", 4 << 10, master_weights=masters)
        optimizer.step()
        state: list[dict[str, Any]] = []
        lines["out"][count] = lines_of(lambda o=optimizer, s=state: s.append(o.state_dict()))  # type: ignore[misc]
        lines["in"][count] = lines_of(lambda o=optimizer, s=state: o.load_state_dict(s[0]))  # type: ignore[misc]
        swapper.of(optimizer).close()
    for way in lines.values():
        check_growth(way.__getitem__)


@pytest.mark.parametrize("numel", [64, 4096], ids=["in memory", "on the drive"])
def test_the_state_of_one_parameter_is_read_and_assigned_with_the_same_work_among_many(
    nvme_path: Path, numel: int
) -> None:
    works: dict[str, Callable[[torch.optim.Optimizer, torch.nn.Parameter, dict[str, Any]], object]] = {
        "read": lambda o, p, _: swapper.of(o).state(p),
        "assigned": lambda o, p, entries: o.state.__setitem__(p, entries),
        "number": lambda o, p, _: o.state[p]["step"],
        "popped": lambda o, p, _: o.state.pop(p),
    }
    lines: dict[str, dict[int, int]] = {what: {} for what in works}
    for count in (FEW, MANY):
        made = parameters(count, numel)
        optimizer = swapped(made, nvme_path, "1MiB", 4 << 10)
        optimizer.step()
        entries = swapper.of(optimizer).state(made[3])
        for what, work in works.items():
            counts = []
            for p in made[4:9]:  # The least: what a call finds in flight depends on the drive.
                swapper.of(optimizer).flush()
                counts.append(lines_of(partial(work, optimizer, p, entries)))
            lines[what][count] = min(counts)
        swapper.of(optimizer).close()
    for what, found in lines.items():
        assert found[MANY] <= GROWTH * found[FEW], what


@pytest.mark.long
@pytest.mark.parametrize("numel", [64, 4096], ids=["in memory", "on the drive"])
def test_a_checkpoint_is_saved_and_loaded_with_the_same_work_for_each_parameter(nvme_path: Path, numel: int) -> None:
    lines: dict[str, dict[int, dict[str, int]]] = {"saved": {}, "loaded": {}}
    for count in (FEW, MANY):
        made = parameters(count, numel)
        model = torch.nn.Module()
        model.all = torch.nn.ParameterList(made)
        optimizer = swapped(made, nvme_path, "1MiB", 4 << 10)
        optimizer.step()
        path = nvme_path / f"{count}"
        save, load = (
            partial(each, path, model, optimizer) for each in (swapper.save_checkpoint, swapper.load_checkpoint)
        )
        lines["saved"][count] = lines_by_file(save)
        lines["loaded"][count] = lines_by_file(load)
        swapper.of(optimizer).close()
    for found in lines.values():
        assert len(found[MANY]) > 20
        for file in found[MANY]:
            # A few lines, which one more wait for the drive has, are no work for each parameter.
            check_growth(lambda n, found=found, file=file: max(found[n].get(file, 0), n // 4), file)  # type: ignore[misc]


def test_a_save_reads_no_index_of_the_checkpoints_beside_it_again(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a run that keeps all of its checkpoints has hundreds."""
    model = torch.nn.Linear(2, 2)
    read: list[object] = []

    def reading(file: Any) -> bytes:
        read.append(file)
        return read_index(file)

    monkeypatch.setattr(index, "read_index", reading)
    for number in range(80):
        read.clear()
        swapper.save_checkpoint(nvme_path / f"{number}", model)
        assert len(read) <= 2, number


def test_gradients_that_come_and_go_leave_nothing(nvme_path: Path) -> None:
    """As those of adapters that are added and removed."""
    base = parameters(3)
    optimizer = swapped(base, nvme_path, gradient="nvme")
    order = swapper.of(optimizer).gradients._order  # type: ignore[union-attr]
    known = 0
    for turn in range(30):
        adapter = parameters(2)
        for p in (*base, *adapter):
            p.grad = None
        optimizer.add_param_group({"params": adapter})
        for _ in range(2):  # In the first they are not known yet.
            torch.stack([p.sum() for p in (*base, *adapter)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer.param_groups[-1]
        known = len(order._by_number) if turn == 2 else known
    assert 0 < len(order._by_number) == known
    swapper.of(optimizer).close()


@pytest.mark.long
def test_gradients_that_are_away_cost_the_same_each(nvme_path: Path) -> None:
    lines: dict[str, dict[int, int]] = {"backward": {}, "step": {}, "zero_grad": {}}
    for count in (FEW, MANY):
        made = parameters(count)
        optimizer = swapped(made, nvme_path, gradient="nvme")

        def backward(made: list[torch.nn.Parameter] = made) -> None:
            torch.stack([p.sum() for p in made]).sum().backward()

        for turn in range(2):
            optimizer.zero_grad()
            count_or_run = lines_of if turn else lambda work: work() or 0
            found = {"backward": count_or_run(backward), "step": count_or_run(optimizer.step)}
            found["zero_grad"] = count_or_run(optimizer.zero_grad)
            for what, number in found.items():
                lines[what][count] = number
        swapper.of(optimizer).close()
    for way in lines.values():
        check_growth(way.__getitem__)


@pytest.mark.long
def test_the_parts_of_one_gradient_cost_the_same_each(nvme_path: Path) -> None:
    def lines(count: int) -> int:
        (p,) = made = parameters(1, count * NUMEL)
        optimizer = swapped(made, nvme_path, gradient="nvme")
        found = 0
        for _ in range(2):
            optimizer.zero_grad()
            p.sum().backward()
            found = lines_of(optimizer.step)
        swapper.of(optimizer).close()
        return found

    check_growth(lines)


@pytest.mark.long
def test_a_step_in_backward_does_the_same_for_each_bucket(nvme_path: Path) -> None:
    def lines(count: int) -> int:
        made = parameters(count)
        for p in made:
            p.grad = None
        optimizer = swapped(made, nvme_path, step_in_backward=True)

        def step() -> None:
            torch.stack([p.sum() for p in made]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        found = lines_of(step)
        swapper.of(optimizer).close()
        return found

    check_growth(lines)


@pytest.mark.long
def test_modules_in_any_order_read_the_same_for_each_use(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are in the pool, so half of the uses miss; beside those one is read ahead of each use at most."""
    monkeypatch.setattr(records, "GROUP_BYTES", 1 << 14)
    rng = random.Random(0)
    for count in (FEW, MANY):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes=count // 2 * (20 << 10) + (64 << 10),
            bucket_bytes="64KiB",
            offload_optimizer={"device": "none"},
            offload_param={"device": "nvme"},
        )
        swapper.offload(model, config=config)

        def use(model: Any = model, count: int = count) -> None:
            with torch.no_grad():
                for i in rng.sample(range(count), count):
                    model[i](torch.zeros(1, 64))

        use()
        before = model.swapper.stats().reads  # type: ignore[operator, union-attr]
        use()
        reads = model.swapper.stats().reads - before  # type: ignore[operator, union-attr]
        assert count / 4 <= reads <= 1.6 * count
        model.swapper.close()  # type: ignore[operator, union-attr]


@pytest.mark.long
def test_modules_are_gathered_with_the_same_work_for_each(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GROUP_BYTES", 1 << 14)
    lines: dict[int, dict[str, int]] = {}
    for count in (FEW, MANY):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count)))
        config = swapper.OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="4MiB",
            offload_optimizer={"device": "none"},
            offload_param={"device": "nvme"},
        )
        swapper.offload(model, config=config)

        def gather(model: torch.nn.Module = model) -> None:
            for module in model.children():
                with swapper.gathered(module), swapper.gathered(module):
                    pass

        lines[count] = lines_by_file(gather)
        assert not model.swapper._uses  # type: ignore[operator, union-attr]
        model.swapper.close()  # type: ignore[operator, union-attr]
    check_growth(lambda count: lines[count]["parameter/owner.py"])


@pytest.mark.long
def test_a_model_is_built_and_taken_over_with_the_same_work_for_each_parameter(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "GROUP_BYTES", 1 << 15)
    lines: dict[str, dict[int, int]] = {"built": {}, "many wait": {}, "taken over": {}}
    for count in (FEW, MANY):
        config = swapper.OffloadConfig(
            nvme_path=nvme_path, pool_bytes="4MiB", bucket_bytes="256KiB", offload_param={"device": "nvme"}
        )
        models: list[torch.nn.Module] = []

        def build(config: Any = config, count: int = count, models: Any = models) -> None:
            with swapper.init(config):
                models.append(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(count))))

        def wait(config: Any = config, count: int = count) -> None:
            """Each is only waiting when the next is made."""
            with swapper.init(config):
                torch.nn.ParameterList(torch.empty(4) for _ in range(10 * count))

        lines["built"][count] = lines_of(build)
        lines["taken over"][count] = lines_of(lambda c=config, m=models: swapper.offload(m[0], config=c))  # type: ignore[misc]
        models[0].swapper.close()  # type: ignore[operator, union-attr]
        lines["many wait"][count] = lines_of(wait)
    for way in lines.values():
        check_growth(way.__getitem__)


def test_the_pool_does_the_same_for_each_lease() -> None:
    class Busy:
        """A transfer that is in flight for good."""

        def done(self) -> bool:
            return False

        def wait(self, timeout: float | None = None) -> int:
            return 0

        def wait_quietly(self) -> None:
            return

        def times_s(self) -> tuple[float, float]:
            return 0.0, 0.0

    def lines(count: int) -> int:
        with BufferPool(4 * count * 4096) as pool:
            for _ in range(count):
                lease = pool.acquire(4096)
                lease.transfer = Busy()
                lease.release()
            held = []
            found = lines_of(lambda: held.extend(pool.acquire(4096) for _ in range(count)))
            found += lines_of(lambda: [lease.release() for lease in held])
            assert pool.used_bytes == count * 4096
            return found

    check_growth(lines)


def test_spare_files_are_found_without_a_look_at_all(tmp_path: Path) -> None:
    def lines(count: int) -> int:
        directory = tmp_path / f"{count}"
        directory.mkdir()
        spares = RecycledFiles(directory)
        lengths = [4096 * (1 + i * 7 % count) for i in range(count)]

        def work() -> None:
            for i, length in enumerate(lengths):
                path = directory / f"old-{i}"
                path.write_bytes(b"")
                os.truncate(path, length)
                assert spares.adopt(path, 1 << 40)
                assert spares.total_bytes == sum(lengths[: i + 1])
            for i, length in enumerate(lengths):
                new = directory / f"new-{i}"
                assert spares.take(length - 1, new)
                assert new.stat().st_size == length, "the nearest"
            assert spares.total_bytes == 0
            assert not spares.take(1, directory / "none")

        return lines_of(work)

    check_growth(lines)


def test_a_lease_that_was_given_back_makes_no_more_views() -> None:
    with BufferPool(1 << 16) as pool:
        lease = pool.acquire(4096 + 64)
        view = lease.strided_view(64, 12, torch.float32, (3, 4), (1, 3))
        assert view.shape == (3, 4)
        assert view.stride() == (1, 3)
        assert view.data_ptr() == lease.address + 64 == lease.view(64, 12, torch.float32).data_ptr()
        assert lease.pool_has(view)
        assert lease.pool_has(torch.empty(0))
        assert not lease.pool_has(torch.empty(3))
        with pytest.raises(ValueError, match="do not fit"):
            lease.strided_view(4096 + 64 - 44, 12, torch.float32, (12,), (1,))
        lease.release()
        for use in (
            lambda: lease.view(0, 1, torch.float32),
            lambda: lease.strided_view(0, 1, torch.float32, (1,), (1,)),
            lambda: lease.pool_has(view),
        ):
            with pytest.raises(SwapError, match="given back"):
                use()
