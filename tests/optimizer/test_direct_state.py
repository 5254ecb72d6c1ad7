"""Optimizer state between the drive and an accelerator without the pool, by cuFile: a mock, see `mock_cufile`."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import SETTINGS, keep_busy, simulated
from interrupts import interrupted_at
from mock_cufile import COMPILER, WITHOUT_CUFILE, Mock, check_that_the_reason_is_logged_once
from removed_waits import remove, sites
from sampling import places
from torch import nn
from training import MasterWeights, assert_same_state, same_bits
from typer.testing import CliRunner

import swapper
from swapper.cli import app
from swapper.errors import ConfigError, SwapError, SwapIOError
from swapper.gradient.swapper import GradientSwapper
from swapper.optimizer.device_records import DeviceBucket
from swapper.optimizer.stepper import Stepper
from swapper.storage.buffers import PoolExhausted
from swapper.storage.store import RecordKey, TensorStore
from swapper.storage.writes import RecordWrites

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler for the mock library")

WATCH = RecordWrites._watch  # Tests of devices have no thread that starts writes: see `accelerators.simulate`.
SHAPES = [(64, 640), (640,), (48, 8, 3, 3), (3,), (20_000,), (64, 64), (64, 128), (64, 96)]


@pytest.fixture
def device(device: str) -> torch.device:
    """The first device of the type: see `accelerators`."""
    return torch.device(device, 0)


@pytest.fixture(autouse=True)
def ordered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a record begins while it is being written."""
    moves: dict[tuple[TensorStore, RecordKey], tuple[str, Any]] = {}

    def watched(name: str) -> Callable[..., Any]:
        former = getattr(TensorStore, name)

        def move(store: TensorStore, key: RecordKey, *arguments: Any) -> Any:
            before = moves.get((store, key))
            assert before is None or before[0] == "read" or before[1].done(), (key, name)
            transfer = former(store, key, *arguments)
            moves[store, key] = name, transfer
            return transfer

        return move

    for name in ("read", "write"):
        monkeypatch.setattr(TensorStore, name, watched(name))
    yield
    moves.clear()


