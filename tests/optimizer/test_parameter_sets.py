"""The parameters of an optimizer change while it is swapped: plain and swapped twins go through the same changes.

Runs all sequences of up to two changes for each placement, and a seeded sample of longer ones. SWAPPER_SEQUENCES=all
runs all sequences of up to four, SWAPPER_SEQUENCES=n a sample of n; SWAPPER_SEQUENCES_SEED chooses the sample.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import ALL
from torch import nn
from torch.optim import AdamW, Optimizer
from twins import bits

import swapper
from swapper import OffloadConfig

pytestmark = pytest.mark.packs_too

SEED = int(os.environ.get("SWAPPER_SEQUENCES_SEED") or 7)
SAMPLE = os.environ.get("SWAPPER_SEQUENCES") or ("24" if ALL else "12")
LENGTH = 4
WIDTH = 64
"""So that a weight is the smallest that is moved."""

ACTIONS = ("step", "remove", "back", "replace", "freeze", "unfreeze", "add", "save", "load")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": {"device": "nvme"}},
    "gradients": {"offload_optimizer": {"device": "nvme"}, "offload_gradient": {"device": "nvme"}},
    "parameters": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "backward": {"offload_optimizer": {"device": "nvme", "step_in_backward": True}},
    "memory": {"offload_optimizer": {"device": "cpu"}},
    "all": {
        "offload_optimizer": {"device": "nvme", "step_in_backward": True},
        "offload_gradient": {"device": "nvme"},
        "offload_param": {"device": "nvme"},
    },
}
BUCKET_BYTES = {"one": 1 << 20, "two": 40 << 10}
"""All layers in one bucket, or each in one of its own."""


def possible(sequence: tuple[str, ...]) -> bool:
    """Whether each action does something, so that the sequence is not one that is shorter."""
    inside = learns = True
    saved: object = None
    groups = 0
    for i, action in enumerate(sequence):
        structure = (inside, groups)
        if action == "load" and (saved != structure or sequence[i - 1] in ("save", "load")):
            return False
        if (action, inside) in (("remove", False), ("back", True)):
            return False
        if (action, learns) in (("freeze", False), ("unfreeze", True)):
            return False
        if action == "save" and i and sequence[i - 1] == "save":
            return False
        inside = {"remove": False, "back": True}.get(action, inside)
        learns = {"freeze": False, "unfreeze": True, "replace": True}.get(action, learns)
        groups += action == "add"
        if action == "save":
            saved = structure
    return True


def sequences(length: int) -> list[tuple[str, ...]]:
    return [each for each in itertools.product(ACTIONS, repeat=length) if possible(each)]


class Twin:
    """A model of two layers and its optimizer, plain or swapped, that go through actions."""

    def __init__(self, config: OffloadConfig | None, directory: Path) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.swapped = config is not None
        self.directory = directory
        self.saved: Any = None
        self.count = 0
        self.out: list[nn.Parameter] = []
        if config is not None:
            swapper.offload(self.model, [self.optimizer], config)
        self.do("step")

    def do(self, action: str) -> None:
        self.count += 1
        torch.manual_seed(self.count)
        getattr(self, action)()

    def step(self) -> None:
        x = torch.randn(3, WIDTH)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def remove(self) -> None:
        self.out = list(self.model[1].parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not any(p is q for q in self.out)]

    def back(self) -> None:
        self.optimizer.param_groups[0]["params"] += self.out
        self.out = []

    def replace(self) -> None:
        layer = self.model[1]
        assert isinstance(layer, nn.Linear)
        former, fresh = layer.weight, nn.Parameter(torch.randn(WIDTH, WIDTH))
        layer.weight = fresh
        for parameters in [self.out, *(group["params"] for group in self.optimizer.param_groups)]:
            parameters[:] = [fresh if p is former else p for p in parameters]
        layer.bias.requires_grad_(True)

    def freeze(self) -> None:
        self.model[1].requires_grad_(False)

    def unfreeze(self) -> None:
        self.model[1].requires_grad_(True)

    def add(self) -> None:
        layer = nn.Linear(WIDTH, WIDTH)
        self.model.append(layer)
        self.optimizer.add_param_group({"params": layer.parameters(), "lr": 2e-2})

    def save(self) -> None:
        if not self.swapped:
            self.saved = copy.deepcopy(self.model.state_dict()), self.state()
            return
        self.saved = self.directory / f"checkpoint-{self.count}"
        swapper.save_checkpoint(self.saved, self.model, self.optimizer).wait()
        self.check_loadable()

    def load(self) -> None:
        if self.swapped:
            swapper.load_checkpoint(self.saved, self.model, self.optimizer)
        else:
            self.model.load_state_dict(self.saved[0])
            self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def state(self) -> dict[str, Any]:
        """The optimizer's state dict. Plain PyTorch has none where a parameter with state is in no group."""
        if self.swapped:
            return self.optimizer.state_dict()
        members = {p for group in self.optimizer.param_groups for p in group["params"]}
        outside = {p: self.optimizer.state.pop(p) for p in list(self.optimizer.state) if p not in members}
        found = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer.state.update(outside)
        return found

    def state_outside(self) -> list[Any]:
        if self.swapped:
            known = [p for p in self.out if self.optimizer.swapper._plan.is_planned(p)]
            return [self.optimizer.swapper.state(p) for p in self.out if any(p is q for q in known)]
        return [dict(self.optimizer.state.get(p, {})) for p in self.out]

    def check_loadable(self) -> None:
        """What was saved is what a fresh program loads."""
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in self.model))
        twin_of = dict(zip(map(id, self.model.parameters()), model.parameters(), strict=True))
        groups = [{"params": [twin_of[id(p)] for p in group["params"]]} for group in self.optimizer.param_groups]
        optimizer = AdamW(groups)
        swapper.load_checkpoint(self.saved, model, optimizer)
        mine, theirs = self.optimizer.state_dict(), optimizer.state_dict()
        assert bits(mine["state"]) == bits(theirs["state"])
        assert bits(list(self.model.parameters())) == bits(list(model.parameters()))

    def look(self) -> list[Any]:
        gradients = [None if p.grad is None else p.grad for p in self.model.parameters()]
        return [bits(list(self.model.parameters())), bits(gradients)]

    def close(self) -> None:
        if self.swapped:
            if isinstance(found := vars(self.model).get("swapper"), swapper.ParameterSwapper):
                found.close(keep_values=True)
            self.optimizer.swapper.close()


