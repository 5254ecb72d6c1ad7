"""How many files are open does not grow with the number of records, and nothing else shows it."""

from __future__ import annotations

import json
import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from isolation import alone
from twins import bits, small_records
from weight_files import hollow, state_to_save, write_shards

import swapper
from swapper.parameter import from_files
from swapper.storage import store as store_module
from swapper.storage.speed import DriveSpeed

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]

SOFT = 256
FEW, MANY = 100, 600


def open_now() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def few_descriptors() -> None:
    """So few that the files of `MANY` records could not all be open; nobody may raise the limit again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, SOFT))


def make_model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))


class Training:
    """Of a model each of whose layers is a record of parameters, one of gradients and one of state, or a plain one."""

    def __init__(self, layers: int, *paths: Path) -> None:
        self.model = make_model(layers)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if paths:
            config = swapper.OffloadConfig(
                nvme_path=list(paths),
                pool_bytes="16MiB",
                bucket_bytes="64KiB",
                offload_param={"device": "nvme"},
                offload_gradient={"device": "nvme"},
                offload_optimizer={"device": "nvme"},
            )
            swapper.offload(self.model, self.optimizer, config)
        self.steps_done = 0
        self.most_open = 0

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.steps_done += 1
            torch.manual_seed(self.steps_done)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 64)).square().sum().backward()
            self.most_open = max(self.most_open, open_now())
            self.optimizer.step()
            self.most_open = max(self.most_open, open_now())
        return self

    def everything(self) -> Any:
        return bits([{name: p.clone() for name, p in self.model.state_dict().items()}, self.optimizer.state_dict()])

    def close(self) -> None:
        swapper.of(self.optimizer).close()
        self.model.swapper.close()  # type: ignore[operator, union-attr]


def train(path: Path, layers: int) -> int:
    few_descriptors()
    torch.set_num_threads(1)
    before = open_now()
    with small_records():
        training = Training(layers, path).steps(2)
        files = sum(len(names) for _, _, names in os.walk(path))
        assert files >= layers, f"{files} records of {layers} layers"
        training.close()
    return training.most_open - before


def test_open_files_do_not_grow_with_the_records(nvme_path: Path) -> None:
    few, many = alone(train, nvme_path, FEW), alone(train, nvme_path, MANY)
    assert many <= few + 8, f"{few} with {FEW} layers, {many} with {MANY}"


def exact(path: Path) -> None:
    few_descriptors()
    torch.set_num_threads(1)
    with small_records():
        training = Training(150, path)
        assert training.steps(3).everything() == Training(150).steps(3).everything()
        training.close()


def test_a_training_of_more_records_than_files_may_be_open_is_exact(nvme_path: Path) -> None:
    alone(exact, nvme_path)


def saved(paths: list[Path]) -> None:
    """Of records on two drives, which are copied in the background while training goes on in other files."""
    few_descriptors()
    torch.set_num_threads(1)
    for path in paths:
        path.mkdir()
    store_module.measure_speeds = lambda *_: [DriveSpeed(1e9, 1e9)] * 2  # type: ignore[assignment]
    with small_records():
        training = Training(80, *paths[:2]).steps(2)
        wanted = Training(80).steps(2)
        saving = swapper.save_checkpoint(paths[2] / "saved", training.model, training.optimizer)
        assert training.steps(1).everything() == wanted.steps(1).everything()
        saving.wait()
        again = Training(80, *paths[:2])
        swapper.load_checkpoint(paths[2] / "saved", again.model, again.optimizer)
        assert again.everything() == Training(80).steps(2).everything()
        again.close()
        training.close()


def test_checkpoints_of_more_records_than_files_may_be_open(nvme_path: Path) -> None:
    alone(saved, [nvme_path / name for name in "abc"])


def weights(path: Path) -> None:
    few_descriptors()
    torch.set_num_threads(1)
    plain = make_model(150)
    index = write_shards(path / "weights", state_to_save(plain), random.Random(0), [0] * 300)
    shards = json.loads(index.read_text())["weight_map"]
    from_files._SMALL_BYTES = 0
    model = hollow(make_model(150))
    with small_records():
        before = open_now()
        swapper.offload(model, config={"nvme_path": path, "pool_bytes": "1MiB"}, weights=path / "weights")
        x = torch.randn(4, 64)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
        assert open_now() <= before + SOFT // 2
        # Written over by ourselves: whoever reads them goes on.
        swapper.save(torch.zeros(3), path / "weights" / shards["20.weight"])
        swapper.save(torch.zeros(3), path / "weights" / shards["120.weight"])
        assert torch.equal(model(x), plain(x))
        # By somebody else: an error that names the file.
        file = path / "weights" / shards["70.weight"]
        file.rename(path / "other")
        file.write_bytes((path / "other").read_bytes())
        with pytest.raises(swapper.SwapIOError, match=file.name):
            for _ in range(2):
                model(x)
        model.swapper.close()  # type: ignore[operator, union-attr]


def test_weights_in_more_files_than_may_be_open(nvme_path: Path) -> None:
    alone(weights, nvme_path)
