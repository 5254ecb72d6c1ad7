"""A run with swapping ends in the same bits as the run without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import GPT, SIZES
from torch import nn
from torch.optim import Optimizer
from training import MORE, OPTIMIZERS, Make, MasterWeights, make_config, same_bits

import swapper

pytestmark = pytest.mark.packs_too

STEPS = 20


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def tiny_gpt(dtype: torch.dtype) -> GPT:
    torch.manual_seed(0)
    return GPT(SIZES["tiny"]).to(dtype)


def train(model: GPT, step: Callable[[], object], zero_grad: Callable[[], object], steps: int = STEPS) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(256, (2, 33), generator=generator)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        step()
        zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_models(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert same_bits(p, q), f"{name} differs"


@functools.cache
def plain_run(make: Make, dtype: torch.dtype, masters: bool, steps: int, threads: int) -> tuple[GPT, list[float]]:
    """The model after so many steps without swapping, and its losses: once for all that must end in the same bits."""
    model = tiny_gpt(dtype)
    optimizer = MasterWeights(list(model.parameters()), make) if masters else make(list(model.parameters()))
    return model, train(model, optimizer.step, model.zero_grad, steps)


def compare(nvme_path: Path, make: Make, dtype: torch.dtype, steps: int, **settings: object) -> swapper.Stats:
    masters = bool(settings.get("master_weights")) and dtype is not torch.float32
    plain, expected = plain_run(make, dtype, masters, steps, torch.get_num_threads())
    swapped = tiny_gpt(dtype)
    wrapped = make(list(swapped.parameters()))
    assert swapper.wrap_optimizer(wrapped, make_config(nvme_path, **settings)) is wrapped
    try:
        assert train(swapped, wrapped.step, swapped.zero_grad, steps) == expected
        assert_same_models(plain, swapped)
        return swapper.of(wrapped).stats()
    finally:
        swapper.of(wrapped).close()


@pytest.mark.long
@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
def test_twenty_steps_end_in_the_bits_of_plain_pytorch(nvme_path: Path, name: str, precision: str) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    stats = compare(nvme_path, OPTIMIZERS[name], dtype, STEPS, master_weights=precision == "bf16-masters")
    assert stats.steps == STEPS
    if name != "Adafactor" or precision == "bf16-masters":  # Factored state is so small that none of it moves.
        assert stats.bytes_read > 0 and stats.bytes_written > stats.bytes_read


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_other_classes_and_flags(nvme_path: Path, name: str, dtype: torch.dtype) -> None:
    compare(nvme_path, MORE[name], dtype, 4)


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters", "fp16-masters"])
def test_any_number_of_threads(nvme_path: Path, threads: int, precision: str) -> None:
    dtype = {"fp32": torch.float32, "fp16-masters": torch.float16}.get(precision, torch.bfloat16)
    compare(nvme_path, OPTIMIZERS["AdamW"], dtype, 4, master_weights=precision.endswith("masters"))


@pytest.mark.parametrize("device", ["cpu", "none"])
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_other_devices(nvme_path: Path, device: str, masters: bool) -> None:
    stats = compare(nvme_path, OPTIMIZERS["AdamW"], torch.bfloat16, 4, device=device, master_weights=masters)
    assert stats.bytes_read == stats.bytes_written == 0


def test_resident_records_are_written_and_never_read(nvme_path: Path) -> None:
    stats = compare(nvme_path, OPTIMIZERS["AdamW"], torch.float32, 4, resident_bytes="20MiB")
    assert stats.bytes_written > 0
    assert stats.bytes_read == 0


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("remote_is", ["AdamW", "Muon", "AdamW-fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-masters"])
def test_parameters_elsewhere_are_copied_both_ways(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch, remote_is: str, precision: str
) -> None:
    """The path for a GPU's parameters, with all its copies, on this machine's memory; see the `cuda` tests."""
    monkeypatch.setattr("swapper.optimizer.plan.is_accelerator", lambda device: True)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    compare(nvme_path, {**OPTIMIZERS, **MORE}[remote_is], dtype, 6, master_weights=precision == "bf16-masters")


SHAPES = [(), (1,), (0,), (3, 0, 2), (63,), (64,), (65,), (7, 11, 13), (130, 129), (70001,), (1, 40000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
def test_odd_tiny_huge_and_empty_shapes(nvme_path: Path, dtype: torch.dtype, masters: bool) -> None:
    def run(swap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        optimizer: Optimizer | MasterWeights
        if swap:
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=masters))
        elif masters and dtype in (torch.bfloat16, torch.float16):
            optimizer = MasterWeights(parameters, lambda p: torch.optim.AdamW(p, lr=1e-2))
        else:
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for _ in range(4):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        if isinstance(optimizer, Optimizer) and swap:
            swapper.of(optimizer).close()
        return [p.detach() for p in parameters]

    for shape, plain, swapped in zip(SHAPES, run(False), run(True), strict=True):
        assert same_bits(plain, swapped), shape


def test_channels_last_parameters_and_strides_of_state(nvme_path: Path) -> None:
    def run(swap: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3)).to(
            memory_format=torch.channels_last
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for _ in range(3):
            model(torch.randn(2, 16, 9, 9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), optimizer.state_dict()["state"][2]

    torch.manual_seed(0)
    plain, plain_state = run(False)
    torch.manual_seed(0)
    swapped, swapped_state = run(True)
    assert all(same_bits(p, q) for p, q in zip(plain, swapped, strict=True))
    assert swapped_state["exp_avg"].stride() == plain_state["exp_avg"].stride()
    assert same_bits(plain_state["exp_avg"], swapped_state["exp_avg"])


class OfItsOwnOrder(Optimizer):
    """Its state is contiguous, whatever the order of its parameter, and it takes sums over both."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            state = self.state[p]
            if not state:
                state["sum"] = torch.zeros(p.shape)
            state["sum"].mul_(0.9).add_(p.grad)
            p.sub_(state["sum"], alpha=float(0.1 / state["sum"].norm()))


