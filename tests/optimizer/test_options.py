"""What a class keeps in its options or attributes is the user's: trials leave it as it is, and resuming keeps it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import swapper
from swapper.optimizer import probe
from swapper.optimizer.twin import equal

PLACES = ["lists", "named tuple", "array", "tensor", "set", "attribute", "attribute array", "of the class", "defaults"]
SAVED = ["lists", "array", "tensor", "set", "defaults"]
"""Of these, what a checkpoint has."""


class Kept(NamedTuple):
    """As an option."""

    cells: list[list[Any]]


def cells() -> list[list[Any]]:
    """For ten steps."""
    return [[None, None] for _ in range(10)]


def caching(where: str, elementwise: bool) -> type[torch.optim.Optimizer]:
    """A class that computes its step size once for all parameters, as the code of RAdam's authors does."""

    class Caching(torch.optim.Optimizer):
        of_class = cells()

        def __init__(self, params: Any, lr: float = 1e-3) -> None:
            options: dict[str, Any] = {
                "lists": {"cells": [cells()]},
                "named tuple": Kept(cells()),
                "array": [np.zeros((10, 2))],
                "tensor": (torch.zeros(10, 2, dtype=torch.float64),),
                "set": [{(0, 0.0)}],
                "defaults": [cells()],
            }
            super().__init__(params, {"lr": lr, **({"kept": options[where]} if where in options else {})})
            self.attribute = [cells()]
            self.array = {"cells": np.zeros((10, 2))}

        def cell_of(self, group: dict[str, Any], step: int) -> Any:
            tables: dict[str, Callable[[], Any]] = {
                "lists": lambda: group["kept"]["cells"][0],
                "named tuple": lambda: group["kept"].cells,
                "array": lambda: group["kept"][0],
                "tensor": lambda: group["kept"][0],
                "attribute": lambda: self.attribute[0],
                "attribute array": lambda: self.array["cells"],
                "of the class": lambda: self.of_class,
                "defaults": lambda: self.defaults["kept"][0],
            }
            return tables[where]()[step % 10]

        def size_of(self, group: dict[str, Any], step: int) -> float:
            size = group["lr"] / (1 - 0.9**step)
            if where == "set":
                known = group["kept"][0]
                if all(at != step for at, _ in known):
                    known.add((step, size))
                return float(next(found for at, found in known if at == step))
            cell = self.cell_of(group, step)
            if cell[0] != step:
                cell[0], cell[1] = step, size
            return float(cell[1])

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["step"], state["mean"] = 0, torch.zeros_like(p)
                    state["step"] += 1
                    state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                    p.add_(state["mean"], alpha=-self.size_of(group, state["step"]))

    return swapper.register_elementwise(Caching) if elementwise else Caching


def config_of(nvme_path: Path, native: str = "auto") -> swapper.OffloadConfig:
    return swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="2MiB",
        bucket_bytes="16KiB",
        offload_optimizer={"device": "nvme", "native_step": native},
    )


