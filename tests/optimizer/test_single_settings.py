"""Settings of bitsandbytes for single parameters, as the Trainer makes them for embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from training import MasterWeights, assert_same, assert_same_state, make_config, make_model, run, wrapped

import swapper
from swapper.optimizer import probe
from swapper.optimizer.single_settings import settings_of

bitsandbytes = pytest.importorskip("bitsandbytes")

CLASSES = ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW32bit", "RMSprop8bit"]


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns a new manager, which all optimizers that are made from then on have."""

    def make() -> Any:
        monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
        made = bitsandbytes.optim.GlobalOptimManager.get_instance()
        made.register_module_override(nn.Embedding(2, 2), "weight", {"optim_bits": 32})  # of another model
        return made

    make()
    return make


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """As the Trainer has them: weights, which decay, and the rest."""
    first = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": first, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1]}]


def override(manager: Any, model: Any, by: str) -> None:
    if by == "module":
        manager.register_module_override(model[2], "weight", {"optim_bits": 32})
    elif by == "rate":
        manager.override_config([model[2].weight, model[0].bias], key_value_dict={"lr": 3e-3, "weight_decay": 0.5})
    elif by == "bits":
        manager.override_config(model[2].weight, "optim_bits", 32)
    else:
        manager.override_config(model[2].weight, "optim_bits", 32)
        manager.register_parameters(in_groups(model))  # by position, too


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("by", ["module", "rate", "bits", "position"])
@pytest.mark.parametrize("when", ["before", "wrapped", "later"])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_settings_for_single_parameters(
    nvme_path: Path, name: str, by: str, when: str, manager: Callable[[], Any]
) -> None:
    """Also where positions in what is stepped are others: a parameter has no gradient, or another group comes first."""

    def train(swapped: bool) -> tuple[nn.Module, dict[str, Any], dict[str, Any], Any]:
        settings = manager()
        model = make_model()
        optimizer: Optimizer = getattr(bitsandbytes.optim, name)(in_groups(model), lr=1e-2)
        if when == "before":
            override(settings, model, by)
        if swapped:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        if when == "wrapped":
            override(settings, model, by)
        run(model, optimizer, range(2))
        if when == "later":
            override(settings, model, by)
        model[0].weight.requires_grad_(False)
        run(model, optimizer, range(2, 4))
        model[0].weight.requires_grad_(True)
        run(model, optimizer, range(4, 5))
        state = optimizer.state_dict()
        resumed: Optimizer = getattr(bitsandbytes.optim, name)(in_groups(model), lr=1e-2)
        if swapped:
            swapper.of(optimizer).close()
            swapper.wrap_optimizer(resumed, make_config(nvme_path))
        resumed.load_state_dict(state)
        run(model, resumed, range(5, 7))
        last = resumed.state_dict()
        if swapped:
            swapper.of(resumed).close()
        return model, state, last, (settings.index2config, sorted(settings.pid2config.values(), key=repr))

    plain, *expected = train(False)
    mine, *found = train(True)
    assert_same(plain, mine)
    for one, other in zip(expected[:2], found[:2], strict=True):
        assert_same_state(unwrapped(one), unwrapped(other))
    assert expected[2] == found[2]


