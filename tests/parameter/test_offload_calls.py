"""The ways to call `offload` and `check`: without, with one and with several optimizers, and what is returned."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import WIDTH, Mlp
from torch import nn
from torch.optim import Optimizer
from twins import bits, close, config_for, evaluate, small_records, swapper_of, train, values_of

import swapper


def optimizers_of(model: Mlp) -> list[Optimizer]:
    return [torch.optim.AdamW(block.parameters(), lr=1e-2) for block in model.blocks]


WITHOUT: dict[str, Callable[[Mlp, Any], Any]] = {
    "nothing": lambda model, config: swapper.offload(model, config=config),
    "None": lambda model, config: swapper.offload(model, None, config),
    "None by name": lambda model, config: swapper.offload(model, optimizer=None, config=config),
    "all by name": lambda model, config: swapper.offload(model=model, optimizer=None, config=config),
    "empty list": lambda model, config: swapper.offload(model, [], config),
    "empty tuple": lambda model, config: swapper.offload(model, (), config),
    "empty generator": lambda model, config: swapper.offload(model, (o for o in ()), config),
}
RETURNED = {"empty list": [], "empty tuple": (), "empty generator": []}


@pytest.mark.parametrize("device", ["nvme", "none"])
@pytest.mark.parametrize("how", WITHOUT)
def test_without_an_optimizer(how: str, device: str, nvme_path: Path) -> None:
    torch.manual_seed(0)
    plain = Mlp(3)
    torch.manual_seed(0)
    model = Mlp(3)
    config = config_for(nvme_path, offload_optimizer={"device": device}, offload_gradient={"device": device})
    with small_records():
        returned = WITHOUT[how](model, config)
        assert returned == (model, RETURNED.get(how))
        assert evaluate(model) == evaluate(plain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert swapper.offload(model, optimizer, config) == (model, optimizer)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        assert train(model, optimizer, 1) == train(plain, reference, 1)
    swapper_of(model).close()
    optimizer.swapper.close()  # type: ignore[attr-defined]


WITH: dict[str, Callable[[list[Optimizer]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda optimizers: (optimizer for optimizer in optimizers),
    "values": lambda optimizers: dict(enumerate(optimizers)).values(),
    "set": set,
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", WITH)
def test_several_optimizers(kind: str, by_name: bool, nvme_path: Path) -> None:
    torch.manual_seed(0)
    plain = Mlp(3)
    torch.manual_seed(0)
    model = Mlp(3)
    optimizers, references = optimizers_of(model), optimizers_of(plain)
    given = WITH[kind](optimizers)
    config = config_for(nvme_path)
    with small_records():
        if by_name:
            _, returned = swapper.offload(model, config=config, optimizer=given)
        else:
            _, returned = swapper.offload(model, given, config)
    if kind in ("list", "tuple"):
        assert returned is given
    else:
        assert type(returned) is list and set(returned) == set(optimizers)
    for mine, theirs in zip(optimizers, references, strict=True):
        assert train(model, mine, 1)[2] == train(plain, theirs, 1)[2]  # type: ignore[index]
    assert values_of(model) == values_of(plain)
    swapper_of(model).close()
    for optimizer in optimizers:
        swapper.of(optimizer).close()


@pytest.mark.parametrize("function", [swapper.offload, swapper.check])
def test_what_is_no_optimizer_is_refused_by_name(function: Callable[..., Any], nvme_path: Path) -> None:
    model = Mlp(2)
    config = config_for(nvme_path)
    for wrong, message in (
        (3, "optimizer: int is not"),
        ([3], "optimizer: int is not"),
        (torch.optim.SGD, "optimizer: type is not|optimizer: SGD is not"),
        (config, r"optimizer: OffloadConfig is a config, .* swapper\.offload\(model, config=config\)"),
        ({"nvme_path": "."}, "optimizer: dict is a config"),
        ("config.yaml", "optimizer: str is a config"),
    ):
        with pytest.raises(swapper.ConfigError, match=message):
            function(model, wrong, config)
    with pytest.raises(swapper.ConfigError, match="config: none is given"):
        function(model)
    with pytest.raises(swapper.ConfigError, match="config: none is given"):
        function(model, torch.optim.SGD(model.parameters()))
    assert not list(nvme_path.iterdir()) and "swapper" not in vars(model)


def test_an_optimizer_that_is_given_twice_leaves_everything_as_it_was(nvme_path: Path) -> None:
    model = Mlp(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(swapper.ConfigError, match="wrapped already"):
        swapper.offload(model, [optimizer, optimizer], config_for(nvme_path))
    assert not hasattr(optimizer, "swapper") and "swapper" not in vars(model)


@pytest.mark.parametrize("gradients", ["none", "nvme"])
@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_check_has_the_sum_of_all_optimizers(
    parameters: str, gradients: str, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mlp(3, 64)
    config = config_for(nvme_path, offload_param={"device": parameters}, offload_gradient={"device": gradients})
    each = [swapper.check(model, optimizer, config) for optimizer in optimizers_of(model)]
    none, by_name, empty = (
        dataclasses.replace(report, disk_free_bytes=0)  # Others write there too.
        for report in (
            swapper.check(model, None, config),
            swapper.check(model, config=config),
            swapper.check(model, [], config),
        )
    )
    assert none == by_name == empty
    assert none.state_bytes == none.gradient_bytes == none.buckets == none.parameter_numel == 0
    for given in (optimizers_of(model), tuple(optimizers_of(model)), iter(optimizers_of(model))):
        report = swapper.check(model, given, config)
        for name in ("state_bytes", "gradient_bytes", "buckets", "parameter_numel"):
            assert getattr(report, name) == sum(getattr(one, name) for one in each), name
        assert report.parameter_bytes == none.parameter_bytes
        added = [one.disk_bytes - none.disk_bytes for one in each]
        assert report.disk_bytes == none.disk_bytes + sum(added)
    capsys.readouterr()
    assert not list(nvme_path.iterdir())


def test_check_of_a_model_that_is_on_the_drive_already(nvme_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(nvme_path)
    model = Mlp(3, 64)
    before = swapper.check(model, torch.optim.SGD(model.parameters()), config)
    swapper.offload(model, config=config)
    assert swapper.check(model, torch.optim.SGD(model.parameters()), config).parameter_bytes == before.parameter_bytes
    capsys.readouterr()
    swapper_of(model).close()


@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_check_needs_for_several_optimizers_what_offload_then_takes(
    parameters: str, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optimizers share the part of the pool that only one of them uses at a time, unless parameters take the rest."""
    torch.manual_seed(0)
    for pool_bytes in (*range(196608, 800_000, 131072), 4 << 20):
        model = Mlp(4, 128)
        optimizers = optimizers_of(model)
        config = config_for(
            nvme_path, pool_bytes=pool_bytes, bucket_bytes="64KiB", offload_param={"device": parameters},
            offload_gradient={"device": "nvme"},
        )  # fmt: skip
        try:
            swapper.check(model, optimizers, config)
            accepted = True
        except swapper.ConfigError:
            accepted = False
        try:
            swapper.offload(model, optimizers, config)
            assert accepted, pool_bytes
        except swapper.ConfigError:
            assert not accepted, pool_bytes
        else:
            if parameters == "nvme":
                swapper_of(model).close()
            for optimizer in optimizers:
                swapper.of(optimizer).close()
    assert accepted
    capsys.readouterr()


