"""Native steps have the bits of the optimizer's own class, on any values, and whatever gives others is not used."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import swapper
from swapper.io import _native
from swapper.optimizer import native_queue, native_step, step_program, step_recorder
from swapper.optimizer.master_codec import split_master, ties_bytes_max
from swapper.optimizer.native_parts import share_memory
from swapper.optimizer.operands import Operand, Scratch


class Lion(Optimizer):
    """A user's own, after Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"] * group["betas"][0] + p.grad * (1 - group["betas"][0])
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


class Replacing(Optimizer):
    """A user's AdamW that makes new tensors, of its state too, and needs a square with and without its root."""

    def __init__(self, params: Any, lr: float = 1e-3, floor: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m, v = state["m"] * b1 + p.grad * (1 - b1), state["v"] * b2 + p.grad * p.grad * (1 - b2)
                root = v.sqrt() + 1e-8
                if group["floor"]:
                    root = root + v * group["floor"]
                    m = m + state["v"] * 1e-3
                state["m"], state["v"] = m, v
                p.addcdiv_(m, root, value=-group["lr"] / (1 - b1 ** state["step"]))


class Bounded(Optimizer):
    """A user's own, of bounds, powers and tensors of zeros."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m, v, last = (state.get(key, torch.zeros_like(p)) for key in ("exp_avg", "exp_avg_sq", "last"))
                m = m * 0.9 + p.grad.clamp(max=3.0) + last.clamp_(-0.5, 0.5)
                v = v * 0.99 + p.grad**2 * 0.01
                update = (v + 1e-10).rsqrt() * m + (m.abs() ** 0.5).clamp(min=1e-3) ** -1
                p.sub_(update.square().clamp_(1e-6, 10.0), alpha=group["lr"])
                last.zero_().sub_(p.grad)
                state.update(exp_avg=m, exp_avg_sq=v, last=last)


swapper.register_elementwise(Lion)
swapper.register_elementwise(Replacing)
swapper.register_elementwise(Bounded)

NATIVE: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW-no-decay": (torch.optim.AdamW, {"weight_decay": 0.0, "maximize": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW-small-betas": (torch.optim.AdamW, {"betas": (0.3, 0.4)}),
    "AdamW-fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW-fused-small-betas": (torch.optim.AdamW, {"fused": True, "betas": (0.3, 0.4), "weight_decay": 0.0}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam-fused": (torch.optim.Adam, {"fused": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD-nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD-dampening": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True, "foreach": True},
    ),
    "SGD-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "SGD-fused-nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
    ),
    "SGD-fused-dampening": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "fused": True, "maximize": True},
    ),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "RMSprop-centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "AdamW-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam-amsgrad-foreach": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "Adam-amsgrad-fused": (torch.optim.Adam, {"amsgrad": True, "fused": True, "weight_decay": 0.1}),
    "AdamW-amsgrad-fused": (torch.optim.AdamW, {"amsgrad": True, "fused": True, "maximize": True}),
    "Adagrad-fused": (torch.optim.Adagrad, {"fused": True}),
    "Adagrad-fused-decay": (
        torch.optim.Adagrad,
        {"fused": True, "weight_decay": 0.1, "lr_decay": 0.1, "maximize": True},
    ),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adadelta-foreach": (torch.optim.Adadelta, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {}),
    "Lion": (Lion, {}),
    "Bounded": (Bounded, {}),
    "Replacing": (Replacing, {}),
    "Replacing-floor": (Replacing, {"floor": 0.1}),
}
BY_CLASS = {"Rprop": (torch.optim.Rprop, {})}

Chosen = list[tuple[int, int]]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Of each bucket, how many segments were stepped natively, and how many there were."""
    counts: Chosen = []
    choose: Callable[..., list[Any]] = native_step.NativeSteps.choose

    def counted(self: Any, optimizer: Optimizer, operands: list[Any], *rest: Any) -> list[Any]:
        found = choose(self, optimizer, operands, *rest)
        counts.append((len(found), len(operands)))
        return found

    monkeypatch.setattr(native_step.NativeSteps, "choose", counted)
    return counts


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=[0, 1, 2], ids=["avx512", "avx2", "baseline"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    chosen: int = request.param
    if not _native.has_instruction_set(chosen):
        pytest.skip("this processor lacks it")
    monkeypatch.setattr(_native, "best_instruction_set", lambda: chosen)
    return chosen


def values(numel: int, seed: int) -> torch.Tensor:
    """Usual values; one in four is random bits, one in sixteen a special value."""
    generator = torch.Generator().manual_seed(seed)
    usual = torch.randn(numel, generator=generator)
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, torch.inf, -torch.inf, torch.nan, 1.0, 0.5])
    kind = torch.randint(16, (numel,), generator=generator)
    picked = special[torch.randint(len(special), (numel,), generator=generator)]
    return torch.where(kind == 0, picked, torch.where(kind < 5, bits, usual))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, or both NaN."""
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def wrapped(optimizer: Optimizer, masters: bool = False, native: str = "on", bucket_bytes: str = "1MiB") -> Optimizer:
    config = swapper.OffloadConfig(
        pool_bytes="32MiB",
        bucket_bytes=bucket_bytes,
        offload_optimizer={"device": "cpu", "master_weights": masters, "native_step": native},
    )
    return swapper.wrap_optimizer(optimizer, config)


def with_any_values(name: str, lengths: list[int], steps: int) -> Optimizer:
    """An optimizer that has made some steps, and whose parameters and state are then random bits."""
    cls, options = NATIVE[name]
    parameters = [nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n))) for n in lengths]
    optimizer = cls(parameters, **options)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        optimizer.step()
    for i, p in enumerate(parameters):
        p.data.copy_(values(p.numel(), 3 * i))
        p.grad = values(p.numel(), 3 * i + 1)
        for k, value in enumerate(optimizer.state[p].values()):
            if isinstance(value, torch.Tensor) and value.dim():
                value.copy_(values(p.numel(), 1000 * i + k))
    return optimizer


def assert_one_step_is_the_same(name: str, lengths: list[int], steps: int, bucket_bytes: str) -> None:
    plain = with_any_values(name, lengths, steps)
    swapped = wrapped(with_any_values(name, lengths, steps), bucket_bytes=bucket_bytes)
    plain.step()
    swapped.step()
    for p, q in zip(plain.param_groups[0]["params"], swapped.param_groups[0]["params"], strict=True):
        assert same(p, q), p.numel()
        mine, other = plain.state[p], swapper.of(swapped).state(q)
        assert list(mine) == list(other)
        for key, value in mine.items():
            assert same(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key
    swapper.of(swapped).close()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NATIVE)
def test_any_bits_of_any_length_step_as_in_plain_torch(
    name: str, threads: int, instruction_set: int, chosen: Chosen
) -> None:
    lengths = [*range(64, 128), 300, 16384 + 5, 70003]
    assert_one_step_is_the_same(name, lengths, 7, "64KiB")
    assert all(native == all_ for native, all_ in chosen) and chosen


def compiled_to_numpy(graph: Any, inputs: Any) -> Callable[..., tuple[torch.Tensor]]:
    """A backend of torch.compile whose code calls no operation of torch, and has the nearest floats to roots."""

    def run(*args: Any) -> tuple[torch.Tensor]:
        (values,) = (each for each in args if isinstance(each, torch.Tensor))
        return (torch.from_numpy(np.sqrt(values.detach().numpy()) * np.float32(0.75)),)

    return run


def test_a_class_that_is_compiled_steps_itself_and_stays_compiled() -> None:
    @torch.compile(dynamic=True, backend=compiled_to_numpy)
    def root_of(values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()

    class Compiled(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["square"] = state.get("square", torch.zeros_like(p)) * 0.9 + p.grad * p.grad
                p.addcdiv_(p.grad, root_of(state["square"]) + 1.0, value=-0.1)

    swapper.register_elementwise(Compiled)

    def steps(is_swapped: bool) -> torch.Tensor:
        p = nn.Parameter(torch.ones(70003))
        optimizer = Compiled([p])
        if is_swapped:
            wrapped(optimizer)
        for step in range(3):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return p.detach()

    plain = steps(False)
    assert same(steps(True), plain)
    assert same(steps(False), plain)


WITH_ROOTS = ["AdamW", "AdamW-foreach", "Adam", "Replacing"]


@pytest.mark.parametrize("name", WITH_ROOTS)
@pytest.mark.parametrize("found", ["vendor", "none", "another"])
def test_roots_are_taken_by_the_vendor_only_where_they_are_torchs(
    found: str, name: str, chosen: Chosen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else by torch itself, between two programs: where torch has no such function, or calls another one."""
    if found == "none":
        monkeypatch.setattr(_native, "has_vendor_sqrt", lambda: False)
    elif not _native.has_vendor_sqrt():
        pytest.skip("this torch takes roots by no vendor's function")
    if found == "another":
        native_program = step_program._native_program

        def other(operations: Sequence[step_recorder.Operation], arrays: int) -> _native.StepProgram:
            """With 1 / root in the place of the vendor's."""
            replaced = [replace(e, opcode=18) if e.opcode == step_recorder.SQRT else e for e in operations]
            return native_program(replaced, arrays)

        monkeypatch.setattr(step_program, "_native_program", other)
    taken = []
    sqrt = torch.sqrt
    monkeypatch.setattr(torch, "sqrt", lambda *args, **kwargs: taken.append(args[0].numel()) or sqrt(*args, **kwargs))
    numel = 70003
    assert_one_step_is_the_same(name, [numel, 300], 3, "64KiB")
    assert all(native == all_ for native, all_ in chosen) and chosen
    assert any(n > 1500 for n in taken) == (found != "vendor")