def unwrapped(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What bitsandbytes puts into a dict of its own, beside the others."""
    return {
        **state_dict,
        "state": {
            i: {key: value for key, value in entries.items() if type(value) is not dict}
            | {key: value for inner in entries.values() if type(inner) is dict for key, value in inner.items()}
            for i, entries in state_dict["state"].items()
        },
    }


def test_the_state_of_a_parameter_with_settings_is_on_the_drive(nvme_path: Path, manager: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    settings = manager()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    settings.register_module_override(model[1], "weight", {"optim_bits": 32})
    swapper.wrap_optimizer(optimizer, make_config(nvme_path))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    stored = {i: dict(optimizer.swapper.state(p)) for i, p in enumerate(model.parameters())}
    assert stored[0]["state1"].dtype is torch.uint8 and stored[2]["state1"].dtype is torch.float32
    numel = 200 * 200
    assert optimizer.swapper.stats().state_bytes >= 2 * numel + 8 * numel
    swapper.of(optimizer).close()


def test_optimizers_that_share_a_manager_find_settings_by_position(nvme_path: Path, manager: Callable[[], Any]) -> None:
    """What was found for a parameter of one is found for that of the other that is at its place: so it is in plain."""

    def train(swapped: bool) -> list[nn.Module]:
        settings = manager()
        models = [make_model(), make_model()]
        optimizers = [bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
        settings.register_module_override(models[0][2], "weight", {"optim_bits": 32, "lr": 1e-3})
        if swapped:
            for optimizer in optimizers:
                swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                run(model, optimizer, range(step, step + 1))
        if swapped:
            for optimizer in optimizers:
                swapper.of(optimizer).close()
        return models

    for plain, mine in zip(train(False), train(True), strict=True):
        assert_same(plain, mine)


class OfTheDead(dict[int, dict[str, Any]]):
    """Settings of parameters that are gone, of which each tensor that is made may have the `id`."""

    def __init__(self, living: nn.Module) -> None:
        super().__init__()
        self._living = {id(p) for p in living.parameters()}

    def __contains__(self, key: object) -> bool:
        return key not in self._living

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {"lr": 0.5}


def test_tensors_that_are_shown_have_no_settings_of_others(nvme_path: Path, manager: Callable[[], Any]) -> None:
    mine = make_model(torch.bfloat16)
    manager().pid2config = OfTheDead(mine)
    optimizer = bitsandbytes.optim.AdamW8bit(mine.parameters(), lr=1e-2)
    with wrapped(optimizer, nvme_path, master_weights=True):
        run(mine, optimizer, range(3))
    manager()
    plain = make_model(torch.bfloat16)
    reference = MasterWeights(list(plain.parameters()), lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-2))
    run(plain, reference, range(3))
    assert_same(plain, mine)


@pytest.mark.parametrize("when", ["before", "later"])
def test_what_is_stepped_in_parts_has_no_settings(
    nvme_path: Path, when: str, manager: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_unorm` looks at a whole parameter, and nothing has tried it where the class as it is may be cut."""
    cls = bitsandbytes.optim.AdamW32bit
    monkeypatch.setattr("swapper.optimizer.probe._elementwise", {*probe._elementwise, cls})

    def train(swapped: bool) -> nn.Module:
        settings, model = manager(), make_model()
        optimizer = cls(model.parameters(), lr=1e-2)
        if when == "before":
            settings.override_config(model[2].weight, "max_unorm", 1e-3)
        if swapped:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path))
        try:
            run(model, optimizer, range(2))
            if when == "later":
                settings.override_config(model[2].weight, "lr", 1e-4)
            run(model, optimizer, range(2, 4))
        finally:
            if swapped:
                swapper.of(optimizer).close()
        return model

    if when == "later":
        with pytest.raises(swapper.ConfigError, match="make them before"):
            train(True)
    else:
        assert_same(train(False), train(True))


class InTorch(bitsandbytes.optim.optimizer.Optimizer2State):  # type: ignore[misc]
    """Computes by operations of torch, which could be recorded."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__("adam", parameters, lr=lr)

    def init_state(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
        self.state[p]["sum"] = torch.zeros_like(p)

    def update_step(self, group: Any, p: torch.Tensor, gindex: int, pindex: int) -> None:
        assert p.grad is not None
        self.state[p]["sum"].mul_(0.9).add_(p.grad)
        p.sub_(self.state[p]["sum"], alpha=self.get_config(gindex, pindex, group)["lr"])


@pytest.mark.parametrize("knows_ids", [True, False])
def test_what_the_class_reads_of_settings_counts(
    nvme_path: Path, knows_ids: bool, manager: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of a group, from which native steps are made; of older versions what they read."""
    monkeypatch.setattr("swapper.optimizer.probe._elementwise", {*probe._elementwise, InTorch})
    if not knows_ids:
        monkeypatch.setattr(InTorch, "get_config", of_an_older_version, raising=False)

    def train(swapped: bool) -> nn.Module:
        settings, model = manager(), make_model()
        optimizer = InTorch(model.parameters(), lr=1e-2)
        settings.override_config(model[2].weight, "lr", 1e-3)
        if swapped:
            swapper.wrap_optimizer(optimizer, make_config(nvme_path, native_step="on"))
        run(model, optimizer, range(4))
        if swapped:
            swapper.of(optimizer).close()
        return model

    assert_same(train(False), train(True))


def of_an_older_version(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
    found = {"lr": group["lr"]}
    found.update(self.mng.index2config.get((gindex, pindex), {}))
    return found


def test_only_managers_of_bitsandbytes_are_looked_at() -> None:
    class Own(torch.optim.SGD):
        mng: Any = None

    optimizer = Own([nn.Parameter(torch.ones(2))])
    optimizer.mng = object()
    assert settings_of(optimizer) == {}


@pytest.fixture(autouse=True)
def _no_manager_is_left() -> Iterator[None]:
    yield
    bitsandbytes.optim.GlobalOptimManager._instance = None
