"""What nothing has filled after `materialize` is an error with its name, and what anything filled is not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models import WIDTH
from torch import nn
from twins import bits, config_for, on_meta, small_records, swapper_of, values_of

import swapper


class Rotary(nn.Module):
    """Has a buffer that no file has, as in most language models."""

    inv_freq: torch.Tensor
    cache: torch.Tensor

    def __init__(self, how: str = "used") -> None:
        super().__init__()
        self.how = how
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)
        self.register_buffer("cache", torch.zeros(2, WIDTH), persistent=False)

    def frequencies(self) -> torch.Tensor:
        return 100.0 ** -(torch.arange(WIDTH) / WIDTH)

    def fill(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(self.frequencies())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "filled in forward":
            self.fill()
        elif self.how == "replaced in forward":
            self.inv_freq = self.frequencies()
        elif self.how == "part by part in forward":
            for i, frequency in enumerate(self.frequencies()):
                self.inv_freq[i] = frequency
        self.cache[:] = self.inv_freq[None, :].float().expand(2, -1) * 2
        return x * self.cache[0].cos()


class Model(nn.Module):
    def __init__(self, how: str = "used") -> None:
        super().__init__()
        self.rotary = Rotary(how)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.own = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("empty", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.rotary(x)))
        y: torch.Tensor = self.norm(x) * self.own
        return y


def nothing(module: nn.Module) -> None:
    """Leave everything as it is."""


def x() -> torch.Tensor:
    return torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def source() -> Model:
    torch.manual_seed(5)
    return Model().eval()


@pytest.fixture
def file(source: Model, tmp_path: Path) -> Path:
    safetensors.torch.save_file(source.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def hollow(nvme_path: Path, how: str = "used", initialiser: Callable[[nn.Module], object] = nothing) -> Model:
    with small_records():
        model = swapper.materialize(on_meta(lambda: Model(how)), config_for(nvme_path), initialiser)
    assert isinstance(model, Model)
    return model.eval()


def same_output(model: nn.Module, source: nn.Module) -> bool:
    with torch.no_grad():
        return bool(bits(model(x())) == bits(source(x())))


# --- Filled, one way or another ---------------------------------------------------------------------------------------


def in_place(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.detach().zero_()


def by_data(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.zero_()


def by_numpy(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.detach().numpy()[...] = 0


def replaced(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, torch.zeros_like(buffer))


def with_ones(module: nn.Module) -> None:
    """Numbers that look like nothing: -1, True and 255."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.fill_(-1)


