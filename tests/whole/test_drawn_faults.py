"""Drawn runs on a simulated device with one fault each: an error that says what to do, or none, and never wrong bits.

    SWAPPER_FAULTS=500 SWAPPER_FAULTS_SEED=1000 .venv/bin/pytest -q tests/whole/test_drawn_faults.py

A seed draws what is kept where, and where a step is made; a fault, and the stage of a window in which it may strike
from then on. A run is saved, goes on, meets the fault, and goes on from where the error allows it to: what was begun is
done again, or, where that is refused, the checkpoint is loaded. It ends in the bits of the run without swapping.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import forget_failures, simulate
from interrupts import interrupted_at
from mock_cufile import COMPILER, Mock
from programs import limits
from sampling import ALL, EVERY
from torch import nn
from training import MasterWeights, same_bits

import swapper
from swapper.errors import SwapError, SwapIOError
from swapper.io import gds
from swapper.io.handle import AsyncIOHandle, FaultPlan

COUNT = int(os.environ.get("SWAPPER_FAULTS") or (60 if EVERY else 30 if ALL else 15))
SEED = int(os.environ.get("SWAPPER_FAULTS_SEED") or 0)
BEFORE, WINDOWS, WIDE = 2, 4, 64
"""Windows before the checkpoint, and all of them; the width of the model."""

pytestmark = pytest.mark.timeout(240)

KINDS = ("read", "read", "write", "write", "full", "short", "memory", "memory", "interrupt", "interrupt", "interrupt")
STAGES = ("forward", "backward", "step", "step", "evaluate", "save", "load", "state")
FILES = ("optimizer/", "parameter/", "gradient/", "storage/", "checkpoint/", "io/", "tensors/")


@dataclass(frozen=True)
class Case:
    """What a seed draws. `at` counts requests of the drive, allocations, or places where Ctrl-C may strike."""

    state: str
    gradients: str
    parameters: str
    step_device: str
    gds: str
    encoding: str
    native_step: str
    masters: bool
    pool: str
    """Of which the larger one has room for all, but for what it may keep."""
    passes: int
    in_backward: bool
    resident: bool
    order: str
    threads: bool
    kind: str
    stage: str
    at: int
    file: str
    by_cufile: bool
    """It is a transfer between the drive and the device that fails, if there are any."""
    twice: bool
    """It strikes again while the run is made good."""
    tries_again: bool
    """What failed is done again, if it may be, without a load."""


def draw(seed: int) -> Case:
    """The case of a seed. What the config refuses is not drawn."""
    rng = random.Random(seed)
    state = rng.choice(("nvme", "nvme", "nvme", "cpu", "none"))
    gradients, parameters = (rng.choice(("nvme", "nvme", "cpu", "none")) for _ in range(2))
    step_device = rng.choice(("device", "device", "cpu"))
    lossy = state == "nvme" and step_device == "cpu"
    kind = rng.choice(KINDS)
    return Case(
        state=state,
        gradients=gradients,
        parameters=parameters,
        step_device=step_device,
        gds=rng.choice(("auto", "auto", "off")) if COMPILER else "off",
        encoding=rng.choice(("exact", "packed", "bf16", "int8")) if lossy else "exact",
        native_step=random.Random(f"native {seed}").choice(("on", "off")),
        masters=rng.random() < 0.5 and state != "none",
        pool=rng.choice(("384KiB", "2MiB")),
        passes=rng.choice((1, 2)),
        in_backward=rng.random() < 0.25,
        resident=rng.random() < 0.25,
        order=rng.choice(("sim-lazy", "sim-random")),
        threads=rng.random() < 0.3,
        kind=kind,
        stage=rng.choice(STAGES),
        at=int(10 ** rng.uniform(0, 3.0 if kind == "interrupt" else 1.3)),
        file=rng.choice(FILES),
        by_cufile=rng.random() < 0.5,
        twice=rng.random() < 0.3,
        tries_again=rng.random() < 0.5,
    )


class Model(nn.Module):
    """Layers, of which one is used twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(5))
        self.norm = nn.LayerNorm(WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = x + torch.tanh(layer(x))
        return self.norm(x)  # type: ignore[no-any-return]


def make_model(case: Case) -> Model:
    torch.manual_seed(0)
    return Model().to("sim", torch.bfloat16 if case.masters else torch.float32)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=2.0**-7, foreach=False)