def test_a_torch_before_2_8_is_refused_by_name(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For parameters alone: the state of an optimizer can be swapped there."""
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    model = Mlp(3)
    with pytest.raises(swapper.ConfigError, match=r"offload_param needs PyTorch 2\.8 or newer"):
        swapper.offload(model, config=config_for(nvme_path))
    with pytest.raises(swapper.ConfigError, match="needs PyTorch"), swapper.init(config_for(nvme_path)):
        Mlp(3)
    optimizer = torch.optim.AdamW(model.parameters())
    config = swapper.OffloadConfig(nvme_path=nvme_path, offload_optimizer={"device": "nvme"})
    swapper.wrap_optimizer(optimizer, config)
    model(torch.randn(2, 48)).sum().backward()
    optimizer.step()
    swapper.of(optimizer).close()


class OfAllGradients(Optimizer):
    """Couples its parameters, so its state could not be swapped."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.count += 1
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for p in parameters:
            self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
            p.sub_(self.state[p]["sum"], alpha=0.1 / (self.count * float(norm)))
        return loss


@pytest.mark.parametrize("how", ["lbfgs", "line search", "coupled"])
def test_an_optimizer_that_cannot_be_swapped_steps_parameters_that_are(
    how: str, nvme_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its state stays in memory, so what it does with it is its own affair."""

    def made(model: nn.Module) -> Optimizer:
        if how == "coupled":
            return OfAllGradients(model.parameters())
        return torch.optim.LBFGS(model.parameters(), 0.5, line_search_fn="strong_wolfe" if how != "lbfgs" else None)

    def trained(model: nn.Module, optimizer: Optimizer) -> list[Any]:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        seen: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            seen.append(bits(loss))
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [*seen, bits(dict(model.state_dict()))]

    torch.manual_seed(0)
    plain = Mlp()
    model = copy.deepcopy(plain)
    config = config_for(nvme_path, offload_optimizer={"device": "none"})
    optimizer = made(model)
    swapper.check(model, optimizer, config)
    assert "parameters" in capsys.readouterr().out
    swapper.offload(model, optimizer, config)
    assert trained(plain, made(plain)) == trained(model, optimizer)
    close(model, optimizer)
    with pytest.raises(swapper.ConfigError, match=r"cannot be swapped|set offload_optimizer.device to none"):
        swapper.check(model, made(model), config_for(nvme_path))


def test_an_optimizer_of_parameters_without_a_shape_is_refused_by_name(nvme_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    config = swapper.OffloadConfig(nvme_path=nvme_path, pool_bytes="8MiB", offload_optimizer={"device": "nvme"})
    for call in (
        lambda: swapper.wrap_optimizer(optimizer, config),
        lambda: swapper.offload(model, optimizer, config),
        lambda: swapper.check(model, optimizer, config),
    ):
        with pytest.raises(swapper.ConfigError, match="has no shape before the model's first forward"):
            call()
    model(torch.ones(2, 3))
    swapper.of(swapper.wrap_optimizer(optimizer, config)).close()
