"""Ctrl-C anywhere in a step with `step_in_backward`: modes stay as they were, and after a load training goes on.

The suite strikes a seeded sample of all places. `SWAPPER_ALL_INTERRUPTS=1` strikes them all, which takes long.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import random
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sampling
import torch
from interrupts import interrupted_at
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import swapper
from swapper import OffloadConfig, SwapError
from swapper.tensors import dispatch_modes
from swapper.tensors.grad_modes import modes_kept, outside_of_inference, set_grad_mode

WIDTH = 96
MODES = ["/torch/autograd/grad_mode.py", "/torch/utils/_contextlib.py", "/torch/autograd/graph.py"]
ALL = bool(os.environ.get("SWAPPER_ALL_INTERRUPTS"))
SAMPLE = 24 if sampling.ALL else 8
DEVICES = ["nvme none none", "cpu nvme none", "nvme nvme nvme"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Run:
    """A program, plain if `settings` is None."""

    def __init__(self, settings: OffloadConfig | None) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if settings is not None:
            swapper.offload(self.net, self.optimizer, settings)

    def step(self, number: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        self.net(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self, saved: tuple[Any, Any]) -> None:
        self.net.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        self.optimizer.zero_grad()

    def bits(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_torch_function_enabled()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = modes()
    torch.set_num_threads(1)
    yield
    after = modes()
    torch.set_grad_enabled(before[0])
    assert before == after


def strike(n: int, run: Run, *files: str) -> bool:
    """A step that is cut off at the n-th place. Returns whether it was."""
    with contextlib.suppress(SwapError):  # What followed an interrupt that a finalizer had swallowed.
        return interrupted_at(n, lambda: run.step(5), *files)
    return True


class Interrupted:
    """A swapped program that is cut off and loaded again, beside a plain one that was not."""

    def __init__(self, devices: str, nvme_path: Path) -> None:
        optimizer, gradient, parameter = devices.split()
        settings = OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="4MiB",
            bucket_bytes="32KiB",
            offload_optimizer={"device": optimizer, "step_in_backward": True},
            offload_gradient={"device": gradient},
            offload_param={"device": parameter},
        )
        plain, self.run = Run(None), Run(settings)
        plain.step(0)
        self.run.step(0)
        self.saved = copy.deepcopy((plain.net.state_dict(), plain.optimizer.state_dict()))
        plain.step(5)
        plain.step(6)
        self.wanted = plain.bits()

    def check(self, n: int, *files: str) -> bool:
        """Strike at the n-th place, load, and go on."""
        self.run.load(self.saved)
        struck = strike(n, self.run, *files)
        assert modes() == (True, False, True), n
        gc.collect(0)
        self.run.load(self.saved)
        self.run.step(5)
        self.run.step(6)
        assert modes() == (True, False, True), n
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, n
        assert all(torch.equal(a, b) for a, b in zip(self.run.bits(), self.wanted, strict=True)), n
        return struck

    def close(self) -> None:
        swapper.of(self.run.optimizer).close()


@pytest.mark.long
@pytest.mark.parametrize("devices", DEVICES)
def test_ctrl_c_at_any_place_of_a_step(devices: str, nvme_path: Path) -> None:
    program, files = Interrupted(devices, nvme_path), ["/swapper/", *MODES]
    if ALL:
        places: Iterator[int] = itertools.count()
    else:
        program.run.load(program.saved)
        highest = 64
        while strike(highest, program.run, *files):
            highest *= 2
            program.run.load(program.saved)
        places = iter(random.Random(7).sample(range(highest), SAMPLE))
    for n in places:
        if not program.check(n, *files) and ALL:
            break
    program.close()


def test_ctrl_c_while_values_are_taken_away(nvme_path: Path) -> None:
    """A parameter has its values and its class, or neither, so that it comes back for the next use."""
    program, x = Interrupted("nvme none nvme", nvme_path), torch.ones(2, WIDTH)
    net, files = program.run.net, ["tensors/evicted.py", "tensors/hollow.py"]
    expected = net(x)
    for n in itertools.count():
        interrupted = interrupted_at(n, lambda: net(x), *files)
        gc.collect(0)
        assert torch.equal(net(x), expected), n
        if not interrupted:
            break
    assert n > 50
    program.close()


class Noted(TorchDispatchMode):
    """Sees operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_ctrl_c_leaves_the_dispatch_modes_of_others(nvme_path: Path) -> None:
    """But at the first instruction of an exit: see [Note: Ctrl-C and dispatch modes] in `dispatch_modes`."""
    program, x = Interrupted("nvme none nvme", nvme_path), torch.ones(2, WIDTH)
    net, files = program.run.net, ["tensors/dispatch_modes.py", "/torch/utils/_python_dispatch.py"]
    expected = net(x)
    raised: list[KeyboardInterrupt] = []

    def use() -> None:
        try:
            net(x)
        except KeyboardInterrupt as error:
            raised[:] = [error]  # Whoever keeps the traceback keeps what it would put back.
            raise

    for n in itertools.count(0, 1 if ALL else 3):
        with contextlib.suppress(RuntimeError, AssertionError), Noted(), Noted():
            interrupted = interrupted_at(n, use, *files)
            places = traceback.extract_tb(raised[0].__traceback__) if raised else []
            struck = [place.name for place in places if place.filename.endswith("tensors/dispatch_modes.py")]
            left = torch._C._len_torch_dispatch_stack()
        assert left == 2 or struck[-1:] == ["__exit__"], (n, struck)
        raised.clear()
        gc.collect(0)
        assert torch._C._len_torch_dispatch_stack() == 0, n
        assert torch.equal(net(x), expected), n
        if not interrupted:
            break
    assert n > 50
    program.close()