@pytest.mark.parametrize("initialiser", [in_place, by_data, by_numpy, replaced, with_ones])
def test_initialisers_that_fill(
    initialiser: Callable[[nn.Module], None],
    nvme_path: Path,
    source: Model,
    file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = hollow(nvme_path, initialiser=initialiser)
    assert type(model.rotary.inv_freq) is torch.Tensor
    with torch.no_grad():
        model(x())
    with caplog.at_level(logging.WARNING):
        assert swapper.load_safetensors(model, file).missing_keys == []
    assert not caplog.records
    model.rotary.fill()
    assert same_output(model, source)


def after_load(model: Model) -> None:
    model.rotary.fill()


LATER: dict[str, Callable[[Model], object]] = {
    "in place": lambda m: m.rotary.fill(),
    "by data": lambda m: m.rotary.inv_freq.data.copy_(m.rotary.frequencies()),
    "by a view": lambda m: m.rotary.inv_freq.view(2, -1).copy_(m.rotary.frequencies().view(2, -1)),
    "by items": lambda m: m.rotary.inv_freq.__setitem__(slice(None), m.rotary.frequencies()),
    "by out": lambda m: torch.mul(m.rotary.frequencies(), 1, out=m.rotary.inv_freq),
    "by set_": lambda m: m.rotary.inv_freq.set_(m.rotary.frequencies()),
    "by assigned data": lambda m: setattr(m.rotary.inv_freq, "data", m.rotary.frequencies()),
    "by numpy": lambda m: m.rotary.inv_freq.data_ptr() and _write(m.rotary.inv_freq, m.rotary.frequencies()),
    "replaced": lambda m: setattr(m.rotary, "inv_freq", m.rotary.frequencies()),
    "registered": lambda m: m.rotary.register_buffer("inv_freq", m.rotary.frequencies(), persistent=False),
    "initialised": lambda m: (nn.init.zeros_(m.rotary.inv_freq), m.rotary.inv_freq.add_(m.rotary.frequencies())),
}


def _write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    import ctypes

    ctypes.memmove(tensor.data_ptr(), values.data_ptr(), values.nbytes)


@pytest.mark.parametrize("first", [True, False], ids=["before loading", "after loading"])
@pytest.mark.parametrize("how", LATER)
def test_code_of_the_user_that_fills_later(how: str, first: bool, nvme_path: Path, source: Model, file: Path) -> None:
    model = hollow(nvme_path)
    if first:
        LATER[how](model)
        model.rotary.cache.zero_()
        swapper.load_safetensors(model, file)
    else:
        swapper.load_safetensors(model, file, strict=False)
        LATER[how](model)
    assert same_output(model, source)
    assert type(model.rotary.inv_freq) is torch.Tensor
    with small_records():
        swapper.offload(model, config=config_for(nvme_path))
    assert same_output(model, source)
    swapper_of(model).close()


@pytest.mark.parametrize("how", ["filled in forward", "replaced in forward", "part by part in forward"])
def test_modules_that_fill_their_buffers_in_forward(how: str, nvme_path: Path, source: Model, file: Path) -> None:
    model = hollow(nvme_path, how)
    swapper.load_safetensors(model, file, strict=False)
    assert same_output(model, source)


@pytest.mark.parametrize("offloaded", ["before", "after", "never"])
@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict_fills(assign: bool, offloaded: str, nvme_path: Path, source: Model) -> None:
    if assign and offloaded == "before":
        return  # Assigning replaces parameters, which a model on the drive does not take.
    model = hollow(nvme_path)
    model.rotary.fill()
    model.rotary.cache.zero_()
    config = config_for(nvme_path)
    with small_records():
        if offloaded == "before":
            swapper.offload(model, config=config)
        model.load_state_dict({name: tensor.clone() for name, tensor in source.state_dict().items()}, assign=assign)
        if offloaded == "after":
            swapper.offload(model, config=config)
    assert same_output(model, source)
    assert values_of(model) == values_of(source)
    assert all(type(p) in (nn.Parameter, swapper.tensors.evicted.EvictedParameter) for p in model.parameters())


def test_lazy_modules_are_filled_as_ever(nvme_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH, device="cpu"))
    swapper.materialize(model, config_for(nvme_path))
    assert model(x()).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_conversion_before_loading(dtype: torch.dtype, nvme_path: Path, source: Model, file: Path) -> None:
    model = hollow(nvme_path).to(dtype)
    with pytest.raises(swapper.SwapError, match=r"rotary\.inv_freq"), torch.no_grad():
        model.rotary(x())
    model.rotary.inv_freq.copy_(source.rotary.inv_freq)
    model.rotary.cache.zero_()
    swapper.load_safetensors(model, file)
    reference = copy.deepcopy(source).to(dtype)
    assert bits(model.layers[0].weight) == bits(reference.layers[0].weight)
    assert bits(model.rotary.inv_freq) == bits(reference.rotary.inv_freq)


# --- Not filled -------------------------------------------------------------------------------------------------------


def test_a_strict_load_names_what_is_not_in_the_file(nvme_path: Path, file: Path) -> None:
    model = hollow(nvme_path)
    message = r"weights\.safetensors does not have rotary\.inv_freq, rotary\.cache, .* strict=False"
    with pytest.raises(swapper.SwapError, match=message):
        swapper.load_safetensors(model, file)