@pytest.mark.thorough("a million values for each class; a few lengths and threads otherwise")
@pytest.mark.parametrize("name", NATIVE)
def test_a_million_values_step_as_in_plain_torch(name: str, chosen: Chosen) -> None:
    """A hundred million of each class are compared by `benchmarks/step_exactness.py`."""
    assert_one_step_is_the_same(name, [(1 << 20) + 77], 6, "2MiB")
    assert all(native == all_ for native, all_ in chosen) and chosen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("bucket_bytes", ["64KiB", "4MiB"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [*NATIVE, *BY_CLASS])
def test_masters_step_as_by_the_class(
    name: str, dtype: torch.dtype, bucket_bytes: str, threads: int, chosen: Chosen
) -> None:
    cls, options = {**NATIVE, **BY_CLASS}[name]
    shapes = [(300, 401), (64,), (3,), (67,), (5000,), (37, 129), ()]

    def run(native: str) -> tuple[list[torch.Tensor], dict[int, dict[str, Any]]]:
        generator = torch.Generator().manual_seed(0)
        # From fp16: one master in eight is a tie.
        start = [torch.randn(shape, generator=generator).to(torch.float16).float() for shape in shapes]
        parameters = [nn.Parameter(each.to(dtype)) for each in start]
        optimizer = wrapped(cls(parameters, **options), True, native, bucket_bytes)
        for step in range(7):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            for i, p in enumerate(parameters):
                p.grad = None if i == 1 and step == 3 else torch.randn(p.shape, generator=generator).to(dtype)
                if step == 5 and i == 4:
                    p.grad.view(-1)[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0, -0.0]).to(dtype)
                if step == 4 and i == 5:
                    p.data[0, 0] = 1.0  # Edited: its masters are made anew.
            optimizer.step()
        state = copy.deepcopy(optimizer.state_dict()["state"])
        assert swapper.of(optimizer).stats().masters_reset == 1
        swapper.of(optimizer).close()
        return [p.detach().clone() for p in parameters], state

    mine, my_state = run("on")
    assert any(native for native, _ in chosen) == (name in NATIVE)
    chosen.clear()
    others, other_state = run("off")
    assert not any(native for native, _ in chosen)
    assert all(map(same, mine, others))
    for i, state in other_state.items():
        assert list(state) == list(my_state[i])
        for key, value in state.items():
            assert same(value, my_state[i][key]) if isinstance(value, torch.Tensor) else value == my_state[i][key]