def test_dispatch_modes_stay_on_whatever_the_handler_of_ctrl_c_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pop = dispatch_modes._pop_mode

    def pop_and_interrupt() -> Any:
        signal.raise_signal(signal.SIGINT)
        return pop()

    def stop(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(dispatch_modes, "_pop_mode", pop_and_interrupt)
    former = signal.signal(signal.SIGINT, stop)
    try:
        with Noted(), Noted():
            with pytest.raises(SystemExit), dispatch_modes.outside_of_dispatch_modes():
                pass
            left = torch._C._len_torch_dispatch_stack()
            for _ in range(2 - left):  # Else the `with` would fail with an error of torch's.
                torch._C._push_on_torch_dispatch_stack(Noted())
    finally:
        signal.signal(signal.SIGINT, former)
    assert left == 2


@pytest.mark.long
@pytest.mark.parametrize("devices", DEVICES)
def test_ctrl_c_where_modes_are_switched(devices: str, nvme_path: Path) -> None:
    """All places there, before and after a switch, and when the traceback that holds its guard has died."""
    program = Interrupted(devices, nvme_path)
    missed = 0
    for n in itertools.count(0, 1 if ALL else 3):
        missed = 0 if program.check(n, "tensors/grad_modes.py", *MODES[:2]) else missed + 1
        if missed == 3:
            break
    assert n > 10
    program.close()


@pytest.mark.parametrize("outside", [False, True])
def test_modes_are_kept_at_every_place(outside: bool) -> None:
    def switch() -> None:
        with (outside_of_inference if outside else modes_kept)():
            set_grad_mode(False)
            assert not torch.is_grad_enabled()
            torch.ones(1).add_(1)

    for enabled, inference in [(True, False), (False, False), (False, True)]:
        for n in itertools.count():
            with torch.inference_mode(inference), torch.set_grad_enabled(enabled):
                before = modes()
                interrupted = interrupted_at(n, switch, "tensors/grad_modes.py", "/test_ctrl_c_in_backward.py")
                assert modes() == before
            gc.collect(0)
            assert modes() == (True, False, True)
            if not interrupted:
                break
        assert n > 4


@pytest.mark.long
@pytest.mark.parametrize("held", [False, True])
def test_reading_gradients_that_are_gone_leaves_the_modes_alone(held: bool, nvme_path: Path) -> None:
    program = Interrupted("nvme none none", nvme_path)
    for n in itertools.count():
        program.run.load(program.saved)
        x = torch.ones(2, WIDTH)
        program.run.net(x).sum().backward()
        error: BaseException | None = None

        def read() -> None:
            nonlocal error
            try:
                assert all(p.grad is not None for p in program.run.net.parameters())
            except KeyboardInterrupt as raised:
                error = raised if held else None
                raise

        interrupted = interrupted_at(
            n, read, "tensors/evicted_gradients.py", "tensors/grad_modes.py", "optimizer/backward_step.py", *MODES
        )
        assert modes() == (True, False, True), n
        del error  # Who kept the traceback lets go of it: nothing may be switched by that.
        gc.collect(0)
        assert modes() == (True, False, True), n
        program.run.optimizer.step()
        if not interrupted:
            break
    assert n > 10
    program.close()
