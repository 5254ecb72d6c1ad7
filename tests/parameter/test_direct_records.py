"""Parameters on an accelerator that come and go without the pool, by cuFile: a mock, see `mock_cufile`."""

from __future__ import annotations

import errno
import gc
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import simulated
from interrupts import interrupted_at, places_of
from mock_cufile import COMPILER, WITHOUT_CUFILE, Mock, check_that_the_reason_is_logged_once
from models import CASES
from sampling import ALL
from torch import nn
from training import same_bits
from twins import Run, models_on, run_twice, small_records, swapper_of
from typer.testing import CliRunner

import swapper
from swapper.cli import app
from swapper.errors import SwapIOError
from swapper.parameter.held_on_device import HeldOnDevice
from swapper.storage.writes import RecordWrites

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library")

WIDE = 64
WATCH = RecordWrites._watch  # Tests of devices have no thread that starts writes: see `accelerators.simulate`.


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


def layers(device: torch.device, depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(depth))).to(device)


def config_for(nvme_path: Path | list[Path], **settings: object) -> swapper.OffloadConfig:
    values: dict[str, object] = {
        "nvme_path": nvme_path,
        "pool_bytes": "1MiB",
        "bucket_bytes": "16KiB",
        "offload_optimizer": {"device": "nvme", "step_device": "device"},
        "offload_param": {"device": "nvme"},
    }
    return swapper.OffloadConfig(**(values | settings))  # type: ignore[arg-type]


class Trained:
    """A model of which the pool has nothing, beside the same one, plain."""

    def __init__(self, nvme_path: Path | list[Path], device: torch.device, **settings: object) -> None:
        self.device = device
        self.plain, self.model = layers(device), layers(device)
        with small_records():
            swapper.offload(self.model, config=config_for(nvme_path, **settings))
        self.swapper = swapper_of(self.model)
        self.empty_pool()

    def empty_pool(self) -> None:
        while self.swapper._pool.reclaim():
            pass
        assert self.swapper._pool.used_bytes == 0

    def evaluated(self, model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        with torch.inference_mode():
            return model(torch.randn(4, WIDE, generator=generator).to(self.device))  # type: ignore[no-any-return]

    def check(self) -> None:
        assert same_bits(self.evaluated(self.model), self.evaluated(self.plain))

    def close(self) -> None:
        """Nothing is left in use."""
        self.swapper.flush()
        assert not any(held.pinned or held.holds or held.attached for held in self.swapper._all)
        self.swapper.close(keep_values=True)
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert same_bits(p.cpu(), q.cpu())


# --- To the bit, and past the pool ---


@pytest.mark.long
@pytest.mark.parametrize("drives", [1, 2])
def test_what_is_read_does_not_pass_the_pool(direct: Mock, nvme_path: Path, device: torch.device, drives: int) -> None:
    paths = [nvme_path / str(number) for number in range(drives)]
    for path in paths:
        path.mkdir()
    trained = Trained(paths, device)
    before = trained.swapper.metrics.bytes_read
    direct["bytes_read"] = direct["reads"] = direct["writes"] = 0
    for _ in range(3):
        trained.check()
    assert trained.swapper._pool.used_bytes == 0
    deadline = time.monotonic() + 240
    while direct["bytes_read"] < trained.swapper.metrics.bytes_read - before and time.monotonic() < deadline:
        time.sleep(0.01)  # What is read ahead is counted when it starts, and by cuFile when it is there.
    assert direct["bytes_read"] == trained.swapper.metrics.bytes_read - before > 0
    assert direct["in_registered_memory"] == direct["reads"] + direct["writes"] > 0 == direct["unaligned"]
    trained.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["mlp", "odd shapes", "gpt2 tied", "used twice", "changing order", "lora", "bags", "strided", "frozen"]
)
@pytest.mark.parametrize("step_device", ["cpu", "device"])
def test_models_train_and_evaluate_to_the_same_bits(
    direct: Mock, name: str, step_device: str, nvme_path: Path, device: torch.device
) -> None:
    case = CASES[name]

    def program(run: Run) -> None:
        for _ in range(2):
            (run.model(*case.inputs(run.generator)).float().square().mean()).backward()
            run.finish_step()
        run.model.eval()
        with torch.inference_mode():
            run.note("evaluated", run.model(*case.inputs(run.generator)))

    with models_on(device, roomy=True, step_device=step_device):
        run_twice(nvme_path, case.make, program, spare_bytes=case.spare_bytes, watch=False)
    assert direct["bytes_read"] > 0