@pytest.mark.parametrize("masters", [True, False])
def test_buffers_that_change_with_each_step_and_plans_that_change_between(
    nvme_path: Path, masters: bool, chosen: Chosen
) -> None:
    """Where the state is, is found once for a segment; the pool gives it other places."""

    def run(native: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if masters else torch.float32
        parameters = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (150000, 70003, 9000, 65)]
        section = {"device": "nvme", "master_weights": masters, "native_step": native}
        config = swapper.OffloadConfig(
            nvme_path=str(nvme_path), pool_bytes="2MiB", bucket_bytes="256KiB", offload_optimizer=section
        )
        optimizer = swapper.wrap_optimizer(torch.optim.AdamW(parameters[1:], lr=0.1, fused=True), config)
        for step in range(8):
            if step == 2:
                optimizer.add_param_group({"params": parameters[:1], "lr": 0.01})
            if step == 4:
                removed = optimizer.param_groups[0]["params"].pop(1)
            if step == 5:
                optimizer.param_groups[0]["params"].append(removed)
            if step == 6:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        state = swapper.of(optimizer).state(parameters[0])
        swapper.of(optimizer).close()
        return [*(p.detach().clone() for p in parameters), *(state[key] for key in ("exp_avg", "exp_avg_sq"))]

    mine = run("on")
    assert sum(native for native, _ in chosen) > 20
    assert all(map(same, mine, run("off")))