def config_for(nvme_path: Path, placement: str, buckets: str) -> OffloadConfig:
    return OffloadConfig(
        nvme_path=nvme_path, pool_bytes=4 << 20, bucket_bytes=BUCKET_BYTES[buckets], **PLACEMENTS[placement]
    )


def run(sequence: tuple[str, ...], config: OffloadConfig, directory: Path) -> None:
    plain, swapped = Twin(None, directory), Twin(config, directory)
    try:
        for i, action in enumerate([*sequence, "step", "save"]):
            where = f"{' '.join(sequence)}: {i}, {action}"
            plain.do(action)
            swapped.do(action)
            for mine, theirs, what in zip(swapped.look(), plain.look(), ("parameters", "gradients"), strict=True):
                assert mine == theirs, f"{where}: {what}"
        assert bits(swapped.state()["state"]) == bits(plain.state()["state"]), f"{' '.join(sequence)}: state"
        inside = [s for s in plain.state_outside() if s]
        assert bits([s for s in swapped.state_outside() if s]) == bits(inside), f"{' '.join(sequence)}: state outside"
    finally:
        swapped.close()


def chosen(placement: str, buckets: str) -> Iterator[tuple[str, ...]]:
    if SAMPLE == "all":
        yield from sequences(LENGTH)
        return
    yield from sequences(2)
    longer = [*sequences(3), *sequences(LENGTH)]
    yield from random.Random(f"{SEED} {placement} {buckets}").sample(longer, min(int(SAMPLE), len(longer)))


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("buckets", BUCKET_BYTES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequences_of_changes_are_equal_to_plain(nvme_path: Path, tmp_path: Path, placement: str, buckets: str) -> None:
    torch.set_num_threads(1)  # What is cut for several threads is tested elsewhere; here it is the sets that count.
    config = config_for(nvme_path, placement, buckets)
    for number, sequence in enumerate(chosen(placement, buckets)):
        run(sequence, config, tmp_path / str(number))


# --- What no sequence shows ------------------------------------------------------------------------------------------


def layers(count: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(count)))