def test_a_load_that_is_not_strict_warns_and_the_first_use_raises(
    nvme_path: Path, file: Path, source: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model = hollow(nvme_path)
    with caplog.at_level(logging.WARNING):
        assert swapper.load_safetensors(model, file, strict=False).missing_keys == []
    assert "rotary.inv_freq, rotary.cache" in caplog.records[-1].getMessage()
    for _ in range(2):
        with pytest.raises(swapper.SwapError, match=r"rotary\.inv_freq is used, and nothing has filled it"):
            model(x())
    model.rotary.fill()
    assert same_output(model, source)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
def test_buffers_of_all_dtypes(dtype: torch.dtype, nvme_path: Path) -> None:
    class Has(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(5, 3).to(dtype), persistent=False)
            self.register_buffer("scalar", torch.tensor(1).to(dtype))

    model = swapper.materialize(on_meta(Has), config_for(nvme_path), nothing)
    for name in ("table", "scalar"):
        buffer = model.get_buffer(name)
        for use in (lambda b: b + b, lambda b: b.sum(), lambda b: b.tolist(), lambda b: torch.stack([b]), copy.copy):
            with pytest.raises(swapper.SwapError, match=f"{name} is used"):
                use(buffer)
        buffer.copy_(torch.ones_like(buffer))
        assert type(buffer) is torch.Tensor and buffer.sum() == buffer.numel()


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("small", [True, False], ids=["all on the drive", "short ones in memory"])
def test_parameters_that_nothing_has_filled(small: bool, offloaded: bool, nvme_path: Path, source: Model) -> None:
    config = config_for(nvme_path)
    model = hollow(nvme_path) if small else swapper.materialize(on_meta(Model), config, nothing).eval()
    assert isinstance(model, Model)
    model.rotary.fill()
    if offloaded:
        with small_records():
            swapper.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    for name, values in source.named_parameters():
        parameter = model.get_parameter(name)
        for use in (lambda p: p.sum(), lambda p: p.detach().tolist(), lambda p: p[0] * 2, lambda _: model(x())):
            with pytest.raises(swapper.SwapError, match=r"^\S+ is used, and nothing has filled it") as caught:
                use(parameter)
            assert str(caught.value).split()[0] in model.state_dict(), "the name is that of the model"
        with torch.no_grad():
            parameter.copy_(values)
        assert bits(parameter) == bits(values)
    for buffer, values in zip(model.norm.buffers(), source.norm.buffers(), strict=True):
        buffer.copy_(values)
    assert same_output(model, source)
    assert all(type(p) in (nn.Parameter, swapper.tensors.evicted.EvictedParameter) for p in model.parameters())


def test_tied_parameters_are_filled_together(nvme_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.b.weight = self.a.weight

    def only_b(module: Any) -> None:
        if module is model.b:
            nn.init.ones_(module.weight)
            nn.init.ones_(module.bias)

    model = on_meta(Tied)
    with small_records():
        swapper.materialize(model, config_for(nvme_path), only_b)
    assert isinstance(model, Tied)
    assert model.a.weight is model.b.weight and model.a.weight.sum() == WIDTH * WIDTH
    with pytest.raises(swapper.SwapError, match=r"a\.bias is used"):
        model.a(x())


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_checkpoint_of_what_has_no_values_is_refused(offloaded: bool, nvme_path: Path, tmp_path: Path) -> None:
    model = hollow(nvme_path)
    with small_records():
        if offloaded:
            swapper.offload(model, config=config_for(nvme_path))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(swapper.SwapError, match=r"own is used, and nothing has filled it"):
        swapper.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    assert not list(tmp_path.glob("checkpoint*"))


def test_a_copy_of_what_has_no_values_has_none_either(nvme_path: Path) -> None:
    rotary = hollow(nvme_path).rotary
    twin = copy.deepcopy(rotary)
    with pytest.raises(swapper.SwapError, match=r"rotary\.inv_freq is used"):
        twin(x())
    twin.fill()
    assert twin(x()).isfinite().all()
    with pytest.raises(swapper.SwapError, match=r"rotary\.inv_freq is used"):
        rotary(x())


@pytest.mark.parametrize("small", [True, False], ids=["all on the drive", "short ones in memory"])
@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("save", [torch.save, safetensors.torch.save_file], ids=["torch", "safetensors"])
def test_saving_a_state_dict_that_nothing_has_filled_is_refused(
    save: Callable[..., None], offloaded: bool, small: bool, nvme_path: Path, tmp_path: Path, source: Model
) -> None:
    config = config_for(nvme_path)
    model = hollow(nvme_path) if small else swapper.materialize(on_meta(Model), config, nothing).eval()
    if offloaded:
        with small_records():
            swapper.offload(model, config=config)
    saved = {"part": model.state_dict()["layers.0.weight"][:1]}
    for state_dict in (model.state_dict(), saved):
        with pytest.raises(swapper.SwapError, match=r"^\S+ is used, and nothing has filled it"):
            save(state_dict, tmp_path / "saved")
    model.load_state_dict(source.state_dict())
    save(model.state_dict(), tmp_path / "saved")
    load = torch.load if save is torch.save else safetensors.torch.load_file
    assert all(bits(values) == bits(source.state_dict()[key]) for key, values in load(tmp_path / "saved").items())


@pytest.mark.parametrize("offloaded", [True, False])
def test_safetensors_loads_a_tied_model_that_nothing_has_filled(
    offloaded: bool, nvme_path: Path, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[1].weight = model[0].weight
        return model

    plain = make()
    safetensors.torch.save_model(plain, str(tmp_path / "saved"))
    with small_records():
        model = swapper.materialize(on_meta(make), config_for(nvme_path), nothing)
        if offloaded:
            swapper.offload(model, config=config_for(nvme_path))
    safetensors.torch.load_model(model, tmp_path / "saved")
    assert all(bits(p) == bits(q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