@pytest.mark.parametrize("moment", ["trial", "step"])
def test_what_gives_other_bits_is_noticed_and_not_used(
    moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen: Chosen
) -> None:
    """As if torch rounded in another way than it does: a number is half a unit off."""
    arithmetic = step_recorder.StepRecorder._arithmetic

    def changed(self: Any, base: str, given: Any) -> Any:
        opcode, operands, constants = arithmetic(self, base, given)
        return opcode, operands, tuple(c * (1 + 2.0**-23) for c in constants) if base == "addcdiv" else constants

    plain = [nn.Parameter(torch.full((100,), 0.5)) for _ in range(2)]
    mine = [nn.Parameter(p.detach().clone()) for p in plain]
    caplog.set_level(logging.INFO)
    if moment == "trial":
        monkeypatch.setattr(step_recorder.StepRecorder, "_arithmetic", changed)
    reference, optimizer = torch.optim.AdamW(plain), wrapped(torch.optim.AdamW(mine))
    assert ("other bits than the class's own" in caplog.text) == (moment == "trial")
    assert ("AdamW is stepped natively" in caplog.text) == (moment == "step")
    for step in range(6):
        if step == 3 and moment == "step":
            monkeypatch.setattr(step_recorder.StepRecorder, "_arithmetic", changed)
        for p, q in zip(plain, mine, strict=True):
            p.grad = torch.randn(100)
            q.grad = p.grad.clone()
        reference.step()
        optimizer.step()
        assert all(map(same, plain, mine))
    said = [record.message for record in caplog.records if "other bits than the class's own" in record.message]
    assert len(said) == 1
    assert any(native for native, _ in chosen) == (moment == "step")
    assert not any(native for native, _ in chosen[-2:])


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("name", "is_long"), [("AdamW", True), ("RAdam", True), ("AdamW-fused", False), ("SGD", False)]
)
def test_auto_is_for_large_groups_whose_steps_are_many_operations_or_have_masters(
    name: str, is_long: bool, masters: bool, monkeypatch: pytest.MonkeyPatch, chosen: Chosen
) -> None:
    monkeypatch.setattr(native_step, "_GROUP_NUMEL_MIN", 1000)
    cls, options = NATIVE[name]
    dtype = torch.bfloat16 if masters else torch.float32
    groups = [[nn.Parameter(torch.ones(n, dtype=dtype)) for n in numels] for numels in ((600, 400), (999,))]
    optimizer = wrapped(cls([{"params": group} for group in groups], **options), masters, "auto")
    for _ in range(7):
        for p in groups[0] + groups[1]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert chosen[-1] == ((2 if masters or is_long else 0), 3)


def test_a_damaged_master_is_refused_before_anything_is_written() -> None:
    numel = 1000
    master = torch.randn(numel)
    bits, low = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    ties = torch.empty(ties_bytes_max(numel), dtype=torch.uint8)
    tie_bits = split_master(master, bits, low, ties)
    gradient, before = torch.randn(numel), (bits.clone(), low.clone())
    program = _native.StepProgram([(5, 0, 0, 1, 0, 0, (-0.1,))], 0, 2)
    addresses = bits.data_ptr(), low.data_ptr(), ties.data_ptr()
    job = (program, numel, 0, *addresses, tie_bits + 1, torch.empty_like(ties).data_ptr(), gradient.data_ptr(), False)
    with pytest.raises(ValueError, match="ties"):
        _native.run_step([(*job, [], [])], 2, _native.best_instruction_set())
    assert torch.equal(bits.view(torch.int16), before[0].view(torch.int16)) and torch.equal(low, before[1])