def train(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    p = next(model.parameters())
    model(torch.randn(3, p.shape[1], dtype=p.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def twins(make: Callable[[], tuple[nn.Module, Optimizer]], config: OffloadConfig) -> list[tuple[nn.Module, Optimizer]]:
    plain, swapped = make(), make()
    swapper.wrap_optimizer(swapped[1], config)
    return [plain, swapped]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement", ["optimizer", "gradients", "memory", "backward"])
def test_replaced_parameters_go_with_their_state(nvme_path: Path, placement: str) -> None:
    model = layers(3)
    config = config_for(nvme_path, placement, "one")
    optimizer = swapper.wrap_optimizer(AdamW(model.parameters()), config)
    train(model, optimizer)
    swapped = optimizer.swapper
    former: list[weakref.ref[nn.Parameter]] = []
    stored, pools = [], []
    for round in range(12):
        layer = model[round % 3]
        assert isinstance(layer, nn.Linear)
        fresh = nn.Parameter(torch.randn(WIDTH, WIDTH))
        group = optimizer.param_groups[0]
        group["params"] = [fresh if p is layer.weight else p for p in group["params"]]
        former.append(weakref.ref(layer.weight))
        layer.weight = fresh
        train(model, optimizer, round)
        gc.collect()
        assert former[-1]() is None, "the replaced parameter is still referenced"
        stored.append(swapped._plan.stored_bytes)
        pools.append(swapped.stats().pool_bytes)
    # What is left of them is never more than what is there.
    assert max(stored[3:]) <= 2 * stored[0] + (64 << 10)
    assert max(pools[3:]) <= 2 * pools[0] + (64 << 10)
    assert len(swapped._plan.planned()) == 6
    swapped.close()


def test_state_of_a_parameter_outside_comes_and_goes_with_the_optimizer(nvme_path: Path) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = layers(2)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer)
        optimizer.param_groups[0]["params"] = list(model[0].parameters())
        return model, optimizer

    config = config_for(nvme_path, "optimizer", "one")
    (plain, plainly), (model, optimizer) = twins(make, config)
    for twin, each in ((plain, plainly), (model, optimizer)):
        train(twin, each, 1)
    outside = model[1].weight
    assert isinstance(outside, nn.Parameter)
    assert bits(optimizer.swapper.state(outside)) == bits(dict(plainly.state[plain[1].weight]))
    swapper.unwrap_optimizer(optimizer)
    assert bits(list(optimizer.state.values())) == bits(list(plainly.state.values()))
    swapper.wrap_optimizer(optimizer, config)
    for twin, each in ((plain, plainly), (model, optimizer)):
        each.param_groups[0]["params"] += list(twin[1].parameters())
        train(twin, each, 2)
    assert bits(list(model.parameters())) == bits(list(plain.parameters()))
    optimizer.swapper.close()


@pytest.mark.parametrize("device", ["nvme", "cpu", "none"])
def test_masters_behind_a_hole_in_a_record_are_saved_and_loaded(nvme_path: Path, tmp_path: Path, device: str) -> None:
    def config() -> OffloadConfig:
        return OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="64MiB",
            bucket_bytes="16MiB",
            offload_optimizer={"device": device, "master_weights": True},
        )

    def parameters(model: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if not name.startswith("0")]

    def make() -> nn.Sequential:
        torch.manual_seed(9)
        return nn.Sequential(*(nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(3)))

    model = make()
    optimizer = swapper.wrap_optimizer(AdamW(model.parameters(), lr=1e-3), config())
    for seed in range(3):
        train(model, optimizer, seed)
    ties = [segment.tie_bits for bucket in optimizer.swapper._plan.buckets for segment in bucket.segments]
    assert sum(ties[:1]) and sum(ties[1:]), "the sizes are such that there are ties before and behind the hole"
    optimizer.param_groups[0]["params"] = parameters(model)
    model[0] = nn.Linear(512, 512, dtype=torch.bfloat16)  # Nobody holds the first layer now.
    gc.collect()
    train(model, optimizer, 3)
    expected = {id(p): optimizer.swapper.state(p) for p in parameters(model)}
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer).wait()
    for fresh, each in (
        (other := make(), swapper.wrap_optimizer(AdamW(parameters(other)), config())),
        (model, optimizer),
    ):
        swapper.load_checkpoint(tmp_path / "saved", fresh, each)
        for mine, theirs in zip(parameters(fresh), parameters(model), strict=True):
            assert bits(each.swapper.state(mine)) == bits(expected[id(theirs)])
    optimizer.swapper.close()


def test_a_parameter_taken_out_between_backward_and_step_is_refused(nvme_path: Path) -> None:
    model = layers(2)
    optimizer = swapper.wrap_optimizer(AdamW(model.parameters()), config_for(nvme_path, "backward", "two"))
    train(model, optimizer)
    model(torch.randn(3, WIDTH)).sum().backward()
    kept = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = list(model[0].parameters())
    with pytest.raises(swapper.SwapError, match="taken out of its group between backward"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = kept
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer)
    optimizer.swapper.close()