class Stepping(Trained):
    """A model that is trained on the device, beside the same one, plain."""

    def __init__(self, nvme_path: Path | list[Path], device: torch.device, **settings: object) -> None:
        self.device = device
        self.plain, self.model = layers(device), layers(device)
        self.reference = torch.optim.AdamW(self.plain.parameters(), lr=0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        with small_records():
            swapper.offload(self.model, self.optimizer, config=config_for(nvme_path, **settings))
        self.swapper = swapper_of(self.model)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        batch = torch.randn(4, WIDE, generator=generator).to(self.device)
        for model, optimizer in ((self.plain, self.reference), (self.model, self.optimizer)):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def edit(self, number: int) -> None:
        for model in (self.plain, self.model):
            with torch.no_grad():
                [*model.parameters()][number].mul_(1.5)


@pytest.mark.long
@pytest.mark.parametrize("short", [0, 4096])
@pytest.mark.parametrize("drives", [1, 2])
def test_what_is_stepped_is_written_past_the_pool(
    direct: Mock, nvme_path: Path, device: torch.device, drives: int, short: int
) -> None:
    """Also if each call of cuFile moves a part of what it was asked to."""
    direct["short"] = short
    paths = [nvme_path / str(number) for number in range(drives)]
    for path in paths:
        path.mkdir()
    stepping = Stepping(paths, device)
    stepping.step()
    stepping.swapper.flush()
    stepping.empty_pool()
    before = stepping.swapper.metrics.bytes_written
    state_before = stepping.optimizer.swapper.stats().bytes_written
    direct["bytes_written"] = 0
    for _ in range(3):
        stepping.step()
    stepping.optimizer.swapper.flush()  # type: ignore[attr-defined]
    stepping.swapper.flush()
    assert stepping.swapper._pool.used_bytes == 0
    written = stepping.swapper.metrics.bytes_written - before
    assert written >= 3 * sum(held.plan.file_bytes for held in stepping.swapper._all)
    assert direct["bytes_written"] == written + stepping.optimizer.swapper.stats().bytes_written - state_before
    stepping.check()
    stepping.close()


@pytest.mark.long
def test_a_record_is_stepped_while_it_is_written(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    stepping = Stepping(
        nvme_path,
        device,
        offload_param={"device": "nvme", "device_resident_bytes": "1MiB"},
    )
    stepping.empty_pool()
    direct["delay_us"] = 5000
    for _ in range(2):
        for _ in range(2):
            stepping.step()
        stepping.swapper.rest()  # All comes from the drive again.
        stepping.check()
    direct["delay_us"] = 0
    stepping.close()


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_programs(
    direct: Mock,
    nvme_path: Path,
    tmp_path: Path,
    device: torch.device,
    step_device: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, and whatever else comes to the records between them, in any order, with a drive that is slow at times."""
    generator = random.Random(f"{step_device} {seed}")
    if generator.random() < 0.5:
        monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    stepping = Stepping(
        nvme_path,
        device,
        offload_optimizer={"device": "nvme", "step_device": step_device},
        offload_param={"device": "nvme", "device_resident_bytes": generator.choice([0, 0, 40_000])},
    )
    if step_device == "cpu" and device.type != "sim":
        pytest.skip("kernels of the device have other bits than those of the CPU")

    def save() -> None:
        swapper.save_checkpoint(tmp_path / "checkpoint", stepping.model, stepping.optimizer).wait()
        assert CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "checkpoint")]).exit_code == 0
        if generator.random() < 0.5:
            swapper.load_checkpoint(tmp_path / "checkpoint", stepping.model, stepping.optimizer)

    def read_on_host() -> None:
        swapper.save(stepping.model.state_dict(), tmp_path / "state.pt")
        found = torch.load(tmp_path / "state.pt", map_location="cpu")
        for name, value in stepping.plain.state_dict().items():
            assert same_bits(found[name], value.cpu())

    def view() -> None:
        p = [*stepping.model.parameters()][generator.randrange(16)]
        kept.append(p.detach())
        del kept[:-1]

    def reclaim() -> None:
        while stepping.swapper._pool.reclaim():
            pass

    kept: list[torch.Tensor] = []
    acts: list[Callable[[], object]] = [
        *[stepping.step] * 5,
        *[stepping.check] * 2,
        lambda: stepping.edit(generator.randrange(16)),
        view,
        read_on_host,
        stepping.swapper.flush,
        stepping.swapper.rest,
        reclaim,
        save,
    ]
    reclaim()
    for _ in range(16):
        direct["delay_us"] = generator.choice([0, 0, 2000])
        generator.choice(acts)()
    direct["delay_us"] = 0
    kept.clear()
    stepping.check()
    stepping.close()


# --- Where it is not used ---


FEW_BYTES: tuple[dict[str, object], str] = (
    {"offload_param": {"device": "nvme", "device_bytes": 150_000}},
    "set it to at least",
)


@pytest.mark.parametrize("why", [*WITHOUT_CUFILE, "few bytes"])
def test_the_reason_is_logged_once_and_all_runs_as_without(
    direct: Mock, why: str, nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    settings, reason = FEW_BYTES if why == "few bytes" else WITHOUT_CUFILE[why]

    def run() -> None:
        trained = Trained(nvme_path, device, **settings)
        trained.check()
        trained.close()

    check_that_the_reason_is_logged_once(direct, why, reason, run, caplog)


# --- Faults ---


@pytest.mark.parametrize("how", ["errno", "end of file"])
def test_a_read_that_fails_is_an_error_and_the_next_pass_is_right(
    direct: Mock, nvme_path: Path, device: torch.device, how: str
) -> None:
    trained = Trained(nvme_path, device)
    failed = 0
    if how == "errno":
        direct["errno"] = errno.EIO
    for n in (1, 2, 3, 5):
        direct["fail_at"] = n if how == "errno" else -1
        cut = trained.swapper.store.directories[0] / trained.swapper._all[n].key.file_name
        content = cut.read_bytes()
        if how != "errno":
            cut.write_bytes(content[:4096])
        raised = 0
        for attempt in (lambda: trained.evaluated(trained.model), trained.check):  # It may be a read for the next pass.
            try:
                attempt()
            except SwapIOError as error:
                assert error.errno == (errno.EIO if how == "errno" else errno.ENODATA)
                raised += 1
            direct["fail_at"] = -1
            if how != "errno":
                with cut.open("r+b") as file:  # Not cut to nothing before: a read may be on its way.
                    file.write(content)
        assert raised <= 1
        trained.check()
        failed += raised
    assert failed > 0
    trained.close()


def test_short_reads_are_completed(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)
    direct["short"] = 4096
    trained.check()
    trained.close()


@pytest.mark.long
def test_what_cufile_refuses_in_the_middle_goes_through_the_host(
    direct: Mock, nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    stepping = Stepping(nvme_path, device)
    stepping.step()
    stepping.swapper.flush()
    stepping.empty_pool()
    direct["result"] = -5008  # Every call from now on.
    for _ in range(2):
        stepping.step()
    stepping.swapper.flush()
    assert sum("memory of the host" in record.getMessage() for record in caplog.records) == 1
    stepping.swapper.rest()
    stepping.check()
    direct["result"] = 0
    stepping.step()
    stepping.check()
    stepping.close()


@pytest.mark.long
def test_ctrl_c_in_a_pass(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)
    trained.check()
    before = torch.accelerator.memory_allocated(device)
    files, struck = ("parameter/di", "parameter/device_", "parameter/held_on_device.py"), 0
    for place in places_of(lambda: trained.evaluated(trained.model), *files, sample=None if ALL else 15):
        struck += interrupted_at(place, lambda: trained.evaluated(trained.model), *files)
        gc.collect()
        trained.check()
        assert torch.accelerator.memory_allocated(device) <= before + 2000, place
    assert struck >= (25 if ALL else 1)  # About 100 of 130; threads have another order each time.
    trained.close()


def test_a_model_that_is_dropped_waits_for_no_thread(
    direct: Mock, nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finalizer may run anywhere, also where locks are held that the thread needs to start a write."""
    monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    trained = Trained(nvme_path, device)
    store = trained.swapper.store
    assert store is not None
    write, inside, go_on, ended = store.write, threading.Event(), threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        if threading.current_thread().name == "swapper-writes":
            inside.set()
            assert go_on.wait(240)
        return write(*args)

    monkeypatch.setattr(store, "write", slow)
    del store
    trained.model[0][0].weight.sum()
    tier, (held, *_) = trained.swapper._tier, [held for held in trained.swapper._all if held.values]
    assert tier is not None and isinstance(held, HeldOnDevice)
    with trained.swapper._lock:
        tier._send_down(held)
    del tier, held, _
    assert inside.wait(240)

    def drop() -> None:
        nonlocal trained
        del trained
        gc.collect()
        ended.set()

    dropping = threading.Thread(target=drop)
    dropping.start()
    waited_for_none = ended.wait(240)
    go_on.set()
    dropping.join()
    for thread in threading.enumerate():
        if thread.name == "swapper-writes":
            thread.join()
    gc.collect()
    assert waited_for_none


@pytest.mark.long
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_is_an_error_and_nothing_is_lost(
    direct: Mock, nvme_path: Path, device: torch.device, number: int
) -> None:
    """The values are still on the device: they are written again."""
    trained = Trained(nvme_path, device)

    def change() -> None:
        with torch.no_grad():
            for p, q in zip(trained.model.parameters(), trained.plain.parameters(), strict=True):
                p.copy_(q)
        trained.swapper.flush()

    failed = 0
    for n in (1, 3, 6, 9, 14, 20):
        with torch.no_grad():
            for q in trained.plain.parameters():
                q.mul_(1.5)
        direct["errno"], direct["fail_at"] = number, n  # Of reads and writes.
        raised = 0
        for _ in range(3):
            try:
                change()
            except SwapIOError as error:
                assert error.errno == number
                raised += 1
            direct["fail_at"] = -1
        assert raised <= 1
        failed += raised
        trained.swapper.rest()
        trained.check()
    assert failed > 0
    trained.close()


@pytest.mark.long
def test_ctrl_c_in_a_step(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    trained = Trained(nvme_path, device)

    def change() -> None:
        with torch.no_grad():
            for p in trained.model.parameters():
                p.mul_(1)  # What has changed is sent down, also to what it was.
        trained.swapper.flush()

    change()
    files, struck = ("parameter/di", "parameter/device_", "parameter/held_on_device.py"), 0
    for place in places_of(change, *files, sample=None if ALL else 15):
        struck += interrupted_at(place, change, *files)
        gc.collect()
        trained.check()
    assert struck >= (25 if ALL else 1)  # About 100 of 130; threads have another order each time.
    trained.close()


@pytest.mark.parametrize("at", [1, 3], ids=["probe", "staging"])
def test_too_little_memory_for_staging_is_an_error_that_says_what_to_do(
    direct: Mock, nvme_path: Path, device: torch.device, at: int
) -> None:
    if not hasattr(torch.ops.sim, "refuse_at"):
        pytest.skip("the simulated device was built before it could refuse memory")
    model = layers(device)
    simulated().refuse_at(at)
    with pytest.raises(torch.OutOfMemoryError, match=r"\nswapper: .*aio\.gds: off"):
        swapper.offload(model, config=config_for(nvme_path))
    simulated().refuse_at(0)
    swapper_of(swapper.offload(model, config=config_for(nvme_path))[0]).close()


def test_device_memory_is_what_was_said(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    torch.accelerator.synchronize()
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    trained = Trained(nvme_path, device)
    report = swapper.check(layers(device), config=config_for(nvme_path))
    trained.check()
    assert trained.swapper._tier is not None and trained.swapper._tier.direct is not None
    plain_bytes = sum(p.nbytes for p in trained.plain.parameters())
    torch.accelerator.reset_peak_memory_stats(device)
    trained.check()
    peak = torch.accelerator.max_memory_allocated(device) - before - plain_bytes
    assert report.device_bytes > 3 * 16 << 10
    assert peak <= report.device_bytes + (64 << 10) + 16384  # Alignment of the staging memory, and activations.
    trained.close()