@pytest.mark.parametrize("shape", [(1000,), (40, 50), (40, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("of", ["numel", "sizes"])
def test_a_class_that_asks_for_sizes_is_stepped_by_itself(of: str, shape: tuple[int, ...], chosen: Chosen) -> None:
    class Scaled(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                scale = p.numel() if of == "numel" else max(1, p.shape[0] ** 2 / p.numel())
                p.add_(state["m"].mul_(0.9).add_(p.grad), alpha=-0.1 * scale**0.5)

    swapper.register_elementwise(Scaled)
    plain, mine = (nn.Parameter(torch.full(shape, 0.5)) for _ in range(2))
    reference, optimizer = Scaled([plain]), wrapped(Scaled([mine]))
    for seed in range(3):
        plain.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        mine.grad = plain.grad.clone()
        reference.step()
        optimizer.step()
        assert same(plain, mine)
    assert chosen == [(0, 1)] * 3
    swapper.of(optimizer).close()


@pytest.mark.parametrize("wrapped_before", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_default_dtype_is_not_asked(dtype: torch.dtype, wrapped_before: bool, chosen: Chosen) -> None:
    """A trial's scratch of that dtype would be too short for fp32."""
    plain, mine = (nn.Parameter(torch.full((300,), 0.5)) for _ in range(2))
    before = wrapped(torch.optim.AdamW([mine])) if wrapped_before else None
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        reference, optimizer = torch.optim.AdamW([plain]), before or wrapped(torch.optim.AdamW([mine]))
        for seed in range(3):
            plain.grad = torch.randn(300, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))
            mine.grad = plain.grad.clone()
            reference.step()
            optimizer.step()
            assert same(plain, mine)
    finally:
        torch.set_default_dtype(default)
    assert chosen == [(0, 1), (1, 1), (1, 1)]
    swapper.of(optimizer).close()


def test_all_threads_take_denormals_for_what_the_caller_does() -> None:
    """The threads are older than what the caller says."""
    numel = 1 << 20
    program = _native.StepProgram([(8, 0, 0, 0, 0, 0, (1.0,))] * 100, 0, 2)
    gradient = torch.zeros(numel)

    def kept() -> int:
        p = torch.ones(numel, dtype=torch.int32).view(torch.float32)
        job = (program, numel, p.data_ptr(), 0, 0, 0, 0, 0, gradient.data_ptr(), False, [], [])
        _native.run_step([job], 3, _native.best_instruction_set())
        return int(p.view(torch.int32).count_nonzero())

    assert kept() == numel
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert [kept() for _ in range(3)] == [0] * 3
    finally:
        torch.set_flush_denormal(False)
    assert kept() == numel


def test_parameters_that_share_memory_are_stepped_one_after_the_other(chosen: Chosen) -> None:
    def run(wrap: Callable[[Optimizer], Optimizer]) -> torch.Tensor:
        torch.manual_seed(0)
        memory = torch.randn(300)
        parameters = [nn.Parameter(memory[:200]), nn.Parameter(memory[100:])]
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1))
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(200)
            optimizer.step()
        return memory

    assert same(run(wrapped), run(lambda optimizer: optimizer))
    assert chosen and not any(native for native, _ in chosen)


def test_a_user_sees_that_a_parameter_has_changed() -> None:
    for dtype, masters in ((torch.float32, False), (torch.bfloat16, True)):
        p = nn.Parameter(torch.randn(5000).to(dtype))
        optimizer = wrapped(torch.optim.SGD([p], lr=0.1), masters)
        for _ in range(3):
            p.grad = torch.randn(5000).to(dtype)
            version = p._version
            optimizer.step()
            assert p._version > version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_whose_memory_has_its_negative_is_stepped_as_what_it_is(dtype: torch.dtype) -> None:
    """As `z.conj().imag` is, of which the sign is a flag of the tensor."""
    numel = 1 << 16
    values, gradient = torch.randn(2, numel).to(dtype)
    found = []
    for sign in (1, -1):
        p = nn.Parameter(values.clone())
        optimizer = wrapped(torch.optim.SGD([p], lr=0.1, momentum=0.9), masters=dtype is torch.bfloat16)
        for _ in range(3):
            p.grad = gradient.clone() if sign == 1 else torch._neg_view(-gradient)
            optimizer.step()
        found.append(p.detach())
        swapper.of(optimizer).close()
    assert torch.equal(*found)


class Memory(bytearray):
    """Can be referred to weakly."""


def test_a_step_that_fails_keeps_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter and its gradient are cut at once: what was not stepped of them is given up with the step."""
    numel = 1 << 17
    p = nn.Parameter(torch.randn(numel).bfloat16())
    config = swapper.OffloadConfig(
        pool_bytes="16MiB",
        bucket_bytes="512KiB",
        offload_optimizer={"device": "cpu", "master_weights": True, "native_step": "on"},
    )
    optimizer = swapper.wrap_optimizer(torch.optim.SGD([p], lr=0.1, momentum=0.9), config)
    p.grad = torch.ones_like(p)
    optimizer.step()
    memory = Memory(2 * numel)
    alive = weakref.ref(memory)
    p.grad = torch.frombuffer(memory, dtype=torch.bfloat16)
    calls: list[int] = []

    def failing(steps: Sequence[tuple[Any, step_program.NativeSegment]], threads: int) -> step_program.NativeRun:
        calls.extend(segment.numel for _, segment in steps)
        if len(calls) == 2:
            raise OSError("on purpose")
        return step_program.NativeRun(steps, threads)

    monkeypatch.setattr(native_queue, "_NUMEL_TOGETHER", 1)
    monkeypatch.setattr(native_queue, "NativeRun", failing)
    with pytest.raises(OSError, match="on purpose"):
        optimizer.step()
    assert sum(calls) < numel  # There is more of it.
    calls.clear()
    p.grad = None
    del memory
    gc.collect()
    assert alive() is None
    swapper.of(optimizer).close()


class Sized(torch.optim.SGD):
    """Its step is torch's, but for what goes into it."""

    def _init_group(self, group: Any, params: Any, grads: Any, *rest: Any) -> Any:
        found = super()._init_group(group, params, grads, *rest)
        grads[:] = [g * 0.5 if p.numel() > 4000 else g for p, g in zip(params, grads, strict=True)]
        return found


class Own(Optimizer):
    """SGD with momentum. `change` is called with each group that it steps, and each parameter."""

    def __init__(self, params: Any, change: Callable[[Any, Any], Any], option: Any = None) -> None:
        super().__init__(params, {"lr": 0.1, "option": option})
        self.change = change

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].mul_(0.9).add_(p.grad)
                    p.add_(state["m"], alpha=-group["lr"] / (1 + len(group["option"] or ())))
                    self.change(group, p)


class Largest(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].copy_(torch.maximum(p.grad, state["m"]))
                p.add_(p.grad, alpha=-group["lr"])


swapper.register_elementwise(Own)
swapper.register_elementwise(Largest)


def assert_steps_are_plain(
    make: Callable[[], tuple[list[nn.Parameter], Optimizer]], give: Callable[[list[nn.Parameter], int], None]
) -> None:
    """Of parameters, gradients and state. `give` gives the gradients of one step."""
    ends = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        parameters, optimizer = make()
        if is_wrapped:
            optimizer = wrapped(optimizer)
        for step in range(6):
            torch.manual_seed(step)
            give(parameters, step)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        end = [*parameters, *(p.grad for p in parameters)]
        end += [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        ends.append([None if each is None else each.detach().clone() for each in end])
        if is_wrapped:
            swapper.of(optimizer).close()
    for mine, other in zip(*ends, strict=True):
        assert (mine is None) == (other is None)
        # With the payloads, and the sign of 0.0.
        assert mine is None or torch.equal(mine.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def give_random(parameters: list[nn.Parameter], step: int) -> None:
    for p in parameters:
        new = torch.randn(p.shape)
        p.grad = new if p.grad is None else p.grad + new


@pytest.mark.parametrize("is_first", [True, False])
def test_memory_that_a_parameter_with_gaps_shares_with_another(is_first: bool) -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        memory = torch.randn(64, 64)
        parameters = [nn.Parameter(memory[:, :32]), nn.Parameter(memory[40:])]
        return parameters, torch.optim.AdamW(parameters if is_first else parameters[::-1], lr=0.1)

    assert_steps_are_plain(make, give_random)


def test_a_gradient_in_a_longer_one_that_a_parameter_is_in() -> None:
    memory = torch.zeros(8000)
    parameters = [nn.Parameter(memory[6000:7000]), nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(8000))]
    gradients = [torch.ones(1000), memory[10:110], memory]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    operands: Any = [Operand(mock.Mock(), p.detach(), p.grad) for p in parameters]
    assert share_memory([], operands)
    assert not share_memory([], operands[1:])


def unaligned(numel: int) -> torch.Tensor:
    """As of a file that is mapped."""
    memory = np.zeros(4 * numel + 64, dtype=np.uint8)
    begin = -memory.ctypes.data % 64 + 2
    return torch.from_numpy(memory[begin : begin + 4 * numel].view(np.float32)).copy_(torch.randn(numel))


@pytest.mark.parametrize("what", ["parameter", "gradient", "no memory"])
def test_addresses_that_are_no_multiples_of_their_elements(what: str) -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(unaligned(1000) if what == "parameter" else torch.randn(1000))]
        return parameters, torch.optim.AdamW(parameters, lr=0.1)

    def give(parameters: list[nn.Parameter], step: int) -> None:
        parameters[0].grad = torch._efficientzerotensor(1000) if what == "no memory" else unaligned(1000)

    assert_steps_are_plain(make, give)


def _take(group: Any, p: Any) -> None:
    p.grad = None


def _replace(group: Any, p: Any) -> None:
    p.grad = p.grad.add(p, alpha=0.1)


def _replace_data(group: Any, p: Any) -> None:
    p.grad.data = p.grad.data.add(p, alpha=0.1)


def _count(group: Any, p: Any) -> None:
    group["option"].append(1.0)


@pytest.mark.parametrize("change", [_take, _replace, _replace_data, _count])
def test_what_a_class_changes_but_for_elements(change: Callable[[Any, Any], None]) -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(n)) for n in (500, 300)]
        return parameters, Own(parameters, change, [] if change is _count else None)

    assert_steps_are_plain(make, give_random)