def test_a_group_added_between_backward_and_step_is_stepped(nvme_path: Path) -> None:
    results = []
    for config in (None, config_for(nvme_path, "backward", "two")):
        model = layers(2)
        optimizer: Optimizer = AdamW(model[0].parameters(), lr=1e-2)
        if config is not None:
            swapper.wrap_optimizer(optimizer, config)
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(3, WIDTH)).square().mean().backward()
            if seed == 1:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
        results.append(bits(list(model.parameters())))
        if config is not None:
            optimizer.swapper.close()
    assert results[0] == results[1]


CHANGES: dict[str, Callable[[nn.Module, Optimizer, list[Any]], None]] = {
    "add": lambda model, optimizer, kept: optimizer.add_param_group({"params": model[2].parameters()}),
    "load": lambda model, optimizer, kept: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "freeze": lambda model, optimizer, kept: model[1].requires_grad_(False) and None,
    "unfreeze": lambda model, optimizer, kept: model[1].requires_grad_(True) and None,
    "train": lambda model, optimizer, kept: train(model, optimizer, len(kept)),
    "wrap": lambda model, optimizer, kept: None,
    "reset": lambda model, optimizer, kept: None,
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "SGD"])
@pytest.mark.parametrize(
    "changes",
    [
        ("add", "train"),
        ("add", "load", "train"),
        ("train", "add", "load", "train"),
        ("train", "freeze", "wrap", "train", "unfreeze", "train"),
        ("freeze", "train", "wrap", "add", "train"),
        ("train", "reset", "train"),
        ("train", "add", "reset", "train"),
        ("freeze", "load", "add", "unfreeze", "train"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("masters", [False, True])
def test_records_in_memory_have_room_whatever_comes_later(
    nvme_path: Path, kind: str, changes: tuple[str, ...], masters: bool
) -> None:
    """With `device: cpu`, and `device: none` with masters, every record that was ever planned has a place."""
    torch.set_num_threads(1)
    results = []
    for device in ("nvme", "none" if masters else "cpu"):
        config = OffloadConfig(
            nvme_path=nvme_path,
            pool_bytes="4MiB",
            bucket_bytes="40KiB",
            offload_optimizer={"device": device, "master_weights": masters},
        )
        model = layers(3, dtype=torch.bfloat16 if masters else torch.float32)
        optimizer: Optimizer = getattr(torch.optim, kind)([*model[0].parameters(), *model[1].parameters()], lr=1e-2)
        swapper.wrap_optimizer(optimizer, config)
        done: list[Any] = []
        for change in changes:
            if change == "wrap":
                swapper.unwrap_optimizer(optimizer, drop_masters=masters)
                swapper.wrap_optimizer(optimizer, config)
            elif change == "reset":
                optimizer.swapper.reset()
            else:
                CHANGES[change](model, optimizer, done)
            done.append(change)
        results.append(bits([optimizer.state_dict()["state"], list(model.parameters())]))
        optimizer.swapper.close()
    assert results[0] == results[1]


def test_what_could_not_be_loaded_is_not_saved(
    nvme_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swapper.checkpoint import checkpoint

    model = layers(2)
    optimizer = swapper.wrap_optimizer(AdamW(model.parameters()), config_for(nvme_path, "optimizer", "one"))
    train(model, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    before = sorted((path.name, path.stat().st_ino) for path in (tmp_path / "saved").iterdir())
    right = checkpoint.save_state

    def wrong(*args: Any) -> Any:
        written = right(*args)
        first = written.saved.buckets[0]
        first.segments.append(first.segments[0])
        return written

    monkeypatch.setattr(checkpoint, "save_state", wrong)
    with pytest.raises(swapper.SwapError, match="not saved, because it could not be loaded"):
        swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    assert sorted((path.name, path.stat().st_ino) for path in (tmp_path / "saved").iterdir()) == before
    assert [path.name for path in tmp_path.iterdir() if path != nvme_path] == ["saved"]
    monkeypatch.undo()
    train(model, optimizer)
    swapper.save_checkpoint(tmp_path / "saved", model, optimizer)
    optimizer.swapper.close()


# --- What else may change between two steps --------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [64 << 10, 1 << 22], ids=["cut", "whole"])
def test_another_order_in_memory_is_refused_where_the_state_lies_in_it(nvme_path: Path, bucket_bytes: int) -> None:
    def train_conv(model: nn.Module, optimizer: Optimizer) -> None:
        torch.manual_seed(1)
        model(torch.randn(2, 64, 6, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    config = OffloadConfig(
        nvme_path=nvme_path, pool_bytes="16MiB", bucket_bytes=bucket_bytes, offload_optimizer={"device": "nvme"}
    )
    results = []
    for swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Conv2d(64, 64, 3)
        optimizer: Optimizer = AdamW(model.parameters(), lr=1e-2)
        if swapped:
            swapper.wrap_optimizer(optimizer, config)
        train_conv(model, optimizer)
        model.to(memory_format=torch.channels_last)
        if swapped and len(optimizer.swapper._plan.segments_of(model.weight)) > 1:
            for use in (
                optimizer.step,
                optimizer.state_dict,
                lambda p=model.weight, s=optimizer.swapper: s.state(p),
                lambda m=model, o=optimizer: swapper.save_checkpoint(nvme_path / "saved", m, o),
            ):
                with pytest.raises(swapper.SwapError, match="memory format"):
                    use()
            optimizer.swapper.close()
            return
        train_conv(model, optimizer)
        results.append(bits(list(model.parameters())))
        if swapped:
            optimizer.swapper.close()
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_twice_in_the_groups_is_refused(nvme_path: Path) -> None:
    """Plain PyTorch steps it twice."""
    config = config_for(nvme_path, "optimizer", "one")
    twice = nn.Parameter(torch.ones(4))
    with pytest.raises(swapper.ConfigError, match="more than once"):
        swapper.wrap_optimizer(torch.optim.SGD([twice, twice], lr=0.1), config)
    model = layers(2)
    optimizer = AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    swapper.wrap_optimizer(optimizer, config)
    train(model, optimizer)
    optimizer.param_groups[1]["params"].append(model[0].weight)
    before = bits(list(model.parameters()))
    with pytest.raises(swapper.ConfigError, match="more than once"):
        train(model, optimizer)
    assert bits(list(model.parameters())) == before
    optimizer.swapper.close()


@pytest.mark.parametrize("how", ["set", "move", "load"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_was_cut_for_fused_is_cut_anew_when_that_is_off(nvme_path: Path, how: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    config = OffloadConfig(
        nvme_path=nvme_path, pool_bytes="16MiB", bucket_bytes="1MiB", offload_optimizer={"device": "nvme"}
    )
    results = []
    for swapped in (False, True):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(700, 1021).to(dtype))
        other = nn.Parameter(torch.zeros(8, dtype=dtype))
        groups = [{"params": [w], "fused": True}, {"params": [other], "foreach": True}]
        optimizer: Optimizer = torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1)
        if swapped:
            swapper.wrap_optimizer(optimizer, config)
        torch.manual_seed(1)
        for step in range(5):
            w.grad = torch.randn(700, 1021).to(dtype) * 0.01
            optimizer.step()
            first, second = optimizer.param_groups
            if step:
                continue
            if how == "set":
                first.update(fused=False, foreach=True)
            elif how == "move":
                second["params"].append(first["params"].pop())
            else:
                state = copy.deepcopy(optimizer.state_dict())
                for group in state["param_groups"]:
                    group.update(fused=None, foreach=True)
                optimizer.load_state_dict(state)
        results.append(bits(w))
        if swapped:
            assert len(optimizer.swapper._plan.segments_of(w)) > 1
            optimizer.swapper.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("why", ["gone", "threads"])
def test_nothing_is_cut_anew_between_a_backward_that_steps_and_the_step(nvme_path: Path, why: str) -> None:
    """What was stepped in backward would be stepped again."""
    torch.set_num_threads(2)
    config = OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="16MiB",
        bucket_bytes=1050 << 10,
        offload_optimizer={"device": "nvme", "step_in_backward": True},
    )
    dtype = torch.float32 if why == "gone" else torch.bfloat16
    results = []
    for swapped in (False, True):
        torch.set_num_threads(2)
        torch.manual_seed(0)
        sizes = [(50000,), (150, 1000), (100,), (55000,), (120000,), (100,)]
        parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
        used, unused = parameters[1], [parameters[2], parameters[5]]
        optimizer: Optimizer = AdamW(parameters, lr=1e-2)
        if swapped:
            swapper.wrap_optimizer(optimizer, config)
        for seed in range(4):
            torch.manual_seed(seed)
            (torch.randn(3, 1000).to(dtype) @ used.t()).float().square().mean().backward()
            if seed == 1:
                if why == "gone":
                    del parameters[:]
                else:
                    torch.set_num_threads(1)
            optimizer.step()
            optimizer.zero_grad()
            if seed == 0 and why == "gone":
                optimizer.param_groups[0]["params"] = [used, *unused]
        results.append(bits(used))
        if swapped:
            optimizer.swapper.close()
    assert results[0] == results[1]