class Model(nn.Module):
    """Parameters of many shapes, and a loss whose gradients are given."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES)
        self.weights = nn.ParameterList(map(nn.Parameter, values))

    def backward(self, seed: int, left_out: int = -1) -> None:
        generator = torch.Generator().manual_seed(seed)
        gradients = [torch.randn(p.shape, generator=generator).to(p) for p in self.weights]
        pairs = enumerate(zip(self.weights, gradients, strict=True))
        torch.stack([(p * gradient).sum() for number, (p, gradient) in pairs if number != left_out]).sum().backward()


def adamw_of(model: Model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


class Twins:
    """A model whose state goes past the pool, beside the same one, plain."""

    def __init__(
        self, nvme_path: Path | list[Path], device: torch.device, *, masters: bool = False, **settings: Any
    ) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        self.device, self.masters = device, masters
        self.plain, self.mine = Model(device, dtype), Model(device, dtype)
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
        make = lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1)  # noqa: E731
        self.reference: Any = MasterWeights(list(self.plain.parameters()), make)
        if not masters:
            self.reference = make(list(self.plain.parameters()))
        self.optimizer = make(list(self.mine.parameters()))
        self.config = config_for(nvme_path, masters=masters, **settings)
        swapper.wrap_optimizer(self.optimizer, self.config)
        self.swapper = swapper.of(self.optimizer)
        self.seed = 0

    def step(self, left_out: int = -1) -> None:
        self.seed += 1
        for model, optimizer in ((self.plain, self.reference), (self.mine, self.optimizer)):
            model.backward(self.seed, left_out)
            optimizer.step()
            model.zero_grad()

    def check(self) -> None:
        for (name, p), q in zip(self.mine.named_parameters(), self.plain.parameters(), strict=True):
            assert same_bits(p.cpu(), q.cpu()), f"{name} differs"

    def check_state(self) -> None:
        if not self.masters:
            assert_same_state(on_the_host(self.optimizer.state_dict()), on_the_host(self.reference.state_dict()))

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {name: value.clone() for name, value in self.mine.state_dict().items()}, self.optimizer.state_dict()

    def load(self, saved: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
        self.mine.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        self.mine.zero_grad()

    def close(self) -> None:
        """Nothing is left to be found wrong."""
        try:
            self.check()
        finally:
            self.swapper.close()


def on_the_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        i: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in entries.items()}
        for i, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def config_for(nvme_path: Path | list[Path], *, masters: bool = False, **settings: Any) -> swapper.OffloadConfig:
    state = {"device": "nvme", "step_device": "device", "master_weights": masters, **settings.pop("state", {})}
    values = {"pool_bytes": "2MiB", "bucket_bytes": "128KiB", "offload_optimizer": state, **settings}
    return swapper.OffloadConfig(nvme_path=nvme_path, **values)


def counted_from_here(mock: Mock) -> None:
    for name in ("reads", "writes", "bytes_read", "bytes_written", "in_registered_memory"):
        mock[name] = 0


# --- To the bit, and past the pool ---


@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("masters", [False, True])
def test_what_is_read_and_written_does_not_pass_the_pool(
    direct: Mock, nvme_path: Path, device: torch.device, drives: int, masters: bool
) -> None:
    paths = [nvme_path / str(number) for number in range(drives)]
    for path in paths:
        path.mkdir()
    twins = Twins(paths, device, masters=masters)
    counted_from_here(direct)
    for _ in range(4):
        twins.step()
    twins.swapper.flush()
    stats = twins.swapper.stats()
    assert stats.pool_peak_bytes == 0
    assert direct["bytes_read"] == stats.bytes_read > 0
    assert direct["bytes_written"] == stats.bytes_written > 0
    assert direct["in_registered_memory"] == direct["reads"] + direct["writes"] > 0 == direct["unaligned"]
    twins.check_state()
    twins.close()


@pytest.mark.long
@pytest.mark.parametrize("masters", [False, True])
def test_files_are_those_of_a_run_through_the_pool(
    direct: Mock, nvme_path: Path, device: torch.device, masters: bool, tmp_path: Path
) -> None:
    """Header, tensors and ties; what is between them is undefined."""
    saved = []
    for gds in ("auto", "off"):
        counted_from_here(direct)
        twins = Twins(nvme_path, device, masters=masters, aio={"gds": gds})
        for _ in range(3):
            twins.step()
        swapper.save_checkpoint(tmp_path / gds, twins.mine, twins.optimizer).wait()
        assert (direct["bytes_written"] > 64 << 10) == (gds == "auto")
        twins.close()
        contents = {}
        for file in sorted((tmp_path / gds).glob("optimizer*")):
            content = file.read_bytes()
            length = 8 + int.from_bytes(content[:8], "little")
            contents[file.name] = content[:length], len(content)
        saved.append(contents)
    assert saved[0] == saved[1] and saved[0]
    assert CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "auto")]).exit_code == 0
    twins = Twins(nvme_path, device, masters=masters, aio={"gds": "off"})
    for _ in range(3):
        twins.step()
    swapper.load_checkpoint(tmp_path / "auto", twins.mine, twins.optimizer)
    twins.step()
    twins.close()


def edit(twins: Twins, generator: random.Random) -> None:
    number = generator.randrange(len(SHAPES))
    with torch.no_grad():
        for model in (twins.plain, twins.mine):
            model.weights[number].mul_(1.5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("gradients", ["none", "nvme"])
@pytest.mark.parametrize("masters", [False, True])
def test_programs(
    direct: Mock,
    nvme_path: Path,
    tmp_path: Path,
    device: torch.device,
    masters: bool,
    gradients: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, and whatever else comes to the records between them, in any order, with a drive that is slow at times."""
    generator = random.Random(seed)
    if generator.random() < 0.5:
        monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    resident = generator.choice([0, 0, 300 << 10])
    in_backward = gradients == "none" and generator.random() < 0.3
    twins = Twins(
        nvme_path,
        device,
        masters=masters,
        state={"resident_bytes": resident, "step_in_backward": in_backward},
        offload_gradient={"device": gradients},
    )
    counted_from_here(direct)

    def checkpoint() -> None:
        swapper.save_checkpoint(tmp_path / "checkpoint", twins.mine, twins.optimizer).wait()
        if generator.random() < 0.5:
            swapper.load_checkpoint(tmp_path / "checkpoint", twins.mine, twins.optimizer)

    def edited() -> None:
        if not masters:
            edit(twins, generator)

    def assign() -> None:
        if not masters:
            number = generator.randrange(len(SHAPES))
            p, q = twins.mine.weights[number], twins.plain.weights[number]
            if p in twins.optimizer.state:
                twins.optimizer.state[p] = dict(twins.swapper.state(p))
            assert (p in twins.optimizer.state) == (q in twins.reference.state)

    acts: list[Callable[[], object]] = [
        *[twins.step] * 6,
        lambda: twins.step(generator.randrange(len(SHAPES)) if not in_backward else -1),
        twins.check_state,
        lambda: twins.load(twins.saved()),
        twins.swapper.flush,
        twins.swapper.rest,
        checkpoint,
        edited,
        assign,
    ]
    for _ in range(14):
        direct["delay_us"] = generator.choice([0, 0, 2000])
        generator.choice(acts)()
        if generator.random() < 0.5:
            twins.check()
    direct["delay_us"] = 0
    assert direct["bytes_written"] > 0
    twins.check_state()
    twins.close()