def test_a_subclass_that_looks_at_sizes() -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(n)) for n in (5000, 300)]
        return parameters, Sized(parameters, lr=0.1, momentum=0.9)

    assert_steps_are_plain(make, give_random)


def test_the_sign_of_a_zero_that_is_a_maximum() -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(5003))]
        return parameters, Largest(parameters, _take)

    def give(parameters: list[nn.Parameter], step: int) -> None:
        gradient = torch.randn(5003)
        gradient[70:] *= 0.0  # Not those that are tried.
        parameters[0].grad = gradient

    assert_steps_are_plain(make, give)


def test_random_numbers_that_another_thread_draws_are_drawn_once() -> None:
    drawn: list[float] = []
    draws = False

    def draw(group: Any, p: Any) -> None:
        if draws:
            thread = threading.Thread(target=lambda: drawn.append(float(torch.rand(()))))
            thread.start()
            thread.join()

    p = nn.Parameter(torch.randn(1000))
    optimizer = wrapped(Own([p], draw))
    p.grad = torch.ones(1000)
    optimizer.step()
    torch.manual_seed(0)
    expected = [float(torch.rand(())) for _ in range(9)]
    torch.manual_seed(0)
    draws = True
    optimizer.step()
    assert len(drawn) >= 2 and drawn == expected[: len(drawn)]
    swapper.of(optimizer).close()