@pytest.mark.parametrize("wrap_at", [0, 2])
@pytest.mark.parametrize("resume", ["no", "state_dict", "checkpoint"])
def test_state_of_another_order_than_its_parameter(resume: str, wrap_at: int, nvme_path: Path, tmp_path: Path) -> None:
    def run(swap: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Conv2d(64, 128, 3, bias=False).to(memory_format=torch.channels_last)
        optimizer = OfItsOwnOrder(model.parameters())
        for step in range(6):
            if swap and step == wrap_at:
                swapper.wrap_optimizer(optimizer, make_config(nvme_path))
            if step == 4 and resume == "state_dict":
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 4 and resume == "checkpoint":
                swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
                if swap:
                    swapper.of(optimizer).close()
                optimizer = OfItsOwnOrder(model.parameters())
                if swap:
                    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
                swapper.load_checkpoint(tmp_path / "saved", model, optimizer)
            model.weight.grad = torch.empty_like(model.weight).normal_()
            optimizer.step()
        return model.weight.detach(), optimizer.state_dict()["state"][0]

    (plain, plain_state), (swapped, swapped_state) = run(False), run(True)
    assert same_bits(plain, swapped)
    assert swapped_state["sum"].stride() == plain_state["sum"].stride() == (576, 9, 3, 1)
    assert same_bits(plain_state["sum"], swapped_state["sum"])


def test_a_gradient_with_other_strides_than_its_parameter(nvme_path: Path) -> None:
    def run(swap: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(300, 400, generator=generator))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for _ in range(3):
            p.grad = torch.randn(400, 300, generator=generator).t()
            optimizer.step()
        return p

    assert same_bits(run(False), run(True))


@pytest.mark.parametrize("gaps", [slice(400), slice(None, None, 2)], ids=["at-the-end-of-rows", "everywhere"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_a_parameter_with_gaps_in_memory_is_cut_too(nvme_path: Path, precision: str, gaps: slice) -> None:
    """There is no view of its segments: they are stepped as copies, and put back."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def run(swap: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(300, 800, generator=generator).to(dtype)[:, gaps])
        optimizer: Optimizer | MasterWeights
        if swap:
            optimizer = torch.optim.AdamW([p], lr=1e-2)
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=dtype == torch.bfloat16))
            assert len(swapper.of(optimizer)._plan.segments_of(p)) > 1
        elif dtype == torch.bfloat16:
            optimizer = MasterWeights([p], lambda p: torch.optim.AdamW(p, lr=1e-2))
        else:
            optimizer = torch.optim.AdamW([p], lr=1e-2)
        for _ in range(3):
            p.grad = torch.randn(300, 400, generator=generator).to(dtype)
            optimizer.step()
        return p.contiguous()

    assert same_bits(run(False), run(True))


def test_strides_of_dimensions_of_one_do_not_matter(nvme_path: Path) -> None:
    def run(swap: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(1, 1, 90000, generator=generator).to(torch.bfloat16))
        optimizer = torch.optim.AdamW([p], lr=1e-2)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for _ in range(3):
            gradient = torch.randn(90000, generator=generator).to(torch.bfloat16)
            p.grad = gradient.as_strided((1, 1, 90000), (7, 1, 1))
            optimizer.step()
        if swap:
            assert len(swapper.of(optimizer)._plan.segments_of(p)) > 1
            swapper.of(optimizer).close()
        return p

    assert same_bits(run(False), run(True))


def test_gradients_whose_layout_would_change_bits_are_refused(nvme_path: Path) -> None:
    p = nn.Parameter(torch.zeros(300, 400, dtype=torch.bfloat16))
    optimizer = swapper.wrap_optimizer(torch.optim.AdamW([p]), make_config(nvme_path))
    p.grad = torch.ones(400, 300, dtype=torch.bfloat16).t()
    with pytest.raises(swapper.SwapError, match="empty_like"):
        optimizer.step()
    p.grad = torch.empty_like(p).copy_(p.grad)
    optimizer.step()
    swapper.of(optimizer).close()


def test_special_values_survive_the_master_encoding(nvme_path: Path) -> None:
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 1.00390625])

    def run(swap: bool) -> torch.Tensor:
        p = nn.Parameter(values.repeat(2000).to(torch.bfloat16))
        optimizer: Optimizer | MasterWeights = torch.optim.SGD([p], lr=2.0**-9, momentum=0.5)
        if swap:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=True))
        else:
            optimizer = MasterWeights([p], lambda q: torch.optim.SGD(q, lr=2.0**-9, momentum=0.5))
        for _ in range(4):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach()

    plain, swapped = run(False), run(True)
    assert torch.equal(plain.isnan(), swapped.isnan())
    assert same_bits(plain.nan_to_num(), swapped.nan_to_num())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "Adam-amsgrad", "SGD-nesterov"])
def test_low_precision_respects_the_chunks_of_torchs_threads(nvme_path: Path, threads: int, name: str) -> None:
    """Kernels whose scalar tails round otherwise than their vectors, on sizes whose chunks all have tails."""

    def run(swap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = (70001, 150003, 210005)
        parameters = [nn.Parameter(torch.randn(n, generator=generator).to(torch.bfloat16)) for n in shapes]
        optimizer = {**OPTIMIZERS, **MORE}[name](parameters)
        if swap:
            config = make_config(nvme_path).model_copy(update={"bucket_bytes": "96KiB"})
            swapper.wrap_optimizer(optimizer, config)
            assert all(len(swapper.of(optimizer)._plan.segments_of(p)) > 1 for p in parameters)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
            optimizer.step()
        if swap:
            swapper.of(optimizer).close()
        return [p.detach() for p in parameters]

    assert all(same_bits(p, q) for p, q in zip(run(False), run(True), strict=True))


class Powers(Optimizer):
    """Elementwise, of kernels whose scalar tails round otherwise than their vectors in fp32 too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            assert p.grad is not None
            state = self.state[p]
            total = state.setdefault("sum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            update = total.sign() * total.abs().pow(0.7) + torch.atan2(total, p.grad)
            p.sub_(torch.nn.functional.softplus(update), alpha=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16-masters"])
def test_a_registered_class_respects_the_chunks_of_torchs_threads(
    precision: str, nvme_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swapper.optimizer.probe._elementwise", {Powers})
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def run(swap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = (70001, 150003, 210005)
        parameters = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in shapes]
        optimizer: Optimizer | MasterWeights
        if swap:
            optimizer = Powers(parameters)
            config = make_config(nvme_path, master_weights=dtype == torch.bfloat16)
            swapper.wrap_optimizer(optimizer, config.model_copy(update={"bucket_bytes": "96KiB"}))
            assert all(len(swapper.of(optimizer)._plan.segments_of(p)) > 1 for p in parameters)
        else:
            optimizer = Powers(parameters) if precision == "fp32" else MasterWeights(parameters, Powers)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
        if isinstance(optimizer, Optimizer) and swap:
            swapper.of(optimizer).close()
        return [p.detach() for p in parameters]

    assert all(same_bits(p, q) for p, q in zip(run(False), run(True), strict=True))


def test_ties_of_several_masters_in_one_record(nvme_path: Path) -> None:
    """Half of these masters lie half-way between two bf16 numbers, and in each step another one has no gradient."""

    def run(swap: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        values = torch.tensor([1.0, 1.25, 1.5, 1.75])
        draws = [torch.randint(4, (8000,), generator=generator) for _ in range(6)]
        parameters = [nn.Parameter(values[draw].to(torch.bfloat16)) for draw in draws]
        optimizer: Optimizer | MasterWeights
        if swap:
            optimizer = torch.optim.SGD(parameters, lr=2.0**-8, momentum=0.5)
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, master_weights=True))
            assert max(len(bucket.segments) for bucket in swapper.of(optimizer)._plan.buckets) > 1
        else:
            optimizer = MasterWeights(parameters, lambda p: torch.optim.SGD(p, lr=2.0**-8, momentum=0.5))
        for step in range(6):
            for i, p in enumerate(parameters):
                signs = torch.randint(2, p.shape, generator=generator) * 2 - 1
                p.grad = None if i == step else signs.to(torch.bfloat16)
            optimizer.step()
        if isinstance(optimizer, MasterWeights):
            return [p.detach() for p in optimizer.masters]
        masters = [swapper.of(optimizer).state(p)["master_param"] for p in parameters]
        swapper.of(optimizer).close()
        return masters

    assert all(same_bits(p, q) for p, q in zip(run(False), run(True), strict=True))
