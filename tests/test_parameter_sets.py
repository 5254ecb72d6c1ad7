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
from torch import nn
from torch.optim import AdamW, Optimizer
from twins import bits

import swapper
from swapper import OffloadConfig

SEED = int(os.environ.get("SWAPPER_SEQUENCES_SEED") or 7)
SAMPLE = os.environ.get("SWAPPER_SEQUENCES") or "60"
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


@pytest.mark.parametrize("buckets", BUCKET_BYTES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sequences_of_changes_are_equal_to_plain(nvme_path: Path, tmp_path: Path, placement: str, buckets: str) -> None:
    torch.set_num_threads(1)  # What is cut for several threads is tested elsewhere; here it is the sets that count.
    config = config_for(nvme_path, placement, buckets)
    for number, sequence in enumerate(chosen(placement, buckets)):
        run(sequence, config, tmp_path / str(number))