def test_denormals_are_what_torch_takes_them_for_on_each_thread() -> None:
    """torch's threads are older than what the caller says."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1.0)

    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(1 << 16))]
        return parameters, torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def give(parameters: list[nn.Parameter], step: int) -> None:
        torch.set_flush_denormal(False)
        parameters[0].grad = torch.randn(1 << 16) * 1e-39
        torch.set_flush_denormal(step % 2 == 1)

    try:
        assert_steps_are_plain(make, give)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_a_half_gradient_is_widened_in_memory_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = Scratch.take

    def noting(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append(take(self, numel, dtype))
        return taken[-1]

    monkeypatch.setattr(Scratch, "take", noting)
    p = nn.Parameter(torch.randn(100_000).half())
    optimizer = wrapped(torch.optim.AdamW([p], fused=True), masters=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    taken.clear()
    optimizer.step()
    assert taken and all(bool((each == 1).all()) for each in taken)
    swapper.of(optimizer).close()


def test_auto_records_no_more_than_it_saves(monkeypatch: pytest.MonkeyPatch, chosen: Chosen) -> None:
    monkeypatch.setattr(native_step, "_GROUP_NUMEL_MIN", 1000)
    parameters = [nn.Parameter(torch.ones(250)) for _ in range(9)]
    for i, p in enumerate(parameters):
        p.lr_scale = float(i)  # type: ignore[attr-defined]
    optimizer = wrapped(torch.optim.AdamW(parameters), native="auto")
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert chosen[-1] == (2, 9)
    swapper.of(optimizer).close()


class Asking(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=getattr(p.grad, "scale", 1.0))
                p.add_(state["m"], alpha=-group["lr"] if p.requires_grad else -0.01)


swapper.register_elementwise(Asking)


@pytest.mark.parametrize("what", ["attribute of a gradient", "requires_grad"])
def test_what_a_class_asks_a_parameter_that_it_is_given(what: str) -> None:
    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(n)) for n in (500, 300)]
        return parameters, Asking(parameters, _take)

    def give(parameters: list[nn.Parameter], step: int) -> None:
        for p in parameters:
            p.grad = torch.randn(p.shape)
        if what == "requires_grad":
            parameters[0].requires_grad_(step < 2)
        else:
            parameters[0].grad.scale = 3.0  # type: ignore[union-attr]

    assert_steps_are_plain(make, give)


@pytest.mark.parametrize(("exponent", "is_native"), [(2, True), (3, False), (torch.tensor(2.0), False)], ids=str)
def test_powers_that_torch_has_no_way_of_its_own_for(exponent: Any, is_native: bool, chosen: Chosen) -> None:
    """Those are of another library, whose bits nobody knows; of a tensor 2.0 is one too."""

    class Raised(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad.abs() ** exponent)
                p.add_(state["m"], alpha=-0.1)

    swapper.register_elementwise(Raised)

    def make() -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(torch.randn(n)) for n in (500, 300)]
        return parameters, Raised(parameters, _take)

    assert_steps_are_plain(make, give_random)
    assert any(native for native, _ in chosen) == is_native


class EverySecond(Own):
    """Gathers gradients, and changes the parameter in every second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                if state["step"] % 2 == 0:
                    p.add_(state["m"], alpha=-group["lr"])