def step_until_written(twins: Twins, direct: Mock) -> None:
    """Step, and wait until all state is written, by whichever thread."""
    before = direct["bytes_written"]
    twins.step()
    deadline_s = time.monotonic() + 240
    while direct["bytes_written"] < before + twins.swapper.stats().state_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.parametrize("masters", [False, True])
def test_writes_start_without_a_call(
    direct: Mock, nvme_path: Path, device: torch.device, masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    twins = Twins(nvme_path, device, masters=masters)
    twins.step()
    twins.swapper.flush()
    for _ in range(4):
        step_until_written(twins, direct)
    twins.check_state()
    twins.close()


def test_threads_make_no_context_on_the_first_device(
    direct: Mock, nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    second = torch.device(device.type, 1)
    if torch.accelerator.device_count() < 2 or device.type == "cuda":
        pytest.skip("needs two simulated devices")
    torch.zeros(1, device=second)
    simulated().forget_contexts()
    twins = Twins(nvme_path, second, masters=True)
    for _ in range(3):
        step_until_written(twins, direct)
    assert simulated().contexts() == [1]
    twins.close()


def test_writes_do_not_wait_for_what_comes_after_the_step(
    direct: Mock, nvme_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated().configure("lazy")  # A stream that nobody waits for does nothing.
    monkeypatch.setattr(RecordWrites, "_watch", WATCH)
    twins = Twins(nvme_path, device)
    for _ in range(2):
        twins.step()
    twins.swapper.flush()
    twins.mine.backward(9)
    before = direct["bytes_written"]
    twins.optimizer.step()
    twins.mine.weights[0].detach().clone()
    reached = torch.get_device_module(device).Event()
    reached.record()
    deadline_s = time.monotonic() + 240
    while direct["bytes_written"] < before + twins.swapper.stats().state_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not reached.query()
    twins.swapper.close()


def test_a_bucket_that_grows_gets_longer_slots(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    twins = Twins(nvme_path, device)
    twins.step()
    torch.manual_seed(3)
    value = torch.randn(150, 200)  # Of 120 kB, but its state moves whole: a foreach kernel sees no order in it.
    for model, optimizer in ((twins.plain, twins.reference), (twins.mine, twins.optimizer)):
        model.weights.append(nn.Parameter(value.to(device)))
        optimizer.add_param_group({"params": [model.weights[-1]]})
    for _ in range(3):
        twins.step()
    twins.check_state()
    twins.close()


# --- Waits that are missed if they are not there ---


def slow_steps(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    """Records leave while the next ones come, and are read on the host while they are written."""
    with contextlib.closing(Twins(nvme_path, device, masters=True, aio={"gds": "on"})) as twins:
        direct["delay_us"] = 2000
        for _ in range(3):
            twins.step()
        assert len(twins.optimizer.state_dict()["state"]) == len(SHAPES)
        twins.step()


def step_after_one_that_failed(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    """Kernels of a step that failed have yet to use a slot when the record of the next one comes, from the pool."""
    twins = Twins(nvme_path, device, state={"resident_bytes": "3MiB"}, pool_bytes="8MiB")
    with contextlib.closing(twins), pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            twins.step()
        values = {name: value.clone() for name, value in twins.mine.state_dict().items()}
        saved = values, on_the_host(twins.optimizer.state_dict())
        # Made before: copies from the host would wait for the stream.
        wrong, right = ([torch.full_like(p, value) for p in twins.mine.weights] for value in (5.0, 0.5))
        set_gradients(twins.plain, right)
        twins.reference.step()
        join = DeviceBucket.join

        def join_late(bucket: DeviceBucket) -> None:
            join(bucket)
            keep_busy(device.type, 20_000)

        def fail(bucket: DeviceBucket, masters: object) -> None:
            raise RuntimeError("it fails")

        torch.accelerator.synchronize()
        set_gradients(twins.mine, wrong)
        with patch.context() as failing:
            failing.setattr(DeviceBucket, "join", join_late)
            failing.setattr(DeviceBucket, "encode", fail)
            with pytest.raises(RuntimeError, match="it fails"):
                twins.optimizer.step()
        twins.load(saved)
        set_gradients(twins.mine, right)
        twins.optimizer.step()
        twins.check_state()


def set_gradients(model: Model, gradients: list[torch.Tensor]) -> None:
    for p, gradient in zip(model.weights, gradients, strict=True):
        p.grad = gradient


def buckets_brought_twice(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    """The pool is short when a gradient of a bucket is on its way to its slot, where a longer record is read then."""
    bring_ahead, uploaded = Stepper._bring_ahead, GradientSwapper.uploaded
    is_ahead, uploads, fails_at = False, 0, 0

    def bring(stepper: Stepper, *arguments: Any) -> bool:
        nonlocal is_ahead
        is_ahead = True
        try:
            return bring_ahead(stepper, *arguments)
        finally:
            is_ahead = False

    def upload(gradients: GradientSwapper, *arguments: Any) -> Any:
        nonlocal uploads
        uploads += is_ahead
        if is_ahead and uploads == fails_at:
            raise PoolExhausted("it is short")
        return uploaded(gradients, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SHAPES", [(64, 64), (64, 64), (64, 256)] * 3)
        patch.setattr(Stepper, "_bring_ahead", bring)
        patch.setattr(GradientSwapper, "uploaded", upload)
        with contextlib.closing(Twins(nvme_path, device, offload_gradient={"device": "nvme"})) as twins:
            twins.step()
            direct["delay_us"] = 2000
            while uploads >= fails_at:
                uploads, fails_at = 0, fails_at + 1
                twins.step()
                twins.check()
            assert fails_at > 7


MISSED: dict[str, tuple[str, Callable[[Mock, Path, torch.device], None]]] = {
    "io/gds.py why_not_direct synchronize": ("sim-lazy", slow_steps),
    "optimizer/device_slots.py give_back transfer": ("sim-lazy", slow_steps),
    "optimizer/direct_state.py leave wait": ("sim-lazy", slow_steps),
    "optimizer/device_slots.py follow_caller begin": ("sim-random", step_after_one_that_failed),
    "optimizer/direct_state.py give_back transfer": ("sim-lazy", buckets_brought_twice),
}
"""By wait: the order of the device's work in which a run fails without it."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of what a failure leaves
@pytest.mark.parametrize("name", MISSED)
def test_a_wait_that_is_removed_is_missed(
    direct: Mock, nvme_path: Path, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run = MISSED[name]
    simulated().configure(**SETTINGS[settings])
    (site,) = [site for site in sites() if str(site) == name]
    for removed in (False, True):
        path = nvme_path / str(removed)
        path.mkdir()
        missed = True
        with contextlib.suppress(*([Exception] if removed else [])), monkeypatch.context() as patch:
            if removed:
                remove(site, patch)
            run(direct, path, device)
            missed = False
        direct["delay_us"] = 0
        gc.collect()
        assert missed == removed


# --- Where it is not used ---


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"verify": "crc32c"}, "optimizer state goes through the pool here: verify: crc32c takes checksums"),
        ({"state": {"step_device": "cpu"}}, "here none go there"),
        ({"state": {"device": "cpu"}}, "here none go there"),
        ({}, "cuFileDriverOpen"),
    ],
    ids=["verified", "steps on the host", "state on the host", "driver"],
)
def test_on_is_refused_where_it_cannot_be(
    direct: Mock, settings: dict[str, Any], reason: str, nvme_path: Path, device: torch.device
) -> None:
    direct["open_error"] = 5033 if not settings else 0
    model = Model(device, torch.float32)
    optimizer = adamw_of(model)
    config = config_for(nvme_path, aio={"gds": "on"}, **settings)
    for refused in (lambda: swapper.wrap_optimizer(optimizer, config), lambda: swapper.check(model, optimizer, config)):
        with pytest.raises(ConfigError, match=f"^aio.gds: on .*{reason}.* aio.gds: auto"):
            refused()
    assert not hasattr(optimizer, "swapper")
    direct["open_error"] = 0
    gc.collect()
    assert not list(nvme_path.iterdir())


def test_on_is_auto_where_it_can_be(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    twins = Twins(nvme_path, device, aio={"gds": "on"})
    for _ in range(3):
        twins.step()
    assert twins.swapper.stats().pool_peak_bytes == 0
    twins.close()


@pytest.mark.parametrize("why", WITHOUT_CUFILE)
def test_the_reason_is_logged_once_and_all_runs_as_without(
    direct: Mock, why: str, nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    settings, reason = WITHOUT_CUFILE[why]

    def run() -> None:
        twins = Twins(nvme_path, device, **settings)
        for _ in range(2):
            twins.step()
        twins.close()

    message = check_that_the_reason_is_logged_once(direct, why, reason, run, caplog)
    assert message.startswith("optimizer state")


def test_what_cufile_refuses_in_the_middle_goes_through_the_host(
    direct: Mock, nvme_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    twins = Twins(nvme_path, device)
    twins.step()
    direct["result"] = -5008  # Every call from now on.
    twins.step()
    assert sum("memory of the host" in record.getMessage() for record in caplog.records) == 1
    direct["result"] = 0
    twins.step()
    twins.check_state()
    twins.close()


def test_short_transfers_are_completed(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    twins = Twins(nvme_path, device)
    direct["short"] = 4096
    for _ in range(3):
        twins.step()
    twins.check_state()
    twins.close()


# --- Faults ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_transfer_that_fails_in_a_step_is_an_error_and_a_load_makes_it_good(
    direct: Mock, nvme_path: Path, device: torch.device, number: int, at: int, masters: bool
) -> None:
    twins = Twins(nvme_path, device, masters=masters)
    for _ in range(2):
        twins.step()
    saved = twins.saved()
    records = {path.name: path for path in twins.swapper.store.directories[0].iterdir()}  # type: ignore[union-attr]
    twins.step()  # Past the pool again.
    twins.load(saved)
    twins.mine.backward(3)
    twins.optimizer.step()
    twins.swapper.flush()
    twins.mine.zero_grad()
    twins.mine.backward(9)
    direct["fail_at"], direct["errno"] = at, number
    try:
        for _ in range(3):
            twins.optimizer.step()
        twins.swapper.flush()
    except SwapIOError as error:
        failure = error
    else:  # It was a read ahead of use, which was given up and done again.
        twins.plain.backward(9)
        for _ in range(3):
            twins.reference.step()
        twins.check_state()
        twins.close()
        return
    finally:
        direct["fail_at"] = -1
    assert failure.errno == number
    assert failure.path is not None and Path(failure.path).name in records
    if failure.buckets_stepped != 0:  # Else nothing has changed, and it may be tried again.
        with pytest.raises(SwapError):
            twins.optimizer.step()
    twins.load(saved)
    twins.mine.backward(3)
    twins.optimizer.step()
    twins.mine.zero_grad()
    twins.step()
    twins.check_state()
    twins.close()


def test_a_file_that_was_cut_short_is_an_error_and_a_load_makes_it_good(
    direct: Mock, nvme_path: Path, device: torch.device
) -> None:
    twins = Twins(nvme_path, device)
    for _ in range(2):
        twins.step()
    saved = twins.saved()
    assert twins.swapper.store is not None
    for cut in sorted(twins.swapper.store.directories[0].glob("*.safetensors"))[1::3]:
        content = cut.read_bytes()
        cut.write_bytes(content[:4096])
        twins.mine.backward(9)
        with pytest.raises(SwapIOError) as failure:
            twins.optimizer.step()
        assert failure.value.errno == errno.ENODATA and failure.value.path == str(cut)
        cut.write_bytes(content)
        twins.load(saved)
        twins.step()
        twins.check()
        saved = twins.saved()
    twins.close()


@pytest.mark.long
def test_ctrl_c_in_a_step(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    twins = Twins(nvme_path, device)
    for _ in range(2):
        twins.step()
    saved = twins.saved()
    twins.load(saved)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(device)
    for at in places(8, 300):
        twins.mine.backward(9)
        if not interrupted_at(at, twins.optimizer.step, "optimizer/di", "optimizer/device_slots"):
            break
        twins.load(saved)
        gc.collect()
        assert torch.accelerator.memory_allocated(device) <= before + 4 * twins_slots(twins), at
    twins.load(saved)
    twins.step()
    twins.check_state()
    twins.close()


@pytest.mark.long
@pytest.mark.parametrize("delay_us", [0, 20_000])
def test_an_optimizer_that_is_dropped_gives_all_back(
    direct: Mock, nvme_path: Path, device: torch.device, delay_us: int, caplog: pytest.LogCaptureFixture
) -> None:
    twins = Twins(nvme_path, device, masters=True)
    for _ in range(2):
        twins.step()
    direct["delay_us"] = delay_us
    twins.step()
    config = twins.config
    del twins
    gc.collect()
    direct["delay_us"] = 0
    assert direct["open_buffers"] == 0 and not list(nvme_path.iterdir())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert config.aio.gds == "auto"  # Its engines end with the optimizer, not with the config.


# --- Memory ---


def twins_slots(twins: Twins) -> int:
    return twins.swapper._plan.slot_bytes


def test_memory_is_what_was_said_and_comes_back(direct: Mock, nvme_path: Path, device: torch.device) -> None:
    torch.accelerator.synchronize()
    gc.collect()
    report = swapper.check(Model(device, torch.float32), adamw_of(Model(device, torch.float32)), config_for(nvme_path))
    twins = Twins(nvme_path, device)
    for _ in range(2):
        twins.step()
    slots = 3 * twins_slots(twins)
    twins.swapper.rest()
    torch.accelerator.synchronize()
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    twins.mine.backward(3)
    gradients = torch.accelerator.memory_allocated(device) - before
    torch.accelerator.reset_peak_memory_stats(device)
    twins.optimizer.step()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated(device) - before - gradients
    held = torch.accelerator.memory_allocated(device) - before - gradients
    assert slots <= held <= slots + (96 << 10)  # Alignment.
    assert peak <= report.step_device_bytes + (96 << 10)
    twins.swapper.rest()
    gc.collect()
    assert torch.accelerator.memory_allocated(device) <= before + gradients + 4096
    twins.swapper.close()