def made(cls: type[torch.optim.Optimizer], config: swapper.OffloadConfig | None) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer with two groups, and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 40), nn.Linear(40, 8))
    groups = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 4e-3}]
    optimizer = cls(groups)
    if config is not None:
        optimizer = swapper.wrap_optimizer(optimizer, config)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1, total_iters=8)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        (model(torch.randn(8, 96, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def check(ours: nn.Module, plain: nn.Module) -> None:
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach(), q.detach())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("native", ["on", "off"])
@pytest.mark.parametrize("elementwise", [True, False], ids=["segments", "whole"])
@pytest.mark.parametrize("where", PLACES)
def test_what_is_computed_once_for_all_parameters(where: str, elementwise: bool, native: str, nvme_path: Path) -> None:
    plain = made(caching(where, elementwise), None)
    ours = made(caching(where, elementwise), config_of(nvme_path, native))
    for run in (plain, ours):
        train(*run, range(12))
    check(ours[0], plain[0])
    assert equal(options_of(ours[1]), options_of(plain[1]))
    assert equal(ours[1].attribute, plain[1].attribute)
    assert equal(ours[1].array, plain[1].array)
    assert ours[1].of_class == plain[1].of_class
    swapper.of(ours[1]).close()


@pytest.mark.parametrize("elementwise", [True, False], ids=["segments", "whole"])
@pytest.mark.parametrize("where", [where for where in PLACES if where not in ("set", "defaults")])
def test_a_class_that_counts_its_steps_there_is_refused(where: str, elementwise: bool, nvme_path: Path) -> None:
    caching_class: Any = caching(where, False)

    class Counting(caching_class):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                cell = self.cell_of(group, 0)
                cell[0] = (cell[0] or 0) + 1
                for p in group["params"]:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.add_(self.state[p]["sum"], alpha=-float(cell[0]) * group["lr"])

    if elementwise:
        swapper.register_elementwise(Counting)
    parameters = [nn.Parameter(torch.ones(96, 96)) for _ in range(3)]
    optimizer = Counting(parameters)
    kept = [options_of(optimizer), optimizer.attribute, optimizer.array, optimizer.of_class]
    before = copy.deepcopy(kept)
    with pytest.raises(swapper.ConfigError, match="Counting"):
        swapper.wrap_optimizer(optimizer, config_of(nvme_path))
    assert equal(kept, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["checkpoint", "state_dict"])
@pytest.mark.parametrize("where", SAVED)
def test_groups_that_share_it_share_it_when_training_is_resumed(
    where: str, how: str, nvme_path: Path, tmp_path: Path
) -> None:
    """With other learning rates in two groups, what one has computed the other one takes."""
    cls = caching(where, False)
    plain = made(cls, None)
    train(*plain, range(5))
    torch.save([each.state_dict() for each in plain], tmp_path / "plain.pt")
    again = made(cls, None)
    for each, state in zip(again, torch.load(tmp_path / "plain.pt", weights_only=False), strict=True):
        each.load_state_dict(state)
    train(*again, range(5, 12))

    ours = made(cls, config_of(nvme_path))
    train(*ours, range(5))
    if how == "checkpoint":
        swapper.save_checkpoint(tmp_path / "ours", ours[0], ours[1], extra=ours[2].state_dict())
    states = [each.state_dict() for each in ours]
    resumed = made(cls, config_of(nvme_path))
    if how == "checkpoint":
        extra = swapper.load_checkpoint(tmp_path / "ours", resumed[0], resumed[1])
        resumed[2].load_state_dict(extra)
    else:
        for each, state in zip(resumed, states, strict=True):
            each.load_state_dict(state)
    train(*resumed, range(5, 12))
    check(resumed[0], again[0])
    assert equal(options_of(resumed[1]), options_of(again[1]))
    for each in (ours, resumed):
        swapper.of(each[1]).close()


def test_a_token_does_not_count_as_a_parameter(nvme_path: Path) -> None:
    caching_class: Any = caching("attribute", False)

    @swapper.register_elementwise
    class Counting(caching_class):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                self.attribute[0][0][0] = (self.attribute[0][0][0] or 0) + 1
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.add_(self.state[p]["sum"], alpha=-0.125)

    parameters = [nn.Parameter(torch.ones(48, 48)) for _ in range(3)]
    optimizer = swapper.wrap_optimizer(Counting(parameters), config_of(nvme_path, "on"))
    for _ in range(4):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.attribute[0][0][0] == 12
    swapper.of(optimizer).close()


# --- Several groups ---------------------------------------------------------------------------------------------------


class OfGroups(torch.optim.Optimizer):
    """Momentum, with a learning rate that `rate` takes from any group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.first_rates = [group["lr"] for group in self.param_groups]

    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, group in enumerate(self.param_groups):
            group["count"] += 1
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad)
                p.sub_(mean, alpha=self.rate(number, group) / (1 + group["count"]))


class FirstRate(OfGroups):
    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(self.param_groups[0]["lr"])


class LargestRate(OfGroups):
    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(max(each["lr"] for each in self.param_groups))


class RatesByNumber(OfGroups):
    """As AdaBound has them."""

    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(self.first_rates[number] * group["lr"])


class FirstPair(OfGroups):
    """Takes what is in a tuple from the first group."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["betas"] = (0.5, 0.25)

    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(group["lr"] * self.param_groups[0].get("betas", (0.5, 0.25))[0])


class NoneIsEmpty(OfGroups):
    """Fails with a group without parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.stack([p.sum() for p in group["params"]])
        super().step()


class FirstRateOfSome(NoneIsEmpty, FirstRate):
    pass


def several(cls: Any, config: swapper.OffloadConfig | None, groups: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 40), nn.Linear(40, 8))
    given = [{"params": [*layer.parameters()], "lr": 1e-3 * (1 + i)} for i, layer in enumerate(model)]
    optimizer = cls(given[:groups])
    if config is not None:
        swapper.wrap_optimizer(optimizer, config)
    for step in range(5):
        if step == 2:
            for group in given[groups:]:
                optimizer.add_param_group(group)
            optimizer.first_rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        (model(torch.randn(8, 96, generator=torch.Generator().manual_seed(step))) - 1).square().mean().backward()
        if step == 3:
            model[0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("elementwise", [False, True], ids=["whole", "segments"])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("cls", [OfGroups, FirstRate, LargestRate, RatesByNumber, FirstPair, NoneIsEmpty])
def test_a_class_finds_all_groups_wherever_it_is_in_a_step(
    cls: Any, groups: int, elementwise: bool, nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elementwise:
        monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, cls})
    plain, ours = several(cls, None, groups), several(cls, config_of(nvme_path, "on"), groups)
    check(ours[0], plain[0])
    assert equal(options_of(ours[1]), options_of(plain[1]))
    swapper.of(ours[1]).close()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_class_that_needs_another_group_and_takes_none_that_is_empty_is_refused(groups: int, nvme_path: Path) -> None:
    with pytest.raises(
        swapper.ConfigError, match="FirstRateOfSome takes what belongs to one parameter group for anoth"
    ):
        several(FirstRateOfSome, config_of(nvme_path), groups)


@pytest.mark.parametrize("cls", [OfGroups, FirstRate, RatesByNumber, FirstPair])
def test_a_class_with_many_groups(cls: Any, nvme_path: Path) -> None:
    def train(swapped: bool) -> Any:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(80, 80)) for _ in range(40)]  # No two in a bucket.
        rates = [1.0] * 4 + [1.0 + i for i in range(35)] + [1.0]  # Of the first and the last no two differ.
        optimizer = cls([{"params": [p], "lr": 1e-3 * rate} for p, rate in zip(parameters, rates, strict=True)])
        if swapped:
            swapper.wrap_optimizer(optimizer, config_of(nvme_path))
        for step in range(3):
            for p in parameters:
                p.grad = torch.full_like(p, 1.0 + step)
            optimizer.step()
        return [p.detach() for p in parameters], optimizer

    expected, _ = train(False)
    found, optimizer = train(True)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    swapper.of(optimizer).close()


class Warm:
    """A schedule of the user's, which counts nothing."""

    def __init__(self) -> None:
        self.factor, self.inner = 0.5, {"a": [1.0]}


class OfObjects(OfGroups):
    """Has objects in containers, and one object in two places."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            shared: dict[str, float] = {}
            group.update(warm=[Warm()], both={"a": shared, "b": shared}, numbers=[itertools.count()])

    def rate(self, number: int, group: dict[str, Any]) -> float:
        group["both"]["a"]["factor"] = 0.5
        return float(group["lr"] * group["warm"][0].factor * group["both"]["b"]["factor"])


class Particular(OfGroups):
    """Takes only some options."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(power=2.0, a=0.75, b=0.25)

    def rate(self, number: int, group: dict[str, Any]) -> float:
        assert group.get("a", 0.75) + group.get("b", 0.25) == 1
        return float(group["lr"] * {1.0: 1.0, 2.0: 0.5}[group.get("power", 2.0)])


class EarlyState(OfGroups):
    """Makes its state when it is constructed, and wants it."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["mean"].mul_(0.9).add_(p.grad)
                    p.sub_(self.state[p]["mean"], alpha=group["lr"])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("cls", [OfObjects, Particular, EarlyState])
def test_classes_that_have_their_ways_are_swapped(cls: Any, groups: int, nvme_path: Path) -> None:
    def train(swapped: bool) -> Any:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(80, 80)) for _ in range(3)]
        given = [{"params": [p], "lr": 1e-3 * (1 + i)} for i, p in enumerate(parameters)]
        optimizer = cls(given if groups > 1 else parameters)
        if swapped:
            swapper.wrap_optimizer(optimizer, config_of(nvme_path))
        for step in range(3):

            def closure(step: int = step) -> None:
                for p in parameters:
                    p.grad = torch.full_like(p, 1.0 + step)

            closure()
            optimizer.step(closure) if cls is EarlyState else optimizer.step()
        return [p.detach() for p in parameters], optimizer

    expected, _ = train(False)
    found, optimizer = train(True)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    swapper.of(optimizer).close()


class OneTensor(OfGroups):
    """Counts in one tensor that is an option of all groups."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        counted = torch.zeros(())
        for group in self.param_groups:
            group["counted"] = counted

    def rate(self, number: int, group: dict[str, Any]) -> float:
        group["counted"].add_(1)
        return float(group["lr"] / group["counted"])


class ClearsFirst(OfGroups):
    """Clears gradients, has the closure compute them, and steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            self.zero_grad()
            with torch.enable_grad():
                closure()
        super().step()


def test_a_tensor_that_groups_share_and_that_is_counted_in_is_refused(nvme_path: Path) -> None:
    optimizer = OneTensor([{"params": [nn.Parameter(torch.ones(80, 8))]} for _ in range(3)])
    with pytest.raises(swapper.ConfigError, match="OneTensor"):
        swapper.wrap_optimizer(optimizer, config_of(nvme_path))


def test_a_class_that_clears_gradients_before_its_closure_is_refused_when_it_is_given_one(nvme_path: Path) -> None:
    p = nn.Parameter(torch.ones(80, 8))
    optimizer = swapper.wrap_optimizer(ClearsFirst([p]), config_of(nvme_path))
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(swapper.ConfigError, match=r"ClearsFirst.step uses its closure for something else"):
        optimizer.step(lambda: None)
    swapper.of(optimizer).close()


class OfTheFirst(OfGroups):
    """What it keeps in each group comes of the first."""

    def rate(self, number: int, group: dict[str, Any]) -> float:
        return float(group["lr"] * (1 + group["kept"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["kept"] = self.param_groups[0]["lr"] * group["lr"] + group.get("kept", 0.0)
        super().step()


def test_a_group_without_gradients_sees_the_others(nvme_path: Path) -> None:
    def train(swapped: bool) -> Any:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(80, 80)) for _ in range(3)]
        optimizer = OfTheFirst([{"params": [p], "lr": 1e-2 * (1 + i)} for i, p in enumerate(parameters)])
        if swapped:
            swapper.wrap_optimizer(optimizer, config_of(nvme_path))
        for step in range(6):
            for i, p in enumerate(parameters):
                p.grad = None if i == 1 and step % 2 else torch.full_like(p, 1.0 + step)
            optimizer.step()
        return [p.detach() for p in parameters], optimizer

    expected, plain = train(False)
    found, ours = train(True)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert equal(options_of(ours), options_of(plain))
    swapper.of(ours).close()


class CountOfTheFirst(OfGroups):
    """Its count of steps is that of the first parameter, of which others may have fewer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(state["mean"], alpha=group["lr"] / self.state[parameters[0]]["step"])


def test_a_class_that_takes_a_count_of_another_parameter_is_refused(nvme_path: Path) -> None:
    with pytest.raises(swapper.ConfigError, match="CountOfTheFirst computes something else"):
        several(CountOfTheFirst, config_of(nvme_path), 1)


class ChangesGradients(OfGroups):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1)
        super().step()


class TakesGradients(OfGroups):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


@pytest.mark.parametrize("where", ["none", "nvme", "cpu"])
@pytest.mark.parametrize("cls", [ChangesGradients, TakesGradients])
def test_what_a_class_does_to_gradients_is_done_or_refused(cls: Any, where: str, nvme_path: Path) -> None:
    """A loop that does not call `zero_grad` sees it."""

    def train(swapped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 8))
        optimizer = cls(model.parameters())
        if swapped:
            config = swapper.OffloadConfig(
                **{**config_of(nvme_path).model_dump(), "offload_gradient": {"device": where}, "pool_bytes": "4MiB"}
            )
            swapper.offload(model, optimizer, config)
        for step in range(4):
            model(torch.randn(4, 96, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    expected = train(False)
    if where != "none":
        with pytest.raises(
            swapper.ConfigError, match=rf"{cls.__name__} .* gradients .*offload_gradient.device to none"
        ):
            train(True)
        return
    assert all(torch.equal(p, q) for p, q in zip(train(True), expected, strict=True))


def test_a_registered_class_that_takes_gradients_away_is_refused_where_it_has_parts_of_them(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_elementwise", {*probe._elementwise, TakesGradients})
    small, large = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(400, 400))
    optimizer = swapper.wrap_optimizer(TakesGradients([small, large]), config_of(nvme_path, "off"))
    small.grad = torch.ones_like(small)
    optimizer.step()
    assert small.grad is None
    large.grad = torch.ones_like(large)
    with pytest.raises(swapper.ConfigError, match=r"TakesGradients takes gradients away .* do not register it"):
        optimizer.step()
    swapper.of(optimizer).close()
