"""What is done again and again leaves nothing, and what is done for each module costs each the same: by counts.

`ACTIONS` and `REPEATED` are lists to add to. A function is found whose lines for each module grow with their number,
however few they are of all that run; `test_scaling` has the totals.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import alone
from line_counts import line_counts
from sampling import ALL
from torch import nn

import swapper
from swapper.parameter import records

pytestmark = pytest.mark.timeout(600)

NVME = {"device": "nvme"}
EVERYTHING = {"offload_optimizer": NVME, "offload_gradient": NVME, "offload_param": NVME}
WIDTH = 64

FEW, MANY = (160, 480) if ALL else (100, 300)
GROWTH = 1.8

LINES = 20
DRIVE = ("storage", "io", "process")
"""Packages of which a call looks at transfers in flight, up to a number: as many as the drive happens to have left."""

"""For each module: fewer are of no weight, and those of what is looked ahead settle only at large numbers."""


class Training:
    """Small layers in a row, each a record, with everything on the drive."""

    def __init__(self, path: Path, count: int, **settings: Any) -> None:
        self.path = path
        self.config = swapper.OffloadConfig(
            nvme_path=path, pool_bytes="64MiB", bucket_bytes="1MiB", **{**EVERYTHING, **settings}
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def offload(self) -> None:
        swapper.offload(self.model, self.optimizer, self.config)

    def backward(self) -> None:
        self.model(torch.ones(2, WIDTH)).square().sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def gather(self) -> None:
        for module in self.model.children():
            with swapper.gathered(module):
                pass

    def clip(self) -> None:
        self.backward()
        swapper.of(self.optimizer).clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        swapper.of(self.optimizer).close()
        if swapped := vars(self.model).get("swapper"):
            swapped.close()


# --- For each module -------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[Training], object]] = {
    "offload": Training.offload,
    "first step": Training.step,
    "second step": Training.step,
    "step": Training.step,
    "state dicts": lambda run: run.load(run.state()),
    "saved": lambda run: swapper.save_checkpoint(run.path / "saved", run.model, run.optimizer),
    "loaded": lambda run: swapper.load_checkpoint(run.path / "saved", run.model, run.optimizer),
    "swapper.save": lambda run: swapper.save(run.state(), run.path / "saved.pt"),
    "swapper.load": lambda run: run.load(swapper.load(run.path / "saved.pt")),
    "gathered": Training.gather,
    "clipped": Training.clip,
    "norms": lambda run: [p.norm() for p in run.model.parameters()],
    "unwrapped": lambda run: swapper.unwrap_optimizer(run.optimizer),
    "closed": lambda run: run.model.swapper.close(keep_values=True),  # type: ignore[operator, union-attr]
}


@pytest.mark.long
def test_no_function_does_more_for_each_module_the_more_there_are(
    nvme_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "GROUP_BYTES", 1 << 14)
    lines: dict[int, dict[str, dict[tuple[str, str], int]]] = {}
    for count in (FEW, MANY):
        path = nvme_path / f"{count}"
        path.mkdir()
        run = Training(path, count)
        lines[count] = {name: line_counts(partial(action, run), DRIVE) for name, action in ACTIONS.items()}
    grown = [
        f"{name}, {':'.join(function)}: {few / FEW:.0f} to {many / MANY:.0f} lines"
        for name, found in lines[MANY].items()
        for function, many in found.items()
        for few in [lines[FEW][name].get(function, 0)]
        if many / MANY > max(LINES, GROWTH * few / FEW)
    ]
    assert grown == []


# --- Again and again -------------------------------------------------------------------------------------------------

TURNS = 24
"""Of these the second half must leave less than one object each."""


def trained_and_closed(path: Path) -> Callable[[int], object]:
    def turn(_: int) -> None:
        run = Training(path, 3)
        run.offload()
        run.step()
        run.close()

    return turn


def optimizers_of_one_model(path: Path) -> Callable[[int], object]:
    run = Training(path, 3)
    swapper.offload(run.model, config=run.config)

    def turn(_: int) -> None:
        run.optimizer = torch.optim.AdamW(run.model.parameters())
        run.offload()
        run.step()

    return turn


def configs_of_one_model(path: Path) -> Callable[[int], object]:
    run = Training(path, 3)

    def turn(_: int) -> None:
        run.config = Training(path, 1).config
        run.offload()
        run.step()
        swapper.unwrap_optimizer(run.optimizer)
        run.model.swapper.close(keep_values=True)  # type: ignore[operator, union-attr]

    return turn


def adapters(path: Path) -> Callable[[int], object]:
    run = Training(path, 3, offload_param={"device": "none"})
    run.offload()

    def turn(_: int) -> None:
        adapter = nn.Linear(WIDTH, WIDTH)
        run.optimizer.add_param_group({"params": list(adapter.parameters())})
        for _ in range(2):
            adapter(run.model(torch.ones(2, WIDTH))).square().sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        del run.optimizer.param_groups[-1]

    return turn


def failing(path: Path) -> Callable[[int], object]:
    run = Training(path, 3)
    run.offload()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("as where activations do not fit")

    def turn(number: int) -> None:
        handle = run.model[number % 3].register_forward_pre_hook(fail)
        try:
            run.step()
        except torch.OutOfMemoryError:
            handle.remove()
            return
        raise AssertionError("it did not fail")

    return turn


def saved(path: Path) -> Callable[[int], object]:
    run = Training(path, 3)
    run.offload()

    def turn(_: int) -> None:
        run.step()
        swapper.save_checkpoint(path / "checkpoint", run.model, run.optimizer)
        swapper.load_checkpoint(path / "checkpoint", run.model, run.optimizer)
        swapper.save(run.state(), path / "state.pt")

    return turn


REPEATED: dict[str, Callable[[Path], Callable[[int], object]]] = {
    "trained and closed": trained_and_closed,
    "optimizers of one model": optimizers_of_one_model,
    "configs of one model": configs_of_one_model,
    "adapters": adapters,
    "failing": failing,
    "saved": saved,
}


def grown(name: str, path: str) -> dict[str, int]:
    """What the second half of the turns has left."""
    torch.set_num_threads(1)
    turn = REPEATED[name](Path(path))
    found: list[dict[str, int]] = []
    for number in range(TURNS):
        turn(number)
        if number + 1 in (TURNS // 2, TURNS):
            gc.collect()
            files = sum(len(files) for _, _, files in os.walk(path))
            maps = Path("/proc/self/maps").read_bytes().count(b"\n")
            found.append({"objects": len(gc.get_objects()), "files": files, "maps": maps})
    return {what: found[1][what] - found[0][what] for what in found[0]}


@pytest.mark.long
@pytest.mark.parametrize("name", REPEATED)
def test_what_is_done_again_and_again_leaves_nothing(name: str, nvme_path: Path) -> None:
    left = alone(grown, name, str(nvme_path), timeout_s=500)
    assert left["objects"] < TURNS // 2, left
    assert left["files"] <= 0, left
    assert left["maps"] < TURNS // 2, left
