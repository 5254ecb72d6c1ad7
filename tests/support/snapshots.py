"""A training of a few steps whose state after each of them is known from plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer
from training import adamw, assert_same_state, make_model, run, same_bits

import swapper

STEPS = 5


@dataclass
class Snapshot:
    model: dict[str, Any]
    optimizer: dict[str, Any]


def make_config(nvme_path: Path, **settings: object) -> swapper.OffloadConfig:
    """So small buckets that a step of this model has about ten."""
    return swapper.OffloadConfig(
        nvme_path=nvme_path,
        pool_bytes="4MiB",
        bucket_bytes="64KiB",
        offload_optimizer={"device": "nvme", **settings},
    )


@pytest.fixture(scope="module")
def plain() -> list[Snapshot]:
    """What plain PyTorch has after 0, 1, ... steps."""
    model = make_model()
    optimizer = adamw(model)
    snapshots = []
    for seed in range(STEPS + 1):
        snapshots.append(Snapshot(copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        run(model, optimizer, range(seed, seed + 1))
    return snapshots


class Training:
    """A wrapped run that was started; a context manager that closes it, whatever failed before."""

    def __init__(
        self, nvme_path: Path, steps: int, make: Callable[[nn.Module], Optimizer] = adamw, **settings: object
    ) -> None:
        self.model = make_model()
        self.optimizer = swapper.wrap_optimizer(make(self.model), make_config(nvme_path, **settings))
        self.swapper = swapper.of(self.optimizer)
        run(self.model, self.optimizer, range(steps))
        self.swapper.flush()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.swapper.close()
        except swapper.SwapIOError:
            self.swapper.close()

    def load(self, snapshot: Snapshot) -> None:
        self.optimizer.load_state_dict(snapshot.optimizer)
        self.model.load_state_dict(snapshot.model)

    def refuses(self) -> None:
        """Nothing goes on until both are loaded."""
        for use in (self.optimizer.step, self.optimizer.state_dict, self.swapper.unwrap):
            with pytest.raises(swapper.SwapError, match="load"):
                use()

    def ends_in(self, snapshot: Snapshot, steps: range) -> None:
        run(self.model, self.optimizer, steps)
        self.equals(snapshot)

    def equals(self, snapshot: Snapshot) -> None:
        assert all(same_bits(p, snapshot.model[name]) for name, p in self.model.named_parameters())
        assert_same_state(snapshot.optimizer, self.optimizer.state_dict())