swapper.register_elementwise(EverySecond)


@pytest.mark.parametrize("masters", [True, False])
def test_a_step_that_leaves_the_parameter_alone_keeps_its_master(masters: bool, chosen: Chosen) -> None:
    ends = []
    for native in ("on", "off"):
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(5000, generator=generator).half()
        p = nn.Parameter(start.bfloat16() if masters else start.float())
        optimizer = wrapped(EverySecond([p], _take), masters, native)
        chosen.clear()
        for _ in range(6):
            p.grad = torch.randn(5000, generator=generator).to(p.dtype)
            optimizer.step()
            assert swapper.of(optimizer).stats().masters_reset == 0
        assert chosen == [(0, 1)] + [(int(native == "on"), 1)] * 5
        state = swapper.of(optimizer).state(p)
        ends.append([p.detach().clone(), *(state[key] for key in ("m", *(["master_param"] if masters else [])))])
        swapper.of(optimizer).close()
    assert all(map(same, *ends))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("the low halves have 3 ties, not 2", "a stored master is damaged: the low halves have 3.*verify: crc32c"),
        ("two arrays of a segment overlap in memory", "a native step was refused: two arrays .*native_step: off"),
    ],
)
@pytest.mark.parametrize("begins", [False, True], ids=["waiting", "beginning"])
def test_a_step_that_the_core_refuses_says_what_was_found(found: str, said: str, begins: bool) -> None:
    parameter = nn.Parameter(torch.ones(5000))
    optimizer = wrapped(torch.optim.AdamW([parameter]))
    for _ in range(2):
        parameter.grad = torch.ones(5000)
        optimizer.step()
    run = mock.Mock(wait=mock.Mock(side_effect=ValueError(found)))
    begun = mock.Mock(side_effect=ValueError(found) if begins else None, return_value=run)
    parameter.grad = torch.ones(5000)
    with (
        mock.patch.object(_native, "StepRun", begun),
        pytest.raises(swapper.errors.SwapError, match=said),
    ):
        optimizer.step()