def batch(case: Case, window: int, part: int) -> torch.Tensor:
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * window + part))
    return x.to("sim", torch.bfloat16 if case.masters else torch.float32)


def loss_of(case: Case, model: nn.Module, window: int, part: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(case, window, part)).float().square().mean()
    return loss


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


class Run:
    """A run that is swapped.

    Attributes:
        window: the one that is next, or under way.
    """

    def __init__(self, case: Case, path: Path) -> None:
        self.case, self.window = case, 0
        self.model = make_model(case)
        self.optimizer: Any = adamw(list(self.model.parameters()))
        resident_bytes = 20_000 if case.resident else 0
        config = swapper.OffloadConfig(
            nvme_path=path,
            pool_bytes=case.pool,
            bucket_bytes="32KiB",
            gradient_accumulation_steps=case.passes,
            aio={"gds": case.gds},
            offload_optimizer={
                "device": case.state,
                "master_weights": case.masters,
                "step_in_backward": case.in_backward,
                "step_device": case.step_device,
                "encoding": case.encoding,
                "native_step": case.native_step,
                "resident_bytes": resident_bytes if case.state == "nvme" else 0,
            },
            offload_gradient={"device": case.gradients},
            offload_param={
                "device": case.parameters,
                "resident_bytes": resident_bytes if case.parameters == "nvme" else 0,
                "device_resident_bytes": resident_bytes if case.parameters != "none" else 0,
            },
        )
        swapper.offload(self.model, self.optimizer, config)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def make_window(self, enter: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        """The passes and the step of a window. `enter` is called for each stage."""
        for part in range(self.case.passes):
            with enter("forward"):
                loss = loss_of(self.case, self.model, self.window, part) / self.case.passes
            with enter("backward"):
                loss.backward()
            del loss
        self.step(enter)

    def step(self, enter: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        with enter("step"):
            self.optimizer.step()
        self.window += 1
        self.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            loss_of(self.case, self.model, 99, 0).item()

    def look(self) -> None:
        self.optimizer.state_dict()
        for value in self.model.state_dict().values():
            value.cpu()

    def flush(self) -> None:
        for each in (self.optimizer, self.model):
            if hasattr(each, "swapper"):
                each.swapper.flush()

    def save(self, path: Path) -> None:
        swapper.save_checkpoint(path, self.model, self.optimizer, extra=self.window).wait()

    def load(self, path: Path) -> None:
        self.window = swapper.load_checkpoint(path, self.model, self.optimizer)
        self.zero_grad()

    def close(self) -> None:
        for each in (self.optimizer, self.model):
            if hasattr(each, "swapper"):
                each.swapper.close()


def no_stage(stage: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Fault:
    """What goes wrong, from when it is armed until it has, or is disarmed."""

    def __init__(self, case: Case, plan: FaultPlan, mock: Mock | None, sim_device: Any) -> None:
        self._case, self._plan, self._mock, self._sim = case, plan, mock, sim_device

    def arm(self, at: int) -> None:
        kind = self._case.kind
        number = errno.ENOSPC if kind == "full" else errno.EIO
        if kind in ("read", "write", "full"):
            if self._mock is not None and self._case.by_cufile:
                self._mock["errno"], self._mock["fail_at"] = number, at
                return
            self._plan.fail_errno = number
            setattr(self._plan, "fail_read_at" if kind == "read" else "fail_write_at", at)
        elif kind == "short" and self._mock is not None:
            self._mock["short"] = 4096
        elif kind == "memory":
            self._sim.refuse_at(at)

    def disarm(self) -> None:
        self._plan.fail_read_at = self._plan.fail_write_at = 0
        self._sim.refuse_at(0)
        if self._mock is not None:
            self._mock["fail_at"], self._mock["errno"], self._mock["short"] = 0, 0, 0

    def explains(self, error: BaseException) -> bool:
        """True if `error` is one that users are told of this fault."""
        case = self._case
        if case.kind == "interrupt":
            return isinstance(error, KeyboardInterrupt)
        if case.kind == "memory":
            return isinstance(error, torch.OutOfMemoryError)
        if case.kind == "short":
            return False
        number = errno.ENOSPC if case.kind == "full" else errno.EIO
        says = "the drive is full" if case.kind == "full" else "the drive reported a failure"
        return isinstance(error, SwapIOError) and error.errno == number and says in str(error)


class Struck(BaseException):
    """The fault has struck, in an operation that raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


@contextlib.contextmanager
def struck(fault: Fault) -> Iterator[None]:
    try:
        yield
    except (SwapError, RuntimeError, KeyboardInterrupt) as error:
        assert fault.explains(error), f"nothing explains {error!r}"
        raise Struck(error.with_traceback(None)) from None


def meet(run: Run, fault: Fault, checkpoint: Path) -> str:
    """Go through a window, with what may come after it, and let the fault strike. Returns the stage in which it did.

    "" if it did not, or nobody was told: then nothing may be wrong.
    """
    case, stage_now = run.case, "forward"
    armed = False

    def act(stage: str, function: Callable[[], object]) -> None:
        nonlocal armed, stage_now
        stage_now = stage
        if stage == case.stage and case.kind == "interrupt":
            if interrupted_at(case.at, function, case.file):
                raise KeyboardInterrupt
            return
        if stage == case.stage and not armed:
            armed = True
            fault.arm(case.at)
        function()

    try:
        with struck(fault):
            for part in range(case.passes):
                losses: list[torch.Tensor] = []
                act("forward", lambda: losses.append(loss_of(case, run.model, run.window, part) / case.passes))  # noqa: B023
                act("backward", lambda: losses.pop().backward())  # type: ignore[no-untyped-call]  # noqa: B023
            act("step", run.optimizer.step)
            run.window += 1
            run.zero_grad()
            act("evaluate", run.evaluate)
            act("save", lambda: run.save(checkpoint.with_name("second")))
            act(
                "state",
                lambda: (run.optimizer.state_dict(), [value.cpu() for value in run.model.state_dict().values()]),
            )
            act("load", lambda: run.load(checkpoint.with_name("second")))
            stage_now = "flush"
            run.flush()
    except Struck:
        return stage_now
    finally:
        fault.disarm()
    return ""


def go_on(run: Run, fault: Fault, stage: str, checkpoint: Path) -> str:
    """Go on after the fault, in which `stage` ended. Returns how."""
    case = run.case
    if case.tries_again:
        try:
            if stage == "step" and case.state != "none":  # Torch's own step takes no notice of one that was cut off.
                run.step(no_stage)
            elif stage in ("forward", "backward") and not case.in_backward:
                run.zero_grad()
                run.make_window(no_stage)
            elif stage in ("evaluate", "save", "state", "flush"):
                run.evaluate()
                run.flush()
                run.look()
            else:
                raise SwapError("it is not tried")
            return "tried again"
        except SwapError:  # A step was cut off, or a write has failed that nobody was told of.
            pass
    if case.twice:
        try:
            with struck(fault):
                if case.kind == "interrupt":
                    if interrupted_at(case.at // 2, lambda: run.load(checkpoint), case.file):
                        raise KeyboardInterrupt
                else:
                    fault.arm(1 + case.at // 2)
                    run.load(checkpoint)
                    run.flush()
        except Struck:
            pass
        finally:
            fault.disarm()
    run.load(checkpoint)
    return "loaded"


@functools.lru_cache(maxsize=64)
def plain_values(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters after the windows before the checkpoint, and after all, of the run without swapping."""
    model, found = make_model(case), []
    make: Any = adamw
    optimizer: Any = MasterWeights(list(model.parameters()), make) if case.masters else adamw(list(model.parameters()))
    for window in range(WINDOWS):
        for part in range(case.passes):
            (loss_of(case, model, window, part) / case.passes).backward()
        optimizer.step()
        model.zero_grad()
        if window + 1 in (BEFORE, WINDOWS):
            found.append(values_of(model))
    return found[0], found[1]


def swapped_values(case: Case, path: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As `plain_values`, of the run without a fault: what is stored of it is rounded."""
    run, found = Run(case, path), []
    with contextlib.closing(run):
        while run.window < WINDOWS:
            run.make_window(no_stage)
            if run.window in (BEFORE, WINDOWS):
                found.append(values_of(run.model))
    return found[0], found[1]


met: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _what_was_met(request: pytest.FixtureRequest) -> Iterator[None]:
    """Faults that never strike are seen."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(
            f"\ndrawn faults: {COUNT} from seed {SEED}", *(f"{n} x {text}" for text, n in sorted(met.items())), sep="\n"
        )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of what a failure leaves
@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT))
def test_the_fault_of_this_seed(
    seed: int, nvme_path: Path, tmp_path: Path, mock_path: str, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = draw(seed)
    print(case)
    sim_device = simulate(case.order, monkeypatch, threads=case.threads)
    if not hasattr(torch.ops.sim, "refuse_at"):
        pytest.skip("the simulated device was built before it could refuse memory")
    sim_device.violations()
    mock = None
    if case.gds != "off":
        monkeypatch.setenv(gds.LIBRARY_VARIABLE, mock_path)
        monkeypatch.setattr(gds, "_NVIDIA_FS", tmp_path / "no-nvidia-fs")
        mock = Mock(mock_path)
        mock.reset()
        mock["device_start"], mock["device_length"], mock["device_distance"] = sim_device.dma_window()
    plan = FaultPlan(seed=seed, short=0.3 if case.kind == "short" else 0.0)
    monkeypatch.setattr("swapper.session.AsyncIOHandle", functools.partial(AsyncIOHandle, faults=plan))
    fault = Fault(case, plan, mock, sim_device)
    with limits(moves_all=True):
        lossy = case.encoding in ("bf16", "int8")
        at_checkpoint, at_end = swapped_values(case, nvme_path) if lossy else plain_values(case)
        run = Run(case, nvme_path)
        try:
            while run.window < BEFORE:
                run.make_window(no_stage)
            checkpoint = tmp_path / "checkpoints" / "first"
            checkpoint.parent.mkdir()
            run.save(checkpoint)
            stage = meet(run, fault, checkpoint)
            how = go_on(run, fault, stage, checkpoint) if stage else "not told"
            met[f"{case.kind} in {stage}: {how}" if stage else f"{case.kind}: {how}"] += 1
            while run.window < WINDOWS:
                run.make_window(no_stage)
            assert all(map(same_bits, values_of(run.model), at_end)), "other bits"
            run.load(checkpoint)
            assert all(map(same_bits, values_of(run.model), at_checkpoint)), "the checkpoint has other bits"
            while run.window < WINDOWS:
                run.make_window(no_stage)
            assert all(map(same_bits, values_of(run.model), at_end)), "other bits after the checkpoint"
        finally:
            fault.disarm()
            run.close()
    del run
    gc.collect()
    while any(thread.name == "swapper-writes" for thread in threading.enumerate()):
        time.sleep(0.001)
    assert sim_device.violations() == []
    forget_failures()
